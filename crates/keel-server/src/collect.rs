//! Collects whole answers, and streams answers.

use std::future::Future;
use std::time::Duration;

use axum::response::Response;
use axum::response::sse::Event;
use futures_util::future::try_join_all;
use futures_util::stream::{self, BoxStream, SelectAll, StreamExt};
use keel_text::AnswerPart;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::answer::{Answer, Ending, Piece, TokenInfo, Usage};
use crate::app::App;
use crate::error::Result;
use crate::http::sse;
use crate::memory::{Meter, RequestMemory};

/// A whole answer.
pub(crate) struct Collected {
    pub text: String,
    pub reasoning: String,
    /// Names and arguments of tool calls.
    pub calls: Vec<(String, String)>,
    pub tokens: Vec<TokenInfo>,
    pub ending: Ending,
    /// The stop string that ended it.
    pub stop: Option<String>,
    pub usage: Usage,
}

/// Waits for all answers.
pub(crate) async fn collect(answers: Vec<Answer>) -> Result<Vec<Collected>> {
    try_join_all(answers.into_iter().map(collect_one)).await
}

async fn collect_one(mut answer: Answer) -> Result<Collected> {
    let (mut text, mut reasoning) = (String::new(), String::new());
    let (mut calls, mut tokens) = (Vec::new(), Vec::new());
    let (mut ending, mut stop) = (Ending::Stop, None);
    while let Some(piece) = answer.next().await? {
        answer.charge(&piece)?;
        match piece {
            Piece::Part(AnswerPart::Text(part)) => text.push_str(&part),
            Piece::Part(AnswerPart::Reasoning(part)) => reasoning.push_str(&part),
            Piece::Part(AnswerPart::ToolCall { name, arguments }) => calls.push((name, arguments)),
            Piece::Tokens(infos) => tokens.extend(infos),
            Piece::End(how, by) => (ending, stop) = (how, by),
        }
    }
    Ok(Collected { text, reasoning, calls, tokens, ending, stop, usage: answer.usage() })
}

/// A piece of one of several answers.
pub(crate) struct Merged {
    pub index: usize,
    pub piece: Result<Piece>,
    /// Token counts of this answer so far.
    pub usage: Usage,
}

/// Merges the pieces of all answers in the order of their arrival.
pub(crate) fn merge(answers: Vec<Answer>) -> SelectAll<BoxStream<'static, Merged>> {
    let pieces = |(index, answer): (usize, Answer)| {
        stream::unfold(Some(answer), move |answer| async move {
            let mut answer = answer?;
            let piece = answer.next().await.transpose()?;
            let usage = answer.usage();
            let rest = piece.is_ok().then_some(answer);
            Some((Merged { index, piece, usage }, rest))
        })
        .boxed()
    };
    stream::select_all(answers.into_iter().enumerate().map(pieces))
}

/// Receives the events of a stream.
pub(crate) struct Outbox {
    events: mpsc::Sender<(Event, Meter)>,
    memory: RequestMemory,
}

impl Outbox {
    /// Sends a JSON object.
    pub async fn json(&self, value: &Value) {
        self.text(Event::default(), value.to_string()).await;
    }

    /// Sends a text as an event's data. It is charged to the memory of requests until the connection takes it; without
    /// room it waits, and the request's deadline bounds how long. If the client has disconnected, the event is lost; the
    /// sending task is then dropped soon.
    pub async fn text(&self, event: Event, text: String) {
        let charge = self.memory.meter();
        while charge.take(text.len() as u64 + EVENT_BYTES).is_err() {
            tokio::time::sleep(NO_ROOM_PAUSE).await;
        }
        let _ = self.events.send((event.data(text), charge)).await;
    }
}

/// Bytes of an event besides its text.
const EVENT_BYTES: u64 = 128;
/// Time between two looks for room for an event.
const NO_ROOM_PAUSE: Duration = Duration::from_millis(50);
/// Number of events that may wait for a slow client.
const OUTBOX: usize = 64;

/// Time for a client to read a stream, as a multiple of the request's deadline. The engine's own deadline comes first.
const READING_TIME: u32 = 2;

/// A response with the events that `produce` sends. When the client disconnects, `produce` is dropped at its current
/// await point, together with its answers.
pub(crate) fn respond<F: Future<Output = ()> + Send + 'static>(
    app: &App,
    produce: impl FnOnce(Outbox) -> F + Send + 'static,
) -> Response {
    let limit = app.options.deadline.saturating_mul(READING_TIME);
    let events = spawn_within(limit, app.memory.clone(), produce);
    sse(app, ReceiverStream::new(events).map(|(event, _charge)| Ok(event)))
}

/// Runs `produce` and returns its events. After `limit` the stream is cut off. Without a limit, a slow client could
/// keep a task and its answers for any time.
fn spawn_within<F: Future<Output = ()> + Send + 'static>(
    limit: Duration,
    memory: RequestMemory,
    produce: impl FnOnce(Outbox) -> F + Send + 'static,
) -> mpsc::Receiver<(Event, Meter)> {
    let (sender, receiver) = mpsc::channel(OUTBOX);
    tokio::spawn(async move {
        let outbox = Outbox { events: sender.clone(), memory };
        tokio::select! {
            () = sender.closed() => {}
            () = tokio::time::sleep(limit) => {}
            () = produce(outbox) => {}
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn a_client_that_never_reads_costs_a_bounded_outbox_until_its_time_is_over() {
        let held = Arc::new(());
        let answer = Arc::clone(&held);
        let memory = RequestMemory::new(1 << 20, 0);
        let mut receiver = spawn_within(Duration::from_millis(1), memory.clone(), |outbox| async move {
            let _answer = answer;
            loop {
                outbox.text(Event::default(), "x".into()).await;
            }
        });
        while Arc::strong_count(&held) > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(memory.used(), OUTBOX as u64 * (EVENT_BYTES + 1), "what waits is charged");
        let mut events = 0;
        while receiver.recv().await.is_some() {
            events += 1;
        }
        assert_eq!((events, memory.used()), (OUTBOX, 0));
    }
}
