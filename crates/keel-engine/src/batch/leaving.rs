//! How a sequence leaves the batch.
//!
//! It leaves at once, whether a step under way has rows of it or not. A later owner of its memory runs after that step,
//! on each device.

use keel_cache::SavedState;

use super::Batcher;
use super::request::{BatchEvent, SequenceId};
use super::sequence::Running;
use crate::EngineError;

impl Batcher {
    pub(super) fn end(&mut self, i: usize, event: BatchEvent) {
        let id = self.leave(i);
        self.emit(id, event);
    }

    pub(super) fn fail(&mut self, i: usize, error: EngineError) {
        self.end(i, BatchEvent::Failed(error));
    }

    /// Removes a sequence from the batch and takes its memory back. Its tokens up to its last kept state are
    /// remembered.
    pub(super) fn leave(&mut self, i: usize) -> SequenceId {
        let mut running = self.running.remove(i);
        self.remember_answer(&mut running);
        let id = running.id;
        self.give_back(running);
        self.forget_unwanted();
        id
    }

    /// Remembers the tokens of a sequence up to its last kept state.
    pub(super) fn remember_answer(&mut self, running: &mut Running) {
        if let Some(SavedState { position, checkpoint }) = running.rolling.take() {
            self.prefixes.remember(&running.key(position), &running.cache, Some(checkpoint));
        } else if self.options.reuse_generated
            && !self.engine.cache().spec().is_recurrent()
            && running.shares_prefixes()
        {
            let whole = running.cache.len() / keel_cache::PREFIX_BLOCK * keel_cache::PREFIX_BLOCK;
            self.prefixes.remember(&running.key(whole), &running.cache, None);
        }
    }

    /// Takes back the memory of a sequence that has ended.
    pub(super) fn give_back(&mut self, mut running: Running) {
        self.let_go_of_pictures(&mut running);
        if let Some(speculation) = &running.speculation {
            self.speculation.add(speculation.counters());
        }
        self.engine.release(running.cache);
    }
}
