//! Compiled kernels on disk.
//!
//! The driver trusts the machine code that it loads: code that is cut short ends the process. So threads and processes
//! that keep the same kernel at the same time each write a file of their own and rename it, and each file ends with a
//! hash of its code.

use std::hash::{DefaultHasher, Hasher};
use std::io::{Error, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

/// Bytes of the hash at the end of a file.
const HASH_BYTES: usize = 8;

/// The folder: below `KEEL_CACHE_DIR`, or `keel` in the user's cache folder.
pub(super) fn cache_folder() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let folder = variable("KEEL_CACHE_DIR")
        .or_else(|| variable("XDG_CACHE_HOME").map(|p| p.join("keel")))
        .or_else(|| variable("HOME").map(|p| p.join(".cache/keel")))?;
    Some(folder.join("kernels"))
}

/// The code that a file holds; `None` if it is not there or not whole.
pub(super) fn read(path: &Path) -> Option<Vec<u8>> {
    let mut code = std::fs::read(path).ok()?;
    let hash = code.split_off(code.len().checked_sub(HASH_BYTES)?);
    (hash == hash_of(&code)).then_some(code)
}

/// Keeps code for the next process. A cache that cannot be written costs time, nothing else.
pub(super) fn store(path: &Path, code: &[u8]) {
    let Some(folder) = path.parent() else { return };
    let write = || {
        std::fs::create_dir_all(folder)?;
        let mut file = new_file(folder)?;
        file.write_all(code)?;
        file.write_all(&hash_of(code))?;
        file.persist(path)?;
        Ok::<(), Error>(())
    };
    if let Err(error) = write() {
        tracing::warn!("the compiled kernel was not kept in {}: {error}", path.display());
    }
}

/// A file of its own name, which other users may read as the umask says.
fn new_file(folder: &Path) -> Result<NamedTempFile, Error> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder)
}

fn hash_of(code: &[u8]) -> [u8; HASH_BYTES] {
    let mut hasher = DefaultHasher::new();
    hasher.write(code);
    hasher.finish().to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Threads that load a model each keep the same kernels at the same time. A file that another thread was about to
    /// write again was read half empty, and the driver crashed.
    #[test]
    fn no_reader_sees_a_file_that_is_being_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("kernels/a.cubin");
        let code = vec![7; 1 << 20];
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        store(&path, &code);
                        assert!(read(&path).is_some_and(|read| read == code), "not whole");
                    }
                });
            }
        });
        let left = std::fs::read_dir(folder.path().join("kernels")).expect("there").count();
        assert_eq!(left, 1, "files of writers stay");
    }

    #[test]
    fn a_file_that_is_not_whole_is_not_taken() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.cubin");
        assert!(read(&path).is_none());
        store(&path, b"machine code");
        // Another user's process may load the code that this one compiled.
        let plain = folder.path().join("plain");
        std::fs::write(&plain, b"").expect("writable");
        let permissions = |path| std::fs::metadata(path).expect("there").permissions();
        assert_eq!(permissions(&path), permissions(&plain));
        let whole = std::fs::read(&path).expect("there");
        assert!(read(&path).is_some_and(|code| code == b"machine code"));
        for end in 0..whole.len() {
            std::fs::write(&path, &whole[..end]).expect("writable");
            assert!(read(&path).is_none(), "{end} bytes of {}", whole.len());
        }
        store(&path, b"machine code");
        assert!(read(&path).is_some(), "it is written again");
    }
}
