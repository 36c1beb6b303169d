//! `/v1/responses`: the same answers in OpenAI's newer form.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use keel_text::AnswerPart;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::chat::{ChatBody, ask_apart};
use crate::answer::{Answer, Ending, Piece, Usage};
use crate::api::unsupported;
use crate::app::fresh_id;
use crate::collect::{Collected, Outbox, StreamRoom, collect, error_event, respond};
use crate::error::{Result, ServerError, wrong};
use crate::http::body::{Body, error_json};
use crate::memory::requests::{Meter, bytes_of_value};
use crate::model_manager::ModelManager;

/// The fields that differ from those of a chat. The others are passed on.
#[derive(Debug, Deserialize)]
pub(crate) struct ResponseBody {
    input: Input,
    instructions: Option<String>,
    max_output_tokens: Option<usize>,
    text: Option<Value>,
    reasoning: Option<Value>,
    previous_response_id: Option<String>,
    stream: Option<bool>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Input {
    Text(String),
    Items(Vec<Value>),
}

/// Fields that mean the same in a chat.
const SHARED: [&str; 9] = [
    "model",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
];

/// Answers an input.
pub(crate) async fn create(
    State(front): State<Arc<ModelManager>>,
    Body(body, caller): Body<ResponseBody>,
) -> Result<Response> {
    if body.previous_response_id.is_some() {
        return Err(wrong("previous_response_id", "responses are not stored; send the whole conversation"));
    }
    let room = StreamRoom::wanted(body.stream.unwrap_or(false), &caller)?;
    let charged = caller.meter.part();
    let mut head = ChunkHeader {
        id: fresh_id("resp_"),
        created: front.now(),
        model: String::new(),
        echoed: json!({
            "tools": body.rest.get("tools").cloned().unwrap_or(json!([])),
            "tool_choice": body.rest.get("tool_choice").cloned().unwrap_or(json!("auto")),
            "parallel_tool_calls": body.rest.get("parallel_tool_calls").cloned().unwrap_or(json!(true)),
            "temperature": body.rest.get("temperature"),
            "top_p": body.rest.get("top_p"),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
        }),
        charged,
    };
    // Kept until the answer ends; copied to an event, and written as text.
    head.charged.take(3 * bytes_of_value(&head.echoed))?;
    let chat = front.work(&caller, move |_| chat(body)).await?;
    let app = front.app(chat.model()).await?;
    head.model.clone_from(&app.id);
    let ask = ask_apart(&app, &caller, chat).await?;
    let mut answers = app.start("/v1/responses", &caller, ask).await?;
    if let Some(room) = room {
        // There is exactly one answer, because this API has no `n`.
        let answer = answers.swap_remove(0);
        return Ok(respond(&app, room, error_event, move |outbox| stream(head, answer, outbox)));
    }
    let answer = collect(answers).await?.swap_remove(0);
    Ok(Json(whole(&head, &answer)).into_response())
}

/// Translates the request to a chat.
pub(crate) fn chat(body: ResponseBody) -> Result<ChatBody> {
    serde_json::from_value(to_chat(body)?).map_err(|error| ServerError::Body(error.to_string()))
}

fn to_chat(body: ResponseBody) -> Result<Value> {
    unsupported::check(&body.rest)?;
    let mut messages = Vec::new();
    messages.extend(body.instructions.map(|text| json!({"role": "system", "content": text})));
    match body.input {
        Input::Text(text) => messages.push(json!({"role": "user", "content": text})),
        Input::Items(items) => {
            for item in items {
                messages.extend(message(item)?);
            }
        }
    }
    let mut chat = Map::new();
    for (key, value) in body.rest {
        if SHARED.contains(&key.as_str()) {
            chat.insert(key, value);
        }
    }
    chat.insert("messages".into(), Value::Array(messages));
    chat.insert("max_tokens".into(), json!(body.max_output_tokens));
    chat.insert("response_format".into(), part("text", body.text, "format")?);
    chat.insert("reasoning_effort".into(), part("reasoning", body.reasoning, "effort")?);
    Ok(Value::Object(chat))
}

/// The part `key` of the object in the field `name`; null if there is none.
fn part(name: &'static str, field: Option<Value>, key: &str) -> Result<Value> {
    match field {
        None | Some(Value::Null) => Ok(Value::Null),
        Some(Value::Object(mut parts)) => Ok(parts.remove(key).unwrap_or_default()),
        Some(_) => Err(wrong(name, "it is no object")),
    }
}

fn message(item: Value) -> Result<Option<Value>> {
    Ok(Some(match item["type"].as_str() {
        None | Some("message") => json!({"role": item["role"], "content": item["content"]}),
        Some("function_call") => json!({"role": "assistant", "tool_calls": [{"id": item["call_id"],
            "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}}]}),
        Some("function_call_output") => {
            let output = match &item["output"] {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            json!({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        }
        // Earlier reasoning is not shown to the model again.
        Some("reasoning") => return Ok(None),
        Some(other) => return Err(wrong("input", format!("an item of type {other:?} is not known"))),
    }))
}

/// Fields that every object of one response repeats.
struct ChunkHeader {
    id: String,
    created: u64,
    model: String,
    echoed: Value,
    /// The charge of it.
    charged: Meter,
}

impl ChunkHeader {
    fn response(&self, status: &str, output: &[Value], usage: Option<Usage>) -> Value {
        let usage = usage.map(|u| {
            json!({
                "input_tokens": u.prompt,
                "input_tokens_details": {"cached_tokens": u.cached},
                "output_tokens": u.completion,
                "output_tokens_details": {"reasoning_tokens": u.reasoning},
                "total_tokens": u.prompt + u.completion,
            })
        });
        let incomplete = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        let mut response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": null,
            "incomplete_details": incomplete,
            "model": self.model,
            "output": output,
            "usage": usage,
            "metadata": {},
            "store": false,
        });
        if let (Value::Object(response), Value::Object(echoed)) = (&mut response, self.echoed.clone()) {
            response.extend(echoed);
        }
        response
    }
}

fn status(ending: Ending) -> &'static str {
    if ending == Ending::Length { "incomplete" } else { "completed" }
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": []})
}

fn message_item(id: &str, text: &str, status: &str) -> Value {
    let content = if status == "in_progress" { json!([]) } else { json!([text_part(text)]) };
    json!({"type": "message", "id": id, "status": status, "role": "assistant", "content": content})
}

fn reasoning_item(id: &str, text: &str) -> Value {
    json!({"type": "reasoning", "id": id, "summary": [],
        "content": [{"type": "reasoning_text", "text": text}]})
}

fn call_item(id: &str, call_id: &str, name: &str, arguments: &str, status: &str) -> Value {
    json!({"type": "function_call", "id": id, "call_id": call_id, "name": name, "arguments": arguments,
        "status": status})
}

fn whole(head: &ChunkHeader, answer: &Collected) -> Value {
    let mut output = Vec::new();
    if !answer.reasoning.is_empty() {
        output.push(reasoning_item(&fresh_id("rs_"), &answer.reasoning));
    }
    if !answer.text.is_empty() || answer.calls.is_empty() {
        output.push(message_item(&fresh_id("msg_"), &answer.text, "completed"));
    }
    for (name, arguments) in &answer.calls {
        output.push(call_item(&fresh_id("fc_"), &fresh_id("call_"), name, arguments, "completed"));
    }
    head.response(status(answer.ending), &output, Some(answer.usage))
}

/// The item that is being streamed.
enum Open {
    Nothing,
    Message { id: String, text: String },
    Reasoning { id: String, text: String },
}

struct Stream {
    head: ChunkHeader,
    outbox: Outbox,
    sequence: usize,
    output: Vec<Value>,
    open: Open,
}

impl Stream {
    async fn send(&mut self, kind: &str, fields: Value) -> Result<()> {
        let mut event = json!({"type": kind, "sequence_number": self.sequence});
        self.sequence += 1;
        if let (Value::Object(event), Value::Object(fields)) = (&mut event, fields) {
            event.extend(fields);
        }
        self.outbox.text(Event::default().event(kind), event.to_string()).await
    }

    fn index(&self) -> usize {
        self.output.len()
    }

    async fn add(&mut self, item: Value) -> Result<()> {
        let fields = json!({"output_index": self.index(), "item": item});
        self.send("response.output_item.added", fields).await
    }

    async fn done(&mut self, item: Value) -> Result<()> {
        let fields = json!({"output_index": self.index(), "item": item});
        self.send("response.output_item.done", fields).await?;
        self.output.push(item);
        Ok(())
    }

    async fn text(&mut self, delta: &str) -> Result<()> {
        if !matches!(self.open, Open::Message { .. }) {
            self.close().await?;
            let id = fresh_id("msg_");
            self.add(message_item(&id, "", "in_progress")).await?;
            let fields = json!({"item_id": id, "output_index": self.index(), "content_index": 0,
                "part": text_part("")});
            self.send("response.content_part.added", fields).await?;
            self.open = Open::Message { id, text: String::new() };
        }
        if let Open::Message { id, text } = &mut self.open {
            text.push_str(delta);
            let fields = json!({"item_id": id, "output_index": self.output.len(), "content_index": 0,
                "delta": delta, "logprobs": []});
            self.send("response.output_text.delta", fields).await?;
        }
        Ok(())
    }

    async fn reasoning(&mut self, delta: &str) -> Result<()> {
        if !matches!(self.open, Open::Reasoning { .. }) {
            self.close().await?;
            let id = fresh_id("rs_");
            self.add(json!({"type": "reasoning", "id": id, "summary": []})).await?;
            self.open = Open::Reasoning { id, text: String::new() };
        }
        if let Open::Reasoning { id, text } = &mut self.open {
            text.push_str(delta);
            let fields = json!({"item_id": id, "output_index": self.output.len(), "content_index": 0,
                "delta": delta});
            self.send("response.reasoning_text.delta", fields).await?;
        }
        Ok(())
    }

    async fn call(&mut self, name: &str, arguments: &str) -> Result<()> {
        self.close().await?;
        let (id, call_id) = (fresh_id("fc_"), fresh_id("call_"));
        self.add(call_item(&id, &call_id, name, "", "in_progress")).await?;
        let index = self.index();
        let delta = json!({"item_id": id, "output_index": index, "delta": arguments});
        self.send("response.function_call_arguments.delta", delta).await?;
        let whole = json!({"item_id": id, "output_index": index, "name": name, "arguments": arguments});
        self.send("response.function_call_arguments.done", whole).await?;
        self.done(call_item(&id, &call_id, name, arguments, "completed")).await
    }

    /// Ends the open item.
    async fn close(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.open, Open::Nothing) {
            Open::Nothing => Ok(()),
            Open::Reasoning { id, text } => self.done(reasoning_item(&id, &text)).await,
            Open::Message { id, text } => {
                let place = json!({"item_id": id, "output_index": self.index(), "content_index": 0});
                let mut whole = place.clone();
                whole["text"] = json!(text);
                whole["logprobs"] = json!([]);
                self.send("response.output_text.done", whole).await?;
                let mut part = place;
                part["part"] = text_part(&text);
                self.send("response.content_part.done", part).await?;
                self.done(message_item(&id, &text, "completed")).await
            }
        }
    }

    /// Sends an answer. What is kept of it until its end is charged to the request.
    async fn answer(&mut self, answer: &mut Answer) -> Result<()> {
        let begun = json!({"response": self.head.response("in_progress", &[], None)});
        self.send("response.created", begun.clone()).await?;
        self.send("response.in_progress", begun).await?;
        while let Some(piece) = answer.next().await? {
            answer.charge(&piece)?;
            match piece {
                Piece::Part(AnswerPart::Text(text)) => self.text(&text).await?,
                Piece::Part(AnswerPart::Reasoning(text)) => self.reasoning(&text).await?,
                Piece::Part(AnswerPart::ToolCall { name, arguments }) => self.call(&name, &arguments).await?,
                Piece::Tokens(_) => {}
                Piece::End(ending, _) => {
                    self.close().await?;
                    let state = status(ending);
                    let response = self.head.response(state, &self.output, Some(answer.usage()));
                    self.send(&format!("response.{state}"), json!({"response": response})).await?;
                }
            }
        }
        Ok(())
    }

    /// Reports an error, with what was complete before it where there is room for that.
    async fn fail(&mut self, error: &ServerError) -> Result<()> {
        let has_room =
            !matches!(error, ServerError::RequestMemory { .. } | ServerError::RequestTooLarge { .. });
        let output = if has_room { &self.output[..] } else { &[] };
        let mut response = self.head.response("failed", output, None);
        response["error"] = error_json(error)["error"].clone();
        self.send("response.failed", json!({"response": response})).await
    }
}

async fn stream(head: ChunkHeader, mut answer: Answer, outbox: Outbox) -> Result<()> {
    let mut stream = Stream { head, outbox, sequence: 0, output: Vec::new(), open: Open::Nothing };
    match stream.answer(&mut answer).await {
        Ok(()) => Ok(()),
        Err(error) => {
            tracing::warn!("{error}");
            stream.fail(&error).await
        }
    }
}
