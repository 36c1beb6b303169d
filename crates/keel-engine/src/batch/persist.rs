//! Remembered prefixes across restarts: the texts of the prefix tree to a [`PrefixFolder`] and back.
//!
//! A file that is missing, damaged or of another model is skipped; its tokens are run again.

use std::path::{Path, PathBuf};

use keel_cache::{BLOCK, CacheError, PrefixFolder, RememberedText, SavedPrefix, Unwritten};

use super::Batcher;
use super::prefixes::text_of;
use crate::{EngineError, Result};

/// The result of restoring a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// How many texts were restored.
    pub texts: usize,
    /// Why others were not.
    pub problems: Vec<String>,
}

impl Batcher {
    /// Writes the remembered prefixes to a folder, from which a batch of the same model can restore them. `model` names
    /// the model. Running requests wait meanwhile. Each text is read through a free sequence: where all sequences run,
    /// none is written. Returns how many texts were written.
    ///
    /// # Errors
    /// An error of the disk, or of a device that cannot be read. The folder then has no file of this call. If it failed
    /// before the first text was written, the texts of an earlier call stay.
    pub fn save_prefixes(&mut self, model: &str, folder: &Path) -> Result<usize> {
        self.settle();
        let folder = PrefixFolder::new(model, folder);
        folder.begin()?;
        let mut written = Vec::new();
        let saved = self.write_texts(model, folder, &mut written).and_then(|texts| {
            folder.write_index(&texts)?;
            Ok(texts.len())
        });
        if saved.is_err() {
            // Files without an index are never read.
            written.iter().for_each(|path| drop(std::fs::remove_file(path)));
        }
        saved
    }

    /// Writes a file for each text and returns the entries of the index. Adds the path of each file to `written`.
    fn write_texts(
        &mut self,
        model: &str,
        folder: PrefixFolder<'_>,
        written: &mut Vec<PathBuf>,
    ) -> Result<Vec<SavedPrefix>> {
        let mut texts = self.prefixes.tree().texts();
        texts.drain(..texts.len().saturating_sub(PrefixFolder::TEXTS_MAX));
        let mut entries = Vec::new();
        for (i, RememberedText { tokens: key, pages, state }) in texts.into_iter().enumerate() {
            let (is_long, mut tokens) = text_of(key);
            let pictures = self.prefixes.unname(&mut tokens);
            let Some(pictures) = pictures.filter(|all| all.len() <= PrefixFolder::PICTURES_MAX) else {
                continue;
            };
            let copies = usize::from(!tokens.len().is_multiple_of(keel_array::AttentionSpec::PAGE));
            if self.engine.cache().free_pages() < copies {
                continue;
            }
            let path = folder.file_of(i);
            let cache = self.engine.cache_mut();
            let mut sequence = match cache.resume(tokens.len(), &pages, state) {
                Ok(sequence) => sequence,
                Err(CacheError::NoSlot { .. }) => break,
                Err(error) => return Err(error.into()),
            };
            sequence.set_long(is_long);
            cache.save(&sequence, &tokens, model, &path)?;
            written.push(path);
            if written.len() == 1 {
                folder.remove_index()?;
            }
            entries.push(folder.entry(i, pictures)?);
        }
        Ok(entries)
    }

    /// Remembers the texts that an earlier batch of the same model wrote to a folder. Never fails: an unreadable file
    /// becomes a problem in the result, and a missing folder counts as empty.
    pub fn restore_prefixes(&mut self, model: &str, folder: &Path) -> Restored {
        let mut restored = Restored::default();
        let folder = PrefixFolder::new(model, folder);
        let texts = match folder.read_index() {
            Ok(texts) => texts.unwrap_or_default(),
            Err(problem) => {
                restored.problems.push(problem);
                return restored;
            }
        };
        for text in texts {
            match text.and_then(|text| self.restore_one(model, folder, &text)) {
                Ok(true) => restored.texts += 1,
                Ok(false) => break,
                Err(problem) => restored.problems.push(problem),
            }
        }
        restored
    }

    /// Restores one text. Returns false if there is no room for more.
    fn restore_one(
        &mut self,
        model: &str,
        folder: PrefixFolder<'_>,
        text: &SavedPrefix,
    ) -> Result<bool, String> {
        let cache = self.engine.cache_mut();
        let (path, name) = (folder.intact(text, cache.saved_bytes_max())?, text.name());
        let (sequence, mut tokens) = match cache.load(model, &path) {
            Ok(loaded) => loaded,
            Err(CacheError::NoPages { .. }) => return Ok(false),
            Err(error) => return Err(error.to_string()),
        };
        if self.prefixes.rename(&mut tokens, &text.pictures).is_none() {
            return Err(format!("{name}: it shows pictures that the index does not name"));
        }
        let whole = tokens.len().is_multiple_of(BLOCK);
        let state = if whole { cache.save_state(&sequence).map_err(|e| e.to_string())? } else { None };
        let has_room = state.is_some() || !cache.spec().is_recurrent();
        if whole && has_room {
            self.prefixes.remember(cache, &tokens, &sequence, state);
        }
        if whole { Ok(has_room) } else { Err(format!("{name}: it ends within a block")) }
    }
}

impl From<Unwritten> for EngineError {
    fn from(Unwritten { path, reason }: Unwritten) -> EngineError {
        EngineError::PrefixFolder { path, reason }
    }
}
