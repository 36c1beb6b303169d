//! Many texts at once on one model.

use std::collections::HashMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use keel_engine::batch::{
    self, BatchOptions, BatchRequest, BatchStatus, Batcher, Constraint, Readout, SequenceId,
};
use keel_engine::{Engine, EngineError, FinishReason};

use crate::{Error, ModelText, Request, Result, TextStream};

/// An event of a request of a [`Batch`].
///
/// ```
/// use evenkeel::{BatchEvent, LoadOptions, Model, Request, SequenceEvent};
/// let mut batch = Model::built_in(&LoadOptions::default())?.into_batch(Default::default())?;
/// batch.submit("Once upon a time", Request { max_tokens: Some(4), ..Request::default() })?;
/// while !batch.is_idle() {
///     for SequenceEvent { id, event } in batch.step() {
///         match event {
///             BatchEvent::Text(piece) => println!("{id}: {piece}"),
///             BatchEvent::Failed(error) => panic!("{id}: {error}"),
///             _ => {}
///         }
///     }
/// }
/// assert!(batch.is_idle());
/// # Ok::<(), evenkeel::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum BatchEvent {
    /// A piece of text.
    Text(String),
    /// The embedding that was asked for. Only the end follows.
    Embedding(Vec<f32>),
    /// It ended, and its memory is free again. No event follows.
    Finished(FinishReason),
    /// It failed, and its memory is free again. No event follows.
    Failed(Error),
}

/// An event of a request of a [`Batch`], with the request's id.
///
/// ```
/// use evenkeel::{LoadOptions, Model, Request, SequenceEvent};
/// let mut batch = Model::built_in(&LoadOptions::default())?.into_batch(Default::default())?;
/// let story = batch.submit("Once upon a time", Request { max_tokens: Some(4), ..Request::default() })?;
/// let events: Vec<SequenceEvent> = batch.step();
/// assert!(events.iter().all(|event| event.id == story));
/// # Ok::<(), evenkeel::Error>(())
/// ```
#[derive(Debug)]
pub struct SequenceEvent {
    /// The request, as [`Batch::submit`] returned it.
    pub id: SequenceId,
    /// The event.
    pub event: BatchEvent,
}

impl BatchEvent {
    fn of(self, id: SequenceId) -> SequenceEvent {
        SequenceEvent { id, event: self }
    }
}

/// Requests that run together on one model. They join and leave between steps.
///
/// ```
/// use evenkeel::{LoadOptions, Model, Request, engine::EngineOptions};
/// let engine = EngineOptions { sequences: 2, ..EngineOptions::default() };
/// let model = Model::built_in(&LoadOptions { engine, ..LoadOptions::default() })?;
/// let mut batch = model.into_batch(Default::default())?;
/// let request = Request { max_tokens: Some(8), ..Request::default() };
/// let stories = batch.complete(&["Once upon a time", "The cat"], &request)?;
/// assert_eq!(stories.len(), 2);
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub struct Batch {
    batcher: Batcher,
    text: ModelText,
    streams: HashMap<SequenceId, TextStream>,
    /// Events of other requests while [`Batch::complete`] or [`Batch::embed`] ran.
    held: Vec<SequenceEvent>,
    next: SequenceId,
}

impl Batch {
    pub(crate) fn new(engine: Engine, text: ModelText, options: BatchOptions) -> Batch {
        Batch {
            // The caller makes the steps, so only the caller knows how long a request may wait.
            batcher: Batcher::new(engine, BatchOptions { queue_timeout: Duration::MAX, ..options }),
            text,
            streams: HashMap::new(),
            held: Vec::new(),
            next: 0,
        }
    }

    /// Queues a text to continue. Under a schema or grammar it makes no drafts. Prompt and text together are as long as
    /// the context at most. (A [`crate::Model::stream`] gives one token more, because the last token is not run.)
    ///
    /// # Errors
    /// The request can never run, or the queue is full. It has a speculation: a batch drafts by its own options.
    ///
    /// See the example of [`Batch::step`].
    pub fn submit(&mut self, prompt: &str, request: Request) -> Result<SequenceId> {
        Ok(self.submit_texts(&[prompt], &request)?.start)
    }

    /// Queues all texts, or none if one cannot be queued.
    fn submit_texts(&mut self, prompts: &[&str], request: &Request) -> Result<Range<SequenceId>> {
        if request.speculation.is_some() {
            let reason = "a request of a batch has no speculation of its own: set BatchOptions::speculation";
            return Err(EngineError::Option(reason.into()).into());
        }
        let grammar = request.grammar.as_ref().map(|source| self.text.compile(source)).transpose()?;
        let context = self.batcher.engine().options().context;
        let (mut streams, mut requests) = (Vec::new(), Vec::new());
        for prompt in prompts {
            let ids = self.encode(prompt)?;
            let room = context.checked_sub(ids.len()).filter(|room| *room > 0);
            let room = room.ok_or(EngineError::Context { needed: ids.len() + 1, context })?;
            let constraint = grammar.clone().map(|state| self.text.constraint(state, &ids)).transpose()?;
            streams.push(TextStream::new(&self.text.tokenizer, &request.stop)?);
            requests.push(BatchRequest {
                sampler: request.sampler.clone().unwrap_or_else(|| self.text.fresh_sampling()),
                end_tokens: if request.ignore_end { Vec::new() } else { self.text.end_tokens() },
                speculate: constraint.is_none(),
                constraint: constraint.map(|constraint| Box::new(constraint) as Box<dyn Constraint>),
                ..BatchRequest::new(0, ids, request.max_tokens.map_or(room, |most| most.min(room)))
            });
        }
        let ids = self.queue(requests)?;
        self.streams.extend(ids.clone().zip(streams));
        Ok(ids)
    }

    /// Queues a text whose embedding is wanted: the hidden state after its last token, scaled to length 1. The pooling
    /// that `1_Pooling/config.json` asks for is not read. If it is a mean, use `keel embed` or `keel serve`.
    ///
    /// # Errors
    /// As [`Batch::submit`].
    ///
    /// ```
    /// use evenkeel::{BatchEvent, LoadOptions, Model, SequenceEvent};
    /// let mut batch = Model::built_in(&LoadOptions::default())?.into_batch(Default::default())?;
    /// let id = batch.submit_embedding("Once upon a time")?;
    /// let mut events = Vec::new();
    /// while !batch.is_idle() {
    ///     events.extend(batch.step());
    /// }
    /// let is_it = |event: &SequenceEvent| event.id == id && matches!(event.event, BatchEvent::Embedding(_));
    /// assert!(events.iter().any(is_it));
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn submit_embedding(&mut self, text: &str) -> Result<SequenceId> {
        Ok(self.submit_embeddings(&[text])?.start)
    }

    /// Queues all texts, or none if one cannot be queued.
    fn submit_embeddings(&mut self, texts: &[&str]) -> Result<Range<SequenceId>> {
        let to_read = |text: &&str| Ok(BatchRequest::to_read(0, self.encode(text)?, Readout::LastHidden));
        let requests = texts.iter().map(to_read).collect::<Result<Vec<_>>>()?;
        self.queue(requests)
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.text.encode_text(text)?;
        if ids.is_empty() { Err(Error::EmptyPrompt) } else { Ok(ids) }
    }

    /// Numbers the requests and queues all, or none if one cannot be queued.
    fn queue(&mut self, mut requests: Vec<BatchRequest>) -> Result<Range<SequenceId>> {
        let ids = self.next..self.next + requests.len() as SequenceId;
        requests.iter_mut().zip(ids.clone()).for_each(|(request, id)| request.id = id);
        self.batcher.submit_together(requests, Instant::now())?;
        self.next = ids.end;
        Ok(ids)
    }

    /// Ends a request in any state and takes its memory back.
    ///
    /// ```
    /// use evenkeel::{LoadOptions, Model, Request};
    /// let mut batch = Model::built_in(&LoadOptions::default())?.into_batch(Default::default())?;
    /// let id = batch.submit("Once upon a time", Request::default())?;
    /// assert_eq!(batch.status().waiting, 1);
    /// batch.step();
    /// assert_eq!(batch.status().running.len(), 1);
    /// batch.cancel(id);
    /// assert!(batch.is_idle());
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn cancel(&mut self, id: SequenceId) {
        self.streams.remove(&id);
        self.held.retain(|event| event.id != id);
        self.batcher.cancel(id);
    }

    /// Whether nothing runs or waits, and [`Batch::step`] has returned all events.
    ///
    /// See the example of [`Batch::step`].
    pub fn is_idle(&self) -> bool {
        self.batcher.is_idle() && self.held.is_empty()
    }

    /// Counts at this moment.
    ///
    /// See the example of [`Batch::cancel`].
    pub fn status(&self) -> BatchStatus {
        self.batcher.status()
    }

    /// Advances texts by one token each: all of them, or in a pipeline those of one micro-batch. Returns the events
    /// since the last call, [`Batch::complete`] and [`Batch::embed`] included. A request that fails ends alone, with
    /// [`BatchEvent::Failed`].
    ///
    /// ```
    /// use evenkeel::{BatchEvent, LoadOptions, Model, Request, SequenceEvent};
    /// let mut batch = Model::built_in(&LoadOptions::default())?.into_batch(Default::default())?;
    /// let id = batch.submit("Once upon a time", Request { max_tokens: Some(4), ..Request::default() })?;
    /// let mut story = String::new();
    /// while !batch.is_idle() {
    ///     for SequenceEvent { event, .. } in batch.step().into_iter().filter(|event| event.id == id) {
    ///         if let BatchEvent::Text(piece) = event {
    ///             story += &piece;
    ///         }
    ///     }
    /// }
    /// assert!(!story.is_empty());
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn step(&mut self) -> Vec<SequenceEvent> {
        let mut events = std::mem::take(&mut self.held);
        self.advance(&mut events);
        events
    }

    /// Makes a step and appends its events.
    fn advance(&mut self, events: &mut Vec<SequenceEvent>) {
        // Requests that ended within this step before the batch ended them. Nothing follows their end.
        let mut ended = Vec::new();
        for batch::SequenceEvent { id, event } in self.batcher.step(Instant::now()) {
            if ended.contains(&id) {
                continue;
            }
            match event {
                batch::BatchEvent::Token { id: token, .. } => {
                    if self.push(id, token, events) {
                        ended.push(id);
                    }
                }
                batch::BatchEvent::Read(values) => match batch::direction(values, usize::MAX) {
                    Ok(values) => events.push(BatchEvent::Embedding(values).of(id)),
                    Err(error) => {
                        events.push(BatchEvent::Failed(error.into()).of(id));
                        ended.push(id);
                    }
                },
                batch::BatchEvent::Finished(reason) => {
                    let mut stream = self.streams.remove(&id);
                    let end = match stream.as_mut().map_or(Ok(""), TextStream::finish) {
                        Ok(rest) => {
                            push_text(events, id, rest);
                            BatchEvent::Finished(reason)
                        }
                        Err(error) => BatchEvent::Failed(error),
                    };
                    events.push(end.of(id));
                }
                batch::BatchEvent::Failed(error) => {
                    self.streams.remove(&id);
                    events.push(BatchEvent::Failed(error.into()).of(id));
                }
                batch::BatchEvent::Started { .. } | batch::BatchEvent::Prefilled(_) => {}
            }
        }
    }

    /// Adds a token to a text. A stop string ends the request, and so does a token that the tokenizer does not know;
    /// true if it ended.
    fn push(&mut self, id: SequenceId, token: u32, events: &mut Vec<SequenceEvent>) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        let end = match stream.push(token) {
            Ok(piece) => {
                push_text(events, id, piece);
                stream.is_stopped().then_some(BatchEvent::Finished(FinishReason::Stop))
            }
            Err(error) => Some(BatchEvent::Failed(error)),
        };
        let Some(end) = end else { return false };
        // Its earlier events stay, held ones too.
        self.streams.remove(&id);
        self.batcher.cancel(id);
        events.push(end.of(id));
        true
    }

    /// Continues all texts together and returns the continuations, in the same order. Other requests of the batch go on
    /// meanwhile, and the next [`Batch::step`] returns their events.
    ///
    /// # Errors
    /// Any of them fails.
    ///
    /// See the example of [`Batch`].
    pub fn complete(&mut self, prompts: &[&str], request: &Request) -> Result<Vec<String>> {
        let ids = self.submit_texts(prompts, request)?;
        let mut texts = vec![String::new(); prompts.len()];
        self.run(ids, |i, event| {
            if let BatchEvent::Text(piece) = event {
                texts[i].push_str(&piece);
            }
        })?;
        Ok(texts)
    }

    /// The embeddings of all texts, in the same order, each of length 1 and made as in [`Batch::submit_embedding`].
    /// Other requests go on as in [`Batch::complete`].
    ///
    /// # Errors
    /// Any of them fails.
    ///
    /// ```
    /// use evenkeel::{LoadOptions, Model};
    /// let mut batch = Model::built_in(&LoadOptions::default())?.into_batch(Default::default())?;
    /// let vectors = batch.embed(&["The cat slept.", "The dog ran."])?;
    /// let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    /// assert!((dot(&vectors[0], &vectors[0]) - 1.0).abs() < 1e-3);
    /// assert!(dot(&vectors[0], &vectors[1]) < 1.0, "the cosine of two different texts");
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn embed(&mut self, texts: &[&str]) -> Result<Vec<Vec<f32>>> {
        let ids = self.submit_embeddings(texts)?;
        let mut embeddings = vec![Vec::new(); texts.len()];
        self.run(ids, |i, event| {
            if let BatchEvent::Embedding(values) = event {
                embeddings[i] = values;
            }
        })?;
        Ok(embeddings)
    }

    /// Steps until these requests have ended, or one has failed. `take` gets each event with the request's place in the
    /// list. Events of other requests are held.
    fn run(&mut self, ids: Range<SequenceId>, mut take: impl FnMut(usize, BatchEvent)) -> Result<()> {
        let (mut left, mut failure) = (ids.end - ids.start, None);
        while left > 0 && failure.is_none() {
            let mut events = Vec::new();
            self.advance(&mut events);
            for SequenceEvent { id, event } in events {
                match event {
                    event if !ids.contains(&id) => self.held.push(event.of(id)),
                    BatchEvent::Failed(error) => failure = Some(error),
                    event => {
                        left -= u64::from(matches!(event, BatchEvent::Finished(_)));
                        take((id - ids.start) as usize, event);
                    }
                }
            }
        }
        let Some(failure) = failure else { return Ok(()) };
        ids.for_each(|id| self.cancel(id));
        Err(failure)
    }
}

fn push_text(events: &mut Vec<SequenceEvent>, id: SequenceId, piece: &str) {
    if !piece.is_empty() {
        events.push(BatchEvent::Text(piece.into()).of(id));
    }
}
