//! The messages between the two processes: one JSON value per line. The first has the templates, each further one a
//! conversation.

use std::borrow::Cow;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::super::source::Sources;
use super::super::{ChatRequest, Message};
use crate::{SpecialTokens, TextError};

/// The templates, and the checkpoint's values for them.
#[derive(Serialize, Deserialize)]
pub(super) struct Setup {
    default: Option<String>,
    tool_use: Option<String>,
    bos: Option<String>,
    eos: Option<String>,
    pad: Option<String>,
    unk: Option<String>,
}

impl Setup {
    pub(super) fn new(sources: Sources, special: SpecialTokens) -> Setup {
        let SpecialTokens { bos, eos, pad, unk, .. } = special;
        Setup { default: sources.default, tool_use: sources.tool_use, bos, eos, pad, unk }
    }

    pub(super) fn into_parts(self) -> (Sources, SpecialTokens) {
        let Setup { default, tool_use, bos, eos, pad, unk } = self;
        (Sources { default, tool_use }, SpecialTokens { bos, eos, pad, unk, add_bos: None })
    }
}

/// A conversation.
#[derive(Serialize, Deserialize)]
pub(super) struct Ask<'a> {
    messages: Vec<Said<'a>>,
    add_generation_prompt: bool,
    tools: Option<Cow<'a, [Value]>>,
    variables: Option<Cow<'a, Map<String, Value>>>,
    now: SystemTime,
}

/// A message. The further fields are not flattened, so that none of them can replace role or content.
#[derive(Serialize, Deserialize)]
struct Said<'a> {
    role: Cow<'a, str>,
    content: Cow<'a, Value>,
    extra: Cow<'a, Map<String, Value>>,
}

impl<'a> Ask<'a> {
    pub(super) fn new(request: &ChatRequest<'a>) -> Ask<'a> {
        let said = |message: &'a Message| Said {
            role: Cow::Borrowed(&message.role),
            content: Cow::Borrowed(&message.content),
            extra: Cow::Borrowed(&message.extra),
        };
        Ask {
            messages: request.messages.iter().map(said).collect(),
            add_generation_prompt: request.add_generation_prompt,
            tools: request.tools.map(Cow::Borrowed),
            variables: request.variables.map(Cow::Borrowed),
            now: request.now,
        }
    }

    /// Calls `use_it` with the conversation.
    pub(super) fn with_request<T>(self, use_it: impl FnOnce(&ChatRequest<'_>) -> T) -> T {
        let message = |said: Said<'_>| Message {
            role: said.role.into_owned(),
            content: said.content.into_owned(),
            extra: said.extra.into_owned(),
        };
        let messages: Vec<Message> = self.messages.into_iter().map(message).collect();
        use_it(&ChatRequest {
            messages: &messages,
            add_generation_prompt: self.add_generation_prompt,
            tools: self.tools.as_deref(),
            variables: self.variables.as_deref(),
            now: self.now,
        })
    }
}

/// The result of a conversation.
#[derive(Serialize, Deserialize)]
pub(super) enum Reply {
    Text(String),
    Refused(String),
    Failed { name: String, reason: String },
}

impl Reply {
    pub(super) fn new(result: Result<String, TextError>) -> Reply {
        match result {
            Ok(text) => Reply::Text(text),
            Err(TextError::Refused { message }) => Reply::Refused(message),
            Err(TextError::Template { name, reason }) => Reply::Failed { name, reason },
            Err(other) => {
                Reply::Failed { name: super::super::source::DEFAULT.into(), reason: other.to_string() }
            }
        }
    }

    pub(super) fn into_result(self) -> Result<String, TextError> {
        match self {
            Reply::Text(text) => Ok(text),
            Reply::Refused(message) => Err(TextError::Refused { message }),
            Reply::Failed { name, reason } => Err(TextError::Template { name, reason }),
        }
    }
}
