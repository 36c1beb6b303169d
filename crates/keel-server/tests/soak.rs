//! Many requests of every kind, and nothing left of them. `KEEL_SOAK=2000` runs the long form.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Running, engine_options, read, send};
use keel_array::RuntimeOptions;
use keel_engine::EngineOptions;
use keel_server::ServerOptions;
use serde_json::{Value, json};

const CLIENTS: usize = 12;

/// What request `i` sends, and the status that it must get; `None` is a client that leaves.
fn request(i: usize) -> (String, Value, Option<u16>) {
    let prompt = format!("Story {i}. {}", "The dog ran over the hill. ".repeat(1 + (i * 7) % 20));
    let base = json!({"prompt": prompt, "max_tokens": 1 + (i * 5) % 40, "temperature": 0.8, "seed": i});
    let path = "/v1/completions".to_string();
    match i % 20 {
        3 | 13 => {
            let mut left = base;
            left["max_tokens"] = json!(600);
            left["ignore_eos"] = json!(true);
            left["stream"] = json!(i.is_multiple_of(3));
            (path, left, None)
        }
        7 => {
            let mut refused = base;
            refused["max_tokens"] = json!(100_000);
            (path, refused, Some(400))
        }
        11 => (path, json!({"prompt": {"not": "a prompt"}}), Some(400)),
        5 => {
            let messages = json!([{"role": "system", "content": "You tell stories. ".repeat(12)},
                {"role": "user", "content": format!("Story {i}")}]);
            (
                "/v1/chat/completions".into(),
                json!({"messages": messages, "max_tokens": 20, "stream": true}),
                Some(200),
            )
        }
        _ => (path, base, Some(200)),
    }
}

fn run(server: &Running, from: usize, to: usize) {
    let next = Arc::new(AtomicUsize::new(from));
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= to {
                        return;
                    }
                    let (path, body, status) = request(i);
                    let connection = send(server.address, "POST", &path, &[], body.to_string().as_bytes());
                    match status {
                        Some(status) => {
                            let reply = read(connection);
                            assert_eq!(reply.status, status, "request {i}: {}", reply.body);
                        }
                        None => std::thread::sleep(std::time::Duration::from_millis(20)),
                    }
                }
            });
        }
    });
    server.wait_until_idle();
}

#[cfg(target_os = "linux")]
fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("it lists").count()
}

#[cfg(target_os = "linux")]
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("it reads");
    let pages = text.split(' ').nth(1).and_then(|p| p.parse::<u64>().ok()).expect("a number");
    pages * 4096
}

#[test]
fn after_many_requests_nothing_is_left() {
    let count = std::env::var("KEEL_SOAK").ok().and_then(|n| n.parse().ok()).unwrap_or(300);
    let options = ServerOptions { model_id: "demo".into(), ..ServerOptions::default() };
    // Small pools: memory that was planned counts as resident once it has been used, and all of it should be by the
    // first measurement.
    let engine = EngineOptions { checkpoints: 18, pool_pages: Some(24), ..engine_options() };
    let server = Running::with(engine, options);
    let before = server.app.engine.ledger().active();
    run(&server, 0, 100);
    #[cfg(target_os = "linux")]
    let (files, resident) = (open_files(), resident_bytes());
    run(&server, 100, count);
    assert_eq!(server.app.engine.ledger().active(), before, "live bytes per category");
    assert_eq!(server.app.engine.ledger().peak(), before, "nothing was allocated meanwhile");
    #[cfg(target_os = "linux")]
    {
        common::wait_for("sockets are closed", || open_files() <= files);
        let now = resident_bytes();
        println!("resident {resident} bytes after 100 requests, {now} after {count}");
        // The host's cache of programs is bounded by bytes and fills as new lengths of prompts come.
        let programs = RuntimeOptions::default().program_cache_bytes as u64;
        assert!(now <= resident + resident / 100 + programs, "resident {resident} bytes, then {now}");
    }
    server.assert_all_is_back();
}
