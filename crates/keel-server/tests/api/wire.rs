//! Details of the APIs' JSON: a streamed answer and a whole one say the same, and no field is ignored silently.

use crate::common::{Running, request};
use serde_json::{Value, json};

fn with(mut body: Value, more: Value) -> Value {
    let more = more.as_object().expect("an object").clone();
    body.as_object_mut().expect("an object").extend(more);
    body
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// The events of a stream of Anthropic's or of responses, which have no last line.
fn events(body: &str) -> Vec<Value> {
    let data = body.lines().filter_map(|line| line.strip_prefix("data: "));
    data.map(|text| serde_json::from_str(text).expect("JSON")).collect()
}

/// An API's answer with calls: the text, the number of calls, and how the answer ended.
type Said = (String, usize, String);

fn chat_says(server: &Running, body: &Value) -> [Said; 2] {
    let whole = server.ask("/v1/chat/completions", body)["choices"][0].clone();
    let message = &whole["message"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let collected =
        (text(&message["content"]), list(&message["tool_calls"]).len(), text(&whole["finish_reason"]));
    let chunks = server.post("/v1/chat/completions", &with(body.clone(), json!({"stream": true}))).events();
    let deltas = || chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]);
    let streamed = (
        deltas().map(|delta| text(&delta["content"])).collect(),
        deltas().map(|delta| list(&delta["tool_calls"]).len()).sum(),
        chunks.iter().map(|chunk| text(&chunk["choices"][0]["finish_reason"])).collect(),
    );
    [collected, streamed]
}

fn messages_say(server: &Running, body: &Value) -> [Said; 2] {
    let whole = server.ask("/v1/messages", body);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let calls = |blocks: &[Value]| blocks.iter().filter(|block| block["type"] == "tool_use").count();
    let content = list(&whole["content"]);
    let collected = (
        content.iter().map(|block| text(&block["text"])).collect(),
        calls(content),
        text(&whole["stop_reason"]),
    );
    let events = events(&server.post("/v1/messages", &with(body.clone(), json!({"stream": true}))).body);
    let begun: Vec<Value> = events.iter().map(|event| event["content_block"].clone()).collect();
    let streamed = (
        events.iter().map(|event| text(&event["delta"]["text"])).collect(),
        calls(&begun),
        events.iter().map(|event| text(&event["delta"]["stop_reason"])).collect(),
    );
    [collected, streamed]
}

fn responses_say(server: &Running, body: &Value) -> [Said; 2] {
    let says = |response: &Value| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        let output = list(&response["output"]);
        let calls = output.iter().filter(|item| item["type"] == "function_call").count();
        let parts = output.iter().map(|item| text(&item["content"][0]["text"]));
        (parts.collect::<String>(), calls, text(&response["status"]))
    };
    let collected = says(&server.ask("/v1/responses", body));
    let events = events(&server.post("/v1/responses", &with(body.clone(), json!({"stream": true}))).body);
    let last = &events.last().expect("events")["response"];
    let streamed: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    let said = says(last);
    assert!(said.1 > 0 || streamed == said.0, "{streamed}");
    [collected, said]
}

#[test]
fn a_call_that_the_limit_of_tokens_cuts_off_is_left_out() {
    let server = Running::start();
    let parameters = json!({"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}},
        "required": ["city"], "additionalProperties": false});
    let chat = json!({"messages": [{"role": "user", "content": "Weather?"}], "temperature": 0,
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": parameters}}],
        "tool_choice": "required", "parallel_tool_calls": false});
    let messages = json!({"messages": chat["messages"], "temperature": 0,
        "tools": [{"name": "weather", "input_schema": parameters}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": true}});
    let responses = json!({"input": "Weather?", "temperature": 0, "tools": chat["tools"],
        "tool_choice": "required", "parallel_tool_calls": false});
    let mut called = 0;
    for limit in [1, 2, 3, 5, 8, 13, 21, 34, 55, 80] {
        let limited = |body: &Value, field: &str| with(body.clone(), json!({field: limit}));
        let apis = [
            (chat_says(&server, &limited(&chat, "max_tokens")), "length", "tool_calls"),
            (messages_say(&server, &limited(&messages, "max_tokens")), "max_tokens", "tool_use"),
            (responses_say(&server, &limited(&responses, "max_output_tokens")), "incomplete", "completed"),
        ];
        for ([collected, streamed], cut, whole) in apis {
            assert_eq!(streamed, collected, "{limit} tokens");
            let (text, calls, ending) = collected;
            assert_eq!(text, "", "{limit} tokens");
            assert!(
                ending == cut || calls == 1 && ending == whole,
                "{limit} tokens: {ending}, {calls} calls"
            );
            called += calls;
        }
    }
    assert!(called >= 3 && called % 3 == 0, "each API has the call in the end: {called}");
    server.assert_all_is_back();
}

#[test]
fn a_call_that_a_stop_string_cuts_off_is_left_out() {
    let server = Running::start();
    let parameters = json!({"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}},
        "required": ["city"], "additionalProperties": false});
    for stop in ["\n", "}", "city"] {
        let chat = json!({"messages": [{"role": "user", "content": "Weather?"}], "temperature": 0, "stop": [stop],
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": parameters}}],
            "tool_choice": "required", "max_tokens": 80});
        let messages = json!({"messages": chat["messages"], "temperature": 0, "stop_sequences": [stop],
            "tools": [{"name": "weather", "input_schema": parameters}], "tool_choice": {"type": "any"},
            "max_tokens": 80});
        let said = |text: &str| (String::new(), 0, text.to_string());
        assert_eq!(chat_says(&server, &chat), [said("stop"), said("stop")], "{stop:?}");
        let stopped = said("stop_sequence");
        assert_eq!(messages_say(&server, &messages), [stopped.clone(), stopped], "{stop:?}");
    }
    server.assert_all_is_back();
}

/// The value of a schema may look like a call, and is none: calls have markers then.
#[test]
fn a_value_that_looks_like_a_call_is_the_value() {
    let server = Running::start();
    let first = server.ask("/tokenize", &json!({"text": "<tool_call>"}))["tokens"][0].to_string();
    let schema = json!({"type": "object", "properties": {"name": {"const": "search"}, "why": {"const": "hello there"}},
        "required": ["name", "why"], "additionalProperties": false});
    let body = json!({"messages": [{"role": "user", "content": "Weather?"}], "temperature": 0,
        "logit_bias": {first: -100}, "tools": [{"type": "function", "function": {"name": "search"}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, "max_tokens": 80});
    for [collected, streamed] in
        [chat_says(&server, &body), chat_says(&server, &with(body.clone(), json!({"max_tokens": 12})))]
    {
        assert_eq!(streamed, collected);
        let (text, calls, _) = collected;
        assert!(calls == 0 && text.replace(' ', "").starts_with(r#"{"name":"sea"#), "{text}");
    }
    server.assert_all_is_back();
}

#[test]
fn what_is_null_in_a_request_has_its_usual_value_in_the_response() {
    let server = Running::start();
    let body = json!({"input": "Hi", "max_output_tokens": 1, "tools": null, "tool_choice": null,
        "parallel_tool_calls": null});
    let response = server.ask("/v1/responses", &body);
    let echoed = ["tools", "tool_choice", "parallel_tool_calls"].map(|field| response[field].clone());
    assert_eq!(echoed, [json!([]), json!("auto"), json!(true)]);
    server.assert_all_is_back();
}

/// Checks that the chunks of a stream list the tokens of the whole answer, each with its text.
fn check_logprobs(server: &Running, path: &str, body: &Value, key: &str) {
    let whole = server.ask(path, body)["choices"][0]["logprobs"].clone();
    assert!(list(&whole[key]).len() > 3, "{whole}");
    let chunks = server.post(path, &with(body.clone(), json!({"stream": true}))).events();
    for field in whole.as_object().expect("fields").keys() {
        let streamed: Vec<&Value> =
            chunks.iter().flat_map(|chunk| list(&chunk["choices"][0]["logprobs"][field])).collect();
        assert_eq!(streamed, list(&whole[field]).iter().collect::<Vec<_>>(), "{path}: {field}");
    }
    let mut with_text = 0;
    for chunk in &chunks {
        let choice = &chunk["choices"][0];
        let text = choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        if !text.is_empty() {
            with_text += 1;
            assert!(!list(&choice["logprobs"][key]).is_empty(), "{path}: a text without its tokens: {chunk}");
        }
    }
    assert!(with_text > 1, "{path}: {chunks:?}");
    // The first chunk of a chat has the role, the last one the reason. Tokens of a stop string have a chunk, too.
    assert!(chunks.len() <= with_text + 3, "{path}: {} chunks, {with_text} with text", chunks.len());
}

#[test]
fn a_streamed_token_comes_with_its_log_probabilities() {
    let server = Running::start();
    let chat = json!({"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0,
        "max_tokens": 30, "logprobs": true, "top_logprobs": 2});
    let text = json!({"prompt": "Once upon a time", "temperature": 0, "max_tokens": 30, "logprobs": 2});
    let story = server.ask("/v1/completions", &text)["choices"][0]["text"].clone();
    let stop: String = story.as_str().expect("text").chars().skip(20).take(6).collect();
    // The bytes of a character are tokens of their own.
    let ids = server.ask("/tokenize", &json!({"text": "\u{20ac}"}))["tokens"].clone();
    let biases: serde_json::Map<_, _> = list(&ids).iter().map(|id| (id.to_string(), json!(100))).collect();
    for more in
        [json!({}), json!({"stop": [stop]}), json!({"logit_bias": biases, "seed": 3, "temperature": 1})]
    {
        check_logprobs(&server, "/v1/chat/completions", &with(chat.clone(), more.clone()), "content");
        check_logprobs(&server, "/v1/completions", &with(text.clone(), more), "tokens");
    }
    server.assert_all_is_back();
}

#[test]
fn completions_say_where_each_token_begins() {
    let server = Running::start();
    let body = json!({"prompt": "Once upon a time", "temperature": 0, "max_tokens": 30, "logprobs": 0});
    let choice = server.ask("/v1/completions", &body)["choices"][0].clone();
    let text: Vec<char> = choice["text"].as_str().expect("text").chars().collect();
    let offsets: Vec<usize> = list(&choice["logprobs"]["text_offset"])
        .iter()
        .map(|at| at.as_u64().expect("a number") as usize)
        .collect();
    let tokens = list(&choice["logprobs"]["tokens"]);
    assert_eq!((offsets.len(), offsets[0]), (30, 0));
    for (token, &at) in tokens.iter().zip(&offsets) {
        let token = token.as_str().expect("text");
        if !token.starts_with("bytes:") {
            assert_eq!(text[at..][..token.chars().count()].iter().collect::<String>(), token, "at {at}");
        }
    }
    // No offset points into text that a stop string takes away.
    let stop: String = text[20..26].iter().collect();
    let cut = server.ask("/v1/completions", &with(body, json!({"stop": [stop]})))["choices"][0].clone();
    let length = cut["text"].as_str().expect("text").chars().count() as u64;
    let offsets = list(&cut["logprobs"]["text_offset"]);
    assert!(!offsets.is_empty(), "{cut}");
    assert!(offsets.iter().all(|at| at.as_u64().is_some_and(|at| at <= length)), "{cut}");
    server.assert_all_is_back();
}

#[test]
fn a_stream_with_usage_names_it_in_each_chunk() {
    let server = Running::start();
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4});
    let text = json!({"prompt": ["Once", "upon"], "max_tokens": 4, "echo": true});
    for (path, body) in [("/v1/chat/completions", chat), ("/v1/completions", text)] {
        for usage in [true, false] {
            let options = json!({"stream": true, "stream_options": {"include_usage": usage}});
            let mut chunks = server.post(path, &with(body.clone(), options)).events();
            if usage {
                let last = chunks.pop().expect("a chunk");
                assert!(last["usage"]["total_tokens"].is_u64(), "{path}: {last}");
            }
            for chunk in chunks {
                assert_eq!(chunk.get("usage"), usage.then_some(&Value::Null), "{path}: {chunk}");
            }
        }
    }
    server.assert_all_is_back();
}

#[test]
fn a_response_repeats_its_metadata_and_refuses_what_it_does_not_do() {
    let server = Running::start();
    let body = json!({"input": "Hi", "max_output_tokens": 2});
    let metadata = json!({"user": "ada", "run": "7"});
    let fields = json!({"metadata": metadata, "store": true, "truncation": "auto",
        "include": ["reasoning.encrypted_content"]});
    let answer = server.ask("/v1/responses", &with(body.clone(), fields));
    assert_eq!(answer["metadata"], metadata);
    assert_eq!(
        (&answer["store"], &answer["truncation"]),
        (&json!(false), &json!("disabled")),
        "nothing is stored or shortened"
    );
    let plain = server.ask("/v1/responses", &with(body.clone(), json!({"metadata": null, "include": null})));
    assert_eq!(plain["metadata"], json!({}));
    for (field, value) in [
        ("metadata", json!({"a": 1})),
        ("metadata", json!(["a"])),
        ("metadata", json!("a")),
        ("include", json!(["message.output_text.logprobs"])),
        ("include", json!(["reasoning.encrypted_content", "file_search_call.results"])),
        ("include", json!("all")),
        ("truncation", json!("some")),
        ("store", json!("yes")),
    ] {
        let refused = server.post("/v1/responses", &with(body.clone(), json!({field: value})));
        let error = refused.json()["error"].clone();
        assert_eq!((refused.status, &error["param"]), (400, &json!(field)), "{value}: {error}");
    }
    server.assert_all_is_back();
}

#[test]
fn alternatives_are_asked_for_with_log_probabilities() {
    let server = Running::start();
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2});
    for more in [json!({"top_logprobs": 2}), json!({"top_logprobs": 2, "logprobs": false})] {
        let refused = server.post("/v1/chat/completions", &with(chat.clone(), more));
        let error = refused.json()["error"].clone();
        assert_eq!((refused.status, &error["param"]), (400, &json!("top_logprobs")));
        assert!(error["message"].as_str().is_some_and(|m| m.contains("logprobs: true")), "{error}");
    }
    server.ask("/v1/chat/completions", &with(chat, json!({"top_logprobs": 0})));
    server.assert_all_is_back();
}

#[test]
fn anthropics_clients_get_models_in_their_form() {
    let server = Running::start();
    let get =
        |path: &str| request(server.address, "GET", path, &[("anthropic-version", "2023-06-01")], b"").json();
    let models = get("/v1/models");
    let model = &models["data"][0];
    assert_eq!((&model["type"], &model["id"]), (&json!("model"), &json!("demo")), "{models}");
    let created = model["created_at"].as_str().expect("a time");
    assert!(created.len() == 20 && created.starts_with("20") && created.ends_with('Z'), "{created}");
    assert!(model["display_name"].is_string());
    let ids = (&models["has_more"], &models["first_id"], &models["last_id"]);
    assert_eq!(ids, (&json!(false), &json!("demo"), &json!("demo")));
    assert_eq!(&get("/v1/models/demo"), model);
    assert_eq!(get("/v1/models/other")["type"], "error");
    assert_eq!(server.get("/v1/models").json()["object"], "list");
}

/// The chat template of the built-in model does not name tools.
#[test]
fn a_model_sees_tools_that_its_template_does_not_name() {
    let server = Running::start();
    let prompt_of =
        |body: Value| server.ask("/v1/chat/completions", &body)["usage"]["prompt_tokens"].as_u64();
    let hello = json!({"role": "user", "content": "Hello!"});
    let plain = json!({"messages": [hello], "max_tokens": 1});
    let mut with_tools = plain.clone();
    with_tools["tools"] =
        json!([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]);
    let mut with_none = with_tools.clone();
    with_none["tool_choice"] = json!("none");
    assert_eq!(prompt_of(with_none), prompt_of(plain.clone()));
    assert!(prompt_of(with_tools) > prompt_of(plain.clone()));
    let call = json!({"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}});
    let turns = [
        hello.clone(),
        json!({"role": "assistant", "content": null, "tool_calls": [call]}),
        json!({"role": "tool", "tool_call_id": "1", "content": "Sun."}),
    ];
    let lengths = [1, 2, 3].map(|count| prompt_of(json!({"messages": turns[..count], "max_tokens": 1})));
    let empty =
        prompt_of(json!({"messages": [hello, {"role": "assistant", "content": ""}], "max_tokens": 1}));
    assert!(lengths[1] > empty && lengths[2] > lengths[1], "{lengths:?}, {empty:?}");
}
