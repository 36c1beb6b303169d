//! Formats values as Python does, because templates expect Python's `str()`.

use std::fmt::Write;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// Values nested deeper than this are refused.
const DEPTH_MAX: usize = 64;

/// `str(value)`: `True`, `None`, `1e-07`, `{'a': [1, 'b']}`. A string is its own text; undefined is the empty text.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_string());
    }
    let mut out = String::new();
    if !value.is_undefined() {
        write_repr(&mut out, value, 0)?;
    }
    Ok(out)
}

/// `repr(x)` of a float: the shortest digits that read back as the same number, with an exponent from 1e16 and below
/// 1e-4.
pub(super) fn float(x: f64) -> String {
    if x.is_nan() {
        return "nan".to_string();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf" } else { "-inf" }.to_string();
    }
    let scientific = format!("{x:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(power) if !(-4..16).contains(&power) => {
            let sign = if power < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", power.unsigned_abs())
        }
        _ if x.fract() == 0.0 => format!("{x:.1}"),
        _ => x.to_string(),
    }
}

/// The error for values that are nested too deep.
pub(super) fn too_deep() -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("a value is nested deeper than {DEPTH_MAX} levels"))
}

/// Whether a value at this depth is too deep to format.
pub(super) fn is_too_deep(depth: usize) -> bool {
    depth > DEPTH_MAX
}

fn write_repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    if is_too_deep(depth) {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => write_quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (n, item) in value.try_iter()?.enumerate() {
                out.push_str(if n == 0 { "" } else { ", " });
                write_repr(out, &item, depth + 1)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (n, key) in value.try_iter()?.enumerate() {
                out.push_str(if n == 0 { "" } else { ", " });
                write_repr(out, &key, depth + 1)?;
                out.push_str(": ");
                write_repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// A number as Python writes it.
pub(super) fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(x) if !value.is_integer() => float(x),
        _ => value.to_string(),
    }
}

/// Writes a string in single quotes, or in double quotes if it contains single and no double quotes.
fn write_quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c => drop(match u32::from(c) {
                code @ ..0x100 => write!(out, "\\x{code:02x}"),
                code @ ..0x1_0000 => write!(out, "\\u{code:04x}"),
                code => write!(out, "\\U{code:08x}"),
            }),
        }
    }
    out.push(quote);
}

/// Python's `c.isprintable()`. False for the Unicode categories Other and Separator, except for the space. The standard
/// library escapes the same characters, and combining marks at the beginning of a text.
fn is_printable(c: char) -> bool {
    c.is_ascii_graphic() || c.is_alphanumeric() || format!("a{c}").escape_debug().nth(1) == Some(c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_read_as_in_python() {
        // Each pair is `x` and `repr(x)`.
        let cases = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (-2.5e300, "-2.5e+300"),
            (f64::INFINITY, "inf"),
        ];
        for (x, expected) in cases {
            assert_eq!(float(x), expected);
        }
        assert_eq!(float(f64::NAN), "nan");
    }

    #[test]
    fn nested_values_read_as_in_python() {
        let json = serde_json::json!({"a": [1, 2.0, null, true, "it's", "\"'\n\u{7f}é"], "b": {}});
        let expected = r#"{'a': [1, 2.0, None, True, "it's", '"\'\n\x7fé'], 'b': {}}"#;
        assert_eq!(text(&Value::from_serialize(json)).unwrap(), expected);
        let odd = "\u{a0}\u{ad}\u{301}\u{378}\u{200b}\u{2028}\u{3000}\u{e000}\u{e0001}\u{1f600}";
        let expected = "['\\xa0\\xad\u{301}\\u0378\\u200b\\u2028\\u3000\\ue000\\U000e0001\u{1f600}']";
        assert_eq!(text(&Value::from(vec![odd])).unwrap(), expected);
        assert_eq!(text(&Value::UNDEFINED).unwrap(), "");
        assert_eq!(text(&Value::from("plain")).unwrap(), "plain");
    }

    #[test]
    fn values_nested_too_deep_are_refused() {
        let nest = |levels| (0..levels).fold(Value::from(1), |inner, _| Value::from(vec![inner]));
        assert!(text(&nest(64)).is_ok());
        assert!(text(&nest(65)).is_err());
    }
}
