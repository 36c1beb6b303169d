//! Generates one sequence with speculation, token by token.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use keel_cache::SequenceCache;

use super::{
    Choice, Chooser, RoundSequence, SamplerChooser, Speculation, SpeculationCounters, SpeculationOptions,
};
use crate::generate::Course;
use crate::{Engine, EngineError, FinishReason, GenerateOptions, Result, Sampler};

/// As [`crate::TokenIterator`], but a step gives several tokens where drafts are accepted. Greedy tokens are the same;
/// sampled tokens have the same distribution.
pub struct MtpTokenIterator<'e> {
    rounds: Rounds<'e>,
    course: Course,
}

/// The rounds of one sequence.
struct Rounds<'e> {
    engine: &'e mut Engine,
    sequence: SequenceCache,
    speculation: Speculation,
    chooser: Box<dyn Chooser>,
    /// Tokens of the last round that were not taken yet.
    ready: VecDeque<u32>,
    /// The token drawn last. It has not been run.
    last: u32,
    /// Whether another round may follow.
    is_open: bool,
}

impl<'e> MtpTokenIterator<'e> {
    /// Runs `prompt` after the tokens that `sequence` holds. `progress` gets the number of prompt tokens done. The
    /// engine must have been made with drafts. [`SpeculationOptions::repeatable`] is ignored for a greedy sequence,
    /// which does not need it.
    ///
    /// # Errors
    /// As [`crate::TokenIterator::new`]. The sequence is then released.
    pub fn new(
        engine: &'e mut Engine,
        sequence: SequenceCache,
        prompt: &[u32],
        options: GenerateOptions,
        mut speculation: SpeculationOptions,
        progress: &mut dyn FnMut(usize),
    ) -> Result<MtpTokenIterator<'e>> {
        speculation.repeatable &= options.sampler.temperature > 0.0;
        let sampler = Sampler::new(options.sampler.clone(), &[&options.seen[..], prompt].concat());
        let chooser = sampler.map(|s| SamplerChooser::new(s, None, options.end_tokens.clone()));
        let how = (options, speculation);
        MtpTokenIterator::with_chooser(engine, sequence, prompt, how, Box::new(chooser?), progress)
    }

    /// As [`MtpTokenIterator::new`], but `chooser` chooses tokens and drafts; the options' sampler is not used.
    ///
    /// # Errors
    /// As [`MtpTokenIterator::new`].
    pub fn with_chooser(
        engine: &'e mut Engine,
        mut sequence: SequenceCache,
        prompt: &[u32],
        (options, speculation): (GenerateOptions, SpeculationOptions),
        mut chooser: Box<dyn Chooser>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<MtpTokenIterator<'e>> {
        let start = Instant::now();
        let drawn = engine.run_prompt(&mut sequence, prompt, chooser.draw_ahead(), progress)?;
        let speculation = Speculation::new(speculation, engine.last_hidden()?);
        let choice = choose_first(engine, &mut *chooser, drawn)?;
        let rounds = Rounds {
            engine,
            sequence,
            speculation,
            chooser,
            ready: VecDeque::from([choice.token]),
            last: choice.token,
            is_open: !choice.is_last,
        };
        Ok(MtpTokenIterator { rounds, course: Course::new(options.end_tokens, options.max_tokens, start) })
    }

    /// Time that the prompt took.
    pub fn prefill_time(&self) -> Duration {
        self.course.prefill_time()
    }

    /// Why the sequence ended, once it has.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.course.finish_reason()
    }

    /// Counts and times of its rounds.
    pub fn counters(&self) -> &SpeculationCounters {
        self.rounds.speculation.counters()
    }

    /// Ends the iteration and returns the sequence for a further turn. It holds the prompt and the tokens taken,
    /// without the last of them.
    pub fn into_sequence(self) -> SequenceCache {
        let Rounds { mut sequence, mut speculation, ready, .. } = self.rounds;
        // The first token came with the prompt. It has no row of a round.
        if speculation.counters().rounds > 0 {
            speculation.take_back(&mut sequence, ready.len());
        }
        sequence
    }

    /// Ends the iteration and releases the sequence's memory, as dropping it does.
    pub fn release(self) {}
}

/// The token after a prompt that has just been run. `drawn` is that token if the device drew it.
fn choose_first(engine: &Engine, chooser: &mut dyn Chooser, drawn: Option<u32>) -> Result<Choice> {
    if let Some(token) = drawn {
        return chooser.take(token);
    }
    let mut logits = Vec::new();
    engine.logits(0, &mut logits)?;
    chooser.choose(&mut logits, None)
}

impl Rounds<'_> {
    /// The next token. At most `left` may still come.
    fn draw(&mut self, left: usize) -> Result<ControlFlow<FinishReason, u32>> {
        if self.ready.is_empty() && self.is_open && !self.run_round(left)? {
            return Ok(ControlFlow::Break(FinishReason::Length));
        }
        Ok(match self.ready.pop_front() {
            Some(id) => ControlFlow::Continue(id),
            None => ControlFlow::Break(FinishReason::Stop),
        })
    }

    /// Runs a round and queues its tokens. Returns false if the context is full.
    fn run_round(&mut self, left: usize) -> Result<bool> {
        let round = self.engine.round(&mut [RoundSequence {
            cache: &mut self.sequence,
            speculation: &mut self.speculation,
            chooser: &mut *self.chooser,
            last: self.last,
            tokens_max: left,
        }]);
        match round {
            Ok(rounds) => {
                for round in rounds {
                    self.is_open = !round.is_last;
                    self.last = round.tokens.last().copied().unwrap_or(self.last);
                    self.ready.extend(round.tokens);
                }
                Ok(true)
            }
            Err(EngineError::Context { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Iterator for MtpTokenIterator<'_> {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Result<u32>> {
        let MtpTokenIterator { rounds, course } = self;
        course.next(|left| rounds.draw(left))
    }
}
