//! Work that takes a while (parsing, templates, tokenizing, grammars), on threads apart from the network's.
//!
//! Seats bound how much of it is done at once. Large texts have a seat of their own, so that small requests do not wait for them;
//! so have grammars. Whoever leaves gives up the place in the queue, and work that has begun is cancelled.

use std::sync::Arc;
use std::time::Duration;

use keel_text::Cancel;
use tokio::sync::Semaphore;

use crate::error::{Result, ServerError};

/// Requests that take more bytes than this are large.
const LARGE_BYTES: u64 = 4 << 20;
const SMALL_SEATS: usize = 2;
const LARGE_SEATS: usize = 1;
const GRAMMAR_SEATS: usize = 2;

/// Threads that the work needs.
pub const WORK_THREADS: usize = SMALL_SEATS + LARGE_SEATS + GRAMMAR_SEATS;

/// The seats.
pub(crate) struct Workshop {
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
    grammars: Arc<Semaphore>,
}

impl Workshop {
    pub fn new() -> Workshop {
        let seats = |n| Arc::new(Semaphore::new(n));
        Workshop { small: seats(SMALL_SEATS), large: seats(LARGE_SEATS), grammars: seats(GRAMMAR_SEATS) }
    }

    /// Work on a request that takes so many bytes.
    pub async fn text<T: Send + 'static>(
        &self,
        bytes: u64,
        wait: Duration,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let seats = if bytes <= LARGE_BYTES { &self.small } else { &self.large };
        run(seats, wait, work).await
    }

    /// Compiles a grammar. One that takes longer than `limit` is given up.
    pub async fn grammar<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let compiled = tokio::time::timeout(limit, run(&self.grammars, limit, work)).await;
        compiled.unwrap_or(Err(ServerError::GrammarTime { seconds: limit.as_secs_f64() }))
    }
}

/// Cancels what nobody waits for.
struct CancelOnDrop(Cancel);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

async fn run<T: Send + 'static>(
    seats: &Arc<Semaphore>,
    wait: Duration,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let seat = tokio::time::timeout(wait, Arc::clone(seats).acquire_owned()).await;
    let Ok(Ok(seat)) = seat else { return Err(ServerError::Busy) };
    let guard = CancelOnDrop(Cancel::default());
    let cancel = guard.0.clone();
    let done = tokio::task::spawn_blocking(move || {
        let _seat = seat;
        cancel.scope(work)
    });
    done.await.unwrap_or_else(|error| Err(ServerError::Io(std::io::Error::other(error))))
}
