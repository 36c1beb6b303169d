//! Values that the host writes to a device's buffers before a step. A device whose steps queue up writes them when the
//! step's turn comes.

use keel_array::{Array, Element};

use crate::Result;

/// Contents of buffers, in the order in which they are written.
#[derive(Default)]
pub(crate) struct Filling(Vec<Box<dyn Fn() -> Result<()> + Send>>);

impl Filling {
    /// Adds the first words of a buffer.
    pub fn add<T: Element + Send + 'static>(&mut self, buffer: &Array, words: Vec<T>) {
        let buffer = buffer.clone();
        self.0.push(Box::new(move || Ok(buffer.write(&words)?)));
    }

    /// Writes the buffers.
    pub fn write(&self) -> Result<()> {
        self.0.iter().try_for_each(|write| write())
    }
}
