//! Files of a header followed by tensors, filled in pieces.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use crate::{Result, WeightsError, partial::PartialFile};

/// Where a tensor's bytes go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorSpan {
    /// From the start of the file.
    pub offset: u64,
    pub bytes: u64,
}

/// The place of each tensor.
pub(crate) type TensorSpans = BTreeMap<String, TensorSpan>;

/// A file under a temporary name. Its tensors are filled in any order. It gets its name when it is complete; if dropped
/// before, nothing remains.
#[derive(Debug)]
pub(crate) struct StreamedFile {
    path: PathBuf,
    file: PartialFile,
    stream: Stream<File>,
}

impl StreamedFile {
    /// Starts the file that will be at `path`.
    pub(crate) fn create(path: &Path, header: &[u8], places: TensorSpans) -> Result<StreamedFile> {
        let (file, handle) = PartialFile::create(path)?;
        let stream = Stream::start(handle, header, places).map_err(WeightsError::io("write", path))?;
        Ok(StreamedFile { path: path.into(), file, stream })
    }

    /// Appends to the bytes of a tensor.
    pub(crate) fn append(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        match self.stream.append(name, bytes) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(problem)) => Err(WeightsError::Output { path: self.path.clone(), problem }),
            Err(source) => Err(WeightsError::io("write", &self.path)(source)),
        }
    }

    /// Completes the file and gives it its name.
    pub(crate) fn finish(self) -> Result<()> {
        if let Some(problem) = self.stream.incomplete() {
            return Err(WeightsError::Output { path: self.path, problem });
        }
        self.stream.target.sync_all().map_err(WeightsError::io("write", &self.path))?;
        self.file.commit()
    }
}

/// The tensors of a file that is being written to `target`.
#[derive(Debug)]
struct Stream<W> {
    target: W,
    tensors: BTreeMap<String, Progress>,
}

/// Progress of one tensor.
#[derive(Debug)]
struct Progress {
    next: u64,
    end: u64,
}

impl<W: Write + Seek> Stream<W> {
    fn start(mut target: W, header: &[u8], places: TensorSpans) -> io::Result<Stream<W>> {
        target.write_all(header)?;
        let progress =
            |(name, TensorSpan { offset, bytes })| (name, Progress { next: offset, end: offset + bytes });
        let tensors = places.into_iter().map(progress).collect();
        Ok(Stream { target, tensors })
    }

    /// The outer error is the system's, the inner one the caller's.
    fn append(&mut self, name: &str, bytes: &[u8]) -> io::Result<Result<(), String>> {
        let Some(progress) = self.tensors.get_mut(name) else {
            return Ok(Err(format!("tensor '{name}' was not declared")));
        };
        let (given, left) = (bytes.len() as u64, progress.end - progress.next);
        if given > left {
            return Ok(Err(format!("tensor '{name}' was given {given} bytes, it has room for {left}")));
        }
        self.target.seek(SeekFrom::Start(progress.next))?;
        self.target.write_all(bytes)?;
        progress.next += given;
        Ok(Ok(()))
    }

    /// Names a tensor with missing bytes, if there is one.
    fn incomplete(&self) -> Option<String> {
        let (name, progress) = self.tensors.iter().find(|(_, progress)| progress.next < progress.end)?;
        Some(format!("tensor '{name}' lacks {} bytes", progress.end - progress.next))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// A disk with room for `left` bytes.
    struct SmallDisk {
        file: Cursor<Vec<u8>>,
        left: usize,
    }

    impl Write for SmallDisk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.left == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let bytes = &bytes[..bytes.len().min(self.left)];
            self.left -= bytes.len();
            self.file.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Seek for SmallDisk {
        fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
            self.file.seek(to)
        }
    }

    #[test]
    fn a_full_disk_is_the_systems_error() {
        let places = || TensorSpans::from([("a".to_string(), TensorSpan { offset: 20, bytes: 100 })]);
        let room = |left| SmallDisk { file: Cursor::new(Vec::new()), left };
        let kind = |error: io::Error| error.kind();
        assert_eq!(
            kind(Stream::start(room(10), &[7; 20], places()).err().unwrap()),
            io::ErrorKind::StorageFull
        );
        let mut stream = Stream::start(room(80), &[7; 20], places()).unwrap();
        stream.append("a", &[1; 50]).unwrap().unwrap();
        assert_eq!(kind(stream.append("a", &[1; 50]).unwrap_err()), io::ErrorKind::StorageFull);
        assert_eq!(stream.incomplete().unwrap(), "tensor 'a' lacks 50 bytes");
    }
}
