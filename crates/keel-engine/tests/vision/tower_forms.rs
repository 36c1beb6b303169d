//! A vision tower in other forms of safetensors files: MLX's names, order of axes and packed groups, and 8-bit floats
//! in blocks. The features are those of a file with the same values in f32.

use std::path::Path;

use crate::common::looking::{outcome, seeing};
use crate::common::{relative_error, runtime};
use keel_engine::Engine;
use keel_models::loading::CheckpointParameters;
use keel_testkit::fixtures::safetensors::FileTensor;
use keel_testkit::fixtures::{seeing_fixture, write_model};
use keel_weights::{Checkpoint, LinearFormat, TensorSource};
use serde_json::json;

const ERROR_MAX: f64 = 2e-5;

/// Columns of an affine group, and columns and rows of a block of 8-bit floats.
const GROUP: usize = 64;
const BLOCK: usize = 128;

/// A matrix in a packed form, and the same values in f32.
struct Packed {
    parts: Vec<FileTensor>,
    values: Vec<f32>,
}

/// A code for each element, which depends on its place.
fn code(i: usize) -> u8 {
    ((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// MLX's 8 bits in groups.
fn affine(module: &str, rows: usize, cols: usize) -> Packed {
    let groups = cols / GROUP;
    let scales: Vec<f32> = (0..rows * groups).map(|i| 2e-4 * (1 + i % 5) as f32).collect();
    let biases: Vec<f32> = scales.iter().map(|scale| -128.0 * scale).collect();
    let value = |i: usize| scales[i / GROUP] * f32::from(code(i)) + biases[i / GROUP];
    let codes = (0..rows * cols).map(code).collect();
    let parts = vec![
        FileTensor::new(&format!("{module}.weight"), "U32", &[rows, cols / 4], codes),
        FileTensor::f32(&format!("{module}.scales"), &[rows, groups], &scales),
        FileTensor::f32(&format!("{module}.biases"), &[rows, groups], &biases),
    ];
    Packed { parts, values: (0..rows * cols).map(value).collect() }
}

/// 8-bit floats from 0 to 1 less an eighth: of each sign the codes 0x30 to 0x37 are 0.5 to 0.9375.
fn float8(module: &str, rows: usize, cols: usize) -> Packed {
    let (down, across) = (rows.div_ceil(BLOCK), cols.div_ceil(BLOCK));
    // Powers of two, so that bf16 holds the products exactly.
    let scales: Vec<f32> = (0..down * across).map(|i| 2f32.powi(-4 - (i % 3) as i32)).collect();
    let stored = |i: usize| 0x30 | code(i) & 0x87;
    let value = |i: usize| {
        let magnitude = 0.5 + f32::from(stored(i) & 7) / 16.0;
        let scale = scales[i / cols / BLOCK * across + i % cols / BLOCK];
        if stored(i) < 0x80 { magnitude * scale } else { -magnitude * scale }
    };
    let codes = (0..rows * cols).map(stored).collect();
    let parts = vec![
        FileTensor::new(&format!("{module}.weight"), "F8_E4M3", &[rows, cols], codes),
        FileTensor::f32(&format!("{module}.weight_scale_inv"), &[down, across], &scales),
    ];
    Packed { parts, values: (0..rows * cols).map(value).collect() }
}

/// A tensor's name in MLX's files of models with vision.
fn name_in_mlx(name: &str) -> String {
    match name.strip_prefix("model.visual.") {
        Some(rest) => format!("vision_tower.{rest}"),
        None => format!("language_model.{name}"),
    }
}

/// The patch layer with its channels last.
fn channels_last(shape: &[usize], values: &[f32]) -> (Vec<usize>, Vec<f32>) {
    let &[rows, channels, frames, y, x] = shape else { panic!("{shape:?}") };
    let places = frames * y * x;
    let at = |i: usize| {
        i / (places * channels) * places * channels + i % channels * places + i / channels % places
    };
    (vec![rows, frames, y, x, channels], (0..values.len()).map(|i| values[at(i)]).collect())
}

/// Writes the model once with the tower's matrices `pack`ed, and once with the same values in f32. Returns the number
/// of packed matrices.
fn write_both(
    [packed, dense]: [&Path; 2],
    is_mlx: bool,
    pack: impl Fn(&str, usize, usize) -> Option<Packed>,
) -> usize {
    let source = Checkpoint::open(&seeing_fixture("seeing_qwen3_vl")).expect("opens");
    let (mut as_packed, mut as_dense, mut count) = (Vec::new(), Vec::new(), 0);
    for name in source.names() {
        let (shape, values) = {
            let tensor = source.tensor(name).expect("there");
            (tensor.shape().to_vec(), tensor.to_f32().expect("floats"))
        };
        let own = if is_mlx { name_in_mlx(name) } else { name.into() };
        let module =
            own.strip_suffix(".weight").filter(|own| own.contains("linear_fc") || own.contains("attn."));
        let found = match (module, &shape[..]) {
            (Some(module), &[rows, cols]) if name.contains("visual") => pack(module, rows, cols),
            _ => None,
        };
        let Some(Packed { parts, values }) = found else {
            let (stored, own_values) = match is_mlx && shape.len() == 5 {
                true => channels_last(&shape, &values),
                false => (shape.clone(), values.clone()),
            };
            as_packed.push(FileTensor::f32(&own, &stored, &own_values));
            as_dense.push(FileTensor::f32(name, &shape, &values));
            continue;
        };
        count += 1;
        as_packed.extend(parts);
        as_dense.push(FileTensor::f32(name, &shape, &values));
    }
    let mut config = source.config().clone();
    write_model(dense, &config.to_string(), &as_dense, None).expect("writable");
    if is_mlx {
        config["quantization"] = json!({"group_size": GROUP, "bits": 8});
    }
    write_model(packed, &config.to_string(), &as_packed, None).expect("writable");
    count
}

fn look(folder: &Path) -> (Vec<f32>, Vec<f32>) {
    let source = Checkpoint::open(folder).expect("opens");
    let parameters = CheckpointParameters(&source);
    let mut engine =
        Engine::load(&runtime(2), &parameters, source.config(), seeing(), &|_| ()).expect("it loads");
    let (features, logits) = outcome(&mut engine);
    (features.levels.concat(), logits)
}

#[test]
fn towers_of_mlx_and_of_8_bit_floats_see_what_their_values_see() {
    for is_mlx in [true, false] {
        let folders = [(); 2].map(|()| tempfile::tempdir().expect("a temporary folder"));
        let paths = folders.each_ref().map(tempfile::TempDir::path);
        let count = write_both(paths, is_mlx, |module, rows, cols| match is_mlx {
            // As MLX does, rows that are no whole groups stay dense.
            true => cols.is_multiple_of(GROUP).then(|| affine(module, rows, cols)),
            false => Some(float8(module, rows, cols)),
        });
        // The mergers' matrices; and 4 of each of the 4 blocks.
        assert_eq!(count, if is_mlx { 6 } else { 6 + 16 });
        let [packed, dense] = paths.map(look);
        let tower = Checkpoint::open(paths[0]).expect("opens");
        let root = if is_mlx { "vision_tower" } else { "model.visual" };
        let format = tower.linear_info(&format!("{root}.merger.linear_fc1")).expect("there").format;
        match is_mlx {
            true => assert!(matches!(format, LinearFormat::Affine { .. })),
            false => assert_eq!(format, LinearFormat::Fp8),
        }
        assert!(dense.0.iter().any(|x| x.abs() > 1e-3));
        let errors = [relative_error(&packed.0, &dense.0), relative_error(&packed.1, &dense.1)];
        assert!(errors.iter().all(|error| *error <= ERROR_MAX), "MLX {is_mlx}: {errors:?}");
    }
}
