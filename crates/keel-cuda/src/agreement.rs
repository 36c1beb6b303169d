//! Checks without a GPU that Rust and a kernel's source have the same numbers.

use crate::kernels::{KernelKey, Source};
use crate::{Architecture, CudaError, compile};

/// Newer than Hopper, so the compiler skips the bodies of the kernels that only Hopper runs. Their macros remain.
const ARCHITECTURE: Architecture = Architecture { capability: (12, 0), is_portable: false };

/// A key with these constants.
pub(crate) fn key_of(source: Source, entry: &'static str, constants: &[(&'static str, usize)]) -> KernelKey {
    constants.iter().fold(KernelKey::new(source, entry), |key, &(name, value)| key.define(name, value))
}

/// Asserts that expressions of the key's source (macros, sizes of structures) have the values that Rust has for them.
/// The compiler checks them.
pub(crate) fn assert_values(key: KernelKey, values: &[(&str, usize)]) {
    let assertion = |(expression, value): &(&str, usize)| {
        format!("static_assert(({expression}) == {value}, \"Rust has {value}\");\n")
    };
    let source = values.iter().map(assertion).fold(key.source.to_string(), |text, line| text + &line);
    match compile(&KernelKey { source: source.into(), ..key }, ARCHITECTURE) {
        Ok(_) => {}
        Err(error @ CudaError::Missing { .. }) if std::env::var_os("KEEL_REQUIRE_NVRTC").is_none() => {
            keel_testkit::skipped!("needs the compiler of kernels: {error}")
        }
        Err(error) => panic!("{error}"),
    }
}
