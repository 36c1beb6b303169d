//! Steps of a model that is split over several devices.
//!
//! Each device has a runtime, its part of the model, and prepared steps of its own. A step is one program on each
//! device. The programs run at the same time and meet in the exchanges of [`keel_array::Group`]. One device, the
//! *lead*, has the output head: its results are those of the step.
//!
//! ```text
//! device 0          embedding ▸ layers ▸ send ─┐
//! device 1                          receive ◀──┘ layers ▸ send ─┐
//! device 2, lead                                    receive ◀───┘ layers ▸ norm ▸ output head ▸ draw
//! ```

use std::io;

use keel_array::{Array, ArrayError, Executable, FailedRun, Regime, RowLog, Runtime};
use keel_cache::{CacheSpec, LayerSpec};
use keel_models::HybridModel;

use crate::step::{Outcome, Rows, Stepper};
use crate::{Engine, EngineError, Result};

/// A device of a split model that is not the lead.
pub(crate) struct Peer {
    pub runtime: Runtime,
    pub model: HybridModel,
    pub stepper: Stepper,
}

impl Peer {
    /// Whether the device takes part in a step: what comes after the layers is run where it lies.
    pub fn takes_part(&self, outcome: Outcome) -> bool {
        outcome.runs_layers() || self.model.part.is_last()
    }
}

/// Where the lead writes bytes that come to the host, and these bytes.
pub(crate) type Drawn<'a> = (&'a Array, &'a mut [u8]);

/// Why a device's run did not succeed.
enum Failure {
    /// The system refused a thread for it.
    NotStarted(io::Error),
    Failed(Box<FailedRun>),
}

impl Failure {
    /// Whether it follows from the failure of another device.
    fn is_consequence(&self) -> bool {
        let exchanges = ["send", "receive", "all_reduce", "all_gather"];
        match self {
            Failure::NotStarted(_) => false,
            Failure::Failed(failed) => {
                matches!(failed.error(), ArrayError::Kernel { op, .. } if exchanges.contains(&op.as_str()))
            }
        }
    }

    fn into_error(self) -> EngineError {
        match self {
            Failure::NotStarted(error) => {
                EngineError::Option(format!("a device of the model could not be given a thread: {error}"))
            }
            Failure::Failed(failed) => ArrayError::from(failed).into(),
        }
    }
}

/// A device's program in a step, and how it ended.
struct Ended {
    step: Executable,
    outcome: Result<(), Failure>,
}

impl Ended {
    /// Whether the run has changed a state of this device; `None` if that is not known.
    fn has_mutated(&self, state: &Array) -> Option<bool> {
        match &self.outcome {
            Ok(()) => Some(self.step.mutates(state)),
            Err(Failure::NotStarted(_)) => Some(false),
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

/// Runs a device's program as a member of its group.
fn as_member(step: &Executable, run: impl FnOnce() -> Result<(), Box<FailedRun>>) -> Result<(), Failure> {
    let mut membership = Membership { runtime: step.runtime(), has_succeeded: false };
    let outcome = run();
    membership.has_succeeded = outcome.is_ok();
    outcome.map_err(Failure::Failed)
}

/// Runs the programs at the same time, each on a thread of its own; that of the lead, the last, on the caller's.
fn run_together(mut steps: Vec<Executable>, drawn: Option<Drawn<'_>>) -> Vec<Ended> {
    let Some(lead) = steps.pop() else { return Vec::new() };
    let run_lead = || match drawn {
        Some((place, bytes)) => lead.submit(place).wait(bytes),
        None => lead.run(),
    };
    let outcomes = std::thread::scope(|scope| {
        let start = |step| {
            let thread = std::thread::Builder::new().name("keel-device".into());
            thread.spawn_scoped(scope, move || as_member(step, || step.run())).map_err(|error| {
                drop(Membership { runtime: step.runtime(), has_succeeded: false });
                Failure::NotStarted(error)
            })
        };
        let threads: Vec<_> = steps.iter().map(start).collect();
        let own = as_member(&lead, run_lead);
        let join = |thread: Result<std::thread::ScopedJoinHandle<'_, _>, Failure>| match thread?.join() {
            Ok(outcome) => outcome,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        threads.into_iter().map(join).chain([own]).collect::<Vec<_>>()
    });
    steps.push(lead.clone());
    steps.into_iter().zip(outcomes).map(|(step, outcome)| Ended { step, outcome }).collect()
}

/// Recurrent layers among these.
fn recurrent(layers: &[LayerSpec]) -> usize {
    layers.iter().filter(|layer| matches!(layer, LayerSpec::Recurrent { .. })).count()
}

/// A device's share of a commit; `None` if its layers are committed already.
fn commit_of(stepper: &Stepper, spec: &CacheSpec, (windows, states): (usize, usize)) -> Option<Outcome> {
    let before = recurrent(&spec.layers[..stepper.layers().start]);
    let own = recurrent(&spec.layers[stepper.layers()]);
    let (windows, states) = (windows.saturating_sub(before), states.saturating_sub(before));
    (states < own).then_some(Outcome::Commit { windows: windows.min(own), states })
}

impl Outcome {
    /// Whether a step with this outcome hands hidden states on from this part of a model.
    pub(crate) fn hands_on(self, model: &HybridModel) -> bool {
        !model.part.is_last() && !matches!(self, Outcome::Commit { .. })
    }

    /// Whether a step with this outcome runs the model's layers, and so takes all devices. Others are the lead's.
    pub(crate) fn runs_layers(self) -> bool {
        match self {
            Outcome::State | Outcome::LastLogits | Outcome::Hidden | Outcome::OpenRows => true,
            Outcome::MtpHidden
            | Outcome::Head
            | Outcome::Draft
            | Outcome::HeadState
            | Outcome::KeptLogits => false,
            Outcome::Commit { .. } => true,
        }
    }
}

impl Engine {
    /// Whether the model is split over several devices.
    pub fn is_split(&self) -> bool {
        !self.peers.is_empty()
    }

    /// The runtimes of the devices, by rank.
    pub fn runtimes(&self) -> impl Iterator<Item = &Runtime> {
        self.peers.iter().map(|peer| &peer.runtime).chain([&self.runtime])
    }

    /// Runs a step on all devices that take part in it. The bytes of `drawn` come to the host.
    pub(crate) fn run_split(
        &mut self,
        (regime, outcome): (Regime, Outcome),
        rows: &[Rows<'_>],
        drawn: Option<Drawn<'_>>,
    ) -> Result<()> {
        for row in rows {
            self.cache.expect_whole(row.sequence)?;
        }
        if let Outcome::Commit { windows, states } = outcome {
            return self.commit_split(regime, (windows, states), rows);
        }
        let mut steps = Vec::with_capacity(self.peers.len() + 1);
        for peer in self.peers.iter_mut().filter(|peer| peer.takes_part(outcome)) {
            let Peer { runtime, model, stepper } = peer;
            steps.push(stepper.step_for(runtime, model, &self.cache, (regime, outcome), rows)?.clone());
        }
        let lead = self.stepper.step_for(&self.runtime, &self.model, &self.cache, (regime, outcome), rows)?;
        steps.push(lead.clone());
        let commits_rows = self.stepper.row_log(regime, outcome) != RowLog::KeepOpen;
        self.note_ended(run_together(steps, drawn), rows, ((0, 0), commits_rows))
    }

    /// The devices that share the output head with the lead.
    fn sharers(&mut self) -> impl Iterator<Item = &mut Peer> {
        self.peers.iter_mut().filter(|peer| peer.model.part.is_last())
    }

    /// Computes the logits of rows of hidden states, at most [`crate::step::HEAD_ROWS`] of them.
    pub(crate) fn run_head_split(&mut self, hidden: &[f32]) -> Result<()> {
        let mut steps = Vec::with_capacity(self.peers.len() + 1);
        for Peer { runtime, model, stepper } in &mut self.peers {
            if model.part.is_last() {
                steps.push(stepper.head_step(runtime, model, &self.cache, hidden)?.clone());
            }
        }
        steps.push(self.stepper.head_step(&self.runtime, &self.model, &self.cache, hidden)?.clone());
        self.note_ended(run_together(steps, None), &[], ((0, 0), false))
    }

    /// Overwrites the input of the MTP head, on every device that has it.
    pub(crate) fn write_hidden(&mut self, hidden: &[f32]) -> Result<()> {
        self.sharers().try_for_each(|peer| peer.stepper.write_hidden(hidden))?;
        self.stepper.write_hidden(hidden)
    }

    /// Sets the hidden states for a pass of the MTP head, on every device that has it.
    pub(crate) fn write_draft_input(&mut self, hidden: &[f32]) -> Result<()> {
        self.sharers().try_for_each(|peer| peer.stepper.write_draft_input(hidden))?;
        self.stepper.write_draft_input(hidden)
    }

    /// Commits device by device, so that the committed layers are always the first ones.
    fn commit_split(&mut self, regime: Regime, settled: (usize, usize), rows: &[Rows<'_>]) -> Result<()> {
        let mut all = Vec::new();
        let (cache, spec) = (&self.cache, self.cache.spec());
        let lead = (&self.runtime, &self.model, &mut self.stepper);
        let peers = self.peers.iter_mut().map(|peer| (&peer.runtime, &peer.model, &mut peer.stepper));
        for (runtime, model, stepper) in peers.chain([lead]) {
            let Some(outcome) = commit_of(stepper, spec, settled) else { continue };
            let step = stepper.step_for(runtime, model, cache, (regime, outcome), rows)?.clone();
            let ended = run_together(vec![step], None);
            let has_failed = ended.iter().any(|ended| ended.outcome.is_err());
            all.extend(ended);
            if has_failed {
                break;
            }
        }
        self.note_ended(all, rows, (settled, false))
    }

    /// Records what a step did to its sequences if it failed on a device. Returns the error that was the first cause.
    fn note_ended(
        &mut self,
        ended: Vec<Ended>,
        rows: &[Rows<'_>],
        (settled, commits_rows): ((usize, usize), bool),
    ) -> Result<()> {
        if ended.iter().all(|ended| ended.outcome.is_ok()) {
            return Ok(());
        }
        self.runtimes().filter_map(|runtime| runtime.backend().group()).for_each(|group| group.rejoin());
        let has_mutated = |state: &Array| {
            let own = ended.iter().find(|ended| ended.step.runtime().is_same(state.runtime()));
            own.map_or(Some(false), |ended| ended.has_mutated(state))
        };
        let slots = rows.iter().map(|row| row.sequence.slot());
        self.cache.note_failure(slots, &has_mutated, settled, commits_rows);
        let mut failures: Vec<Failure> = ended.into_iter().filter_map(|ended| ended.outcome.err()).collect();
        let cause = failures.iter().position(|failure| !failure.is_consequence()).unwrap_or(0);
        Err(failures.swap_remove(cause).into_error())
    }
}
