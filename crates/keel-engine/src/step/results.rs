//! Buffers that a step fills for the host.

use std::ops::Range;

use keel_array::{Array, Category, DType, Runtime};
use keel_models::{HybridModel, Mixer};

use super::LOGITS_ROWS;
use super::buckets::Buckets;
use crate::options::EngineOptions;
use crate::{EngineError, Result};

pub(super) struct Results {
    /// f32 `[rows, V]`.
    pub logits: Array,
    /// f32 `[sequences, hidden]`.
    pub last_hidden: Array,
    /// Hidden states of all rows, f32 `[prefill rows, hidden]`, where every row can be read.
    hidden: Option<Array>,
    /// Whether steps of prompts leave the hidden states of their rows there.
    pub keeps_rows: bool,
    /// Rows whose logits are computed, f32 `[LOGITS_ROWS, hidden]`, where every row can be read.
    logits_input: Option<Array>,
    draft: Option<DraftResults>,
    /// Number of values that were handed to the next device, u32 `[1]`, where there is one. Not read.
    sent: Option<Array>,
}

/// Results where sequences draft.
pub(super) struct DraftResults {
    /// Hidden states of the rows of a decode step, f32 `[decode rows, hidden]`.
    pub rows: Array,
    /// Hidden states of the MTP (multi-token-prediction) head after a prompt's rows, f32 `[sequences, hidden]`. Not
    /// read.
    pub head: Array,
    /// The token drawn after each open row, u32 `[decode rows]`.
    pub drawn: Array,
    /// Output of a pass of the MTP head for keys and values alone, f32 `[1, KV D]`.
    pub remembered: Array,
    /// Output of a step without rows, f32 `[1, Hv, Dv]`. There is none without recurrent layers.
    pub committed: Option<Array>,
}

impl Results {
    pub fn allocate(
        runtime: &Runtime,
        model: &HybridModel,
        options: &EngineOptions,
        buckets: &Buckets,
    ) -> Result<Results> {
        let persistent =
            |shape: &[usize], dtype| Array::persistent(runtime, Category::Activations, shape, dtype);
        // Without an output head there are no results.
        let is_last = model.part.is_last();
        let output = |shape: &[usize]| match is_last {
            true => persistent(shape, DType::F32),
            false => persistent(&[0, shape[1]], DType::F32),
        };
        let ids = |count| persistent(&[if is_last { count } else { 0 }], DType::U32);
        let (hidden, vocab) = (model.config.hidden, model.config.vocab);
        let all = |rows: usize| if options.all_logits { output(&[rows, hidden]).map(Some) } else { Ok(None) };
        let logit_rows = options.decode_rows().max(if options.all_logits { LOGITS_ROWS } else { 0 });
        let recurrent = model.blocks.iter().find_map(|block| match &block.mixer {
            Mixer::GatedDelta(mixer) => Some([1, mixer.value_heads, mixer.value_dim]),
            Mixer::Attention(_) => None,
        });
        let draft = match options.drafts {
            0 => None,
            _ => Some(DraftResults {
                rows: output(&[options.decode_rows(), hidden])?,
                head: output(&[options.sequences, hidden])?,
                drawn: ids(options.decode_rows())?,
                remembered: output(&[1, model.config.kv_heads * model.config.head_dim])?,
                committed: recurrent.map(|shape| persistent(&shape, DType::F32)).transpose()?,
            }),
        };
        let rows = buckets.prefill_rows_max().max(options.sequences);
        Ok(Results {
            logits: output(&[logit_rows, vocab])?,
            last_hidden: output(&[options.sequences, hidden])?,
            hidden: match options.row_hidden {
                true => Some(output(&[rows, hidden])?),
                false => all(rows)?,
            },
            keeps_rows: options.row_hidden,
            logits_input: all(LOGITS_ROWS)?,
            draft,
            sent: (!is_last).then(|| persistent(&[1], DType::U32)).transpose()?,
        })
    }

    /// The buffer for the hidden states of all rows.
    pub fn hidden(&self) -> Result<&Array> {
        self.hidden.as_ref().ok_or_else(not_planned)
    }

    /// The buffer for rows whose logits are computed.
    pub fn logits_input(&self) -> Result<&Array> {
        self.logits_input.as_ref().ok_or_else(not_planned)
    }

    /// The buffer for the number of values that were handed on.
    pub fn sent(&self) -> Result<&Array> {
        let last = || EngineError::Option("the last part of a model hands nothing on".into());
        self.sent.as_ref().ok_or_else(last)
    }

    /// The buffers of engines that draft.
    pub fn draft(&self) -> Result<&DraftResults> {
        self.draft.as_ref().ok_or_else(drafts_not_planned)
    }
}

pub(crate) fn drafts_not_planned() -> EngineError {
    EngineError::Option("drafts were not planned for: set drafts".into())
}

fn not_planned() -> EngineError {
    EngineError::Option("logits of every token were not planned for: set all_logits".into())
}

/// Appends `rows` rows of a buffer, from row `row` on.
pub(crate) fn append_rows(array: &Array, row: usize, rows: usize, values: &mut Vec<f32>) -> Result<()> {
    append_with(Array::read_bytes, array, row..row + rows, values)
}

/// As [`append_rows`], with the given way to read bytes.
pub(super) fn append_with(
    read: impl FnOnce(&Array, usize, &mut [u8]) -> keel_array::Result<()>,
    array: &Array,
    rows: Range<usize>,
    values: &mut Vec<f32>,
) -> Result<()> {
    let row_bytes = array.bytes() / array.shape()[0];
    let before = values.len();
    values.resize(before + rows.len() * row_bytes / size_of::<f32>(), 0.0);
    let outcome = read(array, rows.start * row_bytes, bytemuck::cast_slice_mut(&mut values[before..]));
    if outcome.is_err() {
        values.truncate(before);
    }
    Ok(outcome?)
}

/// Replaces `values` by `rows` rows of a buffer, from row `row` on.
pub(super) fn read_rows(array: &Array, row: usize, rows: usize, values: &mut Vec<f32>) -> Result<()> {
    values.clear();
    append_rows(array, row, rows, values)
}

/// As [`read_rows`], of a buffer that no step under way writes.
pub(super) fn read_settled_rows(array: &Array, row: usize, rows: usize, values: &mut Vec<f32>) -> Result<()> {
    values.clear();
    append_with(Array::read_settled_bytes, array, row..row + rows, values)
}

/// Decodes the bytes of a u32 buffer.
pub(crate) fn ids_of(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}
