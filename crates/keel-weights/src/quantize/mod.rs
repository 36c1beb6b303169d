//! Converts checkpoints: quantised in MLX's affine form or in GGUF's block codings, or dense.

mod experts;
mod gguf;
mod plan;
mod recipe;
mod run;
mod source;

pub use experts::expert_of;
pub use gguf::{GgufRecipe, is_written, metadata_of, write_gguf, written_types};
pub use recipe::QuantizeRecipe;
pub use run::{
    QuantizeProgress, QuantizeReport, SafetensorsForm, copy_side_files, quantize_checkpoint, write_config,
    write_safetensors,
};
pub use source::{Dequantized, RowSource};
