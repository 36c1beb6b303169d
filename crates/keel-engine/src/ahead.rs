//! Steps under way: the host is one step behind the device.
//!
//! A step leaves the tokens that it draws where the next one finds them, whichever of its rows runs which, and position and length move
//! on by counts that the host knows. So the next step can be submitted before the host has seen a token:
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

/// What a sequence runs in a step.
pub struct Work<'a> {
    /// Its memory. Until the step is taken it stays as long as it was.
    pub sequence: &'a mut SequenceCache,
    /// Rows of it that are under way in steps before this one.
    pub ahead: usize,
    /// What it runs.
    pub rows: WorkRows<'a>,
    /// How the token behind is drawn; `None` for a prompt that goes on.
    pub draw: Option<Draw>,
}

/// The rows of a sequence in a step.
#[derive(Clone, Copy, Debug)]
pub enum WorkRows<'a> {
    /// The next tokens of a prompt, from the 64-token grid on, and to it unless the prompt ends with them.
    Prompt {
        /// The tokens.
        tokens: &'a [u32],
        /// Whether the prompt ends with them.
        is_end: bool,
    },
    /// A token.
    Token(u32),
    /// The token that the step submitted last draws behind its work of this number.
    Drawn(usize),
}

impl WorkRows<'_> {
    fn regime(&self) -> Regime {
        match self {
            WorkRows::Prompt { .. } => Regime::Prefill,
            WorkRows::Token(_) | WorkRows::Drawn(_) => Regime::Decode,
        }
    }

    /// What is known of the tokens; a drawn one is of the vocabulary, as 0 is.
    fn tokens(&self) -> &[u32] {
        match self {
            WorkRows::Prompt { tokens, .. } => tokens,
            WorkRows::Token(token) => std::slice::from_ref(token),
            WorkRows::Drawn(_) => &[0],
        }
    }
}

/// A step that was submitted, for [`Engine::take`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u64);

/// A program of a step.
struct RunUnderWay {
    run: PendingRun,
    regime: Regime,
    slots: Vec<u32>,
}

/// A step that nobody has waited for.
pub(crate) struct StepUnderWay {
    number: u64,
    runs: Vec<RunUnderWay>,
    /// What stood in the way of a run.
    refusal: Option<EngineError>,
    /// By work: regime, and row among those of that regime.
    rows: Vec<(Regime, usize)>,
}

/// A program that has been waited for, and the tokens that it has drawn.
struct EndedRun {
    regime: Regime,
    slots: Vec<u32>,
    outcome: Result<Vec<u32>, Box<FailedRun>>,
}

impl StepUnderWay {
    fn wait(self) -> Vec<EndedRun> {
        let wait = |RunUnderWay { run, regime, slots }: RunUnderWay| {
            let mut bytes = vec![0; slots.len() * size_of::<u32>()];
            let outcome = run.wait(&mut bytes).map(|()| ids_of(&bytes));
            EndedRun { regime, slots, outcome }
        };
        self.runs.into_iter().map(wait).collect()
    }

    fn slots(&self) -> impl Iterator<Item = u32> {
        self.runs.iter().flat_map(|run| run.slots.iter().copied())
    }

    fn has(&self, sequence: &SequenceCache) -> bool {
        self.slots().any(|slot| slot == sequence.slot())
    }
}

impl Engine {
    /// Whether anything is gained by submitting a step before the one in front of it is taken: whether the device works while
    /// the host does other things.
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

    /// Submits a step of all this work and returns at once: at most one program for the answers and one for the prompts.
    /// [`Engine::take`] waits for the tokens.
    ///
    /// # Errors
    /// Ids out of range, a full context, work that no step takes, two steps under way already. What goes wrong in the step is said when it is
    /// taken.
    pub fn submit(&mut self, work: &mut [Work<'_>]) -> Result<Ticket> {
        self.check_work(work)?;
        for Work { sequence, ahead, rows, .. } in work.iter_mut() {
            self.make_room_ahead(sequence, *ahead, rows.tokens())?;
        }
        let before = self.under_way.back().map_or(&[][..], |step| &step.rows);
        let places: Vec<usize> =
            before.iter().map(|&(regime, row)| self.stepper.place(regime, row)).collect();
        let (mut rows, mut all) = (Vec::with_capacity(work.len()), [Vec::new(), Vec::new()]);
        for work in &*work {
            let regime = work.rows.regime();
            let of_regime = &mut all[usize::from(regime == Regime::Prefill)];
            rows.push((regime, of_regime.len()));
            of_regime.push(self.rows_of(work, &places));
        }
        let number = self.tickets;
        let mut step = StepUnderWay { number, runs: Vec::new(), refusal: None, rows };
        for (regime, rows) in [Regime::Decode, Regime::Prefill].into_iter().zip(&all) {
            let outcome = outcome_of(regime, rows);
            let slots = rows.iter().map(|row| row.sequence.slot()).collect();
            let Some(outcome) = outcome else { continue };
            let how = (regime, outcome);
            match self.stepper.submit(&self.runtime, &self.model, &self.cache, how, rows) {
                Ok(run) => step.runs.push(RunUnderWay { run, regime, slots }),
                Err(error) => step.refusal = Some(error),
            }
        }
        self.under_way.push_back(step);
        self.tickets += 1;
        Ok(Ticket(number))
    }

    fn check_work(&self, work: &[Work<'_>]) -> Result<()> {
        let prompts = work.iter().filter(|work| work.rows.regime() == Regime::Prefill);
        let (count, tokens) = prompts.fold((0, 0), |(n, sum), work| (n + 1, sum + work.rows.tokens().len()));
        let answers = work.len() - count;
        let (answers_max, prompts_max) = (self.options.sequences, self.chunks_max());
        let drawn = self.under_way.back().map_or(0, |step| step.rows.len());
        let off_grid = |work: &Work<'_>| match work.rows {
            WorkRows::Prompt { tokens, is_end } => {
                let start = work.sequence.offset() + work.ahead;
                let ends = is_end || tokens.len().is_multiple_of(crate::PREFILL_GRID);
                !start.is_multiple_of(crate::PREFILL_GRID) || !ends
            }
            _ => false,
        };
        let reason = if self.under_way.len() == STEPS_MAX {
            format!("{STEPS_MAX} steps are under way; take the tokens of one first")
        } else if work.is_empty()
            || answers > answers_max
            || count > prompts_max
            || tokens > self.prefill_rows_max()
        {
            let rows_max = self.prefill_rows_max();
            format!(
                "a step of {answers} answers and {tokens} tokens of {count} prompts; there are at most {answers_max}, and \
                 {rows_max} of {prompts_max}"
            )
        } else if count > 0 && self.options.drafts > 0 {
            "an engine that drafts runs prompts by themselves".into()
        } else if work.iter().any(|work| matches!(work.rows, WorkRows::Drawn(of) if of >= drawn)) {
            "no step under way draws the token of a sequence".into()
        } else if work.iter().any(off_grid) {
            "a prompt's rows begin on the 64-token grid, and end on it unless the prompt ends".into()
        } else {
            return Ok(());
        };
        Err(EngineError::Option(reason))
    }

    /// Checks that a sequence can run these tokens behind those that are under way, and gets its pages.
    fn make_room_ahead(&mut self, sequence: &mut SequenceCache, ahead: usize, tokens: &[u32]) -> Result<()> {
        self.admit(sequence, tokens)?;
        let (needed, context) = (sequence.len() + ahead + tokens.len(), self.options.context);
        if needed > context {
            return Err(EngineError::Context { needed, context });
        }
        if self.under_way.is_empty() {
            self.finish_commit(sequence)?;
        }
        self.cache.expect_whole(sequence)?;
        Ok(self.cache.reserve(sequence, ahead + tokens.len())?)
    }

    /// The rows of some work. `places` is where the tokens lie that the step before draws.
    fn rows_of<'a>(&self, work: &'a Work<'_>, places: &[usize]) -> Rows<'a> {
        let row = Rows::behind(work.sequence, work.rows.tokens());
        let drawn_at = match work.rows {
            WorkRows::Drawn(of) => Some(places[of]),
            _ => None,
        };
        // A plain decode step leaves its row open where there is a log.
        let accepted = if work.ahead == 0 { row.accepted } else { usize::from(self.leaves_open()) };
        // Whether a prompt goes on says its end alone: without drafts nobody reads what comes behind.
        let next = match work.rows {
            WorkRows::Prompt { is_end: false, .. } => Some(0),
            _ => None,
        };
        Rows { first: row.first + work.ahead, accepted, next, draws: work.draw.as_slice(), drawn_at, ..row }
    }

    /// Waits for a step and returns the token behind each of its work, in order; it means nothing where none was drawn. The
    /// caller makes each sequence as much longer ([`SequenceCache::advance`]).
    ///
    /// # Errors
    /// What the runtime says. No sequence grows then, and steps behind this one are given up: the batch says so to those
    /// that were in one. If the step is not the first of those under way.
    pub fn take(&mut self, ticket: Ticket) -> Result<Vec<u32>> {
        let is_first = self.under_way.front().is_some_and(|step| step.number == ticket.0);
        let Some(mut step) = is_first.then(|| self.under_way.pop_front()).flatten() else {
            return Err(EngineError::Option("the step is not the first of those under way".into()));
        };
        let (rows, refusal) = (std::mem::take(&mut step.rows), step.refusal.take());
        let ended = step.wait();
        if refusal.is_some() || ended.iter().any(|run| run.outcome.is_err()) {
            std::mem::take(&mut self.under_way).into_iter().for_each(|step| drop(step.wait()));
            return Err(self.note_failed_runs(ended, refusal));
        }
        let token = |&(regime, row): &(Regime, usize)| {
            let run = ended.iter().find(|run| run.regime == regime);
            run.and_then(|run| run.outcome.as_ref().ok()).map_or(0, |tokens| tokens[row])
        };
        Ok(rows.iter().map(token).collect())
    }

    /// Notes what the programs of a step that failed have left of its sequences. Returns the first failure.
    fn note_failed_runs(&mut self, ended: Vec<EndedRun>, refusal: Option<EngineError>) -> EngineError {
        let mut error = refusal;
        for EndedRun { regime, slots, outcome } in ended {
            match outcome {
                Err(failed) => {
                    let commits_rows = regime == Regime::Prefill || !self.leaves_open();
                    self.cache.note_failure(slots, &failed, (0, 0), commits_rows);
                    error.get_or_insert_with(|| ArrayError::from(failed).into());
                }
                // Their rows were run and do not count.
                Ok(_) if self.can_take_back() => {}
                Ok(_) => self.cache.note_ahead(slots),
            }
        }
        error.unwrap_or_else(|| unreachable!("something has failed"))
    }

    /// Says to a sequence that `rows` rows of it, of a step that failed and of those behind it, do not count. `was_run_behind`
    /// if some are of those behind, which were run. Where that [cannot be taken back](Engine::can_take_back), the sequence
    /// answers [`keel_cache::CacheError::AheadState`] until it is rewound, which is done here if it can be.
    pub(crate) fn give_up(&mut self, sequence: &mut SequenceCache, rows: usize, was_run_behind: bool) {
        if was_run_behind || !self.cache.spec().is_recurrent() {
            self.cache.forget_steps(sequence, rows, false);
        }
        self.take_back_step(sequence);
    }

    /// Submits a token of each sequence. [`Engine::take_drawn`] waits for the tokens behind them; until then the sequences stay
    /// as long as they were. Without `tokens` each sequence runs the one that the step before, which is still under way, draws
    /// for it.
    ///
    /// # Errors
    /// As [`Engine::submit`]; tokens of a step that is not under way or of other sequences.
    pub fn submit_decode(
        &mut self,
        sequences: &mut [&mut SequenceCache],
        tokens: Option<&[u32]>,
        draws: &[Draw],
    ) -> Result<()> {
        let count = sequences.len();
        let given = tokens.map_or(count, <[u32]>::len);
        if count != given || count != draws.len() {
            let reason = format!("{given} tokens and {} draws for {count} sequences", draws.len());
            return Err(EngineError::Option(reason));
        }
        let slots = || sequences.iter().map(|sequence| sequence.slot());
        if tokens.is_none() && self.under_way.back().is_none_or(|step| !step.slots().eq(slots())) {
            let reason = "no step under way draws the tokens of these sequences, in this order".into();
            return Err(EngineError::Option(reason));
        }
        let ahead: Vec<usize> = sequences.iter().map(|sequence| self.steps_of(sequence)).collect();
        let work = sequences.iter_mut().zip(ahead).zip(draws).enumerate();
        let mut work: Vec<Work<'_>> = work
            .map(|(i, ((sequence, ahead), draw))| {
                let rows = tokens.map_or(WorkRows::Drawn(i), |tokens| WorkRows::Token(tokens[i]));
                Work { sequence, ahead, rows, draw: Some(*draw) }
            })
            .collect();
        self.submit(&mut work).map(drop)
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
        let (ticket, slots) = self.first_of(sequences)?;
        let steps: Vec<usize> = sequences.iter().map(|sequence| self.steps_of(sequence)).collect();
        let drawn = match self.take(ticket) {
            Ok(drawn) => drawn,
            Err(error) => {
                let leaves_open = self.leaves_open();
                let ahead = sequences.iter_mut().zip(steps).filter(|(_, steps)| *steps > 1);
                ahead.for_each(|(sequence, steps)| self.cache.forget_steps(sequence, steps, leaves_open));
                return Err(error);
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
        let (ticket, _) = self.first_of(sequences)?;
        let steps: Vec<usize> = sequences.iter().map(|sequence| self.steps_of(sequence)).collect();
        let is_last = self.under_way.len() == 1;
        let has_failed = self.take(ticket).is_err();
        // If a step has failed and was the last, it is the failure that says what the sequences are now.
        if !(is_last && has_failed) {
            let leaves_open = self.leaves_open();
            let unwanted = sequences.iter_mut().zip(steps);
            unwanted.for_each(|(sequence, steps)| self.cache.forget_steps(sequence, steps, leaves_open));
        }
        std::mem::take(&mut self.under_way).into_iter().for_each(|step| drop(step.wait()));
        Ok(())
    }

    /// The first step under way, if these sequences are in it, and the slots of its sequences.
    fn first_of(&self, sequences: &[&mut SequenceCache]) -> Result<(Ticket, Vec<u32>)> {
        let has_them = |step: &&StepUnderWay| sequences.iter().all(|sequence| step.has(sequence));
        match self.under_way.front().filter(has_them) {
            Some(step) => Ok((Ticket(step.number), step.slots().collect())),
            None => Err(EngineError::Option("the sequences are not in the first step under way".into())),
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
            for EndedRun { slots, outcome: ended, .. } in step.wait() {
                self.cache.note_ahead(slots);
                outcome = outcome.and(ended.map(drop));
            }
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

/// What the program over these rows leaves behind; `None` if there are none.
fn outcome_of(regime: Regime, rows: &[Rows<'_>]) -> Option<Outcome> {
    match (regime, rows) {
        (_, []) => None,
        (Regime::Prefill, [Rows { next: Some(_), .. }]) => Some(Outcome::State),
        _ => Some(Outcome::LastLogits),
    }
}
