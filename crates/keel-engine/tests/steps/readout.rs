//! Prompts that are read, not answered: hidden states and logits against the model in plain loops, alone and in a
//! batch.

use std::path::Path;
use std::time::Instant;

use crate::common::batching::{assert_all_is_back, prompt, run};
use crate::common::{device, engine, fixture, reference_weights, relative_error};
use keel_array::Compute;
use keel_engine::EngineOptions;
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher, Readout};
use keel_testkit::reference::{Config, Reference};
use serde_json::{Map, Value};

/// The sum of an f32 model's rounding errors, relative to the largest value.
const ERROR_MAX: f64 = 1e-4;

fn options(compute: Compute, drafts: usize) -> EngineOptions {
    EngineOptions {
        context: 512,
        sequences: 6,
        prefill_step: 128,
        checkpoints: 12,
        row_hidden: true,
        compute,
        drafts,
        ..EngineOptions::default()
    }
}

fn batcher(name: &str, options: EngineOptions, step_tokens: usize) -> Batcher {
    let batch = BatchOptions { step_tokens, ..BatchOptions::default() };
    Batcher::new(engine(&fixture(name), &device(), options), batch)
}

const WORDS: [u32; 3] = [7, 300, 41];

fn readouts() -> [Readout; 3] {
    [Readout::LastHidden, Readout::MeanHidden, Readout::Logits(WORDS.into())]
}

#[test]
fn hidden_states_means_and_logits_are_those_of_the_model_in_plain_loops() {
    for name in ["qwen3", "llama", "gemma3_text", "qwen3_5", "qwen3_5_moe"] {
        let json = std::fs::read_to_string(fixture(name).join("config.json")).expect("there");
        let config = Config::read(&serde_json::from_str(&json).expect("JSON"));
        let weights = reference_weights(&fixture(name), &config);
        let model =
            Reference::new(&config, weights.iter().map(|(name, values)| (name.as_str(), &values[..])));
        let prompt = prompt(name, 3, 77);
        let mut memory = model.memory();
        let rows: Vec<Vec<f64>> = prompt.iter().map(|id| model.step(&mut memory, *id)).collect();
        let last = rows.last().expect("there are tokens");
        let mean = (0..last.len()).map(|i| rows.iter().map(|row| row[i]).sum::<f64>() / rows.len() as f64);
        let logits = model.logits(last);
        let want = [last.clone(), mean.collect(), WORDS.map(|id| logits[id as usize]).into()];
        // Steps of 64 tokens cut the prompt.
        let mut batcher = batcher(name, options(Compute::F32, 0), 64);
        let request = |(i, readout)| BatchRequest::to_read(i as u64, prompt.clone(), readout);
        let got = run(&mut batcher, readouts().into_iter().enumerate().map(request).collect());
        for ((got, want), readout) in got.iter().zip(want).zip(readouts()) {
            let want: Vec<f32> = want.iter().map(|x| *x as f32).collect();
            assert_eq!((got.read.len(), got.tokens.len()), (want.len(), 0), "{name}: {readout:?}");
            let error = relative_error(&got.read, &want);
            assert!(error <= ERROR_MAX, "{name}: {readout:?} differs by {error:.1e}");
        }
        assert_all_is_back(&mut batcher);
    }
}

#[test]
fn a_batch_reads_what_each_prompt_gives_alone_to_the_bit() {
    for (name, drafts) in [("qwen3", 0), ("gemma3_text", 0), ("qwen3_5", 0), ("qwen3_5", 2)] {
        let request = |i: usize| {
            let (id, prompt) = (i as u64, prompt(name, i as u32, 1 + (i * 67) % 290));
            // Some are answered, so that steps of both kinds mix.
            match i % 4 {
                3 => BatchRequest::new(id, prompt, 9),
                kind => BatchRequest::to_read(id, prompt, readouts()[kind].clone()),
            }
        };
        let mut busy = batcher(name, options(Compute::Auto, drafts), 192);
        let got = run(&mut busy, (0..17).map(request).collect());
        assert_all_is_back(&mut busy);
        let mut quiet = batcher(name, options(Compute::Auto, drafts), 512);
        for (i, got) in got.iter().enumerate() {
            let alone = run(&mut quiet, vec![BatchRequest { id: 0, ..request(i) }]);
            assert!(got.error.is_none() && got.finish.is_some(), "{name}: {:?}", got.error);
            assert!(got.read == alone[0].read, "{name}, {drafts} drafts: request {i} read another value");
            assert_eq!((got.read.is_empty(), &got.tokens), (i % 4 == 3, &alone[0].tokens), "{name}: {i}");
        }
        assert_all_is_back(&mut quiet);
    }
}

/// A copy of a fixture whose tensors have no prefix, as embedding models are saved.
fn without_prefix(name: &str, folder: &Path) {
    let json = std::fs::read(fixture(name).join("config.json")).expect("there");
    std::fs::write(folder.join("config.json"), json).expect("written");
    let file = std::fs::read(fixture(name).join("model.safetensors")).expect("there");
    let (size, rest) = file.split_at(8);
    let size = u64::from_le_bytes(size.try_into().expect("eight bytes")) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&rest[..size]).expect("JSON");
    let bare = |(name, entry): (String, Value)| (name.trim_start_matches("model.").to_string(), entry);
    let header = Value::Object(header.into_iter().map(bare).collect()).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &rest[size..]].concat();
    std::fs::write(folder.join("model.safetensors"), bytes).expect("written");
}

#[test]
fn tensors_may_lack_the_prefix() {
    let folder = tempfile::tempdir().expect("a folder");
    without_prefix("qwen3", folder.path());
    let request = || vec![BatchRequest::to_read(0, prompt("qwen3", 1, 40), Readout::LastHidden)];
    let mut whole = batcher("qwen3", options(Compute::Auto, 0), 512);
    let bare = engine(folder.path(), &device(), options(Compute::Auto, 0));
    let mut bare = Batcher::new(bare, BatchOptions::default());
    let (got, want) = (run(&mut bare, request()), run(&mut whole, request()));
    assert!(got[0].read == want[0].read && !want[0].read.is_empty(), "{:?}", got[0].error);
}

#[test]
fn a_prompt_may_fill_the_context_and_what_cannot_be_read_is_refused() {
    let plain = EngineOptions { row_hidden: false, ..options(Compute::Auto, 0) };
    let mut batcher = batcher("qwen3", plain, 512);
    let whole = BatchRequest::to_read(0, prompt("qwen3", 1, 512), Readout::LastHidden);
    let whole = run(&mut batcher, vec![whole]);
    assert!(!whole[0].read.is_empty(), "{:?}", whole[0].error);
    for (prompt, readout, part) in [
        (prompt("qwen3", 1, 513), Readout::LastHidden, "513 tokens"),
        (prompt("qwen3", 1, 9), Readout::MeanHidden, "row_hidden"),
        (prompt("qwen3", 1, 9), Readout::Logits(vec![1 << 30]), "token id"),
        (Vec::new(), Readout::LastHidden, "no tokens"),
    ] {
        let request = BatchRequest::to_read(1, prompt, readout);
        let error = batcher.submit(request, Instant::now()).expect_err("must not pass").to_string();
        assert!(error.contains(part), "{error}");
    }
    assert_all_is_back(&mut batcher);
}
