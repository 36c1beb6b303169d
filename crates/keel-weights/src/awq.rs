//! 4-bit weights with 4-bit zeros, as packed by AWQ (Lin et al., 2023), GPTQ (Frantar et al., 2022) and ParoQuant
//! (Liang et al., 2025), which uses AWQ's form.
//!
//! `weight[n, k] = scale[g, n] * (q[k, n] - zero[g, n])` with `g = k / group_size`. `scales` are f16 or bf16
//! `[K / group_size, N]`. Each i32 word holds eight values:
//!
//! * AWQ: `qweight` `[K, N / 8]` and `qzeros` `[K / group_size, N / 8]`. A word holds eight outputs, from the lowest
//!   bits on in the order 0, 2, 4, 6, 1, 3, 5, 7.
//! * GPTQ: `qweight` `[K / 8, N]` holds eight inputs a word, `qzeros` eight outputs, both in order. Stored zeros are
//!   one too small, unless the config's `checkpoint_format` is `gptq_v2`. `g_idx` i32 `[K]` names the group of each
//!   input. Only groups `k / group_size` are read, because inputs in another order would need separate scales.
//!
//! ParoQuant's layers first scale their input and rotate it in pairs: `channel_scales` f16 `[1, K]` or `[K]`, `theta`
//! f16 `[R, K / 2]` and `pairs` i16 `[R, K]`, which count from the start of their group. The experts of a layer share
//! two rotations: `experts.gate_up_weight_theta` etc. and `experts.down_weight_theta` etc., next to
//! `experts.0.gate_proj.qweight`.

use std::ops::Range;

use keel_array::DType;
use rayon::prelude::*;

use crate::{
    LinearFormat, LinearInfo, RawTensor, Result, TensorSource, TensorView, WeightsError,
    affine::Gptq,
    float,
    unsupported::{self, CHECKPOINT_ADVICE},
};

/// First bit of output `i` of eight in its word.
const AWQ_SHIFTS: [u32; 8] = [0, 16, 4, 20, 8, 24, 12, 28];

/// Rows that one thread unpacks at a time: those of an AWQ word.
const TASK_ROWS: usize = 8;

/// The largest groups that kernels have. A larger group is read as several with the same scale.
const GROUP_MAX: usize = 128;

/// The values that share a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Packing {
    Awq,
    Gptq {
        /// Added to each stored zero.
        zero_offset: u8,
    },
}

/// A 4-bit weight, borrowed from its checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct AwqTensor<'a> {
    qweight: TensorView<'a>,
    qzeros: TensorView<'a>,
    scales: TensorView<'a>,
    packing: Packing,
    rows: usize,
    cols: usize,
    /// Inputs that share a scale in the file.
    stored_group: usize,
}

/// The rotation before a ParoQuant layer.
#[derive(Clone, Debug, PartialEq)]
pub struct RotationValues {
    /// Factor of each column, `[K]`.
    pub scales: Vec<f32>,
    /// Columns that turn together, as consecutive pairs, `[R, K]`.
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
        let tensor = |part: &str| source.tensor(&format!("{module}.{part}"));
        let (qweight, qzeros, scales) = (tensor("qweight")?, tensor("qzeros")?, tensor("scales")?);
        let wrong = |problem: String| Err(WeightsError::Module { module: module.into(), problem });
        let unread = || unsupported::method_of_words(source, module);
        let Gptq { bits, zero_offset } =
            source.quantization().map_or(Ok(Gptq::default()), |q| q.gptq().ok_or_else(unread))?;
        if bits != 4 {
            return wrong(format!("config.json gives GPTQ with {bits} bits; {CHECKPOINT_ADVICE}"));
        }
        let matrix = |view: TensorView<'_>| match view.shape() {
            &[rows, cols] if rows > 0 && cols > 0 => Some((rows, cols)),
            _ => None,
        };
        let shapes = (matrix(qweight), matrix(qzeros), matrix(scales));
        let types = qweight.dtype() == DType::I32
            && qzeros.dtype() == DType::I32
            && matches!(scales.dtype(), DType::F16 | DType::BF16);
        if let (Some((lines, width)), Some((groups, zero_words)), Some((scale_groups, rows))) = shapes
            && types
            && zero_words.checked_mul(8) == Some(rows)
            && groups == scale_groups
        {
            let found = match lines.checked_mul(8) {
                _ if width == zero_words => Some((Packing::Awq, lines)),
                Some(cols) if width == rows => Some((Packing::Gptq { zero_offset }, cols)),
                _ => None,
            };
            if let Some((packing, cols)) = found.filter(|(_, cols)| cols.is_multiple_of(groups)) {
                let stored_group = cols / groups;
                if packing != Packing::Awq && source.contains(&format!("{module}.g_idx")) {
                    check_groups(module, tensor("g_idx")?, cols, stored_group)?;
                }
                return Ok(AwqTensor { qweight, qzeros, scales, packing, rows, cols, stored_group });
            }
        }
        wrong(format!(
            "qweight {} {:?}, qzeros {} {:?} and scales {} {:?} are neither AWQ's i32 [K, N / 8], i32 [G, N / 8] and f16 \
             [G, N] nor GPTQ's, which has i32 [K / 8, N] first",
            qweight.dtype(),
            qweight.shape(),
            qzeros.dtype(),
            qzeros.shape(),
            scales.dtype(),
            scales.shape()
        ))
    }

    /// The weight's sizes and format.
    pub fn info(&self) -> LinearInfo {
        let format = LinearFormat::Awq { group_size: self.group_size() };
        LinearInfo { experts: None, rows: self.rows, cols: self.cols, format }
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Inputs that share a scale.
    pub fn group_size(&self) -> usize {
        if self.stored_group.is_multiple_of(GROUP_MAX) { GROUP_MAX } else { self.stored_group }
    }

    /// The code of input `k` of output `row`.
    fn code(&self, k: usize, row: usize) -> u8 {
        match self.packing {
            Packing::Awq => nibble(&self.qweight, k * (self.rows / 8) + row / 8, AWQ_SHIFTS[row % 8]),
            Packing::Gptq { .. } => nibble(&self.qweight, k / 8 * self.rows + row, k as u32 % 8 * 4),
        }
    }

    /// The zero of a group of output `row`.
    fn zero(&self, group: usize, row: usize) -> u8 {
        let word = group * (self.rows / 8) + row / 8;
        match self.packing {
            Packing::Awq => nibble(&self.qzeros, word, AWQ_SHIFTS[row % 8]),
            Packing::Gptq { zero_offset } => nibble(&self.qzeros, word, row as u32 % 8 * 4) + zero_offset,
        }
    }

    /// Rows `range` as affine codes, scales and biases, `weight = scale * code + bias`, on all threads.
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
        let (cols, groups) = (self.cols, self.cols / self.group_size());
        crate::view::check_rows(self.qweight.name(), self.rows, cols, &range, codes.len())?;
        for lens in [scales.len(), biases.len()] {
            crate::view::check_rows(self.scales.name(), self.rows, groups, &range, lens)?;
        }
        let offsets =
            scales.par_chunks_mut(TASK_ROWS * groups).zip(biases.par_chunks_mut(TASK_ROWS * groups));
        let tasks = codes.par_chunks_mut(TASK_ROWS * cols).zip(offsets).enumerate();
        tasks.for_each(|(task, (codes, (scales, biases)))| {
            let first = range.start + task * TASK_ROWS;
            for k in 0..cols {
                for (i, codes) in codes.chunks_exact_mut(cols).enumerate() {
                    codes[k] = self.code(k, first + i);
                }
            }
            self.scales_and_biases(first..first + codes.len() / cols, scales, biases);
        });
        Ok(())
    }

    /// The scales and biases of at most [`TASK_ROWS`] rows.
    fn scales_and_biases(&self, rows: Range<usize>, scales: &mut [f32], biases: &mut [f32]) {
        let (dtype, groups) = (self.scales.dtype(), self.cols / self.group_size());
        let mut of_rows = [0.0; TASK_ROWS];
        let of_rows = &mut of_rows[..rows.len()];
        for group in 0..groups {
            let stored = group * self.group_size() / self.stored_group;
            let bytes = &self.scales.bytes()[(stored * self.rows + rows.start) * dtype.size()..];
            float::decode(dtype, &bytes[..rows.len() * dtype.size()], of_rows);
            for (i, scale) in of_rows.iter().enumerate() {
                scales[i * groups + group] = *scale;
                biases[i * groups + group] = -scale * f32::from(self.zero(stored, rows.start + i));
            }
        }
    }

    /// Decodes rows `range` into `out`, `range.len() * cols` values.
    ///
    /// # Errors
    /// [`WeightsError::Rows`] if the rows do not exist or `out` has another length.
    pub fn rows_f32(&self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let groups = range.len().saturating_mul(self.cols / self.group_size());
        let mut codes = vec![0; out.len()];
        let (mut scales, mut biases) = (vec![0.0; groups], vec![0.0; groups]);
        self.rows_affine(range, &mut codes, &mut scales, &mut biases)?;
        for (i, (out, code)) in out.iter_mut().zip(codes).enumerate() {
            let group = i / self.group_size();
            *out = scales[group] * f32::from(code) + biases[group];
        }
        Ok(())
    }
}

/// Four bits of a word, from bit `shift` on.
fn nibble(tensor: &TensorView<'_>, word: usize, shift: u32) -> u8 {
    (u32::from_le_bytes(tensor.bytes().as_chunks::<4>().0[word]) >> shift & 15) as u8
}

/// Checks that input `k` belongs to group `k / group`.
fn check_groups(module: &str, groups: TensorView<'_>, cols: usize, group: usize) -> Result<()> {
    let groups = groups.expect_shape(&[cols])?;
    let problem = if groups.dtype() != DType::I32 {
        format!("g_idx is {}, expected i32", groups.dtype())
    } else {
        let of = |k: usize| i32::from_le_bytes(groups.bytes().as_chunks::<4>().0[k]);
        let Some(k) = (0..cols).find(|&k| usize::try_from(of(k)) != Ok(k / group)) else { return Ok(()) };
        format!(
            "input {k} belongs to group {}, not {}: activation order (desc_act) is not read, because its groups do not lie side \
             by side; use a checkpoint that was made with desc_act false",
            of(k),
            k / group
        )
    };
    Err(WeightsError::Module { module: module.into(), problem })
}

/// The rotation of a ParoQuant layer; `None` if there is none. The names of its tensors begin with `prefix`. `module`
/// is the layer, or one of the layers that share it.
pub(crate) fn rotation<S: TensorSource + ?Sized>(
    source: &S,
    prefix: &str,
    module: &str,
) -> Result<Option<RotationValues>> {
    let name = |part: &str| format!("{prefix}{part}");
    if !source.contains(&name("theta")) {
        return Ok(None);
    }
    let AwqTensor { cols, stored_group: group_size, .. } = AwqTensor::open(source, module)?;
    let angles = source.tensor(&name("theta"))?;
    let rounds = angles.rows();
    let angles = angles.expect_shape(&[rounds, cols / 2])?.to_f32()?;
    let scales = source.tensor(&name("channel_scales"))?;
    let scales = if scales.shape().len() == 1 {
        scales.expect_shape(&[cols])?
    } else {
        scales.expect_shape(&[1, cols])?
    };
    let scales = scales.to_f32()?;
    let RawTensor { dtype, shape, bytes } = source.raw(&name("pairs"))?;
    let wrong = |problem: String| WeightsError::Module { module: module.into(), problem };
    if dtype != "I16" || *shape != [rounds, cols] {
        return Err(wrong(format!("pairs are {dtype} {shape:?}, expected I16 {:?}", [rounds, cols])));
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
