//! Sequences that draft, in rounds of a batch.

use keel_cache::SequenceCache;
use keel_engine::speculation::{Chooser, RoundSequence, SamplerChooser, Speculation};
use keel_engine::{Depth, Engine, Sampler, SamplerOptions, SpeculationCounters, SpeculationOptions};

/// A sequence that drafts, with the tokens it was given.
pub struct Member {
    pub prompt: Vec<u32>,
    pub cache: SequenceCache,
    pub speculation: Speculation,
    pub chooser: SamplerChooser,
    pub tokens: Vec<u32>,
}

impl Member {
    pub fn join(engine: &mut Engine, prompt: &[u32], depth: usize, sampler: SamplerOptions) -> Member {
        let mut cache = engine.open().expect("a slot is free");
        let mut logits = Vec::new();
        engine.prefill(&mut cache, prompt, &mut logits, &mut |_| ()).expect("fits");
        let options = SpeculationOptions { depth: Depth::Fixed(depth), ..Default::default() };
        let speculation = Speculation::new(options, engine.last_hidden().expect("drafts were planned"));
        let sampler = Sampler::new(sampler, prompt).expect("in range");
        let mut chooser = SamplerChooser::new(sampler, None, Vec::new());
        let first = chooser.choose(&mut logits, None).expect("free").token;
        Member { prompt: prompt.to_vec(), cache, speculation, chooser, tokens: vec![first] }
    }

    /// Position, open rows and counters.
    pub fn standing(&self) -> (usize, usize, SpeculationCounters) {
        (self.cache.len(), self.cache.accepted(), self.speculation.counters().clone())
    }
}

/// Runs a round of all members.
pub fn round(engine: &mut Engine, members: &mut [Member]) -> keel_engine::Result<()> {
    let mut batch: Vec<RoundSequence<'_>> = members
        .iter_mut()
        .map(|m| RoundSequence {
            last: m.tokens[m.tokens.len() - 1],
            tokens_max: 100,
            cache: &mut m.cache,
            speculation: Some(&mut m.speculation),
            chooser: &mut m.chooser,
        })
        .collect();
    let rounds = engine.round(&mut batch)?;
    let all = members.iter_mut().zip(rounds);
    all.for_each(|(member, round)| member.tokens.extend(round.expect("nothing constrains it").tokens));
    Ok(())
}
