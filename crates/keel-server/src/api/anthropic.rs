//! Anthropic's API: `/v1/messages` and its token count. Requests are translated to a chat in OpenAI's form.

mod translation;

use std::sync::Arc;

use axum::Json;
use axum::extract::{FromRequest, Request, State};
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use keel_text::AnswerPart;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::access::caller::Caller;
use crate::answer::{Answer, AnswerEvent, Ending, Usage};
use crate::api::field_names::other_fields;
use crate::api::numbers::{check_limit, whole_number};
use crate::api::openai::chat::{ChatBody, engine_request_on_worker};
use crate::collect::{Outbox, StreamRoom, collect, respond};
use crate::collected::Collected;
use crate::error::{Result, ServerError, wrong};
use crate::http::body::Body;
use crate::loaded_model::LoadedModel;
use crate::model_manager::ModelManager;
use crate::shared::fresh_id;

pub(crate) use translation::chat;

/// An error in Anthropic's form.
pub(crate) struct AnthropicError(ServerError);

impl<E: Into<ServerError>> From<E> for AnthropicError {
    fn from(error: E) -> AnthropicError {
        AnthropicError(error.into())
    }
}

fn error_json(error: &ServerError) -> Value {
    let kind = match error.reply().status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        504 => "timeout_error",
        500 => "api_error",
        _ => "invalid_request_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.public_message_for_anthropic()}})
}

impl IntoResponse for AnthropicError {
    fn into_response(self) -> Response {
        self.0.response_with(error_json(&self.0))
    }
}

#[derive(Debug, Deserialize)]
#[serde(expecting = "an object with messages")]
pub(crate) struct MessagesBody {
    model: Option<String>,
    #[serde(default, deserialize_with = "whole_number")]
    max_tokens: Option<usize>,
    system: Option<Value>,
    messages: Vec<InputMessage>,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    thinking: Option<Value>,
    output_config: Option<Value>,
    /// The form of the answer under its earlier name.
    output_format: Option<Value>,
    /// All other fields.
    #[serde(flatten, deserialize_with = "other_fields")]
    rest: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(expecting = "a message, an object with role and content")]
struct InputMessage {
    role: String,
    content: Value,
}

/// A request body. Errors of its extraction have Anthropic's form.
pub(crate) struct Message(MessagesBody, Arc<Caller>);

impl FromRequest<Arc<ModelManager>> for Message {
    type Rejection = AnthropicError;

    async fn from_request(request: Request, manager: &Arc<ModelManager>) -> Result<Message, AnthropicError> {
        let Body(body, caller) = Body::from_request(request, manager).await?;
        Ok(Message(body, caller))
    }
}

/// The model, and the request as a chat.
async fn chat_apart(
    manager: &Arc<ModelManager>,
    caller: &Arc<Caller>,
    body: MessagesBody,
) -> Result<(Arc<LoadedModel>, ChatBody)> {
    let model = manager.model_for(body.model.as_deref()).await?;
    let chat = model.work(caller, move |_| chat(body)).await?;
    Ok((model, chat))
}

/// Answers a conversation.
pub(crate) async fn create(
    State(manager): State<Arc<ModelManager>>,
    Message(body, caller): Message,
) -> Result<Response, AnthropicError> {
    if body.max_tokens.is_none() {
        return Err(wrong("max_tokens", "it is missing").into());
    }
    check_limit("max_tokens", body.max_tokens)?;
    if body.messages.last().is_some_and(|message| message.role == "assistant") {
        let problem =
            "the last one is the assistant's, and answers are not continued here; end with the user's";
        return Err(wrong("messages", problem).into());
    }
    let room = StreamRoom::wanted(body.stream.unwrap_or(false), &caller)?;
    let (model, chat) = chat_apart(&manager, &caller, body).await?;
    let ask = engine_request_on_worker(&model, &caller, chat, model.engine.context()).await?;
    let mut answers = model.start("/v1/messages", &caller, vec![ask]).await?;
    let id = model.id.clone();
    if let Some(room) = room {
        // There is exactly one answer, because this API has no `n`.
        let answer = answers.swap_remove(0);
        return Ok(respond(&model, room, error_event, move |outbox| stream(id, answer, outbox)));
    }
    let answer = collect(answers).await?.swap_remove(0);
    Ok(Json(whole(&id, &answer)).into_response())
}

/// Counts the tokens of a conversation. It may exceed the context, but not the memory of requests.
pub(crate) async fn count_tokens(
    State(manager): State<Arc<ModelManager>>,
    Message(body, caller): Message,
) -> Result<Response, AnthropicError> {
    let (model, chat) = chat_apart(&manager, &caller, body).await?;
    let ask = engine_request_on_worker(&model, &caller, chat, usize::MAX).await?;
    Ok(Json(json!({"input_tokens": ask.prompt.len()})).into_response())
}

/// Fields that mean the same in a chat. Anthropic's API has the first three.
pub(crate) const SHARED: [&str; 10] = [
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "ignore_eos",
];

fn stop_reason(ending: Ending, stop: Option<&str>) -> &'static str {
    match ending {
        Ending::Length => "max_tokens",
        Ending::ToolCalls => "tool_use",
        Ending::Stop if stop.is_some() => "stop_sequence",
        Ending::Stop => "end_turn",
    }
}

fn usage_json(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
    })
}

fn tool_use(name: &str, arguments: &str) -> Value {
    let input: Value = serde_json::from_str(arguments).unwrap_or(json!({}));
    json!({"type": "tool_use", "id": fresh_id("toolu_"), "name": name, "input": input})
}

fn whole(model: &str, answer: &Collected) -> Value {
    let block = |part: &AnswerPart| match part {
        AnswerPart::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
        AnswerPart::Text(text) => json!({"type": "text", "text": text}),
        AnswerPart::ToolCall { name, arguments } => tool_use(name, arguments),
    };
    let content: Vec<Value> = answer.parts.iter().map(block).collect();
    json!({
        "id": fresh_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop_reason(answer.ending, answer.stop.as_deref()),
        "stop_sequence": answer.stop.as_ref().filter(|_| answer.ending == Ending::Stop),
        "usage": usage_json(answer.usage),
    })
}

/// An error within a stream.
fn error_event(error: &ServerError) -> (Event, Value) {
    (Event::default().event("error"), error_json(error))
}

struct Stream {
    outbox: Outbox,
    /// Number of blocks so far. [`Stream::open`] is the kind of the open block.
    blocks: usize,
    open: Option<&'static str>,
}

impl Stream {
    async fn send(&self, value: Value) -> Result<()> {
        let kind = value["type"].as_str().unwrap_or_default().to_string();
        self.outbox.text(Event::default().event(kind), value.to_string()).await
    }

    async fn begin(&mut self, kind: &'static str, block: Value) -> Result<()> {
        if self.open == Some(kind) && kind != "tool_use" {
            return Ok(());
        }
        self.close().await?;
        self.send(json!({"type": "content_block_start", "index": self.blocks, "content_block": block}))
            .await?;
        self.open = Some(kind);
        Ok(())
    }

    async fn delta(&self, delta: Value) -> Result<()> {
        self.send(json!({"type": "content_block_delta", "index": self.blocks, "delta": delta})).await
    }

    async fn close(&mut self) -> Result<()> {
        if self.open.take().is_some() {
            self.send(json!({"type": "content_block_stop", "index": self.blocks})).await?;
            self.blocks += 1;
        }
        Ok(())
    }

    async fn part(&mut self, part: AnswerPart) -> Result<()> {
        match part {
            AnswerPart::Text(text) => {
                self.begin("text", json!({"type": "text", "text": ""})).await?;
                self.delta(json!({"type": "text_delta", "text": text})).await
            }
            AnswerPart::Reasoning(text) => {
                let block = json!({"type": "thinking", "thinking": "", "signature": ""});
                self.begin("thinking", block).await?;
                self.delta(json!({"type": "thinking_delta", "thinking": text})).await
            }
            AnswerPart::ToolCall { name, arguments } => {
                self.begin("tool_use", tool_use(&name, "{}")).await?;
                self.delta(json!({"type": "input_json_delta", "partial_json": arguments})).await
            }
        }
    }
}

async fn stream(model: String, mut answer: Answer, outbox: Outbox) -> Result<()> {
    let mut stream = Stream { outbox, blocks: 0, open: None };
    let begun = json!({"id": fresh_id("msg_"), "type": "message", "role": "assistant", "model": model,
        "content": [], "stop_reason": null, "stop_sequence": null, "usage": usage_json(answer.usage())});
    stream.send(json!({"type": "message_start", "message": begun})).await?;
    while let Some(event) = answer.next().await? {
        match event {
            AnswerEvent::Part(part, _) => stream.part(part).await?,
            AnswerEvent::Tokens(_) => {}
            AnswerEvent::End(ending, stop) => {
                stream.close().await?;
                let reason = stop_reason(ending, stop.as_deref());
                // A call that ends at a stop string ends the answer as a call.
                let stop = stop.filter(|_| ending == Ending::Stop);
                let delta = json!({"stop_reason": reason, "stop_sequence": stop});
                let usage = usage_json(answer.usage());
                stream.send(json!({"type": "message_delta", "delta": delta, "usage": usage})).await?;
                stream.send(json!({"type": "message_stop"})).await?;
            }
        }
    }
    Ok(())
}
