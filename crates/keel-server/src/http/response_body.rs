//! Response bodies that hold a value, or the memory of requests, until they are sent or dropped.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::response::{IntoResponse, Response};
use http_body::{Frame, SizeHint};

use crate::error::ServerError;
use crate::http::connections::READ_BYTES_MAX;
use crate::memory::requests::Meter;

/// Returns the same response. `kept` is dropped after its last byte, or when the client disconnects.
pub(crate) fn with_guard<T: Send + Unpin + 'static>(kept: T, response: Response) -> Response {
    response.map(|body| Body::new(GuardedBody { body, kept: Some(kept) }))
}

struct GuardedBody<T> {
    body: Body,
    kept: Option<T>,
}

impl<T: Unpin> HttpBody for GuardedBody<T> {
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

/// Charges a response's body to its request until it is written, and hands it over in pieces. The connection buffers
/// few pieces. So the rest stays in the body, where it is charged. The charge of the answer becomes that of the body,
/// so no other request takes that memory in between.
pub(crate) fn paced(charge: Arc<Meter>, response: Response) -> Response {
    let bytes = match response.body().size_hint().exact() {
        Some(bytes) if bytes > READ_BYTES_MAX as u64 => bytes,
        _ => return response,
    };
    match charge.set(bytes) {
        Ok(()) => response.map(|body| Body::new(ChargedBody { body, rest: Bytes::new(), charge })),
        Err(refused) => ServerError::from(refused).into_response(),
    }
}

struct ChargedBody {
    body: Body,
    /// Bytes of `body` that were received and not handed over yet.
    rest: Bytes,
    charge: Arc<Meter>,
}

impl HttpBody for ChargedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            let frame = match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => frame,
                other => return other,
            };
            match frame.into_data() {
                Ok(data) => self.rest = data,
                Err(other) => return Poll::Ready(Some(Ok(other))),
            }
        }
        let len = self.rest.len().min(READ_BYTES_MAX);
        // A copy, because a slice would keep the whole body for as long as the connection has it.
        let piece = Bytes::copy_from_slice(&self.rest.split_to(len));
        if self.rest.is_empty() {
            self.rest = Bytes::new();
            if self.body.is_end_stream() {
                self.charge.settle(0);
            }
        }
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let waits = self.rest.len() as u64;
        self.body
            .size_hint()
            .exact()
            .map_or_else(SizeHint::default, |left| SizeHint::with_exact(left + waits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::requests::RequestMemory;

    async fn next(body: &mut Body) -> Option<Bytes> {
        let frame = std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await?;
        Some(frame.expect("it is whole").into_data().expect("data"))
    }

    #[tokio::test]
    async fn a_large_body_is_charged_until_its_last_piece() {
        let (memory, bytes) = (RequestMemory::new(1 << 20, 0), 3 * READ_BYTES_MAX + 7);
        let whole: Vec<u8> = (0..bytes).map(|i| i as u8).collect();
        let response = paced(Arc::new(memory.meter()), Response::new(Body::from(whole.clone())));
        assert_eq!((response.body().size_hint().exact(), memory.used()), (Some(bytes as u64), bytes as u64));
        let (mut body, mut read) = (response.into_body(), Vec::new());
        while let Some(piece) = next(&mut body).await {
            assert!(piece.len() <= READ_BYTES_MAX);
            read.extend_from_slice(&piece);
            assert_eq!(memory.used() == 0, read.len() == bytes, "{} of {bytes} bytes", read.len());
            assert_eq!(body.size_hint().exact(), Some((bytes - read.len()) as u64));
        }
        assert_eq!(read, whole);
        let small = paced(Arc::new(memory.meter()), Response::new(Body::from("small")));
        assert_eq!((memory.used(), small.status().as_u16()), (0, 200));
        let refused = paced(Arc::new(memory.meter()), Response::new(Body::from(vec![0; 1 << 20])));
        assert_eq!((memory.used(), refused.status().as_u16()), (0, 413));
    }

    #[tokio::test]
    async fn the_charge_of_an_answer_becomes_that_of_its_body() {
        let (memory, bytes) = (RequestMemory::new(1 << 20, 0), 2 * READ_BYTES_MAX);
        let (meter, other) = (Arc::new(memory.meter()), memory.meter());
        meter.take(800 << 10).expect("there is room for the answer");
        other.take(96 << 10).expect("there is room for another request");
        let response = paced(Arc::clone(&meter), Response::new(Body::from(vec![0; bytes])));
        assert_eq!(
            (response.status().as_u16(), meter.held()),
            (200, bytes as u64),
            "it is not refused at its end"
        );
        drop((meter, response));
        assert_eq!(memory.used(), 96 << 10);
    }
}
