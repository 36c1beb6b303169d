//! Random numbers.

/// Element `i` of a seed's random bits: SplitMix64 of seed and position.
pub fn random_bits(seed: u64, i: u64) -> u64 {
    let mut z = seed.wrapping_add(i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Uniform in `[0, 1)`, from the upper 24 bits.
pub fn random_uniform(seed: u64, i: u64) -> f64 {
    (random_bits(seed, i) >> 40) as f64 / f64::from(1 << 24)
}

/// Mean 0 and deviation 1, from the uniform numbers `2 i` and `2 i + 1`.
pub fn random_normal(seed: u64, i: u64) -> f64 {
    let (u, v) = (random_uniform(seed, 2 * i), random_uniform(seed, 2 * i + 1));
    (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}
