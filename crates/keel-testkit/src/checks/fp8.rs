//! Products in 8-bit floats.

use super::linear::{affine_weight, floats, takes};
use super::linear_blocks::{blocks, decoded, weight_of_blocks};
use super::nearest::typical_sum;
use super::sequence::{batch, draw, up};
use super::share::is_mine;
use super::{download, rounded};
use crate::cases::linear::weights;
use crate::compare::largest_distance;
use crate::naive::activation;
use crate::naive::linear::{Affine, e4m3_below, e4m3_rows, e4m3_weights, linear};
use crate::naive::matmul::matmul_transposed;
use crate::naive::rms_norm::rms_norm;
use crate::naive::tensor::Tensor;
use crate::random::Random;
use crate::tolerance;
use keel_array::{
    Array, AttentionSpec, BlockFormat, Category, Compute, DType, KvFormat, KvPool, Regime, Runtime,
};
use std::ops::Range;

/// The kinds of arithmetic that may round to 8 bits, as far as a backend has them.
fn computes(runtime: &Runtime) -> Vec<Compute> {
    [Compute::PrefillFp8, Compute::Fp8].into_iter().filter(|&compute| takes(runtime, compute)).collect()
}

/// Rows of x, rows of W and columns. 300 rows are beyond the kernels of few rows; 257 by 80 by 192 has tails of tiles;
/// 260 columns are no whole 16. With 256 rows of W a product absorbs the operation before it: SwiGLU, or a norm of up
/// to 4,096 columns. From 4,096 columns on, a thread rounds several groups of four.
const SHAPES: [(usize, usize, usize); 9] = [
    (300, 256, 512),
    (257, 80, 192),
    (300, 260, 128),
    (258, 256, 4096),
    (259, 256, 4160),
    (140, 256, 512),
    (129, 272, 192),
    (128, 128, 256),
    (1, 128, 256),
];

/// Rows that are not rounded to 8-bit floats.
fn few_rows_max(compute: Compute) -> usize {
    if compute == Compute::Fp8 { 128 } else { 256 }
}

/// Products of many rows whose factors a backend may round to 8-bit floats. It rounds all or none: the result is near
/// the product of rounded factors, or near that of the factors as they are.
pub(super) fn in_fp8(runtime: &Runtime) {
    let (mut random, computes) = (Random::new(60), computes(runtime));
    let kinds = [(4, 64), (8, 32), (4, 128), (6, 64)].into_iter();
    let cases = kinds.flat_map(|kind| SHAPES.map(|shape| (kind, shape)));
    for (compute, ((bits, group), (t, n, k))) in
        cases.flat_map(|case| computes.iter().map(move |&compute| (compute, case)))
    {
        // The oracle takes long for large shapes, so one coding has to do.
        let is_too_much = k > 512 && (bits, group) != (4, 64);
        if !is_mine(&("eight bits", compute, bits, group, t, n, k)) || k % group != 0 || is_too_much {
            continue;
        }
        let w = weights(&mut random, n, k, bits, group);
        // A backend may round x to f16 first, which must not decide between two codes.
        let x = rounded(&Tensor::random(&mut random, &[t, k], -1.0, 1.0), DType::F16);
        // The norm's weights and the gates are near 1. Others would make some values of a row far larger than the rest,
        // which a CPU's 8 bits round worse.
        let norm = rounded(&Tensor::random(&mut random, &[k], 0.9, 1.1), DType::F32);
        let mut gates = Tensor::random(&mut random, &[t, 2 * k], -1.0, 1.0);
        let open = |row: &mut [f64]| row[..k].iter_mut().for_each(|gate| *gate = 1.0 + 0.1 * *gate);
        gates.values.chunks_exact_mut(2 * k).for_each(open);
        let gates = rounded(&gates, DType::F32);
        let r = rounded(&Tensor::random(&mut random, &[t, n], -1.0, 1.0), DType::F32);
        let weight = affine_weight(runtime, std::slice::from_ref(&w), bits, compute);
        let up = |tensor: &Tensor| up(runtime, tensor);
        let (array, residual) = (up(&x), up(&r));
        // A product absorbs a norm or SwiGLU of an intermediate. This one is the sum of two halves, which is exact.
        let twice = |tensor: &Tensor| {
            let values = tensor.values.iter().map(|value| value / 2.0).collect();
            let half = up(&Tensor { values, shape: tensor.shape.clone() });
            half.add(&half)
        };
        let normed = || twice(&x)?.rms_norm(&up(&norm), EPS)?.linear(&weight);
        let gated = || twice(&gates)?.swiglu()?.linear(&weight);
        // Rows of the norm's input are 2 k values apart.
        let part = || {
            let part = twice(&gates)?.slice(&[0, k], &[t, 2 * k])?;
            part.rms_norm(&up(&norm), EPS)?.linear(&weight)
        };
        let part_of_gates: Vec<f32> =
            floats(&gates).chunks_exact(2 * k).flat_map(|row| row[k..].to_vec()).collect();
        let no_residual = vec![0.0; t * n];
        for (form, y, input, residual) in [
            ("x", array.linear(&weight), floats(&x), &no_residual),
            ("x, onto a residual,", array.linear_add(&weight, &residual), floats(&x), &r.values),
            ("a norm", normed(), single(&rms_norm(&floats(&x), &floats(&norm), EPS)), &no_residual),
            ("a norm of parts", part(), single(&rms_norm(&part_of_gates, &floats(&norm), EPS)), &no_residual),
            ("swiglu", gated(), swiglu(&gates.values, k), &no_residual),
        ] {
            let onto = |sums: &[f64]| sums.iter().zip(residual).map(|(sum, r)| sum + r).collect::<Vec<f64>>();
            let codes = |values: &[f32]| e4m3_rows(values, k);
            let exact = onto(&linear(&input, &w));
            let coded = onto(&matmul_transposed(&codes(&input), &e4m3_weights(&w, bits), k));
            let what = format!("{form} [{t}, {n}, {k}] of {bits} bits in groups of {group}, {compute:?}");
            let typical = typical_sum(&input, &w.weights(), k);
            expect_one_of_two(
                &what,
                &y.expect("extents fit"),
                &exact,
                &coded,
                typical,
                t <= few_rows_max(compute),
            );
        }
    }
}

/// Asserts that y is near the product of exact factors, or near that of rounded ones. Few rows are never rounded.
#[track_caller]
fn expect_one_of_two(what: &str, y: &Array, exact: &[f64], coded: &[f64], typical: f64, are_few: bool) {
    let y = download(y);
    let (from_exact, from_coded) = (largest_distance(&y, exact), largest_distance(&y, coded));
    let (step, near) = (tolerance::ONE_OF_TWO_ROUNDINGS * typical, from_exact.min(from_coded));
    assert!(near <= step, "{what}: {from_exact} and {from_coded} from the oracles, {step} allowed");
    assert!(!are_few || from_exact <= step, "{what}: few rows are not rounded to 8-bit floats");
}

/// Weights in blocks. How W is rounded does not depend on the operation before the product, so x alone has to do. The
/// second shape has long rows, which several blocks of a GPU may round; the last has few rows for one arithmetic.
pub(super) fn of_blocks(runtime: &Runtime) {
    let (mut random, computes) = (Random::new(63), computes(runtime));
    let cases = [
        (BlockFormat::Q4K, (270, 80, 512)),
        (BlockFormat::Q4K, (257, 64, 2304)),
        (BlockFormat::Q4K, (140, 96, 768)),
        (BlockFormat::Q8_0, (270, 80, 512)),
        (BlockFormat::Q8_0, (140, 96, 768)),
    ];
    for (compute, (format, (t, n, k))) in
        cases.into_iter().flat_map(|case| computes.iter().map(move |&compute| (compute, case)))
    {
        if !is_mine(&("blocks in eight bits", compute, format, t, n, k)) {
            continue;
        }
        let bytes = even_blocks(&mut random, format, n * k / format.values());
        let w = decoded(format, &bytes);
        let x = rounded(&Tensor::random(&mut random, &[t, k], -1.0, 1.0), DType::F16);
        let weight = weight_of_blocks(runtime, format, &bytes, [1, n, k], compute);
        let y = up(runtime, &x).linear(&weight).expect("extents fit");
        let x = floats(&x);
        let exact = matmul_transposed(&x, &w, k);
        let coded = e4m3_below(&w, k, &magnitudes(format, &bytes, k));
        let coded = matmul_transposed(&e4m3_rows(&x, k), &coded, k);
        let what = format!("x [{t}, {n}, {k}] in {format}, {compute:?}");
        expect_one_of_two(&what, &y, &exact, &coded, typical_sum(&x, &w, k), t <= few_rows_max(compute));
    }
}

/// Random blocks whose scales are alike, so that the sums of all rows are about as large.
fn even_blocks(random: &mut Random, format: BlockFormat, count: usize) -> Vec<u8> {
    let mut bytes = blocks(random, format, count, 0.08..0.1);
    if format == BlockFormat::Q4K {
        // Bits 5 and 7 of these bytes are the highest bits of the 16 scales and mins of six bits.
        let scales = bytes.chunks_exact_mut(format.bytes()).flat_map(|block| &mut block[4..12]);
        scales.for_each(|byte| *byte |= 0xa0);
    }
    bytes
}

/// The greatest magnitude that the scales of each row of blocks can express.
fn magnitudes(format: BlockFormat, bytes: &[u8], k: usize) -> Vec<f32> {
    let (codes, least_and_greatest) = codes(format);
    let [least, greatest] = least_and_greatest.map(|code| {
        let mut bytes = bytes.to_vec();
        bytes.chunks_exact_mut(format.bytes()).for_each(|block| block[codes.clone()].fill(code));
        decoded(format, &bytes)
    });
    let top = |row: &[f32]| row.iter().fold(0.0f32, |top, x| top.max(x.abs()));
    let rows = least.chunks_exact(k).zip(greatest.chunks_exact(k));
    rows.map(|(least, greatest)| top(least).max(top(greatest))).collect()
}

/// The bytes of a block that hold its codes, and a byte of the least and one of the greatest levels.
fn codes(format: BlockFormat) -> (Range<usize>, [u8; 2]) {
    match format {
        BlockFormat::Q4K => (16..144, [0x00, 0xff]),
        BlockFormat::Q8_0 => (2..34, [0x80, 0x7f]),
        other => unreachable!("{other} is in no case"),
    }
}

/// A product of gate and up, SwiGLU, and a product. If a backend rounds the input of the last product to 8 bits, it may
/// keep f16 between gate and SwiGLU: the error of f16 is a small part.
pub(super) fn feed_forward(runtime: &Runtime) {
    let (mut random, computes) = (Random::new(61), computes(runtime));
    // 300 rows are many, 140 for one arithmetic alone, 100 are not. Both products have whole tiles, so that a backend
    // may absorb SwiGLU.
    let shapes = [(300, 256, 320, 256), (140, 256, 320, 256), (100, 256, 320, 256)];
    let cases = [(4, 64), (8, 32)].map(|kind| shapes.map(|s| (kind, s))).concat().into_iter();
    for (compute, ((bits, group), (t, k, inner, n))) in
        cases.flat_map(|case| computes.iter().map(move |&compute| (compute, case)))
    {
        if !is_mine(&("feed forward in eight bits", compute, bits, group, t, k, inner, n)) {
            continue;
        }
        let wide = weights(&mut random, 2 * inner, k, bits, group);
        let down = weights(&mut random, n, inner, bits, group);
        // Gates of about 1.
        let size = 2.0 / typical_sum(&[1.0], &wide.weights(), k) as f32;
        let x = rounded(&Tensor::random(&mut random, &[t, k], -size, size), DType::F16);
        let weight = |w: &Affine| affine_weight(runtime, std::slice::from_ref(w), bits, compute);
        let y = up(runtime, &x).linear(&weight(&wide)).and_then(|wide| wide.swiglu()?.linear(&weight(&down)));
        let y = download(&y.expect("extents fit"));
        let input = floats(&x);
        let exact = swiglu(&linear(&input, &wide), inner);
        let coded = matmul_transposed(&e4m3_rows(&input, k), &e4m3_weights(&wide, bits), k);
        let coded = e4m3_rows(&swiglu(&coded, inner), inner);
        let what =
            format!("[{t}, {k}] to {inner} gates to {n}, {bits} bits in groups of {group}, {compute:?}");
        let coded =
            (t > few_rows_max(compute)).then(|| matmul_transposed(&coded, &e4m3_weights(&down, bits), inner));
        expect_near(&what, &y, &exact, &down, coded.as_deref());
    }
}

/// A product after attention, which may leave f16 for it. The oracle has the rows that attention leaves without it.
pub(super) fn after_attention(runtime: &Runtime) {
    const HEADS: usize = 4;
    const KV: usize = 2;
    let (mut random, computes) = (Random::new(62), computes(runtime));
    let cases = [(64, KvFormat::F16, 256), (128, KvFormat::Bits8, 320), (80, KvFormat::F16, 256)].into_iter();
    for (compute, (d, format, n)) in
        cases.flat_map(|case| computes.iter().map(move |&compute| (compute, case)))
    {
        if !is_mine(&("eight bits after attention", compute, d, format, n)) {
            continue;
        }
        let (rows, t, k) = ([(0, 190), (0, 110)], 300, HEADS * d);
        let elements = format.row_elements(d).expect("whole groups");
        let pool_shape = [rows.len() + 1, KV, 256, elements];
        let pool = || Array::persistent(runtime, Category::Kv, pool_shape, format.dtype()).expect("memory");
        let pool = KvPool { keys: pool(), values: pool() };
        let [q, keys, values] = [HEADS, KV, KV].map(|heads| up(runtime, &draw(&mut random, &[t, heads, d])));
        let batch = batch(runtime, &rows, 1);
        let spec = AttentionSpec { scale: 0.125.into(), window: None, regime: Regime::Prefill };
        let attended = || q.paged_attention(&keys, &values, &pool, &batch, spec.clone())?.reshape([t, k]);
        let x = attended().and_then(|seen| seen.to_vec::<f32>()).expect("a case runs");
        let w = weights(&mut random, n, k, 4, 32);
        let weight = affine_weight(runtime, std::slice::from_ref(&w), 4, compute);
        let y = download(&attended().and_then(|seen| seen.linear(&weight)).expect("extents fit"));
        let coded = matmul_transposed(&e4m3_rows(&x, k), &e4m3_weights(&w, 4), k);
        let what = format!("heads of {d}, {format:?}, to {n}, {compute:?} after attention");
        expect_near(&what, &y, &x, &w, Some(&coded));
    }
}

/// Asserts that y is near the product of x and w, or near `coded`. Distances are in typical sums of a row: few rows are
/// larger than all others. Their mean tells roundings apart; a single one may be several times larger.
#[track_caller]
fn expect_near(what: &str, y: &[f64], x: &[f32], w: &Affine, coded: Option<&[f64]>) {
    let n = w.quants.len() / w.k;
    let of_one = typical_sum(&[1.0], &w.weights(), w.k);
    let square = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
    let typical: Vec<f64> =
        x.chunks_exact(w.k).map(|row| of_one * (square(row) / w.k as f64).sqrt()).collect();
    let distance = |want: &[f64]| {
        let apart = |(i, (y, want)): (usize, (&f64, &f64))| (y - want).abs() / typical[i / n];
        let apart: Vec<f64> = y.iter().zip(want).enumerate().map(apart).collect();
        let mean = (apart.iter().map(|d| d * d).sum::<f64>() / apart.len() as f64).sqrt();
        (mean, apart.iter().copied().fold(0.0, f64::max))
    };
    let from_exact = distance(&linear(x, w));
    let from_coded = coded.map_or((f64::INFINITY, f64::INFINITY), distance);
    let (mean, most) = if from_coded.0 < from_exact.0 { from_coded } else { from_exact };
    let step = tolerance::ONE_OF_TWO_ROUNDINGS;
    assert!(
        mean <= step && most <= 6.0 * step,
        "{what}: {from_exact:?} and {from_coded:?} from the oracles, mean and most; {step} allowed in the mean"
    );
}

const EPS: f32 = 1e-6;

fn single(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}

fn swiglu(x: &[f64], k: usize) -> Vec<f32> {
    single(&activation::swiglu(x, k))
}
