//! Embeds texts, and prints how similar they are.
//!
//! ```text
//! cargo run --release -p evenkeel --example embeddings -- [MODEL]
//! ```

use evenkeel::engine::EngineOptions;
use evenkeel::{LoadOptions, Model, Result};

fn main() -> Result<()> {
    run(std::env::args().nth(1))
}

/// The example, with the path of a model or the built-in model.
pub fn run(path: Option<String>) -> Result<()> {
    // The texts run together only if the engine has a sequence for each.
    let engine = EngineOptions { sequences: 3, ..EngineOptions::default() };
    let options = LoadOptions { context: Some(512), engine, ..LoadOptions::default() };
    let model = match path {
        Some(path) => Model::open(path, &options)?,
        None => Model::built_in(&options)?,
    };
    let texts = ["The cat sat on the mat.", "A cat was lying on a rug.", "The rocket flew to the moon."];
    let embeddings = model.into_batch(Default::default())?.embed(&texts)?;
    for (text, embedding) in texts.iter().zip(&embeddings) {
        let similarity: f32 = embedding.iter().zip(&embeddings[0]).map(|(a, b)| a * b).sum();
        println!("{similarity:.3}  {text}");
    }
    Ok(())
}
