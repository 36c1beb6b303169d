//! Element-wise operations.

use super::{Check, FLOATS, INTEGERS, download, expect, layouts, rounded, upload};
use crate::cases::elementwise::{BROADCASTS, SHAPES};
use crate::compare::assert_each_close;
use crate::naive::elementwise::{binary, gelu, gelu_tanh, select, sigmoid, silu, softplus};
use crate::naive::tensor::Tensor;
use crate::random::Random;
use crate::tolerance;
use half::f16;
use keel_array::{Array, DType, Result, Runtime};

pub(super) const CHECKS: &[Check] = &[
    Check { op: "neg", run: |r| unary(r, "neg", Array::neg, |x| -x, -9.0, TINY) },
    Check { op: "neg", run: |r| integer_unary(r, "neg", Array::neg, |x| -x) },
    Check { op: "abs", run: |r| unary(r, "abs", Array::abs, f64::abs, -9.0, TINY) },
    Check { op: "abs", run: |r| integer_unary(r, "abs", Array::abs, f64::abs) },
    Check { op: "exp", run: |r| unary(r, "exp", Array::exp, f64::exp, -9.0, TINY) },
    Check { op: "log", run: |r| unary(r, "log", Array::log, f64::ln, 0.01, TINY) },
    Check { op: "sqrt", run: |r| unary(r, "sqrt", Array::sqrt, f64::sqrt, 0.0, TINY) },
    Check { op: "rsqrt", run: |r| unary(r, "rsqrt", Array::rsqrt, |x| 1.0 / x.sqrt(), 0.01, TINY) },
    Check { op: "sin", run: |r| unary(r, "sin", Array::sin, f64::sin, -9.0, TINY) },
    Check { op: "cos", run: |r| unary(r, "cos", Array::cos, f64::cos, -9.0, TINY) },
    Check { op: "tanh", run: |r| unary(r, "tanh", Array::tanh, f64::tanh, -9.0, TINY) },
    Check { op: "sigmoid", run: |r| unary(r, "sigmoid", Array::sigmoid, sigmoid, -9.0, TINY) },
    Check { op: "silu", run: |r| unary(r, "silu", Array::silu, silu, -9.0, TINY) },
    Check { op: "softplus", run: |r| unary(r, "softplus", Array::softplus, softplus, -30.0, TINY) },
    Check { op: "gelu", run: |r| unary(r, "gelu", Array::gelu, gelu, -9.0, 1.0) },
    Check { op: "gelu_tanh", run: |r| unary(r, "gelu_tanh", Array::gelu_tanh, gelu_tanh, -9.0, 1e-3) },
    Check { op: "not", run: not },
    Check { op: "add", run: |r| arithmetic(r, "add", Array::add, |a, b| a + b) },
    Check { op: "sub", run: |r| arithmetic(r, "sub", Array::sub, |a, b| a - b) },
    Check { op: "mul", run: |r| arithmetic(r, "mul", Array::mul, |a, b| a * b) },
    Check { op: "div", run: division },
    Check { op: "maximum", run: |r| arithmetic(r, "maximum", Array::maximum, f64::max) },
    Check { op: "minimum", run: |r| arithmetic(r, "minimum", Array::minimum, f64::min) },
    Check { op: "maximum", run: not_a_number_wins },
    Check { op: "pow", run: power },
    Check { op: "equal", run: |r| comparison(r, "equal", Array::equal, |a, b| a == b) },
    Check { op: "less", run: |r| comparison(r, "less", Array::less, |a, b| a < b) },
    Check { op: "less_equal", run: |r| comparison(r, "less_equal", Array::less_equal, |a, b| a <= b) },
    Check { op: "and", run: |r| logical(r, "and", Array::logical_and, |a, b| a && b) },
    Check { op: "or", run: |r| logical(r, "or", Array::logical_or, |a, b| a || b) },
    Check { op: "where", run: selection },
    Check { op: "cast", run: casts },
    Check { op: "cast", run: cast_edges },
    Check { op: "mul", run: wrapping },
    Check { op: "fused", run: fused },
];

type UnaryFn = fn(&Array) -> Result<Array>;
type BinaryFn = fn(&Array, &Array) -> Result<Array>;

/// Results below this have a bound relative to this. It is wide enough for results that are flushed to zero because
/// they are smaller than every normal f32.
const TINY: f64 = 1e-30;

/// Each result has a bound relative to its own size, or to `small` if it is smaller: there the function cancels. Also
/// for inputs where the exponential of its argument overflows.
fn unary(runtime: &Runtime, op: &str, apply: UnaryFn, oracle: fn(f64) -> f64, low: f32, small: f64) {
    let mut random = Random::new(1);
    let far: Vec<f64> = [-100.0, -20.0, 20.0, 100.0].into_iter().filter(|x| low < 0.0 || *x > 0.0).collect();
    for dtype in FLOATS {
        let (tolerance, small) = match dtype {
            DType::F16 => (tolerance::F16_STORED, small.max(f16::MIN_POSITIVE.to_f64())),
            DType::BF16 => (tolerance::BF16_STORED, small),
            _ => (tolerance::F32, small),
        };
        let mut inputs: Vec<Tensor> = vec![Tensor { shape: vec![far.len()], values: far.clone() }];
        inputs.extend(
            SHAPES
                .iter()
                .map(|shape| rounded(&Tensor::random(&mut random, shape, low, low.abs().max(9.0)), dtype)),
        );
        for x in inputs {
            let want = x.map(oracle);
            // Values that overflow the type are infinite. Other results are not rounded: the tolerance is for that.
            let stored = rounded(&want, dtype).values.into_iter().zip(&want.values);
            let want: Vec<f64> = stored.map(|(y, want)| if y.is_infinite() { y } else { *want }).collect();
            for (layout, array) in layouts(runtime, &x, dtype) {
                let y = apply(&array).expect("defined for floats");
                assert_eq!(y.shape()[..], x.shape[..], "{op}: shape");
                let y: Vec<f32> = download(&y).into_iter().map(|y| y as f32).collect();
                let what = format!("{op} of {dtype} {:?} {layout}", x.shape);
                assert_each_close(&what, &y, &want, tolerance, small);
            }
        }
    }
}

fn integer_unary(runtime: &Runtime, op: &str, apply: UnaryFn, oracle: fn(f64) -> f64) {
    let mut random = Random::new(2);
    for dtype in [DType::I32, DType::I64] {
        let x = Tensor::integers(&mut random, &[5, 67], -100, 100);
        for (layout, array) in layouts(runtime, &x, dtype) {
            expect(&format!("{op} of {dtype} {layout}"), &apply(&array).expect("defined"), &x.map(oracle));
        }
    }
}

fn not(runtime: &Runtime) {
    let x = Tensor::integers(&mut Random::new(3), &[7, 129], 0, 2);
    for (layout, array) in layouts(runtime, &x, DType::Bool) {
        let y = array.logical_not().expect("defined for flags");
        expect(&format!("not {layout}"), &y, &x.map(|x| 1.0 - x));
    }
}

fn arithmetic(runtime: &Runtime, op: &str, apply: BinaryFn, oracle: fn(f64, f64) -> f64) {
    let mut random = Random::new(4);
    let cases = SHAPES.iter().map(|s| (*s, *s, *s)).chain(BROADCASTS.iter().copied());
    for (left, right, shape) in cases {
        for dtype in FLOATS.into_iter().chain(INTEGERS) {
            let mut operand = |shape: &[usize]| match dtype {
                // So small that no sum, difference or product overflows the type.
                DType::U8 | DType::U32 => Tensor::integers(&mut random, shape, 8, 15),
                DType::I32 | DType::I64 => Tensor::integers(&mut random, shape, -99, 99),
                _ => rounded(&Tensor::random(&mut random, shape, -3.0, 3.0), dtype),
            };
            let (a, b) = (operand(left), operand(right));
            let want = match dtype {
                // Negative differences of unsigned numbers wrap.
                DType::U8 => binary(&a, &b, shape, oracle).map(|x| x.rem_euclid(256.0)),
                DType::U32 => binary(&a, &b, shape, oracle).map(|x| x.rem_euclid(4_294_967_296.0)),
                _ => binary(&a, &b, shape, oracle),
            };
            for (layout, array) in layouts(runtime, &a, dtype) {
                let y = apply(&array, &upload(runtime, &b, dtype)).expect("shapes broadcast");
                expect(&format!("{op} of {dtype} {left:?} {layout} and {right:?}"), &y, &want);
            }
        }
    }
}

fn division(runtime: &Runtime) {
    let mut random = Random::new(5);
    for dtype in FLOATS {
        let a = rounded(&Tensor::random(&mut random, &[5, 67], -3.0, 3.0), dtype);
        let b = rounded(&Tensor::random(&mut random, &[5, 67], 0.5, 3.0), dtype);
        let y = upload(runtime, &a, dtype).div(&upload(runtime, &b, dtype)).expect("one shape");
        expect(&format!("div of {dtype}"), &y, &binary(&a, &b, &a.shape, |a, b| a / b));
    }
    let a = Tensor::integers(&mut random, &[300], -99, 99);
    let b = Tensor::integers(&mut random, &[300], -3, 4);
    let y = upload(runtime, &a, DType::I32).div(&upload(runtime, &b, DType::I32)).expect("one shape");
    expect(
        "div of i32",
        &y,
        &binary(&a, &b, &a.shape, |a, b| if b == 0.0 { 0.0 } else { (a / b).trunc() + 0.0 }),
    );
}

fn power(runtime: &Runtime) {
    let mut random = Random::new(6);
    let a = rounded(&Tensor::random(&mut random, &[7, 33], 0.1, 3.0), DType::F32);
    let b = rounded(&Tensor::random(&mut random, &[33], -2.0, 3.0), DType::F32);
    let y = upload(runtime, &a, DType::F32).pow(&upload(runtime, &b, DType::F32)).expect("shapes broadcast");
    expect("pow", &y, &binary(&a, &b, &a.shape, f64::powf));
}

fn not_a_number_wins(runtime: &Runtime) {
    let a = Array::from_slice(runtime, &[f32::NAN, 1.0, f32::NAN, 2.0], [4]).expect("memory");
    let b = Array::from_slice(runtime, &[1.0, f32::NAN, f32::NAN, 3.0], [4]).expect("memory");
    for y in [a.maximum(&b), a.minimum(&b)] {
        let y = download(&y.expect("one shape"));
        assert!(y[..3].iter().all(|x| x.is_nan()) && !y[3].is_nan(), "{y:?}");
    }
}

fn comparison(runtime: &Runtime, op: &str, apply: BinaryFn, oracle: fn(f64, f64) -> bool) {
    let mut random = Random::new(7);
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::U8, DType::U32, DType::I32, DType::I64] {
        for (left, right, shape) in BROADCASTS {
            let mut operand = |shape: &[usize]| Tensor::integers(&mut random, shape, 0, 4);
            let (a, b) = (operand(left), operand(right));
            let y =
                apply(&upload(runtime, &a, dtype), &upload(runtime, &b, dtype)).expect("shapes broadcast");
            let want = binary(&a, &b, shape, |a, b| f64::from(u8::from(oracle(a, b))));
            expect(&format!("{op} of {dtype} {left:?} and {right:?}"), &y, &want);
        }
    }
    let nan = Array::from_slice(runtime, &[f32::NAN], [1]).expect("memory");
    assert_eq!(download(&apply(&nan, &nan).expect("one shape")), [0.0], "{op} of what is not a number");
}

fn logical(runtime: &Runtime, op: &str, apply: BinaryFn, oracle: fn(bool, bool) -> bool) {
    let mut random = Random::new(8);
    let a = Tensor::integers(&mut random, &[5, 67], 0, 2);
    let b = Tensor::integers(&mut random, &[5, 67], 0, 2);
    for (layout, array) in layouts(runtime, &a, DType::Bool) {
        let y = apply(&array, &upload(runtime, &b, DType::Bool)).expect("flags");
        let want = binary(&a, &b, &a.shape, |a, b| f64::from(u8::from(oracle(a != 0.0, b != 0.0))));
        expect(&format!("{op} {layout}"), &y, &want);
    }
}

fn selection(runtime: &Runtime) {
    let mut random = Random::new(9);
    for dtype in FLOATS.into_iter().chain(INTEGERS) {
        for shape in SHAPES {
            let condition = Tensor::integers(&mut random, shape, 0, 2);
            let (a, b) =
                (Tensor::integers(&mut random, shape, 0, 9), Tensor::integers(&mut random, shape, 9, 19));
            for (layout, flags) in layouts(runtime, &condition, DType::Bool) {
                let y = flags
                    .select(&upload(runtime, &a, dtype), &upload(runtime, &b, dtype))
                    .expect("one shape");
                expect(&format!("where of {dtype} {shape:?} {layout}"), &y, &select(&condition, &a, &b));
            }
        }
    }
}

fn casts(runtime: &Runtime) {
    let types = FLOATS.into_iter().chain(INTEGERS).chain([DType::Bool]);
    for (from, to) in types.clone().flat_map(|a| types.clone().map(move |b| (a, b))) {
        let high = if from == DType::Bool { 2 } else { 120 };
        let x = Tensor::integers(&mut Random::new(10), &[3, 89], 0, high);
        let want = if to == DType::Bool { x.map(|x| f64::from(u8::from(x != 0.0))) } else { x.clone() };
        for (layout, array) in layouts(runtime, &x, from) {
            expect(&format!("cast of {from} {layout} to {to}"), &array.cast(to).expect("any types"), &want);
        }
    }
}

fn cast_edges(runtime: &Runtime) {
    let x = [f32::NAN, 3e9, -3e9, -1.5, 1.5, f32::INFINITY, f32::NEG_INFINITY, 1e20];
    let x = Array::from_slice(runtime, &x, [8]).expect("memory");
    let to = |dtype| download(&x.cast(dtype).expect("any types"));
    let (low, high) = (f64::from(i32::MIN), f64::from(i32::MAX));
    assert_eq!(to(DType::I32), [0.0, high, low, -1.0, 1.0, high, low, high], "f32 to i32");
    assert_eq!(to(DType::U8), [0.0, 255.0, 0.0, 0.0, 1.0, 255.0, 0.0, 255.0], "f32 to u8");
    assert_eq!(to(DType::Bool), [1.0; 8], "f32 to bool");
    let wide = Array::from_slice(runtime, &[-1i64, 1 << 32, 300], [3]).expect("memory");
    assert_eq!(download(&wide.cast(DType::U8).expect("any types")), [255.0, 0.0, 44.0], "i64 to u8");
    // Midpoints of bf16 at 2^25 and at 2^40, and their neighbours. The nearest f32 of a neighbour is the midpoint.
    let (step, high) = (1i64 << 18, 1i64 << 40);
    let middle = (1 << 25) + step / 2;
    let wide = [
        middle,
        middle + 1,
        middle - 1,
        -middle - 1,
        high + (1 << 32),
        high + (1 << 32) + 1,
        i64::MAX,
        i64::MIN,
    ];
    let wide = Array::from_slice(runtime, &wide, [8]).expect("memory");
    let (low, above) = (f64::from(1 << 25), f64::from((1 << 25) + (1 << 18)));
    let (two_40, two_63) = (2f64.powi(40), 2f64.powi(63));
    let want = [low, above, low, -above, two_40, two_40 + 2f64.powi(33), two_63, -two_63];
    assert_eq!(download(&wide.cast(DType::BF16).expect("any types")), want, "i64 to bf16 rounds once");
    let wide = Array::from_slice(runtime, &[2049i64, 2051, 65_519, 65_520, -(1 << 40)], [5]).expect("memory");
    let want = [2048.0, 2052.0, 65_504.0, f64::INFINITY, f64::NEG_INFINITY];
    assert_eq!(download(&wide.cast(DType::F16).expect("any types")), want, "i64 to f16");
}

fn wrapping(runtime: &Runtime) {
    let x = Array::from_slice(runtime, &[i64::MAX, i64::MIN, 3], [3]).expect("memory");
    let y = x.mul(&x).expect("one shape").to_vec::<i64>().expect("a case runs");
    assert_eq!(y, [1, 0, 9], "products of i64 wrap");
    let x = Array::from_slice(runtime, &[i32::MAX, i32::MIN], [2]).expect("memory");
    let y = x.add(&x).expect("one shape").to_vec::<i32>().expect("a case runs");
    assert_eq!(y, [-2, 0], "sums of i32 wrap");
}

/// A chain longer than the limit of one kernel, with broadcast inputs.
fn fused(runtime: &Runtime) {
    let mut random = Random::new(11);
    for shape in [&[3, 5, 67][..], &[4099], &[2, 1]] {
        let x = rounded(&Tensor::random(&mut random, shape, -2.0, 2.0), DType::F32);
        let w = rounded(&Tensor::random(&mut random, &shape[shape.len() - 1..], 0.5, 1.5), DType::F32);
        let (xs, ws) = (upload(runtime, &x, DType::F32), upload(runtime, &w, DType::F32));
        let (mut array, mut want) = (xs.clone(), x.clone());
        for _ in 0..15 {
            array =
                array.sigmoid().and_then(|y| y.mul(&ws)).and_then(|y| y.add(&xs)).expect("shapes broadcast");
            let y = binary(&want.map(sigmoid), &w, shape, |a, b| a * b);
            want = binary(&y, &x, shape, |a, b| a + b);
        }
        expect(&format!("fused {shape:?}"), &array, &want);
    }
}
