//! Bodies of answers that hold something until they have been sent or given up.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::response::Response;
use http_body::{Frame, SizeHint};

/// The same response; `kept` is dropped after its last byte, or when the client has left.
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

    // An end that is known early would have the body dropped early, which is right, too.
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
