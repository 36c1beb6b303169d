//! The stream: submissions run one at a time, in order, and own their memory until they are done.

use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use super::turns::Turns;
use crate::Buffer;
use crate::backend::Backend;
use crate::program::{Bindings, Launch, Program};
use crate::{ArrayError, Result};

/// Most submissions in the queue. A further one waits for a place.
const QUEUE_MAX: usize = 8;

/// Why work failed, and how far it had come.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub error: ArrayError,
    /// How many kernels of the program had run, if known.
    pub done: Option<usize>,
}

type Outcome = Result<(), Failure>;

/// Tells whether work is done, and whether it failed.
#[derive(Clone, Default)]
pub(crate) struct Fence(Arc<(Mutex<Option<Outcome>>, Condvar)>);

impl Fence {
    fn slot(&self) -> MutexGuard<'_, Option<Outcome>> {
        self.0.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn pass(&self, outcome: Outcome) {
        *self.slot() = Some(outcome);
        self.0.1.notify_all();
    }

    /// Waits for the work.
    pub fn wait(&self) -> Result<()> {
        self.wait_or_tell().map_err(|failure| failure.error)
    }

    /// Waits for the work. A failure tells how far the work came.
    pub fn wait_or_tell(&self) -> Outcome {
        let mut slot = self.slot();
        loop {
            match &*slot {
                Some(outcome) => return outcome.clone(),
                None => slot = self.0.1.wait(slot).unwrap_or_else(|e| e.into_inner()),
            }
        }
    }

    /// The error, if the work has failed.
    fn failure(&self) -> Option<ArrayError> {
        self.slot().as_ref().and_then(|outcome| outcome.clone().err()).map(|failure| failure.error)
    }
}

/// A bounded range of a program's kernels with all memory they touch. Handles dropped elsewhere do not free this
/// memory.
struct Submission {
    program: Arc<Program>,
    piece: Range<usize>,
    bindings: Arc<Bindings>,
    arena: Option<Buffer>,
    /// Work that must succeed first.
    needs: Arc<[Fence]>,
    fence: Fence,
    last: bool,
}

impl Submission {
    fn run(self, backend: &dyn Backend) {
        if self.fence.failure().is_some() {
            return;
        }
        let outcome = match self.needs.iter().find_map(Fence::failure) {
            Some(error) => Err(Failure { error, done: Some(self.piece.start) }),
            None => self.launch(backend),
        };
        if self.last || outcome.is_err() {
            let fence = self.fence.clone();
            // The memory is freed before a waiter hears that the work is done.
            drop(self);
            fence.pass(outcome);
        }
    }

    fn launch(&self, backend: &dyn Backend) -> Outcome {
        let launch = Launch::new(&self.program, self.piece.clone(), &self.bindings, self.arena.as_ref());
        backend.launch(&launch).map_err(|error| Failure { error, done: launch.done() })
    }
}

/// One evaluation of a program, to be cut into submissions.
pub(crate) struct Work {
    pub program: Arc<Program>,
    pub bindings: Arc<Bindings>,
    pub arena: Option<Buffer>,
    pub needs: Arc<[Fence]>,
    pub fence: Fence,
}

impl Work {
    /// The pieces, first to last. `Work` keeps nothing alive after this call.
    fn submissions(self) -> Vec<Submission> {
        let pieces = self.program.pieces();
        let submission = |(i, piece): (usize, &Range<usize>)| Submission {
            program: Arc::clone(&self.program),
            piece: piece.clone(),
            bindings: Arc::clone(&self.bindings),
            arena: self.arena.clone(),
            needs: Arc::clone(&self.needs),
            fence: self.fence.clone(),
            last: i + 1 == pieces.len(),
        };
        pieces.iter().enumerate().map(submission).collect()
    }
}

/// State that the caller's threads and the stream's thread share.
struct Shared {
    backend: Arc<dyn Backend>,
    turns: Turns,
}

/// The queue of a runtime and the thread that serves it.
pub(crate) struct Stream {
    shared: Arc<Shared>,
    sender: Mutex<Option<SyncSender<Submission>>>,
}

impl Stream {
    pub fn new(backend: Arc<dyn Backend>) -> Stream {
        let shared = Shared { backend, turns: Turns::new() };
        Stream { shared: Arc::new(shared), sender: Mutex::new(None) }
    }

    /// Runs the work on this thread if the queue is empty. Otherwise queues it and does not wait for it.
    pub fn run(&self, work: Work) {
        let Some(_turn) = self.shared.turns.now() else { return self.enqueue(work) };
        work.submissions().into_iter().for_each(|s| s.run(&*self.shared.backend));
    }

    /// Hands the work to the stream's thread; waits only while the queue is full.
    pub fn enqueue(&self, work: Work) {
        let mut sender = self.sender.lock().unwrap_or_else(|e| e.into_inner());
        let sender = sender.get_or_insert_with(|| {
            let (sender, receiver) = sync_channel(QUEUE_MAX);
            let shared = Arc::clone(&self.shared);
            std::thread::spawn(move || serve(&shared, &receiver));
            sender
        });
        let submissions = work.submissions();
        self.shared.turns.announce(submissions.len());
        for submission in submissions {
            if let Err(back) = sender.send(submission) {
                let lost = ArrayError::Kernel { op: "stream".into(), reason: "its thread has ended".into() };
                back.0.fence.pass(Err(Failure { error: lost, done: None }));
                self.shared.turns.pass();
            }
        }
    }

    /// Waits until nothing is queued, then gives exclusive use of the device's memory.
    pub fn exclusive<R>(&self, access: impl FnOnce(&dyn Backend) -> R) -> R {
        let _turn = self.shared.turns.exclusive();
        access(&*self.shared.backend)
    }

    /// Waits until all queued work is done.
    pub fn synchronize(&self) {
        self.shared.turns.synchronize();
    }
}

fn serve(shared: &Shared, receiver: &Receiver<Submission>) {
    for submission in receiver {
        shared.turns.take(|| submission.run(&*shared.backend));
    }
}
