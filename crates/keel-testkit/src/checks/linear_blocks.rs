//! Products with weights in the blocks of GGUF files.

use super::linear::{PARTS, floats};
use super::nearest::{expect_nearest, typical_sum};
use super::share::is_mine;
use super::{download, expect_within, rounded, upload};
use crate::naive::linear::gather_stack;
use crate::naive::matmul::matmul_transposed;
use crate::naive::tensor::Tensor;
use crate::random::Random;
use crate::tolerance;
use half::f16;
use keel_array::{
    Array, BlockFormat, Compute, DType, RowBlock, RowData, Runtime, Weight, WeightFormat, WeightSpec,
};
use std::ops::Range;

/// Columns of most weights: three superblocks, or 24 short blocks.
const K: usize = 768;

/// Random blocks with scales in a range.
pub(super) fn blocks(random: &mut Random, format: BlockFormat, count: usize, scales: Range<f32>) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..count * format.bytes()).map(|_| random.below(256) as u8).collect();
    for block in bytes.chunks_exact_mut(format.bytes()) {
        for at in format.scale_offsets() {
            let scale = f16::from_f32(random.uniform(scales.start, scales.end)).to_le_bytes();
            block[*at..at + 2].copy_from_slice(&scale);
        }
        if format == BlockFormat::MXFP4 {
            block[0] = 120 + (block[0] & 7);
        }
    }
    bytes
}

/// The values of blocks.
pub(super) fn decoded(format: BlockFormat, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / format.bytes() * format.values()];
    format.decode(bytes, &mut values);
    values
}

/// A weight of these blocks.
pub(super) fn weight_of_blocks(
    runtime: &Runtime,
    format: BlockFormat,
    bytes: &[u8],
    [experts, rows, cols]: [usize; 3],
    compute: Compute,
) -> Weight {
    let spec = WeightSpec { experts, rows, cols, format: WeightFormat::Blocks(format), compute };
    let weight = Weight::allocate(runtime, spec).expect("there is memory for a case");
    for (expert, bytes) in bytes.chunks_exact(bytes.len() / experts).enumerate() {
        let data = RowData::Blocks(bytes);
        weight.fill(&RowBlock { expert, first_row: 0, rows, data }).expect("whole rows");
    }
    weight
}

/// A weight of random blocks with scales near 0.1, its decoded values, and its columns.
pub(super) fn block_weight(
    runtime: &Runtime,
    random: &mut Random,
    format: BlockFormat,
    [experts, rows, blocks_of_row]: [usize; 3],
    compute: Compute,
) -> (Weight, Vec<f32>, usize) {
    let cols = blocks_of_row * format.values();
    let bytes = blocks(random, format, experts * rows * blocks_of_row, 0.01..0.1);
    let weight = weight_of_blocks(runtime, format, &bytes, [experts, rows, cols], compute);
    (weight, decoded(format, &bytes), cols)
}

/// Sizes of the groups in which backends may round activations to 8 bits: 32 columns, or those that share a scale.
fn groups(format: BlockFormat) -> &'static [usize] {
    match format {
        BlockFormat::Q2K | BlockFormat::Q3K | BlockFormat::Q6K => &[16, 32],
        _ => &[32],
    }
}

fn limit(compute: Compute) -> f64 {
    match compute {
        Compute::F32 => tolerance::F32,
        Compute::Bf16 => tolerance::BF16_ACTIVATIONS,
        _ => tolerance::INT8_ACTIVATIONS,
    }
}

pub(super) fn in_blocks<const PART: usize>(runtime: &Runtime) {
    let mut random = Random::new(59);
    let formats = BlockFormat::ALL.into_iter().skip(PART).step_by(PARTS);
    for format in formats.filter(|format| is_mine(&("blocks", format))) {
        for (t, n) in [(1, 33), (3, 31), (17, 64), (65, 15)] {
            for compute in [Compute::F32, Compute::Auto, Compute::Bf16] {
                product(runtime, &mut random, format, [t, n, K], compute);
            }
        }
        // Few rows with enough rows of W for tensor cores: the kernels of decoding.
        for (t, n) in [(1, 80), (5, 130), (16, 96)] {
            product(runtime, &mut random, format, [t, n, K], Compute::Auto);
        }
        // Rows one by one, and so many that a backend may sort them by expert.
        for (t, n, compute) in [(5, 33, Compute::F32), (5, 80, Compute::Auto), (70, 80, Compute::Auto)] {
            gathered(runtime, &mut random, format, [t, n], compute);
        }
        let (weight, w, k) =
            block_weight(runtime, &mut random, format, [1, 7, K / format.values()], Compute::Auto);
        let ids = Array::from_slice(runtime, &[6u32, 0, 3], [3]).expect("memory");
        let want: Vec<f64> =
            [6, 0, 3].iter().flat_map(|id| &w[id * k..][..k]).map(|x| f64::from(*x)).collect();
        assert_eq!(download(&ids.embedding(&weight).expect("ids")), want, "embedding in {format}");
    }
}

/// More rows than a backend may decode W for more than once: it then writes all of W in 16 bits first.
pub(super) fn many_rows_in_blocks(runtime: &Runtime) {
    let mut random = Random::new(69);
    let formats = [BlockFormat::Q4K, BlockFormat::Q6K, BlockFormat::Q8_0].into_iter();
    for format in formats.filter(|format| is_mine(&("many rows in blocks", format))) {
        product(runtime, &mut random, format, [1030, 80, 512], Compute::Auto);
    }
}

fn product(
    runtime: &Runtime,
    random: &mut Random,
    format: BlockFormat,
    [t, n, k]: [usize; 3],
    compute: Compute,
) {
    let (weight, w, k) = block_weight(runtime, random, format, [1, n, k / format.values()], compute);
    let x = rounded(&Tensor::random(random, &[t, k], -1.0, 1.0), DType::F32);
    let y = upload(runtime, &x, DType::F32).linear(&weight).expect("extents fit");
    let what = format!("linear [{t}, {n}, {k}] in {format}, {compute:?}");
    let (x, multiplied) = (floats(&x), |x: &[f32]| matmul_transposed(x, &w, k));
    expect_within(&what, &y, &multiplied(&x), limit(compute));
    if compute == Compute::Auto {
        expect_nearest(&what, &y, &x, groups(format), typical_sum(&x, &w, k), multiplied);
    }
}

fn gathered(
    runtime: &Runtime,
    random: &mut Random,
    format: BlockFormat,
    [t, n]: [usize; 2],
    compute: Compute,
) {
    const EXPERTS: usize = 3;
    const CHOICES: usize = 2;
    let (weight, w, k) = block_weight(runtime, random, format, [EXPERTS, n, K / format.values()], compute);
    let x = rounded(&Tensor::random(random, &[t, k], -1.0, 1.0), DType::F32);
    let choice: Vec<u32> = (0..t * CHOICES).map(|_| random.below(EXPERTS) as u32).collect();
    let chosen = Array::from_slice(runtime, &choice, [t, CHOICES]).expect("memory");
    let y = upload(runtime, &x, DType::F32).gather_linear(&weight, &chosen).expect("extents fit");
    let what = format!("gather_linear [{t}, {CHOICES}, {n}, {k}] in {format}, {compute:?}");
    assert_eq!(y.shape()[..], [t, CHOICES, n], "{what}: shape");
    let (x, multiplied) = (floats(&x), |x: &[f32]| gather_stack(x, &w, [EXPERTS, k], &choice));
    expect_within(&what, &y, &multiplied(&x), limit(compute));
    if compute == Compute::Auto {
        expect_nearest(&what, &y, &x, groups(format), typical_sum(&x, &w, k), multiplied);
    }
}
