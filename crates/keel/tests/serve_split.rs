//! `keel serve` of a split model as a process: answers, and the memory of each device.

#![cfg(unix)]

mod common;

use std::collections::BTreeMap;

use common::served::{metrics, post, signal, start_with};
use common::{arg, json};
use keel_testkit::fixtures::served_fixture;
use serde_json::{Value, json as object};

/// Logits whose logarithms of probability differ by less may change places by rounding.
const NEAR: f64 = 1e-3;

/// The first tokens of an answer, each with its log probability and that of the next best one.
fn ask(address: &str) -> Vec<Value> {
    let request = object!({"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 24,
        "temperature": 0, "ignore_eos": true, "logprobs": true, "top_logprobs": 2});
    let response = post(address, "/v1/chat/completions", &request.to_string());
    let (head, body) = response.split_once("\r\n\r\n").expect("a head and a body");
    assert!(head.starts_with("HTTP/1.1 200"), "{response}");
    let body: Value = serde_json::from_str(body).expect("JSON");
    body["choices"][0]["logprobs"]["content"].as_array().expect("tokens").clone()
}

/// Asserts that two answers agree up to the first near tie. Returns the number of tokens that do.
fn agreeing(want: &[Value], got: &[Value]) -> usize {
    assert_eq!((want.len(), got.len()), (24, 24));
    let Some(at) = want.iter().zip(got).position(|(want, got)| want["bytes"] != got["bytes"]) else {
        return want.len();
    };
    let top = |i: usize| want[at]["top_logprobs"][i]["logprob"].as_f64().expect("two tokens");
    assert!(top(0) - top(1) < NEAR, "token {at}: {} or {}", want[at], got[at]);
    at
}

/// Bytes of a device by category, in one of its columns.
fn bytes(metrics: &str, device: &str, kind: &str) -> BTreeMap<String, String> {
    let of =
        |line: &str, key: &str| Some(line.split_once(&format!("{key}=\""))?.1.split_once('"')?.0.to_string());
    let lines = metrics.lines().filter(|line| line.starts_with("keel_split_memory_bytes{"));
    let own = lines
        .filter(|l| of(l, "device").as_deref() == Some(device) && of(l, "kind").as_deref() == Some(kind));
    let entry = |line: &str| Some((of(line, "category")?, line.rsplit(' ').next()?.to_string()));
    own.filter_map(entry).collect()
}

#[test]
fn a_split_model_is_served_by_the_program_and_each_device_holds_its_plan() {
    let folder = served_fixture();
    let model = ["--model", arg(&folder), "--context", "512", "--compute", "f32", "--threads", "2"];
    let model = [&model[..], &["--sequences", "2"]].concat();
    let (mut child, address) = start_with(&model);
    let want = ask(&address);
    signal(&child, "-TERM");
    assert!(child.wait().expect("it ends").success());
    for (devices, split) in [("cpu:0,cpu:1", "tensor"), ("cpu:0,cpu:1,cpu:2,cpu:3", "pipeline:2,tensor:2")] {
        let flags = [&model[..], &["--devices", devices, "--split", split]].concat();
        let plan = json(&[&["plan", "--serve", "--json"], &flags[..]].concat());
        let (mut child, address) = start_with(&flags);
        assert!(agreeing(&want, &ask(&address)) > 4, "{split}: few tokens agree");
        let metrics = metrics(&address);
        for (rank, device) in devices.split(',').enumerate() {
            let planned = bytes(&metrics, device, "planned");
            assert!(planned.len() > 5, "{device}: {metrics}");
            assert_eq!(bytes(&metrics, device, "allocated"), planned, "{device}");
            assert_eq!(bytes(&metrics, device, "peak"), planned, "{device}");
            let weights = &plan["devices"][rank]["weights"];
            assert_eq!(planned.get("weights"), Some(&weights.to_string()), "{device}");
        }
        let late: Vec<&str> =
            metrics.lines().filter(|line| line.starts_with("keel_late_work_total{")).collect();
        assert!(late.len() == 5 && late.iter().all(|line| line.ends_with(" 0")), "{late:?}");
        signal(&child, "-TERM");
        assert!(child.wait().expect("it ends").success(), "{split}");
    }
}
