//! Seeded numbers: the same on every machine and in every run.

/// A small generator (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator. `seed` determines its whole sequence.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    /// A number in `low..high`.
    pub fn uniform(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * ((self.bits() >> 40) as f32 / (1u64 << 24) as f32)
    }

    /// `len` numbers in `low..high`.
    pub fn uniforms(&mut self, len: usize, low: f32, high: f32) -> Vec<f32> {
        (0..len).map(|_| self.uniform(low, high)).collect()
    }
}

/// How many mutations a test of a parser runs: `default`, or what `KEEL_FUZZ_MUTATIONS` says.
pub fn mutations(default: u64) -> u64 {
    match std::env::var("KEEL_FUZZ_MUTATIONS") {
        Ok(count) => count.parse().expect("KEEL_FUZZ_MUTATIONS is a number"),
        Err(_) => default,
    }
}
