//! Unpacks quantised weights from their bit planes.

use super::super::format::FloatType;
use super::super::lanes::{LANES, Lanes};

/// Inputs `4 * J .. 4 * J + 4` of the block of 32 at `block`, as four u8 in each row's lane.
///
/// # Safety
/// As [`Lanes`]; `64 * BITS` bytes at `block`.
#[inline(always)]
pub(super) unsafe fn quad<S: Lanes, const BITS: usize, const J: usize>(block: *const u8) -> S::I {
    // SAFETY: all vectors read lie within the block.
    unsafe {
        match BITS {
            8 => S::load_i(block.add(64 * J)),
            4 => field::<S, 4, J, 0>(block),
            2 => field::<S, 2, J, 0>(block),
            3 => S::or(field::<S, 2, J, 0>(block), field::<S, 1, J, 2>(block.add(128))),
            5 => S::or(field::<S, 4, J, 0>(block), field::<S, 1, J, 4>(block.add(256))),
            6 => S::or(field::<S, 4, J, 0>(block), field::<S, 2, J, 4>(block.add(256))),
            _ => unreachable!(),
        }
    }
}

/// The field of quad `J` in a plane of `WIDTH` bits, moved to bit `TO` of each byte.
///
/// # Safety
/// As [`Lanes`]; `64 * WIDTH` bytes at `plane`.
#[inline(always)]
unsafe fn field<S: Lanes, const WIDTH: usize, const J: usize, const TO: usize>(plane: *const u8) -> S::I {
    // SAFETY: `J < 8`, so the vector lies within the plane. The mask removes bits that a shift moves from one byte into
    // the next.
    unsafe {
        let fields = 8 / WIDTH;
        let v = S::load_i(plane.add(64 * (J / fields)));
        let mask = S::splat_i(i32::from_ne_bytes([(((1 << WIDTH) - 1) << TO) as u8; 4]));
        S::and(shift::<S>(v, (J % fields * WIDTH) as i32 - TO as i32), mask)
    }
}

/// `v` shifted right by `by` bits, left if negative; `by` is a constant after inlining.
///
/// # Safety
/// As [`Lanes`].
#[inline(always)]
unsafe fn shift<S: Lanes>(v: S::I, by: i32) -> S::I {
    // SAFETY: as the caller promises.
    unsafe {
        match by {
            0 => v,
            1 => S::shr::<1>(v),
            2 => S::shr::<2>(v),
            3 => S::shr::<3>(v),
            4 => S::shr::<4>(v),
            5 => S::shr::<5>(v),
            6 => S::shr::<6>(v),
            7 => S::shr::<7>(v),
            -1 => S::shl::<1>(v),
            -2 => S::shl::<2>(v),
            -3 => S::shl::<3>(v),
            -4 => S::shl::<4>(v),
            _ => unreachable!(),
        }
    }
}

/// Sixteen scales or biases at `p`, widened.
///
/// # Safety
/// As [`Lanes`]; sixteen values of type `float` at `p`.
#[inline(always)]
pub(super) unsafe fn params<S: Lanes>(p: *const u8, float: FloatType) -> S::F {
    const { assert!(LANES == 16) };
    // SAFETY: as the caller promises.
    unsafe {
        match float {
            FloatType::F32 => S::load(p.cast()),
            FloatType::Bf16 => S::load_bf16(p.cast()),
            FloatType::F16 => S::load_f16(p.cast()),
        }
    }
}

/// Runs a statement for each quad `J` of a block.
macro_rules! for_each_quad {
    ($j:ident => $body:block) => {
        for_each_quad!(@ $j $body 0 1 2 3 4 5 6 7)
    };
    (@ $j:ident $body:block $($n:literal)*) => {
        $({ const $j: usize = $n; $body })*
    };
}
pub(super) use for_each_quad;
