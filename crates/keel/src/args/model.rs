//! Options for the model and its arithmetic.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};
use evenkeel::ModelFiles;
use keel_array::{Compute, DType, KvFormat};
use keel_engine::{EngineOptions, PREFILL_GRID};

use super::quoted;
use crate::source;

/// The model.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// A folder with config.json and weights, a weights file, or a hub name (owner/name). Without it, the
    /// built-in model.
    #[arg(long, short, value_name = "MODEL")]
    pub model: Option<String>,
    #[command(flatten)]
    pub tower: TowerArgs,
}

impl ModelArgs {
    /// Opens the model.
    ///
    /// # Errors
    /// As [`source::open`].
    pub fn open(&self) -> Result<ModelFiles> {
        source::open(self.model.as_deref(), self.tower.mmproj.as_deref())
    }
}

/// The vision tower of a GGUF model.
#[derive(Clone, Debug, Default, Args)]
pub struct TowerArgs {
    /// File with the vision tower of a GGUF model. By default the one file in the model's folder whose name contains
    /// mmproj. none: the model reads text alone.
    #[arg(long, value_name = "FILE")]
    pub mmproj: Option<PathBuf>,
}

impl TowerArgs {
    /// The option, if it was given, with a space before it.
    pub fn flag(&self) -> String {
        let file = self.mmproj.as_ref().map(|file| quoted(&file.display().to_string()));
        file.map_or(String::new(), |file| format!(" --mmproj {file}"))
    }
}

const PREFILL_STEP_DEFAULT: usize = 2048;

/// Bounds and arithmetic of an engine.
#[derive(Clone, Debug, Args)]
pub struct EngineArgs {
    /// Prompt tokens of one step, a multiple of 64. More tokens are faster and take more memory. The result is the
    /// same.
    #[arg(long, value_name = "N", default_value_t = PREFILL_STEP_DEFAULT, value_parser = parse_prefill_step)]
    pub prefill_step: usize,
    /// Arithmetic of the linear layers. auto takes the fastest one that keeps the accuracy of the weights' format. 8bit
    /// is for many clients of a GPU with compute capability 9.0, and changes the result. Steps of more than 128 rows,
    /// of prompts and of answers, multiply quantised weights by activations in 8-bit floats with one scale for each
    /// row. Those weights are kept in such floats, too: one byte more for each. Experts, embedding and output head are
    /// not. On the CPU it changes nothing.
    #[arg(long, value_enum, default_value = "auto")]
    pub compute: ComputeArg,
    /// Arithmetic of prompts' products: 8bit rounds activations and quantised weights to 8-bit floats with one scale
    /// for each row, in steps of more than 256 rows on a GPU that multiplies such floats. It is faster and changes the
    /// result. On other GPUs it only rounds gate, up and the result of attention to f16. On the CPU it changes nothing.
    #[arg(long, value_enum, default_value = "auto", conflicts_with_all = ["compute", "deterministic"])]
    pub prefill_compute: PrefillComputeArg,
    /// Bits of each stored key and value: 32, 16 (f16), or 8 or 4 with one scale for each 32 values. Fewer bits take
    /// less memory and change the result. By default 16, or 32 with --compute f32.
    #[arg(long, value_name = "N", value_parser = parse_kv_bits)]
    pub kv_bits: Option<KvFormat>,
    /// Bits of each value of a recurrent (gated delta) state: 32, or 16 (f16). 16 take half of the memory and traffic
    /// of the states and change the result.
    #[arg(long, value_name = "N", default_value = "32", value_parser = parse_state_bits)]
    pub state_bits: DType,
}

fn parse_kv_bits(text: &str) -> std::result::Result<KvFormat, String> {
    match text {
        "32" => Ok(KvFormat::F32),
        "16" => Ok(KvFormat::F16),
        "8" => Ok(KvFormat::Bits8),
        "4" => Ok(KvFormat::Bits4),
        _ => Err("not one of 32, 16, 8 and 4".into()),
    }
}

fn parse_state_bits(text: &str) -> std::result::Result<DType, String> {
    match text {
        "32" => Ok(DType::F32),
        "16" => Ok(DType::F16),
        _ => Err("not one of 32 and 16".into()),
    }
}

fn parse_prefill_step(text: &str) -> std::result::Result<usize, String> {
    match text.parse() {
        Ok(step) if step > 0 && step % PREFILL_GRID == 0 => Ok(step),
        _ => Err(format!("not a positive multiple of {PREFILL_GRID}")),
    }
}

impl EngineArgs {
    /// The options that were given, but --kv-bits, with a space before each.
    pub fn flags(&self) -> String {
        let mut flags = String::new();
        if self.prefill_step != PREFILL_STEP_DEFAULT {
            flags += &format!(" --prefill-step {}", self.prefill_step);
        }
        flags += match self.compute {
            ComputeArg::Auto => "",
            ComputeArg::F32 => " --compute f32",
            ComputeArg::Bf16 => " --compute bf16",
            ComputeArg::EightBits => " --compute 8bit",
        };
        if self.prefill_compute == PrefillComputeArg::EightBits {
            flags += " --prefill-compute 8bit";
        }
        if self.state_bits == DType::F16 {
            flags += " --state-bits 16";
        }
        flags
    }

    /// Engine options with these values. All others have their defaults.
    pub fn options(&self) -> EngineOptions {
        EngineOptions {
            prefill_step: self.prefill_step,
            compute: match self.prefill_compute {
                PrefillComputeArg::Auto => self.compute.into(),
                PrefillComputeArg::EightBits => Compute::PrefillFp8,
            },
            kv: self.kv_bits,
            state: self.state_bits,
            ..EngineOptions::default()
        }
    }
}

/// Arithmetic of prompts' linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PrefillComputeArg {
    /// As --compute says.
    Auto,
    /// 8-bit floats.
    #[value(name = "8bit")]
    EightBits,
}

/// Arithmetic of linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ComputeArg {
    /// The fastest that keeps the accuracy of the weights' format.
    Auto,
    /// f32 throughout, keys and values included.
    F32,
    /// Activations in 16 bits, never fewer; f32 sums.
    Bf16,
    /// 8-bit floats in steps of many rows; f32 sums.
    #[value(name = "8bit")]
    EightBits,
}

impl From<ComputeArg> for Compute {
    fn from(arg: ComputeArg) -> Compute {
        match arg {
            ComputeArg::Auto => Compute::Auto,
            ComputeArg::F32 => Compute::F32,
            ComputeArg::Bf16 => Compute::Bf16,
            ComputeArg::EightBits => Compute::Fp8,
        }
    }
}
