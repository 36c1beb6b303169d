//! How work is handed to a thread, and how its end comes back.
//!
//! If the thread ends, each waiter for work that is not done gets [`Disconnected`]. So no waiter waits forever.
//!
//! `tests/interleavings.rs` compiles this file with a channel of loom's types and checks each order of the steps.

use std::time::Duration;

use crate::sync::{Receiver, RecvTimeoutError, Sender, channel};

/// Work on its way to a thread. If the thread never begins it, its fields are dropped in this order: the guard, which
/// tells others that nothing was run, before the waiter learns that the end is lost.
pub(crate) struct SentWork<G, W, E> {
    guard: G,
    work: W,
    end: Sender<E>,
}

impl<G, W, E> SentWork<G, W, E> {
    /// Runs the work and sends its end.
    pub fn run(self, run: impl FnOnce(G, W) -> E) {
        let SentWork { guard, work, end } = self;
        // The waiter is gone if its thread was ended by a panic.
        let _ = end.send(run(guard, work));
    }
}

/// Hands work to a thread. When it is dropped, the thread finishes the work that it has, and ends.
pub(crate) struct WorkSender<G, W, E>(Sender<SentWork<G, W, E>>);

/// The thread's side of a [`WorkSender`].
pub(crate) struct WorkReceiver<G, W, E>(Receiver<SentWork<G, W, E>>);

/// A line, and the inbox at its other end.
pub(crate) fn line<G, W, E>() -> (WorkSender<G, W, E>, WorkReceiver<G, W, E>) {
    let (work, received) = channel();
    (WorkSender(work), WorkReceiver(received))
}

impl<G, W, E> WorkSender<G, W, E> {
    /// Hands work to the thread. The guard goes with it.
    pub fn hand(&self, guard: G, work: W) -> ResultReceiver<E> {
        let (end, ended) = channel();
        // If the thread has ended, the work is dropped, which tells the waiter.
        let _ = self.0.send(SentWork { guard, work, end });
        ResultReceiver(ended)
    }
}

impl<G, W, E> WorkReceiver<G, W, E> {
    /// Waits for the next work. `None` if no more can come.
    pub fn next(&self) -> Option<SentWork<G, W, E>> {
        self.0.recv().ok()
    }
}

/// The end of work that was handed to a thread.
pub(crate) struct ResultReceiver<E>(Receiver<E>);

/// The thread has ended, so nothing was run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Disconnected;

impl<E> ResultReceiver<E> {
    /// Waits for the end.
    pub fn wait(self) -> Result<E, Disconnected> {
        self.0.recv().map_err(|_| Disconnected)
    }

    /// Waits for the end, but no longer than `patience`; then it is `None`. An end is returned once.
    pub fn wait_for(&self, patience: Duration) -> Result<Option<E>, Disconnected> {
        match self.0.recv_timeout(patience) {
            Ok(end) => Ok(Some(end)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(Disconnected),
        }
    }
}
