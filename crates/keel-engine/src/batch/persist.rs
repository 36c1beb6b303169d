//! Remembered prefixes across restarts: the texts of the prefix tree to a [`PrefixFolder`] and back.
//!
//! A file holds no full page that an earlier file holds. A file that is missing, damaged or of another model is
//! skipped, and so are those that need its pages. Their tokens are run again.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use keel_array::AttentionSpec;
use keel_cache::{CacheError, PREFIX_BLOCK, PageId, PrefixFolder, RememberedText, SavedPrefix, Unwritten};

use super::Batcher;
use super::prefixes::{PrefixText, key, text_of};
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
    /// none is written, and the texts of an earlier call stay. Returns how many texts were written.
    ///
    /// # Errors
    /// - An error of the disk, or of a device that cannot be read. The folder then has no file of this call. If it
    ///   failed before the first text was written, the texts of an earlier call stay. Otherwise they are removed, too:
    ///   no index names them.
    /// - [`EngineError::StalePrefix`]: all texts are written, but a file of an earlier call cannot be removed.
    pub fn save_prefixes(&mut self, model: &str, folder: &Path) -> Result<usize> {
        self.settle();
        let model = &self.name_of_prefixes(model);
        let folder = PrefixFolder::new(model, folder);
        folder.begin()?;
        let (mut written, mut stale) = (Vec::new(), Ok(()));
        let saved = self.write_texts(model, folder, &mut written).and_then(|texts| {
            if !texts.is_empty() || self.prefixes.tree().is_empty() {
                folder.remove_index()?;
                // A file that stays does no harm to the others: the index does not name it, so it is never read.
                stale = folder.remove_others(&texts);
                folder.write_index(&texts)?;
            }
            Ok(texts.len())
        });
        if saved.is_err() {
            // Files without an index are never read, but hold users' texts.
            written.iter().for_each(|path| drop(std::fs::remove_file(path)));
            folder.remove_unnamed();
        }
        let texts = saved?;
        stale.map_err(|Unwritten { path, reason }| EngineError::StalePrefix { path, reason, texts })?;
        Ok(texts)
    }

    /// The name of saved prefixes of a model. Another kind of device has other bits. The name says whether texts may
    /// contain answers. A batch that reuses no answers does not take such texts.
    fn name_of_prefixes(&self, model: &str) -> String {
        let device = self.engine.runtime().backend().name();
        let kind = device.split(':').next().unwrap_or(device);
        let form = if self.options.reuse_generated { "" } else { ", without answers" };
        format!("{model} on {kind}{form}")
    }

    /// Writes a file for each text and returns the entries of the index. Adds the path of each file to `written`.
    fn write_texts(
        &mut self,
        model: &str,
        folder: PrefixFolder<'_>,
        written: &mut Vec<PathBuf>,
    ) -> Result<Vec<SavedPrefix>> {
        let texts = self.prefixes.tree().texts(PrefixFolder::TEXTS_MAX);
        let mut entries = Vec::new();
        let mut saved_pages: HashSet<PageId> = HashSet::new();
        for (i, RememberedText { tokens: key, pages, state }) in texts.into_iter().enumerate() {
            let PrefixText { mut tokens, is_long } = text_of(key);
            let pictures = self.prefixes.unname(&mut tokens);
            let Some(pictures) = pictures.filter(|all| all.len() <= PrefixFolder::PICTURES_MAX) else {
                continue;
            };
            let path = folder.file_of(i);
            let cache = self.engine.cache_mut();
            let mut sequence = match cache.resume(tokens.len(), &pages, state) {
                Ok(sequence) => sequence,
                Err(CacheError::NoSlot { .. }) => break,
                Err(error) => return Err(error.into()),
            };
            sequence.set_long(is_long);
            let full_pages = &pages[..tokens.len() / AttentionSpec::PAGE];
            let first_page = full_pages.iter().take_while(|page| saved_pages.contains(*page)).count();
            cache.save_from(first_page, &sequence, &tokens, model, &path)?;
            saved_pages.extend(full_pages.iter().copied());
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
        let model = &self.name_of_prefixes(model);
        let folder = PrefixFolder::new(model, folder);
        let texts = match folder.read_index() {
            Ok(texts) => texts.unwrap_or_default(),
            Err(problem) => {
                restored.problems.push(problem);
                return restored;
            }
        };
        let (all, mut kept, mut without_room) = (texts.len(), Vec::new(), 0);
        // The most recently used comes first in the index. If there is no room for all, the last are not restored.
        for text in texts {
            match text.and_then(|text| self.restore_one(model, folder, &text, without_room > 0)) {
                Ok(Some(text)) => kept.push(text),
                Ok(None) => without_room += 1,
                Err(problem) => restored.problems.push(problem),
            }
        }
        if without_room > 0 {
            let reason = "too few pages or saved states are free";
            restored.problems.push(format!("no room for {without_room} of {all} texts: {reason}"));
        }
        restored.texts = kept.len();
        self.touch_again(&kept);
        restored
    }

    /// Notes the uses of texts as they were when the texts were saved. The most recently used comes first.
    fn touch_again(&mut self, texts: &[PrefixText]) {
        let mut last: Option<&PrefixText> = None;
        for text in texts.iter().rev() {
            // A longer text touches its beginnings. If they were touched again, its state would be forgotten first.
            let is_beginning =
                |of: &PrefixText| of.is_long == text.is_long && of.tokens.starts_with(&text.tokens);
            if !last.is_some_and(is_beginning) {
                self.prefixes.touch(&text.tokens, text.is_long);
            }
            last = Some(text);
        }
    }

    /// Restores one text; `None` if there is no room for it. `lacks_room` says that there was none for an earlier one.
    fn restore_one(
        &mut self,
        model: &str,
        folder: PrefixFolder<'_>,
        text: &SavedPrefix,
        lacks_room: bool,
    ) -> Result<Option<PrefixText>, String> {
        let cache = self.engine.cache_mut();
        if cache.free_pages() == 0 || cache.spec().is_recurrent() && cache.free_checkpoints() == 0 {
            return Ok(None);
        }
        let (path, name) = (folder.intact(text, cache.saved_bytes_max())?, text.name());
        let file = cache.open_file(model, &path).map_err(|e| e.to_string())?;
        let mut tokens = file.tokens.clone();
        if self.prefixes.rename(&mut tokens, &text.pictures).is_none() {
            return Err(format!("{name}: it shows pictures that the index does not name"));
        }
        if !tokens.len().is_multiple_of(PREFIX_BLOCK) {
            return Err(format!("{name}: it ends within a block"));
        }
        let before = &tokens[..file.first_page * AttentionSpec::PAGE];
        let Some(first_pages) = self.prefixes.tree().pages_of(&key(before, file.is_long)) else {
            // An earlier text without room is the likely cause.
            let problem = format!("{name}: the text that it continues is not remembered");
            return if lacks_room { Ok(None) } else { Err(problem) };
        };
        let sequence = match cache.load_from(&file, &first_pages) {
            Ok(sequence) => sequence,
            Err(CacheError::NoPages { .. }) => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let state = cache.save_checkpoint(&sequence).map_err(|e| e.to_string())?;
        self.prefixes.remember(&tokens, &sequence, state);
        Ok(Some(PrefixText { tokens, is_long: sequence.is_long() }))
    }
}

impl From<Unwritten> for EngineError {
    fn from(Unwritten { path, reason }: Unwritten) -> EngineError {
        EngineError::PrefixFolder { path, reason }
    }
}
