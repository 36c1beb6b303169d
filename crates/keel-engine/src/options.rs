//! How an engine is made.

use keel_array::{Compute, KvFormat};

use crate::{EngineError, Result, VisionOptions};

/// Rows of the prefill grid: chunks begin at multiples of this.
pub const PREFILL_GRID: usize = 64;

/// Rows by which the multi-token-prediction head may stay behind a sequence that does not draft.
pub(crate) const HEAD_LAG_MAX: usize = 64;

/// Most drafts of a sequence that one step verifies.
pub const DRAFTS_MAX: usize = 8;

/// Bounds of an engine; all its memory follows from them and the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Tokens of the longest sequence, prompt and generated together.
    pub context: usize,
    /// Sequences at once.
    pub sequences: usize,
    /// Prompt tokens of one step; a multiple of 64.
    pub prefill_step: usize,
    /// Recurrent slots saved to go back to.
    pub checkpoints: usize,
    /// Pages of keys and values; `None` is enough for every sequence at full length. With fewer, what a sequence may
    /// need has to be set aside before it starts.
    pub pool_pages: Option<usize>,
    /// Host memory for sequences that are parked while others need their pages: a batch then lets in more than fits. 0
    /// keeps the promise instead.
    pub swap_bytes: usize,
    /// Arithmetic of the linear layers.
    pub compute: Compute,
    /// How keys and values are kept; `None` is f32 where `compute` is, else f16.
    pub kv: Option<KvFormat>,
    /// Drafts of the multi-token-prediction head that one step may verify, at most [`DRAFTS_MAX`]; 0 does without it.
    pub drafts: usize,
    /// Also be able to give the logits of every prompt token, and those of the multi-token-prediction head.
    pub all_logits: bool,
    /// Read the model's tower, too, for pictures of this size; `None` for text alone.
    pub vision: Option<VisionOptions>,
    /// Tokens of a picture that a step must hold together, where the rows of a picture see each other. An engine finds them in the
    /// config.
    pub picture_run: usize,
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            context: 4096,
            sequences: 1,
            prefill_step: 2048,
            checkpoints: 0,
            pool_pages: None,
            swap_bytes: 0,
            compute: Compute::Auto,
            kv: None,
            drafts: 0,
            all_logits: false,
            vision: None,
            picture_run: 0,
        }
    }
}

impl EngineOptions {
    pub(crate) fn check(&self) -> Result<()> {
        let wrong = if self.prefill_step == 0 || !self.prefill_step.is_multiple_of(PREFILL_GRID) {
            format!("a prefill step of {} is not a positive multiple of {PREFILL_GRID}", self.prefill_step)
        } else if self.context == 0 || self.context > 1 << 24 {
            format!("a context of {} tokens is not within 1 to {}", self.context, 1 << 24)
        } else if self.sequences == 0 || self.sequences > 4096 {
            format!("{} sequences are not within 1 to 4096", self.sequences)
        } else if self.pool_pages.is_some_and(|pages| pages == 0 || pages > 1 << 24) {
            format!("a pool of {:?} pages is not within 1 to {}", self.pool_pages, 1 << 24)
        } else if self.drafts > DRAFTS_MAX {
            format!("{} drafts are not within 0 to {DRAFTS_MAX}", self.drafts)
        } else {
            return Ok(());
        };
        Err(EngineError::Option(wrong))
    }

    /// Rows of a sequence that a step may leave open: the token drawn last and its drafts.
    pub(crate) fn open_rows(&self) -> usize {
        if self.drafts == 0 { 0 } else { self.drafts + 1 }
    }

    /// Rows of the largest decode step.
    pub(crate) fn decode_rows(&self) -> usize {
        match self.drafts {
            0 => self.sequences,
            drafts => self.sequences * (drafts + 1),
        }
    }

    /// Rows of the largest pass of the multi-token-prediction head by itself; 0 without drafts.
    pub(crate) fn head_rows(&self) -> usize {
        if self.drafts == 0 { 0 } else { self.decode_rows().max(HEAD_LAG_MAX) }
    }

    /// How keys and values are kept.
    pub fn kv_format(&self) -> KvFormat {
        let default = if self.compute == Compute::F32 { KvFormat::F32 } else { KvFormat::F16 };
        self.kv.unwrap_or(default)
    }
}
