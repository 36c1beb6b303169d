//! Operations with memory, over batches of sequences whose slots and pages are scattered.

use super::attention::{attend, attend_many};
use super::share::is_mine;
use super::{Check, delta_cuts, expect, expect_within, rounded, upload};
use crate::naive::attention::{Shape, attention, attention_until};
use crate::naive::causal_conv::causal_conv;
use crate::naive::gated_delta::{Inputs, gated_delta_kept};
use crate::naive::kv_coded::coded;
use crate::naive::tensor::Tensor;
use crate::random::Random;
use crate::{cases, tolerance};
use half::f16;
use keel_array::{
    Array, AttentionSpec, Batch, Category, ConvWindow, DType, DeltaState, GatedDeltaSpec, KvFormat, KvPool,
    KvRows, Regime, RopeSpec, RowLog, Runtime,
};

pub(super) const CHECKS: &[Check] = &[
    Check { op: "causal_conv", run: conv },
    Check { op: "causal_conv", run: slots_must_differ },
    Check { op: "paged_attention", run: pools_must_differ },
];

pub(super) const BY_CASE: &[Check] = &[
    Check { op: "gated_delta", run: |r| delta(r, Regime::Decode, DType::F32, EXACT_DELTA) },
    Check { op: "gated_delta", run: |r| delta(r, Regime::Prefill, DType::F32, EXACT_DELTA) },
    Check { op: "gated_delta", run: |r| delta(r, Regime::Decode, DType::F16, tolerance::F16_STATE) },
    Check { op: "gated_delta", run: |r| delta(r, Regime::Prefill, DType::F16, tolerance::F16_STATE) },
    Check { op: "gated_delta", run: delta_cuts::check },
    Check { op: "gated_delta", run: |r| delta_cuts::strong_decays(r, EXACT_DELTA) },
    Check { op: "gated_delta", run: delta_cuts::computed_decays },
    Check { op: "paged_attention", run: |r| attend(r, Regime::Decode, KvFormat::F32, EXACT) },
    Check { op: "paged_attention", run: |r| attend(r, Regime::Prefill, KvFormat::F32, EXACT) },
    Check { op: "paged_attention", run: |r| attend(r, Regime::Decode, KvFormat::F16, EXACT) },
    Check { op: "paged_attention", run: |r| attend(r, Regime::Prefill, KvFormat::F16, EXACT) },
    Check { op: "paged_attention", run: |r| attend(r, Regime::Decode, KvFormat::Bits8, EXACT) },
    Check { op: "paged_attention", run: |r| attend(r, Regime::Prefill, KvFormat::Bits8, EXACT) },
    Check { op: "paged_attention", run: |r| attend(r, Regime::Decode, KvFormat::Bits4, EXACT) },
    Check { op: "paged_attention", run: |r| attend(r, Regime::Prefill, KvFormat::Bits4, EXACT) },
    Check { op: "paged_attention", run: |r| attend_in_rings(r, KvFormat::F32, EXACT) },
    Check { op: "paged_attention", run: |r| attend_in_rings(r, KvFormat::F16, EXACT) },
    Check { op: "paged_attention", run: |r| attend_in_rings(r, KvFormat::Bits8, EXACT) },
    Check { op: "paged_attention", run: |r| attend_until(r, KvFormat::F32, EXACT) },
    Check { op: "paged_attention", run: |r| attend_until(r, KvFormat::F16, EXACT) },
    Check { op: "paged_attention", run: |r| attend_until(r, KvFormat::Bits8, EXACT) },
    Check { op: "paged_attention", run: |r| attend_beyond_the_range(r, EXACT) },
];

/// Tolerances of attention in f32, and of the gated delta rule, in which every row changes the state.
const EXACT: f64 = tolerance::F32 * 2.0;
const EXACT_DELTA: f64 = tolerance::F32 * 4.0;

/// Tolerance of products of f16.
const FAST_WITHIN: f64 = tolerance::F16_OPERANDS;

/// Operations that a backend's fast mode may multiply in f16: prompts' gated delta rule, and attention except over f32.
pub(super) const FAST: &[Check] = &[
    Check { op: "gated_delta", run: |r| delta(r, Regime::Prefill, DType::F32, FAST_WITHIN) },
    Check { op: "gated_delta", run: |r| delta(r, Regime::Prefill, DType::F16, tolerance::F16_STATE) },
    Check { op: "gated_delta", run: |r| delta_cuts::strong_decays(r, FAST_WITHIN) },
    Check { op: "paged_attention", run: |r| attend(r, Regime::Decode, KvFormat::F16, FAST_WITHIN) },
    Check { op: "paged_attention", run: |r| attend(r, Regime::Prefill, KvFormat::F16, FAST_WITHIN) },
    Check { op: "paged_attention", run: |r| attend(r, Regime::Decode, KvFormat::Bits8, FAST_WITHIN) },
    Check { op: "paged_attention", run: |r| attend(r, Regime::Prefill, KvFormat::Bits8, FAST_WITHIN) },
    Check { op: "paged_attention", run: |r| attend(r, Regime::Decode, KvFormat::Bits4, FAST_WITHIN) },
    Check { op: "paged_attention", run: |r| attend(r, Regime::Prefill, KvFormat::Bits4, FAST_WITHIN) },
    Check { op: "paged_attention", run: |r| attend_many(r, KvFormat::F16, FAST_WITHIN) },
    Check { op: "paged_attention", run: |r| attend_many(r, KvFormat::Bits8, FAST_WITHIN) },
    Check { op: "paged_attention", run: |r| attend_many(r, KvFormat::Bits4, FAST_WITHIN) },
    Check { op: "paged_attention", run: |r| attend_in_rings(r, KvFormat::F16, FAST_WITHIN) },
    Check { op: "paged_attention", run: |r| attend_until(r, KvFormat::F16, FAST_WITHIN) },
    Check { op: "paged_attention", run: |r| attend_until(r, KvFormat::Bits8, FAST_WITHIN) },
    Check { op: "paged_attention", run: |r| attend_in_rings(r, KvFormat::Bits8, FAST_WITHIN) },
    Check { op: "paged_attention", run: |r| attend_beyond_the_range(r, FAST_WITHIN) },
];

pub(super) fn draw(random: &mut Random, shape: &[usize]) -> Tensor {
    rounded(&Tensor::random(random, shape, -1.0, 1.0), DType::F32)
}

pub(super) fn floats(x: &Tensor) -> Vec<f32> {
    x.values.iter().map(|&x| x as f32).collect()
}

pub(super) fn up(runtime: &Runtime, x: &Tensor) -> Array {
    upload(runtime, x, DType::F32)
}

/// A batch of sequences, each with its first position and rows. Of B sequences, `b` has slot `B - b`, and its page `i`
/// is page `B i + b + 1`.
pub(super) fn batch(runtime: &Runtime, sequences: &[(usize, usize)], pages: usize) -> Batch {
    let count = sequences.len() as u32;
    let mut row_start = vec![0];
    sequences.iter().for_each(|(_, rows)| row_start.push(row_start[row_start.len() - 1] + *rows as u32));
    let position: Vec<u32> = sequences.iter().map(|(first, _)| *first as u32).collect();
    let slot: Vec<u32> = (0..count).map(|b| count - b).collect();
    let table: Vec<u32> =
        (0..count).flat_map(|b| (0..pages as u32).map(move |i| count * i + b + 1)).collect();
    let array = |values: &[u32], shape: &[usize]| Array::from_slice(runtime, values, shape).expect("memory");
    let b = sequences.len();
    Batch {
        row_start: array(&row_start, &[b + 1]),
        slot: array(&slot, &[b]),
        position: array(&position, &[b]),
        table: array(&table, &[b, pages]),
        accepted: array(&vec![0; b], &[b]),
    }
}

/// The rows of sequence `b`, of `width` values each.
pub(super) fn rows_of<'a>(x: &'a [f32], sequences: &[(usize, usize)], b: usize, width: usize) -> &'a [f32] {
    let start: usize = sequences[..b].iter().map(|s| s.1).sum();
    &x[start * width..(start + sequences[b].1) * width]
}

fn conv(runtime: &Runtime) {
    let mut random = Random::new(70);
    for shape in cases::causal_conv::SHAPES {
        for rows in cases::causal_conv::BATCHES {
            let sequences: Vec<(usize, usize)> = rows.iter().map(|&n| (0, n)).collect();
            let (tokens, channels): (usize, usize) = (rows.iter().sum(), shape.channels);
            let w = draw(&mut random, &[shape.width, channels]);
            let window = draw(&mut random, &[rows.len() + 1, shape.width - 1, channels]);
            let state = ConvWindow { rows: up(runtime, &window), open: None };
            let batch = batch(runtime, &sequences, 1);
            let taps = floats(&w);
            let mut windows: Vec<Vec<f32>> =
                floats(&window).chunks((shape.width - 1) * channels).map(<[f32]>::to_vec).collect();
            for step in 0..2 {
                let x = draw(&mut random, &[tokens, channels]);
                let y = up(runtime, &x)
                    .causal_conv(&up(runtime, &w), &state, &batch, RowLog::None)
                    .expect("shapes fit");
                let values = floats(&x);
                let want: Vec<f64> = (0..rows.len())
                    .flat_map(|b| {
                        let x = rows_of(&values, &sequences, b, channels);
                        causal_conv(x, &taps, channels, &mut windows[rows.len() - b])
                    })
                    .collect();
                let what = format!("causal_conv {shape:?} of {rows:?}, step {step}");
                expect(&what, &y, &Tensor { shape: vec![tokens, channels], values: want });
                let kept: Vec<f64> = windows.iter().flatten().map(|&x| f64::from(x)).collect();
                expect(
                    &format!("window of {what}"),
                    &state.rows,
                    &Tensor { shape: window.shape.clone(), values: kept },
                );
            }
        }
    }
}

fn delta(runtime: &Runtime, regime: Regime, form: DType, within: f64) {
    let mut random = Random::new(71);
    for shape in cases::gated_delta::SHAPES {
        let batches = cases::gated_delta::BATCHES.iter();
        for rows in batches.filter(|rows| is_mine(&("delta", regime, form, shape, rows))) {
            let sequences: Vec<(usize, usize)> = rows.iter().map(|&n| (64, n)).collect();
            let (tokens, hv) = (rows.iter().sum::<usize>(), shape.value_heads);
            let row = 2 * shape.key_heads * shape.key_size + hv * shape.value_size;
            let (qkv, a) = (draw(&mut random, &[tokens, row]), draw(&mut random, &[tokens, hv]));
            let b = draw(&mut random, &[tokens, hv]);
            let (a_log, dt_bias) = (draw(&mut random, &[hv]), draw(&mut random, &[hv]));
            let state = draw(&mut random, &[rows.len() + 1, hv, shape.key_size, shape.value_size]);
            let state = rounded(&state, form);
            let persistent = DeltaState { state: upload(runtime, &state, form), records: None };
            let spec = GatedDeltaSpec {
                key_heads: shape.key_heads,
                value_heads: hv,
                key_dim: shape.key_size,
                value_dim: shape.value_size,
                regime,
                log: RowLog::None,
            };
            let y = up(runtime, &qkv)
                .gated_delta(
                    &up(runtime, &a),
                    &up(runtime, &b),
                    &up(runtime, &a_log),
                    &up(runtime, &dt_bias),
                    &persistent,
                    &batch(runtime, &sequences, 1),
                    spec,
                )
                .expect("shapes fit");
            let slot_len = hv * shape.key_size * shape.value_size;
            let mut states: Vec<Vec<f64>> = state.values.chunks(slot_len).map(<[f64]>::to_vec).collect();
            let (qkv, a, b, a_log, dt_bias) =
                (floats(&qkv), floats(&a), floats(&b), floats(&a_log), floats(&dt_bias));
            let want: Vec<f64> = (0..rows.len())
                .flat_map(|s| {
                    let inputs = Inputs {
                        qkv: rows_of(&qkv, &sequences, s, row),
                        a: rows_of(&a, &sequences, s, hv),
                        b: rows_of(&b, &sequences, s, hv),
                        a_log: &a_log,
                        dt_bias: &dt_bias,
                    };
                    gated_delta_kept(*shape, inputs, &mut states[rows.len() - s], kept_in(form)).y
                })
                .collect();
            let what = format!("gated_delta {shape:?} of {rows:?}, {regime:?}, {form}");
            expect_within(&what, &y, &want, within);
            expect_within(&format!("state of {what}"), &persistent.state, &states.concat(), within);
        }
    }
}

/// Rounds a value as a state of this type does.
pub(super) fn kept_in(form: DType) -> impl Fn(f64) -> f64 {
    move |x| if form == DType::F16 { f16::from_f64(x.clamp(-65504.0, 65504.0)).to_f64() } else { x }
}

/// Keys or values after rounding or coding in the pool.
pub(super) fn kept_values(x: &[f32], format: KvFormat) -> Vec<f32> {
    match format {
        KvFormat::F32 => x.to_vec(),
        KvFormat::F16 => x.iter().map(|&x| f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32()).collect(),
        KvFormat::Bits8 => coded(x, 8),
        KvFormat::Bits4 => coded(x, 4),
    }
}

/// Prompts with ranges of rows that see each other, after earlier rows; with and without windows.
fn attend_until(runtime: &Runtime, format: KvFormat, within: f64) {
    // Position of the first row, number of rows, ranges of rows.
    const PROMPTS: [(usize, usize, &[std::ops::Range<usize>]); 2] =
        [(70, 330, &[3..19, 20..276]), (0, 130, &[0..64, 64..130])];
    const PAGES: usize = 3;
    let mut random = Random::new(75);
    for shape in cases::attention::SHAPES.iter().filter(|shape| is_mine(&("until", format, shape))) {
        let Some(elements) = format.row_elements(shape.head_dim) else { continue };
        let pool_shape = [2 * PAGES + 1, shape.kv_heads, 256, elements];
        let array = || Array::persistent(runtime, Category::Kv, pool_shape, format.dtype()).expect("memory");
        let pool = KvPool { keys: array(), values: array() };
        let width = shape.kv_heads * shape.head_dim;
        let mut kept: [(Vec<f32>, Vec<f32>); 2] = Default::default();
        for is_step in [false, true] {
            let rows = PROMPTS.map(|(first, rows, _)| if is_step { (first, rows) } else { (0, first) });
            let draw = |random: &mut Random, heads| {
                draw(random, &[rows.iter().map(|r| r.1).sum(), heads, shape.head_dim])
            };
            let (q, k) = (draw(&mut random, shape.heads), draw(&mut random, shape.kv_heads));
            let v = draw(&mut random, shape.kv_heads);
            let until: Vec<Vec<usize>> = PROMPTS
                .iter()
                .zip(rows)
                .map(|((_, _, stretches), (first, rows))| {
                    let last =
                        |t: usize| stretches.iter().find(|s| is_step && s.contains(&t)).map(|s| s.end - 1);
                    (0..rows).map(|t| first + last(t).unwrap_or(t)).collect()
                })
                .collect();
            // `until` of a row without a range may be any position up to its own. A row that sees all may name any
            // position from the last one on.
            let word = |u: usize, (first, rows): (usize, usize)| match u + 1 == first + rows {
                true => u32::MAX,
                false => u as u32,
            };
            let of_sequence =
                |(until, rows): (&Vec<usize>, _)| until.iter().map(|&u| word(u, rows)).collect::<Vec<u32>>();
            let words: Vec<u32> = until.iter().zip(rows).flat_map(of_sequence).collect();
            let words = Array::from_slice(runtime, &words, [words.len()]).expect("memory");
            let spec =
                AttentionSpec { scale: shape.scale.into(), window: shape.window, regime: Regime::Prefill };
            let y = up(runtime, &q)
                .attention_until(
                    KvRows { keys: &up(runtime, &k), values: &up(runtime, &v) },
                    &pool,
                    &batch(runtime, &rows, PAGES),
                    &words,
                    spec,
                )
                .expect("shapes fit");
            let (q, k, v) = (floats(&q), kept_values(&floats(&k), format), kept_values(&floats(&v), format));
            let want: Vec<f64> = (0..2)
                .flat_map(|b| {
                    kept[b].0.extend_from_slice(rows_of(&k, &rows, b, width));
                    kept[b].1.extend_from_slice(rows_of(&v, &rows, b, width));
                    let q = rows_of(&q, &rows, b, shape.heads * shape.head_dim);
                    attention_until(*shape, q, rows[b].0, &kept[b].0, &kept[b].1, &until[b])
                })
                .collect();
            let what = format!("attention_until {shape:?} of {rows:?}, {format:?}");
            expect_within(&what, &y, &want, within);
        }
    }
}

/// Steps of prompts that are longer than the window's pages, so pages are overwritten during a step. The last step
/// begins between two multiples of 64 positions.
fn attend_in_rings(runtime: &Runtime, format: KvFormat, within: f64) {
    const STEPS: [[usize; 2]; 3] = [[320, 64], [641, 200], [70, 100]];
    const PAGES: usize = 5;
    let mut random = Random::new(73);
    for shape in cases::attention::SHAPES.iter().filter(|shape| is_mine(&("rings", format, shape))) {
        let (Some(window), Some(elements)) = (shape.window, format.row_elements(shape.head_dim)) else {
            continue;
        };
        let ring = (window - 1).div_ceil(256) + 1;
        let pool_shape = [2 * ring + 1, shape.kv_heads, 256, elements];
        let array = || Array::persistent(runtime, Category::Kv, pool_shape, format.dtype()).expect("memory");
        let pool = KvPool { keys: array(), values: array() };
        let table: Vec<u32> =
            (0..2).flat_map(|b| (0..PAGES).map(move |i| (1 + b * ring + i % ring) as u32)).collect();
        let table = Array::from_slice(runtime, &table, [2, PAGES]).expect("memory");
        let mut kept: [(Vec<f32>, Vec<f32>); 2] = Default::default();
        let mut first = [0, 0];
        for rows in STEPS {
            let sequences = [(first[0], rows[0]), (first[1], rows[1])];
            let draw = |random: &mut Random, heads| draw(random, &[rows.iter().sum(), heads, shape.head_dim]);
            let (q, k) = (draw(&mut random, shape.heads), draw(&mut random, shape.kv_heads));
            let v = draw(&mut random, shape.kv_heads);
            let spec =
                AttentionSpec { scale: shape.scale.into(), window: shape.window, regime: Regime::Prefill };
            let batch = Batch { table: table.clone(), ..batch(runtime, &sequences, PAGES) };
            let y = up(runtime, &q)
                .paged_attention(&up(runtime, &k), &up(runtime, &v), &pool, &batch, spec)
                .expect("shapes fit");
            let (q, k, v) = (floats(&q), kept_values(&floats(&k), format), kept_values(&floats(&v), format));
            let width = shape.kv_heads * shape.head_dim;
            let want: Vec<f64> = (0..2)
                .flat_map(|b| {
                    kept[b].0.extend_from_slice(rows_of(&k, &sequences, b, width));
                    kept[b].1.extend_from_slice(rows_of(&v, &sequences, b, width));
                    let q = rows_of(&q, &sequences, b, shape.heads * shape.head_dim);
                    attention(*shape, q, first[b], &kept[b].0, &kept[b].1)
                })
                .collect();
            let what = format!("paged_attention {shape:?} of {sequences:?} in rings of {ring}, {format:?}");
            expect_within(&what, &y, &want, within);
            first = [first[0] + rows[0], first[1] + rows[1]];
        }
    }
}

/// A key and a value beyond f16's range. The queries are 0 where the key is too large, but infinity times 0 is NaN.
fn attend_beyond_the_range(runtime: &Runtime, within: f64) {
    const SHAPE: Shape = Shape { heads: 4, kv_heads: 2, head_dim: 64, scale: 0.125, window: None };
    const ROWS: usize = 3;
    let mut random = Random::new(74);
    let mut q = draw(&mut random, &[ROWS, SHAPE.heads, SHAPE.head_dim]);
    let mut k = draw(&mut random, &[ROWS, SHAPE.kv_heads, SHAPE.head_dim]);
    let mut v = draw(&mut random, &k.shape);
    q.values.chunks_mut(SHAPE.head_dim).for_each(|head| head[40] = 0.0);
    k.values[40] = 1e6;
    v.values[SHAPE.head_dim + 7] = -1e6;
    let (keys, values) = (kept_values(&floats(&k), KvFormat::F16), kept_values(&floats(&v), KvFormat::F16));
    let want = attention(SHAPE, &floats(&q), 0, &keys, &values);
    let cases = [Regime::Decode, Regime::Prefill].map(|regime| [(regime, false), (regime, true)]).concat();
    for (regime, turned) in cases.into_iter().filter(|case| is_mine(&("beyond", case))) {
        let pool = || Array::persistent(runtime, Category::Kv, [2, 2, 256, 64], DType::F16).expect("memory");
        let pool = KvPool { keys: pool(), values: pool() };
        // At position 0 nothing rotates, but a backend may write rotated keys by other code.
        let turn = |x: &Tensor| {
            let x = up(runtime, x);
            let at = Array::from_slice(runtime, &[0i32; ROWS], [ROWS]).expect("memory");
            let inverse = Array::from_slice(runtime, &[1f32; 16], [16]).expect("memory");
            let rope = RopeSpec { rotary: 32, sections: None, interleaved: false };
            if turned { x.rope(&at, &inverse, rope).expect("shapes fit") } else { x }
        };
        let spec = AttentionSpec { scale: SHAPE.scale.into(), window: None, regime };
        let y = turn(&q)
            .paged_attention(&turn(&k), &up(runtime, &v), &pool, &batch(runtime, &[(0, ROWS)], 1), spec)
            .expect("shapes fit");
        expect_within(&format!("beyond f16, {regime:?}, turned: {turned}"), &y, &want, within);
    }
}

fn slots_must_differ(runtime: &Runtime) {
    let mut batch = batch(runtime, &[(0, 1), (0, 1)], 1);
    let ones = Array::full(runtime, [2, 5], DType::F32, 1.0).expect("an addressable shape");
    let w = Array::full(runtime, [4, 5], DType::F32, 1.0).expect("an addressable shape");
    let rows = Array::persistent(runtime, Category::Recurrent, [3, 3, 5], DType::F32).expect("memory");
    let window = ConvWindow { rows, open: None };
    runtime.eval(&[&ones, &w]).expect("a case runs");
    for (slots, message) in [([1u32, 1], "sequences 0 and 1 are both in slot 1"), ([1, 3], "slot 3 of 3")] {
        batch.slot = Array::from_slice(runtime, &slots, [2]).expect("memory");
        let y = ones.causal_conv(&w, &window, &batch, RowLog::None).expect("shapes fit");
        let error = y.eval().expect_err("wrong slots");
        assert!(error.to_string().contains(message), "{error}");
    }
}

fn pools_must_differ(runtime: &Runtime) {
    let rows = Array::full(runtime, [1, 1, 32], DType::F32, 1.0).expect("an addressable shape");
    let pages = Array::persistent(runtime, Category::Kv, [2, 1, 256, 32], DType::F32).expect("memory");
    let pool = KvPool { keys: pages.clone(), values: pages };
    let spec = AttentionSpec { scale: 1.0.into(), window: None, regime: Regime::Decode };
    let y =
        rows.paged_attention(&rows, &rows, &pool, &batch(runtime, &[(0, 1)], 1), spec).expect("shapes fit");
    let error = y.eval().expect_err("one pool for both").to_string();
    assert!(error.contains("operands 3 and 4 share memory"), "{error}");
}
