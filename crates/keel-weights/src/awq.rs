//! AWQ's packing of 4-bit weights, which ParoQuant shares (Lin et al., 2023; Liang et al., 2025).
//!
//! `weight[n, k] = scale[g, n] * (q[k, n] - zero[g, n])` with `g = k / group_size`. `qweight` i32 `[K, N / 8]` and `qzeros` i32
//! `[K / group_size, N / 8]` hold eight outputs a word, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on;
//! `scales` are f16 `[K / group_size, N]`.
//!
//! ParoQuant's layers first scale their input and turn it in pairs: `channel_scales` f16 `[1, K]`, `theta` f16 `[R, K / 2]`
//! and `pairs` i16 `[R, K]`, which count from the start of their group.

use std::ops::Range;

use keel_array::DType;

use crate::{LinearFormat, LinearInfo, Result, TensorInfo, TensorSource, TensorView, WeightsError, float};

/// Bit at which output `i` of eight lies in its word.
const SHIFTS: [u32; 8] = [0, 16, 4, 20, 8, 24, 12, 28];

/// A 4-bit weight, borrowed from its checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct AwqTensor<'a> {
    qweight: TensorView<'a>,
    qzeros: TensorView<'a>,
    scales: TensorView<'a>,
    rows: usize,
    group_size: usize,
}

/// What stands before a ParoQuant layer.
#[derive(Clone, Debug, PartialEq)]
pub struct RotationValues {
    /// Factor of each column, `[K]`.
    pub scales: Vec<f32>,
    /// Columns that turn together, two after two, `[R, K]`.
    pub pairs: Vec<u32>,
    /// Angle of each pair in radians, `[R, K / 2]`.
    pub angles: Vec<f32>,
}

impl<'a> AwqTensor<'a> {
    /// The weight of `module`.
    ///
    /// # Errors
    /// [`WeightsError::Module`] if its tensors do not fit each other.
    pub(crate) fn open<S: TensorSource + ?Sized>(source: &'a S, module: &str) -> Result<AwqTensor<'a>> {
        let info = info(source, module)?;
        let tensor = |part: &str| source.tensor(&format!("{module}.{part}"));
        let (qweight, qzeros, scales) = (tensor("qweight")?, tensor("qzeros")?, tensor("scales")?);
        let LinearFormat::Awq { group_size } = info.format else { unreachable!("info reads AWQ") };
        Ok(AwqTensor { qweight, qzeros, scales, rows: info.rows, group_size })
    }

    /// Its sizes and format.
    pub fn info(&self) -> LinearInfo {
        let format = LinearFormat::Awq { group_size: self.group_size };
        LinearInfo { experts: None, rows: self.rows, cols: self.cols(), format }
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.qweight.rows()
    }

    /// Inputs that share a scale.
    pub fn group_size(&self) -> usize {
        self.group_size
    }

    /// Rows `range` as affine codes, scales and biases, `weight = scale * code + bias`.
    ///
    /// # Shapes
    /// `codes`: `range.len() * cols`; `scales` and `biases`: `range.len() * cols / group_size`.
    ///
    /// # Errors
    /// [`WeightsError::Rows`] if the rows do not exist or a slice has another length.
    pub fn rows_affine(
        &self,
        range: Range<usize>,
        codes: &mut [u8],
        scales: &mut [f32],
        biases: &mut [f32],
    ) -> Result<()> {
        let (cols, groups) = (self.cols(), self.cols() / self.group_size);
        crate::view::check_rows(self.qweight.name(), self.rows, cols, &range, codes.len())?;
        for lens in [scales.len(), biases.len()] {
            crate::view::check_rows(self.scales.name(), self.rows, groups, &range, lens)?;
        }
        let code = |tensor: &TensorView<'_>, k: usize, row: usize| {
            let word = tensor.bytes().as_chunks::<4>().0[k * self.rows / 8 + row / 8];
            (u32::from_le_bytes(word) >> SHIFTS[row % 8] & 15) as u8
        };
        let mut group_scales = vec![0.0; self.rows];
        for k in 0..cols {
            let group = k / self.group_size;
            let starts = k % self.group_size == 0;
            if starts {
                float::decode(
                    self.scales.dtype(),
                    self.scales.row_bytes(group..group + 1)?,
                    &mut group_scales,
                );
            }
            for (i, row) in range.clone().enumerate() {
                codes[i * cols + k] = code(&self.qweight, k, row);
                if starts {
                    let scale = group_scales[row];
                    scales[i * groups + group] = scale;
                    biases[i * groups + group] = -scale * f32::from(code(&self.qzeros, group, row));
                }
            }
        }
        Ok(())
    }

    /// Decodes rows `range` into `out`, `range.len() * cols` values.
    ///
    /// # Errors
    /// [`WeightsError::Rows`] if the rows do not exist or `out` has another length.
    pub fn rows_f32(&self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let groups = range.len().saturating_mul(self.cols() / self.group_size);
        let mut codes = vec![0; out.len()];
        let (mut scales, mut biases) = (vec![0.0; groups], vec![0.0; groups]);
        self.rows_affine(range, &mut codes, &mut scales, &mut biases)?;
        for (i, (out, code)) in out.iter_mut().zip(codes).enumerate() {
            let group = i / self.group_size;
            *out = scales[group] * f32::from(code) + biases[group];
        }
        Ok(())
    }
}

/// Sizes of an AWQ layer, checked against each other.
pub(crate) fn info<S: TensorSource + ?Sized>(source: &S, module: &str) -> Result<LinearInfo> {
    let part = |part: &str| source.info(&format!("{module}.{part}"));
    let (qweight, qzeros, scales) = (part("qweight")?, part("qzeros")?, part("scales")?);
    let matrix = |info: TensorInfo<'_>| match info.shape {
        &[rows, cols] if rows > 0 && cols > 0 => Some((rows, cols)),
        _ => None,
    };
    let shapes = (matrix(qweight), matrix(qzeros), matrix(scales));
    let types = qweight.dtype == DType::I32 && qzeros.dtype == DType::I32 && scales.dtype == DType::F16;
    if let (Some((cols, words)), Some((groups, zero_words)), Some((scale_groups, rows))) = shapes
        && types
        && words.checked_mul(8) == Some(rows)
        && (groups, zero_words) == (scale_groups, words)
        && cols.is_multiple_of(groups)
    {
        let format = LinearFormat::Awq { group_size: cols / groups };
        return Ok(LinearInfo { experts: None, rows, cols, format });
    }
    let problem = format!(
        "qweight {} {:?}, qzeros {} {:?} and scales {} {:?} are not AWQ's i32 [K, N / 8], i32 [G, N / 8] and f16 [G, N]",
        qweight.dtype, qweight.shape, qzeros.dtype, qzeros.shape, scales.dtype, scales.shape
    );
    Err(WeightsError::Module { module: module.into(), problem })
}

/// The rotation of a ParoQuant layer; `None` if the layer has none.
pub(crate) fn rotation<S: TensorSource + ?Sized>(source: &S, module: &str) -> Result<Option<RotationValues>> {
    let name = |part: &str| format!("{module}.{part}");
    if !source.contains(&name("theta")) {
        return Ok(None);
    }
    let LinearInfo { cols, format: LinearFormat::Awq { group_size }, .. } = info(source, module)? else {
        unreachable!("info reads AWQ")
    };
    let angles = source.tensor(&name("theta"))?;
    let rounds = angles.rows();
    let angles = angles.expect_shape(&[rounds, cols / 2])?.to_f32()?;
    let scales = source.tensor(&name("channel_scales"))?.expect_shape(&[1, cols])?.to_f32()?;
    let (kind, shape, bytes) = source.raw(&name("pairs"))?;
    let wrong = |problem: String| WeightsError::Module { module: module.into(), problem };
    if kind != "I16" || *shape != [rounds, cols] {
        return Err(wrong(format!("pairs are {kind} {shape:?}, expected I16 {:?}", [rounds, cols])));
    }
    let mut pairs = Vec::with_capacity(rounds * cols);
    for (i, local) in bytes.as_chunks::<2>().0.iter().enumerate() {
        let local = usize::try_from(i16::from_le_bytes(*local)).ok().filter(|local| *local < group_size);
        let local =
            local.ok_or_else(|| wrong(format!("pair entry {i} is not within a group of {group_size}")))?;
        pairs.push((i % cols / group_size * group_size + local) as u32);
    }
    Ok(Some(RotationValues { scales, pairs, angles }))
}
