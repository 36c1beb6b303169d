//! The masks of a grammar, computed on a thread of the answer where they take long.
//!
//! Most masks take microseconds and are computed when they are needed. Once one has taken long, the rest of the answer's
//! are computed ahead: the tokens that a grammar allows do not depend on logits. An answer whose mask is not there yet
//! sits out of the step, so the others go on. Answers to one prompt share the grammar's tables and wait for each other.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use keel_text::{GrammarMask, GrammarState};

/// A mask that takes longer is slow. So are all after it.
const SLOW: Duration = Duration::from_millis(5);

type Mask = Result<Arc<GrammarMask>, String>;

/// A grammar's position, and the mask there.
pub(crate) struct MaskAhead {
    /// `None` while the thread has it, and after the thread has lost it.
    state: Option<GrammarState>,
    mask: Option<Mask>,
    /// Whether a mask has taken long.
    is_slow: bool,
    is_complete: bool,
    /// Made when the first mask is computed ahead.
    thread: Option<MaskThread>,
}

/// A thread that computes masks. It ends when this is dropped.
struct MaskThread {
    states: Sender<GrammarState>,
    masks: Receiver<Computed>,
}

/// A mask that a thread has computed.
struct Computed {
    state: GrammarState,
    mask: Mask,
    took: Duration,
}

impl Computed {
    fn of(mut state: GrammarState) -> Computed {
        let start = Instant::now();
        let mask = state.allowed().map(Arc::new).map_err(|error| error.to_string());
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

impl MaskAhead {
    /// At the start of a grammar, whose mask is known and took as long as `took`.
    pub fn new(state: GrammarState, first: Arc<GrammarMask>, took: Duration) -> MaskAhead {
        let (is_complete, is_slow) = (state.is_complete(), took > SLOW);
        MaskAhead { state: Some(state), mask: Some(Ok(first)), is_slow, is_complete, thread: None }
    }

    /// Whether a step need not wait for the mask. If it has to, the mask is being computed.
    pub fn is_ready(&mut self) -> bool {
        if self.mask.is_some() || !self.is_slow {
            return true;
        }
        self.begin();
        let Some(thread) = self.thread.as_ref().filter(|_| self.mask.is_none()) else { return true };
        match thread.masks.try_recv() {
            Ok(computed) => self.keep(computed),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => self.lose(),
        }
        self.mask.is_some()
    }

    /// Whether masks take so long that none should be computed within a step.
    pub fn is_slow(&self) -> bool {
        self.is_slow
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
        self.change(|state| state.accept(token).map_err(|error| error.to_string()))
    }

    /// Takes back the last tokens.
    pub fn rollback(&mut self, tokens: usize) -> Result<(), String> {
        self.change(|state| state.rollback(tokens).map_err(|error| error.to_string()))
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
        self.mask = Some(mask);
        self.is_slow |= took > SLOW;
    }

    /// The thread has ended with the state.
    fn lose(&mut self) {
        self.mask.get_or_insert(Err(LOST.into()));
    }

    /// Waits for a mask that is being computed.
    fn change(&mut self, change: impl FnOnce(&mut GrammarState) -> Result<(), String>) -> Result<(), String> {
        self.settle();
        let state = self.state.as_mut().ok_or(LOST)?;
        self.mask = None;
        change(state)?;
        self.is_complete = state.is_complete();
        Ok(())
    }
}

const LOST: &str = "the thread that computes the grammar's masks has ended";

#[cfg(test)]
mod tests {
    use keel_text::{GrammarFactory, GrammarSource, TextFiles, Tokenizer};

    use super::*;

    fn start(grammar: &str, took: Duration) -> (GrammarState, MaskAhead, usize) {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let files = TextFiles::read(&folder).expect("there");
        let tokenizer = Tokenizer::new(&files).expect("sound");
        let factory = GrammarFactory::new(&files, &tokenizer).expect("it takes grammars");
        let mut state = factory.start(&GrammarSource::Regex(grammar.into())).expect("sound");
        let first = state.allowed().expect("bounded");
        let vocab = tokenizer.vocab_size();
        (state.clone(), MaskAhead::new(state, Arc::new(first), took), vocab)
    }

    fn allowed(mask: impl FnOnce(&mut [f32]) -> Result<(), String>, vocab: usize) -> Vec<u32> {
        let mut logits = vec![0.0; vocab];
        mask(&mut logits).expect("bounded");
        (0..vocab as u32).filter(|&id| logits[id as usize] == 0.0).collect()
    }

    #[test]
    fn masks_are_those_that_the_grammar_gives_and_can_be_taken_back() {
        for took in [Duration::ZERO, 2 * SLOW] {
            let (mut state, mut ahead, vocab) = start("[a-c]{1,4}x(y|z){2}", took);
            for step in 0..12 {
                // Some masks are waited for, some are needed at once.
                while step % 3 != 0 && !ahead.is_ready() {}
                let want = allowed(|logits| state.mask(logits).map_err(|e| e.to_string()), vocab);
                assert_eq!(allowed(|logits| ahead.apply(logits), vocab), want, "step {step}");
                let Some(&token) = want.get(step % want.len()) else { break };
                state.accept(token).expect("allowed");
                ahead.accept(token).expect("allowed");
                assert_eq!(ahead.is_complete(), state.is_complete());
                if ahead.is_complete() {
                    break;
                }
                if step % 4 == 1 {
                    // Also while a thread has it.
                    ahead.is_ready();
                    ahead.rollback(1).expect("accepted");
                    state.rollback(1).expect("accepted");
                }
            }
        }
    }

    #[test]
    fn after_a_slow_mask_all_are_computed_on_a_thread() {
        let (mut state, mut ahead, vocab) = start("[a-c]{1,4}x(y|z){2}", Duration::ZERO);
        let token = allowed(|logits| state.mask(logits).map_err(|e| e.to_string()), vocab)[0];
        ahead.accept(token).expect("allowed");
        assert!(ahead.is_ready() && ahead.thread.is_none(), "a fast one is computed when it is needed");
        let state = ahead.state.take().expect("no thread has it");
        let mask = Err("a step has waited for it".into());
        ahead.keep(Computed { state, mask, took: 2 * SLOW });
        for _ in 0..2 {
            ahead.rollback(0).expect("nothing is taken back");
            ahead.is_ready();
            assert!(ahead.thread.is_some() && ahead.is_slow());
            while !ahead.is_ready() {}
            assert!(matches!(&ahead.mask, Some(Ok(_))));
        }
    }
}
