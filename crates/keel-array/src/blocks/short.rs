//! Blocks of 32 values: a scale, sometimes an offset, and small integers.
//!
//! In all but `Q8_0` byte `i` of the quants holds value `i` in its low half and value `i + 16` in its high half.

pub(super) const Q4_0_BYTES: usize = 2 + 16;
pub(super) const Q4_1_BYTES: usize = 4 + 16;
pub(super) const Q5_0_BYTES: usize = 2 + 4 + 16;
pub(super) const Q5_1_BYTES: usize = 4 + 4 + 16;
pub(super) const Q8_0_BYTES: usize = 2 + 32;
pub(super) const IQ4_NL_BYTES: usize = 2 + 16;
pub(super) const MXFP4_BYTES: usize = 1 + 16;

/// The levels of `IQ4_NL` and `IQ4_XS`.
pub(super) const NONLINEAR: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Twice the levels of a 4-bit float with two bits of exponent and one of mantissa.
const FP4_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The half float at `at`.
pub(super) fn half(block: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Value `i` of 32 four-bit integers in 16 bytes.
fn nibble(quants: &[u8], i: usize) -> u8 {
    quants[i % 16] >> (i / 16 * 4) & 15
}

/// `value = d * (q - 8)`: `d` f16, 16 bytes of `q`.
pub(super) fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    for (i, out) in out.iter_mut().enumerate() {
        *out = d * (f32::from(nibble(&block[2..], i)) - 8.0);
    }
}

/// `value = d * q + m`: `d`, `m` f16, 16 bytes of `q`.
pub(super) fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    for (i, out) in out.iter_mut().enumerate() {
        *out = d * f32::from(nibble(&block[4..], i)) + m;
    }
}

/// Five-bit value `i`: its highest bit is bit `i` of the first four bytes.
fn five_bits(quants: &[u8], i: usize) -> u8 {
    let high = quants[i / 8] >> (i % 8) & 1;
    nibble(&quants[4..], i) | high << 4
}

/// `value = d * (q - 16)`: `d` f16, 4 bytes of high bits, 16 bytes of low bits.
pub(super) fn q5_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    for (i, out) in out.iter_mut().enumerate() {
        *out = d * (f32::from(five_bits(&block[2..], i)) - 16.0);
    }
}

/// `value = d * q + m`: `d`, `m` f16, 4 bytes of high bits, 16 bytes of low bits.
pub(super) fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    for (i, out) in out.iter_mut().enumerate() {
        *out = d * f32::from(five_bits(&block[4..], i)) + m;
    }
}

/// `value = d * q`: `d` f16, 32 signed bytes.
pub(super) fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    for (out, &q) in out.iter_mut().zip(&block[2..]) {
        *out = d * f32::from(q as i8);
    }
}

/// `value = d * level[q]`: `d` f16, 16 bytes of `q`.
pub(super) fn iq4_nl(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    for (i, out) in out.iter_mut().enumerate() {
        *out = d * f32::from(NONLINEAR[usize::from(nibble(&block[2..], i))]);
    }
}

/// `value = 2^(e - 127) * level[q]`: `e` u8, 16 bytes of `q`.
pub(super) fn mxfp4(block: &[u8], out: &mut [f32]) {
    // 2^(e - 128), because the levels are doubled; the two smallest are subnormal.
    let exponent = u32::from(block[0]);
    let d = f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 });
    for (i, out) in out.iter_mut().enumerate() {
        *out = d * f32::from(FP4_DOUBLED[usize::from(nibble(&block[1..], i))]);
    }
}
