//! Format strings of Python, with bounds on widths and precisions.

use minijinja::value::Rest;
use minijinja::{Error, ErrorKind, FormatStyle, Value, format_filter};

/// Most digits of a width or precision.
const DIGITS_MAX: usize = 3;

/// `format|format(values)`, which is Python's `format % values`.
pub(super) fn with_percent(format: &str, values: Rest<Value>) -> Result<String, Error> {
    check_percent(format)?;
    format_filter(FormatStyle::Printf, format, &values)
}

/// `format.format(values)`.
pub(super) fn with_braces(format: &str, values: &[Value]) -> Result<String, Error> {
    check_braces(format)?;
    format_filter(FormatStyle::StrFormat, format, values)
}

/// Checks specifications such as `%5d` and `%(key)-5.2f`.
fn check_percent(format: &str) -> Result<(), Error> {
    let mut rest = format;
    while let Some((_, after)) = rest.split_once('%') {
        if let Some(after) = after.strip_prefix('%') {
            rest = after;
            continue;
        }
        let spec = match after.strip_prefix('(') {
            Some(key) => after_key(key, ')')?,
            None => after,
        };
        let is_part = |c: char| c.is_ascii_digit() || "#-+ .".contains(c);
        let end = spec.find(|c| !is_part(c)).unwrap_or(spec.len());
        check_digits(&spec[..end])?;
        rest = &spec[end..];
    }
    Ok(())
}

/// Checks specifications such as `{:5}` and `{0[key]:*>5.2f}`.
fn check_braces(format: &str) -> Result<(), Error> {
    let mut rest = format;
    while let Some((_, after)) = rest.split_once('{') {
        if let Some(after) = after.strip_prefix('{') {
            rest = after;
            continue;
        }
        let spec = after_name(after)?;
        let end = spec.find('}').unwrap_or(spec.len());
        check_digits(&spec[..end])?;
        rest = &spec[end..];
    }
    Ok(())
}

/// The text after the name of a field and the character that fills its width. Keys and that character may be braces.
fn after_name(field: &str) -> Result<&str, Error> {
    let mut rest = field;
    while let Some(at) = rest.find(['[', ':', '}']) {
        let (stop, after) = rest[at..].split_at(1);
        match stop {
            "[" => rest = after_key(after, ']')?,
            "}" => return Ok(&rest[at..]),
            _ => {
                let mut chars = after.chars();
                let align = chars.by_ref().nth(1);
                return Ok(if matches!(align, Some('<' | '>' | '^')) { chars.as_str() } else { after });
            }
        }
    }
    Ok("")
}

/// The text after a key. The engine panics at a key that is not ASCII.
fn after_key(text: &str, end: char) -> Result<&str, Error> {
    let (key, after) = text.split_once(end).unwrap_or((text, ""));
    if key.is_ascii() {
        return Ok(after);
    }
    Err(Error::new(ErrorKind::InvalidOperation, format!("the key {key:?} of a format string is not ASCII")))
}

fn check_digits(spec: &str) -> Result<(), Error> {
    let longest = spec.split(|c: char| !c.is_ascii_digit()).map(str::len).max().unwrap_or(0);
    if longest <= DIGITS_MAX {
        return Ok(());
    }
    let reason = format!("a width of {longest} digits in a format string, at most {DIGITS_MAX} are accepted");
    Err(Error::new(ErrorKind::InvalidOperation, reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_widths_count() {
        for format in ["2023: %s", "%s2023", "%d%%2023", "100%%2023", "%(2023)s", "%999.999f", ""] {
            assert!(check_percent(format).is_ok(), "{format}");
        }
        for format in
            ["%1000d", "%.1000f", "%-1000s", "% 1000s", "%(a)1000d", "%%%1000d", "%(é)s", "%(é", "%s%1000d"]
        {
            assert!(check_percent(format).is_err(), "{format}");
        }
        for format in
            ["2023: {}", "{}2023", "{{2023}}", "{:5}2023", "{0[2023]}", "{:*<999.999f} 2023", "{", "{:", ""]
        {
            assert!(check_braces(format).is_ok(), "{format}");
        }
        for format in [
            "{:1000}",
            "{:.1000f}",
            "{0[}]:1000}",
            "{:}>1000}",
            "{:{<1000}",
            "{{{a:1000}",
            "{:>1000",
            "{0[é]}",
            "{0[é",
            "{:01000}",
        ] {
            assert!(check_braces(format).is_err(), "{format}");
        }
    }
}
