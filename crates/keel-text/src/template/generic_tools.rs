//! Tools for templates that have no place for them.
//!
//! Such a template would leave out the tools, the calls and their results, and the model would never see them. So they
//! become text of the messages, in the notation of Hermes, which most models know and [`AnswerParser`] reads:
//!
//! - the tools are a part of the system message, which is added where there is none;
//! - a call is text of the assistant's message;
//! - results that follow each other are one message of the user. A message of the user next to them is part of it,
//!   because some templates refuse two turns of the user in a row.
//!
//! [`AnswerParser`]: crate::AnswerParser

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use super::{ChatRequest, Message};

const SYSTEM: &str = "system";
const USER: &str = "user";
const TOOL: &str = "tool";
const TOOL_CALLS: &str = "tool_calls";

/// The messages with tools, calls and results as text. Borrowed if there is nothing of these.
pub(super) fn as_text<'a>(request: &ChatRequest<'a>) -> Cow<'a, [Message]> {
    let tools = request.tools.filter(|tools| !tools.is_empty());
    let has_calls = |message: &Message| message.role == TOOL || message.extra.contains_key(TOOL_CALLS);
    if tools.is_none() && !request.messages.iter().any(has_calls) {
        return Cow::Borrowed(request.messages);
    }
    let mut messages: Vec<Message> = Vec::with_capacity(request.messages.len() + 1);
    // Whether the last message has results.
    let mut has_results = false;
    for message in request.messages {
        let is_result = message.role == TOOL;
        let last = messages.last_mut().filter(|last| last.role == USER);
        match last {
            Some(user) if is_result => append(user, &result(message)),
            Some(results) if has_results && message.role == USER => join(results, &message.content),
            _ => {
                messages.push(plain(message));
                has_results = false;
            }
        }
        has_results |= is_result;
    }
    if let Some(tools) = tools {
        if messages.first().is_none_or(|first| first.role != SYSTEM) {
            messages.insert(0, Message::new(SYSTEM, ""));
        }
        append(&mut messages[0], &description(tools));
    }
    Cow::Owned(messages)
}

/// The message without fields about calls.
fn plain(message: &Message) -> Message {
    if message.role == TOOL {
        return Message::new(USER, result(message));
    }
    let mut message = message.clone();
    let Some(calls) = message.extra.shift_remove(TOOL_CALLS) else { return message };
    for call in calls.as_array().into_iter().flatten() {
        append(&mut message, &call_text(call));
    }
    message
}

fn description(tools: &[Value]) -> String {
    let tools: Vec<String> = tools.iter().map(Value::to_string).collect();
    format!(
        "You can call these functions. Each line is one function, and \"parameters\" is the JSON schema of its \
         arguments:\n<tools>\n{}\n</tools>\nFor each call, answer with a JSON object between these markers:\n\
         <tool_call>\n{{\"name\": <name of the function>, \"arguments\": <object of its arguments>}}\n</tool_call>\n\
         The result of a call follows between <tool_response> and </tool_response>.",
        tools.join("\n")
    )
}

/// A call as the model would have written it. Arguments may be an object, or an object as text.
fn call_text(call: &Value) -> String {
    let function = call.get("function").unwrap_or(call);
    let arguments = match &function["arguments"] {
        Value::Null => Value::Object(Map::new()),
        Value::String(text) => serde_json::from_str(text).unwrap_or_else(|_| json!(text)),
        arguments => arguments.clone(),
    };
    format!("<tool_call>\n{{\"name\": {}, \"arguments\": {arguments}}}\n</tool_call>", function["name"])
}

fn result(message: &Message) -> String {
    format!("<tool_response>\n{}\n</tool_response>", text_of(&message.content))
}

/// The text of a message's content, without other parts.
fn text_of(content: &Value) -> Cow<'_, str> {
    match content {
        Value::String(text) => Cow::Borrowed(text),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        Value::Null => Cow::Borrowed(""),
        other => Cow::Owned(other.to_string()),
    }
}

/// Appends a paragraph to the content of a message.
fn append(message: &mut Message, text: &str) {
    match &mut message.content {
        Value::Array(parts) => {
            let gap = if parts.is_empty() { "" } else { "\n" };
            parts.push(json!({"type": "text", "text": format!("{gap}{text}")}));
        }
        content => {
            let before = text_of(content);
            let gap = if before.is_empty() { "" } else { "\n" };
            *content = Value::String(format!("{before}{gap}{text}"));
        }
    }
}

/// Appends the content of another message. Its parts stay parts.
fn join(message: &mut Message, content: &Value) {
    let Value::Array(more) = content else {
        append(message, &text_of(content));
        return;
    };
    if !message.content.is_array() {
        message.content = json!([{"type": "text", "text": text_of(&message.content)}]);
    }
    let Value::Array(parts) = &mut message.content else { return };
    for (n, part) in more.iter().enumerate() {
        let mut part = part.clone();
        if let Some(text) = part["text"].as_str().filter(|_| n == 0) {
            part["text"] = Value::String(format!("\n{text}"));
        }
        parts.push(part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(role: &str, content: Value, extra: Value) -> Message {
        let Value::Object(extra) = extra else { panic!("an object") };
        Message { role: role.into(), content, extra }
    }

    fn contents(messages: &[Message], tools: Option<&[Value]>) -> Vec<(String, Value)> {
        let request = ChatRequest { tools, ..ChatRequest::new(messages) };
        let messages = as_text(&request).into_owned();
        messages.into_iter().map(|message| (message.role, message.content)).collect()
    }

    #[test]
    fn tools_are_part_of_the_system_message() {
        let tools =
            [json!({"type": "function", "function": {"name": "f"}}), json!({"function": {"name": "g"}})];
        let user = Message::new("user", "Hi");
        let added = contents(std::slice::from_ref(&user), Some(&tools));
        let text = added[0].1.as_str().expect("text");
        assert!(added[0].0 == "system" && added[1] == ("user".into(), json!("Hi")));
        assert!(text.contains("<tools>\n{\"type\":\"function\""), "{text}");
        assert!(text.contains("}\n{\"function\":{\"name\":\"g\"}}\n</tools>"), "{text}");
        let given = contents(&[Message::new("system", "Be kind."), user.clone()], Some(&tools));
        assert_eq!(given[0].1, json!(format!("Be kind.\n{text}")));
        let parts = with("system", json!([{"type": "text", "text": "Be kind."}]), json!({}));
        let parts = contents(&[parts, user.clone()], Some(&tools));
        assert_eq!(parts[0].1[1]["text"], json!(format!("\n{text}")));
        for none in [None, Some(&[][..])] {
            let messages = [user.clone()];
            let request = ChatRequest { tools: none, ..ChatRequest::new(&messages) };
            assert!(matches!(as_text(&request), Cow::Borrowed(_)));
        }
    }

    #[test]
    fn calls_and_results_are_text() {
        let calls = json!({"tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}},
            {"id": "2", "function": {"name": "g", "arguments": {"b": [2]}}},
            {"id": "3", "function": {"name": "h"}},
        ]});
        let messages = [
            Message::new("user", "Go."),
            with("assistant", Value::Null, calls),
            with("tool", json!("one"), json!({"tool_call_id": "1"})),
            with("tool", json!([{"type": "text", "text": "two"}]), json!({"tool_call_id": "2"})),
            Message::new("assistant", "Done."),
            with("tool", json!("late"), json!({})),
        ];
        let call = |body: &str| format!("<tool_call>\n{body}\n</tool_call>");
        let calls = [
            call(r#"{"name": "f", "arguments": {"a":1}}"#),
            call(r#"{"name": "g", "arguments": {"b":[2]}}"#),
            call(r#"{"name": "h", "arguments": {}}"#),
        ];
        let response = |text: &str| format!("<tool_response>\n{text}\n</tool_response>");
        let expected = [
            ("user", "Go.".to_string()),
            ("assistant", calls.join("\n")),
            ("user", [response("one"), response("two")].join("\n")),
            ("assistant", "Done.".to_string()),
            ("user", response("late")),
        ];
        let expected = expected.map(|(role, text)| (role.to_string(), Value::String(text)));
        assert_eq!(contents(&messages, None), expected);
    }

    #[test]
    fn results_and_the_users_message_are_one_turn() {
        let user = |text: &str| Message::new("user", text);
        let tool = |text: &str| with("tool", json!(text), json!({}));
        let response = |text: &str| format!("<tool_response>\n{text}\n</tool_response>");
        let said = contents(&[tool("one"), tool("two"), user("And?"), user("So?")], None);
        let turn = format!("{}\n{}\nAnd?\nSo?", response("one"), response("two"));
        assert_eq!(said, [("user".to_string(), json!(turn))]);
        let said = contents(&[user("a"), user("Go."), tool("one"), user("And?")], None);
        let turn = format!("Go.\n{}\nAnd?", response("one"));
        assert_eq!(said, [("user".to_string(), json!("a")), ("user".to_string(), json!(turn))]);
        // Parts, such as pictures, stay parts.
        let parts = json!([{"type": "text", "text": "And?"}, {"type": "image"}]);
        let said = contents(&[tool("one"), with("user", parts, json!({})), tool("two")], None);
        let expected = json!([
            {"type": "text", "text": response("one")},
            {"type": "text", "text": "\nAnd?"},
            {"type": "image"},
            {"type": "text", "text": format!("\n{}", response("two"))},
        ]);
        assert_eq!(said, [("user".to_string(), expected)]);
    }
}
