//! Continuous batching: many sequences on one engine, which join and leave between steps.
//!
//! A request waits until the pages for its prompt and all its tokens can be promised (`admission.rs`). Then it runs
//! to its end: an admitted request never fails for memory. If the engine has host memory to park sequences in, more
//! requests are admitted than can be promised (`overcommit.rs`); they do not fail for memory either. Each
//! [`Batcher::step`] advances every answer by a token, and prompts by chunks under a token budget. Everything here
//! is synchronous and has no clock: the caller says what time it is.

mod admission;
mod ahead;
mod answers;
mod attempts;
mod drafting;
mod features;
mod leaving;
mod microbatches;
mod overcommit;
mod parking;
mod persist;
mod pictures;
mod policy;
mod prefixes;
mod prompts;
mod readout;
mod request;
mod sequence;

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

pub use crate::logits_row::TokenLogprobs;
pub use features::PictureKey;
pub use persist::Restored;
pub use pictures::{PictureInput, RequestVision};
pub use readout::{Readout, direction};
pub use request::{
    BatchEvent, BatchOptions, BatchRequest, BatchStatus, Constraint, ParkingStatus, PictureStatus,
    SequenceEvent, SequenceId, SequenceStatus,
};

use crate::vision::EncodeJob;
use crate::{Engine, EngineError, Result, Sampler, SpeculationCounters};
use ahead::Pending;
use features::FeatureStore;
use prefixes::Prefixes;
use sequence::{Drawn, Running, pages_at_full_length};

/// Longest time that a step waits for the masks of all its sequences, and that a round waits for all further ones.
pub(crate) const MASK_PATIENCE: Duration = Duration::from_millis(1);

/// Pause between two looks for a mask where nothing else can run.
const MASK_POLL: Duration = Duration::from_millis(1);

/// The running sequences with these numbers, in order.
fn members<'a>(running: &'a mut [Running], indices: &'a [usize]) -> impl Iterator<Item = &'a mut Running> {
    running
        .iter_mut()
        .enumerate()
        .filter(|(i, _)| indices.binary_search(i).is_ok())
        .map(|(_, running)| running)
}

struct Waiting {
    request: BatchRequest,
    /// The prompt as prefixes know it, if it shows pictures.
    key: Option<Vec<u32>>,
    sampler: Sampler,
    since: Instant,
}

impl Waiting {
    /// When it fails if it has not started.
    fn expiry(&self, timeout: Duration) -> Option<Instant> {
        self.request.deadline.into_iter().chain(self.since.checked_add(timeout)).min()
    }
}

/// Requests on one engine.
pub struct Batcher {
    engine: Engine,
    options: BatchOptions,
    waiting: VecDeque<Waiting>,
    /// No request that waits expires before this.
    next_expiry: Option<Instant>,
    /// Numbers of requests whose end was not handed out yet.
    in_use: HashSet<SequenceId>,
    /// In the order in which they started.
    running: Vec<Running>,
    /// Steps under way, the oldest first.
    pending: VecDeque<Pending>,
    /// Whether the next step is waited for, because a step failed or could not be submitted.
    is_careful: bool,
    /// Parked sequences, in the same order. All of them started after those that run.
    parked: VecDeque<Running>,
    /// Counts of parking so far.
    parking: ParkingStatus,
    prefixes: Prefixes,
    /// Features that the tower has computed.
    features: FeatureStore,
    /// The picture that tower is encoding.
    encoding: Option<(PictureKey, EncodeJob)>,
    /// How often the tower has encoded a picture, and in how many pieces.
    encoded: u64,
    encoded_pieces: u64,
    /// Counts of sequences that have ended.
    speculation: SpeculationCounters,
    /// Counts turns of answers in steps under way: answers that have waited longest come first.
    turn: usize,
    /// Counts steps with prompts, so that prompts take turns.
    prompt_turn: usize,
    /// Rows in a second of the last step of prompts that was waited for; 0 before the first.
    prompt_rate: f64,
    /// Steps of answers that ran ahead since answers were last asked for drafts, or more if they are asked sooner.
    plain_steps: usize,
    /// Failed steps, whether retried or not, and states that could not be saved.
    failed_steps: u64,
    /// Whether one has failed because a device is lost.
    is_device_lost: bool,
    /// Hidden states of the rows that are being added up.
    row_hidden: Vec<f32>,
    events: Vec<SequenceEvent>,
}

impl Batcher {
    /// A batch without requests.
    pub fn new(engine: Engine, options: BatchOptions) -> Batcher {
        Batcher {
            prefixes: Prefixes::new(engine.cache(), options.reuse_prefixes),
            features: FeatureStore::new(
                engine.vision_runner().map_or(0, crate::vision::VisionRunner::kept_bytes),
            ),
            encoding: None,
            encoded: 0,
            encoded_pieces: 0,
            engine,
            options,
            waiting: VecDeque::new(),
            next_expiry: None,
            in_use: HashSet::new(),
            running: Vec::new(),
            pending: VecDeque::new(),
            is_careful: false,
            parked: VecDeque::new(),
            parking: ParkingStatus::default(),
            speculation: SpeculationCounters::default(),
            turn: 0,
            prompt_turn: 0,
            prompt_rate: 0.0,
            plain_steps: 0,
            failed_steps: 0,
            is_device_lost: false,
            row_hidden: Vec::new(),
            events: Vec::new(),
        }
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Ends everything and gives the engine back.
    pub fn into_engine(mut self) -> Engine {
        self.cancel_all();
        self.settle();
        self.forget_prefixes();
        self.engine
    }

    /// Whether nothing runs or waits, and no event is left for the next step.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.parked.is_empty() && self.waiting.is_empty() && self.events.is_empty()
    }

    /// Puts a request into the queue.
    ///
    /// # Errors
    /// - Its number is in use: [`EngineError::SequenceId`].
    /// - It can never run: token ids or options out of range, [`EngineError::Context`], [`EngineError::NeverFits`].
    /// - It cannot wait now: [`EngineError::QueueFull`].
    pub fn submit(&mut self, request: BatchRequest, now: Instant) -> Result<()> {
        self.submit_together(vec![request], now)
    }

    /// Puts several requests into the queue, or none. They arrive together: the queue must have room for all of them.
    /// An empty queue takes any number, because they would never fit otherwise.
    ///
    /// # Errors
    /// As [`Batcher::submit`].
    pub fn submit_together(&mut self, requests: Vec<BatchRequest>, now: Instant) -> Result<()> {
        let samplers = requests.iter().map(|request| self.check(request)).collect::<Result<Vec<_>>>()?;
        let mut ids = HashSet::new();
        if let Some(twin) = requests.iter().find(|request| !ids.insert(request.id)) {
            return Err(EngineError::SequenceId { id: twin.id });
        }
        let (waiting, arriving, limit) = (self.waiting.len(), requests.len(), self.options.queue_limit);
        if waiting + arriving > limit && (waiting > 0 || limit == 0) {
            return Err(EngineError::QueueFull { waiting, arriving, limit });
        }
        for (request, sampler) in requests.into_iter().zip(samplers) {
            let vision = request.vision.as_ref();
            let key = vision.map(|vision| self.prefixes.name_pictures(&request.prompt, vision));
            self.in_use.insert(request.id);
            let waiting = Waiting { request, key, sampler, since: now };
            let expiry = waiting.expiry(self.options.queue_timeout);
            self.next_expiry = self.next_expiry.into_iter().chain(expiry).min();
            self.waiting.push_back(waiting);
        }
        Ok(())
    }

    /// Whether a request with this number waits, runs or is parked, has an event that was not handed out, or has rows
    /// in a step under way.
    fn has(&self, id: SequenceId) -> bool {
        self.in_use.contains(&id) || self.pending.iter().any(|step| step.has(id))
    }

    fn check(&self, request: &BatchRequest) -> Result<Sampler> {
        if self.has(request.id) {
            return Err(EngineError::SequenceId { id: request.id });
        }
        let vocab = self.engine.model().config.vocab;
        if let Some(&id) = request.prompt.iter().find(|&&id| id as usize >= vocab) {
            return Err(EngineError::TokenId { id, vocab });
        }
        if request.prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        match &request.readout {
            Some(readout) => self.check_readout(readout)?,
            None if request.max_tokens == 0 => {
                return Err(EngineError::Option("a request for no tokens".into()));
            }
            None => {}
        }
        let needed = request.prompt.len().saturating_add(request.max_tokens);
        let context = self.engine.options().context;
        if needed > context {
            return Err(EngineError::Context { needed, context });
        }
        let pages = pages_at_full_length(request.prompt.len(), request.max_tokens);
        let size = self.engine.cache().size();
        if pages > size.pages() {
            // Layers with a window have pages of their own.
            let page_bytes = self.engine.cache().swap_size().page_bytes;
            return Err(EngineError::NeverFits {
                needed_bytes: pages * page_bytes,
                total_bytes: size.pages() * page_bytes,
                needed_tokens: needed,
            });
        }
        self.check_pictures(request)?;
        request.sampler.check_tokens(self.engine.model().config.vocab)?;
        Sampler::new(request.sampler.clone(), &request.prompt)
    }

    /// Ends a request in any state and takes its memory back. Does nothing if it has ended already.
    pub fn cancel(&mut self, id: SequenceId) {
        if !self.in_use.remove(&id) {
            return;
        }
        self.events.retain(|event| event.id != id);
        self.waiting.retain(|w| w.request.id != id);
        if let Some(at) = self.running.iter().position(|r| r.id == id) {
            self.leave(at);
        }
        if let Some(at) = self.parked.iter().position(|r| r.id == id) {
            self.end_parked(at);
        }
    }

    /// Ends everything.
    pub fn cancel_all(&mut self) {
        self.waiting.clear();
        self.events.clear();
        self.in_use.clear();
        while !self.running.is_empty() {
            self.leave(0);
        }
        while !self.parked.is_empty() {
            self.end_parked(0);
        }
    }

    /// Forgets remembered prefixes, and features of pictures that no request holds.
    pub fn forget_prefixes(&mut self) {
        self.features.clear();
        self.prefixes.clear();
    }

    /// Counts for display.
    pub fn status(&self) -> BatchStatus {
        BatchStatus {
            waiting: self.waiting.len(),
            running: self.running.iter().map(Running::status).collect(),
            parking: self.parking_status(),
            pages: self.engine.cache().size().pages(),
            free_pages: self.engine.cache().free_pages(),
            prefix_pages: self.engine.cache().remembered_pages(),
            idle_prefix_pages: self.engine.cache().evictable_pages(),
            prefix_states: self.prefixes.tree().states(),
            pictures: PictureStatus {
                kept: self.features.len(),
                bytes: self.features.used(),
                held_bytes: self.features.held(),
                bytes_max: self.features.limit(),
                encoded: self.encoded,
                pieces: self.encoded_pieces,
            },
            speculation: self.speculation.clone(),
            failed_steps: self.failed_steps,
            is_device_lost: self.is_device_lost,
            late_work: self.engine.late_work(),
        }
    }

    /// Admits requests, advances answers by a token and prompts by chunks, and returns the events. All answers advance,
    /// or those of one micro-batch, or prompts alone (`microbatches.rs`).
    pub fn step(&mut self, now: Instant) -> Vec<SequenceEvent> {
        self.expire(now);
        self.bring_back();
        self.let_in(now);
        let pieces = self.encoded_pieces;
        self.encode_pictures();
        self.catch_up();
        if self.goes_ahead() {
            self.step_ahead();
        } else if self.runs_microbatches() {
            self.step_microbatches();
        } else {
            self.settle();
            self.is_careful = false;
            self.decode();
            self.prefill();
        }
        let has_run = !self.events.is_empty() || !self.pending.is_empty() || self.encoded_pieces > pieces;
        if !has_run && self.running.iter().any(|running| running.awaits_mask) {
            std::thread::sleep(MASK_POLL);
        }
        for SequenceEvent { id, event } in &self.events {
            if event.is_end() {
                self.in_use.remove(id);
            }
        }
        std::mem::take(&mut self.events)
    }

    fn emit(&mut self, id: SequenceId, event: BatchEvent) {
        self.events.push(SequenceEvent { id, event });
    }

    /// Reports tokens. Returns how the sequence ended if it did.
    fn report(&mut self, i: usize, drawn: Result<Drawn>) -> Option<BatchEvent> {
        match drawn {
            Ok(drawn) => {
                let id = self.running[i].id;
                for (token, logprobs) in drawn.tokens {
                    self.emit(id, BatchEvent::Token { id: token, logprobs });
                }
                drawn.finish.map(BatchEvent::Finished)
            }
            Err(error) => Some(BatchEvent::Failed(error)),
        }
    }
}
