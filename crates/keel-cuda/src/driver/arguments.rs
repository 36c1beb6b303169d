//! Arguments of a kernel launch.

use crate::parameters::Parameter;
use std::ffi::c_void;

/// Bytes that an argument is aligned to: no type that kernels take needs more.
const ALIGN: usize = 8;

/// The values of a kernel's parameters, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Arguments {
    words: Vec<u64>,
    starts: Vec<usize>,
}

impl Arguments {
    /// With the bytes of one more value.
    pub fn push(mut self, bytes: &[u8]) -> Arguments {
        self.starts.push(self.words.len());
        for chunk in bytes.chunks(ALIGN) {
            let mut word = [0; ALIGN];
            word[..chunk.len()].copy_from_slice(chunk);
            self.words.push(u64::from_ne_bytes(word));
        }
        self
    }

    /// With one more value.
    pub fn with(self, value: impl Parameter) -> Arguments {
        value.push(self)
    }

    /// Pointers to the values, as the driver takes them.
    pub fn pointers(&mut self) -> Vec<*mut c_void> {
        self.starts.iter().map(|&start| (&raw mut self.words[start]).cast()).collect()
    }
}
