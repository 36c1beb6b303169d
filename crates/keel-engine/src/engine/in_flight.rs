//! A step that was submitted and not yet taken.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use keel_array::Regime;
use keel_cache::SlotId;

use crate::device_thread::{BegunStep, FinishedJob, JobHandle, StepOnThread};
use crate::step::ids_of;
use crate::{EngineError, Result};

/// One program of a step under way. Its tokens come to the host with it.
pub(crate) struct InFlightRun {
    pub run: BegunStep,
    /// The same step on the other devices of a tensor split.
    pub peers: Vec<StepOnThread>,
    pub regime: Regime,
    pub slots: Vec<SlotId>,
}

/// A work item in its step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Item {
    pub regime: Regime,
    /// Its row among those of its regime.
    pub row: usize,
    /// Whether the device draws its token.
    pub is_drawn: bool,
    /// Its row among the kept logits of its regime, if the host draws its token.
    pub kept: Option<usize>,
}

/// A step that was submitted and not yet taken.
pub(crate) struct InFlightStep {
    pub number: u64,
    pub runs: Vec<InFlightRun>,
    /// A pass of the MTP head after them. No token depends on it.
    pub catch_up: Option<InFlightRun>,
    /// Why a program of the step could not be submitted.
    pub refusal: Option<EngineError>,
    pub items: Vec<Item>,
    /// When it was submitted.
    pub since: Instant,
}

/// The time of a step on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepTime {
    Known(Duration),
    AtMost(Duration),
}

impl StepTime {
    /// The same as a bound on the time of a part of the step.
    pub fn of_part(self) -> StepTime {
        match self {
            StepTime::Known(time) | StepTime::AtMost(time) => StepTime::AtMost(time),
        }
    }
}

/// Measures how long steps take on the device, from the times at which the host sees their ends.
///
/// The host sees the end of a step if it waited for it. A step that was submitted before the end of the step before it
/// begins then. So its time is known if the host waited for both. Otherwise the caller may have paused, and the
/// measured time is an upper bound.
#[derive(Default)]
pub(crate) struct StepTimer {
    /// When the step taken last ended, if the host saw it.
    last: Option<Instant>,
}

impl StepTimer {
    /// The host has seen a step's end if it waited for at least 1 / `WAITED` of its time.
    const WAITED: u32 = 8;

    /// The time of a step that was submitted at `submitted`. The host began to wait for it at `asked`, and went on at
    /// `ended`.
    pub fn note(&mut self, submitted: Instant, asked: Instant, ended: Instant) -> StepTime {
        let before = self.last.take();
        let begun = before.map_or(submitted, |before| before.max(submitted));
        let time = ended.duration_since(begun);
        self.last = (Self::WAITED * ended.duration_since(asked) >= time).then_some(ended);
        let is_known = self.last.is_some() && before.is_some_and(|before| submitted <= before);
        if is_known { StepTime::Known(time) } else { StepTime::AtMost(time) }
    }

    /// Something else ran, or a step failed.
    pub fn forget(&mut self) {
        self.last = None;
    }
}

/// The step taken last.
#[derive(Default)]
pub(crate) struct Taken {
    /// Its number.
    pub step: u64,
    pub items: Vec<Item>,
    /// How long the host waited for it.
    pub waited: Duration,
    /// Hidden states after its work items, answers first, once they are read.
    pub hidden: Vec<f32>,
}

impl Taken {
    /// Takes over the number and the work items of a step that has run.
    pub fn note(&mut self, step: &mut InFlightStep) {
        self.step = step.number;
        self.items = std::mem::take(&mut step.items);
        self.hidden.clear();
    }

    /// An item's share of the time that the host waited.
    pub fn share(&self) -> Duration {
        self.waited / self.items.len().max(1) as u32
    }

    /// How many answers it had.
    pub fn answers(&self) -> usize {
        self.items.iter().filter(|item| item.regime == Regime::Decode).count()
    }
}

/// A program that has ended.
pub(crate) struct EndedRun {
    pub regime: Regime,
    pub slots: Vec<SlotId>,
    /// How it ended on each device, on the lead last.
    pub devices: Vec<FinishedJob>,
}

impl EndedRun {
    /// Whether it has failed on a device.
    pub fn has_failed(&self) -> bool {
        self.devices.iter().any(|ended| ended.outcome.is_err())
    }

    /// Makes the devices of these programs ready for a next one if one has failed. Later programs that are under way
    /// end in this call, and their results are undefined.
    pub fn rejoin<'a>(runs: impl Iterator<Item = &'a EndedRun> + Clone) {
        // A program of the lead alone may be the one that has failed.
        FinishedJob::rejoin(runs.flat_map(|run| &run.devices));
    }

    /// The tokens that it drew; none if it has failed.
    pub fn tokens(&self) -> Vec<u32> {
        let of_lead = self.devices.last().filter(|_| !self.has_failed());
        of_lead.and_then(|ended| ended.outcome.as_ref().ok()).map(|bytes| ids_of(bytes)).unwrap_or_default()
    }
}

/// A step that has ended.
pub(crate) struct EndedStep {
    pub runs: Vec<EndedRun>,
    /// The pass of the MTP head after them. If it has failed, the head's next drafts are worse.
    pub catch_up: Option<EndedRun>,
}

impl EndedStep {
    /// All of its programs.
    pub fn into_all(self) -> impl Iterator<Item = EndedRun> {
        self.runs.into_iter().chain(self.catch_up)
    }

    /// As [`EndedRun::rejoin`], for all of its programs.
    pub fn rejoin(&self) {
        EndedRun::rejoin(self.runs.iter().chain(&self.catch_up));
    }
}

impl InFlightRun {
    /// Waits for the program, on all devices at the same time: one that fails lets the others stop.
    pub fn wait(self) -> EndedRun {
        let InFlightRun { run, peers, regime, slots } = self;
        let peers: Vec<JobHandle> = peers.into_iter().map(StepOnThread::end).collect();
        let lead = run.wait();
        EndedRun { regime, slots, devices: peers.into_iter().map(JobHandle::wait).chain([lead]).collect() }
    }
}

/// The steps under way, the oldest first.
#[derive(Default)]
pub(crate) struct InFlightSteps {
    pub steps: VecDeque<InFlightStep>,
    /// Set if one has failed on a device. Those after it are then not begun on any.
    has_failed: Arc<AtomicBool>,
}

impl InFlightSteps {
    /// The mark that a step has failed, for one that is to be begun.
    pub fn failure_mark(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.has_failed)
    }

    /// Forgets which rows belong to the sequence of this slot, which has ended.
    pub fn forget_slot(&mut self, slot: SlotId) {
        let runs = self.steps.iter_mut().flat_map(|step| &mut step.runs);
        runs.for_each(|run| run.slots.retain(|of| *of != slot));
    }

    /// Waits for all steps, whose tokens are lost. Devices are ready for a next step then.
    pub fn end(&mut self) -> Vec<EndedStep> {
        let mut all = Vec::new();
        while let Some(step) = self.steps.pop_front() {
            let ended = step.wait();
            ended.rejoin();
            all.push(ended);
        }
        if self.has_failed.load(Ordering::Acquire) {
            self.has_failed = Arc::default();
        }
        all
    }
}

impl Drop for InFlightSteps {
    /// Runs the steps to their end, and leaves the devices ready for another engine.
    fn drop(&mut self) {
        self.end();
    }
}

impl InFlightStep {
    /// Adds a program that was submitted, or the reason why it could not be.
    pub fn add(&mut self, submitted: Result<InFlightRun>) {
        match submitted {
            Ok(run) => self.runs.push(run),
            Err(error) => drop(self.refusal.get_or_insert(error)),
        }
    }

    /// Waits for all of its programs.
    pub fn wait(self) -> EndedStep {
        let runs = self.runs.into_iter().map(InFlightRun::wait).collect();
        EndedStep { runs, catch_up: self.catch_up.map(InFlightRun::wait) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The times that are found of steps of 8 ms on the device, the next one submitted as soon as one is taken. Before
    /// it asks for a step, the host pauses for these milliseconds.
    fn times(pauses: &[u64]) -> Vec<Option<u64>> {
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let mut timer = StepTimer::default();
        // Two steps are submitted at the start.
        let (mut submitted, mut now, mut idle_from) = (vec![start, start], start, start);
        let times = pauses.iter().enumerate().map(|(i, &pause)| {
            let asked = now + ms(pause);
            let ended = submitted[i].max(idle_from) + ms(8);
            (now, idle_from) = (ended.max(asked), ended);
            submitted.push(now);
            match timer.note(submitted[i], asked, now) {
                StepTime::Known(time) => Some(time.as_millis() as u64),
                StepTime::AtMost(time) => {
                    assert!(time >= ms(8));
                    None
                }
            }
        });
        times.collect()
    }

    #[test]
    fn pauses_of_the_caller_are_not_time_of_the_device() {
        let steady = times(&[0, 0, 1, 6, 0, 0]);
        assert_eq!(steady[1..], [Some(8); 5], "the device works while the caller pauses");
        let paused = times(&[0, 0, 0, 50, 0, 0, 0, 9, 9, 9, 0, 0]);
        assert!(paused.iter().flatten().all(|&time| time == 8), "{paused:?}");
        assert_eq!(paused[1..3], [Some(8); 2]);
        assert_eq!((paused[6], paused[11]), (Some(8), Some(8)), "{paused:?}");
    }
}
