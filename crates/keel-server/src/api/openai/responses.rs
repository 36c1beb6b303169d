//! `/v1/responses`: the same answers in OpenAI's newer form.

mod stream;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use keel_text::AnswerPart;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::chat::{ChatBody, engine_request_on_worker};
use crate::access::caller::Caller;
use crate::answer::{Ending, Usage};
use crate::api::field_names::{EndpointError, about, other_fields, read, renamed};
use crate::api::numbers::{check_limit, whole_number};
use crate::api::unsupported;
use crate::collect::{StreamRoom, collect, error_event, respond};
use crate::collected::Collected;
use crate::error::{Result, wrong};
use crate::http::body::Body;
use crate::memory::requests::{Meter, bytes_of_value};
use crate::model_manager::ModelManager;
use crate::shared::fresh_id;

/// The fields that differ from those of a chat. The others are passed on.
#[derive(Debug, Deserialize)]
#[serde(expecting = "an object with an input")]
pub(crate) struct ResponseBody {
    input: Input,
    instructions: Option<String>,
    #[serde(default, deserialize_with = "whole_number")]
    max_output_tokens: Option<usize>,
    text: Option<Value>,
    reasoning: Option<Value>,
    previous_response_id: Option<String>,
    stream: Option<bool>,
    #[serde(flatten, deserialize_with = "other_fields")]
    rest: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "input is a text or a list of items")]
enum Input {
    Text(String),
    Items(Vec<Value>),
}

/// Fields that mean the same in a chat.
pub(crate) const SHARED: [&str; 16] = [
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "ignore_eos",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
];

/// Answers an input.
pub(crate) async fn create(
    State(manager): State<Arc<ModelManager>>,
    Body(body, caller): Body<ResponseBody>,
) -> Result<Response, EndpointError> {
    answered(&manager, &caller, body).await.map_err(about("input"))
}

async fn answered(manager: &Arc<ModelManager>, caller: &Arc<Caller>, body: ResponseBody) -> Result<Response> {
    if body.previous_response_id.is_some() {
        return Err(wrong("previous_response_id", "responses are not stored; send the whole conversation"));
    }
    check(&body.rest)?;
    let room = StreamRoom::wanted(body.stream.unwrap_or(false), caller)?;
    let charged = caller.meter.part();
    let given = |field: &str| body.rest.get(field).filter(|value| !value.is_null());
    let mut head = ChunkHeader {
        id: fresh_id("resp_"),
        created: manager.now(),
        model: String::new(),
        echoed: json!({
            "tools": given("tools").cloned().unwrap_or(json!([])),
            "tool_choice": given("tool_choice").cloned().unwrap_or(json!("auto")),
            "parallel_tool_calls": given("parallel_tool_calls").cloned().unwrap_or(json!(true)),
            "temperature": body.rest.get("temperature"),
            "top_p": body.rest.get("top_p"),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": given("metadata").cloned().unwrap_or(json!({})),
        }),
        charged,
    };
    // Kept until the answer ends; copied to an event, and written as text.
    head.charged.take(3 * bytes_of_value(&head.echoed))?;
    let chat = manager.work(caller, move |_| chat(body)).await?;
    let model = manager.model_for(chat.model()).await?;
    head.model.clone_from(&model.id);
    let ask = engine_request_on_worker(&model, caller, chat, model.engine.context()).await;
    let ask = ask.map_err(|error| renamed(error, &OWN_NAMES))?;
    let mut answers = model.start("/v1/responses", caller, vec![ask]).await?;
    if let Some(room) = room {
        // There is exactly one answer, because this API has no `n`.
        let answer = answers.swap_remove(0);
        return Ok(respond(&model, room, error_event, move |outbox| stream::stream(head, answer, outbox)));
    }
    let answer = collect(answers).await?.swap_remove(0);
    Ok(Json(whole(&head, &answer)).into_response())
}

/// Checks the fields that a response repeats or that ask for more than an answer.
fn check(rest: &Map<String, Value>) -> Result<()> {
    let given = |field: &str| rest.get(field).filter(|value| !value.is_null());
    if let Some(metadata) = given("metadata")
        && !metadata.as_object().is_some_and(|fields| fields.values().all(Value::is_string))
    {
        return Err(wrong("metadata", "it is no object of strings"));
    }
    if given("store").is_some_and(|store| !store.is_boolean()) {
        return Err(wrong("store", "it is neither true nor false; no response is stored"));
    }
    // A conversation that does not fit is refused with the numbers, so `auto` is never ignored in silence.
    if given("truncation").is_some_and(|how| how != "auto" && how != "disabled") {
        return Err(wrong("truncation", "expected auto or disabled"));
    }
    let Some(include) = given("include") else { return Ok(()) };
    let Some(include) = include.as_array() else { return Err(wrong("include", "it is no list")) };
    // Reasoning is never encrypted: a response has its text.
    match include.iter().find(|&what| what != "reasoning.encrypted_content") {
        None => Ok(()),
        Some(what) if what == "message.output_text.logprobs" => {
            let problem =
                "log probabilities are not in responses; use /v1/chat/completions with logprobs: true";
            Err(wrong("include", problem))
        }
        Some(what) => Err(wrong("include", format!("{what} is not supported here; leave it out"))),
    }
}

/// Fields of a chat, and their names here.
const OWN_NAMES: [(&str, &str); 2] = [("messages", "input"), ("response_format", "text.format")];

/// Translates the request to a chat.
pub(crate) fn chat(body: ResponseBody) -> Result<ChatBody> {
    read(to_chat(body)?).map_err(|error| renamed(error, &OWN_NAMES))
}

fn to_chat(body: ResponseBody) -> Result<Value> {
    unsupported::RESPONSE.check(&body.rest)?;
    check_limit("max_output_tokens", body.max_output_tokens)?;
    let effort = part("reasoning", body.reasoning, "effort")?;
    if !(effort.is_null() || effort.is_string()) {
        return Err(wrong("reasoning", "its effort is no text"));
    }
    let mut messages = Vec::new();
    messages.extend(body.instructions.map(|text| json!({"role": "system", "content": text})));
    match body.input {
        Input::Text(text) => messages.push(json!({"role": "user", "content": text})),
        Input::Items(items) => {
            for item in items {
                append(item, &mut messages)?;
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
    chat.insert("reasoning_effort".into(), effort);
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

/// The assistant's turn that its next reasoning or call belongs to: the last one, as templates expect, or a new one.
fn assistants_turn(messages: &mut Vec<Value>) -> &mut Value {
    if messages.last().is_none_or(|turn| turn["role"] != "assistant") {
        messages.push(json!({"role": "assistant"}));
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

/// Appends an item to a chat. The items of an answer become one turn.
fn append(mut item: Value, messages: &mut Vec<Value>) -> Result<()> {
    if !item.is_object() {
        return Err(wrong("input", "an item is no object"));
    }
    match item["type"].as_str() {
        None | Some("message") => {
            let content = item["content"].take();
            // The reasoning before it has begun its turn.
            let begun = messages.last_mut().filter(|turn| {
                item["role"] == "assistant"
                    && turn.get("reasoning_content").is_some()
                    && turn.get("content").or(turn.get("tool_calls")).is_none()
            });
            match begun {
                Some(turn) => turn["content"] = content,
                None => {
                    let mut one = json!({"role": item["role"]});
                    one["content"] = content;
                    messages.push(one);
                }
            }
        }
        // As in a chat, the template decides which turns show their reasoning.
        Some("reasoning") => {
            let parts = item["content"].as_array().into_iter().flatten();
            let text: String = parts.filter_map(|part| part["text"].as_str()).collect();
            if !text.is_empty() {
                let turn = assistants_turn(messages);
                let earlier = turn["reasoning_content"].as_str().unwrap_or_default();
                let all = format!("{earlier}{text}");
                turn["reasoning_content"] = Value::String(all);
            }
        }
        Some("function_call") => {
            let call = json!({"id": item["call_id"], "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]}});
            match &mut assistants_turn(messages)["tool_calls"] {
                Value::Array(calls) => calls.push(call),
                calls => *calls = json!([call]),
            }
        }
        Some("function_call_output") => {
            let output = item["output"].take();
            if !matches!(output, Value::String(_) | Value::Array(_) | Value::Null) {
                let problem = "the output of a function call is neither a text nor a list of parts";
                return Err(wrong("input", problem));
            }
            let mut one = json!({"role": "tool", "tool_call_id": item["call_id"]});
            one["content"] = output;
            messages.push(one);
        }
        Some(other) => return Err(wrong("input", format!("an item of type {other:?} is not known"))),
    }
    Ok(())
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
            "truncation": "disabled",
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

/// An item of text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Message,
    Reasoning,
}

impl Kind {
    /// The type of its part.
    fn part_type(self) -> &'static str {
        match self {
            Kind::Message => "output_text",
            Kind::Reasoning => "reasoning_text",
        }
    }

    fn part(self, text: &str) -> Value {
        match self {
            Kind::Message => json!({"type": self.part_type(), "text": text, "annotations": []}),
            Kind::Reasoning => json!({"type": self.part_type(), "text": text}),
        }
    }

    fn item(self, id: &str, text: &str, status: &str) -> Value {
        let content = if status == "in_progress" { json!([]) } else { json!([self.part(text)]) };
        match self {
            Kind::Message => json!({"type": "message", "id": id, "status": status, "role": "assistant",
                "content": content}),
            Kind::Reasoning => json!({"type": "reasoning", "id": id, "summary": [], "content": content}),
        }
    }
}

fn call_item(id: &str, call_id: &str, name: &str, arguments: &str, status: &str) -> Value {
    json!({"type": "function_call", "id": id, "call_id": call_id, "name": name, "arguments": arguments,
        "status": status})
}

fn whole(head: &ChunkHeader, answer: &Collected) -> Value {
    let mut output = Vec::new();
    for (index, part) in answer.parts.iter().enumerate() {
        // Only the last item can be incomplete.
        let status = if index + 1 == answer.parts.len() { status(answer.ending) } else { "completed" };
        output.push(match part {
            AnswerPart::Reasoning(text) => Kind::Reasoning.item(&fresh_id("rs_"), text, status),
            AnswerPart::Text(text) => Kind::Message.item(&fresh_id("msg_"), text, status),
            AnswerPart::ToolCall { name, arguments } => {
                call_item(&fresh_id("fc_"), &fresh_id("call_"), name, arguments, "completed")
            }
        });
    }
    head.response(status(answer.ending), &output, Some(answer.usage))
}

#[cfg(test)]
mod tests;
