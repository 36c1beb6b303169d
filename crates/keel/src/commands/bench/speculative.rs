//! Compares greedy decoding with and without drafts.

use std::time::Instant;

use anyhow::{Result, ensure};
use keel_array::sampling::Draw;
use keel_cache::SequenceCache;
use keel_engine::speculation::{Chooser, RoundSequence, SamplerChooser, Speculation};
use keel_engine::{Engine, Sampler, SamplerOptions, SpeculationCounters, SpeculationOptions};
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
}

impl SpeculativeRuns {
    /// Runs `repeats` times after random prompts. Each repeat decodes all sequences greedily without drafts, and then
    /// again with drafts.
    ///
    /// # Errors
    /// Errors of the engine, or different greedy texts.
    pub fn time(
        engine: &mut Engine,
        prompt: usize,
        tokens: usize,
        repeats: usize,
        options: SpeculationOptions,
    ) -> Result<SpeculativeRuns> {
        let counters = SpeculationCounters::default();
        let mut runs = SpeculativeRuns {
            plain: Vec::new(),
            rates: Vec::new(),
            report: SpeculationReport { options, counters },
        };
        for repeat in 0..=repeats {
            let mut counters = SpeculationCounters::default();
            let plain = run_plain(engine, prompt, tokens)?;
            let drafted = run_drafted(engine, prompt, tokens, options, &mut counters)?;
            ensure!(
                options.optimistic || drafted.tokens == plain.tokens,
                "the greedy text depends on speculation"
            );
            // The first repeat is the warm-up.
            if repeat > 0 {
                runs.plain.push(plain.rate);
                runs.rates.push(drafted.rate);
                runs.report.counters.add(&counters);
            }
        }
        Ok(runs)
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

/// The tokens of all sequences of a run, and how many it made per second.
struct Decoded {
    tokens: Vec<Vec<u32>>,
    rate: f64,
}

/// The sequences of a run after their prompts.
struct Sequences {
    caches: Vec<SequenceCache>,
    choosers: Vec<SamplerChooser>,
    hidden: Vec<Vec<f32>>,
    tokens: Vec<Vec<u32>>,
}

impl Sequences {
    fn start(engine: &mut Engine, prompt: usize) -> Result<Sequences> {
        let (batch, vocab) = (engine.options().sequences, engine.model().config.vocab);
        let mut all = Sequences { caches: vec![], choosers: vec![], hidden: vec![], tokens: vec![] };
        let mut logits = Vec::new();
        for i in 0..batch {
            let mut cache = engine.open()?;
            engine.prefill(&mut cache, &random_ids(i, prompt, vocab), &mut logits, &mut |_| ())?;
            let mut chooser =
                SamplerChooser::new(Sampler::new(SamplerOptions::default(), &[])?, None, Vec::new());
            all.tokens.push(vec![chooser.choose(&mut logits, None)?.token]);
            all.hidden.push(engine.last_hidden()?);
            all.choosers.push(chooser);
            all.caches.push(cache);
        }
        Ok(all)
    }

    /// Releases the sequences.
    fn finish(self, engine: &mut Engine, start: Instant) -> Decoded {
        let count = self.tokens.iter().map(|tokens| tokens.len() - 1).sum();
        let rate = rate(count, start.elapsed());
        self.caches.into_iter().for_each(|cache| engine.release(cache));
        Decoded { tokens: self.tokens, rate }
    }
}

fn run_plain(engine: &mut Engine, prompt: usize, wanted: usize) -> Result<Decoded> {
    let mut all = Sequences::start(engine, prompt)?;
    let mut last: Vec<u32> = all.tokens.iter().map(|tokens| tokens[tokens.len() - 1]).collect();
    let draws = vec![Draw::GREATEST; last.len()];
    let start = Instant::now();
    let Sequences { caches, tokens, .. } = &mut all;
    let mut caches: Vec<&mut SequenceCache> = caches.iter_mut().collect();
    let mut take = |drawn: &[u32]| tokens.iter_mut().zip(drawn).for_each(|(all, &token)| all.push(token));
    if engine.runs_ahead() {
        run_ahead(engine, &mut caches, &last, wanted - 1, &draws, take)?;
    } else {
        let draws: Vec<Option<Draw>> = draws.into_iter().map(Some).collect();
        for _ in 1..wanted {
            last = engine.decode_and_draw(&mut caches, &last, &draws)?.into_iter().flatten().collect();
            take(&last);
        }
    }
    Ok(all.finish(engine, start))
}

fn run_drafted(
    engine: &mut Engine,
    prompt: usize,
    wanted: usize,
    options: SpeculationOptions,
    counters: &mut SpeculationCounters,
) -> Result<Decoded> {
    let mut all = Sequences::start(engine, prompt)?;
    let hidden = std::mem::take(&mut all.hidden).into_iter();
    let mut states: Vec<Speculation> = hidden.map(|hidden| Speculation::new(options, hidden)).collect();
    let start = Instant::now();
    while all.tokens.iter().any(|tokens| tokens.len() < wanted) {
        let members = all.caches.iter_mut().zip(&mut states).zip(&mut all.choosers).zip(&all.tokens);
        let (order, mut members): (Vec<usize>, Vec<RoundSequence<'_>>) = members
            .enumerate()
            .filter(|(_, (_, tokens))| tokens.len() < wanted)
            .map(|(i, (((cache, speculation), chooser), tokens))| {
                let (last, tokens_max) = (tokens[tokens.len() - 1], wanted - tokens.len());
                (i, RoundSequence { cache, speculation: Some(speculation), chooser, last, tokens_max })
            })
            .unzip();
        let rounds = engine.round(&mut members)?;
        for (i, round) in order.into_iter().zip(rounds) {
            all.tokens[i].extend(round?.tokens);
        }
    }
    let decoded = all.finish(engine, start);
    states.iter().for_each(|state| counters.add(state.counters()));
    Ok(decoded)
}
