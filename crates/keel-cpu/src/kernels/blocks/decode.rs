//! Decodes blocks to f32, in loops of fixed length that the compiler turns into vectors. Roundings have the order of
//! [`BlockFormat::decode`], so the bits are the same. The rarer codings use that function.

use half::f16;
use keel_array::BlockFormat;

/// Decodes whole blocks of a row.
#[inline(always)]
pub(super) fn row(format: BlockFormat, bytes: &[u8], out: &mut [f32]) {
    match format {
        BlockFormat::Q4_0 => blocks::<18, 32>(bytes, out, q4_0),
        BlockFormat::Q4_1 => blocks::<20, 32>(bytes, out, q4_1),
        BlockFormat::Q5_0 => blocks::<22, 32>(bytes, out, q5_0),
        BlockFormat::Q5_1 => blocks::<24, 32>(bytes, out, q5_1),
        BlockFormat::Q8_0 => blocks::<34, 32>(bytes, out, q8_0),
        BlockFormat::Q4K => blocks::<144, 256>(bytes, out, q4_k),
        BlockFormat::Q5K => blocks::<176, 256>(bytes, out, q5_k),
        BlockFormat::Q6K => blocks::<210, 256>(bytes, out, q6_k),
        other => other.decode(bytes, out),
    }
}

#[inline(always)]
fn blocks<const BYTES: usize, const VALUES: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; VALUES]),
) {
    let (bytes, out) = (bytes.as_chunks().0, out.as_chunks_mut().0);
    for (bytes, out) in bytes.iter().zip(out) {
        decode(bytes, out);
    }
}

#[inline(always)]
fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The 32 nibbles of 16 bytes: low halves, then high halves.
#[inline(always)]
fn nibbles(quants: &[u8]) -> [u8; 32] {
    let mut q = [0; 32];
    for i in 0..16 {
        q[i] = quants[i] & 15;
        q[i + 16] = quants[i] >> 4;
    }
    q
}

/// Nibbles with a fifth bit: value `i` has bit `i` of the four bytes before them.
#[inline(always)]
fn five_bits(quants: &[u8]) -> [u8; 32] {
    let high = u32::from_le_bytes([quants[0], quants[1], quants[2], quants[3]]);
    let mut q = nibbles(&quants[4..]);
    for (i, q) in q.iter_mut().enumerate() {
        *q |= ((high >> i & 1) as u8) << 4;
    }
    q
}

#[inline(always)]
fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let (d, q) = (half(block, 0), nibbles(&block[2..]));
    for i in 0..32 {
        out[i] = d * (f32::from(q[i]) - 8.0);
    }
}

#[inline(always)]
fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m, q) = (half(block, 0), half(block, 2), nibbles(&block[4..]));
    for i in 0..32 {
        out[i] = d * f32::from(q[i]) + m;
    }
}

#[inline(always)]
fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let (d, q) = (half(block, 0), five_bits(&block[2..]));
    for i in 0..32 {
        out[i] = d * (f32::from(q[i]) - 16.0);
    }
}

#[inline(always)]
fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m, q) = (half(block, 0), half(block, 2), five_bits(&block[4..]));
    for i in 0..32 {
        out[i] = d * f32::from(q[i]) + m;
    }
}

#[inline(always)]
fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half(block, 0);
    for i in 0..32 {
        out[i] = d * f32::from(block[2 + i] as i8);
    }
}

/// Scale and min of 32 values: `scale * code - min`.
#[derive(Clone, Copy, Default)]
struct SubBlock {
    scale: f32,
    min: f32,
}

/// The eight sub-blocks of a block, which begins with the units of scales and mins in f16, and 12 bytes of both.
#[inline(always)]
fn sub_blocks(block: &[u8]) -> [SubBlock; 8] {
    let (d, dmin, packed) = (half(block, 0), half(block, 2), &block[4..16]);
    let of = |scale: u8, min: u8| SubBlock { scale: d * f32::from(scale), min: dmin * f32::from(min) };
    let mut all = [SubBlock::default(); 8];
    for i in 0..4 {
        all[i] = of(packed[i] & 63, packed[i + 4] & 63);
        let (scale, min) =
            (packed[i + 8] & 15 | packed[i] >> 6 << 4, packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4);
        all[i + 4] = of(scale, min);
    }
    all
}

#[inline(always)]
fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let subs = sub_blocks(block);
    for pair in 0..4 {
        let quants = &block[16 + 32 * pair..][..32];
        let out = &mut out[64 * pair..][..64];
        let (low, high) = (subs[2 * pair], subs[2 * pair + 1]);
        for i in 0..32 {
            out[i] = low.scale * f32::from(quants[i] & 15) - low.min;
            out[i + 32] = high.scale * f32::from(quants[i] >> 4) - high.min;
        }
    }
}

#[inline(always)]
fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let subs = sub_blocks(block);
    let fifth = &block[16..48];
    for pair in 0..4 {
        let quants = &block[48 + 32 * pair..][..32];
        let out = &mut out[64 * pair..][..64];
        let (low, high) = (subs[2 * pair], subs[2 * pair + 1]);
        for i in 0..32 {
            let bits = fifth[i] >> (2 * pair);
            out[i] = low.scale * f32::from(quants[i] & 15 | (bits & 1) << 4) - low.min;
            out[i + 32] = high.scale * f32::from(quants[i] >> 4 | (bits >> 1 & 1) << 4) - high.min;
        }
    }
}

#[inline(always)]
fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = half(block, 208);
    for part in 0..2 {
        let (low, high) = (&block[64 * part..][..64], &block[128 + 32 * part..][..32]);
        let scales = &block[192 + 8 * part..][..8];
        let out = &mut out[128 * part..][..128];
        for layer in 0..4 {
            let low = &low[32 * (layer % 2)..][..32];
            let out = &mut out[32 * layer..][..32];
            for half in 0..2 {
                let scale = d * f32::from(scales[2 * layer + half] as i8);
                for i in 16 * half..16 * half + 16 {
                    let q = low[i] >> (layer / 2 * 4) & 15 | (high[i] >> (2 * layer) & 3) << 4;
                    out[i] = scale * (f32::from(q) - 32.0);
                }
            }
        }
    }
}
