//! Requests that read values from the model instead of an answer: embeddings and scores.
//!
//! Each text is a request of the batch. The batch admits it as memory allows, and runs it in steps with all other
//! requests. Only a few texts of a list are submitted at a time, so that a long list does not fill the queue. Once the
//! first text is in the queue, the others wait for room there.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, TryStreamExt, stream};
use keel_engine::EngineError;
use keel_engine::batch::{BatchEvent, BatchRequest, Readout};
use tokio::sync::Mutex;
use tracing::field::Empty;

use crate::access::caller::Caller;
use crate::answer::{Ending, Usage};
use crate::engine::worker::NewRequest;
use crate::error::{Result, ServerError, wrong};
use crate::events::Events;
use crate::loaded_model::LoadedModel;
use crate::metrics::RequestTimer;

/// Largest number of texts per request.
pub(crate) const TEXTS_MAX: usize = 2048;
/// Largest number of texts of one request that are queued or running, where the queue has room for them.
const AT_ONCE: usize = 32;
/// Time between two tries to put a text into a full queue.
const RETRY: Duration = Duration::from_millis(5);
/// Heap bytes per value: the value, and its digits in a text that grows by doubling.
const BYTES_PER_VALUE: u64 = 32;

/// The values to read.
pub(crate) struct ReadoutRequest {
    pub prompts: Vec<Vec<u32>>,
    /// Number of tokens that all prompts share at their start; 0 if it is not known.
    pub shared_len: usize,
    pub readout: Readout,
}

/// The values that were read, in the order of the prompts.
pub(crate) struct ReadValues {
    pub values: Vec<Vec<f32>>,
    pub prompt_tokens: usize,
}

/// The result of one prompt.
#[derive(Default)]
struct One {
    values: Vec<f32>,
    cached: usize,
    queued: Duration,
}

/// Refuses an empty list and one that is too long.
pub(crate) fn check_count(field: &'static str, count: usize) -> Result<()> {
    match count {
        1..=TEXTS_MAX => Ok(()),
        _ => Err(wrong(field, format!("{count} texts, expected 1 to {TEXTS_MAX}"))),
    }
}

impl LoadedModel {
    /// Runs the prompts and waits for their values.
    pub(crate) async fn read(
        self: &Arc<Self>,
        endpoint: &'static str,
        caller: &Arc<Caller>,
        ask: ReadoutRequest,
    ) -> Result<ReadValues> {
        if self.is_draining() {
            return Err(ServerError::Draining);
        }
        let ReadoutRequest { prompts, shared_len, readout } = ask;
        let prompt_tokens = prompts.iter().map(Vec::len).sum();
        let width = match &readout {
            Readout::Logits(ids) => ids.len(),
            _ => self.engine.hidden(),
        };
        caller.meter.take((prompts.len() * width) as u64 * BYTES_PER_VALUE)?;
        let span = tracing::info_span!(
            "request",
            request_id = &*caller.id,
            key = caller.key.as_deref(),
            endpoint,
            model = self.id,
            texts = prompts.len(),
            prompt = prompt_tokens,
            cached = Empty,
            generated = Empty,
            reason = Empty
        );
        let mut timer = RequestTimer::new(self.metrics.clone(), span, prompt_tokens, caller.arrived);
        let deadline = caller.arrived.checked_add(self.options.deadline);
        let marks = if shared_len > 0 { vec![shared_len] } else { Vec::new() };
        let turn = Mutex::new(());
        let one = |(index, prompt): (usize, Vec<u32>)| {
            let (marks, readout, turn) = (&marks, &readout, &turn);
            let request = move || BatchRequest {
                deadline,
                marks: marks.clone(),
                ..BatchRequest::to_read(0, prompt.clone(), readout.clone())
            };
            self.read_one(caller, request, (index > 0).then_some(turn))
        };
        let at_once = AT_ONCE.min(self.options.batch.queue_limit).max(1);
        let all = stream::iter(prompts.into_iter().enumerate().map(one)).buffered(at_once);
        let all: Vec<One> = match all.try_collect().await {
            Ok(all) => all,
            Err(error) => {
                timer.failed(error.reply().code);
                return Err(error);
            }
        };
        let cached = all.iter().map(|one| one.cached).sum();
        let queued = all.iter().map(|one| one.queued).max().unwrap_or_default();
        timer.started(cached, queued);
        timer.ended(Ending::Stop, Usage { prompt: prompt_tokens, cached, ..Usage::default() });
        Ok(ReadValues { values: all.into_iter().map(|one| one.values).collect(), prompt_tokens })
    }

    /// Waits for the values of one prompt. Dropping this future ends the request.
    async fn read_one(
        &self,
        caller: &Caller,
        request: impl Fn() -> BatchRequest,
        turn: Option<&Mutex<()>>,
    ) -> Result<One> {
        let mut events = self.submit_one(caller, request, turn).await?;
        let mut one = One::default();
        loop {
            match events.recv().await?.1 {
                BatchEvent::Started { cached_tokens, queued } => {
                    (one.cached, one.queued) = (cached_tokens, queued);
                }
                BatchEvent::Read(values) => one.values = values,
                BatchEvent::Finished(_) => return Ok(one),
                BatchEvent::Prefilled(_) | BatchEvent::Token { .. } | BatchEvent::Failed(_) => {}
            }
        }
    }

    /// Puts one prompt into the queue. The first one of a list fails if the queue is full, or if it waits there too
    /// long. The others wait until their deadline, and ask for room one at a time, in `turn`.
    async fn submit_one(
        &self,
        caller: &Caller,
        request: impl Fn() -> BatchRequest,
        turn: Option<&Mutex<()>>,
    ) -> Result<Events> {
        let wait_max = turn.is_none().then_some(self.options.batch.queue_timeout);
        let _turn = match turn {
            Some(turn) => Some(turn.lock().await),
            None => None,
        };
        loop {
            let request = request();
            let deadline = request.deadline;
            let requests = vec![NewRequest { request, tables: None }];
            match self.engine.submit(requests, wait_max, || caller.meter.part()).await {
                Ok(mut submitted) => {
                    let (_, events) = submitted.pop().ok_or(ServerError::EngineStopped)?;
                    return Ok(events);
                }
                Err(ServerError::Engine(EngineError::QueueFull { .. }) | ServerError::Busy)
                    if turn.is_some() =>
                {
                    if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                        return Err(EngineError::Deadline.into());
                    }
                    tokio::time::sleep(RETRY).await;
                }
                Err(error) => return Err(error),
            }
        }
    }
}
