//! Steps on all devices of a model. Where it is not split, there is one.
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

use std::sync::Arc;

use keel_array::{Array, Executable, Regime, RowLog, Runtime};
use keel_cache::{CacheSpec, CommitProgress, LayerSpec, SlotId};
use keel_models::HybridModel;

use crate::device_thread::{DeviceThread, Failure, FinishedJob, Job, JobHandle};
use crate::step::{Outcome, Rows, StepKind, StepShape, Stepper};
use crate::{Engine, EngineError, Result};

/// A device of a split model that is not the lead.
pub(crate) struct Peer {
    /// Runs its steps. A device that only plans has none.
    pub thread: Option<Arc<DeviceThread>>,
    pub stepper: Stepper,
}

impl Peer {
    fn will_run(&self, step: Executable) -> DeviceStep<'_> {
        DeviceStep { thread: self.thread.as_deref(), job: Job::of(step, None) }
    }

    /// Whether the device takes part in a step. Work after the layers runs only on devices that have the output head.
    pub fn takes_part(&self, outcome: Outcome) -> bool {
        match outcome {
            // They copy results of the lead.
            Outcome::KeptLogits | Outcome::KeptHidden { .. } => false,
            Outcome::MtpHidden | Outcome::Logits | Outcome::Draft | Outcome::MtpState => {
                self.stepper.model().part.is_last()
            }
            Outcome::State
            | Outcome::LastLogits
            | Outcome::Ahead
            | Outcome::Hidden
            | Outcome::OpenRows
            | Outcome::Commit(_) => true,
        }
    }
}

/// Where the lead writes bytes that come to the host, and these bytes.
pub(crate) type Drawn<'a> = (&'a Array, &'a mut [u8]);

/// A device's next step.
pub(crate) struct DeviceStep<'a> {
    /// The device's thread; `None` for the lead, whose step runs on the caller's.
    pub thread: Option<&'a DeviceThread>,
    pub job: Job,
}

impl DeviceStep<'_> {
    fn of_lead(step: Executable, drawn: Option<Array>) -> DeviceStep<'static> {
        DeviceStep { thread: None, job: Job::of(step, drawn) }
    }
}

/// Runs the devices' steps at the same time, and the steps of one device in order. All steps are ready to run. The last
/// step given is the last in the result.
pub(crate) fn run_on_all(shares: Vec<DeviceStep<'_>>) -> Vec<FinishedJob> {
    let (mut there, mut here) = (Vec::new(), Vec::new());
    for DeviceStep { thread, job } in shares {
        match thread {
            Some(thread) => there.push(thread.hand(job)),
            None => here.push(job),
        }
    }
    // The lead is the last of them. The others are waited for after it has run.
    let here: Vec<FinishedJob> = here.into_iter().map(Job::run).collect();
    there.into_iter().map(JobHandle::wait).chain(here).collect()
}

/// Recurrent layers among these.
fn recurrent(layers: &[LayerSpec]) -> usize {
    layers.iter().filter(|layer| matches!(layer, LayerSpec::Recurrent { .. })).count()
}

/// A device's share of a commit; `None` if its layers are committed already.
fn commit_of(stepper: &Stepper, spec: &CacheSpec, settled: CommitProgress) -> Option<Outcome> {
    let before = recurrent(&spec.layers[..stepper.layers().start]);
    let own = recurrent(&spec.layers[stepper.layers()]);
    let (windows, states) = (settled.windows.saturating_sub(before), settled.states.saturating_sub(before));
    (states < own).then_some(Outcome::Commit(CommitProgress { windows: windows.min(own), states }))
}

impl Outcome {
    /// Whether a step with this outcome hands hidden states on from this part of a model.
    pub(crate) fn hands_on(self, model: &HybridModel) -> bool {
        !model.part.is_last() && !matches!(self, Outcome::Commit(_))
    }
}

impl Engine {
    /// Whether the model is split over several devices.
    pub fn is_split(&self) -> bool {
        !self.peers.is_empty()
    }

    /// The runtimes of the devices, by rank; after them that of the vision tower, if it has one of its own.
    pub fn runtimes(&self) -> impl Iterator<Item = &Runtime> {
        self.steppers().map(Stepper::runtime).chain(&self.tower_runtime)
    }

    /// The parts of the model, by rank. The lead's comes last.
    pub(crate) fn steppers(&self) -> impl Iterator<Item = &Stepper> {
        self.peers.iter().map(|peer| &peer.stepper).chain([&self.stepper])
    }

    /// The rank of the lead, the device with the output head. A vision tower's own device comes after it.
    pub fn lead_rank(&self) -> usize {
        self.peers.len()
    }

    /// Names the devices in reports, by rank.
    pub fn name_devices(&mut self, names: Vec<String>) {
        self.device_names = names;
    }

    /// The devices by rank, with their names. Without a name a device is its backend and rank, for example cpu:1.
    pub fn devices(&self) -> impl Iterator<Item = (String, &Runtime)> {
        self.runtimes().enumerate().map(|(rank, runtime)| {
            let name = self.device_names.get(rank).cloned();
            (name.unwrap_or_else(|| format!("{}:{rank}", runtime.backend().name())), runtime)
        })
    }

    /// Runs a step on all devices that take part in it. The bytes of `drawn` come to the host.
    pub(crate) fn run_step(
        &mut self,
        kind: StepKind,
        rows: &[Rows<'_>],
        drawn: Option<Drawn<'_>>,
    ) -> Result<()> {
        self.finish_in_flight()?;
        for row in rows {
            self.cache.expect_whole(row.sequence)?;
        }
        if let Outcome::Commit(settled) = kind.outcome {
            return self.commit_split(kind.regime, settled, rows);
        }
        if let Some(chunks) = self.overlapping_chunks(kind, rows) {
            return self.run_overlapping(kind.outcome, &rows[0], &chunks, drawn);
        }
        let mut shares = Vec::with_capacity(self.peers.len() + 1);
        for peer in self.peers.iter_mut().filter(|peer| peer.takes_part(kind.outcome)) {
            let step = peer.stepper.step_for(kind, rows)?.clone();
            shares.push(peer.will_run(step));
        }
        let lead = self.stepper.step_for(kind, rows)?.clone();
        let (place, bytes) = drawn.map(|(place, bytes)| (place.clone(), bytes)).unzip();
        shares.push(DeviceStep::of_lead(lead, place));
        let commits_rows = self.stepper.row_log(kind) != RowLog::KeepOpen;
        let ended = run_on_all(shares);
        if let (Some(bytes), Some(FinishedJob { outcome: Ok(drawn), .. })) = (bytes, ended.last()) {
            bytes.copy_from_slice(drawn);
        }
        self.note_finished(ended, rows, CommitProgress::default(), commits_rows)
    }

    /// Runs each of these steps of the list twice without a sequence. So later runs have no extra work of a first or
    /// second run.
    pub(crate) fn warm_up_steps(
        &mut self,
        of: fn(&StepShape) -> bool,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<()> {
        let mut shapes = self.stepper.listed_shapes();
        shapes.retain(of);
        for (i, shape) in shapes.iter().enumerate() {
            self.dummy_run(*shape)?;
            self.dummy_run(*shape)?;
            progress(i + 1, shapes.len());
        }
        Ok(())
    }

    /// Runs a step of the list without a sequence, and waits for it. All devices of a step run it at the same time,
    /// because they wait for each other.
    pub(crate) fn dummy_run(&mut self, shape: StepShape) -> Result<()> {
        self.finish_in_flight()?;
        let mut shares = Vec::with_capacity(self.peers.len() + 1);
        for peer in self.peers.iter().filter(|peer| peer.takes_part(shape.outcome)) {
            shares.push(peer.will_run(peer.stepper.dummy_step(shape)?));
        }
        let drawn = Some(self.stepper.drawn(shape.kind(), 1)?);
        shares.push(DeviceStep::of_lead(self.stepper.dummy_step(shape)?, drawn));
        self.note_finished(run_on_all(shares), &[], CommitProgress::default(), false)
    }

    /// Computes the logits of rows of hidden states, at most [`crate::step::LOGITS_ROWS`] of them.
    pub(crate) fn run_output_head(&mut self, hidden: &[f32]) -> Result<()> {
        self.finish_in_flight()?;
        let mut shares = Vec::with_capacity(self.peers.len() + 1);
        for peer in sharers(&mut self.peers) {
            let step = peer.stepper.logits_step(hidden)?.clone();
            shares.push(peer.will_run(step));
        }
        shares.push(DeviceStep::of_lead(self.stepper.logits_step(hidden)?.clone(), None));
        let ended = run_on_all(shares);
        self.note_finished(ended, &[], CommitProgress::default(), false)
    }

    /// Overwrites the input of the MTP head, on every device that has it.
    pub(crate) fn write_hidden(&mut self, hidden: &[f32]) -> Result<()> {
        sharers(&mut self.peers).try_for_each(|peer| peer.stepper.write_hidden(hidden))?;
        self.stepper.write_hidden(hidden)
    }

    /// Sets the hidden states for a pass of the MTP head, on every device that has it.
    pub(crate) fn write_draft_input(&mut self, hidden: &[f32]) -> Result<()> {
        sharers(&mut self.peers).try_for_each(|peer| peer.stepper.write_draft_input(hidden))?;
        self.stepper.write_draft_input(hidden)
    }

    /// As [`Stepper::keep_round_hidden`], on every device that has the MTP head.
    pub(crate) fn keep_round_hidden(&mut self, first: usize, rows: usize) -> Result<()> {
        sharers(&mut self.peers).try_for_each(|peer| peer.stepper.keep_round_hidden(first, rows))?;
        self.stepper.keep_round_hidden(first, rows)
    }

    /// As [`Stepper::keep_drafts`], on every device that has the MTP head.
    pub(crate) fn keep_drafts(&mut self, pass: usize, rows: usize) -> Result<()> {
        sharers(&mut self.peers).try_for_each(|peer| peer.stepper.keep_drafts(pass, rows))?;
        self.stepper.keep_drafts(pass, rows)
    }

    /// Commits one device after the other, so that the committed layers are always the first ones. All steps are
    /// prepared before the first one runs. So after a commit only a run can fail, and that is recorded.
    fn commit_split(&mut self, regime: Regime, settled: CommitProgress, rows: &[Rows<'_>]) -> Result<()> {
        let spec = self.cache.spec();
        let mut steps = Vec::with_capacity(self.peers.len() + 1);
        for stepper in all_steppers(&mut self.peers, &mut self.stepper) {
            let Some(outcome) = commit_of(stepper, spec, settled) else { continue };
            steps.push(stepper.step_for(StepKind { regime, outcome }, rows)?.clone());
        }
        let mut all = Vec::with_capacity(steps.len());
        for step in steps {
            let ended = Job::of(step, None).run();
            let has_failed = ended.outcome.is_err();
            all.push(ended);
            if has_failed {
                break;
            }
        }
        self.note_finished(all, rows, settled, false)
    }

    /// If a step failed on a device, records its effect on its sequences, and returns the error that was the first
    /// cause.
    pub(crate) fn note_finished(
        &mut self,
        ended: Vec<FinishedJob>,
        rows: &[Rows<'_>],
        settled: CommitProgress,
        commits_rows: bool,
    ) -> Result<()> {
        if ended.iter().all(|ended| ended.outcome.is_ok()) {
            return Ok(());
        }
        self.rejoin();
        self.note_devices(&ended, rows.iter().map(|row| row.sequence.slot()), settled, commits_rows);
        Err(self.first_cause(ended))
    }

    /// The error of devices' programs, at least one of which has failed: that of the first cause. In a split it names
    /// the device.
    pub(crate) fn first_cause(&self, ended: impl IntoIterator<Item = FinishedJob>) -> EngineError {
        let failed = |FinishedJob { step, outcome }| outcome.err().map(|failure| (step, failure));
        let mut failures: Vec<(Executable, Failure)> = ended.into_iter().filter_map(failed).collect();
        let cause = failures.iter().position(|(_, failure)| !failure.is_consequence()).unwrap_or(0);
        let (step, failure) = failures.swap_remove(cause);
        // If each waited for another one, as where a network has failed, none of them is to blame.
        let is_cause = !failure.is_consequence();
        let error = failure.into_error();
        let mut devices = self.devices().filter(|_| self.is_split() && is_cause);
        match devices.find(|(_, runtime)| runtime.is_same(step.runtime())) {
            Some((device, _)) => EngineError::Device { device, error: Box::new(error) },
            None => error,
        }
    }

    /// Makes the devices ready for a next step after one that failed. None of them runs.
    pub(crate) fn rejoin(&self) {
        self.runtimes().filter_map(|runtime| runtime.backend().group()).for_each(|group| group.rejoin());
    }

    /// Records the effect of a failed step on the sequences of these slots, as its devices report it.
    pub(crate) fn note_devices(
        &mut self,
        ended: &[FinishedJob],
        slots: impl IntoIterator<Item = SlotId>,
        settled: CommitProgress,
        commits_rows: bool,
    ) {
        let has_mutated = |state: &Array| {
            // A device may have run several chunks of a prompt. If one has changed the state, it is changed.
            let own = ended.iter().filter(|ended| ended.step.runtime().is_same(state.runtime()));
            let has_mutated: Vec<Option<bool>> = own.map(|ended| ended.has_mutated(state)).collect();
            match has_mutated.contains(&Some(true)) {
                true => Some(true),
                false => (!has_mutated.contains(&None)).then_some(false),
            }
        };
        self.cache.note_failure(slots, &has_mutated, settled, commits_rows);
    }
}

/// The devices that share the output head with the lead.
fn sharers(peers: &mut [Peer]) -> impl Iterator<Item = &mut Peer> {
    peers.iter_mut().filter(|peer| peer.stepper.model().part.is_last())
}

/// The parts of the model, by rank, while the rest of the engine is read.
pub(crate) fn all_steppers<'a>(
    peers: &'a mut [Peer],
    lead: &'a mut Stepper,
) -> impl Iterator<Item = &'a mut Stepper> {
    peers.iter_mut().map(|peer| &mut peer.stepper).chain([lead])
}
