//! JSON that is no call. A marker in one of its strings is text.

use super::markers::CALLS;
use super::reader::End;
use super::{CALL_BYTES_MAX, State};

/// Reads JSON that is no call. Returns the number of bytes before the first place where a marker may be, and the state
/// there. `inside`: the text begins inside a string. An end marker outside strings ends the JSON.
///
/// Malformed JSON may have a string that never ends. So a string with a control character, which JSON forbids, counts
/// as no string, and neither does the rest of one that holds back [`CALL_BYTES_MAX`] bytes.
pub(super) fn read_value(text: &str, mut inside: bool, end: End) -> (usize, State) {
    let bytes = text.as_bytes();
    // The first marker inside the current string. If this is an end marker, and a begin marker comes next, then the
    // string lacks its quote.
    let mut hidden = None;
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        if hidden.is_some_and(|hidden| at >= hidden + CALL_BYTES_MAX) && text.is_char_boundary(at) {
            return (at, State::Text);
        }
        match byte {
            b'<' | b'[' => {
                let begins = CALLS.iter().map(|markers| markers.begin);
                let mut ends = CALLS.iter().filter_map(|markers| markers.end);
                let rest = &text[at..];
                let is_begin = begins.clone().any(|begin| rest.starts_with(begin));
                if is_begin || ends.clone().any(|end| rest.starts_with(end)) {
                    let before = text[hidden.unwrap_or(at)..at].trim_ascii_end();
                    if !inside || is_begin && ends.any(|end| before == end) {
                        return (hidden.unwrap_or(at), State::Text);
                    }
                    hidden.get_or_insert(at);
                } else if end != End::Whole && begins.chain(ends).any(|marker| marker.starts_with(rest)) {
                    break;
                }
            }
            b'"' => {
                inside = !inside;
                hidden = None;
            }
            b'\\' if inside => match bytes.get(at + 1) {
                None if end != End::Whole => break,
                None => {}
                Some(..b' ') => return (hidden.unwrap_or(at), State::Text),
                Some(_) => at += 1,
            },
            // JSON has backslashes only in strings.
            b'\\' => return (at, State::Text),
            ..b' ' if inside => return (hidden.unwrap_or(at), State::Text),
            _ => {}
        }
        at += 1;
    }
    match hidden {
        // A string that never ends hid the marker.
        Some(hidden) if end == End::Whole => (hidden, State::Text),
        _ => (hidden.unwrap_or(at), State::Value { inside }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_in_strings_do_not_count() {
        let (text, inside) = (State::Text, State::Value { inside: true });
        let outside = State::Value { inside: false };
        for (value, end, expected) in [
            (r#"{"a": "<tool_call>"}<tool_call>"#, End::More, (20, text)),
            (r#" [ {"a": "\"<tool_call>"}<tool_call>"#, End::More, (25, text)),
            ("{\"a<tool_call>\n", End::More, (3, text)),
            ("{\"a<tool_call>", End::More, (3, inside)),
            ("{\"a<tool_call>", End::Whole, (3, text)),
            ("{\"a<tool_call>\" <tool", End::More, (16, outside)),
            ("{\\\"a<tool_call>", End::More, (1, text)),
            ("{\"a\\", End::More, (3, inside)),
            ("{\"a\\", End::Whole, (4, inside)),
            ("{\"a\\\n", End::More, (3, text)),
            ("{} <tool", End::More, (3, outside)),
            ("{} <tool", End::Whole, (8, outside)),
        ] {
            assert_eq!(read_value(value, false, end), expected, "{value} and {end:?}");
        }
    }
}
