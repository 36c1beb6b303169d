//! Norms, activations and rope: operations on single rows.

use keel_cpu::kernels::activation::{sigmoid_gate, swiglu};
use keel_cpu::kernels::rms_norm::{add_rms_norm, gated_rms_norm, rms_norm};
use keel_cpu::kernels::rope::{HeadNorm, Rope, mrope_axes, rope};
use keel_cpu::kernels::rows::{Rows, RowsMut};
use keel_cpu::pool::{ThreadPool, Worker};
use keel_cpu::shared_slice::SharedMut;
use keel_testkit::cases::rows::SHAPES;
use keel_testkit::compare::{assert_close, assert_same_bits};
use keel_testkit::naive;
use keel_testkit::random::Random;

/// Runs `kernel` over rows of `width` on pools of several sizes, whole and row by row; all must give the same bits.
/// `kernel` gets the inputs and the output. Each input comes with its number of values a row.
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
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        assert_close("swiglu", &y, &naive::activation::swiglu(&wide(&x), width), 1e-6);

        let (x, gate) = x.split_at(rows * width);
        let y = all_cuts(rows, &[(x, width), (gate, width)], width, |x, y, worker| {
            sigmoid_gate(x[0], x[1], y, worker);
        });
        let want = naive::activation::sigmoid_gate(&wide(x), &wide(gate));
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
fn each_frequency_is_turned_by_its_axis() {
    let positions = [5, 6, 4_000, 70, 71, 72, 900, 901, 100_000];
    let frequencies = [1.0, 0.3, 0.01, 1e-4];
    let axes = mrope_axes([2, 1, 1], true);
    // The rotation turns a pair (1, 0) into its cosine and sine.
    let x = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0].repeat(3);
    let y = turned(&x, 8, &positions, &frequencies, &axes, None, 2);
    let angle =
        |t: usize, i: usize| f64::from(positions[usize::from(axes[i]) * 3 + t]) * f64::from(frequencies[i]);
    for (t, row) in y.chunks_exact(8).enumerate() {
        assert_close("cos", &row[..4], &(0..4).map(|i| angle(t, i).cos()).collect::<Vec<_>>(), 1e-7);
        assert_close("sin", &row[4..], &(0..4).map(|i| angle(t, i).sin()).collect::<Vec<_>>(), 1e-7);
    }
}

/// `rope` over `[T, H * D]`.
fn turned(
    x: &[f32],
    head_dim: usize,
    positions: &[i32],
    inverse_frequencies: &[f32],
    axes: &[u8],
    norm: Option<HeadNorm<'_>>,
    workers: usize,
) -> Vec<f32> {
    let axis_count = axes.iter().max().map_or(1, |&last| usize::from(last) + 1);
    let width = x.len() / (positions.len() / axis_count);
    let mut y = vec![f32::NAN; x.len()];
    let task = Rope {
        x: Rows::whole(x, width),
        head_dim,
        positions,
        inverse_frequencies,
        axes,
        norm,
        y: RowsMut::whole(SharedMut::new(&mut y), width),
    };
    ThreadPool::new(workers).run(|worker| rope(&task, worker));
    y
}

#[test]
fn heads_are_normed_and_turned() {
    // (heads, head size, pairs, norm): whole and partial rotation, sizes that are not a multiple of a vector.
    for (heads, size, pairs, normed) in
        [(6, 64, 16, true), (3, 32, 16, false), (4, 80, 10, true), (2, 48, 0, true), (5, 33, 7, false)]
    {
        let positions: Vec<i32> = (250..259).chain(62..66).collect();
        let mut random = Random::new(size as u64);
        let x = random.uniforms(positions.len() * heads * size, -2.0, 2.0);
        let weight = random.uniforms(size, 0.5, 1.5);
        let frequencies: Vec<f32> = (0..pairs).map(|i| 100f32.powf(-(i as f32) / pairs as f32)).collect();
        let norm = normed.then_some(HeadNorm { weight: &weight, eps: 1e-6 });
        let y = turned(&x, size, &positions, &frequencies, &[], norm, 2);

        let input = match normed {
            true => naive::rms_norm::rms_norm(&x, &weight, 1e-6),
            false => x.iter().map(|&x| f64::from(x)).collect(),
        };
        let angles: Vec<f64> = positions
            .iter()
            .flat_map(|&p| frequencies.iter().map(move |&f| f64::from(p) * f64::from(f)))
            .collect();
        assert_close("rope", &y, &naive::rope::rope(&input, heads, size, &angles, pairs), 1e-6);
        assert_same_bits("workers", &y, &turned(&x, size, &positions, &frequencies, &[], norm, 3));
    }
}
