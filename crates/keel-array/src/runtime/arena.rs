//! The arena: memory for the intermediates of all programs of a stream, as large as the largest of them needs.

use std::sync::{Mutex, MutexGuard};

use crate::backend::Buffer;
use crate::{Result, Runtime};

/// None before the first program that needs one.
#[derive(Default)]
pub(super) struct Arena(Mutex<Option<Buffer>>);

impl Arena {
    fn slot(&self) -> MutexGuard<'_, Option<Buffer>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A handle to the arena, which has at least this many bytes; none where there is nothing to hold.
    ///
    /// It grows where it lies if the backend can do so: then nothing waits, and what was recorded with its address stays
    /// right. Otherwise it is given back, once nothing is queued, before a larger one is taken.
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

    /// A handle to the arena as it is.
    pub fn get(&self) -> Option<Buffer> {
        self.slot().clone()
    }

    /// Gives it back. Work that is queued keeps what it was given.
    pub fn clear(&self) {
        *self.slot() = None;
    }
}
