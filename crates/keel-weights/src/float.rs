//! Converts between f32 and the bytes of f32, f16 and bf16.

use half::slice::HalfFloatSliceExt;
use keel_array::DType;
use rayon::prelude::*;

use crate::view::TASK_VALUES;

/// Decodes little-endian elements of a float `dtype`, exactly.
///
/// # Panics
/// If `dtype` is not a float type, or `bytes` are not as many elements as `out`.
pub fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len() * dtype.size());
    match dtype {
        DType::F32 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *out = f32::from_le_bytes(*bytes);
            }
        }
        DType::BF16 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *out = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
            }
        }
        DType::F16 => decode_f16(bytes, out),
        other => panic!("{other} is not a float type"),
    }
}

/// The smallest magnitude that [`encode`] rounds to infinity.
pub(crate) fn overflow(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => 65_520.0,
        DType::BF16 => f32::from_bits(0x7f7f_8000),
        _ => f32::INFINITY,
    }
}

/// Encodes `values` as little-endian elements of a float `dtype`, rounding to nearest even. Many values are encoded on
/// all threads.
///
/// # Panics
/// If `dtype` is not a float type, or `out` has not room for exactly `values`.
pub fn encode(dtype: DType, values: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), values.len() * dtype.size());
    if values.len() <= TASK_VALUES {
        return encode_some(dtype, values, out);
    }
    let tasks = out.par_chunks_mut(TASK_VALUES * dtype.size()).zip(values.par_chunks(TASK_VALUES));
    tasks.for_each(|(out, values)| encode_some(dtype, values, out));
}

fn encode_some(dtype: DType, values: &[f32], out: &mut [u8]) {
    match dtype {
        DType::F32 => {
            for (out, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                *out = value.to_le_bytes();
            }
        }
        DType::BF16 => {
            for (out, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *out = half::bf16::from_f32(*value).to_le_bytes();
            }
        }
        DType::F16 => {
            for (out, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *out = half::f16::from_f32(*value).to_le_bytes();
            }
        }
        other => panic!("{other} is not a float type"),
    }
}

/// Converts whole slices: only these use the processor's half conversion.
fn decode_f16(bytes: &[u8], out: &mut [f32]) {
    const CHUNK: usize = 64;
    let mut halves = [half::f16::ZERO; CHUNK];
    for (out, bytes) in out.chunks_mut(CHUNK).zip(bytes.chunks(2 * CHUNK)) {
        let halves = &mut halves[..out.len()];
        for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *half = half::f16::from_le_bytes(*bytes);
        }
        halves.convert_to_f32_slice(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_16_bit_pattern_survives_the_round_trip() {
        let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let mut values = vec![0.0; 1 << 16];
        let mut back = vec![0; bytes.len()];
        for dtype in [DType::F16, DType::BF16] {
            decode(dtype, &bytes, &mut values);
            encode(dtype, &values, &mut back);
            for ((value, back), bytes) in values.iter().zip(back.chunks(2)).zip(bytes.chunks(2)) {
                // A signalling NaN becomes quiet.
                assert!(value.is_nan() || back == bytes, "{dtype} {bytes:?}: {value} is {back:?}");
            }
        }
    }

    #[test]
    fn encoding_rounds_to_nearest_even() {
        let mut bytes = [0; 8];
        // One bf16 step at 1 is 2^-7: halfway cases go to the even neighbour.
        encode(DType::BF16, &[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, f32::MAX, -0.0], &mut bytes);
        let mut values = [0.0; 4];
        decode(DType::BF16, &bytes, &mut values);
        assert_eq!(values, [1.0, 1.0 + 4.0 / 256.0, f32::INFINITY, 0.0]);
        assert!(values[3].is_sign_negative());
    }
}
