//! Files that get their name when they are complete.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{Result, WeightsError};

/// A file under a temporary name beside its final path, removed on drop unless committed.
#[derive(Debug)]
pub(crate) struct PartialFile {
    temporary: PathBuf,
    path: PathBuf,
    committed: bool,
}

impl PartialFile {
    /// Creates the temporary file for `path` and opens it for writing.
    pub(crate) fn create(path: &Path) -> Result<(PartialFile, File)> {
        // Tells apart the writers of one process; its id tells apart processes.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{name}.{}-{number}.partial", std::process::id()));
        let file = File::create(&temporary).map_err(WeightsError::io("create", path))?;
        Ok((PartialFile { temporary, path: path.into(), committed: false }, file))
    }

    /// Gives the file its name, replacing what had it.
    pub(crate) fn commit(mut self) -> Result<()> {
        fs::rename(&self.temporary, &self.path)
            .map_err(WeightsError::io("rename the finished", &self.path))?;
        self.committed = true;
        Ok(())
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if !self.committed {
            // Nothing more can be done about a file that cannot be removed.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}
