//! One round of a batch: the last token of each sequence and its drafts, if it makes any.
//!
//! A round is a transaction. Until all its tokens are chosen, every change can be taken back:
//!
//! - The pass of the model leaves its rows open. (Without a log it commits them. Then a failed pass may tear
//!   sequences.)
//! - The MTP head's next pass overwrites the rows that this pass wrote.
//! - Choosers remember their state at the start.
//!
//! Then positions, rows that the head lags behind and counters move on. That cannot fail.

use std::time::{Duration, Instant};

use keel_array::Regime;
use keel_array::sampling::Draw;
use keel_cache::SequenceCache;

use super::choose::{Chooser, Draft};
use super::passes::Passes;
use super::{Costs, Speculation};
use crate::batch::MASK_PATIENCE;
use crate::engine::in_flight::StepTime;
use crate::step::{Outcome, Rows, StepKind, TokensAt};
use crate::{Engine, EngineError, Result};

/// One sequence of a round.
pub struct RoundSequence<'a> {
    /// Its memory.
    pub cache: &'a mut SequenceCache,
    /// Its drafts, if it makes any. The engine must have been made with drafts.
    pub speculation: Option<&'a mut Speculation>,
    /// How it chooses tokens.
    pub chooser: &'a mut dyn Chooser,
    /// The token drawn last. It has not been run.
    pub last: u32,
    /// How many tokens it may still be given, at least one.
    pub tokens_max: usize,
}

/// The result of a round for one sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// The new tokens, at least one. The last one has not been run. A token that ends the sequence is included.
    pub tokens: Vec<u32>,
    /// Whether the sequence ends with them.
    pub is_last: bool,
}

/// How long the parts of a round took.
#[derive(Clone, Copy, Default)]
pub(super) struct RoundTimes {
    pub drafting: Duration,
    pub verifying: Duration,
    pub choosing: Duration,
}

/// The drafts of a round for one sequence, if it makes any, with their rows in its passes.
#[derive(Default)]
pub(super) struct Proposal {
    /// How many drafts to make.
    pub depth: usize,
    /// The drafts.
    pub drafts: Vec<u32>,
    /// Its row in passes of the MTP head.
    pub row: usize,
    /// Its first row in the pass of the model.
    pub open_row: usize,
    /// How the pass of the model draws a token after each row; `None` if the chooser reads the logits.
    pub draws: Option<Vec<Draw>>,
    /// How many rows, which the head lagged behind, were run in a pass of their own.
    pub caught_up: usize,
    /// Why its chooser cannot go on. The round goes on for the others.
    pub failure: Option<EngineError>,
    /// Whether the round named the last of the tokens after those rows.
    was_named: bool,
}

impl Engine {
    /// Drafts, verifies and accepts for all sequences of a batch, each at its own depth. A sequence without drafts
    /// takes part with one row. Before a sequence that drafts sits out, it needs [`Engine::fetch_lags`].
    ///
    /// After an error each sequence is as before the round, except that it may hold more pages. A retried round chooses
    /// the same tokens. A sequence whose chooser fails gets an error of its own; its rows are taken back, or without a
    /// log its last token counts as run. A sequence that cannot go on answers [`keel_cache::CacheError::TornState`]:
    /// its state has moved and there is no log, or the backend did not know how far a pass of the model came.
    ///
    /// # Errors
    /// Ids out of range, [`EngineError::Context`] if not even one more token fits, errors of the runtime. Of one
    /// sequence: errors of its constraint.
    pub fn round(&mut self, batch: &mut [RoundSequence<'_>]) -> Result<Vec<Result<Round>>> {
        if batch.is_empty() || batch.len() > self.options.sequences {
            let (count, most) = (batch.len(), self.options.sequences);
            return Err(EngineError::Option(format!("a round of {count} sequences, not 1 to {most}")));
        }
        for sequence in batch.iter_mut() {
            self.admit(sequence.cache, &[sequence.last])?;
            self.finish_commit(sequence.cache)?;
        }
        let mut proposals = self.proposals(batch);
        for (sequence, proposal) in batch.iter_mut().zip(&proposals) {
            self.cache.reserve(sequence.cache, proposal.depth + 1)?;
        }
        for (sequence, proposal) in batch.iter_mut().zip(&mut proposals) {
            sequence.chooser.begin();
            proposal.draws = self.draws_of(&mut *sequence.chooser, proposal.depth + 1);
            if let Some(speculation) = &mut sequence.speculation {
                proposal.was_named = speculation.lag.name_last(sequence.last);
            }
        }
        match self.run_round(batch, &mut proposals) {
            Ok((judged, times)) => {
                let rows =
                    batch.len() + proposals.iter().map(|proposal| proposal.drafts.len()).sum::<usize>();
                // Choosing takes longer the more rows there are.
                let seconds = (times.verifying + times.choosing).as_secs_f64();
                self.costs.note_pass(rows, batch.len(), seconds);
                self.costs.note_round(rows == batch.len());
                share_times(batch, &proposals, times);
                let is_open = self.leaves_open();
                let all = batch.iter_mut().zip(&proposals).zip(judged);
                let (kept, costs) = ((self.kept_rounds, self.round_place(self.kept_rounds)), &mut self.costs);
                Ok(all
                    .map(|((sequence, proposal), round)| {
                        sequence.move_on(proposal, round, is_open, kept, costs)
                    })
                    .collect())
            }
            Err(error) => {
                batch.iter_mut().zip(&proposals).for_each(|(sequence, proposal)| sequence.abandon(proposal));
                Err(error)
            }
        }
    }

    /// Chooses the depth of each sequence: the choice of its control, within the rest of the sequence and of the
    /// context.
    fn proposals(&self, batch: &[RoundSequence<'_>]) -> Vec<Proposal> {
        let sequences = batch.len();
        batch
            .iter()
            .map(|s| {
                let most = self.drafts_max(&*s.chooser, self.room_of(s.cache), s.tokens_max);
                let depth = s.speculation.as_ref().map_or(0, |speculation| {
                    speculation.control.choose(&self.costs, sequences, most, speculation.lag_after(0), 0)
                });
                Proposal { depth, ..Proposal::default() }
            })
            .collect()
    }

    /// How many drafts a sequence may make that has room for `room` tokens and may still be given `tokens_max`.
    fn drafts_max(&self, chooser: &dyn Chooser, room: usize, tokens_max: usize) -> usize {
        let most = room.min(tokens_max).saturating_sub(1);
        if chooser.can_draft() { self.options.drafts.min(most) } else { 0 }
    }

    /// Whether a sequence would make drafts in a round of `sequences` sequences after `ahead` steps under way, each
    /// with one row of it. It has [`room`](Engine::room_of) for `room` tokens and may still be given `tokens_max`,
    /// these steps not counted. Until it makes drafts, steps may run ahead.
    pub(crate) fn wants_drafts(
        &self,
        speculation: &Speculation,
        chooser: &dyn Chooser,
        room: usize,
        tokens_max: usize,
        sequences: usize,
        ahead: usize,
    ) -> bool {
        let [room, tokens_max] = [room, tokens_max].map(|tokens| tokens.saturating_sub(ahead));
        let most = self.drafts_max(chooser, room, tokens_max);
        let lag = speculation.lag_after(ahead);
        speculation.control.choose(&self.costs, sequences, most, lag, ahead) > 0
    }

    /// Records the time of a plain step of `answers` sequences that ran ahead.
    pub(crate) fn note_plain_time(&mut self, answers: usize, time: StepTime) {
        if self.options.drafts == 0 {
            return;
        }
        match time {
            StepTime::Known(time) => {
                self.costs.note_pass(answers, answers, time.as_secs_f64());
                self.costs.note_round(true);
            }
            StepTime::AtMost(time) => self.costs.note_plain_bound(answers, time.as_secs_f64()),
        }
    }

    /// Returns how the device draws the token after each of `rows` rows, or `None` if the host needs the logits. The
    /// device draws greedy tokens, and those of a row without drafts. After drafts it draws others too if it queues:
    /// reading logits then costs the host more than worse drafts do.
    ///
    /// The MTP head then proposes one certain token, so exact rejection sampling reduces to: draw from the model's
    /// distribution, keep the draft if the draw equals it. The text is therefore the same as without drafts.
    fn draws_of(&self, chooser: &mut dyn Chooser, rows: usize) -> Option<Vec<Draw>> {
        let first = chooser.draw_next()?;
        if rows > 1 && first != Draw::GREATEST && !self.runs_ahead() {
            chooser.forget_draws(1);
            return None;
        }
        std::iter::once(Some(first)).chain((1..rows).map(|_| chooser.draw_next())).collect()
    }

    /// Does everything in a round that may fail for all.
    fn run_round(
        &mut self,
        batch: &mut [RoundSequence<'_>],
        proposals: &mut [Proposal],
    ) -> Result<(Vec<Result<Round>>, RoundTimes)> {
        self.ready_lags(batch, proposals)?;
        for (sequence, proposal) in batch.iter_mut().zip(proposals.iter_mut()) {
            if let Some(speculation) = sequence.speculation.as_deref_mut() {
                proposal.caught_up = self.catch_up(sequence.cache, speculation, proposal.depth)?;
            }
        }
        let mut times = RoundTimes::default();
        let verified = if self.queues_passes(proposals) {
            self.run_queued(batch, proposals, &mut times)?
        } else {
            let start = Instant::now();
            self.draft(batch, proposals, None)?;
            times.drafting = start.elapsed();
            let start = Instant::now();
            let verified = self.verify(batch, proposals, None)?;
            times.verifying = start.elapsed();
            verified
        };
        let start = Instant::now();
        let judged = verified.and_then(|drawn| self.judge(batch, proposals, &drawn));
        // The verify pass has committed the rows of the round before.
        let judged =
            judged.inspect_err(|_| self.note_lost(batch.iter_mut().map(|sequence| &mut *sequence.cache)))?;
        self.kept_rounds += u64::from(is_drafting(batch));
        times.choosing = start.elapsed();
        Ok((judged, times))
    }

    /// Runs the last token of each sequence and its drafts, and keeps the hidden states of these rows if sequences
    /// draft. Returns the tokens that the device drew after them. With `passes` they are only submitted. The outer
    /// error says that the pass has failed, the inner one that its results could not be kept or read.
    pub(super) fn verify(
        &mut self,
        batch: &[RoundSequence<'_>],
        proposals: &[Proposal],
        passes: Option<&mut Passes>,
    ) -> Result<Result<Vec<u32>>> {
        let tokens: Vec<Vec<u32>> = batch
            .iter()
            .zip(proposals)
            .map(|(s, proposal)| [&[s.last][..], &proposal.drafts].concat())
            .collect();
        let rows = batch.iter().zip(&tokens).zip(proposals).map(|((s, tokens), proposal)| Rows {
            draws: proposal.draws.as_deref().unwrap_or(&[]),
            at: if passes.is_some() { TokensAt::Drafts(proposal.row) } else { TokensAt::Host },
            ..Rows::after(s.cache, tokens)
        });
        let rows: Vec<Rows<'_>> = rows.collect();
        let count = tokens.iter().map(Vec::len).sum();
        if let Some(passes) = passes {
            self.submit_pass(Outcome::OpenRows, &rows, passes)?;
            return Ok(self.keep_verified(batch, count).map(|()| Vec::new()));
        }
        // Where the engine drafts, each row gives its hidden state and a token.
        let outcome = if self.options.drafts > 0 { Outcome::OpenRows } else { Outcome::LastLogits };
        // A backend that queues is waited for in any case, because the results are read without a further wait.
        let is_host = proposals.iter().all(|proposal| proposal.draws.is_none());
        let drawn = if is_host && !self.runtime().backend().is_queueing() {
            self.run(Regime::Decode, outcome, &rows).map(|()| Ok(Vec::new()))?
        } else {
            self.run_then_read(StepKind::decode(outcome), &rows, count)?
        };
        Ok(drawn.and_then(|drawn| self.keep_verified(batch, count).map(|()| drawn)))
    }

    /// Keeps the hidden states of the `rows` rows of the verify pass that was submitted last, if sequences draft. Those
    /// of the last round stay.
    fn keep_verified(&mut self, batch: &[RoundSequence<'_>], rows: usize) -> Result<()> {
        match is_drafting(batch) {
            true => self.keep_round_hidden(self.round_place(self.kept_rounds + 1), rows),
            false => Ok(()),
        }
    }

    /// Chooses the tokens of each sequence. An error says that results could not be read.
    fn judge(
        &mut self,
        batch: &mut [RoundSequence<'_>],
        proposals: &mut [Proposal],
        drawn: &[u32],
    ) -> Result<Vec<Result<Round>>> {
        let (mut all, mut row) = (Vec::with_capacity(batch.len()), 0);
        let until = Instant::now() + MASK_PATIENCE;
        for (sequence, proposal) in batch.iter_mut().zip(proposals.iter_mut()) {
            proposal.open_row = row;
            row += proposal.drafts.len() + 1;
            all.push(match proposal.failure.take() {
                Some(failure) => Err(failure),
                None => match self.choose_tokens(sequence, proposal, drawn, until) {
                    Ok(round) => round,
                    Err(error) if self.leaves_open() || self.can_take_back() => return Err(error),
                    // Without a log the state has moved on, so the round cannot be repeated.
                    Err(error) => Err(error),
                },
            });
        }
        Ok(all)
    }

    /// The tokens of one sequence, or the error of its chooser. `drawn` holds the tokens that the device drew after all
    /// rows. Masks are waited for until `until`.
    ///
    /// # Errors
    /// Logits could not be read.
    fn choose_tokens(
        &mut self,
        sequence: &mut RoundSequence<'_>,
        proposal: &Proposal,
        drawn: &[u32],
        until: Instant,
    ) -> Result<Result<Round>> {
        let (drafts, row) = (&proposal.drafts, proposal.open_row);
        let optimistic = sequence.speculation.as_ref().is_some_and(|s| s.options.optimistic)
            && sequence.chooser.may_go_unchecked();
        let (mut tokens, mut is_last) = (Vec::with_capacity(drafts.len() + 1), false);
        for i in 0..=drafts.len() {
            if i > 0 && !sequence.chooser.can_go_on(until.saturating_duration_since(Instant::now())) {
                // The last token equals its draft. The drafts after it are not judged.
                break;
            }
            let draft = drafts.get(i).copied();
            let choice = match draft {
                Some(draft) if optimistic => sequence.chooser.take(draft),
                _ if proposal.draws.is_some() => sequence.chooser.take(drawn[row + i]),
                _ => self.with_logits_row(|engine, logits| {
                    engine.stepper.read_row_logits(row + i, &mut logits.values)?;
                    let draft = draft.map(|token| Draft { index: i, token });
                    Ok::<_, EngineError>(sequence.chooser.choose(logits, draft))
                })?,
            };
            let choice = match choice {
                Ok(choice) => choice,
                Err(error) => return Ok(Err(error)),
            };
            tokens.push(choice.token);
            is_last = choice.is_last;
            if is_last || draft != Some(choice.token) {
                break;
            }
        }
        sequence.chooser.forget_draws(drafts.len() + 1 - tokens.len());
        Ok(Ok(Round { tokens, is_last }))
    }
}

impl RoundSequence<'_> {
    /// Applies the outcome of a round. `is_open` says that the round left its rows open. Where sequences draft, the
    /// device keeps the hidden states of its rows: those of round `kept.0`, from place `kept.1` on.
    fn move_on(
        &mut self,
        proposal: &Proposal,
        round: Result<Round>,
        is_open: bool,
        kept: (u64, usize),
        costs: &mut Costs,
    ) -> Result<Round> {
        let round = match round {
            Ok(round) => round,
            Err(error) => {
                // The pass has committed the rows of the round before.
                if is_open {
                    self.cache.accept(0);
                } else {
                    self.cache.advance(1);
                }
                self.abandon(proposal);
                return Err(error);
            }
        };
        let (given, drafted) = (round.tokens.len(), proposal.drafts.len());
        let accepted =
            round.tokens.iter().zip(&proposal.drafts).take_while(|(token, draft)| token == draft).count();
        if is_open {
            self.cache.accept(given);
        } else {
            self.cache.advance(given);
        }
        let Some(speculation) = &mut self.speculation else { return Ok(round) };
        let run_by_head = if drafted > 0 { speculation.lag_after(0) } else { proposal.caught_up };
        speculation.lag.forget(run_by_head);
        let (number, first) = kept;
        speculation.lag.push_round(number, first + proposal.open_row, &round.tokens);
        // A round that ended with a draft says nothing about later ones.
        let judged = if given == accepted { accepted } else { drafted };
        speculation.control.note(judged, accepted);
        costs.note_drafts(judged, accepted);
        speculation.counters.note_round(drafted, accepted, given);
        Ok(round)
    }

    /// Undoes the changes of a failed round.
    fn abandon(&mut self, proposal: &Proposal) {
        if let Some(speculation) = self.speculation.as_mut().filter(|_| proposal.was_named) {
            speculation.lag.unname_last();
        }
        self.chooser.abandon();
    }
}

/// Whether the rows of a round need their hidden states later: those of sequences that draft, now or in later rounds.
fn is_drafting(batch: &[RoundSequence<'_>]) -> bool {
    batch.iter().any(|sequence| sequence.speculation.is_some())
}

fn share_times(batch: &mut [RoundSequence<'_>], proposals: &[Proposal], times: RoundTimes) {
    let drafting = proposals.iter().filter(|proposal| proposal.depth > 0).count() as u32;
    let all = batch.len() as u32;
    for (sequence, proposal) in batch.iter_mut().zip(proposals) {
        let Some(Speculation { counters, .. }) = sequence.speculation.as_deref_mut() else { continue };
        if proposal.depth > 0 {
            counters.draft_time += times.drafting / drafting;
        }
        counters.verify_time += times.verifying / all;
        counters.commit_time += times.choosing / all;
    }
}
