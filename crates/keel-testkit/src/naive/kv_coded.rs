//! Keys and values in 8 or 4 bits; see [`keel_array::KvFormat`].

use half::bf16;

/// Codes rows of whole groups of 32 values, and decodes them again.
pub fn coded(values: &[f32], bits: usize) -> Vec<f32> {
    let group = |x: &[f32]| -> Vec<f32> {
        let farthest = x.iter().copied().fold(0.0f32, |a, b| if b.abs() > a.abs() { b } else { a });
        let (step, low, high) =
            if bits == 8 { (farthest.abs() / 127.0, -127.0, 127.0) } else { (farthest / -8.0, -8.0, 7.0) };
        let step = bf16::from_f32(step).to_f32();
        let inverse = if step == 0.0 { 0.0 } else { 1.0 / step };
        x.iter().map(|x| (x * inverse).round_ties_even().clamp(low, high) * step).collect()
    };
    values.chunks_exact(32).flat_map(group).collect()
}
