//! One 512-bit vector per value; dot products are instructions where `DOTS` says so.

use super::Lanes;
use std::arch::x86_64::*;

/// AVX-512 F, BW, DQ and VL. If `DOTS`, [`Lanes::dot_u8_i8`] also needs VNNI, and [`Lanes::dot_bf16`] AVX512-BF16. A
/// kernel needs the instructions of those that it calls.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512<const DOTS: bool>;

/// An expression of intrinsics and pointer reads.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: the caller promises the CPU's instructions and the validity of pointers.
        unsafe { $e }
    };
}

#[inline(always)]
fn first(count: usize) -> __mmask16 {
    ((1u32 << count) - 1) as __mmask16
}

impl<const DOTS: bool> Lanes for Avx512<DOTS> {
    type F = __m512;
    type I = __m512i;

    #[inline(always)]
    unsafe fn splat_i(x: i32) -> Self::I {
        op!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    unsafe fn load_i(p: *const u8) -> Self::I {
        op!(_mm512_loadu_si512(p.cast()))
    }
    #[inline(always)]
    unsafe fn store_i(a: Self::I, p: *mut u8) {
        op!(_mm512_storeu_si512(p.cast(), a))
    }
    #[inline(always)]
    unsafe fn shr<const S: u32>(a: Self::I) -> Self::I {
        op!(_mm512_srli_epi32::<S>(a))
    }
    #[inline(always)]
    unsafe fn shl<const S: u32>(a: Self::I) -> Self::I {
        op!(_mm512_slli_epi32::<S>(a))
    }
    #[inline(always)]
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I {
        op!(_mm512_and_si512(a, b))
    }
    #[inline(always)]
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I {
        op!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    unsafe fn dot_u8_i8<const BITS: usize>(acc: Self::I, w: Self::I, x: Self::I) -> Self::I {
        if DOTS {
            return op!(_mm512_dpbusd_epi32(acc, w, x));
        }
        op!({
            let ones = _mm512_set1_epi16(1);
            if BITS < 8 {
                let pairs = _mm512_maddubs_epi16(w, x);
                return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, ones));
            }
            // Pairs of products with 8-bit levels can saturate i16; pairs of products with their nibbles cannot.
            let nibble = _mm512_set1_epi8(15);
            let low = _mm512_maddubs_epi16(_mm512_and_si512(w, nibble), x);
            let high = _mm512_maddubs_epi16(_mm512_and_si512(_mm512_srli_epi32::<4>(w), nibble), x);
            let sum = _mm512_add_epi32(acc, _mm512_madd_epi16(low, ones));
            _mm512_add_epi32(sum, _mm512_madd_epi16(high, _mm512_set1_epi16(16)))
        })
    }
    #[inline(always)]
    unsafe fn dot_bf16(acc: Self::F, w: Self::I, x: Self::I) -> Self::F {
        if DOTS {
            // Both types are 64 bytes of plain bits.
            let halves = |v| op!(std::mem::transmute::<__m512i, __m512bh>(v));
            return op!(_mm512_dpbf16_ps(acc, halves(w), halves(x)));
        }
        op!({
            let high = _mm512_set1_epi32(-65536);
            let low = |v| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(v));
            let top = |v| _mm512_castsi512_ps(_mm512_and_si512(v, high));
            _mm512_fmadd_ps(top(w), top(x), _mm512_fmadd_ps(low(w), low(x), acc))
        })
    }
    #[inline(always)]
    unsafe fn to_f32(a: Self::I) -> Self::F {
        op!(_mm512_cvtepi32_ps(a))
    }
    #[inline(always)]
    unsafe fn as_f32(a: Self::I) -> Self::F {
        op!(_mm512_castsi512_ps(a))
    }
    #[inline(always)]
    unsafe fn as_i(a: Self::F) -> Self::I {
        op!(_mm512_castps_si512(a))
    }
    #[inline(always)]
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        op!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    unsafe fn max_u(a: Self::I, b: Self::I) -> Self::I {
        op!(_mm512_max_epu32(a, b))
    }
    #[inline(always)]
    unsafe fn reduce_max_u(a: Self::I) -> u32 {
        op!(_mm512_reduce_max_epu32(a))
    }
    #[inline(always)]
    unsafe fn reduce_add_i(a: Self::I) -> i32 {
        op!(_mm512_reduce_add_epi32(a))
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::I {
        op!(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self::I {
        op!(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn lookup(a: Self::I, table: &[u8; 16]) -> Self::I {
        op!(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), a))
    }
    #[inline(always)]
    unsafe fn store_i8(a: Self::I, p: *mut u8) {
        op!(_mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(a)))
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        op!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        op!(_mm512_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::F {
        op!({
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::F {
        op!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    unsafe fn store(a: Self::F, p: *mut f32, count: usize) {
        op!(_mm512_mask_storeu_ps(p, first(count), a))
    }
    #[inline(always)]
    unsafe fn load_first(p: *const f32, count: usize) -> Self::F {
        op!(_mm512_maskz_loadu_ps(first(count), p))
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        op!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        op!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        op!(_mm_prefetch::<_MM_HINT_T0>(p.cast()))
    }
}
