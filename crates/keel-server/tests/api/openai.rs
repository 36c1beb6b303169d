//! OpenAI's API over real HTTP, with the built-in model.

use crate::common::{Running, engine_options, read, send, wait_for};
use keel_engine::{Depth, EngineOptions};
use keel_server::ServerOptions;
use serde_json::{Value, json};

fn text_of(chunks: &[Value]) -> String {
    let content = |chunk: &Value| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_string);
    chunks.iter().filter_map(content).collect()
}

fn chat(content: &str) -> Value {
    json!({"model": "demo", "messages": [{"role": "user", "content": content}], "temperature": 0,
        "max_tokens": 40})
}

fn with(mut body: Value, more: Value) -> Value {
    let more = more.as_object().expect("an object").clone();
    body.as_object_mut().expect("an object").extend(more);
    body
}

#[test]
fn a_stream_says_what_the_whole_answer_says() {
    let server = Running::start();
    let body = chat("Tell me a story about a dog.");
    let whole = server.ask("/v1/chat/completions", &body);
    let message = &whole["choices"][0]["message"];
    let text = message["content"].as_str().expect("text");
    assert!(text.len() > 20 && message["role"] == "assistant", "{whole}");
    assert_eq!(whole["object"], "chat.completion");
    let usage = &whole["usage"];
    assert_eq!(usage["completion_tokens"], 40);
    assert_eq!(usage["total_tokens"], 40 + usage["prompt_tokens"].as_u64().expect("a number"));
    let options = json!({"stream": true, "stream_options": {"include_usage": true}});
    let reply = server.post("/v1/chat/completions", &with(body, options));
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    let chunks = reply.events();
    assert_eq!(text_of(&chunks), text);
    let last = chunks.last().expect("some");
    assert_eq!((&last["usage"]["completion_tokens"], &last["choices"]), (&json!(40), &json!([])));
    assert_eq!(chunks[chunks.len() - 2]["choices"][0]["finish_reason"], "length");
    server.assert_all_is_back();
}

#[test]
fn completions_take_texts_and_ids_echo_and_several_answers() {
    let server = Running::start();
    let prompt = "Once upon a time";
    let base = json!({"prompt": prompt, "temperature": 0, "max_tokens": 12});
    let one = server.ask("/v1/completions", &base);
    let text = one["choices"][0]["text"].as_str().expect("text").to_string();
    let ids = server.ask("/tokenize", &json!({"text": prompt}))["tokens"].clone();
    let both =
        server.ask("/v1/completions", &with(base.clone(), json!({"prompt": [prompt, prompt], "echo": true})));
    assert_eq!(both["choices"][1]["text"], format!("{prompt}{text}"));
    assert_eq!(both["usage"]["prompt_tokens"], 2 * ids.as_array().expect("ids").len());
    let from_ids = server.ask("/v1/completions", &with(base.clone(), json!({"prompt": ids})));
    assert_eq!(from_ids["choices"][0]["text"], text);
    let drawn = json!({"n": 3, "temperature": 1.5, "seed": 7, "top_k": 0});
    let three = server.ask("/v1/completions", &with(base.clone(), drawn.clone()));
    let texts: Vec<&Value> =
        three["choices"].as_array().expect("choices").iter().map(|c| &c["text"]).collect();
    assert!(texts.len() == 3 && texts[0] != texts[1] && texts[1] != texts[2], "{three}");
    let again = server.ask("/v1/completions", &with(base, drawn));
    assert_eq!(again["choices"], three["choices"], "the seed decides");
    server.assert_all_is_back();
}

#[test]
fn stop_strings_biases_and_log_probabilities() {
    let server = Running::start();
    let base = json!({"prompt": "Once upon a time", "temperature": 0, "max_tokens": 30});
    let whole = server.ask("/v1/completions", &base);
    let text = whole["choices"][0]["text"].as_str().expect("text").to_string();
    let stop: String = text.chars().skip(20).take(5).collect();
    let cut = server.ask("/v1/completions", &with(base.clone(), json!({"stop": [stop]})));
    assert_eq!(cut["choices"][0]["text"], text[..text.find(&stop).expect("a part")]);
    assert_eq!(cut["choices"][0]["finish_reason"], "stop");
    let probable =
        server.ask("/v1/completions", &with(base.clone(), json!({"logprobs": 3, "max_tokens": 2})));
    let logprobs = &probable["choices"][0]["logprobs"];
    let first = logprobs["tokens"][0].as_str().expect("a token").to_string();
    assert!(logprobs["token_logprobs"][0].as_f64().is_some_and(|p| p <= 0.0));
    assert_eq!(logprobs["top_logprobs"][0].as_object().map(serde_json::Map::len), Some(3));
    let id = server.ask("/tokenize", &json!({"text": first}))["tokens"][0].clone();
    let banned = json!({"logit_bias": {id.to_string(): -100}, "max_tokens": 1});
    let other = server.ask("/v1/completions", &with(base, banned));
    assert_ne!(other["choices"][0]["text"], first);
    let body = with(chat("Hello!"), json!({"logprobs": true, "top_logprobs": 2, "max_tokens": 3}));
    let answer = server.ask("/v1/chat/completions", &body);
    let tokens = answer["choices"][0]["logprobs"]["content"].as_array().expect("tokens").clone();
    assert_eq!((tokens.len(), tokens[0]["top_logprobs"].as_array().map(Vec::len)), (3, Some(2)));
    // The first byte of a character is a token.
    let ids = server.ask("/tokenize", &json!({"text": "\u{20ac}"}))["tokens"].clone();
    assert!(ids.as_array().is_some_and(|ids| ids.len() > 1), "{ids}");
    let bias = json!({"logprobs": true, "max_tokens": 1, "logit_bias": {ids[0].to_string(): 100}});
    let part = server.ask("/v1/chat/completions", &with(chat("Hello!"), bias));
    assert_eq!(part["choices"][0]["logprobs"]["content"][0]["bytes"][0], 0xe2, "{part}");
}

#[test]
fn wrong_requests_are_refused_in_openais_form() {
    let server = Running::start();
    let chat_with = |more| with(chat("Hi"), more);
    let cases = [
        ("/v1/chat/completions", json!({}), 400, "invalid_value"),
        ("/v1/chat/completions", json!([]), 400, "invalid_body"),
        ("/v1/chat/completions", chat_with(json!({"messages": []})), 400, "invalid_value"),
        ("/v1/chat/completions", chat_with(json!({"messages": "x"})), 400, "invalid_value"),
        ("/v1/chat/completions", chat_with(json!({"temperature": "hot"})), 400, "invalid_value"),
        ("/v1/chat/completions", chat_with(json!({"temperature": 9})), 400, "invalid_value"),
        ("/v1/chat/completions", chat_with(json!({"n": 0})), 400, "invalid_value"),
        ("/v1/chat/completions", chat_with(json!({"n": 1000})), 400, "invalid_value"),
        ("/v1/chat/completions", chat_with(json!({"max_tokens": 0})), 400, "invalid_value"),
        ("/v1/chat/completions", chat_with(json!({"lora": "mine"})), 400, "invalid_value"),
        ("/v1/chat/completions", chat_with(json!({"modalities": ["text", "audio"]})), 400, "invalid_value"),
        ("/v1/completions", json!({"prompt": "fn f(", "suffix": ")"}), 400, "invalid_value"),
        ("/v1/completions", json!({"prompt": "a", "best_of": 3}), 400, "invalid_value"),
        ("/v1/completions", json!({"prompt": "a", "echo": true, "logprobs": 0}), 400, "invalid_value"),
        ("/v1/completions", json!({"prompt": "a", "prompt_logprobs": 1}), 400, "invalid_value"),
        ("/v1/responses", json!({"input": "a", "conversation": "c"}), 400, "invalid_value"),
        ("/v1/chat/completions", chat_with(json!({"stop": ""})), 400, "invalid_value"),
        ("/v1/chat/completions", chat_with(json!({"model": "gpt-4"})), 404, "model_not_found"),
        (
            "/v1/chat/completions",
            chat_with(json!({"top_logprobs": 99, "logprobs": true})),
            400,
            "invalid_value",
        ),
        (
            "/v1/chat/completions",
            chat_with(json!({"response_format": {"type": "xml"}})),
            400,
            "invalid_value",
        ),
        ("/v1/completions", json!({"prompt": ""}), 400, "empty_prompt"),
        ("/v1/completions", json!({"prompt": [99999]}), 400, "invalid_value"),
        ("/v1/completions", json!({"prompt": []}), 400, "empty_prompt"),
        ("/v1/nothing", json!({}), 404, "unknown_url"),
    ];
    for (path, body, status, code) in cases {
        let reply = server.post(path, &body);
        let error = &reply.json()["error"];
        assert_eq!((reply.status, error["code"].as_str()), (status, Some(code)), "{path} {body}: {error}");
        assert!(error["message"].as_str().is_some_and(|m| m.len() > 5), "{error}");
    }
    let container =
        json!({"max_tokens": 4, "messages": [{"role": "user", "content": "x"}], "container": "c"});
    let reply = server.post("/v1/messages", &container);
    assert!(reply.status == 400 && reply.body.contains("container"), "{}", reply.body);
    let ignored = json!({"future_field": {"a": [1]}, "user": "me", "modalities": ["text"], "suffix": null});
    let ignored = server.ask("/v1/chat/completions", &chat_with(ignored));
    assert!(ignored["choices"][0]["finish_reason"].is_string(), "{ignored}");
    let wrong_method = server.get("/v1/chat/completions");
    assert_eq!((wrong_method.status, wrong_method.header("allow")), (405, Some("POST")));
    server.assert_all_is_back();
}

#[test]
fn an_answer_is_as_long_as_the_context_allows_and_a_prompt_that_does_not_fit_is_told_so() {
    let server = Running::start();
    let prompt: Vec<u32> = (0..2000).map(|i| 300 + i % 700).collect();
    let body = json!({"prompt": prompt, "max_tokens": 100_000, "ignore_eos": true, "temperature": 0});
    let long = server.ask("/v1/completions", &body);
    assert_eq!(long["choices"][0]["finish_reason"], "length");
    assert_eq!(long["usage"]["completion_tokens"], 48, "the context is 2048: {}", long["usage"]);
    let prompt: Vec<u32> = (0..2050).map(|i| 300 + i % 700).collect();
    let reply = server.post("/v1/completions", &json!({"prompt": prompt, "max_tokens": 1}));
    let error = &reply.json()["error"];
    assert_eq!((reply.status, error["code"].as_str()), (400, Some("context_length_exceeded")));
    let message = error["message"].as_str().expect("a message");
    for part in
        ["2050 tokens", "2048", "by at least 3 tokens, or start the server with --context 2051 or more"]
    {
        assert!(message.contains(part), "{message}");
    }
    // A text whose bytes say enough is not made into tokens. The model itself takes 4096.
    let text = "a ".repeat(3 << 20);
    let reply = server.post("/v1/completions", &json!({"prompt": text, "max_tokens": 1}));
    let error = &reply.json()["error"];
    assert_eq!((reply.status, error["code"].as_str()), (400, Some("context_length_exceeded")));
    let message = error["message"].as_str().expect("a message");
    let number = |before: &str| -> usize {
        let after = message.split_once(before).unwrap_or_else(|| panic!("{message}")).1;
        let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().expect("a number")
    };
    assert_eq!((number("the text has "), number("context length is ")), (6 << 20, 2048));
    assert!(number("at least ") > 2048 && message.ends_with("with --context 4096"), "{message}");
    let most = number("more than ");
    let reply =
        server.post("/v1/completions", &json!({"prompt": "a ".repeat(most / 2 + 1), "max_tokens": 1}));
    assert!(reply.body.contains(&format!("more than {most} bytes never fits")), "{}", reply.body);
    let reply = server.post("/v1/completions", &json!({"prompt": "a".repeat(most), "max_tokens": 1}));
    assert!(!reply.body.contains("never fits"), "{}", reply.body);
    let prompt: Vec<u32> = (0..5000).map(|i| 300 + i % 700).collect();
    let reply = server.post("/v1/completions", &json!({"prompt": prompt, "max_tokens": 1}));
    let message = reply.json()["error"]["message"].to_string();
    let advice = "by at least 2953 tokens; this model takes at most 4096, with --context 4096";
    assert!(message.contains(advice), "{message}");
    server.assert_all_is_back();
}

#[test]
fn a_schema_a_tool_and_a_grammar_are_followed() {
    let server = Running::start();
    let schema = json!({"type": "object", "properties": {"animal": {"enum": ["cat", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["animal", "legs"],
        "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let body = with(chat("Which animal?"), json!({"response_format": format}));
    let answer = server.ask("/v1/chat/completions", &body);
    let text = answer["choices"][0]["message"]["content"].as_str().expect("text");
    let value: Value = serde_json::from_str(text).expect("JSON");
    assert!(["cat", "dog"].contains(&value["animal"].as_str().expect("one")), "{value}");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let tools = json!([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
        "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"],
        "additionalProperties": false}}}]);
    let body = with(
        chat("Weather?"),
        json!({"tools": tools, "tool_choice": "required",
        "parallel_tool_calls": false, "max_tokens": 80}),
    );
    let answer = server.ask("/v1/chat/completions", &body);
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
    let function = &choice["message"]["tool_calls"][0]["function"];
    assert_eq!((&function["name"], &choice["message"]["content"]), (&json!("weather"), &Value::Null));
    let arguments: Value = serde_json::from_str(function["arguments"].as_str().expect("text")).expect("JSON");
    assert!(["Bern", "Rome"].contains(&arguments["city"].as_str().expect("one")), "{arguments}");
    let chunks = server.post("/v1/chat/completions", &with(body, json!({"stream": true}))).events();
    let calls: Vec<&Value> =
        chunks.iter().map(|c| &c["choices"][0]["delta"]["tool_calls"][0]).filter(|c| !c.is_null()).collect();
    assert_eq!((calls.len(), &calls[0]["function"]), (1, function));
    let grammar = json!({"response_format": {"type": "grammar", "grammar": "start: \"yes\" | \"no\""}});
    let answer = server.ask("/v1/chat/completions", &with(chat("Yes?"), grammar));
    assert!(["yes", "no"].contains(&answer["choices"][0]["message"]["content"].as_str().expect("text")));
    server.assert_all_is_back();
}

#[test]
fn tools_may_be_called_where_the_text_has_a_schema() {
    let server = Running::start();
    let first = server.ask("/tokenize", &json!({"text": "<tool_call>"}))["tokens"][0].to_string();
    let schema = json!({"type": "object", "properties": {"animal": {"enum": ["cat", "dog"]}},
        "required": ["animal"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let tools = json!([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
        "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"]}}}]);
    let body = with(chat("Weather?"), json!({"tools": tools, "response_format": format, "max_tokens": 80}));
    for (bias, reason) in [(100, "tool_calls"), (-100, "stop")] {
        let body = with(body.clone(), json!({"parallel_tool_calls": false, "logit_bias": {&first: bias}}));
        let answer = server.ask("/v1/chat/completions", &body);
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], reason, "{answer}");
        if let Some(text) = choice["message"]["content"].as_str() {
            let value: Value = serde_json::from_str(text).expect("JSON");
            assert!(value["animal"].is_string(), "{value}");
        }
    }
    let regex = json!({"response_format": {"type": "regex", "regex": "a+"}});
    let refused = server.post("/v1/chat/completions", &with(body, regex));
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("response_format")));
    server.assert_all_is_back();
}

#[test]
fn what_follows_a_grammar_drafts_and_is_the_same() {
    let schema = json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 40},
        "story": {"type": "string", "maxLength": 200}}, "required": ["name", "story"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let body = with(chat("Tell me of a cat."), json!({"response_format": format, "max_tokens": 150}));
    let ask = |drafts: usize| {
        let mut options = ServerOptions { model_id: "demo".into(), ..ServerOptions::default() };
        options.batch.speculation.depth = Depth::Fixed(drafts);
        let server = Running::with(EngineOptions { drafts, ..engine_options() }, options);
        let answer = server.ask("/v1/chat/completions", &body);
        server.assert_all_is_back();
        let drafted = server.model.engine.status().speculation.drafted_total();
        (answer["choices"][0]["message"]["content"].clone(), drafted)
    };
    let (plain, none) = ask(0);
    let (drafted, some) = ask(4);
    assert_eq!((plain.as_str().map(str::is_empty), none), (Some(false), 0));
    assert_eq!(drafted, plain);
    assert!(some > 20, "{some} drafts");
}

#[test]
fn a_client_that_leaves_gives_its_bytes_back() {
    let server = Running::start();
    for stream in [true, false] {
        for _ in 0..4 {
            let body = with(
                chat("Tell me a long story."),
                json!({"max_tokens": 1500, "stream": stream, "ignore_eos": true}),
            );
            let connection =
                send(server.address, "POST", "/v1/chat/completions", &[], body.to_string().as_bytes());
            wait_for("it runs", || !server.model.engine.status().running.is_empty());
            drop(connection);
            server.wait_until_idle();
        }
    }
    // A handler counts its request a moment after the engine has ended it.
    wait_for("all are counted as cancelled", || {
        server.get("/metrics").body.contains("keel_requests_finished_total{reason=\"cancelled\"} 8")
    });
    server.assert_all_is_back();
}

#[test]
fn a_request_gets_the_same_text_alone_and_under_load() {
    let server = Running::start();
    let bodies: Vec<Value> = (0..24)
        .map(|i| {
            with(
                chat(&format!("Story number {i}, please. {}", "Go on. ".repeat(i * 3))),
                json!({"max_tokens": 10 + i}),
            )
        })
        .collect();
    let alone: Vec<Value> =
        bodies.iter().map(|b| server.ask("/v1/chat/completions", b)["choices"].clone()).collect();
    server.assert_all_is_back();
    let connections: Vec<_> = bodies
        .iter()
        .map(|b| send(server.address, "POST", "/v1/chat/completions", &[], b.to_string().as_bytes()))
        .collect();
    for (i, connection) in connections.into_iter().enumerate() {
        assert_eq!(read(connection).json()["choices"], alone[i], "request {i}");
    }
    server.assert_all_is_back();
}

#[test]
fn a_next_turn_begins_where_the_last_one_ended() {
    let server = Running::start();
    let question = "Please tell me about the dog that lived in the little house by the sea. ".repeat(12);
    let first = with(chat(&question), json!({"max_tokens": 100, "ignore_eos": true}));
    let answer = server.ask("/v1/chat/completions", &first);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let said = answer["choices"][0]["message"]["content"].clone();
    let second = with(
        first,
        json!({"messages": [{"role": "user", "content": question},
        {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]}),
    );
    let usage = server.ask("/v1/chat/completions", &second)["usage"].clone();
    let number = |v: &Value| v.as_u64().expect("a number");
    let (prompt, cached) =
        (number(&usage["prompt_tokens"]), number(&usage["prompt_tokens_details"]["cached_tokens"]));
    let first_prompt = number(&answer["usage"]["prompt_tokens"]);
    assert!(cached >= first_prompt / 64 * 64 && cached < prompt, "{usage}");
    server.assert_all_is_back();
}
