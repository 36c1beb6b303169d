//! Conversions between checkpoints and GGUF files: a source that is cut short, and the memory that a large one takes.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use keel_array::DType;
use keel_models::HybridConfig;
use keel_models::gguf::{CheckpointAsGguf, GgufAsCheckpoint, config, metadata};
use keel_weights::gguf::{GgmlType, GgufFile, GgufTensorSpec, GgufWriter};
use keel_weights::quantize::{GgufRecipe, SafetensorsForm, write_gguf, write_safetensors};
use keel_weights::{Checkpoint, Result, SafetensorsWriter, TensorSpec, WeightsError};
use serde_json::json;

/// An empty folder of the target folder.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("conversion").join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder).expect("the folder is this test's");
    }
    fs::create_dir_all(&folder).expect("the target folder is writable");
    folder
}

/// Writes a checkpoint of `llama` with one layer in f32, and returns the path of its weights.
fn write_llama(folder: &Path, hidden: usize) -> PathBuf {
    let (heads, width, vocab) = (4, 8 * hidden, 1024);
    let matrices = [
        ("lm_head", vocab, hidden),
        ("model.embed_tokens", vocab, hidden),
        ("model.layers.0.self_attn.q_proj", hidden, hidden),
        ("model.layers.0.self_attn.k_proj", hidden, hidden),
        ("model.layers.0.self_attn.v_proj", hidden, hidden),
        ("model.layers.0.self_attn.o_proj", hidden, hidden),
        ("model.layers.0.mlp.gate_proj", width, hidden),
        ("model.layers.0.mlp.up_proj", width, hidden),
        ("model.layers.0.mlp.down_proj", hidden, width),
    ];
    let norms = ["model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"];
    let spec = |name: &str, shape| TensorSpec { name: format!("{name}.weight"), dtype: DType::F32, shape };
    let mut specs: Vec<_> =
        matrices.iter().map(|(name, rows, cols)| spec(name, vec![*rows, *cols])).collect();
    specs.extend(norms.map(|name| spec(name, vec![hidden])));
    let path = folder.join("model.safetensors");
    let mut writer = SafetensorsWriter::create(&path, &specs, &BTreeMap::new()).expect("writable");
    for spec in &specs {
        let count: usize = spec.shape.iter().product();
        writer.append(&spec.name, &0.25f32.to_le_bytes().repeat(count)).expect("the sizes fit");
    }
    writer.finish().expect("complete");
    let config = json!({"model_type": "llama", "hidden_size": hidden, "vocab_size": vocab, "num_hidden_layers": 1,
        "num_attention_heads": heads, "intermediate_size": width, "tie_word_embeddings": false});
    fs::write(folder.join("config.json"), config.to_string()).expect("writable");
    path
}

/// An opened checkpoint and its config.
fn open(folder: &Path) -> (Checkpoint, HybridConfig) {
    let source = Checkpoint::open(folder).expect("it was just written");
    let config = keel_models::read_config(source.config()).expect("complete");
    (source, config)
}

/// An opened GGUF file and its config.
fn open_gguf(path: &Path) -> (GgufFile, HybridConfig) {
    let file = GgufFile::open(path).expect("it was just written");
    let config = keel_models::read_config(&config(&file).expect("known")).expect("complete");
    (file, config)
}

fn to_gguf(source: &Checkpoint, config: &HybridConfig, target: &Path) -> Result<()> {
    let tensors = CheckpointAsGguf::new(source, config).expect("all tensors have names");
    let metadata = metadata(source.config(), config, false).expect("files can say it");
    let recipe = GgufRecipe::from_name("F32").expect("a recipe");
    write_gguf(&tensors, target, metadata, &recipe, &mut |_| ()).map(drop)
}

fn to_safetensors(file: &GgufFile, config: &HybridConfig, target: &Path) -> Result<()> {
    let tensors = GgufAsCheckpoint::new(file, config).expect("all tensors have names");
    let form = SafetensorsForm::Dense(None);
    write_safetensors(&tensors, target, &BTreeMap::new(), &form, &mut |_| ()).map(drop)
}

/// Tensors that the config does not explain are errors.
#[test]
fn recurrent_tensors_without_recurrent_layers_are_refused() {
    let root = folder("recurrent");
    write_llama(&root, 128);
    let config = open(&root).1;
    let name = "model.layers.0.linear_attn.in_proj_qkvz.weight";
    let spec = TensorSpec { name: name.into(), dtype: DType::F32, shape: vec![8, 128] };
    let mut writer = SafetensorsWriter::create(
        &root.join("model.safetensors"),
        std::slice::from_ref(&spec),
        &BTreeMap::new(),
    )
    .expect("writable");
    writer.append(name, &[0; 8 * 128 * 4]).expect("the size fits");
    writer.finish().expect("complete");
    let source = Checkpoint::open(&root).expect("it was just written");
    let error = CheckpointAsGguf::new(&source, &config).map(drop).expect_err("llama has none").to_string();
    assert!(error.contains(name), "{error}");

    // A scalar where a convolution has two dimensions.
    let path = root.join("scalar.gguf");
    let (kind, name) = (GgmlType::Plain(DType::F32), "blk.0.ssm_conv1d.weight");
    let tensor = GgufTensorSpec { name: name.into(), kind, shape: vec![] };
    let metadata = metadata(source.config(), &config, false).expect("files can say it");
    let mut writer = GgufWriter::create(&path, &metadata, &[tensor]).expect("writable");
    writer.append(name, &[0; 4]).expect("the size fits");
    writer.finish().expect("complete");
    let file = GgufFile::open(&path).expect("it was just written");
    let error = GgufAsCheckpoint::new(&file, &config).map(drop).expect_err("one number").to_string();
    assert!(error.contains(name), "{error}");
}

#[cfg(unix)]
fn cut(path: &Path) {
    let file = OpenOptions::new().write(true).open(path).expect("there");
    file.set_len(file.metadata().expect("there").len() / 2).expect("the file is this test's");
}

#[cfg(unix)]
#[test]
fn a_source_that_is_cut_short_is_not_converted() {
    let root = folder("cut");
    let (original, target) = (root.join("original"), root.join("target"));
    fs::create_dir_all(&original).expect("writable");
    fs::create_dir_all(&target).expect("writable");
    let weights = write_llama(&original, 128);
    let gguf = root.join("model.gguf");
    let (source, config) = open(&original);
    to_gguf(&source, &config, &gguf).expect("the source is whole");

    let check = |outcome: Result<()>| {
        let error = outcome.expect_err("zeros are no weights");
        assert!(matches!(error, WeightsError::CutShort { .. }), "{error}");
        assert_eq!(fs::read_dir(&target).expect("there").count(), 0, "no file remains");
    };
    cut(&weights);
    check(to_gguf(&source, &config, &target.join("model.gguf")));
    let (file, config) = open_gguf(&gguf);
    cut(&gguf);
    check(to_safetensors(&file, &config, &target));
}

/// Bytes of a mapped file that are in this process's memory.
#[cfg(target_os = "linux")]
fn resident_bytes(path: &Path) -> u64 {
    let maps = fs::read_to_string("/proc/self/smaps").expect("Linux has it");
    let name = path.to_str().expect("a path of this test");
    let of_file = maps.lines().skip_while(|line| !line.ends_with(name)).skip(1);
    let line = of_file.take(4).find_map(|line| line.strip_prefix("Rss:")).expect("the file is mapped");
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kib << 10
}

/// The system reads some pages around those that are touched, so a few remain.
#[cfg(target_os = "linux")]
#[test]
fn a_converted_source_does_not_stay_in_memory() {
    let root = folder("resident").canonicalize().expect("there");
    let (original, gguf) = (root.join("original"), root.join("model.gguf"));
    fs::create_dir_all(&original).expect("writable");
    let weights = write_llama(&original, 512);
    let check = |path: &Path| {
        let (resident, all) = (resident_bytes(path), fs::metadata(path).expect("there").len());
        assert!(resident < all / 16, "{resident} of {all} bytes of {}", path.display());
    };
    let (source, config) = open(&original);
    to_gguf(&source, &config, &gguf).expect("writable");
    check(&weights);
    let (file, config) = open_gguf(&gguf);
    to_safetensors(&file, &config, &root.join("back")).expect("writable");
    check(&gguf);
}
