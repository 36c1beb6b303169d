//! Fills weights with the rows of layers: one layer or a stack of experts, whole or in parts of their columns.

use std::ops::Range;
use std::sync::atomic::Ordering;

use keel_array::{RowData, Weight, WeightFormat, WeightSpec};

use super::assembler::RowAssembler;
use super::{BLOCK_ROWS, Loader, RowSink, SourceRows};
use crate::split::columns::{Columns, pick_columns};
use crate::{ModelError, Result};

impl Loader<'_> {
    /// A token embedding, an output head, or both in one. Steps of many sequences do not round their logits to 8 bits.
    ///
    /// # Errors
    /// As [`Loader::linear`].
    pub(crate) fn vocabulary(&self, source: SourceRows, cols: usize) -> Result<Weight> {
        let mut loader = self.reading(self.parameters);
        loader.compute = self.compute.without_copy();
        loader.linear(source, cols)
    }

    /// A stack of layers of `cols` columns, in `parts` weights of equally many columns.
    pub(super) fn stack_in_parts(
        &self,
        experts: &[Vec<SourceRows>],
        cols: usize,
        parts: usize,
        format: WeightFormat,
    ) -> Result<Vec<Weight>> {
        let rows = experts.first().map_or(0, |sources| sources.iter().map(SourceRows::len).sum());
        let (count, cols) = (experts.len(), cols / parts);
        let spec = WeightSpec { experts: count, rows, cols, format, compute: self.compute };
        let allocate = |_| Weight::allocate(self.runtime, spec);
        let weights: Vec<Weight> = (0..parts).map(allocate).collect::<keel_array::Result<_>>()?;
        if !self.runtime.backend().is_planning() && !self.repeated(&weights, experts)? {
            for (expert, sources) in experts.iter().enumerate() {
                self.fill(&weights, expert, sources)?;
            }
        }
        weights.iter().for_each(|weight| (self.progress)(weight.bytes() as u64));
        Ok(weights)
    }

    /// Fills weights by repeating their first block. False if rows are not alike or the device cannot repeat them.
    fn repeated(&self, weights: &[Weight], experts: &[Vec<SourceRows>]) -> Result<bool> {
        let first = experts.first().and_then(|sources| sources.first());
        let Some(source) = first.filter(|_| self.parameters.rows_are_alike()) else { return Ok(false) };
        let Some(rows) = weights.first().map(|weight| weight.spec().rows.min(BLOCK_ROWS)) else {
            return Ok(false);
        };
        let mut parts: Vec<_> = weights.iter().map(|weight| RowAssembler::new(weight, 0)).collect();
        self.read_rows(source, 0..rows, weights, &mut parts)?;
        parts.iter_mut().try_for_each(RowAssembler::flush)?;
        Ok(weights.iter().all(|weight| weight.repeat(rows)))
    }

    /// Fills one expert of weights that have equally many columns of the same rows. Each row is read once.
    fn fill(&self, weights: &[Weight], expert: usize, sources: &[SourceRows]) -> Result<()> {
        let mut parts: Vec<_> = weights.iter().map(|weight| RowAssembler::new(weight, expert)).collect();
        for source in sources {
            for range in &source.rows {
                self.read_rows(source, range.clone(), weights, &mut parts)?;
            }
            // A device may hold only some experts of a stack. Its last one is the last of the weight.
            let is_last = weights.first().is_none_or(|weight| expert + 1 == weight.spec().experts);
            if source.stored.experts.is_none() || is_last {
                self.parameters.release(&source.module);
            }
        }
        parts.iter_mut().try_for_each(RowAssembler::flush)
    }

    /// Passes rows to the weights that have their columns.
    fn read_rows(
        &self,
        source: &SourceRows,
        rows: Range<usize>,
        weights: &[Weight],
        parts: &mut [RowAssembler<'_>],
    ) -> Result<()> {
        let Some(part) = weights.first().map(|weight| *weight.spec()) else { return Ok(()) };
        let whole = WeightSpec { cols: part.cols * weights.len(), ..part };
        let tiles = self.parameters.column_tiles(&source.module);
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
        self.parameters.linear_rows(&source.module, source.expert, rows, &whole, sink)
    }
}
