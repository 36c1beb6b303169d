//! Products with weights in blocks, exact: rows of the weight are decoded to f32 and multiplied in f32.
//!
//! ```text
//! y[t, n] = sum over k of x[t, k] * decode(w)[n, k]
//! ```
//!
//! Memory holds the blocks as they came. A unit of work is a panel of 32 rows of the weight. It is decoded once and
//! multiplied with every row of x. One lane sums each result along k in order, so a row's bits do not depend on other
//! rows.
//!
//! Floor: reading the blocks, and `2 N K` operations for each row of x; decoding costs about as much as two rows of x.

mod decode;

use crate::isa::Isa;
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::{self, LANES, Simd, VectorKernel};
use keel_array::BlockFormat;
use std::ops::Range;

use super::small_gemm::{Matrix, SmallGemm, Start};

/// Rows of the weight that are decoded together.
const PANEL: usize = 2 * LANES;

/// A stack of weight matrices `[E, N, K]` in blocks.
#[derive(Clone, Copy)]
pub struct BlockWeight<'a> {
    /// How the blocks are coded.
    pub format: BlockFormat,
    /// Rows of blocks, matrix by matrix.
    pub bytes: &'a [u8],
    /// N
    pub n: usize,
    /// K
    pub k: usize,
}

/// Bytes of `rows` rows of `k` values; saturates.
pub fn packed_bytes(format: BlockFormat, rows: usize, k: usize) -> usize {
    format.row_bytes(k).unwrap_or(usize::MAX).saturating_mul(rows)
}

/// `f32` values of workspace for `workers` workers: a panel, a decoded row, and the results of a panel for `rows` rows.
pub fn workspace_len(workers: usize, rows: usize, k: usize) -> usize {
    workers * worker_len(rows, k)
}

fn worker_len(rows: usize, k: usize) -> usize {
    (PANEL + 1) * k + PANEL * rows
}

impl BlockWeight<'_> {
    /// Decodes row `row` of matrix `matrix` with instructions of `isa` at most.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, isa: Isa, matrix: usize, row: usize, out: &mut [f32]) {
        simd::run_at(isa, DecodeRow { weight: self, at: matrix * self.n + row, out });
    }

    #[inline(always)]
    fn decode(&self, at: usize, out: &mut [f32]) {
        let row_bytes = self.bytes.len() / self.rows();
        decode::row(self.format, &self.bytes[at * row_bytes..(at + 1) * row_bytes], out);
    }

    fn rows(&self) -> usize {
        self.bytes.len() / packed_bytes(self.format, 1, self.k)
    }
}

struct DecodeRow<'a, 'b> {
    weight: &'a BlockWeight<'b>,
    at: usize,
    out: &'a mut [f32],
}

impl VectorKernel for DecodeRow<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, _s: S) {
        self.weight.decode(self.at, self.out);
    }
}

/// `y = x W^T` with one matrix, or with the matrix that `experts` names for each row of y.
pub struct BlockProduct<'a> {
    /// The weight.
    pub weight: BlockWeight<'a>,
    /// `[T, K]`; with experts `[R / fanout, K]`.
    pub x: &'a [f32],
    /// The matrix of each of the `R` rows of y; `None`: there is one matrix.
    pub experts: Option<&'a [u32]>,
    /// `[T, N]`, or `[R, N]`.
    pub y: SharedMut<'a, f32>,
    /// Add to y instead of replacing it.
    pub add: bool,
}

impl BlockProduct<'_> {
    /// Computes it. Called by every worker as the first kernel after a barrier, with the same arguments; `workspace`
    /// holds [`workspace_len`] values for the rows of x.
    ///
    /// # Panics
    /// If lengths do not fit each other or an expert is not in the stack.
    pub fn run(&self, workspace: SharedMut<'_, f32>, worker: &Worker<'_>) {
        let rows = self.x.len() / self.weight.k;
        let len = worker_len(rows, self.weight.k);
        assert!(workspace.len() >= worker.count * len, "the workspace is too small");
        // SAFETY: each worker uses its own part.
        let scratch = unsafe { workspace.range(worker.index * len..(worker.index + 1) * len) };
        simd::run_at(worker.isa, Task { product: self, scratch, rows, worker });
    }
}

struct Task<'a, 'w> {
    product: &'a BlockProduct<'a>,
    scratch: &'a mut [f32],
    rows: usize,
    worker: &'a Worker<'w>,
}

impl VectorKernel for Task<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Task { product, scratch, rows, worker } = self;
        let panels = product.weight.n.div_ceil(PANEL);
        match product.experts {
            None => {
                for panel in worker.claim(panels, 1).flatten() {
                    product.panel(s, 0, panel, 0..rows, 0, scratch);
                }
            }
            Some(experts) => {
                let fanout = experts.len() / rows.max(1);
                for unit in worker.claim(panels * experts.len(), 1).flatten() {
                    let (r, panel) = (unit / panels, unit % panels);
                    let row = r / fanout;
                    product.panel(s, experts[r] as usize, panel, row..row + 1, r, scratch);
                }
            }
        }
    }
}

impl BlockProduct<'_> {
    /// Multiplies a panel of one matrix with `rows` of x; the first result belongs to row `first` of y.
    #[inline(always)]
    fn panel<S: Simd>(
        &self,
        s: S,
        matrix: usize,
        panel: usize,
        rows: Range<usize>,
        first: usize,
        scratch: &mut [f32],
    ) {
        let (n, k) = (self.weight.n, self.weight.k);
        let columns = panel * PANEL..((panel + 1) * PANEL).min(n);
        let (row, scratch) = scratch.split_at_mut(k);
        let (transposed, results) = scratch.split_at_mut(PANEL * k);
        for (i, column) in columns.clone().enumerate() {
            self.weight.decode(matrix * n + column, row);
            for (to, value) in transposed.chunks_exact_mut(PANEL).zip(row.iter()) {
                to[i] = *value;
            }
        }
        for to in transposed.chunks_exact_mut(PANEL) {
            to[columns.len()..].fill(0.0);
        }
        let gemm = SmallGemm {
            m: rows.len(),
            n: PANEL,
            k,
            a: Matrix::new(&self.x[rows.start * k..rows.end * k], k),
            b: Matrix::new(transposed, PANEL),
            start: Start::Zero,
        };
        gemm.run(s, results, PANEL);
        for (t, results) in results.chunks_exact(PANEL).take(rows.len()).enumerate() {
            let at = (first + t) * n;
            // SAFETY: each panel of each row is claimed once.
            let y = unsafe { self.y.range(at + columns.start..at + columns.end) };
            for (y, result) in y.iter_mut().zip(results) {
                *y = if self.add { *y + result } else { *result };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::ThreadPool;

    /// Blocks of random bytes; some have scales that are NaN, infinite or subnormal.
    fn random_bytes(len: usize, seed: u64) -> Vec<u8> {
        let mut state = seed;
        let next = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        (0..len).map(next).collect()
    }

    #[test]
    fn rows_decode_to_the_bits_of_the_reference_at_every_level() {
        for (seed, format) in BlockFormat::ALL.into_iter().enumerate() {
            let (rows, k) = (40, 512);
            let bytes = random_bytes(packed_bytes(format, rows, k), seed as u64);
            let weight = BlockWeight { format, bytes: &bytes, n: rows, k };
            let (mut got, mut want) = (vec![0.0; k], vec![0.0; k]);
            for row in 0..rows {
                format.decode(&bytes[row * bytes.len() / rows..], &mut want);
                for isa in Isa::available() {
                    got.fill(7.0);
                    weight.row(isa, 0, row, &mut got);
                    let same =
                        |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
                    assert!(got.iter().zip(&want).all(same), "{format}, row {row}, {isa}");
                }
            }
        }
    }

    #[test]
    fn a_row_gets_the_same_bits_alone_and_with_others() {
        let (n, k) = (45, 256);
        let mut bytes = random_bytes(packed_bytes(BlockFormat::Q4K, n, k), 1);
        for block in bytes.chunks_exact_mut(BlockFormat::Q4K.bytes()) {
            block[..4].copy_from_slice(&[0, 0x2c, 0, 0x28]);
        }
        let x: Vec<f32> = (0..19 * k).map(|i| (i as f32 * 0.37).sin()).collect();
        let run = |x: &[f32], workers: usize| {
            let weight = BlockWeight { format: BlockFormat::Q4K, bytes: &bytes, n, k };
            let rows = x.len() / k;
            let (mut y, mut space) = (vec![0.0; rows * n], vec![f32::NAN; workspace_len(workers, rows, k)]);
            let (y_out, space) = (SharedMut::new(&mut y), SharedMut::new(&mut space));
            let product = BlockProduct { weight, x, experts: None, y: y_out, add: false };
            ThreadPool::new(workers).run(|worker| product.run(space, worker));
            y
        };
        let together = run(&x, 3);
        for t in 0..19 {
            assert_eq!(run(&x[t * k..(t + 1) * k], 1), together[t * n..(t + 1) * n], "row {t}");
        }
    }
}
