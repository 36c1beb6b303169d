//! `/v1/rerank`: scores how well documents answer a query, in the form of Jina, Cohere and vLLM.
//!
//! A model that is trained like Qwen3-Reranker answers whether a document meets the requirements: yes or no. The score
//! is the probability of yes among these two tokens, from the logits after the prompt. All prompts begin with the
//! query, so that its prefix can be reused.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use keel_engine::batch::Readout;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::access::caller::Caller;
use crate::api::field_names::{EndpointError, about, other_fields};
use crate::api::numbers::whole_number;
use crate::api::unsupported;
use crate::engine::readout::{ReadoutRequest, check_count};
use crate::error::{Result, wrong};
use crate::http::body::Body;
use crate::model_manager::ModelManager;
use crate::shared::fresh_id;
use crate::text::{Bounds, ServedText};

/// A query and documents.
#[derive(Debug, Deserialize)]
#[serde(expecting = "an object with a query and documents")]
pub(crate) struct RerankBody {
    model: Option<String>,
    query: String,
    documents: Vec<Document>,
    #[serde(default, deserialize_with = "whole_number")]
    top_n: Option<usize>,
    return_documents: Option<bool>,
    instruction: Option<String>,
    /// All other fields.
    #[serde(flatten, deserialize_with = "other_fields")]
    rest: Map<String, Value>,
}

impl RerankBody {
    /// Bytes of all prompts as texts.
    fn prompt_bytes(&self) -> u64 {
        let instruction = self.instruction.as_deref().unwrap_or(INSTRUCTION);
        let shared = HEAD.len() + TAIL.len() + FRAME_BYTES + instruction.len() + self.query.len();
        self.documents.iter().map(|document| (shared + document.text().len()) as u64).sum()
    }
}

/// The names of the parts of a prompt.
const FRAME_BYTES: usize = "<Instruct>: \n<Query>: \n<Document>: ".len();
/// A token covers at least a byte. Buffers of ids grow by doubling.
const BYTES_PER_PROMPT_BYTE: u64 = 2 * size_of::<u32>() as u64;

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a document is a text or an object with a text")]
enum Document {
    Text(String),
    Object { text: String },
}

impl Document {
    fn text(&self) -> &str {
        match self {
            Document::Text(text) | Document::Object { text } => text,
        }
    }
}

/// The default instruction.
const INSTRUCTION: &str = "Given a web search query, retrieve relevant passages that answer the query";
const HEAD: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct \
     provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n";
const TAIL: &str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";

/// Ranks documents, the best first.
pub(crate) async fn create(
    State(manager): State<Arc<ModelManager>>,
    Body(body, caller): Body<RerankBody>,
) -> Result<Json<Value>, EndpointError> {
    ranked(&manager, &caller, body).await.map_err(about("documents"))
}

async fn ranked(manager: &Arc<ModelManager>, caller: &Arc<Caller>, body: RerankBody) -> Result<Json<Value>> {
    let model = manager.model_for(body.model.as_deref()).await?;
    let worker = Arc::clone(&model);
    // Each prompt repeats the query, so the prompts may be far larger than the body. They are charged before they are
    // made, and take a seat of their size.
    let most = body.prompt_bytes() * BYTES_PER_PROMPT_BYTE;
    caller.meter.take(most)?;
    let work = move |caller: &_| Ok((readout_request(&worker.text, &worker.bounds(caller), &body)?, body));
    let (ask, body) = model.work(caller, work).await?;
    let ids: usize = ask.prompts.iter().map(Vec::capacity).sum();
    caller.meter.give_back(most.saturating_sub((ids * size_of::<u32>()) as u64));
    let read = model.read("/v1/rerank", caller, ask).await?;
    let mut scores: Vec<(usize, f64)> =
        read.values.iter().enumerate().map(|(i, logits)| (i, score(logits))).collect();
    scores.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    scores.truncate(body.top_n.unwrap_or(usize::MAX));
    let result = |&(index, score): &(usize, f64)| {
        let mut result = json!({"index": index, "relevance_score": score});
        if body.return_documents.unwrap_or(true) {
            result["document"] = json!({"text": body.documents[index].text()});
        }
        result
    };
    Ok(Json(json!({
        "id": fresh_id("rerank-"),
        "object": "list",
        "model": model.id,
        "results": scores.iter().map(result).collect::<Vec<_>>(),
        "usage": {"prompt_tokens": read.prompt_tokens, "total_tokens": read.prompt_tokens},
    })))
}

/// Makes one prompt per document.
pub(crate) fn readout_request(
    text: &ServedText,
    bounds: &Bounds<'_>,
    body: &RerankBody,
) -> Result<ReadoutRequest> {
    unsupported::RERANK.check(&body.rest)?;
    check_count("documents", body.documents.len())?;
    if body.top_n == Some(0) {
        return Err(wrong("top_n", "0, expected at least 1"));
    }
    let readout = Readout::Logits(vec![token_of(text, "yes")?, token_of(text, "no")?]);
    let bounds = Bounds { answer_min: 0, ..*bounds };
    let encode = |prompt: &str| bounds.encode(&text.tokenizer, prompt, false);
    let instruction = body.instruction.as_deref().unwrap_or(INSTRUCTION);
    let shared = format!("{HEAD}<Instruct>: {instruction}\n<Query>: {}\n<Document>: ", body.query);
    let prompt = |document: &Document| encode(&format!("{shared}{}{TAIL}", document.text()));
    let prompts = body.documents.iter().map(prompt).collect::<Result<Vec<_>>>()?;
    let head = encode(&shared)?;
    let shared_len = head.iter().zip(&prompts[0]).take_while(|(a, b)| a == b).count();
    Ok(ReadoutRequest { prompts, shared_len, readout })
}

/// The token for a word, either at the start of a text or after a space.
fn token_of(text: &ServedText, word: &str) -> Result<u32> {
    for form in [word, &format!(" {word}")] {
        if let [id] = text.tokenizer.encode(form, false)?[..] {
            return Ok(id);
        }
    }
    Err(wrong("model", format!("this model cannot rank: {word:?} is none of its tokens")))
}

/// The probability of the first of two tokens, relative to both.
fn score(logits: &[f32]) -> f64 {
    let margin = f64::from(logits[0]) - f64::from(logits[1]);
    1.0 / (1.0 + (-margin).exp())
}
