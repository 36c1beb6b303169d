//! Runs slow work (parsing, templates, tokenizing, grammars) on threads apart from the network's.
//!
//! Seats bound how much work runs at once. Large texts and grammars have their own seats, so that small requests do not
//! wait for them. When a client disconnects, its place in the queue is freed, and its running work is cancelled.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use keel_text::Cancel;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{Result, ServerError};
use crate::memory::charge::Refused;

/// Requests with more bytes than this are large.
const LARGE_BYTES: u64 = 4 << 20;
const SMALL_SEATS: usize = 2;
const LARGE_SEATS: usize = 1;
const GRAMMAR_SEATS: usize = 2;
const PICTURE_SEATS: usize = 2;

/// Pause between attempts to charge memory.
const CHARGE_PAUSE: Duration = Duration::from_millis(20);

/// Number of threads for the work.
pub const WORK_THREADS: usize = SMALL_SEATS + LARGE_SEATS + GRAMMAR_SEATS + PICTURE_SEATS;

/// The seats.
pub(crate) struct BlockingWork {
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
    grammars: Arc<Semaphore>,
    pictures: Arc<Semaphore>,
    compilations: Arc<Compilations>,
}

/// Numbers of compilations since the start.
#[derive(Default)]
struct Compilations {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl BlockingWork {
    pub fn new() -> BlockingWork {
        let seats = |n| Arc::new(Semaphore::new(n));
        BlockingWork {
            small: seats(SMALL_SEATS),
            large: seats(LARGE_SEATS),
            grammars: seats(GRAMMAR_SEATS),
            pictures: seats(PICTURE_SEATS),
            compilations: Arc::default(),
        }
    }

    /// Number of compilations that a thread has begun.
    pub fn grammars_begun(&self) -> u64 {
        self.compilations.begun.load(Ordering::Acquire)
    }

    /// Number of compilations that a thread has ended, whatever their outcome.
    pub fn grammars_ended(&self) -> u64 {
        self.compilations.ended.load(Ordering::Acquire)
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

    /// A seat to compile a grammar, once `charge` has charged its memory. Other work returns its memory soon, so a
    /// refusal that may pass is waited for.
    pub async fn grammar_seat(
        &self,
        wait: Duration,
        charge: impl Fn() -> std::result::Result<(), Refused>,
    ) -> Result<OwnedSemaphorePermit> {
        let since = Instant::now();
        let seat = seat(&self.grammars, wait).await?;
        loop {
            match charge() {
                Ok(()) => return Ok(seat),
                Err(Refused::Now { .. }) if since.elapsed() < wait => tokio::time::sleep(CHARGE_PAUSE).await,
                Err(refused) => return Err(refused.into()),
            }
        }
    }

    /// Compiles a grammar. Compilation stops with an error after `limit`.
    pub async fn grammar<T: Send + 'static>(
        &self,
        seat: OwnedSemaphorePermit,
        limit: Duration,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let compilations = Arc::clone(&self.compilations);
        let work = move || {
            compilations.begun.fetch_add(1, Ordering::AcqRel);
            let _ended = EndOnDrop(compilations);
            work()
        };
        let compiled = tokio::time::timeout(limit, run_on(seat, work)).await;
        compiled.unwrap_or(Err(ServerError::GrammarTime { seconds: limit.as_secs_f64() }))
    }
}

/// Counts a compilation as ended, also if it panics.
struct EndOnDrop(Arc<Compilations>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::AcqRel);
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
    run_on(seat(seats, wait).await?, work).await
}

async fn seat(seats: &Arc<Semaphore>, wait: Duration) -> Result<OwnedSemaphorePermit> {
    match tokio::time::timeout(wait, Arc::clone(seats).acquire_owned()).await {
        Ok(Ok(seat)) => Ok(seat),
        _ => Err(ServerError::Busy),
    }
}

async fn run_on<T: Send + 'static>(
    seat: OwnedSemaphorePermit,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let guard = CancelOnDrop(Cancel::default());
    let cancel = guard.0.clone();
    let done = tokio::task::spawn_blocking(move || {
        let _seat = seat;
        cancel.scope(work)
    });
    done.await.unwrap_or_else(|error| Err(ServerError::Io(std::io::Error::other(error))))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    async fn compile<T: Send + 'static>(
        works: &BlockingWork,
        wait: Duration,
        limit: Duration,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let seat = works.grammar_seat(wait, || Ok(())).await?;
        works.grammar(seat, limit, work).await
    }

    #[tokio::test]
    async fn a_grammar_waits_for_memory_that_others_return() {
        let works = BlockingWork::new();
        let asked = AtomicU64::new(0);
        let charge = || match asked.fetch_add(1, Ordering::Relaxed) {
            0 | 1 => Err(Refused::Now { needed: 3, used: 2, limit: 4 }),
            _ => Ok(()),
        };
        drop(works.grammar_seat(LONG, charge).await.expect("the third attempt finds room"));
        assert_eq!(asked.load(Ordering::Relaxed), 3);
        let late =
            works.grammar_seat(Duration::ZERO, || Err(Refused::Now { needed: 3, used: 2, limit: 4 })).await;
        assert!(matches!(late, Err(ServerError::RequestMemory { .. })), "{late:?}");
        let never = works.grammar_seat(LONG, || Err(Refused::Always { needed: 5, limit: 4 })).await;
        assert!(matches!(never, Err(ServerError::RequestTooLarge { .. })), "{never:?}");
    }

    #[tokio::test]
    async fn the_time_of_a_grammar_does_not_include_the_wait_for_a_seat() {
        let works = Arc::new(BlockingWork::new());
        let (end, ended) = mpsc::channel::<()>();
        let ended = Arc::new(std::sync::Mutex::new(ended));
        let occupy = |_| {
            let (works, ended) = (Arc::clone(&works), Arc::clone(&ended));
            let work = move || Ok(ended.lock().map(|ended| ended.recv()).is_ok());
            tokio::spawn(async move { compile(&works, LONG, LONG, work).await })
        };
        let others: Vec<_> = (0..GRAMMAR_SEATS).map(occupy).collect();
        while works.grammars.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let busy = compile(&works, Duration::from_millis(1), LONG, || Ok(())).await;
        assert!(matches!(busy, Err(ServerError::Busy)), "{busy:?}");
        let waiting = {
            let works = Arc::clone(&works);
            tokio::spawn(async move { compile(&works, LONG, Duration::from_secs(1), || Ok(7)).await })
        };
        tokio::time::sleep(Duration::from_millis(1200)).await;
        assert!(!waiting.is_finished(), "it waits for a seat");
        assert_eq!(works.grammars_ended(), 0);
        drop(end);
        assert_eq!(waiting.await.expect("it ends").expect("its own time is short"), 7);
        for other in others {
            other.await.expect("it ends").expect("it had time");
        }
        assert_eq!(
            (works.grammars_begun(), works.grammars_ended()),
            (3, 3),
            "the one without a seat never began"
        );
        let slow = || {
            std::thread::sleep(Duration::from_millis(200));
            Ok(())
        };
        let slow = compile(&works, LONG, Duration::from_millis(20), slow).await;
        assert!(matches!(slow, Err(ServerError::GrammarTime { .. })), "{slow:?}");
    }
}
