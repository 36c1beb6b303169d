//! Errors of checkpoints and weights files.

use std::path::{Path, PathBuf};

use keel_array::DType;

/// The errors of this crate. Each message names the file or tensor, the numbers and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The operating system refused an operation on a file or folder.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The attempted action, as a verb: "open", "write".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },

    /// The path is neither a weights file nor a folder that holds one.
    #[error(
        "no weights at {}: expected a folder with model.safetensors or model.safetensors.index.json, \
         or the path of a .safetensors or .gguf file{}", path.display(), choice(.gguf_files)
    )]
    NoWeights {
        /// The path that was opened.
        path: PathBuf,
        /// Names of the GGUF models that the folder holds, in alphabetical order.
        gguf_files: Vec<String>,
    },

    /// A checkpoint without its configuration.
    #[error(
        "{} is missing: a checkpoint needs its config.json next to the weights; copy it from the model's source", path.display()
    )]
    NoConfig {
        /// The expected path of config.json.
        path: PathBuf,
    },

    /// A JSON file that cannot be used.
    #[error("{} is not usable: {problem}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The problem with it, with the line where known.
        problem: String,
    },

    /// A weights file whose header is broken, or does not match the file.
    #[error("{} is not a valid weights file: {problem}; download it again", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The problem with it.
        problem: HeaderProblem,
    },

    /// A GGUF file that is one part of a model, of which other parts are missing or do not belong to it.
    #[error(
        "{} is one of the {total} parts of a model: {problem}; put all parts into one folder under the names that they were \
         published with",
        path.display()
    )]
    Parts {
        /// The part.
        path: PathBuf,
        /// How many parts there are.
        total: u64,
        /// The problem with the parts.
        problem: String,
    },

    /// A weights file that lost bytes while it was in use.
    #[error(
        "{} was cut short while it was read, or its disk failed: make sure that nothing else writes to it, or download it \
         again",
        path.display()
    )]
    CutShort {
        /// The file.
        path: PathBuf,
    },

    /// An output that cannot be written as requested.
    #[error("{} cannot be written: {problem}", path.display())]
    Output {
        /// The file or folder.
        path: PathBuf,
        /// The problem, as the end of a sentence.
        problem: String,
    },

    /// A tensor that the checkpoint does not hold.
    #[error("tensor '{name}' is not in {}, which holds {held} tensors{}", path.display(), near(.siblings))]
    MissingTensor {
        /// The name asked for.
        name: String,
        /// The checkpoint.
        path: PathBuf,
        /// How many tensors it holds.
        held: usize,
        /// A few names that share the longest part of the path.
        siblings: Vec<String>,
    },

    /// A tensor of another shape than the model needs.
    #[error("tensor '{name}': expected shape {expected:?}, the checkpoint has {found:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// The shape that was needed.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },

    /// A tensor whose bytes do not make up its shape.
    #[error("tensor '{name}': {dtype} of shape {shape:?} does not take {bytes} bytes")]
    ByteCount {
        /// The tensor.
        name: String,
        /// Its element type.
        dtype: DType,
        /// Its shape.
        shape: Vec<usize>,
        /// The bytes it came with.
        bytes: usize,
    },

    /// An element type that the operation does not take.
    #[error("tensor '{name}' is stored as {found}; {needed} is needed here")]
    UnsupportedDType {
        /// The tensor.
        name: String,
        /// The type in the file, as the file spells it.
        found: String,
        /// The types that would do.
        needed: &'static str,
    },

    /// A weight in a form that is not read.
    #[error("tensor '{name}' is stored as {found}, which keel does not read; {advice}")]
    UnsupportedForm {
        /// The tensor.
        name: String,
        /// The element type, and the method that made it.
        found: String,
        /// The forms that are read, and what to do.
        advice: &'static str,
    },

    /// A linear layer whose tensors, shapes and config do not agree, or whose quantisation is not supported.
    #[error("module '{module}': {problem}")]
    Module {
        /// The module's path.
        module: String,
        /// The parts that do not agree, or the unsupported quantisation.
        problem: String,
    },

    /// A weight that is NaN or infinite, where quantising needs finite values.
    #[error(
        "tensor '{name}' holds NaN, infinite or overflowing values at row {row}: the checkpoint is damaged"
    )]
    NotFinite {
        /// The tensor.
        name: String,
        /// The row, or the first of a range of rows that contains it.
        row: usize,
    },

    /// A value that is too large for the type in which it is to be written.
    #[error(
        "tensor '{name}' holds a value at row {row} that is too large for {dtype}: write it in a type with a larger \
         range, such as f32"
    )]
    TooLarge {
        /// The tensor.
        name: String,
        /// The row.
        row: usize,
        /// The type.
        dtype: DType,
    },

    /// A range of rows that the tensor does not have, or an output of the wrong size.
    #[error("tensor '{name}': rows {start}..{end} of {rows} x {cols} into {out} values")]
    Rows {
        /// The tensor.
        name: String,
        /// First row asked for.
        start: usize,
        /// One past the last row asked for.
        end: usize,
        /// Rows of the tensor, its leading dimensions multiplied.
        rows: usize,
        /// Values in a row.
        cols: usize,
        /// Length of the output.
        out: usize,
    },
}

/// A problem in the header of a weights file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderProblem {
    /// The file is empty.
    #[error("the file is empty")]
    Empty,

    /// The file ends inside its header.
    #[error("the file ends after {found} bytes, its header needs {needed}")]
    TruncatedHeader {
        /// Bytes the header needs, the length field included.
        needed: u64,
        /// Bytes in the file.
        found: u64,
    },

    /// A header larger than any real checkpoint's.
    #[error("the header claims {claimed} bytes; at most {limit} are accepted")]
    Oversized {
        /// The length that the file claims for its header.
        claimed: u64,
        /// The most bytes that are accepted.
        limit: u64,
    },

    /// The header is not text.
    #[error("the header is not UTF-8 (byte {at})")]
    NotUtf8 {
        /// Offset of the first bad byte within the header.
        at: usize,
    },

    /// The header is not JSON of the expected form, or a number in it does not fit 64 bits.
    #[error("the header does not parse: {detail}")]
    Syntax {
        /// The parser's message.
        detail: String,
    },

    /// Two tensors with one name.
    #[error("tensor '{name}' appears twice")]
    Duplicate {
        /// The name.
        name: String,
    },

    /// dtype x shape needs another number of bytes than the offsets span.
    #[error("tensor '{name}': {dtype} of shape {shape:?} needs {needed} bytes, its offsets span {found}")]
    Size {
        /// The tensor.
        name: String,
        /// Its element type, as the file spells it.
        dtype: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Bytes that dtype and shape need.
        needed: u64,
        /// Bytes between its offsets.
        found: u64,
    },

    /// dtype x shape does not fit 64 bits.
    #[error("tensor '{name}': {dtype} of shape {shape:?} overflows 64 bits")]
    Overflow {
        /// The tensor.
        name: String,
        /// Its element type, as the file spells it.
        dtype: String,
        /// Its shape.
        shape: Vec<u64>,
    },

    /// Offsets that end before they begin, or point past the end of the file.
    #[error("tensor '{name}': offsets {begin}..{end} lie outside the {available} bytes of data")]
    OutOfRange {
        /// The tensor.
        name: String,
        /// Its first byte within the data.
        begin: u64,
        /// One past its last byte within the data.
        end: u64,
        /// Bytes of data in the file.
        available: u64,
    },

    /// Tensors that overlap or leave a hole between them.
    #[error("tensor '{name}' begins at byte {begin} of the data, expected byte {expected}")]
    NotContiguous {
        /// The tensor.
        name: String,
        /// Where it begins.
        begin: u64,
        /// Where the tensor before it ended.
        expected: u64,
    },

    /// Bytes after the last tensor.
    #[error("the file has {available} bytes of data, its tensors take {used}")]
    TrailingBytes {
        /// Bytes of data in the file.
        available: u64,
        /// Bytes that the tensors take.
        used: u64,
    },
}

impl WeightsError {
    /// The error for a path without weights. If it is a folder, it names the GGUF models there, which are opened by
    /// their own paths.
    pub(crate) fn no_weights(path: &Path) -> WeightsError {
        // Vision towers have `mmproj` in their names.
        let is_gguf = |name: &String| {
            let name = name.to_ascii_lowercase();
            name.ends_with(".gguf") && !name.contains("mmproj")
        };
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let mut gguf_files: Vec<String> = names.filter(is_gguf).collect();
        gguf_files.sort();
        WeightsError::NoWeights { path: path.into(), gguf_files }
    }

    /// An error of the operating system, for use in `map_err`.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| WeightsError::Io { action, path, source }
    }
}

/// Most files that a message names.
const FILES_NAMED: usize = 3;

/// The end of advice: the files of a folder of which one may be meant.
fn choice(files: &[String]) -> String {
    let named = files[..files.len().min(FILES_NAMED)].join(", ");
    match files.len() {
        0 => String::new(),
        1 => format!("; the folder has {named}: give the path of that file"),
        2..=FILES_NAMED => format!("; the folder has {named}: give the path of one"),
        count => format!("; the folder has {named} and {} more: give the path of one", count - FILES_NAMED),
    }
}

fn near(siblings: &[String]) -> String {
    if siblings.is_empty() { String::new() } else { format!(", next to it {}", siblings.join(", ")) }
}
