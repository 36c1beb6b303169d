//! The masks of a grammar, computed on a thread of the answer.
//!
//! The tokens that a grammar allows do not depend on logits, so a mask is computed before the step that needs it. A step
//! waits for masks a moment, because most take microseconds. An answer whose mask is not there then sits out, so the
//! others go on. After a mask that took long, no step waits for the answer any more.
//!
//! Drafts need masks in the middle of a step. An answer drafts once its masks are known to be quick, and these masks are
//! computed within the step. After a slow one it drafts no more. So an answer holds up others for one slow mask at most,
//! and without drafts for none.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use keel_text::{GrammarMask, GrammarState, MaskCanceller, TextError};

/// A mask that takes longer is slow. So are all after it.
const SLOW: Duration = Duration::from_millis(5);
/// Masks are known to be quick after this number of them, if none was slow.
const KNOWN: u32 = 4;
/// Positions whose masks are kept for drafts that are taken back and chosen.
const KEPT: usize = 16;

type Mask = Result<Arc<GrammarMask>, String>;

/// A grammar's position, and the mask there.
pub(crate) struct MaskAhead {
    /// `None` while the thread has it, and after the thread has lost it.
    state: Option<GrammarState>,
    masks: Masks,
    /// Whether a mask has taken long.
    is_slow: bool,
    /// Number of masks so far, up to [`KNOWN`].
    known: u32,
    is_complete: bool,
    /// Made when the first mask is computed ahead.
    thread: Option<MaskThread>,
    canceller: MaskCanceller,
}

/// The masks along the last tokens, and along tokens that were taken back.
#[derive(Default)]
struct Masks {
    /// Those of the kept positions; `None` where a mask is not known.
    masks: Vec<Option<Mask>>,
    /// The tokens between these positions.
    tokens: Vec<u32>,
    /// The current position.
    at: usize,
}

impl Masks {
    fn starting_with(mask: Mask) -> Masks {
        Masks { masks: vec![Some(mask)], tokens: Vec::new(), at: 0 }
    }

    fn here(&self) -> Option<&Mask> {
        self.masks[self.at].as_ref()
    }

    fn set(&mut self, mask: Mask) {
        self.masks[self.at] = Some(mask);
    }

    fn accept(&mut self, token: u32) {
        if self.tokens.get(self.at) != Some(&token) {
            self.tokens.truncate(self.at);
            self.masks.truncate(self.at + 1);
            self.tokens.push(token);
            self.masks.push(None);
        }
        self.at += 1;
        if self.at > KEPT {
            self.tokens.remove(0);
            self.masks.remove(0);
            self.at -= 1;
        }
    }

    fn rollback(&mut self, tokens: usize) {
        match self.at.checked_sub(tokens) {
            Some(at) => self.at = at,
            // Nothing is known so far back.
            None => *self = Masks { masks: vec![None], ..Masks::default() },
        }
    }
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
            state: Some(state),
            masks: Masks::starting_with(Ok(first)),
            is_slow: took > SLOW,
            known: 1,
            thread: None,
        }
    }

    /// Whether the mask is there. If not, it is being computed. Waits for a mask that is not known to be slow.
    pub fn is_ready(&mut self, patience: Duration) -> bool {
        if self.masks.here().is_some() {
            return true;
        }
        self.begin();
        let Some(thread) = self.thread.as_ref().filter(|_| self.masks.here().is_none()) else { return true };
        let patience = if self.is_slow { Duration::ZERO } else { patience };
        match thread.masks.recv_timeout(patience) {
            Ok(computed) => self.keep(computed),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => self.lose(),
        }
        self.masks.here().is_some()
    }

    /// Whether masks are likely to be so quick that they may be computed within a step.
    pub fn is_quick(&self) -> bool {
        !self.is_slow && self.known >= KNOWN
    }

    /// Sets the logits of tokens that may not come to negative infinity.
    pub fn apply(&mut self, logits: &mut [f32]) -> Result<(), String> {
        if self.masks.here().is_none() {
            self.settle();
        }
        if let Some(state) = self.state.take_if(|_| self.masks.here().is_none()) {
            self.keep(Computed::of(state));
        }
        match self.masks.here() {
            Some(Ok(mask)) => mask.apply(logits),
            Some(Err(reason)) => return Err(reason.clone()),
            None => return Err(LOST.into()),
        }
        Ok(())
    }

    /// Takes the token that was drawn.
    pub fn accept(&mut self, token: u32) -> Result<(), String> {
        self.change(|state| state.accept(token))?;
        self.masks.accept(token);
        Ok(())
    }

    /// Takes back the last tokens.
    pub fn rollback(&mut self, tokens: usize) -> Result<(), String> {
        if tokens == 0 {
            return Ok(());
        }
        self.change(|state| state.rollback(tokens))?;
        self.masks.rollback(tokens);
        Ok(())
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
        self.state = Some(state);
        self.masks.set(mask.map(Arc::new).map_err(|error| error.to_string()));
        self.is_slow |= took > SLOW;
        self.known = (self.known + 1).min(KNOWN);
    }

    /// The thread has ended with the state.
    fn lose(&mut self) {
        if self.masks.here().is_none() {
            self.masks.set(Err(LOST.into()));
        }
    }

    /// Waits for a mask that is being computed.
    fn change(
        &mut self,
        change: impl FnOnce(&mut GrammarState) -> Result<(), TextError>,
    ) -> Result<(), String> {
        self.settle();
        let state = self.state.as_mut().ok_or(LOST)?;
        change(state).map_err(|error| error.to_string())?;
        self.is_complete = state.is_complete();
        Ok(())
    }
}

const LOST: &str = "the thread that computes the grammar's masks has ended";

#[cfg(test)]
mod tests;
