//! The threads of a split model's devices, and of a vision tower with a device of its own. Each lives as long as the
//! engine, and runs the programs of its device in order.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use keel_array::{Array, ArrayError, Backend, Executable, FailedRun, Runtime, panic_message};
use work_channel::{Disconnected, ResultReceiver, WorkSender, line};

use crate::step::PreparedStep;
use crate::{EngineError, Result};

mod begun;
mod work_channel;

pub(crate) use begun::{Beginning, BegunStep, StepOnThread};

/// A step of a device, ready to run.
pub(crate) struct Job {
    pub step: Executable,
    /// The destination whose bytes come to the host, if any do.
    pub drawn: Option<Array>,
    /// The job's place among jobs that queue up; `None` if its buffers are filled.
    pub queued: Option<Queued>,
}

/// For a job whose buffers are filled when its turn comes.
pub(crate) struct Queued {
    /// Fills the buffers, on the device's thread.
    pub fill: Box<dyn FnOnce() -> Result<()> + Send>,
    /// Set if a job of the same queue, on any device, has failed. Later ones then do not run.
    pub has_failed: Arc<AtomicBool>,
}

/// Why a device's run did not succeed.
pub(crate) enum Failure {
    Failed(Box<FailedRun>),
    /// A bug of ours. How far the run came is not known.
    Panicked(String),
    /// The device's buffers could not be filled, so nothing was run.
    Unfilled(EngineError),
    /// An earlier job of the same queue has failed, so nothing was run.
    Skipped,
    /// The device's thread has ended, so nothing was run.
    Lost,
}

impl Failure {
    fn of_panic(panic: &(dyn Any + Send)) -> Failure {
        Failure::Panicked(panic_message(panic).to_owned())
    }

    /// Whether it follows from the failure of another device.
    pub fn is_consequence(&self) -> bool {
        let exchanges = ["send", "receive", "all_reduce", "all_gather", "reduce_scatter", "exchange"];
        match self {
            Failure::Panicked(_) | Failure::Unfilled(_) | Failure::Lost => false,
            Failure::Skipped => true,
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
            Failure::Unfilled(error) => error,
            Failure::Skipped => step("a step before this one has failed".into()).into(),
            Failure::Lost => step("the thread of a device has ended".into()).into(),
        }
    }
}

/// A device's program in a step, and how it ended.
pub(crate) struct FinishedJob {
    pub step: Executable,
    /// The bytes that came to the host.
    pub outcome: Result<Vec<u8>, Failure>,
}

impl FinishedJob {
    /// Makes the devices of these jobs ready for a next one if a job has failed, each device once.
    pub fn rejoin<'a>(jobs: impl Iterator<Item = &'a FinishedJob> + Clone) {
        if jobs.clone().all(|job| job.outcome.is_ok()) {
            return;
        }
        let mut devices: Vec<&dyn Backend> = Vec::new();
        for job in jobs {
            let device = job.step.runtime().backend();
            if !devices.iter().any(|other| std::ptr::addr_eq(*other, device)) {
                devices.push(device);
            }
        }
        devices.into_iter().filter_map(|device| device.group()).for_each(|group| group.rejoin());
    }

    /// Whether the run has changed a state of this device; `None` if that is not known.
    pub fn has_mutated(&self, state: &Array) -> Option<bool> {
        match &self.outcome {
            Ok(_) => Some(self.step.mutates(state)),
            Err(Failure::Unfilled(_) | Failure::Skipped | Failure::Lost) => Some(false),
            Err(Failure::Panicked(_)) => (!self.step.mutates(state)).then_some(false),
            Err(Failure::Failed(failed)) => failed.has_mutated(state),
        }
    }
}

/// Tells the other devices if a run ends without success: by an error, by a panic, or because its thread has ended and
/// never begins it. Without that they would wait for this device.
struct Membership {
    runtime: Runtime,
    has_succeeded: bool,
}

impl Membership {
    fn of(step: &Executable) -> Membership {
        Membership { runtime: step.runtime().clone(), has_succeeded: false }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if let Some(group) = self.runtime.backend().group().filter(|_| !self.has_succeeded) {
            group.abandon();
        }
    }
}

/// A job that its own thread begins later. If it is dropped before, the other devices stop waiting for it.
pub(crate) struct DeferredJob {
    membership: Membership,
    job: Job,
}

impl DeferredJob {
    /// Runs the job on this thread.
    pub fn run(self) -> FinishedJob {
        self.job.run_as(self.membership)
    }
}

impl Job {
    /// Runs a step that is ready. The bytes of `drawn` come to the host.
    pub fn of(step: Executable, drawn: Option<Array>) -> Job {
        Job { step, drawn, queued: None }
    }

    /// The job, to be run later.
    pub fn later(self) -> DeferredJob {
        DeferredJob { membership: Membership::of(&self.step), job: self }
    }

    /// Runs the step on this thread, as a member of its device's group.
    pub fn run(self) -> FinishedJob {
        self.later().run()
    }

    fn run_as(self, mut membership: Membership) -> FinishedJob {
        let Job { step, drawn, queued } = self;
        let (fill, has_failed) = queued.map(|Queued { fill, has_failed }| (fill, has_failed)).unzip();
        let run = || {
            if let Some(fill) = fill {
                if has_failed.as_ref().is_some_and(|failed| failed.load(Ordering::Acquire)) {
                    return Err(Failure::Skipped);
                }
                fill().map_err(Failure::Unfilled)?;
            }
            match &drawn {
                None => step.run().map(|()| Vec::new()).map_err(Failure::Failed),
                Some(place) => {
                    let mut bytes = vec![0; place.bytes()];
                    step.submit(place).wait(&mut bytes).map(|()| bytes).map_err(Failure::Failed)
                }
            }
        };
        // A panic of the host must end the step of all devices, and leave the engine usable.
        let outcome =
            catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| Err(Failure::of_panic(&*panic)));
        membership.has_succeeded = outcome.is_ok();
        if let Some(failed) = has_failed.filter(|_| outcome.is_err()) {
            failed.store(true, Ordering::Release);
        }
        drop(membership);
        FinishedJob { step, outcome }
    }
}

/// Work for a thread.
enum Work {
    Run(Job),
    Begin(PreparedStep, Arc<AtomicBool>),
    Wait(BegunStep),
}

/// The result of a thread's work.
enum End {
    Finished(FinishedJob),
    Begun(BegunStep),
}

impl Work {
    fn run_as(self, membership: Membership) -> End {
        match self {
            Work::Run(job) => End::Finished(job.run_as(membership)),
            Work::Begin(step, has_failed) => End::Begun(BegunStep::begin_as(membership, step, has_failed)),
            Work::Wait(begun) => End::Finished(begun.wait_as(membership)),
        }
    }
}

/// A job that was handed to a thread.
pub(crate) struct JobHandle {
    step: Executable,
    ended: ResultReceiver<End>,
}

impl JobHandle {
    /// Waits for the job's end.
    pub fn wait(self) -> FinishedJob {
        let JobHandle { step, ended } = self;
        match ended.wait() {
            Ok(end) => end.finished(),
            Err(Disconnected) => FinishedJob { step, outcome: Err(Failure::Lost) },
        }
    }

    /// Waits for the job's end, but no longer than `patience`. An end is returned once.
    pub fn wait_for(&self, patience: Duration) -> Option<FinishedJob> {
        match self.ended.wait_for(patience) {
            Ok(end) => end.map(End::finished),
            Err(Disconnected) => Some(FinishedJob { step: self.step.clone(), outcome: Err(Failure::Lost) }),
        }
    }
}

impl End {
    fn finished(self) -> FinishedJob {
        match self {
            End::Finished(job) => job,
            End::Begun(_) => unreachable!("the work was to run, or to wait"),
        }
    }
}

/// The thread of a device. Dropping it waits for its jobs.
pub(crate) struct DeviceThread {
    jobs: Option<WorkSender<Membership, Work, End>>,
    thread: Option<JoinHandle<()>>,
}

impl DeviceThread {
    /// Starts the thread of a device, which is named in errors.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(device: &str) -> Result<DeviceThread> {
        let (jobs, inbox) = line::<Membership, Work, End>();
        let serve = move || {
            while let Some(handed) = inbox.next() {
                handed.run(|membership, work| work.run_as(membership));
            }
        };
        let thread = std::thread::Builder::new().name(format!("keel-{device}")).spawn(serve);
        let refused = |error: io::Error| {
            EngineError::Option(format!("the {device} of the model could not be given a thread: {error}"))
        };
        Ok(DeviceThread { jobs: Some(jobs), thread: Some(thread.map_err(refused)?) })
    }

    /// Hands a job to the thread. If the thread never begins it, the other devices stop waiting before the job is known
    /// to be lost, after which the group is made ready again.
    pub fn hand(&self, job: Job) -> JobHandle {
        let step = job.step.clone();
        self.give(step, Work::Run(job))
    }

    fn give(&self, step: Executable, work: Work) -> JobHandle {
        let jobs = self.jobs.as_ref().expect("it is taken when the thread is dropped");
        let ended = jobs.hand(Membership::of(&step), work);
        JobHandle { step, ended }
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use keel_array::{Category, DType, Peers, RuntimeOptions};
    use keel_cpu::{CpuBackend, CpuGroup, CpuOptions};

    use super::*;

    type Exchange = fn(&Array, Peers) -> Result<Array, ArrayError>;

    /// A step of each of two devices, which exchange their values.
    fn exchanges(exchange: Exchange) -> Vec<Job> {
        let job = |group| {
            let options = CpuOptions { threads: Some(1), group: Some(group), ..CpuOptions::default() };
            let runtime = Runtime::new(Arc::new(CpuBackend::new(options)), RuntimeOptions::default());
            let share = Array::from_slice(&runtime, &[1.0f32, 2.0], [2]).expect("memory");
            let y = runtime.trace(|| exchange(&share, Peers { first: 0, count: 2 })).expect("f32");
            let place = Array::persistent(&runtime, Category::Activations, y.shape().clone(), DType::F32)
                .expect("memory");
            let step = runtime.prepare(&[(&y, &place)]).expect("it can run");
            Job { step, drawn: Some(place), queued: None }
        };
        CpuGroup::of(2).into_iter().map(job).collect()
    }

    /// Runs the steps of two devices, the first on `thread`, and returns their outcomes.
    fn run_both(thread: DeviceThread, exchange: Exchange) -> [Result<Vec<u8>, Failure>; 2] {
        let (done, outcomes) = channel();
        std::thread::spawn(move || {
            let [first, second] =
                <[Job; 2]>::try_from(exchanges(exchange)).unwrap_or_else(|_| unreachable!("two devices"));
            let running = thread.hand(first);
            let lead = second.run();
            let _ = done.send([running.wait().outcome, lead.outcome]);
        });
        outcomes.recv_timeout(Duration::from_secs(60)).expect("no device waits for another without end")
    }

    #[test]
    fn devices_add_up_their_values() {
        let thread = DeviceThread::start("device-0").expect("a thread");
        let outcomes = run_both(thread, Array::all_reduce);
        let sum: Vec<u8> = [2.0f32, 4.0].iter().flat_map(|value| value.to_ne_bytes()).collect();
        assert!(outcomes.into_iter().all(|outcome| outcome.is_ok_and(|bytes| bytes == sum)));
    }

    #[test]
    fn the_step_of_a_device_whose_thread_has_ended_ends_for_all() {
        for exchange in [Array::all_reduce, Array::all_gather, Array::reduce_scatter] {
            let (jobs, inbox) = line();
            drop(inbox);
            let [lost, lead] = run_both(DeviceThread { jobs: Some(jobs), thread: None }, exchange);
            assert!(matches!(lost, Err(Failure::Lost)));
            assert!(lead.is_err_and(|failure| failure.is_consequence()));
        }
    }

    /// The thread ends while a job waits for it.
    #[test]
    fn a_job_that_is_never_begun_ends_the_step_for_all() {
        let (jobs, inbox) = line();
        let thread = std::thread::spawn(move || {
            let waiting = inbox.next();
            drop(inbox);
            drop(waiting);
        });
        let thread = DeviceThread { jobs: Some(jobs), thread: Some(thread) };
        let [lost, lead] = run_both(thread, Array::all_reduce);
        assert!(matches!(lost, Err(Failure::Lost)));
        assert!(lead.is_err_and(|failure| failure.is_consequence()));
    }
}
