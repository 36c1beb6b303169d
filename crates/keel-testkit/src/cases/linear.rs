//! Sizes of products with affine weights. K is a multiple of every tested group size, unless a list says otherwise.

use crate::naive::linear::Affine;
use crate::random::Random;
use half::f16;
use keel_array::DType;

/// `(T, N, K)`
pub const SHAPES: &[(usize, usize, usize)] = &[
    (1, 15, 128),
    (2, 1, 256),
    (3, 17, 384),
    (7, 16, 128),
    (8, 31, 256),
    (9, 63, 128),
    (16, 33, 640),
    (17, 65, 256),
    (64, 127, 128),
    (65, 129, 384),
    (97, 199, 128),
    (130, 64, 256),
    (161, 65, 640),
    (225, 67, 384),
    (258, 66, 128),
    (1030, 70, 384),
];

/// `(T, N, K)` for every number of bits with every size of groups: few rows and many.
pub const FOR_EACH_KIND: &[(usize, usize, usize)] = &[(17, 65, 256), (130, 64, 256)];

/// `(T, N, K)` with rows of W so long that a device may divide their columns among several blocks and add up the sums.
/// There are 41 and 21 tiles of 64 columns, which no number of parts divides evenly. K is a multiple of 64.
pub const LONG: &[(usize, usize, usize)] = &[(40, 192, 2624), (300, 130, 1344)];

/// `(T, N, K)` for fast modes: few rows and many, and the last tile of rows of W whole and not.
pub const FAST: &[(usize, usize, usize)] = &[(3, 80, 384), (17, 130, 640), (130, 96, 256)];

/// `(N, K)` of large products. In the first three, W has enough rows that a device with 100 to 200 multiprocessors
/// needs several passes. The others have long rows, and the last two as many row tiles as two to four blocks of each
/// multiprocessor. Kernels cut these in special ways.
pub const WIDE: &[(usize, usize)] =
    &[(8977, 384), (17_011, 128), (135_201, 64), (33, 8256), (4257, 8256), (6369, 4160)];

/// Bits that affine weights can have.
pub const BITS: &[usize] = &[2, 3, 4, 5, 6, 8];

/// Sizes of groups that affine weights can have.
pub const GROUPS: &[usize] = &[32, 64, 128];

/// Types that scales and biases can have.
pub const SCALES: &[DType] = &[DType::BF16, DType::F16, DType::F32];

/// Numbers of rows that must not change a row's bits.
pub const ROWS: &[usize] = &[1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 64, 130];

/// Random weights like those of a quantiser: centred, with scales and biases that bf16 holds exactly.
pub fn weights(random: &mut Random, n: usize, k: usize, bits: usize, group: usize) -> Affine {
    weights_scaled_by(random, [n, k], bits, group, DType::BF16)
}

/// As [`weights`], with scales and biases that `scale_dtype` holds exactly, and narrower types do not.
pub fn weights_scaled_by(
    random: &mut Random,
    [n, k]: [usize; 2],
    bits: usize,
    group: usize,
    scale_dtype: DType,
) -> Affine {
    let stored = |x: f32| match scale_dtype {
        DType::BF16 => f32::from_bits(x.to_bits() & 0xffff_0000),
        DType::F16 => f16::from_f32(x).to_f32(),
        _ => x,
    };
    let quants = (0..n * k).map(|_| random.below(1 << bits) as u8).collect();
    let scales: Vec<f32> = (0..n * k / group).map(|_| stored(random.uniform(0.01, 0.03))).collect();
    let half = (1 << bits) as f32 / 2.0;
    let biases = scales.iter().map(|scale| stored(-scale * half * random.uniform(0.8, 1.2))).collect();
    Affine { k, group, quants, scales, biases }
}
