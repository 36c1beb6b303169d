//! Element types, and the conversions between them.

use half::{bf16, f16};

/// A type for which every bit pattern is a value.
///
/// # Safety
/// Every bit pattern must be a value, and the type must have no padding.
pub unsafe trait Plain: Copy + Default + Send + Sync + 'static {}

/// A boolean of one byte: zero is false, anything else is true.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Flag(pub u8);

macro_rules! plain {
    ($($t:ty)*) => { $(
        // SAFETY: an integer or float, or a transparent wrapper of one.
        unsafe impl Plain for $t {}
    )* };
}
plain!(u8 u16 u32 u64 i32 i64 f16 bf16 f32 Flag);

/// A number as kernels see it: floats are computed in f32, integers in i64.
pub trait Scalar: Plain {
    /// True for float types.
    const IS_FLOAT: bool;
    /// The type that it is computed in.
    type Wide: Wide;
    /// In the type that it is computed in.
    fn wide(self) -> Self::Wide;
    /// As f32; exact for floats, nearest for integers.
    fn to_f32(self) -> f32;
    /// Nearest float; integers truncate towards zero and saturate, NaN is zero; a flag is `x != 0`.
    fn from_f32(x: f32) -> Self;
    /// As i64; floats truncate and saturate.
    fn to_i64(self) -> i64;
    /// The low bits for integers, the nearest float for floats.
    fn from_i64(x: i64) -> Self;
}

/// A type that numbers are computed in: f32 or i64.
pub trait Wide: Plain {
    /// As another type: [`Scalar::from_f32`] or [`Scalar::from_i64`].
    fn narrow<T: Scalar>(self) -> T;
}

impl Wide for f32 {
    #[inline(always)]
    fn narrow<T: Scalar>(self) -> T {
        T::from_f32(self)
    }
}

impl Wide for i64 {
    #[inline(always)]
    fn narrow<T: Scalar>(self) -> T {
        T::from_i64(self)
    }
}

macro_rules! integer {
    ($($t:ty)*) => { $(impl Scalar for $t {
        const IS_FLOAT: bool = false;
        type Wide = i64;
        #[inline(always)]
        fn wide(self) -> i64 {
            self.to_i64()
        }
        #[inline(always)]
        fn to_f32(self) -> f32 {
            self as f32
        }
        #[inline(always)]
        fn from_f32(x: f32) -> $t {
            x as $t
        }
        #[inline(always)]
        fn to_i64(self) -> i64 {
            i64::from(self)
        }
        #[inline(always)]
        fn from_i64(x: i64) -> $t {
            x as $t
        }
    })* };
}
integer!(u8 u32 i32 i64);

/// The f32 towards zero from `x`, with the last bit set if any of `x` is lost. It rounds to a shorter float exactly as
/// `x` itself does: the last bit keeps it off the midpoints of shorter floats.
#[inline(always)]
fn to_odd(x: i64) -> f32 {
    let near = x as f32;
    let (exact, value) = (i128::from(x), near as i128);
    let towards_zero = near.to_bits() - u32::from(value.abs() > exact.abs());
    f32::from_bits(towards_zero | u32::from(value != exact))
}

macro_rules! float {
    ($($t:ty, $to:expr, $from:expr, $integer:expr;)*) => { $(impl Scalar for $t {
        const IS_FLOAT: bool = true;
        type Wide = f32;
        #[inline(always)]
        fn wide(self) -> f32 {
            self.to_f32()
        }
        #[inline(always)]
        fn to_f32(self) -> f32 {
            $to(self)
        }
        #[inline(always)]
        fn from_f32(x: f32) -> $t {
            $from(x)
        }
        #[inline(always)]
        fn to_i64(self) -> i64 {
            self.to_f32() as i64
        }
        #[inline(always)]
        fn from_i64(x: i64) -> $t {
            $from($integer(x))
        }
    })* };
}
float! {
    f32, std::convert::identity, std::convert::identity, |x| x as f32;
    f16, f16::to_f32, f16::from_f32, to_odd;
    bf16, bf16::to_f32, bf16::from_f32, to_odd;
}

impl Scalar for Flag {
    const IS_FLOAT: bool = false;
    type Wide = i64;
    #[inline(always)]
    fn wide(self) -> i64 {
        self.to_i64()
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.to_i64() as f32
    }
    #[inline(always)]
    fn from_f32(x: f32) -> Flag {
        Flag(u8::from(x != 0.0))
    }
    #[inline(always)]
    fn to_i64(self) -> i64 {
        i64::from(self.0 != 0)
    }
    #[inline(always)]
    fn from_i64(x: i64) -> Flag {
        Flag(u8::from(x != 0))
    }
}

/// Widens `x` into the front of `to`.
#[inline(always)]
pub(super) fn widen<T: Scalar>(x: &[T], to: &mut [f32]) {
    for (to, x) in to.iter_mut().zip(x) {
        *to = x.to_f32();
    }
}

/// Runs `$body` with `$t` naming the type that stands for a dtype.
macro_rules! with_scalar {
    ($dtype:expr, $t:ident => $body:expr) => {{
        use keel_array::DType;
        use $crate::kernels::generic::scalar::Flag;
        match $dtype {
            DType::Bool => {
                type $t = Flag;
                $body
            }
            DType::U8 => {
                type $t = u8;
                $body
            }
            DType::U32 => {
                type $t = u32;
                $body
            }
            DType::I32 => {
                type $t = i32;
                $body
            }
            DType::I64 => {
                type $t = i64;
                $body
            }
            DType::F16 => {
                type $t = half::f16;
                $body
            }
            DType::BF16 => {
                type $t = half::bf16;
                $body
            }
            DType::F32 => {
                type $t = f32;
                $body
            }
        }
    }};
}

/// Like `with_scalar`, for the float types.
macro_rules! with_float {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            keel_array::DType::F16 => {
                type $t = half::f16;
                $body
            }
            keel_array::DType::BF16 => {
                type $t = half::bf16;
                $body
            }
            keel_array::DType::F32 => {
                type $t = f32;
                $body
            }
            other => unreachable!("the builder refuses {other} here"),
        }
    };
}

/// Runs `$body` with `$t` naming an unsigned type of the dtype's size, where only bytes are moved.
macro_rules! with_bits {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype.size() {
            1 => {
                type $t = u8;
                $body
            }
            2 => {
                type $t = u16;
                $body
            }
            4 => {
                type $t = u32;
                $body
            }
            _ => {
                type $t = u64;
                $body
            }
        }
    };
}

pub(crate) use {with_bits, with_float, with_scalar};
