//! Rows that the MTP (multi-token-prediction) head has not run yet, and where their hidden states are.
//!
//! ```text
//! device   rows of the verify pass ──copy──▶ rows of a round ──gather──▶ first pass of the head in the next round
//!                                              │ a sequence makes no drafts in the next round
//! host                                         └──read──▶ earlier rows ──write──▶ a later pass of the head
//! ```
//!
//! The hidden states of a round's rows are copied to a place of their own on the device, right after the verify pass.
//! There are two such places, so those of the round before stay until the round has succeeded. If it fails, it can be
//! repeated. In the next round the head runs the rows of each sequence that drafts. The host reads the rows of the
//! other sequences before that round ends. So no row is lost.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::Speculation;
use super::round::{Proposal, Round, RoundSequence};
use crate::options::{DRAFTS_MAX, MTP_LAG_MAX};
use crate::{Engine, EngineError, Result};

/// With more sequences, one read of all rows of a round is faster than a read for each sequence.
const READS_MAX: usize = 8;

/// The hidden states of the rows of a round. Until the host has read them, they are those that the device keeps.
#[derive(Debug)]
pub(crate) struct RoundHidden {
    /// Where the device keeps them, in rows of those that rounds leave there.
    place: Range<usize>,
    values: OnceLock<Vec<f32>>,
}

impl RoundHidden {
    fn at(place: Range<usize>) -> Arc<RoundHidden> {
        Arc::new(RoundHidden { place, values: OnceLock::new() })
    }
}

/// Rows of a round.
#[derive(Debug)]
struct RoundRows {
    round: Arc<RoundHidden>,
    rows: Range<usize>,
}

impl RoundRows {
    /// Where the device keeps them.
    fn place(&self) -> Range<usize> {
        let first = self.round.place.start;
        first + self.rows.start..first + self.rows.end
    }
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
        self.of_round.as_ref().map_or(0..0, RoundRows::place)
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

    /// Adds the rows of a round from `row` on that gave these tokens.
    pub fn push_round(&mut self, round: &Arc<RoundHidden>, row: usize, tokens: &[u32]) {
        assert!(self.of_round.is_none(), "the rows of the round before are run or read before this one ends");
        self.tokens.extend_from_slice(tokens);
        self.of_round = Some(RoundRows { round: Arc::clone(round), rows: row..row + tokens.len() });
    }

    /// Removes the first `rows` rows.
    pub fn forget(&mut self, rows: usize) {
        let on_host = (rows * self.width).min(self.hidden.len());
        self.hidden.drain(..on_host);
        self.tokens.drain(..rows);
        if let Some(of_round) = &mut self.of_round {
            of_round.rows.start = of_round.rows.end.min(of_round.rows.start + rows - on_host / self.width);
            self.of_round.take_if(|of_round| of_round.rows.is_empty());
        }
    }

    /// Removes the last `rows` rows.
    pub fn take_back(&mut self, rows: usize) {
        self.tokens.truncate(self.tokens.len().saturating_sub(rows));
        self.hidden.truncate(self.tokens.len() * self.width);
        let on_host = self.hidden.len() / self.width;
        if let Some(of_round) = &mut self.of_round {
            of_round.rows.end = of_round.rows.start + self.tokens.len() - on_host;
            self.of_round.take_if(|of_round| of_round.rows.is_empty());
        }
    }

    /// Moves rows of a round to the host, where `read` appends their hidden states.
    fn fetch(&mut self, read: impl FnOnce(Range<usize>, &mut Vec<f32>) -> Result<()>) -> Result<()> {
        let Some(of_round) = &self.of_round else { return Ok(()) };
        let RoundRows { round, rows } = of_round;
        match round.values.get() {
            Some(values) => {
                let values = &values[rows.start * self.width..rows.end * self.width];
                self.hidden.extend_from_slice(values);
            }
            None => read(of_round.place(), &mut self.hidden)?,
        }
        self.of_round = None;
        Ok(())
    }
}

impl Engine {
    /// Whether the device keeps hidden states that the head lags behind: those of the last round.
    fn is_on_device(&self, lag: &Lag) -> bool {
        let current = self.round_hidden.as_ref().zip(lag.of_round.as_ref());
        current.is_some_and(|(current, RoundRows { round, .. })| Arc::ptr_eq(current, round))
    }

    /// Brings the hidden states that the head lags behind these sequences to the host.
    pub(crate) fn fetch_lags<'a>(&self, all: impl IntoIterator<Item = &'a mut Speculation>) -> Result<()> {
        let lags: Vec<&mut Lag> = all.into_iter().map(|speculation| &mut speculation.lag).collect();
        if lags.iter().filter(|lag| self.is_on_device(lag)).count() > READS_MAX {
            self.read_round_hidden()?;
        }
        for lag in lags {
            let is_on_device = self.is_on_device(lag);
            lag.fetch(|rows, hidden| match is_on_device {
                true => self.stepper.append_round_hidden(rows, hidden),
                // Rows of earlier rounds of this engine were read when the next round ended.
                false => Err(EngineError::Option("the drafts belong to a round of another engine".into())),
            })?;
        }
        Ok(())
    }

    /// Reads all hidden states of the last round.
    fn read_round_hidden(&self) -> Result<()> {
        let unread = self.round_hidden.as_ref().filter(|round| round.values.get().is_none());
        let Some(round) = unread else { return Ok(()) };
        let mut values = Vec::new();
        self.stepper.append_round_hidden(round.place.clone(), &mut values)?;
        round.values.get_or_init(|| values);
        Ok(())
    }

    /// Prepares the hidden states that the MTP head needs for a round: those of rounds before the last one go to the
    /// host.
    pub(super) fn ready_lags(&self, batch: &mut [RoundSequence<'_>]) -> Result<()> {
        let all = batch.iter_mut().filter_map(|sequence| sequence.speculation.as_deref_mut());
        self.fetch_lags(all.filter(|speculation| !self.is_on_device(&speculation.lag)))
    }

    /// Where the device is to keep the hidden states of the rows of this round, if sequences draft. Those of the last
    /// round stay.
    pub(super) fn next_hidden(
        &self,
        batch: &[RoundSequence<'_>],
        proposals: &[Proposal],
    ) -> Option<Arc<RoundHidden>> {
        batch.iter().find(|sequence| sequence.speculation.is_some())?;
        let rows = proposals.iter().map(|proposal| proposal.depth + 1).sum::<usize>();
        let is_second = self.round_hidden.as_ref().is_some_and(|round| round.place.start == 0);
        let first = if is_second { self.options.decode_rows() } else { 0 };
        Some(RoundHidden::at(first..first + rows))
    }

    /// Keeps the hidden states of the rows of the verify pass that was submitted last, if sequences draft.
    pub(super) fn keep_verified(&mut self, hidden: Option<&RoundHidden>) -> Result<()> {
        let Some(RoundHidden { place, .. }) = hidden else { return Ok(()) };
        self.keep_round_hidden(place.start, place.len())
    }

    /// Makes the round that is about to end with these outcomes the last one; the device keeps its `hidden` states.
    /// Before that, the host reads the hidden states of the round before that a sequence still needs.
    pub(super) fn note_round_hidden(
        &mut self,
        batch: &mut [RoundSequence<'_>],
        proposals: &[Proposal],
        outcomes: &[Result<Round>],
        hidden: Arc<RoundHidden>,
    ) -> Result<()> {
        let (mut lagging, mut run_by_head) = (Vec::new(), 0);
        for ((sequence, proposal), outcome) in batch.iter_mut().zip(proposals).zip(outcomes) {
            let Some(speculation) = sequence.speculation.as_deref_mut() else { continue };
            if outcome.is_ok() && !proposal.drafts.is_empty() {
                run_by_head += usize::from(self.is_on_device(&speculation.lag));
            } else {
                lagging.push(speculation);
            }
        }
        self.fetch_lags(lagging)?;
        // Other sequences take no part in this round.
        if self.round_hidden.as_ref().is_some_and(|round| Arc::strong_count(round) > 1 + run_by_head) {
            self.read_round_hidden()?;
        }
        self.round_hidden = Some(hidden);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTH: usize = 2;

    /// A row on the host, before the token 1, and rows 1 to 3 of a round, before the tokens 2 to 4. The device keeps
    /// these as rows 3 to 5.
    fn lag() -> Lag {
        let mut lag = Lag::after_prompt(vec![0.5; WIDTH]);
        assert!(lag.name_last(1) && !lag.name_last(1));
        lag.push_round(&RoundHidden::at(2..10), 1, &[2, 3, 4]);
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
    fn rows_come_from_the_device_or_from_what_was_read() {
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

        let of_round = RoundHidden::at(2..10);
        lag.push_round(&of_round, 1, &[5, 6]);
        of_round.values.get_or_init(|| (0..8 * WIDTH).map(|i| i as f32).collect());
        lag.fetch(refused).expect("it was read before");
        assert_eq!(lag.hidden()[4 * WIDTH..], [2.0, 3.0, 4.0, 5.0]);
    }
}
