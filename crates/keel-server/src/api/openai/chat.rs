//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use keel_text::{AnswerForm, AnswerPart};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::messages::{ChatMessage, Conversation, to_template};
use super::tools::{Tools, response_grammar};
use super::{ChunkHeader, TOP_LOGPROBS_MAX, chat_logprobs, finish_reason, total, usage_json};
use crate::access::caller::Caller;
use crate::answer::{Answer, AnswerEvent, Usage};
use crate::api::field_names::{EndpointError, about, other_fields};
use crate::api::numbers::{check_limit, whole_number};
use crate::api::sampling::{OneOrMany, SamplingFields};
use crate::api::unsupported;
use crate::collect::{Outbox, StreamRoom, collect, error_event, merge, respond};
use crate::collected::Collected;
use crate::error::{Result, wrong};
use crate::http::body::Body;
use crate::loaded_model::{EngineRequest, LoadedModel, bytes_of_copy};
use crate::memory::requests::Listing;
use crate::model_manager::ModelManager;
use crate::pictures::{MediaSource, PromptMedia};
use crate::shared::fresh_id;
use crate::text::{Bounds, ServedText};

/// The supported fields. An unsupported field is refused if it would change the answer.
#[derive(Debug, Deserialize)]
#[serde(expecting = "an object with messages")]
pub(crate) struct ChatBody {
    model: Option<String>,
    messages: Vec<ChatMessage>,
    #[serde(default, deserialize_with = "whole_number")]
    max_tokens: Option<usize>,
    #[serde(default, deserialize_with = "whole_number")]
    max_completion_tokens: Option<usize>,
    #[serde(default, deserialize_with = "whole_number")]
    n: Option<usize>,
    stop: Option<OneOrMany>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    logprobs: Option<bool>,
    #[serde(default, deserialize_with = "whole_number")]
    top_logprobs: Option<usize>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    response_format: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
    reasoning_effort: Option<String>,
    /// All other fields, such as those of sampling.
    #[serde(flatten, deserialize_with = "other_fields")]
    rest: Map<String, Value>,
}

impl ChatBody {
    /// The requested model.
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(expecting = "an object of options")]
pub(super) struct StreamOptions {
    pub include_usage: Option<bool>,
}

/// Answers a conversation.
pub(crate) async fn create(
    State(manager): State<Arc<ModelManager>>,
    Body(body, caller): Body<ChatBody>,
) -> Result<Response, EndpointError> {
    answered(&manager, &caller, body).await.map_err(about("messages"))
}

async fn answered(manager: &Arc<ModelManager>, caller: &Arc<Caller>, body: ChatBody) -> Result<Response> {
    check_limit("max_completion_tokens", body.max_completion_tokens)?;
    if body.max_completion_tokens.is_none() {
        check_limit("max_tokens", body.max_tokens)?;
    }
    let model = manager.model_for(body.model.as_deref()).await?;
    let with_usage = body.stream_options.as_ref().and_then(|o| o.include_usage).unwrap_or(false);
    let room = StreamRoom::wanted(body.stream.unwrap_or(false), caller)?;
    let mut ask = engine_request_on_worker(&model, caller, body, model.engine.context()).await?;
    // `content` has the texts before and after calls.
    ask.form.joins_texts = true;
    let answers = model.start("/v1/chat/completions", caller, vec![ask]).await?;
    let (id, created) = (fresh_id("chatcmpl-"), model.now());
    let head = ChunkHeader { id, created, model: model.id.clone(), with_usage };
    if let Some(room) = room {
        return Ok(respond(&model, room, error_event, move |outbox| stream(head, answers, outbox)));
    }
    let answers = collect(answers).await?;
    Ok(Json(whole(&head, &answers)).into_response())
}

/// Converts the request on a worker thread, because templates and tokenizers take long for long conversations. A prompt
/// that surely has more than `context` tokens, by its bytes, is refused.
pub(crate) async fn engine_request_on_worker(
    model: &Arc<LoadedModel>,
    caller: &Arc<Caller>,
    body: ChatBody,
    context: usize,
) -> Result<EngineRequest> {
    let worker = Arc::clone(model);
    let shows = body.messages.iter().any(ChatMessage::shows_pictures);
    let work = move |caller: &Caller| {
        let bounds = Bounds { context, ..worker.bounds(caller) };
        engine_request(&worker.text, &bounds, body)
    };
    if shows { model.work_on_pictures(caller, work).await } else { model.work(caller, work).await }
}

/// Converts the request to the engine's terms.
pub(crate) fn engine_request(
    text: &ServedText,
    bounds: &Bounds<'_>,
    body: ChatBody,
) -> Result<EngineRequest> {
    unsupported::CHAT.check(&body.rest)?;
    let sampling = SamplingFields::of(body.rest)?;
    let asked = response_grammar(body.response_format.as_ref())?;
    let parallel = body.parallel_tool_calls.unwrap_or(true);
    let tools = Tools::new(body.tools, body.tool_choice.as_ref(), parallel, asked)?;
    let top_logprobs = match (body.logprobs.unwrap_or(false), body.top_logprobs) {
        (_, Some(n)) if n > TOP_LOGPROBS_MAX => {
            return Err(wrong("top_logprobs", format!("{n}, expected 0 to {TOP_LOGPROBS_MAX}")));
        }
        (false, Some(1..)) => return Err(wrong("top_logprobs", "it needs logprobs: true")),
        (true, n) => Some(n.unwrap_or(0)),
        (false, _) => None,
    };
    let variables = variables(body.chat_template_kwargs, body.reasoning_effort);
    let Conversation { messages, pictures } = to_template(body.messages)?;
    let media = prepare(text, &pictures, bounds)?;
    drop(pictures);
    let offered = (!tools.offered.is_empty()).then_some(&tools.offered[..]);
    let prompt = text.encode_chat(&messages, offered, Some(&variables), &media.spans, bounds)?;
    drop(messages);
    let vision = text.preprocessor.as_ref().map_or(Ok(None), |images| images.vision(&prompt.ids, media))?;
    let choices = body.n.unwrap_or(1).min(bounds.choices_max);
    bounds.settle_with(prompt.ids.len(), choices, vision.as_ref());
    let ask = EngineRequest {
        marks: vec![prompt.shared_len],
        max_tokens: body.max_completion_tokens.or(body.max_tokens),
        sampler: sampling.options(&text.defaults, bounds.vocab)?,
        seed: sampling.seed(),
        stop: body.stop.map_or(Vec::new(), OneOrMany::into_vec),
        choices: body.n.unwrap_or(1),
        ignore_eos: sampling.ignore_eos.unwrap_or(false),
        top_logprobs,
        listing: Listing::Objects,
        one_call: tools.one_call,
        form: AnswerForm::of_chat(&text.tokenizer, &prompt.tail, tools.offered, tools.grammar.is_some()),
        grammar: tools.grammar,
        prompt: prompt.ids,
        vision,
    };
    let copy = bytes_of_copy(&ask.stop, &ask.sampler, ask.grammar.as_ref(), &ask.form);
    bounds.keep(copy * (choices + 1) as u64)?;
    Ok(ask)
}

/// The variables of the template. Those of `chat_template_kwargs` take precedence over `reasoning_effort`.
fn variables(kwargs: Option<Map<String, Value>>, effort: Option<String>) -> Map<String, Value> {
    let mut variables = kwargs.unwrap_or_default();
    match effort.as_deref() {
        None | Some("") => {}
        Some("none") => drop(variables.entry("enable_thinking").or_insert(json!(false))),
        Some(effort) => drop(variables.entry("reasoning_effort").or_insert(json!(effort))),
    }
    variables
}

/// Prepares pictures, if the model takes any.
fn prepare(text: &ServedText, pictures: &[MediaSource], bounds: &Bounds<'_>) -> Result<PromptMedia> {
    match &text.preprocessor {
        _ if pictures.is_empty() => Ok(PromptMedia::default()),
        Some(preprocessor) => preprocessor.prepare(pictures, bounds),
        None => Err(wrong("messages", "it shows a picture, and this model reads only text")),
    }
}

impl ChunkHeader {
    fn chunk(&self, index: usize, delta: Value, finish: Option<&str>) -> Value {
        let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": finish});
        self.object("chat.completion.chunk", json!([choice]))
    }
}

fn tool_call(index: Option<usize>, name: &str, arguments: &str) -> Value {
    let mut call = json!({
        "id": fresh_id("call_"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    });
    if let Some(index) = index {
        call["index"] = json!(index);
    }
    call
}

fn whole(head: &ChunkHeader, answers: &[Collected]) -> Value {
    let choice = |(index, answer): (usize, &Collected)| {
        let calls: Vec<Value> = answer.calls().map(|(n, a)| tool_call(None, n, a)).collect();
        let (text, reasoning) = (answer.text(), answer.reasoning());
        let content = if text.is_empty() && !calls.is_empty() { Value::Null } else { Value::String(text) };
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        if !reasoning.is_empty() {
            message["reasoning_content"] = Value::String(reasoning);
        }
        if !calls.is_empty() {
            message["tool_calls"] = json!(calls);
        }
        let logprobs = if answer.tokens.is_empty() { Value::Null } else { chat_logprobs(&answer.tokens) };
        json!({
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason(answer.ending),
        })
    };
    let choices: Vec<Value> = answers.iter().enumerate().map(choice).collect();
    let mut object = head.object("chat.completion", json!(choices));
    object["usage"] = usage_json(total(&answers.iter().map(|a| a.usage).collect::<Vec<_>>(), answers.len()));
    object
}

/// A part as it is streamed. `calls` counts the calls before it.
fn delta(part: &AnswerPart, calls: &mut usize) -> Value {
    match part {
        AnswerPart::Text(text) => json!({"content": text}),
        AnswerPart::Reasoning(text) => json!({"reasoning_content": text}),
        AnswerPart::ToolCall { name, arguments } => {
            let call = tool_call(Some(*calls), name, arguments);
            *calls += 1;
            json!({"tool_calls": [call]})
        }
    }
}

async fn stream(head: ChunkHeader, answers: Vec<Answer>, outbox: Outbox) -> Result<()> {
    let mut usages = vec![Usage::default(); answers.len()];
    let mut calls = vec![0; answers.len()];
    for index in 0..answers.len() {
        outbox.json(&head.chunk(index, json!({"role": "assistant", "content": ""}), None)).await?;
    }
    let mut events = merge(answers);
    while let Some(merged) = events.next().await {
        let index = merged.index;
        usages[index] = merged.usage;
        let (delta, tokens, finish) = match merged.event? {
            AnswerEvent::Part(part, tokens) => (delta(&part, &mut calls[index]), tokens, None),
            AnswerEvent::Tokens(tokens) => (json!({}), tokens, None),
            AnswerEvent::End(ending, _) => (json!({}), Vec::new(), Some(finish_reason(ending))),
        };
        let mut chunk = head.chunk(index, delta, finish);
        if !tokens.is_empty() {
            chunk["choices"][0]["logprobs"] = chat_logprobs(&tokens);
        }
        outbox.json(&chunk).await?;
    }
    if head.with_usage {
        let mut object = head.object("chat.completion.chunk", json!([]));
        object["usage"] = usage_json(total(&usages, usages.len()));
        outbox.json(&object).await?;
    }
    outbox.text(Event::default(), "[DONE]".into()).await
}

#[cfg(test)]
mod tests {
    use keel_text::{AnswerParser, TextFiles};

    use super::*;

    /// The parser reads markers in text. Only a grammar needs the token that ends the reasoning.
    #[test]
    fn reasoning_needs_no_token_of_its_own() {
        let files = TextFiles::read(&keel_testkit::fixtures::demo()).expect("there");
        let text = ServedText::new(&files.with_chat_template(b"{{ messages[0].content }}<think>\n"));
        let text = text.expect("sound");
        assert_eq!(text.tokenizer.token_to_id("</think>"), None);
        let bounds = Bounds {
            vocab: 1 << 16,
            context: 256,
            context_max: 256,
            answer_min: 1,
            choices_max: 1,
            sources: None,
            meter: None,
        };
        let parts = |more: Value| {
            let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
            body.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
            let body = serde_json::from_value(body).expect("a body");
            let form = engine_request(&text, &bounds, body).expect("a request").form;
            let (mut parser, mut parts) = (AnswerParser::new(form), Vec::new());
            parser.push("Hm.</think>Yes.", &mut parts);
            parser.finish(&mut parts);
            parts
        };
        let apart = [AnswerPart::Reasoning("Hm.".into()), AnswerPart::Text("Yes.".into())];
        assert_eq!(parts(json!({})), apart);
        let grammar = json!({"response_format": {"type": "json_object"}});
        assert_eq!(parts(grammar), [AnswerPart::Text("Hm.</think>Yes.".into())]);
    }

    #[test]
    fn templates_read_the_effort_of_reasoning() {
        let of = |kwargs: Value, effort: &str| {
            Value::Object(variables(kwargs.as_object().cloned(), Some(effort.to_string())))
        };
        assert_eq!(of(Value::Null, "high"), json!({"reasoning_effort": "high"}));
        assert_eq!(of(Value::Null, "none"), json!({"enable_thinking": false}));
        assert_eq!(of(json!({"reasoning_effort": "low"}), "high"), json!({"reasoning_effort": "low"}));
        assert_eq!(of(json!({"enable_thinking": true}), "none"), json!({"enable_thinking": true}));
        assert_eq!(variables(None, None), Map::new());
    }
}
