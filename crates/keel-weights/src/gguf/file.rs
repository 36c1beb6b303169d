//! A mapped GGUF file, or the mapped parts of one.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
};

use super::{BlockTensor, GgmlType, GgufEntry, GgufHeader, GgufValue, part_name::PartName};
use crate::{
    LinearTensor, Result, TensorInfo, TensorSource, TensorView, WeightsError, linear, mapped::MappedFile,
    source::missing, unsupported::GGUF_ADVICE,
};

/// The keys that only a part of a model has.
pub(crate) const PART_KEYS: &str = "split.";

/// The number of parts of a model. Each has some of the tensors, and the first has the metadata.
const PARTS_KEY: &str = "split.count";

/// Which part a file is, from 0.
const PART_KEY: &str = "split.no";

/// The number of tensors of all parts together.
const TENSORS_KEY: &str = "split.tensors.count";

/// A GGUF file, mapped into memory, or all parts of a model that is split into several files. Opening reads only the
/// headers.
///
/// As a [`TensorSource`] it lends tensors that are stored element by element. It lends a matrix in blocks through
/// [`linear`](TensorSource::linear) as [`LinearTensor::Blocks`].
#[derive(Debug)]
pub struct GgufFile {
    /// One part, unless the model is split.
    parts: Vec<Part>,
    /// The part of each tensor.
    owners: BTreeMap<String, usize>,
}

#[derive(Debug)]
struct Part {
    path: PathBuf,
    map: MappedFile,
    header: GgufHeader,
}

impl Part {
    fn open(path: &Path) -> Result<Part> {
        let map = MappedFile::open(path)?;
        let header = GgufHeader::parse(map.bytes())
            .map_err(|problem| WeightsError::Header { path: path.into(), problem })?;
        Ok(Part { path: path.into(), map, header })
    }

    fn number(&self, key: &str) -> Option<u64> {
        self.header.metadata().get(key).and_then(GgufValue::as_u64)
    }

    /// How many parts the model has.
    fn total(&self) -> u64 {
        self.number(PARTS_KEY).unwrap_or(0).max(1)
    }
}

impl GgufFile {
    /// Maps the file at `path` and checks its header. If it is one of the parts of a model
    /// (`NAME-00002-of-00003.gguf`), all parts are mapped; they lie in the same folder.
    ///
    /// # Errors
    /// [`WeightsError::Io`] if it cannot be opened, [`WeightsError::Header`] if it is broken, [`WeightsError::Parts`]
    /// if another part is missing or does not belong to the same model.
    pub fn open(path: &Path) -> Result<GgufFile> {
        let part = Part::open(path)?;
        let parts = if part.total() == 1 { vec![part] } else { all_parts(part)? };
        let mut owners = BTreeMap::new();
        for (i, part) in parts.iter().enumerate() {
            for name in part.header.tensors().keys() {
                if owners.insert(name.clone(), i).is_some() {
                    let problem = format!("tensor '{name}' is in an earlier part, too");
                    return Err(WeightsError::Parts {
                        path: part.path.clone(),
                        total: part.total(),
                        problem,
                    });
                }
            }
        }
        Ok(GgufFile { parts, owners })
    }

    /// The files: one, or the parts of a model in their order.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.parts.iter().map(|part| &*part.path)
    }

    /// All metadata by key.
    pub fn metadata(&self) -> &BTreeMap<String, GgufValue> {
        self.parts[0].header.metadata()
    }

    /// The bytes of a metadata value: its type and its value.
    pub(crate) fn raw_value(&self, key: &str) -> Option<&[u8]> {
        let first = &self.parts[0];
        first.header.raw_value(first.map.bytes(), key)
    }

    /// All tensors by name, as they are stored.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &GgufEntry)> {
        self.owners.iter().map(|(name, &part)| (name.as_str(), &self.parts[part].header.tensors()[name]))
    }

    /// How a tensor is stored.
    pub fn entry(&self, name: &str) -> Option<&GgufEntry> {
        self.stored(name).ok().map(|stored| stored.entry)
    }

    /// The bytes of a tensor, as they are stored.
    pub fn bytes_of(&self, name: &str) -> Option<&[u8]> {
        self.stored(name).ok().map(|stored| stored.bytes())
    }

    fn stored(&self, name: &str) -> Result<StoredTensor<'_>> {
        let found = self.owners.get(name).and_then(|&part| {
            let part = &self.parts[part];
            let (name, entry) = part.header.tensors().get_key_value(name)?;
            Some(StoredTensor { part, name, entry })
        });
        found.ok_or_else(|| missing(self, name, &self.parts[0].path))
    }

    /// A module's weight, if it is a matrix in blocks.
    fn blocks(&self, module: &str) -> Result<Option<BlockTensor<'_>>> {
        let stored = self.stored(&format!("{module}.weight"))?;
        let StoredTensor { name, entry, .. } = stored;
        let Ok(GgmlType::Blocks(format)) = entry.kind else { return Ok(None) };
        linear::check_matrices(module, &entry.shape)?;
        Ok(Some(BlockTensor { name, format, shape: &entry.shape, bytes: stored.bytes() }))
    }
}

/// A tensor in its part.
#[derive(Clone, Copy)]
struct StoredTensor<'a> {
    part: &'a Part,
    name: &'a str,
    entry: &'a GgufEntry,
}

impl<'a> StoredTensor<'a> {
    fn bytes(&self) -> &'a [u8] {
        &self.part.map.bytes()[self.entry.range.clone()]
    }
}

/// All parts of the model of `known`, in their order.
fn all_parts(known: Part) -> Result<Vec<Part>> {
    let (path, total) = (known.path.clone(), known.total());
    let wrong = |path: &Path, problem: String| WeightsError::Parts { path: path.into(), total, problem };
    let name = path.file_name().and_then(|name| PartName::parse(name.to_str()?));
    let Some(name) = name.filter(|name| u64::from(name.total) == total) else {
        let problem = format!(
            "its name does not end in -00001-of-{total:05}.gguf or another of the {total} numbers, so the other parts are \
             not found"
        );
        return Err(wrong(&path, problem));
    };
    let mut known = Some(known);
    let mut parts = Vec::new();
    for (number, name_of_part) in (1..).zip(name.all()) {
        let neighbour = path.with_file_name(&name_of_part);
        let part = match known.take_if(|_| number == name.number) {
            Some(part) => part,
            None if neighbour.is_file() => Part::open(&neighbour)?,
            None => return Err(wrong(&path, format!("{name_of_part} is not in its folder"))),
        };
        if (part.total(), part.number(PART_KEY)) != (total, Some(u64::from(number) - 1)) {
            let problem = format!("its metadata do not say that it is part {number} of {total}");
            return Err(wrong(&part.path, problem));
        }
        parts.push(part);
    }
    let tensors: usize = parts.iter().map(|part| part.header.tensors().len()).sum();
    match parts[0].number(TENSORS_KEY) {
        Some(all) if all != tensors as u64 => {
            let problem = format!("the parts have {tensors} tensors together, and by its metadata {all}");
            Err(wrong(&parts[0].path, problem))
        }
        _ => Ok(parts),
    }
}

impl TensorSource for GgufFile {
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.owners.keys().map(String::as_str))
    }

    fn contains(&self, name: &str) -> bool {
        self.owners.contains_key(name)
    }

    fn info(&self, name: &str) -> Result<TensorInfo<'_>> {
        let StoredTensor { entry, .. } = self.stored(name)?;
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
        let stored = self.stored(name)?;
        TensorView::new(stored.name, info.dtype, info.shape, stored.bytes())
    }

    fn linear(&self, module: &str) -> Result<LinearTensor<'_>> {
        let Some(matrix) = self.blocks(module)? else { return linear::open(self, module) };
        Ok(LinearTensor::Blocks(matrix))
    }

    fn check_intact(&self) -> Result<()> {
        self.parts.iter().try_for_each(|part| part.map.check_intact(&part.path))
    }

    fn release_rows(&self, name: &str, rows: Range<usize>) {
        if let Ok(StoredTensor { part, entry, .. }) = self.stored(name) {
            part.map.release_rows(&entry.range, &entry.shape, rows);
        }
    }
}
