//! Answers in a pipeline: groups of them, each with a step under way, so that no stage waits for another.
//!
//! With `s` stages there are at most `s` groups, of equal size ([`crate::Engine::groups`]). Steps are submitted until
//! each group has one under way; then the first is taken. So a call advances one group by a token, or prompts. Groups
//! are not fixed. A step takes answers that are in no other step. Those that have waited longest come first. One step
//! of prompts is under way with them. Drafts, pictures and other uses of the engine end this mode: the steps under way
//! are taken, and the next step is waited for.

use super::ahead::Part;
use super::sequence::Running;
use super::{Batcher, members};
use crate::Result;
use crate::groups::GROUP_MAX;
use crate::options::HOST_ROWS_MAX;

impl Batcher {
    /// Whether the next step is that of a group, or of prompts while groups have steps under way.
    pub(super) fn goes_in_groups(&self) -> bool {
        let can_go = |running: &Running| {
            running.reading.is_none()
                && (running.is_answering() || running.pictures.key.is_none())
                && self.engine.can_grow(&running.cache, running.virtual_len() + 1)
        };
        let for_host = self.running.iter().filter(|running| !running.draws_ahead()).count();
        !self.is_careful && self.groups() > 1 && for_host <= HOST_ROWS_MAX && self.running.iter().all(can_go)
    }

    fn answers(&self) -> usize {
        self.running.iter().filter(|running| running.is_answering()).count()
    }

    /// How many groups there are.
    fn groups(&self) -> usize {
        self.engine.groups(self.answers())
    }

    /// Submits steps until each group has one under way, and one of prompts if there are any, and takes the first.
    pub(super) fn step_groups(&mut self) {
        let submitted = self.submit_groups();
        // An error comes again in a step that is waited for.
        self.is_careful = submitted.is_err();
        self.take_first();
        self.forget_unwanted();
    }

    fn submit_groups(&mut self) -> Result<()> {
        let prompts = self.pending.iter().filter(|step| step.is_of_prompts()).count();
        while self.pending.len() - prompts < self.groups() && self.submit_group()? {}
        if prompts == 0 {
            let (rows, parts) = self
                .shares(false)
                .into_iter()
                .map(|(i, rows)| (i, Part::of_prompt(&self.running[i], rows)))
                .unzip();
            self.submit_parts(rows, parts)?;
        }
        Ok(())
    }

    /// Submits the step of the next group; false if no answer is free.
    fn submit_group(&mut self) -> Result<bool> {
        let is_free = |running: &Running| running.is_answering() && running.ahead.steps == 0;
        self.ask_masks(is_free);
        let runs = |i: &usize| is_free(&self.running[*i]) && !self.running[*i].awaits_mask;
        let mut free: Vec<usize> = (0..self.running.len()).filter(runs).collect();
        free.sort_by_key(|&i| self.running[i].last_turn);
        free.truncate(self.answers().div_ceil(self.groups()).min(GROUP_MAX));
        free.sort_unstable();
        let parts = free.iter().map(|&i| Part::of_answer(&self.running[i])).collect();
        let turn = self.turn;
        members(&mut self.running, &free).for_each(|running| running.last_turn = turn);
        self.submit_parts(free, parts)
    }
}
