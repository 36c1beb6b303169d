//! Pictures that the server fetches: one bound of time, and none for a client that left.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use keel_server::{Fetch, FetchLimits, PictureSources};
use keel_testkit::fixtures::vlm_fixture;
use serde_json::{Value, json};

use super::{CHAT, grey, server_of};
use crate::common::{read, send, wait_for};

/// Gives a picture for every URL, once it is told to. Counts the URLs.
#[derive(Debug, Default)]
struct Slow {
    asked: AtomicUsize,
    goes_on: AtomicBool,
    times: Mutex<Vec<Duration>>,
}

impl Fetch for Slow {
    fn fetch(&self, _: &str, limits: FetchLimits) -> Result<Vec<u8>, String> {
        self.asked.fetch_add(1, Ordering::AcqRel);
        self.times.lock().expect("no panic").push(limits.time);
        while !self.goes_on.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(grey(64, 64))
    }
}

fn many(count: usize) -> Value {
    let parts: Vec<Value> = (0..count)
        .map(|i| json!({"type": "image_url", "image_url": {"url": format!("http://x/{i}.png")}}))
        .collect();
    json!({"messages": [{"role": "user", "content": parts}], "max_tokens": 2})
}

#[test]
fn nobody_reads_the_pictures_of_a_client_that_left() {
    let Some(folder) = vlm_fixture("vlm_qwen3_5") else { return };
    let slow = Arc::new(Slow::default());
    let sources = PictureSources { fetch: Some(Arc::clone(&slow) as _), ..PictureSources::default() };
    let server = server_of(&folder, sources);
    let client = send(server.address, "POST", CHAT, &[], many(20).to_string().as_bytes());
    wait_for("the first picture is asked for", || slow.asked.load(Ordering::Acquire) == 1);
    drop(client);
    // The server sees that the client left, which cancels the work.
    std::thread::sleep(Duration::from_millis(500));
    slow.goes_on.store(true, Ordering::Release);
    wait_for("the request's memory is back", || server.model.memory.used() == 0);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(slow.asked.load(Ordering::Acquire), 1, "19 pictures were not wanted any more");
    server.assert_all_is_back();
}

#[test]
fn all_pictures_of_a_request_have_one_bound_of_time() {
    let Some(folder) = vlm_fixture("vlm_qwen3_5") else { return };
    let slow = Arc::new(Slow::default());
    let sources = PictureSources {
        fetch: Some(Arc::clone(&slow) as _),
        request_time: Duration::from_millis(300),
        ..PictureSources::default()
    };
    let server = server_of(&folder, sources);
    let client = send(server.address, "POST", CHAT, &[], many(3).to_string().as_bytes());
    wait_for("the first picture is asked for", || slow.asked.load(Ordering::Acquire) == 1);
    std::thread::sleep(Duration::from_millis(400));
    slow.goes_on.store(true, Ordering::Release);
    let reply = read(client);
    assert!(reply.status == 400 && reply.body.contains("longer than 0.3 s"), "{}", reply.body);
    let times = slow.times.lock().expect("no panic");
    assert!(times.len() == 1 && times[0] <= Duration::from_millis(300), "{times:?}");
}
