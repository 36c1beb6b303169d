//! How keys and values are kept.

use serde::{Deserialize, Serialize};

use crate::DType;

/// How the keys and values of a [`KvPool`](crate::KvPool) are kept.
///
/// The coded forms keep 8 or 4 bits of each value, and a bf16 step `d` for each 32 values of one token and head:
/// - 8 bits: `d = max |x| / 127`, `value = d q`, `q = round(x / d)` within -127 to 127;
/// - 4 bits: `d = m / -8` with `m` the value farthest from zero, `value = d q`, `q = round(x / d)` within -8 to 7.
///
/// `d` is rounded to bf16 before `q` is computed. 1,024 values take 1,088 or 576 bytes, compared with 2,048 in f16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum KvFormat {
    /// Unchanged.
    F32,
    /// Rounded to f16, whose relative error is an eighth of bf16's. A value beyond its range of 65,504 becomes the
    /// greatest f16 value.
    F16,
    /// 8 bits, and a step for each 32 values.
    Bits8,
    /// 4 bits, and a step for each 32 values.
    Bits4,
}

impl KvFormat {
    /// Values that share a step in the coded forms.
    pub const GROUP: usize = 32;

    /// Type of the arrays.
    pub fn dtype(self) -> DType {
        match self {
            KvFormat::F32 => DType::F32,
            KvFormat::F16 => DType::F16,
            KvFormat::Bits8 | KvFormat::Bits4 => DType::U8,
        }
    }

    /// Elements of the arrays for one token and head of `head_dim` values. `None` if a coded form cannot cut the head
    /// into groups.
    pub fn row_elements(self, head_dim: usize) -> Option<usize> {
        let step_bytes = head_dim / Self::GROUP * 2;
        match self {
            KvFormat::F32 | KvFormat::F16 => Some(head_dim),
            _ if !head_dim.is_multiple_of(Self::GROUP) => None,
            KvFormat::Bits8 => Some(head_dim + step_bytes),
            KvFormat::Bits4 => Some(head_dim / 2 + step_bytes),
        }
    }

    /// The format of arrays of this type with this many elements for one token and head.
    pub fn of(dtype: DType, elements: usize, head_dim: usize) -> Option<KvFormat> {
        [KvFormat::F32, KvFormat::F16, KvFormat::Bits8, KvFormat::Bits4]
            .into_iter()
            .find(|format| format.dtype() == dtype && format.row_elements(head_dim) == Some(elements))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_tell_their_form() {
        for head_dim in [32, 64, 96, 256] {
            for format in [KvFormat::F32, KvFormat::F16, KvFormat::Bits8, KvFormat::Bits4] {
                let elements = format.row_elements(head_dim).expect("whole groups");
                assert_eq!(KvFormat::of(format.dtype(), elements, head_dim), Some(format));
                assert_eq!(KvFormat::of(format.dtype(), elements + 1, head_dim), None);
            }
        }
        assert_eq!(KvFormat::Bits8.row_elements(80), None);
        assert_eq!(KvFormat::Bits4.row_elements(256), Some(144));
        assert_eq!(KvFormat::of(DType::BF16, 64, 64), None);
    }
}
