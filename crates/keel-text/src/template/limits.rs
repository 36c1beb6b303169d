//! Bounds on what a template may cost.
//!
//! The engine counts steps ("fuel") and the depth of calls, and bounds repeated strings and ranges. What it does
//! not bound is done here: the size of the source, the output, and arguments that make one step
//! large (`"%99999999d"|format(1)`, `x|indent(99999999)`).

use std::io;

use minijinja::value::{Kwargs, Rest, StringInput};
use minijinja::{Environment, Error, ErrorKind, FormatStyle, State, Value, filters, format_filter};
use minijinja_contrib::pycompat;

use crate::TextError;
use crate::files::TEMPLATE_BYTES_MAX;

/// Steps of one rendering. Published templates take 50 to 400 for a message; this is spent in about a second.
const STEPS_MAX: u64 = 5_000_000;
/// A prompt longer than this is no prompt.
const OUTPUT_BYTES_MAX: usize = 64 << 20;
/// Digits of a width in a format string, and the widest indentation.
const WIDTH_DIGITS_MAX: usize = 3;
const INDENT_MAX: usize = 999;

/// Sets the bounds of an environment.
pub(super) fn apply(environment: &mut Environment<'static>) {
    environment.set_fuel(Some(STEPS_MAX));
    environment.add_filter("indent", indent);
    environment.add_filter("format", format);
    environment.set_unknown_method_callback(method);
    // These make lists as long as an argument says, and no chat template has a use for them.
    environment.remove_filter("batch");
    environment.remove_filter("slice");
}

/// Refuses a template that is too long to be one.
pub(super) fn check_source(name: &str, text: &str) -> Result<(), TextError> {
    if text.len() as u64 <= TEMPLATE_BYTES_MAX {
        return Ok(());
    }
    let reason = format!("{} bytes, but at most {TEMPLATE_BYTES_MAX} are accepted", text.len());
    Err(TextError::Template { name: name.to_string(), reason })
}

/// Refuses an indentation, given by an argument, that is wider than any text.
pub(super) fn check_indent(width: usize) -> Result<usize, Error> {
    if width <= INDENT_MAX {
        return Ok(width);
    }
    Err(Error::new(
        ErrorKind::InvalidOperation,
        format!("indent is {width}, at most {INDENT_MAX} is accepted"),
    ))
}

/// Collects the output up to its limit.
#[derive(Default)]
pub(super) struct BoundedOutput {
    bytes: Vec<u8>,
}

impl BoundedOutput {
    pub(super) fn into_string(self) -> Option<String> {
        String::from_utf8(self.bytes).ok()
    }
}

impl io::Write for BoundedOutput {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + part.len() > OUTPUT_BYTES_MAX {
            return Err(io::Error::other(format!("the output exceeds {OUTPUT_BYTES_MAX} bytes")));
        }
        self.bytes.extend_from_slice(part);
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `text|indent(width=4, first=false, blank=false)` with a bounded width.
fn indent(
    text: StringInput<'_>,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let named_width = kwargs.get::<Option<usize>>("width")?;
    check_indent(width.or(named_width).unwrap_or(0))?;
    filters::indent(text, width, first, blank, kwargs)
}

fn format(text: &str, args: Rest<Value>) -> Result<String, Error> {
    check_widths(text)?;
    format_filter(FormatStyle::Printf, text, &args)
}

/// The methods of Python's strings, lists and dictionaries.
fn method(state: &State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let (Some(text), "format") = (value.as_str(), name) {
        check_widths(text)?;
    }
    pycompat::unknown_method_callback(state, value, name, args)
}

fn check_widths(format: &str) -> Result<(), Error> {
    let mut digits = 0;
    for byte in format.bytes() {
        digits = if byte.is_ascii_digit() { digits + 1 } else { 0 };
        if digits > WIDTH_DIGITS_MAX {
            let reason = format!("a number of more than {WIDTH_DIGITS_MAX} digits in a format string");
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
    }
    Ok(())
}
