//! The weight of a linear layer, in the checkpoint's form.

use std::ops::Range;

use keel_array::{BlockFormat, DType};

use crate::{
    Result, TensorSource, TensorView, WeightsError,
    affine::{AffineFormat, AffineTensor, ModuleQuantization, affine_cols},
    awq::AwqTensor,
    cols,
    columns::ColumnsTensor,
    fp4::{Fp4Mode, Fp4Tensor},
    fp8::{self, Fp8Tensor},
    gguf::BlockTensor,
    rows,
    unsupported::{self, CHECKPOINT_ADVICE},
};

/// Sizes and format of a linear layer, from headers and config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearInfo {
    /// The number of stacked experts; `None` for a plain matrix.
    pub experts: Option<usize>,
    /// Outputs: rows of the matrix, or of each expert's.
    pub rows: usize,
    /// Inputs: values in a row.
    pub cols: usize,
    /// Storage of the values.
    pub format: LinearFormat,
}

/// Storage of a linear layer's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinearFormat {
    /// One float per value.
    Dense(DType),
    /// Affine-quantised.
    Affine {
        /// Bits and group size.
        format: AffineFormat,
        /// The type of the scales and biases.
        scales: DType,
    },
    /// In blocks.
    Blocks(BlockFormat),
    /// 4 bits with 4-bit zeros and f16 scales, as packed by AWQ, ParoQuant and GPTQ.
    Awq {
        /// Inputs that share a scale.
        group_size: usize,
    },
    /// 8-bit floats with a scale for each block of 128 by 128, for each row, or for all.
    Fp8,
    /// 4-bit floats in MLX's form.
    Fp4(Fp4Mode),
}

impl LinearInfo {
    /// The sizes of a shape. Its last dimension counts stored elements.
    pub(crate) fn new(shape: &[usize], format: LinearFormat) -> LinearInfo {
        let (experts, matrix) = match shape {
            [experts, matrix @ ..] if matrix.len() == 2 => (Some(*experts), matrix),
            matrix => (None, matrix),
        };
        LinearInfo { experts, rows: rows(matrix), cols: cols(matrix), format }
    }
}

/// The weight of a linear layer or an embedding, borrowed from the checkpoint.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum LinearTensor<'a> {
    /// One float per value: `[rows, cols]` or `[experts, rows, cols]`.
    Dense(TensorView<'a>),
    /// One float per value, stored by columns: `[experts, cols, rows]`.
    Columns(ColumnsTensor<'a>),
    /// Affine-quantised, still packed.
    Affine(AffineTensor<'a>),
    /// In blocks of a GGUF type.
    Blocks(BlockTensor<'a>),
    /// AWQ's and GPTQ's 4 bits.
    Awq(AwqTensor<'a>),
    /// 8-bit floats.
    Fp8(Fp8Tensor<'a>),
    /// 4-bit floats.
    Fp4(Fp4Tensor<'a>),
}

impl LinearTensor<'_> {
    /// The weight's sizes and format.
    pub fn info(&self) -> LinearInfo {
        match self {
            LinearTensor::Dense(view) => LinearInfo::new(view.shape(), LinearFormat::Dense(view.dtype())),
            LinearTensor::Blocks(blocks) => {
                LinearInfo::new(blocks.shape(), LinearFormat::Blocks(blocks.format()))
            }
            LinearTensor::Columns(columns) => columns.info(),
            LinearTensor::Awq(awq) => awq.info(),
            LinearTensor::Fp8(fp8) => fp8.info(),
            LinearTensor::Fp4(fp4) => fp4.info(),
            LinearTensor::Affine(affine) => {
                let (experts, rows, cols) = (affine.experts(), affine.rows(), affine.cols());
                let format =
                    LinearFormat::Affine { format: affine.format(), scales: affine.scales().dtype() };
                LinearInfo { experts, rows, cols, format }
            }
        }
    }

    /// Decodes rows `range` (of all experts, counted through) into `out`.
    ///
    /// # Shapes
    /// `out`: `range.len() * cols`.
    ///
    /// # Errors
    /// [`WeightsError::Rows`] if the rows do not exist or `out` has another length.
    pub fn rows_f32(&self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        match self {
            LinearTensor::Dense(view) => view.rows_f32(range, out),
            LinearTensor::Columns(columns) => columns.rows_f32(range, out),
            LinearTensor::Affine(affine) => affine.rows_f32(range, out),
            LinearTensor::Blocks(blocks) => blocks.rows_f32(range, out),
            LinearTensor::Awq(awq) => awq.rows_f32(range, out),
            LinearTensor::Fp8(fp8) => fp8.rows_f32(range, out),
            LinearTensor::Fp4(fp4) => fp4.rows_f32(range, out),
        }
    }
}

/// The implementation of [`TensorSource::linear`].
pub(crate) fn open<'a, S: TensorSource + ?Sized>(source: &'a S, module: &str) -> Result<LinearTensor<'a>> {
    read(source, module).map_err(|error| unsupported::explained(source, module, error))
}

fn read<'a, S: TensorSource + ?Sized>(source: &'a S, module: &str) -> Result<LinearTensor<'a>> {
    if source.contains(&format!("{module}.qweight")) {
        return AwqTensor::open(source, module).map(LinearTensor::Awq);
    }
    if fp8::scales_name(source, module).is_some() {
        return Fp8Tensor::open(source, module).map(LinearTensor::Fp8);
    }
    let scales = format!("{module}.scales");
    if let Some(mode) = fp4_mode(source, module).filter(|_| source.contains(&scales)) {
        return Fp4Tensor::open(source, module, mode).map(LinearTensor::Fp4);
    }
    let weight = source.tensor(&weight_name(source, module))?;
    if source.contains(&scales) {
        let scales = source.tensor(&scales)?;
        let format = affine_format(source, module, weight.shape(), scales.shape())?;
        let biases = source.tensor(&format!("{module}.biases"))?;
        return AffineTensor::new(format, weight, scales, biases).map(LinearTensor::Affine);
    }
    if !weight.dtype().is_float() {
        let (name, found) = (weight.name().into(), weight.dtype().to_string());
        let needed = "f32, f16 or bf16, or u32 with scales next to it,";
        return Err(WeightsError::UnsupportedDType { name, found, needed });
    }
    check_matrices(module, weight.shape())?;
    Ok(LinearTensor::Dense(weight))
}

/// The config's mode of 4-bit floats for a module.
fn fp4_mode<S: TensorSource + ?Sized>(source: &S, module: &str) -> Option<Fp4Mode> {
    match source.quantization()?.of_module(module) {
        ModuleQuantization::Fp4(mode) => Some(*mode),
        _ => None,
    }
}

/// `<module>.weight`, or the bare name of the module if only that exists: stacked experts are bare parameters in
/// Hugging Face checkpoints.
fn weight_name<S: TensorSource + ?Sized>(source: &S, module: &str) -> String {
    let weight = format!("{module}.weight");
    if !source.contains(&weight) && source.contains(module) { module.into() } else { weight }
}

/// The config's format for a module, if the shapes agree with it.
///
/// Shapes alone cannot tell 4 bits in groups of 64 from 8 bits in groups of 32. So the group size comes from the
/// config, the bits follow from the shapes, and the config's bits must agree.
fn affine_format<S: TensorSource + ?Sized>(
    source: &S,
    module: &str,
    words: &[usize],
    groups: &[usize],
) -> Result<AffineFormat> {
    let problem = |problem: String| Err(WeightsError::Module { module: module.into(), problem });
    let format = match source.quantization().map(|quantization| quantization.of_module(module)) {
        Some(ModuleQuantization::Affine(format)) => *format,
        Some(ModuleQuantization::Dense) => {
            return problem("config.json says it is not quantised, but it has scales".into());
        }
        Some(ModuleQuantization::Unsupported(what)) => {
            return problem(format!(
                "config.json gives {what}; of weights with scales, keel reads bits 2, 3, 4, 5, 6 or 8 with groups of 32, 64 or \
                128, and the modes mxfp4 (groups of 32) and nvfp4 (16); {CHECKPOINT_ADVICE}"
            ));
        }
        Some(ModuleQuantization::Fp4(_)) => {
            return problem("its 4-bit floats were taken for affine codes".into());
        }
        None => return problem("it has scales, but config.json has no 'quantization' section".into()),
    };
    if affine_cols(format, words, groups).is_some() {
        return Ok(format);
    }
    let bits = words.last().zip(groups.last()).and_then(|(words, groups)| {
        let cols = groups.checked_mul(format.group_size()).filter(|&cols| cols > 0)?;
        words.checked_mul(32).filter(|bits| bits.is_multiple_of(cols)).map(|bits| bits / cols)
    });
    let found = match bits {
        Some(bits) if bits != format.bits() => format!("which are {bits} bits in groups of that size"),
        _ => "which do not belong together".into(),
    };
    problem(format!("config.json gives {format}, but it has weight {words:?} and scales {groups:?}, {found}"))
}

/// Checks that a shape is a matrix or a stack of matrices, without a zero.
pub(crate) fn check_matrices(module: &str, shape: &[usize]) -> Result<()> {
    if matches!(shape.len(), 2 | 3) && !shape.contains(&0) {
        return Ok(());
    }
    let problem = format!("shape {shape:?} is neither a matrix nor a stack of matrices");
    Err(WeightsError::Module { module: module.into(), problem })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::*;
    use crate::{Quantization, TensorInfo, source::missing};

    /// Tensors of zeros.
    struct Zeros {
        tensors: BTreeMap<String, (DType, Vec<usize>, Vec<u8>)>,
        quantization: Option<Quantization>,
    }

    impl Zeros {
        fn new(quantization: Value, tensors: &[(&str, DType, &[usize])]) -> Zeros {
            let entry = |&(name, dtype, shape): &(&str, DType, &[usize])| {
                let bytes = vec![0; shape.iter().product::<usize>() * dtype.size()];
                (name.to_string(), (dtype, shape.to_vec(), bytes))
            };
            let quantization = Quantization::from_config(&json!({"quantization": quantization}));
            Zeros { tensors: tensors.iter().map(entry).collect(), quantization }
        }
    }

    impl TensorSource for Zeros {
        fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
            Box::new(self.tensors.keys().map(String::as_str))
        }

        fn contains(&self, name: &str) -> bool {
            self.tensors.contains_key(name)
        }

        fn info(&self, name: &str) -> Result<TensorInfo<'_>> {
            let view = self.tensor(name)?;
            Ok(TensorInfo { dtype: view.dtype(), shape: view.shape() })
        }

        fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
            let found = self.tensors.get_key_value(name);
            let (name, (dtype, shape, bytes)) = found.ok_or_else(|| missing(self, name, "zeros".as_ref()))?;
            TensorView::new(name, *dtype, shape, bytes)
        }

        fn quantization(&self) -> Option<&Quantization> {
            self.quantization.as_ref()
        }
    }

    const F: DType = DType::BF16;
    const U: DType = DType::U32;

    #[test]
    fn sizes_come_from_shapes_and_config() {
        let config = json!({"bits": 3, "group_size": 64, "b": {"bits": 8, "group_size": 32}});
        let zeros = Zeros::new(
            config,
            &[
                ("a.weight", U, &[5, 18]),
                ("a.scales", F, &[5, 3]),
                ("a.biases", F, &[5, 3]),
                ("b.weight", U, &[7, 5, 16]),
                ("b.scales", DType::F32, &[7, 5, 2]),
                ("b.biases", DType::F32, &[7, 5, 2]),
                ("c.weight", DType::F16, &[6, 10]),
                ("experts", F, &[3, 4, 5]),
            ],
        );
        let format = |bits, group_size| AffineFormat::new(bits, group_size).unwrap();
        let a = zeros.linear_info("a").unwrap();
        let affine = LinearFormat::Affine { format: format(3, 64), scales: F };
        assert_eq!(a, LinearInfo { experts: None, rows: 5, cols: 192, format: affine });
        let b = zeros.linear_info("b").unwrap();
        let affine = LinearFormat::Affine { format: format(8, 32), scales: DType::F32 };
        assert_eq!(b, LinearInfo { experts: Some(7), rows: 5, cols: 64, format: affine });
        let c = zeros.linear_info("c").unwrap();
        assert_eq!((c.experts, c.rows, c.cols), (None, 6, 10));
        let experts = zeros.linear_info("experts").unwrap();
        assert_eq!((experts.experts, experts.rows, experts.cols), (Some(3), 4, 5));
    }

    #[test]
    fn config_and_shapes_must_agree() {
        let message = |config: Value, tensors: &[(&str, DType, &[usize])]| {
            Zeros::new(config, tensors).linear_info("m").unwrap_err().to_string()
        };
        let four = || json!({"bits": 4, "group_size": 64});
        let plain: &[(&str, DType, &[usize])] = &[("m.weight", U, &[5, 16]), ("m.scales", F, &[5, 2])];
        assert_eq!(
            message(json!({"bits": 8, "group_size": 64}), plain),
            "module 'm': config.json gives 8 bits in groups of 64, but it has weight [5, 16] and scales [5, 2], \
             which are 4 bits in groups of that size"
        );
        assert!(message(json!(null), plain).contains("no 'quantization' section"));
        assert!(message(json!({"bits": 4, "group_size": 64, "m": false}), plain).contains("not quantised"));
        assert!(message(json!({"bits": 4, "group_size": 16}), plain).contains("bits 4, group_size 16"));
        assert!(message(json!({"quant_method": "awq"}), plain).contains("quant_method 'awq'"));
        for (words, groups) in [
            (&[5, 17][..], &[5, 2][..]),
            (&[5, 16], &[6, 2]),
            (&[5, 0], &[5, 0]),
            (&[16], &[2]),
            (&[0, 16], &[0, 2]),
        ] {
            let message = message(four(), &[("m.weight", U, words), ("m.scales", F, groups)]);
            assert!(message.contains("do not belong together"), "{message}");
        }
        let (none, huge) = (Zeros::new(four(), &[]), [1, usize::MAX / 8]);
        let overflowing = affine_format(&none, "m", &huge, &huge).unwrap_err().to_string();
        assert!(overflowing.contains("do not belong together"), "{overflowing}");
        // A plan refuses the same checkpoints as loading.
        assert!(message(four(), plain).contains("'m.biases' is not in"));
        let with_biases = |weight, shape: &[usize]| {
            let parts =
                [("m.weight", weight, &[5, 16][..]), ("m.scales", F, &[5, 2]), ("m.biases", F, shape)];
            message(four(), &parts)
        };
        assert!(with_biases(F, &[5, 2]).contains("'m.weight' is stored as bf16; u32 is needed here"));
        assert!(with_biases(U, &[5, 1]).contains("'m.biases': expected shape [5, 2]"));
        assert!(message(four(), &[("m.scales", F, &[5, 2])]).contains("'m.weight' is not in"));
        assert!(message(four(), &[("m.weight", U, &[5, 16])]).contains("stored as u32"));
        for shape in [&[5][..], &[2, 3, 4, 5], &[4, 0], &[]] {
            assert!(message(four(), &[("m.weight", F, shape)]).contains("neither a matrix"));
        }
    }
}
