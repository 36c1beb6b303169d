//! The models that a server offers, and the bounds of their memory.

use std::error::Error;
use std::time::Duration;

use keel_engine::Engine;

use crate::options::PrefixStore;
use crate::text::ServedText;

/// The result of loading a model.
pub struct LoadOutput {
    /// The engine.
    pub engine: Engine,
    /// The text side.
    pub text: ServedText,
    /// The place to restore its prefixes from and save them to.
    pub prefix_store: Option<PrefixStore>,
}

/// Loads a model, on a separate thread.
pub type Load = Box<dyn Fn() -> Result<LoadOutput, Box<dyn Error + Send + Sync>> + Send + Sync>;

/// A model that requests may name.
pub struct ServedModel {
    /// The model's name in the API.
    pub id: String,
    /// The planned bytes of the loaded model, without a vision tower that has a device of its own.
    pub bytes: u64,
    /// The planned bytes of a vision tower on the CPU, of a model on another device; otherwise 0.
    pub tower_bytes: u64,
    /// Largest number of tokens of a sequence.
    pub context: usize,
    /// The inputs that the model takes in addition to text.
    pub takes: Modalities,
    /// Loads the model.
    pub load: Load,
}

/// The inputs that a model takes in addition to text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Modalities {
    /// Pictures.
    pub pictures: bool,
    /// Videos.
    pub videos: bool,
}

/// Bounds of a server with several models.
#[derive(Clone, Copy, Debug)]
pub struct ModelManagerOptions {
    /// Limit on the bytes of all loaded models together.
    pub memory_limit: u64,
    /// Limit on the bytes of the loaded models' vision towers that are on the CPU next to models on another device.
    pub tower_limit: u64,
    /// Time after which an unused model is unloaded. With `None` it stays until another model needs its memory.
    pub keep_alive: Option<Duration>,
    /// Makes the allocator return the memory that a model left in it.
    pub trim_allocator: fn(),
}

/// The planned bytes of models.
#[derive(Clone, Copy, Default)]
pub(crate) struct Needs {
    pub bytes: u64,
    /// Those of vision towers with a device of their own.
    pub tower_bytes: u64,
}

impl Needs {
    pub fn plus(self, other: Needs) -> Needs {
        Needs { bytes: self.bytes + other.bytes, tower_bytes: self.tower_bytes + other.tower_bytes }
    }

    /// The memory that is short, if any.
    pub fn beyond(self, options: &ModelManagerOptions) -> Option<Shortage> {
        let model = Shortage { of: |needs| needs.bytes, whose: "", limit: options.memory_limit };
        let tower = Shortage {
            of: |needs| needs.tower_bytes,
            whose: " of its vision tower on the CPU",
            limit: options.tower_limit,
        };
        [model, tower].into_iter().find(|shortage| (shortage.of)(self) > shortage.limit)
    }
}

/// A memory whose limit is exceeded.
pub(crate) struct Shortage {
    /// The bytes in this memory.
    pub of: fn(Needs) -> u64,
    /// Whose they are, for messages.
    pub whose: &'static str,
    pub limit: u64,
}
