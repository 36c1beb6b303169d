//! Fills weights with the rows of layers: one layer or a stack of experts, whole or in parts of their columns.

use std::ops::Range;
use std::sync::atomic::Ordering;

use keel_array::{RowData, Weight, WeightFormat, WeightSpec};

use super::assembler::RowAssembler;
use super::{BLOCK_ROWS, Loader, Piece, RowSink};
use crate::split::columns::{Columns, pick_columns};
use crate::{ModelError, Result};

impl Loader<'_> {
    /// A token embedding, an output head, or both in one. Steps of many sequences do not round their logits to 8 bits.
    ///
    /// # Errors
    /// As [`Loader::linear`].
    pub(crate) fn vocabulary(&self, piece: Piece, cols: usize) -> Result<Weight> {
        let mut loader = self.reading(self.parameters);
        loader.compute = self.compute.without_copy();
        loader.linear(piece, cols)
    }

    /// A stack of layers of `cols` columns, in `parts` weights of equally many columns.
    pub(super) fn stack_in_parts(
        &self,
        experts: &[Vec<Piece>],
        cols: usize,
        parts: usize,
        format: WeightFormat,
    ) -> Result<Vec<Weight>> {
        let rows = experts.first().map_or(0, |pieces| pieces.iter().map(Piece::len).sum());
        let (count, cols) = (experts.len(), cols / parts);
        let spec = WeightSpec { experts: count, rows, cols, format, compute: self.compute };
        let allocate = |_| Weight::allocate(self.runtime, spec);
        let weights: Vec<Weight> = (0..parts).map(allocate).collect::<keel_array::Result<_>>()?;
        if !self.runtime.backend().is_planning() && !self.repeated(&weights, experts)? {
            for (expert, pieces) in experts.iter().enumerate() {
                self.fill(&weights, expert, pieces)?;
            }
        }
        weights.iter().for_each(|weight| (self.progress)(weight.bytes() as u64));
        Ok(weights)
    }

    /// Fills weights by repeating their first block. False if rows are not alike or the device cannot repeat them.
    fn repeated(&self, weights: &[Weight], experts: &[Vec<Piece>]) -> Result<bool> {
        let first = experts.first().and_then(|pieces| pieces.first());
        let Some(piece) = first.filter(|_| self.parameters.rows_are_alike()) else { return Ok(false) };
        let Some(rows) = weights.first().map(|weight| weight.spec().rows.min(BLOCK_ROWS)) else {
            return Ok(false);
        };
        let mut parts: Vec<_> = weights.iter().map(|weight| RowAssembler::new(weight, 0)).collect();
        self.read_rows(piece, 0..rows, weights, &mut parts)?;
        parts.iter_mut().try_for_each(RowAssembler::flush)?;
        Ok(weights.iter().all(|weight| weight.repeat(rows)))
    }

    /// Fills one expert of weights that have equally many columns of the same rows. Each row is read once.
    fn fill(&self, weights: &[Weight], expert: usize, pieces: &[Piece]) -> Result<()> {
        let mut parts: Vec<_> = weights.iter().map(|weight| RowAssembler::new(weight, expert)).collect();
        for piece in pieces {
            for range in &piece.rows {
                self.read_rows(piece, range.clone(), weights, &mut parts)?;
            }
            let last_of_stack = piece.stored.experts.is_none_or(|stack| piece.expert == Some(stack - 1));
            if last_of_stack {
                self.parameters.release(&piece.module);
            }
        }
        parts.iter_mut().try_for_each(RowAssembler::flush)
    }

    /// Passes rows to the weights that have their columns.
    fn read_rows(
        &self,
        piece: &Piece,
        rows: Range<usize>,
        weights: &[Weight],
        parts: &mut [RowAssembler<'_>],
    ) -> Result<()> {
        let Some(part) = weights.first().map(|weight| *weight.spec()) else { return Ok(()) };
        let whole = WeightSpec { cols: part.cols * weights.len(), ..part };
        let tiles = self.parameters.column_tiles(&piece.module);
        let sink: &mut RowSink<'_> = &mut |count, data: RowData<'_>| {
            if self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                return Err(ModelError::Stopped);
            }
            if let [only] = parts {
                return only.push(count, data);
            }
            for (i, assembler) in parts.iter_mut().enumerate() {
                let columns = Columns { tiles, index: i, count: weights.len() };
                pick_columns(count, data, &columns, &mut |count, data| assembler.push(count, data))?;
            }
            Ok(())
        };
        self.parameters.linear_rows(&piece.module, piece.expert, rows, &whole, sink)
    }
}
