//! Decoding with the host one step behind the device.
//!
//! While the batch stays as it is and every token is drawn on the device, the next step is submitted before the tokens of this
//! one are waited for. An answer that ends meanwhile, or is cancelled, leaves at once: the step under way writes behind its end, and
//! whoever gets its memory comes behind that step. Whatever changes the batch (a prompt, an answer that ends or needs
//! the host) takes what is under way first, and submits nothing behind it.

use super::sequence::{Drawn, Running};
use super::{Batcher, members};
use crate::{PREFILL_GRID, Result};

impl Batcher {
    /// Whether it is an answer's turn: all of the step under way come before the others.
    pub(super) fn is_due(&self, running: &Running) -> bool {
        running.decodes_now() && (self.ahead.is_empty() || self.ahead.contains(&running.id))
    }

    /// Whether a step can be submitted behind the one of these answers, before its tokens are known.
    fn can_submit_behind(&self, rows: &[usize]) -> bool {
        let options = self.engine.options();
        let is_plain = options.drafts == 0 && options.swap_bytes == 0;
        if !self.engine.runs_ahead() || !is_plain || rows.len() < self.running.len() {
            return false;
        }
        let keeps_states = self.options.reuse_generated && self.engine.cache().spec().is_recurrent();
        let goes_on = |running: &Running| {
            let at_grid = (running.cache.len() + 1).is_multiple_of(PREFILL_GRID);
            running.draws_ahead() && running.rows_max(false) > 1 && !(keeps_states && at_grid)
        };
        let pages: usize = self.running.iter().map(|running| running.pages_behind(2)).sum();
        self.running.iter().all(goes_on) && pages <= self.engine.cache().free_pages()
    }

    /// A token for each answer whose step is under way, or can be with one behind it; `None` if they are to be run one by one.
    pub(super) fn decode_ahead(&mut self, rows: &[usize]) -> Option<Result<Vec<Result<Drawn>>>> {
        let is_behind = self.can_submit_behind(rows);
        if self.ahead.is_empty() && !is_behind {
            return None;
        }
        let drawn = self.draw_ahead(rows, is_behind);
        Some(match drawn {
            Ok(drawn) => {
                let took = rows.iter().zip(drawn).map(|(&i, token)| self.running[i].take_drawn(token));
                Ok(took.collect())
            }
            Err(error) => {
                self.ahead.clear();
                let abandoned = members(&mut self.running, rows).try_for_each(Running::abandon_draw);
                abandoned.and(Err(error))
            }
        })
    }

    fn draw_ahead(&mut self, rows: &[usize], is_behind: bool) -> Result<Vec<u32>> {
        let ids: Vec<_> = rows.iter().map(|&i| self.running[i].id).collect();
        let under_way = std::mem::take(&mut self.ahead);
        if under_way.is_empty() {
            let draws: Option<Vec<_>> = members(&mut self.running, rows).map(Running::draw_ahead).collect();
            let draws = draws.unwrap_or_else(|| unreachable!("the device draws for all of them"));
            let (tokens, mut sequences): (Vec<u32>, Vec<_>) =
                members(&mut self.running, rows).map(|r| (r.last(), &mut r.cache)).unzip();
            self.engine.submit_decode(&mut sequences, Some(&tokens), &draws)?;
        } else {
            members(&mut self.running, rows).for_each(Running::begin_drawn);
        }
        if is_behind && (under_way.is_empty() || under_way == ids) {
            let draws: Option<Vec<_>> = members(&mut self.running, rows).map(Running::draw_behind).collect();
            let draws = draws.unwrap_or_else(|| unreachable!("the device draws for all of them"));
            let mut sequences: Vec<_> = members(&mut self.running, rows).map(|r| &mut r.cache).collect();
            match self.engine.submit_decode(&mut sequences, None, &draws) {
                Ok(()) => self.ahead = ids,
                // What stands in its way is met again by the step itself.
                Err(_) => members(&mut self.running, rows).for_each(Running::forget_behind),
            }
        }
        let mut sequences: Vec<_> = members(&mut self.running, rows).map(|r| &mut r.cache).collect();
        self.engine.take_drawn(&mut sequences)
    }

    /// Ends the step under way where nobody is left to take its tokens.
    pub(super) fn give_up_ahead(&mut self) {
        let ids = std::mem::take(&mut self.ahead);
        if !ids.is_empty() && self.running.iter().all(|running| !ids.contains(&running.id)) {
            let outcome = self.engine.give_up_steps(&mut []);
            outcome.unwrap_or_else(|error| unreachable!("it is asked for no sequence: {error}"));
        } else {
            self.ahead = ids;
        }
    }
}
