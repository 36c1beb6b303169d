//! Reductions, softmax, running sums, sorting and layer norm, along every axis.

use super::share::is_mine;
use super::{Check, FLOATS, INTEGERS, download, expect, layouts, rounded, upload};
use crate::naive::reduce::{cumsum, largest, layer_norm, reduce, smallest, softmax};
use crate::naive::sort::{argsort, sorted};
use crate::naive::tensor::Tensor;
use crate::random::Random;
use keel_array::{Array, DType, Reduction, Runtime};

pub(super) const CHECKS: &[Check] = &[
    Check { op: "prod", run: product },
    Check { op: "any", run: |r| flags(r, Reduction::Any, |x| x.iter().any(|&x| x != 0.0)) },
    Check { op: "all", run: |r| flags(r, Reduction::All, |x| x.iter().all(|&x| x != 0.0)) },
    Check { op: "sum", run: empty_rows },
    Check { op: "layer_norm", run: layer_norms },
];

pub(super) const BY_CASE: &[Check] = &[
    Check { op: "sum", run: sums },
    Check { op: "max", run: |r| extremes(r, Reduction::Max, largest) },
    Check { op: "min", run: |r| extremes(r, Reduction::Min, smallest) },
    Check { op: "mean", run: mean },
    Check { op: "argmax", run: |r| arg(r, true) },
    Check { op: "argmin", run: |r| arg(r, false) },
    Check { op: "softmax", run: softmaxes },
    Check { op: "cumsum", run: cumsums },
    Check { op: "sort", run: sorts },
    Check { op: "top_k", run: top_ks },
];

const SHAPES: &[&[usize]] =
    &[&[1], &[33], &[257], &[5, 31], &[2, 7, 33], &[3, 1, 17], &[3, 4099], &[67, 129]];

/// `axis` moved to the end, the others in order.
fn last(x: &Tensor, axis: usize) -> Tensor {
    let order: Vec<usize> = (0..x.shape.len()).filter(|&a| a != axis).chain([axis]).collect();
    x.permute(&order)
}

/// The last axis moved to `axis`.
fn back(x: &Tensor, axis: usize) -> Tensor {
    let rank = x.shape.len();
    let order: Vec<usize> = (0..axis).chain([rank - 1]).chain(axis..rank - 1).collect();
    x.permute(&order)
}

/// Runs `case` on every shape, axis and layout of every type, with values that `made` makes of random ones.
fn each(
    runtime: &Runtime,
    dtypes: impl IntoIterator<Item = DType>,
    made: fn(Tensor, DType) -> Tensor,
    mut case: impl FnMut(&str, DType, usize, &Tensor, &Array),
) {
    let mut random = Random::new(30);
    for dtype in dtypes {
        for shape in SHAPES {
            let x = match dtype {
                DType::Bool => Tensor::integers(&mut random, shape, 0, 2),
                DType::U8 => Tensor::integers(&mut random, shape, 0, 256),
                DType::U32 => Tensor::integers(&mut random, shape, 0, 99),
                DType::I32 | DType::I64 => Tensor::integers(&mut random, shape, -99, 99),
                _ => rounded(&Tensor::random(&mut random, shape, -3.0, 3.0), dtype),
            };
            let x = made(x, dtype);
            for axis in 0..shape.len() {
                let layouts = layouts(runtime, &x, dtype).into_iter();
                for (layout, array) in layouts.filter(|(layout, _)| is_mine(&(dtype, shape, layout, axis))) {
                    case(&format!("{dtype} {shape:?} {layout} along {axis}"), dtype, axis, &x, &array);
                }
            }
        }
    }
}

/// The values as they are.
fn plain(x: Tensor, _: DType) -> Tensor {
    x
}

fn sums(runtime: &Runtime) {
    each(runtime, FLOATS.into_iter().chain(INTEGERS), plain, |what, dtype, axis, x, array| {
        let want = reduce(&last(x, axis), |x| x.iter().sum());
        let want = if dtype == DType::U8 { want.map(|x| x.rem_euclid(256.0)) } else { want };
        expect(&format!("sum of {what}"), &array.sum(axis as isize).expect("defined for numbers"), &want);
    });
}

/// Floats of two axes and more with a NaN in one row, whichever axis the rows are along.
fn with_a_nan(mut x: Tensor, dtype: DType) -> Tensor {
    if dtype.is_float() && x.shape.len() > 1 {
        let middle = x.values.len() / 2;
        x.values[middle] = f64::NAN;
    }
    x
}

fn extremes(runtime: &Runtime, reduction: Reduction, oracle: fn(&[f64]) -> f64) {
    each(runtime, FLOATS.into_iter().chain(INTEGERS), with_a_nan, |what, _, axis, x, array| {
        let y = array.reduce(reduction, axis as isize).expect("defined for numbers");
        same(&format!("{} of {what}", reduction.name()), &y, &reduce(&last(x, axis), oracle));
    });
}

fn mean(runtime: &Runtime) {
    each(runtime, FLOATS, plain, |what, _, axis, x, array| {
        let want = reduce(&last(x, axis), |x| x.iter().sum::<f64>() / x.len() as f64);
        expect(&format!("mean of {what}"), &array.mean(axis as isize).expect("defined for floats"), &want);
    });
}

fn product(runtime: &Runtime) {
    let mut random = Random::new(31);
    for dtype in [DType::F32, DType::I64] {
        let x = Tensor::integers(&mut random, &[67, 9], -3, 4);
        let y = upload(runtime, &x, dtype).reduce(Reduction::Prod, 1).expect("defined for numbers");
        expect(&format!("prod of {dtype}"), &y, &reduce(&x, |x| x.iter().product::<f64>() + 0.0));
    }
}

fn flags(runtime: &Runtime, reduction: Reduction, oracle: fn(&[f64]) -> bool) {
    let mut random = Random::new(32);
    let rare = Tensor::random(&mut random, &[129, 7], 0.0, 1.0);
    for threshold in [0.1, 0.9] {
        let x = rare.map(|x| f64::from(u8::from(x < threshold)));
        let y = upload(runtime, &x, DType::Bool).reduce(reduction, 1).expect("defined for flags");
        expect(reduction.name(), &y, &reduce(&x, |x| f64::from(u8::from(oracle(x)))));
    }
}

fn empty_rows(runtime: &Runtime) {
    let x = Array::zeros(runtime, [3, 0], DType::F32).expect("an empty array");
    assert_eq!(download(&x.sum(1).expect("a sum of nothing")), [0.0; 3]);
    assert_eq!(download(&x.reduce(Reduction::Prod, 1).expect("a product of nothing")), [1.0; 3]);
    assert!(x.max(1).is_err() && x.argmax(1).is_err() && x.mean(1).is_err());
    assert_eq!(download(&x.sum(0).expect("no columns")), [0.0; 0]);
}

fn arg(runtime: &Runtime, largest: bool) {
    // Few different floats, so that some are equal.
    let rough = |x: Tensor, dtype: DType| if dtype.is_float() { x.map(|x| (x / 2.0).round()) } else { x };
    each(runtime, FLOATS.into_iter().chain(INTEGERS), rough, |what, _, axis, x, array| {
        let want = reduce(&last(x, axis), |row| argsort(row, largest)[0] as f64);
        let axis = axis as isize;
        let y = if largest { array.argmax(axis) } else { array.argmin(axis) }.expect("the axis has elements");
        expect(&format!("arg of {what}"), &y, &want);
    });
}

fn softmaxes(runtime: &Runtime) {
    each(runtime, FLOATS, plain, |what, _, axis, x, array| {
        let want = back(&softmax(&last(x, axis)), axis);
        expect(&format!("softmax of {what}"), &array.softmax(axis as isize).expect("floats"), &want);
    });
    let masked = Array::from_slice(runtime, &[f32::NEG_INFINITY, 200.0, 200.0], [3]).expect("memory");
    assert_eq!(download(&masked.softmax(0).expect("floats")), [0.0, 0.5, 0.5]);
}

fn cumsums(runtime: &Runtime) {
    for (reverse, exclusive) in [(false, false), (false, true), (true, false), (true, true)] {
        each(runtime, [DType::F32, DType::I32, DType::I64], plain, |what, _, axis, x, array| {
            let want = back(&cumsum(&last(x, axis), reverse, exclusive), axis);
            let y = array.cumsum(axis as isize, reverse, exclusive).expect("numbers");
            expect(&format!("cumsum of {what}, reverse {reverse}, exclusive {exclusive}"), &y, &want);
        });
    }
}

/// Values of which many are equal. Each row of floats has a NaN.
fn with_equals(x: Tensor, dtype: DType) -> Tensor {
    let mut x = x.map(|x| (x / 3.0).round());
    if dtype.is_float() {
        let width = x.width();
        x.values.chunks_mut(width).for_each(|row| row[width / 2] = f64::NAN);
    }
    x
}

fn sorts(runtime: &Runtime) {
    for descending in [false, true] {
        let dtypes = [DType::F32, DType::BF16, DType::U32, DType::I64];
        each(runtime, dtypes, with_equals, |what, _, axis, x, array| {
            let (values, indices) = sorted(&last(x, axis), descending, x.shape[axis]);
            let y = array.sort(axis as isize, descending).expect("any type");
            expect(&format!("sorted indices of {what}"), &y.indices, &back(&indices, axis));
            same(&format!("sorted values of {what}"), &y.values, &back(&values, axis));
        });
    }
}

fn top_ks(runtime: &Runtime) {
    each(runtime, [DType::F32, DType::F16, DType::I32], with_equals, |what, _, axis, x, array| {
        for k in [0, 1, 2, 20, x.shape[axis]] {
            let k = k.min(x.shape[axis]);
            let (values, indices) = sorted(&last(x, axis), true, k);
            let y = array.top_k(k, axis as isize).expect("enough elements");
            expect(&format!("top {k} indices of {what}"), &y.indices, &back(&indices, axis));
            same(&format!("top {k} values of {what}"), &y.values, &back(&values, axis));
        }
    });
}

/// Asserts equality, with NaN equal to itself.
#[track_caller]
fn same(what: &str, got: &Array, want: &Tensor) {
    assert_eq!(got.shape()[..], want.shape[..], "{what}: shape");
    let key = |x: &f64| if x.is_nan() { f64::MAX } else { *x };
    let got: Vec<f64> = download(got).iter().map(key).collect();
    assert_eq!(got, want.values.iter().map(key).collect::<Vec<_>>(), "{what}");
}

fn layer_norms(runtime: &Runtime) {
    let mut random = Random::new(33);
    for dtype in FLOATS {
        for shape in SHAPES.iter().filter(|s| s[s.len() - 1] > 1) {
            let x = rounded(&Tensor::random(&mut random, shape, -3.0, 5.0), dtype);
            let mut row = || rounded(&Tensor::random(&mut random, &[x.width()], -1.0, 2.0), dtype);
            let (w, b) = (row(), row());
            let want = layer_norm(&x, &w.values, &b.values, f64::from(1e-5f32));
            for (layout, array) in layouts(runtime, &x, dtype) {
                let (w, b) = (upload(runtime, &w, dtype), upload(runtime, &b, dtype));
                let y = array.layer_norm(&w, &b, 1e-5).expect("shapes fit");
                expect(&format!("layer_norm of {dtype} {shape:?} {layout}"), &y, &want);
            }
        }
    }
}
