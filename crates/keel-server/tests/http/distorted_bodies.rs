//! Bodies that are almost valid are refused or answered.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::common::{Running, engine_options, request};
use keel_server::ServerOptions;
use serde_json::{Value, json};

/// Almost valid bodies, made from valid ones by replacing, removing and nesting.
fn distort(body: &Value, random: &mut impl FnMut(usize) -> usize) -> Value {
    let odd = [
        json!(null),
        json!(-1),
        json!(1e308),
        json!(""),
        json!("\u{0}\u{ffff}"),
        json!([]),
        json!({}),
        json!(true),
        json!([[[[{}]]]]),
        json!(u64::MAX),
        json!({"type": "x"}),
        json!(["a", 1, null]),
        json!(0.5),
    ];
    match body {
        Value::Object(fields) => {
            let chosen = random(fields.len().max(1));
            let change = |(i, (key, value)): (usize, (&String, &Value))| {
                if i != chosen {
                    return Some((key.clone(), value.clone()));
                }
                match random(3) {
                    0 => None,
                    1 => Some((key.clone(), odd[random(odd.len())].clone())),
                    _ => Some((key.clone(), distort(value, random))),
                }
            };
            fields.iter().enumerate().filter_map(change).collect()
        }
        Value::Array(items) if !items.is_empty() => {
            let chosen = random(items.len());
            let change = |(i, item)| if i == chosen { distort(item, random) } else { item.clone() };
            items.iter().enumerate().map(change).collect()
        }
        _ => odd[random(odd.len())].clone(),
    }
}

#[test]
fn distorted_bodies_are_refused_or_answered() {
    let server = Running::with(
        engine_options(),
        ServerOptions { model_id: "demo".into(), max_tokens_default: 4, ..ServerOptions::default() },
    );
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object",
        "properties": {"a": {"type": "integer"}}}}});
    let bodies = [
        (
            "/v1/completions",
            json!({"prompt": "a", "max_tokens": 3, "temperature": 1, "stop": ["x"], "logprobs": 1,
            "n": 1, "logit_bias": {"5": 1}, "echo": false, "seed": 3}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function", "function":
            {"name": "f", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "1", "content": "x"}],
            "max_tokens": 3, "tools": [tool], "tool_choice": "auto", "response_format": {"type": "json_schema",
            "json_schema": {"schema": {"type": "object", "properties": {"b": {"enum": [1, 2]}}}}}}),
        ),
        (
            "/v1/responses",
            json!({"input": [{"role": "user", "content": "a"}], "max_output_tokens": 3,
            "text": {"format": {"type": "json_object"}}, "tools": [{"type": "function", "name": "f"}]}),
        ),
        (
            "/v1/messages",
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "max_tokens": 3, "system": [{"type": "text", "text": "s"}], "tools": [{"name": "f",
            "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}, "stop_sequences": ["x"]}),
        ),
        ("/tokenize", json!({"text": "a", "add_special_tokens": true})),
        ("/detokenize", json!({"tokens": [1, 2, 300]})),
    ];
    let mut seed = 11u64;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as usize % below
    };
    for (path, body) in &bodies {
        let reply = server.post(path, body);
        assert_eq!(reply.status, 200, "{path} {body}: {}", reply.body);
    }
    let mut statuses = BTreeSet::new();
    for round in 0..240 {
        let (path, body) = &bodies[round % bodies.len()];
        let mut wrong = body.clone();
        for _ in 0..=random(2) {
            wrong = distort(&wrong, &mut random);
        }
        let reply = server.post(path, &wrong);
        assert!(reply.status < 500, "{path} {wrong}: {} {}", reply.status, reply.body);
        // Names of this program's types say nothing to a client.
        let is_plain =
            reply.status == 200 || !(reply.body.contains("untagged enum") || reply.body.contains(" struct "));
        assert!(is_plain, "{path} {wrong}: {}", reply.body);
        statuses.insert(reply.status);
    }
    let unknown_id = server.post("/detokenize", &json!({"tokens": [1, 2, 4_000_000_000u32]}));
    assert!(unknown_id.status == 400 && unknown_id.body.contains("4000000000"), "{}", unknown_id.body);
    assert!(statuses.contains(&200) && statuses.contains(&400), "{statuses:?}");
    for bytes in [&b"{"[..], b"\xff\xfe", b"[1", b"", b"{\"messages\": [", &[b'['; 5000]] {
        assert_eq!(request(server.address, "POST", "/v1/chat/completions", &[], bytes).status, 400);
    }
    std::thread::sleep(Duration::from_millis(10));
    server.assert_all_is_back();
}
