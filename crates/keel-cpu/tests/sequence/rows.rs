//! Norms, activations and rope: operations on single rows.

use super::row_starts;
use keel_cpu::kernels::activation::{sigmoid_gate, swiglu};
use keel_cpu::kernels::attention::{KvPagesMut, PAGE, PageTable, kv_write};
use keel_cpu::kernels::rms_norm::{add_rms_norm, gated_rms_norm, rms_norm};
use keel_cpu::kernels::rope::{QkNormRope, mrope_axes, qk_norm_rope, rope_table};
use keel_cpu::kernels::rows::{Batch, Rows, RowsMut};
use keel_cpu::pool::{ThreadPool, Worker};
use keel_cpu::shared_slice::SharedMut;
use keel_testkit::cases::rows::SHAPES;
use keel_testkit::compare::{assert_close, assert_same_bits};
use keel_testkit::naive;
use keel_testkit::random::Random;

/// Runs `kernel` over rows of `width` on pools of several sizes, whole and row by row; all must give the same bits.
/// `kernel` gets the inputs (of `widths` values a row) and the output.
fn all_cuts(
    rows: usize,
    inputs: &[(&[f32], usize)],
    width: usize,
    kernel: impl Fn(&[Rows<'_>], RowsMut<'_>, &Worker<'_>) + Sync,
) -> Vec<f32> {
    let run = |workers: usize, from: usize, to: usize| {
        let views: Vec<Rows<'_>> =
            inputs.iter().map(|&(x, width)| Rows::whole(&x[from * width..to * width], width)).collect();
        let mut y = vec![f32::NAN; (to - from) * width];
        let out = RowsMut::whole(SharedMut::new(&mut y), width);
        ThreadPool::new(workers).run(|worker| kernel(&views, out, worker));
        y
    };
    let whole = run(1, 0, rows);
    assert_same_bits("three workers", &whole, &run(3, 0, rows));
    let single: Vec<f32> = (0..rows).flat_map(|t| run(2, t, t + 1)).collect();
    assert_same_bits("row by row", &whole, &single);
    whole
}

#[test]
fn norms_follow_the_oracle() {
    for &(rows, width) in SHAPES {
        let mut random = Random::new(width as u64);
        let x = random.uniforms(rows * width, -3.0, 3.0);
        let gate = random.uniforms(rows * width, -8.0, 8.0);
        let weight = random.uniforms(width, 0.5, 1.5);

        let y =
            all_cuts(rows, &[(&x, width)], width, |x, y, worker| rms_norm(x[0], &weight, 1e-6, y, worker));
        assert_close("rms_norm", &y, &naive::rms_norm::rms_norm(&x, &weight, 1e-6), 1e-6);

        let heads = [&x[..], &gate[..]].map(|x| (x, width));
        let y = all_cuts(rows, &heads, width, |x, y, worker| {
            gated_rms_norm(x[0], x[1], &weight, 1e-6, y, worker)
        });
        assert_close("gated_rms_norm", &y, &naive::rms_norm::gated_rms_norm(&x, &gate, &weight, 1e-6), 1e-6);
    }
}

#[test]
fn a_gated_norm_works_head_by_head() {
    let (rows, heads, size) = (3, 5, 24);
    let mut random = Random::new(1);
    let x = random.uniforms(rows * heads * size, -3.0, 3.0);
    let gate = random.uniforms(rows * heads * size, -3.0, 3.0);
    let weight = random.uniforms(size, 0.5, 1.5);
    let inputs = [&x[..], &gate[..]].map(|x| (x, heads * size));
    let y = all_cuts(rows, &inputs, heads * size, |x, y, w| gated_rms_norm(x[0], x[1], &weight, 1e-5, y, w));
    assert_close("heads", &y, &naive::rms_norm::gated_rms_norm(&x, &gate, &weight, 1e-5), 1e-6);
}

#[test]
fn the_residual_is_added_before_the_norm() {
    for &(rows, width) in SHAPES {
        let mut random = Random::new(width as u64);
        let x = random.uniforms(rows * width, -3.0, 3.0);
        let start = random.uniforms(rows * width, -3.0, 3.0);
        let weight = random.uniforms(width, 0.5, 1.5);
        let sum: Vec<f32> = x.iter().zip(&start).map(|(x, r)| x + r).collect();
        for workers in [1, 3] {
            let (mut residual, mut y) = (start.clone(), vec![f32::NAN; x.len()]);
            let (r, out) = (SharedMut::new(&mut residual), SharedMut::new(&mut y));
            let (r, out) = (RowsMut::whole(r, width), RowsMut::whole(out, width));
            ThreadPool::new(workers).run(|w| add_rms_norm(Rows::whole(&x, width), r, &weight, 1e-6, out, w));
            assert_same_bits("residual", &residual, &sum);
            assert_close("add_rms_norm", &y, &naive::rms_norm::rms_norm(&sum, &weight, 1e-6), 1e-6);
        }
    }
}

#[test]
fn activations_follow_their_formulas() {
    for &(rows, width) in SHAPES {
        let mut random = Random::new(width as u64);
        let x = random.uniforms(rows * 2 * width, -20.0, 20.0);
        let y = all_cuts(rows, &[(&x, 2 * width)], width, |x, y, worker| swiglu(x[0], y, worker));
        let want: Vec<f64> = x
            .chunks_exact(2 * width)
            .flat_map(|row| (0..width).map(|i| naive::silu(f64::from(row[i])) * f64::from(row[width + i])))
            .collect();
        assert_close("swiglu", &y, &want, 1e-6);

        let (x, gate) = x.split_at(rows * width);
        let y = all_cuts(rows, &[(x, width), (gate, width)], width, |x, y, worker| {
            sigmoid_gate(x[0], x[1], y, worker);
        });
        let want: Vec<f64> =
            x.iter().zip(gate).map(|(&x, &g)| f64::from(x) / (1.0 + (-f64::from(g)).exp())).collect();
        assert_close("sigmoid_gate", &y, &want, 1e-6);
    }
}

#[test]
fn sections_are_dealt_out_to_axes() {
    assert_eq!(mrope_axes([3, 2, 1], false), [0, 0, 0, 1, 1, 2]);
    assert_eq!(mrope_axes([4, 2, 2], true), [0, 1, 2, 0, 1, 2, 0, 0]);
    assert_eq!(mrope_axes([2, 0, 0], true), [0, 0]);
}

#[test]
fn the_table_turns_each_frequency_by_its_axis() {
    let positions = [5u32, 6, 4_000, 70, 71, 72, 900, 901, 100_000];
    let frequencies = [1.0, 0.3, 0.01, 1e-4];
    let axis = mrope_axes([2, 1, 1], true);
    let (mut cos, mut sin) = (vec![0.0; 12], vec![0.0; 12]);
    let out = [&mut cos, &mut sin].map(|x| RowsMut::whole(SharedMut::new(x), 4));
    ThreadPool::new(2).run(|worker| rope_table(&positions, &frequencies, &axis, out[0], out[1], worker));
    let angle = |i: usize| f64::from(positions[usize::from(axis[i % 4]) * 3 + i / 4]) * frequencies[i % 4];
    assert_close("cos", &cos, &(0..12).map(|i| angle(i).cos()).collect::<Vec<_>>(), 1e-7);
    assert_close("sin", &sin, &(0..12).map(|i| angle(i).sin()).collect::<Vec<_>>(), 1e-7);
}

/// Sizes of a fused norm and rotation.
struct Heads {
    heads: usize,
    kv_heads: usize,
    size: usize,
    pairs: usize,
    gated: bool,
    norm: bool,
}

/// Queries, and the pools of keys and values, of two sequences at positions 250 (9 rows) and 62 (4 rows).
fn fused(h: &Heads, workers: usize) -> ([Vec<f32>; 3], [Vec<f32>; 3]) {
    let (rows, first) = ([9usize, 4], [250u32, 62]);
    let mut random = Random::new(h.size as u64);
    let query_stride = if h.gated { 2 * h.size } else { h.size };
    let (q_len, k_len) = (h.heads * query_stride, h.kv_heads * h.size);
    let width = q_len + 2 * k_len;
    let x = random.uniforms(13 * width, -2.0, 2.0);
    let weights = [random.uniforms(h.size, 0.5, 1.5), random.uniforms(h.size, 0.5, 1.5)];
    let position: Vec<u32> = (0..2).flat_map(|b| (0..rows[b] as u32).map(move |t| first[b] + t)).collect();
    let frequencies: Vec<f64> = (0..h.pairs).map(|i| 100f64.powf(-(i as f64) / h.pairs as f64)).collect();
    let row_start = row_starts(rows);
    let batch = Batch { row_start: &row_start, position: &first };
    let (mut cos, mut sin) = (vec![0.0; 13 * h.pairs], vec![0.0; 13 * h.pairs]);
    let pool = ThreadPool::new(workers);
    if h.pairs > 0 {
        let out = [&mut cos, &mut sin].map(|x| RowsMut::whole(SharedMut::new(x), h.pairs));
        pool.run(|worker| rope_table(&position, &frequencies, &[], out[0], out[1], worker));
    }
    let nothing = vec![0.0; 13];
    let rope = if h.pairs > 0 {
        (Rows::whole(&cos, h.pairs), Rows::whole(&sin, h.pairs))
    } else {
        (Rows::new(&nothing, 1, 0..0), Rows::new(&nothing, 1, 0..0))
    };

    let table = [2u32, 0, 1, 3];
    let table = PageTable { pages: &table, stride: 2 };
    let pool_len = 4 * h.kv_heads * PAGE * h.size;
    let (mut keys, mut values) = (vec![0.0f32; pool_len], vec![0.0; pool_len]);
    let mut q = vec![f32::NAN; 13 * h.heads * h.size];
    let pages = |keys, values| KvPagesMut { keys, values, kv_heads: h.kv_heads, head_size: h.size };
    let task = QkNormRope {
        q: Rows::new(&x, width, 0..q_len),
        k: Rows::new(&x, width, q_len..q_len + k_len),
        v: Rows::new(&x, width, q_len + k_len..width),
        query_stride,
        norm: h.norm.then_some((&weights[0][..], &weights[1][..])),
        eps: 1e-6,
        rope,
        batch,
        table,
        pages: pages(SharedMut::new(&mut keys), SharedMut::new(&mut values)),
        y: RowsMut::whole(SharedMut::new(&mut q), h.heads * h.size),
    };
    pool.run(|worker| qk_norm_rope(&task, worker));

    // The same by way of the oracles, written to the pages by `kv_write`.
    let rows_of = |columns: std::ops::Range<usize>| -> Vec<f32> {
        x.chunks_exact(width).flat_map(|row| row[columns.clone()].to_vec()).collect()
    };
    let queries: Vec<f32> =
        rows_of(0..q_len).chunks_exact(query_stride).flat_map(|head| head[..h.size].to_vec()).collect();
    let angles: Vec<f64> =
        position.iter().flat_map(|&p| frequencies.iter().map(move |f| f64::from(p) * f)).collect();
    let turned = |x: &[f32], heads: usize, weight: &[f32]| -> Vec<f32> {
        let normed = if h.norm {
            naive::rms_norm::rms_norm(x, weight, 1e-6)
        } else {
            x.iter().map(|&x| f64::from(x)).collect()
        };
        naive::rope::rope(&normed, heads, h.size, &angles, h.pairs).iter().map(|&x| x as f32).collect()
    };
    let want_q = turned(&queries, h.heads, &weights[0]);
    let k = turned(&rows_of(q_len..q_len + k_len), h.kv_heads, &weights[1]);
    let v = rows_of(q_len + k_len..width);
    let (mut want_keys, mut want_values) = (vec![0.0f32; pool_len], vec![0.0; pool_len]);
    let want_pages = pages(SharedMut::new(&mut want_keys), SharedMut::new(&mut want_values));
    pool.run(|w| kv_write(Rows::whole(&k, k_len), Rows::whole(&v, k_len), batch, table, want_pages, w));
    ([q, keys, values], [want_q, want_keys, want_values])
}

#[test]
fn queries_and_keys_are_normed_turned_and_put_in_their_places() {
    let cases = [
        Heads { heads: 6, kv_heads: 2, size: 64, pairs: 16, gated: true, norm: true },
        Heads { heads: 3, kv_heads: 3, size: 32, pairs: 16, gated: false, norm: false },
        Heads { heads: 4, kv_heads: 1, size: 80, pairs: 10, gated: false, norm: true },
        Heads { heads: 2, kv_heads: 1, size: 48, pairs: 0, gated: true, norm: true },
    ];
    for h in &cases {
        let (got, want) = fused(h, 2);
        for (got, want) in got.iter().zip(want) {
            assert_close("fused", got, &want.iter().map(|&x| f64::from(x)).collect::<Vec<_>>(), 1e-6);
        }
        let (again, _) = fused(h, 3);
        for (got, again) in got.iter().zip(&again) {
            assert_same_bits("workers", got, again);
        }
    }
}
