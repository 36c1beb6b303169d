//! Files in untrusted folders: only regular files are read, and only up to a limit of bytes.

use std::{
    fs::{File, OpenOptions},
    io::{Error, ErrorKind, Read, Result},
    path::Path,
};

/// Opens a regular file, or a link to one. Refuses a pipe or a device without waiting for its other end.
///
/// # Errors
/// The system's error; [`ErrorKind::InvalidInput`] if it is not a regular file.
pub fn open_regular(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    let file = options.open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(Error::new(ErrorKind::InvalidInput, "it is not a regular file"))
}

/// Reads a regular file of at most `bytes_max` bytes. Counts the bytes that are read, not the size that the system
/// gives.
///
/// # Errors
/// As [`open_regular`]; [`ErrorKind::FileTooLarge`] if the file is larger.
pub fn read_regular(path: &Path, bytes_max: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 <= bytes_max {
        return Ok(bytes);
    }
    Err(Error::new(ErrorKind::FileTooLarge, format!("it has more than {bytes_max} bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        std::fs::write(&path, [7; 10]).unwrap();
        assert_eq!(read_regular(&path, 10).unwrap(), [7; 10]);
        assert_eq!(read_regular(&path, 9).unwrap_err().kind(), ErrorKind::FileTooLarge);
        assert!(read_regular(folder.path(), 9).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn devices_and_pipes_are_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let (link, pipe) = (folder.path().join("link"), folder.path().join("pipe"));
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for path in [&link, &pipe] {
            assert_eq!(open_regular(path).unwrap_err().to_string(), "it is not a regular file");
        }
    }
}
