//! Writes one safetensors file, tensor by tensor, piece by piece.

use std::{collections::BTreeMap, path::Path};

use super::layout::{Layout, TensorSpec};
use crate::{Result, WeightsError, stream::StreamedFile};

/// Writes a safetensors file. Tensors are declared first, then filled in pieces in any order, so no tensor has to be in
/// memory as a whole.
///
/// The file gets its name when it is complete. Until [`finish`](Self::finish) it has a temporary name in the same
/// folder, and dropping the writer removes it.
///
/// ```
/// use std::collections::BTreeMap;
///
/// use keel_array::DType;
/// use keel_weights::{SafetensorsFile, SafetensorsWriter, TensorSource, TensorSpec};
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("out.safetensors");
/// let spec = TensorSpec { name: "logits".into(), dtype: DType::F32, shape: vec![2, 3] };
/// let mut writer = SafetensorsWriter::create(&path, &[spec], &BTreeMap::new())?;
/// for row in [[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]] {
///     writer.append("logits", &row.map(f32::to_le_bytes).concat())?;
/// }
/// writer.finish()?;
/// assert_eq!(SafetensorsFile::open(&path)?.tensor("logits")?.to_f32()?, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
/// # Ok::<(), keel_weights::WeightsError>(())
/// ```
#[derive(Debug)]
pub struct SafetensorsWriter(StreamedFile);

impl SafetensorsWriter {
    /// Starts the file at `path`. It will replace an existing file.
    ///
    /// # Errors
    /// [`WeightsError::Output`] if two tensors share a name or sizes overflow, [`WeightsError::Io`] if the
    /// file cannot be written.
    pub fn create(
        path: &Path,
        tensors: &[TensorSpec],
        metadata: &BTreeMap<String, String>,
    ) -> Result<SafetensorsWriter> {
        let layout = Layout::new(tensors, metadata)
            .map_err(|problem| WeightsError::Output { path: path.into(), problem })?;
        StreamedFile::create(path, &layout.header, layout.places).map(SafetensorsWriter)
    }

    /// Appends to the bytes of a tensor: row-major, little-endian. Appends to different tensors may alternate.
    ///
    /// # Errors
    /// [`WeightsError::Output`] if the tensor was not declared or is full, [`WeightsError::Io`] if the write fails, for
    /// example on a full disk.
    pub fn append(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.0.append(name, bytes)
    }

    /// Completes the file and gives it its name.
    ///
    /// # Errors
    /// [`WeightsError::Output`] if a tensor lacks bytes, [`WeightsError::Io`] if the file cannot be completed.
    /// In both cases no file remains.
    pub fn finish(self) -> Result<()> {
        self.0.finish()
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use keel_array::DType;

    use super::*;
    use crate::{SafetensorsFile, StoredDType, TensorSource};

    fn spec(name: &str, dtype: DType, shape: &[usize]) -> TensorSpec {
        TensorSpec { name: name.into(), dtype, shape: shape.into() }
    }

    fn no_metadata() -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    fn files(folder: &Path) -> Vec<String> {
        let name = |entry: io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        std::fs::read_dir(folder).unwrap().map(name).collect()
    }

    #[test]
    fn tensors_filled_in_turns_read_back_aligned() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.safetensors");
        let metadata = BTreeMap::from([("format".to_string(), "mlx".to_string())]);
        let specs = [
            spec("byte", DType::U8, &[3]),
            spec("half", DType::BF16, &[5]),
            spec("long", DType::I64, &[2]),
            spec("none", DType::F32, &[0, 7]),
        ];
        let mut writer = SafetensorsWriter::create(&path, &specs, &metadata).unwrap();
        writer.append("long", &[1; 8]).unwrap();
        writer.append("byte", &[7, 8]).unwrap();
        writer.append("half", &[3; 10]).unwrap();
        writer.append("long", &[2; 8]).unwrap();
        writer.append("byte", &[9]).unwrap();
        writer.append("none", &[]).unwrap();
        assert!(!path.exists(), "it has its name only when it is complete");
        writer.finish().unwrap();
        assert_eq!(files(folder.path()), ["w.safetensors"]);
        let file = SafetensorsFile::open(&path).unwrap();
        assert_eq!(file.metadata()["format"], "mlx");
        assert_eq!(file.tensor("byte").unwrap().bytes(), [7, 8, 9]);
        assert_eq!(file.tensor("half").unwrap().bytes(), [3; 10]);
        assert_eq!(file.tensor("long").unwrap().bytes(), [[1; 8], [2; 8]].concat());
        assert_eq!(file.tensor("none").unwrap().shape(), [0, 7]);
        for entry in file.header().tensors().values() {
            let StoredDType::Known(dtype) = entry.dtype else { panic!("{entry:?}") };
            assert_eq!(entry.range.start % dtype.size(), 0);
        }
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(safetensors::SafeTensors::deserialize(&bytes).unwrap().len(), 4);
    }

    #[test]
    fn an_unfinished_file_leaves_nothing_and_keeps_the_old_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.safetensors");
        std::fs::write(&path, "old").unwrap();
        let specs = [spec("a", DType::F32, &[2])];
        let mut writer = SafetensorsWriter::create(&path, &specs, &no_metadata()).unwrap();
        writer.append("a", &[0; 7]).unwrap();
        assert_eq!(files(folder.path()).len(), 2);
        let message = writer.finish().unwrap_err().to_string();
        assert!(message.ends_with("w.safetensors cannot be written: tensor 'a' lacks 1 bytes"), "{message}");
        drop(SafetensorsWriter::create(&path, &specs, &no_metadata()).unwrap());
        assert_eq!(files(folder.path()), ["w.safetensors"]);
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
    }

    #[test]
    fn misuse_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.safetensors");
        let create = |specs: &[TensorSpec]| SafetensorsWriter::create(&path, specs, &no_metadata());
        let mut writer = create(&[spec("a", DType::U8, &[2])]).unwrap();
        assert!(writer.append("b", &[0]).unwrap_err().to_string().contains("'b' was not declared"));
        let message = writer.append("a", &[0; 3]).unwrap_err().to_string();
        assert!(message.contains("'a' was given 3 bytes, it has room for 2"), "{message}");
        let twice = [spec("a", DType::U8, &[2]), spec("a", DType::F32, &[1])];
        assert!(create(&twice).unwrap_err().to_string().contains("two tensors are named 'a'"));
        let huge = [spec("a", DType::F32, &[usize::MAX, 2])];
        assert!(create(&huge).unwrap_err().to_string().contains("overflows"));
        let nowhere = folder.path().join("missing/w.safetensors");
        let error = SafetensorsWriter::create(&nowhere, &[], &no_metadata()).unwrap_err();
        assert!(error.to_string().starts_with("cannot create "), "{error}");
    }
}
