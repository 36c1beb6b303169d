//! Two 256-bit vectors per value.

use super::{LANES, Lanes};
use std::arch::x86_64::*;

/// AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx2;

/// An expression of intrinsics and pointer reads.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: the caller promises the CPU's instructions and the validity of pointers.
        unsafe { $e }
    };
}

/// `acc` plus, in each word, the four products of u8 in `w`, below `2^BITS`, and i8 in `x`.
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn dot<const BITS: usize>(acc: __m256i, w: __m256i, x: __m256i) -> __m256i {
    op!({
        let ones = _mm256_set1_epi16(1);
        if BITS < 8 {
            return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), ones));
        }
        // Pairs of products with 8-bit levels can saturate i16; pairs of products with their nibbles cannot.
        let nibble = _mm256_set1_epi8(15);
        let low = _mm256_maddubs_epi16(_mm256_and_si256(w, nibble), x);
        let high = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi32::<4>(w), nibble), x);
        let sum = _mm256_add_epi32(acc, _mm256_madd_epi16(low, ones));
        _mm256_add_epi32(sum, _mm256_madd_epi16(high, _mm256_set1_epi16(16)))
    })
}

/// `acc` plus, in each word, the two products of bf16 in `w` and `x`.
///
/// # Safety
/// The CPU must have AVX2 and FMA.
#[inline(always)]
unsafe fn dot_bf16(acc: __m256, w: __m256i, x: __m256i) -> __m256 {
    op!({
        let high = _mm256_set1_epi32(-65536);
        let low = |v| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(v));
        let top = |v| _mm256_castsi256_ps(_mm256_and_si256(v, high));
        _mm256_fmadd_ps(top(w), top(x), _mm256_fmadd_ps(low(w), low(x), acc))
    })
}

impl Lanes for Avx2 {
    type F = (__m256, __m256);
    type I = (__m256i, __m256i);

    #[inline(always)]
    unsafe fn splat_i(x: i32) -> Self::I {
        op!((_mm256_set1_epi32(x), _mm256_set1_epi32(x)))
    }
    #[inline(always)]
    unsafe fn load_i(p: *const u8) -> Self::I {
        op!((_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())))
    }
    #[inline(always)]
    unsafe fn store_i(a: Self::I, p: *mut u8) {
        op!({
            _mm256_storeu_si256(p.cast(), a.0);
            _mm256_storeu_si256(p.add(32).cast(), a.1);
        })
    }
    #[inline(always)]
    unsafe fn shr<const S: u32>(a: Self::I) -> Self::I {
        let count = op!(_mm_cvtsi32_si128(S as i32));
        op!((_mm256_srl_epi32(a.0, count), _mm256_srl_epi32(a.1, count)))
    }
    #[inline(always)]
    unsafe fn shl<const S: u32>(a: Self::I) -> Self::I {
        let count = op!(_mm_cvtsi32_si128(S as i32));
        op!((_mm256_sll_epi32(a.0, count), _mm256_sll_epi32(a.1, count)))
    }
    #[inline(always)]
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I {
        op!((_mm256_and_si256(a.0, b.0), _mm256_and_si256(a.1, b.1)))
    }
    #[inline(always)]
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I {
        op!((_mm256_or_si256(a.0, b.0), _mm256_or_si256(a.1, b.1)))
    }
    #[inline(always)]
    unsafe fn dot_u8_i8<const BITS: usize>(acc: Self::I, w: Self::I, x: Self::I) -> Self::I {
        op!((dot::<BITS>(acc.0, w.0, x.0), dot::<BITS>(acc.1, w.1, x.1)))
    }
    #[inline(always)]
    unsafe fn dot_bf16(acc: Self::F, w: Self::I, x: Self::I) -> Self::F {
        op!((dot_bf16(acc.0, w.0, x.0), dot_bf16(acc.1, w.1, x.1)))
    }
    #[inline(always)]
    unsafe fn to_f32(a: Self::I) -> Self::F {
        op!((_mm256_cvtepi32_ps(a.0), _mm256_cvtepi32_ps(a.1)))
    }
    #[inline(always)]
    unsafe fn as_f32(a: Self::I) -> Self::F {
        op!((_mm256_castsi256_ps(a.0), _mm256_castsi256_ps(a.1)))
    }
    #[inline(always)]
    unsafe fn as_i(a: Self::F) -> Self::I {
        op!((_mm256_castps_si256(a.0), _mm256_castps_si256(a.1)))
    }
    #[inline(always)]
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        op!((_mm256_add_epi32(a.0, b.0), _mm256_add_epi32(a.1, b.1)))
    }
    #[inline(always)]
    unsafe fn max_u(a: Self::I, b: Self::I) -> Self::I {
        op!((_mm256_max_epu32(a.0, b.0), _mm256_max_epu32(a.1, b.1)))
    }
    #[inline(always)]
    unsafe fn reduce_max_u(a: Self::I) -> u32 {
        op!({
            let eight = _mm256_max_epu32(a.0, a.1);
            let four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
            let two = _mm_max_epu32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
            let one = _mm_max_epu32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two));
            _mm_cvtsi128_si32(one) as u32
        })
    }
    #[inline(always)]
    unsafe fn reduce_add_i(a: Self::I) -> i32 {
        op!({
            let eight = _mm256_add_epi32(a.0, a.1);
            let four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
            let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
            let one = _mm_add_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two));
            _mm_cvtsi128_si32(one)
        })
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::I {
        op!({
            let half = |p: *const u8| _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
            (half(p), half(p.add(8)))
        })
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self::I {
        op!({
            let half = |p: *const u8| _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()));
            (half(p), half(p.add(8)))
        })
    }
    #[inline(always)]
    unsafe fn lookup(a: Self::I, table: &[u8; 16]) -> Self::I {
        op!({
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            (_mm256_shuffle_epi8(table, a.0), _mm256_shuffle_epi8(table, a.1))
        })
    }
    #[inline(always)]
    unsafe fn store_i8(a: Self::I, p: *mut u8) {
        op!({
            // Packing works within halves of 128 bits; the permutation puts the quarters back in order.
            let halves = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(a.0, a.1));
            let low = _mm256_castsi256_si128(halves);
            let high = _mm256_extracti128_si256::<1>(halves);
            _mm_storeu_si128(p.cast(), _mm_packs_epi16(low, high));
        })
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        op!((_mm256_set1_ps(x), _mm256_set1_ps(x)))
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        op!((_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::F {
        let widen = |p: *const u16| {
            op!({
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            })
        };
        op!((widen(p), widen(p.add(8))))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::F {
        op!((_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))))
    }
    #[inline(always)]
    unsafe fn store(a: Self::F, p: *mut f32, count: usize) {
        op!({
            if count == LANES {
                _mm256_storeu_ps(p, a.0);
                _mm256_storeu_ps(p.add(8), a.1);
            } else {
                let mut lanes = [0.0; LANES];
                _mm256_storeu_ps(lanes.as_mut_ptr(), a.0);
                _mm256_storeu_ps(lanes.as_mut_ptr().add(8), a.1);
                std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, count);
            }
        })
    }
    #[inline(always)]
    unsafe fn load_first(p: *const f32, count: usize) -> Self::F {
        let mut lanes = [0.0; LANES];
        op!({
            std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), count);
            Self::load(lanes.as_ptr())
        })
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        op!((_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)))
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        op!((_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)))
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        op!((_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)))
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        op!(_mm_prefetch::<_MM_HINT_T0>(p.cast()))
    }
}
