//! A sequence's cache in a file, so that a later process can continue from it.
//!
//! A safetensors file with these tensors:
//! - `tokens` u32 `[len]`;
//! - for each attention layer `layers.N.keys` and `.values`: the used pages `[pages, KV, 256, W]`, in sliding layers in
//!   the order in which they rotate. Other layers lack the first pages if the metadata says so: `first_page` is their
//!   number;
//! - for each recurrent layer `layers.N.window` and `.state`.
//!
//! The metadata names the format and the model, so that no other model loads it. It says `turns: long` if keys are
//! rotated by the frequencies of long sequences.

use std::collections::BTreeMap;
use std::path::Path;

use keel_array::{Array, AttentionSpec, DType};
use keel_weights::{SafetensorsFile, SafetensorsWriter, TensorSource, TensorSpec, WeightsError};

use crate::contents::contents;
use crate::{CacheError, LayerStorage, ModelCache, PageId, Result, SequenceCache};

/// Name of the file's layout. A change of the layout changes it.
const FORMAT: &str = "keel-prompt-cache-1";

/// Metadata key, and its value if keys are rotated by the frequencies of long sequences.
const TURNS: &str = "turns";
const LONG: &str = "long";

/// Metadata key of the number of pages that come before those of the file. A file without it has all pages.
const FIRST_PAGE: &str = "first_page";

/// An opened file of a sequence.
#[derive(Debug)]
pub struct SequenceFile {
    file: SafetensorsFile,
    /// The tokens of the sequence, also those whose pages are not in the file.
    pub tokens: Vec<u32>,
    /// How many of the sequence's first pages are not in the file. All of them are full.
    pub first_page: usize,
    /// Whether keys are rotated by the frequencies of long sequences.
    pub is_long: bool,
}

impl ModelCache {
    /// Writes the contents of a sequence to `path`, with the model's name and the sequence's tokens.
    ///
    /// # Errors
    /// [`CacheError::File`] if the number of tokens is not the sequence's; [`CacheError::OpenRows`]; an error of the
    /// disk. After an error, an earlier file at `path` is still there.
    pub fn save(&self, sequence: &SequenceCache, tokens: &[u32], model: &str, path: &Path) -> Result<()> {
        self.save_from(0, sequence, tokens, model, path)
    }

    /// As [`ModelCache::save`], without the first `first_page` pages. [`ModelCache::load_from`] needs them again.
    ///
    /// # Errors
    /// As [`ModelCache::save`].
    ///
    /// # Panics
    /// If fewer pages are full.
    pub fn save_from(
        &self,
        first_page: usize,
        sequence: &SequenceCache,
        tokens: &[u32],
        model: &str,
        path: &Path,
    ) -> Result<()> {
        self.expect_settled(sequence)?;
        if tokens.len() != sequence.len() {
            let problem = format!("{} tokens were given for a cache of {}", tokens.len(), sequence.len());
            return Err(CacheError::File { path: path.into(), problem });
        }
        let full_pages = tokens.len() / AttentionSpec::PAGE;
        assert!(first_page <= full_pages, "{first_page} of {full_pages} full pages are to be left out");
        let contents = contents(self.layers(), sequence, first_page, tokens.len());
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
        if first_page > 0 {
            metadata.insert(FIRST_PAGE.into(), first_page.to_string());
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
    /// - [`CacheError::File`] if the file has another format, model or size, or lacks pages; an error of the file.
    /// - [`CacheError::NoSlot`] or [`CacheError::NoPages`] if too few are free.
    ///
    /// After an error no slot or page is held.
    pub fn load(&mut self, model: &str, path: &Path) -> Result<(SequenceCache, Vec<u32>)> {
        let file = self.open_file(model, path)?;
        Ok((self.load_from(&file, &[])?, file.tokens))
    }

    /// Opens the file at `path` and reads its tokens. Nothing is taken for them.
    ///
    /// # Errors
    /// [`CacheError::File`] if the file has another format, model or size.
    pub fn open_file(&self, model: &str, path: &Path) -> Result<SequenceFile> {
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
        let full_pages = tokens.len() / AttentionSpec::PAGE;
        let claimed = file.metadata().get(FIRST_PAGE).map_or("0", String::as_str);
        let Some(first_page) = claimed.parse::<usize>().ok().filter(|&page| page <= full_pages) else {
            let problem = format!("its {FIRST_PAGE} is {claimed:?}, and its tokens fill {full_pages} pages");
            return Err(wrong(problem));
        };
        let is_long = file.metadata().get(TURNS).is_some_and(|turns| turns == LONG);
        Ok(SequenceFile { file, tokens, first_page, is_long })
    }

    /// Opens a sequence with the contents of a file after `first_pages`, which hold the tokens before
    /// [`SequenceFile::first_page`]. These pages are shared. A partly filled last page is the sequence's own.
    ///
    /// # Errors
    /// As [`ModelCache::load`], so [`CacheError::NoPages`] if there is no room for the file's pages.
    /// [`CacheError::File`] also if the file continues from another number of pages.
    pub fn load_from(&mut self, saved: &SequenceFile, first_pages: &[PageId]) -> Result<SequenceCache> {
        let SequenceFile { file, tokens, first_page, is_long } = saved;
        let wrong = |problem: String| CacheError::File { path: file.path().into(), problem };
        let given = first_pages.len();
        if given != *first_page {
            let problem = format!("it lacks its first {first_page} pages, and {given} are given");
            return Err(wrong(problem));
        }
        let mut sequence = self.resume(given * AttentionSpec::PAGE, first_pages, None)?;
        sequence.set_long(*is_long);
        // The tokens and a tensor for each array. A tensor split saves each layer once for each device. A file of
        // another number of devices may have the same shapes with other heads, so the tensors are counted.
        let expected = contents(self.layers(), &sequence, 0, 0).len() + 1;
        let found = file.names().count();
        if found != expected {
            let problem = format!("it holds {found} tensors, and this engine's cache has {expected}");
            return Err(wrong(problem));
        }
        self.fill_from(file, &mut sequence, tokens.len())?;
        file.check_intact()?;
        Ok(sequence)
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

    /// Extends a sequence of full pages to `len` tokens. The pages that it has already are only read.
    fn fill_from(&mut self, file: &SafetensorsFile, sequence: &mut SequenceCache, len: usize) -> Result<()> {
        let (first_page, rows) = (sequence.pages().len(), len - sequence.len());
        self.reserve(sequence, rows)?;
        for held in contents(self.layers(), sequence, first_page, len) {
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
        sequence.advance(rows);
        Ok(())
    }
}
