//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::access::caller::Caller;
use crate::api::numbers::ids;
use crate::error::Result;
use crate::http::body::Body;
use crate::model_manager::ModelManager;
use crate::text::Bounds;

/// A text to tokenize.
#[derive(Debug, Deserialize)]
pub(crate) struct TokenizeBody {
    #[serde(alias = "content", alias = "prompt")]
    pub text: String,
    #[serde(default)]
    pub add_special_tokens: bool,
    model: Option<String>,
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
pub(crate) struct DetokenizeBody {
    #[serde(deserialize_with = "ids")]
    pub tokens: Vec<u32>,
    model: Option<String>,
}

/// Encodes a text.
pub(crate) async fn tokenize(
    State(manager): State<Arc<ModelManager>>,
    Body(body, caller): Body<TokenizeBody>,
) -> Result<Json<Tokenized>> {
    let model = manager.model_for(body.model.as_deref()).await?;
    let context = model.engine.context();
    let worker = Arc::clone(&model);
    let encode = move |caller: &Caller| {
        // A text of any length may be counted.
        let bounds = Bounds { context: usize::MAX, ..worker.bounds(caller) };
        bounds.encode(&worker.text.tokenizer, &body.text, body.add_special_tokens)
    };
    let tokens = model.work(&caller, encode).await?;
    caller.meter.take(tokens.len() as u64 * ANSWER_BYTES_PER_ID)?;
    Ok(Json(Tokenized { count: tokens.len(), tokens, max_model_len: context }))
}

/// Decodes ids.
pub(crate) async fn detokenize(
    State(manager): State<Arc<ModelManager>>,
    Body(body, caller): Body<DetokenizeBody>,
) -> Result<Json<Value>> {
    let model = manager.model_for(body.model.as_deref()).await?;
    let worker = Arc::clone(&model);
    let decode = move |_: &Caller| Ok(worker.text.tokenizer.decode(&body.tokens, false)?);
    let text = model.work(&caller, decode).await?;
    Ok(Json(json!({"text": text, "content": text})))
}
