//! `/v1/models`: the models that can be asked for. OpenAI's clients and Anthropic's get it in their own forms.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Uri};
use axum::response::{IntoResponse, Response};
use keel_text::date_and_time;
use serde_json::{Value, json};

use crate::api::anthropic::AnthropicError;
use crate::error::{Result, ServerError, wrong};
use crate::http::body::is_anthropics;
use crate::model_manager::{Modalities, ModelFacts, ModelManager};

/// Lists the models.
pub(crate) async fn list(State(manager): State<Arc<ModelManager>>, uri: Uri, headers: HeaderMap) -> Response {
    let facts = manager.all_facts();
    if !is_anthropics(&uri, &headers) {
        let data: Vec<_> = facts.iter().map(|facts| openai(manager.created, facts)).collect();
        return Json(json!({"object": "list", "data": data})).into_response();
    }
    let data: Vec<_> = facts.iter().map(|facts| anthropic(manager.created, facts)).collect();
    let id = |facts: Option<&ModelFacts>| facts.map(|facts| facts.id.clone());
    let (first, last) = (id(facts.first()), id(facts.last()));
    Json(json!({"data": data, "has_more": false, "first_id": first, "last_id": last})).into_response()
}

/// One model.
pub(crate) async fn one(
    State(manager): State<Arc<ModelManager>>,
    uri: Uri,
    headers: HeaderMap,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let is_anthropic = is_anthropics(&uri, &headers);
    match facts(&manager, id) {
        Ok(facts) if is_anthropic => Json(anthropic(manager.created, &facts)).into_response(),
        Ok(facts) => Json(openai(manager.created, &facts)).into_response(),
        Err(error) if is_anthropic => AnthropicError::from(error).into_response(),
        Err(error) => error.into_response(),
    }
}

fn facts(manager: &ModelManager, id: Result<Path<String>, PathRejection>) -> Result<ModelFacts, ServerError> {
    let Path(id) = id.map_err(|_| wrong("model", "the name in the path is not UTF-8"))?;
    Ok(manager.facts(manager.find(Some(&id))?))
}

fn openai(created: u64, facts: &ModelFacts) -> Value {
    json!({
        "id": facts.id,
        "object": "model",
        "created": created,
        "owned_by": "keel",
        "context_length": facts.context,
        "loaded": facts.is_loaded,
        "memory_bytes": facts.bytes,
        "input_modalities": modalities(facts.takes),
    })
}

fn anthropic(created: u64, facts: &ModelFacts) -> Value {
    let created = date_and_time(UNIX_EPOCH + Duration::from_secs(created));
    json!({"type": "model", "id": facts.id, "display_name": facts.id, "created_at": created})
}

/// The kinds of input, as other servers name them.
fn modalities(takes: Modalities) -> Vec<&'static str> {
    let more = [(takes.pictures, "image"), (takes.videos, "video")];
    ["text"].into_iter().chain(more.into_iter().filter_map(|(takes, name)| takes.then_some(name))).collect()
}
