//! Quantising whole checkpoints, through the public interface.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use keel_array::DType;
use keel_testkit::fixtures::{foreign_fixture, safetensors::FileTensor, write_model};
use keel_weights::{
    AffineFormat, Checkpoint, LinearFormat, LinearTensor, Result, SafetensorsFile, SafetensorsWriter,
    TensorSource, TensorSpec, float,
    gguf::GgufMetadata,
    quantize::{
        Dequantized, GgufRecipe, QuantizeRecipe, RowSource, SafetensorsForm, quantize_checkpoint, write_gguf,
        write_safetensors,
    },
};
use serde_json::{Value, json};

/// The tensors of a small hybrid model with experts: name and shape. All dimensions that matter are distinct.
const TENSORS: [(&str, &[usize]); 17] = [
    ("lm_head.weight", &[33, 64]),
    ("model.language_model.embed_tokens.weight", &[33, 64]),
    ("model.language_model.layers.0.linear_attn.A_log", &[4]),
    ("model.language_model.layers.0.linear_attn.conv1d.weight", &[20, 1, 4]),
    ("model.language_model.layers.0.linear_attn.in_proj_qkv.weight", &[20, 64]),
    ("model.language_model.layers.0.linear_attn.norm.weight", &[32]),
    ("model.language_model.layers.0.mlp.experts.0.up_proj.weight", &[31, 64]),
    ("model.language_model.layers.0.mlp.experts.1.up_proj.weight", &[31, 64]),
    ("model.language_model.layers.0.mlp.gate.weight", &[3, 64]),
    ("model.language_model.layers.0.mlp.odd_proj.weight", &[7, 40]),
    ("model.language_model.layers.0.mlp.shared_expert_gate.weight", &[1, 64]),
    ("model.language_model.layers.1.mlp.experts.down_proj", &[3, 64, 96]),
    ("model.language_model.layers.1.mlp.experts.gate_up_proj", &[3, 10, 64]),
    ("model.language_model.norm.weight", &[64]),
    ("model.visual.blocks.0.attn.proj.weight", &[64, 64]),
    ("mtp.fc.weight", &[64, 128]),
    ("mtp.layers.0.input_layernorm.weight", &[64]),
];

fn values(name: &str, shape: &[usize]) -> Vec<f32> {
    let seed = name.bytes().fold(7u32, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
    let count: usize = shape.iter().product();
    (0..count as u32).map(|i| ((i.wrapping_mul(2_654_435_761) ^ seed) % 255) as f32 / 128.0 - 1.0).collect()
}

fn write_source(folder: &Path, dtype: DType, change: impl Fn(&str, &mut Vec<f32>)) {
    let spec = |(name, shape): (&str, &[usize])| TensorSpec { name: name.into(), dtype, shape: shape.into() };
    let specs: Vec<_> = TENSORS.into_iter().map(spec).collect();
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let mut writer = SafetensorsWriter::create(&folder.join("model.safetensors"), &specs, &metadata).unwrap();
    for (name, shape) in TENSORS {
        let mut values = values(name, shape);
        change(name, &mut values);
        let mut bytes = vec![0; values.len() * dtype.size()];
        float::encode(dtype, &values, &mut bytes);
        writer.append(name, &bytes).unwrap();
    }
    writer.finish().unwrap();
    fs::write(folder.join("config.json"), r#"{"model_type": "qwen3_5_moe", "text_config": {}}"#).unwrap();
    fs::write(folder.join("tokenizer.json"), "{\"a\": 1}").unwrap();
    fs::write(folder.join("chat_template.jinja"), "{{ x }}").unwrap();
    fs::write(folder.join("notes.pdf"), "no").unwrap();
}

fn recipe(bits: usize, group_size: usize) -> QuantizeRecipe {
    QuantizeRecipe::new(AffineFormat::new(bits, group_size).unwrap())
}

struct Folders {
    _root: tempfile::TempDir,
    source: PathBuf,
    target: PathBuf,
}

fn folders() -> Folders {
    let root = tempfile::tempdir().unwrap();
    let (source, target) = (root.path().join("source"), root.path().join("new/target"));
    fs::create_dir(&source).unwrap();
    Folders { _root: root, source, target }
}

fn error(folders: &Folders, recipe: &QuantizeRecipe) -> String {
    quantize_checkpoint(&folders.source, &folders.target, recipe, &mut |_| ()).unwrap_err().to_string()
}

/// The values of a converted tensor, in the source's row order.
fn decoded(target: &Checkpoint, name: &str, shape: &[usize]) -> Vec<f32> {
    let module = |module: &str, rows: std::ops::Range<usize>| {
        let linear = target.linear(module).unwrap();
        let mut decoded = vec![0.0; rows.len() * linear.info().cols];
        linear.rows_f32(rows, &mut decoded).unwrap();
        decoded
    };
    let rows: usize = shape[..shape.len() - 1].iter().product();
    let Some((layer, part)) = name.split_once(".experts.") else {
        return module(name.strip_suffix(".weight").unwrap(), 0..rows);
    };
    let stack = |part: &str| format!("{layer}.switch_mlp.{part}");
    match part {
        "down_proj" => module(&stack("down_proj"), 0..rows),
        "gate_up_proj" => {
            let half = shape[1] / 2;
            let of = |e: usize| {
                ["gate_proj", "up_proj"].map(|part| module(&stack(part), e * half..(e + 1) * half)).concat()
            };
            (0..shape[0]).flat_map(of).collect()
        }
        _ => {
            let expert: usize = part.split('.').next().unwrap().parse().unwrap();
            module(&stack("up_proj"), expert * rows..(expert + 1) * rows)
        }
    }
}

#[test]
fn a_whole_checkpoint() {
    let folders = folders();
    write_source(&folders.source, DType::BF16, |_, _| ());
    let mut seen = Vec::new();
    let report = quantize_checkpoint(&folders.source, &folders.target, &recipe(4, 32), &mut |progress| {
        seen.push((progress.done_bytes, progress.total_bytes));
    })
    .unwrap();
    let source = Checkpoint::open(&folders.source).unwrap();
    let target = Checkpoint::open(&folders.target).unwrap();
    assert_eq!((report.quantized, report.copied, report.other_forms), (10, 7, 1));
    assert_eq!(report.source_bytes, source.total_bytes());
    assert_eq!(report.output_bytes, target.total_bytes());
    assert!(seen.is_sorted() && seen.len() == 16 + 3 * 2);
    assert_eq!(*seen.last().unwrap(), (source.total_bytes(), source.total_bytes()));

    let layer = "model.language_model.layers.0";
    let format = |module: &str| match target.linear(module).unwrap().info().format {
        LinearFormat::Affine { format, scales: DType::BF16 } => format.bits(),
        LinearFormat::Dense(DType::BF16) => 16,
        other => panic!("{module}: {other:?}"),
    };
    assert_eq!(format("lm_head"), 4);
    assert_eq!(format("model.language_model.embed_tokens"), 4);
    assert_eq!(format(&format!("{layer}.linear_attn.in_proj_qkv")), 4);
    let stacks = ["0.mlp.switch_mlp.up_proj", "1.mlp.switch_mlp.down_proj", "1.mlp.switch_mlp.gate_proj"];
    for (stack, experts) in stacks.into_iter().zip([2, 3, 3]) {
        let stack = format!("model.language_model.layers.{stack}");
        assert_eq!((format(&stack), target.linear(&stack).unwrap().info().experts), (4, Some(experts)));
    }
    assert_eq!(format(&format!("{layer}.mlp.gate")), 8);
    assert_eq!(format(&format!("{layer}.mlp.shared_expert_gate")), 8);
    assert_eq!(format(&format!("{layer}.mlp.odd_proj")), 16);
    assert_eq!(format("mtp.fc"), 4);

    for (name, shape) in TENSORS {
        let is_kept =
            ["A_log", "conv1d", "norm", "visual", "odd_proj"].iter().any(|part| name.contains(part));
        if is_kept {
            let (ours, theirs) = (target.tensor(name).unwrap(), source.tensor(name).unwrap());
            assert_eq!((ours.dtype(), ours.shape(), ours.bytes()), (DType::BF16, shape, theirs.bytes()));
            continue;
        }
        let decoded = decoded(&target, name, shape);
        // Values span 2, so a step is at most 2/15, slightly stretched; bf16 scales add an error of 1/256 of the value.
        for (value, decoded) in source.tensor(name).unwrap().to_f32().unwrap().iter().zip(decoded) {
            assert!((value - decoded).abs() < 0.15, "{name}: {value} became {decoded}");
        }
    }
}

#[test]
fn config_and_side_files() {
    let folders = folders();
    write_source(&folders.source, DType::F32, |_, _| ());
    let mut recipe = recipe(3, 64);
    recipe.overrides.insert("lm_head".into(), AffineFormat::new(6, 32));
    recipe.overrides.insert("in_proj_qkv".into(), None);
    recipe.shard_bytes_max = 20_000;
    let report = quantize_checkpoint(&folders.source, &folders.target, &recipe, &mut |_| ()).unwrap();
    let target = Checkpoint::open(&folders.target).unwrap();
    let layer = "model.language_model.layers.0";
    let mut section = json!({"group_size": 64, "bits": 3, "mode": "affine"});
    // Under the source's names and under mlx-lm's.
    for (prefix, layer) in [("", layer), ("language_model.", "language_model.model.layers.0")] {
        section[format!("{prefix}lm_head")] = json!({"group_size": 32, "bits": 6});
        section[format!("{layer}.linear_attn.in_proj_qkv")] = Value::Bool(false);
        section[format!("{layer}.mlp.gate")] = json!({"group_size": 64, "bits": 8});
        section[format!("{layer}.mlp.shared_expert_gate")] = json!({"group_size": 64, "bits": 8});
    }
    assert_eq!(target.config()["quantization"], section);
    assert_eq!(target.config()["quantization_config"], section);
    assert_eq!(target.config()["model_type"], "qwen3_5_moe");
    assert!(target.files().len() > 1, "the limit splits it");
    assert_eq!(target.metadata()["format"], "pt", "names and layouts are the source's");
    let head = target.linear("lm_head").unwrap().info();
    let format = AffineFormat::new(6, 32).unwrap();
    assert_eq!(head.format, LinearFormat::Affine { format, scales: DType::F32 });
    // 96 columns are not whole groups of 64; neither are the 40 of odd_proj.
    assert_eq!(report.other_forms, 2);
    assert!(matches!(
        target.linear("model.language_model.layers.1.mlp.switch_mlp.down_proj").unwrap(),
        LinearTensor::Dense(_)
    ));
    assert_eq!(fs::read(folders.target.join("tokenizer.json")).unwrap(), b"{\"a\": 1}");
    assert!(folders.target.join("chat_template.jinja").exists());
    assert!(!folders.target.join("notes.pdf").exists());
}

#[test]
fn what_cannot_be_converted_is_refused() {
    let folders = folders();
    write_source(&folders.source, DType::BF16, |_, _| ());
    let mut unmatched = recipe(4, 64);
    unmatched.overrides.insert("lm_haed".into(), None);
    assert!(error(&folders, &unmatched).starts_with("module 'lm_haed': an override names it"));
    quantize_checkpoint(&folders.source, &folders.target, &recipe(4, 64), &mut |_| ()).unwrap();
    let again = error(&folders, &recipe(4, 64));
    assert!(again.contains("it already holds") && again.contains("name an empty folder"), "{again}");
    let twice = Folders {
        source: folders.target.clone(),
        target: folders.source.join("deeper"),
        _root: tempfile::tempdir().unwrap(),
    };
    assert!(error(&twice, &recipe(4, 64)).contains("quantised already"));
}

#[test]
fn damaged_weights_are_found_and_leave_no_checkpoint() {
    for (damage, dtype) in [(f32::NAN, DType::BF16), (f32::INFINITY, DType::F16), (f32::MAX, DType::F32)] {
        let folders = folders();
        write_source(&folders.source, dtype, |name, values| {
            if name == "mtp.fc.weight" {
                values[5 * 128 + 3] = damage;
                values[5 * 128 + 4] = -f32::MAX / 2.0;
            }
        });
        let message = error(&folders, &recipe(4, 64));
        assert!(
            message.starts_with("tensor 'mtp.fc.weight' holds NaN, infinite or overflowing"),
            "{message}"
        );
        assert_eq!(fs::read_dir(&folders.target).unwrap().count(), 0, "{damage}");
    }
}

/// A tensor whose values are all the same, in no type of a file.
struct Constant(TensorSpec, f32);

impl RowSource for Constant {
    fn tensors(&self) -> Result<Vec<TensorSpec>> {
        Ok(vec![self.0.clone()])
    }

    fn rows_f32(&self, _: &str, _: std::ops::Range<usize>, out: &mut [f32]) -> Result<()> {
        out.fill(self.1);
        Ok(())
    }

    fn check_intact(&self) -> Result<()> {
        Ok(())
    }
}

#[test]
fn values_that_a_type_cannot_hold_are_refused() {
    let folders = folders();
    write_source(&folders.source, DType::F32, |name, values| {
        if name == "mtp.fc.weight" {
            values[5 * 128 + 3] = -70_000.0;
        }
    });
    let source = Checkpoint::open(&folders.source).unwrap();
    let dense = |source: &dyn RowSource, dtype| {
        let form = SafetensorsForm::Dense(dtype);
        write_safetensors(source, &folders.target, &BTreeMap::new(), &form, &mut |_| ()).map(drop)
    };
    let gguf = || {
        let (path, recipe) = (folders.target.join("model.gguf"), GgufRecipe::from_name("F16").unwrap());
        write_gguf(&source, &path, GgufMetadata::default(), &recipe, &mut |_| ()).map(drop)
    };
    for written in [dense(&source, Some(DType::F16)), gguf()] {
        let message = written.unwrap_err().to_string();
        assert!(
            message.starts_with("tensor 'mtp.fc.weight' holds a value at row 5 that is too large for f16")
        );
        assert_eq!(fs::read_dir(&folders.target).unwrap().count(), 0);
    }
    // Values that only have a type in the copy.
    let constant = |dtype, value| {
        let spec = TensorSpec { name: "m.weight".into(), dtype, shape: vec![2, 3] };
        dense(&Constant(spec, value), None)
    };
    for (dtype, value) in [(DType::F16, 65_520.0), (DType::BF16, f32::MAX)] {
        let message = constant(dtype, value).unwrap_err().to_string();
        assert!(message.contains(&format!("at row 0 that is too large for {dtype}")), "{message}");
    }
    constant(DType::F16, 65_519.0).unwrap();
    let file = SafetensorsFile::open(&folders.target.join("model.safetensors")).unwrap();
    assert_eq!(file.tensor("m.weight").unwrap().to_f32().unwrap(), [65_504.0; 6]);
}

/// Buffers, such as positions, lie next to quantised weights.
#[test]
fn whole_numbers_of_a_quantised_checkpoint_are_copied() {
    let folders = folders();
    let numbers: Vec<u8> = (0..6i64).flat_map(|i| (i << 33).to_le_bytes()).collect();
    let tensors = [
        FileTensor::new("m.weight", "F8_E4M3", &[2, 3], vec![0x38; 6]),
        FileTensor::new("m.weight_scale_inv", "F32", &[1], 0.5f32.to_le_bytes().to_vec()),
        FileTensor::new("position_ids", "I64", &[2, 3], numbers.clone()),
    ];
    let config = json!({"quantization_config": {"quant_method": "fp8"}});
    write_model(&folders.source, &config.to_string(), &tensors, None).unwrap();
    let source = Checkpoint::open(&folders.source).unwrap();
    let dense = Dequantized::new(&source).unwrap();
    let form = SafetensorsForm::Dense(Some(DType::F16));
    write_safetensors(&dense, &folders.target, &BTreeMap::new(), &form, &mut |_| ()).unwrap();
    let file = SafetensorsFile::open(&folders.target.join("model.safetensors")).unwrap();
    assert_eq!(file.tensor("position_ids").unwrap().bytes(), numbers);
    assert_eq!(file.tensor("m.weight").unwrap().to_f32().unwrap(), [0.5; 6]);
}

/// If the fixtures are present: tensors that MLX quantised by the same recipe have the same bytes.
#[test]
fn a_moe_fixture_quantizes_as_mlx_does() {
    let Some(dense) = foreign_fixture("qwen3_5_moe") else { return };
    let Some(theirs) = foreign_fixture("qwen3_5_moe_mlx_4bit") else { return };
    let folders = folders();
    quantize_checkpoint(&dense, &folders.target, &recipe(4, 32), &mut |_| ()).unwrap();
    let ours = Checkpoint::open(&folders.target).unwrap();
    let theirs = Checkpoint::open(&theirs).unwrap();
    let mut compared = 0;
    for name in theirs.names().filter(|name| !name.contains("norm") && !name.contains("conv1d")) {
        let source = name
            .replace("language_model.model", "model.language_model")
            .replace("language_model.lm_head", "lm_head");
        let (ours, theirs) = (ours.tensor(&source).unwrap(), theirs.tensor(name).unwrap());
        assert_eq!(ours.shape(), theirs.shape(), "{name}");
        assert!(ours.bytes() == theirs.bytes(), "{name}");
        compared += 1;
    }
    assert!(compared > 100, "{compared} tensors");
    assert_eq!(ours.config()["quantization"]["bits"], theirs.config()["quantization"]["bits"]);
    let gate = |config: &Value, layers: &str| config["quantization"][format!("{layers}.2.mlp.gate")].clone();
    let expected = gate(theirs.config(), "language_model.model.layers");
    assert_eq!(gate(ours.config(), "model.language_model.layers"), expected);
    assert_eq!(gate(ours.config(), "language_model.model.layers"), expected);
}
