//! Blocks of GGUF's codings, taken apart: a code for each value, and the scales, with the names of `weight_blocks.cuh`.

use super::WeightFormat;
use super::coding::Coding;
use keel_array::BlockFormat;

/// Whole blocks, taken apart.
pub(super) struct BlockFields {
    pub codes: Vec<u8>,
    pub subs: Vec<u8>,
    pub supers: Vec<u8>,
}

/// Takes whole blocks apart.
pub(super) fn taken_apart(format: BlockFormat, blocks: &[u8]) -> BlockFields {
    let Some(coding) = Coding::of(WeightFormat::Blocks(format)) else { unreachable!("blocks have codes") };
    let count = blocks.len() / format.bytes();
    let subs_each = format.values() / coding.group * coding.sub_bytes;
    let (mut codes, mut subs) = (vec![0; count * format.values()], vec![0; count * subs_each]);
    let mut supers = vec![0; count * coding.super_bytes];
    for (i, block) in blocks.chunks_exact(format.bytes()).enumerate() {
        let codes = &mut codes[i * format.values()..][..format.values()];
        let subs = &mut subs[i * subs_each..][..subs_each];
        let supers = &mut supers[i * coding.super_bytes..][..coding.super_bytes];
        if format.values() == 32 {
            short(format, block, codes, subs)
        } else {
            long(format, block, codes, subs, supers)
        }
    }
    BlockFields { codes, subs, supers }
}

/// A block of 32 values: the scale, perhaps the offset, perhaps fifth bits, then the codes.
fn short(format: BlockFormat, block: &[u8], codes: &mut [u8], subs: &mut [u8]) {
    let (scales, quants) = block.split_at(subs.len());
    subs.copy_from_slice(scales);
    if format == BlockFormat::Q8_0 {
        // Signed bytes, turned into unsigned ones.
        return codes.iter_mut().zip(quants).for_each(|(code, &q)| *code = q ^ 0x80);
    }
    let (fifth, quants) = quants.split_at(quants.len() - 16);
    for (i, code) in codes.iter_mut().enumerate() {
        let high = fifth.get(i / 8).map_or(0, |bits| bits >> (i % 8) & 1);
        *code = quants[i % 16] >> (i / 16 * 4) & 15 | high << 4;
    }
}

/// A superblock of 256 values.
fn long(format: BlockFormat, block: &[u8], codes: &mut [u8], subs: &mut [u8], supers: &mut [u8]) {
    let two_bits = |quants: &[u8], i: usize| quants[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    let four_bits = |quants: &[u8], i: usize| quants[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
    let one_bit = |bits: &[u8], i: usize| bits[i % 32] >> (i / 32) & 1;
    let mut each =
        |code: &dyn Fn(usize) -> u8| codes.iter_mut().enumerate().for_each(|(i, out)| *out = code(i));
    let mut scales =
        |scale: &dyn Fn(usize) -> u8| subs.iter_mut().enumerate().for_each(|(i, out)| *out = scale(i));
    match format {
        BlockFormat::Q2K => {
            each(&|i| two_bits(&block[16..80], i));
            scales(&|i| block[i]);
            supers.copy_from_slice(&block[80..84]);
        }
        BlockFormat::Q3K => {
            each(&|i| two_bits(&block[32..96], i) | one_bit(&block[..32], i) << 2);
            let packed = &block[96..108];
            scales(&|i| {
                let low = packed[i % 8] >> (i / 8 * 4) & 15;
                let upper = packed[8 + i % 4] >> (i / 4 * 2) & 3;
                (low | upper << 4).wrapping_sub(32)
            });
            supers.copy_from_slice(&block[108..110]);
        }
        BlockFormat::Q4K | BlockFormat::Q5K => {
            let quants = block.len() - 128;
            each(&|i| {
                let fifth = if format == BlockFormat::Q5K { one_bit(&block[16..48], i) } else { 0 };
                four_bits(&block[quants..], i) | fifth << 4
            });
            // Scale and offset of each 32 values, 6 bits each; see the decoder.
            let packed = &block[4..16];
            scales(&|place| match (place / 2, place % 2) {
                (i @ 0..4, 0) => packed[i] & 63,
                (i @ 0..4, _) => packed[i + 4] & 63,
                (i, 0) => packed[i + 4] & 15 | packed[i - 4] >> 6 << 4,
                (i, _) => packed[i + 4] >> 4 | packed[i] >> 6 << 4,
            });
            supers.copy_from_slice(&block[..4]);
        }
        BlockFormat::Q6K => {
            each(&|i| {
                let low = block[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4) & 15;
                low | two_bits(&block[128..192], i) << 4
            });
            scales(&|i| block[192 + i]);
            supers.copy_from_slice(&block[208..210]);
        }
        BlockFormat::IQ4XS => {
            each(&|i| block[8 + i / 32 * 16 + i % 16] >> (i % 32 / 16 * 4) & 15);
            let upper = u16::from_le_bytes([block[2], block[3]]);
            scales(&|i| {
                let low = block[4 + i / 2] >> (i % 2 * 4) & 15;
                (low | ((upper >> (i * 2) & 3) as u8) << 4).wrapping_sub(32)
            });
            supers.copy_from_slice(&block[..2]);
        }
        short => unreachable!("{short} has blocks of 32 values"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;
    use keel_testkit::random::Random;

    const NONLINEAR: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
    const FP4_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

    fn half(bytes: &[u8], i: usize) -> f32 {
        f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32()
    }

    /// The value that kernels compute from a code, as `weight_blocks.cuh` says.
    fn value(format: BlockFormat, code: u8, sub: &[u8], superscale: &[u8]) -> f32 {
        let signed = |table: &[i8; 16]| f32::from(table[usize::from(code)]);
        let level = f32::from(code);
        match format {
            BlockFormat::Q4_0 => half(sub, 0) * (level - 8.0),
            BlockFormat::Q5_0 => half(sub, 0) * (level - 16.0),
            BlockFormat::Q8_0 => half(sub, 0) * (level - 128.0),
            BlockFormat::Q4_1 | BlockFormat::Q5_1 => half(sub, 0) * level + half(sub, 1),
            BlockFormat::IQ4NL => half(sub, 0) * signed(&NONLINEAR),
            BlockFormat::MXFP4 => 2f32.powi(i32::from(sub[0]) - 128) * signed(&FP4_DOUBLED),
            BlockFormat::Q2K => {
                let (scale, min) = (f32::from(sub[0] & 15), f32::from(sub[0] >> 4));
                half(superscale, 0) * scale * level - half(superscale, 1) * min
            }
            BlockFormat::Q4K | BlockFormat::Q5K => {
                half(superscale, 0) * f32::from(sub[0]) * level - half(superscale, 1) * f32::from(sub[1])
            }
            BlockFormat::Q3K => half(superscale, 0) * f32::from(sub[0] as i8) * (level - 4.0),
            BlockFormat::Q6K => half(superscale, 0) * f32::from(sub[0] as i8) * (level - 32.0),
            BlockFormat::IQ4XS => half(superscale, 0) * f32::from(sub[0] as i8) * signed(&NONLINEAR),
        }
    }

    #[test]
    fn a_block_taken_apart_has_the_values_that_it_decodes_to() {
        let mut random = Random::new(7);
        for format in BlockFormat::ALL {
            let mut blocks: Vec<u8> = (0..5 * format.bytes()).map(|_| random.bits() as u8).collect();
            for block in blocks.chunks_exact_mut(format.bytes()) {
                for &at in format.scale_offsets() {
                    block[at..at + 2]
                        .copy_from_slice(&f16::from_f32(random.uniform(-1.0, 1.0)).to_le_bytes());
                }
            }
            let mut decoded = vec![0.0; 5 * format.values()];
            format.decode(&blocks, &mut decoded);
            let coding = Coding::of(WeightFormat::Blocks(format)).expect("blocks have codes");
            let BlockFields { codes, subs, supers } = taken_apart(format, &blocks);
            for (i, (&code, expected)) in codes.iter().zip(decoded).enumerate() {
                assert!(u32::from(code) >> coding.bits == 0, "{format}: {code}");
                let sub = &subs[i / coding.group * coding.sub_bytes..];
                let superscale = &supers[i / format.values() * coding.super_bytes..];
                assert_eq!(
                    value(format, code, sub, superscale).to_bits(),
                    expected.to_bits(),
                    "{format}, value {i}"
                );
            }
        }
    }
}
