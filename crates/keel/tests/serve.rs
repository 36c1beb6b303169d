//! `keel serve` as a process: it starts without arguments, drains at SIGTERM, and reports why it cannot start.

#![cfg(unix)]

mod common;

use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::served::{ledger, metrics, planned, post, ready, send, signal, start_with};
use common::{keel_with_input, stderr};

/// Starts a server on a free port. Returns its process and address.
fn start() -> (Child, String) {
    start_with(&[])
}

#[test]
fn sigterm_lets_a_running_answer_end() {
    let (mut child, address) = start();
    let body = r#"{"prompt": "Once", "max_tokens": 200, "ignore_eos": true, "stream": true}"#;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = send(&address, &format!("{head}{body}"));
    let mut text = vec![0; 400];
    stream.read_exact(&mut text).expect("it streams");
    signal(&child, "-TERM");
    stream.read_to_end(&mut text).expect("it ends");
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(text.starts_with("HTTP/1.1 200") && text.contains("[DONE]"), "{text}");
    assert!(child.wait().expect("it ends").success());
}

/// An answer under way does not wait for the disk, and prefixes are saved after it.
#[test]
fn prefixes_are_saved_after_the_last_answer() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let flags =
        ["--prefix-cache-dir", folder.path().to_str().expect("UTF-8"), "--grace", "60", "--sequences", "2"];
    let (mut child, address) = start_with(&flags);
    let post = |body: &str| {
        let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n";
        send(&address, &format!("{head}content-length: {}\r\n\r\n{body}", body.len()))
    };
    let ids = (0..200).map(|id| id.to_string()).collect::<Vec<_>>().join(",");
    let mut answer = String::new();
    let mut stream = post(&format!("{{\"prompt\": [{ids}], \"max_tokens\": 1}}"));
    stream.read_to_string(&mut answer).expect("UTF-8");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let mut stream = post(r#"{"prompt": "Once", "max_tokens": 400, "ignore_eos": true, "stream": true}"#);
    stream.read_exact(&mut [0; 400]).expect("it streams");
    signal(&child, "-TERM");
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).expect("it ends");
    let rest = String::from_utf8_lossy(&rest);
    assert!(rest.contains("[DONE]"), "{rest}");
    assert!(child.wait().expect("it ends").success());
    let index = std::fs::read_to_string(folder.path().join("index.json")).expect("there");
    assert!(index.contains("0.safetensors"), "{index}");
}

#[test]
fn a_second_signal_does_not_wait() {
    let (mut child, address) = start();
    let body = r#"{"prompt": "Once", "max_tokens": 3000, "ignore_eos": true, "stream": true}"#;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = send(&address, &format!("{head}{body}"));
    let mut text = vec![0; 400];
    stream.read_exact(&mut text).expect("it streams");
    signal(&child, "-TERM");
    std::thread::sleep(Duration::from_millis(100));
    signal(&child, "-TERM");
    assert!(child.wait().expect("it ends").success());
    let mut rest = String::new();
    let _ = stream.read_to_string(&mut rest);
    assert!(!rest.contains("[DONE]"), "it was cut off");
}

#[test]
fn a_port_in_use_is_an_error_of_one_line() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("it is bound").port().to_string();
    let output = keel_with_input(&["serve", "--port", &port], "");
    assert_eq!(output.status.code(), Some(1));
    let message = stderr(&output);
    let start = format!("keel: cannot listen on 127.0.0.1:{port}: ");
    let advice = "; another program listens there: choose another port with --port";
    assert!(message.starts_with(&start) && message.trim_end().ends_with(advice), "{message}");
    assert_eq!(message.trim_end().lines().count(), 1, "{message}");
}

#[test]
fn an_empty_key_is_wrong_usage_and_lets_nobody_in() {
    let serve = |args: &[&str], variable: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_keel"));
        command.args(["serve", "--port", "0"]).args(args).env_remove("KEEL_API_KEY");
        if let Some(key) = variable {
            command.env("KEEL_API_KEY", key);
        }
        command.output().expect("keel ends")
    };
    for output in [serve(&["--api-key", ""], None), serve(&[], Some("")), serve(&["--api-key", "a b"], None)]
    {
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains("KEEL_API_KEY") && message.trim_end().lines().count() == 1, "{message}");
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("keys");
    std::fs::write(&file, "alice\n").expect("written");
    let output = serve(&["--api-key-file", &file.display().to_string()], None);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("line 1: expected NAME KEY"), "{}", stderr(&output));
    std::fs::write(&file, "alice same\n").expect("written");
    let output = serve(&["--api-key", "same", "--api-key-file", &file.display().to_string()], None);
    assert_eq!(output.status.code(), Some(2));
    let same_key = "\"alice\" has the same key as \"default\"";
    assert!(stderr(&output).contains(same_key), "{}", stderr(&output));
    let output = serve(&["--api-key-file", "/dev/zero"], None);
    assert!(stderr(&output).contains("not a regular file"), "{}", stderr(&output));
}

#[test]
fn a_server_that_others_can_reach_asks_for_a_key_or_warns() {
    let said = |args: &[&str]| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_keel"))
            .args(["serve", "--port", "0"])
            .args(args)
            .stderr(Stdio::piped())
            .spawn()
            .expect("keel starts");
        let reader = BufReader::new(child.stderr.take().expect("piped"));
        let mut lines = String::new();
        for line in reader.lines().map_while(Result::ok) {
            lines.push_str(&line);
            if line.contains("is served at") {
                break;
            }
        }
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        lines
    };
    assert!(said(&["--host", "0.0.0.0"]).contains("require a key"));
    assert!(!said(&["--host", "0.0.0.0", "--api-key", "k"]).contains("require a key"));
    assert!(!said(&[]).contains("require a key"));
}

#[test]
fn options_beyond_reason_are_wrong_usage() {
    let all = [
        ["--sequences", "0"],
        ["--sequences", "99999999999"],
        ["--deadline", "18446744073709551615"],
        ["--deadline", "0"],
        ["--queue-timeout", "18446744073709551615"],
        ["--grace", "18446744073709551615"],
        ["--step-tokens", "0"],
        ["--connections", "0"],
    ];
    for [option, value] in all {
        let output = keel_with_input(&["serve", "--port", "0", option, value], "");
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{option} {value}: {message}");
        assert!(message.contains(option) && !message.contains("bug"), "{message}");
    }
    let swap = ["serve", "--port", "0", "--overcommit", "--swap", "18446744073709551615"];
    let (mut child, address) = ready(Command::new(env!("CARGO_BIN_EXE_keel")).args(swap));
    drop(send(&address, ""));
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    let output = keel_with_input(&["serve", "--port", "0", "--prefix-states", "18446744073709551615"], "");
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(!message.contains("bug") && !message.contains("panicked"), "{message}");
}

#[cfg(target_os = "linux")]
#[test]
fn few_descriptors_are_enough_for_those_who_ask() {
    let script = format!("ulimit -n 64; exec {} serve --port 0", env!("CARGO_BIN_EXE_keel"));
    let (mut child, address) = ready(Command::new("sh").args(["-c", &script]));
    let half_open: Vec<TcpStream> = (0..100).map(|_| send(&address, "GET /hea")).collect();
    let mut stream = send(&address, "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("it answers");
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    signal(&child, "-TERM");
    assert!(child.wait().expect("it ends").success());
    drop(half_open);
}

/// The bytes of a kind that requests have, from the server's metrics.
fn request_memory(address: &str, kind: &str) -> u64 {
    let name = format!("keel_request_memory_bytes{{kind=\"{kind}\"}} ");
    metrics(address).lines().find_map(|line| line.strip_prefix(&name)?.trim().parse().ok()).expect("a metric")
}

#[test]
fn a_server_holds_the_very_bytes_that_plan_prints_for_the_same_options() {
    let cases: [&[&str]; 4] = [
        &["--sequences", "2", "--context", "512", "--pooling", "mean"],
        &["--sequences", "3", "--context", "1024", "--kv-cache", "3M", "--drafts", "1"],
        &["--overcommit", "--sequences", "2", "--prefix-states", "4M", "--kv-bits", "8"],
        &["--no-prefix-reuse", "--on-demand", "--drafts", "0", "-c", "512", "--sequences", "5"],
    ];
    for flags in cases {
        let flags: &[&str] = &[flags, &["--request-memory", "100Mi"]].concat();
        let (plan, requests) = planned(flags);
        assert_eq!(requests, Some(100 << 20));
        let (mut child, address) = start_with(flags);
        assert_eq!(request_memory(&address, "planned"), 100 << 20);
        assert_eq!(request_memory(&address, "allocated"), 0);
        let body = r#"{"prompt": "Once", "max_tokens": 20}"#;
        let text = post(&address, "/v1/completions", body);
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
        for kind in ["planned", "allocated", "peak"] {
            assert_eq!(ledger(&address, kind), plan, "{kind} with {flags:?}");
        }
        signal(&child, "-TERM");
        assert!(child.wait().expect("it ends").success());
    }
}

/// Asks a model for a few tokens. Returns the whole response.
fn complete(address: &str, model: &str) -> String {
    let body = format!(r#"{{"model": "{model}", "prompt": "Once", "max_tokens": 4}}"#);
    post(address, "/v1/completions", &body)
}

#[test]
fn several_models_are_served_by_name_and_hold_no_more_than_the_limit() {
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo");
    let bounds = ["--sequences", "2", "--context", "512"];
    let (plan, _) = planned(&[&["--model", demo], &bounds[..]].concat());
    let (one, two) = (format!("one={demo}"), format!("two={demo}"));
    let limit = (plan.values().sum::<u64>() * 3 / 2).to_string();
    let flags = ["--model", &one, "--model", &two, "--memory-limit", &limit, "--keep-alive", "1"];
    let (mut child, address) = start_with(&[&flags, &bounds[..]].concat());
    assert!(ledger(&address, "allocated").values().all(|bytes| *bytes == 0), "nothing is loaded yet");
    for name in ["two", "one"] {
        let answer = complete(&address, name);
        assert!(
            answer.starts_with("HTTP/1.1 200") && answer.contains(&format!("\"model\":\"{name}\"")),
            "{answer}"
        );
        assert_eq!(ledger(&address, "allocated"), plan, "one of them at a time");
    }
    let unknown = complete(&address, "three");
    assert!(unknown.starts_with("HTTP/1.1 404") && unknown.contains("model_not_found"), "{unknown}");
    let start = Instant::now();
    while ledger(&address, "allocated").values().any(|bytes| *bytes > 0) {
        assert!(start.elapsed().as_secs() < 60, "nobody uses it any more");
        std::thread::sleep(Duration::from_millis(50));
    }
    signal(&child, "-TERM");
    assert!(child.wait().expect("it ends").success());
    let named = ["serve", "--port", "0", "--name", "x", "--model", &one, "--model", &two];
    common::misuse(&named, "--name is for a single model");
    let twice = keel_with_input(&["serve", "--port", "0", "--model", demo, "--model", demo], "");
    assert!(stderr(&twice).contains("two models are called"), "{}", stderr(&twice));
}

#[test]
fn options_that_a_single_model_does_not_use_are_named_before_it_is_read() {
    let lines = |model: &str| {
        let flags = ["serve", "--port", "0", "--keep-alive", "9", "--name", "x", "--model", model];
        let output = keel_with_input(&flags, "");
        assert_eq!(output.status.code(), Some(1), "there is no such model: {}", stderr(&output));
        assert!(stderr(&output).contains("--keep-alive is for several models"), "{}", stderr(&output));
        stderr(&output)
    };
    let unused = "--name x is not used: --model y=... names the model";
    assert!(lines("y=/nowhere/at/all").contains(unused));
    assert!(!lines("x=/nowhere/at/all").contains("is not used"), "both give the same name");
    assert!(!lines("/nowhere/at/all").contains("is not used"));
}

/// Posts a chat with a picture by path, and returns the whole response.
fn ask_about(address: &str, url: &str) -> String {
    let body = serde_json::json!({"max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]}]});
    post(address, "/v1/chat/completions", &body.to_string())
}

#[test]
fn pictures_are_planned_and_shown_and_zero_of_them_is_text_alone() {
    let Some(folder) = keel_testkit::fixtures::vlm_fixture("vlm_qwen3_5") else { return };
    let (model, images) = (common::arg(&folder), folder.join("images"));
    let flags = ["-m", model, "--images", "2", "--image-pixels", "64Ki", "--sequences", "2"];
    let (plan, _) = planned(&flags);
    assert!(plan["vision"] > 0);
    let (mut child, address) =
        start_with(&[&flags[..], &["--allow-image-files", common::arg(&images)]].concat());
    let answer = ask_about(&address, "a_photo.png");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    for kind in ["planned", "allocated", "peak"] {
        assert_eq!(ledger(&address, kind), plan, "{kind}");
    }
    child.kill().expect("it runs");
    child.wait().expect("it ends");

    let (mut child, address) = start_with(&["-m", model, "--images", "0"]);
    let answer = ask_about(&address, "data:image/png;base64,AAAA");
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("reads only text"), "{answer}");
    assert_eq!(ledger(&address, "allocated")["vision"], 0);
    child.kill().expect("it runs");
    child.wait().expect("it ends");
}

#[test]
fn options_for_pictures_that_make_no_sense_are_wrong_usage() {
    common::misuse(&["serve", "--port", "0", "--images", "3"], "reads only text");
    common::misuse(&["serve", "--port", "0", "--image-pixels", "0"], "--image-pixels");
    common::misuse(&["serve", "--port", "0", "--image-pixels", "18446744073709551615"], "--image-pixels");
    common::misuse(&["serve", "--allow-image-files", "Cargo.toml"], "Cargo.toml is no folder");
    // It may be mounted later: a service that ends with this code is started again.
    let missing = ["serve", "--allow-image-files", "no/such/folder"];
    common::fail(&missing, "cannot find the folder no/such/folder");
    common::misuse(&["serve", "--allow-image-urls", "http://x.org/"], "names of hosts");
}

#[test]
fn lines_carry_the_time_and_are_json_on_request() {
    let first_line = |args: &[&str], filter: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_keel"));
        command.args(["serve", "--port", "0"]).args(args).env("KEEL_DEVICE", "cpu").env_remove("RUST_LOG");
        if let Some(filter) = filter {
            command.env("RUST_LOG", filter);
        }
        let mut child = command.stderr(Stdio::piped()).spawn().expect("keel starts");
        let mut reader = BufReader::new(child.stderr.take().expect("piped"));
        let mut line = String::new();
        reader.read_line(&mut line).expect("it says something");
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        line
    };
    let text = first_line(&[], None);
    assert!(text.starts_with("20") && text.contains("INFO"), "{text}");
    let json: serde_json::Value =
        serde_json::from_str(&first_line(&["--log-format", "json"], None)).expect("JSON");
    assert!(json["timestamp"].is_string() && json["level"] == "INFO", "{json}");
    let told = first_line(&["--host", "0.0.0.0", "--log-format", "json"], Some("warn"));
    assert!(told.contains("WARN"), "RUST_LOG decides: {told}");
}

#[test]
fn more_lines_on_request_tell_about_requests_and_stay_few() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let log = folder.path().join("log");
    let mut child = Command::new(env!("CARGO_BIN_EXE_keel"))
        .args(["serve", "--port", "0", "-v"])
        .env("KEEL_DEVICE", "cpu")
        .env_remove("RUST_LOG")
        .stderr(std::fs::File::create(&log).expect("a file"))
        .spawn()
        .expect("keel starts");
    let start = Instant::now();
    let address = loop {
        let text = std::fs::read_to_string(&log).expect("UTF-8");
        if let Some((line, _)) =
            text.split_once("is served at http://").and_then(|(_, rest)| rest.split_once('\n'))
        {
            break line.to_string();
        }
        assert!(start.elapsed().as_secs() < 60, "it does not start: {text}");
        std::thread::sleep(Duration::from_millis(20));
    };
    let answer = post(&address, "/v1/completions", r#"{"prompt": "Once", "max_tokens": 4}"#);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    signal(&child, "-TERM");
    assert!(child.wait().expect("it ends").success());
    let text = std::fs::read_to_string(&log).expect("UTF-8");
    let told = |level: &str, what: &str| {
        text.lines().any(|line| line.contains(level) && line.contains("request_id=") && line.contains(what))
    };
    assert!(told("DEBUG", "arrived") && told("INFO", "ended"), "{text}");
    assert!(text.lines().count() < 40, "nobody reads {} lines:\n{text}", text.lines().count());
}

/// The first process of a container, which the system does not end at a signal without a handler. The hub never
/// answers, so the process does not come to the point where a server waits for signals.
#[cfg(all(target_os = "linux", feature = "hub"))]
#[test]
fn the_first_process_of_a_container_ends_at_a_signal_before_it_serves() {
    let namespace = ["--pid", "--fork", "--kill-child"];
    if !Command::new("unshare").args(namespace).arg("true").status().is_ok_and(|status| status.success()) {
        keel_testkit::skipped!("needs the right to make a namespace of processes");
        return;
    }
    let hub = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let endpoint = format!("http://{}", hub.local_addr().expect("bound"));
    for command in [&["serve", "--port", "0", "--model", "owner/name"][..], &["pull", "owner/name"]] {
        let home = tempfile::tempdir().expect("a temporary folder");
        let mut child = Command::new("unshare")
            .args(namespace)
            .arg(env!("CARGO_BIN_EXE_keel"))
            .args(command)
            .envs([("KEEL_CONFIG", ""), ("KEEL_DEVICE", "cpu"), ("HF_ENDPOINT", &endpoint)])
            .env("HF_HOME", home.path())
            .env_remove("HF_HUB_OFFLINE")
            .stderr(Stdio::null())
            .spawn()
            .expect("unshare runs");
        let _asking = hub.accept().expect("it asks the hub");
        let keel = common::hostile::children(child.id());
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().expect("a child") {
                break status;
            }
            let kill = Command::new("kill").arg("-TERM").args(keel.iter().map(u32::to_string)).status();
            kill.expect("kill runs");
            std::thread::sleep(Duration::from_millis(50));
            if begin.elapsed() > Duration::from_secs(20) {
                child.kill().expect("it is our child");
                panic!("keel {} goes on after SIGTERM", command.join(" "));
            }
        };
        assert_eq!(status.code(), Some(130), "{command:?}");
    }
}
