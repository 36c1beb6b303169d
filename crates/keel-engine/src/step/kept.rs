//! Logits and hidden states that the host reads while a later step runs.
//!
//! The next step overwrites the logits of a step. So where the host draws a token, the row's logits are copied to a
//! place of their own, by a program that follows the step's.

use keel_array::{Array, Category, DType, Regime, Runtime};

use crate::options::EngineOptions;

use super::StepShape;
use super::buckets::Buckets;
use super::results::{append_with, read_settled_rows};
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

/// The hidden states after the last rows of the sequences of two steps, of answers and then of prompts. The MTP
/// (multi-token-prediction) head runs these rows later.
pub(super) struct KeptHidden {
    /// 0, 1, 2 and so on, u32 `[sequences]`.
    rows: Array,
    /// f32 `[2 (sequences + prompts), hidden]`: those of one step, then those of the other.
    hidden: Array,
    sequences: usize,
    prompts: usize,
}

impl KeptHidden {
    pub fn allocate(
        runtime: &Runtime,
        buckets: &Buckets,
        options: &EngineOptions,
        width: usize,
    ) -> Result<Option<KeptHidden>> {
        if !buckets.drafts_ahead() {
            return Ok(None);
        }
        let (sequences, prompts) = (options.sequences, buckets.prompts());
        let rows = Array::persistent(runtime, Category::Staging, [sequences], DType::U32)?;
        rows.write(&(0..sequences as u32).collect::<Vec<_>>())?;
        let both = [2 * (sequences + prompts), width];
        let hidden = Array::persistent(runtime, Category::Activations, both, DType::F32)?;
        Ok(Some(KeptHidden { rows, hidden, sequences, prompts }))
    }

    fn first(&self, place: usize, regime: Regime) -> usize {
        place * (self.sequences + self.prompts) + if regime == Regime::Decode { 0 } else { self.sequences }
    }

    /// What the program computes: rows of the hidden states of `answers` and of `prompts`, and where they go.
    pub fn trace(&self, answers: &Array, prompts: &Array, place: usize) -> Result<Vec<(Array, Array)>> {
        let pair = |from: &Array, regime, count| -> Result<(Array, Array)> {
            let to = self.hidden.entries(self.first(place, regime), count)?;
            Ok((from.take(&self.rows.prefix(count)?)?, to))
        };
        Ok(vec![
            pair(answers, Regime::Decode, self.sequences)?,
            pair(prompts, Regime::Prefill, self.prompts)?,
        ])
    }

    /// Copies the hidden states of these numbers of answers and prompts of step number `step`, which has ended. A later
    /// one may be under way.
    pub fn append(&self, step: u64, answers: usize, prompts: usize, values: &mut Vec<f32>) -> Result<()> {
        for (regime, rows) in [(Regime::Decode, answers), (Regime::Prefill, prompts)] {
            let first = self.first((step % 2) as usize, regime);
            append_with(Array::read_settled_bytes, &self.hidden, first..first + rows, values)?;
        }
        Ok(())
    }
}
