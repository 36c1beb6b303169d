//! A chooser whose drafts are right, wrong or either.

use keel_array::sampling::Draw;
use keel_engine::speculation::{Choice, Chooser, Draft, SamplerChooser};
use keel_engine::{LogitsRow, Sampler, SamplerOptions};

/// Which drafts are proposed.
#[derive(Clone)]
pub enum Drafter {
    /// Those of the MTP head.
    Head,
    /// Drafts from the text of plain decoding: right, wrong, or either at random.
    Right,
    Wrong,
    Random(u64),
}

/// A greedy chooser with drafts of its own.
pub struct Adversary {
    chooser: SamplerChooser,
    drafter: Drafter,
    /// The text of plain decoding.
    pub truth: Vec<u32>,
    given: usize,
    /// Drafts of this round so far.
    drafted: usize,
    /// The drafter and the number of tokens given when the round began.
    begun: (Drafter, usize),
}

impl Adversary {
    pub fn new(drafter: Drafter, prompt: &[u32], truth: &[u32]) -> Adversary {
        let sampler = Sampler::new(SamplerOptions::default(), prompt).expect("in range");
        let chooser = SamplerChooser::new(sampler, None, Vec::new());
        Adversary {
            chooser,
            begun: (drafter.clone(), 0),
            drafter,
            truth: truth.to_vec(),
            given: 0,
            drafted: 0,
        }
    }
}

impl Chooser for Adversary {
    fn draw_next(&mut self) -> Option<Draw> {
        // Where the device draws, it also makes the drafts. Other drafts come from the host.
        if matches!(self.drafter, Drafter::Head) { self.chooser.draw_next() } else { None }
    }

    fn forget_draws(&mut self, count: usize) {
        self.chooser.forget_draws(count);
    }

    fn draft(&mut self, row: &mut LogitsRow) -> keel_engine::Result<u32> {
        let own = self.chooser.draft(row)?;
        let right = self.truth.get(self.given + self.drafted).copied().unwrap_or_default();
        self.drafted += 1;
        let is_right = match &mut self.drafter {
            Drafter::Head => return Ok(own),
            Drafter::Right => true,
            Drafter::Wrong => false,
            Drafter::Random(state) => {
                *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
                *state >> 33 & 3 != 0
            }
        };
        Ok(if is_right { right } else { (right + 1) % 500 })
    }

    fn begin(&mut self) {
        self.chooser.begin();
        self.drafted = 0;
        self.begun = (self.drafter.clone(), self.given);
    }

    fn abandon(&mut self) {
        (self.drafter, self.given) = self.begun.clone();
        self.chooser.abandon();
    }

    fn retract(&mut self) {
        self.chooser.retract();
    }

    fn choose(&mut self, row: &mut LogitsRow, draft: Option<Draft>) -> keel_engine::Result<Choice> {
        self.given += 1;
        self.chooser.choose(row, draft)
    }

    fn take(&mut self, token: u32) -> keel_engine::Result<Choice> {
        self.given += 1;
        self.chooser.take(token)
    }
}
