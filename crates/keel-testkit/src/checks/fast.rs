//! Norms, rotary embedding and gates.

use super::{Check, expect, layouts, rounded, upload};
use crate::cases::rows::SHAPES;
use crate::naive::activation;
use crate::naive::elementwise::binary;
use crate::naive::rms_norm::{gated_rms_norm, rms_norm};
use crate::naive::rope::rope;
use crate::naive::rotate_pairs::rotate_pairs;
use crate::naive::tensor::Tensor;
use crate::random::Random;
use keel_array::{Array, DType, PairRotation, RopeSpec, Runtime};

pub(super) const CHECKS: &[Check] = &[
    Check { op: "rms_norm", run: norm },
    Check { op: "rms_norm", run: norm_of_broadcast_rows },
    Check { op: "add_rms_norm", run: add_norm },
    Check { op: "gated_rms_norm", run: gated_norm },
    Check { op: "rope", run: |r| rotation(r, false) },
    Check { op: "norm_rope", run: |r| rotation(r, true) },
    Check { op: "rotate_pairs", run: pair_rotation },
    Check { op: "swiglu", run: swiglu },
    Check { op: "sigmoid_gate", run: gate },
];

const EPS: f32 = 1e-6;

fn draw(random: &mut Random, shape: &[usize]) -> Tensor {
    rounded(&Tensor::random(random, shape, -2.0, 2.0), DType::F32)
}

fn floats(x: &Tensor) -> Vec<f32> {
    x.values.iter().map(|&x| x as f32).collect()
}

fn up(runtime: &Runtime, x: &Tensor) -> Array {
    upload(runtime, x, DType::F32)
}

fn norm(runtime: &Runtime) {
    let mut random = Random::new(60);
    for &(rows, width) in SHAPES {
        let (x, w) = (draw(&mut random, &[rows, width]), draw(&mut random, &[width]));
        let want = Tensor { shape: x.shape.clone(), values: rms_norm(&floats(&x), &floats(&w), EPS) };
        for (layout, x) in layouts(runtime, &x, DType::F32) {
            let y = x.rms_norm(&up(runtime, &w), EPS).expect("shapes fit");
            expect(&format!("rms_norm [{rows}, {width}] {layout}"), &y, &want);
        }
    }
}

fn pair_rotation(runtime: &Runtime) {
    let mut random = Random::new(69);
    for (rows, k, rounds) in [(1, 64, 8), (7, 66, 3), (33, 130, 1)] {
        let mut pairs: Vec<u32> = Vec::new();
        for _ in 0..rounds {
            let mut columns: Vec<u32> = (0..k as u32).collect();
            (1..k).rev().for_each(|i| columns.swap(i, random.below(i + 1)));
            pairs.extend(columns);
        }
        let angles = random.uniforms(rounds * k / 2, -3.0, 3.0);
        let turns: Vec<f32> = angles.iter().flat_map(|angle| [angle.cos(), angle.sin()]).collect();
        let (x, scales) = (draw(&mut random, &[rows, k]), draw(&mut random, &[k]));
        let rotation = PairRotation {
            scales: up(runtime, &scales),
            pairs: Array::from_slice(runtime, &pairs, [rounds, k]).expect("memory"),
            cos_sin: Array::from_slice(runtime, &turns, [rounds, k]).expect("memory"),
        };
        let rows = floats(&x);
        let turned = rows.chunks_exact(k).flat_map(|x| rotate_pairs(x, &floats(&scales), &pairs, &turns));
        let want = Tensor { shape: x.shape.clone(), values: turned.collect() };
        for (layout, x) in layouts(runtime, &x, DType::F32) {
            let y = x.rotate_pairs(&rotation).expect("shapes fit");
            expect(&format!("rotate_pairs of {k} columns, {layout}"), &y, &want);
        }
        pairs[1] = k as u32;
        let wrong = Array::from_slice(runtime, &pairs, [rounds, k]).expect("memory");
        let y = up(runtime, &x).rotate_pairs(&PairRotation { pairs: wrong, ..rotation }).expect("shapes fit");
        let error = y.eval().expect_err("no such column").to_string();
        assert!(error.contains(&format!("column {k} of {k}")), "{error}");
    }
}

fn norm_of_broadcast_rows(runtime: &Runtime) {
    let mut random = Random::new(61);
    let (x, w) = (draw(&mut random, &[1, 33]), draw(&mut random, &[33]));
    let wide = x.broadcast(&[5, 33]);
    let want = Tensor { shape: vec![5, 33], values: rms_norm(&floats(&wide), &floats(&w), EPS) };
    let y = up(runtime, &x).broadcast_to([5, 33]).and_then(|x| x.rms_norm(&up(runtime, &w), EPS));
    expect("rms_norm of broadcast rows", &y.expect("shapes fit"), &want);
}

fn add_norm(runtime: &Runtime) {
    let mut random = Random::new(62);
    for &(rows, width) in SHAPES {
        let mut rows_of = || draw(&mut random, &[rows, width]);
        let (x, r) = (rows_of(), rows_of());
        let w = draw(&mut random, &[width]);
        let sum = rounded(&binary(&x, &r, &x.shape, |a, b| a + b), DType::F32);
        let norm = Tensor { shape: x.shape.clone(), values: rms_norm(&floats(&sum), &floats(&w), EPS) };
        let kept = up(runtime, &r);
        for residual in [kept.clone(), up(runtime, &r)] {
            let y = up(runtime, &x).add_rms_norm(&residual, &up(runtime, &w), EPS).expect("shapes fit");
            drop(residual);
            expect("the norm of add_rms_norm", &y.norm, &norm);
            expect("the sum of add_rms_norm", &y.sum, &sum);
        }
        expect("the residual", &kept, &r);
    }
}

fn gated_norm(runtime: &Runtime) {
    let mut random = Random::new(63);
    for (tokens, heads, size) in [(1, 2, 16), (5, 3, 33), (67, 4, 64)] {
        let mut heads_of = || draw(&mut random, &[tokens, heads, size]);
        let (x, z) = (heads_of(), heads_of());
        let w = draw(&mut random, &[size]);
        let values = gated_rms_norm(&floats(&x), &floats(&z), &floats(&w), EPS);
        let want = Tensor { shape: x.shape.clone(), values };
        for ((layout, x), (_, z)) in
            layouts(runtime, &x, DType::F32).iter().zip(layouts(runtime, &z, DType::F32))
        {
            let y = x.gated_rms_norm(&up(runtime, &w), &z, EPS).expect("shapes fit");
            expect(&format!("gated_rms_norm [{tokens}, {heads}, {size}] {layout}"), &y, &want);
        }
    }
}

/// The row of positions that frequency `i` reads.
fn axis(i: usize, sections: [usize; 3], interleaved: bool) -> usize {
    if interleaved {
        if i / 3 < sections[i % 3] { i % 3 } else { 0 }
    } else {
        usize::from(i >= sections[0]) + usize::from(i >= sections[0] + sections[1])
    }
}

fn rotation(runtime: &Runtime, with_norm: bool) {
    let mut random = Random::new(64);
    for (tokens, heads, size, rotary) in [(1, 2, 8, 8), (5, 3, 32, 12), (67, 4, 64, 64), (3, 1, 20, 0)] {
        let third = rotary / 6;
        let split = Some([rotary / 2 - 2 * third, third, third]);
        for (sections, interleaved) in [(None, false), (split, false), (split, true)] {
            let x = draw(&mut random, &[tokens, heads, size]);
            let w = draw(&mut random, &[size]);
            let rows = if sections.is_some() { vec![3, tokens] } else { vec![tokens] };
            let positions = Tensor::integers(&mut random, &rows, 0, 9000);
            let inverse = Tensor::from_fn(&[rotary / 2], |i| {
                f64::from(10_000f32.powf(-(i[0] as f32) / (rotary as f32 / 2.0)))
            });
            let angle = |t: usize, i: usize| {
                let row = sections.map_or(0, |s| axis(i, s, interleaved));
                positions.values[row * tokens + t] * inverse.values[i]
            };
            let pairs = rotary / 2;
            let angles: Vec<f64> =
                (0..tokens).flat_map(|t| (0..pairs).map(move |i| (t, i))).map(|(t, i)| angle(t, i)).collect();
            let from = if with_norm { rms_norm(&floats(&x), &floats(&w), EPS) } else { x.values.clone() };
            let want = Tensor { shape: x.shape.clone(), values: rope(&from, heads, size, &angles, pairs) };
            let spec = RopeSpec { rotary, sections, interleaved };
            let (positions, inverse) = (upload(runtime, &positions, DType::I32), up(runtime, &inverse));
            for (layout, x) in layouts(runtime, &x, DType::F32) {
                let y = if with_norm {
                    x.norm_rope(&positions, &inverse, &up(runtime, &w), spec.clone(), EPS)
                } else {
                    x.rope(&positions, &inverse, spec.clone())
                };
                expect(
                    &format!("rope [{tokens}, {heads}, {size}] {spec:?} {layout}"),
                    &y.expect("shapes fit"),
                    &want,
                );
            }
        }
    }
}

fn swiglu(runtime: &Runtime) {
    let mut random = Random::new(65);
    for &(rows, width) in SHAPES {
        let x = draw(&mut random, &[rows, 2 * width]);
        let want = Tensor { shape: vec![rows, width], values: activation::swiglu(&x.values, width) };
        for (layout, x) in layouts(runtime, &x, DType::F32) {
            expect(&format!("swiglu [{rows}, {width}] {layout}"), &x.swiglu().expect("an even width"), &want);
        }
    }
}

fn gate(runtime: &Runtime) {
    let mut random = Random::new(66);
    for (tokens, heads, size) in [(1, 2, 16), (5, 3, 33), (67, 4, 64)] {
        let mut heads_of = || draw(&mut random, &[tokens, heads, size]);
        let (x, g) = (heads_of(), heads_of());
        let values = activation::sigmoid_gate(&x.values, &g.values);
        let want = Tensor { shape: x.shape.clone(), values };
        for ((layout, x), (_, g)) in
            layouts(runtime, &x, DType::F32).iter().zip(layouts(runtime, &g, DType::F32))
        {
            let y = x.sigmoid_gate(&g).expect("one shape");
            expect(&format!("sigmoid_gate [{tokens}, {heads}, {size}] {layout}"), &y, &want);
        }
    }
}
