//! Tokens drawn from logits, as `keel_array::sampling` defines it.
//!
//! Candidates fall into buckets by `(l - max) / temperature`; the buckets are in the order of the candidates. Counts
//! and weights of the buckets tell which of them holds a boundary, and only that bucket's members are sorted. All
//! workers share the passes over all logits. After that each row belongs to one worker.
//!
//! Memory: the logits are read once for the maximum, once more if a token is drawn, and once for each of top-k, top-p,
//! min-p and the draw itself. Floor of a pass over 248,320 logits: 1 MB at 55 GB/s, 18 us.

mod row;

use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use keel_array::sampling::Draw;
use row::{BUCKETS, Row, Totals};
use std::ops::Range;

/// Words of one worker for one row: the first candidate in its share, then count and weight of each bucket and of the
/// rest.
const WORDS: usize = 1 + 2 * (BUCKETS + 1);

/// Most pairs of a row and a worker that scratch has words for, unless there are more workers.
const PAIRS_MAX: usize = 64;

/// Rows that are processed together.
fn rows_at_a_time(workers: usize) -> usize {
    (PAIRS_MAX / workers).max(1)
}

/// Words of scratch for `rows` rows.
pub fn scratch_words(rows: usize, workers: usize) -> usize {
    rows.min(rows_at_a_time(workers)) * workers * WORDS
}

/// Writes one token to `y` for each row of `width` logits; `draws` are [`Draw::words`].
///
/// # Panics
/// If the lengths do not fit.
pub fn sample(
    logits: &[f32],
    width: usize,
    draws: &[f32],
    y: SharedMut<'_, u32>,
    scratch: SharedMut<'_, u64>,
    worker: &Worker<'_>,
) {
    let rows = y.len();
    assert!(logits.len() == rows * width && draws.len() == rows * Draw::WORDS);
    assert!(scratch.len() >= scratch_words(rows, worker.count));
    let row = |i: usize| Row::new(&logits[i * width..][..width], &draws[i * Draw::WORDS..][..Draw::WORDS]);
    let mut first = 0;
    while first < rows {
        let some = first..rows.min(first + rows_at_a_time(worker.count));
        first = some.end;
        if some.clone().any(|i| !row(i).is_skipped()) {
            sample_some(&row, some, y, WorkerWords { scratch, worker });
            // The next rows use the same words of scratch.
            if first < rows {
                worker.barrier();
            }
        }
    }
}

/// Processes some rows together.
fn sample_some<'a>(
    row: &impl Fn(usize) -> Row<'a>,
    rows: Range<usize>,
    y: SharedMut<'_, u32>,
    mut words: WorkerWords<'_>,
) {
    let worker = words.worker;
    for (at, row) in rows.clone().map(row).enumerate().filter(|(_, row)| !row.is_skipped()) {
        let share = worker.split(row.width(), 64);
        words.own(at, 0..1)[0] = row.first_of(share);
    }
    worker.barrier();
    let all = words;
    let first = |at: usize| (0..worker.count).map(|of| all.read(at, of, 0)).max().unwrap_or(0);
    let mut any_draws = false;
    for (at, row) in rows.clone().map(row).enumerate().filter(|(_, row)| row.draws()) {
        any_draws = true;
        let share = worker.split(row.width(), 64);
        row.with_first(first(at)).fill(share, words.own(at, 1..WORDS).as_chunks_mut::<2>().0, worker.isa);
    }
    if any_draws {
        worker.barrier();
    }
    for at in worker.claim(rows.len(), 1).flatten() {
        let row = row(rows.start + at);
        if row.is_skipped() {
            continue;
        }
        let mut buckets = [Totals::default(); BUCKETS];
        if row.draws() {
            for (i, sum) in buckets.iter_mut().enumerate() {
                let of = |of: usize| [all.read(at, of, 1 + 2 * i), all.read(at, of, 2 + 2 * i)];
                (0..worker.count).map(of).for_each(|part| sum.add(part));
            }
        }
        let token = row.with_first(first(at)).draw(&buckets);
        // SAFETY: each row is claimed once.
        unsafe { y.range(rows.start + at..rows.start + at + 1) }.fill(token);
    }
}

/// Words that workers write for each other.
#[derive(Clone, Copy)]
struct WorkerWords<'a> {
    scratch: SharedMut<'a, u64>,
    worker: &'a Worker<'a>,
}

impl WorkerWords<'_> {
    fn start(self, row: usize, worker: usize) -> usize {
        (row * self.worker.count + worker) * WORDS
    }

    /// Words of this worker. No other worker reads them before the next barrier.
    fn own(&mut self, row: usize, words: Range<usize>) -> &mut [u64] {
        let start = self.start(row, self.worker.index);
        // SAFETY: each worker has words of its own, and holds this borrow only while it writes.
        unsafe { self.scratch.range(start + words.start..start + words.end) }
    }

    /// A word of a worker, written before the last barrier.
    fn read(self, row: usize, worker: usize, word: usize) -> u64 {
        let at = self.start(row, worker) + word;
        assert!(at < self.scratch.len());
        // SAFETY: within the scratch, and no worker writes it after the barrier.
        unsafe { self.scratch.as_ptr().add(at).read() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::ThreadPool;
    use keel_testkit::naive::sample::sample as naive;
    use keel_testkit::random::Random;

    /// Tokens of rows of `width` logits, drawn by `workers` workers.
    fn sampled(logits: &[f32], width: usize, draws: &[Draw], workers: usize) -> Vec<u32> {
        let words: Vec<f32> = draws.iter().flat_map(Draw::words).collect();
        let mut y = vec![u32::MAX; draws.len()];
        let mut scratch = vec![u64::MAX; scratch_words(draws.len(), workers)];
        let (tokens, scratch) = (SharedMut::new(&mut y), SharedMut::new(&mut scratch));
        ThreadPool::new(workers).run(|worker| sample(logits, width, &words, tokens, scratch, worker));
        y
    }

    /// More equal logits than are sorted at a time, and more rows than are processed at a time.
    #[test]
    fn crowded_buckets_and_many_rows_are_drawn_from_as_the_oracle_does() {
        let mut random = Random::new(7);
        let (rows, width) = (70, 5003);
        let logits: Vec<f32> = (0..rows * width)
            .map(|i| if i % width % 3 == 0 { 0.5 } else { random.uniform(-2.0, 0.5) })
            .collect();
        let draws: Vec<Draw> = (0..rows)
            .map(|i| Draw {
                temperature: [1.0, 0.0, 100.0, 0.01][i % 4],
                top_k: [0, 1, 1500, 4000][i / 4 % 4],
                top_p: [1.0, 0.9, 0.3][i % 3],
                min_p: [0.0, 0.2, 1.0][i / 3 % 3],
                uniform: random.uniform(0.0, 1.0),
            })
            .collect();
        let want: Vec<u32> = logits.chunks(width).zip(&draws).map(|(row, draw)| naive(row, draw)).collect();
        for workers in [1, 2, 3] {
            assert_eq!(sampled(&logits, width, &draws, workers), want, "{workers} workers");
        }
    }
}
