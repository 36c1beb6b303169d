//! Anthropic's API: `/v1/messages` and its token count. Requests are translated to a chat in OpenAI's form.

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
use crate::api::numbers::whole_number;
use crate::api::openai::chat::{ChatBody, engine_request_on_worker};
use crate::api::unsupported;
use crate::collect::{Outbox, StreamRoom, collect, respond};
use crate::collected::Collected;
use crate::error::{Result, ServerError, wrong};
use crate::http::body::Body;
use crate::loaded_model::LoadedModel;
use crate::model_manager::ModelManager;
use crate::shared::fresh_id;

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
    json!({"type": "error", "error": {"type": kind, "message": error.public_message()}})
}

impl IntoResponse for AnthropicError {
    fn into_response(self) -> Response {
        let body = error_json(&self.0);
        let response = self.0.into_response();
        let (mut parts, _) = response.into_parts();
        parts.headers.remove(axum::http::header::CONTENT_LENGTH);
        (parts, Json(body)).into_response()
    }
}

#[derive(Debug, Deserialize)]
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
    temperature: Option<f32>,
    top_p: Option<f32>,
    #[serde(default, deserialize_with = "whole_number")]
    top_k: Option<i64>,
    output_config: Option<Value>,
    /// The form of the answer under its earlier name.
    output_format: Option<Value>,
    /// All other fields.
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
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

/// Counts the tokens of a conversation of any length.
pub(crate) async fn count_tokens(
    State(manager): State<Arc<ModelManager>>,
    Message(body, caller): Message,
) -> Result<Response, AnthropicError> {
    let (model, chat) = chat_apart(&manager, &caller, body).await?;
    let ask = engine_request_on_worker(&model, &caller, chat, usize::MAX).await?;
    Ok(Json(json!({"input_tokens": ask.prompt.len()})).into_response())
}

/// Translates the request to a chat.
pub(crate) fn chat(body: MessagesBody) -> Result<ChatBody> {
    serde_json::from_value(to_chat(body)?).map_err(|error| ServerError::Body(error.to_string()))
}

fn to_chat(body: MessagesBody) -> Result<Value> {
    unsupported::check_messages(&body.rest)?;
    let mut messages = Vec::new();
    if let Some(system) = body.system.filter(|s| !s.is_null()) {
        messages.push(json!({"role": "system", "content": system}));
    }
    for message in body.messages {
        translate(message, &mut messages)?;
    }
    let tools = body.tools.map(|tools| tools.into_iter().map(tool).collect::<Result<_>>()).transpose()?;
    let choice = match &body.tool_choice {
        None | Some(Value::Null) => Value::Null,
        Some(choice) => match choice["type"].as_str() {
            Some("auto") => json!("auto"),
            Some("none") => json!("none"),
            Some("any") => json!("required"),
            Some("tool") => json!({"type": "function", "function": {"name": choice["name"]}}),
            _ => return Err(wrong("tool_choice", "type is one of auto, any, tool, none")),
        },
    };
    let parallel =
        body.tool_choice.as_ref().and_then(|c| c["disable_parallel_tool_use"].as_bool()) != Some(true);
    let mut variables = Map::new();
    match &body.thinking {
        None | Some(Value::Null) => {}
        Some(thinking) => {
            let thinks = match thinking["type"].as_str() {
                Some("enabled" | "adaptive") => true,
                Some("disabled") => false,
                _ => return Err(wrong("thinking", "type is one of enabled, adaptive, disabled")),
            };
            variables.insert("enable_thinking".into(), json!(thinks));
        }
    }
    let mut chat = json!({
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "chat_template_kwargs": variables,
    });
    // The values are moved, because the macro would copy them.
    chat["messages"] = Value::Array(messages);
    chat["tools"] = tools.map_or(Value::Null, Value::Array);
    chat["response_format"] = answer_format(body.output_config, body.output_format)?;
    for (key, value) in body.rest {
        if SHARED.contains(&key.as_str()) {
            chat[key] = value;
        }
    }
    Ok(chat)
}

/// Fields of a chat that mean the same here. Anthropic's API has none of them.
pub(crate) const SHARED: [&str; 7] = [
    "seed",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "ignore_eos",
];

/// The form of the answer, which is a schema; null if there is none.
fn answer_format(config: Option<Value>, earlier: Option<Value>) -> Result<Value> {
    let given = config.map(|mut config| config.get_mut("format").map(Value::take).unwrap_or_default());
    let format = given.filter(|format| !format.is_null()).or(earlier).unwrap_or_default();
    match format["type"].as_str() {
        Some("json_schema") if format["schema"].is_object() => Ok(format),
        None if format.is_null() => Ok(format),
        _ => Err(wrong("output_config", "its format is {\"type\": \"json_schema\", \"schema\": {...}}")),
    }
}

fn tool(tool: Value) -> Result<Value> {
    if !matches!(tool["type"].as_str(), None | Some("custom")) {
        let problem =
            format!("a tool of type {}: the server runs no tools; describe one of yours", tool["type"]);
        return Err(wrong("tools", problem));
    }
    Ok(json!({"type": "function", "function": {
        "name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}}))
}

/// Translates a message. A message with results of tools becomes several.
fn translate(message: InputMessage, messages: &mut Vec<Value>) -> Result<()> {
    let blocks = match message.content {
        Value::Array(blocks) => blocks,
        content => {
            messages.push(json!({"role": message.role, "content": content}));
            return Ok(());
        }
    };
    let (mut parts, mut thinking, mut calls) = (Vec::new(), String::new(), Vec::new());
    for mut block in blocks {
        match block["type"].as_str() {
            Some("text") => {
                parts.push(json!({"type": "text", "text": block["text"].as_str().unwrap_or_default()}))
            }
            Some("image") => parts.push(image(&mut block)?),
            Some("thinking") => thinking.push_str(block["thinking"].as_str().unwrap_or_default()),
            Some("redacted_thinking") => {}
            Some("tool_use") => calls.push(json!({"id": block["id"], "type": "function",
                "function": {"name": block["name"], "arguments": block["input"]}})),
            Some("tool_result") => messages.push(tool_result(block)?),
            other => {
                return Err(wrong(
                    "messages",
                    format!("a block of type {other:?}: text and image can be read"),
                ));
            }
        }
    }
    if parts.is_empty() && thinking.is_empty() && calls.is_empty() {
        return Ok(());
    }
    let mut one = json!({"role": message.role});
    one["content"] = Value::Array(parts);
    if !thinking.is_empty() {
        one["reasoning_content"] = json!(thinking);
    }
    if !calls.is_empty() {
        one["tool_calls"] = json!(calls);
    }
    messages.push(one);
    Ok(())
}

/// The result of a tool, whose blocks may be pictures, too.
fn tool_result(mut block: Value) -> Result<Value> {
    let mut one = json!({"role": "tool", "tool_call_id": block["tool_use_id"]});
    one["content"] = match block["content"].take() {
        Value::Array(mut blocks) => {
            for block in blocks.iter_mut().filter(|block| block["type"] == "image") {
                *block = image(block)?;
            }
            Value::Array(blocks)
        }
        content => content,
    };
    Ok(one)
}

/// A picture in OpenAI's form. Its bytes are copied once, into the URL.
fn image(block: &mut Value) -> Result<Value> {
    let source = &block["source"];
    let url = match (source["type"].as_str(), source["media_type"].as_str(), source["data"].as_str()) {
        (Some("base64"), kind, Some(data)) => format!("data:{};base64,{data}", kind.unwrap_or("image")),
        (Some("url"), ..) if source["url"].is_string() => {
            source["url"].as_str().unwrap_or_default().to_string()
        }
        _ => {
            let problem = "an image block has no source of the form {\"type\": \"base64\", \"media_type\", \"data\"} or \
                           {\"type\": \"url\", \"url\"}";
            return Err(wrong("messages", problem));
        }
    };
    *block = Value::Null;
    let mut part = json!({"type": "image_url"});
    part["image_url"] = Value::String(url);
    Ok(part)
}

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
