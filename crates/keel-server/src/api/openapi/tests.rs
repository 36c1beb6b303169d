use std::collections::BTreeSet;
use std::fmt::Debug;

use serde_json::{Value, json};

use super::document;
use crate::api::anthropic::{self, MessagesBody};
use crate::api::openai::chat::ChatBody;
use crate::api::openai::completions::CompletionBody;
use crate::api::openai::embeddings::EmbeddingBody;
use crate::api::openai::responses::{self, ResponseBody};
use crate::api::rerank::RerankBody;
use crate::api::sampling::SamplingFields;
use crate::api::tokenize::{DetokenizeBody, TokenizeBody};
use crate::http::body::parse;

fn schema(name: &str) -> Value {
    document(16)["components"]["schemas"][name].take()
}

/// The names of a struct's fields, as its derived `Debug` writes them: each on a line of its own, one level deep.
fn fields(value: &impl Debug) -> BTreeSet<String> {
    let text = format!("{value:#?}");
    let own = |line: &str| {
        let name = line.strip_prefix("    ")?.split_once(": ")?.0.to_string();
        (!name.starts_with(' ')).then_some(name)
    };
    text.lines().filter_map(own).collect()
}

/// The fields that a body of this kind reads by itself.
fn read<T: Debug + serde::de::DeserializeOwned>(smallest: Value) -> BTreeSet<String> {
    let body: T = parse(smallest.to_string().as_bytes()).expect("a body");
    let mut names = fields(&body);
    assert!(!names.is_empty(), "{body:?}");
    // All other fields are in `rest`. They are checked by `unsupported`, or passed on by name.
    names.remove("rest");
    names
}

fn names(shared: &[&str]) -> BTreeSet<String> {
    shared.iter().map(|name| name.to_string()).collect()
}

#[test]
fn every_field_that_is_read_is_described() {
    let sampling = fields(&SamplingFields::default());
    assert!(sampling.contains("top_k") && sampling.len() >= 10, "{sampling:?}");
    let messages = read::<MessagesBody>(json!({"messages": []}));
    let mut counted = messages.clone();
    counted.remove("max_tokens");
    for (name, read) in [
        ("Chat", read::<ChatBody>(json!({"messages": []}))),
        ("Chat", sampling.clone()),
        ("Completion", read::<CompletionBody>(json!({"prompt": "a"}))),
        ("Completion", sampling),
        ("Response", read::<ResponseBody>(json!({"input": "a"}))),
        ("Response", names(&responses::SHARED)),
        ("Messages", messages),
        ("Messages", names(&anthropic::SHARED)),
        ("CountTokens", counted),
        ("Embedding", read::<EmbeddingBody>(json!({"input": "a"}))),
        ("Rerank", read::<RerankBody>(json!({"query": "a", "documents": []}))),
        ("Tokenize", read::<TokenizeBody>(json!({"text": "a"}))),
        ("Detokenize", read::<DetokenizeBody>(json!({"tokens": []}))),
    ] {
        let schema = schema(name);
        for field in read {
            assert!(schema["properties"][&field].is_object(), "{name} has no {field}");
        }
    }
}

#[test]
fn what_must_be_there_is_required_and_nothing_else() {
    let chat = schema("Chat");
    let message = &chat["properties"]["messages"]["items"];
    assert_eq!(message["required"], json!(["role"]));
    parse::<ChatBody>(br#"{"messages": [{"role": "assistant"}]}"#).expect("a turn of calls has no text");
    assert_eq!(chat["properties"]["n"]["maximum"], 16);
    for (name, required) in [("Chat", "messages"), ("Completion", "prompt"), ("Response", "input")] {
        assert_eq!(schema(name)["required"], json!([required]));
    }
}

#[test]
fn a_text_has_one_of_three_names() {
    let schema = schema("Tokenize");
    let alternatives = schema["oneOf"].as_array().expect("a list");
    assert_eq!(alternatives.len(), 3);
    for alternative in alternatives {
        let name = alternative["required"][0].as_str().expect("a name");
        assert_eq!(schema["properties"][name]["type"], "string");
        let body = json!({name: "a"}).to_string();
        assert_eq!(parse::<TokenizeBody>(body.as_bytes()).expect("a text").text.as_deref(), Some("a"));
    }
    assert!(parse::<TokenizeBody>(br#"{"text": "a", "prompt": "a"}"#).is_err());
    for (body, adds) in [
        (&br#"{"text": "a"}"#[..], false),
        (br#"{"text": "a", "add_special": true}"#, true),
        (br#"{"text": "a", "add_special_tokens": true}"#, true),
    ] {
        assert_eq!(parse::<TokenizeBody>(body).expect("a text").add_special_tokens, adds);
    }
}

#[test]
fn counting_tokens_asks_for_no_number_of_tokens() {
    let schema = schema("CountTokens");
    assert!(schema["properties"]["messages"].is_object() && schema["properties"]["max_tokens"].is_null());
    assert_eq!(schema["required"], json!(["messages"]));
}

#[test]
fn every_reference_has_a_schema() {
    let document = document(16);
    let text = document.to_string();
    for part in text.split("\"#/components/schemas/").skip(1) {
        let name = part.split('"').next().expect("a name");
        assert!(document["components"]["schemas"][name].is_object(), "{name}");
    }
}

#[test]
fn every_place_in_a_path_is_a_parameter() {
    let document = document(16);
    for (path, methods) in document["paths"].as_object().expect("paths") {
        for place in path.split('{').skip(1).filter_map(|rest| rest.split('}').next()) {
            for method in methods.as_object().expect("methods").values() {
                assert_eq!(method["parameters"][0]["name"], place, "{path}");
            }
        }
    }
}
