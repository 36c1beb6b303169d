//! Sources of tensors: the interface for loading and planning models.

use std::{ops::Range, path::Path};

use keel_array::DType;

use crate::{
    LinearInfo, LinearTensor, Quantization, Result, RotationValues, TensorView, WeightsError, awq, linear,
};

/// A tensor's type and shape from its header: enough to plan memory without touching its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// The type of the elements.
    pub dtype: DType,
    /// The dimensions, slowest first.
    pub shape: &'a [usize],
}

impl TensorInfo<'_> {
    /// Bytes of the tensor's elements.
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}

/// A tensor as a file stores it, of a type that may be unknown here.
#[derive(Clone, Debug)]
pub struct RawTensor<'a> {
    /// The type's name in the file.
    pub dtype: String,
    /// The shape.
    pub shape: &'a [usize],
    /// The bytes.
    pub bytes: &'a [u8],
}

/// A set of named tensors, on disk or generated. Several threads may read it.
pub trait TensorSource: Sync {
    /// The names of all tensors, sorted.
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_>;

    /// Whether there is a tensor of this name.
    fn contains(&self, name: &str) -> bool;

    /// The dtype and shape of a tensor, from the header only.
    ///
    /// # Errors
    /// [`WeightsError::MissingTensor`], or
    /// [`WeightsError::UnsupportedDType`] if it is stored in a type that [`DType`] lacks, or
    /// [`WeightsError::UnsupportedForm`] if it is in blocks of a type that is not read.
    fn info(&self, name: &str) -> Result<TensorInfo<'_>>;

    /// A tensor's bytes. A mapped file is only read when they are touched.
    ///
    /// # Errors
    /// As for [`info`](TensorSource::info).
    fn tensor(&self, name: &str) -> Result<TensorView<'_>>;

    /// Returns an error if lent bytes could not be read, because their file was cut short meanwhile. Call it after
    /// their use.
    ///
    /// # Errors
    /// [`WeightsError::CutShort`].
    fn check_intact(&self) -> Result<()> {
        Ok(())
    }

    /// A tensor of any type.
    ///
    /// # Errors
    /// [`WeightsError::MissingTensor`]; [`WeightsError::UnsupportedDType`] if the source lends only known types.
    fn raw(&self, name: &str) -> Result<RawTensor<'_>> {
        let (info, view) = (self.info(name)?, self.tensor(name)?);
        Ok(RawTensor { dtype: info.dtype.to_string(), shape: info.shape, bytes: view.bytes() })
    }

    /// The rotation before a ParoQuant layer; `None` if there is none. Its tensors are `<prefix>theta`, `<prefix>pairs`
    /// and `<prefix>channel_scales`. `module` is the layer, or one of the layers that share the rotation.
    ///
    /// # Errors
    /// As for [`linear_info`](TensorSource::linear_info).
    fn rotation(&self, prefix: &str, module: &str) -> Result<Option<RotationValues>> {
        awq::rotation(self, prefix, module)
    }

    /// The config's quantisation of modules; `None` if it has none.
    fn quantization(&self) -> Option<&Quantization> {
        None
    }

    /// Sizes and format of a linear layer or embedding. Its weights are not read. `module` is its path: the name of its
    /// weight without `.weight`.
    ///
    /// # Errors
    /// [`WeightsError::MissingTensor`], [`WeightsError::UnsupportedDType`], [`WeightsError::UnsupportedForm`] if it is
    /// quantised in a way that is not read, or [`WeightsError::Module`] if its tensors do not fit each other or the
    /// config.
    fn linear_info(&self, module: &str) -> Result<LinearInfo> {
        Ok(self.linear(module)?.info())
    }

    /// The weight of a linear layer or embedding. It is [`LinearTensor::Affine`] if `<module>.scales` exists. Stacked
    /// experts may be bare parameters named `<module>`.
    ///
    /// # Errors
    /// As for [`linear_info`](TensorSource::linear_info).
    fn linear(&self, module: &str) -> Result<LinearTensor<'_>> {
        linear::open(self, module)
    }

    /// [`release`](TensorSource::release)s all tensors of a linear layer.
    fn release_linear(&self, module: &str) {
        self.release(module);
        let packed = ["scales", "biases", "qweight", "qzeros", "g_idx", "weight_scale_inv", "weight_scale"];
        for part in ["weight"].into_iter().chain(packed) {
            self.release(&format!("{module}.{part}"));
        }
    }

    /// Tells the source that this tensor's bytes are no longer needed, so it may free their memory. They can still be
    /// read again. Unknown names are ignored.
    fn release(&self, name: &str) {
        self.release_rows(name, 0..usize::MAX);
    }

    /// As [`release`](TensorSource::release) for some rows, counted through all leading dimensions: for tensors too
    /// large to be resident as a whole. Unknown names and rows are ignored.
    fn release_rows(&self, name: &str, rows: Range<usize>) {
        let _ = (name, rows);
    }
}

/// The product of the dimensions; `None` if their extent cannot be addressed. The extent ignores zeros, so that rows
/// and columns of an empty tensor can be multiplied safely, too.
pub(crate) fn element_count(shape: &[usize]) -> Option<usize> {
    const ELEMENT_BYTES_MAX: usize = 8;
    let extent = shape.iter().try_fold(1usize, |extent, &dim| extent.checked_mul(dim.max(1)))?;
    extent.checked_mul(ELEMENT_BYTES_MAX)?;
    Some(if shape.contains(&0) { 0 } else { extent })
}

/// The error for a missing name, with a few names of `source` that share its longest prefix.
pub(crate) fn missing(source: &dyn TensorSource, name: &str, path: &Path) -> WeightsError {
    const SIBLINGS_MAX: usize = 4;
    let mut siblings = Vec::new();
    let mut prefix = name;
    while let (true, Some((shorter, _))) = (siblings.is_empty(), prefix.rsplit_once('.')) {
        prefix = shorter;
        let others =
            source.names().filter(|name| name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('.')));
        siblings.extend(others.take(SIBLINGS_MAX).map(|name| format!("'{name}'")));
    }
    let (name, path, held) = (name.into(), path.into(), source.names().count());
    WeightsError::MissingTensor { name, path, held, siblings }
}
