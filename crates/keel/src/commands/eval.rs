//! `keel eval`: how well a model predicts a text, and how much it differs from another model.

use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use keel_cache::SequenceCache;
use keel_engine::{EngineOptions, PREFILL_GRID};
use serde_json::json;

use crate::args::{DeviceArgs, EngineArgs, ModelArgs, count};
use crate::failure::usage;
use crate::session::{Session, check_ids};
use crate::{input, output, progress, source};
use evenkeel::ModelText;
use evenkeel::context_for;

/// Measure how well a model predicts a text: the perplexity, and with --kl the divergence from another model.
///
/// The text is cut into windows. The second half of each window is scored, so every scored token has at least half a
/// window before it. A rest shorter than a window is not scored. Lower is better. A perplexity of 1 means certainty.
#[derive(Debug, Args)]
pub struct EvalArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// File with the text.
    #[arg(long, value_name = "FILE")]
    perplexity: PathBuf,
    /// Also compare with this model, for example the unquantised one. Prints the mean Kullback-Leibler divergence of
    /// the predictions in nats, and how often both models find the same token most probable. Both must have the same
    /// vocabulary.
    #[arg(long, value_name = "MODEL")]
    kl: Option<String>,
    /// Tokens of a window, a multiple of 128.
    #[arg(long, value_name = "N", default_value_t = 512)]
    window: usize,
    /// Most windows to score.
    #[arg(long, value_name = "N", value_parser = count)]
    windows: Option<usize>,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Sums over the scored tokens.
#[derive(Default)]
struct Score {
    tokens: usize,
    /// Sum of the negative log-probabilities.
    loss: f64,
    /// Sum of their squares.
    loss_squares: f64,
    divergence: f64,
    same_top: usize,
}

/// Runs the command.
pub fn run(args: &EvalArgs) -> Result<()> {
    if args.window == 0 || !args.window.is_multiple_of(2 * PREFILL_GRID) {
        let reason = format!("--window {} is not a positive multiple of {}", args.window, 2 * PREFILL_GRID);
        return Err(usage(reason));
    }
    let scored = input::text_of(&args.perplexity, input::TEXTS_BYTES_MAX).context("--perplexity")?;
    let model = args.model.open()?;
    let text = ModelText::open(&model)?;
    let ids = text.tokenizer.encode(&scored, false)?;
    check_ids(&model.config, &ids)?;
    let windows = windows(args, &ids)?;
    let begin = begin(&text)?;
    let options = EngineOptions {
        context: context_for(&model.config, args.window).context("--window")?,
        all_logits: true,
        ..args.engine.options()
    };
    let mut session = Session::load(&args.device, &model, options)?;
    let rest = args.device.after(&session.charged());
    let mut other = args.kl.as_deref().map(|other| reference(&rest, other, options)).transpose()?;
    if let Some(other) = &other {
        let (ours, theirs) = (model.config.vocab, other.engine.model().config.vocab);
        if ours != theirs {
            bail!("--kl: the vocabularies have {ours} and {theirs} entries; they must be the same");
        }
    }
    let mut score = Score::default();
    let bar = progress::tokens("scoring", windows.len() * args.window);
    for window in &windows {
        let mut ids = window.to_vec();
        if let Some(begin) = begin {
            ids[0] = begin;
        }
        score_window(&mut session, other.as_mut(), &ids, &mut score)?;
        bar.inc(args.window as u64);
    }
    bar.finish_and_clear();
    report(args, &score, windows.len())
}

/// The windows of the text.
fn windows<'i>(args: &EvalArgs, ids: &'i [u32]) -> Result<Vec<&'i [u32]>> {
    let most = args.windows.unwrap_or(usize::MAX);
    let windows: Vec<&[u32]> = ids.chunks_exact(args.window).take(most).collect();
    if windows.is_empty() {
        bail!(
            "the text has {} tokens, less than one window of {}: take a longer text, or a smaller --window",
            ids.len(),
            args.window
        );
    }
    Ok(windows)
}

/// The token that replaces each window's first token, if any.
fn begin(text: &ModelText) -> Result<Option<u32>> {
    let marked = text.tokenizer.encode("a", true)?;
    Ok(text.tokenizer.bos_id().filter(|bos| marked.first() == Some(bos)))
}

/// Loads the other model, next to the first. `device` has the memory that the first one leaves.
fn reference(device: &DeviceArgs, other: &str, options: EngineOptions) -> Result<Session> {
    let other = source::open(Some(other), Some(Path::new("none"))).context("--kl")?;
    Session::load(device, &other, options).context("--kl, next to the first model")
}

/// Scores the second half of a window. It runs in the steps of a prompt, so that an arithmetic of many rows shows. With
/// another model, the host holds its logits of one step.
fn score_window(
    session: &mut Session,
    mut other: Option<&mut Session>,
    ids: &[u32],
    score: &mut Score,
) -> Result<()> {
    let mut sequence = session.engine.open()?;
    let mut other_sequence = other.as_mut().map(|other| other.engine.open()).transpose()?;
    let rows_max = session.engine.options().prefill_step;
    for first in (0..ids.len()).step_by(rows_max) {
        let step = Step { ids, positions: first..ids.len().min(first + rows_max) };
        let mut theirs = Vec::new();
        if let (Some(other), Some(sequence)) = (&mut other, &mut other_sequence) {
            step.each_scored_row(other, sequence, |_, row| theirs.push(row.to_vec()))?;
        }
        let mut theirs = theirs.iter();
        step.each_scored_row(session, &mut sequence, |position, row| {
            score.add(row, theirs.next().map(Vec::as_slice), ids[position + 1]);
        })?;
    }
    session.engine.release(sequence);
    if let (Some(other), Some(sequence)) = (other, other_sequence) {
        other.engine.release(sequence);
    }
    Ok(())
}

/// Positions of a window that run together.
struct Step<'i> {
    ids: &'i [u32],
    positions: Range<usize>,
}

impl Step<'_> {
    /// Calls `visit` with each position in the second half of the window but the last, and its logits.
    fn each_scored_row(
        &self,
        session: &mut Session,
        sequence: &mut SequenceCache,
        mut visit: impl FnMut(usize, &[f32]),
    ) -> Result<()> {
        let scored = self.ids.len() / 2..self.ids.len() - 1;
        let mut positions = self.positions.clone();
        let mut sink = |row: &[f32]| {
            let position = positions.next().filter(|position| scored.contains(position));
            position.into_iter().for_each(|position| visit(position, row));
            Ok(())
        };
        let tokens = &self.ids[self.positions.clone()];
        Ok(session.engine.all_logits(sequence, tokens, false, &mut sink, None)?)
    }
}

impl Score {
    /// Adds a prediction of `next`, and its divergence from the other model's.
    fn add(&mut self, logits: &[f32], other: Option<&[f32]>, next: u32) {
        let norm = log_sum_exp(logits);
        let loss = norm - f64::from(logits[next as usize]);
        self.tokens += 1;
        self.loss += loss;
        self.loss_squares += loss * loss;
        let Some(other) = other else { return };
        let other_norm = log_sum_exp(other);
        let terms = logits.iter().zip(other).map(|(&ours, &theirs)| {
            let (ours, theirs) = (f64::from(ours) - norm, f64::from(theirs) - other_norm);
            theirs.exp() * (theirs - ours)
        });
        self.divergence += terms.sum::<f64>();
        self.same_top += usize::from(top(logits) == top(other));
    }

    fn mean_loss(&self) -> f64 {
        self.loss / self.tokens as f64
    }

    /// Standard error of the mean loss.
    fn error(&self) -> f64 {
        let n = self.tokens as f64;
        ((self.loss_squares / n - self.mean_loss().powi(2)).max(0.0) / n).sqrt()
    }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    largest + logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum::<f64>().ln()
}

/// The most likely token; among equals, the first.
fn top(logits: &[f32]) -> Option<usize> {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a)))
}

fn report(args: &EvalArgs, score: &Score, windows: usize) -> Result<()> {
    let perplexity = score.mean_loss().exp();
    if !perplexity.is_finite() {
        bail!("the perplexity is {perplexity}: the model's logits are no numbers; check its files");
    }
    let error = perplexity * score.error();
    let (divergence, same) =
        (score.divergence / score.tokens as f64, score.same_top as f64 / score.tokens as f64);
    if args.json {
        let mut object = json!({
            "perplexity": perplexity,
            "perplexity_error": error,
            "tokens": score.tokens,
            "windows": windows,
            "window": args.window,
        });
        if args.kl.is_some() {
            object["kl_divergence"] = divergence.into();
            object["same_top"] = same.into();
        }
        return output::json(&object);
    }
    let tokens = score.tokens;
    output::line(&format!(
        "perplexity {perplexity:.4} +- {error:.4} over {tokens} tokens in {windows} windows"
    ))?;
    match &args.kl {
        None => Ok(()),
        Some(other) => output::line(&format!(
            "from {other}: divergence {divergence:.6} nats a token, same most likely token {:.2}%",
            100.0 * same
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prediction_is_scored_by_what_came() {
        let mut score = Score::default();
        // These are the probabilities 1/4, 1/2, 1/4.
        let logits = [0.0, 2f32.ln(), 0.0];
        score.add(&logits, Some(&logits), 1);
        score.add(&logits, Some(&[0.0, 0.0, 0.0]), 0);
        assert!((score.loss - (2f64.ln() + 4f64.ln())).abs() < 1e-6);
        // Divergence of the uniform distribution from these: (ln(4/3) + ln(2/3) + ln(4/3)) / 3.
        let expected = (2.0 * (4f64 / 3.0).ln() + (2f64 / 3.0).ln()) / 3.0;
        assert!((score.divergence - expected).abs() < 1e-6);
        assert_eq!((score.tokens, score.same_top), (2, 1));
        assert!(score.error() > 0.0);
    }
}
