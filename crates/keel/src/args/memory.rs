//! Options for the memory of a server.

use anyhow::Result;
use clap::{Args, ValueEnum};
use keel_engine::{DRAFTS_MAX, VisionOptions};
use keel_models::vision::read_vision;

use super::{Subject, parse_bytes};
use crate::failure::usage;

/// Largest count of sequences, waiting requests or tokens. Sums of such counts cannot overflow.
pub const COUNT_MAX: usize = 1 << 24;

/// Parses a count: from 1 to [`COUNT_MAX`].
pub fn count(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(n) if (1..=COUNT_MAX).contains(&n) => Ok(n),
        _ => Err(format!("expected a number from 1 to {COUNT_MAX}")),
    }
}

/// Pictures whose features a server keeps, unless another number is asked for.
const IMAGES_DEFAULT: usize = 4;
/// No file with more pixels is decoded.
const IMAGE_PIXELS_MAX: u64 = 64 << 20;
/// Pixels of the largest of them.
const IMAGE_PIXELS_DEFAULT: u64 = 1 << 20;

/// Reads a number of things that there may be none of.
fn some_or_none(text: &str) -> Result<usize, String> {
    if text == "0" { Ok(0) } else { count(text) }
}

/// Bounds from which the memory of a server follows. Bounds that are not given follow from the model and the machine.
#[derive(Clone, Debug, Default, Args)]
pub struct MemoryArgs {
    /// Sequences that run at once. By default one for each core, at least 4 and at most 16. On a GPU 128, 64 or 32, if
    /// they fit into half of its free memory, or into --memory-limit; else 16, and 16 for each of several models.
    #[arg(long, aliases = ["parallel", "max-num-seqs"], value_name = "N", value_parser = count)]
    pub sequences: Option<usize>,
    /// Tokens of one sequence, prompt and answer together. By default 8192, or the model's context if that is shorter.
    #[arg(long, short = 'c', aliases = ["ctx", "ctx-size", "num-ctx", "max-model-len"], value_name = "N", value_parser = count)]
    pub context: Option<usize>,
    /// Memory for keys and values of all sequences and remembered prefixes together. By default enough for 65536
    /// tokens, or on a GPU with room for 2048 of each sequence if that is more, and for no more than all sequences at
    /// full length. On the CPU the default is at most the size of the weights, but always enough for one sequence at
    /// full length.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub kv_cache: Option<u64>,
    /// Whether there are keys and values for all sequences at full length (`keel fit`).
    #[arg(skip)]
    pub whole_contexts: bool,
    /// Start a request as soon as there is room for its prompt, not only when there is room for its whole answer. When
    /// pages run short, the newest sequence is parked in host memory. It continues with the same tokens when other
    /// sequences have ended. No request fails for memory.
    #[arg(long)]
    pub overcommit: bool,
    /// Host memory for parked sequences. By default enough for all keys, values and states.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, requires = "overcommit")]
    pub swap: Option<u64>,
    /// Memory for the recurrent states of remembered prefixes. By default 128Mi; on the CPU at most the size of the
    /// weights. Each running answer takes one more state.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, conflicts_with = "no_prefix_reuse")]
    pub prefix_states: Option<u64>,
    /// Number of pictures whose features are kept at once. Memory is planned for the largest size. 0 serves text only.
    /// By default 4 if the model has a vision tower.
    #[arg(long, value_name = "N", value_parser = some_or_none)]
    pub images: Option<usize>,
    /// Most pixels of a picture. Larger pictures are scaled down to this size. By default 1Mi, which is 1024 by 1024.
    #[arg(long, value_name = "PIXELS", value_parser = parse_bytes)]
    pub image_pixels: Option<u64>,
    /// Do not remember prefixes.
    #[arg(long)]
    pub no_prefix_reuse: bool,
    /// Take planned memory from the system when it is first used (CPU). By default all memory is taken at the start.
    /// Then none can be missing later, and no request waits while the system clears pages.
    #[arg(long, conflicts_with = "resident")]
    pub on_demand: bool,
    /// Most drafts of the multi-token-prediction head that a step verifies for each sequence. By default, if the model
    /// has such a head, 8 on the CPU and 4 on a GPU, and 2 on several devices and where more do not fit; none where
    /// GPUs form a pipeline and with --nodes. The server measures how many drafts pay and may make none. On the CPU a
    /// sampled request with a seed makes none.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=DRAFTS_MAX as i64))]
    pub drafts: Option<u8>,
    /// How an embedding is computed: the hidden state of the last token, or the mean over all tokens. The mean takes
    /// memory for the rows of a step. By default as the model's folder says (modules.json, 1_Pooling/config.json), else
    /// the last token.
    #[arg(long, value_name = "POOLING", value_enum)]
    pub pooling: Option<Pooling>,
}

/// How hidden states become the embedding of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Pooling {
    /// The hidden state of the last token.
    #[default]
    Last,
    /// The mean of the hidden states of all tokens.
    Mean,
}

impl MemoryArgs {
    /// Pixels of a picture at most.
    pub fn image_pixels(&self) -> usize {
        usize::try_from(self.image_pixels.unwrap_or(IMAGE_PIXELS_DEFAULT)).unwrap_or(usize::MAX)
    }

    /// The pictures for which a server plans; `None` for text alone. The tower works in pieces of at most `step_tokens`
    /// tokens' work.
    ///
    /// # Errors
    /// Pictures for a model without a vision tower.
    pub fn vision(&self, subject: &Subject<'_>, step_tokens: usize) -> Result<Option<VisionOptions>> {
        let config = if subject.with_tower { read_vision(&subject.json)? } else { None };
        let pictures = self.images.unwrap_or(IMAGES_DEFAULT);
        if self.image_pixels.is_some_and(|pixels| !(1..=IMAGE_PIXELS_MAX).contains(&pixels)) {
            return Err(usage(format!("--image-pixels: expected a number from 1 to {IMAGE_PIXELS_MAX}")));
        }
        match config {
            Some(config) if pictures > 0 => {
                let patches = (self.image_pixels() / config.patch.pow(2)).max(1);
                Ok(Some(VisionOptions { patches, pictures, piece_tokens: step_tokens }))
            }
            None if self.images.is_some_and(|pictures| pictures > 0) => Err(usage(
                "--images: this model reads only text: it has no vision tower, or no processor files",
            )),
            _ => Ok(None),
        }
    }

    /// Whether an option is given that only a server has.
    pub fn is_of_a_server(&self) -> bool {
        self.sequences.is_some()
            || self.kv_cache.is_some()
            || self.overcommit
            || self.prefix_states.is_some()
            || self.images.is_some()
            || self.image_pixels.is_some()
            || self.no_prefix_reuse
            || self.on_demand
            || self.drafts.is_some()
            || self.pooling.is_some()
    }
}
