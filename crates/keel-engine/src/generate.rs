//! One sequence from prompt to end, token by token.

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

/// The tokens of one sequence as they are generated. The prompt has been run when it is made; each call of `next`
/// runs one step.
pub struct TokenIterator<'e> {
    engine: &'e mut Engine,
    sequence: SequenceCache,
    sampler: Sampler,
    end_tokens: Vec<u32>,
    logits: Vec<f32>,
    /// Drawn, given out, not yet run through the model.
    last: Option<u32>,
    left: usize,
    finished: Option<FinishReason>,
    prefill_time: Duration,
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
            end_tokens: options.end_tokens,
            logits,
            last: None,
            left: options.max_tokens,
            finished: None,
            prefill_time: start.elapsed(),
            engine,
            sequence,
        })
    }

    /// Time that the prompt took.
    pub fn prefill_time(&self) -> Duration {
        self.prefill_time
    }

    /// Why the sequence ended, once it has.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finished
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

    fn advance(&mut self) -> Result<Option<u32>> {
        if self.finished.is_some() {
            return Ok(None);
        }
        if self.left == 0 {
            self.finished = Some(FinishReason::Length);
            return Ok(None);
        }
        if let Some(last) = self.last {
            match self.engine.decode(&mut [&mut self.sequence], &[last]) {
                Ok(()) => {}
                Err(EngineError::Context { .. }) => {
                    self.finished = Some(FinishReason::Length);
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
            self.engine.logits(0, &mut self.logits)?;
        }
        let id = self.sampler.sample(&mut self.logits);
        if self.end_tokens.contains(&id) {
            self.finished = Some(FinishReason::Stop);
            return Ok(None);
        }
        self.left -= 1;
        self.last = Some(id);
        Ok(Some(id))
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
        let item = self.advance().transpose();
        if matches!(item, Some(Err(_))) {
            self.finished = Some(FinishReason::Stop);
        }
        item
    }
}
