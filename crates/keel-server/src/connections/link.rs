//! What is known of one connection, and when it has had its time.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// How long a connection may take for what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// From the first byte of a request, or from the connection, to the end of its head.
    pub head: Duration,
    /// For a body, and [`BODY_BYTES_PER_SECOND`] besides.
    pub body: Duration,
    /// Between an answer and the next request.
    pub idle: Duration,
    /// For a client to take any byte of an answer.
    pub write: Duration,
}

/// A body that comes faster than this has all the time that it needs.
const BODY_BYTES_PER_SECOND: u64 = 16 << 10;

/// What a connection is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Between requests.
    Idle,
    /// A head is awaited, or has come in part.
    Head,
    /// A body comes.
    Body,
    /// The request is there.
    Answering,
}

struct State {
    phase: Phase,
    since: Instant,
    body_bytes: u64,
    /// Since when the client takes nothing of what is to be sent.
    stuck: Option<Instant>,
}

/// A connection, as its task, its bytes and the watch over all of them see it.
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

    /// It is at something else now.
    pub fn enter(&self, phase: Phase) {
        let mut state = self.state();
        state.phase = phase;
        state.since = Instant::now();
        state.body_bytes = 0;
    }

    /// All of the request is there.
    pub fn end_body(&self) {
        if self.phase() == Phase::Body {
            self.enter(Phase::Answering);
        }
    }

    /// Bytes have come.
    pub fn read(&self, bytes: usize) {
        let mut state = self.state();
        match state.phase {
            Phase::Idle => (state.phase, state.since) = (Phase::Head, Instant::now()),
            Phase::Body => state.body_bytes += bytes as u64,
            Phase::Head | Phase::Answering => {}
        }
    }

    /// The client took bytes, or had no room for any.
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

    /// What it may be closed for to make room for another: the least loss first, then the longest wait. `None` if a request
    /// is being answered.
    pub fn dispensable(&self) -> Option<(Phase, Instant)> {
        let state = self.state();
        (state.phase < Phase::Answering).then_some((state.phase, state.since))
    }

    /// What it has taken too long for.
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
}
