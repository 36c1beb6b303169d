//! Passes of the multi-token-prediction (MTP) head.

use std::cmp::Reverse;
use std::time::Instant;

use keel_array::Regime;
use keel_array::sampling::Draw;
use keel_cache::SequenceCache;

use super::Speculation;
use super::passes::Passes;
use super::round::{Proposal, RoundSequence};
use crate::options::{DRAFTS_MAX, MTP_LAG_MAX};
use crate::step::{Outcome, Rows, StepKind, TokensAt};
use crate::{Engine, EngineError, Result};

impl Engine {
    /// Runs rows that the head has not run yet, if they reach `MTP_LAG_MAX` or are more than a drafting pass holds.
    /// Returns how many.
    pub(super) fn catch_up(
        &mut self,
        cache: &SequenceCache,
        speculation: &mut Speculation,
        depth: usize,
    ) -> Result<usize> {
        let lag = speculation.lag_after(0);
        if lag < MTP_LAG_MAX && (depth == 0 || lag <= self.options.open_rows()) {
            return Ok(0);
        }
        // The last row stays for the next draft.
        let rows = if depth == 0 { lag.min(MTP_LAG_MAX) } else { lag - 1 };
        self.run_lag(cache, speculation, rows)?;
        Ok(rows)
    }

    /// Runs the first `rows` rows that the head has not run yet.
    fn run_lag(&mut self, cache: &SequenceCache, speculation: &mut Speculation, rows: usize) -> Result<()> {
        self.fetch_lags([&mut *speculation])?;
        let lag = &speculation.lag;
        self.write_draft_input(&lag.hidden()[..rows * self.model().config.hidden])?;
        let (first, tokens) = (cache.len() - lag.tokens().len(), &lag.tokens()[..rows]);
        let rows_of = Rows { first, ..Rows::after(cache, tokens) };
        self.run(Regime::Decode, Outcome::MtpState, &[rows_of])
    }

    /// Whether a step is under way after which [`Engine::catch_up_ahead`] can run rows: one of answers or of prompts
    /// alone. One of both has three programs: two that run rows, and one that keeps hidden states.
    pub(crate) fn can_catch_up_ahead(&self) -> bool {
        self.in_flight.steps.back().is_some_and(|step| step.catch_up.is_none() && step.runs.len() < 3)
    }

    /// Submits one pass of the MTP head after the step submitted last. It runs the rows of these sequences that the
    /// head has not run. It ends with that step. Rows that it does not hold wait for the next one. If it fails on the
    /// device, drafts are worse. In a split, the step after it is lost, too.
    pub(crate) fn catch_up_ahead(&mut self, all: &mut [(&SequenceCache, &mut Speculation)]) -> Result<()> {
        self.fetch_lags(all.iter_mut().map(|(_, speculation)| &mut **speculation))?;
        let rows_max = if all.len() == 1 { MTP_LAG_MAX } else { self.options.open_rows() };
        // The last row stays for the next draft.
        let count = |speculation: &Speculation| speculation.lag_after(0).saturating_sub(1).min(rows_max);
        let (width, mut input, mut rows) =
            (self.model().config.hidden, Vec::new(), Vec::with_capacity(all.len()));
        for (cache, speculation) in &*all {
            let (count, lag) = (count(speculation), &speculation.lag);
            input.extend_from_slice(&lag.hidden()[..count * width]);
            let first = cache.len() - lag.tokens().len();
            rows.push(Rows { first, ..Rows::after(cache, &lag.tokens()[..count]) });
        }
        self.write_draft_input(&input)?;
        let run = self.submit_on_all(StepKind::decode(Outcome::MtpState), &rows)?;
        let Some(step) = self.in_flight.steps.back_mut() else { unreachable!("a step is under way") };
        step.catch_up = Some(run);
        all.iter_mut().for_each(|(_, speculation)| speculation.lag.forget(count(speculation)));
        Ok(())
    }

    /// Runs the rows that the MTP head has not run yet, if there are more than `DRAFTS_MAX`: with more, `Depth::Auto`
    /// does not draft. No step is under way.
    pub(crate) fn catch_up_plainly(
        &mut self,
        cache: &SequenceCache,
        speculation: &mut Speculation,
    ) -> Result<()> {
        let lag = speculation.lag_after(0);
        if lag <= DRAFTS_MAX {
            return Ok(());
        }
        // The last row stays for the next draft.
        let rows = (lag - 1).min(MTP_LAG_MAX);
        self.run_lag(cache, speculation, rows)?;
        speculation.lag.forget(rows);
        Ok(())
    }

    /// Makes the drafts of each sequence. The first pass of the head runs the rows that it lags behind. The hidden
    /// states of rows of the last round are on the device already. Each later pass runs its own last result and the
    /// draft made from it. The pass before leaves both in place: sequences with the most drafts come first, so the rows
    /// of a pass are the first rows of the pass before.
    ///
    /// With `passes` they are only submitted, and the drafts are not known yet.
    pub(super) fn draft(
        &mut self,
        batch: &mut [RoundSequence<'_>],
        proposals: &mut [Proposal],
        mut passes: Option<&mut Passes>,
    ) -> Result<()> {
        let deepest = proposals.iter().map(|proposal| proposal.depth).max().unwrap_or(0);
        if deepest == 0 {
            return Ok(());
        }
        let width = self.model().config.hidden;
        let mut order: Vec<usize> = (0..batch.len()).collect();
        order.sort_by_key(|&i| Reverse(proposals[i].depth));
        order.iter().enumerate().for_each(|(row, &i)| proposals[i].row = row);
        for pass in 0..deepest {
            let start = Instant::now();
            let active = &order[..order.partition_point(|&i| proposals[i].depth > pass)];
            let at = if pass > 0 && passes.is_some() { TokensAt::MtpHead } else { TokensAt::Host };
            let (mut input, mut rows) = (Vec::new(), Vec::with_capacity(active.len()));
            for &i in active {
                let (RoundSequence { cache, speculation, .. }, proposal) = (&batch[i], &proposals[i]);
                let Some(speculation) = speculation else { unreachable!("it makes drafts") };
                let (first, tokens, of_round) = if pass == 0 {
                    let lag = &speculation.lag;
                    input.extend_from_slice(&lag.hidden()[proposal.caught_up * width..]);
                    let tokens = &lag.tokens()[proposal.caught_up..];
                    assert!(!tokens.is_empty(), "a draft begins with the row after which it is made");
                    (cache.len() - tokens.len(), tokens, lag.rows_of_round())
                } else {
                    (cache.len() + pass - 1, &proposal.drafts[pass - 1..], 0..0)
                };
                let draws: &[Draw] = if proposal.draws.is_some() { &[Draw::GREATEST] } else { &[] };
                rows.push(Rows { first, draws, at, of_round, ..Rows::after(cache, tokens) });
            }
            if !input.is_empty() {
                self.write_draft_input(&input)?;
            }
            if let Some(passes) = &mut passes {
                self.submit_pass(Outcome::Draft, &rows, passes)?;
                self.keep_drafts(pass, active.len())?;
                // Token 0 stands for each draft until it is known.
                active.iter().for_each(|&i| proposals[i].drafts.push(0));
                continue;
            }
            let drawn = self.run_and_draw(StepKind::decode(Outcome::Draft), &rows, active.len())?;
            for (row, &i) in active.iter().enumerate() {
                let draft = if proposals[i].draws.is_some() {
                    drawn[row]
                } else {
                    let drafted = self.with_logits_row(|engine, logits| {
                        engine.stepper.read_row_logits(row, &mut logits.values)?;
                        Ok::<_, EngineError>(batch[i].chooser.draft(logits))
                    })?;
                    drafted.unwrap_or_else(|error| {
                        // Its other drafts do not matter any more.
                        proposals[i].failure.get_or_insert(error);
                        0
                    })
                };
                proposals[i].drafts.push(draft);
            }
            self.costs.note_draft(active.len(), start.elapsed().as_secs_f64());
        }
        batch.iter_mut().for_each(|sequence| sequence.chooser.retract());
        Ok(())
    }
}
