//! AMX bf16 tiles: up to 16 rows of activations against two tiles of weights.
//!
//! The instruction sums a row's even and odd inputs separately, adds both sums to the result, and treats subnormal
//! numbers as zeros. The AVX-512 dot product rounds in another order. A row must have the same bits whatever other rows
//! there are, so tiles are used for every number of rows or for none. The self-test requires the results of loops in
//! this order, and that a row's bits do not depend on the number of rows.

use super::TILE;

/// Inputs that one tile instruction sums.
pub(crate) const STEP: usize = 32;

/// Sums of even and of odd steps, for two tiles of weights: `[parity][tile][row][column]`.
pub(crate) type Sums = [[[f32; TILE * TILE]; 2]; 2];

/// Multiplies bf16 tiles.
///
/// x is rows of `steps * 32` bf16, `stride` bytes apart; a tile of weights is `[steps * 16][16 columns][2]` bf16. A
/// call overwrites the sums of its rows with its own sums.
#[allow(
    clippy::missing_safety_doc,
    reason = "the trait's documentation states sizes; hardware must be usable"
)]
pub(crate) trait Bf16Tiles {
    /// Configures the tile registers for `rows` rows of x, 1 to 16, until `release`.
    unsafe fn configure(rows: usize);
    /// Computes both products, for as many rows as were configured.
    unsafe fn multiply(
        x: *const u8,
        stride: usize,
        rows: usize,
        steps: usize,
        tiles: [*const u8; 2],
        sums: &mut Sums,
    );
    /// Releases the tile registers, so that the system need not save them.
    unsafe fn release();
}

/// The same in plain loops, in the order of the hardware.
pub(crate) struct SoftTiles;

impl Bf16Tiles for SoftTiles {
    unsafe fn configure(_: usize) {}
    unsafe fn multiply(
        x: *const u8,
        stride: usize,
        rows: usize,
        steps: usize,
        tiles: [*const u8; 2],
        sums: &mut Sums,
    ) {
        // SAFETY: within the sizes that the caller vouches for; bf16 lie at multiples of two bytes.
        let bf16 = |p: *const u8, i: usize| unsafe { widen(p.cast::<u16>().add(i).read_unaligned()) };
        for (t, tile) in tiles.into_iter().enumerate() {
            for (row, column) in (0..rows).flat_map(|row| (0..TILE).map(move |column| (row, column))) {
                let x = x.wrapping_add(row * stride);
                let mut by_parity = [0.0f32; 2];
                for step in 0..steps {
                    let mut dots = [0.0f32; 2];
                    for (i, k) in (0..STEP).zip(step * STEP..) {
                        let weight = bf16(tile, (k / 2 * TILE + column) * 2 + k % 2);
                        dots[i % 2] = flush(bf16(x, k).mul_add(weight, dots[i % 2]));
                    }
                    by_parity[step % 2] = flush(by_parity[step % 2] + flush(dots[0] + dots[1]));
                }
                for (sums, sum) in sums.iter_mut().zip(by_parity) {
                    sums[t][row * TILE + column] = sum;
                }
            }
        }
    }
    unsafe fn release() {}
}

fn widen(bits: u16) -> f32 {
    flush(f32::from_bits(u32::from(bits) << 16))
}

fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

/// Whether AMX bf16 can be used: AMX can, the CPU has these instructions, and they pass a self-test. Determined once.
pub(crate) fn usable() -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    {
        static USABLE: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        *USABLE.get_or_init(|| {
            // SAFETY: the instructions run only if the CPU and the system allow them.
            super::usable() && super::hardware::has_bf16() && unsafe { gives_the_same::<hardware::Amx>() }
        })
    }
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    false
}

/// Most steps of the self-test.
const STEPS: usize = 5;

/// Operands of the self-test.
struct Probe {
    /// Rows with padding, so that the distance between rows is more than a row.
    x: [[u16; STEPS * STEP + 32]; TILE],
    tiles: [[u16; STEPS * STEP * TILE]; 2],
}

impl Probe {
    /// Values of both signs between 1/64 and 64, so that the order of additions shows.
    fn new() -> Probe {
        let value = |i: usize| {
            let hash = (i as u32).wrapping_mul(2_654_435_761).rotate_left(13).wrapping_mul(0x85eb_ca6b);
            let exponent = 121 + hash % 13;
            ((hash >> 31) << 15 | exponent << 7 | (hash >> 8 & 0x7f)) as u16
        };
        Probe {
            x: std::array::from_fn(|row| std::array::from_fn(|k| value(row * 1000 + k))),
            tiles: std::array::from_fn(|t| std::array::from_fn(|i| value(50_000 + t * 10_000 + i))),
        }
    }

    /// # Safety
    /// The CPU must have the instructions of `T`.
    unsafe fn run<T: Bf16Tiles>(&self, rows: usize, steps: usize) -> Sums {
        let mut sums = [[[f32::NAN; TILE * TILE]; 2]; 2];
        let tiles = self.tiles.each_ref().map(|tile| tile.as_ptr().cast());
        // SAFETY: the arrays have the sizes of the largest shape; the caller vouches for `T`.
        unsafe {
            T::configure(rows);
            T::multiply(self.x.as_ptr().cast(), size_of_val(&self.x[0]), rows, steps, tiles, &mut sums);
            T::release();
        }
        sums
    }
}

/// Whether `T` gives the results of plain loops, bit for bit, for every number of rows in use.
///
/// # Safety
/// The CPU must have the instructions of `T`.
unsafe fn gives_the_same<T: Bf16Tiles>() -> bool {
    let probe = Probe::new();
    [1, 2, 4, 8, 16].into_iter().flat_map(|rows| [1, 2, STEPS].map(|steps| (rows, steps))).all(
        |(rows, steps)| {
            // SAFETY: as the caller promises; the loops need nothing.
            let (soft, hard) = unsafe { (probe.run::<SoftTiles>(rows, steps), probe.run::<T>(rows, steps)) };
            let bits = |sums: &Sums| {
                let written = sums.iter().flatten().flat_map(|tile| &tile[..rows * TILE]);
                written.map(|sum| sum.to_bits()).collect::<Vec<_>>()
            };
            bits(&soft) == bits(&hard)
        },
    )
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod hardware {
    use super::super::hardware::load_configuration;
    use super::{Bf16Tiles, STEP, Sums, TILE};
    use std::arch::asm;

    /// The tile registers of this thread.
    pub(crate) struct Amx;

    impl Bf16Tiles for Amx {
        /// Registers 0 and 1 hold the sums of even steps, 2 and 3 those of odd ones, 4 activations, 5 and 6 weights.
        unsafe fn configure(rows: usize) {
            let (x, all) = (rows as u8, TILE as u8);
            // SAFETY: a valid configuration; the caller vouches that AMX is usable.
            unsafe { load_configuration(&[64; 7], &[x, x, x, x, x, all, all]) }
        }

        unsafe fn multiply(
            x: *const u8,
            stride: usize,
            _rows: usize,
            steps: usize,
            tiles: [*const u8; 2],
            sums: &mut Sums,
        ) {
            /// Adds the products of one step to a pair of sums.
            macro_rules! step {
                ($left:literal, $right:literal, $step:expr) => {
                    asm!(
                        "tileloadd tmm4, [{x} + {x_stride}*1]",
                        "tileloadd tmm5, [{left} + {stride}*1]",
                        "tileloadd tmm6, [{right} + {stride}*1]",
                        concat!("tdpbf16ps ", $left, ", tmm4, tmm5"),
                        concat!("tdpbf16ps ", $right, ", tmm4, tmm6"),
                        x = in(reg) x.add($step * STEP * 2),
                        x_stride = in(reg) stride,
                        left = in(reg) tiles[0].add($step * STEP * TILE * 2),
                        right = in(reg) tiles[1].add($step * STEP * TILE * 2),
                        stride = in(reg) 64usize,
                        options(nostack, readonly),
                    )
                };
            }
            // SAFETY: the tiles lie within the sizes that the caller vouches for. The compiler keeps nothing in tile
            // registers, so their contents last from one asm block to the next.
            unsafe {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    options(nostack, nomem)
                );
                for pair in 0..steps / 2 {
                    step!("tmm0", "tmm1", 2 * pair);
                    step!("tmm2", "tmm3", 2 * pair + 1);
                }
                if steps % 2 == 1 {
                    step!("tmm0", "tmm1", steps - 1);
                }
                asm!(
                    "tilestored [{sums} + {stride}*1], tmm0",
                    "tilestored [{sums} + {stride}*1 + 1024], tmm1",
                    "tilestored [{sums} + {stride}*1 + 2048], tmm2",
                    "tilestored [{sums} + {stride}*1 + 3072], tmm3",
                    sums = in(reg) sums,
                    stride = in(reg) TILE * size_of::<f32>(),
                    options(nostack),
                );
            }
        }

        unsafe fn release() {
            // SAFETY: the caller vouches that AMX is usable.
            unsafe { asm!("tilerelease", options(nostack, nomem)) }
        }
    }

    const _: () = assert!(size_of::<Sums>() == 4 * 1024);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tiles that add a step's products in another order, as another instruction might.
    struct OtherOrder;

    impl Bf16Tiles for OtherOrder {
        unsafe fn configure(_: usize) {}
        unsafe fn multiply(
            x: *const u8,
            stride: usize,
            rows: usize,
            steps: usize,
            tiles: [*const u8; 2],
            sums: &mut Sums,
        ) {
            // SAFETY: as the caller promises.
            let bf16 = |p: *const u8, i: usize| unsafe { widen(p.cast::<u16>().add(i).read_unaligned()) };
            for (t, row, column) in (0..2 * rows * TILE).map(|i| (i % 2, i / 2 / TILE, i / 2 % TILE)) {
                let at = |k: usize| bf16(tiles[t], (k / 2 * TILE + column) * 2 + k % 2);
                let row_x = x.wrapping_add(row * stride);
                let dot = |step: usize| {
                    (step * STEP..(step + 1) * STEP).fold(0.0f32, |sum, k| bf16(row_x, k).mul_add(at(k), sum))
                };
                for (parity, sums) in sums.iter_mut().enumerate() {
                    sums[t][row * TILE + column] = (parity..steps).step_by(2).map(dot).sum();
                }
            }
        }
        unsafe fn release() {}
    }

    #[test]
    fn the_self_test_sees_the_order_of_additions() {
        // SAFETY: neither uses any instruction that might be missing.
        unsafe {
            assert!(gives_the_same::<SoftTiles>());
            assert!(!gives_the_same::<OtherOrder>());
        }
    }

    #[test]
    fn soft_tiles_give_the_sums_of_products() {
        let probe = Probe::new();
        // SAFETY: plain loops.
        let sums = unsafe { probe.run::<SoftTiles>(3, STEPS) };
        for (t, row, column) in [(0, 0, 0), (0, 2, 15), (1, 1, 7)] {
            let products = |k: usize| {
                let weight = probe.tiles[t][(k / 2 * TILE + column) * 2 + k % 2];
                f64::from(widen(probe.x[row][k])) * f64::from(widen(weight))
            };
            let (want, size) =
                (0..STEPS * STEP).map(products).fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
            let at = row * TILE + column;
            let got = f64::from(sums[0][t][at]) + f64::from(sums[1][t][at]);
            assert!((got - want).abs() <= 1e-6 * size, "{got} and {want}");
        }
        assert!(sums[0][0][3 * TILE].is_nan(), "rows that do not exist are left alone");
    }

    /// Other machines do not run it: their bf16 goes through AVX-512.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[test]
    fn it_is_usable_where_the_machine_has_it() {
        use super::super::hardware::{granted, has_bf16, present};
        assert_eq!(usable(), present() && granted() && has_bf16());
    }
}
