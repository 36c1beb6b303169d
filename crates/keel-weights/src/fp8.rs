//! 8-bit floats with a scale for each block of 128 by 128, as Qwen and DeepSeek publish them, for each row, as
//! compressed-tensors writes them (`float-quantized`), or with one scale, as Ministral 3.
//!
//! `weight[n, k] = e4m3(weight[n, k]) * weight_scale_inv[n / 128, k / 128]`: `weight` F8_E4M3 `[N, K]`,
//! `weight_scale_inv` f32, f16 or bf16 `[ceil(N / 128), ceil(K / 128)]`, `[N, 1]`, or of one element. Some call it
//! `weight_scale`. A scale of activations is not read: they are not rounded to 8 bits.

use std::ops::Range;

use crate::{
    LinearFormat, LinearInfo, RawTensor, Result, TensorSource, TensorView, WeightsError, linear,
    unsupported::CHECKPOINT_ADVICE,
    view::{check_rows, fill_rows},
};

/// Rows and columns of a block.
const BLOCK: usize = 128;

/// The element type's name in safetensors files.
const ELEMENT: &str = "F8_E4M3";

/// The value of each code: a lookup is much faster than the arithmetic.
pub(crate) static E4M3: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < values.len() {
        values[code] = e4m3(code as u8);
        code += 1;
    }
    values
};

/// A weight of 8-bit floats, borrowed from its checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Tensor<'a> {
    codes: &'a [u8],
    rows: usize,
    cols: usize,
    scales: TensorView<'a>,
    /// Rows and columns that share a scale.
    block: [usize; 2],
}

impl<'a> Fp8Tensor<'a> {
    /// The weight of `module`.
    ///
    /// # Errors
    /// [`WeightsError::Module`] if its tensors do not fit each other.
    pub(crate) fn open<S: TensorSource + ?Sized>(source: &'a S, module: &str) -> Result<Fp8Tensor<'a>> {
        let RawTensor { dtype, shape, bytes: codes } = source.raw(&format!("{module}.weight"))?;
        let name = scales_name(source, module).unwrap_or_else(|| format!("{module}.weight_scale_inv"));
        let scales = source.tensor(&name)?;
        linear::check_matrices(module, shape)?;
        if let &[rows, cols] = shape
            && dtype == ELEMENT
            && Some(codes.len()) == rows.checked_mul(cols)
            && scales.dtype().is_float()
        {
            let block = match *scales.shape() {
                [] | [1] | [1, 1] => Some([rows, cols]),
                [n, 1] if n == rows => Some([1, cols]),
                [n, k] if [n, k] == [rows, cols].map(|len| len.div_ceil(BLOCK)) => Some([BLOCK; 2]),
                _ => None,
            };
            if let Some(block) = block {
                return Ok(Fp8Tensor { codes, rows, cols, scales, block });
            }
        }
        let problem = format!(
            "weight {dtype} {shape:?} with {name} {} {:?} is not F8_E4M3 [N, K] with one float, or one for each row or \
             each block of {BLOCK} by {BLOCK}; {CHECKPOINT_ADVICE}",
            scales.dtype(),
            scales.shape()
        );
        Err(WeightsError::Module { module: module.into(), problem })
    }

    /// The weight's sizes and format.
    pub fn info(&self) -> LinearInfo {
        LinearInfo { experts: None, rows: self.rows, cols: self.cols, format: LinearFormat::Fp8 }
    }

    /// Decodes rows `range` into `out`, `range.len() * cols` values, on all threads.
    ///
    /// # Errors
    /// [`WeightsError::Rows`] if the rows do not exist or `out` has another length.
    pub fn rows_f32(&self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        check_rows(self.scales.name(), self.rows, self.cols, &range, out.len())?;
        let [block_rows, block_cols] = self.block;
        fill_rows(&range, self.cols, out, |rows, out| {
            let mut scales = vec![0.0; self.scales.cols()];
            for (row, out) in rows.zip(out.chunks_exact_mut(self.cols)) {
                self.scales.rows_f32(row / block_rows..row / block_rows + 1, &mut scales)?;
                let codes = self.codes[row * self.cols..][..self.cols].chunks(block_cols);
                for ((out, codes), scale) in out.chunks_mut(block_cols).zip(codes).zip(&scales) {
                    out.iter_mut().zip(codes).for_each(|(out, code)| *out = E4M3[usize::from(*code)] * scale);
                }
            }
            Ok(())
        })
    }
}

/// The name of the scales of a module of 8-bit floats; `None` if its weight is stored in another form. Some of these
/// have a `weight_scale`, too.
pub(crate) fn scales_name<S: TensorSource + ?Sized>(source: &S, module: &str) -> Option<String> {
    let [inverse, scale] = ["weight_scale_inv", "weight_scale"].map(|part| format!("{module}.{part}"));
    let is_fp8 = || source.raw(&format!("{module}.weight")).is_ok_and(|weight| weight.dtype == ELEMENT);
    if source.contains(&inverse) {
        return Some(inverse);
    }
    (source.contains(&scale) && is_fp8()).then_some(scale)
}

/// A float with a sign, four bits of exponent and three of mantissa, without infinities.
const fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (code >> 3 & 15, code & 7);
    let magnitude = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa as f32 * power_of_two(-9),
        _ => (8 + mantissa) as f32 * power_of_two(exponent as i32 - 10),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// `2^exponent`, for the exponents of normal floats.
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_the_format() {
        for (code, value) in [
            (0x00, 0.0),
            (0x01, 0.001_953_125),
            (0x07, 0.013_671_875),
            (0x08, 0.015_625),
            (0x38, 1.0),
            (0x3c, 1.5),
            (0xc1, -2.25),
            (0x7e, 448.0),
            (0xfe, -448.0),
        ] {
            assert_eq!(E4M3[code], value, "{code:#x}");
        }
        assert!(E4M3[0x7f].is_nan() && E4M3[0xff].is_nan());
        assert!(E4M3[0x80].is_sign_negative());
        assert!(E4M3[..0x7f].is_sorted_by(|a, b| a < b));
    }
}
