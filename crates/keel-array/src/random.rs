//! Random numbers that depend only on a seed, on every machine: the generator splitmix64.

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// 64 random bits that depend only on seed and counter: number `counter`, from 0, of [`SplitMix64`] from this seed.
#[inline]
pub fn random_bits(seed: u64, counter: u64) -> u64 {
    let z = seed.wrapping_add(counter.wrapping_add(1).wrapping_mul(STEP));
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// splitmix64: a full-period generator with one word of state, at first the seed.
#[derive(Clone, Debug)]
pub struct SplitMix64(pub u64);

impl SplitMix64 {
    /// The next 64 bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        let bits = random_bits(self.0, 0);
        self.0 = self.0.wrapping_add(STEP);
        bits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers from seed 1234567 in the published implementation.
    #[test]
    fn numbers_are_those_of_splitmix64() {
        let published: [u64; 3] =
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        let mut generator = SplitMix64(1_234_567);
        for (counter, bits) in (0..).zip(published) {
            assert_eq!((generator.bits(), random_bits(1_234_567, counter)), (bits, bits));
        }
    }
}
