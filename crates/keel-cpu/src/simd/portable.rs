//! Vectors as plain arrays, for machines without a path of their own.

use super::{LANES, Simd};
use half::f16;

/// Sixteen lanes as an array; the compiler may use whatever vectors the target's baseline has.
#[derive(Clone, Copy)]
pub(super) struct Portable;

#[inline(always)]
fn lanes(f: impl Fn(usize) -> f32) -> [f32; LANES] {
    std::array::from_fn(f)
}

/// Operations without a vector instruction in x86-64's baseline: each lane takes a call or a dozen instructions.
/// Inlined, they made up half of the portable kernels' code, which all builds carry and few machines run. On other
/// architectures each is a few vector instructions.
pub(crate) mod lanewise {
    use super::{LANES, f16, lanes};

    type V = [f32; LANES];

    #[cfg(not(target_arch = "x86_64"))]
    #[inline(always)]
    pub fn fma(a: &V, b: &V, c: &V) -> V {
        lanes(|i| a[i].mul_add(b[i], c[i]))
    }

    /// The library's `fmaf` asks for the processor's instruction at each call. Here sixteen lanes ask once. Either way
    /// has the same bits: it rounds once.
    #[cfg(target_arch = "x86_64")]
    #[inline(never)]
    pub fn fma(a: &V, b: &V, c: &V) -> V {
        if is_x86_feature_detected!("fma") {
            // SAFETY: this processor has the instruction.
            return unsafe { fma_by_instruction(a, b, c) };
        }
        lanes(|i| a[i].mul_add(b[i], c[i]))
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "fma")]
    fn fma_by_instruction(a: &V, b: &V, c: &V) -> V {
        let mut sums = *c;
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = a[i].mul_add(b[i], *sum);
        }
        sums
    }

    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    pub fn widen(halves: &[u16; LANES]) -> V {
        lanes(|i| f16::from_bits(halves[i]).to_f32_const())
    }

    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    pub fn narrow(v: &V) -> [u16; LANES] {
        v.map(|x| f16::from_f32_const(x).to_bits())
    }
}

impl Simd for Portable {
    type V = [f32; LANES];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load_ptr(self, p: *const f32) -> Self::V {
        // SAFETY: the caller promises sixteen values; the read needs no alignment.
        unsafe { p.cast::<[f32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, v: Self::V, p: *mut f32) {
        // SAFETY: the caller promises room for sixteen values.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_f16_ptr(self, p: *const u16) -> Self::V {
        // SAFETY: the caller promises sixteen values.
        let halves = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        lanewise::widen(&halves)
    }
    #[inline(always)]
    unsafe fn store_f16_ptr(self, v: Self::V, p: *mut u16) {
        // SAFETY: the caller promises room for sixteen values; the write needs no alignment.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(lanewise::narrow(&v)) }
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        lanewise::fma(&a, &b, &c)
    }
    #[inline(always)]
    fn fnma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        lanewise::fma(&a.map(|a| -a), &b, &c)
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn select_lt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
        lanes(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }
    #[inline(always)]
    fn add_to_exponent(self, p: Self::V, n: Self::V) -> Self::V {
        lanes(|i| f32::from_bits(p[i].to_bits().wrapping_add(n[i].to_bits() << 23)))
    }
    #[inline(always)]
    fn to_array(self, v: Self::V) -> [f32; LANES] {
        v
    }
    #[inline(always)]
    fn sum(self, mut v: Self::V) -> f32 {
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                v[i] += v[i + half];
            }
        }
        v[0]
    }
    #[inline(always)]
    fn prefetch(self, _: *const u8) {}
}
