//! One tensor, borrowed from its storage.

use std::ops::Range;

use keel_array::DType;
use rayon::prelude::*;

use crate::{Result, WeightsError, float, source::element_count};

/// Values that one thread converts at a time.
pub(crate) const TASK_VALUES: usize = 1 << 16;

/// A borrowed tensor: name, dtype, shape and its elements in row-major order, little-endian.
///
/// The bytes may have any alignment: their place in the file decides.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    name: &'a str,
    dtype: DType,
    shape: &'a [usize],
    bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// A view of `bytes` as `shape` elements of `dtype`.
    ///
    /// # Errors
    /// [`WeightsError::ByteCount`] if `bytes` is not exactly that long.
    pub fn new(name: &'a str, dtype: DType, shape: &'a [usize], bytes: &'a [u8]) -> Result<Self> {
        let needed = element_count(shape).and_then(|count| count.checked_mul(dtype.size()));
        if needed != Some(bytes.len()) {
            let (name, shape, bytes) = (name.into(), shape.into(), bytes.len());
            return Err(WeightsError::ByteCount { name, dtype, shape, bytes });
        }
        Ok(TensorView { name, dtype, shape, bytes })
    }

    /// The tensor's name in the checkpoint.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The dimensions, slowest first.
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// The elements, row-major, little-endian, unaligned.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The product of all dimensions but the last; 1 for a scalar.
    pub fn rows(&self) -> usize {
        rows(self.shape)
    }

    /// The last dimension; 1 for a scalar.
    pub fn cols(&self) -> usize {
        cols(self.shape)
    }

    /// This view, after a check that it has the shape that the model needs.
    ///
    /// # Errors
    /// [`WeightsError::Shape`] with both shapes.
    pub fn expect_shape(self, expected: &[usize]) -> Result<Self> {
        if self.shape == expected {
            return Ok(self);
        }
        let (name, expected, found) = (self.name.into(), expected.into(), self.shape.into());
        Err(WeightsError::Shape { name, expected, found })
    }

    /// All elements as f32 in a new vector: for norms, biases and other small tensors.
    ///
    /// # Errors
    /// [`WeightsError::UnsupportedDType`] unless the dtype is f32, f16 or bf16.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut values = vec![0.0; self.bytes.len() / self.dtype.size()];
        self.decode(self.bytes, &mut values)?;
        Ok(values)
    }

    /// Decodes rows `range` (all leading dimensions counted through) of a float tensor into `out`. So a large tensor
    /// can be read in pieces without a second copy.
    ///
    /// # Shapes
    /// `out`: `range.len() * cols`.
    ///
    /// # Errors
    /// [`WeightsError::Rows`] if the rows do not exist or `out` has another length,
    /// [`WeightsError::UnsupportedDType`] unless the dtype is f32, f16 or bf16.
    pub fn rows_f32(&self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        check_rows(self.name, self.rows(), self.cols(), &range, out.len())?;
        let row_bytes = self.cols() * self.dtype.size();
        self.decode(&self.bytes[range.start * row_bytes..range.end * row_bytes], out)
    }

    /// The bytes of rows `range`.
    ///
    /// # Errors
    /// [`WeightsError::Rows`] if the rows do not exist.
    pub fn bytes_of_rows(&self, range: Range<usize>) -> Result<&'a [u8]> {
        let row_bytes = self.cols() * self.dtype.size();
        check_rows(self.name, self.rows(), self.cols(), &range, range.len().saturating_mul(self.cols()))?;
        Ok(&self.bytes[range.start * row_bytes..range.end * row_bytes])
    }

    fn decode(&self, bytes: &[u8], out: &mut [f32]) -> Result<()> {
        if !self.dtype.is_float() {
            let (name, found) = (self.name.into(), self.dtype.to_string());
            return Err(WeightsError::UnsupportedDType { name, found, needed: "f32, f16 or bf16" });
        }
        float::decode(self.dtype, bytes, out);
        Ok(())
    }
}

/// The product of all dimensions of a shape but the last; 1 for a scalar.
pub fn rows(shape: &[usize]) -> usize {
    shape.split_last().map_or(1, |(_, leading)| leading.iter().product())
}

/// The last dimension of a shape; 1 for a scalar.
pub fn cols(shape: &[usize]) -> usize {
    shape.last().copied().unwrap_or(1)
}

/// Checks that `range` is within `rows`, and that it decodes to `out` values.
pub(crate) fn check_rows(
    name: &str,
    rows: usize,
    cols: usize,
    range: &Range<usize>,
    out: usize,
) -> Result<()> {
    let exists = range.start <= range.end && range.end <= rows;
    if exists && (range.end - range.start).checked_mul(cols) == Some(out) {
        return Ok(());
    }
    let (name, start, end) = (name.into(), range.start, range.end);
    Err(WeightsError::Rows { name, start, end, rows, cols, out })
}

/// Fills `out` with rows `range` of `cols` values, on all threads: `fill` gets some of the rows and their values.
pub(crate) fn fill_rows(
    range: &Range<usize>,
    cols: usize,
    out: &mut [f32],
    fill: impl Fn(Range<usize>, &mut [f32]) -> Result<()> + Sync,
) -> Result<()> {
    // Without columns there is nothing to fill.
    let cols = cols.max(1);
    let task_rows = (TASK_VALUES / cols).max(1);
    out.par_chunks_mut(task_rows * cols).enumerate().try_for_each(|(task, out)| {
        let first = range.start + task * task_rows;
        fill(first..first + out.len() / cols, out)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(values: &[f32], dtype: DType) -> Vec<u8> {
        let encode = |value: f32| match dtype {
            DType::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
            DType::BF16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
            _ => value.to_le_bytes().to_vec(),
        };
        values.iter().flat_map(|&value| encode(value)).collect()
    }

    #[test]
    fn floats_decode_exactly_at_any_alignment() {
        // 3 x 67 values cross a chunk border of the f16 path. Eighths are exact in all three types.
        let values: Vec<f32> = (0..201).map(|i| (i as f32 - 100.0) / 8.0).collect();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for shift in 0..4 {
                let mut bytes = vec![0; shift];
                bytes.extend(bytes_of(&values, dtype));
                let view = TensorView::new("w", dtype, &[3, 67], &bytes[shift..]).unwrap();
                assert_eq!(view.to_f32().unwrap(), values, "{dtype}");
                let mut rows = vec![0.0; 134];
                view.rows_f32(1..3, &mut rows).unwrap();
                assert_eq!(rows, values[67..], "{dtype}");
                assert_eq!(view.bytes_of_rows(1..2).unwrap(), bytes_of(&values[67..134], dtype));
            }
        }
    }

    #[test]
    fn rows_of_three_dimensions_run_over_the_leading_two() {
        let values: Vec<f32> = (0..30).map(|i| i as f32).collect();
        let bytes = bytes_of(&values, DType::F32);
        let view = TensorView::new("w", DType::F32, &[2, 3, 5], &bytes).unwrap();
        assert_eq!((view.rows(), view.cols()), (6, 5));
        let mut row = [0.0; 5];
        view.rows_f32(4..5, &mut row).unwrap();
        assert_eq!(row, values[20..25]);
    }

    #[test]
    fn scalars_and_empty_tensors_have_sizes() {
        let scalar = TensorView::new("s", DType::F32, &[], &[0, 0, 128, 63]).unwrap();
        assert_eq!((scalar.rows(), scalar.cols(), scalar.to_f32().unwrap()), (1, 1, vec![1.0]));
        let empty = TensorView::new("e", DType::BF16, &[4, 0], &[]).unwrap();
        assert_eq!((empty.rows(), empty.cols(), empty.to_f32().unwrap()), (4, 0, vec![]));
    }

    #[test]
    fn wrong_uses_are_errors_with_the_numbers() {
        let bytes = [0; 24];
        let view = TensorView::new("w", DType::F32, &[2, 3], &bytes).unwrap();
        let message = |error: WeightsError| error.to_string();
        assert_eq!(
            message(view.expect_shape(&[3, 2]).unwrap_err()),
            "tensor 'w': expected shape [3, 2], the checkpoint has [2, 3]"
        );
        assert_eq!(
            message(view.rows_f32(1..3, &mut [0.0; 6]).unwrap_err()),
            "tensor 'w': rows 1..3 of 2 x 3 into 6 values"
        );
        assert!(view.rows_f32(0..1, &mut [0.0; 4]).is_err());
        let reversed = Range { start: 2, end: 1 };
        assert!(view.rows_f32(reversed.clone(), &mut []).is_err());
        assert!(view.bytes_of_rows(reversed).is_err());
        assert!(view.bytes_of_rows(0..usize::MAX).is_err());
        assert_eq!(
            message(TensorView::new("w", DType::U32, &[2, 3], &bytes).unwrap().to_f32().unwrap_err()),
            "tensor 'w' is stored as u32; f32, f16 or bf16 is needed here"
        );
        assert_eq!(
            message(TensorView::new("w", DType::F32, &[2, 4], &bytes).unwrap_err()),
            "tensor 'w': f32 of shape [2, 4] does not take 24 bytes"
        );
        assert!(TensorView::new("w", DType::F32, &[usize::MAX, 3], &bytes).is_err());
        assert!(TensorView::new("w", DType::F32, &[0, usize::MAX], &[]).is_err());
    }
}
