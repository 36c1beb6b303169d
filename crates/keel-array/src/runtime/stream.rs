//! The stream: submissions run one at a time, in order, and own their memory until they are done.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use super::device_lock::DeviceLock;
use super::fence;
use crate::Buffer;
use crate::backend::Backend;
use crate::program::{Bindings, Launch, Program};
use crate::{ArrayError, Result, panic_message};

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

impl Failure {
    /// A panic is a bug of ours. How far the work came is not known.
    fn of_panic(panic: &(dyn Any + Send)) -> Failure {
        let reason = format!("the device panicked, which is a bug: {}", panic_message(panic));
        Failure { error: ArrayError::Kernel { op: "stream".into(), reason }, done: None }
    }
}

/// Tells whether work is done, and whether it failed and how far it came.
pub(crate) type Fence = fence::Fence<Outcome>;

impl Fence {
    /// Waits for the work.
    pub fn wait(&self) -> Result<()> {
        self.outcome().map_err(|failure| failure.error)
    }

    /// The error, if the work has failed.
    fn failure(&self) -> Option<ArrayError> {
        self.outcome_so_far()?.err().map(|failure| failure.error)
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
    /// Runs the piece. A panic goes on to the caller after those who wait for the work have heard of it.
    fn run(self, backend: &dyn Backend) {
        if self.fence.failure().is_some() {
            return;
        }
        let launched = match self.needs.iter().find_map(Fence::failure) {
            Some(error) => Ok(Err(Failure { error, done: Some(self.piece.start) })),
            None => catch_unwind(AssertUnwindSafe(|| self.launch(backend))),
        };
        let (outcome, panic) = match launched {
            Ok(outcome) => (outcome, None),
            Err(panic) => (Err(Failure::of_panic(&*panic)), Some(panic)),
        };
        if self.last || outcome.is_err() {
            let fence = self.fence.clone();
            // The memory is freed before a waiter hears that the work is done.
            drop(self);
            fence.pass(outcome);
        }
        if let Some(panic) = panic {
            resume_unwind(panic);
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
    lock: DeviceLock,
}

/// The queue of a runtime and the thread that serves it.
pub(crate) struct Stream {
    shared: Arc<Shared>,
    sender: Mutex<Option<SyncSender<Submission>>>,
}

impl Stream {
    pub fn new(backend: Arc<dyn Backend>) -> Stream {
        let shared = Shared { backend, lock: DeviceLock::new() };
        Stream { shared: Arc::new(shared), sender: Mutex::new(None) }
    }

    /// Runs the work on this thread if the queue is empty. Otherwise queues it and does not wait for it.
    pub fn run(&self, work: Work) {
        let Some(_held) = self.shared.lock.now() else { return self.enqueue(work) };
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
        self.shared.lock.announce(submissions.len());
        for submission in submissions {
            if let Err(back) = sender.send(submission) {
                let lost = ArrayError::Kernel { op: "stream".into(), reason: "its thread has ended".into() };
                back.0.fence.pass(Err(Failure { error: lost, done: None }));
                self.shared.lock.pass();
            }
        }
    }

    /// Waits until nothing is queued, then gives exclusive use of the device's memory.
    pub fn exclusive<R>(&self, access: impl FnOnce(&dyn Backend) -> R) -> R {
        let _held = self.shared.lock.exclusive();
        access(&*self.shared.backend)
    }

    /// Waits until all queued work is done.
    pub fn synchronize(&self) {
        self.shared.lock.synchronize();
    }

    /// Gives exclusive use of the device's memory as [`Stream::exclusive`] does, if no run has begun and not ended.
    pub fn at_rest(&self, access: impl FnOnce(&dyn Backend)) {
        if let Some(_held) = self.shared.lock.at_rest() {
            access(&*self.shared.backend);
        }
    }

    /// The lock of the device, with the count of runs under way.
    pub fn lock(&self) -> &DeviceLock {
        &self.shared.lock
    }
}

fn serve(shared: &Shared, receiver: &Receiver<Submission>) {
    for submission in receiver {
        // The reader of the work hears of a panic by its fence. Work that follows runs.
        let run = || shared.lock.take(|| submission.run(&*shared.backend));
        let _ = catch_unwind(AssertUnwindSafe(run));
    }
}
