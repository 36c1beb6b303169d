//! Vectors of sixteen `f32`, the same on every instruction set.
//!
//! A kernel is written once over [`Simd`] and compiled for each [`Isa`]. All levels work on sixteen lanes and use fused
//! multiply-add, and every reduction has one fixed order, so **all levels give the same bits**: a missing instruction
//! costs time, never a different answer.
//!
//! The value of type `S: Simd` that travels through a kernel is a proof that the CPU has the instructions:
//! only [`run_at`] makes one, inside a function compiled for them. Methods are therefore safe to call.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod element;
mod math;
mod portable;

use crate::isa::Isa;
pub(crate) use element::Element;
pub(crate) use math::{exp, sigmoid, silu};
pub(crate) use portable::lanewise;

/// Lanes of a vector at every level.
pub(crate) const LANES: usize = 16;

/// Work written over [`Simd`]. `run` and all generic functions that it calls must be `#[inline(always)]`: inlining
/// carries the instruction set into them. For the same reason vector operations must not stand in closures, not even in
/// that of `std::array::from_fn`. A closure that is not inlined has only the instructions of the build's baseline, so
/// each of its operations becomes a call. [`lanes!`] takes the place of `map`.
pub(crate) trait VectorKernel {
    /// Does the work with the instructions that `s` stands for.
    fn run<S: Simd>(self, s: S);
}

/// Runs `kernel` with the vectors of `isa`.
///
/// # Panics
/// If this machine lacks them.
pub(crate) fn run_at<K: VectorKernel>(isa: Isa, kernel: K) {
    assert!(isa <= Isa::best(), "{isa} kernels cannot run here: this CPU has {}", Isa::best());
    match isa {
        Isa::Portable => kernel.run(portable::Portable),
        // SAFETY: `isa` is at most the detected level.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2::run(kernel) },
        // SAFETY: `isa` is at most the detected level.
        #[cfg(target_arch = "x86_64")]
        _ => unsafe { avx512::run(kernel) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("only the portable level is detected here"),
    }
}

/// Sets every value of a slice to an expression of the values of others at the same index, a vector at a time:
/// `lanes!(s, y, [a = x, b = w] => s.mul(a, b))` is `y[i] = x[i] * w[i]`.
///
/// # Panics
/// If the lengths differ.
macro_rules! lanes {
    ($s:ident, $y:expr, [$($v:ident = $x:expr),+] => $value:expr) => {{
        let y: &mut [f32] = $y;
        $(
            let $v: &[f32] = $x;
            assert_eq!($v.len(), y.len());
        )+
        let mut i = 0;
        while i + $crate::simd::LANES <= y.len() {
            let value = {
                $(let $v = $s.load_at($v, i);)+
                $value
            };
            $s.store_at(value, y, i);
            i += $crate::simd::LANES;
        }
        if i < y.len() {
            let value = {
                $(let $v = $s.load_partial(&$v[i..]);)+
                $value
            };
            $s.store_partial(value, &mut y[i..]);
        }
    }};
}
pub(crate) use lanes;

/// Operations on sixteen `f32` lanes.
pub(crate) trait Simd: Copy {
    /// Sixteen `f32`.
    type V: Copy;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// Sixteen values at `p`, of any alignment.
    ///
    /// # Safety
    /// `p` must be valid for reading sixteen values.
    unsafe fn load_ptr(self, p: *const f32) -> Self::V;
    /// Writes the lanes at `p`, of any alignment.
    ///
    /// # Safety
    /// `p` must be valid for writing sixteen values.
    unsafe fn store_ptr(self, v: Self::V, p: *mut f32);
    /// Sixteen f16 values at `p`, widened.
    ///
    /// # Safety
    /// `p` must be valid for reading sixteen values.
    unsafe fn load_f16_ptr(self, p: *const u16) -> Self::V;
    /// Writes the lanes at `p` as f16, rounded to nearest, ties to even.
    ///
    /// # Safety
    /// `p` must be valid for writing sixteen values.
    unsafe fn store_f16_ptr(self, v: Self::V, p: *mut u16);
    /// `a + b`
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `c - a * b`, rounded once.
    fn fnma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger of `a` and `b`; `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `x` where `a < b`, else `y` (also where `a` or `b` is NaN).
    fn select_lt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// Adds the integer in the low bits of `n` to the exponent field of `p`, without any check.
    fn add_to_exponent(self, p: Self::V, n: Self::V) -> Self::V;
    /// The lanes as an array.
    fn to_array(self, v: Self::V) -> [f32; LANES];
    /// Lanes summed as a tree: lane `i` with lane `i + 8`, then 4, 2, 1 apart.
    fn sum(self, v: Self::V) -> f32;
    /// Prefetches the cache line at `p`; `p` may be any address.
    fn prefetch(self, p: *const u8);

    /// Prefetches all cache lines of `x`.
    #[inline(always)]
    fn prefetch_all<T>(self, x: &[T]) {
        for offset in (0..size_of_val(x)).step_by(64) {
            self.prefetch(x.as_ptr().cast::<u8>().wrapping_add(offset));
        }
    }

    /// Transposes: lane `j` of result `i` is lane `i` of row `j`.
    #[inline(always)]
    fn transpose(self, rows: [Self::V; LANES]) -> [Self::V; LANES] {
        let mut before = [[0.0; LANES]; LANES];
        for i in 0..LANES {
            self.store(rows[i], &mut before[i]);
        }
        let mut after = [[0.0; LANES]; LANES];
        for i in 0..LANES {
            for j in 0..LANES {
                after[i][j] = before[j][i];
            }
        }
        let mut columns = rows;
        for i in 0..LANES {
            columns[i] = self.load(&after[i]);
        }
        columns
    }

    /// The sixteen values of `x`.
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::V {
        // SAFETY: the array has sixteen values.
        unsafe { self.load_ptr(x.as_ptr()) }
    }

    /// Writes the lanes to `x`.
    #[inline(always)]
    fn store(self, v: Self::V, x: &mut [f32; LANES]) {
        // SAFETY: the array has sixteen values.
        unsafe { self.store_ptr(v, x.as_mut_ptr()) }
    }

    /// Sixteen values of `x` from `i` on.
    #[inline(always)]
    fn load_at(self, x: &[f32], i: usize) -> Self::V {
        let x = &x[i..i + LANES];
        // SAFETY: the slice has sixteen values.
        unsafe { self.load_ptr(x.as_ptr()) }
    }

    /// Writes the lanes to `x` from `i` on.
    #[inline(always)]
    fn store_at(self, v: Self::V, x: &mut [f32], i: usize) {
        let x = &mut x[i..i + LANES];
        // SAFETY: the slice has sixteen values.
        unsafe { self.store_ptr(v, x.as_mut_ptr()) }
    }

    /// All of `x`, at most sixteen values, then zeros.
    #[inline(always)]
    fn load_partial(self, x: &[f32]) -> Self::V {
        let mut lanes = [0.0; LANES];
        lanes[..x.len()].copy_from_slice(x);
        self.load(&lanes)
    }

    /// The first lanes of `v`, as many as `x` has room for.
    #[inline(always)]
    fn store_partial(self, v: Self::V, x: &mut [f32]) {
        let len = x.len();
        x.copy_from_slice(&self.to_array(v)[..len]);
    }

    /// The largest lane.
    #[inline(always)]
    fn max_lane(self, v: Self::V) -> f32 {
        self.to_array(v).into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    /// Sum of `a[i] * b[i]`: 64 partial sums (four vectors), then a tree. The order depends only on the length.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline(always)]
    fn dot(self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len());
        let mut acc = [self.splat(0.0); 4];
        let ((aa, a_tail), (bb, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
        let ((aa, a_rest), (bb, b_rest)) = (aa.as_chunks::<4>(), bb.as_chunks::<4>());
        for (a, b) in aa.iter().zip(bb) {
            for n in 0..4 {
                acc[n] = self.fma(self.load(&a[n]), self.load(&b[n]), acc[n]);
            }
        }
        for (n, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
            acc[n] = self.fma(self.load(a), self.load(b), acc[n]);
        }
        if !a_tail.is_empty() {
            acc[3] = self.fma(self.load_partial(a_tail), self.load_partial(b_tail), acc[3]);
        }
        self.sum(self.add(self.add(acc[0], acc[1]), self.add(acc[2], acc[3])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every operation on awkward lanes, as bits.
    struct Probe<'a>(&'a mut Vec<u32>);

    impl VectorKernel for Probe<'_> {
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let a: [f32; LANES] =
                std::array::from_fn(|i| (i as f32 - 7.3) * 1.7e3_f32.powi(i as i32 % 3 - 1));
            let b: [f32; LANES] =
                std::array::from_fn(|i| if i == 5 { f32::NAN } else { 3.1 / (i as f32 + 0.7) });
            let halves: [u16; LANES] = std::array::from_fn(|i| 0x3f80 + 77 * i as u16);
            let (va, vb) = (s.load(&a), s.load(&b));
            // SAFETY: the array has sixteen values.
            let wide = unsafe { s.load_f16_ptr(halves.as_ptr()) };
            let mut narrow = [0u16; LANES];
            // SAFETY: the array has room for sixteen values.
            unsafe { s.store_f16_ptr(va, narrow.as_mut_ptr()) };
            assert_eq!(narrow, a.map(|x| half::f16::from_f32_const(x).to_bits()));
            let results = [
                s.add(va, vb),
                s.sub(va, vb),
                s.mul(va, vb),
                s.div(va, vb),
                s.fma(va, vb, wide),
                s.fnma(va, vb, wide),
                s.max(va, vb),
                s.select_lt(va, vb, wide, va),
                s.load_partial(&a[..5]),
                wide,
            ];
            for v in results {
                // The payload of a NaN is not part of the promise.
                self.0.extend(s.to_array(v).map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }));
            }
            let mut rows = [va; LANES];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = s.add(va, s.splat(100.0 * i as f32));
            }
            for (i, column) in s.transpose(rows).into_iter().enumerate() {
                let want: [f32; LANES] = std::array::from_fn(|j| a[i] + 100.0 * j as f32);
                assert_eq!(s.to_array(column), want, "column {i}");
            }
            self.0.push(s.sum(va).to_bits());
            self.0.push(s.max_lane(va).to_bits());
            for len in [0, 1, 15, 16, 17, 63, 64, 65, 131] {
                let x: Vec<f32> = (0..len).map(|i| (i as f32 * 0.37).sin()).collect();
                let y: Vec<f32> = (0..len).map(|i| (i as f32 * 0.73).cos()).collect();
                self.0.push(s.dot(&x, &y).to_bits());
                let mut z = vec![9.0; len];
                lanes!(s, &mut z, [x = &x, y = &y] => s.fma(x, y, x));
                self.0.extend(z.iter().map(|z| z.to_bits()));
            }
        }
    }

    #[test]
    fn all_levels_give_the_same_bits() {
        let mut portable = Vec::new();
        run_at(Isa::Portable, Probe(&mut portable));
        assert!(portable.len() > 500);
        for isa in Isa::available() {
            let mut bits = Vec::new();
            run_at(isa, Probe(&mut bits));
            assert_eq!(bits, portable, "{isa}");
        }
    }
}
