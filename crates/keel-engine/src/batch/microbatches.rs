//! Answers in a pipeline: micro-batches of them, each with a step under way, so that no stage waits for another.
//!
//! With `s` stages there are at most `s` micro-batches, of equal size ([`crate::Engine::microbatches`]). Steps are
//! submitted until each micro-batch has one under way; then the first is taken. So a call advances one micro-batch by a
//! token, or prompts. Micro-batches are not fixed. A step takes answers that are in no other step. Those that have
//! waited longest come first. One step of prompts is under way with them. Drafts, pictures and other uses of the engine
//! end this mode: the steps under way are taken, and the next step is waited for.

use super::Batcher;
use super::ahead::StepRows;
use super::prompts::PromptRows;
use super::sequence::Running;
use crate::Result;
use crate::options::HOST_ROWS_MAX;
use crate::split::microbatches::MICROBATCH_MAX;

impl Batcher {
    /// Whether the next step is that of a micro-batch, or of prompts while micro-batches have steps under way.
    pub(super) fn runs_microbatches(&self) -> bool {
        let can_go = |running: &Running| {
            running.reading.is_none()
                && (running.is_answering() || running.pictures.key.is_none())
                && self.engine.can_grow(&running.cache, running.virtual_len() + 1)
        };
        let for_host = self.running.iter().filter(|running| running.needs_logits()).count();
        !self.is_careful
            && self.microbatches() > 1
            && for_host <= HOST_ROWS_MAX
            && self.running.iter().all(can_go)
    }

    /// How many sequences are answered.
    pub(super) fn answers(&self) -> usize {
        self.running.iter().filter(|running| running.is_answering()).count()
    }

    /// How many micro-batches there are.
    fn microbatches(&self) -> usize {
        self.engine.microbatches(self.answers())
    }

    /// Submits steps until each micro-batch has one under way, and one of prompts if there are any, and takes the
    /// first.
    pub(super) fn step_microbatches(&mut self) {
        let submitted = self.submit_microbatches();
        // An error comes again in a step that is waited for.
        self.is_careful = submitted.is_err();
        self.take_first();
        self.forget_unwanted();
    }

    fn submit_microbatches(&mut self) -> Result<()> {
        let prompts = self.pending.iter().filter(|step| step.is_of_prompts()).count();
        while self.pending.len() - prompts < self.microbatches() && self.submit_microbatch()? {}
        if prompts == 0 {
            let (rows, parts) = self
                .shares(usize::MAX)
                .into_iter()
                .map(|PromptRows { i, rows }| (i, StepRows::of_prompt(&self.running[i], rows)))
                .unzip();
            self.submit_parts(rows, parts)?;
        }
        Ok(())
    }

    /// Submits the step of the next micro-batch; false if no answer is free.
    fn submit_microbatch(&mut self) -> Result<bool> {
        let is_free = |running: &Running| running.is_answering() && running.ahead.steps == 0;
        self.ask_masks(is_free);
        let runs = |i: &usize| is_free(&self.running[*i]) && !self.running[*i].awaits_mask;
        let mut free: Vec<usize> = (0..self.running.len()).filter(runs).collect();
        free.sort_by_key(|&i| self.running[i].last_turn);
        free.truncate(self.answers().div_ceil(self.microbatches()).min(MICROBATCH_MAX));
        self.note_turns(free.iter().copied());
        free.sort_unstable();
        let parts = free.iter().map(|&i| StepRows::of_answer(&self.running[i])).collect();
        self.submit_parts(free, parts)
    }
}
