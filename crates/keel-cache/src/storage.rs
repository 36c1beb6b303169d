//! The persistent arrays of the layers, and of saved slots.

use std::ops::Range;

use keel_array::{Array, AttentionSpec, Category, ConvWindow, DType, DeltaState, KvPool, Runtime};

use crate::{CacheError, CacheSize, CacheSpec, LayerSpec, Result};

/// The persistent arrays of one layer.
#[derive(Clone, Debug)]
pub enum LayerStorage {
    /// Keys and values `[pages, KV, 256, W]`; see [`KvPool`].
    Attention(KvPool),
    /// The same, on separate pages that rotate.
    Sliding(KvPool),
    /// Window f32 `[slots, K - 1, C]` and state f32 or f16 `[slots, Hv, Dk, Dv]`, each with a log if rows may be taken
    /// back.
    Recurrent {
        /// Rows before the next token.
        window: ConvWindow,
        /// The state.
        state: DeltaState,
    },
}

impl LayerStorage {
    pub(crate) fn allocate(
        runtime: &Runtime,
        spec: &LayerSpec,
        cache: &CacheSpec,
        size: &CacheSize,
    ) -> Result<LayerStorage> {
        let pool = |pages: usize, kv_heads: usize, head_dim: usize| -> Result<KvPool> {
            let Some(elements) = cache.format.kv.row_elements(head_dim) else {
                return Err(CacheError::HeadSize { head_dim });
            };
            let shape = [pages, kv_heads, AttentionSpec::PAGE, elements];
            let array = || Array::persistent(runtime, Category::Kv, shape, cache.format.kv.dtype());
            Ok(KvPool { keys: array()?, values: array()? })
        };
        Ok(match *spec {
            LayerSpec::Attention { kv_heads, head_dim } => {
                LayerStorage::Attention(pool(size.pages(), kv_heads, head_dim)?)
            }
            LayerSpec::Sliding { kv_heads, head_dim, .. } => {
                let pages = size.sequences * cache.sliding_pages(size);
                LayerStorage::Sliding(pool(pages, kv_heads, head_dim)?)
            }
            LayerSpec::Recurrent { .. } => recurrent(runtime, spec, cache, size)?,
        })
    }

    /// The committed arrays with one entry for each slot.
    pub(crate) fn slot_arrays(&self) -> Vec<&Array> {
        match self {
            LayerStorage::Attention(_) | LayerStorage::Sliding(_) => vec![],
            LayerStorage::Recurrent { window, state } => vec![&window.rows, &state.state],
        }
    }

    /// The arrays of open rows, with one entry for each slot.
    pub(crate) fn log_arrays(&self) -> Vec<&Array> {
        match self {
            LayerStorage::Attention(_) | LayerStorage::Sliding(_) => vec![],
            LayerStorage::Recurrent { window, state } => window.open.iter().chain(&state.records).collect(),
        }
    }

    /// The arrays with one entry for each page.
    pub(crate) fn page_arrays(&self) -> Vec<&Array> {
        match self {
            LayerStorage::Attention(pool) => vec![&pool.keys, &pool.values],
            LayerStorage::Sliding(_) | LayerStorage::Recurrent { .. } => vec![],
        }
    }

    /// The arrays with one entry for each page that rotates.
    pub(crate) fn sliding_page_arrays(&self) -> Vec<&Array> {
        match self {
            LayerStorage::Sliding(pool) => vec![&pool.keys, &pool.values],
            LayerStorage::Attention(_) | LayerStorage::Recurrent { .. } => vec![],
        }
    }
}

/// Windows and states of all slots, each with room for open rows.
fn recurrent(
    runtime: &Runtime,
    spec: &LayerSpec,
    cache: &CacheSpec,
    size: &CacheSize,
) -> Result<LayerStorage> {
    let &LayerSpec::Recurrent { conv_width, channels, value_heads, key_dim, value_dim, .. } = spec else {
        unreachable!("only recurrent layers have slots");
    };
    let (slots, open_rows) = (size.sequences, size.open_rows);
    let array = |shape: &[usize], dtype| Array::persistent(runtime, Category::Recurrent, shape, dtype);
    let log = |width: usize| match open_rows {
        0 => Ok(None),
        _ => Array::persistent(runtime, Category::DeltaLog, [slots, open_rows, width], DType::F32).map(Some),
    };
    let window =
        ConvWindow { rows: array(&[slots, conv_width - 1, channels], DType::F32)?, open: log(channels)? };
    let state = array(&[slots, value_heads, key_dim, value_dim], cache.format.state)?;
    Ok(LayerStorage::Recurrent { window, state: DeltaState { state, records: log(spec.record_len())? } })
}

/// Consecutive layers of a cache, and the device that they lie on.
#[derive(Clone, Debug)]
pub struct DeviceLayers {
    /// The device.
    pub runtime: Runtime,
    /// Which of the cache's layers they are.
    pub layers: Range<usize>,
}

/// Saved slots of consecutive layers.
#[derive(Debug)]
pub(crate) struct SavedSlots {
    pub layers: Range<usize>,
    /// f32 `[checkpoints, windows of these layers]`. Each checkpoint is contiguous, so its first use touches only the
    /// system's pages that it fills.
    pub windows: Array,
    /// f32 or f16 `[checkpoints, states of these layers]`, in the same way.
    pub states: Array,
}

impl SavedSlots {
    /// Room for `checkpoints` slots; `None` if none of the layers is recurrent, or no room is asked for.
    pub(crate) fn allocate(
        DeviceLayers { runtime, layers }: &DeviceLayers,
        spec: &CacheSpec,
        checkpoints: usize,
    ) -> Result<Option<SavedSlots>> {
        let of = &spec.layers[layers.clone()];
        let [windows, states] =
            [LayerSpec::window_len, LayerSpec::state_len].map(|len| of.iter().map(len).sum::<usize>());
        if states == 0 || checkpoints == 0 {
            return Ok(None);
        }
        let array = |len, dtype| Array::persistent(runtime, Category::Checkpoints, [checkpoints, len], dtype);
        let (windows, states) = (array(windows, DType::F32)?, array(states, spec.format.state)?);
        Ok(Some(SavedSlots { layers: layers.clone(), windows, states }))
    }
}
