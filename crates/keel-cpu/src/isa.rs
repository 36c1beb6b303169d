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
    /// AVX-512 with VNNI: u8 x i8 dot products. Some processors of this level also have bf16 dot products, see
    /// [`Isa::has_bf16_dots`].
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

    /// Whether kernels of this level multiply bf16 with an instruction of this machine: of AVX512-BF16, or on AMX
    /// tiles. Cascade Lake, Ice Lake and Tiger Lake have VNNI without it.
    pub fn has_bf16_dots(self) -> bool {
        let on_tiles = || self == Isa::Amx && crate::amx::bf16::usable();
        self >= Isa::Avx512Vnni && (has_avx512_bf16() || on_tiles())
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
            Isa::Avx512Vnni => "AVX-512 VNNI",
            Isa::Amx => "AMX",
        })
    }
}

/// The instructions that decide the level.
#[derive(Clone, Copy, Debug, Default)]
struct Features {
    /// AVX2, FMA and F16C.
    avx2: bool,
    /// AVX-512 F, BW, DQ and VL.
    avx512: bool,
    /// AVX512-VNNI.
    vnni: bool,
    /// AMX int8, granted by the system and self-tested.
    amx: bool,
}

impl Features {
    /// The highest level whose instructions, and those of all levels before it, are there.
    fn level(self) -> Isa {
        let levels = [
            (self.avx2, Isa::Avx2),
            (self.avx512, Isa::Avx512),
            (self.vnni, Isa::Avx512Vnni),
            (self.amx, Isa::Amx),
        ];
        let reached = levels.into_iter().take_while(|(is_there, _)| *is_there).last();
        reached.map_or(Isa::Portable, |(_, level)| level)
    }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Isa {
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    let vnni = is_x86_feature_detected!("avx512vnni");
    // The system is asked for tiles only if the level can be reached.
    let amx = avx2 && avx512 && vnni && crate::amx::usable();
    Features { avx2, avx512, vnni, amx }.level()
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Isa {
    Features::default().level()
}

/// Whether the processor has the dot products of AVX512-BF16.
pub(crate) fn has_avx512_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    false
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

    /// Cascade Lake and Ice Lake have VNNI without AVX512-BF16.
    #[test]
    fn vnni_alone_reaches_its_level_and_no_level_is_skipped() {
        let vnni = Features { avx2: true, avx512: true, vnni: true, amx: false };
        assert_eq!(vnni.level(), Isa::Avx512Vnni);
        assert_eq!(Features { amx: true, ..vnni }.level(), Isa::Amx);
        assert_eq!(Features { vnni: false, amx: true, ..vnni }.level(), Isa::Avx512);
        assert_eq!(Features { avx512: false, ..vnni }.level(), Isa::Avx2);
        assert_eq!(Features { avx2: false, ..vnni }.level(), Isa::Portable);
    }
}
