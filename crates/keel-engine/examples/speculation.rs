//! How much speculation gains on the built-in model, and what it costs when every draft is wrong.
//!
//! `cargo run --release -p keel-engine --example speculation -- [TOKENS] [REPEATS] [auto]`
//!
//! Runs `auto`, `auto` with a drafter that is always wrong, and unless the last argument is `auto` fixed depths, each between
//! two runs of plain decoding, and prints the medians of the rates and of the ratios of neighbours.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use keel_array::{Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::speculation::{Choice, Chooser, SamplerChooser};
use keel_engine::{
    DRAFTS_MAX, Depth, Engine, EngineOptions, GenerateOptions, MtpTokenIterator, Result, Sampler,
    SamplerOptions, SpeculationCounters, SpeculationOptions, TokenIterator,
};
use keel_models::loading::CheckpointParameters;
use keel_weights::Checkpoint;

/// "Once upon a time"
const PROMPT: [u32; 4] = [509, 496, 258, 420];

/// Greedy, with drafts that the model never gives.
struct AlwaysWrong(SamplerChooser, Vec<u32>, usize);

impl Chooser for AlwaysWrong {
    fn draft(&mut self, logits: &mut [f32]) -> Result<u32> {
        self.0.draft(logits)
    }

    fn begin(&mut self) {
        self.0.begin();
    }

    // No round fails here.
    fn abandon(&mut self) -> Result<()> {
        self.0.abandon()
    }

    fn revise(&mut self, drafts: &mut [u32]) {
        for (i, draft) in drafts.iter_mut().enumerate() {
            let right = self.1.get(self.2 + i).copied().unwrap_or_default();
            *draft = (right + 1) % 4000;
        }
    }

    fn retract(&mut self) -> Result<()> {
        self.0.retract()
    }

    fn choose(&mut self, logits: &mut [f32], draft: Option<(usize, u32)>) -> Result<Choice> {
        self.2 += 1;
        self.0.choose(logits, draft)
    }

    fn take(&mut self, token: u32) -> Result<Choice> {
        self.0.take(token)
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let number = |i: usize, default: usize| std::env::args().nth(i).map_or(Ok(default), |n| n.parse());
    let (tokens, repeats) = (number(1, 512)?, number(2, 5)?);
    let auto_alone = std::env::args().nth(3).is_some_and(|arg| arg == "auto");
    let checkpoint = Checkpoint::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo"))?;
    let backend = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() });
    let runtime = Runtime::new(Arc::new(backend), RuntimeOptions::default());
    let options = EngineOptions { context: 2048, drafts: DRAFTS_MAX, ..EngineOptions::default() };
    let parameters = CheckpointParameters(&checkpoint);
    let mut engine = Engine::load(&runtime, &parameters, checkpoint.config(), options, &|_| ())?;

    let (truth, _) = plain(&mut engine, tokens)?;
    let depths = (1..=DRAFTS_MAX).map(|depth| (format!("fixed {depth}"), Depth::Fixed(depth), false));
    let auto = [("auto", false), ("auto, always wrong", true)];
    for (name, depth, is_wrong) in auto
        .map(|(name, is_wrong)| (name.into(), Depth::Auto, is_wrong))
        .into_iter()
        .chain(depths.filter(|_| !auto_alone))
    {
        let (mut plain_rates, mut rates, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        let mut counters = SpeculationCounters::default();
        for _ in 0..repeats {
            let (_, before) = plain(&mut engine, tokens)?;
            let (rate, came) = speculate(&mut engine, &truth, depth, is_wrong)?;
            let (_, after) = plain(&mut engine, tokens)?;
            let plain_rate = 2.0 / (1.0 / before + 1.0 / after);
            plain_rates.push(plain_rate);
            rates.push(rate);
            ratios.push(rate / plain_rate);
            counters.add(&came);
        }
        println!(
            "{name}: {:.1} tokens/s, plain {:.1}, ratio {:.2}; of {} rounds {} plain, {:.2} tokens a round; draft {:.0?}, \
             verify {:.0?}, commit {:.0?}",
            median(rates),
            median(plain_rates),
            median(ratios),
            counters.rounds,
            counters.plain_rounds,
            counters.mean_accepted_len(),
            counters.draft_time,
            counters.verify_time,
            counters.commit_time,
        );
    }
    Ok(())
}

fn plain(engine: &mut Engine, tokens: usize) -> Result<(Vec<u32>, f64)> {
    let sequence = engine.open()?;
    let options = GenerateOptions { max_tokens: tokens, ..GenerateOptions::default() };
    let mut iterator = TokenIterator::new(engine, sequence, &PROMPT, options, &mut |_| ())?;
    let start = Instant::now();
    let ids = iterator.by_ref().collect::<Result<Vec<_>>>()?;
    let seconds = start.elapsed().as_secs_f64();
    iterator.release();
    Ok((ids, tokens as f64 / seconds))
}

fn speculate(
    engine: &mut Engine,
    truth: &[u32],
    depth: Depth,
    is_wrong: bool,
) -> Result<(f64, SpeculationCounters)> {
    let sequence = engine.open()?;
    let options = GenerateOptions { max_tokens: truth.len(), ..GenerateOptions::default() };
    let how = (options, SpeculationOptions { depth, ..Default::default() });
    let chooser = SamplerChooser::new(Sampler::new(SamplerOptions::default(), &PROMPT)?, None, Vec::new());
    let chooser: Box<dyn Chooser> =
        if is_wrong { Box::new(AlwaysWrong(chooser, truth.to_vec(), 0)) } else { Box::new(chooser) };
    let mut iterator = MtpTokenIterator::with_chooser(engine, sequence, &PROMPT, how, chooser, &mut |_| ())?;
    let start = Instant::now();
    let ids = iterator.by_ref().collect::<Result<Vec<_>>>()?;
    let seconds = start.elapsed().as_secs_f64();
    assert_eq!(ids, truth, "speculation changed the text");
    let counters = iterator.counters().clone();
    iterator.release();
    Ok((truth.len() as f64 / seconds, counters))
}
