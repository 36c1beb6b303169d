//! Loading needs no second copy of a tensor, neither of its bytes nor of its pages of the file. This is the only test
//! of its process, because it reads the peak of the process.
#![cfg(target_os = "linux")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use common::{engine, exact, runtime};
use keel_array::{Compute, DType};
use keel_engine::EngineOptions;
use keel_weights::{SafetensorsWriter, TensorSpec};
use serde_json::json;

const VOCAB: usize = 48 << 10;
const WIDTH: usize = 1024;

/// A checkpoint with one large tensor, the embedding, and a small layer.
fn write(folder: &Path) {
    let config = json!({"model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCAB,
        "tie_word_embeddings": true, "max_position_embeddings": 64});
    fs::write(folder.join("config.json"), config.to_string()).expect("the folder is writable");
    let layer = "model.layers.0";
    let tensors = [
        ("model.embed_tokens".to_string(), vec![VOCAB, WIDTH]),
        ("model.norm".into(), vec![WIDTH]),
        (format!("{layer}.input_layernorm"), vec![WIDTH]),
        (format!("{layer}.post_attention_layernorm"), vec![WIDTH]),
        (format!("{layer}.self_attn.q_proj"), vec![32, WIDTH]),
        (format!("{layer}.self_attn.k_proj"), vec![16, WIDTH]),
        (format!("{layer}.self_attn.v_proj"), vec![16, WIDTH]),
        (format!("{layer}.self_attn.o_proj"), vec![WIDTH, 32]),
        (format!("{layer}.mlp.gate_proj"), vec![64, WIDTH]),
        (format!("{layer}.mlp.up_proj"), vec![64, WIDTH]),
        (format!("{layer}.mlp.down_proj"), vec![WIDTH, 64]),
    ];
    let spec = |(name, shape): &(String, Vec<usize>)| TensorSpec {
        name: format!("{name}.weight"),
        dtype: DType::BF16,
        shape: shape.clone(),
    };
    let specs: Vec<TensorSpec> = tensors.iter().map(spec).collect();
    let path = folder.join("model.safetensors");
    let mut writer =
        SafetensorsWriter::create(&path, &specs, &BTreeMap::new()).expect("the folder is writable");
    for spec in &specs {
        let bytes = spec.bytes().expect("small");
        let piece: Vec<u8> = (0..bytes.min(1 << 20)).map(|i| (i % 61) as u8).collect();
        for start in (0..bytes).step_by(piece.len()) {
            writer.append(&spec.name, &piece[..piece.len().min(bytes - start)]).expect("room");
        }
    }
    writer.finish().expect("complete");
}

/// A line of the process's status in bytes.
fn status(key: &str) -> usize {
    let status = fs::read_to_string("/proc/self/status").expect("Linux has it");
    let line = status.lines().find(|line| line.starts_with(key)).expect("the key is there");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<usize>().ok()).expect("a number") * 1024
}

#[test]
fn a_tensor_is_never_there_twice() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    write(folder.path());
    let runtime = runtime(2);
    let options = EngineOptions { context: 64, compute: Compute::Auto, all_logits: false, ..exact() };
    // From here on the peak counts.
    fs::write("/proc/self/clear_refs", "5").expect("a process may reset its own peak");
    let before = status("VmRSS:");
    let engine = engine(folder.path(), &runtime, options);
    let (peak, held) = (status("VmHWM:") - before, runtime.ledger().active().total() as usize);
    let tensor = VOCAB * WIDTH * DType::BF16.size();
    assert!(held >= tensor, "{held} bytes hold the weights");
    assert!(peak < held + tensor / 4, "{peak} bytes were resident at the peak, of which {held} are planned");
    drop(engine);
}
