//! Several devices for one model.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use keel_engine::split::DeviceGrid;

use super::{Device, NodeArgs, nodes};
use crate::failure::usage;

/// Most devices of a model.
const DEVICES_MAX: usize = 64;

/// Devices that share a model.
#[derive(Clone, Debug, Default, Args)]
pub struct SplitArgs {
    /// Devices that share the model, for example cuda:0,cuda:1 or cpu:0,cpu:1. They take the place of --device. Each
    /// has a memory of its own; those of the CPU share its threads. GPUs need the library NCCL.
    #[arg(long, value_name = "DEVICE,...", value_delimiter = ',', value_parser = parse_member)]
    devices: Vec<Member>,
    /// How --devices share the model. pipeline gives each some of the layers, even by bytes. tensor gives each a share
    /// of every layer, by heads and columns. pipeline:2,tensor:2 makes two stages of two devices that share their
    /// layers. The default is pipeline; keel fit proposes the split whose largest device is smallest.
    #[arg(long, value_name = "HOW", requires = "devices", value_parser = parse_split)]
    split: Option<Split>,
    #[command(flatten)]
    pub nodes: NodeArgs,
}

/// One of the devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name in reports.
    pub name: String,
    /// Its kind.
    pub device: Device,
    /// The bytes that it has room for, if they are known, of a device of another process.
    pub remote: Option<Option<u64>>,
}

/// How devices share a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Split {
    /// Each has some of the layers.
    #[default]
    Pipeline,
    /// Each has a share of every layer.
    Tensor,
    /// Stages of a pipeline, each of several devices that share its layers.
    Both {
        /// The number of stages.
        stages: usize,
        /// The number of devices of each.
        shares: usize,
    },
}

impl Split {
    /// The numbers of stages and of devices of each stage, for `devices` devices.
    ///
    /// # Errors
    /// A combination is for another number of devices.
    pub fn grid(self, devices: usize) -> Result<DeviceGrid> {
        match self {
            Split::Pipeline => Ok(DeviceGrid { stages: devices, shares: 1 }),
            Split::Tensor => Ok(DeviceGrid { stages: 1, shares: devices }),
            Split::Both { stages, shares } if stages.checked_mul(shares) == Some(devices) => {
                Ok(DeviceGrid { stages, shares })
            }
            Split::Both { stages, shares } => Err(usage(format!(
                "--split {self}: {stages} stages of {shares} devices are {} devices, and --devices lists {devices}",
                stages.saturating_mul(shares)
            ))),
        }
    }

    /// All ways to split a model over `devices` devices: shares of every layer, then fewer shares and more stages.
    pub fn all(devices: usize) -> Vec<Split> {
        let of = |stages: usize| match stages {
            1 => Split::Tensor,
            _ if stages == devices => Split::Pipeline,
            _ => Split::Both { stages, shares: devices / stages },
        };
        (1..=devices).filter(|stages| devices.is_multiple_of(*stages)).map(of).collect()
    }
}

impl std::fmt::Display for Split {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Split::Pipeline => f.write_str("pipeline"),
            Split::Tensor => f.write_str("tensor"),
            Split::Both { stages, shares } => write!(f, "pipeline:{stages},tensor:{shares}"),
        }
    }
}

fn parse_split(text: &str) -> Result<Split, String> {
    let count = |part: &str, of: &str| {
        part.strip_prefix(of)?.strip_prefix(':')?.parse().ok().filter(|&n: &usize| n > 0)
    };
    let both = |(first, second): (&str, &str)| {
        let in_order =
            |a, b| Some(Split::Both { stages: count(a, "pipeline")?, shares: count(b, "tensor")? });
        in_order(first, second).or_else(|| in_order(second, first))
    };
    match text {
        "pipeline" => Ok(Split::Pipeline),
        "tensor" => Ok(Split::Tensor),
        _ => text.split_once(',').and_then(both).ok_or_else(|| {
            "a model is split by pipeline, by tensor, or by both, for example pipeline:2,tensor:2".into()
        }),
    }
}

fn parse_member(text: &str) -> Result<Member, String> {
    let (kind, number) = text.split_once(':').unwrap_or((text, "0"));
    let number: usize = number.parse().map_err(|_| format!("{number:?} is no number of a device"))?;
    let device = match kind {
        "cpu" => Device::Cpu,
        "cuda" => Device::Cuda(number),
        _ => return Err("there is no such device; use cpu:0 or cuda:0".into()),
    };
    Ok(Member { name: format!("{kind}:{number}"), device, remote: None })
}

impl SplitArgs {
    /// The devices; empty if the model is for the one of `--device`.
    pub fn members(&self) -> &[Member] {
        &self.devices
    }

    /// How they share the model.
    pub fn split(&self) -> Split {
        self.split.unwrap_or_default()
    }

    /// The numbers of stages and of devices of each stage.
    ///
    /// # Errors
    /// As [`Split::grid`].
    pub fn grid(&self) -> Result<DeviceGrid> {
        self.split().grid(self.devices.len())
    }

    /// The splits to choose from: that of --split, or all.
    pub fn choices(&self) -> Vec<Split> {
        self.split.map_or_else(|| Split::all(self.devices.len()), |split| vec![split])
    }

    /// Connects with the other processes that share the model, if there are any. Their devices come before this one's.
    ///
    /// # Errors
    /// A node cannot be reached; devices of the CPU, or a process that does not lead.
    pub fn meet(&mut self) -> Result<()> {
        self.meet_within(nodes::PATIENCE)
    }

    /// The same, waiting up to `patience` until the nodes are there.
    ///
    /// # Errors
    /// As [`SplitArgs::meet`].
    pub fn meet_within(&mut self, patience: Duration) -> Result<()> {
        self.nodes.cluster = None;
        self.devices.retain(|member| member.remote.is_none());
        if !self.nodes.are_several() {
            return Ok(());
        }
        if self.nodes.follows() {
            return Err(usage("--node above 0 is for keel serve, which then does what node 0 says"));
        }
        self.expect_gpus()?;
        self.nodes.own_address()?;
        let others = self.nodes.meet(patience)?;
        self.devices.splice(0..0, others);
        Ok(())
    }

    /// Refuses devices of the CPU, whose exchanges stay within a process.
    ///
    /// # Errors
    /// There are some.
    pub fn expect_gpus(&self) -> Result<()> {
        match self.devices.iter().find(|member| member.device == Device::Cpu) {
            None => Ok(()),
            Some(member) => Err(usage(format!(
                "--nodes: {} exchanges arrays within its own process only; list GPUs in --devices",
                member.name
            ))),
        }
    }

    /// The devices as --devices takes them.
    pub fn list(&self) -> String {
        self.devices.iter().map(|member| member.name.as_str()).collect::<Vec<_>>().join(",")
    }

    /// A copy with another split.
    pub fn with(&self, split: Split) -> SplitArgs {
        SplitArgs { split: Some(split), ..self.clone() }
    }

    /// Whether several devices or processes share the model, or the split is for several.
    pub fn is_split(&self) -> bool {
        let is_for_several =
            matches!(self.split, Some(Split::Both { stages, shares }) if stages.saturating_mul(shares) > 1);
        self.devices.len() > 1 || is_for_several || self.nodes.are_several()
    }

    /// Whether GPUs with this split wait for the host after each step where an engine drafts. Those of a tensor split
    /// in one process do not.
    pub fn waits_for_steps(&self) -> bool {
        let is_one_stage = self.grid().is_ok_and(|grid| grid.stages == 1);
        self.is_split() && (!is_one_stage || self.nodes.are_several())
    }

    /// Refuses devices that cannot share a model.
    ///
    /// # Errors
    /// A device is listed twice (a GPU may be, with NCCL_MULTI_RANK_GPU_ENABLE=1), GPUs and devices of the CPU are
    /// mixed, or there are too many.
    pub fn check(&self) -> Result<()> {
        self.nodes.check()?;
        let all = self.list();
        let repeated =
            self.devices.iter().enumerate().find(|(i, member)| self.devices[..*i].contains(member));
        if let Some((_, Member { name, device, .. })) = repeated {
            // Each place in the list is compared with all free memory of the GPU, so each needs a --memory-limit.
            if *device == Device::Cpu || !keel_cuda::CudaGroup::may_share_a_gpu() {
                return Err(usage(format!("--devices {all}: {name} is listed twice")));
            }
        }
        if self.devices.len() > DEVICES_MAX {
            let count = self.devices.len();
            return Err(usage(format!(
                "--devices lists {count} devices; at most {DEVICES_MAX} share a model"
            )));
        }
        let gpus = self.devices.iter().filter(|member| member.device != Device::Cpu).count();
        if gpus != 0 && gpus != self.devices.len() {
            return Err(usage(format!(
                "--devices {all}: GPUs and devices of the CPU cannot share a model; list only one kind"
            )));
        }
        Ok(())
    }

    /// Refuses several devices, for work that runs on one.
    ///
    /// # Errors
    /// Several devices share the model.
    pub fn refuse(&self) -> Result<()> {
        if self.is_split() {
            return Err(usage(
                "--devices: this command, or serve with several models, runs a model on one device; generate, chat, serve, bench, logits, eval, embed, fit and plan run it on several",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(devices: &str) -> SplitArgs {
        let devices = devices.split(',').map(|name| parse_member(name).expect("a device")).collect();
        SplitArgs { devices, ..SplitArgs::default() }
    }

    #[test]
    fn devices_that_cannot_share_a_model_are_refused() {
        assert!(args("cpu:0,cpu:1").check().is_ok() && args("cuda:1").check().is_ok());
        assert!(args("cuda:0,cuda:1").check().is_ok());
        let refusal = |devices| args(devices).check().expect_err("refused").to_string();
        assert!(refusal("cpu,cpu:0").contains("cpu:0 is listed twice"));
        assert!(refusal("cpu:0,cuda:1").contains("list only one kind"));
        let many: Vec<String> = (0..65).map(|i| format!("cpu:{i}")).collect();
        assert!(refusal(&many.join(",")).contains("lists 65 devices; at most 64"));
        let split = Some(Split::Both { stages: 2, shares: 2 });
        assert!(
            SplitArgs { split, ..args("cpu:0") }.is_split(),
            "its number of devices is checked, not ignored"
        );
        assert!(parse_member("tpu:0").is_err() && parse_member("cpu:x").is_err());
    }

    #[test]
    fn a_tensor_split_of_one_process_does_not_wait_for_steps() {
        let of = |split| SplitArgs { split, ..args("cuda:0,cuda:1") };
        assert!(of(None).waits_for_steps() && of(Some(Split::Pipeline)).waits_for_steps());
        assert!(!of(Some(Split::Tensor)).waits_for_steps());
        assert!(!of(Some(Split::Both { stages: 1, shares: 2 })).waits_for_steps());
        assert!(!args("cuda:0").waits_for_steps());
    }

    #[test]
    fn splits_are_read_and_listed() {
        let both = Split::Both { stages: 2, shares: 3 };
        for (text, split) in
            [("pipeline", Split::Pipeline), ("tensor", Split::Tensor), ("pipeline:2,tensor:3", both)]
        {
            assert_eq!(parse_split(text), Ok(split));
            assert_eq!(split.to_string(), text);
        }
        assert_eq!(parse_split("tensor:3,pipeline:2"), Ok(both));
        for text in
            ["pipeline:0,tensor:2", "pipeline:2", "pipeline:2,pipeline:2", "columns", "tensor:x,pipeline:1"]
        {
            assert!(
                parse_split(text).expect_err("refused").contains("for example pipeline:2,tensor:2"),
                "{text}"
            );
        }
        assert_eq!(both.grid(6).expect("six devices"), DeviceGrid { stages: 2, shares: 3 });
        let error = both.grid(4).expect_err("six are not four").to_string();
        assert!(error.contains("2 stages of 3 devices are 6 devices, and --devices lists 4"), "{error}");
        assert_eq!(
            Split::all(6).iter().map(Split::to_string).collect::<Vec<_>>(),
            ["tensor", "pipeline:2,tensor:3", "pipeline:3,tensor:2", "pipeline"]
        );
    }
}
