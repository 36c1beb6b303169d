//! Rotations of queries and keys before attention.

use super::{EPS, draw, expect_within_of};
use crate::checks::sequence::batch;
use crate::checks::share::is_mine;
use crate::random::Random;
use crate::tolerance;
use keel_array::{Array, AttentionSpec, DType, KvFormat, KvPool, KvRows, Regime, RopeSpec, Runtime};

/// Numbers of query and key-value heads, and elements of a head: all, and those that are rotated.
#[derive(Clone, Copy, Debug)]
struct AttentionSizes {
    heads: usize,
    kv_heads: usize,
    size: usize,
    rotary: usize,
    window: Option<usize>,
}

/// Bytes of coded pages `[pages, KV, 256, W]` for heads of `size`: random codes, and steps from 1/128 to 1/64.
fn coded_pages(random: &mut Random, heads: usize, size: usize, row: usize) -> Vec<u8> {
    let step_bytes = 256 * (size / KvFormat::GROUP) * 2;
    let page = |_| {
        let mut page: Vec<u8> = (0..256 * row).map(|_| random.below(256) as u8).collect();
        let steps = page.len() - step_bytes;
        for step in page[steps..].chunks_exact_mut(2) {
            step.copy_from_slice(&[step[0] & 0x7f, 0x3c]);
        }
        page
    };
    (0..heads).flat_map(page).collect()
}

/// Runs two steps. The second reads the pages that the first has written.
pub(super) fn rotation_then_attention(runtime: &Runtime) {
    let mut random = Random::new(94);
    let rope = |rotary| RopeSpec { rotary, sections: None, interleaved: false };
    let sizes = [
        AttentionSizes { heads: 6, kv_heads: 2, size: 64, rotary: 32, window: None },
        AttentionSizes { heads: 4, kv_heads: 1, size: 128, rotary: 128, window: Some(130) },
        AttentionSizes { heads: 4, kv_heads: 4, size: 80, rotary: 16, window: Some(33) },
        AttentionSizes { heads: 16, kv_heads: 2, size: 256, rotary: 64, window: None },
    ];
    let batches: [&[(usize, usize)]; 6] = [
        &[(300, 1)],
        &[(5, 3), (0, 1), (511, 2)],
        // One row each: positions around a warp's keys, the end of a share, and a page; and a sequence without rows.
        &[(31, 1), (32, 1), (33, 1), (255, 1), (256, 1), (0, 1), (70, 0), (703, 1)],
        &[(2303, 1)],
        // More pairs of row and head than a block takes.
        &[(250, 16)],
        &[(62, 9), (513, 8)],
    ];
    for (sizes, rows) in sizes.into_iter().flat_map(|sizes| batches.map(|rows| (sizes, rows))) {
        let AttentionSizes { heads, kv_heads, size, rotary, window } = sizes;
        let tokens: usize = rows.iter().map(|r| r.1).sum();
        let pages = rows.iter().map(|(first, n)| (first + 2 * n).div_ceil(256)).max().unwrap_or(0);
        let (q_norm, k_norm) = (draw(runtime, &mut random, &[size]), draw(runtime, &mut random, &[size]));
        let wide = draw(runtime, &mut random, &[tokens, (2 * heads + 2 * kv_heads) * size]);
        let inverse: Vec<f32> =
            (0..rotary / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / rotary as f32)).collect();
        let inverse = Array::from_slice(runtime, &inverse, [rotary / 2]).expect("memory");
        let heads_of_pages = (pages * rows.len() + 1) * kv_heads;
        let pool_shape = |row| [pages * rows.len() + 1, kv_heads, 256, row];
        let history = draw(runtime, &mut random, &pool_shape(size));
        // Different rotations of q and k are tested with a single row only.
        let turns: &[(usize, usize)] =
            if tokens == 1 { &[(2, 2), (1, 1), (2, 1), (2, 0), (0, 1)] } else { &[(2, 2), (1, 1)] };
        for format in [KvFormat::F32, KvFormat::F16, KvFormat::Bits8, KvFormat::Bits4] {
            let Some(row) = format.row_elements(size) else { continue };
            let coded = match format.dtype() {
                DType::U8 => coded_pages(&mut random, heads_of_pages, size, row),
                _ => Vec::new(),
            };
            for &(turn_q, turn_k) in
                turns.iter().filter(|turns| is_mine(&("turns", sizes, rows, format, turns)))
            {
                let what = format!("{sizes:?} at {rows:?}, {format:?}, turned {turn_q}, {turn_k}");
                expect_within_of(tolerance::F32, &what, &|step| {
                    let pool = || match format.dtype() {
                        DType::U8 => Array::from_slice(runtime, &coded, pool_shape(row)),
                        dtype => history.add(&history)?.cast(dtype)?.detach(),
                    };
                    let pool = KvPool { keys: pool()?, values: pool()? };
                    let wide = wide.add(&wide)?;
                    let part = |start: usize, heads: usize, each: usize| {
                        let part = wide.slice_axis(-1, start * size, (start + heads * each) * size)?;
                        part.reshape([tokens, heads, each * size])?.slice_axis(-1, 0, size)
                    };
                    let attend = |pass: usize| {
                        let rows: Vec<_> = rows.iter().map(|&(first, n)| (first + pass * n, n)).collect();
                        let at = rows.iter().flat_map(|&(first, n)| first as i32..(first + n) as i32);
                        let at = Array::from_slice(runtime, &at.collect::<Vec<_>>(), [tokens])?;
                        let turn = |x: Array, how: usize, norm: &Array| match how {
                            0 => Ok(x),
                            1 => x.rope(&at, &inverse, rope(rotary)),
                            _ => x.norm_rope(&at, &inverse, norm, rope(rotary), EPS),
                        };
                        let q = step(turn(part(0, heads, 2)?, turn_q, &q_norm)?);
                        let k = step(turn(part(2 * heads, kv_heads, 1)?, turn_k, &k_norm)?);
                        let v = part(2 * heads + kv_heads, kv_heads, 1)?;
                        let spec = AttentionSpec { scale: 0.125.into(), window, regime: Regime::Decode };
                        q.paged_attention(&k, &v, &pool, &batch(runtime, &rows, pages), spec)
                    };
                    let before = attend(0)?;
                    Array::concatenate(&[&before, &attend(1)?], 0)
                });
            }
        }
    }
}

/// Rotations of a prompt's queries and keys, of whole heads and of parts, on one axis and by row and column. Rows see
/// earlier keys alone, or all of their sequence. A second step reads the pages that the first has written.
pub(super) fn rotation_then_prompt(runtime: &Runtime) {
    let mut random = Random::new(100);
    let sizes = [
        AttentionSizes { heads: 6, kv_heads: 2, size: 64, rotary: 64, window: None },
        AttentionSizes { heads: 3, kv_heads: 3, size: 80, rotary: 80, window: None },
        AttentionSizes { heads: 5, kv_heads: 1, size: 128, rotary: 128, window: None },
        AttentionSizes { heads: 4, kv_heads: 2, size: 256, rotary: 256, window: None },
        AttentionSizes { heads: 6, kv_heads: 3, size: 64, rotary: 32, window: None },
        AttentionSizes { heads: 4, kv_heads: 2, size: 64, rotary: 64, window: Some(70) },
    ];
    let batches: [&[(usize, usize)]; 3] =
        [&[(0, 17)], &[(250, 70), (0, 1), (31, 0), (60, 129)], &[(5, 3), (511, 2)]];
    for (sizes, rows) in sizes.into_iter().flat_map(|sizes| batches.map(|rows| (sizes, rows))) {
        let AttentionSizes { heads, kv_heads, size, rotary, window } = sizes;
        let tokens: usize = rows.iter().map(|r| r.1).sum();
        // The last rows belong to no sequence, and write no page.
        let padded = tokens + 3;
        let pages = rows.iter().map(|(first, n)| (first + 2 * n).div_ceil(256)).max().unwrap_or(0);
        let wide = draw(runtime, &mut random, &[padded, (heads + 2 * kv_heads) * size + 4]);
        let inverse = |base: f32| {
            let inverse: Vec<f32> =
                (0..rotary / 2).map(|i| base.powf(-2.0 * i as f32 / rotary as f32)).collect();
            Array::from_slice(runtime, &inverse, [rotary / 2]).expect("memory")
        };
        // Keys may turn in another way than queries.
        let frequencies = [inverse(1e4), inverse(1e3)];
        let history = draw(runtime, &mut random, &[pages * rows.len() + 1, kv_heads, 256, size]);
        let quarter = rotary / 4;
        let axes = [None, Some([quarter, rotary / 2 - quarter, 0])];
        let turns = [(Some(0), Some(0)), (Some(0), Some(1)), (Some(0), None), (None, Some(0))];
        let cases = axes.into_iter().flat_map(|sections| turns.map(|turns| (sections, turns)));
        let kinds = [(DType::F32, tolerance::F32), (DType::F16, tolerance::F16_OPERANDS)];
        for ((sections, turns), (dtype, within)) in
            cases.flat_map(|case| kinds.map(|kind| (case, kind))).filter(|((sections, turns), (dtype, _))| {
                is_mine(&("prompt", sizes, rows, dtype, sections, turns))
            })
        {
            let what = format!("{sizes:?} at {rows:?}, {dtype}, turned {turns:?} by {sections:?}");
            expect_within_of(within, &what, &|step| {
                let pool = || history.add(&history)?.cast(dtype)?.detach();
                let pool = KvPool { keys: pool()?, values: pool()? };
                let wide = step(wide.add(&wide)?);
                let part = |start: usize, heads: usize| {
                    let first = start * size + 4;
                    wide.slice_axis(-1, first, first + heads * size)?.reshape([padded, heads, size])
                };
                let attend = |pass: usize| {
                    let rows: Vec<_> = rows.iter().map(|&(first, n)| (first + pass * n, n)).collect();
                    let each = |&(first, n): &(usize, usize)| first as i32..(first + n) as i32;
                    let mut at: Vec<i32> = rows.iter().flat_map(each).collect();
                    at.resize(padded, 0);
                    if sections.is_some() {
                        at.extend(at.clone().iter().map(|at| at % 7).collect::<Vec<_>>());
                        at.extend(vec![0; padded]);
                    }
                    let axes = if sections.is_some() { vec![3, padded] } else { vec![padded] };
                    let at = Array::from_slice(runtime, &at, axes)?;
                    let spec = RopeSpec { rotary, sections, interleaved: false };
                    let turn = |x: Array, how: Option<usize>| match how {
                        None => Ok(x),
                        Some(how) => x.rope(&at, &frequencies[how], spec.clone()),
                    };
                    let (q, k) = (turn(part(0, heads)?, turns.0)?, turn(part(heads, kv_heads)?, turns.1)?);
                    let (q, k, v) = (step(q), step(k), part(heads + kv_heads, kv_heads)?);
                    let spec = AttentionSpec { scale: 0.125.into(), window, regime: Regime::Prefill };
                    let batch = batch(runtime, &rows, pages);
                    let y = if sections.is_none() {
                        q.paged_attention(&k, &v, &pool, &batch, spec)?
                    } else {
                        let all = Array::from_slice(runtime, &vec![u32::MAX; padded], [padded])?;
                        q.attention_until(KvRows { keys: &k, values: &v }, &pool, &batch, &all, spec)?
                    };
                    y.slice_axis(0, 0, tokens)
                };
                let before = attend(0)?;
                Array::concatenate(&[&before, &attend(1)?], 0)
            });
        }
    }
}
