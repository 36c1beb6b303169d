//! Products of matrices with any strides: `y[i] = a[i] b[i]` for each matrix `i` of a batch.
//!
//! A unit is 8 rows by 256 columns. For each inner index, a block of the right matrix is read into a buffer once for
//! the 8 rows. Every element is one sum in the order of the inner index, so its bits depend on nothing else. This
//! kernel is for arrays of moderate size; layers with weights use `linear`.

use super::BLOCK;
use super::scalar::{Scalar, widen};
use super::strided::Strided;
use crate::isa::Isa;
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::{self, LANES, Simd, VectorKernel};

/// Rows of a unit.
const ROWS: usize = 8;

/// Extents of a product: `[batch, m, k] x [batch, k, n]`.
#[derive(Clone, Copy, Debug)]
pub struct MatmulShape {
    /// Products.
    pub batch: usize,
    /// Rows of the left matrices.
    pub m: usize,
    /// Inner extent.
    pub k: usize,
    /// Columns of the right matrices.
    pub n: usize,
}

/// `y = a b`, summed in f32.
///
/// # Panics
/// If the lengths do not fit the shape.
pub fn matmul<T: Scalar>(
    shape: MatmulShape,
    a: Strided<'_, T>,
    b: Strided<'_, T>,
    y: SharedMut<'_, T>,
    isa: Isa,
    worker: &Worker<'_>,
) {
    let MatmulShape { batch, m, k, n } = shape;
    assert!(a.len() == batch * m * k && b.len() == batch * k * n && y.len() == batch * m * n);
    simd::run_at(isa, Matmul { shape, a, b, y, worker });
}

struct Matmul<'a, 'w, T> {
    shape: MatmulShape,
    a: Strided<'a, T>,
    b: Strided<'a, T>,
    y: SharedMut<'a, T>,
    worker: &'a Worker<'w>,
}

impl<T: Scalar> VectorKernel for Matmul<'_, '_, T> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let MatmulShape { batch, m, k, n } = self.shape;
        let (row_blocks, column_blocks) = (m.div_ceil(ROWS), n.div_ceil(BLOCK));
        let (mut narrow, mut wide) = ([T::default(); BLOCK], [0.0; BLOCK]);
        let mut left = [[0.0; BLOCK]; ROWS];
        for unit in self.worker.claim(batch * row_blocks * column_blocks, 1).flatten() {
            let (matrix, block) = (unit / (row_blocks * column_blocks), unit % (row_blocks * column_blocks));
            let first_row = block / column_blocks * ROWS;
            let first_column = block % column_blocks * BLOCK;
            let (rows, columns) = (ROWS.min(m - first_row), BLOCK.min(n - first_column));
            let mut sums = [[0.0; BLOCK]; ROWS];
            for inner in (0..k).step_by(BLOCK) {
                let depth = BLOCK.min(k - inner);
                for (row, left) in left.iter_mut().enumerate().take(rows) {
                    self.a.read((matrix * m + first_row + row) * k + inner, &mut narrow[..depth]);
                    widen(&narrow[..depth], left);
                }
                for i in 0..depth {
                    self.b.read((matrix * k + inner + i) * n + first_column, &mut narrow[..columns]);
                    widen(&narrow[..columns], &mut wide);
                    for (sums, left) in sums.iter_mut().zip(&left).take(rows) {
                        add_scaled(s, left[i], &wide, sums, columns);
                    }
                }
            }
            for (row, sums) in sums.iter().enumerate().take(rows) {
                let start = (matrix * m + first_row + row) * n + first_column;
                // SAFETY: each block is claimed once.
                let y = unsafe { self.y.range(start..start + columns) };
                y.iter_mut().zip(sums).for_each(|(y, x)| *y = T::from_f32(*x));
            }
        }
    }
}

/// `sums += factor * x` in the first `columns` lanes, rounded up to whole vectors.
#[inline(always)]
fn add_scaled<S: Simd>(s: S, factor: f32, x: &[f32; BLOCK], sums: &mut [f32; BLOCK], columns: usize) {
    let factor = s.splat(factor);
    let vectors = columns.div_ceil(LANES);
    let (x, sums) = (x.as_chunks::<LANES>().0, sums.as_chunks_mut::<LANES>().0);
    for (x, sums) in x.iter().zip(sums).take(vectors) {
        let sum = s.fma(factor, s.load(x), s.load(sums));
        s.store(sum, sums);
    }
}
