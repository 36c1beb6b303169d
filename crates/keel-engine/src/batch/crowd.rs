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
pub(super) struct Holding {
    /// Pages that it holds, or needs in order to come back.
    pub held: usize,
    /// Pages that it should find when it starts or comes back: those of its prompt or those that it holds, and one
    /// more.
    pub soon: usize,
    /// Pages at full length.
    pub full: usize,
}

impl Holding {
    /// A sequence whose prompt takes `prompt` pages.
    pub fn new(held: usize, prompt: usize, full: usize) -> Holding {
        Holding { held, soon: full.min(held.max(prompt) + 1), full }
    }
}

/// The action before the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Run the step. For each running sequence: whether it holds still.
    Run(Vec<bool>),
    /// Park the newest running sequence, then decide again.
    ParkNewest,
}

/// The bounds of overcommit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Crowd {
    /// Pages of the pool.
    pub pages: usize,
    /// Host memory for parked sequences.
    pub swap: SwapSize,
}

impl Crowd {
    /// How many of the oldest sequences fit into the pool at full length.
    fn safe(&self, all: &[Holding]) -> usize {
        let mut sum = 0;
        let fits = |holding: &&Holding| {
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
        running: &[Holding],
        newcomer: Holding,
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
    pub fn can_return(&self, available: usize, running: &[Holding], parked: Holding) -> bool {
        self.finds(available, running, parked.soon)
    }

    /// Whether `pages` are available in addition to the pages that the running sequences need soon. Otherwise a
    /// sequence would be parked again at once.
    fn finds(&self, available: usize, running: &[Holding], pages: usize) -> bool {
        let soon: usize = running.iter().map(|h| h.soon - h.held).sum();
        soon + pages <= available
    }

    /// Decides the next step. `wanted` are the pages that it would add to each running sequence; `parked` are the
    /// sequences that started after the running ones.
    pub fn next(&self, available: usize, running: &[Holding], parked: &[Holding], wanted: &[usize]) -> Next {
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
        if granted <= available || running.len() <= 1 { Next::Run(holds) } else { Next::ParkNewest }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// Here a host block holds one page, and each sequence takes one more block for its slot.
    fn crowd(pages: usize, blocks: usize) -> Crowd {
        let block = SwapSize::bytes(1);
        Crowd { pages, swap: SwapSize { blocks, page_bytes: block, fixed_bytes: block } }
    }

    fn holding(held: usize, full: usize) -> Holding {
        Holding::new(held, 0, full)
    }

    #[test]
    fn the_newest_is_parked_and_the_oldest_goes_on() {
        let crowd = crowd(6, 100);
        let running = [holding(2, 6), holding(2, 6), holding(2, 6)];
        assert_eq!(crowd.next(0, &running, &[], &[1, 0, 0]), Next::ParkNewest);
        assert_eq!(crowd.next(2, &running[..2], &running[2..], &[1, 1]), Next::Run(vec![false, false]));
        assert_eq!(crowd.next(3, &running, &[], &[1, 1, 1]), Next::Run(vec![false; 3]));
    }

    #[test]
    fn one_that_the_host_could_not_take_holds_still() {
        // Two sequences that are not safe take three blocks each.
        let running = [holding(2, 6), holding(2, 6), holding(2, 6)];
        assert_eq!(crowd(8, 6).next(2, &running, &[], &[0, 1, 0]), Next::Run(vec![false, true, false]));
        assert_eq!(crowd(8, 7).next(2, &running, &[], &[0, 1, 1]), Next::Run(vec![false, false, true]));
        assert_eq!(
            crowd(12, 3).next(2, &running, &[], &[0, 1, 0]),
            Next::Run(vec![false; 3]),
            "two are safe"
        );
    }

    #[test]
    fn without_host_memory_a_start_is_a_promise() {
        let crowd = crowd(10, 0);
        let running = [holding(1, 6)];
        assert!(crowd.can_start(9, &running, Holding::new(0, 1, 4), 0, 0));
        assert!(!crowd.can_start(9, &running, Holding::new(0, 1, 5), 0, 0));
    }

    #[test]
    fn a_start_finds_its_prompt_and_a_page_for_everybody() {
        let crowd = crowd(8, 100);
        let running = [holding(3, 8), Holding::new(1, 2, 8)];
        // One page for the first sequence, two for the second, three for the newcomer with a prompt of two pages.
        assert!(crowd.can_start(6, &running, Holding::new(0, 2, 8), 0, 0));
        assert!(!crowd.can_start(5, &running, Holding::new(0, 2, 8), 0, 0));
        assert!(crowd.can_start(5, &running, Holding::new(0, 2, 8), 1, 0));
        assert!(!crowd.can_start(5, &running, Holding::new(0, 2, 8), 1, 1));
        assert!(
            crowd.can_return(5, &running, holding(1, 8)) && !crowd.can_return(4, &running, holding(1, 8))
        );
        assert!(crowd.can_return(8, &[], holding(8, 8)), "one at full length needs no more");
    }

    /// Sequences that grow by up to two pages a step, without a device.
    struct Model {
        crowd: Crowd,
        running: Vec<(Holding, usize)>,
        parked: VecDeque<(Holding, usize)>,
        waiting: VecDeque<(Holding, usize)>,
        slots: usize,
        parkings: usize,
    }

    impl Model {
        fn holdings(list: impl IntoIterator<Item = (Holding, usize)>) -> Vec<Holding> {
            list.into_iter().map(|(h, prompt)| Holding::new(h.held, prompt, h.full)).collect()
        }

        fn available(&self) -> usize {
            self.crowd.pages - self.running.iter().map(|(h, _)| h.held).sum::<usize>()
        }

        fn step(&mut self, random: &mut impl FnMut(usize) -> usize) {
            while let Some(&(next, prompt)) = self.parked.front() {
                let running = Model::holdings(self.running.clone());
                if !self.crowd.can_return(
                    self.available(),
                    &running,
                    Holding::new(next.held, prompt, next.full),
                ) {
                    break;
                }
                self.running.extend(self.parked.pop_front());
            }
            while self.parked.is_empty() && self.running.len() < self.slots {
                let Some(&(next, prompt)) = self.waiting.front() else { break };
                let running = Model::holdings(self.running.clone());
                let newcomer = Holding::new(0, prompt, next.full);
                if !self.crowd.can_start(self.available(), &running, newcomer, 0, 0) {
                    break;
                }
                self.running.extend(self.waiting.pop_front());
            }
            let wanted: Vec<usize> =
                self.running.iter().map(|(h, _)| (h.full - h.held).min(random(3))).collect();
            let holds = loop {
                let running = Model::holdings(self.running.clone());
                let parked = Model::holdings(self.parked.clone());
                match self.crowd.next(self.available(), &running, &parked, &wanted[..running.len()]) {
                    Next::Run(holds) => break holds,
                    Next::ParkNewest => {
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
            let on_host = self.crowd.blocks(self.parked.iter().map(|(h, _)| h.held));
            assert!(on_host <= self.crowd.swap.blocks, "{on_host} blocks of {}", self.crowd.swap.blocks);
            let in_pool: usize = self.running.iter().map(|(h, _)| h.held).sum();
            assert!(in_pool <= self.crowd.pages, "{in_pool} pages of {}", self.crowd.pages);
            // Some sequences end before full length, and any may be cancelled.
            self.running.retain(|(h, _)| h.held < h.full && random(20) > 0);
            self.parked.retain(|_| random(50) > 0);
        }
    }

    #[test]
    fn everybody_comes_to_an_end_within_every_bound() {
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
                crowd: crowd(pages, blocks),
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
