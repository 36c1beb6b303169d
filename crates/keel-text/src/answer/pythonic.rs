//! Calls in Python's notation: `name(key=value, ...)`, with literals as values. OLMo 3 uses it.

use serde_json::{Map, Number, Value};

use super::reader::{Read, Reader, Stop, is_of_name};

/// Largest nesting depth of values.
const DEPTH_MAX: usize = 64;

impl Reader<'_> {
    /// Reads the arguments after the opening bracket, and the closing one.
    pub(super) fn python_arguments(&mut self) -> Read<Map<String, Value>> {
        let mut arguments = Map::new();
        while !self.take(")")? {
            let first = self.next().chars().next().ok_or(Stop::Open)?;
            let key = if is_of_name(first) { Some(self.identifier()?) } else { None };
            match key {
                Some(key) if self.take("=")? => {
                    arguments.insert(key.to_string(), self.python_value(0)?);
                }
                // A value without a key. No tool takes it.
                Some(_) => self.is_text = true,
                None => {
                    self.is_text = true;
                    self.python_value(0)?;
                }
            }
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
        let code = hex(chars.as_str(), digits)?;
        let after = &chars.as_str()[digits..];
        if let 0xd800..0xdc00 = code
            && let Some(low) = low_surrogate(after)?
        {
            text.extend(char::from_u32(0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00)));
            return Ok(&after[LOW_SURROGATE_BYTES..]);
        }
        // A surrogate without its other half is no character.
        let is_half = (0xd800..0xe000).contains(&code);
        text.push(if is_half {
            char::REPLACEMENT_CHARACTER
        } else {
            char::from_u32(code).ok_or(Stop::Wrong)?
        });
        return Ok(after);
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

/// Number of bytes of an escape such as `\ude00`.
const LOW_SURROGATE_BYTES: usize = 6;

/// The low surrogate whose escape comes next, as in JSON. It is the second half of a character.
fn low_surrogate(text: &str) -> Read<Option<u32>> {
    let Some(digits) = text.strip_prefix("\\u") else {
        return if "\\u".starts_with(text) { Err(Stop::Open) } else { Ok(None) };
    };
    match hex(digits, 4) {
        Ok(code) => Ok(Some(code).filter(|code| (0xdc00..0xe000).contains(code))),
        Err(Stop::Wrong) => Ok(None),
        Err(stop) => Err(stop),
    }
}

/// Reads this number of hexadecimal digits.
fn hex(text: &str, digits: usize) -> Read<u32> {
    let end = if text.len() >= digits { Stop::Wrong } else { Stop::Open };
    u32::from_str_radix(text.get(..digits).ok_or(end)?, 16).map_err(|_| Stop::Wrong)
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
        Some(calls.iter().map(|call| json!([call.name, arguments(&call.arguments)])).collect())
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

    /// Models write characters outside the basic plane as JSON does.
    #[test]
    fn halves_of_a_surrogate_pair_are_one_character() {
        for (string, expected) in [
            (r"\ud83d\ude00", "\u{1f600}"),
            (r"a\uD83D\uDE00\n", "a\u{1f600}\n"),
            (r"\U0001f600", "\u{1f600}"),
            // A half alone.
            (r"\ud83d", "\u{fffd}"),
            (r"\ude00b", "\u{fffd}b"),
            (r"\ud83d\n", "\u{fffd}\n"),
            (r"\ud83d\u00e9", "\u{fffd}\u{e9}"),
            (r"\ud83d\ud83d\ude00", "\u{fffd}\u{1f600}"),
            (r"\U0000d83d", "\u{fffd}"),
        ] {
            assert_eq!(one(&format!("f(a=\"{string}\")")), Some(json!([["f", {"a": expected}]])), "{string}");
        }
        for wrong in ["\\ud83d\\u12", "\\ud83d\\u1\u{e9}\u{e9}", "\\U00110000", "\\ud8"] {
            assert_eq!(one(&format!("f(a=\"{wrong}\")")), None, "{wrong}");
        }
        // An escape that is not whole yet decides nothing.
        let text = format!("{}f(a=\"\\ud83d\\ude00\")", TOOL_CALL.begin);
        for end in TOOL_CALL.begin.len()..text.len() {
            let reading = read(&text[..end], Some(TOOL_CALL), &[json!({"name": "f"})], End::More);
            assert_eq!(reading, Reading::Open, "{}", &text[..end]);
        }
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
