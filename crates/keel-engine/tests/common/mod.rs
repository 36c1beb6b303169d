//! Shared parts of the engine's tests: fixtures, and engines made from them.

#![allow(dead_code, unused_imports)] // each test file uses its part

pub mod adversary;
pub mod batching;
pub mod drafted;
pub mod drawn;
pub mod forms;
pub mod launch_faults;
pub mod looking;
pub mod nodes;
pub mod queueing;
pub mod rounds;
pub mod splitting;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use keel_array::{Compute, Runtime, RuntimeOptions};
use keel_cache::{LayerStorage, SequenceCache};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_cuda::{CudaBackend, CudaOptions, Determinism, Precision};
use keel_engine::{Engine, EngineOptions, GenerateOptions, SpeculationOptions, TokenIterator};
use keel_models::loading::CheckpointParameters;
pub use keel_testkit::compare::relative_error;
pub use keel_testkit::fixtures::{HYBRID, PLAIN, demo, fixture, models};
use keel_testkit::reference::Config;
use keel_weights::{Checkpoint, SafetensorsFile, TensorSource};

pub fn runtime(threads: usize) -> Runtime {
    let backend =
        CpuBackend::new(CpuOptions { threads: Some(threads), poison_freed: true, ..CpuOptions::default() });
    Runtime::new(Arc::new(backend), RuntimeOptions::default())
}

/// The CPU, or with `KEEL_TEST_CUDA=1` a GPU that computes in f32.
pub fn device() -> Runtime {
    if std::env::var_os("KEEL_TEST_CUDA").is_none() {
        return runtime(2);
    }
    let options = CudaOptions {
        precision: Precision::F32,
        determinism: Determinism::Steps,
        poison_freed: true,
        ..CudaOptions::default()
    };
    let backend = CudaBackend::new(&options).expect("a GPU");
    Runtime::new(Arc::new(backend), RuntimeOptions::default())
}

pub fn exact() -> EngineOptions {
    EngineOptions {
        context: 512,
        sequences: 2,
        compute: Compute::F32,
        all_logits: true,
        ..EngineOptions::default()
    }
}

pub fn engine(folder: &Path, runtime: &Runtime, options: EngineOptions) -> Engine {
    let checkpoint = Checkpoint::open(folder).expect("the checkpoint opens");
    let parameters = CheckpointParameters(&checkpoint);
    Engine::load(runtime, &parameters, checkpoint.config(), options, &|_| ()).expect("the model loads")
}

/// Reference outputs of a fixture.
pub struct Expected {
    pub ids: Vec<u32>,
    pub logits: Vec<f32>,
    pub mtp_logits: Option<Vec<f32>>,
    /// Absent from the quantised fixtures.
    pub greedy: Option<Greedy>,
}

/// The reference's greedy continuation.
pub struct Greedy {
    pub tokens: Vec<u32>,
    /// How far each token's logit is above the second greatest.
    pub margins: Vec<f32>,
}

pub fn expected(folder: &Path) -> Expected {
    let file = SafetensorsFile::open(&folder.join("expected.safetensors")).expect("the reference opens");
    let floats = |name: &str| file.tensor(name).expect("present").to_f32().expect("float");
    let ints = |name: &str| -> Vec<u32> {
        let bytes = file.tensor(name).expect("present").bytes();
        bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    };
    Expected {
        ids: ints("input_ids"),
        logits: floats("logits"),
        mtp_logits: file.contains("mtp_logits").then(|| floats("mtp_logits")),
        greedy: file
            .contains("greedy_ids")
            .then(|| Greedy { tokens: ints("greedy_ids"), margins: floats("greedy_margin") }),
    }
}

/// The dense weights of a checkpoint under the reference's names.
pub fn reference_weights(folder: &Path, config: &Config) -> BTreeMap<String, Vec<f32>> {
    let checkpoint = Checkpoint::open(folder).expect("the checkpoint opens");
    let mut all = BTreeMap::new();
    for name in checkpoint.names().filter(|name| !name.contains("visual")) {
        let values = checkpoint.tensor(name).expect("present").to_f32().expect("float");
        let name = name.replace("model.language_model.", "").replace("model.", "");
        let Some(prefix) = name.strip_suffix("gate_up_proj") else {
            if !name.ends_with("experts.down_proj") {
                all.insert(name, values);
            } else if let Some(mixture) = &config.mixture {
                for (e, expert) in values.chunks_exact(values.len() / mixture.experts).enumerate() {
                    all.insert(name.replace("down_proj", &format!("{e}.down_proj.weight")), expert.to_vec());
                }
            }
            continue;
        };
        let experts = config.mixture.as_ref().expect("experts have sizes").experts;
        for (e, expert) in values.chunks_exact(values.len() / experts).enumerate() {
            let (gate, up) = expert.split_at(expert.len() / 2);
            all.insert(format!("{prefix}{e}.gate_proj.weight"), gate.to_vec());
            all.insert(format!("{prefix}{e}.up_proj.weight"), up.to_vec());
        }
    }
    all
}

/// Logits of a whole prompt in a fresh sequence, and those of the MTP head.
pub fn all_logits(engine: &mut Engine, ids: &[u32], one_by_one: bool, mtp: bool) -> (Vec<f32>, Vec<f32>) {
    let mut sequence = engine.open().expect("a slot is free");
    let (mut logits, mut mtp_logits) = (Vec::new(), Vec::new());
    let mut sink = |row: &[f32]| {
        logits.extend_from_slice(row);
        Ok(())
    };
    let mut mtp_sink = |row: &[f32]| {
        mtp_logits.extend_from_slice(row);
        Ok(())
    };
    let mtp_sink: Option<&mut keel_engine::LogitSink<'_>> = if mtp { Some(&mut mtp_sink) } else { None };
    engine.all_logits(&mut sequence, ids, one_by_one, &mut sink, mtp_sink).expect("the prompt runs");
    engine.release(sequence);
    (logits, mtp_logits)
}

/// The tokens of a sequence that drafts.
pub fn drafting<'e>(
    engine: &'e mut Engine,
    sequence: SequenceCache,
    prompt: &[u32],
    options: GenerateOptions,
    how: SpeculationOptions,
) -> TokenIterator<'e> {
    let options = GenerateOptions { speculation: Some(how), ..options };
    TokenIterator::new(engine, sequence, prompt, options, &mut |_| ()).expect("the prompt fits")
}

/// The greedy text after a prompt in a fresh sequence.
pub fn greedy(engine: &mut Engine, prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    let sequence = engine.open().expect("a slot is free");
    let options = GenerateOptions { max_tokens, ..GenerateOptions::default() };
    let tokens = TokenIterator::new(engine, sequence, prompt, options, &mut |_| ()).expect("the prompt fits");
    tokens.collect::<Result<_, _>>().expect("every step runs")
}

/// Bytes that the process holds in memory.
pub fn resident_bytes() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    let kilobytes: f64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kilobytes * 1024.0)
}

/// The most probable token; the first among equals.
pub fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    best.expect("a vocabulary is not empty").0 as u32
}

/// Bytes of the windows and states of a sequence.
pub fn recurrent_bytes(engine: &Engine, sequence: &SequenceCache) -> Vec<u8> {
    let mut all = Vec::new();
    for layer in engine.cache().layers() {
        if let LayerStorage::Recurrent { window, state } = layer {
            for array in [&window.rows, &state.state] {
                let entry = array.bytes() / array.shape()[0];
                let mut bytes = vec![0; entry];
                array.read_bytes(sequence.slot().index() * entry, &mut bytes).expect("the slot exists");
                all.extend(bytes);
            }
        }
    }
    all
}

/// The full state of a sequence: its length, its windows and states after a commit, and its next logits, which depend
/// on every key and value. Releases the sequence.
pub fn state_of(engine: &mut Engine, mut sequence: SequenceCache) -> (usize, Vec<u8>, Vec<Vec<f32>>) {
    engine.commit(&mut sequence).expect("runs");
    assert_eq!(sequence.accepted(), 0);
    let (len, committed) = (sequence.len(), recurrent_bytes(engine, &sequence));
    let answers = [7, 200].map(|token| {
        let mut logits = Vec::new();
        engine.decode(&mut [&mut sequence], &[token]).expect("runs");
        engine.logits(0, &mut logits).expect("there");
        logits
    });
    engine.release(sequence);
    (len, committed, answers.into())
}

/// Asserts that two sequences are in the same state to the bit.
pub fn expect_same_state(engine: &mut Engine, left: SequenceCache, right: SequenceCache) {
    let (left, right) = (state_of(engine, left), state_of(engine, right));
    assert_eq!(left.0, right.0);
    assert!(left.1 == right.1, "windows and states differ");
    assert!(left.2 == right.2, "keys or values differ");
}

/// A sequence that was decoded plainly.
pub fn decoded(engine: &mut Engine, prompt: &[u32], tokens: &[u32]) -> SequenceCache {
    let mut sequence = engine.open().expect("a slot is free");
    engine.prefill(&mut sequence, prompt, &mut Vec::new(), &mut |_| ()).expect("fits");
    for &token in tokens {
        engine.decode(&mut [&mut sequence], &[token]).expect("runs");
    }
    sequence
}
