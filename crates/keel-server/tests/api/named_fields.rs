//! An error names the wrong field as its API does, and says what the field takes.

use crate::common::{Running, request};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

/// A valid body with other values of some fields.
fn body(path: &str, more: Value) -> Value {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let mut body = match path {
        CHAT | MESSAGES => json!({"messages": messages, "max_tokens": 2}),
        TEXT => json!({"prompt": "a", "max_tokens": 2}),
        RESPONSES => json!({"input": "a", "max_output_tokens": 2}),
        "/v1/rerank" => json!({"query": "a", "documents": ["a"]}),
        _ => json!({"input": "a"}),
    };
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

/// The body of a reply to a request that is refused because of its body.
fn refused(server: &Running, path: &str, body: &Value) -> Value {
    let reply = server.post(path, body);
    assert!(matches!(reply.status, 400 | 404), "{path} {body}: {} {}", reply.status, reply.body);
    reply.json()["error"].clone()
}

#[test]
fn a_refused_field_is_the_param_of_the_error() {
    let server = Running::start();
    let of_user = |content: Value| json!([{"role": "user", "content": content}]);
    let long = "word ".repeat(20_000);
    let full = vec![5; 2048];
    for (path, more, param) in [
        (CHAT, json!({"stop": ""}), "stop"),
        (CHAT, json!({"stop": vec!["x"; 65]}), "stop"),
        (CHAT, json!({"max_tokens": 0}), "max_tokens"),
        (CHAT, json!({"max_completion_tokens": 0}), "max_completion_tokens"),
        (CHAT, json!({"model": "gpt-4"}), "model"),
        (CHAT, json!({"messages": []}), "messages"),
        (CHAT, json!({"messages": of_user(json!(long))}), "messages"),
        (CHAT, json!({"messages": of_user(json!("a b ".repeat(2000)))}), "messages"),
        (CHAT, json!({"response_format": {"type": "xml"}}), "response_format"),
        (CHAT, json!({"temperature": "x"}), "temperature"),
        (CHAT, json!({"min_p": 2}), "min_p"),
        (CHAT, json!({"repetition_penalty": 0}), "repetition_penalty"),
        (CHAT, json!({"n": -1}), "n"),
        (CHAT, json!({"messages": [{"role": "user", "content": "a"}, {"role": 5}]}), "messages"),
        (TEXT, json!({"prompt": ""}), "prompt"),
        (TEXT, json!({"prompt": []}), "prompt"),
        (TEXT, json!({"prompt": [99999]}), "prompt"),
        (TEXT, json!({"prompt": full}), "prompt"),
        (TEXT, json!({"prompt": long}), "prompt"),
        (TEXT, json!({"stop": [""]}), "stop"),
        (TEXT, json!({"max_tokens": 0}), "max_tokens"),
        (TEXT, json!({"model": "gpt-4"}), "model"),
        (TEXT, json!({"logit_bias": {"5": "x"}}), "logit_bias"),
        (RESPONSES, json!({"input": []}), "input"),
        (RESPONSES, json!({"input": ["a"]}), "input"),
        (RESPONSES, json!({"input": [{"role": 5, "content": "a"}]}), "input"),
        (RESPONSES, json!({"input": [{"role": "robot", "content": "a"}]}), "input"),
        (RESPONSES, json!({"input": [{"role": "user", "content": 5}]}), "input"),
        (RESPONSES, json!({"input": long}), "input"),
        (RESPONSES, json!({"max_output_tokens": 0}), "max_output_tokens"),
        (RESPONSES, json!({"stop": ""}), "stop"),
        (RESPONSES, json!({"model": "gpt-4"}), "model"),
        (RESPONSES, json!({"text": {"format": {"type": "xml"}}}), "text.format"),
        (RESPONSES, json!({"text": {"format": {"type": "json_schema"}}}), "text.format"),
        (RESPONSES, json!({"temperature": "x"}), "temperature"),
        (RESPONSES, json!({"top_k": 0.5}), "top_k"),
        (RESPONSES, json!({"tools": 5}), "tools"),
        (RESPONSES, json!({"reasoning": {"effort": 5}}), "reasoning"),
        // A field of another API keeps the name that it was sent with.
        (RESPONSES, json!({"response_format": {"type": "json_object"}}), "response_format"),
        (RESPONSES, json!({"messages": of_user(json!("a"))}), "messages"),
        ("/v1/embeddings", json!({"input": ""}), "input"),
        ("/v1/embeddings", json!({"input": long}), "input"),
        ("/v1/embeddings", json!({"model": "gpt-4"}), "model"),
        ("/v1/embeddings", json!({"dimensions": "x"}), "dimensions"),
        ("/v1/rerank", json!({"documents": []}), "documents"),
        ("/v1/rerank", json!({"query": 5}), "query"),
        ("/tokenize", json!({"text": 5}), "text"),
        ("/detokenize", json!({"tokens": [72.5]}), "tokens"),
    ] {
        let error = refused(&server, path, &body(path, more.clone()));
        assert_eq!(error["param"], param, "{path} {param}: {error}");
    }
    assert_eq!(refused(&server, CHAT, &json!({"max_tokens": 2}))["param"], "messages", "it is missing");
    for (more, field) in [
        (json!({"max_tokens": 0}), "max_tokens: "),
        (json!({"system": 5}), "system: "),
        (json!({"seed": "x"}), "seed: "),
        (json!({"temperature": "x"}), "temperature: "),
        (json!({"logit_bias": []}), "logit_bias: "),
        (json!({"max_tokens": "x"}), "max_tokens: "),
        (json!({"messages": of_user(json!(5))}), "messages: "),
        (json!({"messages": of_user(json!([{"type": "text"}]))}), "messages: a text block has no text"),
    ] {
        let error = refused(&server, MESSAGES, &body(MESSAGES, more));
        assert!(error["message"].as_str().is_some_and(|message| message.starts_with(field)), "{error}");
    }
    server.assert_all_is_back();
}

/// Of two values one would be ignored in silence.
#[test]
fn a_field_that_is_given_twice_is_refused() {
    let server = Running::start();
    for (path, field) in [
        (TEXT, "prompt"),
        (TEXT, "temperature"),
        (TEXT, "best_of"),
        (TEXT, "a name `of` its own"),
        (CHAT, "top_p"),
        (CHAT, "seed"),
        (RESPONSES, "temperature"),
        (RESPONSES, "tools"),
        (MESSAGES, "top_k"),
        ("/v1/messages/count_tokens", "top_k"),
        ("/v1/embeddings", "user"),
        ("/v1/rerank", "user"),
        ("/tokenize", "with_pieces"),
    ] {
        let valid = match path {
            "/tokenize" => json!({"text": "a"}),
            "/v1/messages/count_tokens" => body(MESSAGES, json!({})),
            path => body(path, json!({})),
        };
        let valid = valid.to_string();
        let fields = valid.strip_suffix('}').expect("an object");
        let twice = format!("{fields}, \"{field}\": null, \"a\": 1, \"{field}\": null}}");
        let reply = request(server.address, "POST", path, &[], twice.as_bytes());
        let error = reply.json()["error"].clone();
        let expected = format!("{field}: duplicate field `{field}`");
        let is_named = error["message"].as_str().is_some_and(|message| message.starts_with(&expected));
        assert!(reply.status == 400 && is_named, "{path} {twice}: {error}");
        assert!(path.starts_with(MESSAGES) || error["param"] == field, "{path} {field}: {error}");
    }
    let message = r#"{"role": "user", "content": "a", "name": "b", "name": "c"}"#;
    let twice = format!("{{\"messages\": [{message}]}}");
    let error = request(server.address, "POST", CHAT, &[], twice.as_bytes()).json()["error"].clone();
    let is_named = error["message"].as_str().is_some_and(|text| text.contains("duplicate field `name`"));
    assert!(is_named && error["param"] == "messages", "{error}");
    // A long name is cut, between characters.
    for (long, cut) in [
        ("x".repeat(1000), "x".repeat(64)),
        (format!("x{}", "\u{e9}".repeat(500)), format!("x{}", "\u{e9}".repeat(31))),
    ] {
        let twice = format!("{{\"prompt\": \"a\", \"{long}\": 1, \"{long}\": 2}}");
        let reply = request(server.address, "POST", TEXT, &[], twice.as_bytes());
        assert!(reply.status == 400 && !reply.body.contains(&long), "{}", reply.body);
        assert_eq!(reply.json()["error"]["param"], cut, "{}", reply.body);
    }
    server.assert_all_is_back();
}

#[test]
fn a_wrong_type_is_told_what_the_field_takes() {
    let server = Running::start();
    for (path, body, expected) in [
        (CHAT, json!([]), "expected an object with messages"),
        (TEXT, json!([]), "expected an object with a prompt"),
        (RESPONSES, json!([]), "expected an object with an input"),
        (MESSAGES, json!([]), "expected an object with messages"),
        ("/v1/embeddings", json!([]), "expected an object with an input"),
        ("/v1/rerank", json!([]), "expected an object with a query and documents"),
        ("/tokenize", json!([]), "expected an object with a text"),
        ("/detokenize", json!([]), "expected an object with tokens"),
        (CHAT, json!({"messages": [{"role": "user", "content": 5}]}), "content is a text or a list of parts"),
        (CHAT, json!({"messages": ["a"]}), "expected a message, an object with a role"),
        (CHAT, body(CHAT, json!({"stop": 5})), "stop is a text or a list of texts"),
        (CHAT, body(CHAT, json!({"stream_options": 5})), "expected an object of options"),
        (CHAT, body(CHAT, json!({"max_tokens": -1})), "expected a whole number from 0, not -1"),
        (MESSAGES, json!({"messages": ["a"]}), "expected a message, an object with role and content"),
        (TEXT, json!({"prompt": 5}), "expected a text, a list of texts, a list of token ids"),
        (RESPONSES, json!({"input": 5}), "input is a text or a list of items"),
        (
            "/v1/rerank",
            json!({"query": "a", "documents": [5]}),
            "a document is a text or an object with a text",
        ),
    ] {
        let error = refused(&server, path, &body);
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains(expected), "{path} {body}: {message}");
        assert!(!message.contains("untagged enum") && !message.contains(" struct "), "{message}");
    }
}

/// The refusal comes before the request waits for a step.
#[test]
fn a_sampling_field_of_a_wrong_type_is_named_with_the_type_that_it_takes() {
    let server = Running::start();
    let reals =
        ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"];
    let texts = reals.map(|field| (field, json!("hot"), "expected a JSON number"));
    let others = [
        ("temperature", json!([1]), "expected a JSON number"),
        ("temperature", json!(true), "expected a JSON number"),
        ("top_k", json!("5"), "expected a JSON number"),
        ("seed", json!({}), "expected a JSON number"),
        ("seed", json!(0.5), "expected a whole number"),
        ("logit_bias", json!({"5": "x"}), "expected a JSON number"),
        ("logit_bias", json!([5]), "expected a map"),
        ("ignore_eos", json!("yes"), "expected a boolean"),
    ];
    for (field, value, expected) in texts.into_iter().chain(others) {
        for path in [CHAT, TEXT, RESPONSES, MESSAGES] {
            let error = refused(&server, path, &body(path, json!({ field: value })));
            let message = error["message"].as_str().expect("a message");
            let is_named = message.starts_with(&format!("{field}: ")) && message.contains(expected);
            assert!(is_named, "{path} {field} {value}: {message}");
        }
    }
    let metrics = server.get("/metrics").body;
    assert!(metrics.contains("keel_prompt_tokens_total 0\n"), "{metrics}");
    server.assert_all_is_back();
}

/// Fields that llama.cpp and vLLM take, and that would be ignored here.
#[test]
fn ids_and_texts_are_refused_if_their_fields_are_not_read() {
    let server = Running::start();
    let ask = |field: &str| server.ask("/tokenize", &json!({"text": "Hi", field: true}));
    assert_eq!(ask("add_special"), ask("add_special_tokens"));
    for (path, body, param) in [
        ("/tokenize", json!({"text": "Hi", "with_pieces": true}), "with_pieces"),
        ("/tokenize", json!({"text": "Hi", "return_token_strs": true}), "return_token_strs"),
        ("/tokenize", json!({"text": "Hi", "parse_special": false}), "parse_special"),
        ("/tokenize", json!({"messages": [{"role": "user", "content": "Hi"}]}), "messages"),
        ("/tokenize", json!({"model": "demo"}), "text"),
        ("/detokenize", json!({"tokens": [999_999, 40]}), "tokens"),
    ] {
        let error = refused(&server, path, &body);
        assert_eq!(error["param"], param, "{error}");
    }
    let neutral =
        json!({"text": "Hi", "with_pieces": false, "return_token_strs": null, "parse_special": true});
    server.ask("/tokenize", &neutral);
}

#[test]
fn best_of_may_be_the_number_of_answers() {
    let server = Running::start();
    for (n, best_of) in
        [(Value::Null, json!(1)), (json!(2), json!(2)), (json!(2), json!(2.0)), (json!(2), Value::Null)]
    {
        server.ask(TEXT, &body(TEXT, json!({"n": n, "best_of": best_of})));
    }
    for (n, best_of) in [(Value::Null, 2), (json!(2), 1), (json!(2), 3)] {
        let error = refused(&server, TEXT, &body(TEXT, json!({"n": n, "best_of": best_of})));
        assert_eq!(error["param"], "best_of", "{error}");
    }
    assert_eq!(refused(&server, CHAT, &body(CHAT, json!({"best_of": 2})))["param"], "best_of");
    server.assert_all_is_back();
}
