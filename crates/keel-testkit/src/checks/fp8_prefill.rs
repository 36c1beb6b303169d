//! Products in 8-bit floats.

use super::linear::{affine_weight, floats, typical_sum};
use super::share::is_mine;
use super::{download, rounded, upload};
use crate::cases::quantized_matmul::weights;
use crate::naive::matmul::matmul_transposed;
use crate::naive::quantized_matmul::{e4m3_rows, quantized_matmul};
use crate::naive::tensor::Tensor;
use crate::random::Random;
use crate::tolerance;
use keel_array::{Compute, DType, Runtime};

/// Products of many rows whose factors a backend may round to 8-bit floats. It rounds all or none: the result is near
/// the product of rounded factors, or near that of the factors as they are.
pub(super) fn in_fp8(runtime: &Runtime) {
    let mut random = Random::new(60);
    let kinds = [(4, 64), (8, 32), (4, 128), (6, 64)].into_iter();
    // 300 rows are beyond the kernels of few rows; 257 by 80 by 192 has tails of tiles; 260 columns are no whole 16.
    let shapes = [(300, 256, 512), (257, 80, 192), (300, 260, 128), (40, 128, 256), (1, 128, 256)];
    for ((bits, group), (t, n, k)) in kinds.flat_map(|kind| shapes.map(|shape| (kind, shape))) {
        if !is_mine(&("eight bits", bits, group, t, n, k)) || k % group != 0 {
            continue;
        }
        let w = weights(&mut random, n, k, bits, group);
        // A backend may round x to f16 first, which must not decide between two codes.
        let x = rounded(&Tensor::random(&mut random, &[t, k], -1.0, 1.0), DType::F16);
        let r = rounded(&Tensor::random(&mut random, &[t, n], -1.0, 1.0), DType::F32);
        let weight = affine_weight(runtime, std::slice::from_ref(&w), bits, Compute::PrefillFp8);
        let (array, residual) = (upload(runtime, &x, DType::F32), upload(runtime, &r, DType::F32));
        let exact = quantized_matmul(&floats(&x), &w);
        let codes = |values: &[f32]| e4m3_rows(values, k);
        let coded = matmul_transposed(&codes(&floats(&x)), &codes(&w.weights()), k);
        let step = tolerance::ONE_OF_TWO_ROUNDINGS * typical_sum(&x.values, &w);
        let what = format!("linear [{t}, {n}, {k}] of {bits} bits in groups of {group}, 8-bit prompts");
        let onto = |sums: &[f64]| sums.iter().zip(&r.values).map(|(sum, r)| sum + r).collect::<Vec<f64>>();
        for (y, exact, coded) in [
            (array.linear(&weight), exact.clone(), coded.clone()),
            (array.linear_add(&weight, &residual), onto(&exact), onto(&coded)),
        ] {
            let y = download(&y.expect("extents fit"));
            let far = |want: &[f64]| y.iter().zip(want).map(|(y, want)| (y - want).abs()).fold(0.0, f64::max);
            let (from_exact, from_coded) = (far(&exact), far(&coded));
            let near = from_exact.min(from_coded);
            assert!(near <= step, "{what}: {from_exact} and {from_coded} from the oracles, {step} allowed");
            if t <= 256 {
                assert!(from_exact <= step, "{what}: few rows are not rounded to 8-bit floats");
            }
        }
    }
}
