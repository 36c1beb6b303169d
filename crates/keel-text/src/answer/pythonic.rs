//! Calls in Python's notation: `name(key=value, ...)`, one after the other, with literals as values. OLMo 3 uses it.

use serde_json::{Map, Number, Value};

use super::tool_call::ParsedCall;

/// Largest nesting depth of values.
const DEPTH_MAX: usize = 64;

/// Returns the calls, or `None` if the text contains anything else.
pub(super) fn parse(text: &str) -> Option<Vec<ParsedCall>> {
    let mut reader = Reader { rest: text.trim() };
    // A list of calls is accepted as well.
    let is_list = reader.take("[");
    let mut calls = Vec::new();
    while !(reader.rest.is_empty() || is_list && reader.rest.starts_with(']')) {
        calls.push(reader.call()?);
        reader.take(",");
    }
    let ended = !is_list || reader.take("]");
    (ended && reader.rest.is_empty() && !calls.is_empty()).then_some(calls)
}

/// Whether a name of a function or of a key may contain this character.
pub(super) fn is_of_name(c: char) -> bool {
    c.is_alphanumeric() || "_-.".contains(c)
}

struct Reader<'a> {
    /// The text that is not read yet. It never begins with white space.
    rest: &'a str,
}

impl<'a> Reader<'a> {
    fn skip(&mut self, bytes: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.rest = rest.trim_start();
        taken
    }

    /// Consumes `word` if the text continues with it.
    fn take(&mut self, word: &str) -> bool {
        let comes = self.rest.starts_with(word);
        if comes {
            self.skip(word.len());
        }
        comes
    }

    fn name(&mut self) -> Option<&'a str> {
        let name = self.skip(self.rest.len() - self.rest.trim_start_matches(is_of_name).len());
        (!name.is_empty()).then_some(name)
    }

    fn call(&mut self) -> Option<ParsedCall> {
        let name = self.name()?.to_string();
        let mut arguments = Map::new();
        if !self.take("(") {
            return None;
        }
        while !self.take(")") {
            let key = self.name()?.to_string();
            if !self.take("=") {
                return None;
            }
            arguments.insert(key, self.value(0)?);
            if !self.take(",") && !self.rest.starts_with(')') {
                return None;
            }
        }
        Some(ParsedCall { name, arguments })
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEPTH_MAX {
            return None;
        }
        match self.rest.chars().next()? {
            '"' | '\'' => {
                let mut text = self.string()?;
                // Python joins adjacent string literals.
                while self.rest.starts_with(['"', '\'']) {
                    text.push_str(&self.string()?);
                }
                Some(Value::String(text))
            }
            '[' => self.list("[", "]", depth),
            '(' => self.list("(", ")", depth),
            '{' => self.object(depth),
            '-' | '+' | '.' | '0'..='9' => self.number(),
            _ => match self.name()? {
                "True" | "true" => Some(Value::Bool(true)),
                "False" | "false" => Some(Value::Bool(false)),
                "None" | "null" => Some(Value::Null),
                _ => None,
            },
        }
    }

    fn list(&mut self, open: &str, close: &str, depth: usize) -> Option<Value> {
        let mut values = Vec::new();
        self.take(open);
        while !self.take(close) {
            values.push(self.value(depth + 1)?);
            if !self.take(",") && !self.rest.starts_with(close) {
                return None;
            }
        }
        Some(Value::Array(values))
    }

    fn object(&mut self, depth: usize) -> Option<Value> {
        let mut object = Map::new();
        self.take("{");
        while !self.take("}") {
            let Value::String(key) = self.value(depth + 1)? else { return None };
            if !self.take(":") {
                return None;
            }
            object.insert(key, self.value(depth + 1)?);
            if !self.take(",") && !self.rest.starts_with('}') {
                return None;
            }
        }
        Some(Value::Object(object))
    }

    fn number(&mut self) -> Option<Value> {
        let end = self.rest.find(|c: char| !(c.is_ascii_alphanumeric() || "+-._".contains(c)));
        let text = self.skip(end.unwrap_or(self.rest.len())).replace('_', "");
        let text = text.trim_start_matches('+');
        let whole = text.parse::<i64>().map(Number::from).ok();
        let whole = whole.or_else(|| text.parse::<u64>().map(Number::from).ok());
        whole.or_else(|| Number::from_f64(text.parse().ok()?)).map(Value::Number)
    }

    /// Reads a string in one kind of quotes, also in triple quotes.
    fn string(&mut self) -> Option<String> {
        let quote = &self.rest[..1];
        let triple = quote.repeat(3);
        let end = if self.rest.starts_with(&triple) { &triple[..] } else { quote };
        let mut rest = &self.rest[end.len()..];
        let mut text = String::new();
        loop {
            if let Some(after) = rest.strip_prefix(end) {
                self.rest = after.trim_start();
                return Some(text);
            }
            let mut chars = rest.chars();
            match chars.next()? {
                '\\' => rest = escape(chars.as_str(), &mut text)?,
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
fn escape<'a>(rest: &'a str, text: &mut String) -> Option<&'a str> {
    let mut chars = rest.chars();
    let c = chars.next()?;
    let digits = match c {
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => 0,
    };
    if digits > 0 {
        let code = rest.get(1..1 + digits)?;
        text.push(char::from_u32(u32::from_str_radix(code, 16).ok()?)?);
        return rest.get(1 + digits..);
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
    Some(chars.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn one(text: &str) -> Option<Value> {
        let calls = parse(text)?;
        Some(calls.into_iter().map(|call| json!([call.name, call.arguments])).collect())
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
