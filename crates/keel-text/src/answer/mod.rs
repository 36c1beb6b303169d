//! Splits an answer into its parts while it streams: reasoning, text and tool calls.
//!
//! ```text
//! <think> reasoning </think> text <tool_call> call </tool_call> text ...
//! ```
//!
//! A marker may be split between two pieces. The parser therefore holds back the end of the text while it could become
//! a marker. `markers.rs` lists the markers that models use, `tool_call.rs` the notations of calls.

mod cut;
mod markers;
mod pythonic;
mod tool_call;

use serde_json::Value;

use crate::Tokenizer;

pub(crate) use markers::SHOWN;
use markers::{CALLS, FUNCTOOLS, Markers, PYTHON_TAG, REASONING, overlap};
use tool_call::{names, parse_calls};

/// Bounds the memory for a call that never ends.
const CALL_BYTES_MAX: usize = 1 << 20;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// Reasoning of the model, not meant for the user.
    Reasoning(String),
    /// Text for the user.
    Text(String),
    /// A call of a tool.
    ToolCall {
        /// The tool's name.
        name: String,
        /// The arguments: a JSON object as text.
        arguments: String,
    },
}

/// The parts that an answer may have.
#[derive(Clone, Debug, Default)]
pub struct AnswerForm {
    /// The model marks its reasoning.
    pub reasoning: bool,
    /// The prompt ends inside the reasoning.
    pub begins_in_reasoning: bool,
    /// The tools that may be called, in OpenAI's form. Without tools, calls are text.
    pub tools: Vec<Value>,
    /// A grammar allows calls only between markers. A JSON value is then a value, also if it looks like a call.
    pub marked_calls: bool,
}

impl AnswerForm {
    /// Whether the answer may have parts other than text.
    pub fn has_parts(&self) -> bool {
        self.reasoning || self.begins_in_reasoning || !self.tools.is_empty()
    }

    /// Whether a prompt that ends with `tail` ends inside the reasoning.
    pub fn is_in_reasoning(tail: &str) -> bool {
        REASONING.iter().any(|markers| tail.trim_end().ends_with(markers.begin))
    }

    /// The token that ends the model's reasoning. `None` if the model does not mark its reasoning.
    pub fn reasoning_end(tokenizer: &Tokenizer) -> Option<u32> {
        REASONING.iter().filter_map(|markers| tokenizer.token_to_id(markers.end?)).next()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Only white space so far.
    Start,
    Reasoning,
    Text,
    /// Inside a call, between these markers.
    Call(Markers),
    /// Calls without markers: everything to the end of the answer.
    BareCall,
}

/// Splits an answer into parts, piece by piece. How the text is cut into pieces does not change the parts, once
/// neighbours of one kind are joined. The parser drops white space around reasoning and before calls. A malformed call
/// becomes text; one that the limit of tokens cuts off is left out ([`AnswerParser::cut_off`]).
#[derive(Clone, Debug)]
pub struct AnswerParser {
    form: AnswerForm,
    state: State,
    /// Text whose part is not decided yet.
    held: String,
    /// The next text begins a part, so its leading white space is dropped.
    at_start: bool,
    /// Text or reasoning came since the answer began, or since its last call.
    has_spoken: bool,
}

impl AnswerParser {
    /// Creates a parser for one answer.
    pub fn new(form: AnswerForm) -> AnswerParser {
        let state = if form.begins_in_reasoning { State::Reasoning } else { State::Start };
        AnswerParser {
            at_start: form.begins_in_reasoning,
            form,
            state,
            held: String::new(),
            has_spoken: false,
        }
    }

    /// Takes the next piece and appends the parts that are now certain to `parts`.
    pub fn push(&mut self, piece: &str, parts: &mut Vec<AnswerPart>) {
        self.held.push_str(piece);
        while self.advance(parts) {}
    }

    /// Ends the answer and appends the text that was held back.
    pub fn finish(&mut self, parts: &mut Vec<AnswerPart>) {
        let rest = std::mem::take(&mut self.held);
        match self.state {
            State::Reasoning => self.emit(rest.trim_end(), parts),
            State::Start | State::Text => self.emit(&rest, parts),
            State::Call(Markers { begin, end }) => {
                let verbatim = format!("{begin}{rest}");
                // The notation of such calls depends on the begin marker, so `parse_calls` needs it.
                let calls = if end.is_none() { &verbatim } else { &rest };
                self.end_call(calls, &verbatim, parts);
            }
            State::BareCall => self.end_call(&rest, &rest, parts),
        }
    }

    /// Whether the next text belongs to the reasoning.
    pub fn is_reasoning(&self) -> bool {
        self.state == State::Reasoning
    }

    /// Makes one decision. Returns false if the next decision needs more text.
    fn advance(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        match self.state {
            State::Start => self.begin(),
            State::Reasoning => {
                let ends = REASONING.map(|markers| (markers.end.unwrap_or_default(), State::Text));
                self.until(&ends, parts)
            }
            State::Text if self.form.tools.is_empty() => {
                let text = std::mem::take(&mut self.held);
                self.emit(&text, parts);
                false
            }
            State::Text => self.until(&CALLS.map(|markers| (markers.begin, State::Call(markers))), parts),
            State::Call(Markers { begin, end: Some(end) }) => self.collect_call(begin, end, parts),
            State::Call(Markers { begin, end: None }) => self.bound_call(begin, parts),
            State::BareCall => self.bound_call("", parts),
        }
    }

    /// Decides which part the answer begins with.
    fn begin(&mut self) -> bool {
        let text = self.held.trim_start();
        let could_be = |marker: &str| marker.starts_with(text) || text.starts_with(marker);
        let (thinks, calls) = (self.form.reasoning, !self.form.tools.is_empty() && !self.form.marked_calls);
        if thinks && REASONING.iter().any(|markers| could_be(markers.begin)) {
            let Some(begun) = REASONING.iter().find_map(|markers| text.strip_prefix(markers.begin)) else {
                return false;
            };
            self.held = begun.to_string();
            (self.state, self.at_start) = (State::Reasoning, true);
            return true;
        }
        // GLM-4 writes the tool's name on a line of its own.
        let lines = names(&self.form.tools).map(|name| format!("{name}\n"));
        let bare: Vec<String> =
            [PYTHON_TAG, FUNCTOOLS, "{", "[{"].map(String::from).into_iter().chain(lines).collect();
        if calls && bare.iter().any(|marker| could_be(marker)) {
            if !bare.iter().any(|marker| text.starts_with(marker.as_str())) {
                return false;
            }
            self.state = State::BareCall;
        } else {
            self.state = State::Text;
        }
        true
    }

    /// Emits text up to the first of `markers`. If there is none, emits the text in which none of them can begin.
    fn until(&mut self, markers: &[(&str, State)], parts: &mut Vec<AnswerPart>) -> bool {
        let found = markers.iter().filter_map(|(marker, next)| Some((self.held.find(marker)?, marker, next)));
        if let Some((at, marker, next)) = found.min_by_key(|(at, ..)| *at) {
            let text = self.held[..at].trim_end().to_string();
            self.held.drain(..at + marker.len());
            self.emit(&text, parts);
            (self.state, self.at_start) = (*next, true);
            return true;
        }
        let begun = markers.iter().map(|(marker, _)| overlap(&self.held, marker)).max().unwrap_or(0);
        let certain = self.held[..self.held.len() - begun].trim_end().len();
        let text: String = self.held.drain(..certain).collect();
        self.emit(&text, parts);
        false
    }

    fn collect_call(&mut self, begin: &str, end: &str, parts: &mut Vec<AnswerPart>) -> bool {
        let Some(at) = self.held.find(end) else { return self.bound_call(begin, parts) };
        let call: String = self.held.drain(..at + end.len()).collect();
        self.state = State::Text;
        self.end_call(&call[..at], &format!("{begin}{call}"), parts);
        true
    }

    /// Treats a call as text once it is too long to be a call.
    fn bound_call(&mut self, begin: &str, parts: &mut Vec<AnswerPart>) -> bool {
        if self.held.len() > CALL_BYTES_MAX {
            let text = format!("{begin}{}", std::mem::take(&mut self.held));
            self.state = State::Text;
            self.emit(&text, parts);
        }
        false
    }

    fn end_call(&mut self, calls: &str, verbatim: &str, parts: &mut Vec<AnswerPart>) {
        match parse_calls(calls, &self.form.tools) {
            Some(calls) => {
                (self.at_start, self.has_spoken) = (true, false);
                parts.extend(
                    calls.into_iter().map(|(name, arguments)| AnswerPart::ToolCall { name, arguments }),
                );
            }
            None => self.emit(verbatim, parts),
        }
    }

    fn emit(&mut self, text: &str, parts: &mut Vec<AnswerPart>) {
        let text = if self.at_start { text.trim_start() } else { text };
        if text.is_empty() {
            return;
        }
        (self.at_start, self.has_spoken) = (false, true);
        parts.push(match self.state {
            State::Reasoning => AnswerPart::Reasoning(text.into()),
            _ => AnswerPart::Text(text.into()),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tools() -> Vec<Value> {
        vec![json!({"type": "function", "function": {"name": "weather", "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}})]
    }

    /// The parts of an answer that arrives in pieces of `size` characters. Neighbours of one kind are joined.
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
        let marked = AnswerForm { marked_calls: true, ..form };
        check(&marked, bare, &[text(bare)]);
        check(&marked, json, &[text("Look:"), call(r#"{"city":"Bern","days":2}"#)]);
    }

    #[test]
    fn a_value_without_quotes_has_a_type_that_the_schema_allows() {
        let properties = json!({
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "list": {"type": ["string", "null"]},
            "code": {"enum": ["1", "2"]},
            "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "open": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Place"}]},
            "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        });
        let tool = json!({"function": {"name": "weather", "parameters": {"properties": properties}}});
        let form = AnswerForm { tools: vec![tool], ..AnswerForm::default() };
        for (key, value, expected) in [
            ("maybe", "12", json!("12")),
            ("maybe", "true", json!("true")),
            ("maybe", "null", json!(null)),
            ("maybe", "\"a\"", json!("\"a\"")),
            ("list", "1.50", json!("1.50")),
            ("list", "null", json!(null)),
            ("code", "1", json!("1")),
            ("either", "12", json!(12)),
            ("either", "[12]", json!("[12]")),
            ("open", "{\"a\":1}", json!({"a": 1})),
            ("count", "12", json!(12)),
            ("unknown", "12", json!(12)),
        ] {
            let expected = json!({ key: expected }).to_string();
            let tags = format!("<function=weather>\n<parameter={key}>\n{value}\n</parameter>\n</function>");
            let keys = format!("weather\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>");
            for notation in [tags, keys] {
                check(&form, &format!("<tool_call>{notation}</tool_call>"), &[call(&expected)]);
            }
        }
    }

    /// The answers are written as the models' chat templates write calls, because models answer in that form.
    #[test]
    fn calls_come_in_the_notations_of_many_houses() {
        let form = AnswerForm { tools: tools(), ..AnswerForm::default() };
        let both = [call(r#"{"city":"Bern","days":2}"#), call("{\"city\":\"Z\u{fc}rich\"}")];
        let (first, second) = (r#"{"city": "Bern", "days": 2}"#, "{\"city\": \"Z\u{fc}rich\"}");
        let named = |arguments: &str| format!(r#"{{"name": "weather", "arguments": {arguments}}}"#);
        let list = format!("[{}, {}]", named(first), named(second));
        for (who, answer) in [
            ("Mistral 7B v0.3, Nemo, Small 3", format!("[TOOL_CALLS]{list}")),
            ("the same with a space", format!("[TOOL_CALLS] {list}")),
            ("Mistral Small 3.2, Ministral 3", format!("[TOOL_CALLS]weather[ARGS]{first}[TOOL_CALLS]weather[ARGS]{second}")),
            ("Devstral", format!("[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{first}[TOOL_CALLS]weather{second}")),
            ("SmolLM3", format!("<tool_call>{}</tool_call>\n<tool_call>{}</tool_call>", named(first), named(second))),
            ("Phi-4-mini", format!("<|tool_call|>{list}<|/tool_call|>")),
            ("Phi-4-mini without its tokens", format!("functools{list}")),
            ("GLM-4", format!("weather\n{first}\nweather\n{second}")),
            (
                "GLM-4.5",
                "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n\
                 <arg_value>2</arg_value>\n</tool_call>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>\
                 Z\u{fc}rich</arg_value>\n</tool_call>"
                    .to_string(),
            ),
            (
                "OLMo 3",
                "<function_calls>weather(city=\"Bern\", days=2)\nweather(city='Z\\xfcrich')</function_calls>".to_string(),
            ),
        ] {
            println!("{who}");
            check(&form, &answer, &both);
        }
        let spoken = "Let me see.[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {}}]";
        check(&form, spoken, &[text("Let me see."), call("{}")]);
    }

    #[test]
    fn mistral_marks_its_reasoning_otherwise() {
        let form = AnswerForm { reasoning: true, ..AnswerForm::default() };
        check(&form, "[THINK]Hm.[/THINK]Yes.", &[AnswerPart::Reasoning("Hm.".into()), text("Yes.")]);
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
            "[TOOL_CALLS]weather",
            "[TOOL_CALLS][{\"name\": \"other\"}]",
            "weather\nis nice",
            "weather",
            "[{\"a\": 1}]",
            "functools[1]",
            "<function_calls>weather(city=home())</function_calls>",
            "<|tool_call|>[]<|/tool_call|>",
        ] {
            check(&form, answer, &[text(answer)]);
        }
        check(&AnswerForm::default(), "<tool_call>x</tool_call>", &[text("<tool_call>x</tool_call>")]);
    }
}
