//! A model on several devices: which device holds which part, and how their steps run.

mod load;
pub(crate) mod microbatches;
mod overlap;
mod planner;
pub(crate) mod step;
mod steps_ahead;

pub(crate) use load::load_parts;
pub(crate) use planner::check_devices;
pub use planner::{DeviceGrid, MixtureChoice, PlacedPart, SplitPlanner};
