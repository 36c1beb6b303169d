//! Options of engines and sequences that draft.

use keel_array::Compute;
use keel_engine::{Depth, EngineOptions, GenerateOptions, SpeculationOptions};

pub fn options(sequences: usize, drafts: usize, compute: Compute) -> EngineOptions {
    EngineOptions {
        context: 768,
        sequences,
        prefill_step: 64,
        drafts,
        compute,
        all_logits: false,
        ..EngineOptions::default()
    }
}

pub fn until(max_tokens: usize) -> GenerateOptions {
    GenerateOptions { max_tokens, ..GenerateOptions::default() }
}

pub fn fixed(depth: usize) -> SpeculationOptions {
    SpeculationOptions { depth: Depth::Fixed(depth), ..Default::default() }
}
