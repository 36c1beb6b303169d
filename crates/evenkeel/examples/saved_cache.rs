//! Runs a prompt once, saves its cache, and continues from the file. No token of the prompt runs again.
//!
//! ```text
//! cargo run --release -p evenkeel --example saved_cache -- [MODEL]
//! ```

use evenkeel::{LoadOptions, Model, Request, Result};

fn main() -> Result<()> {
    run(std::env::args().nth(1))
}

/// The example, with the path of a model or the built-in model.
pub fn run(path: Option<String>) -> Result<()> {
    let options = LoadOptions { context: Some(1024), ..LoadOptions::default() };
    let load = || match &path {
        Some(path) => Model::open(path, &options),
        None => Model::built_in(&options),
    };
    let file = std::env::temp_dir().join(format!("evenkeel-story-{}.safetensors", std::process::id()));
    let request = Request { max_tokens: Some(24), ..Request::default() };

    let mut model = load()?;
    let mut sequence = model.stream("Once upon a time there was a dog.", request.clone())?.into_sequence()?;
    model.save(&mut sequence, &file)?;
    drop(sequence);

    let mut model = load()?;
    let restored = model.restore(&file)?;
    println!("{} tokens came from {}", restored.tokens().len(), file.display());
    let rest: String = model.resume(restored, " Then", request)?.collect::<Result<_>>()?;
    println!("Then{rest}");
    std::fs::remove_file(&file).ok();
    Ok(())
}
