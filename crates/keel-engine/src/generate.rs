//! Generates one sequence token by token, from its prompt to its end.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use keel_array::sampling::Draw;
use keel_cache::SequenceCache;

use crate::batch::Constraint;
use crate::options::MTP_LAG_MAX;
use crate::speculation::{Choice, Chooser, Round, RoundSequence, SamplerChooser, Speculation};
use crate::step::drafts_not_planned;
use crate::{
    Engine, EngineError, HostReads, Result, Sampler, SamplerOptions, SpeculationCounters, SpeculationOptions,
    Ticket, Work, WorkRows,
};

/// Options of a generated text.
#[derive(Clone, Debug, Default)]
pub struct GenerateOptions {
    /// Tokens at most.
    pub max_tokens: usize,
    /// How tokens are drawn.
    pub sampler: SamplerOptions,
    /// Tokens that end the text; they are not part of it.
    pub end_tokens: Vec<u32>,
    /// How the sequence drafts, if it does. An engine that was made without drafts refuses it. For greedy tokens
    /// [`SpeculationOptions::repeatable`] is ignored, because they do not need it.
    pub speculation: Option<SpeculationOptions>,
    /// Run the prompt token by token in the decode regime, to compare the two. There are no drafts then.
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

/// The tokens of one sequence as they are generated. The constructor runs the prompt; each call of `next` then gives
/// one token.
///
/// It is a batch of one: the steps are those of [`Engine::submit`] where the device draws every token and a step too
/// many can be given up, and those of [`Engine::round`] otherwise. Greedy tokens are the same with drafts and without;
/// sampled tokens have the same distribution.
pub struct TokenIterator<'e> {
    engine: &'e mut Engine,
    /// `None` once it is given to the caller.
    sequence: Option<SequenceCache>,
    chooser: Box<dyn Chooser>,
    speculation: Option<Speculation>,
    /// Whether a step is submitted before the token of the previous step is known.
    is_ahead: bool,
    /// Steps that were submitted and not taken.
    in_flight: VecDeque<Ticket>,
    /// Chosen tokens that were not given out yet.
    ready: VecDeque<u32>,
    /// The token chosen last. It has not been run.
    last: u32,
    /// Whether more tokens may be chosen.
    is_open: bool,
    /// All tokens of the sequence, kept while it may outgrow its rotary frequencies. The last one has not been run.
    history: Option<Vec<u32>>,
    end_tokens: Vec<u32>,
    /// How many tokens may still be given out.
    left: usize,
    finished: Option<FinishReason>,
    /// Whether a step has failed. No token follows, and there is no reason to end.
    has_failed: bool,
    prefill_time: Duration,
}

impl<'e> TokenIterator<'e> {
    /// Runs `prompt` after the tokens that `sequence` holds. `progress` gets the number of prompt tokens done.
    ///
    /// # Errors
    /// Options out of range, a prompt that is empty or does not fit, a failure of the runtime. The sequence is then
    /// released.
    pub fn new(
        engine: &'e mut Engine,
        sequence: SequenceCache,
        prompt: &[u32],
        options: GenerateOptions,
        progress: &mut dyn FnMut(usize),
    ) -> Result<TokenIterator<'e>> {
        TokenIterator::within(engine, sequence, prompt, options, None, progress)
    }

    /// As [`TokenIterator::new`]. If there is a constraint, the tokens obey it, and the text makes no drafts.
    ///
    /// # Errors
    /// As [`TokenIterator::new`]; errors of the constraint.
    pub fn within(
        engine: &'e mut Engine,
        sequence: SequenceCache,
        prompt: &[u32],
        mut options: GenerateOptions,
        constraint: Option<Box<dyn Constraint>>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<TokenIterator<'e>> {
        options.speculation = options.speculation.filter(|_| constraint.is_none());
        let is_sampled = options.sampler.temperature > 0.0;
        options.speculation.iter_mut().for_each(|how| how.repeatable &= is_sampled);
        options.sampler.check_tokens(engine.model().config.vocab)?;
        let sampler = Sampler::new(options.sampler.clone(), &[&options.seen[..], prompt].concat())?;
        let chooser = SamplerChooser::new(sampler, constraint, options.end_tokens.clone());
        TokenIterator::with_chooser(engine, sequence, prompt, options, Box::new(chooser), progress)
    }

    /// As [`TokenIterator::new`], but `chooser` chooses tokens and drafts, for example within a grammar. The options'
    /// sampler is not used.
    ///
    /// # Errors
    /// As [`TokenIterator::new`]; errors of the constraint.
    pub fn with_chooser(
        engine: &'e mut Engine,
        mut sequence: SequenceCache,
        prompt: &[u32],
        options: GenerateOptions,
        mut chooser: Box<dyn Chooser>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<TokenIterator<'e>> {
        let speculation = options.speculation.filter(|_| !options.one_by_one);
        if speculation.is_some() && engine.options().drafts == 0 {
            return Err(drafts_not_planned());
        }
        let start = Instant::now();
        let is_known = options.seen.len() == sequence.len();
        let run = if options.one_by_one { run_one_by_one } else { Engine::run_prompt };
        let drawn = run(engine, &mut sequence, prompt, chooser.draw_next(), progress)?;
        let drafts = |how| Ok::<_, EngineError>(Speculation::new(how, engine.last_hidden()?));
        let speculation = speculation.map(drafts).transpose()?;
        let first = choose_first(engine, &mut *chooser, drawn)?;
        let is_safe = options.disposable || engine.can_take_back();
        let history = || [&options.seen[..], prompt, &[first.token]].concat();
        Ok(TokenIterator {
            is_ahead: is_safe && engine.runs_ahead() && chooser.draws_ahead(),
            history: (is_known && engine.may_outgrow(&sequence)).then(history),
            engine,
            sequence: Some(sequence),
            chooser,
            speculation,
            in_flight: VecDeque::new(),
            ready: VecDeque::from([first.token]),
            last: first.token,
            is_open: !first.is_last,
            end_tokens: options.end_tokens,
            left: options.max_tokens,
            finished: None,
            has_failed: false,
            prefill_time: start.elapsed(),
        })
    }

    /// Time that the prompt took.
    pub fn prefill_time(&self) -> Duration {
        self.prefill_time
    }

    /// Why the sequence ended, once it has. There is no reason after an error.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finished
    }

    /// Counts and times of its rounds, if it drafts.
    pub fn counters(&self) -> Option<&SpeculationCounters> {
        self.speculation.as_ref().map(Speculation::counters)
    }

    /// Ends the iteration and returns the sequence for a further turn. It holds the prompt and the tokens given out,
    /// but not the last of them. A disposable sequence may have to be rewound before it goes on.
    pub fn into_sequence(mut self) -> SequenceCache {
        let sequence = self.leave();
        sequence.unwrap_or_else(|| unreachable!("the sequence is given away only here"))
    }

    /// Takes back the rows after the last token given out.
    fn leave(&mut self) -> Option<SequenceCache> {
        let mut sequence = self.sequence.take()?;
        self.engine.give_up_steps(&mut sequence);
        // The first token came with the prompt. It has no row of a round.
        let drafting = self.speculation.as_mut().filter(|drafts| drafts.counters().rounds > 0);
        if let Some(speculation) = drafting {
            speculation.take_back(&mut sequence, self.ready.len());
        }
        Some(sequence)
    }

    /// The next token, or the reason to end. An end token ends the sequence and is not given out.
    fn draw(&mut self) -> Result<ControlFlow<FinishReason, u32>> {
        if self.ready.is_empty() && self.is_open && self.left > 0 {
            let Some(mut sequence) = self.sequence.take() else {
                return Ok(ControlFlow::Break(FinishReason::Stop));
            };
            let chosen = self.choose(&mut sequence);
            self.sequence = Some(sequence);
            match chosen {
                Err(EngineError::Context { .. }) => return Ok(ControlFlow::Break(FinishReason::Length)),
                outcome => outcome?,
            }
        }
        if self.left == 0 && (self.is_open || !self.ready.is_empty()) {
            return Ok(ControlFlow::Break(FinishReason::Length));
        }
        Ok(match self.ready.pop_front().filter(|id| !self.end_tokens.contains(id)) {
            Some(id) => ControlFlow::Continue(id),
            None => ControlFlow::Break(FinishReason::Stop),
        })
    }

    /// Chooses at least one more token.
    fn choose(&mut self, sequence: &mut SequenceCache) -> Result<()> {
        let mut outcome = self.step(sequence);
        if let (Err(EngineError::Outgrown { .. }), Some(all)) = (&outcome, &self.history) {
            self.engine.run_as_long(sequence, &all[..all.len() - 1])?;
            outcome = self.step(sequence);
        }
        let Round { tokens, is_last } = outcome?;
        self.is_open = !is_last;
        self.last = tokens.last().copied().unwrap_or(self.last);
        match &mut self.history {
            Some(all) if !sequence.is_long() => all.extend_from_slice(&tokens),
            _ => self.history = None,
        }
        self.ready.extend(tokens);
        Ok(())
    }

    /// Runs the last token and chooses at least one.
    fn step(&mut self, sequence: &mut SequenceCache) -> Result<Round> {
        if self.is_ahead && (!self.in_flight.is_empty() || self.stays_plain(sequence)) {
            return self.step_ahead(sequence);
        }
        let mut rounds = self.engine.round(&mut [RoundSequence {
            cache: sequence,
            speculation: self.speculation.as_mut(),
            chooser: &mut *self.chooser,
            last: self.last,
            tokens_max: self.left,
        }])?;
        rounds.swap_remove(0)
    }

    /// Whether no drafts are made after the steps under way.
    fn stays_plain(&self, sequence: &SequenceCache) -> bool {
        let Some(speculation) = &self.speculation else { return true };
        let (room, ahead) = (self.engine.room_of(sequence), self.in_flight.len());
        !self.engine.wants_drafts(speculation, &*self.chooser, room, self.left, 1, ahead)
    }

    /// Lets the MTP (multi-token-prediction) head catch up after the steps under way, if it lags far behind.
    fn catch_up(&mut self, sequence: &SequenceCache) -> Result<()> {
        let ahead = self.in_flight.len();
        let lagging =
            self.speculation.as_mut().filter(|speculation| speculation.lag_after(ahead) >= MTP_LAG_MAX);
        match lagging.filter(|_| self.engine.can_catch_up_ahead()) {
            Some(speculation) => self.engine.catch_up_ahead(&mut [(sequence, speculation)]),
            None => Ok(()),
        }
    }

    /// As [`TokenIterator::step`], but submits the next step before it waits for this one, unless only one token may
    /// still come or drafts are to be made.
    fn step_ahead(&mut self, sequence: &mut SequenceCache) -> Result<Round> {
        if self.in_flight.is_empty() {
            // The steps after it add rows whose hidden states the host reads.
            self.engine.fetch_lags(&mut self.speculation)?;
            self.submit(sequence, WorkRows::Token(self.last))?;
        }
        self.catch_up(sequence)?;
        if self.left > 1 && self.stays_plain(sequence) {
            // An error is ignored here: it comes again when this token is wanted.
            self.submit(sequence, WorkRows::Drawn(0)).ok();
        }
        let Some(ticket) = self.in_flight.pop_front() else { unreachable!("a step was submitted") };
        let drawn = self.engine.take(ticket).inspect_err(|_| {
            let later = std::mem::take(&mut self.in_flight).len();
            self.engine.give_up(sequence, 1 + later, later > 0);
        })?;
        sequence.advance(1);
        self.chooser.begin();
        let Some(token) = drawn[0] else { unreachable!("the device draws for this sequence") };
        let Choice { token, is_last } = self.chooser.take(token)?;
        if let Some(speculation) = &mut self.speculation {
            let time = self.engine.taken.share();
            match self.engine.hidden_of(0) {
                Ok(hidden) => speculation.note_plain(self.last, hidden, token, time),
                // The text goes on without drafts.
                Err(_) => self.speculation = None,
            }
        }
        Ok(Round { tokens: vec![token], is_last })
    }

    fn submit(&mut self, sequence: &mut SequenceCache, rows: WorkRows<'_>) -> Result<()> {
        let (ahead, draw) = (self.in_flight.len(), self.chooser.draw_next());
        let work = Work { sequence, ahead, rows, draw, reads: HostReads::Nothing };
        let ticket = self.engine.submit(&mut [work]).inspect_err(|_| self.chooser.forget_draws(1))?;
        self.in_flight.push_back(ticket);
        Ok(())
    }
}

impl Drop for TokenIterator<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Iterator for TokenIterator<'_> {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Result<u32>> {
        if self.has_failed || self.finished.is_some() {
            return None;
        }
        match self.draw() {
            Ok(ControlFlow::Continue(id)) => {
                self.left -= 1;
                Some(Ok(id))
            }
            Ok(ControlFlow::Break(reason)) => {
                self.finished = Some(reason);
                None
            }
            Err(error) => {
                self.has_failed = true;
                Some(Err(error))
            }
        }
    }
}

/// The token after a prompt that has just been run. `drawn` is that token if the device drew it.
fn choose_first(engine: &mut Engine, chooser: &mut dyn Chooser, drawn: Option<u32>) -> Result<Choice> {
    if let Some(token) = drawn {
        return chooser.take(token);
    }
    engine.with_logits_row(|engine, row| {
        engine.logits(0, &mut row.values)?;
        chooser.choose(row, None)
    })
}

/// As [`Engine::run_prompt`], in the decode regime.
fn run_one_by_one(
    engine: &mut Engine,
    sequence: &mut SequenceCache,
    prompt: &[u32],
    draw: Option<Draw>,
    progress: &mut dyn FnMut(usize),
) -> Result<Option<u32>> {
    engine.choose_rope_frequencies(sequence, sequence.len() + prompt.len());
    let mut first = Err(EngineError::EmptyPrompt);
    for (i, &token) in prompt.iter().enumerate() {
        let draw = draw.filter(|_| i + 1 == prompt.len());
        first = Ok(engine.decode_and_draw(&mut [sequence], &[token], &[draw])?[0]);
        progress(i + 1);
    }
    first
}
