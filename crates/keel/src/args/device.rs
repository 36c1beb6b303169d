//! The device to run on, and limits on its use.

use std::sync::{Arc, OnceLock};

use anyhow::Result;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
pub use evenkeel::Device;
use evenkeel::{Determinism, DeviceOptions};
use keel_array::{Backend, Compute};
use keel_cpu::isa::Isa;
use keel_cpu::{CpuBackend, CpuGroup, CpuOptions};
use keel_cuda::{CudaBackend, CudaGroup, CudaOptions};

use super::{Member, Split, SplitArgs, nodes, parse_bytes};
use crate::failure::usage;

/// The device and its bounds.
#[derive(Clone, Debug, Args)]
pub struct DeviceArgs {
    /// Device to run on: auto, cpu, or cuda:N for an NVIDIA GPU (cuda means cuda:0). auto takes the first GPU on which
    /// the plan fits, else the CPU.
    #[arg(long, value_name = "DEVICE", env = "KEEL_DEVICE", default_value = "auto", value_parser = parse_device)]
    device: Wanted,
    /// Device of the vision tower of a model on a GPU: cpu keeps its weights, buffers and work off the GPU, and
    /// pictures take longer. Answers to other requests go on while a picture is looked at. By default the model's
    /// device.
    #[arg(long, value_name = "DEVICE", value_enum)]
    vision_device: Option<VisionDevice>,
    #[command(flatten)]
    pub split: SplitArgs,
    /// The device that `auto` stands for. Clones of these arguments share it.
    #[arg(skip)]
    chosen: Arc<OnceLock<Chosen>>,
    /// Number of CPU threads. By default one for each core.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// The most advanced CPU instructions to use, for comparisons. By default the most advanced that the CPU has.
    #[arg(long, value_enum, value_name = "LEVEL")]
    cpu_isa: Option<IsaArg>,
    /// Take all planned memory from the system at the start, not when it is first used (CPU). `keel serve` always does
    /// this, unless --on-demand is given.
    #[arg(long)]
    resident: bool,
    /// Give the same bits however work is cut: results do not depend on the prefill step, on other sequences, on drafts
    /// or on reused prefixes. So answers are not reused: a next turn runs the last answer again. Slower on a GPU. On
    /// the CPU only a reused answer changes bits without this option. With --deterministic=devices, 1, 2 and 4 of
    /// --devices also give the same bits. On GPUs that costs a tenth to more than half of the speed; on the CPU plain
    /// --deterministic does it.
    #[arg(
        long, value_name = "WHAT", value_parser = determinism_parser(),
        num_args = 0..=1, require_equals = true, default_missing_value = "steps",
    )]
    deterministic: Option<Determinism>,
    /// Hard limit on tensor memory, for example 800M or 1.5Gi; with --devices, of each device, or one for each:
    /// 8Gi,4Gi. A pipeline then gives a device layers in proportion to its limit. With --vision-device it bounds the
    /// model's device, not the tower's. The default on a GPU is its free memory minus 512 MiB for code of kernels and
    /// other programs. On the CPU there is no default limit.
    #[arg(long, value_name = "BYTES", value_delimiter = ',', value_parser = parse_bytes)]
    memory_limit: Vec<u64>,
}

/// The value of `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Auto,
    Only(Device),
}

/// The value of `--vision-device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum VisionDevice {
    Cpu,
}

/// The device chosen for `auto`, and the reason in one line.
#[derive(Clone, Debug)]
struct Chosen {
    device: Device,
    why: String,
}

fn parse_device(text: &str) -> Result<Wanted, String> {
    let number = |n: &str| n.parse().map(Device::Cuda).map_err(|_| format!("{n:?} is no number of a GPU"));
    match text.split_once(':') {
        None if text == "auto" => Ok(Wanted::Auto),
        None if text == "cpu" => Ok(Wanted::Only(Device::Cpu)),
        None if text == "cuda" => Ok(Wanted::Only(Device::Cuda(0))),
        Some(("cuda", n)) => number(n).map(Wanted::Only),
        _ => Err("there is no such device; use auto, cpu, or cuda:0".into()),
    }
}

/// The value of `--deterministic`: the choices that do not change bits.
fn determinism_parser() -> impl TypedValueParser<Value = Determinism> {
    let steps = PossibleValue::new("steps").help("How work is cut into steps");
    let devices = PossibleValue::new("devices").help("Also how many devices share a layer");
    PossibleValuesParser::new([steps, devices]).map(|name| match &*name {
        "devices" => Determinism::Devices,
        _ => Determinism::Steps,
    })
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum IsaArg {
    Portable,
    Avx2,
    Avx512,
    Avx512Vnni,
    Amx,
}

impl From<IsaArg> for Isa {
    fn from(arg: IsaArg) -> Isa {
        match arg {
            IsaArg::Portable => Isa::Portable,
            IsaArg::Avx2 => Isa::Avx2,
            IsaArg::Avx512 => Isa::Avx512,
            IsaArg::Avx512Vnni => Isa::Avx512Vnni,
            IsaArg::Amx => Isa::Amx,
        }
    }
}

impl DeviceArgs {
    /// The device. If it is `auto` and no plan has chosen yet: the first usable GPU, else the CPU. Of several devices,
    /// the first.
    pub fn device(&self) -> Device {
        self.options().device()
    }

    /// The device and its bounds for the library.
    pub fn options(&self) -> DeviceOptions {
        let device = match (self.split.members(), self.device) {
            ([first, ..], _) => Some(first.device),
            ([], Wanted::Only(device)) => Some(device),
            ([], Wanted::Auto) => self.chosen.get().map(|chosen| chosen.device),
        };
        DeviceOptions {
            device,
            threads: self.threads.map(|n| n as usize),
            isa: self.cpu_isa.map(Isa::from),
            resident: self.resident,
            determinism: self.deterministic.unwrap_or_default(),
            memory_limit: self.memory_limit.first().copied(),
        }
    }

    /// The same for one of several devices, by rank.
    pub fn options_of(&self, rank: usize) -> DeviceOptions {
        DeviceOptions { memory_limit: self.limit_of(rank), ..self.options() }
    }

    /// Whether bits must not depend on how work is cut.
    pub fn is_deterministic(&self) -> bool {
        self.deterministic.is_some()
    }

    /// Whether tensor memory has a limit.
    pub fn is_limited(&self) -> bool {
        !self.memory_limit.is_empty()
    }

    /// The limit of one of several devices, by rank.
    pub fn limit_of(&self, rank: usize) -> Option<u64> {
        match &self.memory_limit[..] {
            [all] => Some(*all),
            each => each.get(rank).copied(),
        }
    }

    /// The least limit of a device.
    pub fn least_limit(&self) -> Option<u64> {
        self.memory_limit.iter().copied().min()
    }

    /// The limits of several devices by rank, if there is one for each.
    pub fn limits(&self) -> &[u64] {
        if self.memory_limit.len() > 1 { &self.memory_limit } else { &[] }
    }

    /// A copy with the limits that bytes which are charged already leave, by rank.
    pub fn after(&self, charged: &[u64]) -> DeviceArgs {
        let left = |(rank, bytes): (usize, &u64)| Some(self.limit_of(rank)?.saturating_sub(*bytes));
        DeviceArgs { memory_limit: charged.iter().enumerate().filter_map(left).collect(), ..self.clone() }
    }

    /// Refuses devices that cannot share a model, or not with the bits that were asked for, and limits of other
    /// devices.
    ///
    /// # Errors
    /// As [`SplitArgs::check`]; --deterministic=devices with shares for other than 1, 2 or 4 devices; there are several
    /// limits, and not one for each device.
    pub fn check(&self) -> Result<()> {
        self.split.check()?;
        if self.deterministic == Some(Determinism::Devices) && self.split.is_split() {
            let shares = self.split.grid()?.shares;
            if !matches!(shares, 1 | 2 | 4) {
                return Err(usage(format!(
                    "--deterministic=devices: {shares} devices share each layer, and 1, 2 and 4 have the same bits; choose one \
                     of these numbers, or --deterministic"
                )));
            }
        }
        self.check_limits()
    }

    /// Refuses limits of other devices.
    ///
    /// # Errors
    /// There are several limits, and not one for each device.
    pub fn check_limits(&self) -> Result<()> {
        let (limits, devices) = (self.memory_limit.len(), self.split.members().len().max(1));
        if limits > 1 && limits != devices {
            return Err(usage(format!(
                "--memory-limit has {limits} values for {devices} device(s): give one, or one for each of --devices"
            )));
        }
        Ok(())
    }

    /// Refuses an arithmetic of which no bits can be promised.
    ///
    /// # Errors
    /// 8-bit floats in steps of many rows, with --deterministic.
    pub fn check_compute(&self, compute: Compute) -> Result<()> {
        if compute == Compute::Fp8 && self.deterministic.is_some() {
            return Err(usage(
                "--compute 8bit: whether a row is rounded depends on the number of rows; leave out --deterministic",
            ));
        }
        Ok(())
    }

    /// The vision tower's device and its bounds, if it is not the model's.
    ///
    /// # Errors
    /// Several devices share the model.
    pub fn tower(&self) -> Result<Option<DeviceOptions>> {
        if self.vision_device.is_none() {
            return Ok(None);
        }
        if self.split.is_split() {
            return Err(usage("--vision-device is for a model on one device; leave out --devices"));
        }
        let cpu = DeviceOptions { device: Some(Device::Cpu), memory_limit: None, ..self.options() };
        Ok((self.device() != Device::Cpu).then_some(cpu))
    }

    /// The options that were given and that change a plan, but those that name the model's devices, with a space before
    /// each.
    pub fn flags(&self) -> String {
        let mut flags = String::new();
        if self.vision_device == Some(VisionDevice::Cpu) {
            flags += " --vision-device cpu";
        }
        if let Some(threads) = self.threads {
            flags += &format!(" --threads {threads}");
        }
        if let Some(isa) = self.cpu_isa.and_then(|isa| isa.to_possible_value()) {
            flags += &format!(" --cpu-isa {}", isa.get_name());
        }
        match self.deterministic.unwrap_or_default() {
            Determinism::Off => {}
            Determinism::Steps => flags += " --deterministic",
            Determinism::Devices => flags += " --deterministic=devices",
        }
        flags
    }

    /// The device's name in reports.
    pub fn device_name(&self) -> String {
        match self.device() {
            Device::Cpu => "cpu".into(),
            Device::Cuda(n) => format!("cuda:{n}"),
        }
    }

    /// The names of all devices of the model in reports.
    pub fn names(&self) -> Vec<String> {
        match self.split.members() {
            [] => vec![self.device_name()],
            members => members.iter().map(|member| member.name.clone()).collect(),
        }
    }

    /// Whether the device is `auto` and not chosen yet.
    pub fn is_open(&self) -> bool {
        let is_free = self.split.members().is_empty() && self.device == Wanted::Auto;
        is_free && self.chosen.get().is_none()
    }

    /// Whether the device is not `auto`.
    pub fn is_given(&self) -> bool {
        matches!(self.device, Wanted::Only(_))
    }

    /// A copy of these arguments with another device.
    pub fn on(&self, device: Device) -> DeviceArgs {
        DeviceArgs { device: Wanted::Only(device), split: SplitArgs::default(), ..self.clone() }
    }

    /// A copy of these arguments for one of several devices alone.
    pub fn on_member(&self, rank: usize, device: Device) -> DeviceArgs {
        DeviceArgs { memory_limit: self.limit_of(rank).into_iter().collect(), ..self.on(device) }
    }

    /// A copy of these arguments with another split of the same devices.
    pub fn split_as(&self, split: Split) -> DeviceArgs {
        DeviceArgs { split: self.split.with(split), ..self.clone() }
    }

    /// Chooses the device for `auto`. `why` is the reason in one line.
    pub fn choose(&self, device: Device, why: String) {
        // The first choice stays, because all models of a run share one device.
        let _ = self.chosen.set(Chosen { device, why });
    }

    /// Logs which device `auto` chose, and why.
    pub fn announce(&self) {
        if let Some(chosen) = self.chosen.get().filter(|_| self.device == Wanted::Auto) {
            tracing::info!("{}", chosen.why);
        }
    }

    /// A copy that allocates all planned memory at the start.
    pub fn with_resident_memory(&self) -> DeviceArgs {
        DeviceArgs { resident: true, ..self.clone() }
    }

    /// The backends of several devices, as one group.
    ///
    /// # Errors
    /// A split for another number of devices; a GPU, its driver or its libraries are missing.
    pub fn group(&self, compute: Compute) -> Result<Vec<Arc<dyn Backend>>> {
        self.group_for(compute, false)
    }

    /// The same as backends that count memory without allocating it. They need no GPU.
    ///
    /// # Errors
    /// A split for another number of devices.
    pub fn planning_group(&self, compute: Compute) -> Result<Vec<Arc<dyn Backend>>> {
        self.group_for(compute, true)
    }

    fn group_for(&self, compute: Compute, planning: bool) -> Result<Vec<Arc<dyn Backend>>> {
        let members = self.split.members();
        let shares = self.split.grid()?.shares;
        if members.iter().any(|member| member.device == Device::Cpu) {
            return Ok(self.cpu_group(planning));
        }
        let cluster = self.split.nodes.cluster.as_ref();
        if let Some(cluster) = cluster.filter(|_| !planning) {
            return nodes::lead(self, cluster, shares, compute);
        }
        let groups = match cluster {
            Some(_) => CudaGroup::planned(members.len(), shares),
            None => CudaGroup::of(members.len(), shares),
        };
        let gpu = |(member, group): (&Member, CudaGroup)| {
            let Device::Cuda(ordinal) = member.device else { unreachable!("no device is a CPU") };
            let options = CudaOptions { group: Some(group), ..self.options().cuda_options(ordinal, compute) };
            let backend = if planning {
                CudaBackend::planning(&options)
            } else {
                CudaBackend::new(&options).map_err(evenkeel::Error::from)?
            };
            Ok(Arc::new(backend) as Arc<dyn Backend>)
        };
        members.iter().zip(groups).map(gpu).collect()
    }

    /// The backends of several devices of the CPU. They share its threads. Where there are fewer threads than devices,
    /// no more devices compute at a time than there are threads.
    fn cpu_group(&self, planning: bool) -> Vec<Arc<dyn Backend>> {
        let count = self.split.members().len();
        let options = self.options().cpu_options();
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = options.threads.unwrap_or_else(cores).max(1);
        let backend = |(rank, group)| {
            let own = (threads / count + usize::from(rank < threads % count)).max(1);
            let options = CpuOptions { threads: Some(own), planning, group: Some(group), ..options.clone() };
            Arc::new(CpuBackend::new(options)) as Arc<dyn Backend>
        };
        CpuGroup::with_turns(count, threads).into_iter().enumerate().map(backend).collect()
    }

    /// A backend that counts memory without allocating it. It needs no GPU.
    pub fn planning_backend(&self, compute: Compute) -> Arc<dyn Backend> {
        self.options().planning_backend(compute)
    }

    /// A CPU backend that measures the time of each operation.
    ///
    /// # Errors
    /// The device is a GPU, or there are several.
    pub fn profiled_backend(&self) -> Result<CpuBackend> {
        self.split.refuse()?;
        match self.device() {
            Device::Cpu => Ok(CpuBackend::new(CpuOptions { profile: true, ..self.options().cpu_options() })),
            Device::Cuda(_) => Err(usage("--profile is for --device cpu")),
        }
    }
}
