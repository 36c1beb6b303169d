//! `/v1/completions`: continues a text without a template.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use keel_text::{AnswerForm, AnswerPart};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::chat::StreamOptions;
use super::tools::response_grammar;
use super::{ChunkHeader, TOP_LOGPROBS_MAX, finish_reason, finite, total, usage_json};
use crate::access::caller::Caller;
use crate::answer::{Answer, AnswerEvent, TokenInfo, Usage};
use crate::api::field_names::{EndpointError, about, other_fields};
use crate::api::numbers::{Whole, check_limit, whole_number};
use crate::api::sampling::{OneOrMany, SamplingFields};
use crate::api::unsupported;
use crate::collect::{Outbox, StreamRoom, collect, error_event, merge, respond};
use crate::collected::Collected;
use crate::error::{Result, ServerError, wrong};
use crate::http::body::Body;
use crate::loaded_model::{EngineRequest, bytes_of_copy};
use crate::memory::requests::{Listing, bytes_of_part};
use crate::model_manager::ModelManager;
use crate::shared::fresh_id;
use crate::text::{Bounds, ServedText};

/// OpenAI's default.
const MAX_TOKENS_DEFAULT: usize = 16;
const PROMPTS_MAX: usize = 64;
/// Answers to all prompts of a request. They arrive together, and the queue should have room for other requests.
const ANSWERS_MAX: usize = 128;

/// The supported fields. An unsupported field is refused if it would change the answer.
#[derive(Debug, Deserialize)]
#[serde(expecting = "an object with a prompt")]
pub(crate) struct CompletionBody {
    model: Option<String>,
    prompt: Prompt,
    #[serde(default, deserialize_with = "whole_number")]
    max_tokens: Option<usize>,
    #[serde(default, deserialize_with = "whole_number")]
    n: Option<usize>,
    stop: Option<OneOrMany>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    #[serde(default, deserialize_with = "whole_number")]
    logprobs: Option<usize>,
    echo: Option<bool>,
    response_format: Option<Value>,
    /// All other fields, such as those of sampling.
    #[serde(flatten, deserialize_with = "other_fields")]
    rest: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a text, a list of texts, a list of token ids, or a list of such lists"
)]
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<Whole<u32>>),
    Texts(Vec<String>),
    IdLists(Vec<Vec<Whole<u32>>>),
}

impl Prompt {
    /// How many texts there are.
    pub fn count(&self) -> usize {
        match self {
            Prompt::Text(_) | Prompt::Ids(_) => 1,
            Prompt::Texts(texts) => texts.len(),
            Prompt::IdLists(lists) => lists.len(),
        }
    }

    /// The ids of each text.
    pub fn encode(&self, text: &ServedText, bounds: &Bounds<'_>) -> Result<Vec<Vec<u32>>> {
        let encode = |prompt: &String| bounds.encode(&text.tokenizer, prompt, true);
        let ids = |ids: &Vec<Whole<u32>>| ids.iter().map(|Whole(id)| *id).collect();
        match self {
            Prompt::Text(text) => Ok(vec![encode(text)?]),
            Prompt::Texts(texts) => texts.iter().map(encode).collect(),
            Prompt::Ids(one) => Ok(vec![ids(one)]),
            Prompt::IdLists(lists) => Ok(lists.iter().map(ids).collect()),
        }
    }
}

/// Continues texts.
pub(crate) async fn create(
    State(manager): State<Arc<ModelManager>>,
    Body(body, caller): Body<CompletionBody>,
) -> Result<Response, EndpointError> {
    continued(&manager, &caller, body).await.map_err(about("prompt"))
}

async fn continued(
    manager: &Arc<ModelManager>,
    caller: &Arc<Caller>,
    body: CompletionBody,
) -> Result<Response> {
    check_limit("max_tokens", body.max_tokens)?;
    let model = manager.model_for(body.model.as_deref()).await?;
    let with_usage = body.stream_options.as_ref().and_then(|o| o.include_usage).unwrap_or(false);
    let room = StreamRoom::wanted(body.stream.unwrap_or(false), caller)?;
    let choices = body.n.unwrap_or(1);
    let worker = Arc::clone(&model);
    let work = move |caller: &_| engine_requests(&worker.text, &worker.bounds(caller), body);
    let (asks, echoes) = model.work(caller, work).await?;
    let answers = model.start("/v1/completions", caller, asks).await?;
    let (id, created) = (fresh_id("cmpl-"), model.now());
    let shared = ChunkHeader { id, created, model: model.id.clone(), with_usage };
    let head = CompletionHeader { shared, choices };
    if let Some(room) = room {
        let produce = move |outbox| stream(head, answers, echoes, outbox);
        return Ok(respond(&model, room, error_event, produce));
    }
    let answers = collect(answers).await?;
    Ok(Json(whole(&head, &answers, &echoes)).into_response())
}

/// Returns the request of each prompt, and the text to echo at the start of each choice.
pub(crate) fn engine_requests(
    text: &ServedText,
    bounds: &Bounds<'_>,
    body: CompletionBody,
) -> Result<(Vec<EngineRequest>, Vec<String>)> {
    unsupported::COMPLETION.check(&body.rest)?;
    unsupported::check_best_of(&body.rest, body.n.unwrap_or(1))?;
    let sampling = SamplingFields::of(body.rest)?;
    let count = body.prompt.count();
    if count == 0 || count > PROMPTS_MAX {
        return Err(wrong("prompt", format!("{count} prompts, expected 1 to {PROMPTS_MAX}")));
    }
    let prompts = body.prompt.encode(text, bounds)?;
    // After this check, a prompt that is decoded for an echo is no longer than the context.
    if let Some(long) = prompts.iter().find(|prompt| prompt.len() >= bounds.context) {
        let (prompt, context, context_max) = (long.len(), bounds.context, bounds.context_max);
        return Err(ServerError::PromptTooLong { prompt, context, context_max });
    }
    if body.logprobs.is_some() && body.echo == Some(true) {
        return Err(wrong(
            "echo",
            "log probabilities of a prompt are not computed; ask for echo or for logprobs",
        ));
    }
    if body.logprobs.is_some_and(|n| n > TOP_LOGPROBS_MAX) {
        return Err(wrong("logprobs", format!("expected 0 to {TOP_LOGPROBS_MAX}")));
    }
    let sampler = sampling.options(&text.defaults, bounds.vocab)?;
    let grammar = response_grammar(body.response_format.as_ref())?;
    let stop = body.stop.map_or(Vec::new(), OneOrMany::into_vec);
    let choices = body.n.unwrap_or(1);
    let choices_max = bounds.choices_max;
    if choices > choices_max {
        return Err(wrong("n", format!("{choices} answers, expected 1 to {choices_max}")));
    }
    if count * choices > ANSWERS_MAX {
        let problem = format!(
            "{count} prompts with {choices} answers each are {} answers, expected at most {ANSWERS_MAX}: send fewer at a time",
            count * choices
        );
        return Err(wrong("prompt", problem));
    }
    let copy = bytes_of_copy(&stop, &sampler, grammar.as_ref(), &AnswerForm::default());
    bounds.settle(prompts.iter().map(Vec::len).sum(), choices);
    bounds.keep(copy * (count * (choices + 1)) as u64)?;
    let mut echoes = Vec::new();
    for prompt in &prompts {
        let echo =
            if body.echo.unwrap_or(false) { text.tokenizer.decode(prompt, true)? } else { String::new() };
        bounds.keep(bytes_of_part(&echo) * choices as u64)?;
        echoes.extend(std::iter::repeat_n(echo, choices));
    }
    let ask = |prompt| EngineRequest {
        vision: None,
        prompt,
        marks: Vec::new(),
        max_tokens: Some(body.max_tokens.unwrap_or(MAX_TOKENS_DEFAULT)),
        sampler: sampler.clone(),
        seed: sampling.seed(),
        stop: stop.clone(),
        choices,
        ignore_eos: sampling.ignore_eos.unwrap_or(false),
        top_logprobs: body.logprobs,
        listing: Listing::Entries,
        grammar: grammar.clone(),
        one_call: false,
        form: AnswerForm::default(),
    };
    Ok((prompts.into_iter().map(ask).collect(), echoes))
}

/// Fields that every object of one response repeats, and the number of choices per prompt.
struct CompletionHeader {
    shared: ChunkHeader,
    choices: usize,
}

impl CompletionHeader {
    fn object(&self, choices: Value) -> Value {
        self.shared.object("text_completion", choices)
    }

    fn chunk(&self, index: usize, text: &str, finish: Option<&str>) -> Value {
        let choice = json!({"index": index, "text": text, "logprobs": null, "finish_reason": finish});
        self.object(json!([choice]))
    }
}

/// A token's text. Bytes that are not UTF-8 are written as `bytes:\xNN`, as in OpenAI's API. So two such tokens have
/// different texts.
fn spelling(token: &[u8]) -> String {
    match std::str::from_utf8(token) {
        Ok(text) => text.to_string(),
        Err(_) => token.iter().fold("bytes:".into(), |spelling, byte| format!("{spelling}\\x{byte:02x}")),
    }
}

fn logprobs(tokens: &[TokenInfo]) -> Value {
    let top = |info: &TokenInfo| {
        let mut top = Map::new();
        for (token, &(_, logprob)) in info.top_bytes.iter().zip(&info.logprobs.top) {
            // Of two tokens with one text the more probable one comes first.
            top.entry(spelling(token)).or_insert(json!(finite(logprob)));
        }
        Value::Object(top)
    };
    json!({
        "tokens": tokens.iter().map(|token| spelling(&token.bytes)).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| finite(token.logprobs.drawn)).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
        "text_offset": tokens.iter().map(|token| token.text_offset).collect::<Vec<_>>(),
    })
}

fn whole(head: &CompletionHeader, answers: &[Collected], echoes: &[String]) -> Value {
    let choice = |(index, answer): (usize, &Collected)| {
        let logprobs = if answer.tokens.is_empty() { Value::Null } else { logprobs(&answer.tokens) };
        json!({
            "index": index,
            "text": format!("{}{}", echoes[index], answer.text()),
            "logprobs": logprobs,
            "finish_reason": finish_reason(answer.ending),
        })
    };
    let mut object = head.object(answers.iter().enumerate().map(choice).collect());
    object["usage"] = usage_json(total(&answers.iter().map(|a| a.usage).collect::<Vec<_>>(), head.choices));
    object
}

async fn stream(
    head: CompletionHeader,
    answers: Vec<Answer>,
    echoes: Vec<String>,
    outbox: Outbox,
) -> Result<()> {
    let mut usages = vec![Usage::default(); answers.len()];
    for (index, echo) in echoes.iter().enumerate().filter(|(_, echo)| !echo.is_empty()) {
        outbox.json(&head.chunk(index, echo, None)).await?;
    }
    let mut events = merge(answers);
    while let Some(merged) = events.next().await {
        usages[merged.index] = merged.usage;
        let (text, tokens, finish) = match merged.event? {
            AnswerEvent::Part(AnswerPart::Text(text), tokens) => (text, tokens, None),
            // Other parts cannot come, because the form has neither reasoning nor tools.
            AnswerEvent::Part(_, tokens) | AnswerEvent::Tokens(tokens) => (String::new(), tokens, None),
            AnswerEvent::End(ending, _) => (String::new(), Vec::new(), Some(finish_reason(ending))),
        };
        let mut chunk = head.chunk(merged.index, &text, finish);
        if !tokens.is_empty() {
            chunk["choices"][0]["logprobs"] = logprobs(&tokens);
        }
        outbox.json(&chunk).await?;
    }
    if head.shared.with_usage {
        let mut object = head.object(json!([]));
        object["usage"] = usage_json(total(&usages, head.choices));
        outbox.json(&object).await?;
    }
    outbox.text(Event::default(), "[DONE]".into()).await
}

#[cfg(test)]
mod tests {
    use keel_engine::batch::TokenLogprobs;
    use keel_text::TextFiles;

    use super::*;
    use crate::api::openai::chat_logprobs;

    #[test]
    fn ids_that_exceed_the_context_are_refused_before_they_are_decoded() {
        let text = ServedText::new(&TextFiles::read(&keel_testkit::fixtures::demo()).expect("there"));
        let text = text.expect("sound");
        let bounds = Bounds {
            vocab: 1 << 16,
            context: 8,
            context_max: 8,
            answer_min: 1,
            choices_max: 1,
            sources: None,
            meter: None,
        };
        let ask = |ids: usize| {
            let body = json!({"prompt": vec![65; ids], "echo": true});
            engine_requests(&text, &bounds, serde_json::from_value(body).expect("a body"))
        };
        assert!(ask(7).is_ok_and(|(_, echoes)| !echoes[0].is_empty()));
        assert!(matches!(ask(8), Err(ServerError::PromptTooLong { prompt: 8, context: 8, .. })));
    }

    #[test]
    fn parts_of_characters_are_listed_by_their_bytes() {
        let top = vec![(1, -0.5), (2, -1.0), (3, -2.0), (4, f32::NEG_INFINITY)];
        let token = TokenInfo {
            id: 1,
            bytes: vec![0xe2, 0x82],
            logprobs: TokenLogprobs { drawn: -0.5, top },
            top_bytes: vec![vec![0xe2, 0x82], vec![0xe3], b"a".to_vec(), b"a".to_vec()],
            text_offset: 0,
        };
        let legacy = logprobs(std::slice::from_ref(&token));
        assert_eq!(legacy["tokens"], json!(["bytes:\\xe2\\x82"]));
        let expected = json!({"bytes:\\xe2\\x82": -0.5, "bytes:\\xe3": -1.0, "a": -2.0});
        assert_eq!(legacy["top_logprobs"], json!([expected]));
        let chat = chat_logprobs(&[token]);
        assert_eq!(chat["content"][0]["bytes"], json!([0xe2, 0x82]));
        assert_eq!(chat["content"][0]["token"], "\u{fffd}");
        assert_eq!(chat["content"][0]["top_logprobs"][1]["bytes"], json!([0xe3]));
        assert_eq!(chat["content"][0]["top_logprobs"][3]["logprob"], -9999.0);
    }
}
