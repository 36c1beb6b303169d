//! The end of an answer that the limit of tokens cut off.

use super::bare_call::{after, fits};
use super::markers::{CALLS, FUNCTION, MISTRAL, Markers, PYTHON_TAG, overlap};
use super::tool_call::{names, parse_calls};
use super::{AnswerParser, AnswerPart, State};

use serde_json::Value;

/// Fewest bytes of a marker's beginning that are left out after text. Fewer may as well be text, such as `<` in `a <`.
const MARKER_PART_MIN: usize = 5;

impl AnswerParser {
    /// Ends an answer that its limit of tokens cut off. A call that was cut off is left out: it can neither be made nor
    /// read. The text and the calls before it are kept.
    pub fn cut_off(&mut self, parts: &mut Vec<AnswerPart>) {
        self.release_mention(parts);
        let tools = &self.form.tools;
        match self.state {
            State::Start | State::Text | State::Value if !tools.is_empty() => {
                let begins = CALLS.map(|markers| markers.begin).into_iter();
                let begun = begins.map(|marker| overlap(&self.held, marker)).max().unwrap_or(0);
                let text = self.held[..self.held.len() - begun].trim_end().len();
                let is_alone = begun > 0 && text == 0 && !self.has_spoken;
                if is_alone || begun >= MARKER_PART_MIN {
                    self.held.truncate(text);
                }
            }
            State::Call(markers) if may_begin_calls(&self.notation(markers), tools) => {
                let calls = self.notation(markers);
                self.keep_whole_calls(&calls, parts);
            }
            // The text may still become a call, else the state would be another.
            State::BareCall => {
                let calls = self.held.clone();
                self.keep_whole_calls(&calls, parts);
            }
            State::Closer => self.held.clear(),
            _ => {}
        }
        self.finish(parts);
    }

    /// The text of the current call in its notation.
    fn notation(&self, markers: Markers) -> String {
        let begin = if markers.in_notation { markers.begin } else { "" };
        format!("{begin}{}", self.held)
    }

    /// Treats a begin marker as text if no call follows it. The text after it may have another call.
    fn release_mention(&mut self, parts: &mut Vec<AnswerPart>) {
        let State::Call(markers) = self.state else { return };
        if may_begin_calls(&self.notation(markers), &self.form.tools) {
            return;
        }
        let rest = std::mem::take(&mut self.held);
        self.emit_as_text(markers.begin, "", parts);
        self.held = rest;
        self.enter(State::Text);
        while self.advance(parts) {}
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

/// Whether the text of a call is, or may become, a call of one of the tools in any notation.
fn may_begin_calls(text: &str, tools: &[Value]) -> bool {
    let text = text.trim_start();
    let text =
        text.strip_prefix(MISTRAL).or_else(|| text.strip_prefix(PYTHON_TAG)).unwrap_or(text).trim_start();
    let is_call = |name: &str| fits(text, name) || fits(text, &format!("{}{name}>", FUNCTION.begin));
    fits(text, "{") || fits(text, "[") || names(tools).any(is_call)
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
            ("<function=", "weather>\n<parameter=city>\nBern\n</parameter>\n", "</function>"),
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
        check("Look.<|python_tag|>{\"name\": \"wea", "Look.", 0);
        let function = "<function=weather>\n</function>";
        for end in ["", "\n", "\n</tool_", "\n</tool_call>"] {
            check(&format!("Look. {function}{end}"), "Look.", 1);
        }
    }

    /// Only a call is left out, not the text after a marker that the model writes about.
    #[test]
    fn text_after_a_mention_of_a_marker_is_kept() {
        for same in [
            "Use <tool_call> tags, then more",
            "Use [TOOL_CALLS] or <tool_call> and <function=NAME> here",
            "Use <function=NAME> tags",
            "Use <|python_tag|> so",
            "<tool_call><function=other>\n<parameter=city>",
            "{\"a\": \"<tool_call>\", \"b",
        ] {
            check(same, same, 0);
        }
        check("Use <tool_call> tags:\n<tool_call>{\"name\": \"wea", "Use <tool_call> tags:", 0);
        check("Use <tool_call> tags:\n<tool_ca", "Use <tool_call> tags:", 0);
    }
}
