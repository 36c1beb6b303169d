//! Chunks of prompts. Those of several prompts run in one step, which draws the first token of each prompt that is
//! done.

use std::time::Instant;

use super::policy::{PromptRest, share_prefill};
use super::readout::ResultsOf;
use super::request::BatchEvent;
use super::sequence::{Drawn, Running};
use super::{Batcher, members};
use crate::speculation::Speculation;
use crate::{Chunk, Engine, EngineError, PREFILL_GRID, Result};

/// How long a step of a prompt that is alone may take, if it has more rows than other steps: requests that come, and
/// ends of requests, wait for it.
const LONE_STEP_SECONDS: f64 = 1.0;

/// The next `rows` tokens of the prompt of running sequence `i`.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptRows {
    pub i: usize,
    pub rows: usize,
}

impl Batcher {
    /// Runs chunks of prompts, and draws the first token of those that are done. A failed step is retried once; then
    /// each chunk runs alone.
    pub(super) fn prefill(&mut self) {
        let parts = self.parts();
        if parts.is_empty() {
            return;
        }
        let mut ended = match self.run_twice(&parts) {
            Ok(drawn) => self.finish_parts(&parts, drawn),
            Err(error) if parts.len() == 1 => self.report_all(vec![(parts[0].i, Err(error))]),
            Err(cause) => parts.iter().flat_map(|part| self.run_alone(*part, &cause)).collect(),
        };
        ended.sort_unstable_by_key(|(i, _)| *i);
        ended.into_iter().rev().for_each(|(i, end)| self.end(i, end));
    }

    /// Which prompts the next step should run, and how many tokens of each.
    ///
    /// Of the prompts whose logits the host reads, at most `ends_max` may end: those that came first. Others that could
    /// end wait for a later step and leave their share to others. After a step that keeps logits, none may end. Turns
    /// then count pairs of steps, so that each prompt comes first in a step in which it may end.
    pub(super) fn shares(&mut self, mut ends_max: usize) -> Vec<PromptRows> {
        let decoding = self.answers();
        let step_max = self.engine.prefill_rows_max();
        let is_prompt = |running: &Running| running.prompt_rows_left() > 0 && !running.pictures.are_unseen();
        let mut prompts = self.running.iter().filter(|running| is_prompt(running));
        let budget = match (prompts.next(), prompts.next()) {
            (Some(alone), None) if decoding == 0 && self.waiting.is_empty() => {
                let in_time = (self.prompt_rate * LONE_STEP_SECONDS) as usize;
                self.engine.lone_prompt_rows_max(&alone.cache).min(in_time.max(step_max))
            }
            _ => self.options.step_tokens.saturating_sub(decoding).min(step_max),
        };
        let may_end = |running: &Running| {
            let PromptRest { tokens, until_save_point: until_stop } = running.prompt_rest();
            tokens == until_stop && tokens <= budget.max(PREFILL_GRID)
        };
        let mut runs = |running: &Running| {
            let ends = is_prompt(running) && running.needs_logits() && may_end(running);
            let waits = ends && ends_max == 0;
            ends_max -= usize::from(ends && !waits);
            is_prompt(running) && !waits
        };
        let indices: Vec<usize> = (0..self.running.len()).filter(|&i| runs(&self.running[i])).collect();
        let rests: Vec<PromptRest> = indices.iter().map(|&i| self.running[i].prompt_rest()).collect();
        let needs_logits = self.running.iter().any(Running::needs_logits);
        let turn = if needs_logits { self.prompt_turn / 2 } else { self.prompt_turn };
        let mut shares = share_prefill(&rests, budget, turn, self.engine.chunks_max());
        // One that finds no pages has had its turn, too.
        self.prompt_turn = self.prompt_turn.wrapping_add(usize::from(!indices.is_empty()));
        let mut all = shares.iter_mut().filter(|share| **share > 0);
        if let (Some(only), None) = (all.next(), all.next()) {
            *only = self.engine.chunk_rows(*only);
        }
        let shares = indices.into_iter().zip(shares).filter(|(_, share)| *share > 0);
        let mut shares = shares.map(|(i, rows)| PromptRows { i, rows }).collect();
        self.keep_pictures_whole(&mut shares);
        shares
    }

    /// The chunks of the next step that find their pages. Sequences may be parked for them.
    fn parts(&mut self) -> Vec<PromptRows> {
        let mut parts = Vec::new();
        for part in self.shares(usize::MAX) {
            let PromptRows { i, rows } = part;
            if !self.make_way_for(i, rows) {
                continue;
            }
            let pages = self.running[i].pages_needed(rows);
            self.prefixes.make_room(self.engine.cache(), pages);
            // Reserved now, so that the next part does not count on these pages. If pages are missing, the step says
            // so.
            let _ = self.engine.cache_mut().reserve(&mut self.running[i].cache, rows);
            parts.push(part);
        }
        parts.retain(|part| part.i < self.running.len());
        parts
    }

    /// Whether a chunk of a prompt finds its pages. If not, it does not run in this step; its sequence may have been
    /// parked.
    fn make_way_for(&mut self, i: usize, rows: usize) -> bool {
        let holds = self.make_way(|batch, of| if of == i { batch.running[i].pages_needed(rows) } else { 0 });
        holds.get(i) == Some(&false)
    }

    /// Runs the parts. Retries once if that failed and left all sequences whole.
    fn run_twice(&mut self, parts: &[PromptRows]) -> Result<Vec<Option<u32>>> {
        let indices: Vec<usize> = parts.iter().map(|part| part.i).collect();
        self.twice(&indices, |batch| batch.run_parts(parts))
    }

    /// Runs one part of a failed step alone. `cause` is the error of that step.
    fn run_alone(&mut self, part: PromptRows, cause: &EngineError) -> Vec<(usize, BatchEvent)> {
        let outcome = match self.is_whole(part.i) {
            true => self.run_parts(&[part]).inspect_err(|error| self.count_failed_step(error)),
            false => Err(EngineError::Step(cause.to_string())),
        };
        match outcome {
            Ok(drawn) => self.finish_parts(&[part], drawn),
            Err(error) => self.report_all(vec![(part.i, Err(error))]),
        }
    }

    fn run_parts(&mut self, parts: &[PromptRows]) -> Result<Vec<Option<u32>>> {
        let indices: Vec<usize> = parts.iter().map(|part| part.i).collect();
        let mut chunks = Vec::with_capacity(parts.len());
        for (running, part) in members(&mut self.running, &indices).zip(parts) {
            let at = running.cache.len();
            let next = running.next_of_prompt(at + part.rows);
            let draws = running.reading.is_none() && running.awaits_first_at(at + part.rows);
            let draw = if draws { running.draw_next() } else { None };
            let tokens = &running.tokens[at..at + part.rows];
            chunks.push(Chunk { sequence: &mut running.cache, tokens, next, draw });
        }
        let begin = Instant::now();
        let outcome = self.engine.prefill_chunks(&mut chunks);
        let count: usize = parts.iter().map(|part| part.rows).sum();
        if outcome.is_ok() {
            self.prompt_rate = count as f64 / begin.elapsed().as_secs_f64().max(f64::MIN_POSITIVE);
        } else {
            let drawing = chunks.iter().map(|chunk| chunk.draw.is_some()).collect::<Vec<_>>();
            let drawing = members(&mut self.running, &indices).zip(drawing).filter(|(_, draws)| *draws);
            drawing.for_each(|(running, _)| running.abandon_draws());
        }
        outcome
    }

    /// Takes the results of a step of prompts. Returns which answers ended, and how.
    fn finish_parts(&mut self, parts: &[PromptRows], drawn: Vec<Option<u32>>) -> Vec<(usize, BatchEvent)> {
        let (mut outcomes, mut first) = (Vec::new(), 0);
        for (row, (part, token)) in parts.iter().zip(drawn).enumerate() {
            let running = &self.running[part.i];
            let (id, done) = (running.id, running.cache.len());
            if !running.is_run_again {
                self.emit(id, BatchEvent::Prefilled(done));
            }
            let outcome = self.add_rows(part.i, first, part.rows, Engine::row_hidden);
            if outcome.is_ok() {
                self.save_at_save_point(part.i);
            }
            first += part.rows;
            if outcome.is_err() || self.running[part.i].awaits_first() {
                outcomes.push((part.i, outcome.and_then(|()| self.first_token(part.i, row, token))));
            }
        }
        self.report_all(outcomes)
    }

    fn report_all(&mut self, outcomes: Vec<(usize, Result<Drawn>)>) -> Vec<(usize, BatchEvent)> {
        let report = |(i, drawn)| self.report(i, drawn).map(|end| (i, end));
        outcomes.into_iter().filter_map(report).collect()
    }

    /// Saves the state of a prompt at its save points, where other requests may go on from it. If that fails, they find
    /// no state there.
    pub(super) fn save_at_save_point(&mut self, i: usize) {
        if self.running[i].is_at_save_point() {
            let state = self.save_state(i, true);
            self.remember_stop(i, state);
        }
    }

    /// The token after a prompt, which was row `row` of the last step.
    fn first_token(&mut self, i: usize, row: usize, drawn: Option<u32>) -> Result<Drawn> {
        if let Some(read) = self.read_out(i, ResultsOf::Row(row)) {
            return read;
        }
        if self.engine.options().drafts > 0 && self.running[i].may_draft() {
            // Without the hidden state the answer makes no drafts.
            match self.engine.last_hidden_of(row) {
                Ok(hidden) => {
                    let drafting = Speculation::new(self.options.speculation, hidden);
                    self.running[i].speculation = Some(drafting);
                }
                Err(_) => self.draft_no_more(i),
            }
        }
        match drawn {
            Some(token) => self.running[i].take_drawn(token),
            None => self.draw(i, row),
        }
    }
}
