//! The arena: one memory for the intermediates of all programs of a stream, sized for the largest of them.

use std::sync::{Mutex, MutexGuard};

use crate::Buffer;
use crate::{Result, Runtime};

/// `None` before the first program with intermediates.
#[derive(Default)]
pub(super) struct Arena(Mutex<Option<Buffer>>);

impl Arena {
    fn slot(&self) -> MutexGuard<'_, Option<Buffer>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A handle to the arena with at least this many bytes; `None` for 0 bytes.
    ///
    /// The arena grows in place if the backend can do so: then nothing waits, and recorded programs keep a valid
    /// address. Otherwise the stream is drained and the arena freed before a larger one is allocated.
    pub fn at_least(&self, runtime: &Runtime, bytes: usize) -> Result<Option<Buffer>> {
        if bytes == 0 {
            return Ok(None);
        }
        let (backend, ledger) = (runtime.backend(), runtime.ledger());
        let mut slot = self.slot();
        let grown = match &*slot {
            Some(arena) if arena.bytes() >= bytes => true,
            Some(arena) => arena.grow_arena(backend, ledger, backend.arena_bytes(bytes))?,
            None => false,
        };
        if !grown {
            runtime.synchronize();
            *slot = None;
            *slot = Some(Buffer::allocate_arena(backend, ledger, backend.arena_bytes(bytes))?);
        }
        Ok(slot.clone())
    }

    /// A handle to the arena with its present size.
    pub fn get(&self) -> Option<Buffer> {
        self.slot().clone()
    }

    /// A handle to the arena, unless it is just being replaced. Never waits: a thread that replaces the arena may wait
    /// for the device with the lock held.
    pub fn at_once(&self) -> Option<Buffer> {
        self.0.try_lock().ok()?.clone()
    }

    /// Drops the arena. Queued work keeps its own handle.
    pub fn clear(&self) {
        *self.slot() = None;
    }
}
