//! The routes, and the layers around them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};

use crate::access::caller::{ANTHROPICS_REQUEST_ID, KeyName, REQUEST_ID, RequestMeter, name_request};
use crate::access::host_check::{HostCheck, plain_origin};
use crate::api::anthropic::AnthropicError;
use crate::api::{anthropic, models, openai, openapi, rerank, tokenize};
use crate::error::{Result, ServerError};
use crate::http::body::{Refusal, SHOULD_RETRY, is_anthropics};
use crate::http::response_body::{paced, with_guard};
use crate::http::{page, status};
use crate::model_manager::ModelManager;

/// All endpoints.
///
/// `listens` is the address that the server listens on. It determines which host names are accepted.
pub fn router(manager: Arc<ModelManager>, listens: SocketAddr) -> Router {
    let open = Router::new()
        .route("/", get(page::page))
        .route("/page/{file}", get(page::asset))
        .route("/health", get(health));
    let keyed = Router::new()
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/v1/completions", post(openai::completions::create))
        .route("/v1/chat/completions", post(openai::chat::create))
        .route("/v1/responses", post(openai::responses::create))
        .route("/v1/embeddings", post(openai::embeddings::create))
        .route("/v1/rerank", post(rerank::create))
        .route("/v2/rerank", post(rerank::create))
        .route("/rerank", post(rerank::create))
        .route("/v1/messages", post(anthropic::create))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/openapi.json", get(describe))
        .route("/status", get(status::status))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/metrics", get(metrics))
        .layer(middleware::from_fn_with_state(Arc::clone(&manager), check_key));
    let router = open.merge(keyed).fallback(unknown).method_not_allowed_fallback(other_method);
    let router = match cors(&manager.options.cors_origins) {
        Some(cors) => router.layer(cors),
        None => router,
    };
    let gate = Arc::new(HostCheck::new(listens, &manager.options));
    router
        .layer(middleware::from_fn_with_state(Arc::clone(&manager), pace))
        .layer(middleware::from_fn_with_state(gate, check_site))
        .layer(middleware::from_fn_with_state(Arc::clone(&manager), count_refusals))
        .layer(middleware::from_fn(name_request))
        .layer(middleware::map_response(harden))
        .with_state(manager)
}

async fn check_site(State(gate): State<Arc<HostCheck>>, request: Request, next: Next) -> Response {
    match gate.check(request.version(), request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => refusal(request.uri(), request.headers(), error),
    }
}

/// An error in the form of the API that the request is of.
fn refusal(uri: &Uri, headers: &HeaderMap, error: ServerError) -> Response {
    match is_anthropics(uri, headers) {
        true => AnthropicError::from(error).into_response(),
        false => error.into_response(),
    }
}

/// Charges answers to requests. The page and an operator's requests are few and bounded, and are answered however full
/// the memory of requests is.
async fn pace(State(manager): State<Arc<ModelManager>>, mut request: Request, next: Next) -> Response {
    if request.method() != Method::POST {
        return next.run(request).await;
    }
    let meter = Arc::new(manager.memory.meter());
    request.extensions_mut().insert(RequestMeter(Arc::clone(&meter)));
    paced(meter, next.run(request).await)
}

/// Headers that restrict browsers: no type sniffing, no frames, no use by other sites, and no referrer.
const HARDENING: [(HeaderName, &str); 5] = [
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

async fn harden(mut response: Response) -> Response {
    let headers = response.headers_mut();
    // Sites that are allowed explicitly may read it.
    let is_shared = headers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN);
    for (name, value) in HARDENING {
        if !(is_shared && name == "cross-origin-resource-policy") {
            headers.entry(name).or_insert(HeaderValue::from_static(value));
        }
    }
    response
}

/// Headers of answers that a page of a named site may read.
const EXPOSED: [HeaderName; 4] = [REQUEST_ID, ANTHROPICS_REQUEST_ID, header::RETRY_AFTER, SHOULD_RETRY];
/// Time for which a browser remembers that it may send a request, and does not ask before each one. The default is 5 s.
const PREFLIGHT_AGE: Duration = Duration::from_secs(600);

/// Allows calls from the named sites only.
fn cors(origins: &[String]) -> Option<CorsLayer> {
    if origins.is_empty() {
        return None;
    }
    // The headers are named, because `*` does not stand for `authorization`.
    let layer = CorsLayer::new()
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED)
        .max_age(PREFLIGHT_AGE);
    if origins.iter().any(|origin| origin == "*") {
        return Some(layer.allow_origin(Any));
    }
    let origins: Vec<HeaderValue> =
        origins.iter().filter_map(|origin| plain_origin(origin).parse().ok()).collect();
    Some(layer.allow_origin(AllowOrigin::list(origins)))
}

async fn check_key(State(manager): State<Arc<ModelManager>>, mut request: Request, next: Next) -> Response {
    let is_work = request.method() == Method::POST;
    let pass = match manager.keys.enter(request.headers(), is_work, Instant::now()) {
        Ok(pass) => pass,
        Err(error) => return refusal(request.uri(), request.headers(), error),
    };
    if let Some(pass) = &pass {
        request.extensions_mut().insert(KeyName(Arc::clone(&pass.name)));
    }
    let response = next.run(request).await;
    // A stream is in progress until its last byte.
    with_guard(pass, response)
}

async fn count_refusals(State(manager): State<Arc<ModelManager>>, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    if let Some(Refusal(code)) = response.extensions().get() {
        manager.metrics.refused(code);
    }
    response
}

async fn describe(State(manager): State<Arc<ModelManager>>) -> Json<Value> {
    Json(openapi::document(manager.options.choices_max))
}

async fn unknown(method: Method, uri: Uri, headers: HeaderMap) -> Response {
    let (method, path) = (method.to_string(), uri.path().to_string());
    refusal(&uri, &headers, ServerError::UnknownEndpoint { method, path })
}

async fn other_method(method: Method, uri: Uri, headers: HeaderMap) -> Response {
    let (method, path) = (method.to_string(), uri.path().to_string());
    refusal(&uri, &headers, ServerError::Method { method, path })
}

async fn health(State(manager): State<Arc<ModelManager>>) -> Result<Response> {
    // An engine that is loaded when it is asked for is loaded again.
    if manager.has_failed() {
        return Err(ServerError::EngineStopped);
    }
    if manager.is_draining() {
        return Err(ServerError::Draining);
    }
    Ok(Json(json!({"status": "ok"})).into_response())
}

async fn metrics(State(manager): State<Arc<ModelManager>>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], manager.metrics.expose(manager.totals(), &manager.memory))
        .into_response()
}
