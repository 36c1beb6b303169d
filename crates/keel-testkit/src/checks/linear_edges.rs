//! Products at the edges of what callers give: blocks without rows, rows that begin anywhere, and long rows.

use super::linear::{affine_weight, dense_weight, floats};
use super::{Check, expect_within, rounded, upload};
use crate::cases::linear::weights;
use crate::naive::linear::linear;
use crate::naive::matmul::matmul_transposed;
use crate::naive::tensor::Tensor;
use crate::random::Random;
use crate::tolerance;
use keel_array::{Compute, DType, RowBlock, RowData, Runtime};

pub(super) const CHECKS: &[Check] = &[
    Check { op: "linear", run: no_rows_of_a_weight },
    Check { op: "linear", run: rows_that_begin_anywhere },
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

/// Rows of x that begin at any element of memory. A device may refuse to read them; a copy of them it takes.
fn rows_that_begin_anywhere(runtime: &Runtime) {
    let mut random = Random::new(64);
    let (n, k) = (48, 128);
    let w = weights(&mut random, n, k, 4, 64);
    let values = floats(&rounded(&Tensor::random(&mut random, &[n, k], -1.0, 1.0), DType::BF16));
    let dense = Tensor { shape: vec![n, k], values: values.iter().map(|&x| f64::from(x)).collect() };
    for (rows, first) in [(1, 3), (1, 2), (5, 1), (17, 3), (130, 1)] {
        let flat = rounded(&Tensor::random(&mut random, &[first + rows * k], -1.0, 1.0), DType::F32);
        let x = &floats(&flat)[first..];
        let array = upload(runtime, &flat, DType::F32);
        let array = array.slice_axis(0, first, first + rows * k).and_then(|x| x.reshape([rows, k]));
        let array = array.expect("in the array");
        let of_dense = matmul_transposed(x, &floats(&dense), k);
        for (what, weight, want) in [
            ("4 bits", affine_weight(runtime, std::slice::from_ref(&w), 4, Compute::Bf16), linear(x, &w)),
            ("bf16", dense_weight(runtime, &values, n, k, DType::BF16, Compute::Auto), of_dense),
        ] {
            let what = format!("linear of {rows} rows from element {first} on by {what}");
            let copied = array.contiguous().and_then(|x| x.linear(&weight)).expect("extents fit");
            expect_within(&what, &copied, &want, tolerance::BF16_ACTIVATIONS);
            let y = array.linear(&weight).expect("extents fit");
            match y.to_vec::<f32>() {
                Ok(_) => expect_within(&what, &y, &want, tolerance::BF16_ACTIVATIONS),
                Err(error) => {
                    let error = error.to_string();
                    assert!(error.contains("bytes; make it contiguous"), "{what}: {error}");
                }
            }
        }
    }
}

/// One dense row that takes more shared memory than a block has on some GPUs.
fn long_dense_rows(runtime: &Runtime) {
    let mut random = Random::new(65);
    let (n, k) = (19, 25_600);
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
