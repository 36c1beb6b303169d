//! Paths, and what every request passes through.

use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderValue, Method, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::json;
use subtle::ConstantTimeEq;
use tower_http::cors::{AllowOrigin, Any, CorsLayer};

use crate::app::App;
use crate::error::{Result, ServerError};
use crate::http::Refusal;
use crate::{anthropic, openai, openapi, page, tokenize};

/// All endpoints.
pub fn router(app: Arc<App>) -> Router {
    let open = Router::new().route("/", get(page::page)).route("/health", get(health));
    let keyed = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/completions", post(openai::completions::create))
        .route("/v1/chat/completions", post(openai::chat::create))
        .route("/v1/responses", post(openai::responses::create))
        .route("/v1/messages", post(anthropic::create))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/openapi.json", get(async || Json(openapi::document())))
        .route("/status", get(page::status))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/metrics", get(metrics))
        .layer(middleware::from_fn_with_state(Arc::clone(&app), check_key));
    let router = open
        .merge(keyed)
        .fallback(unknown)
        .method_not_allowed_fallback(unknown)
        .layer(DefaultBodyLimit::max(app.options.body_bytes_max))
        .layer(middleware::from_fn_with_state(Arc::clone(&app), count_refusals));
    match cors(&app.options.cors_origins) {
        Some(cors) => router.layer(cors).with_state(app),
        None => router.with_state(app),
    }
}

/// Other sites may call only if they were named.
fn cors(origins: &[String]) -> Option<CorsLayer> {
    if origins.is_empty() {
        return None;
    }
    let layer = CorsLayer::new().allow_methods([Method::GET, Method::POST]).allow_headers(Any);
    if origins.iter().any(|origin| origin == "*") {
        return Some(layer.allow_origin(Any));
    }
    let origins: Vec<HeaderValue> = origins.iter().filter_map(|o| HeaderValue::from_str(o).ok()).collect();
    Some(layer.allow_origin(AllowOrigin::list(origins)))
}

async fn check_key(State(app): State<Arc<App>>, request: Request, next: Next) -> Result<Response> {
    let Some(key) = &app.options.api_key else { return Ok(next.run(request).await) };
    let headers = request.headers();
    let bearer = headers.get(header::AUTHORIZATION).and_then(|v| v.as_bytes().strip_prefix(b"Bearer "));
    let given = bearer.or(headers.get("x-api-key").map(HeaderValue::as_bytes)).unwrap_or_default();
    // Compares in time that does not depend on where the two differ.
    if bool::from(given.ct_eq(key.as_bytes())) {
        Ok(next.run(request).await)
    } else {
        Err(ServerError::Unauthorized)
    }
}

async fn count_refusals(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    if let Some(Refusal(code)) = response.extensions().get() {
        app.metrics.refused(code);
    }
    response
}

async fn unknown(method: Method, uri: Uri) -> ServerError {
    ServerError::UnknownEndpoint { method: method.to_string(), path: uri.path().to_string() }
}

async fn health(State(app): State<Arc<App>>) -> Result<Response> {
    if app.engine.is_stopped() {
        return Err(ServerError::EngineStopped);
    }
    if app.is_draining() {
        return Err(ServerError::Draining);
    }
    Ok(Json(json!({"status": "ok"})).into_response())
}

fn model_json(app: &App) -> serde_json::Value {
    json!({
        "id": app.options.model_id,
        "object": "model",
        "created": app.created,
        "owned_by": "keel",
        "context_length": app.engine.context(),
    })
}

async fn models(State(app): State<Arc<App>>) -> Response {
    Json(json!({"object": "list", "data": [model_json(&app)]})).into_response()
}

async fn model(
    State(app): State<Arc<App>>,
    axum::extract::Path(id): axum::extract::Path<String>,
) -> Result<Response> {
    app.check_model(Some(&id))?;
    Ok(Json(model_json(&app)).into_response())
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], app.metrics.expose(&app.engine)).into_response()
}
