//! Parsing and checking the header of a safetensors file.
//!
//! ```text
//! [ n: u64 ][ JSON of n bytes ][ data                                    ]
//!             {"w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}
//! ```
//! This crate does not use the `safetensors` crate's parser: that accepts two tensors with one name and keeps the last,
//! and it refuses a whole file for one unknown dtype. The tests compare the two parsers.

use std::{collections::BTreeMap, fmt, ops::Range};

use keel_array::DType;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, IgnoredAny, MapAccess, Visitor},
};

use crate::{HeaderProblem, source::element_count};

/// The most bytes of a header: enough for a million tensors, and the format's own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// How a file stores a tensor's elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoredDType {
    /// A type that this project can compute with.
    Known(DType),
    /// Any other type, with the file's name for it. It does not prevent reading the other tensors.
    Other(String),
}

impl StoredDType {
    fn parse(name: String) -> StoredDType {
        match name.as_str() {
            "BOOL" => StoredDType::Known(DType::Bool),
            "U8" => StoredDType::Known(DType::U8),
            "U32" => StoredDType::Known(DType::U32),
            "I32" => StoredDType::Known(DType::I32),
            "I64" => StoredDType::Known(DType::I64),
            "F16" => StoredDType::Known(DType::F16),
            "BF16" => StoredDType::Known(DType::BF16),
            "F32" => StoredDType::Known(DType::F32),
            _ => StoredDType::Other(name),
        }
    }

    /// Bits of one element; `None` for an unknown name.
    fn bits(&self) -> Option<u64> {
        match self {
            StoredDType::Known(dtype) => Some(8 * dtype.size() as u64),
            StoredDType::Other(name) => match name.as_str() {
                "F4" => Some(4),
                "F6_E2M3" | "F6_E3M2" => Some(6),
                "I8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => Some(8),
                "I16" | "U16" => Some(16),
                "F64" | "U64" | "C64" => Some(64),
                _ => None,
            },
        }
    }
}

impl fmt::Display for StoredDType {
    /// The file format's name for the type.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StoredDType::Known(dtype) => format_name(*dtype),
            StoredDType::Other(name) => name,
        })
    }
}

/// The format's name for a dtype.
pub(crate) fn format_name(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool => "BOOL",
        DType::U8 => "U8",
        DType::U32 => "U32",
        DType::I32 => "I32",
        DType::I64 => "I64",
        DType::F16 => "F16",
        DType::BF16 => "BF16",
        DType::F32 => "F32",
    }
}

/// One tensor of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// How its elements are stored.
    pub dtype: StoredDType,
    /// Its dimensions, slowest first.
    pub shape: Vec<usize>,
    /// Range of its bytes, from the start of the file.
    pub range: Range<usize>,
}

/// A header checked against its file: every tensor lies within the file, has exactly the bytes that its dtype and shape
/// need, and shares no byte with another.
#[derive(Clone, Debug, Default)]
pub struct SafetensorsHeader {
    tensors: BTreeMap<String, TensorEntry>,
    metadata: BTreeMap<String, String>,
}

impl SafetensorsHeader {
    /// Parses the header of `file`, the bytes of a whole file, and checks it against their length. The tensors' bytes
    /// are not touched.
    ///
    /// # Memory
    /// Proportional to the bytes of the header that are present, never to a number in it.
    ///
    /// # Errors
    /// The first [`HeaderProblem`] found.
    pub fn parse(file: &[u8]) -> Result<SafetensorsHeader, HeaderProblem> {
        let json = header_bytes(file)?;
        let data_start = 8 + json.len();
        let text =
            std::str::from_utf8(json).map_err(|error| HeaderProblem::NotUtf8 { at: error.valid_up_to() })?;
        let raw: RawHeader = serde_json::from_str(text).map_err(|error| {
            let detail = error.to_string();
            HeaderProblem::Syntax { detail }
        })?;
        let available = (file.len() - data_start) as u64;
        check_layout(&raw.tensors, available)?;
        let mut tensors = BTreeMap::new();
        for (name, raw) in raw.tensors {
            let entry = raw.into_entry(&name, data_start)?;
            if tensors.insert(name.clone(), entry).is_some() {
                return Err(HeaderProblem::Duplicate { name });
            }
        }
        Ok(SafetensorsHeader { tensors, metadata: raw.metadata })
    }

    /// All tensors by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorEntry> {
        &self.tensors
    }

    /// The free-form strings under `__metadata__`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }
}

/// The JSON part of `file`, after a check of its claimed length against the file's.
fn header_bytes(file: &[u8]) -> Result<&[u8], HeaderProblem> {
    let found = file.len() as u64;
    if found == 0 {
        return Err(HeaderProblem::Empty);
    }
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(HeaderProblem::TruncatedHeader { needed: 8, found });
    };
    let claimed = u64::from_le_bytes(*length);
    if claimed > HEADER_BYTES_MAX {
        return Err(HeaderProblem::Oversized { claimed, limit: HEADER_BYTES_MAX });
    }
    // At most 100 MB after the check above, so it fits a usize.
    rest.get(..claimed as usize).ok_or(HeaderProblem::TruncatedHeader { needed: 8 + claimed, found })
}

/// Checks that the tensors tile the data: in the order of offsets, each begins where the one before ends.
fn check_layout(tensors: &[(String, RawEntry)], available: u64) -> Result<(), HeaderProblem> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&i| tensors[i].1.data_offsets);
    let mut used = 0;
    for i in order {
        let (name, entry) = &tensors[i];
        let (begin, end) = entry.data_offsets;
        if begin > end || end > available {
            return Err(HeaderProblem::OutOfRange { name: name.clone(), begin, end, available });
        }
        if begin != used {
            return Err(HeaderProblem::NotContiguous { name: name.clone(), begin, expected: used });
        }
        used = end;
    }
    if used != available {
        return Err(HeaderProblem::TrailingBytes { available, used });
    }
    Ok(())
}

/// A tensor's JSON entry, unchecked.
#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl RawEntry {
    /// The checked entry. The offsets are known to lie within the file.
    fn into_entry(self, name: &str, data_start: usize) -> Result<TensorEntry, HeaderProblem> {
        let dtype = StoredDType::parse(self.dtype);
        let (begin, end) = self.data_offsets;
        let shape: Option<Vec<usize>> = self.shape.iter().map(|&dim| dim.try_into().ok()).collect();
        let Some((shape, count)) = shape.and_then(|shape| element_count(&shape).map(|count| (shape, count)))
        else {
            let (name, dtype) = (name.into(), dtype.to_string());
            return Err(HeaderProblem::Overflow { name, dtype, shape: self.shape });
        };
        if let Some(bits) = dtype.bits() {
            // At most eight bytes for each element, so `element_count` ensures that this does not overflow.
            let needed = (count as u128 * u128::from(bits)).div_ceil(8) as u64;
            let found = end - begin;
            if needed != found {
                let (name, dtype) = (name.into(), dtype.to_string());
                return Err(HeaderProblem::Size { name, dtype, shape, needed, found });
            }
        }
        let range = data_start + begin as usize..data_start + end as usize;
        Ok(TensorEntry { dtype, shape, range })
    }
}

/// The header in the order of the file, so that a repeated name is noticed.
#[derive(Default)]
struct RawHeader {
    tensors: Vec<(String, RawEntry)>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(RawHeaderVisitor)
    }
}

struct RawHeaderVisitor;

impl<'de> Visitor<'de> for RawHeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut header = RawHeader::default();
        let mut has_metadata = false;
        while let Some(name) = map.next_key::<String>()? {
            if name != "__metadata__" {
                header.tensors.push((name, map.next_value()?));
            } else if has_metadata {
                map.next_value::<IgnoredAny>()?;
                return Err(A::Error::custom("__metadata__ appears twice"));
            } else {
                // Some writers put `null` if there is no metadata.
                header.metadata = map.next_value::<Option<_>>()?.unwrap_or_default();
                has_metadata = true;
            }
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with this header text, followed by `data` bytes.
    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.resize(file.len() + data, 0);
        file
    }

    fn problem(header: &str, data: usize) -> HeaderProblem {
        SafetensorsHeader::parse(&file(header, data)).unwrap_err()
    }

    #[test]
    fn a_sound_header_is_read() {
        let text = r#"{"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[8,20]},
            "__metadata__":{"format":"pt"},"a":{"dtype":"I16","shape":[4],"data_offsets":[0,8]},
            "none":{"dtype":"F32","shape":[3,0],"data_offsets":[20,20]}}"#;
        let header = SafetensorsHeader::parse(&file(text, 20)).unwrap();
        let start = 8 + text.len();
        let names: Vec<_> = header.tensors().keys().collect();
        assert_eq!(names, ["a", "b", "none"]);
        assert_eq!(header.tensors()["b"].dtype, StoredDType::Known(DType::BF16));
        assert_eq!(header.tensors()["b"].shape, [2, 3]);
        assert_eq!(header.tensors()["b"].range, start + 8..start + 20);
        assert_eq!(header.tensors()["a"].dtype, StoredDType::Other("I16".into()));
        assert_eq!(header.tensors()["none"].range, start + 20..start + 20);
        assert_eq!(header.metadata()["format"], "pt");
    }

    #[test]
    fn no_tensors_and_null_metadata_are_fine() {
        assert!(SafetensorsHeader::parse(&file("{}", 0)).unwrap().tensors().is_empty());
        assert!(SafetensorsHeader::parse(&file(r#"{"__metadata__":null}"#, 0)).is_ok());
    }

    #[test]
    fn files_too_short_for_their_header() {
        let parse = |bytes: &[u8]| SafetensorsHeader::parse(bytes).unwrap_err();
        assert_eq!(parse(&[]), HeaderProblem::Empty);
        assert_eq!(parse(&[1, 2, 3]), HeaderProblem::TruncatedHeader { needed: 8, found: 3 });
        let whole = file(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 1);
        assert_eq!(
            parse(&whole[..20]),
            HeaderProblem::TruncatedHeader { needed: whole.len() as u64 - 1, found: 20 }
        );
        let mut oversized = whole.clone();
        oversized[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(
            parse(&oversized),
            HeaderProblem::Oversized { claimed: u64::MAX, limit: HEADER_BYTES_MAX }
        );
        let mut not_text = whole;
        not_text[11] = 0xff;
        assert_eq!(parse(&not_text), HeaderProblem::NotUtf8 { at: 3 });
    }

    #[test]
    fn text_that_is_no_header() {
        for text in ["", "[]", "{", r#"{"a":1}"#, r#"{"a":{"dtype":"U8","shape":[1]}}"#, "null", "{} {}"] {
            assert!(matches!(problem(text, 0), HeaderProblem::Syntax { .. }), "{text}");
        }
        let deep = format!(r#"{{"__metadata__":{}"#, "[".repeat(10_000));
        assert!(matches!(problem(&deep, 0), HeaderProblem::Syntax { .. }));
        let twice = r#"{"__metadata__":{},"__metadata__":{}}"#;
        assert!(problem(twice, 0).to_string().contains("appears twice"));
        let too_large = r#"{"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,1]}}"#;
        assert!(matches!(problem(too_large, 1), HeaderProblem::Syntax { .. }));
        let negative = r#"{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}"#;
        assert!(matches!(problem(negative, 1), HeaderProblem::Syntax { .. }));
    }

    #[test]
    fn two_tensors_of_one_name() {
        let text = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
                       "a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
        assert_eq!(problem(text, 2), HeaderProblem::Duplicate { name: "a".into() });
    }

    #[test]
    fn offsets_that_lie() {
        let entry = |begin: u64, end: u64, shape: u64| {
            format!(r#"{{"dtype":"U8","shape":[{shape}],"data_offsets":[{begin},{end}]}}"#)
        };
        let one = |begin, end, shape| format!(r#"{{"a":{}}}"#, entry(begin, end, shape));
        let name = || "a".to_string();
        assert_eq!(
            problem(&one(0, 9, 9), 8),
            HeaderProblem::OutOfRange { name: name(), begin: 0, end: 9, available: 8 }
        );
        assert_eq!(
            problem(&one(5, 3, 2), 8),
            HeaderProblem::OutOfRange { name: name(), begin: 5, end: 3, available: 8 }
        );
        assert_eq!(
            problem(&one(u64::MAX - 1, u64::MAX, 1), 8),
            HeaderProblem::OutOfRange { name: name(), begin: u64::MAX - 1, end: u64::MAX, available: 8 }
        );
        assert_eq!(
            problem(&one(2, 8, 6), 8),
            HeaderProblem::NotContiguous { name: name(), begin: 2, expected: 0 }
        );
        assert_eq!(problem(&one(0, 6, 6), 8), HeaderProblem::TrailingBytes { available: 8, used: 6 });
        let overlap = format!(r#"{{"b":{},"a":{}}}"#, entry(0, 6, 6), entry(5, 8, 3));
        assert_eq!(
            problem(&overlap, 8),
            HeaderProblem::NotContiguous { name: name(), begin: 5, expected: 6 }
        );
    }

    #[test]
    fn shapes_that_lie() {
        let one = |dtype: &str, shape: &str, end: u64| {
            format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]}}}}"#)
        };
        assert_eq!(
            problem(&one("BF16", "[3,5]", 29), 29).to_string(),
            "tensor 'a': BF16 of shape [3, 5] needs 30 bytes, its offsets span 29"
        );
        assert!(matches!(problem(&one("I16", "[3]", 5), 5), HeaderProblem::Size { needed: 6, .. }));
        // 2^32 * 2^32 and 2^62 * 4 bytes wrap to 0, which would agree with empty offsets. The byte count of the columns
        // of an empty tensor must not overflow either.
        let wrapping = [
            ("U8", "[4294967296,4294967296]"),
            ("F32", "[4611686018427387904]"),
            ("F32", "[0,4611686018427387904]"),
            ("P3", "[4294967296,4294967296]"),
        ];
        for (dtype, shape) in wrapping {
            let problem = problem(&one(dtype, shape, 0), 0);
            assert!(matches!(problem, HeaderProblem::Overflow { .. }), "{problem}");
        }
    }

    #[test]
    fn a_dtype_nobody_knows_does_not_hide_the_other_tensors() {
        let text = r#"{"a":{"dtype":"P3","shape":[7],"data_offsets":[0,5]},
                       "b":{"dtype":"U8","shape":[1],"data_offsets":[5,6]}}"#;
        let header = SafetensorsHeader::parse(&file(text, 6)).unwrap();
        assert_eq!(header.tensors()["a"].dtype.to_string(), "P3");
        assert_eq!(header.tensors()["b"].dtype.to_string(), "U8");
    }

    /// The reference parser agrees on which files are valid, and on where the bytes lie.
    #[test]
    fn agrees_with_the_reference_parser() {
        let values = [[1u8; 24], [2; 24]];
        let view = |dtype, shape: &[usize], i: usize| {
            safetensors::tensor::TensorView::new(dtype, shape.to_vec(), &values[i]).unwrap()
        };
        let tensors = [
            ("x", view(safetensors::Dtype::BF16, &[3, 4], 0)),
            ("y", view(safetensors::Dtype::I64, &[3], 1)),
        ];
        let bytes = safetensors::serialize(tensors, None).unwrap();
        let ours = SafetensorsHeader::parse(&bytes).unwrap();
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(theirs.len(), 2);
        for (name, view) in theirs.tensors() {
            let entry = &ours.tensors()[&name];
            assert_eq!(entry.shape, view.shape());
            assert_eq!(&bytes[entry.range.clone()], view.data());
        }
        let overlapping = r#"{"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},
                              "b":{"dtype":"U8","shape":[3],"data_offsets":[5,8]}}"#;
        assert!(safetensors::SafeTensors::deserialize(&file(overlapping, 8)).is_err());
    }
}
