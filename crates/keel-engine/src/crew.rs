//! The threads of a split model's devices. Each lives as long as the engine, and runs the steps of its device in order.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use keel_array::{Array, ArrayError, Executable, FailedRun, Runtime};

use crate::{EngineError, Result};

/// A step of a device, ready to run.
pub(crate) struct Job {
    pub step: Executable,
    /// The destination whose bytes come to the host, if any do.
    pub drawn: Option<Array>,
}

/// Why a device's run did not succeed.
pub(crate) enum Failure {
    Failed(Box<FailedRun>),
    /// A bug of ours. How far the run came is not known.
    Panicked(String),
    /// The device's thread has ended, so nothing was run.
    Lost,
}

impl Failure {
    /// Whether it follows from the failure of another device.
    pub fn is_consequence(&self) -> bool {
        let exchanges = ["send", "receive", "all_reduce", "all_gather", "exchange"];
        match self {
            Failure::Panicked(_) | Failure::Lost => false,
            Failure::Failed(failed) => {
                matches!(failed.error(), ArrayError::Kernel { op, .. } if exchanges.contains(&op.as_str()))
            }
        }
    }

    pub fn into_error(self) -> EngineError {
        let step = |reason| ArrayError::Kernel { op: "step".into(), reason };
        match self {
            Failure::Failed(failed) => ArrayError::from(failed).into(),
            Failure::Panicked(message) => {
                step(format!("a device of the model panicked, which is a bug: {message}")).into()
            }
            Failure::Lost => step("the thread of a device has ended".into()).into(),
        }
    }
}

/// A device's program in a step, and how it ended.
pub(crate) struct Ended {
    pub step: Executable,
    /// The bytes that came to the host.
    pub outcome: Result<Vec<u8>, Failure>,
}

impl Ended {
    /// Whether the run has changed a state of this device; `None` if that is not known.
    pub fn has_mutated(&self, state: &Array) -> Option<bool> {
        match &self.outcome {
            Ok(_) => Some(self.step.mutates(state)),
            Err(Failure::Lost) => Some(false),
            Err(Failure::Panicked(_)) => (!self.step.mutates(state)).then_some(false),
            Err(Failure::Failed(failed)) => failed.has_mutated(state),
        }
    }
}

/// Tells the other devices if a run ends without success, also by a panic.
struct Membership<'a> {
    runtime: &'a Runtime,
    has_succeeded: bool,
}

impl Drop for Membership<'_> {
    fn drop(&mut self) {
        if let Some(group) = self.runtime.backend().group().filter(|_| !self.has_succeeded) {
            group.abandon();
        }
    }
}

impl Job {
    /// Runs the step on this thread, as a member of its device's group.
    pub fn run(self) -> Ended {
        let Job { step, drawn } = self;
        let mut membership = Membership { runtime: step.runtime(), has_succeeded: false };
        let run = || match &drawn {
            None => step.run().map(|()| Vec::new()),
            Some(place) => {
                let mut bytes = vec![0; place.bytes()];
                step.submit(place).wait(&mut bytes).map(|()| bytes)
            }
        };
        // A panic of the host must end the step of all devices, and leave the engine usable.
        let outcome = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(outcome) => outcome.map_err(Failure::Failed),
            Err(panic) => Err(Failure::Panicked(message_of(&*panic))),
        };
        membership.has_succeeded = outcome.is_ok();
        drop(membership);
        Ended { step, outcome }
    }
}

/// What a panic says.
fn message_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message").into()
}

/// A job that was handed to a thread.
pub(crate) struct Running {
    step: Executable,
    ended: Receiver<Ended>,
}

impl Running {
    /// Waits for the job's end.
    pub fn wait(self) -> Ended {
        let Running { step, ended } = self;
        ended.recv().unwrap_or_else(|_| Ended { step, outcome: Err(Failure::Lost) })
    }
}

/// The thread of a device. Dropping it waits for its jobs.
pub(crate) struct DeviceThread {
    jobs: Option<Sender<(Job, Sender<Ended>)>>,
    thread: Option<JoinHandle<()>>,
}

impl DeviceThread {
    /// Starts the thread of device `rank`.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(rank: usize) -> Result<DeviceThread> {
        let (jobs, received) = channel::<(Job, Sender<Ended>)>();
        let serve = move || {
            for (job, end) in received {
                // The receiver is gone if the step's thread was ended by a panic.
                let _ = end.send(job.run());
            }
        };
        let thread = std::thread::Builder::new().name(format!("keel-device-{rank}")).spawn(serve);
        let refused = |error: io::Error| {
            EngineError::Option(format!("device {rank} of the model could not be given a thread: {error}"))
        };
        Ok(DeviceThread { jobs: Some(jobs), thread: Some(thread.map_err(refused)?) })
    }

    /// Hands a job to the thread.
    pub fn hand(&self, job: Job) -> Running {
        let (end, ended) = channel();
        let step = job.step.clone();
        if let Some(jobs) = &self.jobs {
            // If the thread has ended, the waiter learns it.
            let _ = jobs.send((job, end));
        }
        Running { step, ended }
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
