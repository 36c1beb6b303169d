//! Block kernels compiled for each instruction set.

use super::super::lanes::portable::Portable;
#[cfg(target_arch = "x86_64")]
use super::super::lanes::{avx2::Avx2, avx512::Avx512};
use super::Block;
use crate::isa::Isa;

/// A block kernel for a certain number of rows.
///
/// # Safety
/// The CPU must have the instructions it was compiled for, and the block must describe what it expects.
pub(in super::super) type BlockFn = unsafe fn(&Block<'_>);

/// Which arithmetic a block is computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Kernel {
    /// Affine weights of so many bits, i8 activations.
    Int8(usize),
    /// Affine weights of so many bits, f32 activations.
    AffineF32(usize),
    /// Dense f32 weights, f32 activations.
    F32,
    /// Dense f16 weights, f32 activations.
    F16,
    /// Dense bf16 weights, f32 activations.
    Bf16,
    /// Dense bf16 weights, bf16 activations.
    Bf16Dots,
}

/// A kernel's functions at one level.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct BlockFns {
    /// For 1, 2, 4 and 8 rows; those above `most_rows` repeat the last.
    by_rows: [BlockFn; 4],
    /// As many as the level's registers hold: a larger block is computed in parts.
    most_rows: usize,
    /// For 16 rows on tiles.
    sixteen: Option<BlockFn>,
}

impl BlockFns {
    /// Rows of a part of a block of `rows`, and the function for them.
    pub(in super::super) fn part(&self, rows: usize) -> (usize, BlockFn) {
        if let (16, Some(sixteen)) = (rows, self.sixteen) {
            return (rows, sixteen);
        }
        let rows = rows.min(self.most_rows);
        (rows, self.by_rows[rows.ilog2() as usize])
    }
}

impl BlockFns {
    /// Rows of the largest block: segments are cut into such, then into smaller ones.
    pub(in super::super) fn block_rows(&self) -> usize {
        if self.sixteen.is_some() { 16 } else { 8 }
    }
}

/// The functions of `kernel` at `isa`.
pub(in super::super) fn block_fns(isa: Isa, kernel: Kernel) -> BlockFns {
    match isa {
        Isa::Portable => portable::fns(kernel),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::fns(kernel),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => avx512::fns(kernel),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni => avx512_dots::fns(kernel),
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        Isa::Amx if kernel == Kernel::Bf16Dots && crate::amx::bf16::usable() => amx::bf16_fns(),
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        Isa::Amx => BlockFns { sixteen: amx::fns(kernel), ..avx512_dots::fns(kernel) },
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        _ => unreachable!("{isa} is not found on this platform"),
    }
}

/// The module of one level: every kernel as a function compiled for the level's features.
macro_rules! level {
    ($name:ident, $lanes:ty, [$one:literal $two:literal $four:literal $eight:literal] $(, $features:literal)?) => {
        mod $name {
            use super::*;
            use crate::kernels::linear::block::{affine_f32, dense, int8};

            $(#[target_feature(enable = $features)])?
            unsafe fn int8<const BITS: usize, const M: usize>(block: &Block<'_>) {
                // SAFETY: as the caller promises.
                unsafe { int8::int8::<$lanes, BITS, M>(block) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn affine_f32<const BITS: usize, const M: usize>(block: &Block<'_>) {
                // SAFETY: as the caller promises.
                unsafe { affine_f32::affine_f32::<$lanes, BITS, M>(block) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn dense<D: dense::Weights, const M: usize>(block: &Block<'_>) {
                // SAFETY: as the caller promises.
                unsafe { dense::dense::<$lanes, D, M>(block) }
            }

            pub(super) fn fns(kernel: Kernel) -> BlockFns {
                macro_rules! rows {
                    ($f:ident $arg:tt) => {
                        [$f::<$arg, $one>, $f::<$arg, $two>, $f::<$arg, $four>, $f::<$arg, $eight>]
                    };
                    ($f:ident $arg:path) => {
                        [$f::<$arg, $one>, $f::<$arg, $two>, $f::<$arg, $four>, $f::<$arg, $eight>]
                    };
                }
                let by_rows: [BlockFn; 4] = match kernel {
                    Kernel::Int8(2) => rows!(int8 2),
                    Kernel::Int8(3) => rows!(int8 3),
                    Kernel::Int8(4) => rows!(int8 4),
                    Kernel::Int8(5) => rows!(int8 5),
                    Kernel::Int8(6) => rows!(int8 6),
                    Kernel::Int8(_) => rows!(int8 8),
                    Kernel::AffineF32(2) => rows!(affine_f32 2),
                    Kernel::AffineF32(3) => rows!(affine_f32 3),
                    Kernel::AffineF32(4) => rows!(affine_f32 4),
                    Kernel::AffineF32(5) => rows!(affine_f32 5),
                    Kernel::AffineF32(6) => rows!(affine_f32 6),
                    Kernel::AffineF32(_) => rows!(affine_f32 8),
                    Kernel::F32 => rows!(dense dense::F32),
                    Kernel::F16 => rows!(dense dense::F16),
                    Kernel::Bf16 => rows!(dense dense::Bf16),
                    Kernel::Bf16Dots => rows!(dense dense::Bf16Dots),
                };
                BlockFns { by_rows, most_rows: $eight, sixteen: None }
            }
        }
    };
}

level!(portable, Portable, [1 1 1 1]);
#[cfg(target_arch = "x86_64")]
level!(avx2, Avx2, [1 2 4 4], "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
level!(avx512, Avx512<false>, [1 2 4 8], "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
level!(avx512_dots, Avx512<true>, [1 2 4 8], "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c");

/// AMX: int8 in blocks of 16 rows, beside which the level has the functions of `avx512_dots`, and bf16 in blocks of
/// any size.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx {
    use super::*;

    pub(super) fn fns(kernel: Kernel) -> Option<BlockFn> {
        let Kernel::Int8(bits) = kernel else { return None };
        Some(match bits {
            2 => int8::<2>,
            3 => int8::<3>,
            4 => int8::<4>,
            5 => int8::<5>,
            6 => int8::<6>,
            _ => int8::<8>,
        })
    }

    pub(super) fn bf16_fns() -> BlockFns {
        BlockFns {
            by_rows: [bf16::<1>, bf16::<2>, bf16::<4>, bf16::<8>],
            most_rows: 8,
            sixteen: Some(bf16::<16>),
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")]
    unsafe fn bf16<const M: usize>(block: &Block<'_>) {
        use crate::amx::bf16::hardware::Amx;
        // SAFETY: as the caller promises.
        unsafe { super::super::amx_bf16::bf16::<Avx512<true>, Amx, M>(block) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")]
    unsafe fn int8<const BITS: usize>(block: &Block<'_>) {
        // SAFETY: as the caller promises.
        unsafe { super::super::amx::int8::<Avx512<true>, crate::amx::hardware::Amx, BITS>(block) }
    }
}

/// The portable functions with blocks of 16 rows on tiles made of plain loops, to test those anywhere.
#[cfg(test)]
pub(in super::super) fn soft_tile_fns(bits: usize) -> BlockFns {
    use super::amx::int8;
    use crate::amx::SoftTiles;
    let sixteen: BlockFn = match bits {
        2 => int8::<Portable, SoftTiles, 2>,
        3 => int8::<Portable, SoftTiles, 3>,
        4 => int8::<Portable, SoftTiles, 4>,
        5 => int8::<Portable, SoftTiles, 5>,
        6 => int8::<Portable, SoftTiles, 6>,
        _ => int8::<Portable, SoftTiles, 8>,
    };
    BlockFns { sixteen: Some(sixteen), ..portable::fns(Kernel::Int8(bits)) }
}

/// The functions for bf16 on tiles made of plain loops, to test them anywhere.
#[cfg(test)]
pub(in super::super) fn soft_bf16_tile_fns() -> BlockFns {
    use super::amx_bf16::bf16;
    use crate::amx::bf16::SoftTiles;
    let by_rows: [BlockFn; 4] = [
        bf16::<Portable, SoftTiles, 1>,
        bf16::<Portable, SoftTiles, 2>,
        bf16::<Portable, SoftTiles, 4>,
        bf16::<Portable, SoftTiles, 8>,
    ];
    BlockFns { by_rows, most_rows: 8, sixteen: Some(bf16::<Portable, SoftTiles, 16>) }
}
