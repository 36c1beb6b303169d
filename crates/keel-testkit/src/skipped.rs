//! Tests that cannot run on this machine: they need a GPU, or files that are missing.
//!
//! Such a test calls [`skipped!`](crate::skipped!) and returns. That writes a line to standard output and to
//! `skipped-tests.txt` in the target folder. `.ci/run` counts the lines at its end, because Rust's test harness reports
//! these tests as passed.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

/// The file that lists the tests that did not run. It lies in the target folder of the test's program.
pub const FILE: &str = "skipped-tests.txt";

/// Records that this test did not run, and why.
#[macro_export]
macro_rules! skipped {
    ($($reason:tt)*) => {
        $crate::skipped::note(module_path!(), &format!($($reason)*))
    };
}

/// True if `KEEL_TEST_CUDA` is set, which says that there is a GPU to test. Otherwise the test is recorded as skipped.
#[macro_export]
macro_rules! has_gpu {
    () => {{
        let has = std::env::var_os("KEEL_TEST_CUDA").is_some();
        if !has {
            $crate::skipped!("needs a GPU: set KEEL_TEST_CUDA=1 where there is one");
        }
        has
    }};
}

/// The function of [`skipped!`](crate::skipped!): prints the line and appends it to [`FILE`].
pub fn note(module: &str, reason: &str) {
    // The harness gives a test's thread the test's name.
    let thread = std::thread::current();
    let line = format!("{module}::{}: {reason}\n", thread.name().unwrap_or("main"));
    print!("skipped: {line}");
    // Appended in one write, so that lines of several processes do not mix.
    let path = target_folder().join(FILE);
    let file = OpenOptions::new().create(true).append(true).open(path);
    let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
}

/// The folder that this program was built into, for example `target/release`; the system's temporary folder if that is
/// read-only.
pub(crate) fn target_folder() -> PathBuf {
    let built = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.parent()?.to_owned()));
    let writable =
        |folder: &PathBuf| std::fs::metadata(folder).is_ok_and(|found| !found.permissions().readonly());
    built.filter(writable).unwrap_or_else(std::env::temp_dir)
}
