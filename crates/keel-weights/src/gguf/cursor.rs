//! Reads numbers and strings from a slice that may end anywhere.

use crate::HeaderProblem;

/// A position in the bytes of a header.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { bytes, at: 0 }
    }

    /// How many bytes have been read.
    pub fn position(&self) -> usize {
        self.at
    }

    /// How many bytes are left.
    pub fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], HeaderProblem> {
        let (head, _) =
            self.bytes[self.at..].split_first_chunk::<N>().ok_or_else(|| self.truncated(N as u64))?;
        self.at += N;
        Ok(*head)
    }

    pub fn u32(&mut self) -> Result<u32, HeaderProblem> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64, HeaderProblem> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A string after its 64-bit length.
    pub fn string(&mut self) -> Result<String, HeaderProblem> {
        let length = self.u64()?;
        let bytes = usize::try_from(length).ok().and_then(|length| self.bytes[self.at..].get(..length));
        let bytes = bytes.ok_or_else(|| self.truncated(length))?;
        let text = std::str::from_utf8(bytes)
            .map_err(|error| HeaderProblem::NotUtf8 { at: self.at + error.valid_up_to() })?;
        self.at += bytes.len();
        Ok(text.to_string())
    }

    /// A number of items of at least `bytes_each` bytes each, checked against the bytes that are left.
    pub fn count(&mut self, bytes_each: usize) -> Result<usize, HeaderProblem> {
        let count = self.u64()?;
        let most = self.left() / bytes_each;
        match usize::try_from(count) {
            Ok(count) if count <= most => Ok(count),
            _ => Err(self.truncated(count.saturating_mul(bytes_each as u64))),
        }
    }

    fn truncated(&self, more: u64) -> HeaderProblem {
        let needed = (self.at as u64).saturating_add(more);
        HeaderProblem::TruncatedHeader { needed, found: self.bytes.len() as u64 }
    }
}
