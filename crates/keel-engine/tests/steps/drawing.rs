//! Tokens drawn on the device: the same as those of the host's sampler, at four bytes each.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::drawn::{prompt, waited_for};
use crate::common::{demo, engine, fixture, runtime};
use keel_array::sampling::Draw;
use keel_array::{ArrayError, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::{Engine, EngineOptions, GenerateOptions, SamplerOptions, TokenIterator};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};

const TOKENS: usize = 40;

fn options() -> EngineOptions {
    EngineOptions { context: 256, sequences: 2, ..EngineOptions::default() }
}

fn iterated(engine: &mut Engine, sampler: SamplerOptions) -> Vec<u32> {
    let sequence = engine.open().expect("a slot is free");
    let options = GenerateOptions { max_tokens: TOKENS, sampler, ..GenerateOptions::default() };
    let tokens = TokenIterator::new(engine, sequence, &prompt(), options, &mut |_| ()).expect("fits");
    tokens.collect::<Result<_, _>>().expect("every step runs")
}

/// The same tokens, drawn by the host from all logits.
fn sampled_by_the_host(engine: &mut Engine, sampler: SamplerOptions) -> Vec<u32> {
    let (sequence, tokens) = waited_for(engine, sampler, TOKENS);
    engine.release(sequence);
    tokens
}

fn samplers() -> Vec<SamplerOptions> {
    let hot = SamplerOptions { temperature: 1.0, seed: 11, ..SamplerOptions::default() };
    vec![
        SamplerOptions::default(),
        hot.clone(),
        SamplerOptions { top_k: 20, top_p: 0.95, temperature: 0.6, ..hot.clone() },
        SamplerOptions { top_k: 1, ..hot.clone() },
        SamplerOptions { min_p: 0.05, temperature: 1.5, ..hot.clone() },
        SamplerOptions { top_p: 0.3, min_p: 0.01, ..hot.clone() },
        SamplerOptions { repetition_penalty: 1.2, ..hot.clone() },
        SamplerOptions { logit_bias: vec![(7, 3.0)], temperature: 0.0, ..hot },
    ]
}

#[test]
fn the_device_draws_what_the_sampler_draws() {
    for folder in [demo(), fixture("qwen3_5"), fixture("llama")] {
        for drafts in [0, 1] {
            if drafts > 0 && folder != demo() {
                continue;
            }
            let mut engine = engine(&folder, &runtime(2), EngineOptions { drafts, ..options() });
            for sampler in samplers() {
                let want = sampled_by_the_host(&mut engine, sampler.clone());
                assert_eq!(iterated(&mut engine, sampler.clone()), want, "{}: {sampler:?}", folder.display());
            }
        }
    }
}

#[test]
fn sequences_of_a_step_are_drawn_for_apart() {
    let mut engine = engine(&demo(), &runtime(2), options());
    let draws = [0.2, 0.9].map(|uniform| Draw { temperature: 1.0, uniform, ..Draw::GREATEST });
    let mut step = |draws: [Option<Draw>; 2]| {
        let mut sequences = [(); 2].map(|()| engine.open().expect("a slot is free"));
        for sequence in &mut sequences {
            engine.prefill(sequence, &prompt(), &mut Vec::new(), &mut |_| ()).expect("fits");
        }
        let drawn = engine.decode_and_draw(&mut sequences.each_mut(), &[5, 5], &draws).expect("runs");
        sequences.into_iter().for_each(|sequence| engine.release(sequence));
        drawn
    };
    let both = step(draws.map(Some));
    assert!(both[0].is_some() && both[1].is_some() && both[0] != both[1], "{both:?}");
    assert_eq!(step([Some(draws[0]), None]), [both[0], None]);
    assert_eq!(step([None, Some(draws[1])]), [None, both[1]]);
    assert_eq!(step([None, None]), [None, None]);
    assert_eq!(step([Some(draws[1]), Some(draws[0])]), [both[1], both[0]]);
}

/// Counts the bytes that come to the host.
#[derive(Default)]
struct Reads(AtomicUsize);

impl Interceptor for Reads {
    fn before_read(&self, bytes: usize, _is_settled: bool) -> Result<(), ArrayError> {
        self.0.fetch_add(bytes, Ordering::SeqCst);
        Ok(())
    }
}

#[test]
fn a_token_brings_four_bytes_to_the_host() {
    let reads = Arc::new(Reads::default());
    let cpu = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() });
    let runtime =
        Runtime::new(InterceptedBackend::new(Arc::new(cpu), Arc::clone(&reads)), RuntimeOptions::default());
    let mut engine = engine(&demo(), &runtime, options());
    let row_bytes = 4 * engine.model().config.vocab;
    for (i, sampler) in samplers().into_iter().enumerate() {
        let before = reads.0.load(Ordering::SeqCst);
        iterated(&mut engine, sampler.clone());
        let read = reads.0.load(Ordering::SeqCst) - before;
        // Penalties and bias need the logits on the host.
        let by_host = i >= 6;
        assert_eq!(read, TOKENS * if by_host { row_bytes } else { 4 }, "{sampler:?}");
    }
}
