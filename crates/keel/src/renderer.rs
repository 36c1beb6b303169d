//! Runs this program as a second process that renders chat templates. The system bounds its memory and time.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The argument that selects the rendering process. The command-line parser never sees it.
const ARGUMENT: &str = "--render-templates-for-parent";

/// Whether this is the rendering process.
pub fn is_asked_for() -> bool {
    std::env::args_os().nth(1).is_some_and(|argument| argument == ARGUMENT)
}

/// Renders until the parent ends.
pub fn run() -> Result<()> {
    // One heap arena, because further arenas would reserve address space, which is bounded.
    keel_cpu::process::heap::stay_small();
    keel_text::render_for_parent(keel_cpu::process::heap::give_back_free)
        .context("templates are not rendered")
}

/// Makes the rendering process render the templates of this process.
pub fn set() {
    keel_text::render_in_process(own_program(), vec![ARGUMENT.into()]);
}

/// A path of the running program.
pub fn own_program() -> PathBuf {
    // The link names it also after an update has replaced its file.
    let link = Path::new("/proc/self/exe");
    let named = || std::env::args_os().next().map(PathBuf::from).unwrap_or_default();
    if link.exists() { link.to_path_buf() } else { std::env::current_exe().unwrap_or_else(|_| named()) }
}
