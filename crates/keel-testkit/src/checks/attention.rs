//! Attention over pages, batch by batch.

use super::expect_within;
use super::sequence::{batch, draw, floats, kept_values, rows_of, up};
use super::share::is_mine;
use crate::cases;
use crate::naive::attention::{Shape, attention};
use crate::random::Random;
use keel_array::{Array, AttentionSpec, DType, KvFormat, KvPool, Regime, Runtime};

pub(super) fn attend(runtime: &Runtime, regime: Regime, format: KvFormat, within: f64) {
    let mut random = Random::new(72);
    for shape in cases::attention::SHAPES {
        if format.row_elements(shape.head_dim).is_none() {
            continue;
        }
        let batches = cases::attention::BATCHES.iter();
        for sequences in batches.filter(|rows| is_mine(&("attend", regime, format, shape, rows))) {
            attend_batch(runtime, &mut random, shape, sequences, regime, format, within);
        }
    }
}

/// A step of one batch, after the tokens before it.
fn attend_batch(
    runtime: &Runtime,
    random: &mut Random,
    shape: &Shape,
    sequences: &[(usize, usize)],
    regime: Regime,
    format: KvFormat,
    within: f64,
) {
    let Some(elements) = format.row_elements(shape.head_dim) else { unreachable!("a size that pools keep") };
    let pages = sequences.iter().map(|(first, rows)| (first + rows).div_ceil(256)).max().unwrap_or(0);
    let pool_shape = [pages * sequences.len() + 1, shape.kv_heads, 256, elements];
    // NaN everywhere. In coded formats bytes of ones are NaN steps, too.
    let pool = || {
        let count = pool_shape.iter().product();
        if format.dtype() == DType::U8 {
            return Array::from_slice(runtime, &vec![0xffu8; count], pool_shape).expect("memory");
        }
        let array = Array::from_slice(runtime, &vec![f32::NAN; count], pool_shape).expect("memory");
        array.cast(format.dtype()).and_then(|a| a.detach()).expect("memory")
    };
    let pool = KvPool { keys: pool(), values: pool() };
    let width = shape.kv_heads * shape.head_dim;
    let spec = |regime, window| AttentionSpec { scale: shape.scale.into(), window, regime };
    // A separate prefill step first writes the tokens before the step's rows. It attends to nothing, so this
    // test does not spend the time that a long context costs the slowest kernels.
    let (before, step): (Vec<_>, Vec<_>) =
        sequences.iter().map(|&(first, rows)| ((0, first), (first, rows))).unzip();
    let mut kept: Vec<(Vec<f32>, Vec<f32>)> = vec![Default::default(); sequences.len()];
    for (rows, check) in [(before, false), (step, true)] {
        let tokens: usize = rows.iter().map(|r| r.1).sum();
        if tokens == 0 {
            continue;
        }
        let kv = |random: &mut Random| draw(random, &[tokens, shape.kv_heads, shape.head_dim]);
        let q = draw(random, &[tokens, shape.heads, shape.head_dim]);
        let (k, v) = (kv(random), kv(random));
        let y = up(runtime, &q)
            .paged_attention(
                &up(runtime, &k),
                &up(runtime, &v),
                &pool,
                &batch(runtime, &rows, pages),
                if check { spec(regime, shape.window) } else { spec(Regime::Prefill, Some(0)) },
            )
            .expect("shapes fit");
        let (q, k, v) = (floats(&q), kept_values(&floats(&k), format), kept_values(&floats(&v), format));
        for (b, (keys, values)) in kept.iter_mut().enumerate() {
            keys.extend_from_slice(rows_of(&k, &rows, b, width));
            values.extend_from_slice(rows_of(&v, &rows, b, width));
        }
        let one = |b: usize| {
            let q = rows_of(&q, &rows, b, shape.heads * shape.head_dim);
            attention(*shape, q, rows[b].0, &kept[b].0, &kept[b].1)
        };
        if check {
            let want: Vec<f64> = (0..rows.len()).flat_map(one).collect();
            let what = format!("paged_attention {shape:?} of {rows:?}, {regime:?}, {format:?}");
            expect_within(&what, &y, &want, within);
        } else {
            y.eval().expect("a case runs");
        }
    }
}

/// A decode step of many sequences, which a backend may walk through in a kernel of its own.
pub(super) fn attend_many(runtime: &Runtime, format: KvFormat, within: f64) {
    let mut random = Random::new(76);
    let sequences = cases::attention::many_sequences();
    for shape in cases::attention::SHAPES_OF_MANY.iter().filter(|shape| is_mine(&("many", format, shape))) {
        attend_batch(runtime, &mut random, shape, &sequences, Regime::Decode, format, within);
    }
}
