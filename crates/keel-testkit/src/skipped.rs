//! Tests that cannot run where they are: without a GPU, without files from elsewhere.
//!
//! Such a test says so with [`skipped!`](crate::skipped!) and returns. The line goes to standard output and to
//! `skipped-tests.txt` in the target folder; `.ci/run` counts the lines at its end, because Rust's test harness reports
//! these tests as passed.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

/// The file that collects the tests that did not run, in the target folder of this test's program.
pub const FILE: &str = "skipped-tests.txt";

/// Says that this test did not run, and why.
#[macro_export]
macro_rules! skipped {
    ($($reason:tt)*) => {
        $crate::skipped::note(module_path!(), &format!($($reason)*))
    };
}

/// True where `KEEL_TEST_CUDA` says that there is a GPU to be tested; otherwise the test is noted as skipped.
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

/// What [`skipped!`](crate::skipped!) calls: prints the line and adds it to [`FILE`].
pub fn note(module: &str, reason: &str) {
    // The harness names a test's thread after the test.
    let thread = std::thread::current();
    let line = format!("{module}::{}: {reason}\n", thread.name().unwrap_or("main"));
    print!("skipped: {line}");
    // Appended in one write, so that lines of several processes do not mix.
    let path = target_folder().join(FILE);
    let file = OpenOptions::new().create(true).append(true).open(path);
    let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
}

/// The folder that this program was built into, `target/release` for one; the system's temporary folder where that cannot
/// be written.
pub(crate) fn target_folder() -> PathBuf {
    let built = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.parent()?.to_owned()));
    let writable =
        |folder: &PathBuf| std::fs::metadata(folder).is_ok_and(|found| !found.permissions().readonly());
    built.filter(writable).unwrap_or_else(std::env::temp_dir)
}
