//! A quantised weight as the checkpoint holds it: still packed.

use std::ops::Range;

use keel_array::DType;

use super::{AffineFormat, dequantize_row};
use crate::{Result, TensorView, WeightsError, float, view::check_rows};

/// The three tensors of an affine-quantised module, their shapes checked against each other.
#[derive(Clone, Copy, Debug)]
pub struct AffineTensor<'a> {
    format: AffineFormat,
    weight: TensorView<'a>,
    scales: TensorView<'a>,
    biases: TensorView<'a>,
    cols: usize,
}

impl<'a> AffineTensor<'a> {
    /// Combines the tensors of a module.
    ///
    /// # Shapes
    /// `weight`: u32 `[.., rows, cols * bits / 32]`; `scales`, `biases`: `[.., rows, cols / group_size]`. `..` is
    /// empty, or the number of experts.
    ///
    /// # Errors
    /// [`WeightsError::UnsupportedDType`] or [`WeightsError::Module`] if they do not fit each other.
    pub fn new(
        format: AffineFormat,
        weight: TensorView<'a>,
        scales: TensorView<'a>,
        biases: TensorView<'a>,
    ) -> Result<AffineTensor<'a>> {
        let dtype_error = |view: &TensorView<'_>, needed| {
            let (name, found) = (view.name().into(), view.dtype().to_string());
            Err(WeightsError::UnsupportedDType { name, found, needed })
        };
        if weight.dtype() != DType::U32 {
            return dtype_error(&weight, "u32");
        }
        if !scales.dtype().is_float() {
            return dtype_error(&scales, "f32, f16 or bf16");
        }
        if biases.dtype() != scales.dtype() {
            return dtype_error(&biases, "the type of the scales");
        }
        biases.expect_shape(scales.shape())?;
        let cols = affine_cols(format, weight.shape(), scales.shape()).ok_or_else(|| {
            let (words, groups) = (weight.shape(), scales.shape());
            let problem = format!("weight {words:?} and scales {groups:?} are not {format}");
            WeightsError::Module { module: weight.name().into(), problem }
        })?;
        Ok(AffineTensor { format, weight, scales, biases, cols })
    }

    /// Bits and group size.
    pub fn format(&self) -> AffineFormat {
        self.format
    }

    /// The packed codes, u32 `[.., rows, cols * bits / 32]`.
    pub fn weight(&self) -> TensorView<'a> {
        self.weight
    }

    /// The scales, `[.., rows, cols / group_size]`.
    pub fn scales(&self) -> TensorView<'a> {
        self.scales
    }

    /// The biases, of the scales' dtype and shape.
    pub fn biases(&self) -> TensorView<'a> {
        self.biases
    }

    /// The number of stacked experts; `None` for a plain matrix.
    pub fn experts(&self) -> Option<usize> {
        (self.weight.shape().len() == 3).then(|| self.weight.shape()[0])
    }

    /// Rows of the matrix, or of each expert's.
    pub fn rows(&self) -> usize {
        self.weight.shape()[self.weight.shape().len() - 2]
    }

    /// Values in a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Decodes rows `range` (of all experts, counted through) into `out`.
    ///
    /// # Shapes
    /// `out`: `range.len() * cols`.
    ///
    /// # Errors
    /// [`WeightsError::Rows`] if the rows do not exist or `out` has another length.
    pub fn rows_f32(&self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        check_rows(self.weight.name(), self.weight.rows(), self.cols, &range, out.len())?;
        let groups = self.scales.cols();
        let mut scales = vec![0.0; groups];
        let mut biases = vec![0.0; groups];
        for (row, out) in range.zip(out.chunks_exact_mut(self.cols)) {
            float::decode(self.scales.dtype(), self.scales.bytes_of_rows(row..row + 1)?, &mut scales);
            float::decode(self.biases.dtype(), self.biases.bytes_of_rows(row..row + 1)?, &mut biases);
            dequantize_row(self.format, self.weight.bytes_of_rows(row..row + 1)?, &scales, &biases, out);
        }
        Ok(())
    }
}

/// The columns of a weight whose packed words and scales have these shapes. `None` if the shapes do not fit the format,
/// have not two or three dimensions, or contain a zero.
pub(crate) fn affine_cols(format: AffineFormat, words: &[usize], groups: &[usize]) -> Option<usize> {
    let ((&words, words_leading), (&groups, groups_leading)) = (words.split_last()?, groups.split_last()?);
    let sound = words_leading == groups_leading
        && (1..=2).contains(&words_leading.len())
        && groups > 0
        && !words_leading.contains(&0);
    let cols = groups.checked_mul(format.group_size())?;
    (sound && words.checked_mul(32) == cols.checked_mul(format.bits())).then_some(cols)
}
