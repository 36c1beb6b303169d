//! How far logits drift when recurrent states are kept in 16 bits:
//! `cargo run --release -p keel-engine --example state_drift -- TOKENS MODEL...`
//!
//! Each MODEL is a folder. Two engines, with states in 32 and in 16 bits, run the same tokens one by one, so a state is
//! rounded after every token. The tokens are drawn from the first engine. For each eighth of the tokens a line gives
//! the relative error of the logits (mean and largest), the mean Kullback-Leibler divergence in nats, and how often
//! both engines find the same token most probable.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use keel_array::{DType, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::{Engine, EngineOptions, LogitsRow, Sampler, SamplerOptions};
use keel_models::loading::CheckpointParameters;
use keel_testkit::compare::relative_error;
use keel_weights::Checkpoint;

const PARTS: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let tokens: usize = arguments.next().ok_or("usage: state_drift TOKENS MODEL...")?.parse()?;
    for model in arguments {
        println!("{model}, {tokens} tokens\n   until    mean error     largest    divergence    same token");
        let part = tokens.div_ceil(PARTS).max(1);
        for (i, line) in measure(Path::new(&model), tokens)?.chunks(part).enumerate() {
            println!("{:>8}    {}", (i * part + line.len()), summary(line));
        }
    }
    Ok(())
}

/// One token's logits in both engines.
struct Compared {
    error: f64,
    divergence: f64,
    is_same: bool,
}

fn summary(line: &[Compared]) -> String {
    let mean = |of: fn(&Compared) -> f64| line.iter().map(of).sum::<f64>() / line.len() as f64;
    let largest = line.iter().fold(0.0, |largest: f64, c| largest.max(c.error));
    let same = mean(|c| f64::from(u8::from(c.is_same)));
    format!(
        "{:>10.1e}  {largest:>10.1e}  {:>12.1e}  {:>10.2} %",
        mean(|c| c.error),
        mean(|c| c.divergence),
        100.0 * same
    )
}

fn engine(folder: &Path, context: usize, state: DType) -> Result<Engine, Box<dyn Error>> {
    let runtime = Runtime::new(Arc::new(CpuBackend::new(CpuOptions::default())), RuntimeOptions::default());
    let checkpoint = Checkpoint::open(folder)?;
    let options = EngineOptions { context, state, ..EngineOptions::default() };
    let parameters = CheckpointParameters(&checkpoint);
    Ok(Engine::load(&runtime, &parameters, checkpoint.config(), options, &|_| ())?)
}

fn measure(folder: &Path, tokens: usize) -> Result<Vec<Compared>, Box<dyn Error>> {
    let mut engines = [engine(folder, tokens + 1, DType::F32)?, engine(folder, tokens + 1, DType::F16)?];
    let [first, second] = &mut engines;
    let mut sequences = [first.open()?, second.open()?];
    let mut sampler =
        Sampler::new(SamplerOptions { temperature: 1.0, seed: 1, ..SamplerOptions::default() }, &[])?;
    let (mut logits, mut others) = (Vec::new(), Vec::new());
    let (mut token, mut all) = (1, Vec::with_capacity(tokens));
    for _ in 0..tokens {
        for (engine, (sequence, logits)) in
            [&mut *first, &mut *second].into_iter().zip(sequences.iter_mut().zip([&mut logits, &mut others]))
        {
            engine.decode(&mut [sequence], &[token])?;
            engine.logits(0, logits)?;
        }
        all.push(compare(&logits, &others));
        token = sampler.sample(&mut LogitsRow::from(&logits));
    }
    Ok(all)
}

fn compare(want: &[f32], got: &[f32]) -> Compared {
    let top = |x: &[f32]| (0..x.len()).max_by(|&a, &b| x[a].total_cmp(&x[b]));
    let (p, q) = (log_probabilities(want), log_probabilities(got));
    Compared {
        error: relative_error(got, want),
        divergence: p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum(),
        is_same: top(want) == top(got),
    }
}

fn log_probabilities(logits: &[f32]) -> Vec<f64> {
    let most = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - most).exp()).sum();
    logits.iter().map(|&x| f64::from(x) - most - sum.ln()).collect()
}
