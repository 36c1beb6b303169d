//! Anthropic's API, OpenAI's responses, the description of the API, and the page.

use crate::common::{Running, cpu, demo, engine_options};
use keel_server::{ApiKey, ServerOptions};
use serde_json::{Value, json};

/// Names and data of a stream's events.
fn events(body: &str) -> Vec<Value> {
    let mut events = Vec::new();
    for block in body.split("\n\n").filter(|b| b.contains("data: ")) {
        let field = |name: &str| block.lines().find_map(|l| l.strip_prefix(name)).expect("there");
        let data: Value = serde_json::from_str(field("data: ")).expect("JSON");
        assert_eq!(data["type"], field("event: "), "the event's name is its type");
        events.push(data);
    }
    events
}

#[test]
fn messages_answer_stream_count_and_refuse() {
    let server = Running::start();
    let system = "You tell stories about animals. ".repeat(10);
    let body = json!({"model": "demo", "max_tokens": 12, "temperature": 0, "system": system,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "A dog, please."}]}]});
    let answer = server.ask("/v1/messages", &body);
    let text = answer["content"][0]["text"].as_str().expect("text").to_string();
    assert_eq!((&answer["type"], &answer["stop_reason"]), (&json!("message"), &json!("max_tokens")));
    let counted = server.ask("/v1/messages/count_tokens", &body)["input_tokens"].clone();
    assert_eq!(counted, answer["usage"]["input_tokens"]);
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = events(&server.post("/v1/messages", &streamed).body);
    let kinds: Vec<&str> = events.iter().filter_map(|e| e["type"].as_str()).collect();
    assert_eq!(kinds[..2], ["message_start", "content_block_start"]);
    assert_eq!(kinds[kinds.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let whole: String = events.iter().filter_map(|e| e["delta"]["text"].as_str()).collect();
    assert_eq!(whole, text);
    let cached = &events[0]["message"]["usage"]["cache_read_input_tokens"];
    assert!(cached.as_u64().is_some_and(|n| n >= 64), "the system prompt is remembered: {cached}");
    let stop: String = text.chars().skip(8).take(4).collect();
    let mut stopped = body.clone();
    stopped["stop_sequences"] = json!([stop]);
    let answer = server.ask("/v1/messages", &stopped);
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("stop_sequence"), &json!(stop)));
    let mut tools = body.clone();
    tools["tools"] = json!([{"name": "look", "input_schema": {"type": "object", "properties":
        {"at": {"enum": ["sky", "sea"]}}, "required": ["at"], "additionalProperties": false}}]);
    tools["tool_choice"] = json!({"type": "any", "disable_parallel_tool_use": true});
    tools["max_tokens"] = json!(80);
    let answer = server.ask("/v1/messages", &tools);
    assert_eq!((&answer["stop_reason"], &answer["content"][0]["name"]), (&json!("tool_use"), &json!("look")));
    assert!(answer["content"][0]["input"]["at"].is_string(), "{answer}");
    for (more, kind) in [
        (json!({"max_tokens": null}), "invalid_request_error"),
        (json!({"model": "claude"}), "not_found_error"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}), "invalid_request_error"),
        (json!({"thinking": true}), "invalid_request_error"),
        (json!({"thinking": {"type": "loud"}}), "invalid_request_error"),
        (json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}), "invalid_request_error"),
        (json!({"output_config": {"format": {"type": "xml"}}}), "invalid_request_error"),
        (json!({"stop": ["x"]}), "invalid_request_error"),
        (
            json!({"messages": [{"role": "user", "content": "A dog."}, {"role": "assistant", "content": "A"}]}),
            "invalid_request_error",
        ),
    ] {
        let mut wrong = body.clone();
        wrong.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let reply = server.post("/v1/messages", &wrong).json();
        assert_eq!((&reply["type"], &reply["error"]["type"]), (&json!("error"), &json!(kind)), "{reply}");
    }
    server.assert_all_is_back();
}

#[test]
fn messages_follow_a_schema_and_a_seed() {
    let server = Running::start();
    let schema = json!({"type": "object", "properties": {"animal": {"enum": ["cat", "dog"]}},
        "required": ["animal"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "schema": schema});
    let base = json!({"max_tokens": 40, "messages": [{"role": "user", "content": "Which animal?"}]});
    let ask = |more: Value| {
        let mut body = base.clone();
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        server.ask("/v1/messages", &body)["content"][0]["text"].as_str().expect("text").to_string()
    };
    for named in [json!({"output_config": {"format": format}}), json!({"output_format": format})] {
        let value: Value = serde_json::from_str(&ask(named)).expect("JSON");
        assert!(value["animal"].is_string(), "{value}");
    }
    let drawn = || {
        ask(json!({"seed": 7, "temperature": 1.5, "min_p": 0.01, "tools": [{"type": "custom", "name": "f"}]}))
    };
    assert_eq!(drawn(), drawn(), "the seed decides");
    // The tokens of a conversation that ends with the assistant can be counted, though it is not answered.
    let ended =
        json!({"messages": [{"role": "user", "content": "A dog."}, {"role": "assistant", "content": "A"}]});
    assert!(server.ask("/v1/messages/count_tokens", &ended)["input_tokens"].is_u64());
    let long = json!({"max_tokens": 1, "messages": [{"role": "user", "content": "word ".repeat(20_000)}]});
    let full = |content: String| {
        let body = json!({"max_tokens": 1, "messages": [{"role": "user", "content": content}]});
        let reply = server.post("/v1/messages", &body);
        let message = reply.json()["error"]["message"].as_str().expect("a message").to_string();
        // Anthropic's clients recognise a full context by these words.
        assert!(reply.status == 400 && message.starts_with("prompt is too long: "), "{message}");
        assert!(message.contains(" tokens > 2048 maximum; "), "{message}");
        message
    };
    // One is refused by its tokens, the other by its bytes alone.
    assert!(full("word ".repeat(2500)).contains("shorten the conversation by at least "));
    assert!(full("word ".repeat(20_000)).contains(" bytes never fits"));
    assert_eq!(server.post("/v1/messages", &long).status, 400, "it exceeds the context");
    let count = server.ask("/v1/messages/count_tokens", &long)["input_tokens"].as_u64();
    assert!(count > Some(20_000), "{count:?}");
    server.assert_all_is_back();
}

/// OpenAI's clients build the response from these events, and fail at a delta of a part that was not added.
#[test]
fn a_streamed_response_adds_the_part_of_its_reasoning() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for entry in std::fs::read_dir(demo()).expect("there") {
        let path = entry.expect("readable").path();
        std::fs::copy(&path, folder.path().join(path.file_name().expect("a file"))).expect("copied");
    }
    // The model has a token that ends reasoning, and its answers begin in reasoning.
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let path = folder.path().join(name);
        let text = std::fs::read_to_string(&path).expect("readable").replace("<|endoftext|>", "</think>");
        let text = text.replace("'<|im_start|>assistant\\\\n'", "'<|im_start|>assistant\\\\n<think>\\\\n'");
        std::fs::write(&path, text).expect("written");
    }
    let options = ServerOptions { model_id: "demo".into(), ..ServerOptions::default() };
    let server = Running::of(folder.path(), cpu(), engine_options(), options);
    let body =
        json!({"input": "Tell me about a cat.", "max_output_tokens": 8, "temperature": 0, "stream": true});
    let events = events(&server.post("/v1/responses", &body).body);
    let mut kinds: Vec<&str> = events.iter().filter_map(|e| e["type"].as_str()).collect();
    kinds.dedup();
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ];
    assert_eq!(kinds, expected);
    assert_eq!(events[2]["item"]["content"], json!([]));
    assert_eq!(events[3]["part"], json!({"type": "reasoning_text", "text": ""}));
    let text: String = events.iter().filter_map(|e| e["delta"].as_str()).collect();
    let done = events.iter().find(|e| e["type"] == "response.reasoning_text.done").expect("there");
    assert_eq!(done["text"], text);
    let item = &events.last().expect("some")["response"]["output"][0];
    assert_eq!((&item["type"], &item["content"][0]["text"]), (&json!("reasoning"), &json!(text)));
    server.assert_all_is_back();
}

#[test]
fn responses_answer_and_stream() {
    let server = Running::start();
    let body =
        json!({"model": "demo", "input": "Tell me about a cat.", "max_output_tokens": 25, "temperature": 0});
    let answer = server.ask("/v1/responses", &body);
    assert_eq!((&answer["object"], &answer["status"]), (&json!("response"), &json!("incomplete")));
    let text = answer["output"][0]["content"][0]["text"].as_str().expect("text").to_string();
    assert_eq!(answer["output"][0]["status"], "incomplete");
    assert_eq!(answer["usage"]["output_tokens"], 25);
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = events(&server.post("/v1/responses", &streamed).body);
    let numbers: Vec<u64> = events.iter().filter_map(|e| e["sequence_number"].as_u64()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let whole: String = events.iter().filter_map(|e| e["delta"].as_str()).collect();
    assert_eq!(whole, text);
    let last = events.last().expect("some");
    assert_eq!(
        (&last["type"], &last["response"]["output"][0]["content"]),
        (&json!("response.incomplete"), &answer["output"][0]["content"])
    );
    assert_eq!(last["response"]["output"][0]["status"], "incomplete");
    let tools = json!([{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {},
        "additionalProperties": false}}]);
    let items = json!([{"role": "user", "content": [{"type": "input_text", "text": "Look!"}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "the sea"}]);
    let call = json!({"input": items, "tools": tools, "tool_choice": {"type": "function", "name": "look"},
        "max_output_tokens": 60, "temperature": 0});
    let answer = server.ask("/v1/responses", &call);
    assert_eq!(
        (&answer["output"][0]["type"], &answer["output"][0]["name"]),
        (&json!("function_call"), &json!("look"))
    );
    for (field, value) in
        [("previous_response_id", json!("y")), ("text", json!(true)), ("reasoning", json!("high"))]
    {
        let wrong = server.post("/v1/responses", &json!({"input": "x", field: value}));
        assert_eq!((wrong.status, &wrong.json()["error"]["param"]), (400, &json!(field)), "{}", wrong.body);
    }
    server.assert_all_is_back();
}

#[test]
fn the_document_names_every_endpoint_and_status_adds_up() {
    let server = Running::start();
    let document = server.get("/openapi.json").json();
    for (path, methods) in document["paths"].as_object().expect("paths") {
        let path = path.replace("{id}", "demo");
        for method in methods.as_object().expect("methods").keys() {
            let reply = if method == "get" { server.get(&path) } else { server.post(&path, &json!({})) };
            assert!(reply.status != 404, "{method} {path} is in the document and not served");
        }
    }
    assert!(document["paths"]["/v1/models/{id}"].is_object(), "a model by its name");
    let status = server.get("/status").json();
    let sum = |part: &Value| -> u64 {
        part.as_object().expect("categories").values().filter_map(Value::as_u64).sum()
    };
    assert_eq!(sum(&status["now"]), sum(&status["allocated"]));
    assert_eq!(status["planned"], status["allocated"]);
    let models = server.get("/v1/models").json();
    assert_eq!((&models["data"][0]["id"], server.get("/v1/models/demo").status), (&json!("demo"), 200));
    assert_eq!(server.get("/v1/models/other").status, 404);
}

/// JSON has one kind of number: 5.0 is an integer by JSON Schema, and so by `/openapi.json`.
#[test]
fn ids_may_be_written_as_whole_floats_and_no_others() {
    let server = Running::start();
    let of = |ids: Value| server.post("/detokenize", &json!({"tokens": ids}));
    assert_eq!(of(json!([72.0, 105.0])).json(), of(json!([72, 105])).json());
    for wrong in [json!([72.5]), json!([-1.0]), json!([4_294_967_296.0]), json!(["72"]), json!([null])] {
        assert_eq!(of(wrong.clone()).status, 400, "{wrong}");
    }
    let whole = json!({"prompt": [[72.0, 105.0]], "max_tokens": 3.0, "n": 1.0, "logprobs": 2.0, "seed": 7.0,
        "top_k": 5.0, "ignore_eos": true});
    assert_eq!(server.ask("/v1/completions", &whole)["usage"]["completion_tokens"], 3);
    assert_eq!(server.ask("/v1/embeddings", &json!({"input": [72.0]}))["usage"]["prompt_tokens"], 1);
    let part = json!({"prompt": "a", "max_tokens": 2.5});
    assert_eq!(server.post("/v1/completions", &part).status, 400);
}

/// It is there under the names of llama.cpp and of vLLM, too.
#[test]
fn the_text_of_ids_has_three_names_and_is_charged() {
    let server = Running::start();
    let text_of = |ids: Vec<u32>| {
        let answer = server.ask("/detokenize", &json!({"tokens": ids}));
        assert_eq!((&answer["content"], &answer["prompt"]), (&answer["text"], &answer["text"]));
        answer["text"].as_str().expect("text").len()
    };
    let length = |id: &u32| text_of(vec![*id]);
    let short = (300..340).min_by_key(length).expect("there are some");
    let long = (300..340).max_by_key(length).expect("there are some");
    // The bodies have the same length, so that only the texts differ.
    let [few, many] = [short, long].map(|id| (text_of(vec![id; 10_000]), server.model.memory.peak()));
    assert!(many.0 > few.0, "{few:?} {many:?}");
    assert!(many.1 - few.1 > 3 * (many.0 - few.0) as u64, "{few:?} {many:?}");
    server.assert_all_is_back();
}

/// Claude Code, Codex and other clients send these whatever the model.
#[test]
fn hints_about_effort_and_length_are_ignored() {
    let server = Running::start();
    let messages = json!([{"role": "user", "content": "Hello!"}]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 2, "verbosity": "low"})),
        (
            "/v1/responses",
            json!({"input": "Hello!", "max_output_tokens": 2, "text": {"verbosity": "low"}, "max_tool_calls": 3}),
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 2, "output_config": {"effort": "low"},
                "thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ),
    ] {
        server.ask(path, &body);
    }
}

#[test]
fn a_path_of_another_server_is_told_where_to_go() {
    let server = Running::start();
    for path in ["/api/chat", "/api/generate", "/completion", "/chat/completions", "/props"] {
        let reply = server.post(path, &json!({}));
        assert_eq!(reply.status, 404);
        let message = reply.json()["error"]["message"].to_string();
        assert!(message.contains(&format!("there is no POST {path} here")), "{message}");
        for advice in ["/openapi.json", "clients ends in /v1", "/api is not served"] {
            assert!(message.contains(advice), "{message}");
        }
    }
}

#[test]
fn the_page_and_its_files_are_served_under_a_strict_policy_and_without_a_key() {
    let options =
        ServerOptions { keys: vec![ApiKey::new("a", "secret").expect("a key")], ..ServerOptions::default() };
    let server = Running::with(engine_options(), options);
    let page = server.get("/");
    assert!(page.body.starts_with("<!doctype html>"), "{}", page.body);
    assert_eq!(page.header("cache-control"), Some("no-cache"));
    for path in page.body.split('"').filter(|part| part.starts_with('/')) {
        let file = server.get(path);
        assert_eq!(file.status, 200, "{path}");
        assert!(file.header("cache-control").is_some_and(|value| value.contains("immutable")), "{path}");
        assert!(!file.body.is_empty() && file.header("content-encoding").is_none(), "{path}");
        let policy = file.header("content-security-policy").unwrap_or_default();
        for part in ["default-src 'none'", "script-src 'self'", "require-trusted-types-for 'script'"] {
            assert!(policy.contains(part), "{path}: {policy}");
        }
        assert!(!policy.contains("unsafe"), "{path}: {policy}");
        assert_eq!(file.header("x-content-type-options"), Some("nosniff"));
    }
    // A page of an older version names another content. A browser must not keep this one under that name.
    for path in [
        "/page/app.js?v=000000000000",
        "/page/app.js?v=",
        "/page/app.js?v",
        "/page/app.js",
        "/page/licences.txt",
    ] {
        let file = server.get(path);
        assert_eq!((file.status, file.header("cache-control")), (200, Some("no-cache")), "{path}");
    }
    assert_eq!(server.get("/page/other.js").status, 404);
    assert_eq!(server.get("/page/..%2F..%2FCargo.toml").status, 404);
}
