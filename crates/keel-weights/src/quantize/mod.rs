//! Turning a dense checkpoint into an affine-quantised one.

mod experts;
mod plan;
mod recipe;
mod run;

pub use recipe::QuantizeRecipe;
pub use run::{QuantizeProgress, QuantizeReport, quantize_checkpoint};
