//! Filters, tests and methods that Jinja2 and Python have, and that the engine lacks or defines otherwise.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};
use minijinja_contrib::pycompat;

use super::{format, python};

pub(super) fn apply(environment: &mut Environment<'static>) {
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("join", join_filter);
    environment.add_filter("replace", replace);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("format", format::with_percent);
    environment.add_test("sequence", is_sequence);
    environment.set_unknown_method_callback(method);
}

fn invalid(reason: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

fn length(value: &Value) -> Result<usize, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(0),
        ValueKind::Iterable => Ok(value.try_iter()?.count()),
        _ => filters::length(value),
    }
}

fn join_filter(values: &Value, joiner: Option<&Value>) -> Result<String, Error> {
    let joiner = joiner.map(python::text).transpose()?;
    join(values, &joiner.unwrap_or_default())
}

fn join(values: &Value, joiner: &str) -> Result<String, Error> {
    let mut out = String::new();
    for (n, value) in values.try_iter()?.enumerate() {
        out.push_str(if n == 0 { "" } else { joiner });
        out.push_str(&python::text(&value)?);
    }
    Ok(out)
}

/// `text|replace(old, new, count=none)`. A negative count means all.
fn replace(
    text: &Value,
    old: &Value,
    new: &Value,
    count: Option<i64>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let count = count.or(kwargs.get("count")?).unwrap_or(-1);
    kwargs.assert_all_used()?;
    let (text, old, new) = (python::text(text)?, python::text(old)?, python::text(new)?);
    Ok(usize::try_from(count)
        .map_or_else(|_| text.replace(&old, &new), |count| text.replacen(&old, &new, count)))
}

/// `value|int(default=0, base=10)`.
fn int(value: &Value, default: Option<Value>, base: Option<u32>, kwargs: Kwargs) -> Result<Value, Error> {
    let default = default.or(kwargs.get("default")?);
    let base = base.or(kwargs.get("base")?).unwrap_or(10);
    kwargs.assert_all_used()?;
    if !(2..=36).contains(&base) {
        return Err(invalid("int: the base must be from 2 to 36"));
    }
    let whole = |x: f64| (x.abs() < 1e38).then_some(x as i128);
    let number = match value.kind() {
        ValueKind::Number if value.is_integer() => return Ok(value.clone()),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default().trim().to_ascii_lowercase();
            let prefix = match base {
                2 => "0b",
                8 => "0o",
                16 => "0x",
                _ => "",
            };
            let digits = text.strip_prefix(prefix).unwrap_or(&text);
            i128::from_str_radix(digits, base).ok().or_else(|| whole(text.parse().ok()?))
        }
        _ => as_float(value).and_then(whole),
    };
    Ok(number.map(Value::from).or(default).unwrap_or(Value::from(0)))
}

/// `value|float(default=0.0)`.
fn float(value: &Value, default: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let default = default.or(kwargs.get("default")?);
    kwargs.assert_all_used()?;
    Ok(as_float(value).map(Value::from).or(default).unwrap_or(Value::from(0.0)))
}

fn as_float(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::String => value.as_str()?.trim().parse().ok(),
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        _ => None,
    }
}

/// In Jinja2 everything with a length and items is a sequence.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined)
}

/// The methods of Python's strings, lists and dictionaries.
fn method(state: &State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let (ValueKind::Seq, "index") = (value.kind(), name) {
        let (wanted,): (&Value,) = from_args(args)?;
        let at = value.try_iter()?.position(|item| item == *wanted);
        return at.map(Value::from).ok_or_else(|| invalid("index: the list does not have the value"));
    }
    if let Some(text) = value.as_str() {
        match string_method(text, name, args) {
            Err(error) if error.kind() == ErrorKind::UnknownMethod => {}
            result => return result,
        }
    }
    pycompat::unknown_method_callback(state, value, name, args)
}

fn string_method(text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    if name == "format" {
        return format::with_braces(text, args).map(Value::from);
    }
    if name == "join" {
        let (values,): (&Value,) = from_args(args)?;
        return join(values, text).map(Value::from);
    }
    if name == "rsplit" {
        let (separator, splits): (Option<&str>, Option<i64>) = from_args(args)?;
        let splits = splits.and_then(|splits| usize::try_from(splits).ok()).unwrap_or(usize::MAX);
        return rsplit(text, separator, splits).map(list);
    }
    if ![
        "find",
        "rfind",
        "index",
        "rindex",
        "count",
        "partition",
        "rpartition",
        "removeprefix",
        "removesuffix",
    ]
    .contains(&name)
    {
        return Err(ErrorKind::UnknownMethod.into());
    }
    let (part,): (&str,) = from_args(args)?;
    let characters = |bytes: Option<usize>| bytes.map(|bytes| text[..bytes].chars().count());
    Ok(match name {
        "find" | "rfind" | "index" | "rindex" => {
            let bytes = if name.starts_with('r') { text.rfind(part) } else { text.find(part) };
            match characters(bytes) {
                Some(at) => Value::from(at),
                None if name.ends_with("find") => Value::from(-1),
                None => return Err(invalid("index: the text does not have the part")),
            }
        }
        "count" if part.is_empty() => Value::from(text.chars().count() + 1),
        "count" => Value::from(text.matches(part).count()),
        "partition" | "rpartition" if part.is_empty() => {
            return Err(invalid("partition: the separator is empty"));
        }
        "partition" => {
            list(text.split_once(part).map_or([text, "", ""], |(before, after)| [before, part, after]))
        }
        "rpartition" => {
            list(text.rsplit_once(part).map_or(["", "", text], |(before, after)| [before, part, after]))
        }
        "removeprefix" => Value::from(text.strip_prefix(part).unwrap_or(text)),
        _ => Value::from(text.strip_suffix(part).unwrap_or(text)),
    })
}

fn list<'a>(parts: impl IntoIterator<Item = &'a str>) -> Value {
    parts.into_iter().map(Value::from).collect()
}

/// Splits at most `splits` times, from the end. Without a separator, white space separates.
fn rsplit<'a>(text: &'a str, separator: Option<&str>, splits: usize) -> Result<Vec<&'a str>, Error> {
    let mut parts = Vec::new();
    let mut rest = if separator.is_none() { text.trim_end() } else { text };
    while parts.len() < splits {
        let split = match separator {
            Some("") => return Err(invalid("rsplit: the separator is empty")),
            Some(separator) => rest.rsplit_once(separator),
            None => rest.rsplit_once(char::is_whitespace).map(|(before, part)| (before.trim_end(), part)),
        };
        let Some((before, part)) = split else { break };
        parts.push(part);
        rest = before;
    }
    if separator.is_some() || !rest.is_empty() {
        parts.push(rest);
    }
    parts.reverse();
    Ok(parts)
}
