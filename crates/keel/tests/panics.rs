//! A panic leaves a line that says where it was and what it said.

/// Standard error after a panic, and the exit status.
fn after_panic(kind: &str, backtrace: &str) -> (String, std::process::ExitStatus) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_keel"));
    let command = command.args(["plan", "--json"]).env("KEEL_INJECT_PANIC", kind);
    let output = command.env("RUST_BACKTRACE", backtrace).output().expect("keel starts");
    (String::from_utf8_lossy(&output.stderr).into_owned(), output.status)
}

#[test]
fn a_panic_leaves_a_line_with_place_and_message() {
    let (stderr, status) = after_panic("once", "0");
    assert_eq!(status.code(), Some(1));
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    for part in ["keel: this is a bug in keel", "thread main", "src/failure.rs:", "injected in two lines"] {
        assert!(stderr.contains(part), "{part} in {stderr}");
    }
    let (traced, _) = after_panic("once", "1");
    assert!(traced.lines().count() > 5 && traced.contains("injected"), "{traced}");
}

#[test]
fn a_second_panic_while_unwinding_leaves_a_line_too() {
    let (stderr, status) = after_panic("unwinding", "0");
    assert!(!status.success());
    for part in ["injected first", "injected while unwinding"] {
        assert!(stderr.contains(part), "{part} in {stderr}");
    }
}

#[test]
fn a_panic_in_a_task_of_the_server_leaves_a_line() {
    let (stderr, status) = after_panic("task", "0");
    assert!(status.success(), "the task's alone: {stderr}");
    assert!(stderr.contains("injected in a task") && stderr.contains("src/failure.rs:"), "{stderr}");
}
