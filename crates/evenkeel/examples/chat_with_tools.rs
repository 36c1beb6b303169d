//! Answers a message. The model may call a tool; its result goes into the next turn.
//!
//! ```text
//! cargo run --release -p evenkeel --example chat_with_tools -- [MODEL]
//! ```

use evenkeel::text::{AnswerPart, Message};
use evenkeel::{LoadOptions, Model, Request, Result};
use serde_json::json;

/// The tool.
fn weather(arguments: &str) -> String {
    format!("22 degrees, for {arguments}")
}

fn main() -> Result<()> {
    run(std::env::args().nth(1))
}

/// The example, with the path of a model or the built-in model.
pub fn run(path: Option<String>) -> Result<()> {
    let options = LoadOptions::default();
    let mut model = match path {
        Some(path) => Model::open(path, &options)?,
        None => Model::built_in(&options)?,
    };
    let tools = [json!({"type": "function", "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }})];
    let mut messages = vec![Message::new("user", "What is the weather in Oslo?")];
    // Two turns at most: the call, and the answer that uses its result.
    for _ in 0..2 {
        let mut calls = Vec::new();
        let request = Request { max_tokens: Some(48), ..Request::default() };
        for part in model.chat(&messages, &tools, request)? {
            match part? {
                AnswerPart::Reasoning(text) => eprint!("{text}"),
                AnswerPart::Text(text) => print!("{text}"),
                AnswerPart::ToolCall { name, arguments } => calls.push((name, arguments)),
            }
        }
        println!();
        if calls.is_empty() {
            break;
        }
        let mut turn = Message::new("assistant", "");
        let call = |(name, arguments): &(String, String)| {
            let arguments = serde_json::from_str(arguments).unwrap_or_else(|_| json!({}));
            json!({"type": "function", "function": {"name": name, "arguments": arguments}})
        };
        turn.extra.insert("tool_calls".into(), calls.iter().map(call).collect());
        messages.push(turn);
        messages.extend(calls.iter().map(|(_, arguments)| Message::new("tool", weather(arguments))));
    }
    Ok(())
}
