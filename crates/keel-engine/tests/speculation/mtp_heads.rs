//! MTP heads other than one bf16 layer of Hugging Face's: several layers, which run one after the other, quantised
//! layers, and other names.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::{all_logits, engine, exact, expected, fixture, relative_error, runtime};
use half::f16;
use keel_array::{Compute, DType};
use keel_engine::{Depth, Engine, EngineOptions, GenerateOptions, SpeculationOptions, TokenIterator};
use keel_models::gguf::CheckpointAsGguf;
use keel_testkit::fixtures::foreign_fixture;
use keel_weights::quantize::{QuantizeRecipe, RowSource, quantize_checkpoint};
use keel_weights::{AffineFormat, Checkpoint, SafetensorsWriter, TensorSource, TensorSpec};
use serde_json::{Value, json};

/// A fixture with an MTP head, and the first logits of the last row from `reference/qwen3_5.py`, for a head of two
/// layers that both have the weights of its one layer.
const TWICE: [(&str, [f32; 8]); 2] = [
    ("qwen3_5", [2.21914, 2.34788, -0.3035, -2.29121, -0.81179, -0.6292, -0.89073, 0.98913]),
    ("qwen3_5_moe", [-0.51142, 1.94202, 0.93307, -2.70666, 0.93826, -1.05637, -0.22816, -0.27879]),
];

/// Writes tensors as a checkpoint.
fn write(folder: &Path, tensors: &[(TensorSpec, Vec<u8>)], config: &Value) {
    let specs: Vec<TensorSpec> = tensors.iter().map(|(spec, _)| spec.clone()).collect();
    let path = folder.join("model.safetensors");
    let mut writer = SafetensorsWriter::create(&path, &specs, &BTreeMap::new()).expect("a new file");
    for (spec, bytes) in tensors {
        writer.append(&spec.name, bytes).expect("declared");
    }
    writer.finish().expect("complete");
    std::fs::write(folder.join("config.json"), config.to_string()).expect("written");
}

/// Writes the values of a quantised checkpoint in f32.
fn write_dense(source: &Checkpoint, folder: &Path) {
    let mut tensors: Vec<(TensorSpec, Vec<u8>)> = Vec::new();
    for name in source.names().filter(|name| !name.contains("visual")) {
        let tensor = source.tensor(name).expect("listed");
        let module =
            name.strip_suffix(".weight").filter(|module| source.contains(&format!("{module}.scales")));
        let (dtype, shape, bytes) = match module {
            Some(module) => {
                let linear = source.linear(module).expect("listed");
                let cols = linear.info().cols;
                let mut shape = tensor.shape().to_vec();
                *shape.last_mut().expect("a matrix") = cols;
                let rows = shape.iter().product::<usize>() / cols;
                let mut values = vec![0.0; rows * cols];
                linear.rows_f32(0..rows, &mut values).expect("all of its rows");
                (DType::F32, shape, values.into_iter().flat_map(f32::to_le_bytes).collect())
            }
            None if name.ends_with(".scales") || name.ends_with(".biases") => continue,
            None => (tensor.dtype(), tensor.shape().to_vec(), tensor.bytes().to_vec()),
        };
        tensors.push((TensorSpec { name: name.into(), dtype, shape }, bytes));
    }
    let mut config = source.config().clone();
    let fields = config.as_object_mut().expect("an object");
    fields.remove("quantization");
    fields.remove("quantization_config");
    std::fs::create_dir(folder).expect("a new folder");
    write(folder, &tensors, &config);
}

/// Writes a fixture whose MTP head has one layer more. Both layers have the weights of its one layer. Layer `idle`, if
/// there is one, adds nothing to its input.
fn with_two_layers(fixture: &Path, folder: &Path, idle: Option<usize>) {
    let source = Checkpoint::open(fixture).expect("the fixture opens");
    let mut tensors: Vec<(TensorSpec, Vec<u8>)> = Vec::new();
    for name in source.names().filter(|name| !name.contains("visual")) {
        let tensor = source.tensor(name).expect("listed");
        let spec = |name: String| TensorSpec { name, dtype: tensor.dtype(), shape: tensor.shape().to_vec() };
        let Some(part) = name.strip_prefix("mtp.layers.0.") else {
            tensors.push((spec(name.into()), tensor.bytes().to_vec()));
            continue;
        };
        for layer in 0..2 {
            let is_silent =
                idle == Some(layer) && ["o_proj", "down_proj"].iter().any(|end| part.contains(end));
            let bytes = if is_silent { vec![0; tensor.bytes().len()] } else { tensor.bytes().to_vec() };
            tensors.push((spec(format!("mtp.layers.{layer}.{part}")), bytes));
        }
    }
    let mut config = source.config().clone();
    config["text_config"]["mtp_num_hidden_layers"] = 2.into();
    write(folder, &tensors, &config);
}

fn drafting() -> EngineOptions {
    EngineOptions { context: 512, drafts: 8, prefill_step: 64, compute: Compute::Auto, ..Default::default() }
}

/// Greedy text with drafts is the text without. Some drafts are made.
fn expect_same_text(engine: &mut Engine, prompt: &[u32], what: &str) {
    let options = || GenerateOptions { max_tokens: 128, ..GenerateOptions::default() };
    let sequence = engine.open().expect("a slot is free");
    let mut plain = TokenIterator::new(engine, sequence, prompt, options(), &mut |_| ()).expect("fits");
    let want: Vec<u32> = plain.by_ref().map(|token| token.expect("runs")).collect();
    drop(plain);
    for depth in [Depth::Auto, Depth::Fixed(1), Depth::Fixed(3), Depth::Fixed(8)] {
        let sequence = engine.open().expect("a slot is free");
        let how = SpeculationOptions { depth, ..Default::default() };
        let mut tokens = crate::common::drafting(engine, sequence, prompt, options(), how);
        let got: Vec<u32> = tokens.by_ref().map(|token| token.expect("runs")).collect();
        assert!(tokens.counters().expect("it drafts").drafted_total() > 0);
        assert_eq!(got, want, "{what}, {depth:?}");
    }
}

#[test]
fn layers_of_a_head_run_one_after_the_other() {
    for (name, last_row) in TWICE {
        // Another program computed this row, for the weights of its own fixture.
        let foreign = foreign_fixture(name);
        let cases: &[Option<usize>] =
            if foreign.is_some() { &[None, Some(0), Some(1)] } else { &[Some(0), Some(1)] };
        let folder = foreign.unwrap_or_else(|| fixture(name));
        let (want, vocab) = (expected(&folder), 512);
        let one_layer = want.mtp_logits.expect("the fixture has a head");
        for &idle in cases {
            let dir = tempfile::tempdir().expect("a temporary folder");
            with_two_layers(&folder, dir.path(), idle);
            let mut exact = engine(dir.path(), &runtime(2), exact());
            assert_eq!(exact.model().mtp.as_ref().map(|head| head.blocks.len()), Some(2));
            for one_by_one in [false, true] {
                let (_, logits) = all_logits(&mut exact, &want.ids, one_by_one, true);
                let error = match idle {
                    None => relative_error(&logits[logits.len() - vocab..][..8], &last_row),
                    Some(_) => relative_error(&logits, &one_layer),
                };
                assert!(error < 1e-4, "{name}, idle layer {idle:?}: {error:.1e}");
            }
            if idle.is_none() {
                let mut engine = engine(dir.path(), &runtime(2), drafting());
                expect_same_text(&mut engine, &want.ids, name);
            }
        }
    }
}

/// The modules of these fixtures' MTP heads, as an override names them.
const HEAD: [&str; 14] = [
    "mtp.fc",
    "mtp.layers.0.self_attn.q_proj",
    "mtp.layers.0.self_attn.k_proj",
    "mtp.layers.0.self_attn.v_proj",
    "mtp.layers.0.self_attn.o_proj",
    "mtp.layers.0.mlp.gate_proj",
    "mtp.layers.0.mlp.up_proj",
    "mtp.layers.0.mlp.down_proj",
    "mtp.layers.0.mlp.gate",
    "mtp.layers.0.mlp.shared_expert_gate",
    "mtp.layers.0.mlp.shared_expert.gate_proj",
    "mtp.layers.0.mlp.shared_expert.up_proj",
    "mtp.layers.0.mlp.shared_expert.down_proj",
    "mtp.layers.0.mlp.switch_mlp.down_proj",
];

#[test]
fn a_head_may_be_quantized_or_stay_in_bf16() {
    for name in ["qwen3_5", "qwen3_5_moe"] {
        let folder = fixture(name);
        let want = expected(&folder);
        let source = Checkpoint::open(&folder).expect("the fixture opens");
        for keep_head in [false, true] {
            let dir = tempfile::tempdir().expect("a temporary folder");
            let target = dir.path().join("quantised");
            let mut recipe = QuantizeRecipe::new(AffineFormat::new(8, 32).expect("MLX has it"));
            if keep_head {
                // Quantising stacks the experts under another name.
                let stacked = |module: &str| module.replace("switch_mlp", "experts");
                let is_there = |module: &&&str| {
                    source.contains(&stacked(module)) || source.contains(&format!("{module}.weight"))
                };
                recipe.overrides =
                    HEAD.iter().filter(is_there).map(|module| (module.to_string(), None)).collect();
            }
            quantize_checkpoint(&folder, &target, &recipe, &mut |_| ()).expect("quantises");
            let quantized = Checkpoint::open(&target).expect("opens");
            assert_eq!(quantized.contains("mtp.fc.scales"), !keep_head);
            assert_eq!(quantized.contains("mtp.layers.0.self_attn.q_proj.scales"), !keep_head);
            assert!(quantized.contains("lm_head.scales"));
            let dense = dir.path().join("dense");
            write_dense(&quantized, &dense);
            let logits_of = |folder: &Path| {
                let mut engine = engine(folder, &runtime(2), exact());
                all_logits(&mut engine, &want.ids, false, true).1
            };
            let error = relative_error(&logits_of(&target), &logits_of(&dense));
            assert!(error < 1e-4, "{name}, head kept: {keep_head}: {error:.1e}");
            let mut engine = engine(&target, &runtime(2), drafting());
            expect_same_text(&mut engine, &want.ids, name);
        }
    }
}

/// Writes a fixture with its head under `root`. In MLX's form the layers have other names, too, the convolution is
/// transposed, and norms are stored as scales.
fn with_head_under(root: &str, is_mlx: bool, source: &Checkpoint, folder: &Path) {
    let mut tensors: Vec<(TensorSpec, Vec<u8>)> = Vec::new();
    for name in source.names().filter(|name| !name.contains("visual")) {
        let tensor = source.tensor(name).expect("listed");
        let moved = match name.strip_prefix("mtp.") {
            Some(part) => format!("{root}.{part}"),
            None if is_mlx && name.starts_with("lm_head.") => format!("language_model.{name}"),
            None if is_mlx => name.replace("model.language_model.", "language_model.model."),
            None => name.to_string(),
        };
        let (mut dtype, mut shape, mut bytes) =
            (tensor.dtype(), tensor.shape().to_vec(), tensor.bytes().to_vec());
        if is_mlx && name.ends_with("conv1d.weight") {
            // One of the two dimensions is 1, so the bytes stay in their places.
            shape.swap(1, 2);
        } else if is_mlx && name.contains("norm") && !name.contains("linear_attn.") {
            let offsets = tensor.to_f32().expect("a float");
            dtype = DType::F32;
            bytes = offsets.iter().flat_map(|offset| (offset + 1.0).to_le_bytes()).collect();
        }
        tensors.push((TensorSpec { name: moved, dtype, shape }, bytes));
    }
    write(folder, &tensors, source.config());
}

/// The tensors of the head in a GGUF file of a checkpoint, with their values.
fn head_in_gguf(source: &Checkpoint) -> Vec<(String, Vec<f32>)> {
    let config = keel_models::read_config(source.config()).expect("the config is complete");
    let file = CheckpointAsGguf::new(source, &config).expect("all tensors have names");
    assert!(file.has_mtp_head());
    let block = format!("blk.{}.", config.layers.len());
    let specs = file.tensors().expect("all types are known").into_iter();
    let values = |spec: TensorSpec| {
        let cols = *spec.shape.last().expect("a vector or a matrix");
        let rows = spec.shape.iter().product::<usize>() / cols;
        let mut values = vec![0.0; rows * cols];
        file.rows_f32(&spec.name, 0..rows, &mut values).expect("all of its rows");
        (spec.name, values)
    };
    specs.filter(|spec| spec.name.starts_with(&block)).map(values).collect()
}

/// Converters that keep the head write it next to or into the language model.
#[test]
fn a_head_runs_and_is_exported_under_the_names_of_converters() {
    let folder = fixture("qwen3_5");
    let (source, want) = (Checkpoint::open(&folder).expect("the fixture opens"), expected(&folder));
    let want_head = want.mtp_logits.expect("the fixture has a head");
    let exported = head_in_gguf(&source);
    assert!(exported.iter().any(|(name, _)| name.contains(".nextn.")));
    for (root, is_mlx) in [
        ("language_model.mtp", true),
        ("language_model.mtp", false),
        ("model.mtp", true),
        ("model.mtp", false),
        ("model.language_model.mtp", false),
    ] {
        let what = format!("{root}, MLX's form: {is_mlx}");
        let dir = tempfile::tempdir().expect("a temporary folder");
        with_head_under(root, is_mlx, &source, dir.path());
        let mut exact = engine(dir.path(), &runtime(2), exact());
        let (logits, head) = all_logits(&mut exact, &want.ids, false, true);
        for (got, want) in [(&logits, &want.logits), (&head, &want_head)] {
            let error = relative_error(got, want);
            assert!(error < 1e-4, "{what}: {error:.1e}");
        }
        let moved = Checkpoint::open(dir.path()).expect("it was just written");
        assert!(head_in_gguf(&moved) == exported, "{what}: the exported head differs");
        if is_mlx {
            let mut engine = engine(dir.path(), &runtime(2), drafting());
            expect_same_text(&mut engine, &want.ids, &what);
        }
    }
}

/// A matrix in GPTQ's form, and its values in f32. Codes follow a pattern; all zeros are 8 and all scales 1/64.
fn gptq(module: &str, rows: usize, cols: usize) -> (Vec<(TensorSpec, Vec<u8>)>, Vec<u8>) {
    const GROUP: usize = 64;
    let code = |row: usize, col: usize| ((5 * row + 3 * col + row * col) % 16) as u8;
    let mut words = Vec::with_capacity(rows * cols / 2);
    // A word holds eight inputs of an output, lowest bits first.
    for word in 0..cols / 8 {
        for row in 0..rows {
            words.extend(
                (8 * word..8 * word + 8).step_by(2).map(|col| code(row, col) | code(row, col + 1) << 4),
            );
        }
    }
    let groups = cols / GROUP;
    let scales = f16::from_f32(1.0 / 64.0).to_le_bytes().repeat(groups * rows);
    let part = |part: &str, dtype, shape: [usize; 2], bytes| {
        (TensorSpec { name: format!("{module}.{part}"), dtype, shape: shape.into() }, bytes)
    };
    let tensors = vec![
        part("qweight", DType::I32, [cols / 8, rows], words),
        // Zero points are stored minus 1.
        part("qzeros", DType::I32, [groups, rows / 8], vec![0x77; groups * rows / 2]),
        part("scales", DType::F16, [groups, rows], scales),
    ];
    let value = |i: usize| (f32::from(code(i / cols, i % cols)) - 8.0) / 64.0;
    (tensors, (0..rows * cols).flat_map(|i| value(i).to_le_bytes()).collect())
}

#[test]
fn a_head_whose_projection_is_packed_is_found() {
    let folder = fixture("qwen3_5");
    let (source, ids) = (Checkpoint::open(&folder).expect("the fixture opens"), expected(&folder).ids);
    let (mut packed, mut dense) = (Vec::new(), Vec::new());
    for name in source.names().filter(|name| !name.contains("visual")) {
        let tensor = source.tensor(name).expect("listed");
        let spec = TensorSpec { name: name.into(), dtype: tensor.dtype(), shape: tensor.shape().to_vec() };
        if name == "mtp.fc.weight" {
            let (tensors, values) = gptq("mtp.fc", spec.shape[0], spec.shape[1]);
            packed.extend(tensors);
            dense.push((TensorSpec { dtype: DType::F32, ..spec }, values));
        } else {
            packed.push((spec.clone(), tensor.bytes().to_vec()));
            dense.push((spec, tensor.bytes().to_vec()));
        }
    }
    let dirs = [(); 2].map(|()| tempfile::tempdir().expect("a temporary folder"));
    let mut config = source.config().clone();
    write(dirs[1].path(), &dense, &config);
    config["quantization_config"] = json!({"quant_method": "gptq", "bits": 4, "group_size": 64});
    write(dirs[0].path(), &packed, &config);
    let [got, want] = dirs.each_ref().map(|dir| {
        let mut engine = engine(dir.path(), &runtime(2), exact());
        let logits = all_logits(&mut engine, &ids, false, true).1;
        (logits, head_in_gguf(&Checkpoint::open(dir.path()).expect("it was just written")))
    });
    let error = relative_error(&got.0, &want.0);
    assert!(error < 1e-5, "logits of the head differ by {error:.1e}");
    assert!(got.1 == want.1, "the exported head differs");
}
