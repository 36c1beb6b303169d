//! The timed runs.

use std::fmt;
use std::time::Instant;

use anyhow::{Result, bail};
use keel_cache::SequenceCache;
use keel_engine::{Chunk, Engine};

use super::drawing::Drawing;
use crate::progress;
use crate::report::rate;

/// Tokens of the warm-up. It touches every page of the weights in both regimes.
const WARM_UP: (usize, usize) = (64, 4);
/// Warm-ups with the whole prompt where programs are compiled: the first compiles and the second captures.
const WARM_UPS_COMPILED: usize = 2;

/// Tokens per second of each repeat.
#[derive(Debug, Default)]
pub struct Runs {
    prefill: Vec<f64>,
    decode: Vec<f64>,
}

/// Median, smallest and largest of the repeats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    pub fn of(values: &[f64]) -> Spread {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median = if sorted.len().is_multiple_of(2) {
            (sorted[middle - 1] + sorted[middle]) / 2.0
        } else {
            sorted[middle]
        };
        Spread { median, min: sorted[0], max: sorted[sorted.len() - 1] }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>9.1} ({:.1}..{:.1})", self.median, self.min, self.max)
    }
}

impl Runs {
    /// Warms up, then runs `repeats` times: each sequence of the engine processes a prompt, and then all sequences
    /// decode together.
    ///
    /// # Errors
    /// Errors of the engine, or logits that are not finite.
    pub fn time(
        engine: &mut Engine,
        prompt: usize,
        gen_len: usize,
        repeats: usize,
        drawing: Drawing,
    ) -> Result<Runs> {
        let mut runs = Runs::default();
        let batch = engine.options().sequences;
        if engine.runtime().backend().is_compiling() {
            for _ in 0..WARM_UPS_COMPILED {
                run(engine, prompt, gen_len.min(WARM_UP.1), drawing)?;
            }
        } else {
            run(engine, prompt.min(WARM_UP.0), gen_len.min(WARM_UP.1), drawing)?;
        }
        let bar = progress::tokens("running", repeats * batch * (prompt + gen_len));
        for _ in 0..repeats {
            let Rates { prefill, decode } = run(engine, prompt, gen_len, drawing)?;
            runs.prefill.push(prefill);
            runs.decode.push(decode);
            bar.inc((batch * (prompt + gen_len)) as u64);
        }
        bar.finish_and_clear();
        Ok(runs)
    }

    /// Prompt tokens per second.
    pub fn prefill(&self) -> Spread {
        Spread::of(&self.prefill)
    }

    /// Generated tokens per second, for all sequences together.
    pub fn decode(&self) -> Spread {
        Spread::of(&self.decode)
    }
}

/// Tokens per second of one run.
struct Rates {
    prefill: f64,
    decode: f64,
}

fn run(engine: &mut Engine, prompt: usize, gen_len: usize, drawing: Drawing) -> Result<Rates> {
    let batch = engine.options().sequences;
    let start = Instant::now();
    let mut sequences = prefill(engine, prompt)?;
    let prefill = rate(batch * prompt, start.elapsed());
    let start = Instant::now();
    decode(engine, &mut sequences, gen_len, drawing)?;
    let decode = rate(batch * gen_len, start.elapsed());
    release(engine, sequences)?;
    Ok(Rates { prefill, decode })
}

/// Opens all sequences of the engine. Each processes its own random prompt, several of them in a step if a step has
/// room for several.
pub fn prefill(engine: &mut Engine, prompt: usize) -> Result<Vec<SequenceCache>> {
    let vocab = engine.model().config.vocab;
    let mut sequences =
        (0..engine.options().sequences).map(|_| engine.open()).collect::<Result<Vec<_>, _>>()?;
    let prompts: Vec<Vec<u32>> = (0..sequences.len()).map(|i| random_ids(i, prompt, vocab)).collect();
    let together = (engine.options().prefill_step / prompt).clamp(1, engine.chunks_max());
    let mut logits = Vec::new();
    for (sequences, prompts) in sequences.chunks_mut(together).zip(prompts.chunks(together)) {
        if let ([sequence], [prompt]) = (&mut *sequences, prompts) {
            engine.prefill(sequence, prompt, &mut logits, &mut |_| ())?;
            continue;
        }
        let chunk = |(sequence, tokens)| Chunk { sequence, tokens, next: None, draw: None };
        let mut chunks: Vec<_> =
            sequences.iter_mut().zip(prompts.iter().map(Vec::as_slice)).map(chunk).collect();
        engine.prefill_chunks(&mut chunks)?;
        engine.logits(0, &mut logits)?;
    }
    check(&logits)?;
    Ok(sequences)
}

/// Runs `gen_len` steps of all sequences together.
pub fn decode(
    engine: &mut Engine,
    sequences: &mut [SequenceCache],
    gen_len: usize,
    drawing: Drawing,
) -> Result<()> {
    let (batch, vocab) = (sequences.len(), engine.model().config.vocab);
    drawing.steps(engine, sequences, &random_ids(batch, gen_len, vocab))
}

/// Checks the last logits and releases the sequences.
pub fn release(engine: &mut Engine, sequences: Vec<SequenceCache>) -> Result<()> {
    let mut logits = Vec::new();
    engine.logits(0, &mut logits)?;
    check(&logits)?;
    sequences.into_iter().for_each(|sequence| engine.release(sequence));
    Ok(())
}

/// Fails if the logits are not plausible, because a time is then meaningless.
fn check(logits: &[f32]) -> Result<()> {
    let first = logits.first();
    if logits.iter().any(|logit| !logit.is_finite()) || logits.iter().all(|logit| Some(logit) == first) {
        bail!("the logits are NaN or infinite, so the time means nothing");
    }
    Ok(())
}

/// Ids spread over the vocabulary, the same in every run.
pub fn random_ids(stream: usize, count: usize, vocab: usize) -> Vec<u32> {
    let mut state = stream as u64 + 1;
    let next = |_| {
        // The generator of Knuth's MMIX. Its upper half is random enough.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % vocab as u64) as u32
    };
    (0..count).map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_lies_in_the_middle() {
        assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 3.0]), Spread { median: 2.5, min: 1.0, max: 4.0 });
    }

    #[test]
    fn ids_are_in_range_and_repeatable() {
        let ids = random_ids(0, 1000, 97);
        assert!(ids.iter().all(|&id| id < 97));
        assert_eq!(ids, random_ids(0, 1000, 97));
        assert_ne!(ids, random_ids(1, 1000, 97));
    }

    #[test]
    fn insane_logits_are_refused() {
        assert!(check(&[0.0, 1.0]).is_ok());
        for logits in [&[0.0, f32::NAN][..], &[1.0, 1.0], &[]] {
            assert!(check(logits).is_err(), "{logits:?}");
        }
    }
}
