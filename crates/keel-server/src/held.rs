//! Response bodies that hold a value until they are sent or dropped.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::response::Response;
use http_body::{Frame, SizeHint};

/// Returns the same response. `kept` is dropped after its last byte, or when the client disconnects.
pub(crate) fn holding<T: Send + Unpin + 'static>(kept: T, response: Response) -> Response {
    response.map(|body| Body::new(Holding { body, kept: Some(kept) }))
}

struct Holding<T> {
    body: Body,
    kept: Option<T>,
}

impl<T: Unpin> HttpBody for Holding<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.kept = None;
        }
        polled
    }

    // If the end is known early, the body is dropped early. That is right as well.
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
