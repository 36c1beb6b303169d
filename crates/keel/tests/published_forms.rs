//! Compares whole checkpoints in the published forms of AutoGPTQ, AutoAWQ and Qwen with dense checkpoints of the same
//! values.

mod common;

use std::path::Path;

use common::written::{Numbers, Tensors, f16_exact, f16s, save, set_quantization, words};
use common::{arg, copy_of, fail, floats, relative_error, succeed};
use half::bf16;
use keel_weights::{SafetensorsFile, TensorSource};
use serde_json::{Value, json};

const GROUP: usize = 64;

/// Writes a linear layer in a published form. Returns its values.
type Form = fn(&mut Numbers, &str, (usize, usize), &mut Tensors) -> Vec<f32>;

/// Codes `[K, N]`, zeros and scales `[K / GROUP, N]`, and values `[N, K]`.
struct FourBits {
    codes: Vec<u32>,
    zeros: Vec<u32>,
    scales: Vec<f32>,
    values: Vec<f32>,
}

impl FourBits {
    fn new(numbers: &mut Numbers, (rows, cols): (usize, usize), symmetric: bool) -> FourBits {
        let codes: Vec<u32> = (0..cols * rows).map(|_| numbers.below(16) as u32).collect();
        let groups = cols / GROUP * rows;
        // GPTQ stores each zero minus 1, so the zero 0 is not used.
        let zeros: Vec<u32> =
            (0..groups).map(|_| if symmetric { 8 } else { 1 + numbers.below(15) as u32 }).collect();
        let scales = f16_exact((0..groups).map(|_| 0.01 + 0.005 * numbers.unit()).collect());
        let value = |row: usize, k: usize| {
            let g = k / GROUP * rows + row;
            scales[g] * (codes[k * rows + row] as f32 - zeros[g] as f32)
        };
        let values = (0..rows * cols).map(|i| value(i / cols, i % cols)).collect();
        FourBits { codes, zeros, scales, values }
    }
}

fn awq(numbers: &mut Numbers, module: &str, (rows, cols): (usize, usize), tensors: &mut Tensors) -> Vec<f32> {
    const SHIFTS: [u32; 8] = [0, 16, 4, 20, 8, 24, 12, 28];
    let four = FourBits::new(numbers, (rows, cols), false);
    let groups = cols / GROUP;
    tensors.insert(format!("{module}.qweight"), ("I32", vec![cols, rows / 8], words(&four.codes, SHIFTS)));
    tensors.insert(format!("{module}.qzeros"), ("I32", vec![groups, rows / 8], words(&four.zeros, SHIFTS)));
    tensors.insert(format!("{module}.scales"), ("F16", vec![groups, rows], f16s(&four.scales)));
    four.values
}

fn gptq(
    numbers: &mut Numbers,
    module: &str,
    (rows, cols): (usize, usize),
    tensors: &mut Tensors,
) -> Vec<f32> {
    const SHIFTS: [u32; 8] = [0, 4, 8, 12, 16, 20, 24, 28];
    let four = FourBits::new(numbers, (rows, cols), true);
    let groups = cols / GROUP;
    // Eight inputs of one output share a word.
    let lines = (0..cols / 8).flat_map(|line| (0..rows).map(move |row| (line, row)));
    let codes: Vec<u32> = lines
        .flat_map(|(line, row)| (0..8).map(move |i| (line * 8 + i) * rows + row))
        .map(|at| four.codes[at])
        .collect();
    let zeros: Vec<u32> = four.zeros.iter().map(|zero| zero - 1).collect();
    let group_of = (0..cols).flat_map(|k| ((k / GROUP) as i32).to_le_bytes()).collect();
    tensors.insert(format!("{module}.qweight"), ("I32", vec![cols / 8, rows], words(&codes, SHIFTS)));
    tensors.insert(format!("{module}.qzeros"), ("I32", vec![groups, rows / 8], words(&zeros, SHIFTS)));
    tensors.insert(format!("{module}.scales"), ("F16", vec![groups, rows], f16s(&four.scales)));
    tensors.insert(format!("{module}.g_idx"), ("I32", vec![cols], group_of));
    four.values
}

/// Blocks of 128 x 128, cut at the edges of the layer.
fn fp8(numbers: &mut Numbers, module: &str, (rows, cols): (usize, usize), tensors: &mut Tensors) -> Vec<f32> {
    // Codes with either sign, and with exponents and mantissas that are finite numbers.
    let codes: Vec<u8> =
        (0..rows * cols).map(|_| (numbers.below(2) << 7 | numbers.below(0x7f)) as u8).collect();
    let blocks = [rows.div_ceil(128), cols.div_ceil(128)];
    let scale = |_| bf16::from_f32(1e-4 + 5e-5 * numbers.unit());
    let scales: Vec<bf16> = (0..blocks[0] * blocks[1]).map(scale).collect();
    let value = |i: usize| {
        let (code, block) = (codes[i], i / cols / 128 * blocks[1] + i % cols / 128);
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
        let size = if exponent == 0 { mantissa / 64.0 } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) };
        let signed = if code >> 7 == 1 { -size } else { size };
        // The loaded weights keep this precision.
        bf16::from_f32(signed * scales[block].to_f32()).to_f32()
    };
    let values = (0..rows * cols).map(value).collect();
    let scales = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    tensors.insert(format!("{module}.weight"), ("F8_E4M3", vec![rows, cols], codes));
    tensors.insert(format!("{module}.weight_scale_inv"), ("BF16", blocks.to_vec(), scales));
    values
}

/// Compares the logits of the `llama` fixture with its layers in the published form, and with the equivalent dense
/// values.
fn compare(form: Form, quantization: Value) {
    let (packed_folder, dense_folder) = (copy_of("llama"), copy_of("llama"));
    let file = SafetensorsFile::open(&packed_folder.path().join("model.safetensors")).expect("a fixture");
    let (mut packed, mut dense, mut numbers) = (Tensors::new(), Tensors::new(), Numbers(11));
    for name in file.names() {
        let tensor = file.tensor(name).expect("it is there");
        let shape = tensor.shape().to_vec();
        let module = name.strip_suffix("_proj.weight").map(|module| format!("{module}_proj"));
        let Some(module) = module else {
            for tensors in [&mut packed, &mut dense] {
                tensors.insert(name.into(), ("BF16", shape.clone(), tensor.bytes().to_vec()));
            }
            continue;
        };
        let values = form(&mut numbers, &module, (shape[0], shape[1]), &mut packed);
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        dense.insert(name.into(), ("F32", shape, bytes));
    }
    drop(file);
    save(packed_folder.path(), &packed);
    save(dense_folder.path(), &dense);
    let method = quantization["quant_method"].as_str().expect("a name").to_string();
    set_quantization(packed_folder.path(), quantization);
    let out = tempfile::tempdir().expect("a temporary folder");
    let ids: Vec<String> = (0..70).map(|i| (i * 37 % 500).to_string()).collect();
    let logits = |folder: &Path, extra: &[&str]| {
        let file = out.path().join("logits");
        let model = ["logits", "--model", arg(folder), "--ids", &ids.join(","), "--out", arg(&file)];
        succeed(&[&model[..], extra].concat());
        floats(&file, "logits")
    };
    let want = logits(dense_folder.path(), &["--compute", "f32"]);
    let error = relative_error(&logits(packed_folder.path(), &["--compute", "f32"]), &want);
    assert!(error <= 1e-4, "{method}: {error:.1e}");
    // The fast kernels round activations: 1.1e-2 with AWQ and 4.5e-3 with GPTQ, to 8 bits in groups.
    let error = relative_error(&logits(packed_folder.path(), &[]), &want);
    assert!(error <= 0.03, "{method}, fast: {error:.1e}");
}

#[test]
fn gptq_as_autogptq_publishes_it() {
    compare(
        gptq,
        json!({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": false, "sym": true,
            "static_groups": false, "damp_percent": 0.01, "true_sequential": true, "model_name_or_path": null,
            "model_file_base_name": null}),
    );
}

#[test]
fn awq_as_autoawq_publishes_it() {
    compare(
        awq,
        json!({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": true, "version": "gemm",
            "modules_to_not_convert": null}),
    );
}

#[test]
fn fp8_in_blocks_as_qwen_publishes_it() {
    compare(
        fp8,
        json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]}),
    );
}

/// The first layer that is read in a form that is not. Every command says so in the same words.
#[test]
fn a_form_that_is_not_read_is_named() {
    let folder = copy_of("llama");
    let path = folder.path().join("model.safetensors");
    let file = SafetensorsFile::open(&path).expect("a fixture");
    let mut tensors = Tensors::new();
    for name in file.names() {
        let tensor = file.tensor(name).expect("it is there");
        match name.strip_suffix("_proj.weight") {
            Some(module) => {
                let shape = vec![tensor.shape()[0], tensor.shape()[1] / 8];
                let bytes = vec![0; 4 * shape[0] * shape[1]];
                tensors.insert(format!("{module}_proj.weight_packed"), ("I32", shape, bytes));
            }
            None => {
                tensors.insert(name.into(), ("BF16", tensor.shape().to_vec(), tensor.bytes().to_vec()));
            }
        }
    }
    drop(file);
    save(folder.path(), &tensors);
    let quantization = json!({"quant_method": "compressed-tensors", "format": "pack-quantized"});
    set_quantization(folder.path(), quantization);
    let reason = "weight_packed' is stored as i32 (quant_method 'compressed-tensors', format 'pack-quantized'), which keel \
                  does not read; read are bf16";
    let model = arg(folder.path());
    let out = tempfile::tempdir().expect("a temporary folder");
    let converted = out.path().join("converted.gguf");
    fail(&["plan", "--model", model], reason);
    fail(&["generate", "--model", model, "--ids", "1,2,3", "--max-tokens", "2"], reason);
    fail(&["quantize", model, arg(&converted)], reason);
    assert!(!converted.exists(), "nothing is written");
}
