//! Remembered prefixes on disk.
//!
//! A folder holds one cache file for each text ([`ModelCache::save_from`](crate::ModelCache::save_from)), and
//! `index.json`. A file has no full page that an earlier file of the same save has. The index names the files in the
//! order in which they are to be read, with their sizes and checksums, and the pictures of each text by their hashes.
//! It is written last: files without an index are never read. Texts come from users, so a file of a text that the index
//! does not name stays only if it cannot be removed.

use std::collections::HashSet;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use keel_weights::{open_regular, read_regular, write_whole};
use serde_json::{Value, json};

/// The hash of a picture and its settings.
pub type PictureHash = [u8; 32];

const INDEX: &str = "index.json";
/// The size limit of an index. Each entry takes less than 100 bytes, and 70 for each picture.
const INDEX_BYTES_MAX: u64 = 1 << 20;
const FORMAT: &str = "keel-prefix-cache-2";

/// A folder of the texts that a model remembered.
#[derive(Clone, Copy, Debug)]
pub struct PrefixFolder<'a> {
    model: &'a str,
    path: &'a Path,
}

/// A text in the index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedPrefix {
    name: String,
    file: Checked,
    /// The pictures in the text, in order.
    pub pictures: Vec<PictureHash>,
}

/// Bytes of a file and their CRC-32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Checked {
    bytes: u64,
    crc32: u32,
}

/// The texts that an index names, and for each that cannot be read the reason.
pub type IndexEntries = Vec<Result<SavedPrefix, String>>;

/// A file that cannot be written, and the system's reason.
#[derive(Debug)]
pub struct Unwritten {
    /// The file or folder.
    pub path: PathBuf,
    /// The reason.
    pub reason: String,
}

impl Unwritten {
    fn new(path: &Path, error: &dyn std::fmt::Display) -> Unwritten {
        Unwritten { path: path.into(), reason: error.to_string() }
    }
}

impl PrefixFolder<'_> {
    /// Most texts in an index.
    pub const TEXTS_MAX: usize = 256;
    /// Most pictures of a text.
    pub const PICTURES_MAX: usize = 32;

    /// The folder at `path`, for texts of `model`.
    pub fn new<'a>(model: &'a str, path: &'a Path) -> PrefixFolder<'a> {
        PrefixFolder { model, path }
    }

    /// Makes the folder if it does not exist. A link in place of the index is refused: it may lead to another's file.
    ///
    /// # Errors
    /// The folder cannot be made, or the entry in place of the index is not a file.
    pub fn begin(&self) -> Result<(), Unwritten> {
        std::fs::create_dir_all(self.path).map_err(|error| Unwritten::new(self.path, &error))?;
        self.index().map(drop)
    }

    /// Removes the index, once the first of its files is replaced or its texts are forgotten. Until then the checksum
    /// says that the file is another.
    ///
    /// # Errors
    /// The index cannot be removed, or the entry in its place is not a file.
    pub fn remove_index(&self) -> Result<(), Unwritten> {
        let Some(index) = self.index()? else { return Ok(()) };
        std::fs::remove_file(&index).map_err(|error| Unwritten::new(&index, &error))
    }

    /// Removes the files of texts that are not among these. An entry that is not a regular file stays.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn remove_others(&self, texts: &[SavedPrefix]) -> Result<(), Unwritten> {
        let named: HashSet<&str> = texts.iter().map(SavedPrefix::name).collect();
        self.remove_files(|name| !named.contains(name))
    }

    /// Removes the files of all texts if no index names them, after an error that is already to be reported.
    pub fn remove_unnamed(&self) {
        if matches!(self.index(), Ok(None)) {
            let _ = self.remove_files(|_| true);
        }
    }

    /// Tries to remove the files of all texts with these names. The error is that of the first that stays.
    fn remove_files(&self, of: impl Fn(&str) -> bool) -> Result<(), Unwritten> {
        let mut outcome = Ok(());
        for path in (0..Self::TEXTS_MAX).filter(|&i| of(&name_of(i))).map(|i| self.file_of(i)) {
            let is_file = std::fs::symlink_metadata(&path).is_ok_and(|found| found.is_file());
            let removed = if is_file { std::fs::remove_file(&path) } else { Ok(()) };
            outcome = outcome.and(removed.map_err(|error| Unwritten::new(&path, &error)));
        }
        outcome
    }

    /// The path of the index, if there is one.
    fn index(&self) -> Result<Option<PathBuf>, Unwritten> {
        let index = self.path.join(INDEX);
        match std::fs::symlink_metadata(&index) {
            Ok(found) if found.is_symlink() => {
                Err(Unwritten::new(&index, &"it is a link; make the folder itself a link instead"))
            }
            Ok(found) if !found.is_file() => {
                Err(Unwritten::new(&index, &"what is there is not a regular file"))
            }
            Ok(_) => Ok(Some(index)),
            Err(_) => Ok(None),
        }
    }

    /// The path for the file of text number `i`.
    pub fn file_of(&self, i: usize) -> PathBuf {
        self.path.join(name_of(i))
    }

    /// The entry of text number `i`, whose file is written.
    ///
    /// # Errors
    /// The file cannot be read back.
    pub fn entry(&self, i: usize, pictures: Vec<PictureHash>) -> Result<SavedPrefix, Unwritten> {
        let path = self.file_of(i);
        let file = checked(&path, u64::MAX).map_err(|error| Unwritten::new(&path, &error))?;
        Ok(SavedPrefix { name: name_of(i), file, pictures })
    }

    /// Writes the index. It is complete or absent.
    ///
    /// # Errors
    /// The index cannot be written.
    pub fn write_index(&self, texts: &[SavedPrefix]) -> Result<(), Unwritten> {
        let files: Vec<Value> = texts.iter().map(SavedPrefix::to_json).collect();
        let index = json!({"format": FORMAT, "model": self.model, "files": files});
        let path = self.path.join(INDEX);
        write_whole(&path, index.to_string().as_bytes()).map_err(|error| Unwritten::new(&path, &error))
    }

    /// The texts of the index, in its order. `None` if there is no index.
    ///
    /// # Errors
    /// One sentence: the index cannot be read, or is of another format or model.
    pub fn read_index(&self) -> Result<Option<IndexEntries>, String> {
        let path = self.path.join(INDEX);
        if !path.exists() {
            return Ok(None);
        }
        let bytes = read_regular(&path, INDEX_BYTES_MAX).map_err(|e| format!("{INDEX}: {e}"))?;
        let index: Value = serde_json::from_slice(&bytes).map_err(|e| format!("{INDEX}: {e}"))?;
        if index["format"] != FORMAT || index["model"] != self.model {
            return Err(format!("{INDEX}: it is of another format or model"));
        }
        let Value::Array(files) = &index["files"] else { return Err(format!("{INDEX}: it names no files")) };
        let mut names = HashSet::new();
        let mut entry = |file: &Value| {
            let text = SavedPrefix::from_json(file)?;
            // One file is read once.
            if names.insert(text.name.clone()) {
                Ok(text)
            } else {
                Err(format!("{}: it is named twice", text.name))
            }
        };
        Ok(Some(files.iter().take(Self::TEXTS_MAX).map(&mut entry).collect()))
    }

    /// The path of a text's file, which has the bytes that were written. A file of more than `bytes_max` bytes is not
    /// read.
    ///
    /// # Errors
    /// One sentence: the file cannot be read, is too large or has other bytes.
    pub fn intact(&self, text: &SavedPrefix, bytes_max: u64) -> Result<PathBuf, String> {
        let name = &text.name;
        if text.file.bytes > bytes_max {
            return Err(format!(
                "{name}: {} bytes, and a text of this engine has at most {bytes_max}",
                text.file.bytes
            ));
        }
        let path = self.path.join(name);
        match checked(&path, text.file.bytes) {
            Ok(file) if file == text.file => Ok(path),
            Ok(_) => Err(format!("{name}: damaged, its checksum is another")),
            Err(error) => Err(format!("{name}: {error}")),
        }
    }
}

impl SavedPrefix {
    /// Name of the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn to_json(&self) -> Value {
        let hex = |hash: &PictureHash| hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let pictures: Vec<String> = self.pictures.iter().map(hex).collect();
        json!({"name": self.name, "bytes": self.file.bytes, "crc32": self.file.crc32, "pictures": pictures})
    }

    /// An entry without a size or a checksum is that of a damaged file.
    fn from_json(entry: &Value) -> Result<SavedPrefix, String> {
        let name = entry["name"].as_str().filter(|name| !name.contains(['/', '\\'])).unwrap_or_default();
        let crc32 = entry["crc32"].as_u64().and_then(|crc32| u32::try_from(crc32).ok());
        let (Some(bytes), Some(crc32)) = (entry["bytes"].as_u64(), crc32) else {
            return Err(format!("{name}: damaged, its checksum is another"));
        };
        let pictures = entry["pictures"].as_array().map_or(Some(Vec::new()), |all| {
            all.iter().take(PrefixFolder::PICTURES_MAX).map(|hash| from_hex(hash.as_str()?)).collect()
        });
        let pictures = pictures.ok_or_else(|| format!("{name}: its pictures are no hashes"))?;
        Ok(SavedPrefix { name: name.into(), file: Checked { bytes, crc32 }, pictures })
    }
}

fn name_of(i: usize) -> String {
    format!("{i}.safetensors")
}

fn from_hex(text: &str) -> Option<PictureHash> {
    let mut hash = PictureHash::default();
    let is_hex = text.len() == 2 * hash.len() && text.bytes().all(|b| b.is_ascii_hexdigit());
    for (i, byte) in hash.iter_mut().enumerate().filter(|_| is_hex) {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
    }
    is_hex.then_some(hash)
}

/// Reads a file up to one byte more than `expected`, by which a larger file is known.
fn checked(path: &Path, expected: u64) -> io::Result<Checked> {
    let mut reader = BufReader::new(open_regular(path)?.take(expected.saturating_add(1)));
    let (mut hasher, mut bytes) = (crc32fast::Hasher::new(), 0);
    let mut block = vec![0; 1 << 16];
    loop {
        let read = reader.read(&mut block)?;
        if read == 0 {
            return Ok(Checked { bytes, crc32: hasher.finalize() });
        }
        hasher.update(&block[..read]);
        bytes += read as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_comes_back_and_a_damaged_file_is_noticed() {
        let folder = tempfile::tempdir().expect("a folder");
        let saved = PrefixFolder::new("a model", folder.path());
        assert!(saved.read_index().expect("none").is_none());
        saved.begin().expect("it exists");
        std::fs::write(saved.file_of(0), b"text").expect("written");
        let entry = saved.entry(0, vec![[7; 32]]).expect("there");
        saved.write_index(std::slice::from_ref(&entry)).expect("written");
        let index = saved.read_index().expect("sound").expect("there");
        assert_eq!(index, [Ok(entry.clone())]);
        assert_eq!(saved.intact(&entry, 4), Ok(saved.file_of(0)));
        assert!(saved.intact(&entry, 3).expect_err("too large").contains("4 bytes"), "it is not read");
        for other in [b"texT".as_slice(), b"text and more", b"tex"] {
            std::fs::write(saved.file_of(0), other).expect("written");
            assert!(saved.intact(&entry, 100).expect_err("another").contains("checksum"));
        }
        saved.write_index(&[entry.clone(), entry.clone()]).expect("written");
        let twice = saved.read_index().expect("sound").expect("there");
        assert!(twice[0].is_ok() && twice[1].as_ref().is_err_and(|problem| problem.contains("twice")));
        let other = PrefixFolder::new("another model", folder.path());
        assert!(other.read_index().expect_err("not its own").contains("format or model"));
        saved.begin().expect("it exists");
        assert!(saved.read_index().expect("sound").is_some(), "the index stays until a file is replaced");
        saved.remove_index().expect("it is a file");
        assert!(saved.read_index().expect("none").is_none(), "files without an index are not read");
        saved.remove_index().expect("there is none");
    }

    #[test]
    fn files_that_the_index_does_not_name_are_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let saved = PrefixFolder::new("a model", folder.path());
        let last = PrefixFolder::TEXTS_MAX - 1;
        let all = [0, 1, last];
        let there = || all.map(|i| saved.file_of(i).exists());
        let write = || all.iter().for_each(|&i| std::fs::write(saved.file_of(i), "text").expect("written"));
        write();
        let others = ["notes.txt", "256.safetensors"].map(|name| folder.path().join(name));
        others.iter().for_each(|path| std::fs::write(path, "another's").expect("written"));
        let entry = saved.entry(1, Vec::new()).expect("there");
        saved.remove_others(std::slice::from_ref(&entry)).expect("removed");
        assert_eq!(there(), [false, true, false]);
        write();
        saved.write_index(&[entry]).expect("written");
        saved.remove_unnamed();
        assert_eq!(there(), [true; 3], "there is an index");
        saved.remove_index().expect("removed");
        saved.remove_unnamed();
        assert_eq!(there(), [false; 3]);
        std::fs::create_dir(saved.file_of(0)).expect("made");
        saved.remove_others(&[]).expect("a folder is not removed");
        assert!(saved.file_of(0).is_dir() && others.iter().all(|path| path.exists()));
    }

    #[cfg(unix)]
    #[test]
    fn a_link_in_place_of_the_index_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let (index, other) = (folder.path().join(INDEX), folder.path().join("other"));
        std::fs::write(&other, "another's").expect("written");
        let saved = PrefixFolder::new("a model", folder.path());
        for target in ["other", "/dev/full", "nowhere"] {
            std::os::unix::fs::symlink(target, &index).expect("made");
            let refused = saved.begin().expect_err("it is a link");
            assert!(refused.path == index && refused.reason.contains("it is a link"), "{refused:?}");
            assert_eq!(std::fs::read_link(&index).expect("it is still there"), Path::new(target));
            std::fs::remove_file(&index).expect("removed");
        }
        assert_eq!(std::fs::read(&other).expect("there"), b"another's");
    }
}
