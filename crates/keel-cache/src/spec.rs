//! The storage of a model's layers, and its size.

use keel_array::{AttentionSpec, DType, KvFormat};

/// The memory of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerSpec {
    /// Keys and values.
    Attention {
        /// Key-value heads.
        kv_heads: usize,
        /// Size of a head.
        head_dim: usize,
    },
    /// Keys and values of the latest tokens, on pages that rotate.
    Sliding {
        /// Key-value heads.
        kv_heads: usize,
        /// Size of a head.
        head_dim: usize,
        /// Tokens that a row sees, itself included.
        window: usize,
    },
    /// A gated-delta state and a convolution window.
    Recurrent {
        /// Rows of the window, plus one.
        conv_width: usize,
        /// Channels of the convolution.
        channels: usize,
        /// Heads of the keys.
        key_heads: usize,
        /// Heads of the state.
        value_heads: usize,
        /// Rows of a head's state.
        key_dim: usize,
        /// Columns of a head's state.
        value_dim: usize,
    },
}

impl LayerSpec {
    /// Bytes that grow with each token; in a sliding layer only until its window is full. 0 if the format cannot store
    /// heads of this size; no cache is allocated for these.
    pub fn token_bytes(&self, kv: KvFormat) -> usize {
        match self {
            LayerSpec::Attention { kv_heads, head_dim } | LayerSpec::Sliding { kv_heads, head_dim, .. } => {
                2 * kv_heads * kv.row_elements(*head_dim).unwrap_or(0) * kv.dtype().size()
            }
            LayerSpec::Recurrent { .. } => 0,
        }
    }

    /// Values of one sequence's convolution window; 0 for attention.
    pub fn window_len(&self) -> usize {
        match *self {
            LayerSpec::Attention { .. } | LayerSpec::Sliding { .. } => 0,
            LayerSpec::Recurrent { conv_width, channels, .. } => (conv_width - 1) * channels,
        }
    }

    /// Values of one sequence's gated-delta state; 0 for attention.
    pub fn state_len(&self) -> usize {
        match *self {
            LayerSpec::Attention { .. } | LayerSpec::Sliding { .. } => 0,
            LayerSpec::Recurrent { value_heads, key_dim, value_dim, .. } => value_heads * key_dim * value_dim,
        }
    }

    /// Values of one record of the delta log; 0 for attention.
    pub fn record_len(&self) -> usize {
        match *self {
            LayerSpec::Attention { .. } | LayerSpec::Sliding { .. } => 0,
            LayerSpec::Recurrent { key_heads, value_heads, key_dim, value_dim, .. } => {
                key_heads * key_dim + value_heads * (value_dim + 1)
            }
        }
    }

    /// Bytes of one open row of one sequence: its record, and its row of the convolution.
    pub fn open_row_bytes(&self) -> usize {
        match *self {
            LayerSpec::Attention { .. } | LayerSpec::Sliding { .. } => 0,
            LayerSpec::Recurrent { channels, .. } => (self.record_len() + channels) * DType::F32.size(),
        }
    }
}

/// How a cache stores its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheFormat {
    /// Keys and values.
    pub kv: KvFormat,
    /// Gated-delta states: f32 or f16.
    pub state: DType,
}

/// The storage of a model's layers. The layers of the multi-token-prediction head come last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheSpec {
    /// In the order of the layers.
    pub layers: Vec<LayerSpec>,
    /// How they store it.
    pub format: CacheFormat,
}

impl CacheSpec {
    /// KV bytes of one token in all layers.
    pub fn token_bytes(&self) -> usize {
        self.layers.iter().map(|l| l.token_bytes(self.format.kv)).sum()
    }

    /// KV bytes of one token in the sliding layers. They keep only the pages that their windows need.
    pub fn sliding_token_bytes(&self) -> usize {
        let sliding = self.layers.iter().filter(|layer| matches!(layer, LayerSpec::Sliding { .. }));
        sliding.map(|layer| layer.token_bytes(self.format.kv)).sum()
    }

    /// The largest window of the sliding layers.
    pub fn sliding_window(&self) -> Option<usize> {
        let windows = self.layers.iter().filter_map(|layer| match layer {
            LayerSpec::Sliding { window, .. } => Some(*window),
            _ => None,
        });
        windows.max()
    }

    /// Pages of one sequence in a sliding layer: the window before the first token of a page, and that page. Rows are
    /// written and attended 64 at a time, so a sequence never needs more.
    pub fn sliding_pages(&self, size: &CacheSize) -> usize {
        self.sliding_window().map_or(0, |window| {
            (window.saturating_sub(1).div_ceil(AttentionSpec::PAGE) + 1).min(size.pages_per_sequence())
        })
    }

    /// Lets sliding layers keep this many tokens more than their windows, for steps that write all rows before they
    /// attend the first.
    pub fn widen_windows(&mut self, tokens: usize) {
        for layer in &mut self.layers {
            if let LayerSpec::Sliding { window, .. } = layer {
                *window += tokens;
            }
        }
    }

    /// Whether there are recurrent layers, whose state cannot go back without a checkpoint.
    pub fn is_recurrent(&self) -> bool {
        self.recurrent_layers() > 0
    }

    /// Layers with a state.
    pub fn recurrent_layers(&self) -> usize {
        self.layers.iter().filter(|layer| matches!(layer, LayerSpec::Recurrent { .. })).count()
    }

    /// Recurrent bytes of one sequence in all layers.
    pub fn slot_bytes(&self) -> usize {
        let windows = self.layers.iter().map(LayerSpec::window_len).sum::<usize>() * DType::F32.size();
        windows + self.layers.iter().map(LayerSpec::state_len).sum::<usize>() * self.format.state.size()
    }

    /// Bytes of one open row of one sequence in all layers.
    pub fn open_row_bytes(&self) -> usize {
        self.layers.iter().map(LayerSpec::open_row_bytes).sum()
    }
}

/// The size of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSize {
    /// Sequences at once.
    pub sequences: usize,
    /// Tokens of the longest sequence.
    pub context: usize,
    /// Saved recurrent slots.
    pub checkpoints: usize,
    /// Pages of the pool; `None` means enough for every sequence at full length.
    pub pool_pages: Option<usize>,
    /// Rows of a sequence that a step may leave open, to take them back or commit them later.
    pub open_rows: usize,
    /// Host memory for parked sequences.
    pub swap_bytes: usize,
}

impl CacheSize {
    /// Pages of one sequence at full length.
    pub fn pages_per_sequence(&self) -> usize {
        self.context.div_ceil(AttentionSpec::PAGE)
    }

    /// Pages of the pool for layers without a window.
    pub fn pages(&self) -> usize {
        self.pool_pages.unwrap_or(self.sequences * self.pages_per_sequence())
    }
}
