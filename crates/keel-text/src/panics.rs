//! Catches panics of the libraries in use.
//!
//! Inputs that are known to panic are refused before the call (`tokenizer/check.rs`, `template/limits.rs`). This module
//! covers the unknown ones. Example: a precompiled normaliser whose table points outside itself panics only when a text
//! reaches the bad entry.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use crate::{Cancel, TextError};

/// Runs `body`. A panic inside it becomes [`TextError::Panicked`].
///
/// `body` must not leave its captures half-changed. Every caller passes code that takes `&self` of a finished tokenizer
/// or template, or that builds a value which is dropped on failure.
pub(crate) fn catch_panics<T>(
    op: &'static str,
    body: impl FnOnce() -> Result<T, TextError>,
) -> Result<T, TextError> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| Err(panicked(op, payload)))
}

/// Runs `body` on a new thread with a stack of `stack_bytes`, and catches panics as [`catch_panics`] does.
///
/// A stack overflow cannot be caught; it can only be avoided by a larger stack. The stack is address space, and pages
/// are allocated when touched. An ordinary run costs tens of microseconds and no memory.
pub(crate) fn guarded_on_stack<T: Send>(
    op: &'static str,
    stack_bytes: usize,
    body: impl FnOnce() -> Result<T, TextError> + Send,
) -> Result<T, TextError> {
    let cancel = Cancel::current();
    thread::scope(|scope| {
        let worker = thread::Builder::new()
            .name(op.to_string())
            .stack_size(stack_bytes)
            .spawn_scoped(scope, move || cancel.scope(body));
        let worker = worker.map_err(|source| TextError::Stack { op, stack_bytes, source })?;
        worker.join().unwrap_or_else(|payload| Err(panicked(op, payload)))
    })
}

fn panicked(op: &'static str, payload: Box<dyn Any + Send>) -> TextError {
    let reason = match payload.downcast::<String>() {
        Ok(message) => *message,
        Err(payload) => payload.downcast_ref::<&str>().unwrap_or(&"no message").to_string(),
    };
    TextError::Panicked { op, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error_that_names_the_operation() {
        let missing: Vec<u8> = Vec::new();
        let err = catch_panics("encode", || Ok(missing[3])).unwrap_err();
        assert!(matches!(err, TextError::Panicked { op: "encode", .. }), "{err}");
        assert!(err.to_string().contains("index out of bounds"), "{err}");
        let err = guarded_on_stack("render", 1 << 20, || Ok(missing[3])).unwrap_err();
        assert!(matches!(err, TextError::Panicked { op: "render", .. }), "{err}");
        assert!(err.to_string().contains("index out of bounds"), "{err}");
    }

    #[test]
    fn values_and_errors_pass_through() {
        assert_eq!(catch_panics("encode", || Ok(7)).unwrap(), 7);
        let err =
            catch_panics::<()>("encode", || Err(TextError::Refused { message: "no".into() })).unwrap_err();
        assert!(matches!(err, TextError::Refused { .. }));
        assert_eq!(guarded_on_stack("render", 1 << 20, || Ok(7)).unwrap(), 7);
    }

    #[test]
    fn a_deep_recursion_fits_the_stack_it_asked_for() {
        fn depth(n: u64) -> u64 {
            if n == 0 { 0 } else { std::hint::black_box(depth(std::hint::black_box(n - 1))) + 1 }
        }
        // At 16 bytes or more per call this overflows the 2 MiB stack of a test thread.
        let counted = guarded_on_stack("render", 512 << 20, || Ok(depth(1_000_000))).unwrap();
        assert_eq!(counted, 1_000_000);
    }
}
