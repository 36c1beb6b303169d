//! Calls in Python's notation: `name(key=value, ...)`, with literals as values. OLMo 3 uses it.

use serde_json::{Map, Number, Value};

use super::reader::{Read, Reader, Stop};

/// Largest nesting depth of values.
const DEPTH_MAX: usize = 64;

impl Reader<'_> {
    /// Reads the arguments after the opening bracket, and the closing one.
    pub(super) fn python_arguments(&mut self) -> Read<Map<String, Value>> {
        let mut arguments = Map::new();
        while !self.take(")")? {
            let key = self.identifier()?.to_string();
            self.expect("=")?;
            arguments.insert(key, self.python_value(0)?);
            self.separator(")")?;
        }
        Ok(arguments)
    }

    /// Reads a comma. The last one before `close` may be missing.
    fn separator(&mut self, close: &str) -> Read<()> {
        if self.take(",")? || self.comes(&[close])? { Ok(()) } else { Err(self.stop()) }
    }

    fn python_value(&mut self, depth: usize) -> Read<Value> {
        if depth > DEPTH_MAX {
            return Err(Stop::Wrong);
        }
        match self.next().chars().next().ok_or(Stop::Open)? {
            '"' | '\'' => {
                let mut text = self.python_string()?;
                // Python joins adjacent string literals.
                while self.next().starts_with(['"', '\'']) {
                    text.push_str(&self.python_string()?);
                }
                Ok(Value::String(text))
            }
            '[' => self.python_list("[", "]", depth),
            '(' => self.python_list("(", ")", depth),
            '{' => self.python_object(depth),
            '-' | '+' | '.' | '0'..='9' => self.python_number(),
            _ => match self.identifier()? {
                "True" | "true" => Ok(Value::Bool(true)),
                "False" | "false" => Ok(Value::Bool(false)),
                "None" | "null" => Ok(Value::Null),
                _ => Err(self.stop()),
            },
        }
    }

    fn python_list(&mut self, open: &str, close: &str, depth: usize) -> Read<Value> {
        let mut values = Vec::new();
        self.expect(open)?;
        while !self.take(close)? {
            values.push(self.python_value(depth + 1)?);
            self.separator(close)?;
        }
        Ok(Value::Array(values))
    }

    fn python_object(&mut self, depth: usize) -> Read<Value> {
        let mut object = Map::new();
        self.expect("{")?;
        while !self.take("}")? {
            let Value::String(key) = self.python_value(depth + 1)? else { return Err(self.stop()) };
            self.expect(":")?;
            object.insert(key, self.python_value(depth + 1)?);
            self.separator("}")?;
        }
        Ok(Value::Object(object))
    }

    fn python_number(&mut self) -> Read<Value> {
        let rest = self.rest();
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || "+-._".contains(c)));
        let text = rest[..end.unwrap_or(rest.len())].replace('_', "");
        self.at += end.unwrap_or(rest.len());
        let text = text.trim_start_matches('+');
        let whole = text.parse::<i64>().map(Number::from).ok();
        let whole = whole.or_else(|| text.parse::<u64>().map(Number::from).ok());
        let number = whole.or_else(|| Number::from_f64(text.parse().ok()?));
        number.map(Value::Number).ok_or_else(|| self.stop())
    }

    /// Reads a string in one kind of quotes, also in triple quotes.
    fn python_string(&mut self) -> Read<String> {
        let all = self.rest();
        let quote = &all[..1];
        let triple = quote.repeat(3);
        let end = if all.starts_with(&triple) { &triple[..] } else { quote };
        let mut rest = &all[end.len()..];
        let mut text = String::new();
        loop {
            if let Some(after) = rest.strip_prefix(end) {
                self.at = self.text.len() - after.len();
                return Ok(text);
            }
            let mut chars = rest.chars();
            match chars.next().ok_or(Stop::Open)? {
                '\\' => {
                    self.at = self.text.len() - rest.len();
                    rest = escape(chars.as_str(), &mut text)?;
                }
                c => {
                    text.push(c);
                    rest = chars.as_str();
                }
            }
        }
    }
}

/// Appends the character that an escape stands for, and returns the text after the escape. `rest` begins after the
/// backslash.
fn escape<'a>(rest: &'a str, text: &mut String) -> Read<&'a str> {
    let mut chars = rest.chars();
    let c = chars.next().ok_or(Stop::Open)?;
    let digits = match c {
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => 0,
    };
    if digits > 0 {
        let end = if rest.len() > digits { Stop::Wrong } else { Stop::Open };
        let code = rest.get(1..1 + digits).ok_or(end)?;
        let code = u32::from_str_radix(code, 16).ok().and_then(char::from_u32);
        text.push(code.ok_or(Stop::Wrong)?);
        return Ok(&rest[1 + digits..]);
    }
    match c {
        'n' => text.push('\n'),
        't' => text.push('\t'),
        'r' => text.push('\r'),
        'b' => text.push('\u{8}'),
        'f' => text.push('\u{c}'),
        '0' => text.push('\0'),
        '\n' => {}
        '\\' | '\'' | '"' | '/' => text.push(c),
        // In other escapes Python keeps the backslash.
        _ => text.extend(['\\', c]),
    }
    Ok(chars.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::markers::TOOL_CALL;
    use crate::answer::reader::{End, Reading, read};
    use serde_json::json;

    fn one(text: &str) -> Option<Value> {
        let tools = ["f", "g", "g.h"].map(|name| json!({ "name": name }));
        let text = format!("{}{text}", TOOL_CALL.begin);
        let Reading::Calls(calls, _) = read(&text, Some(TOOL_CALL), &tools, End::Whole) else { return None };
        let arguments = |text: &str| -> Value { serde_json::from_str(text).expect("JSON") };
        Some(calls.iter().map(|(name, text)| json!([name, arguments(text)])).collect())
    }

    #[test]
    fn literals_are_those_of_python_and_of_json() {
        let text = "f(a='it\\'s', b=\"two\\nlines\\u00e9\", c=-1.5e3, d=[1, 2,], e={'k': (True, None)}, g=false, h=1_000)\n\
                    g.h( )";
        let expected = json!([
            ["f", {"a": "it's", "b": "two\nlines\u{e9}", "c": -1500.0, "d": [1, 2], "e": {"k": [true, null]},
                "g": false, "h": 1000}],
            ["g.h", {}]
        ]);
        assert_eq!(one(text), Some(expected));
        assert_eq!(one("[f(a='''x'y\"z'''), g()]"), Some(json!([["f", {"a": "x'y\"z"}], ["g", {}]])));
        assert_eq!(one("f(a='b' \"c\", d='\\d')"), Some(json!([["f", {"a": "bc", "d": "\\d"}]])));
    }

    #[test]
    fn anything_else_is_no_call() {
        for text in [
            "",
            "f",
            "f(",
            "f(1)",
            "f(a=g())",
            "f(a=1 b=2)",
            "f(a='x)",
            "f(a=1) nonsense",
            "[f()",
            "f(a={1: 2})",
        ] {
            assert_eq!(one(text), None, "{text}");
        }
        assert_eq!(one(&format!("f(a={})", "[".repeat(100_000))), None);
    }
}
