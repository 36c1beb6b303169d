//! Remembered prefixes across restarts.
//!
//! A folder holds one cache file for each text, and `index.json`. The index names the files with their sizes and
//! checksums, and the pictures of each text by their hashes. It is written last. A file that is missing, damaged or of
//! another model is skipped; its tokens are run again.

use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use keel_cache::{BLOCK, CacheError, RememberedText, open_regular, read_regular, write_whole};
use serde_json::{Value, json};

use super::Batcher;
use super::features::PictureKey;
use super::prefixes::text_of;
use crate::{EngineError, Result};

const INDEX: &str = "index.json";
/// The size limit of an index. Each entry takes less than 100 bytes, and 70 for each picture.
const INDEX_BYTES_MAX: u64 = 1 << 20;
/// A text with more pictures is not written.
const PICTURES_MAX: usize = 32;
const FORMAT: &str = "keel-prefix-cache-1";
/// How many texts are kept: the most recently used.
const TEXTS_MAX: usize = 256;

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
    /// An error of the disk. The folder then has no file of this call.
    pub fn save_prefixes(&mut self, model: &str, folder: &Path) -> Result<usize> {
        self.settle();
        std::fs::create_dir_all(folder).map_err(|e| disk(folder, &e))?;
        let _ = std::fs::remove_file(folder.join(INDEX));
        let mut written = Vec::new();
        let saved =
            self.write_texts(model, folder, &mut written).and_then(|files| write_index(model, folder, files));
        if saved.is_err() {
            // Files without an index are never read.
            written.iter().for_each(|path| drop(std::fs::remove_file(path)));
        }
        saved
    }

    /// Writes a file for each text and returns the entries of the index. Adds each path to `written` before its file
    /// exists.
    fn write_texts(&mut self, model: &str, folder: &Path, written: &mut Vec<PathBuf>) -> Result<Vec<Value>> {
        let mut texts = self.prefixes.tree().texts();
        texts.drain(..texts.len().saturating_sub(TEXTS_MAX));
        let mut files = Vec::new();
        for (i, RememberedText { tokens: key, pages, state }) in texts.into_iter().enumerate() {
            let (is_long, mut tokens) = text_of(key);
            let Some(pictures) = self.prefixes.unname(&mut tokens).filter(|all| all.len() <= PICTURES_MAX)
            else {
                continue;
            };
            let copies = usize::from(!tokens.len().is_multiple_of(keel_array::AttentionSpec::PAGE));
            if self.engine.cache().free_pages() < copies {
                continue;
            }
            let name = format!("{i}.safetensors");
            let path = folder.join(&name);
            let cache = self.engine.cache_mut();
            let mut sequence = match cache.resume(tokens.len(), &pages, state) {
                Ok(sequence) => sequence,
                Err(CacheError::NoSlot { .. }) => break,
                Err(error) => return Err(error.into()),
            };
            written.push(path.clone());
            sequence.set_long(is_long);
            cache.save(&sequence, &tokens, model, &path)?;
            let (bytes, checksum) = checksum(&path).map_err(|e| disk(&path, &e))?;
            let pictures: Vec<String> = pictures.iter().map(hex).collect();
            files.push(json!({"name": name, "bytes": bytes, "crc32": checksum, "pictures": pictures}));
        }
        Ok(files)
    }

    /// Remembers the texts that an earlier batch of the same model wrote to a folder. Never fails: an unreadable file
    /// becomes a problem in the result, and a missing folder counts as empty.
    pub fn restore_prefixes(&mut self, model: &str, folder: &Path) -> Restored {
        let mut restored = Restored::default();
        let path = folder.join(INDEX);
        if !path.exists() {
            return restored;
        }
        let index = match read_index(&path, model) {
            Ok(index) => index,
            Err(problem) => {
                restored.problems.push(problem);
                return restored;
            }
        };
        for entry in index {
            match self.restore_one(model, folder, &entry) {
                Ok(true) => restored.texts += 1,
                Ok(false) => break,
                Err(problem) => restored.problems.push(problem),
            }
        }
        restored
    }

    /// Restores one text. Returns false if there is no room for more.
    fn restore_one(&mut self, model: &str, folder: &Path, entry: &Value) -> Result<bool, String> {
        let name = entry["name"].as_str().filter(|name| !name.contains(['/', '\\'])).unwrap_or_default();
        let path = folder.join(name);
        let found = checksum(&path).map_err(|e| format!("{name}: {e}"))?;
        if (entry["bytes"].as_u64(), entry["crc32"].as_u64()) != (Some(found.0), Some(u64::from(found.1))) {
            return Err(format!("{name}: damaged, its checksum is another"));
        }
        let pictures = entry["pictures"].as_array().map_or(Ok(Vec::new()), |all| {
            let all = all.iter().take(PICTURES_MAX).map(|picture| picture.as_str().and_then(from_hex));
            all.collect::<Option<Vec<_>>>().ok_or(format!("{name}: its pictures are no hashes"))
        })?;
        let cache = self.engine.cache_mut();
        let (sequence, mut tokens) = match cache.load(model, &path) {
            Ok(loaded) => loaded,
            Err(CacheError::NoPages { .. }) => return Ok(false),
            Err(error) => return Err(error.to_string()),
        };
        if self.prefixes.rename(&mut tokens, &pictures).is_none() {
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

/// Writes the index and returns how many files it names.
fn write_index(model: &str, folder: &Path, files: Vec<Value>) -> Result<usize> {
    let count = files.len();
    let index = json!({"format": FORMAT, "model": model, "files": files});
    // Written so that the index is complete or absent.
    let path = folder.join(INDEX);
    write_whole(&path, index.to_string().as_bytes())
        .map_err(|error| EngineError::PrefixFolder { path: path.clone(), reason: error.to_string() })?;
    Ok(count)
}

fn read_index(path: &Path, model: &str) -> Result<Vec<Value>, String> {
    let bytes = read_regular(path, INDEX_BYTES_MAX).map_err(|e| format!("{INDEX}: {e}"))?;
    let index: Value = serde_json::from_slice(&bytes).map_err(|e| format!("{INDEX}: {e}"))?;
    if index["format"] != FORMAT || index["model"] != model {
        return Err(format!("{INDEX}: it is of another format or model"));
    }
    match &index["files"] {
        Value::Array(files) => Ok(files.iter().take(TEXTS_MAX).cloned().collect()),
        _ => Err(format!("{INDEX}: it names no files")),
    }
}

fn hex(key: &PictureKey) -> String {
    key.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<PictureKey> {
    let mut key = PictureKey::default();
    let is_hex = text.len() == 2 * key.len() && text.bytes().all(|b| b.is_ascii_hexdigit());
    for (i, byte) in key.iter_mut().enumerate().filter(|_| is_hex) {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
    }
    is_hex.then_some(key)
}

/// Bytes of a file and their CRC-32.
fn checksum(path: &Path) -> io::Result<(u64, u32)> {
    let mut reader = BufReader::new(open_regular(path)?);
    let (mut hasher, mut bytes) = (crc32fast::Hasher::new(), 0);
    let mut block = vec![0; 1 << 16];
    loop {
        let read = reader.read(&mut block)?;
        if read == 0 {
            return Ok((bytes, hasher.finalize()));
        }
        hasher.update(&block[..read]);
        bytes += read as u64;
    }
}

fn disk(path: &Path, error: &io::Error) -> EngineError {
    EngineError::PrefixFolder { path: path.into(), reason: error.to_string() }
}
