//! Facts about the processor and the bus. Linux reports them in files; elsewhere many are unknown.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The processor.
#[derive(Debug, Default)]
pub struct Processor {
    pub name: Option<String>,
    /// Logical cores of the machine.
    pub logical: Option<usize>,
    /// Physical cores of the machine.
    pub physical: Option<usize>,
    /// Cores that this process may use, by its affinity and the quota of its control group.
    pub usable: usize,
    /// Whether the processor has matrix tiles, even if the system does not grant them.
    pub has_amx: bool,
}

impl Processor {
    pub fn look() -> Processor {
        let usable = std::thread::available_parallelism().map_or(1, usize::from);
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Processor { usable, ..Processor::parse(&info) }
    }

    fn parse(cpuinfo: &str) -> Processor {
        let value = |line: &str, key: &str| {
            let (name, value) = line.split_once(':')?;
            (name.trim() == key).then(|| value.trim().to_string())
        };
        let first = |key| cpuinfo.lines().find_map(|line| value(line, key));
        let logical = cpuinfo.lines().filter(|line| value(line, "processor").is_some()).count();
        let mut cores = BTreeSet::new();
        for block in cpuinfo.split("\n\n") {
            let of = |key| block.lines().find_map(|line| value(line, key));
            cores.extend(of("core id").map(|core| (of("physical id"), core)));
        }
        let count = |n: usize| (n > 0).then_some(n);
        Processor {
            name: first("model name"),
            logical: count(logical),
            physical: count(cores.len()),
            usable: 0,
            has_amx: first("flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "amx_tile")),
        }
    }
}

/// The instruction sets that kernels are written for, and whether the processor has each.
pub fn instructions() -> Vec<(&'static str, bool)> {
    #[cfg(target_arch = "x86_64")]
    {
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        let amx = keel_cpu::isa::Isa::best() >= keel_cpu::isa::Isa::Amx;
        vec![
            ("AVX2", is_x86_feature_detected!("avx2")),
            ("FMA", is_x86_feature_detected!("fma")),
            ("F16C", is_x86_feature_detected!("f16c")),
            ("AVX-512", avx512),
            ("AVX-512 VNNI", is_x86_feature_detected!("avx512vnni")),
            ("AVX-512 BF16", is_x86_feature_detected!("avx512bf16")),
            ("AMX", amx),
        ]
    }
    #[cfg(not(target_arch = "x86_64"))]
    Vec::new()
}

/// Number of NVIDIA devices on the PCI bus, with or without a driver.
pub fn nvidia_devices() -> usize {
    let Ok(devices) = fs::read_dir("/sys/bus/pci/devices") else { return 0 };
    let says = |folder: &Path, file: &str, start: &str| {
        fs::read_to_string(folder.join(file)).is_ok_and(|text| text.trim().starts_with(start))
    };
    let is_gpu = |folder: PathBuf| says(&folder, "vendor", "0x10de") && says(&folder, "class", "0x03");
    devices.flatten().filter(|device| is_gpu(device.path())).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_counted_by_socket_and_core() {
        let core = |processor: u32, core: u32| {
            format!(
                "processor\t: {processor}\nmodel name\t: Some CPU\nphysical id\t: 0\ncore id\t\t: {core}\nflags\t\t: fpu amx_tile\n\n"
            )
        };
        let info = [core(0, 0), core(1, 0), core(2, 1), core(3, 1)].concat();
        let processor = Processor::parse(&info);
        assert_eq!((processor.logical, processor.physical), (Some(4), Some(2)));
        assert_eq!((processor.name.as_deref(), processor.has_amx), (Some("Some CPU"), true));
        let unknown = Processor::parse("");
        assert_eq!((unknown.logical, unknown.physical, unknown.name), (None, None, None));
    }
}
