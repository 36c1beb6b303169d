//! Parsing and checking the header of a GGUF file.
//!
//! ```text
//! "GGUF" version:u32 tensors:u64 pairs:u64
//! pairs   x { key:string type:u32 value }
//! tensors x { name:string dims:u32 dim:u64 x dims type:u32 offset:u64 }
//! padding to the alignment, then the data that the offsets count from
//! ```

use std::{collections::BTreeMap, ops::Range};

use super::{
    GgmlType, GgufValue,
    cursor::Cursor,
    metadata::{ALIGNMENT_KEY, ValueReader},
};
use crate::{HeaderProblem, source::element_count};

/// The most dimensions a tensor may have.
const DIMS_MAX: u32 = 4;
const ALIGNMENT_DEFAULT: u64 = 32;
const ALIGNMENT_MAX: u64 = 1 << 16;
/// The fewest bytes of a metadata pair, and of a tensor's description.
const PAIR_BYTES_MIN: usize = 8 + 4 + 1;
const TENSOR_BYTES_MIN: usize = 8 + 4 + 4 + 8;

/// One tensor of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufEntry {
    /// How its elements are stored; the type's number if this crate does not read it.
    pub kind: Result<GgmlType, u32>,
    /// Its dimensions, slowest first.
    pub shape: Vec<usize>,
    /// Range of its bytes, from the start of the file. For unknown types only the start is known.
    pub range: Range<usize>,
}

/// A header checked against its file: every tensor of a known type lies within the file, is aligned, and shares no byte
/// with another.
#[derive(Clone, Debug, Default)]
pub struct GgufHeader {
    tensors: BTreeMap<String, GgufEntry>,
    metadata: BTreeMap<String, GgufValue>,
    /// Range of each value in the file, with its type.
    ranges: BTreeMap<String, Range<usize>>,
}

impl GgufHeader {
    /// Parses the header of `file`, the bytes of a whole file, and checks it against their length.
    ///
    /// # Memory
    /// Bounded by the bytes of the header that are present, and by a limit on the elements of arrays.
    ///
    /// # Errors
    /// The first [`HeaderProblem`] found.
    pub fn parse(file: &[u8]) -> Result<GgufHeader, HeaderProblem> {
        if file.is_empty() {
            return Err(HeaderProblem::Empty);
        }
        let mut cursor = Cursor::new(file);
        check_magic(&mut cursor)?;
        let tensors = cursor.u64()?;
        let pairs = cursor.count(PAIR_BYTES_MIN)?;
        let Metadata { values: metadata, ranges } = read_metadata(&mut cursor, pairs)?;
        if tensors > (cursor.left() / TENSOR_BYTES_MIN) as u64 {
            return Err(syntax(format!("it claims {tensors} tensors, {} bytes are left", cursor.left())));
        }
        let raw: Vec<RawTensor> =
            (0..tensors).map(|_| RawTensor::read(&mut cursor)).collect::<Result<_, _>>()?;
        let alignment = alignment(&metadata)?;
        let data_start =
            (cursor.position() as u64).next_multiple_of(alignment).min(file.len() as u64) as usize;
        let mut entries = BTreeMap::new();
        for tensor in raw {
            let entry = tensor.check(alignment, data_start, file.len() - data_start)?;
            if entries.insert(tensor.name.clone(), entry).is_some() {
                return Err(HeaderProblem::Duplicate { name: tensor.name });
            }
        }
        check_overlaps(&entries, data_start)?;
        Ok(GgufHeader { tensors: entries, metadata, ranges })
    }

    /// All tensors by name.
    pub fn tensors(&self) -> &BTreeMap<String, GgufEntry> {
        &self.tensors
    }

    /// All metadata by key.
    pub fn metadata(&self) -> &BTreeMap<String, GgufValue> {
        &self.metadata
    }

    /// The bytes of a metadata value in `file`, which was parsed: its type and its value.
    pub(crate) fn raw_value<'f>(&self, file: &'f [u8], key: &str) -> Option<&'f [u8]> {
        file.get(self.ranges.get(key)?.clone())
    }
}

fn syntax(detail: String) -> HeaderProblem {
    HeaderProblem::Syntax { detail }
}

fn check_magic(cursor: &mut Cursor<'_>) -> Result<(), HeaderProblem> {
    let magic = cursor.array::<4>()?;
    if &magic != b"GGUF" {
        return Err(syntax(format!("it begins with {magic:02x?}, not with GGUF")));
    }
    match cursor.u32()? {
        2 | 3 => Ok(()),
        version if version.swap_bytes() == 3 => Err(syntax("it is big-endian".into())),
        version => Err(syntax(format!("version {version} is not read, 2 and 3 are"))),
    }
}

/// The metadata by key.
struct Metadata {
    values: BTreeMap<String, GgufValue>,
    /// The bytes of each value in the file, type included.
    ranges: BTreeMap<String, Range<usize>>,
}

fn read_metadata(cursor: &mut Cursor<'_>, pairs: usize) -> Result<Metadata, HeaderProblem> {
    let mut reader = ValueReader::default();
    let mut metadata = Metadata { values: BTreeMap::new(), ranges: BTreeMap::new() };
    for _ in 0..pairs {
        let key = cursor.string()?;
        let start = cursor.position();
        let value = reader.typed(cursor)?;
        metadata.ranges.insert(key.clone(), start..cursor.position());
        if metadata.values.insert(key.clone(), value).is_some() {
            return Err(syntax(format!("metadata key '{key}' appears twice")));
        }
    }
    Ok(metadata)
}

fn alignment(metadata: &BTreeMap<String, GgufValue>) -> Result<u64, HeaderProblem> {
    let Some(value) = metadata.get(ALIGNMENT_KEY) else { return Ok(ALIGNMENT_DEFAULT) };
    let usable = |alignment: &u64| alignment.is_power_of_two() && *alignment <= ALIGNMENT_MAX;
    value.as_u64().filter(usable).ok_or_else(|| syntax(format!("{ALIGNMENT_KEY} is {value:?}")))
}

/// A tensor's description from the file, unchecked.
struct RawTensor {
    name: String,
    /// Slowest first.
    dims: Vec<u64>,
    kind: u32,
    offset: u64,
}

impl RawTensor {
    fn read(cursor: &mut Cursor<'_>) -> Result<RawTensor, HeaderProblem> {
        let name = cursor.string()?;
        let count = cursor.u32()?;
        if count > DIMS_MAX {
            return Err(syntax(format!(
                "tensor '{name}' has {count} dimensions, at most {DIMS_MAX} are read"
            )));
        }
        let mut dims: Vec<u64> = (0..count).map(|_| cursor.u64()).collect::<Result<_, _>>()?;
        dims.reverse();
        Ok(RawTensor { name, dims, kind: cursor.u32()?, offset: cursor.u64()? })
    }

    fn check(&self, alignment: u64, data_start: usize, available: usize) -> Result<GgufEntry, HeaderProblem> {
        let name = || self.name.clone();
        let kind = GgmlType::from_id(self.kind).ok_or(self.kind);
        let dtype = || kind.map_or_else(GgmlType::describe_unread, |kind| kind.to_string());
        let overflow = || HeaderProblem::Overflow { name: name(), dtype: dtype(), shape: self.dims.clone() };
        let shape: Option<Vec<usize>> = self.dims.iter().map(|&dim| dim.try_into().ok()).collect();
        let shape = shape.filter(|shape| element_count(shape).is_some()).ok_or_else(overflow)?;
        let bytes = match kind {
            Err(_) => 0,
            Ok(kind) => {
                let cols = crate::cols(&shape);
                let row_bytes = kind.row_bytes(cols).ok_or_else(|| {
                    syntax(format!(
                        "tensor '{}' has rows of {cols} values, which are not whole blocks of {kind}",
                        self.name
                    ))
                })?;
                // Cannot overflow: a block takes fewer bytes than its values would with eight bytes each.
                crate::rows(&shape) * row_bytes
            }
        };
        if !self.offset.is_multiple_of(alignment) {
            return Err(syntax(format!(
                "tensor '{}' lies at {}, not a multiple of {alignment}",
                self.name, self.offset
            )));
        }
        let begin = usize::try_from(self.offset).ok().filter(|&begin| begin <= available);
        let end = begin.and_then(|begin| begin.checked_add(bytes)).filter(|&end| end <= available);
        let (Some(begin), Some(end)) = (begin, end) else {
            let (begin, available) = (self.offset, available as u64);
            let end = begin.saturating_add(bytes as u64);
            return Err(HeaderProblem::OutOfRange { name: name(), begin, end, available });
        };
        Ok(GgufEntry { kind, shape, range: data_start + begin..data_start + end })
    }
}

/// Checks that no tensor begins inside another. Gaps are padding.
fn check_overlaps(tensors: &BTreeMap<String, GgufEntry>, data_start: usize) -> Result<(), HeaderProblem> {
    let mut order: Vec<_> = tensors.iter().collect();
    order.sort_by_key(|(_, entry)| (entry.range.start, entry.range.end));
    let mut end = data_start;
    for (name, entry) in order {
        if entry.range.start < end && !entry.range.is_empty() {
            let (begin, expected) = ((entry.range.start - data_start) as u64, (end - data_start) as u64);
            return Err(HeaderProblem::NotContiguous { name: name.clone(), begin, expected });
        }
        end = end.max(entry.range.end);
    }
    Ok(())
}
