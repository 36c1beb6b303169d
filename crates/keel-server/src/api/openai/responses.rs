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
use crate::api::field_names::{EndpointError, about, renamed};
use crate::api::numbers::{check_limit, whole_number};
use crate::api::passed_on::check_types;
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
    #[serde(flatten)]
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
    // The types of all other fields are checked before.
    serde_json::from_value(to_chat(body)?).map_err(|error| wrong("input", error.to_string()))
}

fn to_chat(body: ResponseBody) -> Result<Value> {
    unsupported::check_response(&body.rest)?;
    check_types(&SHARED, &body.rest)?;
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

/// Appends an item to a chat. Calls belong to the assistant's turn before them, as templates expect.
fn append(mut item: Value, messages: &mut Vec<Value>) -> Result<()> {
    if !item.is_object() {
        return Err(wrong("input", "an item is no object"));
    }
    messages.push(match item["type"].as_str() {
        None | Some("message") => json!({"role": item["role"], "content": item["content"]}),
        Some("function_call") => {
            let call = json!({"id": item["call_id"], "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]}});
            match messages.last_mut().filter(|turn| turn["role"] == "assistant") {
                Some(turn) => match &mut turn["tool_calls"] {
                    Value::Array(calls) => calls.push(call),
                    calls => *calls = json!([call]),
                },
                None => messages.push(json!({"role": "assistant", "tool_calls": [call]})),
            }
            return Ok(());
        }
        Some("function_call_output") => {
            let output = item["output"].take();
            if !matches!(output, Value::String(_) | Value::Array(_) | Value::Null) {
                let problem = "the output of a function call is neither a text nor a list of parts";
                return Err(wrong("input", problem));
            }
            let mut one = json!({"role": "tool", "tool_call_id": item["call_id"]});
            one["content"] = output;
            one
        }
        // Earlier reasoning is not shown to the model again.
        Some("reasoning") => return Ok(()),
        Some(other) => return Err(wrong("input", format!("an item of type {other:?} is not known"))),
    });
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
mod tests {
    use super::*;
    use crate::api::openai::messages::to_template;

    fn translated(body: Value) -> Result<Value> {
        to_chat(serde_json::from_value(body).expect("the types are right"))
    }

    #[test]
    fn an_assistants_items_are_one_turn() {
        let call = |id: &str| json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"});
        let output = |id: &str| json!({"type": "function_call_output", "call_id": id, "output": "x"});
        let said = json!({"role": "assistant", "content": "I look."});
        let input = json!([{"role": "user", "content": "Look!"}, {"type": "reasoning"}, said, call("1"), call("2"),
            output("1"), output("2"), call("3"), call("4"), output("3"), output("4")]);
        let chat = translated(json!({"input": input})).expect("right");
        let turns: Vec<(&str, usize)> = chat["messages"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|m| (m["role"].as_str().expect("a role"), m["tool_calls"].as_array().map_or(0, Vec::len)))
            .collect();
        let expected = [
            ("user", 0),
            ("assistant", 2),
            ("tool", 0),
            ("tool", 0),
            ("assistant", 2),
            ("tool", 0),
            ("tool", 0),
        ];
        assert_eq!(turns, expected);
        assert_eq!(chat["messages"][1]["content"], "I look.");
    }

    #[test]
    fn instructions_and_a_developers_message_are_one_system_message() {
        let input = json!([{"role": "developer", "content": "b"}, {"role": "user", "content": "Hi"}]);
        let chat = translated(json!({"instructions": "a", "input": input})).expect("right");
        let messages = serde_json::from_value(chat["messages"].clone()).expect("messages");
        let messages = to_template(messages).expect("right").messages;
        let contents: Vec<(&str, &Value)> = messages.iter().map(|m| (&*m.role, &m.content)).collect();
        assert_eq!(contents, [("system", &json!("a\n\nb")), ("user", &json!("Hi"))]);
    }

    #[test]
    fn the_output_of_a_call_is_a_text_or_parts() {
        let of = |output: Value| {
            let item = json!({"type": "function_call_output", "call_id": "1", "output": output});
            translated(json!({"input": [item]})).map(|mut chat| chat["messages"][0].take())
        };
        let parts =
            json!([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:x"}]);
        for output in [json!("a"), parts, Value::Null] {
            let message = json!({"role": "tool", "tool_call_id": "1", "content": output});
            assert_eq!(of(output).expect("right"), message);
        }
        for wrong in [json!({"a": 1}), json!(5), json!(true)] {
            assert_eq!(of(wrong).expect_err("neither").field(), Some("input"));
        }
    }

    #[test]
    fn fields_of_a_chat_are_passed_on_or_refused() {
        let fields = json!({"input": "x", "stop": ["a"], "min_p": 0.5, "presence_penalty": 1.0, "n": 1,
            "frequency_penalty": 1.0, "repetition_penalty": 1.5, "logit_bias": {"5": 1.0}, "top_logprobs": 0});
        let chat = translated(fields.clone()).expect("right");
        for field in
            ["stop", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"]
        {
            assert_eq!(chat[field], fields[field], "{field}");
        }
        for (field, value) in [
            ("n", json!(2)),
            ("response_format", json!({"type": "json_object"})),
            ("top_logprobs", json!(3)),
            ("prompt", json!({"id": "p"})),
            ("max_tokens", json!(5)),
        ] {
            let refused = translated(json!({"input": "x", field: value})).expect_err("it has no effect here");
            assert_eq!(refused.field(), Some(field));
        }
    }
}
