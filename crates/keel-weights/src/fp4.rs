//! 4-bit floats in MLX's form: `mode` `mxfp4` or `nvfp4` in the config.
//!
//! `weight[n, k] = level(code) * scale[n, k / group]`, levels 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. `weight`
//! u32
//! `[N, K / 8]` holds eight codes a word, lowest bits first. `scales` u8 `[N, K / group]` are powers of two
//! (`2^(e - 127)`, groups of 32) in `mxfp4`, and 8-bit floats (E4M3, groups of 16) in `nvfp4`. Experts are stacked.

use std::ops::Range;

use keel_array::{BlockFormat, DType};

use crate::{
    LinearFormat, LinearInfo, Result, TensorSource, TensorView, WeightsError,
    fp8::E4M3,
    linear,
    view::{check_rows, fill_rows},
};

/// The scale of a group of 4-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp4Mode {
    /// A power of two for 32 values.
    Mxfp4,
    /// An 8-bit float for 16 values.
    Nvfp4,
}

/// A weight of 4-bit floats, borrowed from its checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Fp4Tensor<'a> {
    mode: Fp4Mode,
    info: LinearInfo,
    weight: TensorView<'a>,
    scales: TensorView<'a>,
}

impl Fp4Mode {
    /// The mode of this name in a config.
    pub(crate) fn from_name(name: &str) -> Option<Fp4Mode> {
        match name {
            "mxfp4" => Some(Fp4Mode::Mxfp4),
            "nvfp4" => Some(Fp4Mode::Nvfp4),
            _ => None,
        }
    }

    /// Values that share a scale.
    pub const fn group_size(self) -> usize {
        match self {
            Fp4Mode::Mxfp4 => 32,
            Fp4Mode::Nvfp4 => 16,
        }
    }
}

impl<'a> Fp4Tensor<'a> {
    /// The weight of `module`.
    ///
    /// # Errors
    /// [`WeightsError::Module`] if its tensors do not fit each other.
    pub(crate) fn open<S: TensorSource + ?Sized>(
        source: &'a S,
        module: &str,
        mode: Fp4Mode,
    ) -> Result<Fp4Tensor<'a>> {
        let tensor = |part: &str| source.tensor(&format!("{module}.{part}"));
        let (weight, scales) = (tensor("weight")?, tensor("scales")?);
        let group = mode.group_size();
        linear::check_matrices(module, weight.shape())?;
        let split = |view: TensorView<'a>| view.shape().split_last().map(|(&last, leading)| (last, leading));
        let cols =
            split(weight).zip(split(scales)).and_then(|((words, leading), (groups, scale_leading))| {
                let cols = words.checked_mul(8)?;
                (leading == scale_leading && groups.checked_mul(group) == Some(cols)).then_some(cols)
            });
        match cols.filter(|_| weight.dtype() == DType::U32 && scales.dtype() == DType::U8) {
            Some(cols) => {
                let info = LinearInfo { cols, ..LinearInfo::new(weight.shape(), LinearFormat::Fp4(mode)) };
                Ok(Fp4Tensor { mode, info, weight, scales })
            }
            None => {
                let problem = format!(
                    "weight {} {:?} and scales {} {:?} are not u32 [.., N, K / 8] and u8 [.., N, K / {group}]",
                    weight.dtype(),
                    weight.shape(),
                    scales.dtype(),
                    scales.shape()
                );
                Err(WeightsError::Module { module: module.into(), problem })
            }
        }
    }

    /// The weight's sizes and format.
    pub fn info(&self) -> LinearInfo {
        self.info
    }

    /// Decodes rows `range` (of all experts, counted through) into `out`, on all threads.
    ///
    /// # Errors
    /// [`WeightsError::Rows`] if the rows do not exist or `out` has another length.
    pub fn rows_f32(&self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        const LEVELS: [f32; 16] =
            [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
        let (cols, group) = (self.info.cols, self.mode.group_size());
        check_rows(self.weight.name(), self.weight.rows(), cols, &range, out.len())?;
        fill_rows(&range, cols, out, |rows, out| {
            let (codes, scales) =
                (self.weight.bytes_of_rows(rows.clone())?, self.scales.bytes_of_rows(rows)?);
            for ((out, codes), scale) in out.chunks_exact_mut(group).zip(codes.chunks(group / 2)).zip(scales)
            {
                let scale = match self.mode {
                    Fp4Mode::Mxfp4 => 2f32.powi(i32::from(*scale) - 127),
                    Fp4Mode::Nvfp4 => E4M3[usize::from(*scale)],
                };
                for (out, &codes) in out.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                    *out = [codes & 15, codes >> 4].map(|code| LEVELS[usize::from(code)] * scale);
                }
            }
            Ok(())
        })
    }

    /// Rows `range` of an `mxfp4` weight as blocks of [`BlockFormat::MXFP4`], with the same values.
    ///
    /// # Errors
    /// [`WeightsError::Rows`] if the rows do not exist.
    ///
    /// # Panics
    /// If the mode is not `mxfp4`.
    pub fn rows_blocks(&self, range: Range<usize>) -> Result<Vec<u8>> {
        assert_eq!(self.mode, Fp4Mode::Mxfp4);
        let (codes, scales) = (self.weight.bytes_of_rows(range.clone())?, self.scales.bytes_of_rows(range)?);
        let mut blocks = Vec::with_capacity(scales.len() * BlockFormat::MXFP4.bytes());
        for (codes, scale) in codes.as_chunks::<16>().0.iter().zip(scales) {
            blocks.push(*scale);
            // In the checkpoint, neighbours share a byte. In a block, values 16 apart do.
            let code = |i: usize| codes[i / 2] >> (i % 2 * 4) & 15;
            blocks.extend((0..16).map(|i| code(i) | code(i + 16) << 4));
        }
        Ok(blocks)
    }
}
