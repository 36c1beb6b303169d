//! Two 256-bit vectors per value; the register file holds eight values, so wide tiles spill.

use super::{LANES, Simd, VectorKernel};
use std::arch::x86_64::*;

/// Proof that the CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

/// Runs `kernel` compiled for AVX2, FMA and F16C.
///
/// # Safety
/// The CPU must have AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<K: VectorKernel>(kernel: K) {
    kernel.run(Avx2(()));
}

/// An intrinsic, or an expression of several.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: an `Avx2` exists only inside `run`, where the CPU has the instructions.
        unsafe { $e }
    };
}

/// Eight f16 values at `p`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn widen_f16(p: *const u16) -> __m256 {
    // SAFETY: the caller promises eight values.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(p.cast()) })
}

/// Writes eight values at `p` as f16.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn narrow_f16(v: __m256, p: *mut u16) {
    // SAFETY: the caller promises room for eight values.
    unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
}

/// The low bits of `n` added to the exponent of `p`.
#[inline]
#[target_feature(enable = "avx2")]
fn shift_exponent(p: __m256, n: __m256) -> __m256 {
    let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(n));
    _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent))
}

impl Simd for Avx2 {
    type V = (__m256, __m256);

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        op!((_mm256_set1_ps(x), _mm256_set1_ps(x)))
    }
    #[inline(always)]
    unsafe fn load_ptr(self, p: *const f32) -> Self::V {
        // SAFETY: as `op!`; the caller promises sixteen values.
        unsafe { (_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, v: Self::V, p: *mut f32) {
        // SAFETY: as `op!`; the caller promises room for sixteen values.
        unsafe {
            _mm256_storeu_ps(p, v.0);
            _mm256_storeu_ps(p.add(8), v.1);
        }
    }
    #[inline(always)]
    unsafe fn load_f16_ptr(self, p: *const u16) -> Self::V {
        // SAFETY: as `op!`; the caller promises sixteen values.
        unsafe { (widen_f16(p), widen_f16(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn store_f16_ptr(self, v: Self::V, p: *mut u16) {
        // SAFETY: as `op!`; the caller promises room for sixteen values.
        unsafe {
            narrow_f16(v.0, p);
            narrow_f16(v.1, p.add(8));
        }
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        op!((_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)))
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        op!((_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1)))
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        op!((_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)))
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        op!((_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1)))
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        op!((_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)))
    }
    #[inline(always)]
    fn fnma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        op!((_mm256_fnmadd_ps(a.0, b.0, c.0), _mm256_fnmadd_ps(a.1, b.1, c.1)))
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        op!((_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1)))
    }
    #[inline(always)]
    fn select_lt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
        op!((
            _mm256_blendv_ps(y.0, x.0, _mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0)),
            _mm256_blendv_ps(y.1, x.1, _mm256_cmp_ps::<_CMP_LT_OQ>(a.1, b.1)),
        ))
    }
    #[inline(always)]
    fn add_to_exponent(self, p: Self::V, n: Self::V) -> Self::V {
        op!((shift_exponent(p.0, n.0), shift_exponent(p.1, n.1)))
    }
    #[inline(always)]
    fn to_array(self, v: Self::V) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        lanes
    }
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        op!({
            let eight = _mm256_add_ps(v.0, v.1);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        op!(_mm_prefetch::<_MM_HINT_T0>(p.cast()))
    }
}
