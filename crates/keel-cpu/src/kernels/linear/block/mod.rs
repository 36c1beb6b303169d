//! The innermost kernels: `M` rows of x against a pair of weight tiles, over all of K.
//!
//! Each output element has its own accumulators and one order of additions over K, the same for every `M`. So a row's
//! bits do not depend on other rows of the block. Sums are cut at fixed places (the affine group, or 256 inputs of a
//! dense row). This also keeps f32 rounding errors far below those of one long sum.
//!
//! | kernel | weights | inner step |
//! |---|---|---|
//! | [`int8`] | affine | unpack 4 inputs x 16 rows of u8, exact i32 dot with i8 x; per group: conversion, scale, bias |
//! | [`int8_overlapped`] | affine | the same for many rows; conversions run between the next group's dots |
//! | [`amx`] | affine | the same on tiles of 16 rows |
//! | [`coded`] | block codings | as [`int8_overlapped`], with levels minus a zero, or with offsets |
//! | [`affine_f32`] | affine | unpack, `scale * q + bias` in f32, f32 multiply-add |
//! | [`amx_bf16`] | dense bf16 | bf16 products of pairs on tiles, f32 sums, any number of rows |
//! | [`dense`] | dense | widen, f32 multiply-add; or bf16 dot of input pairs with f32 sums |

mod affine_f32;
mod amx;
mod amx_bf16;
mod coded;
mod complete;
mod dense;
mod dispatch;
mod int8;
mod int8_overlapped;
mod unpack;

use super::coding::Coding;
use super::format::{PAIR, TILE_ROWS};
use super::lanes::Lanes;
pub(super) use dispatch::{BlockFns, Kernel, block_fns};
#[cfg(test)]
pub(super) use dispatch::{portable_fns, soft_bf16_tile_fns, soft_tile_fns};

/// Most rows of x computed together.
pub(super) const MAX_ROWS: usize = 16;

/// Operands of a block kernel. Each pointer is valid for the bytes that the layout puts there.
pub(super) struct Block<'a> {
    pub layout: &'a super::PackedLayout,
    /// The two tiles; one tile twice if only one is left.
    pub tiles: [*const u8; PAIR],
    /// Bytes from one unit of a tile to the next.
    pub stride: usize,
    /// Weights to prefetch while the tiles are read.
    pub ahead: Option<Ahead>,
    /// Start of each row's activations. If they are quantised: start of the whole block's, see `activations`.
    pub x: [*const u8; MAX_ROWS],
    /// Start of each row's outputs.
    pub y: [*mut f32; MAX_ROWS],
    /// The pair's first column.
    pub column: usize,
    /// Columns of each tile that exist; 0 for a repeated tile.
    pub columns: [usize; PAIR],
    /// Add to y instead of replacing it.
    pub add: bool,
}

/// Distance of prefetching, in bytes of the stream: a few hundred nanoseconds of reading, and a small part of a
/// first-level cache.
const DISTANCE: usize = 8 << 10;

/// The next weights, prefetched in small steps.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    /// The range to prefetch; may be any addresses.
    next: *const u8,
    end: *const u8,
    /// Start of the run after `end`; null if none follows.
    then: *const u8,
    /// Bytes to prefetch with each group or chunk of inputs.
    step: usize,
}

impl Ahead {
    /// Prefetches the beginning of the stream at `pair`.
    pub(super) fn first(pair: *const u8) {
        for line in (0..DISTANCE).step_by(64) {
            prefetch(pair.wrapping_add(line));
        }
    }

    /// The share of block `block` of `blocks` in the pair at `pair`.
    pub(super) fn share(layout: &super::PackedLayout, pair: *const u8, block: usize, blocks: usize) -> Ahead {
        let pair_bytes = PAIR * layout.tile_bytes();
        let at = |block: usize| pair.wrapping_add(pair_bytes * block / blocks);
        let step = (step(layout) / blocks).next_multiple_of(64);
        Ahead { next: at(block), end: at(block + 1), then: std::ptr::null(), step }
    }

    /// The weights [`DISTANCE`] bytes after those of the pair at `pair`, for the one block that reads the pair. The
    /// stream ends at `end` and continues at `then`, unless that is null.
    pub(super) fn after(
        layout: &super::PackedLayout,
        pair: *const u8,
        end: *const u8,
        then: *const u8,
    ) -> Ahead {
        let past = (pair.addr() + DISTANCE).checked_sub(end.addr());
        let (next, end, then) = match past {
            None => (pair.wrapping_add(DISTANCE), end, then),
            Some(_) if then.is_null() => (end, end, then),
            // The next run is longer than the part that this block prefetches.
            Some(past) => (then.wrapping_add(past), std::ptr::without_provenance(usize::MAX), then),
        };
        Ahead { next, end, then, step: step(layout) }
    }

    /// Prefetches the next step and advances.
    ///
    /// # Safety
    /// As [`Lanes`].
    #[inline(always)]
    unsafe fn ask<S: Lanes>(&mut self) {
        if self.next >= self.end {
            if self.then.is_null() {
                return;
            }
            self.next = self.then.wrapping_add(self.next.addr() - self.end.addr());
            self.end = std::ptr::without_provenance(usize::MAX);
        }
        for line in (0..self.step).step_by(64) {
            // SAFETY: a prefetch may be of any address.
            unsafe { S::prefetch(self.next.wrapping_add(line)) }
        }
        self.next = self.next.wrapping_add(self.step);
    }
}

/// Prefetches the cache line at any address, on processors with such an instruction.
fn prefetch(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch may be of any address, and every x86-64 processor has it.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// Bytes of a pair that a block kernel reads between two calls of [`Ahead::ask`].
fn step(layout: &super::PackedLayout) -> usize {
    let step = match layout.format() {
        super::WeightFormat::Dense(_) => layout.unit_bytes() * dense::CHUNK,
        super::WeightFormat::Affine { .. } => layout.unit_bytes(),
        // A prefetch of 256 inputs at once would fill the queue that demand loads share.
        super::WeightFormat::Blocks(format) => layout.unit_bytes() / Coding::of(format).blocks,
    };
    PAIR * step.min(layout.tile_bytes())
}

/// Both tiles, `bytes` further on.
///
/// A function and not `map`: for each kernel, `map` would compile the closure and the array functions again.
///
/// # Safety
/// Each tile has this many bytes from there on.
#[inline(always)]
unsafe fn both_at([left, right]: [*const u8; PAIR], bytes: usize) -> [*const u8; PAIR] {
    // SAFETY: as the caller promises.
    unsafe { [left.add(bytes), right.add(bytes)] }
}

/// Prefetches the cache lines of `M` rows that [`store`] will write: with many rows none of them is in a near cache.
///
/// # Safety
/// As [`Lanes`].
#[inline(always)]
unsafe fn ask_for_results<S: Lanes, const M: usize>(block: &Block<'_>) {
    for y in &block.y[..M] {
        let y = y.wrapping_add(block.column);
        // SAFETY: a prefetch may be of any address.
        unsafe {
            S::prefetch(y.cast());
            S::prefetch(y.wrapping_add(TILE_ROWS).cast());
        }
    }
}

/// Writes the results of `M` rows, or adds them to the present values.
///
/// # Safety
/// As [`Lanes`]; each row of `block.y` has room for `block.columns`.
#[inline(always)]
unsafe fn store<S: Lanes, const M: usize>(block: &Block<'_>, sums: &[[S::F; PAIR]; M]) {
    for (sums, y) in sums.iter().zip(block.y) {
        for (t, columns) in block.columns.into_iter().enumerate() {
            // SAFETY: only columns of the tile that exist.
            unsafe {
                let y = y.wrapping_add(block.column + t * TILE_ROWS);
                let sum = if block.add { S::add(sums[t], S::load_first(y, columns)) } else { sums[t] };
                S::store(sum, y, columns);
            }
        }
    }
}
