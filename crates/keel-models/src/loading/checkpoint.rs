//! Reads parameters from a checkpoint on disk.

use std::ops::Range;

use keel_array::{BlockFormat, DType, RowData, WeightFormat, WeightSpec};
use keel_weights::affine::unpack_row;
use keel_weights::{
    AffineTensor, AwqTensor, Fp4Mode, LinearFormat, LinearInfo, LinearTensor, RotationValues, TensorSource,
    TensorView, float,
};

use super::{BLOCK_ROWS, Parameters, RowSink};
use crate::{ModelError, Result};

/// Checks the sizes of the linear layer `name`.
fn expect_linear(
    name: &str,
    info: &LinearInfo,
    experts: Option<usize>,
    rows: usize,
    cols: usize,
) -> Result<()> {
    if (info.experts, info.rows, info.cols) == (experts, rows, cols) {
        return Ok(());
    }
    let shape = |e: Option<usize>, r, c| e.map_or(format!("({r}, {c})"), |e| format!("({e}, {r}, {c})"));
    let (expected, got) = (shape(experts, rows, cols), shape(info.experts, info.rows, info.cols));
    Err(ModelError::Shape { name: name.into(), expected, got })
}

/// The parameters of a checkpoint.
pub struct CheckpointParameters<'a>(pub &'a dyn TensorSource);

impl CheckpointParameters<'_> {
    /// Gives the file's pages of these rows back to the system, so that a tensor is never in memory twice. A stack of
    /// experts may be stored under the module's bare name.
    fn release_rows(&self, module: &str, tensor: &LinearTensor<'_>, rows: Range<usize>) {
        if let LinearTensor::Columns(columns) = tensor {
            return self.0.release_rows(module, columns.stored_rows(rows));
        }
        for part in ["", ".weight", ".scales", ".biases"] {
            self.0.release_rows(&format!("{module}{part}"), rows.clone());
        }
    }
}

impl Parameters for CheckpointParameters<'_> {
    fn contains(&self, name: &str) -> bool {
        self.0.contains(name)
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.0.info(name).ok().map(|info| info.shape.to_vec())
    }

    fn linear_format(
        &self,
        module: &str,
        experts: Option<usize>,
        rows: usize,
        cols: usize,
    ) -> Result<WeightFormat> {
        let info = self.0.linear_info(module)?;
        expect_linear(module, &info, experts, rows, cols)?;
        match info.format {
            LinearFormat::Dense(dtype) => Ok(WeightFormat::Dense(dtype)),
            LinearFormat::Affine { format, scales } => Ok(WeightFormat::Affine {
                bits: format.bits() as u8,
                group_size: format.group_size() as u16,
                scale_dtype: scales,
            }),
            LinearFormat::Blocks(format) => Ok(WeightFormat::Blocks(format)),
            // Products of a scale and a zero do not fit the 16 bits of the scales.
            LinearFormat::Awq { group_size } => {
                Ok(WeightFormat::Affine { bits: 4, group_size: group_size as u16, scale_dtype: DType::F32 })
            }
            LinearFormat::Fp4(Fp4Mode::Mxfp4) => Ok(WeightFormat::Blocks(BlockFormat::MXFP4)),
            // No packed form here has a float scale for 16 columns or for 128 by 128. bf16 holds the product of a 4-bit
            // and an 8-bit float exactly. It rounds the product of an 8-bit float and its scale to 8 bits of mantissa;
            // the float has 4.
            LinearFormat::Fp4(Fp4Mode::Nvfp4) | LinearFormat::Fp8 => Ok(WeightFormat::Dense(DType::BF16)),
            other => Err(ModelError::Config(format!("{module}: format {other:?} is not supported"))),
        }
    }

    fn linear_rows(
        &self,
        module: &str,
        expert: Option<usize>,
        rows: Range<usize>,
        _spec: &WeightSpec,
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        let tensor = self.0.linear(module)?;
        let base = expert.unwrap_or(0) * tensor.info().rows;
        for first in rows.clone().step_by(BLOCK_ROWS) {
            let block = first..rows.end.min(first + BLOCK_ROWS);
            let stored = base + block.start..base + block.end;
            match &tensor {
                LinearTensor::Dense(view) => {
                    sink(stored.len(), RowData::Dense(view.bytes_of_rows(stored.clone())?))?
                }
                LinearTensor::Columns(columns) => {
                    sink(stored.len(), RowData::Dense(&columns.bytes_of_rows(stored.clone())?))?
                }
                LinearTensor::Affine(affine) => affine_block(affine, stored.clone(), sink)?,
                LinearTensor::Awq(awq) => awq_block(awq, stored.clone(), sink)?,
                LinearTensor::Fp4(fp4) if fp4.info().format == LinearFormat::Fp4(Fp4Mode::Mxfp4) => {
                    sink(stored.len(), RowData::Blocks(&fp4.rows_blocks(stored.clone())?))?
                }
                LinearTensor::Fp4(_) | LinearTensor::Fp8(_) => decoded_block(&tensor, stored.clone(), sink)?,
                LinearTensor::Blocks(blocks) => {
                    sink(stored.len(), RowData::Blocks(blocks.bytes_of_rows(stored.clone())?))?
                }
                other => return Err(ModelError::Config(format!("{module}: {other:?} is not supported"))),
            }
            self.release_rows(module, &tensor, stored);
        }
        Ok(self.0.check_intact()?)
    }

    fn release(&self, module: &str) {
        self.0.release_linear(module);
    }

    fn rotation(&self, prefix: &str, module: &str) -> Result<Option<RotationValues>> {
        Ok(self.0.rotation(prefix, module)?)
    }

    fn values(&self, name: &str, _elements: usize) -> Result<Vec<f32>> {
        let values = self.0.tensor(name)?.to_f32()?;
        self.0.check_intact()?;
        Ok(values)
    }

    fn rows_are_alike(&self) -> bool {
        false
    }

    fn norms_are_scales(&self) -> bool {
        false
    }

    fn column_tiles(&self, _: &str) -> usize {
        1
    }
}

/// Rows decoded to bf16.
fn decoded_block(tensor: &LinearTensor<'_>, stored: Range<usize>, sink: &mut RowSink<'_>) -> Result<()> {
    let mut values = vec![0.0; stored.len() * tensor.info().cols];
    tensor.rows_f32(stored.clone(), &mut values)?;
    let mut bytes = vec![0; values.len() * DType::BF16.size()];
    float::encode(DType::BF16, &values, &mut bytes);
    sink(stored.len(), RowData::Dense(&bytes))
}

fn awq_block(awq: &AwqTensor<'_>, stored: Range<usize>, sink: &mut RowSink<'_>) -> Result<()> {
    let values = stored.len() * awq.cols();
    let groups = values / awq.group_size();
    let mut codes = vec![0; values];
    let (mut scales, mut biases) = (vec![0.0; groups], vec![0.0; groups]);
    awq.rows_affine(stored.clone(), &mut codes, &mut scales, &mut biases)?;
    sink(stored.len(), RowData::Affine { codes: &codes, scales: &scales, biases: &biases })
}

fn affine_block(affine: &AffineTensor<'_>, stored: Range<usize>, sink: &mut RowSink<'_>) -> Result<()> {
    let cols = affine.cols();
    let groups = cols / affine.format().group_size();
    let mut codes = vec![0; stored.len() * cols];
    let packed = affine.weight().bytes_of_rows(stored.clone())?;
    let row_bytes = packed.len() / stored.len();
    for (packed, codes) in packed.chunks_exact(row_bytes).zip(codes.chunks_exact_mut(cols)) {
        unpack_row(affine.format(), packed, codes);
    }
    let floats = |view: TensorView<'_>| -> Result<Vec<f32>> {
        let mut values = vec![0.0; stored.len() * groups];
        float::decode(view.dtype(), view.bytes_of_rows(stored.clone())?, &mut values);
        Ok(values)
    };
    let (scales, biases) = (floats(affine.scales())?, floats(affine.biases())?);
    let data = RowData::Affine { codes: &codes, scales: &scales, biases: &biases };
    sink(stored.len(), data)
}
