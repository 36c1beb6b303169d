//! Sequences of operations that a backend may run as one. The result must be the same as one by one.

mod reshaped;
mod rotations;

use super::share::is_mine;
use super::{Check, download, expect_within, upload};
use crate::cases::linear::weights;
use crate::checks::linear::{affine_weight, dense_weight};
use crate::checks::linear_blocks::block_weight;
use crate::naive::tensor::Tensor;
use crate::random::Random;
use crate::tolerance;
use keel_array::{Array, BlockFormat, Compute, DType, Result, Routing, Runtime, SharedExpert, Weight};

use rotations::{rotation_then_attention, rotation_then_prompt};

pub(super) const CHECKS: &[Check] = &[
    Check { op: "linear", run: norm_then_product },
    Check { op: "linear", run: heads_then_product },
    Check { op: "linear", run: rows_rounded_for_products },
    Check { op: "linear", run: product_then_bias },
    Check { op: "swiglu", run: product_then_gate },
    Check { op: "swiglu", run: wide_product_then_gate },
    Check { op: "gather_linear", run: norm_then_experts },
    Check { op: "combine_experts", run: whole_mixture },
    Check { op: "combine_experts", run: given_experts },
    Check { op: "paged_attention", run: rotation_then_attention },
    Check { op: "paged_attention", run: rotation_then_prompt },
    Check { op: "swiglu", run: reshaped::product_then_gate },
    Check { op: "gather_linear", run: reshaped::gate_then_experts },
    Check { op: "combine_experts", run: reshaped::experts_then_combination },
    Check { op: "route_top_k", run: reshaped::copy_then_routing },
    Check { op: "norm_rope", run: reshaped::copy_then_rotation },
    Check { op: "linear", run: reshaped::gate_then_product },
];

/// Checks that compare a backend with itself, so that its precision does not matter.
pub(super) const IN_ANY_PRECISION: &[Check] = &[
    Check { op: "paged_attention", run: rotation_then_attention },
    Check { op: "paged_attention", run: rotation_then_prompt },
];

const EPS: f32 = 1e-5;

/// Numbers of rows around the limit of kernels for few rows.
const ROWS: [usize; 6] = [1, 2, 5, 16, 17, 33];

fn draw(runtime: &Runtime, random: &mut Random, shape: &[usize]) -> Array {
    upload(runtime, &Tensor::random(random, shape, -1.0, 1.0), DType::F32)
}

/// Weights `[rows, cols]` of several codings.
fn codings(runtime: &Runtime, random: &mut Random, rows: usize, cols: usize) -> Vec<(String, Weight)> {
    let dense: Vec<f32> = (0..rows * cols).map(|_| random.uniform(-1.0, 1.0)).collect();
    let mut all =
        vec![("bf16".into(), dense_weight(runtime, &dense, rows, cols, DType::BF16, Compute::Auto))];
    for (bits, group) in [(4, 64), (3, 32), (8, 128)] {
        let w = weights(random, rows, cols, bits, group);
        let weight = affine_weight(runtime, std::slice::from_ref(&w), bits, Compute::Auto);
        all.push((format!("{bits} bits in groups of {group}"), weight));
    }
    all
}

/// Action on each intermediate value: evaluate it, or nothing.
type Step<'a> = dyn Fn(Array) -> Array + 'a;

/// Asserts that `build` gives the same result if each step is evaluated alone and if all are built first.
///
/// The tolerance allows for inputs rounded to 8 bits: a difference in the last bit can become a whole rounding step of
/// a few inputs.
fn expect_same(what: &str, build: &dyn Fn(&Step<'_>) -> Result<Array>) {
    expect_within_of(tolerance::INT8_ACTIVATIONS, what, build);
}

/// As [`expect_same`], within `tolerance`.
fn expect_within_of(tolerance: f64, what: &str, build: &dyn Fn(&Step<'_>) -> Result<Array>) {
    let apart = build(&|x| {
        x.eval().expect("a case runs");
        x
    });
    let together = build(&|x| x);
    let want = download(&apart.expect("shapes fit"));
    expect_within(what, &together.expect("shapes fit"), &want, tolerance);
}

fn norm_then_product(runtime: &Runtime) {
    const K: usize = 384;
    let mut random = Random::new(90);
    for (coding, weight) in codings(runtime, &mut random, K, K) {
        let w = draw(runtime, &mut random, &[K]);
        for rows in ROWS.into_iter().filter(|rows| is_mine(&("norm", &coding, rows))) {
            let x = draw(runtime, &mut random, &[rows, K]);
            let other = draw(runtime, &mut random, &[rows, K]);
            for (residual, from) in [("itself", &x), ("another", &other)] {
                expect_same(
                    &format!("{rows} rows normed, multiplied by {coding}, onto {residual}"),
                    &|step| step(x.rms_norm(&w, EPS)?).linear_add(&weight, from),
                );
            }
            // The sum has two readers, so its memory must not be given to the product.
            expect_same(&format!("{rows} rows added, normed, multiplied by {coding}"), &|step| {
                let sum = step(x.add(&other)?);
                step(sum.rms_norm(&w, EPS)?).linear_add(&weight, &sum)
            });
            expect_same(&format!("{rows} rows added, normed, multiplied by {coding} alone"), &|step| {
                step(step(x.add(&other)?).rms_norm(&w, EPS)?).linear(&weight)
            });
        }
    }
}

fn heads_then_product(runtime: &Runtime) {
    const N: usize = 80;
    let mut random = Random::new(91);
    for (heads, size) in [(3, 128), (6, 64), (2, 256)] {
        let k = heads * size;
        for (coding, weight) in codings(runtime, &mut random, N, k) {
            let w = draw(runtime, &mut random, &[size]);
            for rows in ROWS.into_iter().filter(|rows| is_mine(&("heads", &coding, heads, rows))) {
                let x = draw(runtime, &mut random, &[rows, heads, size]);
                let wide = draw(runtime, &mut random, &[rows, 2 * k + 12]);
                let what = format!("{rows} rows of {heads} heads of {size}, {coding}");
                let whole = |gated: Array| gated.reshape([rows, k]);
                expect_same(&format!("gated norm of {what}"), &|step| {
                    let z = wide.add(&wide)?.slice_axis(-1, 8, 8 + k)?.reshape([rows, heads, size])?;
                    whole(step(x.gated_rms_norm(&w, &z, EPS)?))?.linear(&weight)
                });
                expect_same(&format!("gate of {what}"), &|step| {
                    let both =
                        wide.add(&wide)?.slice_axis(-1, 4, 4 + 2 * k)?.reshape([rows, heads, 2 * size])?;
                    let gate = both.slice_axis(-1, size, 2 * size)?;
                    whole(step(x.sigmoid_gate(&gate)?))?.linear(&weight)
                });
            }
        }
    }
}

/// Enough rows that a backend may round the input of a product to 16 bits.
fn rows_rounded_for_products(runtime: &Runtime) {
    const N: usize = 320;
    let mut random = Random::new(98);
    // In the second case parameters are parts of arrays, from entry 1 on.
    for (heads, size, first) in [(6, 64, 0), (4, 128, 1)] {
        let k = heads * size;
        for (coding, weight) in codings(runtime, &mut random, N, k) {
            let mut parameter = |len| draw(runtime, &mut random, &[first + len]).entries(first, len);
            let (w, bias) = (parameter(k).expect("in memory"), parameter(k).expect("in memory"));
            let of_head = parameter(size).expect("in memory");
            for rows in [17, 33, 130, 300, 1040]
                .into_iter()
                .filter(|rows| is_mine(&("rounded", &coding, heads, rows)))
            {
                let wide = draw(runtime, &mut random, &[rows, 2 * k]);
                let what = format!("{rows} rows of {heads} heads of {size}, multiplied by {coding}");
                let part = |first: usize| wide.add(&wide)?.slice_axis(-1, first, first + k);
                let as_heads = |first: usize| part(first)?.reshape([rows, heads, size]);
                expect_same(&format!("norm of {what}"), &|step| {
                    step(step(part(0)?.add(&part(k)?)?).rms_norm(&w, EPS)?).linear(&weight)
                });
                expect_same(&format!("layer norm of {what}"), &|step| {
                    step(step(part(0)?.add(&part(k)?)?).layer_norm(&w, &bias, EPS)?).linear(&weight)
                });
                expect_same(&format!("chain of {what}"), &|step| {
                    step(step(part(k)?.add(&bias)?.gelu_tanh()?).mul(&part(0)?)?).linear(&weight)
                });
                expect_same(&format!("SwiGLU of {what}"), &|step| {
                    step(step(wide.add(&wide)?).swiglu()?).linear(&weight)
                });
                expect_same(&format!("gated norm of {what}"), &|step| {
                    let x = step(as_heads(0)?.add(&as_heads(k)?)?);
                    step(x.gated_rms_norm(&of_head, &as_heads(k)?, EPS)?).reshape([rows, k])?.linear(&weight)
                });
                expect_same(&format!("gate of {what}"), &|step| {
                    let x = step(as_heads(0)?.add(&as_heads(k)?)?);
                    step(x.sigmoid_gate(&as_heads(k)?)?).reshape([rows, k])?.linear(&weight)
                });
            }
        }
    }
}

/// A bias, and a residual, added to products of dense weights. Biases are arrays, or parts of one from entry 1 on.
fn product_then_bias(runtime: &Runtime) {
    let mut random = Random::new(99);
    let cases = [
        (320, 384, DType::BF16, 0),
        (256, 256, DType::BF16, 1),
        (448, 320, DType::F16, 1),
        (384, 448, DType::F16, 0),
        (72, 264, DType::F16, 0),
    ];
    for (n, k, dtype, first) in cases {
        let dense: Vec<f32> = (0..n * k).map(|_| random.uniform(-1.0, 1.0)).collect();
        let weight = dense_weight(runtime, &dense, n, k, dtype, Compute::Auto);
        let bias = draw(runtime, &mut random, &[first + n]).entries(first, n).expect("in memory");
        let (w, shift) = (draw(runtime, &mut random, &[k]), draw(runtime, &mut random, &[k]));
        for rows in [16, 17, 33, 130, 300].into_iter().filter(|rows| is_mine(&("bias", n, k, dtype, rows))) {
            let (x, residual) =
                (draw(runtime, &mut random, &[rows, k]), draw(runtime, &mut random, &[rows, n]));
            let what = format!("{rows} rows by {dtype} [{n}, {k}] and a bias from entry {first} on");
            let within = |what: &str, tolerance, build: &dyn Fn(&Step<'_>) -> Result<Array>| {
                expect_within_of(tolerance, what, build);
            };
            within(&what, tolerance::F32, &|step| step(x.linear(&weight)?).add(&bias));
            within(&format!("{what}, added to a residual"), tolerance::F32, &|step| {
                residual.add(&step(step(x.linear(&weight)?).add(&bias)?))
            });
            // The residual is an intermediate, so the sum may take its place.
            within(&format!("{what}, added to a sum"), tolerance::F32, &|step| {
                let sum = step(residual.add(&residual)?);
                step(step(x.linear(&weight)?).add(&bias)?).add(&sum)
            });
            within(&format!("{what}, after a layer norm"), tolerance::BF16_ACTIVATIONS, &|step| {
                let x = step(x.add(&x)?);
                step(step(x.layer_norm(&w, &shift, EPS)?).linear(&weight)?).add(&bias)
            });
            within(&format!("{what}, then GELU"), tolerance::F32, &|step| {
                step(step(x.linear(&weight)?).add(&bias)?).gelu_tanh()
            });
            if n == k {
                within(&format!("{what}, added to x"), tolerance::F32, &|step| {
                    let x = step(x.add(&x)?);
                    step(step(x.linear(&weight)?).add(&bias)?).add(&x)
                });
            }
        }
    }
}

fn product_then_gate(runtime: &Runtime) {
    const K: usize = 320;
    let mut random = Random::new(92);
    // In the first case each half ends with a tile, in the second it does not.
    for n in [96, 72] {
        for (coding, weight) in codings(runtime, &mut random, n, 2 * K) {
            let w = draw(runtime, &mut random, &[2 * K]);
            for rows in ROWS.into_iter().filter(|rows| is_mine(&("gate", &coding, n, rows))) {
                let x = draw(runtime, &mut random, &[rows, 2 * K]);
                let what = format!("SwiGLU of {rows} rows by {coding} to {n}");
                expect_same(&what, &|step| step(x.linear(&weight)?).swiglu());
                expect_same(&format!("{what}, normed"), &|step| {
                    step(step(x.rms_norm(&w, EPS)?).linear(&weight)?).swiglu()
                });
            }
        }
    }
}

/// The same for a weight with enough rows that kernels cut it in a special way, with short and with long rows.
fn wide_product_then_gate(runtime: &Runtime) {
    let mut random = Random::new(95);
    for (n, k) in [(8512, 384), (8544, 4160)] {
        let w = weights(&mut random, n, k, 4, 64);
        let weight = affine_weight(runtime, std::slice::from_ref(&w), 4, Compute::Auto);
        for rows in [1, 2, 4, 5].into_iter().filter(|rows| is_mine(&("wide gate", n, rows))) {
            let x = draw(runtime, &mut random, &[rows, k]);
            expect_same(&format!("SwiGLU of {rows} rows of {k} to {n}"), &|step| {
                step(x.linear(&weight)?).swiglu()
            });
        }
    }
}

fn norm_then_experts(runtime: &Runtime) {
    const EXPERTS: usize = 5;
    const CHOICES: usize = 2;
    const K: usize = 256;
    const F: usize = 64;
    let mut random = Random::new(93);
    for group in [64, 32] {
        let mut stack = |rows: usize, cols: usize| {
            let stack: Vec<_> = (0..EXPERTS).map(|_| weights(&mut random, rows, cols, 4, group)).collect();
            affine_weight(runtime, &stack, 4, Compute::Auto)
        };
        let (gate_up, down) = (stack(2 * F, K), stack(80, F));
        let router = affine_weight(runtime, &[weights(&mut random, 64, K, 8, 64)], 8, Compute::Auto);
        let w = draw(runtime, &mut random, &[K]);
        for rows in ROWS.into_iter().filter(|rows| is_mine(&("experts", group, rows))) {
            let x = draw(runtime, &mut random, &[rows, K]);
            let chosen = Tensor::integers(&mut random, &[rows, CHOICES], 0, EXPERTS as i64);
            let chosen = upload(runtime, &chosen, DType::U32);
            expect_same(&format!("{rows} rows normed, by {CHOICES} experts, groups of {group}"), &|step| {
                let normed = step(x.rms_norm(&w, EPS)?);
                let inner = step(step(normed.gather_linear(&gate_up, &chosen)?).swiglu()?);
                let outer = inner.gather_linear(&down, &chosen)?;
                // The norm has two readers.
                outer.mul(&normed.linear(&router)?.slice_axis(-1, 0, 1)?.reshape([rows, 1, 1])?)
            });
        }
    }
}

/// Sizes of a mixture: `choices` experts per token, `k` columns of x, width `f` of an expert, width of the shared one.
#[derive(Clone, Copy, Debug)]
struct MixtureSizes {
    experts: usize,
    choices: usize,
    k: usize,
    f: usize,
    /// 0 for none.
    shared: usize,
}

/// Weights of a mixture in one coding: router, gate and up, down, and the shared expert's gate and up, and down.
struct MixtureWeights {
    router: Weight,
    gate_up: Weight,
    down: Weight,
    shared: Option<(Weight, Weight)>,
}

impl MixtureWeights {
    fn new(
        runtime: &Runtime,
        MixtureSizes { experts, k, f, shared, .. }: MixtureSizes,
        mut stack: impl FnMut(usize, usize, usize) -> Weight,
        random: &mut Random,
    ) -> MixtureWeights {
        let router = affine_weight(runtime, &[weights(random, experts + 1, k, 8, 32)], 8, Compute::Auto);
        let (gate_up, down) = (stack(experts, 2 * f, k), stack(experts, k, f));
        let shared = (shared > 0).then(|| (stack(1, 2 * shared, k), stack(1, k, shared)));
        MixtureWeights { router, gate_up, down, shared }
    }
}

fn whole_mixture(runtime: &Runtime) {
    let mut random = Random::new(95);
    let sizes = [
        // The last unit of columns is not full.
        MixtureSizes { experts: 129, choices: 3, k: 320, f: 96, shared: 96 },
        // More units of all products than warps hold.
        MixtureSizes { experts: 70, choices: 8, k: 64, f: 1792, shared: 1792 },
        // The shared expert has another width.
        MixtureSizes { experts: 40, choices: 4, k: 256, f: 128, shared: 256 },
        MixtureSizes { experts: 300, choices: 5, k: 192, f: 64, shared: 0 },
        MixtureSizes { experts: 66, choices: 2, k: 512, f: 256, shared: 256 },
    ];
    for (sizes, coding) in
        sizes.into_iter().zip([Some((4, 32)), Some((4, 64)), Some((8, 128)), Some((3, 64)), None])
    {
        let mut other = Random::new(96);
        let stack = |experts: usize, rows: usize, cols: usize| match coding {
            Some((bits, group)) => {
                let stack: Vec<_> =
                    (0..experts).map(|_| weights(&mut other, rows, cols, bits, group)).collect();
                affine_weight(runtime, &stack, bits, Compute::Auto)
            }
            None => {
                let blocks = cols / BlockFormat::Q6K.values();
                block_weight(runtime, &mut other, BlockFormat::Q6K, [experts, rows, blocks], Compute::Auto).0
            }
        };
        let w = MixtureWeights::new(runtime, sizes, stack, &mut random);
        let MixtureSizes { experts, choices, k, .. } = sizes;
        let norm = draw(runtime, &mut random, &[k]);
        for rows in ROWS.into_iter().filter(|rows| is_mine(&("mixture", sizes, rows))) {
            let (x, other) = (draw(runtime, &mut random, &[rows, k]), draw(runtime, &mut random, &[rows, k]));
            for (normed, normalise, onto) in [(false, true, true), (true, false, true), (true, true, false)] {
                let what = format!(
                    "{rows} rows through a mixture of {sizes:?}, {coding:?}, normed: {normed}, onto x: {onto}"
                );
                expect_same(&what, &|step| {
                    let x = step(x.add(&other)?);
                    let enter = || if normed { x.rms_norm(&norm, EPS) } else { Ok(x.clone()) };
                    // Both ways round it in the same kernel, so that nearly equal logits have the same order.
                    let routed = step(enter()?.linear(&w.router)?);
                    let logits = routed.slice_axis(-1, 0, experts)?;
                    let Routing { weights, experts: chosen } = logits.route_top_k(choices, normalise)?;
                    let entered = step(enter()?);
                    let inner = step(step(entered.gather_linear(&w.gate_up, &chosen)?).swiglu()?);
                    let outputs = step(inner.gather_linear(&w.down, &chosen)?);
                    let Some((gate_up, down)) = &w.shared else {
                        return outputs.combine_experts(&weights, onto.then_some(&x), None);
                    };
                    let inner = step(step(entered.linear(gate_up)?).swiglu()?);
                    let always = step(inner.linear(down)?);
                    let gate = routed.slice_axis(-1, experts, experts + 1)?;
                    let shared = SharedExpert { output: &always, gate: &gate };
                    outputs.combine_experts(&weights, onto.then_some(&x), Some(shared))
                });
            }
        }
    }
}

/// Combines products of experts that were not chosen by a router.
fn given_experts(runtime: &Runtime) {
    const EXPERTS: usize = 5;
    const CHOICES: usize = 3;
    let mut random = Random::new(97);
    for (n, f) in [(80, 128), (65, 64)] {
        let stack: Vec<_> = (0..EXPERTS).map(|_| weights(&mut random, n, f, 4, 64)).collect();
        let down = affine_weight(runtime, &stack, 4, Compute::Auto);
        for rows in ROWS.into_iter().filter(|rows| is_mine(&("given", n, rows))) {
            let mut draw = |shape: &[usize]| draw(runtime, &mut random, shape);
            let (inner, probabilities) = (draw(&[rows, CHOICES, f]), draw(&[rows, CHOICES]));
            let (residual, always, gate) = (draw(&[rows, n]), draw(&[rows, n]), draw(&[rows, 1]));
            let chosen = Tensor::integers(&mut random, &[rows, CHOICES], 0, EXPERTS as i64);
            let combined = |step: &Step<'_>, chosen: &Array| {
                let inner = step(inner.add(&inner)?);
                let outputs = step(inner.gather_linear(&down, chosen)?);
                let shared = SharedExpert { output: &always, gate: &gate };
                outputs.combine_experts(&probabilities, Some(&residual), Some(shared))
            };
            for dtype in [DType::U32, DType::I32] {
                let chosen = upload(runtime, &chosen, dtype);
                expect_same(&format!("{rows} rows of {CHOICES} experts by {dtype}"), &|step| {
                    combined(step, &chosen)
                });
            }
            let wrong = upload(runtime, &chosen.map(|e| if e == 0.0 { 9.0 } else { e }), DType::U32);
            if chosen.values.contains(&0.0) {
                let error =
                    combined(&|x| x, &wrong).expect("extents fit").eval().expect_err("no such expert");
                assert!(error.to_string().contains("gather_linear: expert 9 of a stack of 5"), "{error}");
            }
        }
    }
}
