//! GPTQ, 8-bit floats in blocks, and MLX's 4-bit floats: a model packed in each form gives the logits of the same
//! values in f32.

use std::fs;
use std::path::Path;

use crate::common::{all_logits, engine, exact, expected, fixture, relative_error, runtime};
use half::f16;
use keel_testkit::fixtures::safetensors::FileTensor;
use keel_testkit::fixtures::write_model;
use keel_weights::{Checkpoint, TensorSource};
use serde_json::{Value, json};

/// A way to pack a matrix. Returns its tensors, without the module's name, and the values that they stand for.
type Pack = fn(&[f32], usize, usize) -> (Vec<FileTensor>, Vec<f32>);

/// Packs eight codes into a word, lowest bits first.
fn words(codes: impl Iterator<Item = u8>) -> Vec<u8> {
    let codes: Vec<u8> = codes.collect();
    codes.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4).collect()
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |a, b| a.max(b.abs()))
}

fn gptq(values: &[f32], n: usize, k: usize) -> (Vec<FileTensor>, Vec<f32>) {
    const GROUP: usize = 64;
    let groups = k / GROUP;
    let scale =
        |row: usize, g: usize| f16::from_f32(largest(&values[row * k + g * GROUP..][..GROUP]) / 7.0).to_f32();
    let zero = |row: usize| 7 + (row % 3) as u8;
    let code = |row: usize, col: usize| {
        (values[row * k + col] / scale(row, col / GROUP) + f32::from(zero(row))).round().clamp(0.0, 15.0)
            as u8
    };
    let decoded = (0..n * k).map(|i| {
        let (row, col) = (i / k, i % k);
        scale(row, col / GROUP) * (f32::from(code(row, col)) - f32::from(zero(row)))
    });
    let lines =
        (0..k / 8).flat_map(|line| (0..n).flat_map(move |row| (0..8).map(move |i| (row, line * 8 + i))));
    let group_of: Vec<u32> = (0..k).map(|col| (col / GROUP) as u32).collect();
    let scales = (0..groups * n).map(|i| scale(i % n, i / n));
    let tensors = vec![
        FileTensor::new("qweight", "I32", &[k / 8, n], words(lines.map(|(row, col)| code(row, col)))),
        // Zero points are stored minus 1.
        FileTensor::new("qzeros", "I32", &[groups, n / 8], words((0..groups * n).map(|i| zero(i % n) - 1))),
        FileTensor::f16("scales", &[groups, n], &scales.collect::<Vec<_>>()),
        FileTensor::words("g_idx", "I32", &[k], &group_of),
    ];
    (tensors, decoded.collect())
}

/// The nearest 8-bit float that is a number: its code and its value.
fn nearest_e4m3(value: f32) -> (u8, f32) {
    // Each power of two has eight codes. Values below the least power have eight codes with that power's step.
    let exponent = (value.abs().log2().floor() as i32).clamp(-6, 8);
    let step = 2f32.powi(exponent - 3);
    let steps = (value.abs() / step).round();
    // A value that is rounded up to the next power of two gets the first code of that power.
    let code = (((exponent + 6) * 8) as f32 + steps).min(126.0) as u8;
    let magnitude = (steps * step).min(448.0);
    if value < 0.0 { (code | 0x80, -magnitude) } else { (code, magnitude) }
}

fn fp8(values: &[f32], n: usize, k: usize) -> (Vec<FileTensor>, Vec<f32>) {
    let shape = [n.div_ceil(128), k.div_ceil(128)];
    // Powers of two, so that bf16 holds the products exactly.
    let scale = |row: usize, col: usize| 2f32.powi((row / 128 + 2 * (col / 128)) as i32 - 9);
    let coded: Vec<(u8, f32)> = (0..n * k).map(|i| nearest_e4m3(values[i] / scale(i / k, i % k))).collect();
    let decoded = coded.iter().enumerate().map(|(i, (_, value))| value * scale(i / k, i % k)).collect();
    let scales: Vec<f32> =
        (0..shape[0] * shape[1]).map(|i| scale(i / shape[1] * 128, i % shape[1] * 128)).collect();
    let tensors = vec![
        FileTensor::new("weight", "F8_E4M3", &[n, k], coded.iter().map(|(code, _)| *code).collect()),
        FileTensor::f32("weight_scale_inv", &shape, &scales),
    ];
    (tensors, decoded)
}

/// Packs groups as 4-bit floats. `round` gives the byte and the value of a group's scale.
fn fp4(
    values: &[f32],
    n: usize,
    k: usize,
    group: usize,
    round: fn(f32) -> (u8, f32),
) -> (Vec<FileTensor>, Vec<f32>) {
    const LEVELS: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let scales: Vec<(u8, f32)> =
        values.chunks_exact(group).map(|values| round(largest(values) / 6.0)).collect();
    let code = |i: usize| {
        let scaled = values[i] / scales[i / group].1;
        let distance = |code: &usize| (LEVELS[*code] - scaled.abs()).abs();
        let code = (0..8).min_by(|a, b| distance(a).total_cmp(&distance(b))).expect("there are levels");
        (code, if scaled < 0.0 { -1.0 } else { 1.0 })
    };
    let decoded = (0..n * k).map(|i| LEVELS[code(i).0] * code(i).1 * scales[i / group].1).collect();
    let codes = (0..n * k).map(|i| code(i).0 as u8 | if code(i).1 < 0.0 { 8 } else { 0 });
    let tensors = vec![
        FileTensor::new("weight", "U32", &[n, k / 8], words(codes)),
        FileTensor::new("scales", "U8", &[n, k / group], scales.iter().map(|scale| scale.0).collect()),
    ];
    (tensors, decoded)
}

fn mxfp4(values: &[f32], n: usize, k: usize) -> (Vec<FileTensor>, Vec<f32>) {
    fp4(values, n, k, 32, |scale| {
        let exponent = scale.log2().ceil() as i32;
        ((exponent + 127) as u8, 2f32.powi(exponent))
    })
}

fn nvfp4(values: &[f32], n: usize, k: usize) -> (Vec<FileTensor>, Vec<f32>) {
    fp4(values, n, k, 16, nearest_e4m3)
}

/// The fixture with packed projections, and with the values that these stand for.
fn pack(source: &Checkpoint, pack: Pack) -> (Vec<FileTensor>, Vec<FileTensor>) {
    let (mut packed, mut dense) = (Vec::new(), Vec::new());
    for name in source.names() {
        let view = source.tensor(name).expect("there");
        let values = view.to_f32().expect("a float");
        let stored = |values: &[f32]| FileTensor::f32(name, view.shape(), values);
        let (Some(module), &[n, k]) = (name.strip_suffix("_proj.weight"), view.shape()) else {
            packed.push(stored(&values));
            dense.push(stored(&values));
            continue;
        };
        let (tensors, decoded) = pack(&values, n, k);
        let named = |part: FileTensor| FileTensor { name: format!("{module}_proj.{}", part.name), ..part };
        packed.extend(tensors.into_iter().map(named));
        dense.push(stored(&decoded));
    }
    (packed, dense)
}

#[test]
fn packed_weights_give_the_logits_of_what_they_stand_for() {
    let folder = fixture("llama");
    let source = Checkpoint::open(&folder).expect("the fixture opens");
    let ids = expected(&folder).ids;
    let logits = |folder: &Path| {
        let mut engine = engine(folder, &runtime(2), exact());
        all_logits(&mut engine, &ids, false, false).0
    };
    let kinds: [(&str, Pack, Value); 4] = [
        ("GPTQ", gptq, json!({"quant_method": "gptq", "bits": 4, "group_size": 64})),
        ("FP8", fp8, json!({"quant_method": "fp8", "weight_block_size": [128, 128]})),
        ("MXFP4", mxfp4, json!({"bits": 4, "group_size": 32, "mode": "mxfp4"})),
        ("NVFP4", nvfp4, json!({"bits": 4, "group_size": 16, "mode": "nvfp4"})),
    ];
    for (kind, how, quantization) in kinds {
        let scratch = tempfile::tempdir().expect("a temporary folder");
        let (packed, dense) = (scratch.path().join("packed"), scratch.path().join("dense"));
        let (packed_tensors, dense_tensors) = pack(&source, how);
        fs::create_dir(&packed).expect("the folder is writable");
        fs::create_dir(&dense).expect("the folder is writable");
        let config = source.config().to_string();
        write_model(&dense, &config, &dense_tensors, None).expect("the folder is writable");
        let mut config = source.config().clone();
        config["quantization_config"] = quantization;
        write_model(&packed, &config.to_string(), &packed_tensors, None).expect("the folder is writable");
        let error = relative_error(&logits(&packed), &logits(&dense));
        assert!(error <= 1e-5, "{kind}: logits differ by {error:.1e}");
    }
}
