//! The element types of GGUF tensors.

use std::fmt;

use keel_array::{BlockFormat, DType};

/// Storage of a GGUF tensor's elements: one by one, or in blocks that share scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GgmlType {
    /// One by one.
    Plain(DType),
    /// In blocks.
    Blocks(BlockFormat),
}

/// The numbers of the types.
const TYPES: [(u32, GgmlType); 18] = {
    use GgmlType::{Blocks, Plain};
    [
        (0, Plain(DType::F32)),
        (1, Plain(DType::F16)),
        (2, Blocks(BlockFormat::Q4_0)),
        (3, Blocks(BlockFormat::Q4_1)),
        (6, Blocks(BlockFormat::Q5_0)),
        (7, Blocks(BlockFormat::Q5_1)),
        (8, Blocks(BlockFormat::Q8_0)),
        (10, Blocks(BlockFormat::Q2K)),
        (11, Blocks(BlockFormat::Q3K)),
        (12, Blocks(BlockFormat::Q4K)),
        (13, Blocks(BlockFormat::Q5K)),
        (14, Blocks(BlockFormat::Q6K)),
        (20, Blocks(BlockFormat::IQ4NL)),
        (23, Blocks(BlockFormat::IQ4XS)),
        (26, Plain(DType::I32)),
        (27, Plain(DType::I64)),
        (30, Plain(DType::BF16)),
        (39, Blocks(BlockFormat::MXFP4)),
    ]
};

/// Names of types that are not read here, by their numbers.
const NOT_READ: [(u32, &str); 16] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (40, "NVFP4"),
    (41, "Q1_0"),
];

impl GgmlType {
    /// All types that are read here.
    pub(crate) fn all() -> impl Iterator<Item = GgmlType> {
        TYPES.into_iter().map(|(_, kind)| kind)
    }

    /// The type with this number in files; `None` for a type that is not read here.
    pub(super) fn from_id(id: u32) -> Option<GgmlType> {
        TYPES.iter().find(|(number, _)| *number == id).map(|(_, kind)| *kind)
    }

    /// The type's number in a file.
    ///
    /// # Panics
    /// If files have no number for the element type.
    pub(super) fn id(self) -> u32 {
        let found = TYPES.iter().find(|(_, kind)| *kind == self);
        found.unwrap_or_else(|| panic!("{self} has no number")).0
    }

    /// The type with this name in file descriptions: `Q4_K`, `f16`.
    pub fn from_name(name: &str) -> Option<GgmlType> {
        GgmlType::all().find(|kind| kind.to_string().eq_ignore_ascii_case(name))
    }

    /// A type that is not read here, in words: its number, and its name if it is known.
    pub fn describe_unread(id: u32) -> String {
        match NOT_READ.iter().find(|(number, _)| *number == id) {
            Some((_, name)) => format!("type {id} ({name})"),
            None => format!("type {id}"),
        }
    }

    /// The dtype of elements that are stored one by one; `None` for blocks.
    pub fn dtype(self) -> Option<DType> {
        if let GgmlType::Plain(dtype) = self { Some(dtype) } else { None }
    }

    /// Bytes of a row of `cols` values; `None` if they are not whole blocks or too many.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        match self {
            GgmlType::Plain(dtype) => cols.checked_mul(dtype.size()),
            GgmlType::Blocks(format) => format.row_bytes(cols),
        }
    }
}

impl fmt::Display for GgmlType {
    /// The format's name for the type.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GgmlType::Plain(dtype) => f.write_str(&dtype.to_string().to_uppercase()),
            GgmlType::Blocks(format) => format.fmt(f),
        }
    }
}
