//! A loaded model, and the path from a request to running answers.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;

use keel_engine::SamplerOptions;
use keel_engine::batch::{BatchRequest, RequestVision};
use keel_text::{AnswerForm, GrammarSource, StopMatcher};
use tracing::field::Empty;

use crate::access::caller::Caller;
use crate::answer::{Answer, AnswerStyle};
use crate::engine::grammar::{Compiled, Grammar};
use crate::engine::worker::{EngineHandle, NewRequest};
use crate::error::{Result, ServerError, wrong};
use crate::memory::requests::{Listing, bytes_of_value};
use crate::metrics::RequestTimer;
use crate::shared::{Shared, fresh_seed};
use crate::text::{Bounds, ServedText};

/// A loaded model.
pub struct LoadedModel {
    pub(crate) shared: Arc<Shared>,
    /// Its name in the API.
    pub id: String,
    /// The engine's thread.
    pub engine: EngineHandle,
    /// The text side.
    pub text: ServedText,
}

impl Deref for LoadedModel {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

/// A request in the engine's terms, independent of its API.
pub(crate) struct EngineRequest {
    pub prompt: Vec<u32>,
    /// The pictures that it shows.
    pub vision: Option<RequestVision>,
    /// Lengths of prefixes that later prompts may share.
    pub marks: Vec<usize>,
    /// `None` means the server's default. The room in the context bounds both.
    pub max_tokens: Option<usize>,
    pub sampler: SamplerOptions,
    /// `None` means a new seed for each request.
    pub seed: Option<u64>,
    pub stop: Vec<String>,
    pub choices: usize,
    pub ignore_eos: bool,
    pub top_logprobs: Option<usize>,
    /// How tokens are listed, if `top_logprobs` is given.
    pub listing: Listing,
    pub grammar: Option<Grammar>,
    /// The answer ends after its first tool call.
    pub one_call: bool,
    pub form: AnswerForm,
}

/// Heap bytes that each answer of a request holds in addition to its prompt.
pub(crate) fn bytes_of_copy(
    stop: &[String],
    sampler: &SamplerOptions,
    grammar: Option<&Grammar>,
    form: &AnswerForm,
) -> u64 {
    /// A stop string's text, and the table that finds it.
    const PER_STOP_BYTE: usize = 2 * size_of::<usize>();
    let stops: usize = stop.iter().map(|stop| stop.len() * PER_STOP_BYTE + size_of::<[usize; 16]>()).sum();
    // The engine keeps a copy of its own.
    let biases = 2 * size_of_val(&sampler.logit_bias[..]);
    let grammar = grammar.map_or(0, |grammar| match &grammar.0 {
        GrammarSource::JsonSchema(schema) => bytes_of_value(schema),
        GrammarSource::Lark(text) | GrammarSource::Regex(text) => text.len() as u64,
    });
    (stops + biases) as u64 + grammar + form.tools.iter().map(bytes_of_value).sum::<u64>()
}

impl LoadedModel {
    /// The largest number of tokens of an answer: the requested number or the room in the context, whichever is less.
    /// An answer that reaches it ends with `length`.
    fn max_tokens(&self, ask: &EngineRequest) -> Result<usize> {
        let (prompt, context) = (ask.prompt.len(), self.engine.context());
        if prompt >= context {
            let context_max = self.engine.context_max();
            return Err(ServerError::PromptTooLong { prompt, context, context_max });
        }
        Ok(ask.max_tokens.unwrap_or(self.options.max_tokens_default).min(context - prompt))
    }

    /// Bounds on requests.
    pub(crate) fn bounds<'a>(&'a self, caller: &'a Caller) -> Bounds<'a> {
        Bounds {
            vocab: self.engine.vocab(),
            context: self.engine.context(),
            context_max: self.engine.context_max(),
            answer_min: 1,
            choices_max: self.options.choices_max,
            sources: Some(&self.options.pictures),
            meter: Some(&caller.meter),
        }
    }

    /// The grammars of `count` answers; none if `ask` has no grammar. `compiled` is the one that is left of an earlier
    /// prompt, so a grammar is compiled once.
    async fn grammars(
        self: &Arc<Self>,
        caller: &Caller,
        ask: &EngineRequest,
        compiled: Option<Compiled>,
        count: usize,
    ) -> Result<Vec<Compiled>> {
        let wait = self.options.batch.queue_timeout;
        if let Some(compiled) = compiled {
            let bytes = compiled.bytes() * count as u64;
            return self.works.text(bytes, wait, move || compiled.copies(count)).await;
        }
        let Some(grammar) = ask.grammar.clone() else { return Ok(Vec::new()) };
        let (model, charge) = (Arc::clone(self), caller.meter.part());
        let seat = self.works.grammar_seat(wait, || charge.take(grammar.0.compile_bytes() as u64)).await?;
        let compile = move || model.text.grammars.compile(&grammar, charge)?.copies(count);
        self.works.grammar(seat, self.options.grammar_time, compile).await
    }

    /// Starts the answers to all prompts of a request. They arrive together, and the first one is waited for. Prompts
    /// with a grammar arrive one after the other: each answer has a copy of the compiled grammar, which is large.
    /// `endpoint` is the path of the request. An error ends all answers of the request.
    pub(crate) async fn start(
        self: &Arc<Self>,
        endpoint: &'static str,
        caller: &Arc<Caller>,
        mut asks: Vec<EngineRequest>,
    ) -> Result<Vec<Answer>> {
        if self.is_draining() {
            return Err(ServerError::Draining);
        }
        // If one answer can never run, none runs.
        for ask in &asks {
            let (choices, choices_max) = (ask.choices, self.options.choices_max);
            if choices == 0 || choices > choices_max {
                return Err(wrong("n", format!("{choices} answers, expected 1 to {choices_max}")));
            }
            self.max_tokens(ask)?;
        }
        let deadline = caller.arrived.checked_add(self.options.deadline);
        let (mut answers, mut grammars) = (Vec::new(), Vec::new());
        while !asks.is_empty() {
            let has_grammar = asks.iter().any(|ask| ask.grammar.is_some());
            let later = asks.split_off(if has_grammar { 1 } else { asks.len() });
            let together = std::mem::replace(&mut asks, later);
            // One more than its answers need is left for the next prompt.
            let count = together[0].choices + usize::from(!asks.is_empty());
            let made = self.grammars(caller, &together[0], grammars.pop(), count).await;
            // The reason is known before the answers are dropped.
            grammars = made.map_err(|error| caller.failed(error))?;
            let started =
                self.start_together(&mut answers, endpoint, caller, together, &mut grammars, deadline).await;
            started.map_err(|error| caller.failed(error))?;
        }
        Ok(answers)
    }

    /// Appends the answers to prompts that arrive together. Each answer takes one of the grammars, if there are some.
    async fn start_together(
        self: &Arc<Self>,
        answers: &mut Vec<Answer>,
        endpoint: &'static str,
        caller: &Arc<Caller>,
        asks: Vec<EngineRequest>,
        grammars: &mut Vec<Compiled>,
        deadline: Option<Instant>,
    ) -> Result<()> {
        let (mut requests, mut styles) = (Vec::new(), Vec::new());
        for ask in asks {
            // The style that all of its answers have.
            let style = AnswerStyle {
                stops: StopMatcher::new(&ask.stop)?,
                form: ask.form.clone(),
                one_call: ask.one_call,
                listing: ask.top_logprobs.map(|_| ask.listing),
            };
            let made = self.requests_of(ask, grammars, deadline)?;
            styles.extend(std::iter::repeat_n(style, made.len()));
            requests.extend(made);
        }
        let sizes: Vec<_> =
            requests.iter().map(|new| (new.request.prompt.len(), new.request.max_tokens)).collect();
        // Later answers of a request may wait for its first ones.
        let earlier = answers.len();
        let wait_max = (earlier == 0).then_some(self.options.batch.queue_timeout);
        let submitted = self.engine.submit(requests, wait_max, || caller.meter.part()).await?;
        for (((id, events), style), (prompt, max_tokens)) in submitted.into_iter().zip(styles).zip(sizes) {
            let span = tracing::info_span!(
                "request",
                id,
                request_id = &*caller.id,
                key = caller.key.as_deref(),
                endpoint,
                model = self.id,
                prompt,
                max_tokens,
                cached = Empty,
                generated = Empty,
                reason = Empty
            );
            span.in_scope(|| tracing::debug!("arrived"));
            let timer = RequestTimer::new(self.metrics.clone(), span, prompt, caller.arrived);
            let caller = Arc::clone(caller);
            answers.push(Answer::new(events, &self.text.tokenizer, style, prompt, timer, caller));
        }
        // The others may have to wait until the first has ended. Its tokens must be sent meanwhile, so only it is
        // awaited.
        answers[earlier].started().await
    }

    /// The requests for the answers to one prompt.
    fn requests_of(
        &self,
        ask: EngineRequest,
        grammars: &mut Vec<Compiled>,
        deadline: Option<Instant>,
    ) -> Result<Vec<NewRequest>> {
        let max_tokens = self.max_tokens(&ask)?;
        let seed = ask.seed.unwrap_or_else(fresh_seed);
        let request = |choice| {
            let (constraint, tables) =
                grammars.pop().map(|compiled| self.text.grammars.constraint(compiled, &ask.form)).unzip();
            let end_tokens = if ask.ignore_eos { Vec::new() } else { self.text.tokenizer.eos_ids().to_vec() };
            let request = BatchRequest {
                sampler: SamplerOptions { seed: seed.wrapping_add(choice as u64), ..ask.sampler.clone() },
                vision: ask.vision.clone(),
                end_tokens,
                top_logprobs: ask.top_logprobs,
                constraint,
                marks: ask.marks.clone(),
                deadline,
                // With drafts, a seed does not determine a sampled text.
                speculate: ask.seed.is_none() || ask.sampler.temperature == 0.0,
                ..BatchRequest::new(0, ask.prompt.clone(), max_tokens)
            };
            NewRequest { request, tables }
        };
        Ok((0..ask.choices).map(request).collect())
    }
}
