//! Parses damaged bodies as the endpoints do: seeded mutations must not cause panics or errors of the server.
//!
//! `fuzz/` runs the same function on inputs that libFuzzer finds. To repeat one case, run `KEEL_FUZZ_CASE=1234 cargo
//! test -p keel-server --test fuzz_smoke`.

#[path = "common/reading.rs"]
mod reading;

use keel_server::requests::Endpoint;
use keel_testkit::random::{Random, mutate, mutations};
use reading::exercise;

const MUTATIONS: u64 = 30_000;
const WORKERS: u64 = 2;

/// Valid bodies that together use every field.
const BODIES: [(Endpoint, &str); 15] = [
    (
        Endpoint::Embeddings,
        r#"{"model":"m","input":["Hi","there"],"encoding_format":"base64","dimensions":9,"user":"me"}"#,
    ),
    (Endpoint::Embeddings, r#"{"input":[[1,2],[3]],"encoding_format":"float"}"#),
    (
        Endpoint::Rerank,
        r#"{"query":"who?","documents":["a",{"text":"b"}],"top_n":1,"return_documents":true,"instruction":"Say."}"#,
    ),
    (
        Endpoint::Chat,
        r#"{"model":"m","messages":[{"role":"system","content":"Be kind."},{"role":"user","content":[{"type":"text","text":"Hi"}]}],
        "max_tokens":5,"temperature":0.5,"top_p":0.9,"top_k":20,"min_p":0.1,"seed":7,"n":2,"stop":["a","b"],
        "presence_penalty":0.1,"frequency_penalty":-0.1,"logit_bias":{"5":-100},"logprobs":true,"top_logprobs":3,
        "stream":true,"stream_options":{"include_usage":true},"chat_template_kwargs":{"x":[1]},"reasoning_effort":"none"}"#,
    ),
    (
        Endpoint::Chat,
        r#"{"messages":[{"role":"user","content":"Weather?"},{"role":"assistant","content":null,"tool_calls":[{"id":"1",
        "type":"function","function":{"name":"f","arguments":"{\"x\": 1}"}}]},{"role":"tool","tool_call_id":"1","content":"2"}],
        "tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"x":{"type":"integer"}}}}}],
        "tool_choice":"required","parallel_tool_calls":true}"#,
    ),
    (
        Endpoint::Chat,
        r#"{"messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema","json_schema":{"name":"a",
        "schema":{"type":"object","properties":{"a":{"enum":[1,"b"]},"c":{"type":"array","items":{"type":"string","maxLength":9}}},
        "required":["a"],"additionalProperties":false}}}}"#,
    ),
    (
        Endpoint::Chat,
        r#"{"messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_object"}}"#,
    ),
    (
        Endpoint::Completions,
        r#"{"prompt":"Once","max_tokens":9,"echo":true,"stop":"\n","ignore_eos":true,"n":3}"#,
    ),
    (
        Endpoint::Completions,
        r#"{"prompt":[[1,2,3],[4]],"response_format":{"type":"json_object"},"repetition_penalty":1.1,"logprobs":2}"#,
    ),
    (
        Endpoint::Responses,
        r#"{"input":[{"role":"user","content":[{"type":"input_text","text":"Hi"}]},{"type":"function_call","call_id":"c",
        "name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":
        [{"type":"input_text","text":"1"}]},{"type":"reasoning"}],
        "instructions":"Be kind.","max_output_tokens":4,"text":{"format":{"type":"text"}},"reasoning":{"effort":"low"},
        "tools":[{"type":"function","name":"f","parameters":{"type":"object"}}],"tool_choice":"auto","temperature":1}"#,
    ),
    (Endpoint::Responses, r#"{"input":"Hi","stream":true,"top_p":0.5,"seed":3}"#),
    (
        Endpoint::Messages,
        r#"{"max_tokens":5,"system":[{"type":"text","text":"Be kind."}],"messages":[{"role":"user","content":"Hi"},
        {"role":"assistant","content":[{"type":"thinking","thinking":"hm"},{"type":"text","text":"a"},{"type":"tool_use","id":"1",
        "name":"f","input":{"x":1}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":"2"}]}],
        "tools":[{"name":"f","description":"d","input_schema":{"type":"object"}}],"tool_choice":{"type":"tool","name":"f"},
        "thinking":{"type":"disabled"},"stop_sequences":["x"],"top_k":5,"temperature":0.1}"#,
    ),
    (
        Endpoint::Messages,
        r#"{"messages":[{"role":"user","content":"Hi"}],"tool_choice":{"type":"auto","disable_parallel_tool_use":true}}"#,
    ),
    (Endpoint::Tokenize, r#"{"text":"a \ud83d\ude00 b","add_special_tokens":true}"#),
    (Endpoint::Detokenize, r#"{"tokens":[1,2,3,65,300]}"#),
];

#[test]
fn damaged_bodies_never_panic_and_are_the_clients_errors() {
    for (endpoint, body) in BODIES {
        assert!(exercise(endpoint, body.as_bytes()), "{endpoint:?} {body}");
    }
    if let Ok(case) = std::env::var("KEEL_FUZZ_CASE") {
        run_case(case.parse().expect("a number"));
        return;
    }
    let mutations = mutations(MUTATIONS);
    let read: u64 = std::thread::scope(|scope| {
        let worker = move |first: u64| {
            (first..mutations).step_by(WORKERS as usize).filter(|&case| run_case(case)).count() as u64
        };
        let workers: Vec<_> = (0..WORKERS).map(|first| scope.spawn(move || worker(first))).collect();
        workers.into_iter().map(|worker| worker.join().expect("it reports its case")).sum()
    });
    // If all mutations broke the bodies, or none, the test would test nothing.
    assert!((mutations / 20..mutations * 9 / 10).contains(&read), "{read} of {mutations} were read");
}

/// Runs one mutation. Returns whether it is still a request. A panic is reported with the number of the case.
fn run_case(case: u64) -> bool {
    let mut random = Random::of_case(case);
    let (endpoint, body) = BODIES[random.below(BODIES.len())];
    let mut body = body.as_bytes().to_vec();
    for _ in 0..1 + random.below(3) {
        match random.below(8) {
            0 => replace_value(&mut body, &mut random),
            _ => mutate(&mut body, &WORDS, &mut random),
        }
    }
    match std::panic::catch_unwind(|| exercise(endpoint, &body)) {
        Ok(read) => read,
        Err(_) => panic!("case {case} panicked: {endpoint:?} {}", String::from_utf8_lossy(&body)),
    }
}

/// Words with a meaning for one of the parsers.
const WORDS: [&str; 33] = [
    "null",
    "true",
    "-1",
    "0",
    "1e999",
    "1e38",
    "4294967295",
    "18446744073709551615",
    "18446744073709551616",
    "0.5",
    "\"\"",
    "[]",
    "{}",
    "[[[[{}]]]]",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "\u{ffff}",
    "\"type\":\"x\",",
    "\"$ref\":\"#\",",
    "\"type\":[\"object\",\"null\"],",
    "\"pattern\":\"(a|b)*c{1,99}\",",
    "\"minItems\":99999,",
    "\"anyOf\":[{},false],",
    "\"additionalProperties\":true,",
    "\"n\":0,",
    "\"stop\":[\"\"],",
    "\"required\"",
    "\"grammar\"",
    "\"image_url\"",
    "<tool_call>",
    "</think>",
    ",",
    "\"",
];

/// Replaces the next value by a word, so that the body usually stays JSON.
fn replace_value(body: &mut Vec<u8>, random: &mut Random) {
    let at = random.below(body.len() + 1);
    let word = WORDS[random.below(WORDS.len())].as_bytes();
    let Some(colon) = body[at..].iter().position(|&b| b == b':') else { return };
    let start = at + colon + 1;
    let len = body[start..].iter().position(|b| b",}]".contains(b)).unwrap_or(0);
    drop(body.splice(start..start + len, word.iter().copied()));
}
