//! Options for the memory of a server.

use clap::{Args, ValueEnum};
use keel_engine::DRAFTS_MAX;

use super::parse_bytes;

/// Largest count of sequences, waiting requests or tokens. Sums of such counts cannot overflow.
pub const COUNT_MAX: usize = 1 << 24;

/// Parses a count: from 1 to [`COUNT_MAX`].
pub fn count(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(n) if (1..=COUNT_MAX).contains(&n) => Ok(n),
        _ => Err(format!("expected a number from 1 to {COUNT_MAX}")),
    }
}

/// Bounds from which the memory of a server follows. What is not given follows the model and the machine.
#[derive(Clone, Debug, Default, Args)]
pub struct HoldingArgs {
    /// Sequences at once; by default one for each core, 4 to 16, and 16 on a GPU.
    #[arg(long, aliases = ["parallel", "max-num-seqs"], value_name = "N", value_parser = count)]
    pub sequences: Option<usize>,
    /// Tokens of one sequence, prompt and answer together; by default 8192, or the model's context if that is shorter.
    #[arg(long, short = 'c', aliases = ["ctx", "ctx-size", "num-ctx", "max-model-len"], value_name = "N")]
    pub context: Option<usize>,
    /// Memory for the keys and values of all sequences and remembered prefixes together; by default enough for 65536
    /// tokens, or for all sequences at full length if that is less. On the CPU no more than the weights take, but enough for one
    /// sequence at full length.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub kv_cache: Option<u64>,
    /// Let in more requests than the memory of keys and values can promise: a request starts when there is room for its
    /// prompt. Where pages run short the newest sequence is parked in host memory, and goes on with the same tokens when
    /// others have ended; none fails for memory.
    #[arg(long)]
    pub overcommit: bool,
    /// Host memory for parked sequences; by default enough for all keys, values and states.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, requires = "overcommit")]
    pub swap: Option<u64>,
    /// Memory for recurrent states of remembered prefixes; by default 128Mi, on the CPU no more than the weights take. Each answer
    /// at work takes one, too.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, conflicts_with = "no_prefix_reuse")]
    pub prefix_states: Option<u64>,
    /// Do not remember prefixes.
    #[arg(long)]
    pub no_prefix_reuse: bool,
    /// Take planned memory from the system as it is first used (CPU). By default all is taken at the start: then none is
    /// missing later, and no request waits while the system clears pages.
    #[arg(long, conflicts_with = "resident")]
    pub on_demand: bool,
    /// Drafts of the multi-token-prediction head that a step may verify for each sequence; by default 2 if the model has a head.
    /// How many are made is measured, down to none. A sampled request with a seed makes none on the CPU.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=DRAFTS_MAX as i64))]
    pub drafts: Option<u8>,
    /// What embeddings are: the hidden state of the last token, or the mean of those of all tokens, which takes memory for the
    /// rows of a step. What a model was trained for is in its folder's 1_Pooling/config.json.
    #[arg(long, value_name = "POOLING", value_enum, default_value_t)]
    pub pooling: Pooling,
}

/// What the embedding of a text is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Pooling {
    /// The hidden state of the last token.
    #[default]
    Last,
    /// The mean of the hidden states of all tokens.
    Mean,
}

impl HoldingArgs {
    /// Whether an option is given that only a server has.
    pub fn is_of_a_server(&self) -> bool {
        self.sequences.is_some()
            || self.kv_cache.is_some()
            || self.overcommit
            || self.prefix_states.is_some()
            || self.no_prefix_reuse
            || self.on_demand
            || self.drafts.is_some()
            || self.pooling != Pooling::default()
    }
}
