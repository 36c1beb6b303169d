//! Bounds on the cost of a malicious folder.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Runs keel on a malicious folder. It must end within 5 s and 500 MB, including its child processes. Returns standard
/// error.
pub fn ends_soon(args: &[&str]) -> String {
    let mut child = Command::new(env!("CARGO_BIN_EXE_keel"))
        .args(args)
        .env("KEEL_DEVICE", "cpu")
        .env("HF_HUB_OFFLINE", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("keel starts");
    let (start, mut peaks) = (Instant::now(), std::collections::BTreeMap::new());
    while child.try_wait().expect("it is our child").is_none() {
        for pid in std::iter::once(child.id()).chain(children(child.id())) {
            let kb = peak_kb(pid);
            peaks.entry(pid).and_modify(|peak: &mut u64| *peak = kb.max(*peak)).or_insert(kb);
        }
        if start.elapsed() > Duration::from_secs(20) {
            child.kill().expect("it is our child");
            panic!("keel {} is still running after 20 s, with {peaks:?} kB", args.join(" "));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let peak_kb = peaks.values().sum::<u64>();
    assert!(peak_kb < 500 << 10, "keel {}: {peaks:?} kB", args.join(" "));
    let output = child.wait_with_output().expect("it has ended");
    let message = super::stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    message
}

/// Peak memory of a process.
pub fn peak_kb(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("0 kB");
    line.trim().trim_end_matches(" kB").parse().unwrap_or(0)
}

/// The running child processes of a process.
pub fn children(pid: u32) -> Vec<u32> {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let of_thread =
        |thread: fs::DirEntry| fs::read_to_string(thread.path().join("children")).unwrap_or_default();
    let lists: Vec<String> = threads.flatten().map(of_thread).collect();
    lists.iter().flat_map(|list| list.split_whitespace()).filter_map(|pid| pid.parse().ok()).collect()
}
