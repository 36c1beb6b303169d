//! Tokens drawn by the host, to compare with.

use keel_cache::SequenceCache;
use keel_engine::{Engine, LogitsRow, Sampler, SamplerOptions};

pub fn prompt() -> Vec<u32> {
    (0..70).map(|i| (i * 7 + 5) % 500).collect()
}

/// Draws `tokens` tokens after the prompt and waits for each step. Returns the sequence and these tokens; the last one
/// has not been run.
pub fn waited_for(engine: &mut Engine, sampler: SamplerOptions, tokens: usize) -> (SequenceCache, Vec<u32>) {
    let mut sampler = Sampler::new(sampler, &prompt()).expect("in range");
    let (mut sequence, mut logits) = (engine.open().expect("a slot is free"), LogitsRow::default());
    engine.prefill(&mut sequence, &prompt(), &mut logits.values, &mut |_| ()).expect("fits");
    let mut drawn = vec![sampler.sample(&mut logits)];
    for _ in 1..tokens {
        engine.decode(&mut [&mut sequence], &drawn[drawn.len() - 1..]).expect("runs");
        engine.logits(0, &mut logits.values).expect("there");
        drawn.push(sampler.sample(&mut logits));
    }
    (sequence, drawn)
}
