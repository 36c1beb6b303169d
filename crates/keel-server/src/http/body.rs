//! Reads request bodies, and writes responses and streams.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, StreamExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::access::caller::Caller;
use crate::api::field_names::read;
use crate::error::{Result, ServerError};
use crate::http::connections::BODY_BUFFER_BYTES;
use crate::loaded_model::LoadedModel;
use crate::memory::requests::{Meter, bytes_of_body};
use crate::model_manager::ModelManager;

/// A body parsed as JSON, and its caller. Defects become errors of this crate.
pub(crate) struct Body<T>(pub T, pub Arc<Caller>);

impl<T: DeserializeOwned + Send + 'static> FromRequest<Arc<ModelManager>> for Body<T> {
    type Rejection = ServerError;

    async fn from_request(request: Request, manager: &Arc<ModelManager>) -> Result<Body<T>> {
        check_media_type(request.headers())?;
        check_encoding(request.headers())?;
        let caller = Arc::new(Caller::new(&request, &manager.memory));
        let bytes = collect(request, manager.options.body_bytes_max, &caller.meter).await?;
        let taken = caller.meter.held();
        caller.meter.take(bytes_of_body(&bytes))?;
        if bytes.len() <= PARSED_AT_ONCE {
            let value = parse(&bytes)?;
            caller.meter.give_back(taken);
            return Ok(Body(value, caller));
        }
        let value = manager
            .work(&caller, move |caller| {
                let value = parse(&bytes)?;
                drop(bytes);
                caller.meter.give_back(taken);
                Ok(value)
            })
            .await?;
        Ok(Body(value, caller))
    }
}

/// Bodies up to this size are parsed on the network's threads.
const PARSED_AT_ONCE: usize = 32 << 10;
/// First capacity for a body of unknown size.
const BODY_BYTES_FIRST: usize = 16 << 10;

/// Reads a body. The body is refused while it arrives, as soon as it is too large or there is no memory for it.
async fn collect(request: Request, limit: usize, meter: &Meter) -> Result<Vec<u8>> {
    let declared =
        request.headers().get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|bytes| bytes > limit as u64) {
        return Err(ServerError::BodyTooLarge { limit });
    }
    let _network = meter.hold(declared.unwrap_or(u64::MAX).min(BODY_BUFFER_BYTES))?;
    let mut chunks = request.into_body().into_data_stream();
    let mut body = Vec::new();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| ServerError::IncompleteBody(error.to_string()))?;
        let needed = body.len() + chunk.len();
        if needed > limit {
            return Err(ServerError::BodyTooLarge { limit });
        }
        if needed > body.capacity() {
            let before = body.capacity();
            let room = needed.max(2 * before).max(BODY_BYTES_FIRST).min(limit);
            // Both buffers exist while one is copied to the other.
            meter.take(room as u64)?;
            body.reserve_exact(room - body.len());
            meter.give_back(before as u64);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// Refuses bodies that are not declared as JSON, because a web page can send other types to any site without a
/// preflight request.
pub(crate) fn check_media_type(headers: &HeaderMap) -> Result<()> {
    let declared = headers.get(header::CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    let kind = declared.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
    if kind.eq_ignore_ascii_case(b"application/json") {
        return Ok(());
    }
    Err(ServerError::MediaType { found: String::from_utf8_lossy(declared).into_owned() })
}

/// Refuses compressed bodies. A small one could become larger than any limit on bodies.
fn check_encoding(headers: &HeaderMap) -> Result<()> {
    let is_plain = |coding: &[u8]| coding.is_empty() || coding.eq_ignore_ascii_case(b"identity");
    for value in headers.get_all(header::CONTENT_ENCODING) {
        let mut codings = value.as_bytes().split(|&byte| byte == b',');
        if !codings.all(|coding| is_plain(coding.trim_ascii())) {
            let found = String::from_utf8_lossy(value.as_bytes()).into_owned();
            return Err(ServerError::BodyEncoding { found });
        }
    }
    Ok(())
}

/// Anthropic's clients send this header with each request.
const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");

/// Whether a request is of Anthropic's API. Its refusals then have that form, and the list of models, too.
pub(crate) fn is_anthropics(uri: &Uri, headers: &HeaderMap) -> bool {
    uri.path().starts_with("/v1/messages") || headers.contains_key(ANTHROPIC_VERSION)
}

/// Tells OpenAI's and Anthropic's clients whether to repeat a request.
pub(crate) const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// Parses a body as JSON.
///
/// # Errors
/// [`ServerError::Body`] if it is no JSON; else the field that is wrong.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| {
        // The second reading follows the path to the wrong field. That takes time and memory.
        let again = || read::<T, _>(&mut serde_json::Deserializer::from_slice(bytes)).err();
        let of_field = if error.is_data() { again() } else { None };
        of_field.unwrap_or_else(|| ServerError::Body(error.to_string()))
    })
}

/// An error in OpenAI's form.
pub(crate) fn error_json(error: &ServerError) -> Value {
    let reply = error.reply();
    json!({"error": {
        "message": error.public_message(),
        "type": reply.kind,
        "param": error.field(),
        "code": reply.code,
    }})
}

impl IntoResponse for ServerError {
    fn into_response(self) -> Response {
        self.response_with(error_json(&self))
    }
}

impl ServerError {
    /// The response with the status and headers of this error. `body` has the error in the form of the endpoint's API.
    pub(crate) fn response_with(&self, body: Value) -> Response {
        let reply = self.reply();
        if reply.status.is_server_error() {
            tracing::warn!(code = reply.code, "{self}");
        }
        let mut response = (reply.status, Json(body)).into_response();
        if let Some(seconds) = reply.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if reply.is_final {
            response.headers_mut().insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if reply.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // The layer that counts refusals reads this.
        response.extensions_mut().insert(Refusal(reply.code));
        response
    }
}

/// Marks a response as a refusal, with the error's code.
#[derive(Clone, Copy)]
pub(crate) struct Refusal(pub &'static str);

/// A stream of server-sent events. Comments keep it open while there are no events.
pub(crate) fn sse(
    model: &LoadedModel,
    events: impl Stream<Item = Result<Event, Infallible>> + Send + 'static,
) -> Response {
    let ping: Duration = model.options.ping;
    let mut response =
        Sse::new(events).keep_alive(KeepAlive::new().interval(ping).text("ping")).into_response();
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
