//! Seeded numbers: the same on every machine and in every run.

use keel_array::random::SplitMix64;

/// A small generator.
#[derive(Clone, Debug)]
pub struct Random(SplitMix64);

impl Random {
    /// A generator. `seed` determines its whole sequence.
    pub fn new(seed: u64) -> Random {
        Random(SplitMix64(seed))
    }

    /// The generator of a numbered case. Generators of neighbouring cases have unrelated sequences.
    pub fn of_case(case: u64) -> Random {
        Random::new(case.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x6b65_656c)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0.bits()
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

/// How many mutations a test of a parser runs: `default`, or the value of `KEEL_FUZZ_MUTATIONS`.
pub fn mutations(default: u64) -> u64 {
    match std::env::var("KEEL_FUZZ_MUTATIONS") {
        Ok(count) => count.parse().expect("KEEL_FUZZ_MUTATIONS is a number"),
        Err(_) => default,
    }
}

/// Damages a file in one place: changes, removes, inserts or repeats bytes, or cuts off the rest. `words` mean
/// something to the parser.
pub fn mutate<W: AsRef<[u8]>>(file: &mut Vec<u8>, words: &[W], random: &mut Random) {
    let at = random.below(file.len() + 1);
    let end = (at + random.below(24)).min(file.len());
    let word = words[random.below(words.len())].as_ref();
    match random.below(7) {
        0 if at < file.len() => file[at] = random.below(256) as u8,
        1 if at < file.len() => file[at] ^= 1 << random.below(8),
        2 => drop(file.drain(at..end)),
        3 => drop(file.splice(at..end, word.iter().copied())),
        4 => drop(file.splice(at..at, word.iter().copied())),
        5 => {
            // A repeated stretch makes duplicates and nesting.
            let stretch = file[at..end].to_vec();
            drop(file.splice(at..at, stretch));
        }
        _ => file.truncate(at),
    }
}
