//! Collects whole answers, and streams answers.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::response::Response;
use axum::response::sse::Event;
use futures_util::future::try_join_all;
use futures_util::stream::{self, BoxStream, SelectAll, StreamExt};
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;

use crate::access::caller::Caller;
use crate::answer::{Answer, AnswerEvent, Usage};
use crate::collected::Collected;
use crate::error::{Result, ServerError};
use crate::http::body::{error_json, sse};
use crate::loaded_model::LoadedModel;
use crate::memory::charge::Refused;
use crate::memory::requests::Meter;

/// Waits for all answers.
pub(crate) async fn collect(answers: Vec<Answer>) -> Result<Vec<Collected>> {
    try_join_all(answers.into_iter().map(collect_one)).await
}

async fn collect_one(mut answer: Answer) -> Result<Collected> {
    let mut whole = Collected::default();
    while let Some(event) = answer.next().await? {
        answer.charge(&event)?;
        match event {
            AnswerEvent::Part(part, infos) => {
                whole.push(part);
                whole.tokens.extend(infos);
            }
            AnswerEvent::Tokens(infos) => whole.tokens.extend(infos),
            AnswerEvent::End(how, by) => (whole.ending, whole.stop) = (how, by),
        }
    }
    whole.usage = answer.usage();
    Ok(whole)
}

/// An event of one of several answers.
pub(crate) struct Merged {
    pub index: usize,
    pub event: Result<AnswerEvent>,
    /// Token counts of this answer so far.
    pub usage: Usage,
}

/// Merges the events of all answers in the order of their arrival.
pub(crate) fn merge(answers: Vec<Answer>) -> SelectAll<BoxStream<'static, Merged>> {
    let events = |(index, answer): (usize, Answer)| {
        stream::unfold(Some(answer), move |answer| async move {
            let mut answer = answer?;
            let event = answer.next().await.transpose()?;
            let usage = answer.usage();
            let rest = event.is_ok().then_some(answer);
            Some((Merged { index, event, usage }, rest))
        })
        .boxed()
    };
    stream::select_all(answers.into_iter().enumerate().map(events))
}

/// Bytes that a stream has for events that wait for its client. They are charged before its prompt runs.
const STREAM_BYTES: usize = 8 << 10;
/// Bytes of an event without its text.
const EVENT_BYTES: usize = 128;
/// Number of events that may wait for a slow client.
const OUTBOX: usize = 64;
/// Longest time that an event larger than [`STREAM_BYTES`] waits for memory that other requests hold.
const ROOM_TIME: Duration = Duration::from_secs(2);
/// Time between two looks for room for an event.
const NO_ROOM_PAUSE: Duration = Duration::from_millis(50);
/// Time for a client to read a stream, as a multiple of the request's deadline. The engine's own deadline comes first.
const READING_TIME: u32 = 2;

/// An event that waits for the client, and its charge.
struct Waiting {
    event: Event,
    _room: Room,
}

/// Memory of an event.
#[allow(dead_code)] // dropping it gives it back
enum Room {
    /// Of the stream's own [`STREAM_BYTES`].
    Own(OwnedSemaphorePermit),
    /// Of the memory that all requests share.
    Shared(SharedRoom),
}

/// The charge of an event that did not fit into the stream's own memory.
struct SharedRoom {
    waiting: Arc<Meter>,
    bytes: u64,
}

impl Drop for SharedRoom {
    fn drop(&mut self) {
        self.waiting.give_back(self.bytes);
    }
}

/// The own memory of a stream. It is taken when a request is admitted. So a stream that is refused has run no prompt.
pub(crate) struct StreamRoom {
    caller: Arc<Caller>,
    charge: Meter,
}

impl StreamRoom {
    /// Takes the memory of a stream, if the request asks for one.
    ///
    /// # Errors
    /// There is no memory left for it.
    pub fn wanted(streams: bool, caller: &Arc<Caller>) -> Result<Option<StreamRoom>> {
        streams.then(|| StreamRoom::take(caller)).transpose()
    }

    fn take(caller: &Arc<Caller>) -> Result<StreamRoom> {
        let charge = caller.meter.part();
        charge.take(STREAM_BYTES as u64)?;
        Ok(StreamRoom { caller: Arc::clone(caller), charge })
    }
}

/// Receives the events of a stream.
///
/// A stream holds memory while it sends: its prompt, and tokens that wait. Without a limit, two streams could wait for
/// memory that the other holds. So:
///
/// - An event of at most [`STREAM_BYTES`] waits for the stream's own client alone.
/// - A larger event waits for at most [`ROOM_TIME`].
/// - An event that exceeds the limit of its request, even without the unread events, is refused at once.
#[derive(Clone)]
pub(crate) struct Outbox {
    events: mpsc::Sender<Waiting>,
    own: Arc<Semaphore>,
    /// Holds the charge of events that wait beyond the stream's own bytes.
    waiting: Arc<Meter>,
    caller: Arc<Caller>,
}

impl Outbox {
    /// Sends a JSON object.
    ///
    /// # Errors
    /// As [`Outbox::text`].
    pub async fn json(&self, value: &Value) -> Result<()> {
        self.text(Event::default(), value.to_string()).await
    }

    /// Sends a text as an event's data. It is charged until the connection takes it. If the client has disconnected,
    /// the event is lost; the sending task is then dropped soon.
    ///
    /// # Errors
    /// There is no memory left for a large event.
    pub async fn text(&self, event: Event, text: String) -> Result<()> {
        let room = self.room(text.len() + EVENT_BYTES).await.map_err(|error| self.caller.failed(error))?;
        let _ = self.events.send(Waiting { event: event.data(text), _room: room }).await;
        Ok(())
    }

    async fn room(&self, bytes: usize) -> Result<Room> {
        let own = bytes.min(STREAM_BYTES) as u32;
        if bytes <= STREAM_BYTES
            && let Ok(room) = Arc::clone(&self.own).try_acquire_many_owned(own)
        {
            return Ok(Room::Own(room));
        }
        let bytes = bytes as u64;
        let until = Instant::now() + ROOM_TIME;
        loop {
            // Read before the attempt: bytes that are given back meanwhile make this too large, never too small.
            let unread = self.waiting.held();
            let Err(refused) = self.waiting.take(bytes) else { break };
            // The client reads, and so makes room in the stream's own bytes.
            if bytes <= STREAM_BYTES as u64
                && let Ok(room) = Arc::clone(&self.own).acquire_many_owned(own).await
            {
                return Ok(Room::Own(room));
            }
            let never =
                matches!(refused, Refused::Always { needed, limit } if needed.saturating_sub(unread) > limit);
            if never || Instant::now() >= until {
                return Err(refused.into());
            }
            tokio::time::sleep(NO_ROOM_PAUSE).await;
        }
        Ok(Room::Shared(SharedRoom { waiting: Arc::clone(&self.waiting), bytes }))
    }
}

/// How an API reports an error within a stream.
pub(crate) type ErrorEvent = fn(&ServerError) -> (Event, Value);

/// An error within a stream in OpenAI's form.
pub(crate) fn error_event(error: &ServerError) -> (Event, Value) {
    (Event::default(), error_json(error))
}

/// A response with the events that `produce` sends. An error of it becomes the last event. When the client disconnects,
/// `produce` is dropped at its current await point, together with its answers.
pub(crate) fn respond<F: Future<Output = Result<()>> + Send + 'static>(
    model: &LoadedModel,
    room: StreamRoom,
    form: ErrorEvent,
    produce: impl FnOnce(Outbox) -> F + Send + 'static,
) -> Response {
    let limit = model.options.deadline.saturating_mul(READING_TIME);
    let (events, own) = spawn_within(limit, room, form, produce);
    let events = ReceiverStream::new(events).map(move |waiting| {
        let _own = &own;
        Ok(waiting.event)
    });
    sse(model, events)
}

/// Runs `produce` and returns its events, and the charge of the stream's own bytes. After `limit` the stream is cut
/// off. Without a limit, a slow client could keep a task and its answers for any time.
fn spawn_within<F: Future<Output = Result<()>> + Send + 'static>(
    limit: Duration,
    room: StreamRoom,
    form: ErrorEvent,
    produce: impl FnOnce(Outbox) -> F + Send + 'static,
) -> (mpsc::Receiver<Waiting>, Meter) {
    let StreamRoom { caller, charge } = room;
    let (sender, receiver) = mpsc::channel(OUTBOX);
    let own = Arc::new(Semaphore::new(STREAM_BYTES));
    let waiting = Arc::new(caller.meter.part());
    let outbox = Outbox { events: sender.clone(), own, waiting, caller };
    tokio::spawn(async move {
        let work = async {
            if let Err(error) = produce(outbox.clone()).await {
                tracing::warn!("{error}");
                let (event, value) = form(&error);
                let _ = outbox.text(event, value.to_string()).await;
            }
        };
        tokio::select! {
            () = sender.closed() => {}
            () = tokio::time::sleep(limit) => {}
            () = work => {}
        }
    });
    (receiver, charge)
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::extract::Request;
    use keel_engine::FinishReason;
    use keel_engine::batch::{BatchEvent, TokenLogprobs};
    use keel_text::{AnswerForm, StopMatcher, TextFiles};

    use super::*;
    use crate::answer::AnswerStyle;
    use crate::events::{Events, waiting_bytes};
    use crate::memory::requests::{Listing, RequestMemory};
    use crate::metrics::{Metrics, RequestTimer};
    use crate::text::ServedText;

    const EVENT: &str = "an event of a stream that another stream keeps from memory";

    fn caller(memory: &RequestMemory) -> Arc<Caller> {
        Arc::new(Caller::new(&Request::new(Body::empty()), memory))
    }

    fn room(memory: &RequestMemory) -> StreamRoom {
        StreamRoom::take(&caller(memory)).expect("there is room")
    }

    /// From the arrival of a request to the time when the engine's thread sent its token.
    const LATER: Duration = Duration::from_secs(40);

    /// An answer of one token, which is also its stop string. So its end is known with its first event.
    fn answer_of_one_token(memory: &RequestMemory, metrics: &Metrics) -> Answer {
        let folder = keel_testkit::fixtures::demo();
        let text = ServedText::new(&TextFiles::read(&folder).expect("there")).expect("sound");
        let (id, caller) = (300, caller(memory));
        let stop = text.tokenizer.decode(&[id], false).expect("it is a token");
        let (sender, receiver) = mpsc::unbounded_channel();
        let meter = Arc::new(caller.meter.part());
        let logprobs = TokenLogprobs { drawn: -1.0, top: vec![(id, -1.0); 20] };
        let sent = caller.arrived + LATER;
        for event in
            [BatchEvent::Token { id, logprobs: Some(logprobs) }, BatchEvent::Finished(FinishReason::Stop)]
        {
            meter.take(waiting_bytes(&event)).expect("there is room");
            sender.send((sent, Ok(event))).expect("somebody listens");
        }
        let style = AnswerStyle {
            stops: StopMatcher::new(&[stop]).expect("short"),
            form: AnswerForm::default(),
            one_call: false,
            listing: Some(Listing::Objects),
        };
        let timer = RequestTimer::new(metrics.clone(), tracing::Span::none(), 1, caller.arrived);
        Answer::new(Events { receiver, meter }, &text.tokenizer, style, 1, timer, caller)
    }

    #[tokio::test]
    async fn an_answer_whose_last_events_have_no_room_ends_for_that_reason() {
        for (budget, reason) in [(1 << 20, "stop"), (8 << 10, "request_too_large")] {
            let (memory, metrics) = (RequestMemory::new(budget, 0), Metrics::new());
            let collected = collect(vec![answer_of_one_token(&memory, &metrics)]).await;
            assert_eq!(collected.is_ok(), reason == "stop");
            assert_eq!((metrics.finished(reason), memory.used()), (1, 0), "{reason}");
        }
    }

    /// A client reads when it likes, and that is no part of the times of its request.
    #[tokio::test]
    async fn times_of_a_request_are_those_of_the_engine() {
        let (memory, metrics) = (RequestMemory::new(1 << 20, 0), Metrics::new());
        collect(vec![answer_of_one_token(&memory, &metrics)]).await.expect("there is room");
        let text = metrics.encoded();
        for name in ["time_to_first_token", "request"] {
            let line = format!("keel_{name}_seconds_sum {:?}\n", LATER.as_secs_f64());
            assert!(text.contains(&line), "{line}{text}");
        }
    }

    #[tokio::test]
    async fn an_answer_whose_end_is_not_taken_is_cancelled() {
        let (memory, metrics) = (RequestMemory::new(1 << 20, 0), Metrics::new());
        let mut answer = answer_of_one_token(&memory, &metrics);
        assert!(matches!(answer.next().await, Ok(Some(AnswerEvent::Tokens(_)))));
        drop(answer);
        assert_eq!((metrics.finished("stop"), metrics.finished("cancelled")), (0, 1));
    }

    #[tokio::test]
    async fn a_client_that_never_reads_costs_a_bounded_outbox_until_its_time_is_over() {
        let held = Arc::new(());
        let answer = Arc::clone(&held);
        let memory = RequestMemory::new(1 << 20, 0);
        let produce = |outbox: Outbox| async move {
            let _answer = answer;
            loop {
                outbox.text(Event::default(), "x".repeat(1000)).await?;
            }
        };
        let (mut receiver, own) = spawn_within(Duration::from_millis(1), room(&memory), error_event, produce);
        while Arc::strong_count(&held) > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let most = OUTBOX * (EVENT_BYTES + 1000);
        assert!(memory.used() <= (STREAM_BYTES + most) as u64, "{} bytes", memory.used());
        assert!(memory.used() >= most as u64, "what waits is charged: {} bytes", memory.used());
        let mut events = 0;
        while receiver.recv().await.is_some() {
            events += 1;
        }
        drop(own);
        assert_eq!((events, memory.used()), (OUTBOX, 0));
    }

    #[tokio::test]
    async fn streams_that_hold_all_memory_do_not_wait_for_each_other() {
        const COUNT: usize = 1000;
        let memory = RequestMemory::new(1 << 20, 0);
        let begin = || {
            let caller = caller(&memory);
            caller.meter.take((448 << 10) - STREAM_BYTES as u64).expect("half of what large requests have");
            let produce = |outbox: Outbox| async move {
                for _ in 0..COUNT {
                    outbox.text(Event::default(), EVENT.into()).await?;
                }
                outbox.text(Event::default(), "x".repeat(STREAM_BYTES)).await
            };
            let room = StreamRoom::take(&caller).expect("there is room");
            spawn_within(Duration::from_secs(60), room, error_event, produce)
        };
        let streams = [begin(), begin()];
        assert_eq!(memory.used(), memory.limit() / 8 * 7, "large requests have no more");
        let start = Instant::now();
        let read = streams.map(|(mut receiver, own)| async move {
            let mut events = 0;
            while receiver.recv().await.is_some() {
                events += 1;
            }
            drop(own);
            events
        });
        let events = futures_util::future::join_all(read).await;
        assert_eq!(events, [COUNT + 1, COUNT + 1], "the last is an event, or the error of one without room");
        assert!(start.elapsed() < 3 * ROOM_TIME, "{:?}", start.elapsed());
        assert_eq!(memory.used(), 0);
    }

    #[tokio::test]
    async fn an_event_that_never_fits_is_refused_at_once_and_one_that_will_fit_waits() {
        const HALF: usize = 600 << 10;
        let memory = RequestMemory::new(1 << 20, 0);
        let caller = caller(&memory);
        let room = StreamRoom::take(&caller).expect("there is room");
        let produce = |outbox: Outbox| async move {
            // Together they exceed the budget, and the client reads the first.
            outbox.text(Event::default(), "x".repeat(HALF)).await?;
            outbox.text(Event::default(), "x".repeat(HALF)).await?;
            outbox.text(Event::default(), "x".repeat(2 * HALF)).await
        };
        let (mut receiver, own) = spawn_within(Duration::from_secs(60), room, error_event, produce);
        tokio::time::sleep(2 * NO_ROOM_PAUSE).await;
        assert_eq!(caller.failure(), None, "the second waits until the first is read");
        for _ in 0..2 {
            assert!(receiver.recv().await.is_some_and(|waiting| matches!(waiting._room, Room::Shared(_))));
        }
        let start = Instant::now();
        assert!(receiver.recv().await.is_some() && receiver.recv().await.is_none(), "the error is the last");
        assert!(start.elapsed() < ROOM_TIME / 2, "{:?}", start.elapsed());
        assert_eq!(caller.failure(), Some("request_too_large"));
        drop(own);
        assert_eq!(memory.used(), 0);
    }
}
