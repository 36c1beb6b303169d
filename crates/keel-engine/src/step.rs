//! The prepared steps of a model: traced once per shape, run again with new data in the staging buffers.

use keel_array::{Array, Batch, Category, DType, Executable, Regime, RowLog, Runtime};
use keel_cache::{LayerStorage, ModelCache, SequenceCache};
use keel_models::HybridModel;
use keel_models::blocks::StepContext;

use crate::engine::LogitSink;
use crate::options::EngineOptions;
use crate::{EngineError, Result};

/// Prepared steps kept at a time. Prompts end in steps of any length, so old ones make room.
const STEPS_MAX: usize = 24;

/// Rows of logits that are computed at a time when every row is wanted.
pub(crate) const HEAD_ROWS: usize = 64;

/// What a step leaves behind besides the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Nothing else: more of the prompt follows.
    State,
    /// Logits of the last row of each sequence.
    LastLogits,
    /// Hidden states of every row.
    Hidden,
    /// Hidden states of the multi-token-prediction head for every row.
    MtpHidden,
    /// Logits of rows of the hidden buffer.
    Head,
}

/// The shape of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepShape {
    pub regime: Regime,
    pub rows: usize,
    pub sequences: usize,
    pub outcome: Outcome,
}

/// Buffers that the host fills before a step, for the largest step.
struct Staging {
    tokens: Array,
    positions: Array,
    row_start: Array,
    slot: Array,
    position: Array,
    table: Array,
    /// Of sliding layers; `table` itself where there are none.
    window_table: Array,
    accepted: Array,
    last_rows: Array,
}

/// Buffers that a step fills for the host.
struct Results {
    /// f32 `[sequences or HEAD_ROWS, V]`.
    logits: Array,
    /// f32 `[sequences, hidden]`.
    last_hidden: Array,
    /// f32 `[prefill rows, hidden]`, if every row may be asked for.
    hidden: Option<Array>,
    /// Rows whose logits are computed, f32 `[HEAD_ROWS, hidden]`.
    head_input: Option<Array>,
}

/// The rows of one sequence in a step.
pub(crate) struct Rows<'a> {
    pub sequence: &'a SequenceCache,
    pub tokens: &'a [u32],
}

/// Runs steps.
pub(crate) struct Stepper {
    staging: Staging,
    results: Results,
    prepared: Vec<(StepShape, Executable)>,
}

impl Stepper {
    /// Allocates the buffers.
    pub fn allocate(
        runtime: &Runtime,
        model: &HybridModel,
        options: &EngineOptions,
        pages_per_sequence: usize,
    ) -> Result<Stepper> {
        let (rows, sequences) = (options.prefill_rows().max(options.sequences), options.sequences);
        let input = |shape: &[usize], dtype| Array::persistent(runtime, Category::Staging, shape, dtype);
        let table = input(&[sequences, pages_per_sequence], DType::U32)?;
        let window_table = match model.config.window {
            0 => table.clone(),
            _ => input(&[sequences, pages_per_sequence], DType::U32)?,
        };
        let staging = Staging {
            tokens: input(&[rows], DType::U32)?,
            positions: input(&[rows], DType::I32)?,
            row_start: input(&[sequences + 1], DType::U32)?,
            slot: input(&[sequences], DType::U32)?,
            position: input(&[sequences], DType::U32)?,
            table,
            window_table,
            accepted: input(&[sequences], DType::U32)?,
            last_rows: input(&[sequences], DType::U32)?,
        };
        let output = |shape: &[usize]| Array::persistent(runtime, Category::Activations, shape, DType::F32);
        let (hidden, vocab) = (model.config.hidden, model.config.vocab);
        let logit_rows = if options.all_logits { sequences.max(HEAD_ROWS) } else { sequences };
        let all = |rows: usize| if options.all_logits { output(&[rows, hidden]).map(Some) } else { Ok(None) };
        let results = Results {
            logits: output(&[logit_rows, vocab])?,
            last_hidden: output(&[sequences, hidden])?,
            hidden: all(rows)?,
            head_input: all(HEAD_ROWS)?,
        };
        Ok(Stepper { staging, results, prepared: Vec::new() })
    }

    /// The prepared step of a shape, traced if it is new.
    fn step(
        &mut self,
        runtime: &Runtime,
        model: &HybridModel,
        cache: &ModelCache,
        shape: StepShape,
    ) -> Result<&Executable> {
        if let Some(i) = self.prepared.iter().position(|(s, _)| *s == shape) {
            let found = self.prepared.remove(i);
            self.prepared.push(found);
        } else {
            if self.prepared.len() == STEPS_MAX {
                self.prepared.remove(0);
            }
            let executable = runtime.trace(|| self.trace(runtime, model, cache.layers(), shape))?;
            self.prepared.push((shape, executable));
        }
        match self.prepared.last() {
            Some((_, executable)) => Ok(executable),
            None => unreachable!("a step was just pushed"),
        }
    }

    /// Prepares a step ahead of its first run, so that its memory is part of the plan.
    pub fn prepare(
        &mut self,
        runtime: &Runtime,
        model: &HybridModel,
        cache: &ModelCache,
        shape: StepShape,
    ) -> Result<()> {
        self.step(runtime, model, cache, shape).map(drop)
    }

    fn context(&self, shape: StepShape) -> Result<StepContext> {
        let s = &self.staging;
        let batch = Batch {
            row_start: s.row_start.prefix(shape.sequences + 1)?,
            slot: s.slot.prefix(shape.sequences)?,
            position: s.position.prefix(shape.sequences)?,
            table: s.table.prefix(shape.sequences)?,
            accepted: s.accepted.prefix(shape.sequences)?,
        };
        let window_batch = Batch { table: s.window_table.prefix(shape.sequences)?, ..batch.clone() };
        let positions = s.positions.prefix(shape.rows)?;
        Ok(StepContext { batch, window_batch, positions, regime: shape.regime, log: RowLog::None })
    }

    fn trace(
        &self,
        runtime: &Runtime,
        model: &HybridModel,
        layers: &[LayerStorage],
        shape: StepShape,
    ) -> Result<Executable> {
        let tokens = self.staging.tokens.prefix(shape.rows)?;
        let context = self.context(shape)?;
        let (value, place) = match shape.outcome {
            Outcome::State | Outcome::LastLogits => {
                let hidden = model.hidden(&tokens, layers, &context)?;
                let last = hidden.take(&self.staging.last_rows.prefix(shape.sequences)?)?;
                if shape.outcome == Outcome::State {
                    (last, self.results.last_hidden.prefix(shape.sequences)?)
                } else {
                    (model.logits(&last)?, self.results.logits.prefix(shape.sequences)?)
                }
            }
            Outcome::Hidden => (model.hidden(&tokens, layers, &context)?, self.hidden_rows(shape.rows)?),
            Outcome::MtpHidden => {
                let head = model.mtp.as_ref().ok_or(EngineError::NoMtpHead)?;
                let own = &layers[model.blocks.len()..];
                // The rows before are the head's input; its own result takes their place.
                let input = self.hidden_rows(shape.rows)?;
                (model.mtp_hidden(head, &input, &tokens, own, &context)?, input)
            }
            Outcome::Head => {
                let input = self.head_input()?.prefix(shape.rows)?;
                (model.logits(&input)?, self.results.logits.prefix(shape.rows)?)
            }
        };
        Ok(runtime.prepare(&[(&value, &place)])?)
    }

    fn hidden_rows(&self, rows: usize) -> Result<Array> {
        let hidden = self.results.hidden.as_ref().ok_or_else(not_planned)?;
        Ok(hidden.prefix(rows)?)
    }

    fn head_input(&self) -> Result<&Array> {
        self.results.head_input.as_ref().ok_or_else(not_planned)
    }

    /// Fills the staging buffers for the rows of a step.
    fn stage(&self, rows: &[Rows<'_>]) -> Result<()> {
        let s = &self.staging;
        let pages = s.table.shape()[1];
        let (mut tokens, mut positions) = (Vec::new(), Vec::new());
        let (mut row_start, mut last_rows) = (vec![0u32], Vec::new());
        let (mut slots, mut firsts) = (Vec::new(), Vec::new());
        let mut table = Vec::with_capacity(rows.len() * pages);
        for Rows { sequence, tokens: ids } in rows {
            let first = sequence.offset();
            tokens.extend_from_slice(ids);
            positions.extend((first..first + ids.len()).map(|p| p as i32));
            row_start.push(tokens.len() as u32);
            last_rows.push(tokens.len() as u32 - 1);
            slots.push(sequence.slot());
            firsts.push(first as u32);
            table.extend_from_slice(sequence.pages());
            table.resize(row_start.len().saturating_sub(1) * pages, 0);
        }
        s.tokens.write(&tokens)?;
        s.positions.write(&positions)?;
        s.row_start.write(&row_start)?;
        s.slot.write(&slots)?;
        s.position.write(&firsts)?;
        s.table.write(&table)?;
        self.stage_windows(rows)?;
        s.last_rows.write(&last_rows)?;
        Ok(())
    }

    /// Fills the page tables of sliding layers, whose pages rotate.
    fn stage_windows(&self, rows: &[Rows<'_>]) -> Result<()> {
        let entries = self.staging.table.shape()[1];
        if rows.iter().all(|r| r.sequence.window_pages().is_empty()) {
            return Ok(());
        }
        let table: Vec<u32> = rows
            .iter()
            .flat_map(|r| r.sequence.window_pages().iter().copied().cycle().take(entries))
            .collect();
        Ok(self.staging.window_table.write(&table)?)
    }

    /// Runs a step over the rows given.
    pub fn run(
        &mut self,
        runtime: &Runtime,
        model: &HybridModel,
        cache: &ModelCache,
        shape: (Regime, Outcome),
        rows: &[Rows<'_>],
    ) -> Result<()> {
        self.stage(rows)?;
        let count = rows.iter().map(|r| r.tokens.len()).sum();
        let shape = StepShape { regime: shape.0, rows: count, sequences: rows.len(), outcome: shape.1 };
        Ok(self.step(runtime, model, cache, shape)?.run()?)
    }

    /// Copies row `row` of the logits of the last step.
    pub fn read_logits(&self, row: usize, logits: &mut Vec<f32>) -> Result<()> {
        read_rows(&self.results.logits, row, 1, logits)
    }

    /// Copies rows of the hidden states of the last step.
    pub fn read_hidden(&self, rows: usize, hidden: &mut Vec<f32>) -> Result<()> {
        read_rows(&self.hidden_rows(rows)?, 0, rows, hidden)
    }

    /// Overwrites the input of the multi-token-prediction head.
    pub fn write_hidden(&self, hidden: &[f32]) -> Result<()> {
        let buffer = self.results.hidden.as_ref().ok_or_else(not_planned)?;
        Ok(buffer.write(hidden)?)
    }

    /// Logits of hidden states `[rows, hidden]`, appended row by row.
    pub fn head(
        &mut self,
        runtime: &Runtime,
        model: &HybridModel,
        cache: &ModelCache,
        hidden: &[f32],
        sink: &mut LogitSink<'_>,
    ) -> Result<()> {
        let mut row_logits = Vec::new();
        for block in hidden.chunks(HEAD_ROWS * model.config.hidden) {
            let rows = block.len() / model.config.hidden;
            self.head_input()?.write(block)?;
            let shape = StepShape { regime: Regime::Prefill, rows, sequences: 1, outcome: Outcome::Head };
            self.step(runtime, model, cache, shape)?.run()?;
            for row in 0..rows {
                self.read_logits(row, &mut row_logits)?;
                sink(&row_logits)?;
            }
        }
        Ok(())
    }
}

fn not_planned() -> EngineError {
    EngineError::Option("logits of every token were not planned for: set all_logits".into())
}

fn read_rows(array: &Array, row: usize, rows: usize, values: &mut Vec<f32>) -> Result<()> {
    let row_bytes = array.bytes() / array.shape()[0];
    let mut bytes = vec![0; rows * row_bytes];
    array.read_bytes(row * row_bytes, &mut bytes)?;
    values.clear();
    values.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)));
    Ok(())
}
