//! Compares GPTQ's packing, 8-bit floats in blocks and MLX's 4-bit floats, read through the public API, with plain
//! decoders. Shapes and groups that do not fit are refused.

use std::path::Path;

use half::f16;
use keel_array::{BlockFormat, DType};
use keel_testkit::fixtures::safetensors::FileTensor;
use keel_testkit::fixtures::write_model;
use keel_weights::quantize::{Dequantized, RowSource};
use keel_weights::{Checkpoint, Fp4Mode, LinearFormat, LinearTensor, TensorSource};
use serde_json::{Value, json};

/// Name, type name in files, shape, bytes.
type Tensor = (&'static str, &'static str, Vec<usize>, Vec<u8>);

/// A checkpoint of these tensors.
fn checkpoint(folder: &Path, quantization: Value, tensors: &[Tensor]) -> Checkpoint {
    let stored = |(name, kind, shape, bytes): &Tensor| FileTensor::new(name, kind, shape, bytes.clone());
    let tensors: Vec<FileTensor> = tensors.iter().map(stored).collect();
    let config = json!({"quantization_config": quantization});
    write_model(folder, &config.to_string(), &tensors, None).unwrap();
    Checkpoint::open(folder).unwrap()
}

fn words(values: impl Iterator<Item = u32>) -> Vec<u8> {
    values.flat_map(u32::to_le_bytes).collect()
}

/// Eight four-bit values in a word, in order.
fn word(value: impl Fn(usize) -> u32) -> u32 {
    (0..8).fold(0, |word, i| word | value(i) << (4 * i))
}

const K: usize = 96;
const N: usize = 24;
const GROUP: usize = 32;

fn code(k: usize, n: usize) -> u32 {
    ((k * 7 + n * 3 + k * n) % 16) as u32
}

fn zero(group: usize, n: usize) -> u32 {
    ((group * 5 + n) % 16) as u32
}

fn scale(group: usize, n: usize) -> f32 {
    0.25 + (group * N + n) as f32 / 64.0
}

/// A GPTQ layer whose input `k` belongs to group `group_of(k)`.
fn gptq(group_of: impl Fn(usize) -> i32) -> Vec<Tensor> {
    let qweight = (0..K / 8).flat_map(|line| (0..N).map(move |n| word(|i| code(line * 8 + i, n))));
    let qzeros = (0..K / GROUP).flat_map(|g| (0..N / 8).map(move |w| word(|i| zero(g, w * 8 + i))));
    let scales =
        (0..K / GROUP).flat_map(|g| (0..N).flat_map(move |n| f16::from_f32(scale(g, n)).to_le_bytes()));
    vec![
        ("m.qweight", "I32", vec![K / 8, N], words(qweight)),
        ("m.qzeros", "I32", vec![K / GROUP, N / 8], words(qzeros)),
        ("m.scales", "F16", vec![K / GROUP, N], scales.collect()),
        ("m.g_idx", "I32", vec![K], (0..K).flat_map(|k| group_of(k).to_le_bytes()).collect()),
    ]
}

fn sorted(k: usize) -> i32 {
    (k / GROUP) as i32
}

#[test]
fn gptq_packs_inputs_and_stores_zeros_less_one() {
    for (method, key, form, offset) in [
        ("gptq", "checkpoint_format", "gptq", 1.0),
        ("gptq", "checkpoint_format", "gptq_v2", 0.0),
        ("auto-round", "packing_format", "auto_round:auto_gptq", 1.0),
        ("auto-round", "packing_format", "auto_round:gptq", 1.0),
        ("intel/auto-round", "packing_format", "", 1.0),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let config = json!({"quant_method": method, "bits": 4, "group_size": GROUP, key: form});
        let source = checkpoint(folder.path(), config, &gptq(sorted));
        let info = source.linear_info("m").unwrap();
        assert_eq!((info.experts, info.rows, info.cols), (None, N, K));
        assert_eq!(info.format, LinearFormat::Awq { group_size: GROUP });
        let mut rows = vec![0.0; 5 * K];
        source.linear("m").unwrap().rows_f32(17..22, &mut rows).unwrap();
        for (i, value) in rows.iter().enumerate() {
            let (n, k) = (17 + i / K, i % K);
            let g = k / GROUP;
            let expected = scale(g, n) * (code(k, n) as f32 - (zero(g, n) as f32 + offset));
            assert!(
                (value - expected).abs() < 1e-5,
                "{form}, output {n}, input {k}: {value}, expected {expected}"
            );
        }
    }
}

#[test]
fn groups_larger_than_kernels_have_are_several() {
    let folder = tempfile::tempdir().unwrap();
    let (k, n) = (256, 8);
    let tensors = [
        ("m.qweight", "I32", vec![k / 8, n], words((0..k / 8 * n).map(|i| i as u32))),
        ("m.qzeros", "I32", vec![1, 1], words([0x7777_7777].into_iter())),
        ("m.scales", "F16", vec![1, n], (0..n).flat_map(|n| f16::from_f32(n as f32).to_le_bytes()).collect()),
    ];
    let source = checkpoint(folder.path(), json!({"quant_method": "gptq", "bits": 4}), &tensors);
    assert_eq!(source.linear_info("m").unwrap().format, LinearFormat::Awq { group_size: 128 });
    let mut row = vec![0.0; k];
    source.linear("m").unwrap().rows_f32(3..4, &mut row).unwrap();
    for (at, value) in row.iter().enumerate() {
        let code = (at / 8 * n + 3) as u32 >> (at % 8 * 4) & 15;
        assert_eq!(*value, 3.0 * (code as f32 - 8.0));
    }
}

#[test]
fn activation_order_and_other_bits_are_refused() {
    let message = |config: Value, tensors: &[Tensor]| {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(folder.path(), config, tensors);
        let error = source.linear("m").unwrap_err().to_string();
        assert_eq!(source.linear_info("m").unwrap_err().to_string(), error, "a plan refuses it, too");
        error
    };
    let four = || json!({"quant_method": "gptq", "bits": 4});
    let swapped = gptq(|k| if k == 40 { 0 } else { sorted(k) });
    let refused = message(four(), &swapped);
    assert!(
        refused.contains("input 40 belongs to group 0, not 1") && refused.contains("desc_act"),
        "{refused}"
    );
    assert!(message(four(), &gptq(|_| -1)).contains("belongs to group -1"));
    assert!(message(json!({"quant_method": "gptq", "bits": 8}), &gptq(sorted)).contains("GPTQ with 8 bits"));
    let mut short = gptq(sorted);
    short[3].2 = vec![K - 1];
    short[3].3.truncate(4 * (K - 1));
    assert!(message(four(), &short).contains("g_idx"), "{}", message(four(), &short));
    let mut wrong = gptq(sorted);
    wrong[0].2 = vec![N, K / 8];
    assert!(message(four(), &wrong).contains("nor GPTQ's"), "{}", message(four(), &wrong));

    // A method may store zeros and codes in another order.
    for (config, method) in [
        (json!({"quant_method": "unheard-of", "bits": 4}), "(quant_method 'unheard-of')"),
        (
            json!({"quant_method": "auto-round", "packing_format": "auto_round:other", "bits": 4}),
            "(quant_method 'auto-round', packing_format 'auto_round:other')",
        ),
    ] {
        let refused = message(config, &gptq(sorted));
        assert!(refused.contains("'m.qweight' is stored as i32 ") && refused.contains(method), "{refused}");
    }
}

/// Threads share the rows of a block.
#[test]
fn rows_of_a_block_are_those_read_one_by_one() {
    let (n, k) = (700, 128);
    let codes: Vec<u8> = (0..n * k).map(finite).collect();
    let scales = (0..6).flat_map(|i| (0.5 + i as f32).to_le_bytes()).collect();
    let fp8: [Tensor; 2] = [
        ("m.weight", "F8_E4M3", vec![n, k], codes.clone()),
        ("m.weight_scale_inv", "F32", vec![6, 1], scales),
    ];
    let nvfp4: [Tensor; 2] = [
        ("m.weight", "U32", vec![n, k / 8], codes[..n * k / 2].to_vec()),
        ("m.scales", "U8", vec![n, k / 16], codes[..n * k / 16].to_vec()),
    ];
    let gptq = gptq(sorted);
    for (config, tensors, rows) in [
        (json!({"quant_method": "fp8"}), &fp8[..], 1..n),
        (json!({"mode": "nvfp4"}), &nvfp4[..], 1..n),
        (json!({"quant_method": "gptq"}), &gptq[..], 3..N - 1),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(folder.path(), config, tensors);
        let linear = source.linear("m").unwrap();
        let cols = linear.info().cols;
        let mut block = vec![0.0; rows.len() * cols];
        linear.rows_f32(rows.clone(), &mut block).unwrap();
        let mut row = vec![0.0; cols];
        for (at, expected) in rows.zip(block.chunks_exact(cols)) {
            linear.rows_f32(at..at + 1, &mut row).unwrap();
            assert!(row == expected, "{:?}, row {at}", linear.info());
        }
    }
}

/// The value of an 8-bit float, from its definition.
fn e4m3(code: u8) -> f32 {
    let sign = if code >> 7 == 1 { -1.0 } else { 1.0 };
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
    sign * if exponent == 0 { mantissa * 2f32.powi(-6) } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) }
}

/// Codes that are numbers.
fn finite(i: usize) -> u8 {
    let code = (i * 37 % 251) as u8;
    if code & 0x7f == 0x7f { 0 } else { code }
}

#[test]
fn eight_bit_floats_have_a_scale_for_each_block() {
    let (n, k) = (130, 257);
    let scale = |row: usize, col: usize| 0.5 + row as f32 + 4.0 * col as f32;
    let scales = (0..2).flat_map(|r| (0..3).flat_map(move |c| scale(r, c).to_le_bytes()));
    let tensors = [
        ("m.weight", "F8_E4M3", vec![n, k], (0..n * k).map(finite).collect()),
        ("m.weight_scale_inv", "F32", vec![2, 3], scales.collect()),
    ];
    let folder = tempfile::tempdir().unwrap();
    let config = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    let source = checkpoint(folder.path(), config.clone(), &tensors);
    let info = source.linear_info("m").unwrap();
    assert_eq!((info.rows, info.cols, info.format), (n, k, LinearFormat::Fp8));
    let mut rows = vec![0.0; 4 * k];
    source.linear("m").unwrap().rows_f32(126..130, &mut rows).unwrap();
    for (i, value) in rows.iter().enumerate() {
        let (row, col) = (126 + i / k, i % k);
        assert_eq!(
            *value,
            e4m3(finite(row * k + col)) * scale(row / 128, col / 128),
            "row {row}, column {col}"
        );
    }
    assert!(source.linear("m").unwrap().rows_f32(127..131, &mut rows).is_err());

    // One scale for all.
    for shape in [vec![], vec![1], vec![1, 1]] {
        let mut whole = tensors.clone();
        (whole[1].1, whole[1].2, whole[1].3) =
            ("BF16", shape, half::bf16::from_f32(0.25).to_le_bytes().to_vec());
        let folder = tempfile::tempdir().unwrap();
        let config = json!({"quant_method": "fp8", "weight_block_size": null, "activation_scheme": "static"});
        checkpoint(folder.path(), config, &whole).linear("m").unwrap().rows_f32(126..130, &mut rows).unwrap();
        for (i, value) in rows.iter().enumerate() {
            assert_eq!(*value, e4m3(finite(126 * k + i)) * 0.25, "{i}");
        }
    }

    for (part, shape) in [(1, vec![2, 2]), (1, vec![6]), (0, vec![n * k]), (0, vec![1, n, k])] {
        let mut wrong = tensors.clone();
        let keep =
            shape.iter().product::<usize>() * wrong[part].3.len() / wrong[part].2.iter().product::<usize>();
        wrong[part].2 = shape;
        wrong[part].3.truncate(keep);
        let folder = tempfile::tempdir().unwrap();
        let message =
            checkpoint(folder.path(), config.clone(), &wrong).linear_info("m").unwrap_err().to_string();
        assert!(message.starts_with("module 'm': "), "{message}");
    }
    let mut wider = tensors;
    (wider[0].1, wider[0].2) = ("F8_E5M2", vec![n, k]);
    let folder = tempfile::tempdir().unwrap();
    let message = checkpoint(folder.path(), config, &wider).linear_info("m").unwrap_err().to_string();
    assert!(message.contains("F8_E5M2"), "{message}");
}

/// Ministral 3 has both kinds of scales next to a weight. compressed-tensors has a scale for each row.
#[test]
fn scales_of_activations_are_no_weights() {
    let floats = |values: &[f32]| words(values.iter().map(|x| x.to_bits()));
    for (name, shape, scales) in [
        ("m.weight_scale_inv", vec![], &[0.5][..]),
        ("m.weight_scale", vec![1], &[0.5]),
        ("m.weight_scale", vec![2, 1], &[0.25, 0.5]),
    ] {
        let tensors = [
            ("m.activation_scale", "F32", vec![], floats(&[0.5])),
            ("m.input_scale", "F32", vec![], floats(&[0.5])),
            ("m.weight", "F8_E4M3", vec![2, 3], vec![0x38; 6]),
            (name, "F32", shape, floats(scales)),
        ];
        let folder = tempfile::tempdir().unwrap();
        let config = json!({"quant_method": "fp8", "activation_scheme": "static"});
        let source = checkpoint(folder.path(), config, &tensors);
        assert_eq!(source.linear_info("m").unwrap().format, LinearFormat::Fp8);
        let dense = Dequantized::new(&source).unwrap();
        let specs = dense.tensors().unwrap();
        assert_eq!(specs.iter().map(|spec| spec.name.as_str()).collect::<Vec<_>>(), ["m.weight"]);
        let mut row = [0.0; 3];
        dense.rows_f32("m.weight", 1..2, &mut row).unwrap();
        assert_eq!(row, [0.5; 3], "{name}");
        // Released rows can be read again.
        dense.release_rows("m.weight", 0..1);
        dense.release_rows("m.weight", 1..2);
        dense.rows_f32("m.weight", 0..1, &mut row).unwrap();
        assert_eq!(row, [scales[0]; 3], "{name}");
    }
}

#[test]
fn four_bit_floats_are_those_of_mlx() {
    const LEVELS: [f32; 16] =
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    let (experts, n, k) = (2, 3, 64);
    let code = |i: usize| (i * 5 + i / 16) % 16;
    for (mode, known, group) in [("mxfp4", Fp4Mode::Mxfp4, 32), ("nvfp4", Fp4Mode::Nvfp4, 16)] {
        let groups = k / group;
        let scale = |i: usize| if known == Fp4Mode::Mxfp4 { 120 + i as u8 } else { finite(i + 9) };
        let weight = words((0..experts * n * k / 8).map(|w| word(|i| code(w * 8 + i) as u32)));
        let tensors = [
            ("m.weight", "U32", vec![experts, n, k / 8], weight),
            ("m.scales", "U8", vec![experts, n, groups], (0..experts * n * groups).map(scale).collect()),
        ];
        let folder = tempfile::tempdir().unwrap();
        let config = json!({"bits": 4, "group_size": group, "mode": mode});
        let source = checkpoint(folder.path(), config.clone(), &tensors);
        let info = source.linear_info("m").unwrap();
        assert_eq!(
            (info.experts, info.rows, info.cols, info.format),
            (Some(experts), n, k, LinearFormat::Fp4(known))
        );
        let linear = source.linear("m").unwrap();
        let mut rows = vec![0.0; 3 * k];
        linear.rows_f32(2..5, &mut rows).unwrap();
        for (i, value) in rows.iter().enumerate() {
            let at = 2 * k + i;
            let scale = match known {
                Fp4Mode::Mxfp4 => 2f32.powi(i32::from(scale(at / group)) - 127),
                _ => e4m3(scale(at / group)),
            };
            assert_eq!(*value, LEVELS[code(at)] * scale, "{mode}, value {at}");
        }
        if known == Fp4Mode::Mxfp4 {
            let LinearTensor::Fp4(fp4) = linear else { panic!("{linear:?}") };
            let mut again = vec![0.0; 3 * k];
            BlockFormat::MXFP4.decode(&fp4.rows_blocks(2..5).unwrap(), &mut again);
            assert_eq!(again, rows);
        }
        let mut wrong = tensors.clone();
        wrong[1].2 = vec![experts, n * groups, 1];
        let folder = tempfile::tempdir().unwrap();
        let message = checkpoint(folder.path(), config, &wrong).linear_info("m").unwrap_err().to_string();
        assert!(message.contains("are not u32") && message.contains("module 'm'"), "{message}");
    }
}

#[test]
fn types_of_the_parts_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let tensors: [Tensor; 2] =
        [("m.weight", "U32", vec![2, 8], vec![0; 64]), ("m.scales", "F32", vec![2, 2], vec![0; 16])];
    let source = checkpoint(folder.path(), json!({"bits": 4, "group_size": 32, "mode": "mxfp4"}), &tensors);
    let message = source.linear_info("m").unwrap_err().to_string();
    assert!(message.contains("scales f32 [2, 2]"), "{message}");
    assert_eq!(source.tensor("m.scales").unwrap().dtype(), DType::F32);
}

/// Forms that other programs publish, with the tensors and configs of their checkpoints.
#[test]
fn forms_that_are_not_read_are_named_with_a_remedy() {
    let packed: Vec<Tensor> = vec![
        ("m.weight_packed", "I32", vec![16, 4], vec![0; 4 * 64]),
        ("m.weight_scale", "BF16", vec![16, 1], vec![0; 32]),
        ("m.weight_shape", "I64", vec![2], vec![0; 16]),
    ];
    let channels: Vec<Tensor> = vec![
        ("m.weight", "F8_E5M2", vec![16, 32], vec![0; 16 * 32]),
        ("m.weight_scale", "F32", vec![16, 1], vec![0; 64]),
    ];
    let nf4: Vec<Tensor> = vec![
        ("m.weight", "U8", vec![256, 1], vec![0; 256]),
        ("m.weight.absmax", "U8", vec![8], vec![0; 8]),
        ("m.weight.quant_map", "F32", vec![16], vec![0; 64]),
    ];
    let aqlm: Vec<Tensor> = vec![
        ("m.codebooks", "F16", vec![1, 16, 1, 8], vec![0; 256]),
        ("m.codes", "I8", vec![16, 4, 1], vec![0; 64]),
        ("m.scales", "F16", vec![16, 1, 1, 1], vec![0; 32]),
    ];
    let hqq: Vec<Tensor> =
        vec![("m.W_q", "U8", vec![16, 16], vec![0; 256]), ("m.zero", "F16", vec![16], vec![0; 32])];
    let pack = json!({"quant_method": "compressed-tensors", "format": "pack-quantized"});
    let float = json!({"quant_method": "compressed-tensors", "format": "float-quantized"});
    let in_words = "quant_method 'compressed-tensors', format";
    let cases = [
        (pack, &packed, format!("'m.weight_packed' is stored as i32 ({in_words} 'pack-quantized')")),
        (Value::Null, &packed, "'m.weight_packed' is stored as i32 (compressed-tensors)".into()),
        (float, &channels, format!("'m.weight' is stored as F8_E5M2 ({in_words} 'float-quantized')")),
        (Value::Null, &channels, "'m.weight' is stored as F8_E5M2 (8 or 4 bits with weight_scale)".into()),
        (
            json!({"quant_method": "bitsandbytes", "load_in_4bit": true}),
            &nf4,
            "'m.weight' is stored as u8 (quant_method 'bitsandbytes')".into(),
        ),
        (Value::Null, &nf4, "'m.weight' is stored as u8 (bitsandbytes)".into()),
        (json!({"quant_method": "aqlm"}), &aqlm, "stored as f16 (quant_method 'aqlm')".into()),
        (Value::Null, &hqq, "'m.W_q' is stored as u8 (HQQ)".into()),
        // Another form of the method is read, so the method's name alone does not say which form is not.
        (
            json!({"quant_method": "fp8"}),
            &channels,
            "'m.weight' is stored as F8_E5M2 (quant_method 'fp8', 8 or 4 bits with weight_scale)".into(),
        ),
    ];
    for (config, tensors, expected) in cases {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(folder.path(), config, tensors);
        // A conversion refuses them, too: it would copy the parts as they are.
        let errors =
            [source.linear_info("m").err(), source.linear("m").err(), Dequantized::new(&source).err()];
        for error in errors {
            let message = error.expect("it is not read").to_string();
            assert!(message.contains(", which keel does not read; read are bf16"), "{message}");
            assert!(message.contains("keel quantize") && message.contains("Q4_K_M"), "{message}");
        }
        let message = source.linear_info("m").unwrap_err().to_string();
        assert!(message.contains(&expected), "{message}");
    }
}

#[test]
fn a_missing_weight_is_explained_by_its_own_form_alone() {
    // Experts are looked for as a stack.
    let experts: [Tensor; 2] = [
        ("mlp.experts.0.up_proj.weight_packed", "I32", vec![16, 4], vec![0; 4 * 64]),
        ("mlp.gate.weight", "F32", vec![2, 2], vec![0; 16]),
    ];
    let folder = tempfile::tempdir().unwrap();
    let pack = json!({"quant_method": "compressed-tensors", "format": "pack-quantized"});
    let source = checkpoint(folder.path(), pack, &experts);
    let message = source.linear_info("mlp.experts.gate_up_proj").unwrap_err().to_string();
    assert!(message.contains("'mlp.experts.0.up_proj.weight_packed' is stored as i32"), "{message}");
    let message = source.linear_info("attn.q_proj").unwrap_err().to_string();
    assert!(message.contains("tensor 'attn.q_proj.weight' is not in"), "{message}");

    // A missing weight of a method that is read is not explained by another parameter of the module.
    let router: [Tensor; 1] = [("mlp.gate.e_score_correction_bias", "F32", vec![2], vec![0; 8])];
    for method in ["gptq", "awq", "fp8", "paroquant"] {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(folder.path(), json!({"quant_method": method}), &router);
        let message = source.linear_info("mlp.gate").unwrap_err().to_string();
        assert!(message.contains("tensor 'mlp.gate.weight' is not in"), "{method}: {message}");
    }
}
