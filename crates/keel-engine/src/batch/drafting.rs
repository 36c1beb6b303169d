//! When the answers of a batch draft, where steps run ahead.
//!
//! Answers are asked together, after each round and again after [`PLAIN_STEPS`] steps, because a round and the return
//! to steps that run ahead cost all of them. They are asked sooner if the reason for no drafts soon passes: a plain
//! step is to be measured, or a grid point is next. The MTP (multi-token-prediction) head catches up with all answers
//! at once, too, after a step under way.

use super::Batcher;
use super::sequence::Running;
use crate::options::{DRAFTS_MAX, MTP_LAG_MAX};
use crate::speculation::{BOUNDS_MAX, COMPARED_EVERY, Depth};

/// How many steps of a batch run ahead before its answers are asked for drafts again.
const PLAIN_STEPS: usize = MTP_LAG_MAX;

/// The last of the 8 steps in a row in which they are asked: an answer compares depths in one of 8 steps
/// (`COMPARED_EVERY`). Then the count begins anew. 71 steps are no multiple of the grid, so an answer that had no room
/// for a draft before a grid point is elsewhere next time.
const ASKED_LAST: usize = PLAIN_STEPS + COMPARED_EVERY as usize - 1;

/// How many steps run ahead to measure a plain step. The time of the first may be known only as a bound. The last is
/// still under way when answers are asked again.
const MEASURING_STEPS: usize = BOUNDS_MAX as usize + 1;

/// How many steps run ahead where no draft fits before the next grid point. The first ends there, and the second is
/// submitted with it.
const GRID_STEPS: usize = 2;

/// How many rows the MTP head may lag behind an answer before it catches up.
const LAG_MAX: usize = 5;

impl Batcher {
    /// Whether an answer wants drafts, and it is time to make them.
    pub(super) fn wants_drafts(&self) -> bool {
        let is_time = self.answers() == 1 || !self.depth_is_auto() || self.are_asked();
        is_time && self.would_draft(self.keeps_state())
    }

    fn depth_is_auto(&self) -> bool {
        self.options.speculation.depth == Depth::Auto
    }

    /// Whether answers are asked for drafts before this step.
    fn are_asked(&self) -> bool {
        matches!(self.plain_steps, 0 | PLAIN_STEPS..)
    }

    /// Whether an answer would make drafts in a round now. With `keeps_state` no round crosses a grid point.
    fn would_draft(&self, keeps_state: bool) -> bool {
        let count = self.answers();
        let mut answers = self.running.iter().filter(|running| running.is_answering());
        answers.any(|running| running.wants_drafts(&self.engine, keeps_state, count))
    }

    /// Called before steps run ahead. If the answers have just been asked and want no drafts, sets after how many steps
    /// they are asked again.
    pub(super) fn note_asked(&mut self) {
        if (1..ASKED_LAST).contains(&self.plain_steps) {
            return;
        }
        let steps = if self.measures_plain() {
            MEASURING_STEPS
        } else if self.keeps_state() && self.would_draft(false) {
            GRID_STEPS
        } else {
            PLAIN_STEPS
        };
        self.plain_steps = PLAIN_STEPS - steps;
    }

    /// Whether answers make no drafts because a plain step is to be measured first.
    fn measures_plain(&self) -> bool {
        let is_measured = self.depth_is_auto() && !self.options.speculation.repeatable;
        let count = self.answers();
        self.engine.options().drafts > 0 && is_measured && count > 0 && self.engine.costs.wants_plain(count)
    }

    /// Counts a step that was submitted. The count does not begin while an answer is so new that it was not asked for
    /// drafts.
    pub(super) fn note_plain_step(&mut self) {
        let mut answers = self.running.iter().filter(|running| running.is_answering()).peekable();
        let is_known = |running: &Running| running.speculation.is_some() || !running.may_draft();
        let are_known = answers.peek().is_some() && answers.all(is_known);
        self.plain_steps += usize::from(are_known || self.plain_steps > 0);
    }

    /// Lets the MTP head catch up with all answers in a pass after the step under way. So they may draft at any time.
    /// If each step has prompts, there is no room for that pass. Then the steps under way are taken first, which may
    /// end answers: once the head lags 64 rows (`MTP_LAG_MAX`), and before answers are asked that could not draft
    /// because of its lag.
    pub(super) fn catch_up(&mut self) {
        if self.answers() == 0 {
            self.plain_steps = 0;
        }
        if self.engine.options().drafts == 0 || !self.engine.runs_ahead() {
            return;
        }
        let lag = self.running.iter().map(Running::lag).max().unwrap_or(0);
        let is_asked = self.depth_is_auto() && self.plain_steps >= PLAIN_STEPS;
        let can_go_ahead = self.engine.can_catch_up_ahead();
        if lag >= MTP_LAG_MAX || lag > DRAFTS_MAX && is_asked && !can_go_ahead {
            self.settle();
            self.catch_up_plainly();
        } else if lag > LAG_MAX && can_go_ahead {
            let all = self.running.iter_mut();
            let all = all.filter_map(|running| Some((&running.cache, running.speculation.as_mut()?)));
            let mut all: Vec<_> = all.filter(|(_, speculation)| speculation.lag_after(0) > 1).collect();
            if !all.is_empty() && self.engine.catch_up_ahead(&mut all).is_err() {
                // The error comes again in a round.
                self.is_careful = true;
            }
        }
    }

    fn catch_up_plainly(&mut self) {
        for Running { cache, speculation, .. } in &mut self.running {
            let Some(speculation) = speculation else { continue };
            if self.engine.catch_up_plainly(cache, speculation).is_err() {
                // The error comes again in a round.
                self.is_careful = true;
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
