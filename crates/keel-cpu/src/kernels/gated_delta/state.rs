//! How the elements of a state are kept in memory.

use half::f16;

use crate::kernels::generic::scalar::Plain;
use crate::simd::{LANES, Simd};

/// An element of a state: f32, or f16 for half of the memory and traffic. Arithmetic is in f32. A state in f16 is
/// rounded after each update, so a row that another row follows in its step has the bits of a row whose state went to
/// memory.
pub trait StateElement: Plain + element::Vectors {}

impl StateElement for f32 {}
impl StateElement for f16 {}

pub(super) mod element {
    use super::{LANES, Simd, f16};

    pub trait Vectors: Sized {
        /// Sixteen values at `p`, widened.
        ///
        /// # Safety
        /// `p` must be valid for reading sixteen values.
        #[allow(private_bounds, private_interfaces)]
        unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V;

        /// Writes sixteen values that [`Vectors::kept`] gave.
        ///
        /// # Safety
        /// `p` must be valid for writing sixteen values.
        #[allow(private_bounds, private_interfaces)]
        unsafe fn store<S: Simd>(s: S, x: S::V, p: *mut Self);

        /// `x` as memory keeps it. f16: rounded to nearest, ties to even, and at most 65,504 in magnitude.
        #[allow(private_bounds, private_interfaces)]
        fn kept<S: Simd>(s: S, x: S::V) -> S::V;
    }

    impl Vectors for f32 {
        #[inline(always)]
        #[allow(private_bounds, private_interfaces)]
        unsafe fn load<S: Simd>(s: S, p: *const f32) -> S::V {
            // SAFETY: the caller's promise.
            unsafe { s.load_ptr(p) }
        }

        #[inline(always)]
        #[allow(private_bounds, private_interfaces)]
        unsafe fn store<S: Simd>(s: S, x: S::V, p: *mut f32) {
            // SAFETY: the caller's promise.
            unsafe { s.store_ptr(x, p) }
        }

        #[inline(always)]
        #[allow(private_bounds, private_interfaces)]
        fn kept<S: Simd>(_: S, x: S::V) -> S::V {
            x
        }
    }

    impl Vectors for f16 {
        #[inline(always)]
        #[allow(private_bounds, private_interfaces)]
        unsafe fn load<S: Simd>(s: S, p: *const f16) -> S::V {
            // SAFETY: the caller's promise; f16 is a transparent u16.
            unsafe { s.load_f16_ptr(p.cast()) }
        }

        #[inline(always)]
        #[allow(private_bounds, private_interfaces)]
        unsafe fn store<S: Simd>(s: S, x: S::V, p: *mut f16) {
            // SAFETY: the caller's promise; f16 is a transparent u16.
            unsafe { s.store_f16_ptr(x, p.cast()) }
        }

        #[inline(always)]
        #[allow(private_bounds, private_interfaces)]
        fn kept<S: Simd>(s: S, x: S::V) -> S::V {
            let (low, high) = (s.splat(f16::MIN.to_f32_const()), s.splat(f16::MAX.to_f32_const()));
            // A NaN stays one: it is less than nothing.
            let x = s.select_lt(x, low, low, s.select_lt(high, x, high, x));
            let mut halves = [0u16; LANES];
            // SAFETY: the array has sixteen values.
            unsafe {
                s.store_f16_ptr(x, halves.as_mut_ptr());
                s.load_f16_ptr(halves.as_ptr())
            }
        }
    }
}

/// `N` vectors of a row. With N = 1, `x` may be shorter than a vector.
#[inline(always)]
pub(super) fn load_row<E: StateElement, S: Simd, const N: usize>(s: S, x: &[E]) -> [S::V; N] {
    if N == 1 && x.len() < LANES {
        let mut part = [E::default(); LANES];
        part[..x.len()].copy_from_slice(x);
        // SAFETY: the array has sixteen values.
        return [unsafe { E::load(s, part.as_ptr()) }; N];
    }
    let (chunks, _) = x.as_chunks::<LANES>();
    assert!(chunks.len() >= N);
    let mut row = [s.splat(0.0); N];
    for n in 0..N {
        // SAFETY: a chunk has sixteen values.
        row[n] = unsafe { E::load(s, chunks[n].as_ptr()) };
    }
    row
}

/// Writes the values that [`load_row`] reads. They must be [`element::Vectors::kept`].
#[inline(always)]
pub(super) fn store_row<E: StateElement, S: Simd, const N: usize>(s: S, row: [S::V; N], x: &mut [E]) {
    if N == 1 && x.len() < LANES {
        let mut part = [E::default(); LANES];
        // SAFETY: the array has room for sixteen values.
        unsafe { E::store(s, row[0], part.as_mut_ptr()) };
        return x.copy_from_slice(&part[..x.len()]);
    }
    let (chunks, _) = x.as_chunks_mut::<LANES>();
    assert!(chunks.len() >= N);
    for n in 0..N {
        // SAFETY: a chunk has room for sixteen values.
        unsafe { E::store(s, row[n], chunks[n].as_mut_ptr()) };
    }
}

/// Widens `from` to the front of `to`, and fills the rest with zeros.
#[inline(always)]
#[allow(private_bounds)]
pub(crate) fn widen<E: StateElement, S: Simd>(s: S, from: &[E], to: &mut [f32]) {
    let mut to = to.chunks_mut(LANES);
    for (part, to) in from.chunks(LANES).zip(&mut to) {
        s.store_partial(load_row::<E, S, 1>(s, part)[0], to);
    }
    to.for_each(|rest| rest.fill(0.0));
}

/// Writes the front of `from`, which is [`element::Vectors::kept`].
#[inline(always)]
#[allow(private_bounds)]
pub(crate) fn narrow<E: StateElement, S: Simd>(s: S, from: &[f32], to: &mut [E]) {
    for (part, to) in from.chunks(LANES).zip(to.chunks_mut(LANES)) {
        store_row::<E, S, 1>(s, [s.load_partial(part)], to);
    }
}

/// Replaces values by those that memory keeps. Whole vectors.
#[inline(always)]
#[allow(private_bounds)]
pub(crate) fn keep<E: StateElement, S: Simd>(s: S, x: &mut [f32]) {
    for part in x.as_chunks_mut::<LANES>().0 {
        s.store(E::kept(s, s.load(part)), part);
    }
}
