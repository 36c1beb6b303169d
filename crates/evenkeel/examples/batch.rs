//! Runs several requests together: a step advances every text by a token.
//!
//! ```text
//! cargo run --release -p evenkeel --example batch -- [MODEL]
//! ```

use evenkeel::engine::EngineOptions;
use evenkeel::{BatchEvent, LoadOptions, Model, Request, Result, SequenceEvent};

fn main() -> Result<()> {
    run(std::env::args().nth(1))
}

/// The example, with the path of a model or the built-in model.
pub fn run(path: Option<String>) -> Result<()> {
    let engine = EngineOptions { sequences: 3, ..EngineOptions::default() };
    let options = LoadOptions { context: Some(512), engine, ..LoadOptions::default() };
    let model = match path {
        Some(path) => Model::open(path, &options)?,
        None => Model::built_in(&options)?,
    };
    let mut batch = model.into_batch(Default::default())?;
    let mut stories = Vec::new();
    // The fourth request waits until a sequence has ended.
    for prompt in ["Once upon a time", "The little dog", "Tom and Mia", "One day"] {
        batch.submit(prompt, Request { max_tokens: Some(24), ..Request::default() })?;
        stories.push(prompt.to_string());
    }
    while !batch.is_idle() {
        for SequenceEvent { id, event } in batch.step() {
            match event {
                BatchEvent::Text(piece) => stories[id as usize].push_str(&piece),
                BatchEvent::Failed(error) => return Err(error),
                _ => {}
            }
        }
    }
    stories.iter().for_each(|story| println!("{story}"));
    Ok(())
}
