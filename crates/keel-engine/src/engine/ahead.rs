//! Steps under way: the host submits the next step before it has the tokens of the last one.
//!
//! A step writes the tokens that it draws to a pool on the device. The next step reads them there, from whichever rows
//! it needs. Position and length grow by counts that the host knows. So the host can submit a step before it has seen a
//! token:
//!
//! ```text
//! host     submit 1   submit 2   take 1   submit 3   take 2   submit 4   ...
//! device              | step 1         | step 2         | step 3         ...
//! ```
//!
//! Where the host draws the token after a row, the row's logits are kept until it reads them, and the sequence is in no
//! step before it has. One step under way at a time keeps logits. Hidden states that the host reads of prompts are kept
//! in two places in turn, so each of two steps under way may keep them.
//!
//! A sequence grows when its token is taken. The token that ends a text is seen when the next step is under way. That
//! step is given up. Its keys and values lie after the end and are written again. Gated-delta states have moved on, so
//! such a sequence can go on only from a checkpoint ([`Engine::can_take_back`]).
//!
//! Where sequences may draft, steps run ahead while none does. Their rows are committed at once, as in an engine
//! without drafts. The MTP (multi-token-prediction) head runs the rows later, so their hidden states are kept until the
//! host has read them.

use keel_array::sampling::Draw;
use std::time::Instant;

use keel_array::{Regime, RowLog};
use keel_cache::SequenceCache;

use crate::engine::hidden::ROWS_NOT_PLANNED;
use crate::engine::in_flight::{EndedRun, EndedStep, InFlightStep, Item, Taken};
use crate::step::{HiddenOf, Outcome, Rows, StepKind, TokensAt};
use crate::{Engine, EngineError, PREFILL_GRID, Result};

/// How many steps may be under way.
pub(crate) const STEPS_MAX: usize = 2;

/// The work of one sequence in a step.
pub struct Work<'a> {
    /// Its memory. Its length does not change until the step is taken.
    pub sequence: &'a mut SequenceCache,
    /// How many of its rows are under way in earlier steps.
    pub ahead: usize,
    /// The rows to run.
    pub rows: WorkRows<'a>,
    /// How the device draws the token after its rows. `None` for a prompt that goes on or is not answered, and if the
    /// host draws it.
    pub draw: Option<Draw>,
    /// The results that the host reads when the step is taken.
    pub reads: HostReads,
}

/// The results of a work item that the host reads. They are kept while the next step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostReads {
    /// None of those below.
    Nothing,
    /// The logits after its rows ([`Engine::kept_logits`]), to draw the token or for themselves.
    Logits,
    /// The hidden state of its last row: a prompt ends.
    LastHidden,
    /// The hidden states of all its rows, which are of a prompt. The engine must be made with
    /// [`crate::EngineOptions::row_hidden`].
    AllHidden,
}

/// The rows of a sequence in a step.
#[derive(Clone, Copy, Debug)]
pub enum WorkRows<'a> {
    /// The next tokens of a prompt. They begin on the 64-token grid. They end on it, too, unless the prompt ends with
    /// them.
    Prompt {
        /// The tokens.
        tokens: &'a [u32],
        /// The prompt's token after them; `None` if the prompt ends.
        next: Option<u32>,
    },
    /// A token that the host knows.
    Token(u32),
    /// The token that the step submitted last draws for its work item of this number.
    Drawn(usize),
}

impl WorkRows<'_> {
    pub(crate) fn regime(&self) -> Regime {
        match self {
            WorkRows::Prompt { .. } => Regime::Prefill,
            WorkRows::Token(_) | WorkRows::Drawn(_) => Regime::Decode,
        }
    }

    /// The tokens, for checks. A drawn token is not known yet; 0 stands for it, because both are in the vocabulary.
    pub(crate) fn tokens(&self) -> &[u32] {
        match self {
            WorkRows::Prompt { tokens, .. } => tokens,
            WorkRows::Token(token) => std::slice::from_ref(token),
            WorkRows::Drawn(_) => &[0],
        }
    }
}

/// Names a submitted step, for [`Engine::take`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(pub(crate) u64);

/// Where each work item of a step has its rows.
pub(crate) fn items_of(work: &[Work<'_>]) -> Vec<Item> {
    let (mut rows, mut kept) = ([0; 2], [0; 2]);
    let item = |work: &Work<'_>| {
        let regime = work.rows.regime();
        let of = usize::from(regime == Regime::Prefill);
        let keeps_logits = work.reads == HostReads::Logits;
        let place = keeps_logits.then_some(kept[of]);
        let item = Item { regime, row: rows[of], is_drawn: work.draw.is_some(), kept: place };
        rows[of] += 1;
        kept[of] += usize::from(keeps_logits);
        item
    };
    work.iter().map(item).collect()
}

/// The rows of these items whose logits are kept for the host.
pub(crate) fn kept_rows<'a>(items: impl IntoIterator<Item = &'a Item>) -> Vec<usize> {
    items.into_iter().filter(|item| item.kept.is_some()).map(|item| item.row).collect()
}

/// Why a step cannot be taken.
pub(crate) const NOT_FIRST: &str = "the step is not the first of those under way";

impl Engine {
    /// Whether it pays to submit a step before the previous one is taken: the device works while the host does other
    /// things.
    pub fn runs_ahead(&self) -> bool {
        self.stepper.buckets().runs_ahead()
    }

    /// Whether the steps under way are those of micro-batches. Each then has other sequences.
    pub(crate) fn runs_microbatches(&self) -> bool {
        self.is_split() && !self.runs_ahead()
    }

    /// Whether a step can be given up without a trace. It cannot where there are gated-delta states.
    pub fn can_take_back(&self) -> bool {
        !self.cache.spec().is_recurrent()
    }

    /// Steps under way: at most two, or one for each [micro-batch](Engine::microbatches_max) and one of prompts.
    pub fn steps_in_flight(&self) -> usize {
        self.in_flight.steps.len() + self.microbatch_steps()
    }

    /// How many answers, or how many ends of prompts, a step may have whose tokens the host draws.
    pub fn host_rows_max(&self, regime: Regime) -> usize {
        self.stepper.buckets().host_rows(regime)
    }

    /// Submits one step with all this work and returns at once. The step has at most one program for answers and one
    /// for prompts. [`Engine::take`] waits for the tokens. In a pipeline a step has either answers, whose last
    /// tokens are known ([`WorkRows::Token`]), or prompts without pictures, and no sequence of a step under way.
    ///
    /// # Errors
    /// Ids out of range, a full context, work that no step can hold, too many steps under way. A failure inside the
    /// step is reported when the step is taken.
    pub fn submit(&mut self, work: &mut [Work<'_>]) -> Result<Ticket> {
        if self.runs_microbatches() {
            return self.submit_microbatch(work);
        }
        self.check_work(work)?;
        if self.in_flight.steps.is_empty() {
            // A pass of the head that failed after the last step is no failure of this one.
            self.in_flight.end();
        }
        for Work { sequence, ahead, rows, .. } in work.iter_mut() {
            self.make_room_ahead(sequence, *ahead, rows.tokens())?;
        }
        let before = self.in_flight.steps.back().map_or(&[][..], |step| &step.items);
        let places: Vec<usize> =
            before.iter().map(|item| self.stepper.place(item.regime, item.row)).collect();
        let items = items_of(work);
        let number = self.tickets;
        let mut step = InFlightStep {
            number,
            runs: Vec::new(),
            catch_up: None,
            refusal: None,
            items,
            since: Instant::now(),
        };
        for regime in [Regime::Decode, Regime::Prefill] {
            let of_regime = work.iter().filter(|work| work.rows.regime() == regime);
            let rows: Vec<Rows<'_>> = of_regime.map(|work| self.rows_of(work, &places)).collect();
            let kept = kept_rows(step.items.iter().filter(|item| item.regime == regime));
            let Some(outcome) = self.outcome_of(regime, &rows) else { continue };
            let kind = StepKind { regime, outcome };
            step.add(self.submit_on_all(kind, &rows));
            if !kept.is_empty() {
                let keeping = self.stepper.keeping_logits(regime, &kept);
                step.add(keeping.map(|program| self.submit_on_lead(regime, program)));
            }
        }
        let reads = |results| work.iter().any(|work| work.reads == results);
        let all_rows = reads(HostReads::AllHidden);
        // The MTP head runs the rows later after which tokens are drawn.
        let for_head = self.options.drafts > 0 && work.iter().any(|work| work.draw.is_some());
        if all_rows || for_head || reads(HostReads::LastHidden) {
            let keeping = self.stepper.keeping_hidden(number, all_rows);
            step.add(keeping.map(|program| self.submit_on_lead(Regime::Decode, program)));
        }
        self.in_flight.steps.push_back(step);
        self.tickets += 1;
        Ok(Ticket(number))
    }

    fn check_work(&self, work: &[Work<'_>]) -> Result<()> {
        let before = self.in_flight.steps.back().map_or(&[][..], |step| &step.items);
        let is_drawn = |of: usize| before.get(of).is_some_and(|item| item.is_drawn);
        let of_logits = work.iter().filter(|work| work.reads == HostReads::Logits);
        let [answers, prompts] = [Regime::Decode, Regime::Prefill]
            .map(|regime| of_logits.clone().filter(|work| work.rows.regime() == regime).count());
        let [answers_max, prompts_max] = [Regime::Decode, Regime::Prefill].map(|of| self.host_rows_max(of));
        let reason = if self.in_flight.steps.len() == STEPS_MAX {
            format!("{STEPS_MAX} steps are under way; take the tokens of one first")
        } else if let Some(reason) = self.refused_rows(work, self.options.sequences) {
            reason
        } else if !self.runs_ahead() {
            let name = self.runtime().backend().name();
            format!("{name} runs no step while the host goes on: use `decode` and `prefill_chunks`")
        } else if work.iter().any(|work| matches!(work.rows, WorkRows::Drawn(of) if !is_drawn(of))) {
            "no step under way draws the token of a sequence".into()
        } else if answers > answers_max || prompts > prompts_max {
            format!("logits of {answers} answers, {prompts} prompts; {answers_max}, {prompts_max} are kept")
        } else if answers + prompts > 0 && before.iter().any(|item| item.kept.is_some()) {
            "the step under way keeps logits for the host; take its tokens first".into()
        } else if !self.stepper.keeps_rows() && work.iter().any(|work| work.reads == HostReads::AllHidden) {
            ROWS_NOT_PLANNED.into()
        } else {
            return Ok(());
        };
        Err(EngineError::Option(reason))
    }

    /// Why no step can hold these rows, with at most `answers_max` answers; `None` if one can.
    pub(crate) fn refused_rows(&self, work: &[Work<'_>], answers_max: usize) -> Option<String> {
        let prompts = work.iter().filter(|work| work.rows.regime() == Regime::Prefill);
        let (count, tokens) = prompts.fold((0, 0), |(n, sum), work| (n + 1, sum + work.rows.tokens().len()));
        let answers = work.len() - count;
        let (prompts_max, rows_max) = (self.chunks_max(), self.prefill_rows_max());
        if work.is_empty() || answers > answers_max || count > prompts_max || tokens > rows_max {
            return Some(format!(
                "a step of {answers} answers and {tokens} tokens of {count} prompts; there are at most {answers_max}, and \
                 {rows_max} of {prompts_max}"
            ));
        }
        let off_grid = |work: &Work<'_>| match work.rows {
            WorkRows::Prompt { tokens, next } => {
                let start = work.sequence.offset() + work.ahead;
                let ends = next.is_none() || tokens.len().is_multiple_of(PREFILL_GRID);
                !self.leaves_grid() && (!start.is_multiple_of(PREFILL_GRID) || !ends)
            }
            _ => false,
        };
        let reason = "a prompt's rows begin on the 64-token grid, and end on it unless the prompt ends";
        work.iter().any(off_grid).then(|| reason.into())
    }

    /// Checks that a sequence can run these tokens after those under way, and reserves its pages.
    pub(crate) fn make_room_ahead(
        &mut self,
        sequence: &mut SequenceCache,
        ahead: usize,
        tokens: &[u32],
    ) -> Result<()> {
        self.admit_ahead(sequence, ahead, tokens)?;
        if self.in_flight.steps.is_empty() {
            self.commit(sequence)?;
        }
        self.cache.expect_whole(sequence)?;
        if sequence.accepted() > 0 {
            let reason = "a sequence with open rows joins only when no step is under way";
            return Err(EngineError::Option(reason.into()));
        }
        Ok(self.cache.reserve(sequence, ahead + tokens.len())?)
    }

    /// The rows of one work item. `places` says where in the pool the last submitted step writes its tokens.
    pub(crate) fn rows_of<'a>(&self, work: &'a Work<'_>, places: &[usize]) -> Rows<'a> {
        let row = Rows::after(work.sequence, work.rows.tokens());
        let at = match work.rows {
            WorkRows::Drawn(of) => TokensAt::Pool(places[of]),
            _ => TokensAt::Host,
        };
        let next = match work.rows {
            WorkRows::Prompt { next, .. } => next,
            _ => None,
        };
        Rows { first: row.first + work.ahead, next, draws: work.draw.as_slice(), at, ..row }
    }

    /// Waits for a step and returns the token that the device drew after each of its work items, in order. Where the
    /// host draws, [`Engine::kept_logits`] has the logits until another step that keeps logits is submitted. The caller
    /// advances each sequence by its rows ([`SequenceCache::advance`]).
    ///
    /// # Errors
    /// - The ticket is not of the first step under way.
    /// - A failure of the runtime. Then no sequence grows, and all later steps are given up; the batch tells their
    ///   sequences.
    pub fn take(&mut self, ticket: Ticket) -> Result<Vec<Option<u32>>> {
        if self.runs_microbatches() {
            return self.take_microbatch(ticket);
        }
        let is_first = self.in_flight.steps.front().is_some_and(|step| step.number == ticket.0);
        let Some(mut step) = is_first.then(|| self.in_flight.steps.pop_front()).flatten() else {
            return Err(EngineError::Option(NOT_FIRST.into()));
        };
        let refusal = step.refusal.take();
        self.taken.note(&mut step);
        let (submitted, asked) = (step.since, Instant::now());
        let ended = step.wait();
        let now = Instant::now();
        self.taken.waited = now.duration_since(asked);
        let time = self.step_timer.note(submitted, asked, now);
        ended.rejoin();
        let EndedStep { runs: ended, catch_up } = ended;
        if refusal.is_some() || ended.iter().any(EndedRun::has_failed) {
            let later = self.in_flight.end().into_iter().flat_map(EndedStep::into_all);
            let later = catch_up.into_iter().chain(later).collect();
            self.step_timer.forget();
            return Err(self.note_failed_runs(ended, later, refusal));
        }
        if let Some(run) = catch_up.filter(|run| self.is_split() && run.has_failed()) {
            // The devices have met again without the steps under way, whose results are undefined now.
            let cause = self.first_cause_of([run]).to_string();
            self.in_flight
                .steps
                .iter_mut()
                .for_each(|step| step.refusal = Some(EngineError::Step(cause.clone())));
        }
        let answers = self.taken.answers();
        if answers > 0 {
            // The answers of a step with prompts took no longer than the step.
            let is_plain = answers == self.taken.items.len();
            self.note_plain_time(answers, if is_plain { time } else { time.of_part() });
        }
        let drawn: Vec<(Regime, Vec<u32>)> = ended.iter().map(|run| (run.regime, run.tokens())).collect();
        let token = |item: &Item| {
            let run = drawn.iter().find(|(regime, _)| item.is_drawn && *regime == item.regime);
            run.map(|(_, tokens)| tokens[item.row])
        };
        Ok(self.taken.items.iter().map(token).collect())
    }

    /// The hidden state after work item `item` of the step taken last, in an engine that drafts.
    ///
    /// # Errors
    /// It could not be read.
    pub(crate) fn hidden_of(&mut self, item: usize) -> Result<&[f32]> {
        let width = self.model().config.hidden;
        let answers = self.taken.answers();
        let Taken { step, items, hidden, .. } = &mut self.taken;
        if hidden.is_empty() {
            let mut read = |of, rows| self.stepper.append_kept_hidden(*step, of, 0..rows, hidden);
            let read = read(HiddenOf::Answers, answers)
                .and_then(|()| read(HiddenOf::Prompts, items.len() - answers));
            read.inspect_err(|_| hidden.clear())?;
        }
        let Item { regime, row, .. } = items[item];
        let row = if regime == Regime::Decode { row } else { answers + row };
        Ok(&hidden[row * width..(row + 1) * width])
    }

    /// Copies the logits after work item `item` of the step taken last, whose token the host draws.
    ///
    /// # Errors
    /// The host does not draw for this item.
    pub fn kept_logits(&self, item: usize, logits: &mut Vec<f32>) -> Result<()> {
        let Some(&Item { regime, kept: Some(row), .. }) = self.taken.items.get(item) else {
            return Err(EngineError::Option(format!("no logits are kept of work item {item}")));
        };
        if self.runs_microbatches() {
            return self.microbatch_logits(row, logits);
        }
        self.stepper.read_kept_logits(regime, row, logits)
    }

    /// Tells a sequence that `rows` of its rows do not count. They belong to a failed step and to later ones.
    /// `later_ran` says that some belong to later steps, which did run. Where that [cannot be taken
    /// back](Engine::can_take_back), or where the rows may have overwritten keys of a sliding layer that are needed,
    /// the sequence answers [`keel_cache::CacheError::AheadState`] until it is rewound. That is so even if the step was
    /// refused before it ran. If the state is kept, the sequence is rewound here. If this fails, too, it stays as the
    /// step has left it.
    pub(crate) fn give_up(&mut self, sequence: &mut SequenceCache, rows: usize, later_ran: bool) {
        // No model has both recurrent and sliding layers.
        let is_recurrent = self.cache.spec().is_recurrent();
        if later_ran || !is_recurrent {
            self.cache.forget_rows(sequence, rows);
        }
        let at = sequence.offset();
        let is_kept = at == 0 || is_recurrent && sequence.checkpoints().any(|kept| kept == at);
        if is_kept && self.cache.expect_whole(sequence).is_err() {
            let _ = self.cache.rewind(sequence, at);
        }
    }

    /// Waits for all steps under way and gives them up. Each has one row of this sequence, and of no other that is
    /// still needed. Where a step [cannot be taken back](Engine::can_take_back), the sequence answers
    /// [`keel_cache::CacheError::AheadState`] until it is rewound.
    pub(crate) fn give_up_steps(&mut self, sequence: &mut SequenceCache) {
        let steps = self.in_flight.steps.len();
        let Some(first) = self.in_flight.steps.front() else { return };
        let has_failed = self.take(Ticket(first.number)).is_err();
        // If the only step failed, its failure already says what state the sequence is in.
        if !(steps == 1 && has_failed) {
            self.cache.forget_rows(sequence, steps);
        }
        self.in_flight.end();
    }

    /// Waits for all steps under way before something else runs. Their tokens are lost, and their sequences must be
    /// rewound before they are used again. Steps of groups can still be taken.
    ///
    /// # Errors
    /// The first failure of a step.
    pub(crate) fn finish_in_flight(&mut self) -> Result<()> {
        self.finish_microbatches();
        self.step_timer.forget();
        let ended = self.in_flight.end();
        let runs = || ended.iter().flat_map(|step| &step.runs);
        runs().for_each(|run| self.cache.note_ahead(run.slots.iter().copied()));
        match runs().any(EndedRun::has_failed) {
            true => Err(self.first_cause_of(ended.into_iter().flat_map(EndedStep::into_all))),
            false => Ok(()),
        }
    }

    /// Whether a decode step that is waited for leaves its rows open.
    pub(crate) fn leaves_open(&self) -> bool {
        self.stepper.row_log(StepKind::decode(Outcome::LastLogits)) == RowLog::KeepOpen
    }

    /// The outcome of the program over these rows; `None` if there are no rows.
    pub(crate) fn outcome_of(&self, regime: Regime, rows: &[Rows<'_>]) -> Option<Outcome> {
        match (regime, rows) {
            (_, []) => None,
            (Regime::Prefill, [Rows { next: Some(_), .. }]) => Some(Outcome::State),
            (Regime::Decode, _) if self.options.drafts > 0 => Some(Outcome::Ahead),
            _ => Some(Outcome::LastLogits),
        }
    }
}
