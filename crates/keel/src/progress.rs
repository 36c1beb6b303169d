//! Progress bars on standard error. They are shown only on a terminal.

use std::io::{IsTerminal, stderr};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A progress bar in bytes.
pub fn bytes(what: &'static str, total: u64) -> ProgressBar {
    bar(what, total, "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}")
}

/// A progress bar in tokens.
pub fn tokens(what: &'static str, total: usize) -> ProgressBar {
    bar(what, total as u64, "{msg} {wide_bar} {pos}/{len} tokens")
}

/// A progress bar in programs or kernels.
pub fn programs(what: &'static str, total: usize) -> ProgressBar {
    bar(what, total as u64, "{msg} {wide_bar} {pos}/{len}")
}

fn bar(what: &'static str, total: u64, template: &str) -> ProgressBar {
    let target =
        if stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(Some(total), target).with_style(style).with_message(what)
}
