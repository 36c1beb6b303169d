//! Requests to a batch, and the events and counts that it returns.

use std::time::{Duration, Instant};

use super::pictures::RequestVision;
use super::readout::Readout;
use crate::logits_row::TokenLogprobs;
use crate::{EngineError, FinishReason, LateWork, SamplerOptions, SpeculationCounters, SpeculationOptions};

/// Names a sequence within its batch. A request of the server has one for each of its answers.
pub type SequenceId = u64;

/// Limits the tokens that a sequence may get next; for example a grammar.
pub trait Constraint: Send {
    /// Sets the logits of tokens that may not come next to negative infinity.
    ///
    /// # Errors
    /// A sentence for the user; the request fails with it.
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String>;

    /// Whether [`Constraint::mask`] takes no time. It is asked before each step of the sequence after its first token,
    /// and before each further token of a round with drafts. It may wait for `patience` if it is likely to be ready
    /// then. If it is not, the sequence sits out of the step, or its round ends, and others go on.
    fn is_ready(&mut self, _patience: Duration) -> bool {
        true
    }

    /// Takes the token that was drawn.
    ///
    /// # Errors
    /// A sentence for the user; the request fails with it.
    fn accept(&mut self, token: u32) -> Result<(), String>;

    /// Whether nothing may follow.
    fn is_complete(&self) -> bool;

    /// Whether masks are likely to be ready soon after the token before. If not, the sequence does not draft: a round
    /// ends before a mask that is not ready. It may change with each token and mask.
    fn is_quick(&self) -> bool {
        true
    }

    /// Takes back the last `tokens` tokens that were accepted, because their round is repeated.
    ///
    /// # Errors
    /// A sentence for the user; the request fails with it.
    fn rollback(&mut self, tokens: usize) -> Result<(), String> {
        Err(format!("this constraint cannot take back {tokens} tokens"))
    }
}

/// One sequence to run.
pub struct BatchRequest {
    /// Chosen by the caller. A number that is in use is refused.
    pub id: SequenceId,
    /// Token ids.
    pub prompt: Vec<u32>,
    /// The pictures that the prompt shows.
    pub vision: Option<RequestVision>,
    /// The most tokens to generate. Room for all of them is set aside before the request starts, unless the engine has
    /// host memory to park sequences in.
    pub max_tokens: usize,
    /// How tokens are drawn.
    pub sampler: SamplerOptions,
    /// Tokens that end the text; they are not part of it.
    pub end_tokens: Vec<u32>,
    /// Report the log probabilities of the drawn token and of this many of the most probable tokens.
    pub top_logprobs: Option<usize>,
    /// Limits the tokens that may come.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Lengths of prefixes that later prompts are likely to share, such as the system prompt.
    pub marks: Vec<usize>,
    /// The request fails once this time has passed.
    pub deadline: Option<Instant>,
    /// Whether it may draft even if that gives another text of the same distribution. How many drafts pay depends on
    /// the load, and the order in which random numbers are used depends on the drafts. So say no if a sampled text must
    /// follow from its seed. The request then drafts only where the device draws its tokens, which gives the same text.
    pub speculate: bool,
    /// The values to read of the prompt instead of an answer. `max_tokens` is then 0.
    pub readout: Option<Readout>,
}

impl BatchRequest {
    /// A greedy request.
    pub fn new(id: SequenceId, prompt: Vec<u32>, max_tokens: usize) -> BatchRequest {
        BatchRequest {
            id,
            prompt,
            vision: None,
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

    /// A request for a readout instead of an answer.
    pub fn to_read(id: SequenceId, prompt: Vec<u32>, readout: Readout) -> BatchRequest {
        BatchRequest { readout: Some(readout), ..BatchRequest::new(id, prompt, 0) }
    }

    /// Whether it may use remembered prefixes, and is remembered for later requests.
    pub(super) fn shares_prefixes(&self) -> bool {
        self.readout.as_ref().is_none_or(Readout::shares_prefixes)
    }
}

/// An event, with its sequence.
#[derive(Debug)]
pub struct SequenceEvent {
    /// The sequence.
    pub id: SequenceId,
    /// The event.
    pub event: BatchEvent,
}

/// An event of a sequence.
#[derive(Debug)]
pub enum BatchEvent {
    /// It runs from now on.
    Started {
        /// Prompt tokens that need not be run, because an earlier sequence began with them.
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
        /// Its log probabilities, if they were asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// The values read of the prompt. Only the end follows.
    Read(Vec<f32>),
    /// It ended, and its memory is free again. No event follows.
    Finished(FinishReason),
    /// It failed, and its memory is free again. No event follows.
    Failed(EngineError),
}

impl BatchEvent {
    /// Whether no event of its sequence follows.
    pub fn is_end(&self) -> bool {
        matches!(self, BatchEvent::Finished(_) | BatchEvent::Failed(_))
    }
}

/// Bounds of a batch.
#[derive(Clone, Copy, Debug)]
pub struct BatchOptions {
    /// The most tokens in one step, answers and prompts together. A prompt may exceed it while no other request runs or
    /// waits.
    pub step_tokens: usize,
    /// How many requests may wait. An empty queue also takes more of them if they arrive together.
    pub queue_limit: usize,
    /// How long a request may wait.
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
    pub id: SequenceId,
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

/// Sequences that are parked in host memory while others have their pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParkingStatus {
    /// Sequences that are parked now.
    pub parked: usize,
    /// Bytes that they take.
    pub bytes: u64,
    /// Bytes for parked sequences in all.
    pub bytes_max: u64,
    /// How often a sequence was parked.
    pub times: u64,
    /// Bytes copied to the host so far.
    pub bytes_out: u64,
    /// Bytes copied back so far.
    pub bytes_in: u64,
}

/// Kept features of pictures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PictureStatus {
    /// Pictures whose features are kept.
    pub kept: usize,
    /// Bytes kept or promised to requests.
    pub bytes: u64,
    /// Bytes of features that requests hold.
    pub held_bytes: u64,
    /// Bytes for features in all.
    pub bytes_max: u64,
    /// How often the tower has encoded a picture.
    pub encoded: u64,
    /// In how many pieces, of which a step does one at most.
    pub pieces: u64,
}

impl PictureStatus {
    fn add(&mut self, other: PictureStatus) {
        let PictureStatus { kept, bytes, held_bytes, bytes_max, encoded, pieces } = other;
        self.kept += kept;
        self.bytes += bytes;
        self.held_bytes += held_bytes;
        self.bytes_max += bytes_max;
        self.encoded += encoded;
        self.pieces += pieces;
    }
}

/// Counts of a batch at one moment.
#[derive(Clone, Debug, Default)]
pub struct BatchStatus {
    /// Requests waiting.
    pub waiting: usize,
    /// The running sequences.
    pub running: Vec<SequenceStatus>,
    /// Parked sequences.
    pub parking: ParkingStatus,
    /// Pages of the pool.
    pub pages: usize,
    /// Pages without an owner.
    pub free_pages: usize,
    /// Pages that remembered prefixes hold, alone or with others.
    pub prefix_pages: usize,
    /// Pages that only remembered prefixes hold.
    pub idle_prefix_pages: usize,
    /// Saved states of remembered prefixes.
    pub prefix_states: usize,
    /// Features of pictures.
    pub pictures: PictureStatus,
    /// Counts of speculation, for all sequences that have ended.
    pub speculation: SpeculationCounters,
    /// Failed steps, whether retried or not, and states that could not be saved.
    pub failed_steps: u64,
    /// Whether a device has failed for good. Every later step fails, too.
    pub is_device_lost: bool,
    /// Work that was done late, when a request may have waited for it.
    pub late_work: LateWork,
}

impl BatchStatus {
    /// Adds the counts of another batch.
    pub fn add(&mut self, other: &BatchStatus) {
        self.waiting += other.waiting;
        self.running.extend_from_slice(&other.running);
        let (parking, more) = (&mut self.parking, other.parking);
        parking.parked += more.parked;
        parking.bytes += more.bytes;
        parking.bytes_max += more.bytes_max;
        parking.times += more.times;
        parking.bytes_out += more.bytes_out;
        parking.bytes_in += more.bytes_in;
        self.pages += other.pages;
        self.free_pages += other.free_pages;
        self.prefix_pages += other.prefix_pages;
        self.idle_prefix_pages += other.idle_prefix_pages;
        self.prefix_states += other.prefix_states;
        self.pictures.add(other.pictures);
        self.speculation.add(&other.speculation);
        self.failed_steps += other.failed_steps;
        self.is_device_lost |= other.is_device_lost;
        self.late_work = self.late_work.plus(other.late_work);
    }

    /// Keeps the totals of past events and resets the values of the present state. Called for a batch that no longer
    /// exists.
    pub fn forget_gauges(&mut self) {
        let ParkingStatus { times, bytes_out, bytes_in, .. } = self.parking;
        let PictureStatus { encoded, pieces, .. } = self.pictures;
        *self = BatchStatus {
            parking: ParkingStatus { times, bytes_out, bytes_in, ..ParkingStatus::default() },
            pictures: PictureStatus { encoded, pieces, ..PictureStatus::default() },
            speculation: std::mem::take(&mut self.speculation),
            failed_steps: self.failed_steps,
            late_work: self.late_work,
            ..BatchStatus::default()
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_pictures_are_added_and_what_happened_is_kept() {
        let of = |kept, encoded| BatchStatus {
            pictures: PictureStatus {
                kept,
                bytes: 10,
                held_bytes: 4,
                bytes_max: 100,
                encoded,
                pieces: 2 * encoded,
            },
            ..BatchStatus::default()
        };
        let mut sum = of(1, 5);
        sum.add(&of(2, 7));
        let expected =
            PictureStatus { kept: 3, bytes: 20, held_bytes: 8, bytes_max: 200, encoded: 12, pieces: 24 };
        assert_eq!(sum.pictures, expected);
        sum.forget_gauges();
        assert_eq!(sum.pictures, PictureStatus { encoded: 12, pieces: 24, ..PictureStatus::default() });
    }
}
