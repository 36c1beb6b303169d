use super::row_starts;
use keel_cpu::kernels::causal_conv::{CausalConv, ConvLog, causal_conv};
use keel_cpu::kernels::rows::{Batch, Rows, RowsMut};
use keel_cpu::pool::ThreadPool;
use keel_cpu::shared_slice::SharedMut;
use keel_testkit::cases::causal_conv::{BATCHES, SHAPES, Shape};
use keel_testkit::compare::{assert_close, assert_same_bits};
use keel_testkit::naive;
use keel_testkit::random::Random;

struct Weights {
    shape: Shape,
    weight: Vec<f32>,
}

impl Weights {
    fn random(shape: Shape) -> Weights {
        Weights { shape, weight: Random::new(3).uniforms(shape.width * shape.channels, -1.0, 1.0) }
    }

    fn window_len(&self) -> usize {
        (self.shape.width - 1) * self.shape.channels
    }
}

/// One step; `x` lies in the middle of rows that are wider by five values.
fn step(
    weights: &Weights,
    x: &[f32],
    rows: &[usize],
    slot: &[u32],
    window: &mut [f32],
    log: Option<ConvLog<'_>>,
    workers: usize,
) -> Vec<f32> {
    let channels = weights.shape.channels;
    let wide: Vec<f32> = x
        .chunks_exact(channels)
        .flat_map(|row| [f32::NAN; 2].into_iter().chain(row.iter().copied()).chain([f32::NAN; 3]))
        .collect();
    let row_start = row_starts(rows.iter().copied());
    let position = vec![0; rows.len()];
    let mut y = vec![f32::NAN; x.len()];
    let conv = CausalConv {
        x: Rows::new(&wide, channels + 5, 2..channels + 2),
        weight: &weights.weight,
        batch: Batch { row_start: &row_start, position: &position },
        slot,
        window: SharedMut::new(window),
        log,
        y: RowsMut::whole(SharedMut::new(&mut y), channels),
    };
    ThreadPool::new(workers).run(|worker| causal_conv(&conv, worker));
    y
}

#[test]
fn it_follows_the_oracle_whatever_the_batch_and_the_workers() {
    for &shape in SHAPES {
        let weights = Weights::random(shape);
        for rows in BATCHES {
            let mut random = Random::new(17);
            let x = random.uniforms(rows.iter().sum::<usize>() * shape.channels, -2.0, 2.0);
            let len = weights.window_len();
            let start = random.uniforms((rows.len() + 1) * len, -2.0, 2.0);
            let slot: Vec<u32> = (0..rows.len() as u32).rev().collect();
            let (mut want, mut want_window, mut from) = (Vec::new(), start.clone(), 0);
            for (&rows, &slot) in rows.iter().zip(&slot) {
                let part = &x[from..from + rows * shape.channels];
                let slot = slot as usize * len..(slot as usize + 1) * len;
                let mut window = start[slot.clone()].to_vec();
                let weight = &weights.weight;
                want.extend(naive::causal_conv::causal_conv(part, weight, shape.channels, &mut window));
                want_window[slot].copy_from_slice(&window);
                from += part.len();
            }
            let mut runs = Vec::new();
            for workers in [1, 3] {
                let mut window = start.clone();
                let y = step(&weights, &x, rows, &slot, &mut window, None, workers);
                assert_close(&format!("{shape:?} {rows:?}"), &y, &want, 1e-6);
                assert_same_bits("window", &window, &want_window);
                runs.push(y);
            }
            assert_same_bits("workers", &runs[0], &runs[1]);
        }
    }
}

#[test]
fn row_by_row_has_the_bits_of_all_rows_at_once() {
    for &shape in SHAPES {
        let weights = Weights::random(shape);
        let x = Random::new(18).uniforms(20 * shape.channels, -2.0, 2.0);
        let (mut whole, mut single) = (vec![0.5; weights.window_len()], vec![0.5; weights.window_len()]);
        let y = step(&weights, &x, &[20], &[0], &mut whole, None, 2);
        let rows: Vec<f32> = x
            .chunks_exact(shape.channels)
            .flat_map(|row| step(&weights, row, &[1], &[0], &mut single, None, 2))
            .collect();
        assert_same_bits("y", &y, &rows);
        assert_same_bits("window", &whole, &single);
    }
}

/// Rounds of open rows, some of them accepted, end where plain decoding ends.
#[test]
fn accepted_rows_have_the_bits_of_plain_decoding() {
    for &shape in SHAPES {
        let (weights, capacity, channels) = (Weights::random(shape), 5, shape.channels);
        let mut random = Random::new(19);
        let x = random.uniforms(50 * channels, -2.0, 2.0);
        let mut plain = vec![0.25; weights.window_len()];
        let want = step(&weights, &x, &[50], &[0], &mut plain, None, 1);

        let mut window = vec![0.25; weights.window_len()];
        let mut open_rows = vec![f32::NAN; capacity * channels];
        let rows = SharedMut::new(&mut open_rows);
        let (mut done, mut accepted) = (0, 0);
        while done < 50 {
            let count = 1 + random.below(capacity);
            let right = (1 + random.below(count)).min(50 - done);
            let mut open = x[done * channels..(done + right) * channels].to_vec();
            open.extend(random.uniforms((count - right) * channels, -9.0, 9.0));
            let log = ConvLog { rows, capacity, accepted: &[accepted], keep_open: true };
            let y = step(&weights, &open, &[count], &[0], &mut window, Some(log), 2);
            assert_same_bits("y", &y[..right * channels], &want[done * channels..(done + right) * channels]);
            done += right;
            accepted = right as u32;
        }
        let log = ConvLog { rows, capacity, accepted: &[accepted], keep_open: false };
        step(&weights, &[], &[0], &[0], &mut window, Some(log), 1);
        assert_same_bits("settled window", &window, &plain);
    }
}
