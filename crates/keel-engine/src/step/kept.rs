//! Logits and hidden states that the host reads while a later step runs.
//!
//! The next step overwrites the results of a step. So where the host draws a token, the row's logits are copied to a
//! place of their own, by a program that follows the step's. Hidden states are copied in the same way.

use std::ops::Range;

use keel_array::{Array, Category, DType, Regime, Runtime};

use crate::options::EngineOptions;

use super::StepShape;
use super::buckets::Buckets;
use super::results::{append_with, read_settled_rows};
use crate::Result;

/// Rows of the kept logits: those of answers, then those of prompts.
pub(super) struct KeptLogits {
    /// Which rows of the logits are kept, u32 `[rows]`.
    rows: Array,
    /// f32 `[rows, V]`.
    logits: Array,
    /// How many rows of answers are kept at most.
    answers: usize,
}

impl KeptLogits {
    pub fn allocate(runtime: &Runtime, buckets: &Buckets, vocab: usize) -> Result<Option<KeptLogits>> {
        let [answers, prompts] = [Regime::Decode, Regime::Prefill].map(|regime| buckets.host_rows(regime));
        if answers == 0 {
            return Ok(None);
        }
        let count = answers + prompts;
        let rows = Array::persistent(runtime, Category::Staging, [count], DType::U32)?;
        let logits = Array::persistent(runtime, Category::Activations, [count, vocab], DType::F32)?;
        Ok(Some(KeptLogits { rows, logits, answers }))
    }

    /// The first of the kept rows of a regime.
    fn first(&self, regime: Regime) -> usize {
        if regime == Regime::Decode { 0 } else { self.answers }
    }

    /// The result of the program, which is rows of `logits`, and its destination.
    pub fn trace(&self, logits: &Array, shape: StepShape) -> Result<(Array, Array)> {
        let at = self.first(shape.regime);
        let rows = self.rows.entries(at, shape.rows)?;
        Ok((logits.take(&rows)?, self.logits.entries(at, shape.rows)?))
    }

    /// Names the rows that the next program of this shape keeps. Padding keeps row 0.
    pub fn fill(&self, shape: StepShape, rows: &[usize]) -> Result<()> {
        let named = (0..shape.rows).map(|i| rows.get(i).copied().unwrap_or_default() as u32);
        Ok(self.rows.entries(self.first(shape.regime), shape.rows)?.write(&named.collect::<Vec<_>>())?)
    }

    /// Copies kept row `row` of a regime. The step that kept it has ended; a later one may be under way.
    pub fn read(&self, regime: Regime, row: usize, values: &mut Vec<f32>) -> Result<()> {
        read_settled_rows(&self.logits, self.first(regime) + row, 1, values)
    }
}

/// Hidden states that a step keeps.
#[derive(Clone, Copy)]
pub(crate) enum HiddenOf {
    /// Those of its answers, where sequences draft. The MTP (multi-token-prediction) head runs these rows later.
    Answers,
    /// Those of the last rows of its prompts.
    Prompts,
    /// Those of all rows of its prompts, if the mean of a prompt is read.
    PromptRows,
}

/// Hidden states of two steps.
pub(super) struct KeptHidden {
    /// 0, 1, 2 and so on, u32 `[rows]`.
    rows: Array,
    /// f32 `[2 (sum of counts), hidden]`: those of one step, then those of the other.
    hidden: Array,
    /// How many of each [`HiddenOf`] a step keeps.
    counts: [usize; 3],
}

impl KeptHidden {
    pub fn allocate(
        runtime: &Runtime,
        buckets: &Buckets,
        options: &EngineOptions,
        width: usize,
    ) -> Result<Option<KeptHidden>> {
        if !buckets.runs_ahead() {
            return Ok(None);
        }
        let answers = if buckets.drafts_ahead() { options.sequences } else { 0 };
        let prompt_rows = if buckets.keeps_rows() { buckets.prefill_rows_max() } else { 0 };
        let most = options.sequences.max(prompt_rows);
        let rows = Array::persistent(runtime, Category::Staging, [most], DType::U32)?;
        rows.write(&(0..most as u32).collect::<Vec<_>>())?;
        let counts = [answers, buckets.prompts(), prompt_rows];
        let both = [2 * counts.iter().sum::<usize>(), width];
        let hidden = Array::persistent(runtime, Category::Activations, both, DType::F32)?;
        Ok(Some(KeptHidden { rows, hidden, counts }))
    }

    fn first(&self, place: usize, of: HiddenOf) -> usize {
        place * self.counts.iter().sum::<usize>() + self.counts[..of as usize].iter().sum::<usize>()
    }

    /// The results of a program, which are the first rows of these hidden states, and their destinations.
    pub fn trace(&self, all: &[(HiddenOf, &Array)], place: usize) -> Result<Vec<(Array, Array)>> {
        let pair = |&(of, from): &(HiddenOf, &Array)| -> Result<(Array, Array)> {
            let count = self.counts[of as usize];
            let to = self.hidden.entries(self.first(place, of), count)?;
            Ok((from.take(&self.rows.prefix(count)?)?, to))
        };
        all.iter().map(pair).collect()
    }

    /// Appends these of the hidden states that step number `step` kept, which has ended. A later one may be under way.
    pub fn append(&self, step: u64, of: HiddenOf, rows: Range<usize>, values: &mut Vec<f32>) -> Result<()> {
        let first = self.first((step % 2) as usize, of);
        append_with(Array::read_settled_bytes, &self.hidden, first + rows.start..first + rows.end, values)
    }
}
