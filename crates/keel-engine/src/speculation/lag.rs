//! Rows that the MTP (multi-token-prediction) head has not run yet, and where their hidden states are.
//!
//! ```text
//! device   rows of the verify pass ──copy──▶ rows of a round ──gather──▶ first pass of the head in the next round
//!                                              │ a sequence makes no drafts in the next round
//! host                                         └──read──▶ earlier rows ──write──▶ a later pass of the head
//! ```
//!
//! The hidden states of a round's rows are copied to a place of their own on the device, right after the verify pass.
//! There are two such places, so those of the last round stay until the next one has succeeded. If it fails, it can be
//! repeated. In the next round the head runs the rows of each sequence that drafts. Before that round, the host reads
//! the rows of the other sequences. So no row is lost.

use std::ops::Range;

use super::Speculation;
use super::round::{Proposal, RoundSequence};
use crate::options::{DRAFTS_MAX, MTP_LAG_MAX};
use crate::{Engine, EngineError, Result};

/// With more sequences, one read of all their rows is faster than a read for each sequence.
const READS_MAX: usize = 8;

/// Rows of a round whose hidden states the device alone has.
#[derive(Debug)]
struct RoundRows {
    /// The number of the round.
    round: u64,
    /// Where the device keeps them, in rows of those that rounds leave there.
    places: Range<usize>,
}

/// The rows that the head lags behind a sequence, the oldest first.
#[derive(Debug)]
pub(super) struct Lag {
    /// The tokens after the rows. The last one may be missing until a round names it.
    tokens: Vec<u32>,
    /// Hidden states of the first rows.
    hidden: Vec<f32>,
    /// Values in a hidden state.
    width: usize,
    /// The rows after those.
    of_round: Option<RoundRows>,
}

impl Lag {
    /// The most rows whose hidden states may wait on the host. Memory for them is reserved once.
    pub const ROWS_MAX: usize = 1 + MTP_LAG_MAX + DRAFTS_MAX;

    /// The last row of a prompt, with this hidden state.
    pub fn after_prompt(mut hidden: Vec<f32>) -> Lag {
        let width = hidden.len();
        hidden.reserve_exact((Lag::ROWS_MAX - 1) * width);
        Lag { tokens: Vec::new(), hidden, width, of_round: None }
    }

    /// The tokens after the rows.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The hidden states that are on the host: those of the first rows.
    pub fn hidden(&self) -> &[f32] {
        &self.hidden
    }

    /// Where the device keeps the hidden states of the last rows, if they are not on the host.
    pub fn rows_of_round(&self) -> Range<usize> {
        self.of_round.as_ref().map_or(0..0, |of_round| of_round.places.clone())
    }

    /// Sets the token after the prompt's last row, which only the first round knows. Returns whether it did.
    pub fn name_last(&mut self, last: u32) -> bool {
        let is_unknown = self.tokens.is_empty() && !self.hidden.is_empty();
        if is_unknown {
            self.tokens.push(last);
        }
        is_unknown
    }

    /// Takes the name of the prompt's last row back.
    pub fn unname_last(&mut self) {
        self.tokens.pop();
    }

    /// Adds a row whose hidden state is on the host.
    pub fn push(&mut self, hidden: &[f32], token: u32) {
        assert!(self.of_round.is_none(), "the rows of a round are read before a step runs ahead");
        self.hidden.extend_from_slice(hidden);
        self.tokens.push(token);
    }

    /// Adds rows of a round that gave these tokens. `first` is the place of the first one.
    pub fn push_round(&mut self, round: u64, first: usize, tokens: &[u32]) {
        assert!(self.of_round.is_none(), "the rows of the round before are run or read before this one ends");
        self.tokens.extend_from_slice(tokens);
        self.of_round = Some(RoundRows { round, places: first..first + tokens.len() });
    }

    /// Removes the first `rows` rows.
    pub fn forget(&mut self, rows: usize) {
        let on_host = (rows * self.width).min(self.hidden.len());
        self.hidden.drain(..on_host);
        self.tokens.drain(..rows);
        if let Some(of_round) = &mut self.of_round {
            let Range { start, end } = of_round.places;
            of_round.places.start = end.min(start + rows - on_host / self.width);
            self.of_round.take_if(|of_round| of_round.places.is_empty());
        }
    }

    /// Removes the last `rows` rows.
    pub fn take_back(&mut self, rows: usize) {
        self.tokens.truncate(self.tokens.len().saturating_sub(rows));
        self.hidden.truncate(self.tokens.len() * self.width);
        let on_host = self.hidden.len() / self.width;
        if let Some(of_round) = &mut self.of_round {
            of_round.places.end = of_round.places.start + self.tokens.len() - on_host;
            self.of_round.take_if(|of_round| of_round.places.is_empty());
        }
    }

    /// Moves rows of a round to the host, where `read` appends their hidden states.
    fn fetch(&mut self, read: impl FnOnce(Range<usize>, &mut Vec<f32>) -> Result<()>) -> Result<()> {
        read(self.rows_of_round(), &mut self.hidden)?;
        self.of_round = None;
        Ok(())
    }
}

impl Engine {
    /// Brings the hidden states that the head lags behind these sequences to the host. A sequence that sits out of a
    /// round needs it before the round, because the device keeps the hidden states of the last two rounds alone.
    ///
    /// # Errors
    /// If the device cannot be read, or it does not keep them any more.
    pub fn fetch_lags<'a>(&self, all: impl IntoIterator<Item = &'a mut Speculation>) -> Result<()> {
        let lags = all.into_iter().map(|speculation| &mut speculation.lag);
        let mut lags: Vec<&mut Lag> = lags.filter(|lag| lag.of_round.is_some()).collect();
        if !lags.iter().all(|lag| self.keeps(lag, 2)) {
            let reason =
                "hidden states of an earlier round are gone: call `fetch_lags` before the sequence sits out";
            return Err(EngineError::Option(reason.into()));
        }
        if lags.len() <= READS_MAX {
            let read = |rows, hidden: &mut Vec<f32>| self.stepper.append_round_hidden(rows, hidden);
            return lags.iter_mut().try_for_each(|lag| lag.fetch(read));
        }
        let places = lags.iter().map(|lag| lag.rows_of_round());
        let span = places.reduce(|span, of| span.start.min(of.start)..span.end.max(of.end));
        let Range { start, end } = span.unwrap_or_default();
        let mut values = Vec::new();
        self.stepper.append_round_hidden(start..end, &mut values)?;
        let width = self.model().config.hidden;
        let copy = |rows: Range<usize>, hidden: &mut Vec<f32>| {
            hidden.extend_from_slice(&values[(rows.start - start) * width..(rows.end - start) * width]);
            Ok(())
        };
        lags.iter_mut().try_for_each(|lag| lag.fetch(copy))
    }

    /// Whether the device keeps the rows of a round that the head lags behind, and it was one of the last `rounds`
    /// rounds. True if there are none.
    fn keeps(&self, lag: &Lag, rounds: u64) -> bool {
        lag.of_round.as_ref().is_none_or(|RoundRows { round, places }| {
            let end = self.round_place(*round) + self.options.decode_rows();
            *round <= self.kept_rounds && self.kept_rounds < round + rounds && places.end <= end
        })
    }

    /// Where the device keeps the hidden states of the first row of a round. Rounds take turns in two places.
    pub(super) fn round_place(&self, round: u64) -> usize {
        if round.is_multiple_of(2) { 0 } else { self.options.decode_rows() }
    }

    /// Brings hidden states to the host of sequences that make no drafts in this round, and those of the round before
    /// the last one: this round takes their place. The head runs the others in this round.
    pub(super) fn ready_lags(&self, batch: &mut [RoundSequence<'_>], proposals: &[Proposal]) -> Result<()> {
        let all = batch.iter_mut().zip(proposals).filter_map(|(sequence, proposal)| {
            let speculation = sequence.speculation.as_deref_mut()?;
            (proposal.depth == 0 || !self.keeps(&speculation.lag, 1)).then_some(speculation)
        });
        self.fetch_lags(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTH: usize = 2;

    /// A row on the host, before the token 1, and rows of a round, before the tokens 2 to 4. The device keeps these as
    /// rows 3 to 5.
    fn lag() -> Lag {
        let mut lag = Lag::after_prompt(vec![0.5; WIDTH]);
        assert!(lag.name_last(1) && !lag.name_last(1));
        lag.push_round(1, 3, &[2, 3, 4]);
        lag
    }

    fn standing(lag: &Lag) -> (Vec<u32>, usize, Range<usize>) {
        (lag.tokens().to_vec(), lag.hidden().len() / WIDTH, lag.rows_of_round())
    }

    #[test]
    fn rows_go_from_both_ends() {
        for (rows, rest) in
            [(0, (vec![1, 2, 3, 4], 1, 3..6)), (1, (vec![2, 3, 4], 0, 3..6)), (3, (vec![4], 0, 5..6))]
        {
            let mut lag = lag();
            lag.forget(rows);
            assert_eq!(standing(&lag), rest);
        }
        for (rows, rest) in
            [(0, (vec![1, 2, 3, 4], 1, 3..6)), (2, (vec![1, 2], 1, 3..4)), (3, (vec![1], 1, 0..0))]
        {
            let mut lag = lag();
            lag.take_back(rows);
            assert_eq!(standing(&lag), rest);
        }
        let mut lag = lag();
        lag.forget(4);
        assert_eq!(standing(&lag), (vec![], 0, 0..0));
        lag.push(&[0.25; WIDTH], 9);
        assert_eq!(standing(&lag), (vec![9], 1, 0..0));
    }

    #[test]
    fn rows_of_a_round_go_to_the_host() {
        let mut lag = lag();
        let refused = |_: Range<usize>, _: &mut Vec<f32>| Err(EngineError::NoMtpHead);
        lag.fetch(refused).expect_err("it cannot be read");
        assert_eq!(standing(&lag), (vec![1, 2, 3, 4], 1, 3..6));
        lag.fetch(|rows, hidden| {
            hidden.extend(rows.flat_map(|row| [row as f32; WIDTH]));
            Ok(())
        })
        .expect("it can be read");
        assert_eq!(lag.hidden(), [0.5, 0.5, 3.0, 3.0, 4.0, 4.0, 5.0, 5.0]);
        assert_eq!(standing(&lag), (vec![1, 2, 3, 4], 4, 0..0));
    }
}
