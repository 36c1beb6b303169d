//! What the engine's tests share: fixtures, and engines made from them.

#![allow(dead_code)] // each test file uses its part

use std::path::{Path, PathBuf};
use std::sync::Arc;

use keel_array::{Compute, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::{Engine, EngineOptions};
use keel_models::loading::CheckpointParameters;
use keel_weights::{Checkpoint, SafetensorsFile, TensorSource};

/// The hybrid fixtures.
pub const HYBRID: [&str; 6] = [
    "qwen3_5",
    "qwen3_5_real_head_dims",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen3_5_mlx_4bit",
    "qwen3_5_moe_mlx_4bit",
];

/// The plain transformers.
pub const PLAIN: [&str; 4] = ["llama", "qwen3", "qwen3_moe", "gemma3_text"];

/// All fixtures with reference logits.
pub fn models() -> impl Iterator<Item = &'static str> {
    HYBRID.into_iter().chain(PLAIN)
}

/// A fixture's folder, or `None` where the shared folder is not beside the repository.
pub fn fixture(name: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/fixtures").join(name);
    if !folder.is_dir() {
        println!("skipped: no fixture {name}");
        return None;
    }
    Some(folder)
}

pub fn runtime(threads: usize) -> Runtime {
    let backend =
        CpuBackend::new(CpuOptions { threads: Some(threads), poison_freed: true, ..CpuOptions::default() });
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
    pub greedy: Option<Vec<u32>>,
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
        greedy: file.contains("greedy_ids").then(|| ints("greedy_ids")),
    }
}

pub fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |x: f64| x * x;
    let difference: f64 = got.iter().zip(want).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let size: f64 = want.iter().map(|b| square(f64::from(*b))).sum();
    (difference / size).sqrt()
}

/// Logits (and those of the head) of a whole prompt in a fresh sequence.
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

/// Bytes that the process holds in memory.
pub fn resident_bytes() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    let kilobytes: f64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kilobytes * 1024.0)
}
