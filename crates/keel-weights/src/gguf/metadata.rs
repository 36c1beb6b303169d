//! The typed values of GGUF metadata.

use super::cursor::Cursor;
use crate::HeaderProblem;

/// The key of the file's alignment: its tensors begin at multiples of that.
pub(super) const ALIGNMENT_KEY: &str = "general.alignment";

/// Greatest depth of nested arrays; real files have one level.
const DEPTH_MAX: usize = 4;

/// The most values in all arrays of a file together: several times the largest vocabularies with their merges. It
/// bounds the memory for a hostile file, whose one-byte elements take 32 bytes each here.
const VALUES_MAX: usize = 8 << 20;

/// A metadata value. Integers of all widths are widened.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum GgufValue {
    /// u8, u16, u32 or u64.
    Unsigned(u64),
    /// i8, i16, i32 or i64.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// Text.
    String(String),
    /// Values of one type.
    Array(Vec<GgufValue>),
}

impl GgufValue {
    /// The value as an unsigned integer, if it is an integer and not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            GgufValue::Unsigned(value) => Some(*value),
            GgufValue::Signed(value) => (*value).try_into().ok(),
            _ => None,
        }
    }

    /// The value as a float, if it is a number.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            GgufValue::Unsigned(value) => Some(*value as f64),
            GgufValue::Signed(value) => Some(*value as f64),
            GgufValue::Float(value) => Some(*value),
            _ => None,
        }
    }

    /// The value, if it is text.
    pub fn as_str(&self) -> Option<&str> {
        if let GgufValue::String(text) = self { Some(text) } else { None }
    }

    /// The value, if it is a truth value.
    pub fn as_bool(&self) -> Option<bool> {
        if let GgufValue::Bool(value) = self { Some(*value) } else { None }
    }

    /// The elements, if it is an array.
    pub fn as_array(&self) -> Option<&[GgufValue]> {
        if let GgufValue::Array(values) = self { Some(values) } else { None }
    }
}

/// Reads metadata values and counts them.
#[derive(Default)]
pub(super) struct ValueReader {
    values: usize,
}

impl ValueReader {
    /// A value after its type.
    pub fn typed(&mut self, cursor: &mut Cursor<'_>) -> Result<GgufValue, HeaderProblem> {
        let kind = cursor.u32()?;
        self.value(cursor, kind, 0)
    }

    fn value(
        &mut self,
        cursor: &mut Cursor<'_>,
        kind: u32,
        depth: usize,
    ) -> Result<GgufValue, HeaderProblem> {
        Ok(match kind {
            0 => GgufValue::Unsigned(u8::from_le_bytes(cursor.array()?).into()),
            1 => GgufValue::Signed(i8::from_le_bytes(cursor.array()?).into()),
            2 => GgufValue::Unsigned(u16::from_le_bytes(cursor.array()?).into()),
            3 => GgufValue::Signed(i16::from_le_bytes(cursor.array()?).into()),
            4 => GgufValue::Unsigned(cursor.u32()?.into()),
            5 => GgufValue::Signed(i32::from_le_bytes(cursor.array()?).into()),
            6 => GgufValue::Float(f32::from_le_bytes(cursor.array()?).into()),
            7 => GgufValue::Bool(cursor.array::<1>()? != [0]),
            8 => GgufValue::String(cursor.string()?),
            9 => self.array(cursor, depth + 1)?,
            10 => GgufValue::Unsigned(cursor.u64()?),
            11 => GgufValue::Signed(i64::from_le_bytes(cursor.array()?)),
            12 => GgufValue::Float(f64::from_le_bytes(cursor.array()?)),
            _ => return Err(syntax(format!("{kind} is not the type of a metadata value"))),
        })
    }

    fn array(&mut self, cursor: &mut Cursor<'_>, depth: usize) -> Result<GgufValue, HeaderProblem> {
        if depth > DEPTH_MAX {
            return Err(syntax(format!("arrays nest deeper than {DEPTH_MAX}")));
        }
        let kind = cursor.u32()?;
        let count = cursor.count(value_bytes_min(kind))?;
        self.values += count;
        if self.values > VALUES_MAX {
            return Err(syntax(format!("its arrays have more than {VALUES_MAX} values")));
        }
        (0..count).map(|_| self.value(cursor, kind, depth)).collect::<Result<_, _>>().map(GgufValue::Array)
    }
}

/// The fewest bytes that a value of this type takes.
fn value_bytes_min(kind: u32) -> usize {
    match kind {
        2 | 3 => 2,
        4..=6 => 4,
        8 | 10..=12 => 8,
        9 => 12,
        _ => 1,
    }
}

fn syntax(detail: String) -> HeaderProblem {
    HeaderProblem::Syntax { detail }
}
