//! The last fence against panics of the libraries underneath.
//!
//! What is known to panic is checked before it is called (`tokenizer/check.rs`, `template/limits.rs`). This
//! fence is for what is not known: a precompiled normaliser whose table points outside itself, for example,
//! panics only when a text reaches the bad entry.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::TextError;

/// Runs `body`; a panic inside it becomes [`TextError::Panicked`].
///
/// `body` must not leave its captures half-changed: everything called here takes `&self` of a finished
/// tokenizer or template, or builds a value that is dropped on failure.
pub(crate) fn guarded<T>(
    op: &'static str,
    body: impl FnOnce() -> Result<T, TextError>,
) -> Result<T, TextError> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        let reason = payload
            .downcast_ref::<&str>()
            .map(|s| s.to_string())
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".to_string());
        Err(TextError::Panicked { op, reason })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error_that_names_the_operation() {
        let missing: Vec<u8> = Vec::new();
        let err = guarded("encode", || Ok(missing[3])).unwrap_err();
        assert!(matches!(err, TextError::Panicked { op: "encode", .. }), "{err}");
        assert!(err.to_string().contains("index out of bounds"), "{err}");
    }

    #[test]
    fn values_and_errors_pass_through() {
        assert_eq!(guarded("encode", || Ok(7)).unwrap(), 7);
        let err = guarded::<()>("encode", || Err(TextError::Refused { message: "no".into() })).unwrap_err();
        assert!(matches!(err, TextError::Refused { .. }));
    }
}
