//! The instructions that a kernel may use, detected when the program starts.

use std::fmt;
use std::sync::OnceLock;

/// An instruction-set level. Each includes those before it, so `isa >= Isa::Avx512` asks "at least".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, compiled for the build's baseline.
    Portable,
    /// AVX2, FMA and F16C: 256-bit vectors.
    Avx2,
    /// AVX-512 F, BW, DQ and VL: 512-bit vectors, masks.
    Avx512,
    /// AVX-512 with VNNI (u8 x i8 dot products) and BF16 (bf16 dot products).
    Avx512Vnni,
    /// [`Isa::Avx512Vnni`] with AMX int8 tiles, granted by the system and self-tested.
    Amx,
}

impl Isa {
    /// Every level, lowest first.
    pub const ALL: [Isa; 5] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Vnni, Isa::Amx];

    /// The best level of this machine. Detected once; a lookup afterwards.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(detect)
    }

    /// The levels that this machine can run, lowest first. Tests loop over them.
    pub fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| *isa <= Isa::best())
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "AVX2",
            Isa::Avx512 => "AVX-512",
            Isa::Avx512Vnni => "AVX-512 VNNI BF16",
            Isa::Amx => "AMX",
        })
    }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Isa {
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    let vnni = avx512 && is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512bf16");
    match (avx2, avx512, vnni) {
        (_, _, true) if crate::amx::usable() => Isa::Amx,
        (_, _, true) => Isa::Avx512Vnni,
        (_, true, _) => Isa::Avx512,
        (true, _, _) => Isa::Avx2,
        _ => Isa::Portable,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Isa {
    Isa::Portable
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_ordered_and_the_portable_one_is_always_there() {
        assert!(Isa::ALL.is_sorted());
        assert_eq!(Isa::available().next(), Some(Isa::Portable));
        assert_eq!(Isa::available().last(), Some(Isa::best()));
    }
}
