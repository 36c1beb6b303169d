//! Arguments of a kernel launch.

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
    fn push(mut self, bytes: &[u8]) -> Arguments {
        self.starts.push(self.words.len());
        for chunk in bytes.chunks(ALIGN) {
            let mut word = [0; ALIGN];
            word[..chunk.len()].copy_from_slice(chunk);
            self.words.push(u64::from_ne_bytes(word));
        }
        self
    }

    /// A device pointer.
    pub fn pointer(self, address: u64) -> Arguments {
        self.push(&address.to_ne_bytes())
    }

    /// An `unsigned int`.
    pub fn u32(self, value: usize) -> Arguments {
        let value = u32::try_from(value).expect("the backend has checked the extents");
        self.push(&value.to_ne_bytes())
    }

    /// An `unsigned long long`.
    pub fn u64(self, value: usize) -> Arguments {
        self.push(&(value as u64).to_ne_bytes())
    }

    /// A `float`.
    pub fn f32(self, value: f32) -> Arguments {
        self.push(&value.to_ne_bytes())
    }

    /// A `double`.
    pub fn f64(self, value: f64) -> Arguments {
        self.push(&value.to_ne_bytes())
    }

    /// A structure of 64-bit words.
    pub fn words(self, words: &[u64]) -> Arguments {
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        self.push(&bytes)
    }

    /// Pointers to the values, as the driver takes them.
    pub fn pointers(&mut self) -> Vec<*mut c_void> {
        self.starts.iter().map(|&start| (&raw mut self.words[start]).cast()).collect()
    }
}
