//! Weights of linear layers. They are packed once into the device's own layout, and opaque afterwards.
//!
//! Quantised weights keep their bits in memory; there is no wider copy, except for [`Compute::Fp8`]. A weight may be
//! filled in blocks of rows, so loading needs staging for one block only, for a tensor of any size.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{ArrayError, BlockFormat, Buffer, Category, DType, Result, Runtime};

/// How the elements of a weight are coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WeightFormat {
    /// One float each: f32, f16 or bf16.
    Dense(DType),
    /// `scale * q + bias` with unsigned `q`, one scale and bias for each `group_size` columns of a row.
    Affine {
        /// Bits of `q`: 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// Columns that share a scale: 32, 64 or 128.
        group_size: u16,
        /// Type of scales and biases.
        scale_dtype: DType,
    },
    /// Blocks along the columns; each row is whole blocks. Backends keep exactly the values of [`BlockFormat::decode`],
    /// in at most 1.05 times the bytes of the blocks, apart from the copy of [`Compute::Fp8`].
    Blocks(BlockFormat),
}

/// The arithmetic of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Compute {
    /// The device's fastest arithmetic that keeps the accuracy of the weight's format.
    #[default]
    Auto,
    /// Weights widened to f32, f32 multiply-add.
    F32,
    /// Activations in 16 bits or more (bf16 or f16, whichever is more accurate on the device), f32 sums.
    Bf16,
    /// As `Auto`. Products of many rows, as those of prompts, may round activations and quantised weights to 8-bit
    /// floats (e4m3) with a scale for each row, if the device has matrix instructions for them.
    PrefillFp8,
    /// As `PrefillFp8`, for the steps of many sequences as well. A device that multiplies 8-bit floats may keep a
    /// quantised weight in them, too: one byte more for each element. A mode that promises bits does not use them.
    Fp8,
}

impl Compute {
    /// The same arithmetic without a copy of the weight in 8-bit floats.
    pub fn without_copy(self) -> Compute {
        if self == Compute::Fp8 { Compute::Auto } else { self }
    }
}

/// Shape and coding of a weight `[experts, rows, cols]`; a plain linear layer has one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WeightSpec {
    /// Stacked matrices; 1 for a plain layer.
    pub experts: usize,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Coding.
    pub format: WeightFormat,
    /// Arithmetic.
    pub compute: Compute,
}

/// Consecutive rows of one expert, in canonical form.
pub struct RowBlock<'a> {
    /// Which expert.
    pub expert: usize,
    /// First row.
    pub first_row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Their elements.
    pub data: RowData<'a>,
}

/// Elements of a block of rows.
#[derive(Clone, Copy)]
pub enum RowData<'a> {
    /// `[rows, cols]` floats; little-endian elements of the format's dtype.
    Dense(&'a [u8]),
    /// Codes one byte each, and the scales and biases of each group.
    Affine {
        /// `[rows, cols]`.
        codes: &'a [u8],
        /// `[rows, cols / group_size]`.
        scales: &'a [f32],
        /// `[rows, cols / group_size]`.
        biases: &'a [f32],
    },
    /// The blocks of each row, in the file's form.
    Blocks(&'a [u8]),
}

/// A weight in device memory. Cloning shares it.
#[derive(Clone, Debug)]
pub struct Weight {
    pub(crate) runtime: Runtime,
    pub(crate) buffer: Buffer,
    /// Its range of bytes in the buffer.
    pub(crate) place: Range<usize>,
    spec: WeightSpec,
}

impl Weight {
    /// Memory for a weight, to be filled with [`Weight::fill`].
    ///
    /// # Errors
    /// If the specification is invalid, or a limit would be exceeded.
    pub fn allocate(runtime: &Runtime, spec: WeightSpec) -> Result<Weight> {
        spec.check()?;
        let bytes = runtime.backend().packed_bytes(&spec);
        let buffer = runtime.allocate(Category::Weights, bytes)?;
        Ok(Weight { runtime: runtime.clone(), buffer, place: 0..bytes, spec })
    }

    /// Stores a block of rows. Devices pack whole tiles of rows: each block begins at a multiple of 256 rows, and each
    /// but the last has a multiple of 256 rows.
    ///
    /// # Errors
    /// If the block is not within the weight; or its data has another coding, a wrong size, or a code of too many bits.
    pub fn fill(&self, block: &RowBlock<'_>) -> Result<()> {
        let spec = &self.spec;
        check_place(spec, block)?;
        if self.runtime.backend().is_planning() {
            return Ok(());
        }
        check_rows(spec, block)?;
        if block.rows == 0 {
            return Ok(());
        }
        self.runtime.exclusive(|backend| backend.pack(spec, self.buffer.memory(), self.place.start, block))
    }

    /// Repeats the first `rows` rows of the first expert, stored before, over the whole weight: for made-up weights.
    /// False if the device cannot do this, or if `rows` is 0 or more than there are; the caller then stores every row.
    pub fn repeat(&self, rows: usize) -> bool {
        if rows == 0 || rows > self.spec.rows {
            return false;
        }

        let repeat = |backend: &dyn crate::Backend| {
            backend.repeat_rows(&self.spec, self.buffer.memory(), self.place.start, rows)
        };
        self.runtime.backend().is_planning() || self.runtime.exclusive(repeat)
    }

    /// Some rows as a weight that shares the memory. `None` if the device does not store them contiguously, or they are
    /// not within the weight.
    pub fn rows(&self, rows: Range<usize>) -> Option<Weight> {
        let is_within = self.spec.experts == 1 && rows.start < rows.end && rows.end <= self.spec.rows;
        let first =
            is_within.then(|| self.runtime.backend().first_byte_of_rows(&self.spec, rows.clone()))??;
        let spec = WeightSpec { rows: rows.len(), ..self.spec };
        let start = self.place.start + first;
        let place = start..start + self.runtime.backend().packed_bytes(&spec);
        (place.end <= self.place.end).then(|| Weight { place, spec, ..self.clone() })
    }

    /// Shape and coding.
    pub fn spec(&self) -> &WeightSpec {
        &self.spec
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        self.place.len()
    }
}

/// No weight has as many elements: their bytes could not be counted in `usize`.
const ELEMENTS_END: usize = usize::MAX / 64;

/// Whether a block lies within a weight.
fn check_place(spec: &WeightSpec, block: &RowBlock<'_>) -> Result<()> {
    let end = block.first_row.checked_add(block.rows);
    if block.expert < spec.experts && end.is_some_and(|end| end <= spec.rows) {
        return Ok(());
    }
    Err(ArrayError::Argument {
        op: "pack_weight",
        reason: format!(
            "{} rows from row {} of expert {} are not within ({}, {}, {})",
            block.rows, block.first_row, block.expert, spec.experts, spec.rows, spec.cols
        ),
    })
}

impl WeightSpec {
    /// Refuses a specification that no weight has. For specifications that another process sends.
    ///
    /// # Errors
    /// A format with other numbers or types, columns that are not whole groups or blocks, no elements, or too many.
    pub fn check(&self) -> Result<()> {
        let wrong = |reason: String| Err(ArrayError::Argument { op: "weight", reason });
        match self.format {
            WeightFormat::Dense(dtype) if !dtype.is_float() => {
                wrong(format!("elements are {dtype}, expected a float type"))
            }
            WeightFormat::Affine { scale_dtype, .. } if !scale_dtype.is_float() => {
                wrong(format!("scales are {scale_dtype}, expected a float type"))
            }
            WeightFormat::Affine { bits, .. } if !matches!(bits, 2..=6 | 8) => {
                wrong(format!("{bits} bits; affine weights have 2, 3, 4, 5, 6 or 8"))
            }
            WeightFormat::Affine { group_size, .. } if !matches!(group_size, 32 | 64 | 128) => {
                wrong(format!("groups of {group_size}; affine weights have groups of 32, 64 or 128"))
            }
            WeightFormat::Affine { group_size, .. } if !self.cols.is_multiple_of(usize::from(group_size)) => {
                wrong(format!("{} columns are not a multiple of the group size {group_size}", self.cols))
            }
            WeightFormat::Blocks(format) if !self.cols.is_multiple_of(format.values()) => wrong(format!(
                "{} columns are not whole blocks of {} values of {format}",
                self.cols,
                format.values()
            )),
            _ => {
                let WeightSpec { experts, rows, cols, .. } = *self;
                let elements = experts.checked_mul(rows).and_then(|rows| rows.checked_mul(cols));
                match elements {
                    Some(1..ELEMENTS_END) => Ok(()),
                    Some(0) => wrong(format!("shape ({experts}, {rows}, {cols}) has no elements")),
                    _ => wrong(format!("shape ({experts}, {rows}, {cols}) has too many elements")),
                }
            }
        }
    }

    /// Refuses a block that [`Backend::pack`](crate::Memory::pack) must not be given: [`Weight::fill`] does so for its
    /// own blocks. For blocks that another process sends.
    ///
    /// # Errors
    /// As [`Weight::fill`]; a specification that no weight has.
    pub fn check_block(&self, block: &RowBlock<'_>) -> Result<()> {
        self.check()?;
        check_place(self, block)?;
        check_rows(self, block)
    }
}

/// Whether a block within a weight has the weight's coding and the right number of elements.
fn check_rows(spec: &WeightSpec, block: &RowBlock<'_>) -> Result<()> {
    let wrong = |reason: String| Err(ArrayError::Argument { op: "pack_weight", reason });
    let (rows, cols) = (block.rows, spec.cols);
    let bytes_of = |got: usize, expected: usize, elements: &dyn std::fmt::Display| match got == expected {
        true => Ok(()),
        false => wrong(format!("{got} bytes for {rows} rows of {cols} {elements}, expected {expected}")),
    };
    match (block.data, spec.format) {
        (RowData::Dense(bytes), WeightFormat::Dense(dtype)) => {
            bytes_of(bytes.len(), rows * cols * dtype.size(), &dtype)
        }
        (RowData::Blocks(bytes), WeightFormat::Blocks(format)) => {
            let row = format.row_bytes(cols).expect("weights have whole blocks");
            bytes_of(bytes.len(), rows * row, &format_args!("values in {format}"))
        }
        (RowData::Affine { codes, scales, biases }, WeightFormat::Affine { bits, group_size, .. }) => {
            let (values, groups) = (rows * cols, rows * cols / usize::from(group_size));
            if codes.len() != values || scales.len() != groups || biases.len() != groups {
                let (codes, scales, biases) = (codes.len(), scales.len(), biases.len());
                return wrong(format!(
                    "{codes} codes, {scales} scales and {biases} biases for {rows} rows of {cols}; expected {values}, and {groups} each"
                ));
            }
            match codes.iter().find(|&&code| u32::from(code) >> bits != 0) {
                Some(code) => wrong(format!("code {code} does not fit {bits} bits")),
                None => Ok(()),
            }
        }
        (_, format) => wrong(format!("the rows are not coded as the weight, {format:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_and_scales_are_floats() {
        let check =
            |format| WeightSpec { experts: 1, rows: 4, cols: 64, format, compute: Compute::Auto }.check();
        let affine = |scale_dtype| WeightFormat::Affine { bits: 4, group_size: 64, scale_dtype };
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            assert!(check(affine(dtype)).is_ok() && check(WeightFormat::Dense(dtype)).is_ok(), "{dtype}");
        }
        for dtype in [DType::Bool, DType::U8, DType::U32, DType::I32, DType::I64] {
            let message = check(affine(dtype)).expect_err("no floats").to_string();
            assert_eq!(message, format!("weight: scales are {dtype}, expected a float type"));
            assert!(check(WeightFormat::Dense(dtype)).is_err(), "{dtype}");
        }
    }
}
