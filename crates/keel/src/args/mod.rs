//! Groups of options that several commands share.

mod access;
mod bytes;
mod device;
mod form;
mod ids;
mod memory;
mod model;
pub mod nodes;
mod pictures;
mod prompt;
mod sampling;
mod shape;
mod speculate;
mod split;
mod subject;
mod timeouts;

pub use access::AccessArgs;
pub use bytes::parse_bytes;
pub use device::{Device, DeviceArgs};
pub use form::FormArgs;
pub use ids::IdArgs;
pub use memory::{COUNT_MAX, MemoryArgs, Pooling, count};
pub use model::{EngineArgs, ModelArgs, TowerArgs};
pub use nodes::NodeArgs;
pub use pictures::PictureArgs;
pub use prompt::{PromptArgs, PromptMode};
pub use sampling::SamplingArgs;
pub use shape::{ShapeArgs, affine_format};
pub use speculate::{DraftArgs, SpeculateArgs, drafts_max};
pub use split::{Member, Split, SplitArgs};
pub use subject::{Subject, SubjectArgs, quoted};
pub use timeouts::{TimeoutArgs, seconds};
