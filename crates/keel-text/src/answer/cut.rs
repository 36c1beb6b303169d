//! The end of an answer that the limit of tokens cut off.

use super::markers::{CALLS, FUNCTOOLS, MISTRAL, Markers, PYTHON_TAG, overlap};
use super::tool_call::{names, parse_calls};
use super::{AnswerParser, AnswerPart, State};

use serde_json::Value;

/// Fewest bytes of a marker's beginning that are left out after text. Fewer may as well be text, such as `<` in `a <`.
const MARKER_PART_MIN: usize = 5;

impl AnswerParser {
    /// Ends an answer that its limit of tokens cut off. A call that was cut off is left out: it can neither be made nor
    /// read. The text and the calls before it are kept.
    pub fn cut_off(&mut self, parts: &mut Vec<AnswerPart>) {
        let tools = &self.form.tools;
        match self.state {
            State::Start | State::Text if !tools.is_empty() => {
                let begins = CALLS.map(|markers| markers.begin).into_iter().chain([PYTHON_TAG]);
                let begun = begins.map(|marker| overlap(&self.held, marker)).max().unwrap_or(0);
                let text = self.held[..self.held.len() - begun].trim_end().len();
                let is_alone = begun > 0 && text == 0 && !self.has_spoken;
                if is_alone || begun >= MARKER_PART_MIN {
                    self.held.truncate(text);
                }
            }
            State::Call(Markers { begin, end }) => {
                // The notation of calls without an end marker depends on the begin marker.
                let begin = if end.is_none() { begin } else { "" };
                let calls = format!("{begin}{}", self.held);
                self.keep_whole_calls(&calls, parts);
            }
            State::BareCall if begins_call(&self.held, tools) => {
                let calls = self.held.clone();
                self.keep_whole_calls(&calls, parts);
            }
            _ => {}
        }
        self.finish(parts);
    }

    /// Appends the calls that are complete, and drops the rest.
    fn keep_whole_calls(&mut self, calls: &str, parts: &mut Vec<AnswerPart>) {
        let tools = &self.form.tools;
        let whole = if ends_open(calls, tools) { None } else { parse_calls(calls, tools) };
        // Of Mistral's calls only the last one can be unfinished.
        let earlier = || calls.rfind(MISTRAL).and_then(|last| parse_calls(&calls[..last], tools));
        let whole = whole.or_else(earlier).unwrap_or_default();
        self.emit_calls(whole, parts);
        self.held.clear();
        self.gap.clear();
        self.enter(State::Text);
    }
}

/// Whether arguments may follow, although the calls can be parsed. Only tags and keys can be parsed without their end.
/// A tool's name alone is not parsed here: its arguments may follow, too.
fn ends_open(calls: &str, tools: &[Value]) -> bool {
    let calls = calls.trim();
    let has_keys = |name| after(calls, name).is_some_and(|rest| rest.starts_with("<arg_key>"));
    calls.starts_with("<function=") && !calls.ends_with("</function>") || names(tools).any(has_keys)
}

/// Whether a text at the begin of an answer, which has no markers, is a call and not a JSON value or a sentence.
fn begins_call(text: &str, tools: &[Value]) -> bool {
    let text = text.trim_start();
    if text.starts_with(PYTHON_TAG) || text.starts_with(FUNCTOOLS) {
        return true;
    }
    // GLM-4 writes the arguments below the name.
    let is_named = |name| {
        let below = text.strip_prefix(name).and_then(|rest| rest.strip_prefix('\n'));
        below.is_some_and(|rest| rest.trim().is_empty() || rest.trim_start().starts_with('{'))
    };
    let object = after(text, "[").unwrap_or(text);
    let value = ["{", "\"name\"", ":", "\""].into_iter().try_fold(object, after);
    let names_it = |name: &str| {
        let begun = |value: &str| value.strip_prefix(name).is_some_and(|rest| rest.starts_with('"'));
        value.is_some_and(|value| begun(value) || name.starts_with(value))
    };
    names(tools).any(|name| is_named(name) || names_it(name))
}

/// The text after `word`, without the white space between.
fn after<'a>(text: &'a str, word: &str) -> Option<&'a str> {
    text.strip_prefix(word).map(str::trim_start)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::AnswerForm;

    /// The text and the number of calls of an answer that is cut off after it arrived in pieces of `size` characters.
    fn cut(answer: &str, size: usize) -> (String, usize) {
        let tools = vec![json!({"function": {"name": "weather"}})];
        let mut parser = AnswerParser::new(AnswerForm { tools, ..AnswerForm::default() });
        let (mut parts, chars) = (Vec::new(), answer.chars().collect::<Vec<_>>());
        for piece in chars.chunks(size) {
            parser.push(&piece.iter().collect::<String>(), &mut parts);
        }
        parser.cut_off(&mut parts);
        let text = |part: &AnswerPart| match part {
            AnswerPart::Text(text) => text.clone(),
            _ => String::new(),
        };
        let calls = parts.iter().filter(|part| matches!(part, AnswerPart::ToolCall { .. })).count();
        (parts.iter().map(text).collect(), calls)
    }

    fn check(answer: &str, text: &str, calls: usize) {
        for size in [1, 3, 1000] {
            assert_eq!(cut(answer, size), (text.to_string(), calls), "{answer:?} in pieces of {size}");
        }
    }

    #[test]
    fn a_call_that_is_cut_off_anywhere_is_left_out() {
        let json = r#"{"name": "weather", "arguments": {"city": "Bern"}}"#;
        for (begin, call, end) in [
            ("<tool_call>", json, "</tool_call>"),
            ("<|tool_call|>", &format!("[{json}]"), "<|/tool_call|>"),
            ("<function_calls>", "weather(city=\"Bern\")", "</function_calls>"),
            (
                "<tool_call>",
                "<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>",
                "</tool_call>",
            ),
            (
                "<tool_call>",
                "weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n",
                "</tool_call>",
            ),
            ("[TOOL_CALLS]", "weather[ARGS]{\"city\": \"Bern\"}", ""),
            ("<tool_call>", "weather\n", "</tool_call>"),
        ] {
            let before = format!("Look: {begin}");
            for at in 6 + MARKER_PART_MIN..before.len() + call.len() {
                let answer = format!("{before}{call}");
                check(&answer[..at], "Look:", 0);
            }
            check(&format!("{before}{call}{end}"), "Look:", 1);
            // The first call is kept where the second is cut off.
            check(&format!("{before}{call}{end}{begin}{}", &call[..call.len() - 1]), "Look:", 1);
        }
    }

    #[test]
    fn calls_without_markers_are_left_out_and_values_are_not() {
        for (answer, text) in [
            (r#"{"name": "weather", "parameters": {"ci"#, ""),
            (r#"[{ "name" : "wea"#, ""),
            ("<|python_tag|>{\"na", ""),
            ("functools[{\"na", ""),
            ("weather\n", ""),
            ("<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"</tool_call>", ""),
            ("weather\n{\"city\": ", ""),
            ("weather\nis ni", "weather\nis ni"),
            (r#"{"name": "Anna", "a"#, r#"{"name": "Anna", "a"#),
            (r#"{"name": "weatherman", "a"#, r#"{"name": "weatherman", "a"#),
            (r#"[{"a": 1"#, r#"[{"a": 1"#),
            ("if a <", "if a <"),
            ("<", ""),
            ("<t", ""),
        ] {
            check(answer, text, 0);
        }
        check(r#"{"name": "weather", "arguments": {}}"#, "", 1);
        check("a  <tool_call>no</tool_call> \n<tool_call>weather", "a  <tool_call>no</tool_call>", 0);
    }
}
