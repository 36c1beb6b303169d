//! Files mapped into memory, read-only, and those that are part of the program. The one module of this crate with `unsafe` code.
#![allow(unsafe_code)]

use std::{fs::File, ops::Range, path::Path};

use crate::{Result, WeightsError};

/// A whole file as a slice of bytes. Pages are read when first touched and stay clean, so the
/// system can drop them under pressure.
#[derive(Debug)]
pub(crate) enum MappedFile {
    /// A file of its own.
    Mapped(memmap2::Mmap),
    /// Part of the program's file, which the system has mapped.
    Static(&'static [u8]),
}

impl MappedFile {
    /// Maps the regular file at `path`.
    pub(crate) fn open(path: &Path) -> Result<MappedFile> {
        let file = File::open(path).map_err(WeightsError::io("open", path))?;
        let metadata = file.metadata().map_err(WeightsError::io("read the size of", path))?;
        if !metadata.is_file() {
            return Err(WeightsError::NoWeights { path: path.into() });
        }
        // SAFETY: the mapping is read-only and private to this value, which outlives all slices of it.
        // What remains is the contract of every mapped checkpoint: nobody truncates or rewrites the file
        // in place while it is loaded. Writers of this crate honour it by renaming finished files.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(WeightsError::io("map", path))?;
        Ok(MappedFile::Mapped(map))
    }

    /// The file's bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            MappedFile::Mapped(map) => map,
            MappedFile::Static(bytes) => bytes,
        }
    }

    /// [`release`](Self::release)s some rows of a tensor that lies at `tensor` and has this shape. Rows beyond its
    /// last are ignored.
    pub(crate) fn release_rows(&self, tensor: &Range<usize>, shape: &[usize], rows: Range<usize>) {
        let count = shape.split_last().map_or(1, |(_, leading)| leading.iter().product());
        let row_bytes = tensor.len() / usize::max(count, 1);
        let offset = |row: usize| tensor.start + row.min(count) * row_bytes;
        self.release(offset(rows.start)..offset(rows.end));
    }

    /// Drops the resident pages that lie wholly inside `range`; touching them again reads the file again.
    /// This is a hint: where the system does not take it, the pages stay. The program's own pages stay, too.
    pub(crate) fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let MappedFile::Mapped(map) = self {
            const PAGE_BYTES: usize = 4096;
            let start = range.start.next_multiple_of(PAGE_BYTES);
            let end = range.end.min(map.len()) / PAGE_BYTES * PAGE_BYTES;
            if start < end {
                let advice = memmap2::UncheckedAdvice::DontNeed;
                // SAFETY: the pages are clean pages of a read-only file mapping, so dropping them loses
                // nothing: the next access reads the same bytes from the file.
                let _ = unsafe { map.unchecked_advise_range(advice, start, end - start) };
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_pages_read_back_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        let bytes: Vec<u8> = (0..3 * 4096 + 17).map(|i| (i % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let file = MappedFile::open(&path).unwrap();
        assert_eq!(file.bytes(), bytes);
        file.release(1..bytes.len());
        file.release(5000..5001);
        file.release(0..usize::MAX / 2);
        assert_eq!(file.bytes(), bytes);
    }

    #[test]
    fn the_programs_own_bytes_stay() {
        let file = MappedFile::Static(b"bytes");
        file.release(0..5);
        file.release_rows(&(0..5), &[5], 0..5);
        assert_eq!(file.bytes(), b"bytes");
    }

    #[test]
    fn a_folder_is_not_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let error = MappedFile::open(folder.path()).unwrap_err();
        assert!(matches!(error, WeightsError::NoWeights { .. }), "{error}");
    }
}
