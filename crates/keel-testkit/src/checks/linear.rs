//! Matrix products, with weights and without, and the embedding.

use super::linear_blocks::{in_blocks, many_rows_in_blocks};
use super::nearest::{expect_nearest, typical_sum};
use super::share::is_mine;
use super::{Check, FLOATS, download, expect, expect_within, fp8, layouts, rounded, upload};
use crate::cases::linear::{weights, weights_scaled_by};
use crate::compare::mean_distance;
use crate::naive::elementwise;
use crate::naive::linear::{Affine, linear, quantized_activations};
use crate::naive::matmul::{matmul, matmul_transposed};
use crate::naive::tensor::Tensor;
use crate::random::Random;
use crate::{cases, tolerance};
use half::{bf16, f16};
use keel_array::{
    Array, ArrayError, BlockFormat, Compute, DType, RowBlock, RowData, Runtime, Weight, WeightFormat,
    WeightSpec,
};

pub(super) const CHECKS: &[Check] = &[
    Check { op: "matmul", run: broadcast_products },
    Check { op: "linear", run: onto_a_residual },
    Check { op: "linear", run: rows_that_do_not_fit_their_weight },
    Check { op: "embedding", run: embedding },
];

pub(super) const BY_CASE: &[Check] = &[
    Check { op: "matmul", run: products },
    Check { op: "linear", run: dense },
    Check { op: "linear", run: affine::<0> },
    Check { op: "linear", run: affine::<1> },
    Check { op: "linear", run: affine::<2> },
    Check { op: "linear", run: wide },
    Check { op: "linear", run: long },
    Check { op: "linear", run: fp8::in_fp8 },
    Check { op: "linear", run: fp8::feed_forward },
    Check { op: "linear", run: fp8::after_attention },
    Check { op: "linear", run: fp8::of_blocks },
    Check { op: "linear", run: many_rows_in_blocks },
    Check { op: "linear", run: in_blocks::<0> },
    Check { op: "linear", run: in_blocks::<1> },
    Check { op: "linear", run: in_blocks::<2> },
];

/// For fast modes: the deterministic one multiplies many rows by kernels of its own.
pub(super) const FAST: &[Check] = &[
    Check { op: "linear", run: dense },
    Check { op: "linear", run: affine::<0> },
    Check { op: "linear", run: in_published_codings },
    Check { op: "linear", run: fp8::after_attention },
];

/// The kinds of weights are divided among this many checks, which run in parallel in a third of the time.
pub(super) const PARTS: usize = 3;

pub(super) fn floats(x: &Tensor) -> Vec<f32> {
    x.values.iter().map(|&x| x as f32).collect()
}

fn products(runtime: &Runtime) {
    let mut random = Random::new(50);
    for &[batch, m, n, k] in cases::matmul::BATCHED {
        for dtype in FLOATS.into_iter().filter(|dtype| is_mine(&(batch, m, n, k, dtype))) {
            let a = rounded(&Tensor::random(&mut random, &[batch, m, k], -1.0, 1.0), dtype);
            let b = rounded(&Tensor::random(&mut random, &[batch, k, n], -1.0, 1.0), dtype);
            let values = matmul(&floats(&a), &floats(&b), [batch, m, n, k]);
            let want = Tensor { shape: vec![batch, m, n], values };
            for ((layout, a), (_, b)) in layouts(runtime, &a, dtype).iter().zip(layouts(runtime, &b, dtype)) {
                let y = a.matmul(&b).expect("extents fit");
                expect(&format!("matmul of {dtype} [{batch}, {m}, {k}, {n}] {layout}"), &y, &want);
            }
        }
    }
}

fn broadcast_products(runtime: &Runtime) {
    let mut random = Random::new(49);
    let a = rounded(&Tensor::random(&mut random, &[2, 1, 5, 7], -1.0, 1.0), DType::F32);
    let b = rounded(&Tensor::random(&mut random, &[3, 7, 4], -1.0, 1.0), DType::F32);
    let (wide_a, wide_b) = (a.broadcast(&[2, 3, 5, 7]), b.broadcast(&[2, 3, 7, 4]));
    let values = matmul(&floats(&wide_a), &floats(&wide_b), [6, 5, 4, 7]);
    let y =
        upload(runtime, &a, DType::F32).matmul(&upload(runtime, &b, DType::F32)).expect("batches broadcast");
    expect("matmul of broadcast batches", &y, &Tensor { shape: vec![2, 3, 5, 4], values });
}

/// A dense weight `[rows, cols]`, filled in two blocks.
pub(super) fn dense_weight(
    runtime: &Runtime,
    values: &[f32],
    rows: usize,
    cols: usize,
    dtype: DType,
    compute: Compute,
) -> Weight {
    dense_stack(runtime, values, [1, rows, cols], dtype, compute)
}

/// A dense stack `[experts, rows, cols]`, each expert filled in two blocks.
pub(super) fn dense_stack(
    runtime: &Runtime,
    values: &[f32],
    [experts, rows, cols]: [usize; 3],
    dtype: DType,
    compute: Compute,
) -> Weight {
    let spec = WeightSpec { experts, rows, cols, format: WeightFormat::Dense(dtype), compute };
    let weight = Weight::allocate(runtime, spec).expect("there is memory for a case");
    let bytes: Vec<u8> = match dtype {
        DType::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    };
    let split = if rows > 32 { 32 } else { rows };
    let ranges = [split..rows, 0..split].into_iter().filter(|range| !range.is_empty());
    let row_bytes = cols * dtype.size();
    for (expert, bytes) in bytes.chunks_exact(rows * row_bytes).enumerate() {
        for range in ranges.clone() {
            let data = RowData::Dense(&bytes[range.start * row_bytes..range.end * row_bytes]);
            let block = RowBlock { expert, first_row: range.start, rows: range.len(), data };
            weight.fill(&block).expect("whole tiles of rows");
        }
    }
    weight
}

/// A quantised stack with scales in bf16, filled in two blocks of rows.
pub(super) fn affine_weight(runtime: &Runtime, stack: &[Affine], bits: usize, compute: Compute) -> Weight {
    affine_scaled_by(runtime, stack, bits, DType::BF16, compute)
}

/// A quantised stack with scales and biases of a type.
pub(super) fn affine_scaled_by(
    runtime: &Runtime,
    stack: &[Affine],
    bits: usize,
    scale_dtype: DType,
    compute: Compute,
) -> Weight {
    try_affine_weight(runtime, stack, bits, scale_dtype, compute).expect("whole tiles of rows")
}

/// Whether a backend takes weights for this arithmetic. It may refuse weights that are kept in 8-bit floats, if its
/// device does not multiply them.
pub(super) fn takes(runtime: &Runtime, compute: Compute) -> bool {
    let w = weights(&mut Random::new(0), 64, 64, 4, 64);
    match try_affine_weight(runtime, &[w], 4, DType::BF16, compute) {
        Err(error) if compute == Compute::Fp8 && is_for_other_devices(&error) => {
            crate::skipped!("{compute:?}: {error}");
            false
        }
        taken => taken.map(|_| true).expect("a weight of whole tiles"),
    }
}

/// Whether a backend refuses a weight because of its device. Every other refusal of a good weight is a failure.
fn is_for_other_devices(error: &ArrayError) -> bool {
    matches!(error, ArrayError::Argument { reason, .. } if reason.contains("compute capability"))
}

fn try_affine_weight(
    runtime: &Runtime,
    stack: &[Affine],
    bits: usize,
    scale_dtype: DType,
    compute: Compute,
) -> Result<Weight, ArrayError> {
    let Affine { k, group, .. } = stack[0];
    let rows = stack[0].quants.len() / k;
    let format = WeightFormat::Affine { bits: bits as u8, group_size: group as u16, scale_dtype };
    let spec = WeightSpec { experts: stack.len(), rows, cols: k, format, compute };
    let weight = Weight::allocate(runtime, spec).expect("there is memory for a case");
    let split = if rows > 32 { 32 } else { rows };
    let ranges = [split..rows, 0..split].into_iter().filter(|range| !range.is_empty());
    for ((expert, w), range) in
        stack.iter().enumerate().flat_map(|of| ranges.clone().map(move |range| (of, range)))
    {
        let groups = range.start * k / group..range.end * k / group;
        let data = RowData::Affine {
            codes: &w.quants[range.start * k..range.end * k],
            scales: &w.scales[groups.clone()],
            biases: &w.biases[groups],
        };
        let block = RowBlock { expert, first_row: range.start, rows: range.len(), data };
        weight.fill(&block)?;
    }
    Ok(weight)
}

fn dense(runtime: &Runtime) {
    let mut random = Random::new(51);
    for &(t, n, k) in cases::matmul::SHAPES.iter().chain(cases::matmul::FEW_ROWS) {
        let may_begin_anywhere = !cases::matmul::FEW_ROWS.contains(&(t, n, k));
        for dtype in FLOATS.into_iter().filter(|dtype| is_mine(&("dense", t, n, k, dtype))) {
            let x = rounded(&Tensor::random(&mut random, &[t, k], -1.0, 1.0), DType::F32);
            let w = floats(&rounded(&Tensor::random(&mut random, &[n, k], -1.0, 1.0), dtype));
            let want = Tensor { shape: vec![t, n], values: matmul_transposed(&floats(&x), &w, k) };
            for (compute, limit) in [
                (Compute::F32, tolerance::F32),
                (Compute::Auto, tolerance::BF16_ACTIVATIONS),
                (Compute::Bf16, tolerance::BF16_ACTIVATIONS),
            ] {
                let weight = dense_weight(runtime, &w, n, k, dtype, compute);
                let mut layouts = layouts(runtime, &x, DType::F32);
                layouts.retain(|&(layout, _)| may_begin_anywhere || layout != "part");
                for (layout, x) in layouts {
                    let y = x.linear(&weight).expect("extents fit");
                    let what = format!("linear [{t}, {n}, {k}] of {dtype}, {compute:?}, {layout}");
                    expect_within(&what, &y, &want.values, limit);
                }
            }
        }
    }
}

fn affine<const PART: usize>(runtime: &Runtime) {
    let mut random = Random::new(52);
    let groups = cases::linear::GROUPS;
    let kinds =
        cases::linear::BITS.iter().enumerate().flat_map(|bits| groups.iter().map(move |g| (bits, *g)));
    for ((i, &bits), group) in kinds.skip(PART).step_by(PARTS) {
        // Each number of bits has one size of groups for which it meets all shapes.
        let has_all = groups[i % groups.len()] == group;
        let shapes = if has_all { cases::linear::SHAPES } else { cases::linear::FOR_EACH_KIND };
        let cases = shapes.iter().enumerate();
        for (case, &(t, n, k)) in cases.filter(|case| is_mine(&("affine", bits, group, case.1))) {
            let scale_dtype = cases::linear::SCALES[(i + case) % cases::linear::SCALES.len()];
            let w = weights_scaled_by(&mut random, [n, k], bits, group, scale_dtype);
            let x = rounded(&Tensor::random(&mut random, &[t, k], -1.0, 1.0), DType::F32);
            let what = format!("linear [{t}, {n}, {k}] of {bits} bits in groups of {group} by {scale_dtype}");
            let array = upload(runtime, &x, DType::F32);
            let want = linear(&floats(&x), &w);
            for (compute, limit) in
                [(Compute::F32, tolerance::F32), (Compute::Bf16, tolerance::BF16_ACTIVATIONS)]
            {
                let stack = std::slice::from_ref(&w);
                let weight = affine_scaled_by(runtime, stack, bits, scale_dtype, compute);
                let y = array.linear(&weight).expect("extents fit");
                expect_within(&format!("{what}, {compute:?}"), &y, &want, limit);
            }
            expect_fast(runtime, &what, &x, &array, &w, bits, scale_dtype);
        }
    }
}

/// Weights as most published models have them.
fn in_published_codings(runtime: &Runtime) {
    let mut random = Random::new(57);
    let kinds = [(4, 64), (4, 128), (8, 64)].into_iter();
    let cases = kinds.flat_map(|kind| cases::linear::FAST.iter().map(move |shape| (kind, shape)));
    for ((bits, group), &(t, n, k)) in cases.filter(|case| is_mine(&("published", case))) {
        let w = weights(&mut random, n, k, bits, group);
        let x = rounded(&Tensor::random(&mut random, &[t, k], -1.0, 1.0), DType::F32);
        let what = format!("linear [{t}, {n}, {k}] of {bits} bits in groups of {group}");
        let array = upload(runtime, &x, DType::F32);
        let weight = affine_weight(runtime, std::slice::from_ref(&w), bits, Compute::Bf16);
        let y = array.linear(&weight).expect("extents fit");
        let want = linear(&floats(&x), &w);
        expect_within(&format!("{what}, Bf16"), &y, &want, tolerance::BF16_ACTIVATIONS);
        expect_fast(runtime, &what, &x, &array, &w, bits, DType::BF16);
    }
}

/// Products of few rows of x with very many rows of W.
fn wide(runtime: &Runtime) {
    let mut random = Random::new(54);
    for (&(n, k), bits) in cases::linear::WIDE.iter().zip([4, 4, 4, 8, 4, 4]) {
        let w = weights(&mut random, n, k, bits, 64);
        for t in [1, 2, 4, 5].into_iter().filter(|t| is_mine(&("wide", n, k, t))) {
            let x = rounded(&Tensor::random(&mut random, &[t, k], -1.0, 1.0), DType::F32);
            let what = format!("linear [{t}, {n}, {k}] of {bits} bits");
            expect_fast(runtime, &what, &x, &upload(runtime, &x, DType::F32), &w, bits, DType::BF16);
        }
    }
}

/// Products of many rows of x with long rows of W, alone and onto a residual. A backend that divides the columns adds
/// up the parts in a kernel of its own.
fn long(runtime: &Runtime) {
    let mut random = Random::new(58);
    for &(t, n, k) in cases::linear::LONG.iter().filter(|shape| is_mine(&("long", shape))) {
        let w = weights(&mut random, n, k, 4, 64);
        let x = rounded(&Tensor::random(&mut random, &[t, k], -1.0, 1.0), DType::F32);
        let r = rounded(&Tensor::random(&mut random, &[t, n], -1.0, 1.0), DType::F32);
        let what = format!("linear [{t}, {n}, {k}] of 4 bits");
        let array = upload(runtime, &x, DType::F32);
        expect_fast(runtime, &what, &x, &array, &w, 4, DType::BF16);
        let weight = affine_weight(runtime, std::slice::from_ref(&w), 4, Compute::Bf16);
        let y = array.linear_add(&weight, &upload(runtime, &r, DType::F32)).expect("extents fit");
        let want: Vec<f64> = linear(&floats(&x), &w).iter().zip(&r.values).map(|(y, r)| y + r).collect();
        expect_within(&format!("{what}, onto a residual"), &y, &want, tolerance::BF16_ACTIVATIONS);
    }
}

/// Compares a product with the oracle's for quantised activations. A backend may quantise activations or not; both
/// results are within one rounding step of the oracle's. A sum whose terms cancel is small compared with its terms, so
/// the step is relative to the size of a sum with random signs.
///
/// In the mean the product follows one oracle much closer. A backend quantises by the groups of W, or by at most 64
/// columns.
fn expect_fast(
    runtime: &Runtime,
    what: &str,
    x: &Tensor,
    array: &Array,
    w: &Affine,
    bits: usize,
    scale_dtype: DType,
) {
    let weight = affine_scaled_by(runtime, std::slice::from_ref(w), bits, scale_dtype, Compute::Auto);
    let (x, values) = (floats(x), w.weights());
    let multiplied = |x: &[f32]| matmul_transposed(x, &values, w.k);
    let want = multiplied(&quantized_activations(&x, w.group));
    let largest = want.iter().fold(0.0f64, |a, b| a.max(b.abs()));
    let size = typical_sum(&x, &values, w.k);
    let limit = tolerance::INT8_ACTIVATIONS * (size / largest).max(1.0);
    let y = array.linear(&weight).expect("extents fit");
    expect_within(what, &y, &want, limit);
    // The other oracles take as long again, so they are not asked if this one fits.
    if mean_distance(&download(&y), &want) > tolerance::OF_THE_NEAREST * size {
        let groups = if w.group > 64 { &[w.group, 64][..] } else { &[w.group] };
        expect_nearest(what, &y, &x, groups, size, multiplied);
    }
}

fn onto_a_residual(runtime: &Runtime) {
    let mut random = Random::new(53);
    for (t, n, k) in [(1, 33, 65), (7, 64, 64), (33, 15, 31)] {
        let x = rounded(&Tensor::random(&mut random, &[t, k], -1.0, 1.0), DType::F32);
        let r = rounded(&Tensor::random(&mut random, &[t, n], -1.0, 1.0), DType::F32);
        let w = floats(&rounded(&Tensor::random(&mut random, &[n, k], -1.0, 1.0), DType::F32));
        let weight = dense_weight(runtime, &w, n, k, DType::F32, Compute::F32);
        let product = Tensor { shape: vec![t, n], values: matmul_transposed(&floats(&x), &w, k) };
        let want = elementwise::binary(&product, &r, &[t, n], |a, b| a + b);
        let array = upload(runtime, &x, DType::F32);
        let kept = upload(runtime, &r, DType::F32);
        let y = array.linear_add(&weight, &kept).expect("extents fit");
        expect("linear onto a residual that is kept", &y, &want);
        expect("the residual", &kept, &r);
        let own = upload(runtime, &r, DType::F32);
        let y = array.linear_add(&weight, &own).expect("extents fit");
        drop(own);
        expect("linear onto a residual that is given up", &y, &want);
        if n == k {
            // The residual is also the input, so it must not be overwritten while it is read.
            let y = array.linear_add(&weight, &array).expect("extents fit");
            drop(array);
            expect("x + linear(x)", &y, &elementwise::binary(&product, &x, &[t, n], |a, b| a + b));
        }
    }
}

fn rows_that_do_not_fit_their_weight(runtime: &Runtime) {
    let (rows, cols) = (33, 64);
    let refusal = |format: WeightFormat, data: RowData<'_>| {
        let spec = WeightSpec { experts: 1, rows, cols, format, compute: Compute::Auto };
        let weight = Weight::allocate(runtime, spec).expect("memory");
        let error = weight.fill(&RowBlock { expert: 0, first_row: 0, rows, data }).expect_err("refused");
        error.to_string()
    };
    let affine = WeightFormat::Affine { bits: 3, group_size: 32, scale_dtype: DType::F16 };
    let blocks = WeightFormat::Blocks(BlockFormat::Q8_0);
    let (codes, pairs, bytes) = (vec![7; rows * cols], vec![0.5; rows * 2], vec![0; rows * cols * 2]);
    let mut wide_code = codes.clone();
    wide_code[rows * cols - 1] = 8;
    for (format, data, reason) in [
        (
            WeightFormat::Dense(DType::BF16),
            RowData::Dense(&bytes[2..]),
            "4222 bytes for 33 rows of 64 bf16, expected 4224",
        ),
        (blocks, RowData::Blocks(&bytes), "4224 bytes for 33 rows of 64 values in Q8_0, expected 2244"),
        (affine, RowData::Affine { codes: &codes[1..], scales: &pairs, biases: &pairs }, "2111 codes"),
        (affine, RowData::Affine { codes: &codes, scales: &pairs[1..], biases: &pairs }, "65 scales"),
        (affine, RowData::Affine { codes: &codes, scales: &pairs, biases: &pairs[1..] }, "65 biases"),
        (
            affine,
            RowData::Affine { codes: &wide_code, scales: &pairs, biases: &pairs },
            "code 8 does not fit 3 bits",
        ),
        (affine, RowData::Dense(&bytes), "not coded as the weight"),
        (blocks, RowData::Dense(&bytes), "not coded as the weight"),
        (WeightFormat::Dense(DType::F16), RowData::Blocks(&bytes), "not coded as the weight"),
    ] {
        let error = refusal(format, data);
        assert!(error.contains(reason), "{error}, expected {reason}");
    }
}

fn embedding(runtime: &Runtime) {
    let mut random = Random::new(56);
    let ids = Tensor::integers(&mut random, &[3, 7], 0, 37);
    let check = |what: &str, weight: &Weight, table: &[f32], k: usize| {
        for dtype in [DType::U32, DType::I32] {
            let y = upload(runtime, &ids, dtype).embedding(weight).expect("ids");
            let values = ids.values.iter().flat_map(|&id| &table[id as usize * k..(id as usize + 1) * k]);
            let values: Vec<f64> = values.map(|&x| f64::from(x)).collect();
            assert_eq!(download(&y), values, "embedding of {what} by {dtype}");
        }
        let wrong =
            Array::from_slice(runtime, &[37u32], [1]).expect("memory").embedding(weight).expect("ids");
        let error = wrong.eval().expect_err("no such row").to_string();
        assert!(error.contains("index 37 is out of range for 37"), "{error}");
    };
    for dtype in FLOATS {
        let table = floats(&rounded(&Tensor::random(&mut random, &[37, 45], -1.0, 1.0), dtype));
        check(&dtype.to_string(), &dense_weight(runtime, &table, 37, 45, dtype, Compute::Auto), &table, 45);
    }
    for &bits in cases::linear::BITS {
        let w = weights(&mut random, 37, 128, bits, 64);
        let weight = affine_weight(runtime, std::slice::from_ref(&w), bits, Compute::Auto);
        check(&format!("{bits} bits"), &weight, &w.weights(), 128);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_device_excuses_a_refused_weight() {
        let refused = |reason: &str| ArrayError::Argument { op: "pack_weight", reason: reason.into() };
        assert!(is_for_other_devices(&refused("this needs a GPU of compute capability 9.0")));
        assert!(!is_for_other_devices(&refused("65 scales for 33 rows, expected 66")));
    }
}
