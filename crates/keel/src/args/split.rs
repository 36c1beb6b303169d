//! Several devices for one model.

use anyhow::Result;
use clap::Args;

use super::Device;
use crate::failure::usage;

/// Most devices of a model.
const DEVICES_MAX: usize = 64;

/// Devices that share a model.
#[derive(Clone, Debug, Default, Args)]
pub struct SplitArgs {
    /// Devices that share the model, for example cpu:0,cpu:1. They take the place of --device. Each has a memory of its own;
    /// those of the CPU share its threads.
    #[arg(long, value_name = "DEVICE,...", value_delimiter = ',', value_parser = parse_member)]
    devices: Vec<Member>,
    /// How --devices share the model: pipeline gives each some of the layers, even by bytes; tensor gives each a
    /// share of every layer, by heads and columns.
    #[arg(long, value_name = "HOW", requires = "devices", default_value = "pipeline", value_parser = parse_split)]
    split: Split,
}

/// One of the devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name in reports.
    pub name: String,
    /// Its kind.
    pub device: Device,
}

/// How devices share a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Split {
    /// Each has some of the layers.
    #[default]
    Pipeline,
    /// Each has a share of every layer.
    Tensor,
}

fn parse_split(text: &str) -> Result<Split, String> {
    match text {
        "pipeline" => Ok(Split::Pipeline),
        "tensor" => Ok(Split::Tensor),
        _ => Err("a model is split by pipeline or tensor; the two are not combined".into()),
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
    Ok(Member { name: format!("{kind}:{number}"), device })
}

impl SplitArgs {
    /// The devices; empty if the model is for the one of `--device`.
    pub fn members(&self) -> &[Member] {
        &self.devices
    }

    /// How they share the model.
    pub fn split(&self) -> Split {
        self.split
    }

    /// Whether several devices share the model.
    pub fn is_split(&self) -> bool {
        self.devices.len() > 1
    }

    /// Refuses devices that cannot share a model.
    ///
    /// # Errors
    /// A device is listed twice, is a GPU, or there are too many.
    pub fn check(&self) -> Result<()> {
        let list = |members: &[Member]| members.iter().map(|m| m.name.clone()).collect::<Vec<_>>().join(",");
        let all = list(&self.devices);
        if let Some(twice) =
            self.devices.iter().enumerate().find(|(i, member)| self.devices[..*i].contains(member))
        {
            return Err(usage(format!("--devices {all}: {} is listed twice", twice.1.name)));
        }
        if self.devices.len() > DEVICES_MAX {
            let count = self.devices.len();
            return Err(usage(format!(
                "--devices lists {count} devices; at most {DEVICES_MAX} share a model"
            )));
        }
        if self.is_split() && self.devices.iter().any(|member| member.device != Device::Cpu) {
            return Err(usage(format!(
                "--devices {all}: a model is split over devices of the CPU only; give one GPU with --device"
            )));
        }
        Ok(())
    }

    /// Refuses several devices, for what runs on one.
    ///
    /// # Errors
    /// Several devices share the model.
    pub fn refuse(&self) -> Result<()> {
        if self.is_split() {
            return Err(usage(
                "--devices: this command, or plan with the options of a server, runs a model on one device; generate, chat, logits, eval, embed and plan run it on several",
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
        SplitArgs { devices, split: Split::Pipeline }
    }

    #[test]
    fn devices_that_cannot_share_a_model_are_refused() {
        assert!(args("cpu:0,cpu:1").check().is_ok() && args("cuda:1").check().is_ok());
        let refusal = |devices| args(devices).check().expect_err("refused").to_string();
        assert!(refusal("cpu,cpu:0").contains("cpu:0 is listed twice"));
        assert!(refusal("cuda:0,cuda:1").contains("devices of the CPU only"));
        let many: Vec<String> = (0..65).map(|i| format!("cpu:{i}")).collect();
        assert!(refusal(&many.join(",")).contains("lists 65 devices; at most 64"));
        assert!(parse_member("tpu:0").is_err() && parse_member("cpu:x").is_err());
        assert!(parse_split("pipeline:2,tensor:2").expect_err("not there").contains("not combined"));
    }
}
