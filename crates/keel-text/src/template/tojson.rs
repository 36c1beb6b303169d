//! The filter `tojson`, with the output of Python's `json.dumps`.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::{limits, python};

/// How the JSON text is laid out.
struct Style {
    /// Write non-ASCII characters as `\uXXXX`.
    ascii: bool,
    /// Write one item per line, indented by this many spaces per level.
    indent: Option<usize>,
    between_items: String,
    after_key: String,
    sort_keys: bool,
}

/// `value|tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`, as the reference implementation
/// defines it. Unlike the engine's own filter, it does not escape `<`, `>` and `&`.
pub(super) fn tojson(value: &Value, ensure_ascii: Option<bool>, kwargs: Kwargs) -> Result<String, Error> {
    let ascii = ensure_ascii.or(kwargs.get::<Option<bool>>("ensure_ascii")?).unwrap_or(false);
    let indent = kwargs.get::<Option<usize>>("indent")?.map(limits::check_indent).transpose()?;
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let (between_items, after_key) = match separators.as_deref() {
        Some([items, keys]) => (items.clone(), keys.clone()),
        Some(_) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators must be two strings"));
        }
        None => (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()),
    };
    let mut out = String::new();
    Style { ascii, indent, between_items, after_key, sort_keys }.write(&mut out, value, 0)?;
    Ok(out)
}

impl Style {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if python::is_too_deep(depth) {
            return Err(python::too_deep());
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&json_number(value)),
            ValueKind::String => self.write_string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.write_list(out, value, depth)?,
            ValueKind::Map => self.write_map(out, value, depth)?,
            kind => {
                let reason = format!("tojson: a value of type {kind} has no JSON form");
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
        }
        Ok(())
    }

    fn write_list(&self, out: &mut String, list: &Value, depth: usize) -> Result<(), Error> {
        out.push('[');
        let mut empty = true;
        for item in list.try_iter()? {
            self.begin_item(out, &mut empty, depth);
            self.write(out, &item, depth + 1)?;
        }
        self.close(out, empty, depth, ']');
        Ok(())
    }

    fn write_map(&self, out: &mut String, map: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Value> = map.try_iter()?.collect();
        if self.sort_keys {
            keys.sort();
        }
        out.push('{');
        let mut empty = true;
        for key in keys {
            self.begin_item(out, &mut empty, depth);
            match key.as_str() {
                Some(text) => self.write_string(out, text),
                None => {
                    let mut text = String::new();
                    self.write(&mut text, &key, depth + 1)?;
                    self.write_string(out, &text);
                }
            }
            out.push_str(&self.after_key);
            self.write(out, &map.get_item(&key)?, depth + 1)?;
        }
        self.close(out, empty, depth, '}');
        Ok(())
    }

    fn begin_item(&self, out: &mut String, first: &mut bool, depth: usize) {
        if !std::mem::take(first) {
            out.push_str(&self.between_items);
        }
        self.new_line(out, depth + 1);
    }

    fn close(&self, out: &mut String, empty: bool, depth: usize, bracket: char) {
        if !empty {
            self.new_line(out, depth);
        }
        out.push(bracket);
    }

    fn new_line(&self, out: &mut String, depth: usize) {
        if let Some(spaces) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', spaces * depth));
        }
    }

    fn write_string(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ascii && c > '~') => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// Python writes numbers into JSON as it prints them, except for NaN and the two infinities.
fn json_number(value: &Value) -> String {
    match python::number(value).as_str() {
        "nan" => "NaN".to_string(),
        "inf" => "Infinity".to_string(),
        "-inf" => "-Infinity".to_string(),
        number => number.to_string(),
    }
}
