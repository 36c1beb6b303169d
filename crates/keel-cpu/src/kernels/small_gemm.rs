//! Products of small matrices that lie in a worker's cache: `C = start + A B`.
//!
//! One lane computes each element of C: it adds `a[i, l] * b[l, j]` in rising order of `l`, so the bits do not depend
//! on the tiles. A tile is 8 rows by 2 vectors. Its 16 sums hide the latency of the multiply-add, and each step of `l`
//! needs 10 loads for 16 multiply-adds.

#![allow(clippy::needless_range_loop, reason = "registers are numbered, not iterated")]

use crate::simd::{Element, LANES, Simd};

/// Rows and vectors of a full tile.
const TILE_ROWS: usize = 8;
const TILE_VECTORS: usize = 2;

/// The initial value of each element of C.
#[derive(Clone, Copy)]
pub(super) enum Start<'a> {
    /// Zero.
    Zero,
    /// Its value times the factor of its row.
    Rows(&'a [f32]),
    /// Its value times one factor.
    Scaled(f32),
}

/// A matrix whose rows are `stride` elements apart. Columns are adjacent.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a, E> {
    pub values: &'a [E],
    pub stride: usize,
}

impl<'a, E> Matrix<'a, E> {
    pub fn new(values: &'a [E], stride: usize) -> Matrix<'a, E> {
        Matrix { values, stride }
    }
}

/// `C[m, n] = start + A[m, k] B[k, n]`
#[derive(Clone, Copy)]
pub(super) struct SmallGemm<'a, E> {
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C, a multiple of 16.
    pub n: usize,
    /// Columns of A, rows of B.
    pub k: usize,
    pub a: Matrix<'a, f32>,
    pub b: Matrix<'a, E>,
    /// The initial value of C.
    pub start: Start<'a>,
}

impl<E: Element> SmallGemm<'_, E> {
    /// Computes `c`, whose rows are `c_stride` apart.
    ///
    /// # Panics
    /// If a matrix is shorter than its shape says, or `n` is not a multiple of 16.
    #[inline(always)]
    pub(super) fn run<S: Simd>(&self, s: S, c: &mut [f32], c_stride: usize) {
        let last = |rows: usize, stride: usize, columns: usize| {
            if rows == 0 || columns == 0 { 0 } else { (rows - 1) * stride + columns }
        };
        assert!(self.n.is_multiple_of(LANES));
        assert!(self.a.values.len() >= last(self.m, self.a.stride, self.k), "A is too short");
        assert!(self.b.values.len() >= last(self.k, self.b.stride, self.n), "B is too short");
        assert!(c.len() >= last(self.m, c_stride, self.n), "C is too short");
        if let Start::Rows(factors) = self.start {
            assert!(factors.len() >= self.m, "one factor for each row");
        }
        let mut j = 0;
        while j + TILE_VECTORS * LANES <= self.n {
            self.columns::<S, TILE_VECTORS>(s, c, c_stride, j);
            j += TILE_VECTORS * LANES;
        }
        if j < self.n {
            self.columns::<S, 1>(s, c, c_stride, j);
        }
    }

    /// All rows of `N` vectors of columns.
    #[inline(always)]
    fn columns<S: Simd, const N: usize>(&self, s: S, c: &mut [f32], c_stride: usize, j: usize) {
        let mut i = 0;
        while i + TILE_ROWS <= self.m {
            // SAFETY: `run` has checked the extents of all three matrices; rows i.. and columns j.. lie within.
            unsafe { self.tile::<S, TILE_ROWS, N>(s, c.as_mut_ptr(), c_stride, i, j) };
            i += TILE_ROWS;
        }
        while i < self.m {
            // SAFETY: as above.
            unsafe { self.tile::<S, 1, N>(s, c.as_mut_ptr(), c_stride, i, j) };
            i += 1;
        }
    }

    /// `M` rows from `i` on by `N` vectors from column `j` on.
    ///
    /// # Safety
    /// The tile must lie within C, and its rows and columns within A and B.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize, const N: usize>(
        &self,
        s: S,
        c: *mut f32,
        c_stride: usize,
        i: usize,
        j: usize,
    ) {
        let mut acc = [[s.splat(0.0); N]; M];
        for m in 0..M {
            let factor = match self.start {
                Start::Zero => continue,
                Start::Rows(factors) => s.splat(factors[i + m]),
                Start::Scaled(factor) => s.splat(factor),
            };
            for n in 0..N {
                // SAFETY: within C by the caller's promise.
                acc[m][n] = s.mul(factor, unsafe { s.load_ptr(c.add((i + m) * c_stride + j + n * LANES)) });
            }
        }
        let (a, a_stride) = (self.a.values.as_ptr(), self.a.stride);
        for l in 0..self.k {
            // SAFETY: row l and column l lie within B and A by the caller's promise.
            unsafe {
                let row = self.b.values.as_ptr().add(l * self.b.stride + j);
                let mut b = [s.splat(0.0); N];
                for n in 0..N {
                    b[n] = E::load(s, row.add(n * LANES));
                }
                for m in 0..M {
                    let a = s.splat(*a.add((i + m) * a_stride + l));
                    for n in 0..N {
                        acc[m][n] = s.fma(a, b[n], acc[m][n]);
                    }
                }
            }
        }
        for m in 0..M {
            for n in 0..N {
                // SAFETY: within C by the caller's promise.
                unsafe { s.store_ptr(acc[m][n], c.add((i + m) * c_stride + j + n * LANES)) };
            }
        }
    }
}
