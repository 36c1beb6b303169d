//! The origin of a request: its name in logs and answers, its key, and its memory.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;

use crate::error::ServerError;
use crate::memory::requests::{Meter, RequestMemory};
use crate::shared::fresh_id;

/// The headers of an answer that name its request: OpenAI's and Anthropic's. A client may choose the name in OpenAI's.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
pub(crate) const ANTHROPICS_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
const ID_BYTES_MAX: usize = 128;

/// The name of a request.
#[derive(Clone, Debug)]
pub(crate) struct RequestId(pub Arc<str>);

/// The name of a request's key.
#[derive(Clone, Debug)]
pub(crate) struct KeyName(pub Arc<str>);

/// A request in progress.
#[derive(Debug)]
pub(crate) struct Caller {
    pub id: Arc<str>,
    /// Name of the key, if keys are required.
    pub key: Option<Arc<str>>,
    pub meter: Arc<Meter>,
    /// When the head of the request was there.
    pub arrived: Instant,
    /// Code of the first error that ended the request after it had begun.
    failure: OnceLock<&'static str>,
}

/// The meter of a request. The layer that charges responses holds it, too, so that the charge passes from an answer to
/// its body without a gap.
#[derive(Clone, Debug)]
pub(crate) struct RequestMeter(pub Arc<Meter>);

impl Caller {
    pub fn new(request: &Request, memory: &RequestMemory) -> Caller {
        let id = request.extensions().get::<RequestId>().map(|id| Arc::clone(&id.0));
        let key = request.extensions().get::<KeyName>().map(|key| Arc::clone(&key.0));
        let meter = request.extensions().get::<RequestMeter>().map(|meter| Arc::clone(&meter.0));
        Caller {
            id: id.unwrap_or_else(|| fresh_id("req_").into()),
            key,
            meter: meter.unwrap_or_else(|| Arc::new(memory.meter())),
            arrived: Instant::now(),
            failure: OnceLock::new(),
        }
    }

    /// Returns the error. It is the reason why all answers of the request end that have not ended by themselves.
    pub fn failed(&self, error: ServerError) -> ServerError {
        self.failure.get_or_init(|| error.reply().code);
        error
    }

    /// The code of the error that ended the request.
    pub fn failure(&self) -> Option<&'static str> {
        self.failure.get().copied()
    }
}

/// Gives each request a name and returns it in the answer. A valid name from the client or proxy is kept.
pub(crate) async fn name_request(mut request: Request, next: Next) -> Response {
    let id: Arc<str> = given(request.headers()).unwrap_or_else(|| fresh_id("req_").into());
    request.extensions_mut().insert(RequestId(Arc::clone(&id)));
    let mut response = next.run(request).await;
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(ANTHROPICS_REQUEST_ID, value.clone());
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// The name in the headers, if it is short and has only characters that are safe in logs.
fn given(headers: &HeaderMap) -> Option<Arc<str>> {
    let id = headers.get(REQUEST_ID)?.to_str().ok()?;
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    ((1..=ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(plain)).then(|| id.into())
}
