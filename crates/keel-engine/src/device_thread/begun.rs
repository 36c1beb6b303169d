//! Steps that a device begins before the host waits for them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use keel_array::{Executable, PendingRun};

use super::work_channel::{Disconnected, ResultReceiver};
use super::{DeviceThread, End, Failure, FinishedJob, JobHandle, Membership, Work};
use crate::step::PreparedStep;

/// A step that a device has begun. Dropping it waits for its end.
pub(crate) struct BegunStep {
    step: Executable,
    run: Result<PendingRun, Failure>,
    /// Bytes that come to the host.
    bytes: usize,
    /// Set if a step of the same queue, on any device, has failed. Later ones are then not begun: a device that has
    /// failed would wait for peers that wait for it no more.
    has_failed: Arc<AtomicBool>,
    /// Whether the other devices were told at its begin that it has failed.
    is_told: bool,
}

impl BegunStep {
    /// Begins a step on this thread, as a member of its device's group. A backend that does not queue also ends it.
    pub fn begin(prepared: PreparedStep, has_failed: Arc<AtomicBool>) -> BegunStep {
        let membership = Membership::of(&prepared.step);
        BegunStep::begin_as(membership, prepared, has_failed)
    }

    pub(super) fn begin_as(
        mut membership: Membership,
        PreparedStep { step, drawn }: PreparedStep,
        has_failed: Arc<AtomicBool>,
    ) -> BegunStep {
        let run = match has_failed.load(Ordering::Acquire) {
            true => Err(Failure::Skipped),
            false => catch_unwind(AssertUnwindSafe(|| step.submit(&drawn)))
                .map_err(|panic| Failure::of_panic(&*panic)),
        };
        let is_refused = run.as_ref().is_ok_and(PendingRun::has_failed);
        membership.has_succeeded = matches!(run, Err(Failure::Skipped)) || run.is_ok() && !is_refused;
        let is_told = !membership.has_succeeded;
        has_failed.fetch_or(is_told, Ordering::AcqRel);
        BegunStep { step, run, bytes: drawn.bytes(), has_failed, is_told }
    }

    /// Waits for its end, on this thread.
    pub fn wait(self) -> FinishedJob {
        let membership = Membership::of(&self.step);
        self.wait_as(membership)
    }

    pub(super) fn wait_as(self, mut membership: Membership) -> FinishedJob {
        let BegunStep { step, run, bytes, has_failed, is_told } = self;
        let mut drawn = vec![0; bytes];
        let wait = |run: PendingRun| {
            catch_unwind(AssertUnwindSafe(|| run.wait(&mut drawn).map_err(Failure::Failed)))
                .unwrap_or_else(|panic| Err(Failure::of_panic(&*panic)))
        };
        let outcome = run.and_then(wait).map(|()| drawn);
        membership.has_succeeded = is_told || matches!(outcome, Ok(_) | Err(Failure::Skipped));
        has_failed.fetch_or(!membership.has_succeeded, Ordering::AcqRel);
        FinishedJob { step, outcome }
    }
}

/// A step that a thread is to begin.
pub(crate) struct Beginning {
    thread: Arc<DeviceThread>,
    step: Executable,
    has_failed: Arc<AtomicBool>,
    begun: ResultReceiver<End>,
}

impl Beginning {
    /// Waits until the step has begun.
    pub fn wait(self) -> StepOnThread {
        let Beginning { thread, step, has_failed, begun } = self;
        let begun = match begun.wait() {
            Ok(End::Begun(begun)) => begun,
            Ok(End::Finished(_)) => unreachable!("the work was to begin"),
            Err(Disconnected) => {
                has_failed.store(true, Ordering::Release);
                BegunStep { step, run: Err(Failure::Lost), bytes: 0, has_failed, is_told: true }
            }
        };
        StepOnThread { thread, begun }
    }
}

/// A step that a thread has begun.
pub(crate) struct StepOnThread {
    thread: Arc<DeviceThread>,
    begun: BegunStep,
}

impl StepOnThread {
    /// Lets the thread wait for its end.
    pub fn end(self) -> JobHandle {
        let StepOnThread { thread, begun } = self;
        let step = begun.step.clone();
        thread.give(step, Work::Wait(begun))
    }
}

impl DeviceThread {
    /// Lets the thread begin a step after the work that it has.
    pub fn begin(self: &Arc<DeviceThread>, prepared: PreparedStep, has_failed: Arc<AtomicBool>) -> Beginning {
        let step = prepared.step.clone();
        let work = Work::Begin(prepared, Arc::clone(&has_failed));
        let JobHandle { step, ended } = self.give(step, work);
        Beginning { thread: Arc::clone(self), step, has_failed, begun: ended }
    }
}
