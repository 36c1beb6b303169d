//! Who asks: the request's name in logs and answers, the key it came with, and the memory it takes.

use std::sync::Arc;

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;

use crate::app::fresh_id;
use crate::memory::{Meter, RequestMemory};

/// Names a request in answers and logs.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const ID_BYTES_MAX: usize = 128;

/// Names a request.
#[derive(Clone, Debug)]
pub(crate) struct RequestId(pub Arc<str>);

/// Names the key that a request came with.
#[derive(Clone, Debug)]
pub(crate) struct KeyName(pub Arc<str>);

/// A request on its way.
#[derive(Debug)]
pub(crate) struct Caller {
    pub id: Arc<str>,
    /// Name of the key.
    pub key: Option<Arc<str>>,
    pub meter: Meter,
}

impl Caller {
    pub fn new(request: &Request, memory: &RequestMemory) -> Caller {
        let id = request.extensions().get::<RequestId>().map(|id| Arc::clone(&id.0));
        let key = request.extensions().get::<KeyName>().map(|key| Arc::clone(&key.0));
        Caller { id: id.unwrap_or_else(|| fresh_id("req_").into()), key, meter: memory.meter() }
    }
}

/// Gives every request a name, unless whoever passed it on gave it one, and tells it in the answer.
pub(crate) async fn name_request(mut request: Request, next: Next) -> Response {
    let id: Arc<str> = given(request.headers()).unwrap_or_else(|| fresh_id("req_").into());
    request.extensions_mut().insert(RequestId(Arc::clone(&id)));
    let mut response = next.run(request).await;
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// A name is short and of characters that no log takes for something else.
fn given(headers: &HeaderMap) -> Option<Arc<str>> {
    let id = headers.get(REQUEST_ID)?.to_str().ok()?;
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    ((1..=ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(plain)).then(|| id.into())
}
