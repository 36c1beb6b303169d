//! Converts rows of values to rows of codes and back.

use rayon::prelude::*;

use super::{
    AffineFormat,
    bits::{pack, unpack, with_bits},
};

/// MLX's lower bound on a step. It prevents a division by zero in a constant group.
const STEP_MIN: f32 = 1e-7;

/// Adding this to a float of 0 to 255 rounds it to the nearest integer, ties to even, and leaves that integer in the
/// lowest bits: at 1.5 * 2^23 neighbouring f32 values differ by 1.
const ROUND: f32 = 12_582_912.0;

/// Splits the packed codes of a row into one byte per code.
///
/// # Shapes
/// `packed`: `cols * bits / 8` bytes; `codes`: `cols`, a multiple of the group size.
///
/// # Panics
/// If the lengths do not agree.
pub fn unpack_row(format: AffineFormat, packed: &[u8], codes: &mut [u8]) {
    check_lengths(format, codes.len(), packed.len());
    with_bits!(format, unpack(packed, codes));
}

/// Packs codes, each below `2^bits`, into the bytes of a row: the inverse of [`unpack_row`].
///
/// # Panics
/// If the lengths do not agree.
pub fn pack_row(format: AffineFormat, codes: &[u8], packed: &mut [u8]) {
    check_lengths(format, codes.len(), packed.len());
    debug_assert!(codes.iter().all(|&code| code <= format.code_max()));
    with_bits!(format, pack(codes, packed));
}

/// `values[i] = scale * code[i] + bias`, in f32, with the scale and bias of `i`'s group.
///
/// # Shapes
/// `packed`: `cols * bits / 8` bytes; `scales`, `biases`: `cols / group_size`; `values`: `cols`.
///
/// # Panics
/// If the lengths do not agree.
pub fn dequantize_row(
    format: AffineFormat,
    packed: &[u8],
    scales: &[f32],
    biases: &[f32],
    values: &mut [f32],
) {
    check_lengths(format, values.len(), packed.len());
    let groups = values.len() / format.group_size();
    assert!(
        scales.len() == groups && biases.len() == groups,
        "one scale and bias for each of {groups} groups"
    );
    let mut codes = [0; 128];
    let codes = &mut codes[..format.group_size()];
    let packed = packed.chunks_exact(format.packed_bytes(format.group_size()));
    let groups = values.chunks_exact_mut(format.group_size()).zip(packed);
    for ((values, packed), (&scale, &bias)) in groups.zip(scales.iter().zip(biases)) {
        with_bits!(format, unpack(packed, codes));
        for (value, &code) in values.iter_mut().zip(&*codes) {
            *value = scale * f32::from(code) + bias;
        }
    }
}

/// Quantises rows, in parallel. Of a group's smallest and largest value, the one of larger magnitude is the edge and
/// becomes the bias. The step is adjusted so that zero falls on a code:
///
/// ```text
/// step  = max((w_max - w_min) / (2^bits - 1), 1e-7), negative where the edge is w_max
/// q0    = round(edge / step)
/// scale = edge / q0, bias = edge          where q0 != 0
/// scale = step,      bias = 0             otherwise
/// code  = clamp(round((w - bias) / scale), 0, 2^bits - 1)
/// ```
/// All arithmetic is f32, rounding ties to even. As in MLX, codes are chosen before scale and bias are rounded to their
/// stored type. A NaN gets code 0.
///
/// # Shapes
/// `values`: `[rows, cols]`; `packed`: `[rows, cols * bits / 8]` bytes; `scales`, `biases`:
/// `[rows, cols / group_size]`.
///
/// # Panics
/// If the lengths do not agree or `cols` is not a positive multiple of the group size.
pub fn quantize_rows(
    format: AffineFormat,
    cols: usize,
    values: &[f32],
    packed: &mut [u8],
    scales: &mut [f32],
    biases: &mut [f32],
) {
    let groups = format.groups(cols).filter(|&groups| groups > 0).expect("cols must be whole groups");
    assert!(values.len().is_multiple_of(cols), "values must be whole rows");
    check_lengths(format, values.len(), packed.len());
    let count = values.len() / format.group_size();
    assert!(scales.len() == count && biases.len() == count, "one scale and bias for each of {count} groups");
    let rows = values.par_chunks_exact(cols).zip(packed.par_chunks_exact_mut(format.packed_bytes(cols)));
    let groups = scales.par_chunks_exact_mut(groups).zip(biases.par_chunks_exact_mut(groups));
    rows.zip(groups).for_each(|((values, packed), (scales, biases))| {
        quantize_row(format, values, packed, scales, biases)
    });
}

fn quantize_row(
    format: AffineFormat,
    values: &[f32],
    packed: &mut [u8],
    scales: &mut [f32],
    biases: &mut [f32],
) {
    let mut codes = [0; 128];
    let codes = &mut codes[..format.group_size()];
    let packed = packed.chunks_exact_mut(format.packed_bytes(format.group_size()));
    let groups = values.chunks_exact(format.group_size()).zip(packed);
    for ((values, packed), (scale, bias)) in groups.zip(scales.iter_mut().zip(biases)) {
        (*scale, *bias) = fit(values, format.code_max().into());
        encode(values, *scale, *bias, format.code_max().into(), codes);
        with_bits!(format, pack(codes, packed));
    }
}

/// The scale and bias of a group.
fn fit(values: &[f32], code_max: f32) -> (f32, f32) {
    let (min, max) = bounds(values);
    let bias_is_min = min.abs() > max.abs();
    let step = ((max - min) / code_max).max(STEP_MIN);
    let (step, edge) = if bias_is_min { (step, min) } else { (-step, max) };
    let q0 = (edge / step).round_ties_even();
    if q0 != 0.0 { (edge / q0, edge) } else { (step, 0.0) }
}

/// Smallest and largest value, ignoring NaNs. Eight lanes, so that it compiles to vector code.
fn bounds(values: &[f32]) -> (f32, f32) {
    let (mut min, mut max) = ([f32::INFINITY; 8], [f32::NEG_INFINITY; 8]);
    for values in values.as_chunks::<8>().0 {
        for (i, &value) in values.iter().enumerate() {
            min[i] = if value < min[i] { value } else { min[i] };
            max[i] = if value > max[i] { value } else { max[i] };
        }
    }
    (min.into_iter().fold(f32::INFINITY, f32::min), max.into_iter().fold(f32::NEG_INFINITY, f32::max))
}

fn encode(values: &[f32], scale: f32, bias: f32, code_max: f32, codes: &mut [u8]) {
    for (code, &value) in codes.iter_mut().zip(values) {
        // The bounds are integers, so clamping gives the same before rounding as after it. NaN becomes 0.
        let clamped = ((value - bias) / scale).max(0.0).min(code_max);
        *code = (clamped + ROUND).to_bits() as u8;
    }
}

fn check_lengths(format: AffineFormat, cols: usize, packed: usize) {
    assert!(
        cols.is_multiple_of(format.group_size()) && packed == format.packed_bytes(cols),
        "{cols} values of {format} do not take {packed} bytes"
    );
}
