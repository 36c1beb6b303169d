//! Opens damaged files with every reader: 20,000 seeded mutations must not panic.
//!
//! `fuzz/` runs the same function on inputs that libFuzzer finds. To repeat one case, run `KEEL_FUZZ_CASE=1234 cargo
//! test -p keel-text --test fuzz_smoke`.

mod common;
#[path = "common/exercise.rs"]
mod exercise;

use common::{asset, files_of};
use exercise::{Input, exercise};
use keel_testkit::random::{Random, mutate, mutations};

const MUTATIONS: u64 = 20_000;
const WORKERS: usize = 4;

#[test]
fn damaged_files_never_panic() {
    let bases = bases();
    if let Ok(case) = std::env::var("KEEL_FUZZ_CASE") {
        run_case(&bases, case.parse().unwrap());
        return;
    }
    let mutations = mutations(MUTATIONS);
    let opened: u64 = std::thread::scope(|scope| {
        let bases = &bases;
        let worker = move |first: u64| {
            (first..mutations).step_by(WORKERS).filter(|&case| run_case(bases, case)).count() as u64
        };
        let workers: Vec<_> = (0..WORKERS as u64).map(|first| scope.spawn(move || worker(first))).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).sum()
    });
    // If all mutations broke the files, or none, the test would test nothing.
    assert!((mutations / 10..mutations * 9 / 10).contains(&opened), "{opened} of {mutations} opened");
}

/// Runs one mutation. Returns whether everything opened. A panic is reported with the number of the case.
fn run_case(bases: &[Input], case: u64) -> bool {
    let mut random = Random::of_case(case);
    let mut input = bases[random.below(bases.len())].clone();
    damage(&mut input, &mut random);
    match std::panic::catch_unwind(|| exercise(&input)) {
        Ok(opened) => opened,
        Err(_) => panic!("case {case} panicked"),
    }
}

/// The checkpoints under `assets`, and each of the templates in them.
fn bases() -> Vec<Input> {
    let mut bases = Vec::new();
    for name in ["byte_level", "byte_tokens"] {
        let files = files_of(name);
        for template in ["chatml", "qwen_like", "gemma_like", "llama_like", "python_isms"] {
            bases.push(Input {
                tokenizer: files.tokenizer.clone(),
                tokenizer_config: files.tokenizer_config.clone(),
                config: files.config.clone(),
                generation_config: files.generation_config.clone(),
                template: std::fs::read(asset("templates").join(format!("{template}.jinja"))).unwrap(),
            });
        }
    }
    bases
}

/// Damages one file of the input in one to three places, and removes the files that do not interact with it.
fn damage(input: &mut Input, random: &mut Random) {
    let file = match random.below(7) {
        0..3 => {
            input.template.clear();
            &mut input.tokenizer
        }
        3..5 => {
            input.tokenizer.clear();
            &mut input.template
        }
        5 => &mut input.tokenizer_config,
        _ if random.below(2) == 0 => &mut input.config,
        _ => &mut input.generation_config,
    };
    for _ in 0..1 + random.below(3) {
        match random.below(7) {
            0 | 1 => copy_value(file, random),
            _ => mutate(file, &WORDS, random),
        }
    }
}

/// Words with a meaning for one of the parsers.
const WORDS: [&str; 40] = [
    "null",
    "-1",
    "0",
    "1e999",
    "4294967295",
    "18446744073709551616",
    "\"\"",
    "[]",
    "{}",
    "true",
    "\u{FFFD}",
    "\"type\":\"Precompiled\"",
    "\"type\":\"Unigram\"",
    "\"type\":\"WordPiece\"",
    "\"type\":\"BPEDecoder\"",
    "\"type\":\"Metaspace\"",
    "\"type\":\"CTC\"",
    "\"type\":\"Sequence\"",
    "\"type\":\"FixedLength\",\"length\":0",
    "\"type\":\"Strip\",\"stop\":9",
    "\"lstrip\":true,",
    "\"rstrip\":true,",
    "\"single_word\":true,",
    "\"normalized\":true,",
    "\"continuing_subword_prefix\":\"#\",",
    "\"end_of_word_suffix\":\"w\",",
    "(",
    "|",
    "*",
    "\\p{",
    "{{",
    "}}",
    "{%",
    "%}",
    "[0]",
    ".x",
    "|tojson",
    "|indent(9)",
    " * 3",
    "loop.",
];

/// Copies one piece between commas over another. This keeps most JSON well-formed and puts values in wrong places.
fn copy_value(file: &mut Vec<u8>, random: &mut Random) {
    let commas: Vec<usize> = (0..file.len()).filter(|&at| file[at] == b',').collect();
    if commas.len() < 3 {
        return;
    }
    let (from, to) = (random.below(commas.len() - 1), random.below(commas.len() - 1));
    let piece = file[commas[from] + 1..commas[from + 1]].to_vec();
    drop(file.splice(commas[to] + 1..commas[to + 1], piece));
}
