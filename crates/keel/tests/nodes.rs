//! A model on several processes, through the program: the cases that need no GPU.

#![cfg(unix)]

mod common;

use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::served::signal;
use common::{fail, keel, misuse, stderr};
use keel_cuda::Survey;

/// A process that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Two addresses on which no process listens.
fn addresses() -> [String; 2] {
    [(); 2].map(|()| {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        listener.local_addr().expect("bound").to_string()
    })
}

#[test]
fn processes_that_cannot_share_a_model_are_refused() {
    let with = |command: &[&'static str], options: &[&'static str]| [command, options].concat();
    let cpu = &["--devices", "cpu:0", "--nodes", "localhost:1,localhost:2"];
    misuse(&with(&["generate", "x"], cpu), "cpu:0 exchanges arrays within its own process only");
    misuse(&with(&with(&["serve"], cpu), &["--node", "1"]), "list GPUs in --devices");
    let gpu = &["--devices", "cuda:0", "--nodes", "localhost:1,localhost:2"];
    misuse(&with(&with(&["generate", "x"], gpu), &["--node", "1"]), "--node above 0 is for keel serve");
    misuse(&with(&with(&["serve"], gpu), &["--node", "2"]), "--nodes lists 2 addresses");
    let limits = &["--node", "1", "--memory-limit", "1Gi,2Gi"];
    misuse(&with(&with(&["serve"], gpu), limits), "--memory-limit has 2 values for 1 device(s)");
    misuse(&with(&["plan"], gpu), "this command runs in one process");
    let alone = &["--devices", "cuda:0", "--nodes", "localhost:1"];
    misuse(&with(&["generate", "x"], alone), "--nodes lists one address");
}

#[test]
fn a_node_says_why_it_cannot_open_its_devices() {
    if !Survey::take().gpus.is_empty() {
        keel_testkit::skipped!("for a machine without a GPU");
        return;
    }
    let [first, second] = addresses();
    let nodes = [first, second].join(",");
    let node = Command::new(env!("CARGO_BIN_EXE_keel"))
        .args(["serve", "--devices", "cuda:0", "--nodes", &nodes, "--node", "1"])
        .env("KEEL_CONFIG", "")
        .stderr(Stdio::piped())
        .spawn();
    let mut node = Running(node.expect("keel starts"));
    let options = ["generate", "Once", "--devices", "cuda:0", "--nodes", &nodes];
    // The node goes on after a leader that failed.
    for _ in 0..2 {
        fail(&options, "cuda:0: ");
        let message = stderr(&keel(&options));
        assert!(message.contains("node 1 (127.0.0.1:") && message.contains("NVIDIA driver"), "{message}");
    }
    assert_eq!(node.0.try_wait().expect("a child"), None, "the same process goes on");
    node.0.kill().expect("it runs");
    let log = std::io::read_to_string(node.0.stderr.take().expect("piped")).expect("text");
    let starts = log.lines().filter(|line| line.contains("for the leader at")).count();
    assert!((4..=5).contains(&starts), "it starts again after each of four leaders:\n{log}");
}

/// The leader shares the layers without the limit, which only the node knows.
#[test]
fn a_plan_beyond_the_own_limit_of_a_node_names_the_remedy() {
    let nodes = addresses().join(",");
    let mut node = Command::new(env!("CARGO_BIN_EXE_keel"));
    node.args(["serve", "--devices", "cuda:0", "--nodes", &nodes, "--node", "1", "--memory-limit", "1Mi"]);
    let _node = Running(node.env("KEEL_CONFIG", "").stderr(Stdio::null()).spawn().expect("keel starts"));
    let leader = ["generate", "Once", "--devices", "cuda:0", "--nodes", &nodes];
    fail(&leader, "1/cuda:0, as its process says (in a pipeline give node 0 a --memory-limit");
}

/// A leader whose model cannot be loaded looks for some seconds whether a node is lost.
#[test]
fn a_signal_ends_a_leader_that_does_not_serve() {
    if !Survey::take().gpus.is_empty() {
        keel_testkit::skipped!("for a machine without a GPU");
        return;
    }
    let nodes = addresses().join(",");
    let start = |options: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_keel"));
        command.args(["serve", "--devices", "cuda:0", "--nodes", &nodes]).args(options);
        Running(command.env("KEEL_CONFIG", "").stderr(Stdio::piped()).spawn().expect("keel starts"))
    };
    let _node = start(&["--node", "1"]);
    let mut leader = start(&["--port", "0"]);
    // It fails well before, and waits for 6 s.
    std::thread::sleep(Duration::from_secs(2));
    let begin = Instant::now();
    signal(&leader.0, "-INT");
    let status = leader.0.wait().expect("a child");
    // If the machine is so slow that it has not begun, the system ends it.
    assert!(status.code() == Some(130) || status.signal() == Some(2), "{status}");
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
}
