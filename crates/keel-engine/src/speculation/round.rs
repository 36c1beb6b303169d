//! One round of a batch.

use std::time::{Duration, Instant};

use keel_array::Regime;
use keel_cache::SequenceCache;

use super::choose::Chooser;
use super::{Speculation, SpeculationOptions};
use crate::options::HEAD_LAG_MAX;
use crate::step::{Outcome, Rows};
use crate::{Engine, EngineError, Result};

/// One sequence of a round.
pub struct RoundSequence<'a> {
    /// Its memory.
    pub cache: &'a mut SequenceCache,
    /// What it keeps between rounds.
    pub speculation: &'a mut Speculation,
    /// How it chooses tokens.
    pub chooser: &'a mut dyn Chooser,
    /// The token that was drawn last and has not been run.
    pub last: u32,
    /// Tokens that it may still be given, at least one.
    pub tokens_max: usize,
}

/// What a round gave one sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// The new tokens, at least one; the last one has not been run. One that ends the sequence is among them.
    pub tokens: Vec<u32>,
    /// Whether nothing follows.
    pub is_last: bool,
}

impl Engine {
    /// The hidden state of the last token of a prompt that has just been run, for [`Speculation::new`].
    ///
    /// # Errors
    /// If the engine was made without drafts.
    pub fn last_hidden(&self) -> Result<Vec<f32>> {
        let mut hidden = Vec::new();
        if self.options.drafts == 0 {
            return Err(EngineError::Option("drafts were not planned for: set drafts".into()));
        }
        self.stepper.read_last_hidden(0, &mut hidden)?;
        Ok(hidden)
    }

    /// Drafts, verifies and accepts for all sequences of a batch, each at its own depth. One without drafts takes part
    /// with one row. After an error the sequences cannot go on.
    ///
    /// # Errors
    /// Ids out of range, [`EngineError::Context`] if not even one more token fits, what the constraints and the
    /// runtime say.
    pub fn round(&mut self, batch: &mut [RoundSequence<'_>]) -> Result<Vec<Round>> {
        if batch.is_empty() || batch.len() > self.options.sequences {
            let (count, most) = (batch.len(), self.options.sequences);
            return Err(EngineError::Option(format!("a round of {count} sequences, not 1 to {most}")));
        }
        for sequence in batch.iter() {
            self.admit(sequence.cache, &[sequence.last])?;
        }
        let depths = self.depths(batch);
        for (sequence, depth) in batch.iter_mut().zip(&depths) {
            self.cache.reserve(sequence.cache, depth + 1)?;
            sequence.speculation.name_last(sequence.last);
            self.catch_up(sequence, *depth)?;
        }
        let start = Instant::now();
        let drafts = self.draft(batch, &depths)?;
        let drafting = start.elapsed();
        let start = Instant::now();
        self.verify(batch, &drafts)?;
        let verifying = start.elapsed();
        let rows = batch.len() + drafts.iter().map(Vec::len).sum::<usize>();
        self.costs.note_verify(rows, verifying.as_secs_f64());
        self.costs.note_round(rows == batch.len());
        let start = Instant::now();
        let rounds = self.accept(batch, &drafts)?;
        share_times(batch, &depths, [drafting, verifying, start.elapsed()]);
        Ok(rounds)
    }

    /// Drafts of each sequence: what its control says, within what is left of the sequence and the context.
    fn depths(&self, batch: &[RoundSequence<'_>]) -> Vec<usize> {
        let sequences = batch.len();
        batch
            .iter()
            .map(|s| {
                let room = (self.options.context - s.cache.len()).min(s.tokens_max).saturating_sub(1);
                let most = if s.chooser.can_draft() { self.options.drafts.min(room) } else { 0 };
                s.speculation.control.choose(&self.costs, sequences, most, s.speculation.lag_rows())
            })
            .collect()
    }

    /// Runs rows that the head is behind, if they are many and no draft does it anyway.
    fn catch_up(&mut self, sequence: &mut RoundSequence<'_>, depth: usize) -> Result<()> {
        let lag = sequence.speculation.lag_rows();
        if lag < HEAD_LAG_MAX && (depth == 0 || lag <= self.options.open_rows()) {
            return Ok(());
        }
        // The last row stays for the next draft.
        let done = if depth == 0 { lag.min(HEAD_LAG_MAX) } else { lag - 1 };
        let width = self.model.config.hidden;
        let Speculation { lag_hidden, lag_tokens, .. } = &mut *sequence.speculation;
        self.stepper.write_draft_input(&lag_hidden[..done * width])?;
        let first = sequence.cache.len() - lag;
        let rows = Rows { sequence: sequence.cache, tokens: &lag_tokens[..done], first, next: None };
        self.run(Regime::Decode, Outcome::HeadState, &[rows])?;
        // A pass of the head commits nothing, and neither moves the sequence on.
        lag_hidden.drain(..done * width);
        lag_tokens.drain(..done);
        Ok(())
    }

    /// The drafts of each sequence. The first pass of the head runs the rows it is behind, each further one its own
    /// result and the draft made of it.
    fn draft(&mut self, batch: &mut [RoundSequence<'_>], depths: &[usize]) -> Result<Vec<Vec<u32>>> {
        let mut drafts: Vec<Vec<u32>> = vec![Vec::new(); batch.len()];
        let deepest = depths.iter().copied().max().unwrap_or(0);
        let mut logits = Vec::new();
        // Results of the last pass, in its order.
        let mut hidden: Vec<(usize, Vec<f32>)> = Vec::new();
        for pass in 0..deepest {
            let start = Instant::now();
            let active: Vec<usize> = (0..batch.len()).filter(|&i| depths[i] > pass).collect();
            let mut input = Vec::new();
            let mut rows = Vec::with_capacity(active.len());
            for &i in &active {
                let RoundSequence { cache, speculation, .. } = &batch[i];
                if pass == 0 {
                    input.extend_from_slice(&speculation.lag_hidden);
                    let first = cache.len() - speculation.lag_rows();
                    rows.push(Rows { sequence: cache, tokens: &speculation.lag_tokens, first, next: None });
                } else {
                    let own = hidden.iter().find(|(of, _)| *of == i);
                    input.extend_from_slice(own.map_or(&[], |(_, hidden)| hidden));
                    let (first, tokens) = (cache.len() + pass - 1, &drafts[i][pass - 1..]);
                    rows.push(Rows { sequence: cache, tokens, first, next: None });
                }
            }
            self.stepper.write_draft_input(&input)?;
            self.run(Regime::Decode, Outcome::Draft, &rows)?;
            hidden.clear();
            for (row, &i) in active.iter().enumerate() {
                if pass == 0 {
                    batch[i].speculation.lag_hidden.clear();
                    batch[i].speculation.lag_tokens.clear();
                }
                self.stepper.read_logits(row, &mut logits)?;
                drafts[i].push(batch[i].chooser.draft(&mut logits)?);
                let mut own = Vec::new();
                self.stepper.append_draft_hidden(row, &mut own)?;
                hidden.push((i, own));
            }
            self.costs.note_draft(active.len(), start.elapsed().as_secs_f64());
        }
        for (sequence, drafts) in batch.iter_mut().zip(&mut drafts) {
            sequence.chooser.retract()?;
            sequence.chooser.revise(drafts);
        }
        Ok(drafts)
    }

    /// Runs the last token of each sequence and its drafts.
    fn verify(&mut self, batch: &[RoundSequence<'_>], drafts: &[Vec<u32>]) -> Result<()> {
        let tokens: Vec<Vec<u32>> =
            batch.iter().zip(drafts).map(|(s, drafts)| [&[s.last][..], drafts].concat()).collect();
        let rows: Vec<Rows<'_>> =
            batch.iter().zip(&tokens).map(|(s, tokens)| Rows::behind(s.cache, tokens)).collect();
        self.run(Regime::Decode, verify_outcome(drafts), &rows)
    }

    /// Chooses the tokens of each sequence and moves it on by as many.
    fn accept(&mut self, batch: &mut [RoundSequence<'_>], drafts: &[Vec<u32>]) -> Result<Vec<Round>> {
        let is_open = verify_outcome(drafts) == Outcome::OpenRows;
        let (mut rounds, mut logits, mut row) = (Vec::with_capacity(batch.len()), Vec::new(), 0);
        for (sequence, drafts) in batch.iter_mut().zip(drafts) {
            let round = self.choose_tokens(sequence, (row, drafts), &mut logits)?;
            let kept = round.tokens.len();
            if is_open {
                sequence.cache.accept(kept);
            } else {
                sequence.cache.advance(kept);
            }
            let accepted =
                round.tokens.iter().zip(drafts).take_while(|(token, draft)| token == draft).count();
            let speculation = &mut *sequence.speculation;
            self.stepper.append_row_hidden(row, kept, &mut speculation.lag_hidden)?;
            speculation.lag_tokens.extend_from_slice(&round.tokens);
            speculation.control.note(drafts.len(), accepted);
            speculation.counters.note_round(drafts.len(), accepted, kept);
            row += drafts.len() + 1;
            rounds.push(round);
        }
        Ok(rounds)
    }

    /// The tokens of a sequence whose rows begin at `row`.
    fn choose_tokens(
        &self,
        sequence: &mut RoundSequence<'_>,
        (row, drafts): (usize, &[u32]),
        logits: &mut Vec<f32>,
    ) -> Result<Round> {
        let SpeculationOptions { optimistic, .. } = sequence.speculation.options;
        let mut tokens = Vec::with_capacity(drafts.len() + 1);
        for i in 0..=drafts.len() {
            let draft = drafts.get(i).copied();
            let choice = match draft {
                Some(draft) if optimistic => sequence.chooser.take(draft)?,
                _ => {
                    self.stepper.read_logits(row + i, logits)?;
                    sequence.chooser.choose(logits, draft.map(|draft| (i, draft)))?
                }
            };
            tokens.push(choice.token);
            if choice.is_last {
                return Ok(Round { tokens, is_last: true });
            }
            if draft != Some(choice.token) {
                break;
            }
        }
        Ok(Round { tokens, is_last: false })
    }
}

/// Without drafts there is nothing to take back.
fn verify_outcome(drafts: &[Vec<u32>]) -> Outcome {
    if drafts.iter().all(Vec::is_empty) { Outcome::Rows } else { Outcome::OpenRows }
}

impl Speculation {
    fn lag_rows(&self) -> usize {
        self.lag_tokens.len()
    }

    /// Behind a prompt, the first token is known only now.
    fn name_last(&mut self, last: u32) {
        if self.lag_tokens.is_empty() && !self.lag_hidden.is_empty() {
            self.lag_tokens.push(last);
        }
    }
}

fn share_times(batch: &mut [RoundSequence<'_>], depths: &[usize], [draft, verify, commit]: [Duration; 3]) {
    let drafting = depths.iter().filter(|&&depth| depth > 0).count() as u32;
    let all = batch.len() as u32;
    for (sequence, &depth) in batch.iter_mut().zip(depths) {
        let counters = &mut sequence.speculation.counters;
        if depth > 0 {
            counters.draft_time += draft / drafting;
        }
        counters.verify_time += verify / all;
        counters.commit_time += commit / all;
    }
}
