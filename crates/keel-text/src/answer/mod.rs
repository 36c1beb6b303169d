//! The parts of an answer: reasoning, text and tool calls, told apart as they stream.
//!
//! ```text
//! <think> reasoning </think> text <tool_call> call </tool_call> text ...
//! ```
//!
//! A marker may be cut anywhere between two pieces, so the end of the text that could become one is held back.

mod tool_call;

use serde_json::Value;

use tool_call::parse_call;

const THINK: &str = "<think>";
const THINK_END: &str = "</think>";
const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";
/// What Llama writes before a call; its end is the end of the answer.
const PYTHON_TAG: &str = "<|python_tag|>";

/// Bounds a call that never ends.
const CALL_BYTES_MAX: usize = 1 << 20;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// What the model says to itself.
    Reasoning(String),
    /// What it says.
    Text(String),
    /// A tool that it calls.
    ToolCall {
        /// The tool.
        name: String,
        /// Its arguments, as a JSON object.
        arguments: String,
    },
}

/// What an answer may consist of.
#[derive(Clone, Debug, Default)]
pub struct AnswerForm {
    /// The model marks its reasoning.
    pub reasoning: bool,
    /// The prompt ends inside the reasoning.
    pub begins_in_reasoning: bool,
    /// The tools that may be called, in OpenAI's form; without any, calls are text.
    pub tools: Vec<Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing but white space has come.
    Start,
    Reasoning,
    Text,
    Call,
    /// A call without markers: all that comes is JSON.
    BareCall,
}

/// Takes an answer apart, piece by piece. However it is cut into pieces, the parts of one kind put together are the
/// same. White space around reasoning and before calls is dropped; what looks like a call and is none is text.
#[derive(Clone, Debug)]
pub struct AnswerParser {
    form: AnswerForm,
    state: State,
    /// Text that is not decided yet.
    held: String,
    /// The next text begins a part: its leading white space is dropped.
    at_start: bool,
}

impl AnswerParser {
    /// A parser for one answer.
    pub fn new(form: AnswerForm) -> AnswerParser {
        let state = if form.begins_in_reasoning { State::Reasoning } else { State::Start };
        AnswerParser { at_start: form.begins_in_reasoning, form, state, held: String::new() }
    }

    /// Takes the next piece and adds the parts that it made certain to `parts`.
    pub fn push(&mut self, piece: &str, parts: &mut Vec<AnswerPart>) {
        self.held.push_str(piece);
        while self.advance(parts) {}
    }

    /// Ends the answer and adds what was held back.
    pub fn finish(&mut self, parts: &mut Vec<AnswerPart>) {
        let rest = std::mem::take(&mut self.held);
        match self.state {
            State::Reasoning => self.emit(rest.trim_end(), parts),
            State::Start | State::Text => self.emit(&rest, parts),
            State::Call => self.end_call(&rest, &format!("{CALL}{rest}"), parts),
            State::BareCall => {
                let call = rest.trim().trim_start_matches(PYTHON_TAG);
                self.end_call(call, &rest, parts);
            }
        }
    }

    /// Whether what comes next belongs to the reasoning.
    pub fn is_reasoning(&self) -> bool {
        self.state == State::Reasoning
    }

    /// Takes one decision; false if more text is needed for the next.
    fn advance(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        match self.state {
            State::Start => self.begin(),
            State::Reasoning => self.until(THINK_END, State::Text, parts),
            State::Text if self.form.tools.is_empty() => {
                let text = std::mem::take(&mut self.held);
                self.emit(&text, parts);
                false
            }
            State::Text => self.until(CALL, State::Call, parts),
            State::Call => self.collect_call(parts),
            State::BareCall => false,
        }
    }

    /// Decides how the answer begins.
    fn begin(&mut self) -> bool {
        let text = self.held.trim_start();
        let could_be = |marker: &str| marker.starts_with(text) || text.starts_with(marker);
        let (thinks, calls) = (self.form.reasoning, !self.form.tools.is_empty());
        if thinks && could_be(THINK) {
            if !text.starts_with(THINK) {
                return false;
            }
            self.held = text[THINK.len()..].to_string();
            (self.state, self.at_start) = (State::Reasoning, true);
        } else if calls && (could_be(PYTHON_TAG) || could_be("{")) {
            if !text.starts_with(PYTHON_TAG) && !text.starts_with('{') {
                return false;
            }
            self.state = State::BareCall;
        } else {
            self.state = State::Text;
        }
        true
    }

    /// Emits text up to a marker, or as far as no marker can begin.
    fn until(&mut self, marker: &str, next: State, parts: &mut Vec<AnswerPart>) -> bool {
        if let Some(at) = self.held.find(marker) {
            let text = self.held[..at].trim_end().to_string();
            self.held.drain(..at + marker.len());
            self.emit(&text, parts);
            (self.state, self.at_start) = (next, true);
            return true;
        }
        let undecided = self.held.len() - overlap(&self.held, marker);
        let certain = self.held[..undecided].trim_end().len();
        let text: String = self.held.drain(..certain).collect();
        self.emit(&text, parts);
        false
    }

    fn collect_call(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        let Some(at) = self.held.find(CALL_END) else {
            if self.held.len() > CALL_BYTES_MAX {
                let text = format!("{CALL}{}", std::mem::take(&mut self.held));
                self.state = State::Text;
                self.emit(&text, parts);
            }
            return false;
        };
        let call: String = self.held.drain(..at + CALL_END.len()).collect();
        self.state = State::Text;
        self.end_call(&call[..at], &format!("{CALL}{call}"), parts);
        true
    }

    fn end_call(&mut self, call: &str, verbatim: &str, parts: &mut Vec<AnswerPart>) {
        match parse_call(call, &self.form.tools) {
            Some((name, arguments)) => {
                self.at_start = true;
                parts.push(AnswerPart::ToolCall { name, arguments });
            }
            None => self.emit(verbatim, parts),
        }
    }

    fn emit(&mut self, text: &str, parts: &mut Vec<AnswerPart>) {
        let text = if self.at_start { text.trim_start() } else { text };
        if text.is_empty() {
            return;
        }
        self.at_start = false;
        parts.push(match self.state {
            State::Reasoning => AnswerPart::Reasoning(text.into()),
            _ => AnswerPart::Text(text.into()),
        });
    }
}

/// Length of the longest end of `text` that `marker` begins with.
fn overlap(text: &str, marker: &str) -> usize {
    (1..marker.len()).rev().find(|&n| text.ends_with(&marker[..n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tools() -> Vec<Value> {
        vec![json!({"type": "function", "function": {"name": "weather", "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}})]
    }

    /// Parts of an answer given in pieces of `size` characters, neighbours of one kind joined.
    fn parts(form: &AnswerForm, answer: &str, size: usize) -> Vec<AnswerPart> {
        let mut parser = AnswerParser::new(form.clone());
        let (mut all, chars) = (Vec::new(), answer.chars().collect::<Vec<_>>());
        for piece in chars.chunks(size) {
            parser.push(&piece.iter().collect::<String>(), &mut all);
        }
        parser.finish(&mut all);
        let mut joined: Vec<AnswerPart> = Vec::new();
        for part in all {
            match (joined.last_mut(), part) {
                (Some(AnswerPart::Text(a)), AnswerPart::Text(b))
                | (Some(AnswerPart::Reasoning(a)), AnswerPart::Reasoning(b)) => a.push_str(&b),
                (_, part) => joined.push(part),
            }
        }
        joined
    }

    fn check(form: &AnswerForm, answer: &str, expected: &[AnswerPart]) {
        for size in [1, 2, 3, 7, 1000] {
            assert_eq!(parts(form, answer, size), expected, "{answer:?} in pieces of {size}");
        }
    }

    fn text(text: &str) -> AnswerPart {
        AnswerPart::Text(text.into())
    }

    fn call(arguments: &str) -> AnswerPart {
        AnswerPart::ToolCall { name: "weather".into(), arguments: arguments.into() }
    }

    #[test]
    fn reasoning_is_separated() {
        let form = AnswerForm { reasoning: true, ..AnswerForm::default() };
        let expected = [AnswerPart::Reasoning("Hm.\nYes <b>".into()), text("So: yes. <think>")];
        check(&form, "<think>\nHm.\nYes <b>\n</think>\n\nSo: yes. <think>", &expected);
        let inside = AnswerForm { begins_in_reasoning: true, ..form.clone() };
        check(&inside, "Hm.\nYes <b>\n</think>\n\nSo: yes. <think>", &expected);
        check(&form, " plain <tool_call>", &[text(" plain <tool_call>")]);
        check(&inside, "never ends", &[AnswerPart::Reasoning("never ends".into())]);
        check(&AnswerForm::default(), "<think>a</think>", &[text("<think>a</think>")]);
    }

    #[test]
    fn calls_come_in_both_notations() {
        let form = AnswerForm { tools: tools(), ..AnswerForm::default() };
        let json = r#"Look: <tool_call>
{"name": "weather", "arguments": {"city": "Bern", "days": 2}}
</tool_call>"#;
        check(&form, json, &[text("Look:"), call(r#"{"city":"Bern","days":2}"#)]);
        let xml = "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n2\n\
                   </parameter>\n</function>\n</tool_call>\n<tool_call>{\"name\":\"weather\",\"arguments\":{}}</tool_call>";
        check(&form, xml, &[call(r#"{"city":"12","days":2}"#), call("{}")]);
        let bare = r#"{"name": "weather", "parameters": {"city": "Bern"}}"#;
        check(&form, bare, &[call(r#"{"city":"Bern"}"#)]);
        check(&form, &format!("<|python_tag|>{bare}"), &[call(r#"{"city":"Bern"}"#)]);
    }

    #[test]
    fn what_is_no_call_is_text() {
        let form = AnswerForm { tools: tools(), ..AnswerForm::default() };
        for answer in [
            "<tool_call>nonsense</tool_call>",
            "<tool_call>{\"name\": \"other\", \"arguments\": {}}</tool_call>",
            "<tool_call>{\"name\": \"weather\"",
            "{\"a\": 1}",
            "a < b and <tool",
        ] {
            check(&form, answer, &[text(answer)]);
        }
        check(&AnswerForm::default(), "<tool_call>x</tool_call>", &[text("<tool_call>x</tool_call>")]);
    }
}
