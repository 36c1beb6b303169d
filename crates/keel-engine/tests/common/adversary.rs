//! A chooser whose drafts are right, wrong or either.

use keel_engine::speculation::{Choice, Chooser, SamplerChooser};
use keel_engine::{Sampler, SamplerOptions};

/// How the MTP head's drafts are changed before they are verified.
#[derive(Clone)]
pub enum Drafter {
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
    /// The drafter and the number of tokens given when the round began.
    begun: (Drafter, usize),
}

impl Adversary {
    pub fn new(drafter: Drafter, prompt: &[u32], truth: &[u32]) -> Adversary {
        let sampler = Sampler::new(SamplerOptions::default(), prompt).expect("in range");
        let chooser = SamplerChooser::new(sampler, None, Vec::new());
        Adversary { chooser, begun: (drafter.clone(), 0), drafter, truth: truth.to_vec(), given: 0 }
    }
}

impl Chooser for Adversary {
    fn is_argmax(&self) -> bool {
        self.chooser.is_argmax()
    }

    fn draft(&mut self, logits: &mut [f32]) -> keel_engine::Result<u32> {
        self.chooser.draft(logits)
    }

    fn begin(&mut self) {
        self.chooser.begin();
        self.begun = (self.drafter.clone(), self.given);
    }

    fn abandon(&mut self) -> keel_engine::Result<()> {
        (self.drafter, self.given) = self.begun.clone();
        self.chooser.abandon()
    }

    fn revise(&mut self, drafts: &mut [u32]) {
        for (i, draft) in drafts.iter_mut().enumerate() {
            let right = self.truth.get(self.given + i).copied().unwrap_or_default();
            let is_right = match &mut self.drafter {
                Drafter::Head => continue,
                Drafter::Right => true,
                Drafter::Wrong => false,
                Drafter::Random(state) => {
                    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
                    *state >> 33 & 3 != 0
                }
            };
            *draft = if is_right { right } else { (right + 1) % 500 };
        }
    }

    fn retract(&mut self) -> keel_engine::Result<()> {
        self.chooser.retract()
    }

    fn choose(&mut self, logits: &mut [f32], draft: Option<(usize, u32)>) -> keel_engine::Result<Choice> {
        self.given += 1;
        self.chooser.choose(logits, draft)
    }

    fn take(&mut self, token: u32) -> keel_engine::Result<Choice> {
        self.given += 1;
        self.chooser.take(token)
    }
}
