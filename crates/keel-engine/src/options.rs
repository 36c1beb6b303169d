//! The options that an engine is made with.

use keel_array::{Compute, DType, KvFormat, PREFILL_GRID};
use keel_cache::{CacheFormat, CacheSize};
use keel_models::SumOrder;

use crate::{EarlySteps, EngineError, Result, VisionOptions};

/// How many rows the MTP (multi-token-prediction) head may lag behind a sequence that does not draft.
pub(crate) const MTP_LAG_MAX: usize = 64;

/// The most prompts that may end in a step, and the most answers of a micro-batch, whose tokens the host draws while a
/// later step runs. Their logits have a place of their own.
pub(crate) const HOST_ROWS_MAX: usize = 16;

/// The same of answers where steps run ahead.
pub(crate) const HOST_ANSWERS_MAX: usize = 64;

/// The most drafts of one sequence that a step verifies.
pub const DRAFTS_MAX: usize = 8;

/// Bounds of an engine. All its memory follows from them and from the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Tokens of the longest sequence, prompt and answer together.
    pub context: usize,
    /// How many sequences run at once.
    pub sequences: usize,
    /// The most prompt tokens in one step; a multiple of 64. A prompt that is alone in a pipeline runs several such
    /// steps at once ([`Engine::lone_prompt_rows_max`](crate::Engine::lone_prompt_rows_max)).
    pub prefill_step: usize,
    /// How many recurrent states can be saved as checkpoints.
    pub checkpoints: usize,
    /// Pages of keys and values. `None` is enough for all sequences at full length. With fewer pages, a sequence starts
    /// only when the pages that it may need can be promised.
    pub pool_pages: Option<usize>,
    /// Host memory in which sequences are parked while others need their pages. A batch then admits more than fits.
    /// With 0 it admits only requests whose pages it can promise.
    pub swap_bytes: usize,
    /// Arithmetic of the linear layers.
    pub compute: Compute,
    /// The order in which columns that devices share are added.
    pub sums: SumOrder,
    /// The form in which keys and values are stored. `None` is f32 if `compute` is f32, else f16.
    pub kv: Option<KvFormat>,
    /// The type in which gated-delta states are stored: f32, or f16 for half of their memory and traffic.
    pub state: DType,
    /// How many drafts of the MTP head one step may verify, at most [`DRAFTS_MAX`]. 0 runs without the head.
    pub drafts: usize,
    /// Whether the logits of every prompt token can be read, and those of the MTP head.
    pub all_logits: bool,
    /// Keep the hidden states of all rows of a step of prompts, which [`crate::batch::Readout::MeanHidden`] adds up; of
    /// two more steps where steps run ahead.
    pub row_hidden: bool,
    /// Also load the model's vision tower, for pictures up to this size. `None` is for text alone.
    pub vision: Option<VisionOptions>,
    /// The steps whose kernels [`Engine::load_planned`](crate::Engine::load_planned) compiles while weights are read.
    pub early_steps: EarlySteps,
    /// Only in a plan: count the largest step of each kind alone. See [`crate::plan::at_least`].
    pub largest_steps: bool,
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
            sums: SumOrder::ByDevice,
            kv: None,
            state: DType::F32,
            drafts: 0,
            all_logits: false,
            row_hidden: false,
            vision: None,
            early_steps: EarlySteps::default(),
            largest_steps: false,
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
        } else if ![DType::F32, DType::F16].contains(&self.state) {
            format!("states in {}: they are stored in f32 or f16", self.state)
        } else {
            return Ok(());
        };
        Err(EngineError::Option(wrong))
    }

    /// How many rows of a sequence a step may leave open: the last drawn token and its drafts. 0 without drafts.
    pub(crate) fn open_rows(&self) -> usize {
        if self.drafts == 0 { 0 } else { self.drafts + 1 }
    }

    /// The size of the cache.
    pub(crate) fn cache_size(&self) -> CacheSize {
        CacheSize {
            sequences: self.sequences,
            context: self.context,
            checkpoints: self.checkpoints,
            pool_pages: self.pool_pages,
            open_rows: self.open_rows(),
            swap_bytes: self.swap_bytes,
        }
    }

    /// How many rows the host may draw for while a later step runs, at most `most`; none in an engine that drafts.
    pub(crate) fn host_rows(&self, most: usize) -> usize {
        if self.drafts == 0 { self.sequences.min(most) } else { 0 }
    }

    /// Rows of the largest decode step.
    pub(crate) fn decode_rows(&self) -> usize {
        match self.drafts {
            0 => self.sequences,
            drafts => self.sequences * (drafts + 1),
        }
    }

    /// Rows of the largest pass of the MTP head alone; 0 without drafts.
    pub(crate) fn mtp_rows(&self) -> usize {
        if self.drafts == 0 { 0 } else { self.decode_rows().max(MTP_LAG_MAX) }
    }

    pub(crate) fn cache_format(&self) -> CacheFormat {
        CacheFormat { kv: self.kv_format(), state: self.state }
    }

    /// The form in which keys and values are stored.
    pub fn kv_format(&self) -> KvFormat {
        let default = if self.compute == Compute::F32 { KvFormat::F32 } else { KvFormat::F16 };
        self.kv.unwrap_or(default)
    }
}
