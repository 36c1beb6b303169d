//! Elements of recurrent states, keys and values: f32, or f16 for half of the memory and traffic.

#![allow(private_bounds, private_interfaces, reason = "vector types stay out of the public interface")]

use super::{LANES, Simd};
use crate::kernels::generic::scalar::Plain;
use half::f16;

/// A number type that states, keys and values are kept in. Arithmetic is in f32.
///
/// Public traits have it as a bound, and no other crate can name it.
pub trait Element: Plain {
    /// Rounds to nearest, ties to even. A value beyond the range becomes the nearest end of the range.
    fn from_f32(x: f32) -> Self;

    /// Sixteen values at `p`, widened.
    ///
    /// # Safety
    /// `p` must be valid for reading sixteen values.
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V;

    /// Writes sixteen values that [`Element::kept`] gave.
    ///
    /// # Safety
    /// `p` must be valid for writing sixteen values.
    unsafe fn store<S: Simd>(s: S, x: S::V, p: *mut Self);

    /// `x` as memory keeps it. f16: rounded to nearest, ties to even, and at most 65,504 in magnitude.
    fn kept<S: Simd>(s: S, x: S::V) -> S::V;
}

impl Element for f32 {
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const f32) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load_ptr(p) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, x: S::V, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { s.store_ptr(x, p) }
    }

    #[inline(always)]
    fn kept<S: Simd>(_: S, x: S::V) -> S::V {
        x
    }
}

impl Element for f16 {
    #[inline(always)]
    fn from_f32(x: f32) -> f16 {
        f16::from_f32(x.clamp(f16::MIN.to_f32_const(), f16::MAX.to_f32_const()))
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const f16) -> S::V {
        // SAFETY: the caller's promise; f16 is a transparent u16.
        unsafe { s.load_f16_ptr(p.cast()) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, x: S::V, p: *mut f16) {
        // SAFETY: the caller's promise; f16 is a transparent u16.
        unsafe { s.store_f16_ptr(x, p.cast()) }
    }

    #[inline(always)]
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
