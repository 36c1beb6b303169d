//! The input of a conversion: named tensors, read in ranges of rows.

use std::{borrow::Cow, collections::BTreeMap, ops::Range};

use keel_array::{BlockFormat, DType};
use rayon::prelude::*;

use crate::{
    Checkpoint, ColumnsTensor, LinearFormat, LinearTensor, Result, TensorSource, TensorSpec, WeightsError,
    cols, float, fp8,
    gguf::{GgmlType, GgufEntry, GgufFile},
    unsupported,
    view::fill_rows,
};

/// Tensors to be converted.
///
/// Names and shapes are those of the output. Rows count through all leading dimensions.
pub trait RowSource: Sync {
    /// All tensors, sorted by name, each with the type that an unquantised copy has.
    ///
    /// # Errors
    /// If a tensor cannot be converted.
    fn tensors(&self) -> Result<Vec<TensorSpec>>;

    /// Decodes rows of a float tensor into `out`, `rows.len() * cols` values.
    ///
    /// # Errors
    /// If there is no such tensor, or no such rows.
    fn rows_f32(&self, name: &str, rows: Range<usize>, out: &mut [f32]) -> Result<()>;

    /// Rows as bytes, in the type given by [`tensors`](RowSource::tensors).
    ///
    /// # Errors
    /// As [`rows_f32`](RowSource::rows_f32).
    fn bytes_of_rows(&self, spec: &TensorSpec, rows: Range<usize>) -> Result<Cow<'_, [u8]>> {
        encoded_rows(self, spec, rows).map(Cow::Owned)
    }

    /// The blocks of a tensor stored in this coding and in the output's row order; `None` otherwise.
    fn blocks(&self, name: &str, format: BlockFormat) -> Option<&[u8]> {
        let _ = (name, format);
        None
    }

    /// Bytes of a tensor in the source.
    fn stored_bytes(&self, spec: &TensorSpec) -> u64 {
        spec.bytes().unwrap_or(0) as u64
    }

    /// Called after rows have been read.
    fn release_rows(&self, name: &str, rows: Range<usize>) {
        let _ = (name, rows);
    }

    /// As [`TensorSource::check_intact`]. There is no default: without the check, zeros of a file that is cut short
    /// would be written as weights.
    ///
    /// # Errors
    /// [`WeightsError::CutShort`].
    fn check_intact(&self) -> Result<()>;
}

/// Rows of a source, decoded and encoded again.
fn encoded_rows<S: RowSource + ?Sized>(source: &S, spec: &TensorSpec, rows: Range<usize>) -> Result<Vec<u8>> {
    let (name, cols) = (&spec.name, cols(&spec.shape));
    let mut values = vec![0.0; rows.len() * cols];
    fill_rows(&rows, cols, &mut values, |rows, values| source.rows_f32(name, rows, values))?;
    encode_floats(name, spec.dtype, rows.start, cols, &values)
}

/// Values of rows from `start` on, in this type. A finite value that would become infinite is an error.
pub(super) fn encode_floats(
    name: &str,
    dtype: DType,
    start: usize,
    cols: usize,
    values: &[f32],
) -> Result<Vec<u8>> {
    let limit = float::overflow(dtype);
    // Without an early exit, the loop compiles to vector code.
    let overflows =
        |row: &[f32]| row.iter().fold(false, |found, x| found | (x.is_finite() & (x.abs() >= limit)));
    if let Some(row) = values.par_chunks(cols.max(1)).position_first(overflows) {
        return Err(WeightsError::TooLarge { name: name.into(), row: start + row, dtype });
    }
    let mut bytes = vec![0; values.len() * dtype.size()];
    float::encode(dtype, values, &mut bytes);
    Ok(bytes)
}

impl RowSource for Checkpoint {
    fn tensors(&self) -> Result<Vec<TensorSpec>> {
        self.names().map(|name| spec_of(self, name)).collect()
    }

    fn rows_f32(&self, name: &str, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        match ColumnsTensor::find(self, name) {
            Some(columns) => columns.rows_f32(rows, out),
            None => self.tensor(name)?.rows_f32(rows, out),
        }
    }

    fn bytes_of_rows(&self, spec: &TensorSpec, rows: Range<usize>) -> Result<Cow<'_, [u8]>> {
        Ok(match ColumnsTensor::find(self, &spec.name) {
            Some(columns) => Cow::Owned(columns.bytes_of_rows(rows)?),
            None => Cow::Borrowed(self.tensor(&spec.name)?.bytes_of_rows(rows)?),
        })
    }

    fn release_rows(&self, name: &str, rows: Range<usize>) {
        match ColumnsTensor::find(self, name) {
            None => TensorSource::release_rows(self, name, rows),
            Some(columns) => TensorSource::release_rows(self, name, columns.stored_rows(rows)),
        }
    }

    fn check_intact(&self) -> Result<()> {
        TensorSource::check_intact(self)
    }
}

/// The name, type and shape of a tensor. Matrices that are stored by columns have their shape by rows.
fn spec_of(checkpoint: &Checkpoint, name: &str) -> Result<TensorSpec> {
    let info = checkpoint.info(name)?;
    let columns = ColumnsTensor::find(checkpoint, name);
    let shape = columns.map_or_else(|| info.shape.into(), |columns| columns.shape());
    Ok(TensorSpec { name: name.into(), dtype: info.dtype, shape })
}

/// A quantised checkpoint, presented dense.
pub struct Dequantized<'a> {
    checkpoint: &'a Checkpoint,
    tensors: BTreeMap<String, TensorSpec>,
}

impl<'a> Dequantized<'a> {
    /// The tensors of `checkpoint`. Each quantised module becomes one weight.
    ///
    /// # Errors
    /// [`WeightsError::Module`] if a module's tensors do not fit, or its input is rotated first (ParoQuant);
    /// [`WeightsError::UnsupportedForm`] if a module is quantised in a way that is not read.
    pub fn new(checkpoint: &'a Checkpoint) -> Result<Dequantized<'a>> {
        // Scales of activations are not used: they are not rounded to 8 bits.
        const PARTS: [&str; 7] =
            ["scales", "biases", "qzeros", "g_idx", "weight_scale_inv", "activation_scale", "input_scale"];
        let turned =
            |name: &'a str| name.strip_suffix(".theta").or_else(|| name.strip_suffix("_weight_theta"));
        if let Some(module) = checkpoint.names().find_map(turned) {
            let problem = "its input is rotated (ParoQuant), which other forms cannot say".into();
            return Err(WeightsError::Module { module: module.into(), problem });
        }
        let mut tensors = BTreeMap::new();
        for name in checkpoint.names() {
            let (module, part) = name.rsplit_once('.').unwrap_or((name, ""));
            let is_quantized = part == "qweight" || part == "weight" && is_packed(checkpoint, module);
            let spec = if is_quantized {
                let info = checkpoint.linear_info(module)?;
                let dtype = match info.format {
                    LinearFormat::Dense(dtype) => dtype,
                    LinearFormat::Affine { scales, .. } => scales,
                    LinearFormat::Awq { .. } => DType::F16,
                    _ => DType::BF16,
                };
                let shape = info.experts.into_iter().chain([info.rows, info.cols]).collect();
                TensorSpec { name: format!("{module}.weight"), dtype, shape }
            } else if PARTS.contains(&part) || part == "weight_scale" && is_packed(checkpoint, module) {
                continue;
            } else {
                unsupported::check_part(checkpoint, name)?;
                spec_of(checkpoint, name)
                    .map_err(|error| unsupported::explained(checkpoint, module, error))?
            };
            tensors.insert(spec.name.clone(), spec);
        }
        Ok(Dequantized { checkpoint, tensors })
    }
}

/// Whether the checkpoint has scales for a weight.
fn is_packed(checkpoint: &Checkpoint, module: &str) -> bool {
    checkpoint.contains(&format!("{module}.scales")) || fp8::scales_name(checkpoint, module).is_some()
}

impl RowSource for Dequantized<'_> {
    fn tensors(&self) -> Result<Vec<TensorSpec>> {
        Ok(self.tensors.values().cloned().collect())
    }

    fn rows_f32(&self, name: &str, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        match self.decoded_module(name) {
            Some(module) => self.checkpoint.linear(module)?.rows_f32(rows, out),
            None => RowSource::rows_f32(self.checkpoint, name, rows, out),
        }
    }

    fn bytes_of_rows(&self, spec: &TensorSpec, rows: Range<usize>) -> Result<Cow<'_, [u8]>> {
        match self.decoded_module(&spec.name) {
            Some(_) => encoded_rows(self, spec, rows).map(Cow::Owned),
            None => RowSource::bytes_of_rows(self.checkpoint, spec, rows),
        }
    }

    fn release_rows(&self, name: &str, rows: Range<usize>) {
        let is_last = self.tensors.get(name).is_some_and(|spec| rows.end >= crate::rows(&spec.shape));
        match name.strip_suffix(".weight") {
            // With the last rows of a module, all of its scales and zeros have been read.
            Some(module) if is_last => self.checkpoint.release_linear(module),
            _ => RowSource::release_rows(self.checkpoint, name, rows),
        }
    }

    fn check_intact(&self) -> Result<()> {
        TensorSource::check_intact(self.checkpoint)
    }
}

impl Dequantized<'_> {
    /// The last dimension of a tensor.
    pub fn cols_of(&self, name: &str) -> Option<usize> {
        self.tensors.get(name).map(|spec| cols(&spec.shape))
    }

    /// The quantised module whose weight has this name. The other tensors are those of the checkpoint.
    fn decoded_module<'n>(&self, name: &'n str) -> Option<&'n str> {
        let module = name.strip_suffix(".weight")?;
        (!self.checkpoint.contains(name) || is_packed(self.checkpoint, module)).then_some(module)
    }
}

impl RowSource for GgufFile {
    /// Tensors that are not in blocks keep their types. Blocks have no element type; f32 stands for it.
    fn tensors(&self) -> Result<Vec<TensorSpec>> {
        let spec = |(name, entry): (&str, &GgufEntry)| {
            let dtype = match entry.kind {
                Ok(kind) => kind.dtype().unwrap_or(DType::F32),
                Err(_) => self.info(name)?.dtype,
            };
            Ok(TensorSpec { name: name.into(), dtype, shape: entry.shape.clone() })
        };
        self.entries().map(spec).collect()
    }

    fn rows_f32(&self, name: &str, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let module = name.strip_suffix(".weight").filter(|_| self.info(name).is_err());
        match module.map(|module| self.linear(module)).transpose()? {
            Some(LinearTensor::Blocks(blocks)) => blocks.rows_f32(rows, out),
            _ => self.tensor(name)?.rows_f32(rows, out),
        }
    }

    fn blocks(&self, name: &str, format: BlockFormat) -> Option<&[u8]> {
        let is_stored_so = self.entry(name)?.kind == Ok(GgmlType::Blocks(format));
        self.bytes_of(name).filter(|_| is_stored_so)
    }

    fn stored_bytes(&self, spec: &TensorSpec) -> u64 {
        self.entry(&spec.name).map_or(0, |entry| entry.range.len() as u64)
    }

    fn release_rows(&self, name: &str, rows: Range<usize>) {
        TensorSource::release_rows(self, name, rows);
    }

    fn check_intact(&self) -> Result<()> {
        TensorSource::check_intact(self)
    }
}
