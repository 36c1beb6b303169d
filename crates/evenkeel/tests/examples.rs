//! Every example runs, with the built-in model.

// Their `main` is not called here.
#![allow(dead_code)]

use std::path::Path;

#[path = "../examples/batch.rs"]
mod batch;
#[path = "../examples/chat_with_tools.rs"]
mod chat_with_tools;
#[path = "../examples/custom_kernel.rs"]
mod custom_kernel;
#[path = "../examples/embeddings.rs"]
mod embeddings;
#[path = "../examples/plan.rs"]
mod plan;
#[path = "../examples/saved_cache.rs"]
mod saved_cache;
#[path = "../examples/stream.rs"]
mod stream;

type Example = (&'static str, fn(Option<String>) -> evenkeel::Result<()>);

const EXAMPLES: [Example; 7] = [
    ("batch", batch::run),
    ("chat_with_tools", chat_with_tools::run),
    ("custom_kernel", custom_kernel::run),
    ("embeddings", embeddings::run),
    ("plan", plan::run),
    ("saved_cache", saved_cache::run),
    ("stream", stream::run),
];

#[test]
fn examples_run() {
    for (name, run) in EXAMPLES {
        run(None).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn no_example_is_forgotten() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let mut files: Vec<String> = std::fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path().file_stem().expect("a name").display().to_string())
        .collect();
    files.sort();
    assert_eq!(files, EXAMPLES.map(|(name, _)| name));
}
