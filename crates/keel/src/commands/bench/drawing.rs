//! How tokens are drawn in the timed steps.

use anyhow::Result;
use clap::ValueEnum;
use keel_array::sampling::Draw;
use keel_cache::SequenceCache;
use keel_engine::{Engine, Sampler, SamplerOptions};

/// What follows a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Drawing {
    /// Nothing.
    #[default]
    None,
    /// The device takes the greatest logit.
    Greedy,
    /// The device draws with temperature 0.7, top-k 20 and top-p 0.95.
    Sampled,
    /// The same by the host, which reads all logits.
    Host,
}

impl Drawing {
    /// Runs a token of each sequence and draws what follows.
    ///
    /// # Errors
    /// What the engine says.
    pub fn step(self, engine: &mut Engine, sequences: &mut [SequenceCache], ids: &[u32]) -> Result<()> {
        let mut all: Vec<&mut SequenceCache> = sequences.iter_mut().collect();
        let options =
            SamplerOptions { temperature: 0.7, top_k: 20, top_p: 0.95, seed: 1, ..SamplerOptions::default() };
        let SamplerOptions { temperature, top_k, top_p, min_p, .. } = options;
        let draw = match self {
            Drawing::None | Drawing::Host => None,
            Drawing::Greedy => Some(Draw::GREATEST),
            Drawing::Sampled => Some(Draw { temperature, top_k, top_p, min_p, uniform: 0.5 }),
        };
        engine.decode_and_draw(&mut all, ids, &vec![draw; ids.len()])?;
        if self == Drawing::Host {
            let mut sampler = Sampler::new(options, &[])?;
            let mut logits = Vec::new();
            for row in 0..ids.len() {
                engine.logits(row, &mut logits)?;
                sampler.sample(&mut logits);
            }
        }
        Ok(())
    }

    /// The name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
    }
}
