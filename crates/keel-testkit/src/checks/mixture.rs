//! The mixture of experts: products of gathered experts, routing, and the sum of their outputs.

use super::linear::{affine_scaled_by, affine_weight, dense_stack, floats};
use super::nearest::{expect_nearest, typical_sum};
use super::{Check, FLOATS, expect, expect_within, rounded, upload};
use crate::cases::linear::{SCALES, weights, weights_scaled_by};
use crate::compare::assert_close;
use crate::naive::experts;
use crate::naive::linear::{Affine, gather_linear, gather_stack};
use crate::naive::tensor::Tensor;
use crate::random::Random;
use crate::tolerance;
use keel_array::{Array, Compute, DType, Runtime, SharedExpert};

pub(super) const CHECKS: &[Check] = &[
    Check { op: "gather_linear", run: gathered },
    Check { op: "gather_linear", run: gathered_from_dense },
    Check { op: "gather_linear", run: more_rows_than_a_grid_has_blocks },
    Check { op: "gather_linear", run: expert_out_of_range },
    Check { op: "route_top_k", run: routing },
    Check { op: "route_top_k", run: broken_routing },
    Check { op: "combine_experts", run: combination },
];

fn gathered(runtime: &Runtime) {
    let mut random = Random::new(54);
    let cases = [
        (1, 2, 5, 33, 64, (4, 32), Compute::F32, tolerance::F32),
        (7, 3, 4, 17, 128, (4, 32), Compute::F32, tolerance::F32),
        (65, 2, 9, 31, 64, (4, 32), Compute::F32, tolerance::F32),
        (1, 3, 5, 65, 192, (4, 32), Compute::Bf16, tolerance::BF16_ACTIVATIONS),
        (33, 4, 7, 95, 128, (4, 32), Compute::Bf16, tolerance::BF16_ACTIVATIONS),
        (95, 3, 257, 33, 64, (4, 32), Compute::Bf16, tolerance::BF16_ACTIVATIONS),
        (400, 3, 512, 17, 64, (4, 32), Compute::Bf16, tolerance::BF16_ACTIVATIONS),
        (1, 3, 5, 33, 192, (4, 64), Compute::Auto, tolerance::INT8_ACTIVATIONS),
        (33, 4, 7, 65, 128, (4, 64), Compute::Auto, tolerance::INT8_ACTIVATIONS),
        (1, 3, 5, 65, 192, (8, 64), Compute::Auto, tolerance::INT8_ACTIVATIONS),
        (65, 2, 9, 31, 128, (8, 64), Compute::Auto, tolerance::INT8_ACTIVATIONS),
        (1, 3, 5, 80, 192, (3, 64), Compute::Auto, tolerance::INT8_ACTIVATIONS),
        (70, 2, 5, 80, 192, (3, 32), Compute::Auto, tolerance::INT8_ACTIVATIONS),
        (5, 2, 5, 80, 192, (6, 32), Compute::Auto, tolerance::INT8_ACTIVATIONS),
        (70, 2, 5, 80, 192, (6, 64), Compute::Auto, tolerance::INT8_ACTIVATIONS),
    ];
    for (case, (tokens, choices, experts, n, k, (bits, group), compute, limit)) in
        cases.into_iter().enumerate()
    {
        let scale_dtype = SCALES[case % SCALES.len()];
        let stack: Vec<Affine> =
            (0..experts).map(|_| weights_scaled_by(&mut random, [n, k], bits, group, scale_dtype)).collect();
        let weight = affine_scaled_by(runtime, &stack, bits, scale_dtype, compute);
        let all: Vec<f32> = stack.iter().flat_map(Affine::weights).collect();
        let chosen = Tensor::integers(&mut random, &[tokens, choices], 0, experts as i64);
        let choice: Vec<u32> = chosen.values.iter().map(|&e| e as u32).collect();
        for shape in [&[tokens, k][..], &[tokens, choices, k]] {
            let x = rounded(&Tensor::random(&mut random, shape, -1.0, 1.0), DType::F32);
            let array = upload(runtime, &x, DType::F32);
            let x = floats(&x);
            let multiplied = |x: &[f32]| gather_stack(x, &all, [experts, k], &choice);
            let (want, typical) = (gather_linear(&x, &stack, &choice), typical_sum(&x, &all, k));
            for dtype in [DType::U32, DType::I32] {
                let y = array.gather_linear(&weight, &upload(runtime, &chosen, dtype)).expect("extents fit");
                let what = format!(
                    "gather_linear of {shape:?}, {bits} bits in groups of {group} by {scale_dtype}, {compute:?}"
                );
                expect_within(&what, &y, &want, limit);
                if compute == Compute::Auto {
                    expect_nearest(&what, &y, &x, &[group], typical, multiplied);
                }
            }
        }
    }
}

/// Stacks of floats. Those of 16 bits have enough rows for tensor cores, or too few.
fn gathered_from_dense(runtime: &Runtime) {
    const EXPERTS: usize = 7;
    const CHOICES: usize = 2;
    // Whole eights of columns, and no whole tile.
    const K: usize = 72;
    let mut random = Random::new(60);
    for dtype in FLOATS {
        for n in [80, 33] {
            let stack = floats(&rounded(&Tensor::random(&mut random, &[EXPERTS, n, K], -1.0, 1.0), dtype));
            for (compute, limit) in
                [(Compute::F32, tolerance::F32), (Compute::Auto, tolerance::BF16_ACTIVATIONS)]
            {
                let weight = dense_stack(runtime, &stack, [EXPERTS, n, K], dtype, compute);
                for tokens in [1, 5, 70] {
                    let x = rounded(&Tensor::random(&mut random, &[tokens, K], -1.0, 1.0), DType::F32);
                    let choice: Vec<u32> =
                        (0..tokens * CHOICES).map(|_| random.below(EXPERTS) as u32).collect();
                    let chosen = Array::from_slice(runtime, &choice, [tokens, CHOICES]).expect("memory");
                    let y = upload(runtime, &x, DType::F32).gather_linear(&weight, &chosen);
                    let what =
                        format!("gather_linear [{tokens}, {CHOICES}, {n}, {K}] of {dtype}, {compute:?}");
                    let want = gather_stack(&floats(&x), &stack, [EXPERTS, K], &choice);
                    expect_within(&what, &y.expect("extents fit"), &want, limit);
                }
            }
        }
    }
}

/// More rows than a GPU's grid has blocks along its second axis. A few of them are compared, around the place where a
/// backend may cut them.
fn more_rows_than_a_grid_has_blocks(runtime: &Runtime) {
    const TOKENS: usize = 8_200;
    const CHOICES: usize = 8;
    // More experts than a backend sorts rows by.
    const EXPERTS: usize = 520;
    const K: usize = 32;
    let mut random = Random::new(56);
    let x = rounded(&Tensor::random(&mut random, &[TOKENS, K], -1.0, 1.0), DType::F32);
    let chosen: Vec<u32> = (0..TOKENS * CHOICES).map(|_| random.below(EXPERTS) as u32).collect();
    let choice = Array::from_slice(runtime, &chosen, [TOKENS, CHOICES]).expect("memory");
    let (array, x) = (upload(runtime, &x, DType::F32), floats(&x));
    for (n, compute, limit) in
        [(17, Compute::F32, tolerance::F32), (64, Compute::Auto, tolerance::INT8_ACTIVATIONS)]
    {
        let stack: Vec<Affine> = (0..EXPERTS).map(|_| weights(&mut random, n, K, 4, 32)).collect();
        let weight = affine_weight(runtime, &stack, 4, compute);
        let y = array.gather_linear(&weight, &choice).expect("extents fit");
        let y = y.to_vec::<f32>().expect("a case runs");
        for tokens in [0..2, 65_535 / CHOICES - 1..65_535 / CHOICES + 2, TOKENS - 2..TOKENS] {
            let rows = tokens.start * CHOICES..tokens.end * CHOICES;
            let (x, chosen) = (&x[tokens.start * K..tokens.end * K], &chosen[rows.clone()]);
            let want = gather_linear(x, &stack, chosen);
            let what = format!("rows {rows:?} of gather_linear, {compute:?}");
            assert_close(&what, &y[rows.start * n..rows.end * n], &want, limit);
        }
    }
}

fn expert_out_of_range(runtime: &Runtime) {
    let x = Array::zeros(runtime, [2, 64], DType::F32).expect("an addressable shape");
    let chosen = Array::from_slice(runtime, &[2u32, 3], [2, 1]).expect("memory");
    for (n, compute) in [(6, Compute::F32), (96, Compute::Auto)] {
        let stack: Vec<Affine> = (0..3).map(|_| weights(&mut Random::new(55), n, 64, 4, 32)).collect();
        let weight = affine_weight(runtime, &stack, 4, compute);
        let product = || x.gather_linear(&weight, &chosen).expect("extents fit");
        // A backend may run the product within SwiGLU. The experts are still the product's.
        for y in [product(), product().swiglu().expect("an even width")] {
            let error = y.eval().expect_err("no such expert").to_string();
            assert!(error.contains("gather_linear: expert 3 of a stack of 3"), "{error}");
        }
    }
}

fn routing(runtime: &Runtime) {
    let mut random = Random::new(57);
    for (tokens, count, k) in [(1, 4, 1), (5, 60, 4), (67, 129, 8), (3, 7, 7)] {
        for normalise in [false, true] {
            // Few different values, so that some are equal.
            let logits = Tensor::integers(&mut random, &[tokens, count], -5, 6).map(|x| x / 2.0);
            let (weights, chosen) = experts::route_top_k(&floats(&logits), count, k, normalise);
            let y = upload(runtime, &logits, DType::F32).route_top_k(k, normalise).expect("enough experts");
            expect("weights of experts", &y.weights, &Tensor { shape: vec![tokens, k], values: weights });
            assert_eq!(y.experts.to_vec::<u32>().expect("a case runs"), chosen, "experts");
        }
    }
}

/// Rows with NaN and with negative infinity. NaN comes last and has no weight; a row of nothing but NaN still names
/// experts that exist, and its weights are NaN.
fn broken_routing(runtime: &Runtime) {
    let mut random = Random::new(59);
    for (count, k) in [(7, 7), (60, 4), (129, 40), (600, 5)] {
        let mut logits = Tensor::integers(&mut random, &[4, count], -5, 6).map(|x| x / 2.0);
        for (i, x) in logits.values.iter_mut().enumerate() {
            match (i / count, i % count) {
                // Every row but the last keeps at least one number. Row 1 keeps no other, so that NaN is chosen.
                (0, at) if at % 3 == 0 => *x = f64::NAN,
                (1, at) if at != count / 2 => *x = if at % 2 == 0 { f64::NAN } else { f64::NEG_INFINITY },
                (2, at) if at % 5 == 1 => *x = f64::NEG_INFINITY,
                (3, _) => *x = f64::NAN,
                _ => {}
            }
        }
        for normalise in [false, true] {
            let (weights, chosen) = experts::route_top_k(&floats(&logits), count, k, normalise);
            let y = upload(runtime, &logits, DType::F32).route_top_k(k, normalise).expect("enough experts");
            let what = format!("{k} of {count} experts with NaN");
            assert_eq!(y.experts.to_vec::<u32>().expect("a case runs"), chosen, "{what}");
            let got = y.weights.to_vec::<f32>().expect("a case runs");
            let (sound, broken) = got.split_at(3 * k);
            assert_close(&what, sound, &weights[..3 * k], tolerance::F32);
            assert!(broken.iter().all(|x| x.is_nan()), "{what}: {broken:?}");
        }
    }
}

fn combination(runtime: &Runtime) {
    let mut random = Random::new(58);
    for (tokens, choices, width) in [(1, 2, 33), (7, 3, 256), (65, 8, 17)] {
        let mut draw = |shape: &[usize]| rounded(&Tensor::random(&mut random, shape, -1.0, 1.0), DType::F32);
        let (y, w, r) = (draw(&[tokens, choices, width]), draw(&[tokens, choices]), draw(&[tokens, width]));
        let (shared, gate) = (draw(&[tokens, width]), draw(&[tokens, 1]));
        let up = |x: &Tensor| upload(runtime, x, DType::F32);
        let none = Tensor { values: vec![0.0; r.values.len()], ..r.clone() };
        for (with_shared, with_residual) in [(false, true), (true, true), (false, false), (true, false)] {
            let (s, g) = (floats(&shared), floats(&gate));
            let oracle = with_shared.then_some((&s[..], &g[..]));
            let added = floats(if with_residual { &r } else { &none });
            let values = experts::combine(&floats(&y), &floats(&w), oracle, &added, width);
            let (s, g) = (up(&shared), up(&gate));
            let shared = with_shared.then_some(SharedExpert { output: &s, gate: &g });
            let residual = with_residual.then(|| up(&r));
            let got = up(&y).combine_experts(&up(&w), residual.as_ref(), shared);
            let want = Tensor { shape: vec![tokens, width], values };
            let what = format!("combine_experts, shared {with_shared}, residual {with_residual}");
            expect(&what, &got.expect("shapes fit"), &want);
        }
    }
}
