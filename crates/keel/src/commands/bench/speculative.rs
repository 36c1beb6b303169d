//! Compares greedy decoding with and without drafts.

use std::time::Instant;

use anyhow::{Result, ensure};
use keel_array::sampling::Draw;
use keel_cache::SequenceCache;
use keel_engine::batch::{BatchEvent, BatchOptions, BatchRequest, Batcher, SequenceEvent};
use keel_engine::{
    Engine, GenerateOptions, LogitsRow, Sampler, SamplerOptions, SpeculationCounters, SpeculationOptions,
    TokenIterator,
};
use serde_json::{Value, json};

use super::drawing::run_ahead;
use super::runs::{Spread, random_ids};
use crate::report::rate;
use crate::speculation::SpeculationReport;

/// Tokens per second of each repeat, plain and speculative, of the same text in the same run.
pub struct SpeculativeRuns {
    plain: Vec<f64>,
    rates: Vec<f64>,
    report: SpeculationReport,
    is_exact: bool,
}

impl SpeculativeRuns {
    /// No runs yet. `is_exact` says that a text's bits do not depend on how work is cut.
    pub fn new(options: SpeculationOptions, is_exact: bool) -> SpeculativeRuns {
        let report = SpeculationReport { options, counters: SpeculationCounters::default() };
        SpeculativeRuns { plain: Vec::new(), rates: Vec::new(), report, is_exact }
    }

    /// Runs `repeats` times after random prompts. Each repeat decodes all sequences greedily without drafts, and then
    /// again with drafts, as `keel generate` does for one sequence and a server for many. Gives the engine back.
    ///
    /// # Errors
    /// Errors of the engine, or greedy texts that differ and must not.
    pub fn time(
        &mut self,
        mut engine: Engine,
        prompt: usize,
        tokens: usize,
        repeats: usize,
    ) -> Result<Engine> {
        let options = self.report.options;
        for repeat in 0..=repeats {
            let plain = run_plain(&mut engine, prompt, tokens)?;
            let drafted;
            if engine.options().sequences == 1 {
                drafted = iterate(&mut engine, prompt, tokens, options)?;
            } else {
                (engine, drafted) = run_batch(engine, prompt, tokens, options)?;
            }
            ensure!(
                options.optimistic || !self.is_exact || drafted.tokens == plain.tokens,
                "the greedy text depends on speculation"
            );
            // The first repeat is the warm-up.
            if repeat > 0 {
                self.plain.push(plain.rate);
                self.rates.push(drafted.rate);
                self.report.counters.add(&drafted.counters);
            }
        }
        Ok(engine)
    }

    /// Median of the ratios of speculative to plain runs. Each ratio is of two consecutive runs.
    fn gain(&self) -> f64 {
        let ratios: Vec<f64> = self.rates.iter().zip(&self.plain).map(|(rate, plain)| rate / plain).collect();
        Spread::of(&ratios).median
    }

    pub fn to_json(&self) -> Value {
        let mut object = self.report.to_json();
        object["tokens_per_second"] = Spread::of(&self.rates).median.into();
        object["plain_tokens_per_second"] = Spread::of(&self.plain).median.into();
        object["ratio_to_plain"] = json!(self.gain());
        object
    }

    pub fn to_text(&self, tokens: usize) -> String {
        format!(
            "greedy   {tokens:>6}  {}  own tokens, no drafts\ndrafted  {tokens:>6}  {}  {:.2} of that\n{}\n",
            Spread::of(&self.plain),
            Spread::of(&self.rates),
            self.gain(),
            self.report.to_line()
        )
    }
}

/// The tokens of all sequences of a run, how many it made per second, and the counters of its drafts.
struct Decoded {
    tokens: Vec<Vec<u32>>,
    rate: f64,
    counters: SpeculationCounters,
}

fn run_plain(engine: &mut Engine, prompt: usize, wanted: usize) -> Result<Decoded> {
    let (batch, vocab) = (engine.options().sequences, engine.model().config.vocab);
    let (mut caches, mut tokens, mut logits) = (Vec::new(), Vec::new(), LogitsRow::default());
    for i in 0..batch {
        let mut cache = engine.open()?;
        engine.prefill(&mut cache, &random_ids(i, prompt, vocab), &mut logits.values, &mut |_| ())?;
        tokens.push(vec![Sampler::new(SamplerOptions::default(), &[])?.sample(&mut logits)]);
        caches.push(cache);
    }
    let mut last: Vec<u32> = tokens.iter().map(|tokens| tokens[0]).collect();
    let draws = vec![Draw::GREATEST; batch];
    let start = Instant::now();
    let mut all: Vec<&mut SequenceCache> = caches.iter_mut().collect();
    let mut take = |drawn: &[u32]| tokens.iter_mut().zip(drawn).for_each(|(all, &token)| all.push(token));
    if engine.runs_ahead() {
        run_ahead(engine, &mut all, &last, wanted - 1, &draws, take)?;
    } else {
        let draws: Vec<Option<Draw>> = draws.into_iter().map(Some).collect();
        for _ in 1..wanted {
            last = engine.decode_and_draw(&mut all, &last, &draws)?.into_iter().flatten().collect();
            take(&last);
        }
    }
    let rate = rate(batch * (wanted - 1), start.elapsed());
    caches.into_iter().for_each(|cache| engine.release(cache));
    Ok(Decoded { tokens, rate, counters: SpeculationCounters::default() })
}

/// One sequence, as `keel generate` runs it.
fn iterate(engine: &mut Engine, prompt: usize, wanted: usize, how: SpeculationOptions) -> Result<Decoded> {
    let ids = random_ids(0, prompt, engine.model().config.vocab);
    let options = GenerateOptions {
        max_tokens: wanted,
        speculation: Some(how),
        disposable: true,
        ..Default::default()
    };
    let sequence = engine.open()?;
    let mut iterator = TokenIterator::new(engine, sequence, &ids, options, &mut |_| ())?;
    let start = Instant::now();
    let tokens = iterator.by_ref().collect::<Result<Vec<u32>, _>>()?;
    let rate = rate(wanted - 1, start.elapsed());
    let counters = iterator.counters().cloned().unwrap_or_default();
    Ok(Decoded { tokens: vec![tokens], rate, counters })
}

/// All sequences, as a server runs them. Time counts from the step that ends the last prompt.
fn run_batch(
    engine: Engine,
    prompt: usize,
    wanted: usize,
    speculation: SpeculationOptions,
) -> Result<(Engine, Decoded)> {
    let (batch, vocab) = (engine.options().sequences, engine.model().config.vocab);
    let step_tokens = engine.options().prefill_step;
    let queue_limit = batch;
    let options = BatchOptions {
        step_tokens,
        queue_limit,
        speculation,
        reuse_prefixes: false,
        reuse_generated: false,
        ..BatchOptions::default()
    };
    let mut batcher = Batcher::new(engine, options);
    for i in 0..batch {
        batcher.submit(BatchRequest::new(i as u64, random_ids(i, prompt, vocab), wanted), Instant::now())?;
    }
    let mut tokens = vec![Vec::new(); batch];
    let mut begun: Option<(Instant, usize)> = None;
    while !batcher.is_idle() {
        for SequenceEvent { id, event } in batcher.step(Instant::now()) {
            match event {
                BatchEvent::Token { id: token, .. } => tokens[id as usize].push(token),
                BatchEvent::Failed(error) => return Err(error.into()),
                _ => {}
            }
        }
        if begun.is_none() && tokens.iter().all(|tokens| !tokens.is_empty()) {
            begun = Some((Instant::now(), tokens.iter().map(Vec::len).sum()));
        }
    }
    let (start, before) = begun.unwrap_or_else(|| (Instant::now(), 0));
    let rate = rate(tokens.iter().map(Vec::len).sum::<usize>() - before, start.elapsed());
    let counters = batcher.status().speculation;
    Ok((batcher.into_engine(), Decoded { tokens, rate, counters }))
}
