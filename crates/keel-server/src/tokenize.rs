//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::error::Result;
use crate::http::Body;
use crate::openai::chat::blocking;

/// A text.
#[derive(Debug, Deserialize)]
pub(crate) struct TokenizeBody {
    #[serde(alias = "content", alias = "prompt")]
    pub text: String,
    #[serde(default)]
    pub add_special_tokens: bool,
}

/// Ids.
#[derive(Debug, Deserialize)]
pub(crate) struct DetokenizeBody {
    pub tokens: Vec<u32>,
}

/// Ids of a text.
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    Body(body): Body<TokenizeBody>,
) -> Result<Json<Value>> {
    let context = app.engine.context();
    let tokens =
        blocking(move || Ok(app.text.tokenizer.encode(&body.text, body.add_special_tokens)?)).await?;
    Ok(Json(json!({"tokens": tokens, "count": tokens.len(), "max_model_len": context})))
}

/// The text of ids.
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    Body(body): Body<DetokenizeBody>,
) -> Result<Json<Value>> {
    let text = blocking(move || Ok(app.text.tokenizer.decode(&body.tokens, false)?)).await?;
    Ok(Json(json!({"text": text, "content": text})))
}
