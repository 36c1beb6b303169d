//! The end of an answer, which the limit of tokens or a stop string may cut off.

use serde_json::Value;

use super::bare_call::{after, begins_function, may_be_call};
use super::markers::{
    CALLS, FUNCTION, FUNCTION_END, KEY, MISTRAL, PARAMETER, PARAMETER_END, PYTHON_TAG, overlap,
};
use super::tool_call::{Call, leading_calls, names, parse_calls};
use super::{AnswerParser, AnswerPart, State, without_gap};

/// Fewest bytes of a marker's beginning that are left out after text. Fewer may as well be text, such as `<` in `a <`.
const MARKER_PART_MIN: usize = 5;

impl AnswerParser {
    /// Ends the answer and appends the text that was held back.
    pub fn finish(&mut self, parts: &mut Vec<AnswerPart>) {
        self.end(false, parts);
    }

    /// Ends an answer that its limit of tokens or a stop string cut off. A call that was cut off is left out: it can
    /// neither be made nor read. The text before it is kept. So are the calls before it, if they have markers of their
    /// own or are written in JSON.
    pub fn cut_off(&mut self, parts: &mut Vec<AnswerPart>) {
        self.end(true, parts);
    }

    fn end(&mut self, is_cut: bool, parts: &mut Vec<AnswerPart>) {
        // The text after a begin marker is read again only once, so that the time stays linear.
        let mut may_be_mention = true;
        loop {
            match (self.state, self.search.last_end(is_cut)) {
                // A string or a parameter that never ends hid the end marker. A string may be cut off.
                (State::Call(markers), Some(at)) if !is_cut || self.search.is_in_tags() => {
                    self.trusts_ends |= self.search.is_in_tags();
                    let end = markers.end.unwrap_or_default();
                    let rest = self.held.split_off(at + end.len());
                    self.close_call(markers, at, parts);
                    self.push(&rest, parts);
                }
                (State::Call(markers), _) => {
                    let rest = std::mem::take(&mut self.held);
                    let begin = if markers.in_notation { markers.begin } else { "" };
                    let is_call = match is_cut {
                        true => {
                            let end = markers.end.map_or(0, |end| overlap(&rest, end));
                            self.keep_whole_calls(begin, &rest[..rest.len() - end], parts)
                        }
                        false => self.take_calls(markers, &rest, false, parts),
                    };
                    // The begin marker may be a mention of it, and a call of another notation may follow. A parameter
                    // that never ends has no calls.
                    let is_mention = !is_call && may_be_mention && !self.search.is_in_tags();
                    if !is_call {
                        self.emit_as_text(markers.begin, if is_mention { "" } else { &rest }, parts);
                    }
                    self.enter(if is_mention { State::after_mention(&rest) } else { State::Text });
                    if is_mention {
                        may_be_mention = false;
                        self.push(&rest, parts);
                    }
                }
                (State::BareCall | State::Unmarked, hidden) => {
                    let held = std::mem::take(&mut self.held);
                    if self.state == State::BareCall && self.take_bare_calls(&held, is_cut, parts) {
                        self.enter(State::Text);
                        break;
                    }
                    self.held = held;
                    // A string that is cut off hides what it mentions.
                    let Some(at) = hidden.filter(|_| !is_cut) else { break };
                    let rest = self.held.split_off(at);
                    self.end_value(at, parts);
                    self.push(&rest, parts);
                }
                _ => break,
            }
        }
        if is_cut {
            self.drop_begun_marker();
        }
        let rest = std::mem::take(&mut self.held);
        let rest = if self.is_reasoning() { without_gap(&rest) } else { &rest };
        self.emit(rest, parts);
    }

    /// Emits the calls without markers that end the answer. Returns false if the text is no call.
    fn take_bare_calls(&mut self, text: &str, is_cut: bool, parts: &mut Vec<AnswerPart>) -> bool {
        if is_cut {
            return self.keep_whole_calls("", text, parts);
        }
        let calls = parse_calls(text, &self.form.tools);
        calls.map(|calls| self.emit_calls(calls, parts)).is_some()
    }

    /// Emits the calls that are complete, and drops the one that is cut off. Returns false if there is no call: then
    /// the text is text.
    fn keep_whole_calls(&mut self, begin: &str, inside: &str, parts: &mut Vec<AnswerPart>) -> bool {
        let Some(calls) = whole_calls(begin, inside, &self.form.tools) else { return false };
        self.gap.clear();
        self.emit_calls(calls, parts);
        true
    }

    /// Drops the begin of a marker that is cut off.
    fn drop_begun_marker(&mut self) {
        if let State::Closer(_) = self.state {
            self.held.clear();
        }
        if self.form.tools.is_empty() || self.is_reasoning() {
            return;
        }
        let begins = CALLS.map(|markers| markers.begin).into_iter();
        let begun = begins.map(|marker| overlap(&self.held, marker)).max().unwrap_or(0);
        let text = self.held[..self.held.len() - begun].trim_end().len();
        let is_alone = begun > 0 && text == 0 && !self.has_spoken;
        if is_alone || begun >= MARKER_PART_MIN {
            self.held.truncate(text);
        }
    }
}

/// The complete calls of a text that is cut off. `None` if the text is no call.
fn whole_calls(begin: &str, inside: &str, tools: &[Value]) -> Option<Vec<Call>> {
    let text = format!("{begin}{inside}");
    let whole = if ends_open(&text, tools) { None } else { parse_calls(&text, tools) };
    // Of Mistral's calls only the last one can be unfinished.
    let earlier = || parse_calls(&text[..text.rfind(MISTRAL).filter(|_| begin == MISTRAL)?], tools);
    if let Some(calls) = whole.or_else(earlier) {
        return Some(calls);
    }
    if let Some((calls, rest)) = leading_calls(inside, tools) {
        // After whole calls comes another one, or the text explains a call.
        let is_next = may_be_call(rest, tools) || names(tools).any(|name| name.starts_with(rest));
        return is_next.then_some(calls);
    }
    is_begun(&text, tools).then(Vec::new)
}

/// Whether arguments may follow, although the calls can be parsed. Only tags and keys can be parsed without their end.
/// A tool's name alone is not parsed here: its arguments may follow, too.
fn ends_open(calls: &str, tools: &[Value]) -> bool {
    let calls = calls.trim();
    let calls = after(calls, PYTHON_TAG).unwrap_or(calls);
    let has_keys = |name| after(calls, name).is_some_and(|rest| rest.starts_with(KEY));
    // A value without its end may go on after `</function>`, too.
    let is_whole = calls.ends_with(FUNCTION_END) && calls.rfind(PARAMETER) <= calls.rfind(PARAMETER_END);
    calls.starts_with(FUNCTION.begin) && !is_whole || names(tools).any(has_keys)
}

/// Whether a text that may become a call is the begin of one. A JSON object is one if it names a tool, or if the member
/// that decides is cut off. Many values of JSON begin with the key `id`, as some calls do.
fn is_begun(text: &str, tools: &[Value]) -> bool {
    let text = text.trim_start();
    let text = [MISTRAL, PYTHON_TAG].iter().find_map(|marker| after(text, marker)).unwrap_or(text);
    if let Some(function) = text.strip_prefix(FUNCTION.begin) {
        return begins_function(function, tools);
    }
    if !after(text, "[").unwrap_or(text).starts_with('{') {
        return true;
    }
    // No member may go on with this character outside a string. So it decides about a member that is cut off.
    let is_undecided = || may_be_call(text, tools) && !may_be_call(&format!("{text}\u{1}"), tools);
    let mut values = text.split("\"name\"").skip(1).filter_map(|rest| after(rest.trim_start(), ":"));
    let is_name = |value: &str| names(tools).any(|name| value.starts_with(&Value::from(name).to_string()));
    values.any(is_name) || is_undecided()
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
            ("<tool_call>", &format!("\n{json}"), "\n</tool_call>"),
            // The call is whole before its list is.
            ("<|tool_call|>", &format!("[{json}"), "]<|/tool_call|>"),
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
            // Whether or not the call is made, nothing of it or of its end marker is text.
            for at in 1..end.len() {
                let (text, calls) = cut(&format!("{before}{call}{}", &end[..at]), 3);
                assert!(text == "Look:" && calls <= 1, "{call} and {}: {text:?}", &end[..at]);
            }
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
            (r#"{"id": "a", "items": [1"#, r#"{"id": "a", "items": [1"#),
            (r#"{"parameters": {"a": 1"#, r#"{"parameters": {"a": 1"#),
            (r#"{"type": "tool", "x"#, r#"{"type": "tool", "x"#),
            (r#"{"type": "func"#, ""),
            (
                r#"{"type": "function", "function": {"name": "weather""#,
                r#"{"type": "function", "function": {"name": "weather""#,
            ),
            // A string that is no name of a call.
            (
                r#"{"id": "a1", "kind": "weather", "items": [1"#,
                r#"{"id": "a1", "kind": "weather", "items": [1"#,
            ),
            (r#"{"arguments": {"kind": "weather", "x"#, r#"{"arguments": {"kind": "weather", "x"#),
            (r#"{"id": "call_1", "na"#, ""),
            (r#"{"id": "call_1", "name": "weather", "arg"#, ""),
            (r#"[{"arguments": {"city": "B"}, "name": "weather""#, ""),
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

    /// Of calls in JSON, alone or below a name, the whole ones are kept, if nothing but another call follows.
    #[test]
    fn whole_calls_before_one_that_is_cut_off_are_kept() {
        let json = r#"{"name": "weather", "arguments": {"city": "Bern"}}"#;
        for begin in ["<|python_tag|>", "", "<tool_call>"] {
            for gap in ["; ", ",", "\n"] {
                for end in ["", "{", "{\"na", &json[..json.len() - 1]] {
                    check(&format!("{begin}{json}{gap}{end}"), "", 1);
                }
                check(&format!("{begin}{json}{gap}{json}{gap}{{\"name\": \"wea"), "", 2);
            }
            let explained = format!("{begin}{json} is a call, and");
            check(&explained, &explained, 0);
        }
        for begin in ["[TOOL_CALLS][", "<|tool_call|>[", "functools[", "["] {
            for end in ["", ", ", ", {\"na", ", {\"name\": \"weather\", \"arg"] {
                check(&format!("{begin}{json}{end}"), "", 1);
            }
            let explained = format!("{begin}{json}] is a call, and");
            check(&explained, &explained, 0);
        }
        for end in ["", "wea", "weather", "weather\n{\"ci"] {
            check(&format!("weather\n{{}}\n{end}"), "", 1);
        }
        check("weather\n{}\nNow a long text", "weather\n{}\nNow a long text", 0);
    }

    /// The marker after the end of the function counts, and not one in a value that may go on.
    #[test]
    fn a_call_that_lacks_the_end_of_a_parameter_keeps_the_text_after_it() {
        let function = "<function=weather>\n<parameter=city>\nBern\n</function>\n</tool_call>";
        for begin in ["", "<tool_call>\n"] {
            check(&format!("{begin}{function}\nNow a long text"), "Now a long text", 1);
            check(&format!("{begin}{function}\nNow a long text <tool_"), "Now a long text", 1);
        }
        let values = [
            "Bern\n</tool_call>",
            "a </tool_call> b",
            "a\n</function>",
            "a\n</function>\nb",
            "a</parameter>",
        ];
        for value in values {
            check(&format!("<tool_call><function=weather>\n<parameter=city>\n{value}"), "", 0);
            check(&format!("<function=weather>\n<parameter=city>\n{value}"), "", 0);
            check(&format!("<|python_tag|><function=weather>\n<parameter=city>\n{value}"), "", 0);
        }
    }

    /// Only a call is left out, not the text after a marker that the model writes about.
    #[test]
    fn text_after_a_mention_of_a_marker_is_kept() {
        for same in [
            "Use <tool_call> tags, then more",
            "Use [TOOL_CALLS] or <tool_call> and <function=NAME> here",
            "Use <function=NAME> tags",
            "Use <function=weather> tags",
            "Use <tool_call>[sic] and more",
            "Use <tool_call>weather is a tool",
            "Use <tool_call>weather (see below) and",
            "Use <tool_call>weather [1] and",
            "Use <tool_call>weather <b> and",
            "Use <function=NA",
            "Use <function=NAME>",
            // The string that is cut off mentions a call.
            "{\"text\": \"Use <tool_call>weather</tool_call> to ask",
            "{\"id\": \"Use <tool_call>weather</tool_call> to",
            "<tool_call>{\"arguments\": {\"text\": \"see <tool_call>weather</tool_call> an",
            "<function=other>\n<parameter=city>\n<tool_call>weather</tool_call> an",
            "<tool_call>{\"a\": 1, \"b\": [",
            "Use <|python_tag|> so",
            "<tool_call><function=other>\n<parameter=city>",
            "{\"a\": \"<tool_call>\", \"b",
        ] {
            check(same, same, 0);
        }
        check("Use <tool_call> tags:\n<tool_call>{\"name\": \"wea", "Use <tool_call> tags:", 0);
        let twice = "Use <tool_call> or <tool_call> tags:";
        check(&format!("{twice} <tool_call>{{\"name\": \"wea"), twice, 0);
        check("Use <tool_call> tags:\n<tool_ca", "Use <tool_call> tags:", 0);
    }
}
