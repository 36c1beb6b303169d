//! Files that get their name only when they are complete.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{Result, WeightsError};

/// The temporary files of this process.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(|e| e.into_inner())
}

/// Removes the files that this process has begun and not finished, and lets no thread begin or finish another. For a
/// process that a signal ends, which drops nothing.
pub fn remove_unfinished() {
    let mut unfinished = unfinished();
    for path in unfinished.drain(..) {
        let _ = fs::remove_file(path);
    }
    std::mem::forget(unfinished);
}

/// A file under a temporary name in the folder of its final path. Removed on drop unless committed.
#[derive(Debug)]
pub(crate) struct PartialFile {
    temporary: PathBuf,
    path: PathBuf,
    committed: bool,
}

impl PartialFile {
    /// Creates the temporary file for `path` and opens it for writing. If `path` is a link, the link stays and the file
    /// that it points to will be replaced.
    ///
    /// # Errors
    /// If `path` exists and is not a regular file: a pipe, a device, a folder.
    pub(crate) fn create(path: &Path) -> Result<(PartialFile, File)> {
        let path = &target_of(path)?;
        // The number distinguishes writers of one process, the process id distinguishes processes.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{name}.{}-{number}.partial", std::process::id()));
        // A link, pipe or file that another process left under this name is removed. It is never written through.
        let _ = fs::remove_file(&temporary);
        let mut listed = unfinished();
        let file = File::create_new(&temporary).map_err(WeightsError::io("create", path))?;
        listed.push(temporary.clone());
        drop(listed);
        Ok((PartialFile { temporary, path: path.into(), committed: false }, file))
    }

    /// Gives the file its name. It replaces an existing file of that name.
    pub(crate) fn commit(mut self) -> Result<()> {
        check_replaceable(&self.path)?;
        fs::rename(&self.temporary, &self.path)
            .map_err(WeightsError::io("rename the finished", &self.path))?;
        self.committed = true;
        Ok(())
    }
}

/// Longest chain of links that is followed, the same as the system's.
const LINKS_MAX: usize = 40;

/// The real path of a file to be written to `path`. Links are followed, also to files that do not exist yet.
fn target_of(path: &Path) -> Result<PathBuf> {
    let mut target = path.to_path_buf();
    for _ in 0..LINKS_MAX {
        let Ok(next) = fs::read_link(&target) else {
            check_replaceable(&target)?;
            return Ok(target);
        };
        target = target.parent().unwrap_or(Path::new("")).join(next);
    }
    Err(WeightsError::Output {
        path: path.into(),
        problem: format!("it is a chain of more than {LINKS_MAX} links"),
    })
}

/// Returns an error if `path` exists and is not a regular file.
fn check_replaceable(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if !found.is_file() => Err(WeightsError::Output {
            path: path.into(),
            problem: "what is there is not a regular file; name another path".into(),
        }),
        _ => Ok(()),
    }
}

/// Writes a small file completely or not at all. Links are followed; only regular files are replaced.
///
/// # Errors
/// [`WeightsError::Io`], [`WeightsError::Output`].
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let (partial, mut file) = PartialFile::create(path)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    written.map_err(WeightsError::io("write", path))?;
    partial.commit()
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        let mut listed = unfinished();
        if !self.committed {
            // If the file cannot be removed, nothing more can be done.
            let _ = fs::remove_file(&self.temporary);
        }
        listed.retain(|path| *path != self.temporary);
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn what_is_not_a_file_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let link = folder.path().join("link");
        symlink("/dev/full", &link).unwrap();
        for path in [&pipe, &link, &folder.path().to_path_buf(), &PathBuf::from("/dev/null")] {
            let error = write_whole(path, b"new").unwrap_err().to_string();
            assert!(error.contains("not a regular file"), "{error}");
        }
        assert!(!fs::symlink_metadata(&pipe).unwrap().is_file());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left behind");
    }

    #[test]
    fn links_that_stand_in_place_of_the_temporary_file_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let [file, other] = ["file", "other"].map(|name| folder.path().join(name));
        fs::write(&other, "another's").unwrap();
        // Other tests of this process count, too.
        for number in 0..10_000 {
            let name = format!(".file.{}-{number}.partial", std::process::id());
            symlink(&other, folder.path().join(name)).unwrap();
        }
        write_whole(&file, b"new").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert!(fs::symlink_metadata(&file).unwrap().is_file());
        assert_eq!(fs::read(&other).unwrap(), b"another's");
    }

    #[test]
    fn links_are_followed_and_stay() {
        let folder = tempfile::tempdir().unwrap();
        let [file, link, dangling] = ["file", "link", "dangling"].map(|name| folder.path().join(name));
        fs::write(&file, "old").unwrap();
        symlink("file", &link).unwrap();
        symlink("later", &dangling).unwrap();
        write_whole(&link, b"new").unwrap();
        write_whole(&dangling, b"there").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert_eq!(fs::read(folder.path().join("later")).unwrap(), b"there");
    }
}
