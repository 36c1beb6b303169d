//! Bounds on the cost of a template.
//!
//! The engine bounds steps ("fuel"), the depth of calls, repeated strings and ranges. This module bounds the rest:
//!
//! - the source and the output;
//! - arguments that make one step large, such as `"%99999999d"|format(1)` and `x|indent(99999999)`;
//! - the stack. The engine's compiler recurses along chains such as `elif` after `elif`, and dropping a value recurses
//!   along its nesting. A template of 100 KB, or one line in a loop, would overflow an ordinary stack. So compiling and
//!   rendering run on a stack sized for the worst case.
//!
//! A template that keeps doubling a string fills the memory before its steps are used up. `render_process` bounds
//! memory and time.

use std::io;

use minijinja::value::{Kwargs, StringInput};
use minijinja::{Environment, Error, ErrorKind, Value, filters};
use serde_json::Value as Json;

use super::ChatRequest;
use crate::files::TEMPLATE_BYTES_MAX;
use crate::{TextError, cancel};

/// Steps for an empty conversation. Published templates take a few hundred.
const STEPS_BASE: u64 = 200_000;
/// Steps for each value of the messages, tools and variables. A message has three values, for which published templates
/// take about 70 steps. Macros that print schemas take about 100 steps per value.
const STEPS_PER_VALUE: u64 = 500;
/// Upper bound on the steps, about half a second.
const STEPS_MAX: u64 = 4_000_000;
/// Constant folding takes time quadratic in the length of a chain.
const EXPRESSION_BYTES_MAX: usize = 4096;
/// Measured: the compiler takes up to 480 bytes of stack per byte of source. Dropping a value takes up to 110 bytes per
/// step.
const STACK_BYTES_PER_SOURCE_BYTE: usize = 1024;
const STACK_BYTES_PER_STEP: usize = 256;
/// For everything that grows with neither, such as calls of macros, whose depth the engine bounds.
const STACK_BYTES_BASE: usize = 8 << 20;
/// No real prompt is longer.
const OUTPUT_BYTES_MAX: usize = 64 << 20;
/// The widest indentation. `format.rs` bounds the widths in format strings.
const INDENT_MAX: usize = 999;

/// Applies the bounds to an environment.
pub(super) fn apply(environment: &mut Environment<'static>) {
    environment.add_filter("indent", indent);
    // These filters make lists as long as an argument says. No chat template needs them.
    environment.remove_filter("batch");
    environment.remove_filter("slice");
}

/// Number of steps that rendering this conversation may take.
pub(super) fn steps(request: &ChatRequest<'_>) -> u64 {
    let messages =
        request.messages.iter().flat_map(|message| message.extra.values().chain([&message.content]));
    let others =
        request.tools.into_iter().flatten().chain(request.variables.into_iter().flat_map(|map| map.values()));
    let values = request.messages.len() as u64 + messages.chain(others).map(count).sum::<u64>();
    (STEPS_BASE + values.saturating_mul(STEPS_PER_VALUE)).min(STEPS_MAX)
}

/// Stack size for a rendering of at most this many steps.
pub(super) fn rendering_stack_bytes(steps: u64) -> usize {
    STACK_BYTES_BASE + steps as usize * STACK_BYTES_PER_STEP
}

/// Stack size for compiling a template of checked size.
pub(super) fn compiling_stack_bytes(source: &str) -> usize {
    STACK_BYTES_BASE + source.len() * STACK_BYTES_PER_SOURCE_BYTE
}

/// Number of values in a JSON tree.
fn count(json: &Json) -> u64 {
    1 + match json {
        Json::Array(items) => items.iter().map(count).sum(),
        Json::Object(fields) => fields.values().map(count).sum(),
        _ => 0,
    }
}

/// Refuses a source that is longer than real templates, or has an expression longer than people write.
pub(super) fn check_source(name: &str, text: &str) -> Result<(), TextError> {
    let refuse = |reason| Err(TextError::Template { name: name.to_string(), reason });
    if text.len() as u64 > TEMPLATE_BYTES_MAX {
        return refuse(format!("{} bytes, but at most {TEMPLATE_BYTES_MAX} are accepted", text.len()));
    }
    let longest = longest_expression_bytes(text);
    if longest > EXPRESSION_BYTES_MAX {
        let limit = format!("at most {EXPRESSION_BYTES_MAX} are accepted");
        return refuse(format!("an expression of {longest} bytes without its strings, but {limit}"));
    }
    Ok(())
}

/// Length of the longest `{{ }}` or `{% %}`, without string literals.
fn longest_expression_bytes(text: &str) -> usize {
    let mut longest = 0;
    let mut rest = text;
    while let Some(open) = rest.find('{') {
        rest = &rest[open + 1..];
        match rest.bytes().next() {
            Some(b'#') => rest = rest.split_once("#}").map_or("", |(_, after)| after),
            Some(b'{' | b'%') => {
                let (expression_bytes, after) = expression(rest);
                longest = longest.max(expression_bytes);
                rest = after;
            }
            _ => {}
        }
    }
    longest
}

/// Returns the length of the expression at the start of `text` without its string literals, and the text after it.
/// `text` begins with the second character of `{{` or `{%`.
fn expression(text: &str) -> (usize, &str) {
    let close: &[u8] = if text.starts_with('%') { b"%}" } else { b"}}" };
    let (mut outside, mut braces, mut quote, mut escaped) = (0, 0, None, false);
    for (at, &byte) in text.as_bytes().iter().enumerate().skip(1) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if byte == b'\\' => escaped = true,
            Some(open) if byte == open => quote = None,
            Some(_) => {}
            None if braces == 0 && text.as_bytes()[at..].starts_with(close) => {
                return (outside, &text[at + 2..]);
            }
            None => {
                match byte {
                    b'"' | b'\'' => quote = Some(byte),
                    b'{' => braces += 1,
                    b'}' if braces > 0 => braces -= 1,
                    _ => {}
                }
                outside += 1;
            }
        }
    }
    (outside, "")
}

/// Refuses an indentation width, given by an argument, that is larger than any text needs.
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
        if cancel::is_cancelled() {
            return Err(io::Error::other("cancelled"));
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_measured_without_strings_and_comments() {
        for (text, bytes) in [
            ("no expression { at } all", 0),
            ("{{abc}}", 3),
            ("{%- if x -%}{{ y }}", 8),
            ("{{ 'a long }} string \\' with all' }}", 3),
            ("{# {{ a comment }} #}{{x}}", 1),
            ("{{ never closed", 13),
            ("{{ {'a': {'b': 1}} }}", 13),
            ("{{x}}{% set y = {} %}{{ zz }}", 12),
        ] {
            assert_eq!(longest_expression_bytes(text), bytes, "{text}");
        }
    }
}
