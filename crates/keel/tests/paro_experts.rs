//! ParoQuant's experts share a rotation, and an output projection has a separate one. They are compared with the same
//! model with equivalent dense weights, whole and split.

mod common;

use std::path::Path;

use common::written::{Numbers, Tensors, f16_exact, f16s, save, set_quantization, words};
use common::{arg, copy_of, floats, relative_error, succeed};
use keel_weights::{SafetensorsFile, TensorSource};
use serde_json::json;

const GROUP: usize = 32;
const ROUNDS: usize = 3;

/// A rotation of `cols` inputs.
struct Rotation {
    scales: Vec<f32>,
    pairs: Vec<usize>,
    angles: Vec<f32>,
}

impl Rotation {
    fn new(numbers: &mut Numbers, cols: usize) -> Rotation {
        let mut pairs = Vec::new();
        for _ in 0..ROUNDS * cols / GROUP {
            let mut group: Vec<usize> = (0..GROUP).collect();
            (1..GROUP).for_each(|i| group.swap(i, numbers.below(i + 1)));
            pairs.extend(group);
        }
        let scales = (0..cols).map(|_| 1.5 + numbers.unit() / 2.0).collect();
        let scales: Vec<f32> = f16_exact(scales);
        let angles = (0..ROUNDS * cols / 2).map(|_| numbers.unit()).collect();
        Rotation { scales, pairs, angles }
    }

    /// Applies the rotation as the format defines it: scales, then rotates pair by pair, round by round.
    fn apply(&self, x: &mut [f64]) {
        let cols = x.len();
        x.iter_mut().zip(&self.scales).for_each(|(x, scale)| *x *= f64::from(*scale));
        for (i, pair) in self.pairs.chunks_exact(2).enumerate() {
            let start = i * 2 % cols / GROUP * GROUP;
            let (a, b) = (start + pair[0], start + pair[1]);
            let (sin, cos) = f64::from(self.angles[i]).sin_cos();
            (x[a], x[b]) = (x[a] * cos + x[b] * sin, x[b] * cos - x[a] * sin);
        }
    }

    fn write(&self, prefix: &str, tensors: &mut Tensors) {
        let cols = self.scales.len();
        let pairs = self.pairs.iter().flat_map(|p| (*p as i16).to_le_bytes()).collect();
        tensors.insert(format!("{prefix}channel_scales"), ("F16", vec![1, cols], f16s(&self.scales)));
        tensors.insert(format!("{prefix}theta"), ("F16", vec![ROUNDS, cols / 2], f16s(&self.angles)));
        tensors.insert(format!("{prefix}pairs"), ("I16", vec![ROUNDS, cols], pairs));
    }
}

/// Writes a 4-bit weight to `packed`, and the equivalent weight without the rotation to `dense`.
fn linear(
    numbers: &mut Numbers,
    module: &str,
    (rows, cols): (usize, usize),
    rotation: &Rotation,
    (packed, dense): (&mut Tensors, &mut Tensors),
) {
    const SHIFTS: [u32; 8] = [0, 16, 4, 20, 8, 24, 12, 28];
    let groups = cols / GROUP;
    let codes: Vec<u32> = (0..cols * rows).map(|_| numbers.below(16) as u32).collect();
    let zeros: Vec<u32> = (0..groups * rows).map(|_| numbers.below(16) as u32).collect();
    let scales = f16_exact((0..groups * rows).map(|_| 0.01 + 0.005 * numbers.unit()).collect());
    packed.insert(format!("{module}.qweight"), ("I32", vec![cols, rows / 8], words(&codes, SHIFTS)));
    packed.insert(format!("{module}.qzeros"), ("I32", vec![groups, rows / 8], words(&zeros, SHIFTS)));
    packed.insert(format!("{module}.scales"), ("F16", vec![groups, rows], f16s(&scales)));
    let mut effective = vec![0.0f32; rows * cols];
    for input in 0..cols {
        let mut x = vec![0.0; cols];
        x[input] = 1.0;
        rotation.apply(&mut x);
        for row in 0..rows {
            let weight = |k: usize| {
                let g = k / GROUP * rows + row;
                f64::from(scales[g]) * (f64::from(codes[k * rows + row]) - f64::from(zeros[g]))
            };
            effective[row * cols + input] = (0..cols).map(|k| weight(k) * x[k]).sum::<f64>() as f32;
        }
    }
    let bytes = effective.iter().flat_map(|v| v.to_le_bytes()).collect();
    dense.insert(format!("{module}.weight"), ("F32", vec![rows, cols], bytes));
}

#[test]
fn layers_with_rotations_give_what_their_dense_weights_give() {
    let (packed_folder, dense_folder) = (copy_of("qwen3_moe"), copy_of("qwen3_moe"));
    let path = packed_folder.path().join("model.safetensors");
    let file = SafetensorsFile::open(&path).expect("a fixture");
    let mut packed = Tensors::new();
    let is_rotated = |name: &str| name.contains(".experts.") || name.contains(".o_proj.");
    for name in file.names().filter(|name| !is_rotated(name)) {
        let tensor = file.tensor(name).expect("it is there");
        packed.insert(name.into(), ("BF16", tensor.shape().to_vec(), tensor.bytes().to_vec()));
    }
    let mut dense = packed.clone();
    let (mut numbers, hidden, heads, inner) = (Numbers(7), 128, 4 * 64, 64);
    for layer in 0..4 {
        let module = format!("model.layers.{layer}.self_attn.o_proj");
        let of_heads = Rotation::new(&mut numbers, heads);
        of_heads.write(&format!("{module}."), &mut packed);
        linear(&mut numbers, &module, (hidden, heads), &of_heads, (&mut packed, &mut dense));
        let prefix = format!("model.layers.{layer}.mlp.experts.");
        let (wide, narrow) = (Rotation::new(&mut numbers, hidden), Rotation::new(&mut numbers, inner));
        wide.write(&format!("{prefix}gate_up_weight_"), &mut packed);
        narrow.write(&format!("{prefix}down_weight_"), &mut packed);
        for expert in 0..8 {
            for (name, shape, rotation) in [
                ("gate_proj", (inner, hidden), &wide),
                ("up_proj", (inner, hidden), &wide),
                ("down_proj", (hidden, inner), &narrow),
            ] {
                let module = format!("{prefix}{expert}.{name}");
                linear(&mut numbers, &module, shape, rotation, (&mut packed, &mut dense));
            }
        }
    }
    drop(file);
    save(packed_folder.path(), &packed);
    save(dense_folder.path(), &dense);
    let quantization = json!({"quant_method": "paroquant", "bits": 4, "group_size": GROUP, "krot": ROUNDS});
    set_quantization(packed_folder.path(), quantization);

    let out = tempfile::tempdir().expect("a temporary folder");
    let ids: Vec<String> = (0..70).map(|i| (i * 37 % 500).to_string()).collect();
    let logits = |folder: &Path, name: &str, extra: &[&str]| {
        let file = out.path().join(name);
        let model = ["logits", "--model", arg(folder), "--ids", &ids.join(","), "--out", arg(&file)];
        succeed(&[&model[..], extra].concat());
        floats(&file, "logits")
    };
    let want = logits(dense_folder.path(), "dense", &["--compute", "f32"]);
    let split = ["--devices", "cpu:0,cpu:1", "--split", "tensor"];
    for extra in [&[][..], &["--one-by-one"], &split] {
        let got = logits(packed_folder.path(), "packed", &[&["--compute", "f32"][..], extra].concat());
        let error = relative_error(&got, &want);
        assert!(error <= 1e-4, "{extra:?}: {error:.1e}");
    }
    // In the fixed order of sums, two devices give the bits of one.
    let whole = logits(packed_folder.path(), "whole", &["--deterministic"]);
    let shares = logits(packed_folder.path(), "shares", &[&["--deterministic"][..], &split].concat());
    assert!(whole == shares, "two devices give other bits than one: {:.1e}", relative_error(&shares, &whole));
    // The fast kernels round activations to 8 bits.
    let error = relative_error(&logits(packed_folder.path(), "fast", &[]), &want);
    assert!(error <= 0.1, "fast: {error:.1e}");
    // Rotated weights cannot be converted to a form without rotations.
    let target = out.path().join("quantised.gguf");
    common::fail(&["quantize", arg(packed_folder.path()), arg(&target)], "rotated");
}
