//! Bodies in, bodies and streams out.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::Stream;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::app::App;
use crate::error::{Result, ServerError};

/// A body read as JSON; what is wrong with it is an error of ours.
pub(crate) struct Body<T>(pub T);

impl<T: DeserializeOwned> FromRequest<Arc<App>> for Body<T> {
    type Rejection = ServerError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Body<T>> {
        check_media_type(request.headers())?;
        let limit = app.options.body_bytes_max;
        let bytes =
            Bytes::from_request(request, app).await.map_err(|_| ServerError::BodyTooLarge { limit })?;
        parse(&bytes).map(Body)
    }
}

/// Refuses what is not declared as JSON: a web page can send other types to any site without asking it first.
pub(crate) fn check_media_type(headers: &HeaderMap) -> Result<()> {
    let declared = headers.get(header::CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    let kind = declared.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
    if kind.eq_ignore_ascii_case(b"application/json") {
        return Ok(());
    }
    Err(ServerError::MediaType { found: String::from_utf8_lossy(declared).into_owned() })
}

/// A body as JSON.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| ServerError::Body(error.to_string()))
}

/// OpenAI's form of an error.
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
        let reply = self.reply();
        if reply.status.is_server_error() {
            tracing::warn!(code = reply.code, "{self}");
        }
        let mut response = (reply.status, Json(error_json(&self))).into_response();
        if let Some(seconds) = reply.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if reply.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // For the layer that counts refusals.
        response.extensions_mut().insert(Refusal(reply.code));
        response
    }
}

/// Marks a response as a refusal.
#[derive(Clone, Copy)]
pub(crate) struct Refusal(pub &'static str);

/// Server-sent events, with comments where nothing else comes for a while.
pub(crate) fn sse(
    app: &App,
    events: impl Stream<Item = Result<Event, Infallible>> + Send + 'static,
) -> Response {
    let ping: Duration = app.options.ping;
    let mut response =
        Sse::new(events).keep_alive(KeepAlive::new().interval(ping).text("ping")).into_response();
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// An event of a JSON object.
pub(crate) fn data(value: &Value) -> Event {
    Event::default().data(value.to_string())
}
