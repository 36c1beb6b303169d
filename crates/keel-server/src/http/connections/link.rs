//! The state of one connection, and its timeouts.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// The timeouts of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// From the start of a connection, or from the first byte of a request, to the end of the request's head.
    pub head: Duration,
    /// For a body. Each [`BODY_BYTES_PER_SECOND`] bytes that arrive extend it by one second.
    pub body: Duration,
    /// From the end of an answer to the next request.
    pub idle: Duration,
    /// For a client to accept any byte of an answer.
    pub write: Duration,
}

/// A body that arrives faster than this never times out.
const BODY_BYTES_PER_SECOND: u64 = 16 << 10;

/// The current phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Between requests.
    Idle,
    /// A request's head is awaited or partly received.
    Head,
    /// A body is being received.
    Body,
    /// The whole request was received.
    Answering,
}

struct State {
    phase: Phase,
    since: Instant,
    body_bytes: u64,
    /// Since when the client has accepted no bytes, if bytes wait to be sent.
    stuck: Option<Instant>,
}

/// The state of a connection. Its task, its stream and the watch over all connections share it.
pub(crate) struct Link {
    state: Mutex<State>,
    /// Ends the connection's task.
    pub close: Notify,
}

impl Link {
    pub fn new(now: Instant) -> Arc<Link> {
        let state = State { phase: Phase::Head, since: now, body_bytes: 0, stuck: None };
        Arc::new(Link { state: Mutex::new(state), close: Notify::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Enters a new phase.
    pub fn enter(&self, phase: Phase) {
        let mut state = self.state();
        state.phase = phase;
        state.since = Instant::now();
        state.body_bytes = 0;
    }

    /// Notes that the whole request was received.
    pub fn end_body(&self) {
        if self.phase() == Phase::Body {
            self.enter(Phase::Answering);
        }
    }

    /// Notes that bytes were received.
    pub fn read(&self, bytes: usize) {
        let mut state = self.state();
        match state.phase {
            Phase::Idle => (state.phase, state.since) = (Phase::Head, Instant::now()),
            Phase::Body => state.body_bytes += bytes as u64,
            Phase::Head | Phase::Answering => {}
        }
    }

    /// Notes that the client accepted bytes (`took`), or had no room for any.
    pub fn wrote(&self, took: bool) {
        let mut state = self.state();
        if took {
            state.stuck = None;
        } else {
            state.stuck.get_or_insert_with(Instant::now);
        }
    }

    pub fn phase(&self) -> Phase {
        self.state().phase
    }

    /// The rank for closing this connection in favour of a new one. The earliest phase is first, because the least is
    /// lost, then the longest wait. `None` while a request is being answered, or the end of an answer waits to be sent.
    pub fn dispensable(&self) -> Option<(Phase, Instant)> {
        let state = self.state();
        (state.phase < Phase::Answering && state.stuck.is_none()).then_some((state.phase, state.since))
    }

    /// The reason to close this connection, if a timeout has passed.
    pub fn overdue(&self, now: Instant, times: &Times) -> Option<&'static str> {
        let state = self.state();
        let waited = now.saturating_duration_since(state.since);
        let stuck = state.stuck.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let coming = Duration::from_secs(state.body_bytes / BODY_BYTES_PER_SECOND);
        match state.phase {
            _ if stuck > times.write => Some("the client reads nothing"),
            Phase::Idle if waited > times.idle => Some("no request came"),
            Phase::Head if waited > times.head => Some("the head of a request did not come"),
            Phase::Body if waited > times.body.saturating_add(coming) => Some("the body came too slowly"),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_phase_has_a_time_of_its_own() {
        let second = Duration::from_secs(1);
        let times = Times { head: 2 * second, body: 4 * second, idle: 8 * second, write: 16 * second };
        let link = Link::new(Instant::now());
        let overdue = |seconds: u32| link.overdue(Instant::now() + seconds * second, &times).is_some();
        assert!(!overdue(1) && overdue(3), "a connection that says nothing");
        link.enter(Phase::Body);
        assert!(!overdue(3) && overdue(5));
        link.read(2 * BODY_BYTES_PER_SECOND as usize);
        assert!(!overdue(5) && overdue(7), "what comes has more time");
        link.end_body();
        assert!(!overdue(1000) && link.dispensable().is_none(), "an answer has a deadline elsewhere");
        link.wrote(false);
        assert!(!overdue(15) && overdue(17), "but not if nobody reads it");
        link.wrote(true);
        link.enter(Phase::Idle);
        assert!(!overdue(7) && overdue(9));
        link.read(1);
        assert_eq!(link.phase(), Phase::Head);
    }

    #[test]
    fn a_connection_with_an_unsent_end_of_an_answer_makes_no_room() {
        let link = Link::new(Instant::now());
        link.enter(Phase::Answering);
        link.wrote(false);
        link.enter(Phase::Idle);
        assert!(link.dispensable().is_none(), "its client is still reading");
        link.wrote(true);
        assert_eq!(link.dispensable().map(|(phase, _)| phase), Some(Phase::Idle));
    }
}
