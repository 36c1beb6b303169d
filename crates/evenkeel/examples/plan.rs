//! Prints the planned memory of a model before anything is loaded, and then the allocated memory: the same.
//!
//! ```text
//! cargo run --release -p evenkeel --example plan -- [MODEL]
//! ```

use evenkeel::{LoadOptions, Model, ModelFiles, Result, human_bytes};

fn main() -> Result<()> {
    run(std::env::args().nth(1))
}

/// The example, with the path of a model or the built-in model.
pub fn run(path: Option<String>) -> Result<()> {
    let files = match path {
        Some(path) => ModelFiles::open(path)?,
        None => ModelFiles::built_in()?,
    };
    let options = LoadOptions { context: Some(1024), ..LoadOptions::default() };
    let planned = files.plan(&options)?;
    for (category, bytes) in planned.iter().filter(|(_, bytes)| *bytes > 0) {
        println!("{category:<12} {:>10}", human_bytes(bytes));
    }
    let model = Model::load(&files, &options, &|_| ())?;
    for (category, bytes) in planned.iter() {
        assert_eq!(model.allocated(category), bytes, "{category}");
    }
    println!("{:<12} {:>10}", "total", human_bytes(planned.total()));
    Ok(())
}
