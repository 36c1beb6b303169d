//! Cancels work on a text whose result is no longer needed.
//!
//! The libraries in use have no cancellation. So a thread that works on a text carries a flag, and code that runs for
//! each word or character checks it.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::TextError;

thread_local! {
    static CURRENT: RefCell<Cancel> = RefCell::default();
}

/// Ends work on a text early. Clones share one flag.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Asks work within [`Cancel::scope`] to end with [`TextError::Cancelled`] as soon as it can.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether the work was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Runs `work` so that `cancel` ends the functions of this crate that it calls on this thread.
    pub fn scope<T>(&self, work: impl FnOnce() -> T) -> T {
        let _before = Before(CURRENT.with(|current| current.replace(self.clone())));
        work()
    }

    /// The handle of the caller's scope. Outside a scope: a handle that is never cancelled.
    pub fn current() -> Cancel {
        CURRENT.with(|current| current.borrow().clone())
    }
}

/// Restores the previous handle, also after a panic.
struct Before(Cancel);

impl Drop for Before {
    fn drop(&mut self) {
        CURRENT.with(|current| current.swap(&RefCell::new(std::mem::take(&mut self.0))));
    }
}

/// Whether the work of this thread was cancelled.
pub(crate) fn is_cancelled() -> bool {
    CURRENT.with(|current| current.borrow().is_cancelled())
}

/// Fails if the work of this thread was cancelled.
pub(crate) fn check() -> Result<(), TextError> {
    if is_cancelled() { Err(TextError::Cancelled) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_holds_within_its_scope_alone() {
        let (outer, inner) = (Cancel::default(), Cancel::default());
        inner.cancel();
        outer.scope(|| {
            assert!(!is_cancelled());
            inner.scope(|| assert!(check().is_err()));
            assert!(check().is_ok());
            outer.cancel();
            assert!(is_cancelled());
        });
        assert!(!is_cancelled());
    }
}
