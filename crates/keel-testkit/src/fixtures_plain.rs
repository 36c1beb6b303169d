//! Tiny checkpoints of more plain transformers, in `../shared/fixtures_plain` next to the repository.

use std::path::PathBuf;

/// Their names. `phi4` and `phi4_mini` have the type `phi3`.
pub const OTHERS: [&str; 8] =
    ["mistral", "ministral", "ministral3", "smollm3", "phi4", "phi4_mini", "olmo3", "glm4"];

/// A fixture's folder; `None`, recorded as a skipped test, if `../shared/fixtures_plain` is missing.
///
/// # Panics
/// If it is missing and `KEEL_REQUIRE_FIXTURES` is set.
pub fn other_fixture(name: &str) -> Option<PathBuf> {
    let found = crate::fixtures::in_shared("fixtures_plain", name);
    if found.is_none() {
        crate::skipped!("needs ../shared/fixtures_plain/{name}, which another program wrote");
    }
    found
}
