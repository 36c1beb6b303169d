//! The tiny checkpoints of further plain transformers in `../shared/fixtures_plain` beside the repository.

use std::path::{Path, PathBuf};

/// Their names; the types of `phi4` and `phi4_mini` are `phi3`.
pub const OTHERS: [&str; 8] =
    ["mistral", "ministral", "ministral3", "smollm3", "phi4", "phi4_mini", "olmo3", "glm4"];

/// A fixture's folder, or `None` (and a line that says so) where the shared folder is not beside the repository.
///
/// # Panics
/// If it is not there and `KEEL_REQUIRE_FIXTURES` is set.
pub fn other_fixture(name: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/fixtures_plain").join(name);
    if !folder.is_dir() {
        assert!(std::env::var_os("KEEL_REQUIRE_FIXTURES").is_none(), "no fixture {}", folder.display());
        println!("skipped: no fixture {name}");
        return None;
    }
    Some(folder)
}
