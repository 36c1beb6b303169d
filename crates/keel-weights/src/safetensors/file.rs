//! One mapped safetensors file.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
};

use super::{SafetensorsHeader, StoredDType, TensorEntry};
use crate::{
    RawTensor, Result, TensorInfo, TensorSource, TensorView, WeightsError, mapped::MappedFile,
    source::missing,
};

/// A safetensors file, mapped into memory. Opening reads only the header.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    map: MappedFile,
    header: SafetensorsHeader,
}

impl SafetensorsFile {
    /// Maps the file at `path` and checks its header.
    ///
    /// # Errors
    /// [`WeightsError::Io`] if it cannot be opened, [`WeightsError::Header`] if it is broken.
    pub fn open(path: &Path) -> Result<SafetensorsFile> {
        SafetensorsFile::with_bytes(path, MappedFile::open(path)?)
    }

    /// A file whose bytes are part of the program. Errors name it `path`, which need not exist.
    ///
    /// # Errors
    /// [`WeightsError::Header`] if it is broken.
    pub fn in_memory(path: &Path, bytes: &'static [u8]) -> Result<SafetensorsFile> {
        SafetensorsFile::with_bytes(path, MappedFile::Static(bytes))
    }

    fn with_bytes(path: &Path, map: MappedFile) -> Result<SafetensorsFile> {
        let header = SafetensorsHeader::parse(map.bytes())
            .map_err(|problem| WeightsError::Header { path: path.into(), problem })?;
        Ok(SafetensorsFile { path: path.into(), map, header })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The checked header.
    pub fn header(&self) -> &SafetensorsHeader {
        &self.header
    }

    /// The free-form strings under `__metadata__`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        self.header.metadata()
    }

    fn entry(&self, name: &str) -> Result<(&str, &TensorEntry)> {
        let found = self.header.tensors().get_key_value(name);
        found.map(|(name, entry)| (name.as_str(), entry)).ok_or_else(|| missing(self, name, &self.path))
    }
}

impl TensorSource for SafetensorsFile {
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.header.tensors().keys().map(String::as_str))
    }

    fn contains(&self, name: &str) -> bool {
        self.header.tensors().contains_key(name)
    }

    fn info(&self, name: &str) -> Result<TensorInfo<'_>> {
        let (name, entry) = self.entry(name)?;
        match &entry.dtype {
            StoredDType::Known(dtype) => Ok(TensorInfo { dtype: *dtype, shape: &entry.shape }),
            StoredDType::Other(found) => {
                let needed = "bool, u8, u32, i32, i64, f16, bf16 or f32";
                Err(WeightsError::UnsupportedDType { name: name.into(), found: found.clone(), needed })
            }
        }
    }

    fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        let info = self.info(name)?;
        let (name, entry) = self.entry(name)?;
        TensorView::new(name, info.dtype, info.shape, &self.map.bytes()[entry.range.clone()])
    }

    fn raw(&self, name: &str) -> Result<RawTensor<'_>> {
        let (_, entry) = self.entry(name)?;
        let dtype = match &entry.dtype {
            StoredDType::Known(dtype) => dtype.to_string(),
            StoredDType::Other(name) => name.clone(),
        };
        Ok(RawTensor { dtype, shape: &entry.shape, bytes: &self.map.bytes()[entry.range.clone()] })
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
