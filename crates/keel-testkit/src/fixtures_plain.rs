//! The tiny checkpoints of further plain transformers in `../shared/fixtures_plain` beside the repository.

use std::path::PathBuf;

/// Their names; the types of `phi4` and `phi4_mini` are `phi3`.
pub const OTHERS: [&str; 8] =
    ["mistral", "ministral", "ministral3", "smollm3", "phi4", "phi4_mini", "olmo3", "glm4"];

/// A fixture's folder; `None`, noted as a skipped test, where `../shared/fixtures_plain` is not there.
///
/// # Panics
/// If it is not there and `KEEL_REQUIRE_FIXTURES` is set.
pub fn other_fixture(name: &str) -> Option<PathBuf> {
    let found = crate::fixtures::in_shared("fixtures_plain", name);
    if found.is_none() {
        crate::skipped!("needs ../shared/fixtures_plain/{name}, which another program wrote");
    }
    found
}
