//! Files mapped into memory, read-only, and files that are part of the program. This module and [`fault`](crate::fault)
//! are the only ones of this crate with `unsafe` code.
#![allow(unsafe_code)]

use std::{ops::Range, path::Path};

use crate::{Result, WeightsError, open_regular};

/// A whole file as a slice of bytes. Pages are read at the first touch and stay clean, so the system can drop them when
/// memory is short.
#[derive(Debug)]
pub(crate) enum MappedFile {
    /// A separate file.
    Mapped {
        /// Declared before the mapping, so it is dropped first.
        #[cfg(unix)]
        watched: crate::fault::Watched,
        map: memmap2::Mmap,
    },
    /// Part of the program's own file, which the system has mapped.
    Static(&'static [u8]),
}

impl MappedFile {
    /// Maps the regular file at `path`.
    pub(crate) fn open(path: &Path) -> Result<MappedFile> {
        if path.is_dir() {
            return Err(WeightsError::no_weights(path));
        }
        let file = open_regular(path).map_err(WeightsError::io("open", path))?;
        // SAFETY: the mapping is read-only and private to this value, which outlives all slices of it. The rest is the
        // contract of every mapped checkpoint: no process rewrites the file in place while it is loaded. This crate's
        // writers keep the contract: they rename finished files. A file that is cut short is noticed, see `is_damaged`.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(WeightsError::io("map", path))?;
        #[cfg(unix)]
        let watched = crate::fault::Watched::new(&map);
        Ok(MappedFile::Mapped {
            #[cfg(unix)]
            watched,
            map,
        })
    }

    /// Whether some bytes could not be read and became zeros: the file was cut short, or its disk failed.
    pub(crate) fn is_damaged(&self) -> bool {
        match self {
            #[cfg(unix)]
            MappedFile::Mapped { watched, .. } => watched.is_damaged(),
            _ => false,
        }
    }

    /// Returns an error if the file [is damaged](Self::is_damaged). Call it after bytes were read.
    pub(crate) fn check_intact(&self, path: &Path) -> Result<()> {
        if self.is_damaged() { Err(WeightsError::CutShort { path: path.into() }) } else { Ok(()) }
    }

    /// The file's bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            MappedFile::Mapped { map, .. } => map,
            MappedFile::Static(bytes) => bytes,
        }
    }

    /// [`release`](Self::release)s some rows of a tensor with this shape at bytes `tensor`. Rows after the last are
    /// ignored.
    pub(crate) fn release_rows(&self, tensor: &Range<usize>, shape: &[usize], rows: Range<usize>) {
        let count = crate::rows(shape);
        let row_bytes = tensor.len() / usize::max(count, 1);
        let offset = |row: usize| tensor.start + row.min(count) * row_bytes;
        self.release(offset(rows.start)..offset(rows.end));
    }

    /// Drops the resident pages that lie wholly inside `range`. Touching them again reads the file again. This is a
    /// hint: the system may keep the pages. The program's own pages always stay.
    pub(crate) fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let MappedFile::Mapped { map, .. } = self {
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

    #[cfg(unix)]
    #[test]
    fn a_file_that_is_cut_short_while_it_is_read_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let (file, other) = (MappedFile::open(&path).unwrap(), MappedFile::open(&path).unwrap());
        assert_eq!(file.bytes()[0], 7);
        file.check_intact(&path).unwrap();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(8192).unwrap();
        assert_eq!(file.bytes().iter().map(|byte| u64::from(*byte)).sum::<u64>(), 8192 * 7);
        assert!(file.is_damaged() && !other.is_damaged(), "the other one was not read");
        let error = file.check_intact(&path).unwrap_err().to_string();
        assert!(error.contains("data was cut short") && error.contains("download"), "{error}");
        drop(file);
        assert_eq!(std::thread::spawn(move || other.bytes()[1 << 19]).join().unwrap(), 0);
    }

    #[test]
    fn a_folder_is_not_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let error = MappedFile::open(folder.path()).unwrap_err();
        assert!(matches!(error, WeightsError::NoWeights { .. }), "{error}");
    }
}
