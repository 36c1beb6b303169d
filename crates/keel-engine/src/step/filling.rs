//! What the host writes to a device's buffers before a step. A device whose steps queue up writes it when the step's
//! turn comes.

use keel_array::Array;

use crate::Result;

/// Contents of buffers, in the order in which they are written.
#[derive(Default)]
pub(crate) struct Filling(Vec<(Array, Words)>);

/// The words of a buffer.
pub(crate) enum Words {
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
}

impl From<Vec<u32>> for Words {
    fn from(words: Vec<u32>) -> Words {
        Words::U32(words)
    }
}

impl From<Vec<i32>> for Words {
    fn from(words: Vec<i32>) -> Words {
        Words::I32(words)
    }
}

impl From<Vec<f32>> for Words {
    fn from(words: Vec<f32>) -> Words {
        Words::F32(words)
    }
}

impl Filling {
    /// Adds the first words of a buffer.
    pub fn add(&mut self, buffer: &Array, words: impl Into<Words>) {
        self.0.push((buffer.clone(), words.into()));
    }

    /// Writes the buffers.
    pub fn write(&self) -> Result<()> {
        for (buffer, words) in &self.0 {
            match words {
                Words::U32(words) => buffer.write(words)?,
                Words::I32(words) => buffer.write(words)?,
                Words::F32(words) => buffer.write(words)?,
            }
        }
        Ok(())
    }
}
