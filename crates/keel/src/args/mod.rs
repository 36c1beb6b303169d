//! Groups of options that several commands share.

mod access;
mod bytes;
mod device;
mod form;
mod holding;
mod ids;
mod model;
pub mod nodes;
mod patience;
mod pictures;
mod prompt;
mod sampling;
mod shape;
mod speculate;
mod split;
mod subject;

pub use access::AccessArgs;
pub use bytes::parse_bytes;
pub use device::{Device, DeviceArgs};
pub use form::FormArgs;
pub use holding::{COUNT_MAX, HoldingArgs, Pooling, count};
pub use ids::IdArgs;
pub use model::{EngineArgs, ModelArgs, TowerArgs};
pub use nodes::NodeArgs;
pub use patience::{PatienceArgs, seconds};
pub use pictures::PictureArgs;
pub use prompt::{Asking, PromptArgs};
pub use sampling::SamplingArgs;
pub use shape::{ShapeArgs, affine_format};
pub use speculate::{DraftArgs, SpeculateArgs, drafts_max};
pub use split::{Member, Split, SplitArgs};
pub use subject::{Subject, SubjectArgs, quoted};
