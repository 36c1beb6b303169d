//! Lanes as plain arrays. Multiply-adds stay calls: inlined into the unrolled kernels they would take megabytes of
//! code.

use super::{LANES, Lanes};
use crate::simd::lanewise;
use half::f16;
use std::array::from_fn;

/// Plain Rust; the compiler may use whatever vectors the target's baseline has.
#[derive(Clone, Copy)]
pub(in super::super) struct Portable;

fn bf16(bits: u32) -> f32 {
    f32::from_bits(bits << 16)
}

impl Lanes for Portable {
    type F = [f32; LANES];
    type I = [u32; LANES];

    #[inline(always)]
    unsafe fn splat_i(x: i32) -> Self::I {
        [x as u32; LANES]
    }
    #[inline(always)]
    unsafe fn load_i(p: *const u8) -> Self::I {
        // SAFETY: the caller promises 64 bytes.
        unsafe { p.cast::<[u32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_i(a: Self::I, p: *mut u8) {
        // SAFETY: the caller promises room for 64 bytes.
        unsafe { p.cast::<[u32; LANES]>().write_unaligned(a) }
    }
    #[inline(always)]
    unsafe fn shr<const S: u32>(a: Self::I) -> Self::I {
        a.map(|a| a >> S)
    }
    #[inline(always)]
    unsafe fn shl<const S: u32>(a: Self::I) -> Self::I {
        a.map(|a| a << S)
    }
    #[inline(always)]
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I {
        from_fn(|i| a[i] & b[i])
    }
    #[inline(always)]
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I {
        from_fn(|i| a[i] | b[i])
    }
    #[inline(never)]
    unsafe fn dot_u8_i8<const BITS: usize>(acc: Self::I, w: Self::I, x: Self::I) -> Self::I {
        from_fn(|i| {
            let products = |j: u32| i32::from((w[i] >> (8 * j)) as u8) * i32::from((x[i] >> (8 * j)) as i8);
            acc[i].wrapping_add((products(0) + products(1) + products(2) + products(3)) as u32)
        })
    }
    #[inline(never)]
    unsafe fn dot_bf16(acc: Self::F, w: Self::I, x: Self::I) -> Self::F {
        let (low, high) = (|a: u32| bf16(a & 0xffff), |a: u32| bf16(a >> 16));
        let sums = lanewise::fma(&w.map(low), &x.map(low), &acc);
        lanewise::fma(&w.map(high), &x.map(high), &sums)
    }
    #[inline(always)]
    unsafe fn to_f32(a: Self::I) -> Self::F {
        a.map(|a| a as i32 as f32)
    }
    #[inline(always)]
    unsafe fn as_f32(a: Self::I) -> Self::F {
        a.map(f32::from_bits)
    }
    #[inline(always)]
    unsafe fn as_i(a: Self::F) -> Self::I {
        a.map(f32::to_bits)
    }
    #[inline(always)]
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        from_fn(|i| a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    unsafe fn max_u(a: Self::I, b: Self::I) -> Self::I {
        from_fn(|i| a[i].max(b[i]))
    }
    #[inline(always)]
    unsafe fn reduce_max_u(a: Self::I) -> u32 {
        a.into_iter().fold(0, u32::max)
    }
    #[inline(always)]
    unsafe fn reduce_add_i(a: Self::I) -> i32 {
        a.into_iter().fold(0, |sum, a| sum.wrapping_add(a as i32))
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::I {
        // SAFETY: the caller promises sixteen bytes.
        unsafe { p.cast::<[u8; LANES]>().read() }.map(u32::from)
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self::I {
        // SAFETY: the caller promises sixteen bytes.
        unsafe { p.cast::<[i8; LANES]>().read() }.map(|x| i32::from(x) as u32)
    }
    #[inline(always)]
    unsafe fn lookup(a: Self::I, table: &[u8; 16]) -> Self::I {
        a.map(|a| u32::from_ne_bytes(a.to_ne_bytes().map(|i| table[usize::from(i & 15)])))
    }
    #[inline(always)]
    unsafe fn store_i8(a: Self::I, p: *mut u8) {
        // SAFETY: the caller promises room for sixteen bytes.
        unsafe { p.cast::<[u8; LANES]>().write(a.map(|a| a as u8)) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: the caller promises sixteen values.
        unsafe { p.cast::<[f32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::F {
        // SAFETY: the caller promises sixteen values.
        unsafe { p.cast::<[u16; LANES]>().read_unaligned() }.map(|bits| bf16(u32::from(bits)))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::F {
        // SAFETY: the caller promises sixteen values.
        unsafe { p.cast::<[u16; LANES]>().read_unaligned() }.map(|bits| f16::from_bits(bits).to_f32_const())
    }
    #[inline(always)]
    unsafe fn store(a: Self::F, p: *mut f32, count: usize) {
        // SAFETY: the caller promises room for `count <= 16` values.
        unsafe { std::ptr::copy_nonoverlapping(a.as_ptr(), p, count) }
    }
    #[inline(always)]
    unsafe fn load_first(p: *const f32, count: usize) -> Self::F {
        let mut lanes = [0.0; LANES];
        // SAFETY: the caller promises `count <= 16` values.
        unsafe { std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), count) }
        lanes
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        lanewise::fma(&a, &b, &c)
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}
