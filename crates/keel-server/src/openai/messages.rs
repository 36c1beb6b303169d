//! Converts OpenAI's messages to the form for chat templates.

use keel_text::Message;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::error::{Result, wrong};

/// A message of a conversation.
#[derive(Debug, Deserialize)]
pub(crate) struct ChatMessage {
    role: String,
    #[serde(default)]
    content: Content,
    #[serde(default)]
    tool_calls: Option<Vec<Value>>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(untagged)]
enum Content {
    #[default]
    None,
    Text(String),
    Parts(Vec<Map<String, Value>>),
}

/// Converts the messages. Text parts are joined, and the arguments of calls become objects, because templates iterate
/// over them.
pub(crate) fn to_template(messages: Vec<ChatMessage>) -> Result<Vec<Message>> {
    messages.into_iter().map(one).collect()
}

fn one(message: ChatMessage) -> Result<Message> {
    let role = match message.role.as_str() {
        "developer" => "system",
        "function" => "tool",
        role @ ("system" | "user" | "assistant" | "tool") => role,
        other => return Err(wrong("messages", format!("there is no role {other:?}"))),
    };
    let mut extra = Map::new();
    for key in ["name", "tool_call_id", "reasoning_content"] {
        extra.extend(message.rest.get(key).filter(|v| v.is_string()).map(|v| (key.to_string(), v.clone())));
    }
    if let Some(calls) = message.tool_calls.filter(|calls| !calls.is_empty()) {
        let calls = calls.into_iter().map(call).collect::<Result<Vec<_>>>()?;
        extra.insert("tool_calls".into(), Value::Array(calls));
    }
    Ok(Message { role: role.into(), content: Value::String(text(message.content)?), extra })
}

fn text(content: Content) -> Result<String> {
    match content {
        Content::None => Ok(String::new()),
        Content::Text(text) => Ok(text),
        Content::Parts(parts) => parts.iter().map(part).collect(),
    }
}

fn part(part: &Map<String, Value>) -> Result<String> {
    let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
    match (kind, part.get("text").or(part.get("refusal")).and_then(Value::as_str)) {
        ("text" | "input_text" | "output_text" | "refusal", Some(text)) => Ok(text.to_string()),
        _ => Err(wrong("messages", format!("a part of type {kind:?}: this model reads text alone"))),
    }
}

fn call(call: Value) -> Result<Value> {
    let function = &call["function"];
    let Some(name) = function["name"].as_str() else {
        return Err(wrong("messages", "a tool call has no function name"));
    };
    let arguments = match &function["arguments"] {
        Value::String(text) => serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.clone())),
        Value::Null => json!({}),
        other => other.clone(),
    };
    Ok(json!({"type": "function", "id": call["id"], "function": {"name": name, "arguments": arguments}}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(json: Value) -> Result<Vec<Message>> {
        to_template(serde_json::from_value(json).expect("the types are right"))
    }

    #[test]
    fn parts_are_joined_and_arguments_opened() {
        let messages = template(json!([
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ]))
        .expect("right");
        assert_eq!((messages[0].role.as_str(), &messages[0].content), ("system", &json!("ab")));
        assert_eq!(messages[1].content, "");
        assert_eq!(messages[1].extra["tool_calls"][0]["function"]["arguments"]["x"], 1);
        assert_eq!(messages[2].extra["tool_call_id"], "1");
    }

    #[test]
    fn what_the_model_cannot_read_is_refused() {
        for message in [
            json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
            json!({"role": "robot", "content": "x"}),
            json!({"role": "assistant", "tool_calls": [{"function": {}}]}),
        ] {
            assert_eq!(template(json!([message])).expect_err("wrong").field(), Some("messages"));
        }
    }
}
