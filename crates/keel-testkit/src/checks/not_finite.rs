//! A NaN in a row gives NaN in that row's results, and changes no bit of other rows. So does infinity where the kernels
//! keep it: 16-bit operands of prompts saturate instead.

use super::Check;
use super::linear::{affine_weight, dense_weight, floats, takes};
use super::linear_blocks::block_weight;
use super::sequence::{batch, draw, up};
use crate::cases::linear::weights;
use crate::compare::assert_same_bits;
use crate::naive::linear::Affine;
use crate::naive::tensor::Tensor;
use crate::random::Random;
use keel_array::{
    Array, AttentionSpec, BlockFormat, Category, Compute, DType, KvFormat, KvPool, Regime, Result, Runtime,
    Weight,
};

pub(super) const CHECKS: &[Check] = &[
    Check { op: "linear", run: |r| products(r, affine) },
    Check { op: "linear", run: |r| products(r, in_blocks) },
    Check { op: "linear", run: |r| products(r, dense) },
    Check { op: "gather_linear", run: gathered },
    Check { op: "paged_attention", run: |r| attention(r, KvFormat::F32) },
    Check { op: "paged_attention", run: |r| attention(r, KvFormat::F16) },
    Check { op: "paged_attention", run: |r| attention(r, KvFormat::Bits8) },
    Check { op: "paged_attention", run: |r| attention(r, KvFormat::Bits4) },
];

/// Attention of fast modes.
pub(super) const FAST: &[Check] = &[
    Check { op: "paged_attention", run: |r| attention(r, KvFormat::F16) },
    Check { op: "paged_attention", run: |r| attention(r, KvFormat::Bits8) },
    Check { op: "paged_attention", run: |r| attention(r, KvFormat::Bits4) },
    Check { op: "paged_attention", run: a_later_value },
];

/// Rows and columns of the weights: whole tiles of the kernels, and groups of every size.
const N: usize = 96;
const K: usize = 512;

/// Rows of x that kernels of few rows take.
const FEW: usize = 16;

/// Asserts that bad values spoil all `width` results of their rows, and change no bit of the other rows.
#[track_caller]
fn expect_spoiled(what: &str, clean: &[f32], got: &[f32], width: usize, is_spoiled: impl Fn(usize) -> bool) {
    assert_eq!(clean.len(), got.len(), "{what}: number of elements");
    for (row, (clean, got)) in clean.chunks(width).zip(got.chunks(width)).enumerate() {
        assert!(clean.iter().all(|x| x.is_finite()), "{what}: row {row} without a bad value");
        if is_spoiled(row) {
            let hidden = got.iter().position(|x| x.is_finite());
            assert!(hidden.is_none(), "{what}: row {row} has a bad input, and output {hidden:?} is a number");
        } else {
            assert_same_bits(&format!("{what}: row {row}, which has no bad value"), got, clean);
        }
    }
}

/// Weights of several kinds, with their names.
type Kinds = Vec<(String, Weight)>;

fn affine(runtime: &Runtime, random: &mut Random, compute: Compute) -> Kinds {
    let kind = |(bits, group)| {
        let weight = affine_weight(runtime, &[weights(random, N, K, bits, group)], bits, compute);
        (format!("{bits} bits in groups of {group}"), weight)
    };
    [(4, 64), (8, 32), (3, 128)].map(kind).into()
}

fn in_blocks(runtime: &Runtime, random: &mut Random, compute: Compute) -> Kinds {
    let kind = |format: BlockFormat| {
        let (weight, _, _) = block_weight(runtime, random, format, [1, N, K / format.values()], compute);
        (format.to_string(), weight)
    };
    [BlockFormat::Q6K, BlockFormat::Q8_0, BlockFormat::MXFP4].map(kind).into()
}

fn dense(runtime: &Runtime, random: &mut Random, compute: Compute) -> Kinds {
    let kind = |dtype: DType| {
        let w = floats(&draw(random, &[N, K]));
        (dtype.to_string(), dense_weight(runtime, &w, N, K, dtype, compute))
    };
    [DType::BF16, DType::F16, DType::F32].map(kind).into()
}

/// Operands of the operations before a product.
struct Factors {
    norm: Array,
    head_norm: Array,
    gate: Array,
}

/// A product, alone or with an operation before or after it. A backend may make one kernel of both.
type Form = fn(&Array, &Factors, &Weight) -> Result<Array>;

const FORMS: &[(&str, Form)] = &[
    ("plain", |x, _, w| x.linear(w)),
    ("after a norm", |x, f, w| x.rms_norm(&f.norm, 1e-6)?.linear(w)),
    ("after a gate", |x, f, w| {
        let heads = f.gate.shape();
        x.reshape(heads)?.sigmoid_gate(&f.gate)?.reshape(x.shape())?.linear(w)
    }),
    ("after a norm of heads", |x, f, w| {
        let heads = f.gate.shape();
        x.reshape(heads)?.gated_rms_norm(&f.head_norm, &f.gate, 1e-6)?.reshape(x.shape())?.linear(w)
    }),
    ("before swiglu", |x, _, w| x.linear(w)?.swiglu()),
];

fn products(runtime: &Runtime, kinds: fn(&Runtime, &mut Random, Compute) -> Kinds) {
    let mut random = Random::new(90);
    for (compute, rows) in [
        (Compute::Auto, &[1, 3, 16, 17, 70][..]),
        (Compute::F32, &[1, 17]),
        (Compute::Bf16, &[1, 17]),
        (Compute::PrefillFp8, &[300]),
        (Compute::Fp8, &[140]),
    ] {
        if !takes(runtime, compute) {
            continue;
        }
        for (i, (kind, weight)) in kinds(runtime, &mut random, compute).iter().enumerate() {
            for &t in rows {
                // Backends compile a kernel for each form, so one weight and few rows have to do.
                let forms = if compute == Compute::Auto && i == 0 && t <= 3 { FORMS } else { &FORMS[..1] };
                products_of(runtime, &mut random, t, kind, weight, compute, forms);
            }
        }
    }
}

fn products_of(
    runtime: &Runtime,
    random: &mut Random,
    t: usize,
    kind: &str,
    weight: &Weight,
    compute: Compute,
    forms: &[(&str, Form)],
) {
    let x = draw(random, &[t, K]);
    let factors = Factors {
        norm: up(runtime, &draw(random, &[K])),
        head_norm: up(runtime, &draw(random, &[64])),
        gate: up(runtime, &draw(random, &[t, K / 64, 64])),
    };
    let keeps_infinity = t <= FEW && compute != Compute::Bf16;
    let bad_values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    for (form, product) in forms {
        let y = |x: &Tensor| {
            let y = product(&up(runtime, x), &factors, weight).expect("extents fit");
            (y.to_vec::<f32>().expect("a case runs"), y.shape()[1])
        };
        let (clean, width) = y(&x);
        for &bad in &bad_values[..if keeps_infinity { 3 } else { 1 }] {
            let (row, column) = (t / 2, random.below(K));
            let mut spoiled = x.clone();
            spoiled.values[row * K + column] = f64::from(bad);
            let what = format!("linear of {t} rows, {kind}, {compute:?}, {form}, {bad} in column {column}");
            expect_spoiled(&what, &clean, &y(&spoiled).0, width, |r| r == row);
        }
    }
}

fn gathered(runtime: &Runtime) {
    const EXPERTS: usize = 5;
    const CHOICES: usize = 2;
    let mut random = Random::new(91);
    for compute in [Compute::Auto, Compute::F32, Compute::Bf16] {
        let stack: Vec<Affine> = (0..EXPERTS).map(|_| weights(&mut random, N, K, 4, 64)).collect();
        let weight = affine_weight(runtime, &stack, 4, compute);
        for t in [1, 3, 100] {
            let chosen = Tensor::integers(&mut random, &[t, CHOICES], 0, EXPERTS as i64);
            let chosen: Vec<u32> = chosen.values.iter().map(|&e| e as u32).collect();
            let chosen = Array::from_slice(runtime, &chosen, [t, CHOICES]).expect("memory");
            let mut x = draw(&mut random, &[t, K]);
            let y = |x: &Tensor| {
                let y = up(runtime, x).gather_linear(&weight, &chosen).expect("extents fit");
                y.to_vec::<f32>().expect("a case runs")
            };
            let (clean, row) = (y(&x), t / 2);
            x.values[row * K + random.below(K)] = f64::NAN;
            let what = format!("gather_linear of {t} rows, {compute:?}");
            expect_spoiled(&what, &clean, &y(&x), N, |r| r / CHOICES == row);
        }
    }
}

/// Steps of one row a sequence. A spoiled row is the first one of a chunk of 16 keys, so its key may be the only one
/// that a warp looks at.
fn attention(runtime: &Runtime, format: KvFormat) {
    const HEADS: usize = 8;
    const KV: usize = 2;
    const D: usize = 64;
    const COLUMN: usize = 5;
    let mut random = Random::new(92);
    for (count, regime) in [(4, Regime::Decode), (150, Regime::Decode), (4, Regime::Prefill)] {
        let is_spoiled = |row: usize| row % 4 == 1;
        let elements = format.row_elements(D).expect("whole groups");
        let pool_shape = [count + 1, KV, 256, elements];
        let pool = || Array::persistent(runtime, Category::Kv, pool_shape, format.dtype()).expect("memory");
        let pool = KvPool { keys: pool(), values: pool() };
        let run = |rows: &[(usize, usize)], q: &Tensor, k: &Tensor, v: &Tensor, spec| {
            let batch = batch(runtime, rows, 1);
            let y = up(runtime, q).paged_attention(&up(runtime, k), &up(runtime, v), &pool, &batch, spec);
            y.expect("shapes fit").to_vec::<f32>().expect("a case runs")
        };
        let draws = |random: &mut Random, tokens: usize| {
            [HEADS, KV, KV].map(|heads| draw(random, &[tokens, heads, D]))
        };
        let before: Vec<(usize, usize)> = (0..count).map(|b| (0, 16 * (b % 4))).collect();
        let [q, k, v] = draws(&mut random, before.iter().map(|rows| rows.1).sum());
        let writes = AttentionSpec { scale: 0.125.into(), window: Some(0), regime: Regime::Prefill };
        run(&before, &q, &k, &v, writes);
        let step: Vec<(usize, usize)> = (0..count).map(|b| (16 * (b % 4), 1)).collect();
        let spec = AttentionSpec { scale: 0.125.into(), window: None, regime };
        let sound = draws(&mut random, count);
        let [q, k, v] = &sound;
        // Columns other than the spoiled one may be numbers if a value is spoiled.
        let column = |y: Vec<f32>| y.into_iter().skip(COLUMN).step_by(D).collect::<Vec<f32>>();
        let clean = run(&step, q, k, v, spec.clone());
        for (i, name) in ["queries", "keys", "values"].iter().enumerate() {
            let mut operands = sound.clone();
            for (row, x) in operands[i].values.chunks_mut(sound[i].values.len() / count).enumerate() {
                if is_spoiled(row) {
                    x.iter_mut().skip(COLUMN).step_by(D).for_each(|x| *x = f64::NAN);
                }
            }
            let [q, k, v] = &operands;
            let got = run(&step, q, k, v, spec.clone());
            let what = format!("{regime:?} of {count} sequences, {format:?}, NaN in {name}");
            expect_spoiled(&what, &column(clean.clone()), &column(got.clone()), HEADS, is_spoiled);
            for (row, (got, clean)) in got.chunks(HEADS * D).zip(clean.chunks(HEADS * D)).enumerate() {
                if !is_spoiled(row) {
                    assert_same_bits(&format!("{what}: row {row}"), got, clean);
                }
            }
        }
    }
}

/// Two rows for each sequence, the second with NaN as values. Which results are NaN does not depend on the number of
/// sequences, by which a backend may choose its kernel.
fn a_later_value(runtime: &Runtime) {
    const HEADS: usize = 8;
    const KV: usize = 2;
    const D: usize = 64;
    // The second row is the first one of a chunk of 16 keys, which the first row does not see.
    const FIRST: usize = 15;
    let are_nan = |count: usize| {
        let shape = [count + 1, KV, 256, D];
        let pool = || Array::persistent(runtime, Category::Kv, shape, DType::F16).expect("memory");
        let pool = KvPool { keys: pool(), values: pool() };
        let run = |position: usize, rows: usize, v: &Array, spec: AttentionSpec| {
            let batch = batch(runtime, &vec![(position, rows); count], 1);
            let ones =
                |heads| Array::full(runtime, [count * rows, heads, D], DType::F32, 1.0).expect("a shape");
            let y = ones(HEADS).paged_attention(&ones(KV), v, &pool, &batch, spec);
            y.expect("shapes fit").to_vec::<f32>().expect("a case runs")
        };
        let values = |rows: usize, is_nan: fn(usize) -> bool| {
            let value = |i: usize| if is_nan(i / (KV * D) % rows) { f32::NAN } else { 1.0 };
            let values: Vec<f32> = (0..count * rows * KV * D).map(value).collect();
            Array::from_slice(runtime, &values, [count * rows, KV, D]).expect("memory")
        };
        let writes = AttentionSpec { scale: 0.125.into(), window: Some(0), regime: Regime::Prefill };
        run(0, FIRST, &values(FIRST, |_| false), writes);
        let spec = AttentionSpec { scale: 0.125.into(), window: None, regime: Regime::Decode };
        let y = run(FIRST, 2, &values(2, |row| row == 1), spec);
        y[..2 * HEADS * D].iter().map(|y| y.is_nan()).collect::<Vec<bool>>()
    };
    let [alone, among_many] = [1, 150].map(are_nan);
    assert!(alone[HEADS * D..].iter().all(|&is_nan| is_nan), "the second row sees its own value");
    assert!(alone == among_many, "other results are NaN among 150 sequences");
}
