//! Measures how much speculation gains on the built-in model, and how much it costs when every draft is wrong.
//!
//! `cargo run --release -p keel-engine --example speculation -- [TOKENS] [REPEATS] [auto]`
//!
//! Runs `auto`, `auto` with a drafter that is always wrong, and each fixed depth unless the last argument is `auto`.
//! Each run alternates with plain decoding, one step of each, so that other work on the machine slows both alike. A
//! step that takes more than three times the median of its kind counts as three times the median. Prints the rates over
//! all REPEATS texts of TOKENS tokens, and the least and greatest ratio of a text.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use keel_array::{Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::speculation::{Choice, Chooser, Draft, RoundSequence, SamplerChooser, Speculation};
use keel_engine::{
    DRAFTS_MAX, Depth, Engine, EngineOptions, GenerateOptions, LogitsRow, Result, Sampler, SamplerOptions,
    SpeculationCounters, SpeculationOptions, TokenIterator,
};
use keel_models::loading::CheckpointParameters;
use keel_weights::Checkpoint;

/// "Once upon a time"
const PROMPT: [u32; 4] = [509, 496, 258, 420];

/// A greedy chooser whose drafts are always wrong.
struct AlwaysWrong {
    chooser: SamplerChooser,
    /// The text of plain decoding.
    truth: Vec<u32>,
    given: usize,
    /// Drafts of this round so far.
    drafted: usize,
}

impl Chooser for AlwaysWrong {
    fn draft(&mut self, row: &mut LogitsRow) -> Result<u32> {
        self.chooser.draft(row)?;
        let right = self.truth.get(self.given + self.drafted).copied().unwrap_or_default();
        self.drafted += 1;
        Ok((right + 1) % 4000)
    }

    fn begin(&mut self) {
        self.chooser.begin();
        self.drafted = 0;
    }

    // No round fails here.
    fn abandon(&mut self) {
        self.chooser.abandon();
    }

    fn retract(&mut self) {
        self.chooser.retract();
    }

    fn choose(&mut self, row: &mut LogitsRow, draft: Option<Draft>) -> Result<Choice> {
        self.given += 1;
        self.chooser.choose(row, draft)
    }

    fn take(&mut self, token: u32) -> Result<Choice> {
        self.given += 1;
        self.chooser.take(token)
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
    let options =
        EngineOptions { context: 2048, sequences: 2, drafts: DRAFTS_MAX, ..EngineOptions::default() };
    let parameters = CheckpointParameters(&checkpoint);
    let mut engine = Engine::load(&runtime, &parameters, checkpoint.config(), options, &|_| ())?;

    let truth = text(&mut engine, tokens)?;
    let depths = (1..=DRAFTS_MAX).map(|depth| (format!("fixed {depth}"), Depth::Fixed(depth), false));
    let auto = [("auto", false), ("auto, always wrong", true)];
    for (name, depth, is_wrong) in auto
        .map(|(name, is_wrong)| (name.into(), Depth::Auto, is_wrong))
        .into_iter()
        .chain(depths.filter(|_| !auto_alone))
    {
        let (mut plain, mut drafting) = (0.0, 0.0);
        let (mut least, mut greatest) = (f64::INFINITY, 0.0f64);
        let mut counters = SpeculationCounters::default();
        for _ in 0..repeats {
            let (seconds, came) = side_by_side(&mut engine, &truth, depth, is_wrong)?;
            (plain, drafting) = (plain + seconds[0], drafting + seconds[1]);
            least = least.min(seconds[0] / seconds[1]);
            greatest = greatest.max(seconds[0] / seconds[1]);
            counters.add(&came);
        }
        let all = (tokens * repeats) as f64;
        println!(
            "{name}: {:.1} tokens/s, plain {:.1}, ratio {:.3} ({least:.2} to {greatest:.2}); of {} rounds {} plain, {:.2} \
             tokens a round; draft {:.0?}, verify {:.0?}, commit {:.0?}",
            all / drafting,
            all / plain,
            plain / drafting,
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

/// The text of plain decoding.
fn text(engine: &mut Engine, tokens: usize) -> Result<Vec<u32>> {
    let sequence = engine.open()?;
    let options = GenerateOptions { max_tokens: tokens, ..GenerateOptions::default() };
    TokenIterator::new(engine, sequence, &PROMPT, options, &mut |_| ())?.collect()
}

/// Seconds of plain decoding and of rounds, for the same text.
fn side_by_side(
    engine: &mut Engine,
    truth: &[u32],
    depth: Depth,
    is_wrong: bool,
) -> Result<([f64; 2], SpeculationCounters)> {
    let (mut logits, mut ids) = (LogitsRow::default(), Vec::new());
    let mut plain = engine.open()?;
    engine.prefill(&mut plain, &PROMPT, &mut logits.values, &mut |_| ())?;
    let mut cache = engine.open()?;
    engine.prefill(&mut cache, &PROMPT, &mut logits.values, &mut |_| ())?;
    let options = SpeculationOptions { depth, ..Default::default() };
    let mut speculation = Speculation::new(options, engine.last_hidden()?);
    let sampler = || Sampler::new(SamplerOptions::default(), &PROMPT);
    let inner = SamplerChooser::new(sampler()?, None, Vec::new());
    let mut chooser: Box<dyn Chooser> = if is_wrong {
        Box::new(AlwaysWrong { chooser: inner, truth: truth.to_vec(), given: 0, drafted: 0 })
    } else {
        Box::new(inner)
    };
    let mut sampler = sampler()?;
    ids.push(chooser.choose(&mut logits, None)?.token);
    let mut steps = [Vec::new(), Vec::new()];
    let mut decoded = 1;
    while decoded < truth.len() || ids.len() < truth.len() {
        if decoded < truth.len() {
            let start = Instant::now();
            engine.decode(&mut [&mut plain], &[truth[decoded - 1]])?;
            engine.logits(0, &mut logits.values)?;
            assert_eq!(sampler.sample(&mut logits), truth[decoded]);
            steps[0].push(start.elapsed().as_secs_f64());
            decoded += 1;
        }
        // Rounds go on only while they have no more tokens than plain decoding.
        if ids.len() < truth.len() && (ids.len() <= decoded || decoded == truth.len()) {
            let start = Instant::now();
            let rounds = engine.round(&mut [RoundSequence {
                last: ids[ids.len() - 1],
                tokens_max: truth.len() - ids.len(),
                cache: &mut cache,
                speculation: Some(&mut speculation),
                chooser: &mut *chooser,
            }])?;
            steps[1].push(start.elapsed().as_secs_f64());
            for round in rounds {
                ids.extend(round?.tokens);
            }
        }
    }
    assert_eq!(ids, truth, "speculation changed the text");
    engine.release(plain);
    engine.release(cache);
    let seconds = steps.map(|steps| {
        let most = 3.0 * median(steps.clone());
        steps.iter().map(|seconds| seconds.min(most)).sum()
    });
    Ok((seconds, speculation.counters().clone()))
}
