//! One 512-bit vector per value.

use super::{LANES, Simd, VectorKernel};
use std::arch::x86_64::*;

/// Proof that the CPU has AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

/// Runs `kernel` compiled for AVX-512.
///
/// # Safety
/// The CPU must have AVX-512 F, BW, DQ, VL, and AVX2 with FMA.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn run<K: VectorKernel>(kernel: K) {
    kernel.run(Avx512(()));
}

/// An intrinsic, or an expression of several.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: an `Avx512` exists only inside `run`, where the CPU has the instructions.
        unsafe { $e }
    };
}

/// A mask of the first `len` lanes.
#[inline(always)]
fn first(len: usize) -> __mmask16 {
    debug_assert!(len <= LANES);
    ((1u32 << len) - 1) as __mmask16
}

/// Exchanges values, then pairs of values, within each quarter of the vectors; then exchanges the quarters, twice.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(r: [__m512; LANES]) -> [__m512; LANES] {
    let (mut a, mut b) = (r, r);
    for i in (0..LANES).step_by(2) {
        a[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    let pairs = |lo: bool, x: __m512, y: __m512| {
        let (x, y) = (_mm512_castps_pd(x), _mm512_castps_pd(y));
        _mm512_castpd_ps(if lo { _mm512_unpacklo_pd(x, y) } else { _mm512_unpackhi_pd(x, y) })
    };
    for i in (0..LANES).step_by(4) {
        b[i] = pairs(true, a[i], a[i + 2]);
        b[i + 1] = pairs(false, a[i], a[i + 2]);
        b[i + 2] = pairs(true, a[i + 1], a[i + 3]);
        b[i + 3] = pairs(false, a[i + 1], a[i + 3]);
    }
    // Quarter q of b[4 g + c] now holds rows 4 g.. of column 4 q + c.
    for c in 0..4 {
        a[c] = _mm512_shuffle_f32x4::<0x88>(b[c], b[4 + c]);
        a[4 + c] = _mm512_shuffle_f32x4::<0xdd>(b[c], b[4 + c]);
        a[8 + c] = _mm512_shuffle_f32x4::<0x88>(b[8 + c], b[12 + c]);
        a[12 + c] = _mm512_shuffle_f32x4::<0xdd>(b[8 + c], b[12 + c]);
    }
    for c in 0..4 {
        b[c] = _mm512_shuffle_f32x4::<0x88>(a[c], a[8 + c]);
        b[8 + c] = _mm512_shuffle_f32x4::<0xdd>(a[c], a[8 + c]);
        b[4 + c] = _mm512_shuffle_f32x4::<0x88>(a[4 + c], a[12 + c]);
        b[12 + c] = _mm512_shuffle_f32x4::<0xdd>(a[4 + c], a[12 + c]);
    }
    b
}

impl Simd for Avx512 {
    type V = __m512;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        op!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load_ptr(self, p: *const f32) -> Self::V {
        // SAFETY: as `op!`; the caller promises sixteen values.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, v: Self::V, p: *mut f32) {
        // SAFETY: as `op!`; the caller promises room for sixteen values.
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_f16_ptr(self, p: *const u16) -> Self::V {
        // SAFETY: as `op!`; the caller promises sixteen values.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn store_f16_ptr(self, v: Self::V, p: *mut u16) {
        // SAFETY: as `op!`; the caller promises room for sixteen values.
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(v)) }
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        op!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        op!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        op!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        op!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        op!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn fnma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        op!(_mm512_fnmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        op!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn select_lt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
        op!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x))
    }
    #[inline(always)]
    fn add_to_exponent(self, p: Self::V, n: Self::V) -> Self::V {
        op!({
            let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(n));
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent))
        })
    }
    #[inline(always)]
    fn to_array(self, v: Self::V) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        lanes
    }
    #[inline(always)]
    fn load_partial(self, x: &[f32]) -> Self::V {
        assert!(x.len() <= LANES);
        op!(_mm512_maskz_loadu_ps(first(x.len()), x.as_ptr()))
    }
    #[inline(always)]
    fn store_partial(self, v: Self::V, x: &mut [f32]) {
        assert!(x.len() <= LANES);
        op!(_mm512_mask_storeu_ps(x.as_mut_ptr(), first(x.len()), v))
    }
    #[inline(always)]
    fn transpose(self, rows: [__m512; LANES]) -> [__m512; LANES] {
        op!(transpose(rows))
    }
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        op!({
            let eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
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
