//! Checkpoints written by tests, tensor by tensor.

use std::collections::BTreeMap;
use std::path::Path;

use half::f16;
use keel_testkit::fixtures::safetensors::{FileTensor, file};
use serde_json::Value;

/// Pseudo-random numbers.
pub struct Numbers(pub u64);

impl Numbers {
    /// An integer below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }

    /// A number between -1 and 1, exact in f16.
    pub fn unit(&mut self) -> f32 {
        f16::from_f32(self.below(2001) as f32 / 1000.0 - 1.0).to_f32()
    }
}

/// Tensors to write: type, shape, bytes.
pub type Tensors = BTreeMap<String, (&'static str, Vec<usize>, Vec<u8>)>;

/// Values as f16.
pub fn f16s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect()
}

/// Values rounded to f16.
pub fn f16_exact(values: Vec<f32>) -> Vec<f32> {
    values.into_iter().map(|v| f16::from_f32(v).to_f32()).collect()
}

/// Packs eight 4-bit values into a word, each at its shift.
pub fn words(values: &[u32], shifts: [u32; 8]) -> Vec<u8> {
    let word = |eight: &[u32]| eight.iter().zip(shifts).fold(0, |word, (value, shift)| word | value << shift);
    values.chunks_exact(8).flat_map(|eight| word(eight).to_le_bytes()).collect()
}

/// Writes tensors as the weights of a folder.
pub fn save(folder: &Path, tensors: &Tensors) {
    let tensors: Vec<FileTensor> = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| FileTensor::new(name, dtype, shape, bytes.clone()))
        .collect();
    std::fs::write(folder.join("model.safetensors"), file(&tensors, None)).expect("the folder is writable");
}

/// Sets the quantisation in a folder's config.
pub fn set_quantization(folder: &Path, quantization: Value) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).expect("there")).expect("JSON");
    config["quantization_config"] = quantization;
    std::fs::write(&path, config.to_string()).expect("the folder is writable");
}
