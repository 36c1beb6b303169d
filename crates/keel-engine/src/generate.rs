//! One sequence from prompt to end, token by token.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use keel_cache::SequenceCache;

use crate::{Engine, EngineError, Result, Sampler, SamplerOptions};

/// What to generate.
#[derive(Clone, Debug, Default)]
pub struct GenerateOptions {
    /// Tokens at most.
    pub max_tokens: usize,
    /// How tokens are drawn.
    pub sampler: SamplerOptions,
    /// Tokens that end the text; they are not part of it.
    pub end_tokens: Vec<u32>,
    /// Run the prompt token by token in the decode regime, to compare the two.
    pub one_by_one: bool,
    /// Tokens that the sequence holds already, before the prompt: for the repetition penalty.
    pub seen: Vec<u32>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token or stop string.
    Stop,
    /// As many tokens as were asked for, or as fit.
    Length,
}

impl FinishReason {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// When a sequence ends, and why it did.
pub(crate) struct Course {
    end_tokens: Vec<u32>,
    left: usize,
    finished: Option<FinishReason>,
    prefill_time: Duration,
}

impl Course {
    /// Of a sequence whose prompt, begun at `start`, has just been run.
    pub fn new(end_tokens: Vec<u32>, max_tokens: usize, start: Instant) -> Course {
        Course { end_tokens, left: max_tokens, finished: None, prefill_time: start.elapsed() }
    }

    pub fn prefill_time(&self) -> Duration {
        self.prefill_time
    }

    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finished
    }

    /// The next token, which `draw` gives if there is one, unless it is one that ends the sequence. `draw` gets the number
    /// of tokens that may still come.
    pub fn next(
        &mut self,
        draw: impl FnOnce(usize) -> Result<ControlFlow<FinishReason, u32>>,
    ) -> Option<Result<u32>> {
        if self.finished.is_some() {
            return None;
        }
        if self.left == 0 {
            self.finished = Some(FinishReason::Length);
            return None;
        }
        let (token, reason) = match draw(self.left) {
            Ok(ControlFlow::Continue(id)) if !self.end_tokens.contains(&id) => {
                self.left -= 1;
                return Some(Ok(id));
            }
            Ok(ControlFlow::Continue(_)) => (None, FinishReason::Stop),
            Ok(ControlFlow::Break(reason)) => (None, reason),
            Err(error) => (Some(Err(error)), FinishReason::Stop),
        };
        self.finished = Some(reason);
        token
    }
}

/// The tokens of one sequence as they are generated. The prompt has been run when it is made; each call of `next`
/// runs one step.
pub struct TokenIterator<'e> {
    engine: &'e mut Engine,
    sequence: SequenceCache,
    sampler: Sampler,
    logits: Vec<f32>,
    /// Drawn, given out, not yet run through the model.
    last: Option<u32>,
    course: Course,
}

impl<'e> TokenIterator<'e> {
    /// Runs `prompt` behind what `sequence` holds. `progress` gets the prompt tokens done.
    ///
    /// # Errors
    /// Options out of range, a prompt that does not fit or is empty, what the runtime says. The sequence is
    /// released then.
    pub fn new(
        engine: &'e mut Engine,
        mut sequence: SequenceCache,
        prompt: &[u32],
        options: GenerateOptions,
        progress: &mut dyn FnMut(usize),
    ) -> Result<TokenIterator<'e>> {
        let start = Instant::now();
        let mut logits = Vec::new();
        let run = if options.one_by_one { run_one_by_one } else { Engine::prefill };
        let prefilled = Sampler::new(options.sampler, &[&options.seen[..], prompt].concat())
            .and_then(|sampler| run(engine, &mut sequence, prompt, &mut logits, progress).map(|()| sampler));
        let sampler = match prefilled {
            Ok(sampler) => sampler,
            Err(error) => {
                engine.release(sequence);
                return Err(error);
            }
        };
        Ok(TokenIterator {
            sampler,
            logits,
            last: None,
            course: Course::new(options.end_tokens, options.max_tokens, start),
            engine,
            sequence,
        })
    }

    /// Time that the prompt took.
    pub fn prefill_time(&self) -> Duration {
        self.course.prefill_time()
    }

    /// Why the sequence ended, once it has.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.course.finish_reason()
    }

    /// Ends the iteration and gives the sequence back for a further turn. It holds the prompt and the generated
    /// tokens but the last.
    pub fn into_sequence(self) -> SequenceCache {
        self.sequence
    }

    /// Ends the iteration and releases the sequence's memory.
    pub fn release(self) {
        self.engine.release(self.sequence);
    }
}

/// What [`Engine::prefill`] does, in the decode regime.
fn run_one_by_one(
    engine: &mut Engine,
    sequence: &mut SequenceCache,
    prompt: &[u32],
    logits: &mut Vec<f32>,
    progress: &mut dyn FnMut(usize),
) -> Result<()> {
    if prompt.is_empty() {
        return Err(EngineError::EmptyPrompt);
    }
    for (i, &token) in prompt.iter().enumerate() {
        engine.decode(&mut [sequence], &[token])?;
        progress(i + 1);
    }
    engine.logits(0, logits)
}

impl Iterator for TokenIterator<'_> {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Result<u32>> {
        let TokenIterator { engine, sequence, sampler, logits, last, course } = self;
        course.next(|_| {
            let mut drawn = None;
            if let Some(last) = *last {
                match engine.decode_and_draw(&mut [sequence], &[last], &[sampler.draw_ahead()]) {
                    Ok(tokens) => drawn = tokens[0],
                    Err(EngineError::Context { .. }) => return Ok(ControlFlow::Break(FinishReason::Length)),
                    Err(error) => return Err(error),
                }
                if drawn.is_none() {
                    engine.logits(0, logits)?;
                }
            }
            let id = drawn.unwrap_or_else(|| sampler.pick(logits));
            sampler.note(id);
            *last = Some(id);
            Ok(ControlFlow::Continue(id))
        })
    }
}
