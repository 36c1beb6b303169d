//! Compares the affine codec with an oracle that reads and writes one bit at a time.

mod naive {
    //! The format by its definition: code `i` is bits `i * bits..` of the row, lowest first.

    pub fn code(packed: &[u8], bits: usize, i: usize) -> u8 {
        (0..bits).map(|bit| (packed[(i * bits + bit) / 8] >> ((i * bits + bit) % 8) & 1) << bit).sum()
    }

    /// Scale, bias and codes of one group. Rounds and clamps in MLX's order.
    pub fn quantize_group(values: &[f32], bits: usize) -> (f32, f32, Vec<u8>) {
        let code_max = ((1 << bits) - 1) as f32;
        let min = values.iter().copied().fold(f32::INFINITY, f32::min);
        let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut scale = ((max - min) / code_max).max(1e-7);
        let edge = if min.abs() > max.abs() { min } else { max };
        if edge == max && min.abs() <= max.abs() {
            scale = -scale;
        }
        let steps = (edge / scale).round_ties_even();
        let mut bias = 0.0;
        if steps != 0.0 {
            scale = edge / steps;
            bias = edge;
        }
        let code = |&value: &f32| {
            let code = ((value - bias) / scale).round_ties_even();
            if code.is_nan() { 0 } else { code.clamp(0.0, code_max) as u8 }
        };
        (scale, bias, values.iter().map(code).collect())
    }
}

use keel_array::DType;
use keel_weights::{
    AffineFormat, AffineTensor, TensorView,
    affine::{AFFINE_BITS, AFFINE_GROUP_SIZES, dequantize_row, pack_row, quantize_rows, unpack_row},
    float,
};
use proptest::prelude::*;

fn format() -> impl Strategy<Value = AffineFormat> {
    let bits = prop::sample::select(AFFINE_BITS.to_vec());
    let group_size = prop::sample::select(AFFINE_GROUP_SIZES.to_vec());
    (bits, group_size).prop_map(|(bits, group_size)| AffineFormat::new(bits, group_size).unwrap())
}

/// A format, one to three groups of packed bytes, and a scale and bias of any bit pattern for each.
fn packed_row() -> impl Strategy<Value = (AffineFormat, Vec<u8>, Vec<f32>, Vec<f32>)> {
    (format(), 1usize..4).prop_flat_map(|(format, groups)| {
        let bytes = format.packed_bytes(groups * format.group_size());
        let floats = || prop::collection::vec(any::<u32>().prop_map(f32::from_bits), groups);
        (Just(format), prop::collection::vec(any::<u8>(), bytes), floats(), floats())
    })
}

/// Values of a few groups: mostly values of one magnitude, sometimes any bit pattern.
fn values() -> impl Strategy<Value = (AffineFormat, usize, Vec<f32>)> {
    (format(), 1usize..3, 1usize..4, -30i32..20).prop_flat_map(|(format, groups, rows, exponent)| {
        let cols = groups * format.group_size();
        let ordinary = (-1f32..1.0).prop_map(move |value| value * (exponent as f32).exp2());
        let special = prop::sample::select(vec![0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, f32::NAN]);
        let value = prop_oneof![60 => ordinary, 1 => special];
        (Just(format), Just(cols), prop::collection::vec(value, rows * cols))
    })
}

struct Quantized {
    packed: Vec<u8>,
    scales: Vec<f32>,
    biases: Vec<f32>,
}

fn quantize(format: AffineFormat, cols: usize, values: &[f32]) -> Quantized {
    let groups = values.len() / format.group_size();
    let mut packed = vec![0; format.packed_bytes(values.len())];
    let (mut scales, mut biases) = (vec![0.0; groups], vec![0.0; groups]);
    quantize_rows(format, cols, values, &mut packed, &mut scales, &mut biases);
    Quantized { packed, scales, biases }
}

proptest! {
    #[test]
    fn unpacking_reads_the_bit_stream((format, packed, ..) in packed_row()) {
        let mut codes = vec![0; packed.len() * 8 / format.bits()];
        unpack_row(format, &packed, &mut codes);
        for (i, &code) in codes.iter().enumerate() {
            prop_assert_eq!(code, naive::code(&packed, format.bits(), i), "code {} of {}", i, format);
        }
        let mut back = vec![0; packed.len()];
        pack_row(format, &codes, &mut back);
        prop_assert_eq!(back, packed);
    }

    #[test]
    fn dequantizing_any_scales_is_the_formula((format, packed, scales, biases) in packed_row()) {
        let mut values = vec![0.0; packed.len() * 8 / format.bits()];
        dequantize_row(format, &packed, &scales, &biases, &mut values);
        for (i, &value) in values.iter().enumerate() {
            let group = i / format.group_size();
            let expected = scales[group] * f32::from(naive::code(&packed, format.bits(), i)) + biases[group];
            let same = value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan();
            prop_assert!(same, "value {i} of {format}: {value}, expected {expected}");
        }
    }

    #[test]
    fn quantizing_is_the_rule_bit_for_bit((format, cols, values) in values()) {
        let quantized = quantize(format, cols, &values);
        for (group, values) in values.chunks(format.group_size()).enumerate() {
            let (scale, bias, codes) = naive::quantize_group(values, format.bits());
            prop_assert_eq!(quantized.scales[group].to_bits(), scale.to_bits(), "scale of group {}", group);
            prop_assert_eq!(quantized.biases[group].to_bits(), bias.to_bits(), "bias of group {}", group);
            for (i, code) in codes.into_iter().enumerate() {
                let found = naive::code(&quantized.packed, format.bits(), group * format.group_size() + i);
                prop_assert_eq!(found, code, "value {} of group {}", values[i], group);
            }
        }
    }

    #[test]
    fn a_finite_value_comes_back_within_a_step((format, cols, values) in values()) {
        let quantized = quantize(format, cols, &values);
        let groups = values.chunks(format.group_size()).enumerate();
        for (group, values) in groups.filter(|(_, values)| values.iter().all(|value| value.abs() < 1e30)) {
            let (scale, bias) = (quantized.scales[group], quantized.biases[group]);
            let bytes = format.packed_bytes(format.group_size());
            let mut back = vec![0.0; values.len()];
            dequantize_row(format, &quantized.packed[group * bytes..][..bytes], &[scale], &[bias], &mut back);
            let edge = values.iter().copied().fold(0f32, |edge, value| edge.max(value.abs()));
            for (&value, &back) in values.iter().zip(&back) {
                // Stretching the step so that zero is a code can move the far end by half a step more than rounding
                // does. A group narrower than the smallest step loses its differences.
                let error = (value - back).abs();
                prop_assert!(error <= scale.abs() * 1.01 + edge * 1e-6 + 1e-7, "{value} became {back}, scale {scale}");
            }
        }
    }
}

#[test]
fn the_larger_edge_and_zero_are_exact() {
    for bits in AFFINE_BITS {
        let format = AffineFormat::new(bits, 32).unwrap();
        for sign in [1.0, -1.0] {
            let values: Vec<f32> = (0..32).map(|i| sign * (i as f32 - 13.0) / 7.0).collect();
            let quantized = quantize(format, 32, &values);
            let mut back = vec![0.0; 32];
            dequantize_row(format, &quantized.packed, &quantized.scales, &quantized.biases, &mut back);
            assert_eq!(back[31], values[31], "the edge at {bits} bits");
            assert!(back[13].abs() < 1e-6, "zero at {bits} bits: {}", back[13]);
        }
    }
}

#[test]
fn constant_groups_do_not_divide_by_zero() {
    let format = AffineFormat::new(4, 64).unwrap();
    for value in [0.0, 1e-9, 0.75, -2.5] {
        let quantized = quantize(format, 64, &[value; 64]);
        let mut back = vec![9.0; 64];
        dequantize_row(format, &quantized.packed, &quantized.scales, &quantized.biases, &mut back);
        assert!(back.iter().all(|back| (back - value).abs() <= 1e-7), "{value}: {back:?}");
    }
}

#[test]
fn infinities_and_nans_never_panic() {
    let format = AffineFormat::new(5, 32).unwrap();
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = [0.5; 64];
        values[40] = special;
        let clean = quantize(format, 64, &[0.5; 64]);
        let quantized = quantize(format, 64, &values);
        assert_eq!(quantized.packed[..20], clean.packed[..20], "the group next to it is untouched");
        assert_eq!(quantize(format, 64, &[special; 64]).packed.len(), 40);
    }
}

/// Experts, rows, groups and columns all differ, so that a wrong stride is noticed.
#[test]
fn stacked_experts_decode_by_flat_row() {
    let (experts, rows, cols) = (3, 5, 192);
    let values: Vec<f32> =
        (0..experts * rows * cols).map(|i| ((i * 37 % 101) as f32 - 50.0) / 32.0).collect();
    for bits in AFFINE_BITS {
        let format = AffineFormat::new(bits, 64).unwrap();
        let quantized = quantize(format, cols, &values);
        let scale_bytes = |scales: &[f32], dtype: DType| {
            let mut bytes = vec![0; scales.len() * dtype.size()];
            float::encode(dtype, scales, &mut bytes);
            bytes
        };
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let (scales, biases) =
                (scale_bytes(&quantized.scales, dtype), scale_bytes(&quantized.biases, dtype));
            let (words, groups) = ([experts, rows, cols * bits / 32], [experts, rows, 3]);
            let weight = TensorView::new("w", DType::U32, &words, &quantized.packed).unwrap();
            let scales = TensorView::new("s", dtype, &groups, &scales).unwrap();
            let biases = TensorView::new("b", dtype, &groups, &biases).unwrap();
            let tensor = AffineTensor::new(format, weight, scales, biases).unwrap();
            assert_eq!((tensor.experts(), tensor.rows(), tensor.cols()), (Some(3), 5, 192));
            let mut decoded = vec![0.0; 4 * cols];
            tensor.rows_f32(9..13, &mut decoded).unwrap();
            let (scale, bias) = (scales.to_f32().unwrap(), biases.to_f32().unwrap());
            for (i, value) in decoded.iter().enumerate() {
                let at = 9 * cols + i;
                let code = f32::from(naive::code(&quantized.packed, bits, at));
                assert_eq!(*value, scale[at / 64] * code + bias[at / 64], "{bits} bits, {dtype}, value {i}");
            }
            assert!(tensor.rows_f32(14..16, &mut decoded[..2 * cols]).is_err());
            assert!(tensor.rows_f32(14..15, &mut decoded).is_err());
            let other = AffineFormat::new(if bits == 8 { 4 } else { 8 }, 64).unwrap();
            assert!(AffineTensor::new(other, weight, scales, biases).is_err());
            assert!(AffineTensor::new(format, weight, weight, weight).is_err());
            assert!(AffineTensor::new(format, scales, scales, biases).is_err());
        }
    }
}
