//! Which sequences run, hold still or are parked where more were admitted than the pool can promise. Decisions over
//! counts alone.
//!
//! Sequences stand in the order in which they started.
//!
//! - The oldest sequences that fit into the pool at full length are *safe*: parking the others frees all the pages that
//!   they need.
//! - The others together hold at most as much as the host can take, so each of them can be parked at any time. A
//!   sequence that would exceed this holds still until it is safe.
//!
//! So the oldest sequence always goes on, and each sequence becomes the oldest in the end. There is no deadlock, and no
//! sequence fails for memory.
//!
//! The newest sequence is parked first. The oldest parked sequence, which was parked last, comes back first. So the
//! sequences that began first end first and give their pages back for good. Parking the sequence with most left to do
//! would make long sequences take turns, and longer ones would swap more.

use keel_cache::SwapSize;

/// The pages of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageDemand {
    /// Pages that it holds, or needs in order to come back.
    pub held: usize,
    /// Pages that it should find when it starts or comes back: those of its prompt or those that it holds, and one
    /// more.
    pub soon: usize,
    /// Pages at full length.
    pub full: usize,
}

impl PageDemand {
    /// A sequence whose prompt takes `prompt` pages.
    pub fn new(held: usize, prompt: usize, full: usize) -> PageDemand {
        PageDemand { held, soon: full.min(held.max(prompt) + 1), full }
    }
}

/// The action before the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// Run the step. For each running sequence: whether it holds still.
    Run(Vec<bool>),
    /// Park the newest running sequence, then decide again.
    ParkNewest,
}

/// The bounds of overcommit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OvercommitPolicy {
    /// Pages of the pool.
    pub pages: usize,
    /// Host memory for parked sequences.
    pub swap: SwapSize,
}

impl OvercommitPolicy {
    /// How many of the oldest sequences fit into the pool at full length.
    fn safe(&self, all: &[PageDemand]) -> usize {
        let mut sum = 0;
        let fits = |holding: &&PageDemand| {
            sum += holding.full;
            sum <= self.pages
        };
        all.iter().take_while(fits).count()
    }

    /// Host blocks for sequences that hold these numbers of pages.
    fn blocks(&self, pages: impl Iterator<Item = usize>) -> usize {
        pages.map(|pages| self.swap.blocks_for(pages)).sum()
    }

    /// Whether a sequence may start after the running ones, while none is parked. `shared` of its pages exist already.
    /// `available` pages are free or can be evicted, and starting would pin `pinned` of these.
    pub fn can_start(
        &self,
        available: usize,
        running: &[PageDemand],
        newcomer: PageDemand,
        shared: usize,
        pinned: usize,
    ) -> bool {
        let all = [running, &[newcomer]].concat();
        let others = &all[self.safe(&all)..];
        let own = newcomer.soon.saturating_sub(shared);
        self.finds(available, running, own + pinned)
            && self.blocks(others.iter().map(|h| h.soon)) <= self.swap.blocks
    }

    /// Whether the oldest parked sequence should come back.
    pub fn can_return(&self, available: usize, running: &[PageDemand], parked: PageDemand) -> bool {
        self.finds(available, running, parked.soon)
    }

    /// Whether `pages` are available in addition to the pages that the running sequences need soon. Otherwise a
    /// sequence would be parked again at once.
    fn finds(&self, available: usize, running: &[PageDemand], pages: usize) -> bool {
        let soon: usize = running.iter().map(|h| h.soon - h.held).sum();
        soon + pages <= available
    }

    /// Decides the next step. `wanted` are the pages that it would add to each running sequence; `parked` are the
    /// sequences that started after the running ones.
    pub fn next(
        &self,
        available: usize,
        running: &[PageDemand],
        parked: &[PageDemand],
        wanted: &[usize],
    ) -> Decision {
        let all = [running, parked].concat();
        let safe = self.safe(&all);
        let mut blocks = self.blocks(all[safe..].iter().map(|h| h.held));
        let mut granted = 0;
        let holds = running.iter().zip(wanted).enumerate().map(|(i, (holding, &pages))| {
            if i >= safe && pages > 0 {
                let grown = self.swap.blocks_for(holding.held + pages);
                let after = blocks - self.swap.blocks_for(holding.held) + grown;
                if after > self.swap.blocks {
                    return true;
                }
                blocks = after;
            }
            granted += pages;
            false
        });
        let holds = holds.collect();
        if granted <= available || running.len() <= 1 { Decision::Run(holds) } else { Decision::ParkNewest }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// Here a host block holds one page, and each sequence takes one more block for its slot.
    fn policy(pages: usize, blocks: usize) -> OvercommitPolicy {
        let block = SwapSize::bytes(1);
        OvercommitPolicy { pages, swap: SwapSize { blocks, page_bytes: block, fixed_bytes: block } }
    }

    fn holding(held: usize, full: usize) -> PageDemand {
        PageDemand::new(held, 0, full)
    }

    #[test]
    fn the_newest_is_parked_and_the_oldest_goes_on() {
        let policy = policy(6, 100);
        let running = [holding(2, 6), holding(2, 6), holding(2, 6)];
        assert_eq!(policy.next(0, &running, &[], &[1, 0, 0]), Decision::ParkNewest);
        assert_eq!(policy.next(2, &running[..2], &running[2..], &[1, 1]), Decision::Run(vec![false, false]));
        assert_eq!(policy.next(3, &running, &[], &[1, 1, 1]), Decision::Run(vec![false; 3]));
    }

    #[test]
    fn one_that_the_host_could_not_take_holds_still() {
        // Two sequences that are not safe take three blocks each.
        let running = [holding(2, 6), holding(2, 6), holding(2, 6)];
        assert_eq!(policy(8, 6).next(2, &running, &[], &[0, 1, 0]), Decision::Run(vec![false, true, false]));
        assert_eq!(policy(8, 7).next(2, &running, &[], &[0, 1, 1]), Decision::Run(vec![false, false, true]));
        assert_eq!(
            policy(12, 3).next(2, &running, &[], &[0, 1, 0]),
            Decision::Run(vec![false; 3]),
            "two are safe"
        );
    }

    #[test]
    fn without_host_memory_a_start_is_a_promise() {
        let policy = policy(10, 0);
        let running = [holding(1, 6)];
        assert!(policy.can_start(9, &running, PageDemand::new(0, 1, 4), 0, 0));
        assert!(!policy.can_start(9, &running, PageDemand::new(0, 1, 5), 0, 0));
    }

    #[test]
    fn a_start_finds_its_prompt_and_a_page_for_each_sequence() {
        let policy = policy(8, 100);
        let running = [holding(3, 8), PageDemand::new(1, 2, 8)];
        // One page for the first sequence, two for the second, three for the newcomer with a prompt of two pages.
        assert!(policy.can_start(6, &running, PageDemand::new(0, 2, 8), 0, 0));
        assert!(!policy.can_start(5, &running, PageDemand::new(0, 2, 8), 0, 0));
        assert!(policy.can_start(5, &running, PageDemand::new(0, 2, 8), 1, 0));
        assert!(!policy.can_start(5, &running, PageDemand::new(0, 2, 8), 1, 1));
        assert!(
            policy.can_return(5, &running, holding(1, 8)) && !policy.can_return(4, &running, holding(1, 8))
        );
        assert!(policy.can_return(8, &[], holding(8, 8)), "one at full length needs no more");
    }

    /// Sequences that grow by up to two pages a step, without a device.
    struct Model {
        policy: OvercommitPolicy,
        running: Vec<(PageDemand, usize)>,
        parked: VecDeque<(PageDemand, usize)>,
        waiting: VecDeque<(PageDemand, usize)>,
        slots: usize,
        parkings: usize,
    }

    impl Model {
        fn holdings(list: impl IntoIterator<Item = (PageDemand, usize)>) -> Vec<PageDemand> {
            list.into_iter().map(|(h, prompt)| PageDemand::new(h.held, prompt, h.full)).collect()
        }

        fn available(&self) -> usize {
            self.policy.pages - self.running.iter().map(|(h, _)| h.held).sum::<usize>()
        }

        fn step(&mut self, random: &mut impl FnMut(usize) -> usize) {
            while let Some(&(next, prompt)) = self.parked.front() {
                let running = Model::holdings(self.running.clone());
                if !self.policy.can_return(
                    self.available(),
                    &running,
                    PageDemand::new(next.held, prompt, next.full),
                ) {
                    break;
                }
                self.running.extend(self.parked.pop_front());
            }
            while self.parked.is_empty() && self.running.len() < self.slots {
                let Some(&(next, prompt)) = self.waiting.front() else { break };
                let running = Model::holdings(self.running.clone());
                let newcomer = PageDemand::new(0, prompt, next.full);
                if !self.policy.can_start(self.available(), &running, newcomer, 0, 0) {
                    break;
                }
                self.running.extend(self.waiting.pop_front());
            }
            let wanted: Vec<usize> =
                self.running.iter().map(|(h, _)| (h.full - h.held).min(random(3))).collect();
            let holds = loop {
                let running = Model::holdings(self.running.clone());
                let parked = Model::holdings(self.parked.clone());
                match self.policy.next(self.available(), &running, &parked, &wanted[..running.len()]) {
                    Decision::Run(holds) => break holds,
                    Decision::ParkNewest => {
                        self.parked.extend(self.running.pop());
                        self.parked.rotate_right(1);
                        self.parkings += 1;
                    }
                }
            };
            assert!(!holds.first().is_some_and(|&holds| holds), "the oldest goes on");
            for (i, (holding, _)) in self.running.iter_mut().enumerate().filter(|(i, _)| !holds[*i]) {
                holding.held += wanted[i];
            }
            let on_host = self.policy.blocks(self.parked.iter().map(|(h, _)| h.held));
            assert!(on_host <= self.policy.swap.blocks, "{on_host} blocks of {}", self.policy.swap.blocks);
            let in_pool: usize = self.running.iter().map(|(h, _)| h.held).sum();
            assert!(in_pool <= self.policy.pages, "{in_pool} pages of {}", self.policy.pages);
            // Some sequences end before full length, and any may be cancelled.
            self.running.retain(|(h, _)| h.held < h.full && random(20) > 0);
            self.parked.retain(|_| random(50) > 0);
        }
    }

    #[test]
    fn every_sequence_comes_to_an_end_within_every_bound() {
        let mut seed = 11u64;
        let mut random = |below: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
            (seed >> 33) as usize % below
        };
        let mut parkings = 0;
        for _ in 0..400 {
            let pages = 1 + random(20);
            let blocks = random(40);
            let request = |random: &mut dyn FnMut(usize) -> usize| {
                let full = 1 + random(pages);
                (holding(0, full), 1 + random(full))
            };
            let mut model = Model {
                policy: policy(pages, blocks),
                running: Vec::new(),
                parked: VecDeque::new(),
                waiting: (0..40).map(|_| request(&mut random)).collect(),
                slots: 1 + random(12),
                parkings: 0,
            };
            let mut steps = 0;
            while !(model.running.is_empty() && model.parked.is_empty() && model.waiting.is_empty()) {
                model.step(&mut random);
                steps += 1;
                // 40 requests of at most 20 pages, with 20 steps for each page.
                assert!(steps < 40 * 20 * 20, "no end with {pages} pages and {blocks} blocks");
            }
            parkings += model.parkings;
        }
        assert!(parkings > 1000, "the pools were too small: {parkings}");
    }
}
