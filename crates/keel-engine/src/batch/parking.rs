//! Overcommit: sequences are parked on the host while others need their pages (`overcommit.rs` decides).

use keel_array::AttentionSpec;
use keel_cache::SwapSize;

use super::Batcher;
use super::overcommit::{Decision, OvercommitPolicy, PageDemand};
use super::policy::rows_of_steps;
use super::request::{BatchEvent, ParkingStatus};
use super::sequence::Running;
use crate::engine::ahead::STEPS_MAX;
use crate::{EngineError, Result};

impl Batcher {
    /// The bounds of overcommit; `None` if a request is admitted only when its pages can be promised.
    pub(super) fn overcommit_policy(&self) -> Option<OvercommitPolicy> {
        let cache = self.engine.cache();
        let swap = cache.swap_size();
        (swap.blocks > 0).then_some(OvercommitPolicy { pages: cache.size().pages(), swap })
    }

    /// Pages that are free or can be evicted.
    pub(super) fn available_pages(&self) -> usize {
        let cache = self.engine.cache();
        cache.free_pages() + cache.evictable_pages()
    }

    pub(super) fn running_holdings(&self) -> Vec<PageDemand> {
        self.running.iter().map(Running::page_demand).collect()
    }

    /// Brings parked sequences back as long as there is room. The sequence parked last comes back first.
    pub(super) fn bring_back(&mut self) {
        let Some(policy) = self.overcommit_policy() else { return };
        while let Some(next) = self.parked.front().map(Running::page_demand) {
            if !policy.can_return(self.available_pages(), &self.running_holdings(), next) {
                return;
            }
            if !self.pending.is_empty() {
                // Its pages and its slot may be written by steps under way, which may also end answers.
                self.settle();
                continue;
            }
            let Some(mut running) = self.parked.pop_front() else { return };
            self.prefixes.make_room(self.engine.cache(), next.held);
            let before = self.engine.cache().free_swap_blocks();
            let outcome = self.engine.cache_mut().unpark(&mut running.cache);
            let blocks = self.engine.cache().free_swap_blocks() - before;
            self.parking.bytes_in += SwapSize::bytes(blocks) as u64;
            match outcome {
                Ok(()) => self.running.push(running),
                Err(error) => {
                    let id = running.id;
                    self.give_back(running);
                    self.emit(id, BatchEvent::Failed(error.into()));
                }
            }
        }
    }

    /// Whether the steps that are submitted next find their pages, and no sequence is parked or holds still for them.
    pub(super) fn finds_pages_ahead(&self) -> bool {
        let Some(policy) = self.overcommit_policy() else { return true };
        let step_max = self.engine.prefill_rows_max();
        let pages = |running: &Running| {
            let (prompt, answer) = (running.prompt_rows_left(), running.answer_rows_left());
            running.pages_needed(rows_of_steps(prompt, answer, STEPS_MAX, step_max))
        };
        let wanted: Vec<usize> = self.running.iter().map(pages).collect();
        self.decision_of(&policy, &wanted) == Decision::Run(vec![false; wanted.len()])
    }

    /// The action before a step that adds these pages to the running sequences.
    fn decision_of(&self, policy: &OvercommitPolicy, wanted: &[usize]) -> Decision {
        if wanted.iter().all(|&pages| pages == 0) {
            return Decision::Run(vec![false; wanted.len()]);
        }
        let parked: Vec<PageDemand> = self.parked.iter().map(Running::page_demand).collect();
        policy.next(self.available_pages(), &self.running_holdings(), &parked, wanted)
    }

    /// Makes sure that the next step finds its pages, and parks the newest sequences if it would not. `wanted` says how
    /// many pages the step adds to a running sequence. Returns which sequences hold still in this step.
    pub(super) fn make_way(&mut self, wanted: impl Fn(&Batcher, usize) -> usize) -> Vec<bool> {
        let Some(policy) = self.overcommit_policy() else { return vec![false; self.running.len()] };
        loop {
            let wants: Vec<usize> = (0..self.running.len()).map(|i| wanted(self, i)).collect();
            match self.decision_of(&policy, &wants) {
                Decision::Run(holds) => return holds,
                Decision::ParkNewest => self.park_newest(),
            }
        }
    }

    fn park_newest(&mut self) {
        let Some(mut newest) = self.running.pop() else { return };
        match self.park(&mut newest) {
            Ok(()) => self.parked.push_front(newest),
            Err(error) => {
                self.running.push(newest);
                self.fail(self.running.len() - 1, error);
            }
        }
    }

    fn park(&mut self, running: &mut Running) -> Result<()> {
        self.engine.commit(&mut running.cache)?;
        // The device keeps them for two rounds alone.
        self.engine.fetch_lags(&mut running.speculation)?;
        // Its pages go next, so its prefix is remembered now for a next turn.
        self.remember_answer(running);
        let before = self.engine.cache().free_swap_blocks();
        self.engine.cache_mut().park(&mut running.cache)?;
        let blocks = before - self.engine.cache().free_swap_blocks();
        self.parking.times += 1;
        self.parking.bytes_out += SwapSize::bytes(blocks) as u64;
        Ok(())
    }

    /// Ends a parked request.
    pub(super) fn end_parked(&mut self, at: usize) {
        let Some(running) = self.parked.remove(at) else { return };
        self.give_back(running);
    }

    /// Fails the parked sequences for which `is_late` is true.
    pub(super) fn expire_parked(&mut self, is_late: impl Fn(&Running) -> bool) {
        while let Some(at) = self.parked.iter().position(&is_late) {
            let id = self.parked[at].id;
            self.end_parked(at);
            self.emit(id, BatchEvent::Failed(EngineError::Deadline));
        }
    }

    pub(super) fn parking_status(&self) -> ParkingStatus {
        let cache = self.engine.cache();
        let total = cache.swap_size().blocks;
        ParkingStatus {
            parked: self.parked.len(),
            bytes: SwapSize::bytes(total - cache.free_swap_blocks()) as u64,
            bytes_max: SwapSize::bytes(total) as u64,
            ..self.parking
        }
    }
}

impl Running {
    /// Its pages, as decisions count them.
    pub fn page_demand(&self) -> PageDemand {
        let held = if self.cache.is_parked() {
            self.cache.len().div_ceil(AttentionSpec::PAGE)
        } else {
            self.cache.pages().len()
        };
        PageDemand::new(held, self.prompt_len.div_ceil(AttentionSpec::PAGE), self.pages_at_full_length())
    }
}
