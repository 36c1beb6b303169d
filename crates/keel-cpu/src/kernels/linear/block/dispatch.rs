//! Block kernels compiled for each instruction set.

use super::super::format::PackedLayout;
use super::super::lanes::portable::Portable;
#[cfg(target_arch = "x86_64")]
use super::super::lanes::{avx2::Avx2, avx512::Avx512};
use super::Block;
use crate::isa::Isa;
use keel_array::BlockFormat;

/// A block kernel for a certain number of rows.
///
/// # Safety
/// The CPU must have the kernel's instructions, and the block must describe operands of the kernel's kind.
pub(in super::super) type BlockFn = unsafe fn(&Block<'_>);

/// The arithmetic of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Kernel {
    /// Affine weights of this number of bits, i8 activations.
    Int8(usize),
    /// Weights in a block coding, i8 activations.
    Coded(BlockFormat),
    /// Affine weights of this number of bits, f32 activations.
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

/// A kernel's functions at one level, one for each number of rows in a block.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct BlockFns {
    /// Rows of a block, falling to 1.
    sizes: &'static [usize],
    /// One for each size.
    fns: &'static [BlockFn],
}

impl BlockFns {
    /// Rows of the blocks that segments are cut into, see [`super::super::rows::Segment::block`].
    pub(in super::super) fn sizes(&self) -> &'static [usize] {
        self.sizes
    }

    /// The function for blocks of `rows` rows, which is one of the sizes.
    pub(in super::super) fn of(&self, rows: usize) -> BlockFn {
        let at = self.sizes.iter().position(|size| *size == rows);
        self.fns[at.unwrap_or_else(|| panic!("a block of {rows} rows, not of {:?}", self.sizes))]
    }
}

/// The functions of `kernel` for weights of `layout` at `isa`.
///
/// Kernels without dot products are those of AVX-512 at all levels from it on. Block codings without VNNI are fastest
/// in the 256-bit vectors of AVX2.
pub(in super::super) fn block_fns(isa: Isa, kernel: Kernel, layout: &PackedLayout) -> BlockFns {
    match (isa, kernel) {
        (Isa::Portable, _) => portable::fns(kernel),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, _) => avx2::fns(kernel),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Vnni, Kernel::Int8(bits)) => overlapped::fns(bits, layout.group()),
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        (Isa::Amx, Kernel::Int8(bits)) => amx::fns(bits),
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        (Isa::Amx, Kernel::Bf16Dots) if crate::amx::bf16::usable() => amx::bf16_fns(),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Vnni | Isa::Amx, Kernel::Coded(format)) => vnni::coded_fns(format),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Vnni | Isa::Amx, Kernel::Bf16Dots) if crate::isa::has_avx512_bf16() => bf16_dots::fns(),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512 | Isa::Avx512Vnni | Isa::Amx, _) => avx512::fns(kernel),
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("{isa} is not found on this platform"),
    }
}

/// The portable functions. Unlike [`block_fns`] it does not refer to those of other levels.
#[cfg(test)]
pub(in super::super) fn portable_fns(kernel: Kernel) -> BlockFns {
    portable::fns(kernel)
}

/// The function for each number of rows: `f::<arg, rows>`.
macro_rules! by_rows {
    ($f:ident $arg:tt [$($rows:literal)+]) => {
        BlockFns { sizes: &[$($rows),+], fns: const { &[$($f::<$arg, $rows> as BlockFn),+] } }
    };
    ($f:ident $arg:path, [$($rows:literal)+]) => {
        BlockFns { sizes: &[$($rows),+], fns: const { &[$($f::<$arg, $rows> as BlockFn),+] } }
    };
}

/// Within the module of a level: the kernel of affine weights and i8 activations, compiled for the level's features.
macro_rules! int8_kernel {
    ($lanes:ty $(, $features:tt)?) => {
        $(#[target_feature(enable = $features)])?
        pub(super) unsafe fn int8<const BITS: usize, const M: usize>(block: &Block<'_>) {
            // SAFETY: as the caller promises.
            unsafe { super::super::int8::int8::<$lanes, BITS, M>(block) }
        }
    };
}

/// Within the module of a level: the kernels of block codings, compiled for the level's features.
macro_rules! coded_kernels {
    ($lanes:ty, $rows:tt $(, $features:tt)?) => {
        $(#[target_feature(enable = $features)])?
        unsafe fn coded<C: super::super::coded::Coded, const M: usize>(block: &Block<'_>) {
            // SAFETY: as the caller promises.
            unsafe { super::super::coded::int8::<$lanes, C, M>(block) }
        }

        pub(super) fn coded_fns(format: BlockFormat) -> BlockFns {
            use super::super::coded::codings;
            match format {
                BlockFormat::Q4_0 => by_rows!(coded codings::Q4_0, $rows),
                BlockFormat::Q4_1 => by_rows!(coded codings::Q4_1, $rows),
                BlockFormat::Q5_0 => by_rows!(coded codings::Q5_0, $rows),
                BlockFormat::Q5_1 => by_rows!(coded codings::Q5_1, $rows),
                BlockFormat::Q8_0 => by_rows!(coded codings::Q8_0, $rows),
                BlockFormat::Q2K => by_rows!(coded codings::Q2K, $rows),
                BlockFormat::Q3K => by_rows!(coded codings::Q3K, $rows),
                BlockFormat::Q4K => by_rows!(coded codings::Q4K, $rows),
                BlockFormat::Q5K => by_rows!(coded codings::Q5K, $rows),
                BlockFormat::Q6K => by_rows!(coded codings::Q6K, $rows),
                BlockFormat::IQ4NL => by_rows!(coded codings::IQ4NL, $rows),
                BlockFormat::IQ4XS => by_rows!(coded codings::IQ4XS, $rows),
                BlockFormat::MXFP4 => by_rows!(coded codings::MXFP4, $rows),
            }
        }
    };
}

/// Within the module of a level: the other kernels, compiled for the level's features, and the functions of all
/// kernels. Those of block codings are `$coded_fns`.
macro_rules! kernels {
    ($lanes:ty, $rows:tt, $coded_fns:path $(, $features:tt)?) => {
        use super::super::{affine_f32, dense};

        int8_kernel!($lanes $(, $features)?);

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
            match kernel {
                Kernel::Coded(format) => $coded_fns(format),
                Kernel::Int8(2) => by_rows!(int8 2 $rows),
                Kernel::Int8(3) => by_rows!(int8 3 $rows),
                Kernel::Int8(4) => by_rows!(int8 4 $rows),
                Kernel::Int8(5) => by_rows!(int8 5 $rows),
                Kernel::Int8(6) => by_rows!(int8 6 $rows),
                Kernel::Int8(_) => by_rows!(int8 8 $rows),
                Kernel::AffineF32(2) => by_rows!(affine_f32 2 $rows),
                Kernel::AffineF32(3) => by_rows!(affine_f32 3 $rows),
                Kernel::AffineF32(4) => by_rows!(affine_f32 4 $rows),
                Kernel::AffineF32(5) => by_rows!(affine_f32 5 $rows),
                Kernel::AffineF32(6) => by_rows!(affine_f32 6 $rows),
                Kernel::AffineF32(_) => by_rows!(affine_f32 8 $rows),
                Kernel::F32 => by_rows!(dense dense::F32, $rows),
                Kernel::F16 => by_rows!(dense dense::F16, $rows),
                Kernel::Bf16 => by_rows!(dense dense::Bf16, $rows),
                Kernel::Bf16Dots => by_rows!(dense dense::Bf16Dots, $rows),
            }
        }
    };
}

mod portable {
    use super::*;
    coded_kernels!(Portable, [1]);
    kernels!(Portable, [1], coded_fns);
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;
    coded_kernels!(Avx2, [2 1], "avx2,fma,f16c");
    kernels!(Avx2, [4 2 1], coded_fns, "avx2,fma,f16c");
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::*;
    kernels!(
        Avx512<false>,
        [8 4 2 1],
        avx2::coded_fns,
        "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
    );
}

/// Kernels with the dot products of VNNI.
#[cfg(target_arch = "x86_64")]
mod vnni {
    use super::*;
    int8_kernel!(Avx512<true>, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c");
    coded_kernels!(
        Avx512<true>,
        [6 4 2 1],
        "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
    );
}

/// The kernel with the dot products of AVX512-BF16.
#[cfg(target_arch = "x86_64")]
mod bf16_dots {
    use super::super::dense;
    use super::*;

    pub(super) fn fns() -> BlockFns {
        by_rows!(bf16 dense::Bf16Dots, [8 4 2 1])
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn bf16<D: dense::Weights, const M: usize>(block: &Block<'_>) {
        // SAFETY: as the caller promises.
        unsafe { dense::dense::<Avx512<true>, D, M>(block) }
    }
}

/// Int8 in blocks of up to 6 rows: a second block would read the weights again. Blocks of 5 and 6 rows do their
/// conversions between dot products; smaller ones use the functions of `vnni`.
#[cfg(target_arch = "x86_64")]
mod overlapped {
    use super::*;

    pub(super) fn fns(bits: usize, group: usize) -> BlockFns {
        macro_rules! of {
            ($($bits:literal)+) => {
                match (bits, group) {
                    $(($bits, 32) => rows!($bits, 32), ($bits, 64) => rows!($bits, 64), ($bits, _) => rows!($bits, 128),)+
                    _ => unreachable!("the layout has checked the bits"),
                }
            };
        }
        macro_rules! rows {
            ($bits:literal, $group:literal) => {
                BlockFns {
                    sizes: &[6, 5, 4, 3, 2, 1],
                    fns: const {
                        &[
                            int8::<$bits, $group, 6> as BlockFn,
                            int8::<$bits, $group, 5>,
                            vnni::int8::<$bits, 4>,
                            vnni::int8::<$bits, 3>,
                            vnni::int8::<$bits, 2>,
                            vnni::int8::<$bits, 1>,
                        ]
                    },
                }
            };
        }
        of!(2 3 4 5 6 8)
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn int8<const BITS: usize, const GROUP: usize, const M: usize>(block: &Block<'_>) {
        // SAFETY: as the caller promises.
        unsafe { super::super::int8_overlapped::int8::<Avx512<true>, BITS, GROUP, M>(block) }
    }
}

/// AMX: int8 in blocks of 16 rows, with the functions of `vnni` for smaller blocks; bf16 in blocks of any size.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx {
    use super::*;

    pub(super) fn fns(bits: usize) -> BlockFns {
        macro_rules! rows {
            ($bits:literal) => {
                BlockFns {
                    sizes: &[16, 8, 4, 2, 1],
                    fns: const {
                        &[
                            int8::<$bits> as BlockFn,
                            vnni::int8::<$bits, 8>,
                            vnni::int8::<$bits, 4>,
                            vnni::int8::<$bits, 2>,
                            vnni::int8::<$bits, 1>,
                        ]
                    },
                }
            };
        }
        match bits {
            2 => rows!(2),
            3 => rows!(3),
            4 => rows!(4),
            5 => rows!(5),
            6 => rows!(6),
            _ => rows!(8),
        }
    }

    pub(super) fn bf16_fns() -> BlockFns {
        BlockFns {
            sizes: &[16, 8, 4, 2, 1],
            fns: const { &[bf16::<16> as BlockFn, bf16::<8>, bf16::<4>, bf16::<2>, bf16::<1>] },
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn bf16<const M: usize>(block: &Block<'_>) {
        use crate::amx::bf16::hardware::Amx;
        // SAFETY: as the caller promises.
        unsafe { super::super::amx_bf16::bf16::<Avx512<true>, Amx, M>(block) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn int8<const BITS: usize>(block: &Block<'_>) {
        // SAFETY: as the caller promises.
        unsafe { super::super::amx::int8::<Avx512<true>, crate::amx::hardware::Amx, BITS>(block) }
    }
}

/// The portable functions, with blocks of 16 rows on tiles in plain loops, to test the tile kernel on any machine.
#[cfg(test)]
pub(in super::super) fn soft_tile_fns(bits: usize) -> BlockFns {
    use super::amx::int8;
    use crate::amx::SoftTiles;
    macro_rules! rows {
        ($bits:literal) => {
            BlockFns {
                sizes: &[16, 1],
                fns: const { &[int8::<Portable, SoftTiles, $bits> as BlockFn, portable::int8::<$bits, 1>] },
            }
        };
    }
    match bits {
        2 => rows!(2),
        3 => rows!(3),
        4 => rows!(4),
        5 => rows!(5),
        6 => rows!(6),
        _ => rows!(8),
    }
}

/// The functions for bf16 on tiles in plain loops, to test them on any machine.
#[cfg(test)]
pub(in super::super) fn soft_bf16_tile_fns() -> BlockFns {
    use super::amx_bf16::bf16;
    use crate::amx::bf16::SoftTiles;
    BlockFns {
        sizes: &[16, 8, 4, 2, 1],
        fns: const {
            &[
                bf16::<Portable, SoftTiles, 16> as BlockFn,
                bf16::<Portable, SoftTiles, 8>,
                bf16::<Portable, SoftTiles, 4>,
                bf16::<Portable, SoftTiles, 2>,
                bf16::<Portable, SoftTiles, 1>,
            ]
        },
    }
}
