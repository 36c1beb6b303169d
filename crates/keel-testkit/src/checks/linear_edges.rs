//! Products of unusual operands: blocks without rows, rows that begin anywhere, and long rows.

use super::linear::{affine_weight, dense_weight, floats};
use super::{Check, expect_within, rounded, upload};
use crate::cases::linear::weights;
use crate::naive::linear::{Affine, gather_linear, linear};
use crate::naive::matmul::matmul_transposed;
use crate::naive::tensor::Tensor;
use crate::random::Random;
use crate::tolerance;
use keel_array::{Array, Category, Compute, DType, RowBlock, RowData, Runtime};

pub(super) const CHECKS: &[Check] = &[
    Check { op: "linear", run: no_rows_of_a_weight },
    Check { op: "linear", run: rows_that_begin_anywhere },
    Check { op: "gather_linear", run: rows_of_experts_that_begin_anywhere },
    Check { op: "linear", run: results_that_begin_anywhere },
    Check { op: "linear", run: long_dense_rows },
];

/// Blocks without rows, and a repetition of none or of too many, change nothing.
fn no_rows_of_a_weight(runtime: &Runtime) {
    let mut random = Random::new(63);
    let w = weights(&mut random, 33, 128, 4, 64);
    let weight = affine_weight(runtime, std::slice::from_ref(&w), 4, Compute::F32);
    let data = RowData::Affine { codes: &[], scales: &[], biases: &[] };
    weight.fill(&RowBlock { expert: 0, first_row: 0, rows: 0, data }).expect("nothing to store");
    assert!(!weight.repeat(0) && !weight.repeat(34));
    let x = rounded(&Tensor::random(&mut random, &[2, 128], -1.0, 1.0), DType::F32);
    let y = upload(runtime, &x, DType::F32).linear(&weight).expect("extents fit");
    expect_within("linear after blocks without rows", &y, &linear(&floats(&x), &w), tolerance::F32);
}

/// Asserts that a product is right. A device may instead ask for a copy of x: it may read several values at a time.
#[track_caller]
fn expect_right_or_refused(what: &str, y: &Array, want: &[f64], within: f64) {
    match y.eval() {
        Ok(()) => expect_within(what, y, want, within),
        Err(error) => expect_refused(what, &error.to_string()),
    }
}

#[track_caller]
fn expect_refused(what: &str, error: &str) {
    assert!(error.contains("bytes; make it contiguous"), "{what}: {error}");
}

/// Rows of x that begin at any element of memory. A device may refuse to read them; it takes a copy of them.
fn rows_that_begin_anywhere(runtime: &Runtime) {
    let mut random = Random::new(64);
    const K: usize = 128;
    // Fewer rows of a weight than tensor cores take, and more.
    for n in [48, 80] {
        let w = weights(&mut random, n, K, 4, 64);
        let values = floats(&rounded(&Tensor::random(&mut random, &[n, K], -1.0, 1.0), DType::BF16));
        let dense = Tensor { shape: vec![n, K], values: values.iter().map(|&x| f64::from(x)).collect() };
        for (rows, first) in [(1, 3), (1, 2), (5, 1), (17, 3), (130, 1)] {
            let flat = rounded(&Tensor::random(&mut random, &[first + rows * K], -1.0, 1.0), DType::F32);
            let x = &floats(&flat)[first..];
            let array = upload(runtime, &flat, DType::F32);
            // With a handle on the view, an evaluation would copy it to memory of its own.
            let view = || {
                array
                    .slice_axis(0, first, first + rows * K)
                    .and_then(|x| x.reshape([rows, K]))
                    .expect("in the array")
            };
            let of_dense = matmul_transposed(x, &floats(&dense), K);
            for (what, weight, want) in [
                ("4 bits", affine_weight(runtime, std::slice::from_ref(&w), 4, Compute::Bf16), linear(x, &w)),
                ("bf16", dense_weight(runtime, &values, n, K, DType::BF16, Compute::Auto), of_dense),
            ] {
                let what = format!("linear of {rows} rows from element {first} on by {n} rows of {what}");
                let copied = view().contiguous().and_then(|x| x.linear(&weight)).expect("extents fit");
                expect_within(&what, &copied, &want, tolerance::BF16_ACTIVATIONS);
                let y = view().linear(&weight).expect("extents fit");
                expect_right_or_refused(&what, &y, &want, tolerance::BF16_ACTIVATIONS);
            }
        }
    }
}

/// As [`rows_that_begin_anywhere`], with an expert for each row.
fn rows_of_experts_that_begin_anywhere(runtime: &Runtime) {
    const K: usize = 64;
    let mut random = Random::new(66);
    for (rows, first, n, compute) in [
        (3, 1, 33, Compute::F32),
        (5, 2, 80, Compute::Bf16),
        (5, 3, 80, Compute::Bf16),
        (2, 1, 80, Compute::F32),
    ] {
        let stack: Vec<Affine> = (0..3).map(|_| weights(&mut random, n, K, 4, 32)).collect();
        let weight = affine_weight(runtime, &stack, 4, compute);
        let choice: Vec<u32> = (0..rows).map(|_| random.below(3) as u32).collect();
        let chosen = Array::from_slice(runtime, &choice, [rows, 1]).expect("memory");
        let flat = rounded(&Tensor::random(&mut random, &[first + rows * K], -1.0, 1.0), DType::F32);
        let array = upload(runtime, &flat, DType::F32);
        let x = array.slice_axis(0, first, first + rows * K).and_then(|x| x.reshape([rows, K]));
        let y = x.and_then(|x| x.gather_linear(&weight, &chosen)).expect("extents fit");
        let want = gather_linear(&floats(&flat)[first..], &stack, &choice);
        let what = format!("gather_linear of {rows} rows from element {first} on, {n} rows, {compute:?}");
        expect_right_or_refused(&what, &y, &want, tolerance::BF16_ACTIVATIONS);
    }
}

/// Results that begin at any element of a destination. The weight's rows are long and few, so a device may cut its
/// columns into parts and add up their sums.
fn results_that_begin_anywhere(runtime: &Runtime) {
    const ROWS: usize = 17;
    const N: usize = 64;
    const K: usize = 4096;
    let mut random = Random::new(67);
    let w = weights(&mut random, N, K, 4, 64);
    let weight = affine_weight(runtime, std::slice::from_ref(&w), 4, Compute::Bf16);
    let x = rounded(&Tensor::random(&mut random, &[ROWS, K], -1.0, 1.0), DType::F32);
    let (array, want) = (upload(runtime, &x, DType::F32), linear(&floats(&x), &w));
    for first in [0, 1, 2, 4] {
        let what = format!("linear of {ROWS} rows to element {first} on");
        let memory = Array::persistent(runtime, Category::User, [first + ROWS * N], DType::F32);
        let place = memory.and_then(|memory| memory.entries(first, ROWS * N)).expect("memory");
        let step = runtime.trace(|| {
            let y = array.linear(&weight).and_then(|y| y.reshape([ROWS * N])).expect("extents fit");
            runtime.prepare(&[(&y, &place)]).expect("a program")
        });
        match step.run() {
            Ok(()) => expect_within(&what, &place, &want, tolerance::BF16_ACTIVATIONS),
            Err(error) => expect_refused(&what, &error.to_string()),
        }
    }
}

/// One dense row that takes more shared memory than a block has on some GPUs. W has enough rows for tensor cores, whose
/// kernel would keep x in that memory.
fn long_dense_rows(runtime: &Runtime) {
    let mut random = Random::new(65);
    let (n, k) = (80, 25_600);
    let x = rounded(&Tensor::random(&mut random, &[1, k], -1.0, 1.0), DType::F32);
    let w = floats(&rounded(&Tensor::random(&mut random, &[n, k], -1.0, 1.0), DType::BF16));
    let weight = dense_weight(runtime, &w, n, k, DType::BF16, Compute::Auto);
    let y = upload(runtime, &x, DType::F32).linear(&weight).expect("extents fit");
    expect_within(
        "a dense row of 25600",
        &y,
        &matmul_transposed(&floats(&x), &w, k),
        tolerance::BF16_ACTIVATIONS,
    );
}
