//! Batches whose steps run ahead of the host.
//!
//! Where tokens are drawn on the device, the contents of the next step follow from counts. A prompt moves on by its
//! chunk, and an answer by one token, whatever that token is. So each call submits the next step, then takes the step
//! before. Arrivals, ends, cancellations and grid points change the contents of the next step, not whether it is
//! submitted.
//!
//! A sequence whose tokens the host draws is in every other step: the step after its row is submitted before the host
//! has its logits. All such sequences are in the same steps, so together they wait no longer than one alone. If there
//! are more than [a step may have](crate::Engine::host_rows_max), those that have waited longest come first. If all
//! sequences are such answers, each step is waited for and has all of them. One whose mask is not ready sits out. The
//! values that are read of a prompt come when its step is taken (`readout.rs`).
//!
//! An answer that ends with its token has a row too many in the step under way. That row writes after the answer's end.
//! The next owner of its pages and slot runs after that step. A state that is to be kept is copied after the step that
//! leads to it and before the next.
//!
//! Where the engine drafts, steps run ahead while no answer wants drafts (`drafting.rs`).
//!
//! If a step fails, the step after it is given up, and sequences with torn states end. The others run in a step that is
//! waited for, and one by one if it fails, too (`attempts.rs`).

use super::prompts::PromptRows;
use super::request::{BatchEvent, SequenceId};
use super::sequence::{Drawn, Running};
use super::{Batcher, members};
use crate::speculation::Speculation;
use crate::{EngineError, HostReads, PREFILL_GRID, Result, Ticket, Work, WorkRows};
use keel_array::Regime;
use keel_cache::{CheckpointLease, SavedState};

/// A step under way.
pub(super) struct Pending {
    ticket: Ticket,
    parts: Vec<StepRows>,
}

impl Pending {
    /// Whether a request has rows in the step. Its sequence may have left the batch.
    pub fn has(&self, id: SequenceId) -> bool {
        self.parts.iter().any(|part| part.id == id)
    }

    /// Whether it has prompts.
    pub fn is_of_prompts(&self) -> bool {
        self.parts.iter().any(|part| part.is_prompt)
    }
}

/// The rows of one sequence in a step.
pub(super) struct StepRows {
    id: SequenceId,
    rows: usize,
    is_prompt: bool,
    /// Whether a token is drawn after its rows.
    draws: bool,
    /// The results that the host reads.
    reads: HostReads,
    /// Its state after its rows, if that state is kept.
    saved: Option<SavedState>,
}

impl StepRows {
    /// The next row of an answer.
    pub fn of_answer(running: &Running) -> StepRows {
        let reads = if running.needs_logits() { HostReads::Logits } else { HostReads::Nothing };
        StepRows { id: running.id, rows: 1, is_prompt: false, draws: true, reads, saved: None }
    }

    /// The next `rows` rows of a prompt.
    pub fn of_prompt(running: &Running, rows: usize) -> StepRows {
        let ends = running.awaits_first_at(running.virtual_len() + rows);
        let reads = match &running.reading {
            Some(reading) => reading.reads(ends),
            None if ends && running.needs_logits() => HostReads::Logits,
            None => HostReads::Nothing,
        };
        let draws = ends && running.reading.is_none();
        StepRows { id: running.id, rows, is_prompt: true, draws, reads, saved: None }
    }

    /// Whether the host reads the logits after its rows.
    fn keeps_logits(&self) -> bool {
        self.reads == HostReads::Logits
    }
}

/// The position of an item. The search begins at `from`: steps have their sequences in the order of the batch.
fn position_from<T>(items: &[T], from: usize, mut is_it: impl FnMut(&T) -> bool) -> Option<usize> {
    let (before, after) = items.split_at(from);
    after.iter().position(&mut is_it).map(|at| from + at).or_else(|| before.iter().position(is_it))
}

impl Batcher {
    /// Whether the next step is submitted before the last one is taken.
    pub(super) fn goes_ahead(&self) -> bool {
        // A sequence that outgrows its rotary frequencies is run again, after all steps are taken. No row follows a
        // prompt that is only read.
        let can_go = |running: &Running| {
            let next = usize::from(running.reading.is_none());
            self.engine.can_grow(&running.cache, running.virtual_len() + next)
        };
        // The next step has none of the answers that the host draws now. Without others there would be no next step.
        let is_drawn_by_host = |running: &Running| running.is_answering() && running.needs_logits();
        let keeps_logits = self.engine.host_rows_max(Regime::Decode) > 0;
        self.engine.runs_ahead()
            && !self.is_careful
            && !self.running.iter().all(is_drawn_by_host)
            && (keeps_logits || !self.running.iter().any(Running::needs_logits))
            && self.running.iter().all(can_go)
            && !self.wants_drafts()
            && self.finds_pages_ahead()
    }

    /// Commits open rows of the last round, and reads the hidden states of its rows: steps that run ahead add more.
    fn commit_round(&mut self) -> Result<()> {
        if self.engine.options().drafts == 0 || !self.pending.is_empty() {
            return Ok(());
        }
        let mut all: Vec<_> = self.running.iter_mut().map(|running| &mut running.cache).collect();
        self.engine.commit_all(&mut all)?;
        self.engine.fetch_lags(self.running.iter_mut().filter_map(|running| running.speculation.as_mut()))
    }

    /// Submits the next step, or the next two if none is under way, and takes the first.
    pub(super) fn step_ahead(&mut self) {
        self.note_asked();
        if self.commit_round().is_err() {
            // The error comes again in a step that is waited for.
            self.is_careful = true;
            return;
        }
        loop {
            let is_first = self.pending.is_empty();
            let submitted = self.submit_next();
            if submitted.as_ref().is_ok_and(|submitted| *submitted) && is_first {
                continue;
            }
            if submitted.is_err() {
                // The error comes again in a step that is waited for.
                self.is_careful = true;
            }
            break;
        }
        self.take_first();
        self.forget_unwanted();
    }

    /// Takes all steps under way, before steps that are waited for.
    pub(super) fn settle(&mut self) {
        while !self.pending.is_empty() {
            self.take_first();
        }
    }

    /// Waits for all steps under way if no running sequence takes part in them.
    pub(super) fn forget_unwanted(&mut self) {
        if self.running.iter().all(|running| running.ahead.steps == 0) {
            self.settle();
        }
    }

    /// Submits the next step; false if there is nothing to run.
    fn submit_next(&mut self) -> Result<bool> {
        let (indices, parts) = self.next_parts().into_iter().unzip();
        self.submit_parts(indices, parts)
    }

    /// Submits a step with these parts of these running sequences, whose numbers ascend; false if there are none.
    pub(super) fn submit_parts(&mut self, indices: Vec<usize>, mut parts: Vec<StepRows>) -> Result<bool> {
        if parts.is_empty() {
            return Ok(false);
        }
        let pages =
            indices.iter().zip(&parts).map(|(&i, part)| self.running[i].pages_needed(part.rows)).sum();
        self.prefixes.make_room(&self.engine.cache, pages);
        let before: &[StepRows] = self.pending.back().map_or(&[], |pending| &pending.parts);
        let mut work = Vec::with_capacity(parts.len());
        let mut of_before = 0;
        for (running, part) in members(&mut self.running, &indices).zip(&parts) {
            let draw = if part.draws { running.draw_next() } else { None };
            let at = running.virtual_len();
            let rows = if part.is_prompt {
                let tokens = &running.tokens[at..at + part.rows];
                WorkRows::Prompt { tokens, next: running.next_of_prompt(at + part.rows) }
            } else if let Some(&token) = running.tokens.get(at) {
                WorkRows::Token(token)
            } else {
                let of = position_from(before, of_before, |part| part.id == running.id);
                of_before = of.unwrap_or_else(|| unreachable!("the step before draws its token"));
                WorkRows::Drawn(of_before)
            };
            let (ahead, reads) = (running.ahead.rows, part.reads);
            work.push(Work { ahead, sequence: &mut running.cache, rows, draw, reads });
        }
        let submitted = self.engine.submit(&mut work);
        drop(work);
        let ticket = match submitted {
            Ok(ticket) => ticket,
            Err(error) => {
                let drawing = members(&mut self.running, &indices).zip(&parts).filter(|(_, part)| part.draws);
                drawing.for_each(|(running, _)| running.forget_next_draw());
                return Err(error);
            }
        };
        for (&i, part) in indices.iter().zip(&mut parts) {
            let running = &mut self.running[i];
            running.ahead.rows += part.rows;
            running.ahead.steps += 1;
            running.ahead.draws += usize::from(part.draws);
            part.saved = self.save_ahead(i, part.is_prompt);
        }
        self.note_plain_step();
        self.pending.push_back(Pending { ticket, parts });
        Ok(true)
    }

    /// The contents of the next step: chunks of prompts, and one row of each answer that goes on, whatever token is
    /// drawn. Each with the number of its running sequence, ascending.
    fn next_parts(&mut self) -> Vec<(usize, StepRows)> {
        let keeps_logits =
            self.pending.back().is_some_and(|step| step.parts.iter().any(StepRows::keeps_logits));
        // A step keeps the logits of few rows, and of none after a step that keeps some.
        let kept_max = [Regime::Decode, Regime::Prefill]
            .map(|regime| if keeps_logits { 0 } else { self.engine.host_rows_max(regime) });
        let chunks = self.shares(kept_max[1]);
        self.ask_masks(Running::is_answering);
        let goes_on = |(_, running): &(usize, &Running)| {
            running.is_answering() && running.draws_left() > 0 && !running.awaits_mask
        };
        let answers = self.running.iter().enumerate().filter(goes_on);
        let of_prompt = |PromptRows { i, rows }| (i, StepRows::of_prompt(&self.running[i], rows));
        let mut parts: Vec<(usize, StepRows)> = chunks.into_iter().map(of_prompt).collect();
        parts.extend(answers.map(|(i, running)| (i, StepRows::of_answer(running))));
        // Prompts that end come in the order of their arrival. One too many may end here: a chunk whose picture is kept
        // whole may be longer than its share.
        parts.sort_by_key(|(i, part)| if part.is_prompt { 0 } else { self.running[*i].last_turn });
        let mut kept = [0; 2];
        parts.retain(|(_, part)| {
            let of = usize::from(part.is_prompt);
            kept[of] += usize::from(part.keeps_logits());
            !part.keeps_logits() || kept[of] <= kept_max[of]
        });
        self.note_turns(parts.iter().filter(|(_, part)| !part.is_prompt).map(|(i, _)| *i));
        parts.sort_unstable_by_key(|(i, _)| *i);
        parts
    }

    /// Notes that these answers have their turns, in this order.
    pub(super) fn note_turns(&mut self, answers: impl Iterator<Item = usize>) {
        for i in answers {
            self.turn = self.turn.wrapping_add(1);
            self.running[i].last_turn = self.turn;
        }
    }

    /// Saves the state that a step under way will leave, if it is to be kept: at a prompt's save points, and at an
    /// answer's last grid point. With micro-batches it is saved when the step is taken.
    fn save_ahead(&mut self, i: usize, is_prompt: bool) -> Option<SavedState> {
        let running = &self.running[i];
        let position = running.virtual_len();
        let at_grid = position > running.prompt_len
            && position.is_multiple_of(PREFILL_GRID)
            && self.options.reuse_generated;
        let is_kept = if is_prompt { running.save_points.contains(&position) } else { at_grid };
        if !is_kept || self.engine.runs_microbatches() {
            return None;
        }
        self.save_state(i, is_prompt).map(|checkpoint| SavedState { position, checkpoint })
    }

    /// Takes the first step under way.
    pub(super) fn take_first(&mut self) {
        let Some(Pending { ticket, parts }) = self.pending.pop_front() else { return };
        match self.engine.take(ticket) {
            Ok(tokens) => self.take_parts(parts, tokens),
            Err(error) => self.give_up_all(&error),
        }
    }

    fn take_parts(&mut self, parts: Vec<StepRows>, tokens: Vec<Option<u32>>) {
        let (mut ended, mut last, mut prompt_rows) = (Vec::new(), 0, 0);
        for (item, (part, token)) in parts.into_iter().zip(tokens).enumerate() {
            let first = prompt_rows;
            prompt_rows += if part.is_prompt { part.rows } else { 0 };
            let Some(i) = position_from(&self.running, last, |running| running.id == part.id) else {
                // The sequence has left the batch.
                continue;
            };
            last = i;
            let hidden = self.hidden_after(i, item, &part);
            let running = &mut self.running[i];
            // The token of an answer that was run.
            let run = (!part.is_prompt).then(|| running.tokens[running.cache.len()]);
            running.cache.advance(part.rows);
            running.ahead.rows -= part.rows;
            running.ahead.steps -= 1;
            let done = running.cache.len();
            if part.is_prompt {
                if !running.is_run_again {
                    self.emit(part.id, BatchEvent::Prefilled(done));
                }
                match self.engine.runs_microbatches() {
                    true => self.save_at_save_point(i),
                    false => self.remember_stop(i, part.saved.map(|saved| saved.checkpoint)),
                }
            } else if self.engine.runs_microbatches() {
                self.keep_state(i);
            } else if part.saved.is_some() {
                self.running[i].rolling = part.saved;
            }
            let outcome = if part.draws {
                let drawn = match token {
                    Some(token) => self.running[i].take_ahead(token),
                    None => self.draw_kept(i, item),
                };
                Some(drawn.inspect(|drawn| self.note_hidden(i, run, hidden, drawn)))
            } else {
                self.read_item(i, item, first, part.rows)
            };
            let end = outcome.and_then(|outcome| self.report(i, outcome));
            ended.extend(end.map(|end| (part.id, end)));
        }
        for (id, end) in ended {
            if let Some(i) = self.running.iter().position(|running| running.id == id) {
                self.end(i, end);
            }
        }
    }

    /// The hidden state after work item `item` of the step taken last, if the MTP head needs it.
    fn hidden_after(&mut self, i: usize, item: usize, part: &StepRows) -> Result<Option<Vec<f32>>> {
        let is_needed = part.draws && self.engine.options().drafts > 0 && self.running[i].may_draft();
        if is_needed { self.engine.hidden_of(item).map(|hidden| Some(hidden.to_vec())) } else { Ok(None) }
    }

    /// Keeps a hidden state for the MTP head: after the token `run` that gave `drawn`, or after a prompt. An answer
    /// whose hidden state cannot be read goes on without drafts.
    fn note_hidden(&mut self, i: usize, run: Option<u32>, hidden: Result<Option<Vec<f32>>>, drawn: &Drawn) {
        let time = self.engine.taken.share();
        let running = &mut self.running[i];
        let hidden = match hidden {
            Ok(Some(hidden)) => hidden,
            Ok(None) => return,
            Err(_) => return self.draft_no_more(i),
        };
        match (run, &mut running.speculation, drawn.tokens.first()) {
            (None, ..) => running.speculation = Some(Speculation::new(self.options.speculation, hidden)),
            (Some(run), Some(speculation), Some((token, _))) => {
                speculation.note_plain(run, &hidden, *token, time);
            }
            _ => {}
        }
    }

    /// Draws the token after work item `item` of the step taken last.
    fn draw_kept(&mut self, i: usize, item: usize) -> Result<Drawn> {
        self.running[i].ahead.draws -= 1;
        self.draw_from(i, |engine, logits| engine.kept_logits(item, logits))
    }

    /// Remembers a prompt that has come to one of its save points, with its saved state if there is one.
    pub(super) fn remember_stop(&mut self, i: usize, state: Option<CheckpointLease>) {
        let running = &self.running[i];
        if running.is_at_save_point() {
            self.prefixes.remember(&running.key(running.cache.len()), &running.cache, state);
        }
    }

    /// Handles a failed step: the steps after it are given up. Sequences whose states it has torn end.
    fn give_up_all(&mut self, cause: &EngineError) {
        self.count_failed_step(cause);
        self.is_careful = true;
        let later: Vec<StepRows> =
            std::mem::take(&mut self.pending).into_iter().flat_map(|pending| pending.parts).collect();
        let mut ids = Vec::new();
        for running in self.running.iter_mut().filter(|running| running.ahead.steps > 0) {
            ids.push(running.id);
            // A micro-batch's step does not run after one that failed.
            let later_ran =
                !self.engine.runs_microbatches() && later.iter().any(|part| part.id == running.id);
            let ahead = std::mem::take(&mut running.ahead);
            self.engine.give_up(&mut running.cache, ahead.rows, later_ran);
            if ahead.draws > 0 {
                running.abandon_draws();
            }
        }
        for id in ids {
            let torn =
                self.running.iter().position(|running| running.id == id).filter(|&i| !self.is_whole(i));
            if let Some(i) = torn {
                self.fail(i, EngineError::Step(cause.to_string()));
            }
        }
    }
}

#[cfg(test)]
mod tests;
