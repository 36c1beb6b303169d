//! The input of a rendering: messages and the template's variables.

use std::time::SystemTime;

use serde::Serialize;
use serde_json::{Map, Value};

/// One message of a conversation, as templates see it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Message {
    /// The speaker: `system`, `user`, `assistant` or `tool`. Templates refuse roles that they do not know.
    pub role: String,
    /// A string, or a list of parts such as `{"type": "text", "text": "..."}`.
    pub content: Value,
    /// Further fields, such as `tool_calls` or `reasoning_content`.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Message {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, text: impl Into<String>) -> Self {
        Message { role: role.into(), content: Value::String(text.into()), extra: Map::new() }
    }
}

/// A conversation to render.
#[derive(Clone, Copy, Debug)]
pub struct ChatRequest<'a> {
    /// The conversation so far.
    pub messages: &'a [Message],
    /// Whether the prompt ends with the opening of the assistant's turn. The default is true.
    pub add_generation_prompt: bool,
    /// Tool definitions, in the form the template expects.
    pub tools: Option<&'a [Value]>,
    /// Variables of the template, such as `enable_thinking`.
    pub variables: Option<&'a Map<String, Value>>,
    /// The time that `strftime_now` formats, in UTC.
    pub now: SystemTime,
}

impl<'a> ChatRequest<'a> {
    /// A conversation to be answered, without tools and variables, at the current time.
    pub fn new(messages: &'a [Message]) -> Self {
        let now = SystemTime::now();
        ChatRequest { messages, add_generation_prompt: true, tools: None, variables: None, now }
    }
}
