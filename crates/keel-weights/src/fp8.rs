//! 8-bit floats with a scale for each block of 128 by 128, as Qwen and DeepSeek publish them, or with one scale, as
//! Ministral 3.
//!
//! `weight[n, k] = e4m3(weight[n, k]) * weight_scale_inv[n / 128, k / 128]`: `weight` F8_E4M3 `[N, K]`,
//! `weight_scale_inv` f32, f16 or bf16 `[ceil(N / 128), ceil(K / 128)]`, or of one element. A scale of activations is
//! not read: they are not rounded to 8 bits.

use std::ops::Range;

use crate::{
    LinearFormat, LinearInfo, RawTensor, Result, TensorSource, TensorView, WeightsError, linear,
    unsupported::CHECKPOINT_ADVICE, view::check_rows,
};

/// Rows and columns of a block.
const BLOCK: usize = 128;

/// The element type's name in safetensors files.
const E4M3: &str = "F8_E4M3";

/// A weight of 8-bit floats, borrowed from its checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Tensor<'a> {
    codes: &'a [u8],
    rows: usize,
    cols: usize,
    scales: TensorView<'a>,
}

impl<'a> Fp8Tensor<'a> {
    /// The weight of `module`.
    ///
    /// # Errors
    /// [`WeightsError::Module`] if its tensors do not fit each other.
    pub(crate) fn open<S: TensorSource + ?Sized>(source: &'a S, module: &str) -> Result<Fp8Tensor<'a>> {
        let LinearInfo { rows, cols, .. } = info(source, module)?;
        let codes = source.raw(&format!("{module}.weight"))?.bytes;
        let scales = source.tensor(&format!("{module}.weight_scale_inv"))?;
        Ok(Fp8Tensor { codes, rows, cols, scales })
    }

    /// The weight's sizes and format.
    pub fn info(&self) -> LinearInfo {
        LinearInfo { experts: None, rows: self.rows, cols: self.cols, format: LinearFormat::Fp8 }
    }

    /// Decodes rows `range` into `out`, `range.len() * cols` values.
    ///
    /// # Errors
    /// [`WeightsError::Rows`] if the rows do not exist or `out` has another length.
    pub fn rows_f32(&self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        check_rows(self.scales.name(), self.rows, self.cols, &range, out.len())?;
        let [block_rows, block_cols] = match self.scales.rows() * self.scales.cols() {
            1 => [self.rows, self.cols],
            _ => [BLOCK; 2],
        };
        let mut scales = vec![0.0; self.scales.cols()];
        for (row, out) in range.zip(out.chunks_exact_mut(self.cols)) {
            self.scales.rows_f32(row / block_rows..row / block_rows + 1, &mut scales)?;
            let codes = self.codes[row * self.cols..][..self.cols].chunks(block_cols);
            for ((out, codes), scale) in out.chunks_mut(block_cols).zip(codes).zip(&scales) {
                out.iter_mut().zip(codes).for_each(|(out, code)| *out = e4m3(*code) * scale);
            }
        }
        Ok(())
    }
}

/// A float with a sign, four bits of exponent and three of mantissa, without infinities.
pub(crate) fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Sizes of an FP8 layer, checked against each other.
pub(crate) fn info<S: TensorSource + ?Sized>(source: &S, module: &str) -> Result<LinearInfo> {
    let RawTensor { dtype, shape, bytes } = source.raw(&format!("{module}.weight"))?;
    let scales = source.info(&format!("{module}.weight_scale_inv"))?;
    linear::check_matrices(module, shape)?;
    if let &[rows, cols] = shape
        && dtype == E4M3
        && Some(bytes.len()) == rows.checked_mul(cols)
        && scales.dtype.is_float()
        && (scales.shape.iter().all(|len| *len == 1)
            || *scales.shape == [rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)])
    {
        return Ok(LinearInfo { experts: None, rows, cols, format: LinearFormat::Fp8 });
    }
    let problem = format!(
        "weight {dtype} {shape:?} with weight_scale_inv {} {:?} is not F8_E4M3 [N, K] with one float, or one for each \
         block of {BLOCK} by {BLOCK}; {CHECKPOINT_ADVICE}",
        scales.dtype, scales.shape
    );
    Err(WeightsError::Module { module: module.into(), problem })
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
            assert_eq!(e4m3(code), value, "{code:#x}");
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        assert!(e4m3(0x80).is_sign_negative());
        assert!((0..0x7e).all(|code| e4m3(code) < e4m3(code + 1)));
    }
}
