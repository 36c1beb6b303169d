//! Logits that the host reads while a later step runs.
//!
//! The next step overwrites the logits of a step. So where the host draws a token, the row's logits are copied to a
//! place of their own, by a program that follows the step's.

use keel_array::{Array, Category, DType, Regime, Runtime};

use super::StepShape;
use super::buckets::Buckets;
use super::results::read_settled_rows;
use crate::Result;

/// Rows of the kept logits: those of answers, then those of prompts.
pub(super) struct KeptLogits {
    /// Which rows of the logits are kept, u32 `[2 host rows]`.
    rows: Array,
    /// f32 `[2 host rows, V]`.
    logits: Array,
    /// How many rows of each regime are kept at most.
    host_rows: usize,
}

impl KeptLogits {
    pub fn allocate(runtime: &Runtime, buckets: &Buckets, vocab: usize) -> Result<Option<KeptLogits>> {
        let host_rows = buckets.host_rows();
        if host_rows == 0 {
            return Ok(None);
        }
        let rows = Array::persistent(runtime, Category::Staging, [2 * host_rows], DType::U32)?;
        let logits = Array::persistent(runtime, Category::Activations, [2 * host_rows, vocab], DType::F32)?;
        Ok(Some(KeptLogits { rows, logits, host_rows }))
    }

    /// The first of the kept rows of a regime.
    fn first(&self, regime: Regime) -> usize {
        if regime == Regime::Decode { 0 } else { self.host_rows }
    }

    /// What the program computes: rows of `logits`, and where they go.
    pub fn trace(&self, logits: &Array, shape: StepShape) -> Result<(Array, Array)> {
        let at = self.first(shape.regime);
        let rows = self.rows.entries(at, shape.rows)?;
        Ok((logits.take(&rows)?, self.logits.entries(at, shape.rows)?))
    }

    /// Names the rows that the next program of this regime keeps. Padding keeps row 0.
    pub fn fill(&self, regime: Regime, rows: &[usize]) -> Result<()> {
        let named = (0..self.host_rows).map(|i| rows.get(i).copied().unwrap_or_default() as u32);
        Ok(self.rows.entries(self.first(regime), self.host_rows)?.write(&named.collect::<Vec<_>>())?)
    }

    /// Copies kept row `row` of a regime. The step that kept it has ended; a later one may be under way.
    pub fn read(&self, regime: Regime, row: usize, values: &mut Vec<f32>) -> Result<()> {
        read_settled_rows(&self.logits, self.first(regime) + row, 1, values)
    }
}
