//! Slow compilation of grammars does not delay other requests.

use std::time::Duration;

use crate::common::{Running, engine_options, read, request, send, wait_for};
use keel_server::ServerOptions;
use serde_json::{Value, json};

/// A schema of about 49 KB with many names and patterns. Many more properties exceed the parser's limit of 2,000 items.
fn large_schema() -> Value {
    let property = |i: usize| {
        let pattern = format!("^[a-z]{{{},{}}}(x|y{i}|z)*[0-9]{{1,{}}}$", 1 + i % 7, 9 + i % 11, 3 + i % 5);
        (format!("a_property_of_this_large_object_number_{i}"), json!({"type": "string", "pattern": pattern}))
    };
    let properties: serde_json::Map<String, Value> = (0..450).map(property).collect();
    json!({"type": "object", "properties": properties, "additionalProperties": false})
}

fn body(n: usize) -> String {
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": large_schema()}});
    json!({"prompt": "x", "max_tokens": 4, "n": n, "response_format": format}).to_string()
}

/// Threads of the test's server for the network. As many grammars are compiled at once.
const NETWORK_THREADS: u64 = 2;
/// Answers that must come during compilations.
const ANSWERS: usize = 5;
/// Most rounds of requests. One is usually enough; more are needed if other programs have the machine's cores.
const ROUNDS: usize = 20;

/// Each counted answer is asked for after two compilations have begun, and comes before either has ended. If they held
/// the network's two threads, no such answer could come, however fast or slow the machine is.
#[test]
fn health_is_answered_while_grammars_are_compiled() {
    // All of these grammars have room at once.
    let options = ServerOptions { request_memory: 8 << 30, ..ServerOptions::default() };
    let server = Running::with(engine_options(), options);
    let body = body(8);
    assert!(body.len() > 40_000, "{}", body.len());
    let (mut during, mut asked_count, mut compiled) = (0, 0, 0);
    for _ in 0..ROUNDS {
        let clients: Vec<_> =
            (0..4).map(|_| send(server.address, "POST", "/v1/completions", &[], body.as_bytes())).collect();
        let replies = std::thread::spawn(move || clients.into_iter().map(read).collect::<Vec<_>>());
        while !replies.is_finished() {
            // A grammar that ends between the two readings counts as ended during the request.
            let ended = server.model.grammars_ended();
            let are_compiled = server.model.grammars_begun() - ended >= NETWORK_THREADS;
            assert_eq!(request(server.address, "GET", "/health", &[], b"").status, 200);
            during += usize::from(are_compiled && server.model.grammars_ended() == ended);
            asked_count += 1;
            std::thread::sleep(Duration::from_millis(1));
        }
        for reply in replies.join().expect("every request is answered") {
            let code = reply.json()["error"]["code"].clone();
            compiled += usize::from(reply.status == 200 || code == "grammar_too_slow");
            assert!(matches!(reply.status, 200 | 400 | 429), "{} {}", reply.status, reply.body);
        }
        if during >= ANSWERS {
            break;
        }
    }
    println!("{during} of {asked_count} answers came during compilations; {compiled} requests with grammars");
    assert!(compiled > 0, "no request came to its grammar");
    assert!(during >= ANSWERS, "{during} of {asked_count} answers came before a compilation had ended");
    server.assert_all_is_back();
}

#[test]
fn a_grammar_is_compiled_once_for_all_prompts() {
    let server = Running::start();
    let schema = json!({"enum": ["yes", "no"]});
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
    let body = json!({"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 8, "response_format": format});
    let answer = server.ask("/v1/completions", &body);
    let choices = answer["choices"].as_array().expect("a list");
    let texts: Vec<&str> = choices.iter().filter_map(|choice| choice["text"].as_str()).collect();
    assert_eq!(texts.len(), 6, "{answer}");
    assert!(texts.iter().all(|text| ["\"yes\"", "\"no\""].contains(text)), "{texts:?}");
    assert_eq!((server.model.grammars_begun(), server.model.grammars_ended()), (1, 1));
    wait_for("all is given back", || server.model.memory.used() == 0);
    server.assert_all_is_back();
}

#[test]
fn a_grammar_that_takes_too_long_is_refused() {
    let options = ServerOptions { grammar_time: Duration::from_millis(1), ..ServerOptions::default() };
    let server = Running::with(engine_options(), options);
    let reply = read(send(server.address, "POST", "/v1/completions", &[], body(1).as_bytes()));
    assert_eq!((reply.status, reply.json()["error"]["code"].as_str()), (400, Some("grammar_too_slow")));
    server.assert_all_is_back();
}
