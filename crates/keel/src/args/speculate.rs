//! Options for speculation with the model's own MTP head.

use std::str::FromStr;

use anyhow::Result;
use clap::Args;
use keel_engine::{DRAFTS_MAX, Depth, SpeculationOptions};
use keel_models::has_mtp_head;

use super::{Device, DeviceArgs, SamplingArgs, Subject};
use crate::failure::usage;
use evenkeel::ModelFiles;

/// Speculation.
#[derive(Clone, Debug, Args)]
pub struct SpeculateArgs {
    /// Number of tokens that the multi-token-prediction head drafts for one step to verify: 1 to 8, auto, or off. auto
    /// makes as many drafts as pay. It is off without such a head, where GPUs form a pipeline, with --nodes, and where
    /// only a plan without drafts fits on the GPU. By default auto; with random weights off. Greedy text does not
    /// change; on a GPU without --deterministic a near tie may fall differently. Sampled text has the same
    /// distribution; on a GPU it is the same text if the device draws it.
    #[arg(long, value_name = "N|auto|off")]
    pub speculate: Option<Speculate>,
    /// Accept every draft without verifying it. WARNING: the text may then differ from the model's own text, and be
    /// worse.
    #[arg(long)]
    pub speculate_optimistic: bool,
}

/// The value of `--speculate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speculate {
    /// As many as pay off, if there is an MTP head.
    Auto,
    /// None.
    Off,
    /// Always this many.
    Drafts(usize),
}

impl FromStr for Speculate {
    type Err = String;

    fn from_str(text: &str) -> Result<Speculate, String> {
        match (text, text.parse()) {
            ("auto", _) => Ok(Speculate::Auto),
            ("off", _) => Ok(Speculate::Off),
            (_, Ok(drafts)) if (1..=DRAFTS_MAX).contains(&drafts) => Ok(Speculate::Drafts(drafts)),
            _ => Err(format!("expected 1 to {DRAFTS_MAX}, auto or off")),
        }
    }
}

impl SpeculateArgs {
    /// Whether a number of drafts is requested explicitly.
    pub fn is_asked_for(&self) -> bool {
        matches!(self.speculate, Some(Speculate::Drafts(_)))
    }

    /// Whether drafts are requested explicitly, of any number.
    pub fn wants_head(&self) -> bool {
        matches!(self.speculate, Some(Speculate::Drafts(_) | Speculate::Auto))
    }

    /// Whether an option is given.
    pub fn is_given(&self) -> bool {
        self.speculate.is_some() || self.speculate_optimistic
    }

    /// The speculation options for a checkpoint; `None` means no speculation.
    ///
    /// # Errors
    /// Drafts are requested but there is no MTP head, or optimism is requested without drafts.
    pub fn for_model(
        &self,
        model: &ModelFiles,
        device: &DeviceArgs,
        sampling: &SamplingArgs,
    ) -> Result<Option<SpeculationOptions>> {
        let options = self.on(device, has_mtp_head(&model.config, &*model.parameters()))?;
        Ok(options.map(|options| SpeculationOptions { repeatable: sampling.is_repeatable(), ..options }))
    }

    /// The speculation options for a checkpoint or a shape. With random weights every draft is wrong, so the default is
    /// off.
    ///
    /// # Errors
    /// As [`SpeculateArgs::for_model`].
    pub fn for_subject(
        &self,
        subject: &Subject<'_>,
        device: &DeviceArgs,
        is_random: bool,
    ) -> Result<Option<SpeculationOptions>> {
        let is_pointless = is_random && self.speculate.is_none();
        self.on(device, !is_pointless && has_mtp_head(&subject.config, &*subject.parameters))
    }

    /// As [`SpeculateArgs::options`], for a given device. With several stages of GPUs, steps overlap only in an engine
    /// without drafts. With `--nodes` each pass of a round is waited for. So `auto` means off in both.
    fn on(&self, device: &DeviceArgs, has_head: bool) -> Result<Option<SpeculationOptions>> {
        let options = self.options(has_head)?;
        let waits = device.device() != Device::Cpu && device.split.waits_for_steps();
        Ok(options.filter(|options| !waits || options.depth != Depth::Auto))
    }

    /// The speculation options for a model with or without an MTP head; `None` means no speculation.
    ///
    /// # Errors
    /// Drafts are requested but there is no MTP head, or optimism is requested without drafts.
    fn options(&self, has_head: bool) -> Result<Option<SpeculationOptions>> {
        let depth = match self.speculate.unwrap_or(Speculate::Auto) {
            Speculate::Drafts(_) if !has_head => {
                return Err(usage("--speculate: this model has no multi-token-prediction head"));
            }
            Speculate::Auto if has_head => Depth::Auto,
            Speculate::Drafts(drafts) => Depth::Fixed(drafts),
            Speculate::Auto | Speculate::Off => {
                if self.speculate_optimistic {
                    return Err(usage("--speculate-optimistic: there are no drafts to accept"));
                }
                return Ok(None);
            }
        };
        Ok(Some(SpeculationOptions { depth, optimistic: self.speculate_optimistic, ..Default::default() }))
    }
}

/// How a server drafts. How many drafts it makes at most is `--drafts` of [`super::MemoryArgs`].
#[derive(Clone, Debug, Default, Args)]
pub struct DraftArgs {
    /// Make as many drafts as --drafts allows in each step, even if they do not pay.
    #[arg(long, requires = "drafts")]
    drafts_always: bool,
    /// Accept every draft without verifying it. WARNING: the text may then differ from the model's own text, and be
    /// worse.
    #[arg(long, requires = "drafts")]
    drafts_optimistic: bool,
}

impl DraftArgs {
    /// The speculation options, with `drafts` of `--drafts`.
    ///
    /// # Errors
    /// Drafts are to be made or taken, and `--drafts 0` allows none.
    pub fn options(&self, drafts: Option<u8>) -> Result<SpeculationOptions> {
        let drafts = drafts.map_or(0, usize::from);
        let flag = if self.drafts_always { "--drafts-always" } else { "--drafts-optimistic" };
        if (self.drafts_always || self.drafts_optimistic) && drafts == 0 {
            return Err(usage(format!("{flag}: --drafts 0 allows no drafts")));
        }
        if self.drafts_optimistic {
            tracing::warn!(
                "--drafts-optimistic: drafts are accepted without verification; answers may differ from \
                 the model's"
            );
        }
        let depth = if self.drafts_always { Depth::Fixed(drafts) } else { Depth::Auto };
        Ok(SpeculationOptions { depth, optimistic: self.drafts_optimistic, ..Default::default() })
    }
}

/// Most drafts that `auto` makes on a GPU. Each number of rows is a program of its own there, and a fifth draft is
/// seldom accepted.
const AUTO_DRAFTS_GPU: usize = 4;

/// Number of drafts to plan memory for.
pub fn drafts_max(options: Option<SpeculationOptions>, device: Device) -> usize {
    match options.map(|options| options.depth) {
        None => 0,
        Some(Depth::Auto) if device == Device::Cpu => DRAFTS_MAX,
        Some(Depth::Auto) => AUTO_DRAFTS_GPU,
        Some(Depth::Fixed(drafts)) => drafts,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: &str, optimistic: bool, has_head: bool) -> Result<Option<SpeculationOptions>> {
        let speculate = Some(text.parse().map_err(|error: String| anyhow::anyhow!(error))?);
        SpeculateArgs { speculate, speculate_optimistic: optimistic }.options(has_head)
    }

    #[test]
    fn auto_follows_the_checkpoint_and_numbers_insist() {
        assert_eq!(options("auto", false, false).expect("fine"), None);
        assert_eq!(options("off", false, true).expect("fine"), None);
        let auto = options("auto", false, true).expect("fine");
        assert_eq!(auto.map(|o| o.depth), Some(Depth::Auto));
        assert_eq!(drafts_max(auto, Device::Cpu), DRAFTS_MAX);
        assert_eq!(drafts_max(auto, Device::Cuda(0)), AUTO_DRAFTS_GPU);
        let three = options("3", true, true).expect("fine");
        assert_eq!(
            three,
            Some(SpeculationOptions { depth: Depth::Fixed(3), optimistic: true, ..Default::default() })
        );
        assert_eq!(drafts_max(three, Device::Cuda(0)), 3);
        assert!(options("3", false, false).is_err());
        assert!(options("off", true, true).is_err());
        for wrong in ["0", "9", "-1", "on", ""] {
            assert!(options(wrong, false, true).is_err(), "{wrong}");
        }
    }
}
