//! The masks of a grammar, computed on a thread of the answer.
//!
//! The tokens that a grammar allows do not depend on logits, so a mask is computed before the step that needs it. A
//! step waits for masks a moment, because most take microseconds. An answer whose mask is not there then sits out, so
//! the others go on. After a mask that took long, no step waits for the answer any more.
//!
//! A round with drafts begins the mask of each further token when its turn comes, and ends before a token whose mask is
//! not there. An answer drafts while its masks are quick.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use keel_text::{GrammarMask, GrammarState, MaskCanceller, TextError};

/// If one mask takes longer, no step waits for this answer's later masks.
const SLOW: Duration = Duration::from_millis(5);
/// An answer drafts while its masks take no longer.
const QUICK: Duration = Duration::from_millis(1);

type Mask = Result<Arc<GrammarMask>, String>;

/// A grammar's position, and the mask there.
pub(crate) struct MaskAhead {
    /// `None` while the thread has it, and after the thread has lost it.
    state: Option<GrammarState>,
    /// The mask here, if it is known.
    mask: Option<Mask>,
    /// The time that the last mask took.
    took: Duration,
    /// Whether a mask has taken long.
    is_slow: bool,
    is_complete: bool,
    /// Bytes that the grammar holds, as of its last mask.
    bytes: Arc<AtomicU64>,
    /// Made when the first mask is computed ahead.
    thread: Option<MaskThread>,
    canceller: MaskCanceller,
}

/// A thread that computes masks. It ends when this is dropped, after the mask that it is computing.
struct MaskThread {
    states: Sender<GrammarState>,
    masks: Receiver<Computed>,
}

/// A mask that was computed.
pub(crate) struct Computed {
    pub state: GrammarState,
    pub mask: Result<GrammarMask, TextError>,
    pub took: Duration,
}

impl Computed {
    /// Computes the mask of a state.
    pub fn of(mut state: GrammarState) -> Computed {
        let start = Instant::now();
        let mask = state.allowed();
        Computed { state, mask, took: start.elapsed() }
    }
}

impl MaskThread {
    /// Starts a thread; `None` if the system refuses one.
    fn start() -> Option<MaskThread> {
        let (states, received) = channel::<GrammarState>();
        let (computed, masks) = channel();
        let work = move || {
            for state in received {
                // The receiver is gone if the answer has ended.
                let _ = computed.send(Computed::of(state));
            }
        };
        std::thread::Builder::new().name("keel-mask".into()).spawn(work).ok()?;
        Some(MaskThread { states, masks })
    }
}

impl Drop for MaskAhead {
    fn drop(&mut self) {
        if self.state.is_none() {
            self.canceller.cancel();
        }
    }
}

impl MaskAhead {
    /// At the start of a grammar, whose mask is known and took as long as `took`.
    pub fn new(state: GrammarState, first: Arc<GrammarMask>, took: Duration) -> MaskAhead {
        MaskAhead {
            canceller: state.canceller(),
            is_complete: state.is_complete(),
            bytes: Arc::new(AtomicU64::new(state.bytes() as u64)),
            state: Some(state),
            mask: Some(Ok(first)),
            took,
            is_slow: took > SLOW,
            thread: None,
        }
    }

    /// Bytes that the grammar holds. They are updated after each mask.
    pub fn bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.bytes)
    }

    /// Whether the mask is there. If not, it is being computed. Waits for a mask that is not known to be slow.
    pub fn is_ready(&mut self, patience: Duration) -> bool {
        if self.mask.is_some() {
            return true;
        }
        self.begin();
        let Some(thread) = self.thread.as_ref().filter(|_| self.mask.is_none()) else { return true };
        let patience = if self.is_slow { Duration::ZERO } else { patience };
        match thread.masks.recv_timeout(patience) {
            Ok(computed) => self.keep(computed),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => self.lose(),
        }
        self.mask.is_some()
    }

    /// Whether the next masks are likely to be there soon after the tokens before them.
    pub fn is_quick(&self) -> bool {
        !self.is_slow && self.took <= QUICK
    }

    /// Sets the logits of tokens that may not come to negative infinity.
    pub fn apply(&mut self, logits: &mut [f32]) -> Result<(), String> {
        if self.mask.is_none() {
            self.settle();
        }
        if let Some(state) = self.state.take_if(|_| self.mask.is_none()) {
            self.keep(Computed::of(state));
        }
        match &self.mask {
            Some(Ok(mask)) => mask.apply(logits),
            Some(Err(reason)) => return Err(reason.clone()),
            None => return Err(LOST.into()),
        }
        Ok(())
    }

    /// Takes the token that was drawn.
    pub fn accept(&mut self, token: u32) -> Result<(), String> {
        self.change(|state| state.accept(token))
    }

    /// Takes back the last tokens.
    pub fn rollback(&mut self, tokens: usize) -> Result<(), String> {
        if tokens == 0 {
            return Ok(());
        }
        self.change(|state| state.rollback(tokens))
    }

    /// Whether the grammar allows no further token.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Hands the state to the thread, which computes the mask. Without a thread the mask is computed here.
    fn begin(&mut self) {
        let Some(state) = self.state.take() else { return };
        if self.thread.is_none() {
            self.thread = MaskThread::start();
        }
        let refused = match &self.thread {
            Some(thread) => thread.states.send(state).err().map(|refused| refused.0),
            None => Some(state),
        };
        if let Some(state) = refused {
            self.keep(Computed::of(state));
        }
    }

    /// Waits for the thread, if it has the state.
    fn settle(&mut self) {
        if self.state.is_some() {
            return;
        }
        match self.thread.as_ref().and_then(|thread| thread.masks.recv().ok()) {
            Some(computed) => self.keep(computed),
            None => self.lose(),
        }
    }

    fn keep(&mut self, computed: Computed) {
        let Computed { state, mask, took } = computed;
        self.bytes.store(state.bytes() as u64, Ordering::Release);
        self.state = Some(state);
        self.mask = Some(mask.map(Arc::new).map_err(|error| error.to_string()));
        self.took = took;
        self.is_slow |= took > SLOW;
    }

    /// The thread has ended with the state.
    fn lose(&mut self) {
        self.mask.get_or_insert(Err(LOST.into()));
    }

    /// Moves to another position, whose mask is not known. Waits for a mask that is being computed.
    fn change(
        &mut self,
        change: impl FnOnce(&mut GrammarState) -> Result<(), TextError>,
    ) -> Result<(), String> {
        self.settle();
        let state = self.state.as_mut().ok_or(LOST)?;
        change(state).map_err(|error| error.to_string())?;
        self.mask = None;
        self.is_complete = state.is_complete();
        Ok(())
    }
}

const LOST: &str = "the thread that computes the grammar's masks has ended";

#[cfg(test)]
mod tests;
