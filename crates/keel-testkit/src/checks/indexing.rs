//! Gathering by index.

use super::{Check, expect, layouts, upload};
use crate::naive::indexing::{take, take_along};
use crate::naive::tensor::Tensor;
use crate::random::Random;
use keel_array::{DType, Runtime};

pub(super) const CHECKS: &[Check] = &[
    Check { op: "take", run: takes },
    Check { op: "take_along_axis", run: takes_along },
    Check { op: "take", run: out_of_range },
];

fn takes(runtime: &Runtime) {
    let mut random = Random::new(40);
    for (shape, picks) in
        [(&[7][..], &[300][..]), (&[9, 33], &[5]), (&[9, 33], &[2, 3]), (&[4, 5, 6], &[1]), (&[3, 5], &[0])]
    {
        for dtype in [DType::U8, DType::BF16, DType::F32, DType::I64] {
            for index in [DType::U32, DType::I32] {
                let x = Tensor::integers(&mut random, shape, 0, 99);
                let indices = Tensor::integers(&mut random, picks, 0, shape[0] as i64);
                for (layout, array) in layouts(runtime, &x, dtype) {
                    let y = array.take(&upload(runtime, &indices, index)).expect("indices");
                    let what = format!("take of {dtype} {shape:?} {layout} by {index} {picks:?}");
                    expect(&what, &y, &take(&x, &indices));
                }
            }
        }
    }
}

fn takes_along(runtime: &Runtime) {
    let mut random = Random::new(41);
    for (shape, picks) in [(&[33][..], &[300][..]), (&[5, 17], &[5, 3]), (&[2, 3, 7], &[2, 3, 67])] {
        for dtype in [DType::U8, DType::F16, DType::F32, DType::I64] {
            let x = Tensor::integers(&mut random, shape, 0, 99);
            let indices = Tensor::integers(&mut random, picks, 0, x.width() as i64);
            for (layout, array) in layouts(runtime, &x, dtype) {
                let y = array.take_along_axis(&upload(runtime, &indices, DType::U32)).expect("indices");
                let what = format!("take_along_axis of {dtype} {shape:?} {layout}");
                expect(&what, &y, &take_along(&x, &indices));
            }
        }
    }
}

fn out_of_range(runtime: &Runtime) {
    let x = upload(runtime, &Tensor::from_fn(&[5, 3], |_| 1.0), DType::F32);
    for (wrong, dtype) in [(5.0, DType::U32), (-1.0, DType::I32)] {
        let indices = Tensor { shape: vec![2], values: vec![4.0, wrong] };
        let error =
            x.take(&upload(runtime, &indices, dtype)).expect("indices").eval().expect_err("out of range");
        let message = error.to_string();
        assert!(message.contains(&format!("index {wrong} is out of range for 5")), "{message}");
    }
    // The runtime still works after the error.
    let indices = Tensor { shape: vec![1], values: vec![2.0] };
    expect(
        "take after an error",
        &x.take(&upload(runtime, &indices, DType::U32)).expect("indices"),
        &Tensor { shape: vec![1, 3], values: vec![1.0; 3] },
    );
}
