//! Chat templates are rendered by another process of this very program, whose memory and time the system bounds.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The argument that makes this program the other process. It is no command: the command line never sees it.
const ARGUMENT: &str = "--render-templates-for-parent";

/// Whether this is the other process.
pub fn is_asked_for() -> bool {
    std::env::args_os().nth(1).is_some_and(|argument| argument == ARGUMENT)
}

/// Renders until the parent ends.
pub fn run() -> Result<()> {
    // One arena: further ones would reserve address space, which is what is bounded.
    keel_cpu::heap::share_arena();
    keel_text::render_for_parent(keel_cpu::heap::give_back_free).context("templates are not rendered")
}

/// Has templates of this process rendered by the other.
pub fn set() {
    // The link names the program that runs, also after an update has replaced its file.
    let link = Path::new("/proc/self/exe");
    let named = || std::env::args_os().next().map(PathBuf::from).unwrap_or_default();
    let program =
        if link.exists() { link.to_path_buf() } else { std::env::current_exe().unwrap_or_else(|_| named()) };
    keel_text::render_apart(program, vec![ARGUMENT.into()]);
}
