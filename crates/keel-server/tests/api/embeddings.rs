//! `/v1/embeddings` and `/v1/rerank` over real HTTP, with the built-in model.

use crate::common::{Running, cpu, engine, engine_options, wait_for};
use keel_engine::EngineOptions;
use keel_server::ServerOptions;
use serde_json::{Value, json};

const EMBEDDINGS: &str = "/v1/embeddings";

fn floats(embedding: &Value) -> Vec<f32> {
    let numbers = embedding.as_array().unwrap_or_else(|| panic!("no list: {embedding}"));
    numbers.iter().map(|x| x.as_f64().expect("a number") as f32).collect()
}

fn embed(server: &Running, input: Value) -> Vec<Vec<f32>> {
    let answer = server.ask(EMBEDDINGS, &json!({"model": "demo", "input": input}));
    answer["data"].as_array().expect("a list").iter().map(|one| floats(&one["embedding"])).collect()
}

fn length(values: &[f32]) -> f64 {
    values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

fn ids(server: &Running, text: &str) -> Vec<u32> {
    let answer = server.ask("/tokenize", &json!({"text": text, "add_special_tokens": true}));
    answer["tokens"].as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

/// Reads the reply to a refused request: status, code, and the wrong field.
fn refusal(server: &Running, path: &str, body: &Value) -> (u16, String, Value) {
    let reply = server.post(path, body);
    let error = reply.json()["error"].clone();
    (reply.status, error["code"].as_str().expect("a code").to_string(), error["param"].clone())
}

#[test]
fn an_embedding_is_the_direction_of_the_last_hidden_state() {
    let server = Running::start();
    let text = "Once upon a time there was a dog.";
    let answer = server.ask(EMBEDDINGS, &json!({"model": "demo", "input": text, "user": "me"}));
    assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("demo")));
    assert_eq!((&answer["data"][0]["object"], &answer["data"][0]["index"]), (&json!("embedding"), &json!(0)));
    let ids = ids(&server, text);
    assert_eq!(answer["usage"], json!({"prompt_tokens": ids.len(), "total_tokens": ids.len()}));
    let mut engine = engine(cpu(), engine_options());
    let mut sequence = engine.open().expect("a slot is free");
    engine.prefill(&mut sequence, &ids, &mut Vec::new(), &mut |_| ()).expect("fits");
    let hidden = engine.last_hidden().expect("there");
    engine.release(sequence);
    let got = floats(&answer["data"][0]["embedding"]);
    assert!((length(&got) - 1.0).abs() < 1e-6 && got.len() == hidden.len());
    let size = length(&hidden);
    let error = got.iter().zip(&hidden).map(|(a, b)| (f64::from(*a) - f64::from(*b) / size).abs());
    assert!(error.fold(0.0, f64::max) < 1e-6, "another direction");
    // Ids give the same embedding as the text, and base64 the same as numbers. Fewer dimensions are the first ones.
    assert_eq!(embed(&server, json!(ids))[0], got);
    assert_eq!(embed(&server, json!([ids, ids]))[1], got);
    let packed = server.ask(EMBEDDINGS, &json!({"input": text, "encoding_format": "base64"}));
    let packed = packed["data"][0]["embedding"].as_str().expect("text").to_string();
    let bytes = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, packed).expect("base64");
    let unpacked: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    assert_eq!(unpacked, got);
    let few = server.ask(EMBEDDINGS, &json!({"input": text, "dimensions": 8, "encoding_format": null}));
    let few = floats(&few["data"][0]["embedding"]);
    let size = length(&got[..8]);
    let error = few.iter().zip(&got).map(|(a, b)| (f64::from(*a) - f64::from(*b) / size).abs());
    assert!(few.len() == 8 && error.fold(0.0, f64::max) < 1e-6, "{few:?}");
    server.assert_all_is_back();
}

#[test]
fn many_texts_among_answers_are_embedded_as_each_alone() {
    let server = Running::start();
    let story = |n: usize| "The dog ran to the park and was happy. ".repeat(1 + n % 9) + &n.to_string();
    let texts: Vec<String> = (0..50).map(story).collect();
    let chat = json!({"prompt": "Once upon a time", "max_tokens": 60, "n": 2, "ignore_eos": true});
    let crowd = std::thread::scope(|scope| {
        let answer = scope.spawn(|| server.ask("/v1/completions", &chat));
        let crowd = embed(&server, json!(texts));
        answer.join().expect("it is answered");
        crowd
    });
    assert_eq!(crowd.len(), texts.len());
    for (text, among) in texts.iter().zip(&crowd).step_by(7) {
        assert_eq!(embed(&server, json!(text))[0], *among, "{text}");
    }
    assert_ne!(crowd[0], crowd[9], "other texts have other directions");
    server.assert_all_is_back();
    assert_eq!(server.model.memory.used(), 0);
}

#[test]
fn a_mean_of_one_token_is_that_token() {
    let options = || ServerOptions { model_id: "demo".into(), ..ServerOptions::default() };
    let last = Running::start();
    let mean = Running::with(EngineOptions { row_hidden: true, ..engine_options() }, options());
    assert_eq!(embed(&mean, json!([[7], [300]])), embed(&last, json!([[7], [300]])));
    let text = json!("The dog ran to the park.");
    assert_ne!(embed(&mean, text.clone()), embed(&last, text));
    mean.assert_all_is_back();
}

#[test]
fn what_cannot_be_embedded_is_refused_in_openais_form() {
    let server = Running::start();
    for (body, status, code, field) in [
        (json!({"input": "a", "dimensions": 0}), 400, "invalid_value", json!("dimensions")),
        (json!({"input": "a", "dimensions": 1 << 20}), 400, "invalid_value", json!("dimensions")),
        (json!({"input": "a", "model": "other"}), 404, "model_not_found", json!("model")),
        (json!({"input": "a", "encoding_format": "int8"}), 400, "invalid_value", json!("encoding_format")),
        (json!({"input": "a", "lora": "x"}), 400, "invalid_value", json!("lora")),
        (json!({"input": []}), 400, "empty_prompt", json!("input")),
        (json!({"input": [[]]}), 400, "empty_prompt", json!("input")),
        (json!({"input": vec!["a"; 2049]}), 400, "invalid_value", json!("input")),
        (json!({"input": [1 << 20]}), 400, "invalid_value", json!("input")),
        (json!({"input": vec![5; 2049]}), 400, "context_length_exceeded", json!("input")),
        (json!({"input": "a ".repeat(9000)}), 400, "context_length_exceeded", json!("input")),
        (json!({}), 400, "invalid_value", json!("input")),
        (json!([]), 400, "invalid_body", Value::Null),
    ] {
        assert_eq!(refusal(&server, EMBEDDINGS, &body), (status, code.into(), field), "{body}");
    }
    assert_eq!(embed(&server, json!(vec![5; 2048])).len(), 1, "a text may fill the context");
    server.assert_all_is_back();
}

#[test]
fn a_text_that_is_too_long_is_told_the_context_of_the_server() {
    let server = Running::start();
    let long = "a ".repeat(200_000);
    for (path, body) in [
        (EMBEDDINGS, json!({"input": long})),
        ("/v1/rerank", json!({"query": "Who?", "documents": [long]})),
        ("/v1/completions", json!({"prompt": long})),
    ] {
        let message = server.post(path, &body).json()["error"]["message"].clone();
        let message = message.as_str().expect("a message");
        assert!(
            message.contains(&format!("length is {} tokens", engine_options().context)),
            "{path}: {message}"
        );
    }
}

#[test]
fn documents_are_ranked_by_the_probability_of_yes() {
    let server = Running::start();
    let documents = ["The dog is happy.", "A cat sat on a mat.", "There was a big tree."];
    let body = json!({"model": "demo", "query": "Who is happy?", "documents": documents});
    let ranked = server.ask("/v1/rerank", &body);
    let results = ranked["results"].as_array().expect("a list");
    let score = |result: &Value| result["relevance_score"].as_f64().expect("a number");
    assert_eq!(results.len(), 3);
    assert!(results.windows(2).all(|pair| score(&pair[0]) >= score(&pair[1])), "{ranked}");
    let mut engine = engine(cpu(), engine_options());
    let word = |word: &str| match ids(&server, word)[..] {
        [id] => id as usize,
        _ => panic!("{word} is no token"),
    };
    let (yes, no) = (word(" yes"), word(" no"));
    for result in results {
        let document = documents[result["index"].as_u64().expect("a number") as usize];
        assert_eq!(result["document"]["text"], document);
        let prompt = format!(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct \
             provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a \
             web search query, retrieve relevant passages that answer the query\n<Query>: Who is happy?\n<Document>: \
             {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        );
        let prompt = server.ask("/tokenize", &json!({"text": prompt}))["tokens"].clone();
        let prompt: Vec<u32> = serde_json::from_value(prompt).expect("ids");
        let (mut sequence, mut logits) = (engine.open().expect("a slot is free"), Vec::new());
        engine.prefill(&mut sequence, &prompt, &mut logits, &mut |_| ()).expect("fits");
        engine.release(sequence);
        let want = 1.0 / (1.0 + f64::from(logits[no] - logits[yes]).exp());
        assert!((score(result) - want).abs() < 1e-6, "{document}: {} for {want}", score(result));
    }
    // A document alone has the same score as among others, and the query is not run again for it.
    let alone =
        server.ask("/rerank", &json!({"query": "Who is happy?", "documents": [{"text": documents[1]}]}));
    let among = results.iter().find(|result| result["index"] == 1).expect("ranked");
    assert_eq!(alone["results"][0]["relevance_score"], among["relevance_score"]);
    wait_for("the query is remembered", || {
        let metrics = server.get("/metrics").body;
        metrics.lines().any(|line| {
            line.strip_prefix("keel_prompt_tokens_cached_total ").is_some_and(|count| count != "0")
        })
    });
    let top = json!({"query": "Who?", "documents": documents, "top_n": 1, "return_documents": false});
    let top = server.ask("/v2/rerank", &top);
    assert!(top["results"].as_array().expect("a list").len() == 1 && top["results"][0]["document"].is_null());
    for (body, field) in [
        (json!({"query": "a", "documents": []}), "documents"),
        (json!({"query": "a", "documents": ["b"], "top_n": 0}), "top_n"),
    ] {
        assert_eq!(refusal(&server, "/v1/rerank", &body), (400, "invalid_value".into(), json!(field)));
    }
    server.assert_all_is_back();
}
