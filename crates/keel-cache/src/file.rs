//! A sequence's cache in a file, so that a later process can continue from it.
//!
//! A safetensors file with these tensors:
//! - `tokens` u32 `[len]`;
//! - for each attention layer `layers.N.keys` and `.values`: the used pages `[pages, KV, 256, W]`, in sliding layers in
//!   the order in which they rotate;
//! - for each recurrent layer `layers.N.window` and `.state`.
//!
//! The metadata names the format and the model, so that no other model loads it. It says `turns: long` if keys are
//! rotated by the frequencies of long sequences.

use std::collections::BTreeMap;
use std::path::Path;

use keel_array::{Array, DType};
use keel_weights::{SafetensorsFile, SafetensorsWriter, TensorSource, TensorSpec, WeightsError};

use crate::contents::contents;
use crate::{CacheError, LayerStorage, ModelCache, Result, SequenceCache};

/// Name of the file's layout. A change of the layout changes it.
const FORMAT: &str = "keel-prompt-cache-1";

/// Metadata key, and its value if keys are rotated by the frequencies of long sequences.
const TURNS: &str = "turns";
const LONG: &str = "long";

impl ModelCache {
    /// Writes the contents of a sequence to `path`, with the model's name and the sequence's tokens.
    ///
    /// # Errors
    /// [`CacheError::File`] if the number of tokens is not the sequence's; [`CacheError::OpenRows`]; an error of the
    /// disk. After an error what was at `path` is still there.
    pub fn save(&self, sequence: &SequenceCache, tokens: &[u32], model: &str, path: &Path) -> Result<()> {
        self.expect_settled(sequence)?;
        if tokens.len() != sequence.len() {
            let problem = format!("{} tokens were given for a cache of {}", tokens.len(), sequence.len());
            return Err(CacheError::File { path: path.into(), problem });
        }
        let contents = contents(self.layers(), sequence, tokens.len());
        let mut specs: Vec<TensorSpec> = contents
            .iter()
            .map(|p| TensorSpec { name: p.name.clone(), dtype: p.pool.dtype(), shape: p.shape() })
            .collect();
        specs.push(TensorSpec { name: "tokens".into(), dtype: DType::U32, shape: vec![tokens.len()] });
        let mut metadata = BTreeMap::from(
            [("format", FORMAT), ("model", model)].map(|(k, v)| (k.to_string(), v.to_string())),
        );
        if sequence.is_long() {
            metadata.insert(TURNS.into(), LONG.into());
        }
        let mut writer = SafetensorsWriter::create(path, &specs, &metadata)?;
        for held in &contents {
            let mut bytes = vec![0; held.entry_bytes()];
            for &entry in &held.entries {
                held.pool.read_bytes(entry * bytes.len(), &mut bytes)?;
                writer.append(&held.name, &bytes)?;
            }
        }
        let ids: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
        writer.append("tokens", &ids)?;
        Ok(writer.finish()?)
    }

    /// Opens a sequence with the contents of the file at `path`, and returns it with its tokens.
    ///
    /// # Errors
    /// [`CacheError::File`] if the file has another format, model or size; or if no slot or page is free. After an
    /// error no slot or page is held.
    pub fn load(&mut self, model: &str, path: &Path) -> Result<(SequenceCache, Vec<u32>)> {
        let file = SafetensorsFile::open(path)?;
        let wrong = |problem: String| CacheError::File { path: path.into(), problem };
        for (key, expected) in [("format", FORMAT), ("model", model)] {
            let found = file.metadata().get(key).map_or("none", String::as_str);
            if found != expected {
                return Err(wrong(format!("its {key} is {found:?}, expected {expected:?}")));
            }
        }
        let ids = file.tensor("tokens")?;
        // Counted before they are copied: a file may claim any number of them.
        let (ids_of, context) = (ids.bytes().as_chunks::<4>().0, self.size().context);
        if ids.dtype() != DType::U32 || ids_of.is_empty() || ids_of.len() > context {
            let (dtype, count) = (ids.dtype(), ids_of.len());
            return Err(wrong(format!("it holds {count} {dtype} tokens, and the context is {context}")));
        }
        let tokens: Vec<u32> = ids_of.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let mut sequence = self.open()?;
        sequence.set_long(file.metadata().get(TURNS).is_some_and(|turns| turns == LONG));
        // The tokens and a tensor for each array. A tensor split saves each layer once for each device. A file of
        // another number of devices may have the same shapes with other heads, so the tensors are counted.
        let expected = contents(self.layers(), &sequence, 0).len() + 1;
        let found = file.names().count();
        if found != expected {
            let problem = format!("it holds {found} tensors, and this engine's cache has {expected}");
            return Err(wrong(problem));
        }
        self.fill_from(&file, &mut sequence, tokens.len())?;
        file.check_intact()?;
        Ok((sequence, tokens))
    }

    /// The most bytes of a file that [`ModelCache::save`] writes.
    pub fn saved_bytes_max(&self) -> u64 {
        /// Name, type, shape and place of a tensor, and its share of the rest of the header.
        const HEADER_BYTES: usize = 4096;
        let pages = self.size().pages_per_sequence();
        let entry = |array: &Array| array.bytes() / array.shape()[0].max(1);
        let layer = |layer: &LayerStorage| match layer {
            LayerStorage::Attention(pool) | LayerStorage::Sliding(pool) => {
                (entry(&pool.keys) + entry(&pool.values)) * pages
            }
            LayerStorage::Recurrent { window, state } => entry(&window.rows) + entry(&state.state),
        };
        let layers: usize = self.layers().iter().map(|of| layer(of) + 2 * HEADER_BYTES).sum();
        (layers + self.size().context * size_of::<u32>() + HEADER_BYTES) as u64
    }

    fn fill_from(&mut self, file: &SafetensorsFile, sequence: &mut SequenceCache, len: usize) -> Result<()> {
        self.reserve(sequence, len)?;
        for held in contents(self.layers(), sequence, len) {
            let tensor = file.tensor(&held.name)?.expect_shape(&held.shape())?;
            if tensor.dtype() != held.pool.dtype() {
                let (found, needed) = (tensor.dtype().to_string(), "the type of this engine's cache");
                return Err(WeightsError::UnsupportedDType { name: held.name, found, needed }.into());
            }
            let entry_bytes = held.entry_bytes();
            for (&entry, bytes) in held.entries.iter().zip(tensor.bytes().chunks_exact(entry_bytes)) {
                held.pool.write_bytes(entry * entry_bytes, bytes)?;
            }
        }
        sequence.advance(len);
        Ok(())
    }
}
