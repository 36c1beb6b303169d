//! Renders a conversation with the chat template of a checkpoint folder, and shows its tokens.
//!
//!     cargo run --release -p keel-text --example chat_template -- crates/keel-text/tests/assets/byte_level "Hello,
//!     sea!"

use std::process::ExitCode;

use keel_text::{ChatRequest, ChatTemplate, Message, TextError, TextFiles, Tokenizer};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, text] = arguments.as_slice() else {
        eprintln!("usage: chat_template FOLDER TEXT");
        return ExitCode::from(2);
    };
    match run(folder, text) {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            eprintln!("{err}");
            ExitCode::FAILURE
        }
    }
}

fn run(folder: &str, text: &str) -> Result<(), TextError> {
    let files = TextFiles::read(folder.as_ref())?;
    let tokenizer = Tokenizer::new(&files)?;
    let prompt = match ChatTemplate::new(&files)? {
        Some(template) => template.render(&ChatRequest::new(&[Message::new("user", text)]))?,
        None => text.to_string(),
    };
    println!("{prompt}");

    // The template wrote the special tokens itself, so none are added here.
    let ids = tokenizer.encode(&prompt, false)?;
    let mut stream = tokenizer.stream(false);
    for id in ids {
        println!("{id:>7}  {:?}", stream.push(id)?);
    }
    Ok(())
}
