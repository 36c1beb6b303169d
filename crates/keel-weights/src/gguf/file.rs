//! One mapped GGUF file.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
};

use super::{BlockTensor, GgmlType, GgufEntry, GgufHeader, GgufValue};
use crate::{
    LinearTensor, Result, TensorInfo, TensorSource, TensorView, WeightsError, linear, mapped::MappedFile,
    source::missing, unsupported::GGUF_ADVICE,
};

/// The number of files that a model is split into. A part has only some of the tensors.
const PARTS_KEY: &str = "split.count";

/// A GGUF file, mapped into memory. Opening reads only the header.
///
/// As a [`TensorSource`] it lends tensors that are stored element by element. It lends a matrix in blocks through
/// [`linear`](TensorSource::linear) as [`LinearTensor::Blocks`].
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    map: MappedFile,
    header: GgufHeader,
}

impl GgufFile {
    /// Maps the file at `path` and checks its header.
    ///
    /// # Errors
    /// [`WeightsError::Io`] if it cannot be opened, [`WeightsError::Header`] if it is broken, [`WeightsError::Split`]
    /// if it is one of several parts.
    pub fn open(path: &Path) -> Result<GgufFile> {
        let map = MappedFile::open(path)?;
        let header = GgufHeader::parse(map.bytes())
            .map_err(|problem| WeightsError::Header { path: path.into(), problem })?;
        let parts = header.metadata().get(PARTS_KEY).and_then(GgufValue::as_u64).unwrap_or(1);
        if parts > 1 {
            return Err(WeightsError::Split { path: path.into(), parts });
        }
        Ok(GgufFile { path: path.into(), map, header })
    }

    /// The checked header.
    pub fn header(&self) -> &GgufHeader {
        &self.header
    }

    /// All metadata by key.
    pub fn metadata(&self) -> &BTreeMap<String, GgufValue> {
        self.header.metadata()
    }

    /// The whole file.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.map.bytes()
    }

    fn entry(&self, name: &str) -> Result<(&str, &GgufEntry)> {
        let found = self.header.tensors().get_key_value(name);
        found.map(|(name, entry)| (name.as_str(), entry)).ok_or_else(|| missing(self, name, &self.path))
    }

    /// A module's weight, if it is a matrix in blocks.
    fn blocks(&self, module: &str) -> Result<Option<BlockTensor<'_>>> {
        let (name, entry) = self.entry(&format!("{module}.weight"))?;
        let Ok(GgmlType::Blocks(format)) = entry.kind else { return Ok(None) };
        linear::check_matrices(module, &entry.shape)?;
        let bytes = &self.map.bytes()[entry.range.clone()];
        Ok(Some(BlockTensor { name, format, shape: &entry.shape, bytes }))
    }
}

impl TensorSource for GgufFile {
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.header.tensors().keys().map(String::as_str))
    }

    fn contains(&self, name: &str) -> bool {
        self.header.tensors().contains_key(name)
    }

    fn info(&self, name: &str) -> Result<TensorInfo<'_>> {
        let (name, entry) = self.entry(name)?;
        let kind = entry.kind.map_err(|id| WeightsError::UnsupportedForm {
            name: name.into(),
            found: GgmlType::describe_unread(id),
            advice: GGUF_ADVICE,
        })?;
        match kind.dtype() {
            Some(dtype) => Ok(TensorInfo { dtype, shape: &entry.shape }),
            None => {
                let (found, needed) = (kind.to_string(), "a type without blocks");
                Err(WeightsError::UnsupportedDType { name: name.into(), found, needed })
            }
        }
    }

    fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        let info = self.info(name)?;
        let (name, entry) = self.entry(name)?;
        TensorView::new(name, info.dtype, info.shape, &self.map.bytes()[entry.range.clone()])
    }

    fn linear(&self, module: &str) -> Result<LinearTensor<'_>> {
        let Some(matrix) = self.blocks(module)? else { return linear::open(self, module) };
        Ok(LinearTensor::Blocks(matrix))
    }

    fn check_intact(&self) -> Result<()> {
        self.map.check_intact(&self.path)
    }

    fn release_rows(&self, name: &str, rows: Range<usize>) {
        if let Some(entry) = self.header.tensors().get(name) {
            self.map.release_rows(&entry.range, &entry.shape, rows);
        }
    }
}
