//! Runs slow work (parsing, templates, tokenizing, grammars) on threads apart from the network's.
//!
//! Seats bound how much work runs at once. Large texts and grammars have their own seats, so that small requests do not
//! wait for them. When a client disconnects, its place in the queue is freed, and its running work is cancelled.

use std::sync::Arc;
use std::time::Duration;

use keel_text::Cancel;
use tokio::sync::Semaphore;

use crate::error::{Result, ServerError};

/// Requests with more bytes than this are large.
const LARGE_BYTES: u64 = 4 << 20;
const SMALL_SEATS: usize = 2;
const LARGE_SEATS: usize = 1;
const GRAMMAR_SEATS: usize = 2;
const PICTURE_SEATS: usize = 2;

/// Number of threads for the work.
pub const WORK_THREADS: usize = SMALL_SEATS + LARGE_SEATS + GRAMMAR_SEATS + PICTURE_SEATS;

/// The seats.
pub(crate) struct BlockingWork {
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
    grammars: Arc<Semaphore>,
    pictures: Arc<Semaphore>,
}

impl BlockingWork {
    pub fn new() -> BlockingWork {
        let seats = |n| Arc::new(Semaphore::new(n));
        BlockingWork {
            small: seats(SMALL_SEATS),
            large: seats(LARGE_SEATS),
            grammars: seats(GRAMMAR_SEATS),
            pictures: seats(PICTURE_SEATS),
        }
    }

    /// Runs work for a request that takes `bytes` bytes.
    pub async fn text<T: Send + 'static>(
        &self,
        bytes: u64,
        wait: Duration,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let seats = if bytes <= LARGE_BYTES { &self.small } else { &self.large };
        run(seats, wait, work).await
    }

    /// Work on a request with pictures.
    pub async fn pictures<T: Send + 'static>(
        &self,
        wait: Duration,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        run(&self.pictures, wait, work).await
    }

    /// Compiles a grammar. Compilation stops with an error after `limit`.
    pub async fn grammar<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let compiled = tokio::time::timeout(limit, run(&self.grammars, limit, work)).await;
        compiled.unwrap_or(Err(ServerError::GrammarTime { seconds: limit.as_secs_f64() }))
    }
}

/// Cancels work when its result is no longer needed.
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
