//! Weights in block codings against activations quantised to i8.
//!
//! With `w = s (l - z) + o` and `x = c p` the sum over a group is `s c (sum(l p) - z sum(p)) + o c sum(p)`. The term in
//! parentheses is exact in i32 and starts from `-z sum(p)`. Quantising the row has computed `-z sum(p)`, or `c sum(p)`
//! for codings with offsets. A group's conversion to f32 is spread between the dot products of the next, see
//! [`super::complete`].
//!
//! Floor: reading the tiles; for many rows 4 or 8 dot products a group and 2 or 3 multiply-adds on the same units.

use super::super::coding::{Coding, Scales};
use super::super::format::{BLOCK, TILE_ROWS};
use super::super::lanes::Lanes;
use super::complete::Complete;
use super::unpack::{for_each_quad, quad};
use super::{Block, PAIR, both_at};
use keel_array::BlockFormat;

/// A coding as a type.
pub(super) trait Coded {
    const CODING: Coding;
}

macro_rules! codings {
    ($($name:ident)+) => {
        /// One type for each coding.
        #[allow(non_camel_case_types, reason = "the codings' own names")]
        pub(super) mod codings {
            use super::*;
            $(
                pub(in super::super) struct $name;
                impl Coded for $name {
                    const CODING: Coding = Coding::of(BlockFormat::$name);
                }
            )+
        }
    };
}
codings!(Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2K Q3K Q4K Q5K Q6K IQ4NL IQ4XS MXFP4);

/// The parameters of a unit of one tile.
struct Params<S: Lanes> {
    /// `d`, and `-dmin` or the offset.
    head: [S::F; 2],
    /// Start of the groups' bytes.
    bytes: *const u8,
}

impl<S: Lanes> Params<S> {
    /// # Safety
    /// As [`Lanes`]; the parameters of `coding` at `at`.
    #[inline(always)]
    unsafe fn load(coding: &Coding, at: *const u8) -> Params<S> {
        // SAFETY: as the caller promises.
        unsafe {
            let half = |i: usize| S::load_f16(at.add(i * TILE_ROWS * 2).cast());
            let head = match coding.scales {
                Scales::Half | Scales::Signed => [half(0), S::splat(0.0)],
                Scales::HalfAndOffset => [half(0), half(1)],
                Scales::WithMins | Scales::Nibbles => [half(0), S::mul(half(1), S::splat(-1.0))],
                Scales::Exponent => {
                    // A product of two normal powers of two, because the result may be subnormal.
                    let (e, bias) = (S::load_u8(at), S::splat_i(63));
                    let power = |e: S::I| S::as_f32(S::shl::<23>(S::add_i(S::shr::<1>(e), bias)));
                    [S::mul(power(e), power(S::add_i(e, S::splat_i(1)))), S::splat(0.0)]
                }
            };
            Params { head, bytes: at.add(TILE_ROWS * coding.scales.head_bytes()) }
        }
    }

    /// Scale and offset of group `g`.
    ///
    /// # Safety
    /// As [`Params::load`]; the unit has the group.
    #[inline(always)]
    unsafe fn of(&self, coding: &Coding, g: usize) -> [S::F; 2] {
        let [d, second] = self.head;
        // SAFETY: as the caller promises.
        unsafe {
            let bytes = |i: usize| self.bytes.add(i * TILE_ROWS);
            match coding.scales {
                Scales::Half | Scales::HalfAndOffset | Scales::Exponent => self.head,
                Scales::Signed => [S::mul(d, S::to_f32(S::load_i8(bytes(g)))), second],
                Scales::WithMins => {
                    let (scale, min) = (S::load_u8(bytes(g)), S::load_u8(bytes(coding.groups() + g)));
                    [S::mul(d, S::to_f32(scale)), S::mul(second, S::to_f32(min))]
                }
                Scales::Nibbles => {
                    let both = S::load_u8(bytes(g));
                    let scale = S::to_f32(S::and(both, S::splat_i(15)));
                    [S::mul(d, scale), S::mul(second, S::to_f32(S::shr::<4>(both)))]
                }
            }
        }
    }
}

/// # Safety
/// As [`Lanes`]; `block` describes weights in the coding `C` and `M` rows of activations quantised for it.
#[inline(always)]
pub(super) unsafe fn int8<S: Lanes, C: Coded, const M: usize>(block: &Block<'_>) {
    let coding = const { &C::CODING };
    let (mut x, mut left, mut right) = (block.x[0], block.tiles[0], block.tiles[1]);
    // Read once: reading them for each unit made the compiler keep all activations of a group on the stack.
    let (units, stride) = (block.layout.k() / coding.inputs(), block.stride);
    let mut ahead = block.ahead;
    // SAFETY: every pointer stays within the tile or the rows that the caller vouches for.
    unsafe {
        super::ask_for_results::<S, M>(block);
        let none = [[0.0; 2]; M];
        let mut sums = [[S::splat(0.0); PAIR]; M];
        let mut last = Complete::<S, M>::nothing(&none);
        for _ in 0..units {
            let params = both_at([left, right], TILE_ROWS * coding.code_bytes());
            let params = [Params::<S>::load(coding, params[0]), Params::<S>::load(coding, params[1])];
            for b in 0..coding.blocks {
                if let Some(ahead) = ahead.as_mut() {
                    ahead.ask::<S>();
                }
                let w = both_at([left, right], b * 64 * coding.bits);
                if coding.group == BLOCK {
                    group::<S, C, M, 0, 8>(w, &params, b, x, &mut last, &mut sums);
                    x = x.add(M * (BLOCK + 8));
                } else {
                    group::<S, C, M, 0, 4>(w, &params, 2 * b, x, &mut last, &mut sums);
                    x = x.add(M * (BLOCK / 2 + 8));
                    group::<S, C, M, 4, 8>(w, &params, 2 * b + 1, x, &mut last, &mut sums);
                    x = x.add(M * (BLOCK / 2 + 8));
                }
            }
            (left, right) = (left.wrapping_add(stride), right.wrapping_add(stride));
        }
        last.add_share(coding.scales.has_offset(), 0, 1, &mut sums);
        super::store::<S, M>(block, &sums);
    }
}

/// Computes the dots of group `g` of a unit, the quads `FIRST..END` of the blocks at `w`. Meanwhile adds the last group
/// to the sums.
///
/// # Safety
/// As [`Lanes`]; the block lies at `w`, the group of `M` rows at `x`.
#[inline(always)]
unsafe fn group<S: Lanes, C: Coded, const M: usize, const FIRST: usize, const END: usize>(
    w: [*const u8; PAIR],
    params: &[Params<S>; PAIR],
    g: usize,
    x: *const u8,
    last: &mut Complete<S, M>,
    sums: &mut [[S::F; PAIR]; M],
) {
    let coding = const { &C::CODING };
    // SAFETY: as the caller promises.
    unsafe {
        let rows = x.add(M * coding.group).cast::<[f32; 2]>();
        let mut dots = [[S::splat_i(0); PAIR]; M];
        if coding.zero != 0 {
            for (m, dots) in dots.iter_mut().enumerate() {
                *dots = [S::splat_i((*rows.add(m))[1].to_bits() as i32); PAIR];
            }
        }
        for_each_quad!(J => {
            if (FIRST..END).contains(&J) {
                let w = [levels::<S, C, J>(w[0]), levels::<S, C, J>(w[1])];
                for (m, dots) in dots.iter_mut().enumerate() {
                    let x = x.add(m * coding.group + 4 * (J - FIRST));
                    let x = S::splat_i(x.cast::<i32>().read_unaligned());
                    for t in 0..PAIR {
                        dots[t] = match coding.level_bits() {
                            8 => S::dot_u8_i8::<8>(dots[t], w[t], x),
                            _ => S::dot_u8_i8::<6>(dots[t], w[t], x),
                        };
                    }
                }
                last.add_share(coding.scales.has_offset(), J - FIRST, END - FIRST, sums);
            }
        });
        let ([left_scale, left_offset], [right_scale, right_offset]) =
            (params[0].of(coding, g), params[1].of(coding, g));
        *last =
            Complete { dots, scale: [left_scale, right_scale], offset: [left_offset, right_offset], rows };
    }
}

/// Levels of the inputs `4 * J .. 4 * J + 4` of a block, as four u8 in each row's lane.
///
/// # Safety
/// As [`Lanes`]; the codes of a block at `block`.
#[inline(always)]
unsafe fn levels<S: Lanes, C: Coded, const J: usize>(block: *const u8) -> S::I {
    let coding = const { &C::CODING };
    // SAFETY: as the caller promises.
    unsafe {
        let codes = match coding.bits {
            2 => quad::<S, 2, J>(block),
            3 => quad::<S, 3, J>(block),
            4 => quad::<S, 4, J>(block),
            5 => quad::<S, 5, J>(block),
            6 => quad::<S, 6, J>(block),
            _ => quad::<S, 8, J>(block),
        };
        match &coding.table {
            Some(table) => S::lookup(codes, table),
            None => codes,
        }
    }
}
