//! The tiny checkpoints with reference outputs in `../shared/fixtures` beside the repository.

use std::path::{Path, PathBuf};

/// The hybrid models.
pub const HYBRID: [&str; 6] = [
    "qwen3_5",
    "qwen3_5_real_head_dims",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen3_5_mlx_4bit",
    "qwen3_5_moe_mlx_4bit",
];

/// The plain transformers.
pub const PLAIN: [&str; 4] = ["llama", "qwen3", "qwen3_moe", "gemma3_text"];

/// All models with reference logits.
pub fn models() -> impl Iterator<Item = &'static str> {
    HYBRID.into_iter().chain(PLAIN).chain(["qwen3_5_paro"])
}

/// A fixture's folder, or `None` (and a line that says so) where the shared folder is not beside the repository.
pub fn fixture(name: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/fixtures").join(name);
    if !folder.is_dir() {
        println!("skipped: no fixture {name}");
        return None;
    }
    Some(folder)
}

/// The models with eyes.
pub const VLM: [&str; 4] = ["vlm_qwen3_5", "vlm_qwen3_5_moe", "vlm_qwen3_vl", "vlm_gemma3"];

/// The folder of a model with eyes, or `None` (and a line that says so) where the shared folder is not beside the repository.
///
/// # Panics
/// Where it is not there and `KEEL_REQUIRE_FIXTURES` is set: a run that must not skip anything says so.
pub fn vlm_fixture(name: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/fixtures_vlm").join(name);
    if folder.is_dir() {
        return Some(folder);
    }
    assert!(std::env::var_os("KEEL_REQUIRE_FIXTURES").is_none(), "no fixture {name} in {}", folder.display());
    println!("skipped: no fixture {name}");
    None
}
