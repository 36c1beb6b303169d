//! Products in 8-bit floats.

use super::linear::{affine_weight, floats, typical_sum};
use super::share::is_mine;
use super::{download, rounded, upload};
use crate::cases::quantized_matmul::weights;
use crate::naive::matmul::matmul_transposed;
use crate::naive::quantized_matmul::{e4m3_rows, quantized_matmul};
use crate::naive::rms_norm::rms_norm;
use crate::naive::silu;
use crate::naive::tensor::Tensor;
use crate::random::Random;
use crate::tolerance;
use keel_array::{Compute, DType, Runtime};

/// Products of many rows whose factors a backend may round to 8-bit floats. It rounds all or none: the result is near
/// the product of rounded factors, or near that of the factors as they are.
pub(super) fn in_fp8(runtime: &Runtime) {
    let mut random = Random::new(60);
    let kinds = [(4, 64), (8, 32), (4, 128), (6, 64)].into_iter();
    // 300 rows are beyond the kernels of few rows; 257 by 80 by 192 has tails of tiles; 260 columns are no whole 16. With
    // 256 rows of W a product absorbs what comes before it: SwiGLU, and a norm of up to 4,096 columns. From 4,096 columns
    // on, a thread rounds several groups of four.
    let shapes = [
        (300, 256, 512),
        (257, 80, 192),
        (300, 260, 128),
        (258, 256, 4096),
        (259, 256, 4160),
        (40, 128, 256),
        (1, 128, 256),
    ];
    for ((bits, group), (t, n, k)) in kinds.flat_map(|kind| shapes.map(|shape| (kind, shape))) {
        // The oracle takes long for large shapes, so one coding has to do.
        let is_too_much = k > 512 && (bits, group) != (4, 64);
        if !is_mine(&("eight bits", bits, group, t, n, k)) || k % group != 0 || is_too_much {
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
        let weight = affine_weight(runtime, std::slice::from_ref(&w), bits, Compute::PrefillFp8);
        let up = |tensor: &Tensor| upload(runtime, tensor, DType::F32);
        let (array, residual) = (up(&x), up(&r));
        // A product absorbs what reads an intermediate: the sum of two halves, which is exact.
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
            let exact = onto(&quantized_matmul(&input, &w));
            let coded = onto(&matmul_transposed(&codes(&input), &codes(&w.weights()), k));
            let y = download(&y.expect("extents fit"));
            let far = |want: &[f64]| y.iter().zip(want).map(|(y, want)| (y - want).abs()).fold(0.0, f64::max);
            let (from_exact, from_coded) = (far(&exact), far(&coded));
            let wide: Vec<f64> = input.iter().copied().map(f64::from).collect();
            let step = tolerance::ONE_OF_TWO_ROUNDINGS * typical_sum(&wide, &w);
            let what = format!("{form} [{t}, {n}, {k}] of {bits} bits in groups of {group}, 8-bit prompts");
            let near = from_exact.min(from_coded);
            assert!(near <= step, "{what}: {from_exact} and {from_coded} from the oracles, {step} allowed");
            if t <= 256 {
                assert!(from_exact <= step, "{what}: few rows are not rounded to 8-bit floats");
            }
        }
    }
}

const EPS: f32 = 1e-6;

fn single(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}

/// `silu(x[:, :k]) * x[:, k:]`
fn swiglu(x: &[f64], k: usize) -> Vec<f32> {
    let gated = |row: &[f64]| (0..k).map(|i| (silu(row[i]) * row[k + i]) as f32).collect::<Vec<_>>();
    x.chunks_exact(2 * k).flat_map(gated).collect()
}
