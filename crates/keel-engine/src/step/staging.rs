//! Buffers that the host fills before a step.

use std::ops::Range;

use keel_array::sampling::Draw;
use keel_array::{Array, Batch, Category, DType, ElementCopy, Regime, Runtime, copy_all};
use keel_cache::SequenceCache;
use keel_models::HybridModel;
use keel_models::blocks::RopePositions;

use super::filling::Filling;
use super::{Buckets, StepShape};
use crate::Result;
use crate::options::EngineOptions;

/// The rows of one sequence in a step.
pub(crate) struct Rows<'a> {
    pub sequence: &'a SequenceCache,
    pub tokens: &'a [u32],
    /// Position of the first row.
    pub first: usize,
    /// The token after the last row, where it is known. The MTP (multi-token-prediction) head reads it.
    pub next: Option<u32>,
    /// How the device draws the token after a decode step, or after each of its open rows. Empty if the host draws.
    pub draws: &'a [Draw],
    /// How many open rows of the step before stay. This step commits them.
    pub accepted: usize,
    pub at: TokensAt,
    /// For a pass of the MTP head: where the hidden states of the last rows are among those that rounds leave on the
    /// device ([`MtpStaging::place_of_round`]). The host writes those of the rows before them.
    pub of_round: Range<usize>,
}

/// Where the tokens of a sequence's rows come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokensAt {
    /// The host writes them.
    Host,
    /// The only token is in the pool, at this place ([`Staging::place`]): a step under way draws it.
    Pool(usize),
    /// The last pass of the MTP head has drawn the only token, in the same row. So it is for all rows of the step.
    MtpHead,
    /// The host writes the first token. The others are in the pool: passes of the MTP head drew them, in this row.
    Drafts(usize),
}

impl<'a> Rows<'a> {
    /// Rows after the tokens that the sequence holds.
    pub fn after(sequence: &'a SequenceCache, tokens: &'a [u32]) -> Rows<'a> {
        let (first, accepted) = (sequence.offset(), sequence.accepted());
        Rows { sequence, tokens, first, next: None, draws: &[], accepted, at: TokensAt::Host, of_round: 0..0 }
    }

    /// The positions of the rows in the sequence.
    pub fn positions(&self) -> Range<usize> {
        self.first..self.first + self.tokens.len()
    }
}

/// The buffers, for the largest step.
pub(super) struct Staging {
    /// Tokens of the rows of a step. A pass of the MTP head leaves the tokens that it drew here, for its next pass.
    pub tokens: Array,
    /// Tokens for the rows of a decode step, u32 `[decode rows + sequences + prompts + drafts sequences]`. In order:
    /// the tokens that the host writes; those of the last decode step; those of the last step of prompts; the drafts of
    /// each pass of the MTP head.
    pool: Array,
    /// The place in the pool of each decode row's token, u32 `[decode rows]`.
    source: Array,
    sequences: usize,
    prompts: usize,
    pub positions: Array,
    /// Rotary positions, where long sequences use other frequencies.
    rope_positions: Option<RopePositions>,
    row_start: Array,
    slot: Array,
    position: Array,
    table: Array,
    /// The page table of sliding layers; `table` itself where there are none.
    window_table: Array,
    accepted: Array,
    pub last_rows: Array,
    /// How tokens are drawn, f32 `[decode rows, 5]`: one row for each sequence, or for each open row.
    pub draws: Array,
    pub head: Option<MtpStaging>,
}

/// Input of the MTP head, where sequences draft.
pub(super) struct MtpStaging {
    /// The token after each row of a prompt, u32 `[prefill rows]`.
    pub next_tokens: Array,
    /// Hidden states for the rows of the head's own passes, f32 `[head rows + 2 decode rows, hidden]`. The first part
    /// holds those that the host writes. A drafting pass leaves the last row of each sequence there. The second part
    /// holds those of the rows of two rounds.
    pub hidden: Array,
    /// The place in `hidden` of the input of each row, u32 `[head rows]`.
    source: Array,
}

impl MtpStaging {
    /// Hidden states for the rows of a pass.
    pub fn input(&self, rows: usize) -> Result<Array> {
        Ok(self.hidden.take(&self.source.prefix(rows)?)?)
    }

    /// The place in `hidden` of row `row` of those of two rounds.
    pub fn place_of_round(&self, row: usize) -> usize {
        self.source.shape()[0] + row
    }

    /// The place of each row's hidden state.
    fn fill(&self, rows: &[Rows<'_>], shape: StepShape, filling: &mut Filling) {
        let (mut source, mut written) = (Vec::with_capacity(shape.rows), 0..);
        for row in rows {
            source.extend(written.by_ref().take(row.tokens.len() - row.of_round.len()));
            source.extend(row.of_round.clone().map(|row| self.place_of_round(row) as u32));
        }
        filling.add(&self.source, padded(source, shape.rows, 0));
    }
}

impl Staging {
    pub fn allocate(
        runtime: &Runtime,
        model: &HybridModel,
        options: &EngineOptions,
        buckets: &Buckets,
    ) -> Result<Staging> {
        let pages_per_sequence = options.cache_size().pages_per_sequence();
        let prefill_rows = buckets.prefill_rows_max();
        let sequences = options.sequences;
        let rows = prefill_rows.max(options.decode_rows()).max(options.mtp_rows());
        let input = |shape: &[usize], dtype| Array::persistent(runtime, Category::Staging, shape, dtype);
        let table = input(&[sequences, pages_per_sequence], DType::U32)?;
        let window_table = match model.config.window {
            None => table.clone(),
            Some(_) => input(&[sequences, pages_per_sequence], DType::U32)?,
        };
        let rope_positions = match model.config.short_context() {
            None => None,
            Some(_) => {
                Some(RopePositions { short: input(&[rows], DType::I32)?, long: input(&[rows], DType::I32)? })
            }
        };
        let head = match model.part.is_last() && options.drafts > 0 {
            false => None,
            true => Some(MtpStaging {
                next_tokens: input(&[prefill_rows], DType::U32)?,
                hidden: input(
                    &[options.mtp_rows() + 2 * options.decode_rows(), model.config.hidden],
                    DType::F32,
                )?,
                source: input(&[options.mtp_rows()], DType::U32)?,
            }),
        };
        Ok(Staging {
            tokens: input(&[rows], DType::U32)?,
            pool: input(
                &[options.decode_rows() + buckets.prompts() + (1 + options.drafts) * sequences],
                DType::U32,
            )?,
            source: input(&[options.decode_rows()], DType::U32)?,
            sequences,
            prompts: buckets.prompts(),
            positions: input(&[rows], DType::I32)?,
            rope_positions,
            row_start: input(&[sequences + 1], DType::U32)?,
            slot: input(&[sequences], DType::U32)?,
            position: input(&[sequences], DType::U32)?,
            table,
            window_table,
            accepted: input(&[sequences], DType::U32)?,
            last_rows: input(&[sequences], DType::U32)?,
            draws: input(&[options.decode_rows(), Draw::WORDS], DType::F32)?,
            head,
        })
    }

    /// Rotary positions of the rows, where long sequences use other frequencies.
    pub fn rope_positions(&self, rows: usize) -> Result<Option<RopePositions>> {
        let Some(positions) = &self.rope_positions else { return Ok(None) };
        Ok(Some(RopePositions { short: positions.short.prefix(rows)?, long: positions.long.prefix(rows)? }))
    }

    /// The batch of a step of `sequences` sequences, and the same for sliding layers.
    pub fn batches(&self, sequences: usize) -> Result<(Batch, Batch)> {
        let batch = Batch {
            row_start: self.row_start.prefix(sequences + 1)?,
            slot: self.slot.prefix(sequences)?,
            position: self.position.prefix(sequences)?,
            table: self.table.prefix(sequences)?,
            accepted: self.accepted.prefix(sequences)?,
        };
        let window_batch = Batch { table: self.window_table.prefix(sequences)?, ..batch.clone() };
        Ok((batch, window_batch))
    }

    /// The tokens that the rows of a step of this shape run.
    pub fn tokens_of(&self, shape: StepShape) -> Result<Array> {
        if shape.is_pooled() {
            return Ok(self.pool.take(&self.source.prefix(shape.rows)?)?);
        }
        Ok(self.tokens.prefix(shape.rows)?)
    }

    /// The place in the pool of the token that row `row` of a step draws.
    pub fn place(&self, regime: Regime, row: usize) -> usize {
        let decoded = self.source.shape()[0];
        match regime {
            Regime::Decode => decoded + row,
            Regime::Prefill => decoded + self.sequences + row,
        }
    }

    /// The place in the pool of the draft that row `row` of pass number `pass` of the MTP head makes.
    fn place_of_draft(&self, pass: usize, row: usize) -> usize {
        self.place(Regime::Prefill, self.prompts) + pass * self.sequences + row
    }

    /// Copies the drafts of the first `rows` rows of the last pass of the MTP head, number `pass`, to the pool.
    pub fn keep_drafts(&self, pass: usize, rows: usize) -> Result<()> {
        let to = self.place_of_draft(pass, 0);
        Ok(copy_all(&[ElementCopy { source: &self.tokens, from: 0, target: &self.pool, to, count: rows }])?)
    }

    /// The pool entries in which the first `rows` rows of a step put their tokens.
    pub fn drawn(&self, regime: Regime, rows: usize) -> Result<Array> {
        Ok(self.pool.entries(self.place(regime, 0), rows)?)
    }

    /// The host's tokens for the pool, and each decode row's place in it.
    fn for_pool(&self, rows: &[Rows<'_>], shape: StepShape, filling: &mut Filling) {
        let tokens: Vec<u32> = rows.iter().flat_map(|row| row.tokens).copied().collect();
        let all = rows.iter().flat_map(|row| (0..row.tokens.len()).map(|i| (row.at, i)));
        let place = |(row, (at, i)): (usize, (TokensAt, usize))| match at {
            TokensAt::Pool(place) => place,
            TokensAt::Drafts(of) if i > 0 => self.place_of_draft(i - 1, of),
            _ => row,
        };
        let mut source: Vec<u32> = all.enumerate().map(|row| place(row) as u32).collect();
        source.extend(source.len() as u32..shape.rows as u32);
        filling.add(&self.pool, padded(tokens, shape.rows, 0));
        filling.add(&self.source, source);
    }

    /// The contents of the buffers for the rows of a step of this shape. The step draws a token after each row if
    /// `draws_rows`, else after each sequence. Padding belongs to no sequence.
    pub fn filling(&self, rows: &[Rows<'_>], shape: StepShape, draws_rows: bool) -> Filling {
        let mut filling = Filling::default();
        let pages = self.table.shape()[1];
        let (mut tokens, mut next_tokens, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        let (mut row_start, mut last_rows) = (vec![0u32], Vec::new());
        let (mut slots, mut firsts, mut accepted) = (Vec::new(), Vec::new(), Vec::new());
        let mut table = Vec::with_capacity(shape.sequences * pages);
        for row in rows {
            let Rows { sequence, tokens: ids, first, next, accepted: open, .. } = row;
            tokens.extend_from_slice(ids);
            next_tokens.extend(ids.iter().skip(1).copied().chain([next.unwrap_or_default()]));
            positions.extend(row.positions().map(|token| sequence.position_of(token)[0]));
            row_start.push(tokens.len() as u32);
            last_rows.push((tokens.len() as u32).saturating_sub(1));
            slots.push(sequence.slot().0);
            firsts.push(*first as u32);
            accepted.push(*open as u32);
            table.extend(sequence.pages().iter().map(|page| page.0));
            table.resize(row_start.len().saturating_sub(1) * pages, 0);
        }
        if shape.is_pooled() {
            self.for_pool(rows, shape, &mut filling);
        } else if rows.iter().all(|row| row.at == TokensAt::Host) {
            filling.add(&self.tokens, padded(tokens, shape.rows, 0));
        }
        filling.add(&self.positions, padded(positions, shape.rows, 0));
        self.for_turns(rows, &mut filling);
        let end = row_start.last().copied().unwrap_or_default();
        filling.add(&self.row_start, padded(row_start, shape.sequences + 1, end));
        filling.add(&self.slot, padded(slots, shape.sequences, Batch::NO_SLOT));
        filling.add(&self.position, padded(firsts, shape.sequences, 0));
        filling.add(&self.table, padded(table, shape.sequences * pages, 0));
        filling.add(&self.accepted, padded(accepted, shape.sequences, 0));
        self.for_windows(rows, &mut filling);
        filling.add(&self.last_rows, padded(last_rows, shape.sequences, 0));
        let mut words = Vec::new();
        for row in rows {
            let count = if draws_rows { row.tokens.len() } else { 1 };
            let of = |i: usize| row.draws.get(i).map_or(Draw::NOTHING, Draw::words);
            words.extend((0..count).map(of));
        }
        let drawn = if draws_rows { shape.rows } else { shape.sequences };
        filling.add(&self.draws, padded(words, drawn, Draw::NOTHING).concat());
        // A step of prompts passes the head, too.
        if let Some(head) = self.head.as_ref().filter(|_| shape.regime == Regime::Prefill) {
            filling.add(&head.next_tokens, padded(next_tokens, shape.rows, 0));
        }
        if let Some(head) = self.head.as_ref().filter(|_| shape.reads_hidden()) {
            head.fill(rows, shape, &mut filling);
        }
        filling
    }

    /// The rotary positions: a row's position for the frequencies of its sequence, 0 for the other frequencies.
    fn for_turns(&self, rows: &[Rows<'_>], filling: &mut Filling) {
        let Some(positions) = &self.rope_positions else { return };
        let (mut short, mut long) = (Vec::new(), Vec::new());
        for row in rows {
            let (own, other) =
                if row.sequence.is_long() { (&mut long, &mut short) } else { (&mut short, &mut long) };
            own.extend(row.positions().map(|position| position as i32));
            other.resize(own.len(), 0);
        }
        filling.add(&positions.short, short);
        filling.add(&positions.long, long);
    }

    /// The page tables of sliding layers, whose pages rotate.
    fn for_windows(&self, rows: &[Rows<'_>], filling: &mut Filling) {
        let entries = self.table.shape()[1];
        if rows.iter().all(|r| r.sequence.sliding_pages().is_empty()) {
            return;
        }
        let table: Vec<u32> = rows
            .iter()
            .flat_map(|r| r.sequence.sliding_pages().iter().map(|page| page.0).cycle().take(entries))
            .collect();
        filling.add(&self.window_table, table);
    }
}

/// Extends the entries to `count` with `nothing`.
fn padded<T: Clone>(mut entries: Vec<T>, count: usize, nothing: T) -> Vec<T> {
    entries.resize(count.max(entries.len()), nothing);
    entries
}
