//! The weights files of a checkpoint: one file, or those of an index.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Component, Path, PathBuf},
};

use serde::Deserialize;

use crate::{Result, SafetensorsFile, TensorSource, WeightsError, json};

const INDEX_BYTES_MAX: u64 = 256 << 20;
pub(super) const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// The weights file or shard index at `path`.
pub(super) fn weights_path(path: &Path) -> Result<PathBuf> {
    let metadata = std::fs::metadata(path).map_err(WeightsError::io("open", path))?;
    if metadata.is_dir() {
        let (single, index) = (path.join(SINGLE_FILE), path.join(INDEX_FILE));
        return match (single.exists(), index.exists()) {
            // Some tools keep the tensors that they do not change, such as an MTP head, in another file. The index
            // names both files.
            (true, true) if names_single_file(&index) => Ok(index),
            (true, _) => Ok(single),
            (false, true) => Ok(index),
            (false, false) => Err(WeightsError::no_weights(path)),
        };
    }
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json") {
        return Ok(path.into());
    }
    Err(WeightsError::no_weights(path))
}

/// Whether an index is one of the folder's single file, too. Another one may be left from shards that are gone.
fn names_single_file(index: &Path) -> bool {
    read_index(index).is_ok_and(|index| index.weight_map.values().any(|file| file == SINGLE_FILE))
}

/// Whether a path that [`weights_path`] gives is an index.
pub(super) fn is_index(weights: &Path) -> bool {
    weights.extension().is_some_and(|extension| extension == "json")
}

/// Reads an index. It names a file at least.
fn read_index(path: &Path) -> Result<ShardIndex> {
    let index: ShardIndex = json::read(path, INDEX_BYTES_MAX)?;
    if index.weight_map.is_empty() {
        return Err(WeightsError::Json { path: path.into(), problem: "its weight_map is empty".into() });
    }
    Ok(index)
}

/// Whether all weights files of a folder are there.
pub(super) fn has_weights(folder: &Path) -> bool {
    match weights_path(folder) {
        Ok(index) if is_index(&index) => read_index(&index).is_ok_and(|shards| {
            shards.files(&index).is_ok_and(|names| names.iter().all(|name| folder.join(name).is_file()))
        }),
        Ok(single) => single.is_file(),
        Err(_) => false,
    }
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl ShardIndex {
    /// The names of the files, each once: the index, which is at `path`, has one for each tensor. They are files of the
    /// index's own folder.
    fn files(&self, path: &Path) -> Result<BTreeSet<&str>> {
        let names: BTreeSet<&str> = self.weight_map.values().map(String::as_str).collect();
        if let Some(name) = names.iter().find(|name| !is_plain_name(name)) {
            let problem = format!("'{name}' is not the name of a file in the same folder");
            return Err(WeightsError::Json { path: path.into(), problem });
        }
        Ok(names)
    }
}

/// The files of a checkpoint.
pub(super) struct Shards {
    pub files: Vec<SafetensorsFile>,
    /// For each tensor, the number of its file.
    pub owners: BTreeMap<String, usize>,
}

/// Opens the files named by an index, and checks that each holds the tensors that the index says.
pub(super) fn open_shards(index: &Path, folder: &Path) -> Result<Shards> {
    let shards = read_index(index)?;
    let (mut files, mut numbers) = (Vec::new(), BTreeMap::new());
    for name in shards.files(index)? {
        numbers.insert(name, files.len());
        files.push(SafetensorsFile::open(&folder.join(name))?);
    }
    let mut owners = BTreeMap::new();
    for (tensor, file) in &shards.weight_map {
        let number = numbers[file.as_str()];
        if !files[number].contains(tensor) {
            let problem = format!("it places tensor '{tensor}' in {file}, which does not hold it");
            return Err(WeightsError::Json { path: index.into(), problem });
        }
        owners.insert(tensor.clone(), number);
    }
    Ok(Shards { files, owners })
}

/// Whether `name` is one ordinary path component. So an index cannot name files outside its folder.
fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
}
