//! Generates one sequence token by token, from its prompt to its end.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use keel_array::sampling::Draw;
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
    /// Tokens that the sequence already holds before the prompt. The repetition penalty counts them.
    pub seen: Vec<u32>,
    /// The caller will release or rewind the sequence after the text, and never continue where it ends. Then steps may
    /// run ahead even if a step too many leaves a trace: see [`Engine::can_take_back`].
    pub disposable: bool,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token or stop string.
    Stop,
    /// The number of tokens asked for, or a full context.
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
    /// For a sequence whose prompt was begun at `start` and has just been run.
    pub fn new(end_tokens: Vec<u32>, max_tokens: usize, start: Instant) -> Course {
        Course { end_tokens, left: max_tokens, finished: None, prefill_time: start.elapsed() }
    }

    pub fn prefill_time(&self) -> Duration {
        self.prefill_time
    }

    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finished
    }

    /// Returns the next token, or `None` once the sequence has ended. `draw` gets the number of tokens that may still
    /// come; it gives a token or the reason to end. An end token ends the sequence and is not returned.
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

/// The tokens of one sequence as they are generated. The constructor runs the prompt; each call of `next` then gives
/// one token.
pub struct TokenIterator<'e> {
    engine: &'e mut Engine,
    /// `None` once it is given to the caller.
    sequence: Option<SequenceCache>,
    sampler: Sampler,
    logits: Vec<f32>,
    /// The token after the prompt, if the device drew it. Otherwise `logits` are those of the prompt's last token.
    first: Option<u32>,
    /// The token given out last. It has not been run through the model.
    last: Option<u32>,
    /// Whether a step is submitted before the token of the previous step is known.
    is_ahead: bool,
    /// All tokens of the sequence, kept while it may outgrow its rotary frequencies. The last one has not been run.
    history: Option<Vec<u32>>,
    course: Course,
}

impl<'e> TokenIterator<'e> {
    /// Runs `prompt` after the tokens that `sequence` holds. `progress` gets the number of prompt tokens done.
    ///
    /// # Errors
    /// Options out of range, a prompt that is empty or does not fit, a failure of the runtime. The sequence is then
    /// released.
    pub fn new(
        engine: &'e mut Engine,
        mut sequence: SequenceCache,
        prompt: &[u32],
        options: GenerateOptions,
        progress: &mut dyn FnMut(usize),
    ) -> Result<TokenIterator<'e>> {
        let start = Instant::now();
        let mut logits = Vec::new();
        let is_known = options.seen.len() == sequence.len();
        let history = [&options.seen[..], prompt].concat();
        let run = if options.one_by_one { run_one_by_one } else { Engine::run_prompt };
        let mut sampler = Sampler::new(options.sampler, &history)?;
        let first = run(engine, &mut sequence, prompt, sampler.draw_ahead(), progress)?;
        if first.is_none() {
            engine.logits(0, &mut logits)?;
        }
        let is_safe = options.disposable || engine.can_take_back();
        Ok(TokenIterator {
            is_ahead: is_safe && engine.runs_ahead() && sampler.draws_ahead(),
            sampler,
            logits,
            first,
            last: None,
            history: (is_known && engine.may_outgrow(&sequence)).then_some(history),
            course: Course::new(options.end_tokens, options.max_tokens, start),
            engine,
            sequence: Some(sequence),
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

    /// Ends the iteration and returns the sequence for a further turn. It holds the prompt and all generated tokens but
    /// the last. A disposable sequence may have to be rewound before it goes on.
    pub fn into_sequence(mut self) -> SequenceCache {
        self.give_up_steps().unwrap_or_else(|| unreachable!("the sequence is given away only here"))
    }

    /// Ends the iteration and releases the sequence's memory, as dropping it does.
    pub fn release(self) {}

    /// Gives up the step after the last token.
    fn give_up_steps(&mut self) -> Option<SequenceCache> {
        let mut sequence = self.sequence.take()?;
        let outcome = self.engine.give_up_steps(&mut [&mut sequence]);
        outcome.unwrap_or_else(|error| unreachable!("the steps under way are this sequence's: {error}"));
        Some(sequence)
    }
}

impl Drop for TokenIterator<'_> {
    fn drop(&mut self) {
        self.give_up_steps();
    }
}

/// Runs a token and draws the next. Returns `None` if the host has to draw it from the logits of this step.
fn step(
    engine: &mut Engine,
    sequence: &mut SequenceCache,
    sampler: &mut Sampler,
    last: u32,
) -> Result<Option<u32>> {
    Ok(engine.decode_and_draw(&mut [sequence], &[last], &[sampler.draw_ahead()])?[0])
}

/// As [`step`], but submits the next step before it waits for this one, unless only one of `left` tokens remains.
fn step_ahead(
    engine: &mut Engine,
    sequence: &mut SequenceCache,
    sampler: &mut Sampler,
    last: u32,
    left: usize,
) -> Result<Option<u32>> {
    let mut submit = |engine: &mut Engine, sequence: &mut SequenceCache, token: Option<&[u32]>| {
        let before = sampler.random();
        let Some(draw) = sampler.draw_ahead() else { unreachable!("the device draws for this sampler") };
        let submitted = engine.submit_decode(&mut [sequence], token, &[draw]);
        submitted.inspect_err(|_| sampler.set_random(before))
    };
    if engine.steps_under_way() == 0 {
        submit(engine, sequence, Some(&[last]))?;
    }
    if left > 1 && sequence.len() + engine.steps_under_way() < engine.options().context {
        // An error is ignored here: it comes again when this token is wanted.
        submit(engine, sequence, None).ok();
    }
    Ok(Some(engine.take_drawn(&mut [sequence])?[0]))
}

/// As [`Engine::run_prompt`], in the decode regime.
fn run_one_by_one(
    engine: &mut Engine,
    sequence: &mut SequenceCache,
    prompt: &[u32],
    draw: Option<Draw>,
    progress: &mut dyn FnMut(usize),
) -> Result<Option<u32>> {
    engine.settle_turns(sequence, sequence.len() + prompt.len());
    let mut first = Err(EngineError::EmptyPrompt);
    for (i, &token) in prompt.iter().enumerate() {
        let draw = draw.filter(|_| i + 1 == prompt.len());
        first = Ok(engine.decode_and_draw(&mut [sequence], &[token], &[draw])?[0]);
        progress(i + 1);
    }
    first
}

impl Iterator for TokenIterator<'_> {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Result<u32>> {
        let TokenIterator { engine, sequence, sampler, logits, first, last, is_ahead, history, course } =
            self;
        let sequence = sequence.as_mut()?;
        course.next(|left| {
            let mut drawn = first.take();
            if let Some(last) = *last {
                let mut run = |engine: &mut Engine, sequence: &mut SequenceCache| match is_ahead {
                    true => step_ahead(engine, sequence, sampler, last, left),
                    false => step(engine, sequence, sampler, last),
                };
                let outcome = match (run(engine, sequence), history.as_ref().and_then(|all| all.split_last()))
                {
                    (Err(EngineError::Outgrown { .. }), Some((_, before))) => {
                        engine.run_as_long(sequence, before).and_then(|()| run(engine, sequence))
                    }
                    (outcome, _) => outcome,
                };
                match outcome {
                    Ok(token) => drawn = token,
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
            match history {
                Some(all) if !sequence.is_long() => all.push(id),
                _ => *history = None,
            }
            Ok(ControlFlow::Continue(id))
        })
    }
}
