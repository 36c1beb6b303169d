//! `/v1/embeddings`: embeds texts as vectors of length 1.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use keel_engine::batch::direction;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::completions::Prompt;
use crate::access::caller::Caller;
use crate::api::field_names::{EndpointError, about, other_fields};
use crate::api::numbers::whole_number;
use crate::api::unsupported;
use crate::engine::readout::{ReadoutRequest, check_count};
use crate::error::{Result, wrong};
use crate::http::body::Body;
use crate::model_manager::ModelManager;
use crate::text::{Bounds, ServedText};

/// The supported fields. An unsupported field is refused if it would change the result.
#[derive(Debug, Deserialize)]
#[serde(expecting = "an object with an input")]
pub(crate) struct EmbeddingBody {
    model: Option<String>,
    input: Prompt,
    encoding_format: Option<Encoding>,
    #[serde(default, deserialize_with = "whole_number")]
    dimensions: Option<usize>,
    /// All other fields.
    #[serde(flatten, deserialize_with = "other_fields")]
    rest: Map<String, Value>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Encoding {
    #[default]
    Float,
    Base64,
}

/// Serialized directly: as JSON values the numbers would take several times the memory.
#[derive(Serialize)]
struct Embeddings {
    object: &'static str,
    data: Vec<Embedding>,
    model: String,
    usage: EmbeddingUsage,
}

#[derive(Serialize)]
struct Embedding {
    object: &'static str,
    index: usize,
    embedding: Vector,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Vector {
    Floats(Vec<f32>),
    /// Little-endian f32.
    Base64(String),
}

#[derive(Serialize)]
struct EmbeddingUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

/// Embeds texts.
pub(crate) async fn create(
    State(manager): State<Arc<ModelManager>>,
    Body(body, caller): Body<EmbeddingBody>,
) -> Result<Response, EndpointError> {
    embedded(&manager, &caller, body).await.map_err(about("input"))
}

async fn embedded(
    manager: &Arc<ModelManager>,
    caller: &Arc<Caller>,
    body: EmbeddingBody,
) -> Result<Response> {
    let model = manager.model_for(body.model.as_deref()).await?;
    let width = model.engine.hidden();
    let dimensions = body.dimensions.unwrap_or(width);
    if dimensions == 0 || dimensions > width {
        return Err(wrong("dimensions", format!("{dimensions}, and this model has 1 to {width}")));
    }
    let encoding = body.encoding_format.unwrap_or_default();
    let worker = Arc::clone(&model);
    let prompts = move |caller: &_| prompts(&worker.text, &worker.bounds(caller), &body);
    let prompts = model.work(caller, prompts).await?;
    let ask = ReadoutRequest { prompts, shared_len: 0, readout: model.engine.pooling() };
    let read = model.read("/v1/embeddings", caller, ask).await?;
    let embedding = |(index, values): (usize, Vec<f32>)| {
        let values = direction(values, dimensions)?;
        let embedding = match encoding {
            Encoding::Float => Vector::Floats(values),
            Encoding::Base64 => {
                let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                Vector::Base64(STANDARD.encode(bytes))
            }
        };
        Ok(Embedding { object: "embedding", index, embedding })
    };
    let answer = Embeddings {
        object: "list",
        data: read.values.into_iter().enumerate().map(embedding).collect::<Result<_>>()?,
        model: model.id.clone(),
        usage: EmbeddingUsage { prompt_tokens: read.prompt_tokens, total_tokens: read.prompt_tokens },
    };
    Ok(Json(answer).into_response())
}

/// Encodes each text.
pub(crate) fn prompts(text: &ServedText, bounds: &Bounds<'_>, body: &EmbeddingBody) -> Result<Vec<Vec<u32>>> {
    unsupported::EMBEDDING.check(&body.rest)?;
    // An embedding needs no room for an answer after the prompt.
    let bounds = Bounds { answer_min: 0, ..*bounds };
    check_count("input", body.input.count())?;
    let prompts = body.input.encode(text, &bounds)?;
    bounds.settle(prompts.iter().map(Vec::len).sum(), 1);
    Ok(prompts)
}
