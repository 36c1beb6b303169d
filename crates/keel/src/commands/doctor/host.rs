//! Facts about the processor and memory. Linux reports them in files; elsewhere many are unknown.

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

/// Memory of the machine and of this process's control groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    pub total: Option<u64>,
    /// Free memory, including caches that can be dropped.
    pub available: Option<u64>,
    /// The lowest limit of a control group.
    pub limit: Option<u64>,
    /// Bytes left in that group.
    pub left_of_limit: Option<u64>,
}

impl Memory {
    pub fn look() -> Memory {
        let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Memory::parse(&info, &groups, Path::new("/sys/fs/cgroup"))
    }

    fn parse(meminfo: &str, groups: &str, root: &Path) -> Memory {
        let kib = |key: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
        };
        let total = kib("MemTotal");
        let bound =
            bounds(groups, root).into_iter().filter(|(limit, _)| total.is_none_or(|total| *limit < total));
        let tightest = bound.min_by_key(|(limit, used)| limit.saturating_sub(*used));
        Memory {
            total,
            available: kib("MemAvailable"),
            limit: tightest.map(|(limit, _)| limit),
            left_of_limit: tightest.map(|(limit, used)| limit.saturating_sub(used)),
        }
    }

    /// Bytes that a program can still allocate.
    pub fn free(&self) -> Option<u64> {
        match (self.available, self.left_of_limit) {
            (Some(available), Some(left)) => Some(available.min(left)),
            (available, left) => available.or(left),
        }
    }
}

/// Limit and usage of each control group, from this process's own up to the root.
fn bounds(groups: &str, root: &Path) -> Vec<(u64, u64)> {
    let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        // Version 2 of control groups has one tree for all controllers, version 1 has one tree per controller.
        // Above `memory.high` a process is slowed down until it gives memory back.
        let (base, limits, used) = match controllers {
            "" => (root.to_path_buf(), &["memory.max", "memory.high"][..], "memory.current"),
            "memory" => (root.join("memory"), &["memory.limit_in_bytes"][..], "memory.usage_in_bytes"),
            _ => continue,
        };
        let own = base.join(path.trim_start_matches('/'));
        for folder in own.ancestors().take_while(|folder| folder.starts_with(&base)) {
            let limit = limits.iter().filter_map(|file| number(folder.join(file))).min();
            found.extend(limit.zip(number(folder.join(used))));
        }
    }
    found
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

    #[test]
    fn the_tightest_group_is_the_limit() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let put = |folder: &str, limit: &str, used: &str| {
            let folder = root.path().join(folder);
            fs::create_dir_all(&folder).expect("writable");
            fs::write(folder.join("memory.max"), limit).expect("writable");
            fs::write(folder.join("memory.current"), used).expect("writable");
        };
        put("a", "4000000\n", "3500000\n");
        put("a/b", "max\n", "10\n");
        put("a/b/c", "2000000\n", "10\n");
        let info = "MemTotal:  8000 kB\nMemFree: 1 kB\nMemAvailable:   5000 kB\n";
        let memory = Memory::parse(info, "0::/a/b/c\n", root.path());
        assert_eq!((memory.total, memory.available), (Some(8_192_000), Some(5_120_000)));
        assert_eq!((memory.limit, memory.left_of_limit), (Some(4_000_000), Some(500_000)));
        assert_eq!(memory.free(), Some(500_000));
        fs::write(root.path().join("a/memory.high"), "3900000\n").expect("writable");
        let memory = Memory::parse(info, "0::/a/b/c\n", root.path());
        assert_eq!((memory.limit, memory.left_of_limit), (Some(3_900_000), Some(400_000)));
        fs::write(root.path().join("a/memory.high"), "max\n").expect("writable");
        let free = Memory::parse(info, "0::/\n", root.path());
        assert_eq!((free.limit, free.free()), (None, Some(5_120_000)));
        put("a", "9000000\n", "0\n");
        assert_eq!(
            Memory::parse(info, "0::/a\n", root.path()).limit,
            None,
            "more than there is limits nothing"
        );
    }
}
