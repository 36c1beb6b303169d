//! What is asked of a batch, and what comes out of it.

use std::time::{Duration, Instant};

use super::pictures::RequestSight;
use super::readout::Readout;
use crate::{EngineError, FinishReason, LateWork, SamplerOptions, SpeculationCounters, SpeculationOptions};

/// Names a request within its batch.
pub type RequestId = u64;

/// What a sequence may say next, such as a grammar.
pub trait Constraint: Send {
    /// Sets the logits of tokens that may not come next to negative infinity.
    ///
    /// # Errors
    /// A sentence for the user; the request fails with it.
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String>;

    /// Takes the token that was drawn.
    ///
    /// # Errors
    /// A sentence for the user; the request fails with it.
    fn accept(&mut self, token: u32) -> Result<(), String>;

    /// True if nothing may follow.
    fn is_complete(&self) -> bool;

    /// Whether [`Constraint::rollback`] works: without it, a sequence does not draft.
    fn can_roll_back(&self) -> bool {
        false
    }

    /// Takes back the last `tokens` tokens that were accepted.
    ///
    /// # Errors
    /// A sentence for the user; the request fails with it.
    fn rollback(&mut self, tokens: usize) -> Result<(), String> {
        Err(format!("this constraint cannot take back {tokens} tokens"))
    }
}

/// One sequence to run.
pub struct BatchRequest {
    /// Chosen by the caller; must not be in use.
    pub id: RequestId,
    /// Token ids.
    pub prompt: Vec<u32>,
    /// The pictures that the prompt shows.
    pub sight: Option<RequestSight>,
    /// Tokens at most. Room for all of them is set aside before the request starts, unless the engine has host memory to
    /// park sequences in.
    pub max_tokens: usize,
    /// How tokens are drawn.
    pub sampler: SamplerOptions,
    /// Tokens that end the text; they are not part of it.
    pub end_tokens: Vec<u32>,
    /// Log probabilities of the token drawn and of so many of the most probable.
    pub top_logprobs: Option<usize>,
    /// What may be said.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Lengths of prefixes that later prompts are likely to share, such as the system prompt.
    pub marks: Vec<usize>,
    /// The request fails when this has passed.
    pub deadline: Option<Instant>,
    /// Whether it may draft, where the engine can, even if that makes another text of the same distribution. How many drafts
    /// pay depends on the load, and with them the order in which random numbers are used: for a sampled text that its seed should decide
    /// say no. It then drafts only where a device draws its tokens, which are the same with drafts.
    pub speculate: bool,
    /// What is read of the prompt in place of an answer; `max_tokens` is 0 then.
    pub readout: Option<Readout>,
}

impl BatchRequest {
    /// A greedy request.
    pub fn new(id: RequestId, prompt: Vec<u32>, max_tokens: usize) -> BatchRequest {
        BatchRequest {
            id,
            prompt,
            sight: None,
            max_tokens,
            sampler: SamplerOptions::default(),
            end_tokens: Vec::new(),
            top_logprobs: None,
            constraint: None,
            marks: Vec::new(),
            deadline: None,
            speculate: true,
            readout: None,
        }
    }

    /// A request for no answer.
    pub fn to_read(id: RequestId, prompt: Vec<u32>, readout: Readout) -> BatchRequest {
        BatchRequest { readout: Some(readout), ..BatchRequest::new(id, prompt, 0) }
    }

    /// Whether it may begin with what earlier prompts left, and leave its own.
    pub(super) fn shares_prefixes(&self) -> bool {
        self.readout.as_ref().is_none_or(Readout::shares_prefixes)
    }
}

/// Log probabilities at one position, before penalties, temperature and constraints.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token drawn.
    pub drawn: f32,
    /// The most probable tokens, most probable first.
    pub top: Vec<(u32, f32)>,
}

/// Something happened to a request.
#[derive(Debug)]
pub enum BatchEvent {
    /// It runs from now on.
    Started {
        /// Prompt tokens that need not be run, because an earlier sequence began alike.
        cached_tokens: usize,
        /// Time in the queue.
        queued: Duration,
    },
    /// Prompt tokens that are done, the cached ones included.
    Prefilled(usize),
    /// A token was drawn.
    Token {
        /// Its id.
        id: u32,
        /// If they were asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// What was to be read of the prompt. Only the end follows.
    Read(Vec<f32>),
    /// It ended, and its memory is free again. No event follows.
    Finished(FinishReason),
    /// It failed, and its memory is free again. No event follows.
    Failed(EngineError),
}

/// Bounds of a batch.
#[derive(Clone, Copy, Debug)]
pub struct BatchOptions {
    /// Tokens of one step, decodes and prompts together, while others are waiting for it.
    pub step_tokens: usize,
    /// Requests that may wait.
    pub queue_limit: usize,
    /// How long one may wait.
    pub queue_timeout: Duration,
    /// Remember prefixes of sequences for later ones.
    pub reuse_prefixes: bool,
    /// Remember generated tokens, too. They were run in the decode regime, so a later prompt that contains them gets
    /// a result that agrees with a fresh one to rounding, not to the bit.
    pub reuse_generated: bool,
    /// How sequences draft, where the engine was made with drafts.
    pub speculation: SpeculationOptions,
}

impl Default for BatchOptions {
    fn default() -> BatchOptions {
        BatchOptions {
            step_tokens: 512,
            queue_limit: 256,
            queue_timeout: Duration::from_secs(60),
            reuse_prefixes: true,
            reuse_generated: true,
            speculation: SpeculationOptions::default(),
        }
    }
}

/// A running sequence, for display.
#[derive(Clone, Debug)]
pub struct SequenceStatus {
    /// The request.
    pub id: RequestId,
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Prompt tokens that came from an earlier sequence.
    pub cached_tokens: usize,
    /// Prompt tokens done.
    pub prefilled_tokens: usize,
    /// Tokens drawn.
    pub generated_tokens: usize,
    /// Pages held, shared ones included.
    pub pages: usize,
    /// Pages at full length.
    pub pages_promised: usize,
    /// Slot of the recurrent state.
    pub slot: u32,
    /// Drafts made.
    pub drafted: u64,
    /// Drafts accepted.
    pub accepted: u64,
}

/// Sequences that lie in host memory while others have their pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParkingStatus {
    /// Sequences that are parked now.
    pub parked: usize,
    /// Bytes that they take.
    pub bytes: u64,
    /// Bytes there are for them.
    pub bytes_max: u64,
    /// How often a sequence was parked.
    pub times: u64,
    /// Bytes copied to the host so far.
    pub bytes_out: u64,
    /// Bytes copied back so far.
    pub bytes_in: u64,
}

/// Features of pictures that are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PictureStatus {
    /// Pictures whose features are there.
    pub kept: usize,
    /// Bytes kept or promised to requests.
    pub bytes: u64,
    /// Bytes of those that requests hold.
    pub held_bytes: u64,
    /// Bytes there are for them.
    pub bytes_max: u64,
    /// How often the tower has looked at a picture.
    pub looks: u64,
}

/// Counts of a batch at one moment.
#[derive(Clone, Debug, Default)]
pub struct BatchStatus {
    /// Requests waiting.
    pub waiting: usize,
    /// The running sequences.
    pub running: Vec<SequenceStatus>,
    /// Those that are parked.
    pub parking: ParkingStatus,
    /// Pages of the pool.
    pub pages: usize,
    /// Pages that nobody holds.
    pub free_pages: usize,
    /// Pages that remembered prefixes hold, whoever else does.
    pub prefix_pages: usize,
    /// Pages that remembered prefixes alone hold.
    pub idle_prefix_pages: usize,
    /// Saved states of remembered prefixes.
    pub prefix_states: usize,
    /// Features of pictures.
    pub pictures: PictureStatus,
    /// What speculation came to, of all sequences that have ended.
    pub speculation: SpeculationCounters,
    /// Steps that have failed, tried again or not.
    pub failed_steps: u64,
    /// What was done late, while somebody may have waited.
    pub late_work: LateWork,
}
