//! AMX int8 tiles: products of 16 rows of activations with two tiles of weights, one group of inputs at a time.
//!
//! The instructions are inline assembly. They are used only if the CPU has them, the system has granted the tile
//! registers to this process, and a self-test gives the results of plain loops; see [`usable`].

pub(crate) mod bf16;

/// Rows of activations and columns of a weight tile in one product.
pub(crate) const TILE: usize = 16;

/// Most inputs that one tile instruction sums.
pub(crate) const PART: usize = 64;

/// Multiplies tiles.
///
/// There are `parts` parts of `part` inputs, 32 or 64. x is `[parts][16][part]` i8; each panel is
/// `[parts][part / 4][16][4]` u8; dots are `[16][16]` i32, row by column, and exact.
#[allow(
    clippy::missing_safety_doc,
    reason = "the trait's documentation states sizes; hardware must be usable"
)]
pub(crate) trait Tiles {
    /// Configures the tile registers for parts of `part` inputs, until `release`.
    unsafe fn configure(part: usize);
    /// Computes both products.
    unsafe fn multiply(x: *const u8, part: usize, parts: usize, panels: [*const u8; 2], dots: [*mut i32; 2]);
    /// Releases the tile registers, so that the system need not save them.
    unsafe fn release();
}

/// The same in plain loops: the reference for the hardware, and its replacement in tests on other machines.
pub(crate) struct SoftTiles;

impl Tiles for SoftTiles {
    unsafe fn configure(_: usize) {}
    unsafe fn multiply(x: *const u8, part: usize, parts: usize, panels: [*const u8; 2], dots: [*mut i32; 2]) {
        for (panel, dots) in panels.into_iter().zip(dots) {
            for (row, column) in (0..TILE).flat_map(|row| (0..TILE).map(move |column| (row, column))) {
                let product = |k: usize| {
                    let at = (k / part * TILE + row) * part + k % part;
                    // SAFETY: within the sizes that the caller vouches for.
                    let (x, w) = unsafe { (*x.add(at) as i8, *panel.add(k / 4 * 64 + column * 4 + k % 4)) };
                    i32::from(x) * i32::from(w)
                };
                // SAFETY: as above.
                unsafe { *dots.add(row * TILE + column) = (0..part * parts).map(product).sum() }
            }
        }
    }
    unsafe fn release() {}
}

/// Whether AMX int8 can be used. Asks the system to grant the tile registers to the whole process.
pub(crate) fn usable() -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    // SAFETY: the instructions run only if the CPU and the system allow them.
    return hardware::present() && hardware::granted() && unsafe { gives_the_same::<hardware::Amx>() };
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    false
}

/// Whether `T` gives the results of plain loops, for all shapes in use.
///
/// # Safety
/// The CPU must have the instructions of `T`.
unsafe fn gives_the_same<T: Tiles>() -> bool {
    let bytes: [u8; 2 * TILE * PART] = std::array::from_fn(|i| ((i * 2_654_435_761) >> 11) as u8);
    let mut reversed = bytes;
    reversed.reverse();
    [(32, 1), (64, 1), (64, 2)].into_iter().all(|(part, parts)| {
        let mut results = [[[0i32; TILE * TILE]; 2]; 2];
        let panels = [bytes.as_ptr(), reversed.as_ptr()];
        let [soft, hard] = &mut results;
        // SAFETY: the arrays have the sizes of the largest shape; the caller vouches for `T`.
        unsafe {
            let dots = |pair: &mut [[i32; TILE * TILE]; 2]| pair.each_mut().map(|dots| dots.as_mut_ptr());
            SoftTiles::multiply(reversed.as_ptr(), part, parts, panels, dots(soft));
            T::configure(part);
            T::multiply(reversed.as_ptr(), part, parts, panels, dots(hard));
            T::release();
        }
        soft == hard
    })
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod hardware {
    use super::{TILE, Tiles};
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count};

    /// The tile registers of this thread.
    pub(crate) struct Amx;

    /// The operand of LDTILECFG.
    #[repr(C, align(64))]
    struct Configuration {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }
    const _: () = assert!(size_of::<Configuration>() == 64);

    impl Tiles for Amx {
        /// Registers 0 and 1 hold dots, 2 activations, 3 and 4 panels.
        unsafe fn configure(part: usize) {
            let quads = (part / 4) as u8;
            // SAFETY: a valid configuration; the caller vouches that AMX is usable.
            unsafe { load_configuration(&[64, 64, part as u16, 64, 64], &[16, 16, 16, quads, quads]) }
        }

        unsafe fn multiply(
            x: *const u8,
            part: usize,
            parts: usize,
            panels: [*const u8; 2],
            dots: [*mut i32; 2],
        ) {
            // SAFETY: the tiles lie within the sizes that the caller vouches for. The compiler keeps nothing in tile
            // registers, so their contents last from one asm block to the next.
            unsafe {
                asm!("tilezero tmm0", "tilezero tmm1", options(nostack, nomem));
                for p in 0..parts {
                    asm!(
                        "tileloadd tmm2, [{x} + {x_stride}*1]",
                        "tileloadd tmm3, [{left} + {stride}*1]",
                        "tileloadd tmm4, [{right} + {stride}*1]",
                        "tdpbsud tmm0, tmm2, tmm3",
                        "tdpbsud tmm1, tmm2, tmm4",
                        x = in(reg) x.add(p * TILE * part),
                        x_stride = in(reg) part,
                        left = in(reg) panels[0].add(p * TILE * part),
                        right = in(reg) panels[1].add(p * TILE * part),
                        stride = in(reg) 64usize,
                        options(nostack, readonly),
                    );
                }
                asm!(
                    "tilestored [{left} + {stride}*1], tmm0",
                    "tilestored [{right} + {stride}*1], tmm1",
                    left = in(reg) dots[0],
                    right = in(reg) dots[1],
                    stride = in(reg) TILE * size_of::<i32>(),
                    options(nostack),
                );
            }
        }

        unsafe fn release() {
            // SAFETY: the caller vouches that AMX is usable.
            unsafe { asm!("tilerelease", options(nostack, nomem)) }
        }
    }

    /// Sets the row bytes and the numbers of rows of the first tile registers; the others are left unused.
    ///
    /// # Safety
    /// AMX must be usable, and the sizes at most 64 and 16.
    pub(super) unsafe fn load_configuration(used_row_bytes: &[u16], used_rows: &[u8]) {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        row_bytes[..used_row_bytes.len()].copy_from_slice(used_row_bytes);
        rows[..used_rows.len()].copy_from_slice(used_rows);
        let configuration = Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows };
        // SAFETY: as the caller promises.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, readonly)) }
    }

    /// Operations of a round of [`multiply_rounds`].
    pub(crate) const ROUND_OPS: f64 = 6.0 * 2.0 * (16 * 16 * 64) as f64;

    /// `rounds` rounds of six independent products of whole tiles, to measure the peak.
    ///
    /// # Safety
    /// AMX must be usable.
    pub(crate) unsafe fn multiply_rounds(rounds: u64) {
        // SAFETY: as the caller promises; the tiles are zeros.
        unsafe {
            load_configuration(&[64; 8], &[16; 8]);
            asm!(
                "2:",
                "tdpbsud tmm0, tmm6, tmm7",
                "tdpbsud tmm1, tmm6, tmm7",
                "tdpbsud tmm2, tmm6, tmm7",
                "tdpbsud tmm3, tmm6, tmm7",
                "tdpbsud tmm4, tmm6, tmm7",
                "tdpbsud tmm5, tmm6, tmm7",
                "dec {rounds}",
                "jnz 2b",
                rounds = inout(reg) rounds => _,
                options(nostack, nomem),
            );
            Amx::release();
        }
    }

    /// Operations of a round of [`multiply_bf16_rounds`].
    pub(crate) const BF16_ROUND_OPS: f64 = 6.0 * 2.0 * (16 * 16 * 32) as f64;

    /// Like [`multiply_rounds`], with bf16 tiles.
    ///
    /// # Safety
    /// AMX bf16 must be usable.
    pub(crate) unsafe fn multiply_bf16_rounds(rounds: u64) {
        // SAFETY: as the caller promises; the tiles are zeros.
        unsafe {
            load_configuration(&[64; 8], &[16; 8]);
            asm!(
                "2:",
                "tdpbf16ps tmm0, tmm6, tmm7",
                "tdpbf16ps tmm1, tmm6, tmm7",
                "tdpbf16ps tmm2, tmm6, tmm7",
                "tdpbf16ps tmm3, tmm6, tmm7",
                "tdpbf16ps tmm4, tmm6, tmm7",
                "tdpbf16ps tmm5, tmm6, tmm7",
                "dec {rounds}",
                "jnz 2b",
                rounds = inout(reg) rounds => _,
                options(nostack, nomem),
            );
            Amx::release();
        }
    }

    /// Whether the CPU has bf16 tiles, too. Call it only if [`present`] is true.
    pub(super) fn has_bf16() -> bool {
        const AMX_BF16: u32 = 1 << 22;
        __cpuid_count(7, 0).edx & AMX_BF16 != 0
    }

    /// Whether the CPU has int8 tiles and the system saves their registers.
    pub(super) fn present() -> bool {
        const OSXSAVE: u32 = 1 << 27;
        const AMX_TILE: u32 = 1 << 24;
        const AMX_INT8: u32 = 1 << 25;
        const TILE_STATE: u64 = 0b11 << 17;
        if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 {
            return false;
        }
        let features = __cpuid_count(7, 0).edx;
        if features & (AMX_TILE | AMX_INT8) != AMX_TILE | AMX_INT8 {
            return false;
        }
        let (low, high): (u32, u32);
        // SAFETY: the system has enabled XGETBV, as OSXSAVE says.
        unsafe {
            asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nostack, nomem));
        }
        (u64::from(high) << 32 | u64::from(low)) & TILE_STATE == TILE_STATE
    }

    /// Asks the system to let this process use the tile registers.
    pub(super) fn granted() -> bool {
        const SYS_ARCH_PRCTL: isize = 158;
        const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
        const XFEATURE_TILE_DATA: usize = 18;
        let result: isize;
        // SAFETY: this call changes nothing but a permission of the process.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") SYS_ARCH_PRCTL => result,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") XFEATURE_TILE_DATA,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack),
            );
        }
        result == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tiles with one wrong result of 512.
    struct Broken;

    impl Tiles for Broken {
        unsafe fn configure(_: usize) {}
        unsafe fn multiply(
            x: *const u8,
            part: usize,
            parts: usize,
            panels: [*const u8; 2],
            dots: [*mut i32; 2],
        ) {
            // SAFETY: as the caller promises.
            unsafe {
                SoftTiles::multiply(x, part, parts, panels, dots);
                *dots[1].add(TILE * TILE - 1) += 1;
            }
        }
        unsafe fn release() {}
    }

    #[test]
    fn the_self_test_refuses_tiles_that_are_wrong_in_one_place() {
        // SAFETY: neither uses any instruction that might be missing.
        unsafe {
            assert!(gives_the_same::<SoftTiles>());
            assert!(!gives_the_same::<Broken>());
        }
    }

    #[test]
    fn the_level_follows_what_is_usable() {
        assert_eq!(usable(), crate::isa::Isa::best() == crate::isa::Isa::Amx);
    }

    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[test]
    fn it_is_usable_where_the_machine_has_it() {
        assert_eq!(usable(), hardware::present() && hardware::granted());
    }
}
