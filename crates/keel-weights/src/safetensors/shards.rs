//! Writes a checkpoint as one file, or as shards with an index.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value, json};

use super::{SafetensorsWriter, TensorSpec};
use crate::{Result, WeightsError, json};

/// Writes the weights of a checkpoint into a folder: `model.safetensors` if they fit one file, otherwise
/// `model-00001-of-00003.safetensors` and so on with `model.safetensors.index.json`. As in [`SafetensorsWriter`],
/// tensors are declared first and filled in pieces. Files get their names in [`finish`](Self::finish).
#[derive(Debug)]
pub struct ShardedWriter {
    folder: PathBuf,
    shards: Vec<Shard>,
    /// The index in `shards` of each tensor.
    owners: BTreeMap<String, usize>,
    total_bytes: u64,
}

#[derive(Debug)]
struct Shard {
    file_name: String,
    writer: SafetensorsWriter,
}

impl ShardedWriter {
    /// Starts the files in `folder`, which must exist. Tensors fill shards in the given order. A tensor larger than
    /// `shard_bytes_max` gets a separate shard.
    ///
    /// # Errors
    /// As for [`SafetensorsWriter::create`].
    pub fn create(
        folder: &Path,
        tensors: &[TensorSpec],
        metadata: &BTreeMap<String, String>,
        shard_bytes_max: u64,
    ) -> Result<ShardedWriter> {
        let output = |problem| WeightsError::Output { path: folder.into(), problem };
        let split = split(tensors, shard_bytes_max)
            .ok_or_else(|| output("the sizes of its tensors overflow 64 bits".into()))?;
        let (mut shards, mut owners) = (Vec::new(), BTreeMap::new());
        for specs in &split {
            let file_name = match split.len() {
                1 => "model.safetensors".to_string(),
                count => format!("model-{:05}-of-{count:05}.safetensors", shards.len() + 1),
            };
            for spec in *specs {
                if owners.insert(spec.name.clone(), shards.len()).is_some() {
                    return Err(output(format!("two tensors are named '{}'", spec.name)));
                }
            }
            let writer = SafetensorsWriter::create(&folder.join(&file_name), specs, metadata)?;
            shards.push(Shard { file_name, writer });
        }
        // `split` has checked that no sum overflows.
        let total_bytes = tensors.iter().filter_map(TensorSpec::bytes).map(|bytes| bytes as u64).sum();
        Ok(ShardedWriter { folder: folder.into(), shards, owners, total_bytes })
    }

    /// Appends to the bytes of a tensor.
    ///
    /// # Errors
    /// As for [`SafetensorsWriter::append`].
    pub fn append(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        match self.owners.get(name) {
            Some(&shard) => self.shards[shard].writer.append(name, bytes),
            None => {
                let problem = format!("tensor '{name}' was not declared");
                Err(WeightsError::Output { path: self.folder.clone(), problem })
            }
        }
    }

    /// Completes and names all files, and writes the index if there is more than one.
    ///
    /// # Errors
    /// As for [`SafetensorsWriter::finish`]. Shards named before the failure remain; without an index they are not a
    /// checkpoint.
    pub fn finish(self) -> Result<()> {
        let names: Vec<String> = self.shards.iter().map(|shard| shard.file_name.clone()).collect();
        for shard in self.shards {
            shard.writer.finish()?;
        }
        if names.len() == 1 {
            return Ok(());
        }
        let entry = |(tensor, shard): (String, usize)| (tensor, Value::from(names[shard].as_str()));
        let weight_map: Map<String, Value> = self.owners.into_iter().map(entry).collect();
        let index = json!({"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map});
        json::write(&self.folder.join("model.safetensors.index.json"), &index)
    }
}

/// Cuts the list before a shard would exceed `bytes_max`. There is at least one shard, and none is empty unless all
/// are. `None` if sizes overflow.
fn split(tensors: &[TensorSpec], bytes_max: u64) -> Option<Vec<&[TensorSpec]>> {
    let (mut shards, mut start, mut shard_bytes, mut total) = (Vec::new(), 0, 0u64, 0u64);
    for (i, spec) in tensors.iter().enumerate() {
        let bytes = u64::try_from(spec.bytes()?).ok()?;
        total = total.checked_add(bytes)?;
        if i > start && shard_bytes + bytes > bytes_max {
            shards.push(&tensors[start..i]);
            (start, shard_bytes) = (i, 0);
        }
        shard_bytes += bytes;
    }
    shards.push(&tensors[start..]);
    Some(shards)
}

#[cfg(test)]
mod tests {
    use keel_array::DType;

    use super::*;
    use crate::{Checkpoint, TensorSource};

    fn specs(sizes: &[usize]) -> Vec<TensorSpec> {
        let spec = |(i, &size)| TensorSpec { name: format!("t{i}"), dtype: DType::U8, shape: vec![size] };
        sizes.iter().enumerate().map(spec).collect()
    }

    fn write(folder: &Path, sizes: &[usize], bytes_max: u64) -> Checkpoint {
        std::fs::write(folder.join("config.json"), "{}").unwrap();
        let mut writer = ShardedWriter::create(folder, &specs(sizes), &BTreeMap::new(), bytes_max).unwrap();
        for (i, &size) in sizes.iter().enumerate().rev() {
            writer.append(&format!("t{i}"), &vec![i as u8; size]).unwrap();
        }
        writer.finish().unwrap();
        Checkpoint::open(folder).unwrap()
    }

    #[test]
    fn shards_stay_below_their_limit_and_read_back() {
        let sizes = [3, 4, 20, 1, 9, 0, 1];
        for (bytes_max, shards) in [(10, 4), (7, 5), (1 << 40, 1), (38, 1), (37, 2)] {
            let folder = tempfile::tempdir().unwrap();
            let checkpoint = write(folder.path(), &sizes, bytes_max);
            assert_eq!(checkpoint.files().len(), shards, "limit {bytes_max}");
            assert_eq!(checkpoint.total_bytes(), 38);
            for (i, &size) in sizes.iter().enumerate() {
                let tensor = checkpoint.tensor(&format!("t{i}")).unwrap();
                assert_eq!(tensor.bytes(), vec![i as u8; size]);
            }
            let entries = std::fs::read_dir(folder.path()).unwrap().count();
            assert_eq!(entries, 1 + shards + usize::from(shards > 1), "nothing else is left");
        }
    }

    #[test]
    fn dropping_it_leaves_no_files() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = ShardedWriter::create(folder.path(), &specs(&[5, 5]), &BTreeMap::new(), 5).unwrap();
        writer.append("t0", &[1; 5]).unwrap();
        assert!(writer.append("t9", &[1]).is_err());
        assert!(writer.finish().is_err());
        let complete = |name: &str| !name.ends_with(".partial");
        let left = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let left: Vec<_> = left.map(|name| name.into_string().unwrap()).collect();
        assert!(left.iter().all(|name| complete(name)), "{left:?}");
        let unnamed = Checkpoint::open(folder.path()).unwrap_err();
        assert!(matches!(unnamed, WeightsError::NoWeights { .. }), "{unnamed}");
    }

    #[test]
    fn one_name_in_two_shards_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut tensors = specs(&[5, 5]);
        tensors[1].name = "t0".into();
        let error = ShardedWriter::create(folder.path(), &tensors, &BTreeMap::new(), 5).unwrap_err();
        assert!(error.to_string().contains("two tensors are named 't0'"), "{error}");
    }
}
