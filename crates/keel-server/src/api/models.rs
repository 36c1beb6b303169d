//! `/v1/models`: the models that can be asked for. OpenAI's clients and Anthropic's get it in their own forms.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::api::anthropic::AnthropicError;
use crate::error::{Result, ServerError, wrong};
use crate::model_manager::{Modalities, ModelFacts, ModelManager};

/// Anthropic's clients send this header with each request.
const ANTHROPIC: &str = "anthropic-version";

/// Lists the models.
pub(crate) async fn list(State(manager): State<Arc<ModelManager>>, headers: HeaderMap) -> Response {
    let facts = manager.all_facts();
    if !headers.contains_key(ANTHROPIC) {
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
    headers: HeaderMap,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let is_anthropic = headers.contains_key(ANTHROPIC);
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
    json!({"type": "model", "id": facts.id, "display_name": facts.id, "created_at": date_and_time(created)})
}

/// The kinds of input, as other servers name them.
fn modalities(takes: Modalities) -> Vec<&'static str> {
    let more = [(takes.pictures, "image"), (takes.videos, "video")];
    ["text"].into_iter().chain(more.into_iter().filter_map(|(takes, name)| takes.then_some(name))).collect()
}

/// Seconds since 1970 as a date and a time by RFC 3339.
fn date_and_time(seconds: u64) -> String {
    let (mut days, within) = (seconds / 86_400, seconds % 86_400);
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (day, hour, minute, second) = (days + 1, within / 3600, within / 60 % 60, within % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::date_and_time;

    #[test]
    fn times_are_written_by_rfc_3339() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (1_764_362_278, "2025-11-28T20:37:58Z"),
        ] {
            assert_eq!(date_and_time(seconds), text);
        }
    }
}
