//! Streams a story, token by token.
//!
//! ```text
//! cargo run --release -p evenkeel --example stream -- [MODEL]
//! ```

use std::io::{Write, stdout};

use evenkeel::{LoadOptions, Model, Request, Result};

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
    for piece in model.stream("Once upon a time", Request { max_tokens: Some(64), ..Request::default() })? {
        print!("{}", piece?);
        stdout().flush().ok();
    }
    println!();
    Ok(())
}
