//! The machine's peak rates: the floors that kernels are measured against.
//!
//! Arithmetic peaks are register-only loops of one instruction, with enough independent accumulators to hide its
//! latency. The read bandwidth is a streaming sum over a buffer larger than the caches. Both run on every worker of the
//! pool at once, for about the time given.

use std::time::{Duration, Instant};

use crate::backend::memory::HostMemory;
use crate::isa::Isa;
use crate::pool::ThreadPool;

/// Memory read bandwidth of the whole pool in bytes per second, over `buffer`. The buffer should be touched, and
/// several times as large as the last-level cache. Takes the best of several passes: other programs only make a pass
/// slower.
pub fn read_bandwidth(pool: &ThreadPool, buffer: &[u64], budget: Duration) -> f64 {
    const PIECE: usize = 1 << 15;
    let started = Instant::now();
    let mut best = 0.0f64;
    while best == 0.0 || started.elapsed() < budget {
        let pass = Instant::now();
        pool.run(|worker| {
            for piece in worker.claim(buffer.len(), PIECE) {
                std::hint::black_box(sum(&buffer[piece]));
            }
        });
        best = best.max(size_of_val(buffer) as f64 / pass.elapsed().as_secs_f64());
    }
    best
}

/// Like [`read_bandwidth`], of `bytes` of memory as weights have it: in large pages where the system has them. Small
/// pages are read more slowly.
///
/// # Panics
/// If the system has no such memory.
pub fn weights_bandwidth(pool: &ThreadPool, bytes: usize, budget: Duration) -> f64 {
    let memory = HostMemory::zeroed(bytes).unwrap_or_else(|e| panic!("{bytes} bytes to read: {e}"));
    // SAFETY: the memory is zeroed, aligned for words, and used by nothing else.
    let words =
        unsafe { std::slice::from_raw_parts_mut(memory.start().cast::<u64>(), bytes / size_of::<u64>()) };
    words.fill(1);
    read_bandwidth(pool, words, budget)
}

/// Wrapping sum in 32 lanes (eight chains of 256 bits), which any vector width streams faster than memory delivers.
fn sum(values: &[u64]) -> u64 {
    let mut lanes = [0u64; 32];
    for chunk in values.chunks_exact(32) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = lane.wrapping_add(*value);
        }
    }
    lanes.into_iter().fold(0, u64::wrapping_add)
}

/// Peak rates of the multiply-accumulate instructions of `isa`, all workers together, in operations per second. A
/// multiplication and an addition count as two operations. `None` where the level has no such instruction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    /// f32 fused multiply-add.
    pub f32_fma: Option<f64>,
    /// u8 x i8 dot products into i32, on AMX tiles where the level has them.
    pub int8_dot: Option<f64>,
    /// bf16 dot products into f32, on AMX tiles where they are used.
    pub bf16_dot: Option<f64>,
}

/// Measures [`Peaks`] at `isa`, spending about `budget` on each.
///
/// # Panics
/// If this machine lacks `isa`.
pub fn peaks(pool: &ThreadPool, isa: Isa, budget: Duration) -> Peaks {
    assert!(isa <= Isa::best(), "{isa} cannot be measured here: this machine has {}", Isa::best());
    let rate = |ops_per_round: f64, rounds: fn(u64)| Some(rate(pool, budget, ops_per_round, rounds));
    #[cfg(target_arch = "x86_64")]
    return Peaks {
        f32_fma: match isa {
            Isa::Portable => None,
            Isa::Avx2 => rate(12.0 * 8.0 * 2.0, x86::fma_256),
            _ => rate(24.0 * 16.0 * 2.0, x86::fma_512),
        },
        int8_dot: match isa {
            #[cfg(target_os = "linux")]
            Isa::Amx => rate(crate::amx::hardware::ROUND_OPS, x86::amx),
            Isa::Avx512Vnni => rate(24.0 * 64.0 * 2.0, x86::vnni_512),
            _ => None,
        },
        bf16_dot: match isa {
            #[cfg(target_os = "linux")]
            Isa::Amx if crate::amx::bf16::usable() => {
                rate(crate::amx::hardware::BF16_ROUND_OPS, x86::amx_bf16)
            }
            Isa::Avx512Vnni | Isa::Amx if crate::isa::has_avx512_bf16() => {
                rate(24.0 * 32.0 * 2.0, x86::bf16_512)
            }
            _ => None,
        },
    };
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (isa, rate);
        Peaks { f32_fma: None, int8_dot: None, bf16_dot: None }
    }
}

#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
fn rate(pool: &ThreadPool, budget: Duration, ops_per_round: f64, run: fn(u64)) -> f64 {
    const ROUNDS: u64 = 200_000;
    let started = Instant::now();
    let mut best = 0.0f64;
    while best == 0.0 || started.elapsed() < budget {
        let pass = Instant::now();
        pool.run(|_| run(ROUNDS));
        let ops = ops_per_round * ROUNDS as f64 * pool.workers() as f64;
        best = best.max(ops / pass.elapsed().as_secs_f64());
    }
    best
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;

    #[cfg(target_os = "linux")]
    pub(super) fn amx(rounds: u64) {
        // SAFETY: the caller has checked that the machine has this level, so AMX is usable.
        unsafe { crate::amx::hardware::multiply_rounds(rounds) }
    }

    #[cfg(target_os = "linux")]
    pub(super) fn amx_bf16(rounds: u64) {
        // SAFETY: the caller has checked that bf16 tiles are usable.
        unsafe { crate::amx::hardware::multiply_bf16_rounds(rounds) }
    }

    /// `rounds` rounds of one instruction on each of the listed accumulators.
    macro_rules! register_loop {
        ($name:ident, $op:tt, $a:tt, $b:tt, [$($acc:tt)*]) => {
            pub(super) fn $name(rounds: u64) {
                // SAFETY: the caller has checked that the CPU has the instruction. It uses registers only, and those
                // written are declared as clobbered.
                unsafe {
                    asm!(
                        concat!("vxorps ", $a, ", ", $a, ", ", $a),
                        concat!("vxorps ", $b, ", ", $b, ", ", $b),
                        $(concat!("vxorps ", $acc, ", ", $acc, ", ", $acc),)*
                        "2:",
                        $(concat!($op, " ", $acc, ", ", $a, ", ", $b),)*
                        "dec {rounds}",
                        "jnz 2b",
                        rounds = inout(reg) rounds => _,
                        $(out($acc) _,)*
                        out($a) _,
                        out($b) _,
                        options(nomem, nostack),
                    );
                }
            }
        };
    }
    register_loop!(fma_256, "vfmadd231ps", "ymm14", "ymm15",
        ["ymm0" "ymm1" "ymm2" "ymm3" "ymm4" "ymm5" "ymm6" "ymm7" "ymm8" "ymm9" "ymm10" "ymm11"]);
    macro_rules! register_loop_512 {
        ($name:ident, $op:tt) => {
            register_loop!($name, $op, "zmm30", "zmm31", [
                "zmm0" "zmm1" "zmm2" "zmm3" "zmm4" "zmm5" "zmm6" "zmm7" "zmm8" "zmm9" "zmm10" "zmm11"
                "zmm12" "zmm13" "zmm14" "zmm15" "zmm16" "zmm17" "zmm18" "zmm19" "zmm20" "zmm21" "zmm22" "zmm23"
            ]);
        };
    }
    register_loop_512!(fma_512, "vfmadd231ps");
    register_loop_512!(vnni_512, "vpdpbusd");
    register_loop_512!(bf16_512, "vdpbf16ps");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_exist_where_the_instructions_do() {
        let pool = ThreadPool::new(1);
        for isa in Isa::available() {
            let peaks = peaks(&pool, isa, Duration::ZERO);
            assert_eq!(peaks.int8_dot.is_some(), isa >= Isa::Avx512Vnni);
            assert_eq!(peaks.bf16_dot.is_some(), isa.has_bf16_dots());
            assert!(peaks.f32_fma.is_none_or(|rate| rate > 1e8), "{peaks:?}");
        }
        assert!(read_bandwidth(&pool, &[1; 4096], Duration::ZERO) > 1e6);
        assert!(weights_bandwidth(&pool, 4 << 20, Duration::ZERO) > 1e6);
    }
}
