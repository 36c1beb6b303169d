//! AWQ's packing and ParoQuant's rotations, read through the public API.

use std::collections::BTreeMap;

use half::f16;
use keel_array::DType;
use keel_weights::{
    LinearFormat, LinearTensor, SafetensorsFile, SafetensorsWriter, TensorSource, TensorSpec,
};

const K: usize = 64;
const N: usize = 16;
const GROUP: usize = 32;

fn code(k: usize, n: usize) -> u32 {
    ((k * 7 + n * 3) % 16) as u32
}

fn zero(group: usize, n: usize) -> u32 {
    ((group * 5 + n) % 16) as u32
}

/// `rows` rows of N outputs, eight in a word.
fn packed(rows: usize, value: impl Fn(usize, usize) -> u32) -> Vec<u8> {
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let word = |row: usize, word: usize| {
        (0..8).fold(0u32, |packed, i| packed | value(row, 8 * word + ORDER[i]) << (4 * i))
    };
    (0..rows)
        .flat_map(|row| (0..N / 8).map(move |w| (row, w)))
        .flat_map(|(r, w)| word(r, w).to_le_bytes())
        .collect()
}

fn halves(count: usize, value: impl Fn(usize) -> f32) -> Vec<u8> {
    (0..count).flat_map(|i| f16::from_f32(value(i)).to_le_bytes()).collect()
}

/// A file with one layer. `shape_of_zeros` may be wrong.
fn file(shape_of_zeros: [usize; 2]) -> (tempfile::TempDir, SafetensorsFile) {
    let tensors = [
        ("m.qweight", DType::I32, vec![K, N / 8], packed(K, code)),
        ("m.qzeros", DType::I32, shape_of_zeros.to_vec(), packed(K / GROUP, zero)),
        ("m.scales", DType::F16, vec![K / GROUP, N], halves(K / GROUP * N, |i| 0.25 + i as f32 / 64.0)),
        ("m.theta", DType::F16, vec![3, K / 2], halves(3 * K / 2, |i| i as f32 / 32.0)),
        ("m.channel_scales", DType::F16, vec![1, K], halves(K, |i| 1.0 + i as f32 / 64.0)),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let spec = |t: &(&str, DType, Vec<usize>, Vec<u8>)| TensorSpec {
        name: t.0.into(),
        dtype: t.1,
        shape: t.2.clone(),
    };
    let specs: Vec<TensorSpec> = tensors.iter().map(spec).collect();
    let mut writer = SafetensorsWriter::create(&path, &specs, &BTreeMap::new()).unwrap();
    for (name, _, _, bytes) in &tensors {
        writer.append(name, bytes).unwrap();
    }
    writer.finish().unwrap();
    let file = SafetensorsFile::open(&path).unwrap();
    (folder, file)
}

#[test]
fn eight_outputs_of_a_word_come_out_in_their_order() {
    let (_folder, file) = file([K / GROUP, N / 8]);
    let info = file.linear_info("m").unwrap();
    assert_eq!((info.experts, info.rows, info.cols), (None, N, K));
    assert_eq!(info.format, LinearFormat::Awq { group_size: GROUP });
    let linear = file.linear("m").unwrap();
    assert!(matches!(linear, LinearTensor::Awq(_)));
    let mut rows = vec![0.0; 3 * K];
    linear.rows_f32(5..8, &mut rows).unwrap();
    for (i, value) in rows.iter().enumerate() {
        let (n, k) = (5 + i / K, i % K);
        let scale = 0.25 + (k / GROUP * N + n) as f32 / 64.0;
        let expected = scale * (code(k, n) as f32 - zero(k / GROUP, n) as f32);
        assert!((value - expected).abs() < 1e-5, "output {n}, input {k}: {value}, expected {expected}");
    }
    assert!(linear.rows_f32(15..18, &mut rows).is_err());
}

#[test]
fn what_does_not_fit_is_refused_with_its_shapes() {
    let (_folder, wrong) = file([N / 8, K / GROUP]);
    assert!(wrong.linear_info("m").is_ok(), "the two shapes are the same here");
    let (_folder, wrong) = file([1, K / GROUP * N / 8]);
    let message = wrong.linear_info("m").unwrap_err().to_string();
    assert!(message.contains("qzeros i32 [1, 4]") && message.contains("module 'm'"), "{message}");
    let (_folder, missing) = file([K / GROUP, N / 8]);
    let message = missing.rotation("m.", "m").unwrap_err().to_string();
    assert!(message.contains("m.pairs"), "a rotation without pairs: {message}");
    assert_eq!(missing.rotation("n.", "n").unwrap(), None);
}
