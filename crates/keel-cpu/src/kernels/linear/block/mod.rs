//! The innermost kernels: `M` rows of x against a pair of weight tiles, over all of K.
//!
//! Each output element has accumulators of its own and one order of additions over K, the same for every `M`:
//! that is why a row's bits do not depend on the rows computed beside it. Sums are cut at fixed places (the
//! affine group, or 256 inputs of a dense row), which also keeps f32 rounding far below that of one long sum.
//!
//! | kernel | weights | inner step |
//! |---|---|---|
//! | [`int8`] | affine | unpack 4 inputs x 16 rows of u8, exact i32 dot with i8 activations; per group one conversion, scale, bias |
//! | [`int8_overlapped`] | affine | the same for many rows, the conversions between the next group's dots |
//! | [`amx`] | affine | the same on tiles of 16 rows |
//! | [`coded`] | block codings | as [`int8_overlapped`], with levels less a zero, or offsets |
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
pub(super) use dispatch::{soft_bf16_tile_fns, soft_tile_fns};

/// Most rows of x computed together.
pub(super) const MAX_ROWS: usize = 16;

/// What a block kernel reads and writes. Pointers are valid for what the layout says lies behind them.
pub(super) struct Block<'a> {
    pub layout: &'a super::PackedLayout,
    /// The two tiles; the same twice where only one is left.
    pub tiles: [*const u8; PAIR],
    /// Bytes from one unit of a tile to the next.
    pub stride: usize,
    /// What to ask for while the tiles are read.
    pub ahead: Option<Ahead>,
    /// Where the activations of each row begin. Where they are quantised: of the whole block, see `activations`.
    pub x: [*const u8; MAX_ROWS],
    /// Where the outputs of each row begin.
    pub y: [*mut f32; MAX_ROWS],
    /// The pair's first column.
    pub column: usize,
    /// Columns of each tile that exist; 0 for a repeated tile.
    pub columns: [usize; PAIR],
    /// Add to y rather than replace it.
    pub add: bool,
}

/// How far ahead of what is read weights are asked for, in bytes of the stream: some hundred nanoseconds, and a small
/// part of a first-level cache.
const DISTANCE: usize = 8 << 10;

/// Weights that come next, asked for little by little.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    /// As far as `end`; may be any addresses.
    next: *const u8,
    end: *const u8,
    /// Where to go on from `end`; null where nothing follows.
    then: *const u8,
    /// Bytes to ask for with each group or chunk of inputs.
    step: usize,
}

impl Ahead {
    /// Asks for the beginning of the stream at `pair`.
    pub(super) fn first(pair: *const u8) {
        for line in (0..DISTANCE).step_by(64) {
            prefetch(pair.wrapping_add(line));
        }
    }

    /// Share `block` of `blocks` of the pair at `pair`.
    pub(super) fn share(layout: &super::PackedLayout, pair: *const u8, block: usize, blocks: usize) -> Ahead {
        let pair_bytes = PAIR * layout.tile_bytes();
        let at = |block: usize| pair.wrapping_add(pair_bytes * block / blocks);
        let step = (step(layout) / blocks).next_multiple_of(64);
        Ahead { next: at(block), end: at(block + 1), then: std::ptr::null(), step }
    }

    /// What lies [`DISTANCE`] behind the pair at `pair`, while it is read by one block: in a stream that ends at `end`
    /// and goes on at `then`, unless that is null.
    pub(super) fn behind(
        layout: &super::PackedLayout,
        pair: *const u8,
        end: *const u8,
        then: *const u8,
    ) -> Ahead {
        let past = (pair.addr() + DISTANCE).checked_sub(end.addr());
        let (next, end, then) = match past {
            None => (pair.wrapping_add(DISTANCE), end, then),
            Some(_) if then.is_null() => (end, end, then),
            // The next run is longer than this block asks for.
            Some(past) => (then.wrapping_add(past), std::ptr::without_provenance(usize::MAX), then),
        };
        Ahead { next, end, then, step: step(layout) }
    }

    /// Asks for the next step, and moves on.
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

/// Asks for the cache line at any address, on processors where that can be said.
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
        // Units of 256 inputs at once would fill the queue that demand loads wait in, too.
        super::WeightFormat::Blocks(format) => layout.unit_bytes() / Coding::of(format).blocks,
    };
    PAIR * step.min(layout.tile_bytes())
}

/// Asks for the cache lines of `M` rows that [`store`] will write: with many rows none of them is near.
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

/// Writes the results of `M` rows, or adds them to what is there.
///
/// # Safety
/// As [`Lanes`]; each row of `block.y` has room for `block.columns`.
#[inline(always)]
unsafe fn store<S: Lanes, const M: usize>(block: &Block<'_>, sums: &[[S::F; PAIR]; M]) {
    for (sums, y) in sums.iter().zip(block.y) {
        for (t, columns) in block.columns.into_iter().enumerate() {
            // SAFETY: the columns of the tile that exist.
            unsafe {
                let y = y.wrapping_add(block.column + t * TILE_ROWS);
                let sum = if block.add { S::add(sums[t], S::load_first(y, columns)) } else { sums[t] };
                S::store(sum, y, columns);
            }
        }
    }
}
