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
//! A sequence grows when its token is taken. The one that ends a text is seen when the step behind it is under way. That step is
//! given up: its keys and values lie behind the end and are written again; its row is still open where the engine has a log.
//! Gated-delta states without one have moved on, so such a sequence cannot go on from there ([`Engine::can_take_back`]), only
//! from a checkpoint.

use keel_array::sampling::Draw;
use keel_array::{ArrayError, FailedRun, PendingRun, Regime, RowLog};
use keel_cache::SequenceCache;

use crate::step::{Outcome, Rows, ids_of};
use crate::{Engine, EngineError, Result};

/// Steps under way at most.
const STEPS_MAX: usize = 2;

/// A step that nobody has waited for.
pub(crate) struct StepUnderWay {
    run: PendingRun,
    /// Of its sequences.
    slots: Vec<u32>,
}

/// One that has been waited for.
struct EndedStep {
    slots: Vec<u32>,
    /// The tokens that it has drawn.
    outcome: Result<Vec<u32>, Box<FailedRun>>,
}

impl StepUnderWay {
    fn wait(self) -> EndedStep {
        let StepUnderWay { run, slots } = self;
        let mut bytes = vec![0; slots.len() * size_of::<u32>()];
        let outcome = run.wait(&mut bytes);
        EndedStep { slots, outcome: outcome.map(|()| ids_of(&bytes)) }
    }

    fn has(&self, sequence: &SequenceCache) -> bool {
        self.slots.contains(&sequence.slot())
    }
}

impl Engine {
    /// Whether anything is gained by [`Engine::submit_decode`]: whether the device works while the host does other things.
    pub fn runs_ahead(&self) -> bool {
        self.runtime.backend().is_queueing()
    }

    /// Whether a step that nobody wanted leaves no trace: not with gated-delta states and no log to leave rows open in.
    pub fn can_take_back(&self) -> bool {
        !self.cache.spec().is_recurrent() || self.leaves_open()
    }

    /// Steps under way, at most two.
    pub fn steps_under_way(&self) -> usize {
        self.under_way.len()
    }

    /// As [`Engine::decode_and_draw`], but returns as soon as the step is submitted. [`Engine::take_drawn`] waits for the
    /// tokens; until then the sequences stay as long as they were. Without `tokens` each sequence runs the one that the step
    /// before, which is still under way, draws for it.
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
        if self.under_way.len() == STEPS_MAX {
            let reason = format!("{STEPS_MAX} steps are under way; take the tokens of one first");
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
            self.make_room_ahead(sequence, *token)?;
        }
        let rows = sequences.iter().zip(tokens_or_unknown).zip(draws);
        let rows: Vec<Rows<'_>> = rows
            .map(|((sequence, token), draw)| {
                let row = Rows::behind(sequence, std::slice::from_ref(token));
                let ahead = self.steps_of(sequence);
                let accepted = match ahead {
                    0 => row.accepted,
                    _ => usize::from(self.leaves_open()),
                };
                let first = row.first + ahead;
                Rows { first, accepted, draws: std::slice::from_ref(draw), is_drawn: tokens.is_none(), ..row }
            })
            .collect();
        let run = self.stepper.submit(&self.runtime, &self.model, &self.cache, &rows)?;
        self.under_way.push_back(StepUnderWay { run, slots });
        Ok(())
    }

    /// Checks that a sequence can run one more token behind those that are under way, and gets its pages.
    fn make_room_ahead(&mut self, sequence: &mut SequenceCache, token: u32) -> Result<()> {
        let ahead = self.steps_of(sequence);
        self.admit(sequence, &[vec![0; ahead], vec![token]].concat())?;
        if self.under_way.is_empty() {
            self.finish_commit(sequence)?;
        }
        self.cache.expect_whole(sequence)?;
        Ok(self.cache.reserve(sequence, ahead + 1)?)
    }

    /// Steps under way that a sequence is in.
    fn steps_of(&self, sequence: &SequenceCache) -> usize {
        self.under_way.iter().filter(|step| step.has(sequence)).count()
    }

    /// Waits for the first step under way and returns the tokens that it has drawn for these sequences, which are then a token
    /// longer. They are all of the step's, or those of them that go on.
    ///
    /// # Errors
    /// What the runtime says. The sequences stay as long as they were, and what is under way behind the step is given up; as
    /// after [`Engine::decode`] they may be torn. If they are not in the first step under way.
    pub fn take_drawn(&mut self, sequences: &mut [&mut SequenceCache]) -> Result<Vec<u32>> {
        let EndedStep { slots, outcome } = self.first_of(sequences)?.wait();
        let drawn = match outcome {
            Ok(drawn) => drawn,
            Err(failed) => {
                self.note_unwanted(sequences, Some(&failed));
                return Err(ArrayError::from(failed).into());
            }
        };
        self.note_decoded(sequences);
        let of = |slot| slots.iter().position(|&of| of == slot).map_or(0, |row| drawn[row]);
        Ok(sequences.iter().map(|sequence| of(sequence.slot())).collect())
    }

    /// Waits for what is under way, and gives it up. `sequences` are those of its sequences that are still of use. Where a step
    /// [cannot be taken back](Engine::can_take_back), they answer [`keel_cache::CacheError::AheadState`] until they are rewound.
    ///
    /// # Errors
    /// If the sequences are not in the first step under way.
    pub fn give_up_steps(&mut self, sequences: &mut [&mut SequenceCache]) -> Result<()> {
        if self.under_way.is_empty() {
            return Ok(());
        }
        let EndedStep { outcome, .. } = self.first_of(sequences)?.wait();
        self.note_unwanted(sequences, outcome.err().as_deref());
        Ok(())
    }

    /// The first step under way, if these sequences are in it.
    fn first_of(&mut self, sequences: &[&mut SequenceCache]) -> Result<StepUnderWay> {
        let has_them = |step: &StepUnderWay| sequences.iter().all(|sequence| step.has(sequence));
        if self.under_way.front().is_some_and(has_them)
            && let Some(step) = self.under_way.pop_front()
        {
            return Ok(step);
        }
        Err(EngineError::Option("the sequences are not in the first step under way".into()))
    }

    /// A step of the sequences has ended and does not count, nor do those behind it, which end here. If it has failed and was
    /// the last, it is the failure that says what the sequences are now.
    fn note_unwanted(&mut self, sequences: &mut [&mut SequenceCache], failed: Option<&FailedRun>) {
        let later = std::mem::take(&mut self.under_way);
        if let Some(failed) = failed.filter(|_| later.is_empty()) {
            let slots = sequences.iter().map(|sequence| sequence.slot());
            self.cache.note_failure(slots, failed, (0, 0), !self.leaves_open());
            return;
        }
        let leaves_open = self.leaves_open();
        for sequence in sequences {
            let steps = 1 + later.iter().filter(|step| step.has(sequence)).count();
            self.cache.forget_steps(sequence, steps, leaves_open);
        }
    }

    /// Ends what is under way, before something else runs: nobody will take its tokens. Its sequences cannot be used before
    /// they are rewound.
    ///
    /// # Errors
    /// What went wrong in a step.
    pub(crate) fn finish_under_way(&mut self) -> Result<()> {
        let mut outcome = Ok(());
        while let Some(step) = self.under_way.pop_front() {
            let EndedStep { slots, outcome: ended } = step.wait();
            self.cache.note_ahead(slots);
            outcome = outcome.and(ended.map(drop));
        }
        Ok(outcome.map_err(ArrayError::from)?)
    }

    /// Notes that a decode step has a row more of each sequence.
    pub(crate) fn note_decoded(&self, sequences: &mut [&mut SequenceCache]) {
        let is_open = self.leaves_open();
        sequences.iter_mut().for_each(|s| if is_open { s.accept(1) } else { s.advance(1) });
    }

    /// Whether a plain decode step leaves its rows open.
    fn leaves_open(&self) -> bool {
        self.stepper.row_log(Regime::Decode, Outcome::LastLogits) == RowLog::KeepOpen
    }
}
