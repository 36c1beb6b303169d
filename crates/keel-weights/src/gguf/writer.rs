//! Writes a GGUF file.

use std::{collections::BTreeMap, path::Path};

use super::{GgmlType, metadata::ALIGNMENT_KEY};
use crate::{
    Result, WeightsError, cols, rows,
    source::element_count,
    stream::{StreamedFile, TensorSpan, TensorSpans},
};

/// Tensors begin at multiples of this. It is the readers' default.
const ALIGNMENT: u64 = 32;

/// Metadata of a file to be written. Setting a key again replaces its value.
#[derive(Clone, Debug, Default)]
pub struct GgufMetadata(BTreeMap<String, Vec<u8>>);

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensorSpec {
    /// Its name.
    pub name: String,
    /// How its elements are stored.
    pub kind: GgmlType,
    /// Its dimensions, slowest first.
    pub shape: Vec<usize>,
}

/// Writes a GGUF file. Tensors are declared first, then filled in pieces, in any order.
///
/// As with [`SafetensorsWriter`](crate::SafetensorsWriter), the file gets its name when it is complete.
#[derive(Debug)]
pub struct GgufWriter(StreamedFile);

impl GgufMetadata {
    /// Whether a key is set.
    pub fn contains(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// Sets an unsigned 32-bit number.
    pub fn u32(&mut self, key: &str, value: u32) {
        self.set(key, 4, value.to_le_bytes());
    }

    /// Sets a float of 32 bits.
    pub fn f32(&mut self, key: &str, value: f32) {
        self.set(key, 6, value.to_le_bytes());
    }

    /// Sets a truth value.
    pub fn bool(&mut self, key: &str, value: bool) {
        self.set(key, 7, [value.into()]);
    }

    /// Sets a text.
    pub fn string(&mut self, key: &str, value: &str) {
        self.set(key, 8, string(value));
    }

    /// Sets a list of whole numbers of 32 bits.
    pub fn i32s(&mut self, key: &str, values: &[i32]) {
        self.list(key, 5, values.len(), values.iter().flat_map(|value| value.to_le_bytes()));
    }

    /// Sets a list of floats of 32 bits.
    pub fn f32s(&mut self, key: &str, values: &[f32]) {
        self.list(key, 6, values.len(), values.iter().flat_map(|value| value.to_le_bytes()));
    }

    /// Sets a list of truth values.
    pub fn bools(&mut self, key: &str, values: &[bool]) {
        self.list(key, 7, values.len(), values.iter().map(|&value| value.into()));
    }

    /// Sets a list of texts.
    pub fn strings(&mut self, key: &str, values: &[&str]) {
        self.list(key, 8, values.len(), values.iter().flat_map(|value| string(value)));
    }

    /// Copies a value from another file: see [`GgufHeader::raw_value`](super::GgufHeader::raw_value).
    pub(crate) fn raw(&mut self, key: &str, value: &[u8]) {
        // The alignment is set by this writer.
        if key != ALIGNMENT_KEY {
            self.0.insert(key.into(), value.into());
        }
    }

    fn set(&mut self, key: &str, kind: u32, bytes: impl IntoIterator<Item = u8>) {
        self.0.insert(key.into(), kind.to_le_bytes().into_iter().chain(bytes).collect());
    }

    fn list(&mut self, key: &str, kind: u32, count: usize, bytes: impl Iterator<Item = u8>) {
        let count = (count as u64).to_le_bytes();
        self.set(key, 9, kind.to_le_bytes().into_iter().chain(count).chain(bytes));
    }
}

impl GgufTensorSpec {
    /// Bytes of the tensor; `None` if they overflow or a row is not whole blocks.
    pub fn bytes(&self) -> Option<usize> {
        element_count(&self.shape)?;
        self.kind.row_bytes(cols(&self.shape))?.checked_mul(rows(&self.shape))
    }
}

impl GgufWriter {
    /// Starts the file at `path`. It will replace an existing file.
    ///
    /// # Errors
    /// [`WeightsError::Output`] if two tensors share a name, rows are not whole blocks or sizes overflow,
    /// [`WeightsError::Io`] if the file cannot be written.
    pub fn create(path: &Path, metadata: &GgufMetadata, tensors: &[GgufTensorSpec]) -> Result<GgufWriter> {
        let Layout { header, places } = layout(metadata, tensors)
            .map_err(|problem| WeightsError::Output { path: path.into(), problem })?;
        StreamedFile::create(path, &header, places).map(GgufWriter)
    }

    /// Appends to the bytes of a tensor, row-major. Appends to different tensors may alternate.
    ///
    /// # Errors
    /// As [`SafetensorsWriter::append`](crate::SafetensorsWriter::append).
    pub fn append(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.0.append(name, bytes)
    }

    /// Completes the file and gives it its name.
    ///
    /// # Errors
    /// As [`SafetensorsWriter::finish`](crate::SafetensorsWriter::finish).
    pub fn finish(self) -> Result<()> {
        self.0.finish()
    }
}

/// A text after its length.
fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// The header, and the places of the tensors after it.
struct Layout {
    header: Vec<u8>,
    places: TensorSpans,
}

fn layout(metadata: &GgufMetadata, tensors: &[GgufTensorSpec]) -> Result<Layout, String> {
    let mut header = b"GGUF".to_vec();
    header.extend(3u32.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend((metadata.0.len() as u64).to_le_bytes());
    for (key, value) in &metadata.0 {
        header.extend(string(key));
        header.extend(value);
    }
    let mut places = TensorSpans::new();
    let mut next = 0u64;
    for spec in tensors {
        let GgufTensorSpec { name, kind, shape } = spec;
        let bytes = spec
            .bytes()
            .map(|bytes| bytes as u64)
            .filter(|bytes| next.checked_add(bytes + ALIGNMENT).is_some());
        let bytes = bytes.ok_or_else(|| format!("tensor '{name}' of shape {shape:?} cannot be {kind}"))?;
        header.extend(string(name));
        header.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|&dim| header.extend((dim as u64).to_le_bytes()));
        header.extend(kind.id().to_le_bytes());
        header.extend(next.to_le_bytes());
        if places.insert(name.clone(), TensorSpan { offset: next, bytes }).is_some() {
            return Err(format!("two tensors are named '{name}'"));
        }
        next = (next + bytes).next_multiple_of(ALIGNMENT);
    }
    header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
    places.values_mut().for_each(|place| place.offset += header.len() as u64);
    Ok(Layout { header, places })
}

#[cfg(test)]
mod tests {
    use keel_array::{BlockFormat, DType};

    use super::*;
    use crate::gguf::{GgufFile, GgufValue};
    use crate::{LinearFormat, TensorSource};

    fn spec(name: &str, kind: GgmlType, shape: &[usize]) -> GgufTensorSpec {
        GgufTensorSpec { name: name.into(), kind, shape: shape.into() }
    }

    #[test]
    fn what_is_written_reads_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let mut metadata = GgufMetadata::default();
        metadata.string("general.architecture", "llama");
        metadata.u32("a.count", 6);
        metadata.u32("a.count", 7);
        metadata.f32("a.eps", 0.5);
        metadata.bool("a.flag", true);
        metadata.i32s("a.kinds", &[1, -2]);
        metadata.f32s("a.scores", &[-1.5]);
        metadata.bools("a.flags", &[false, true]);
        metadata.strings("a.texts", &["", "äb"]);
        let float = GgmlType::Plain(DType::F32);
        let blocks = GgmlType::Blocks(BlockFormat::Q8_0);
        let specs = [spec("n", float, &[3]), spec("w.weight", blocks, &[2, 64]), spec("z", float, &[1])];
        let mut writer = GgufWriter::create(&path, &metadata, &specs).unwrap();
        writer.append("w.weight", &[1; 100]).unwrap();
        writer.append("n", &[2; 12]).unwrap();
        writer.append("z", &[3; 4]).unwrap();
        writer.append("w.weight", &[4; 36]).unwrap();
        writer.finish().unwrap();
        let file = GgufFile::open(&path).unwrap();
        let value = |key: &str| file.metadata()[key].clone();
        assert_eq!(value("general.architecture").as_str(), Some("llama"));
        assert_eq!((value("a.count"), value("a.eps")), (GgufValue::Unsigned(7), GgufValue::Float(0.5)));
        assert_eq!(value("a.flag"), GgufValue::Bool(true));
        assert_eq!(value("a.kinds"), GgufValue::Array(vec![GgufValue::Signed(1), GgufValue::Signed(-2)]));
        assert_eq!(value("a.scores"), GgufValue::Array(vec![GgufValue::Float(-1.5)]));
        assert_eq!(value("a.flags"), GgufValue::Array(vec![GgufValue::Bool(false), GgufValue::Bool(true)]));
        let texts = ["", "äb"].map(|text| GgufValue::String(text.into()));
        assert_eq!(value("a.texts"), GgufValue::Array(texts.into()));
        assert_eq!(file.tensor("n").unwrap().bytes(), [2; 12]);
        assert_eq!(file.tensor("z").unwrap().bytes(), [3; 4]);
        let info = file.linear_info("w").unwrap();
        assert_eq!((info.rows, info.cols), (2, 64));
        assert_eq!(info.format, LinearFormat::Blocks(BlockFormat::Q8_0));
        let mut copy = GgufMetadata::default();
        for key in ["a.kinds", "a.texts"] {
            copy.raw(key, file.raw_value(key).unwrap());
            assert_eq!(copy.0[key], metadata.0[key]);
        }
    }

    #[test]
    fn what_cannot_be_laid_out_is_refused() {
        let create = |specs: &[GgufTensorSpec]| {
            let error = GgufWriter::create("nowhere/m.gguf".as_ref(), &GgufMetadata::default(), specs);
            error.unwrap_err().to_string()
        };
        let blocks = GgmlType::Blocks(BlockFormat::Q4K);
        assert!(create(&[spec("a", blocks, &[2, 255])]).contains("'a' of shape [2, 255] cannot be Q4_K"));
        assert!(create(&[spec("a", blocks, &[usize::MAX, 256])]).contains("cannot be Q4_K"));
        let twice = [spec("a", blocks, &[256]), spec("a", blocks, &[256])];
        assert!(create(&twice).contains("two tensors are named 'a'"));
    }
}
