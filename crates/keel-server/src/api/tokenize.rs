//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use keel_engine::EngineError;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::access::caller::Caller;
use crate::api::field_names::{EndpointError, about, other_fields};
use crate::api::numbers::ids;
use crate::api::unsupported;
use crate::error::{Result, wrong};
use crate::http::body::Body;
use crate::memory::requests::bytes_of_part;
use crate::model_manager::ModelManager;
use crate::text::Bounds;

/// A text to tokenize.
#[derive(Debug, Deserialize)]
#[serde(expecting = "an object with a text")]
pub(crate) struct TokenizeBody {
    #[serde(alias = "content", alias = "prompt")]
    pub text: Option<String>,
    #[serde(default, alias = "add_special")]
    pub add_special_tokens: bool,
    model: Option<String>,
    /// All other fields.
    #[serde(flatten, deserialize_with = "other_fields")]
    rest: Map<String, Value>,
}

impl TokenizeBody {
    /// The text.
    ///
    /// # Errors
    /// There is none, or a field is not supported.
    pub fn text(&self) -> Result<&str> {
        unsupported::TOKENIZE.check(&self.rest)?;
        self.text.as_deref().ok_or_else(|| wrong("text", "it is missing"))
    }
}

/// The ids of a text. They are serialized directly: as JSON values they would take twenty times the memory.
#[derive(Debug, Serialize)]
pub(crate) struct Tokenized {
    tokens: Vec<u32>,
    count: usize,
    max_model_len: usize,
}

/// Bytes per id in the answer: the id, and its digits in a buffer that grows by doubling.
const ANSWER_BYTES_PER_ID: u64 = 24;

/// Ids to decode.
#[derive(Debug, Deserialize)]
#[serde(expecting = "an object with tokens")]
pub(crate) struct DetokenizeBody {
    #[serde(deserialize_with = "ids")]
    pub tokens: Vec<u32>,
    model: Option<String>,
}

impl DetokenizeBody {
    /// The ids, all of which a model has.
    ///
    /// # Errors
    /// An id that is not below `vocab`.
    pub fn tokens(&self, vocab: usize) -> Result<&[u32]> {
        match self.tokens.iter().find(|&&id| id as usize >= vocab) {
            Some(&id) => Err(EngineError::TokenId { id, vocab }.into()),
            None => Ok(&self.tokens),
        }
    }
}

/// The text of ids, under its name here, in llama.cpp and in vLLM. Serialized directly: as JSON values there would be a
/// copy for each name.
#[derive(Serialize)]
struct Detokenized<'a> {
    text: &'a str,
    content: &'a str,
    prompt: &'a str,
}

/// Encodes a text.
pub(crate) async fn tokenize(
    State(manager): State<Arc<ModelManager>>,
    Body(body, caller): Body<TokenizeBody>,
) -> Result<Json<Tokenized>, EndpointError> {
    encoded(&manager, &caller, body).await.map_err(about("text"))
}

async fn encoded(
    manager: &Arc<ModelManager>,
    caller: &Arc<Caller>,
    body: TokenizeBody,
) -> Result<Json<Tokenized>> {
    let model = manager.model_for(body.model.as_deref()).await?;
    let context = model.engine.context();
    let worker = Arc::clone(&model);
    let encode = move |caller: &Caller| {
        // A counted text may exceed the context, but not the memory of requests.
        let bounds = Bounds { context: usize::MAX, ..worker.bounds(caller) };
        bounds.encode(&worker.text.tokenizer, body.text()?, body.add_special_tokens)
    };
    let tokens = model.work(caller, encode).await?;
    caller.meter.take(tokens.len() as u64 * ANSWER_BYTES_PER_ID)?;
    Ok(Json(Tokenized { count: tokens.len(), tokens, max_model_len: context }))
}

/// Decodes ids.
pub(crate) async fn detokenize(
    State(manager): State<Arc<ModelManager>>,
    Body(body, caller): Body<DetokenizeBody>,
) -> Result<Response, EndpointError> {
    decoded(&manager, &caller, body).await.map_err(about("tokens"))
}

async fn decoded(
    manager: &Arc<ModelManager>,
    caller: &Arc<Caller>,
    body: DetokenizeBody,
) -> Result<Response> {
    let model = manager.model_for(body.model.as_deref()).await?;
    let worker = Arc::clone(&model);
    let decode = move |_: &Caller| {
        let tokens = body.tokens(worker.engine.vocab())?;
        Ok(worker.text.tokenizer.decode(tokens, false)?)
    };
    let text = model.work(caller, decode).await?;
    caller.meter.take(bytes_of_part(&text))?;
    Ok(Json(Detokenized { text: &text, content: &text, prompt: &text }).into_response())
}
