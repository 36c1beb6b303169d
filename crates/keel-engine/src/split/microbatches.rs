//! Answers in a pipeline: micro-batches of sequences, each with a decode step of its own under way. A step of prompts
//! may be under way with them.
//!
//! ```text
//! stage 1    A ▸ B ▸ A ▸ B ▸ A
//! stage 2        A ▸ B ▸ A ▸ B ▸ A
//! ```
//!
//! A step is submitted when the host knows the tokens of its micro-batch. Each device but the lead then gets its
//! program and runs it after those of earlier steps. The lead's program runs on the caller's thread, when the step is
//! taken. So the lead's results stay until the next step is taken, and a micro-batch needs no memory of its own on any
//! device. The plan has host memory for the logits of rows whose tokens the host draws.
//!
//! While a step is under way, a device may wait for the lead. So nothing else may wait for a device before the lead has
//! run its programs ([`Engine::finish_microbatches`]); the results then wait on the host until the step is taken.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use keel_array::{RESULT_BYTES_MAX, Regime};
use keel_cache::{CommitProgress, SlotId};

use crate::device_thread::{DeferredJob, FinishedJob, JobHandle};
use crate::engine::ahead::{HostReads, NOT_FIRST, Ticket, Work, WorkRows, items_of, kept_rows};
use crate::engine::in_flight::Item;
use crate::options::HOST_ROWS_MAX;
use crate::step::{Rows, StepKind, ids_of};
use crate::{Engine, EngineError, Result};

/// The most sequences of a micro-batch: their drawn tokens come to the host with the step.
pub(crate) const MICROBATCH_MAX: usize = RESULT_BYTES_MAX / size_of::<u32>();

/// The fewest sequences of a micro-batch. Each micro-batch reads the weights again. So a step of fewer sequences takes
/// nearly as long as one of all, and the longest stage would be busy for longer than all stages together are with one
/// step.
pub(crate) const MICROBATCH_MIN: usize = 8;

/// Steps of micro-batches.
#[derive(Default)]
pub(crate) struct Microbatches {
    /// Those that are not taken, the oldest first.
    steps: VecDeque<MicrobatchStep>,
    /// Set if a step has failed on a device. Those after it then do not run.
    has_failed: Arc<AtomicBool>,
    /// Logits of the step taken last, for the rows whose tokens the host draws.
    logits: Option<Result<Vec<f32>>>,
}

impl Microbatches {
    /// As [`InFlightSteps::forget_slot`](crate::engine::in_flight::InFlightSteps::forget_slot).
    pub fn forget_slot(&mut self, slot: SlotId) {
        self.steps.iter_mut().for_each(|step| step.slots.retain(|of| *of != slot));
    }
}

/// The decode step of a micro-batch, or a step of prompts.
struct MicrobatchStep {
    number: u64,
    /// All of one regime.
    items: Vec<Item>,
    slots: Vec<SlotId>,
    /// `None` once it has ended.
    run: Option<MicrobatchRun>,
    /// The tokens that it has drawn.
    drawn: Result<Vec<u32>>,
    /// Logits for the host, if it draws tokens.
    logits: Option<Result<Vec<f32>>>,
}

/// A step under way. If it is dropped before it has run, the devices stop waiting for the lead.
struct MicrobatchRun {
    peers: Vec<JobHandle>,
    lead: DeferredJob,
}

impl MicrobatchRun {
    /// Runs the lead's program, and waits for those of the other devices.
    fn wait(self) -> Vec<FinishedJob> {
        let lead = self.lead.run();
        self.peers.into_iter().map(JobHandle::wait).chain([lead]).collect()
    }
}

impl Drop for Microbatches {
    /// Runs the steps under way to their end, and leaves the devices ready for another engine.
    fn drop(&mut self) {
        let runs = self.steps.iter_mut().filter_map(|step| step.run.take());
        let ended: Vec<FinishedJob> = runs.flat_map(MicrobatchRun::wait).collect();
        FinishedJob::rejoin(ended.iter());
    }
}

impl Engine {
    /// How many steps of different sequences may be under way, so that no stage of a pipeline waits for another. 1 if
    /// each step is waited for: on one stage, where devices take turns, and where sequences may draft or be parked.
    pub fn microbatches_max(&self) -> usize {
        let is_plain = self.options.drafts == 0 && self.options.swap_bytes == 0;
        let group = self.runtime().backend().group().filter(|group| group.is_concurrent());
        let can_run = group.is_some() && self.peers.iter().all(|peer| peer.thread.is_some());
        if is_plain && can_run { self.stages() } else { 1 }
    }

    /// How many micro-batches pay for this many answers; 1 if one step for all is as good.
    pub fn microbatches(&self, answers: usize) -> usize {
        self.microbatches_max().min(answers / MICROBATCH_MIN).max(1)
    }

    /// Steps of micro-batches that are not taken.
    pub(crate) fn microbatch_steps(&self) -> usize {
        self.microbatches.steps.len()
    }

    /// As [`Engine::submit`], for a micro-batch of a model in a pipeline.
    pub(crate) fn submit_microbatch(&mut self, work: &mut [Work<'_>]) -> Result<Ticket> {
        self.check_microbatch(work)?;
        for Work { sequence, rows, .. } in work.iter_mut() {
            self.make_room_ahead(sequence, 0, rows.tokens())?;
        }
        let rows: Vec<Rows<'_>> = work.iter().map(|work| self.rows_of(work, &[])).collect();
        if rows.iter().any(Rows::has_pictures) {
            return Err(EngineError::Option(
                "`prefill_chunks` runs prompts with pictures in a pipeline".into(),
            ));
        }
        let regime = work[0].rows.regime();
        let Some(outcome) = self.outcome_of(regime, &rows) else { unreachable!("there are rows") };
        let kind = StepKind { regime, outcome };
        let has_failed = Arc::clone(&self.microbatches.has_failed);
        let mut jobs = self.queued_jobs(kind, &rows, &has_failed)?;
        let Some(mut lead) = jobs.pop() else { unreachable!("the lead has a job") };
        lead.drawn = Some(self.stepper.drawn(kind, rows.len())?);
        let slots = rows.iter().map(|row| row.sequence.slot()).collect();
        let items = items_of(work);
        let threads = self.peers.iter().filter_map(|peer| peer.thread.as_ref());
        let peers = threads.zip(jobs).map(|(thread, job)| thread.hand(job)).collect();
        let (number, run) = (self.tickets, Some(MicrobatchRun { peers, lead: lead.later() }));
        let drawn = Ok(Vec::new());
        self.microbatches.steps.push_back(MicrobatchStep { number, items, slots, run, drawn, logits: None });
        self.tickets += 1;
        Ok(Ticket(number))
    }

    fn check_microbatch(&self, work: &[Work<'_>]) -> Result<()> {
        let (groups, steps) = (self.microbatches_max(), &self.microbatches.steps);
        let regime = work.first().map(|work| work.rows.regime());
        let alike = steps.iter().filter(|step| Some(step.items[0].regime) == regime).count();
        let is_known = |work: &Work<'_>| {
            Some(work.rows.regime()) == regime && !matches!(work.rows, WorkRows::Drawn(_)) && work.ahead == 0
        };
        let for_host = work.iter().filter(|work| work.reads == HostReads::Logits).count();
        let for_host_max = self.options.host_rows(HOST_ROWS_MAX);
        let is_under_way = |work: &Work<'_>| steps.iter().any(|s| s.slots.contains(&work.sequence.slot()));
        let reason = if groups == 1 {
            "steps of a model on several devices are under way only in a pipeline, without drafts and parking: use \
             `decode` and `prefill_chunks`"
                .into()
        } else if regime == Some(Regime::Prefill) && alike > 0 {
            "a step of prompts is under way; take its tokens first".into()
        } else if alike == groups {
            format!("{groups} steps are under way; take the tokens of one first")
        } else if steps.iter().any(|step| step.drawn.is_err()) {
            "a step under way has failed; take it first".into()
        } else if let Some(reason) = self.refused_rows(work, self.options.sequences.min(MICROBATCH_MAX)) {
            reason
        } else if !work.iter().all(is_known) {
            "a step of a pipeline runs tokens that the host knows, of answers or of prompts".into()
        } else if work.iter().any(is_under_way) {
            "a sequence of a step under way; take its token first".into()
        } else if for_host > for_host_max {
            format!(
                "the host draws {for_host} tokens of a step; the logits of at most {for_host_max} are kept"
            )
        } else {
            return Ok(());
        };
        Err(EngineError::Option(reason))
    }

    /// As [`Engine::take`], for a micro-batch.
    pub(crate) fn take_microbatch(&mut self, ticket: Ticket) -> Result<Vec<Option<u32>>> {
        if self.microbatches.steps.front().is_none_or(|step| step.number != ticket.0) {
            return Err(EngineError::Option(NOT_FIRST.into()));
        }
        self.finish_microbatch(0);
        let Some(step) = self.microbatches.steps.pop_front() else { unreachable!("it is the first") };
        let MicrobatchStep { number, items, drawn, logits, .. } = step;
        // Those after a failed step have not run to their end.
        let drawn = drawn.inspect_err(|_| self.microbatches.steps.clear())?;
        let tokens = items.iter().map(|item| item.is_drawn.then(|| drawn[item.row])).collect();
        (self.taken.step, self.taken.items, self.microbatches.logits) = (number, items, logits);
        Ok(tokens)
    }

    /// Runs the lead's programs of all steps under way and waits for those of the other devices. The results stay until
    /// the steps are taken. Called before anything else uses a device.
    pub(crate) fn finish_microbatches(&mut self) {
        (0..self.microbatches.steps.len()).for_each(|at| self.finish_microbatch(at));
    }

    /// The same for step `at`; those before it have ended. If it fails, those after it end, too.
    fn finish_microbatch(&mut self, at: usize) {
        let Some(run) = self.microbatches.steps[at].run.take() else { return };
        let ended = run.wait();
        if let (true, Some(FinishedJob { outcome: Ok(bytes), .. })) =
            (ended.iter().all(|ended| ended.outcome.is_ok()), ended.last())
        {
            let drawn = ids_of(bytes);
            let rows = kept_rows(&self.microbatches.steps[at].items);
            let logits = (!rows.is_empty()).then(|| self.logits_of(&rows));
            let step = &mut self.microbatches.steps[at];
            (step.drawn, step.logits) = (Ok(drawn), logits);
            return;
        }
        let later = self.microbatches.steps.iter_mut().skip(at + 1).filter_map(|step| step.run.take());
        let all: Vec<Vec<FinishedJob>> =
            std::iter::once(ended).chain(later.map(MicrobatchRun::wait)).collect();
        self.rejoin();
        for (step, ended) in all.iter().enumerate() {
            let slots = std::mem::take(&mut self.microbatches.steps[at + step].slots);
            self.note_devices(ended, slots, CommitProgress::default(), true);
        }
        let cause = self.first_cause(all.into_iter().flatten());
        for step in self.microbatches.steps.iter_mut().skip(at + 1) {
            step.drawn = Err(EngineError::Step(cause.to_string()));
        }
        self.microbatches.steps[at].drawn = Err(cause);
        self.microbatches.has_failed = Arc::default();
    }

    /// These rows of the logits of the step that the lead ran last.
    fn logits_of(&self, rows: &[usize]) -> Result<Vec<f32>> {
        let (mut all, mut one) = (Vec::with_capacity(rows.len() * self.model().config.vocab), Vec::new());
        for row in rows {
            self.stepper.read_logits(*row, &mut one)?;
            all.extend_from_slice(&one);
        }
        Ok(all)
    }

    /// Copies row `row` of the logits for the host of the step taken last.
    pub(crate) fn microbatch_logits(&self, row: usize, logits: &mut Vec<f32>) -> Result<()> {
        logits.clear();
        match &self.microbatches.logits {
            Some(Ok(all)) => {
                let width = self.model().config.vocab;
                logits.extend_from_slice(&all[row * width..(row + 1) * width]);
                Ok(())
            }
            Some(Err(error)) => Err(EngineError::Step(error.to_string())),
            None => Err(EngineError::Option("the step taken last keeps no logits".into())),
        }
    }
}
