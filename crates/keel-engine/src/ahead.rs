//! Steps under way: the host is one step behind the device.
//!
//! A step leaves the tokens that it draws where the next one finds its own, and position and length move on by one whatever
//! they are. So the next step can be submitted before the host has seen them:
//!
//! ```text
//! host     submit 1   submit 2   take 1   submit 3   take 2   submit 4   ...
//! device              | step 1         | step 2         | step 3         ...
//! ```
//!
//! The token that ends a text is known when the step behind it is under way. That step is taken back: its keys and values lie
//! behind the end and are written again; its row is still open where the engine has a log. Gated-delta states without
//! one have moved on, so such a sequence cannot go on from there ([`Engine::can_take_back`]), only from a checkpoint.

use keel_array::sampling::Draw;
use keel_array::{ArrayError, FailedRun, PendingRun, RUNS_MAX, Regime, RowLog};
use keel_cache::{SequenceCache, SequenceMark};

use crate::step::{Outcome, Rows};
use crate::{Engine, EngineError, Result};

/// A step that nobody has waited for.
pub(crate) struct StepUnderWay {
    run: PendingRun,
    slots: Vec<u32>,
    /// Where its sequences were before.
    marks: Vec<SequenceMark>,
}

/// One that has been waited for.
struct EndedStep {
    slots: Vec<u32>,
    marks: Vec<SequenceMark>,
    /// The tokens that it has drawn.
    outcome: Result<Vec<u32>, Box<FailedRun>>,
}

impl StepUnderWay {
    fn wait(self) -> EndedStep {
        let StepUnderWay { run, slots, marks } = self;
        let mut bytes = vec![0; slots.len() * size_of::<u32>()];
        let outcome = run.wait(&mut bytes);
        let tokens = || bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        EndedStep { slots, marks, outcome: outcome.map(|()| tokens()) }
    }
}

impl Engine {
    /// Whether anything is gained by [`Engine::submit_decode`]: whether the device works while the host does other things.
    pub fn runs_ahead(&self) -> bool {
        self.runtime.backend().is_queueing()
    }

    /// Whether a step that nobody wanted leaves no trace: not with gated-delta states and no log to leave rows open in.
    pub fn can_take_back(&self) -> bool {
        !self.cache.spec().is_recurrent() || self.options.open_rows() > 0
    }

    /// Steps under way, at most two.
    pub fn steps_under_way(&self) -> usize {
        self.under_way.len()
    }

    /// As [`Engine::decode_and_draw`], but returns as soon as the step is submitted, the sequences a token longer.
    /// [`Engine::take_drawn`] waits for the tokens. Without `tokens` each sequence runs the one that the step before, which
    /// is still under way, draws for it.
    ///
    /// # Errors
    /// Ids out of range, a full context, two steps under way already, tokens of a step that is not under way or of other
    /// sequences. What goes wrong in the step is said when its tokens are taken.
    pub fn submit_decode(
        &mut self,
        sequences: &mut [&mut SequenceCache],
        tokens: Option<&[u32]>,
        draws: &[Draw],
    ) -> Result<()> {
        let count = sequences.len();
        let given = tokens.map_or(count, <[u32]>::len);
        if count != given || count != draws.len() || count == 0 || count > self.options.sequences {
            let (draws, most) = (draws.len(), self.options.sequences);
            let reason = format!("{given} tokens and {draws} draws for {count} sequences, of 1 to {most}");
            return Err(EngineError::Option(reason));
        }
        if self.under_way.len() == RUNS_MAX {
            let reason = format!("{RUNS_MAX} steps are under way; take the tokens of one first");
            return Err(EngineError::Option(reason));
        }
        let slots: Vec<u32> = sequences.iter().map(|sequence| sequence.slot()).collect();
        if tokens.is_none() && self.under_way.back().is_none_or(|step| step.slots != slots) {
            let reason = "no step under way draws the tokens of these sequences, in this order".into();
            return Err(EngineError::Option(reason));
        }
        // A drawn token is one of the vocabulary's, as this is.
        let unknown = vec![0; count];
        let tokens_or_unknown = tokens.unwrap_or(&unknown);
        for (sequence, token) in sequences.iter_mut().zip(tokens_or_unknown) {
            self.admit(sequence, &[*token])?;
            if self.under_way.is_empty() {
                self.finish_commit(sequence)?;
            }
            self.cache.expect_whole(sequence)?;
            self.cache.reserve(sequence, 1)?;
        }
        let rows = sequences.iter().zip(tokens_or_unknown).zip(draws);
        let rows: Vec<Rows<'_>> = rows
            .map(|((sequence, token), &draw)| Rows {
                draw: Some(draw),
                is_drawn: tokens.is_none(),
                ..Rows::behind(sequence, std::slice::from_ref(token))
            })
            .collect();
        let run = self.stepper.submit(&self.runtime, &self.model, &self.cache, &rows)?;
        let marks = sequences.iter().map(|sequence| sequence.mark()).collect();
        self.under_way.push_back(StepUnderWay { run, slots, marks });
        self.note_decoded(sequences);
        Ok(())
    }

    /// Waits for the first step under way, which is one of these sequences, and returns the tokens that it has drawn.
    ///
    /// # Errors
    /// What the runtime says. The sequences are then where they were before that step, and what was under way behind it is
    /// taken back, too; as after [`Engine::decode`] they may be torn. If no step of these sequences is the first.
    pub fn take_drawn(&mut self, sequences: &mut [&mut SequenceCache]) -> Result<Vec<u32>> {
        let EndedStep { slots, marks, outcome } = self.first_of(sequences)?.wait();
        outcome.map_err(|failed| {
            self.leave_behind(sequences, &marks, (&slots, Some(&failed)));
            ArrayError::from(failed).into()
        })
    }

    /// Waits for what is under way of these sequences, and takes it back. Where that
    /// [cannot be](Engine::can_take_back), they answer [`keel_cache::CacheError::AheadState`] until they are rewound.
    ///
    /// # Errors
    /// If the steps under way are of other sequences.
    pub fn take_back_steps(&mut self, sequences: &mut [&mut SequenceCache]) -> Result<()> {
        if self.under_way.is_empty() {
            return Ok(());
        }
        let EndedStep { slots, marks, outcome } = self.first_of(sequences)?.wait();
        self.leave_behind(sequences, &marks, (&slots, outcome.err().as_deref()));
        Ok(())
    }

    /// The first step under way, if it is one of these sequences.
    fn first_of(&mut self, sequences: &[&mut SequenceCache]) -> Result<StepUnderWay> {
        let is_theirs =
            |step: &StepUnderWay| step.slots.iter().copied().eq(sequences.iter().map(|s| s.slot()));
        if self.under_way.front().is_some_and(is_theirs)
            && let Some(step) = self.under_way.pop_front()
        {
            return Ok(step);
        }
        Err(EngineError::Option("no step of these sequences is the first under way".into()))
    }

    /// Takes the sequences back to where they were before a step that has ended, and all behind it, which end here. If it has
    /// failed and was the last, it is the failure that says what they are now.
    fn leave_behind(
        &mut self,
        sequences: &mut [&mut SequenceCache],
        marks: &[SequenceMark],
        (slots, failed): (&[u32], Option<&FailedRun>),
    ) {
        let was_last = self.under_way.is_empty();
        self.under_way.clear();
        for (sequence, &mark) in sequences.iter_mut().zip(marks) {
            match failed {
                Some(_) if was_last => self.cache.undo(sequence, mark),
                _ => self.cache.take_back_to(sequence, mark),
            }
        }
        if let Some(failed) = failed.filter(|_| was_last) {
            let commits_rows = self.stepper.row_log(Regime::Decode, Outcome::LastLogits) != RowLog::KeepOpen;
            self.cache.note_failure(slots.iter().copied(), failed, (0, 0), commits_rows);
        }
    }

    /// Ends what is under way, before something else runs. Its sequences have the tokens that it ran.
    ///
    /// # Errors
    /// That of a step whose tokens nobody has taken. Its sequences cannot be used before they are rewound.
    pub(crate) fn finish_under_way(&mut self) -> Result<()> {
        let mut outcome = Ok(());
        while let Some(step) = self.under_way.pop_front() {
            let EndedStep { slots, outcome: ended, .. } = step.wait();
            if outcome.is_ok() {
                outcome = ended.map(drop);
            }
            if outcome.is_err() {
                self.cache.note_ahead(slots);
            }
        }
        Ok(outcome.map_err(ArrayError::from)?)
    }

    /// Notes that a decode step has a row more of each sequence.
    pub(crate) fn note_decoded(&self, sequences: &mut [&mut SequenceCache]) {
        let is_open = self.stepper.row_log(Regime::Decode, Outcome::LastLogits) == RowLog::KeepOpen;
        sequences.iter_mut().for_each(|s| if is_open { s.accept(1) } else { s.advance(1) });
    }
}
