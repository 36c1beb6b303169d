//! Memory that the system has free for this process.

use std::path::Path;

/// Bytes free, and the source of that number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeMemory {
    /// Bytes that can still be taken without swapping and without being killed.
    pub bytes: u64,
    /// The source of the bound.
    pub bound: Bound,
}

/// The source of a bound on memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The machine: `MemAvailable`.
    Machine,
    /// A limit of the control group that the process is in, such as that of a container.
    ControlGroup,
}

/// Memory of the machine and of this process's control groups. All is unknown on other systems than Linux.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SystemMemory {
    /// Bytes of the machine: `MemTotal`.
    pub total: Option<u64>,
    /// Free bytes of the machine, including caches that can be dropped: `MemAvailable`.
    pub available: Option<u64>,
    /// The control group with the fewest bytes left; `None` if no group has less than the machine.
    pub group: Option<GroupMemory>,
}

/// Memory of a control group with a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupMemory {
    /// Bytes that the group may use. Above `memory.high` it is not killed, but slowed down until it gives memory back.
    pub limit: u64,
    /// Bytes of the limit that are left. File pages in memory count as left.
    pub left: u64,
}

impl SystemMemory {
    /// The memory that the system reports now.
    pub fn look() -> SystemMemory {
        SystemMemory::under(Path::new("/"))
    }

    /// Like [`SystemMemory::look`], with the system's files under `root`.
    fn under(root: &Path) -> SystemMemory {
        let text = |file: &str| std::fs::read_to_string(root.join(file)).unwrap_or_default();
        let (meminfo, lines) = (text("proc/meminfo"), text("proc/self/cgroup"));
        let bytes = |key: &str| kib(&meminfo, key).map(|kib| kib * 1024);
        let (total, available) = (bytes("MemTotal:"), bytes("MemAvailable:"));
        // Version 1 writes a number beyond any memory where there is no limit.
        let binds = |group: &GroupMemory| {
            total.is_none_or(|total| group.limit < total)
                || available.is_some_and(|available| group.left < available)
        };
        let groups = lines.lines().flat_map(|line| groups_of_line(root, line)).filter(binds);
        SystemMemory { total, available, group: groups.min_by_key(|group| group.left) }
    }

    /// Bytes that can still be taken.
    pub fn free(&self) -> Option<u64> {
        self.available.into_iter().chain(self.group.map(|group| group.left)).min()
    }
}

/// Free memory now; `None` where the system does not report it (other systems than Linux).
///
/// It is the minimum of `MemAvailable` and of the rest of the limit of each control group above the process (version 1
/// or 2). File pages in memory count as free, because the system drops them when it needs memory.
pub fn free() -> Option<FreeMemory> {
    free_under(Path::new("/"))
}

/// Like [`free`], with the system's files under `root`.
fn free_under(root: &Path) -> Option<FreeMemory> {
    let SystemMemory { available, group, .. } = SystemMemory::under(root);
    let available = available?;
    Some(match group {
        Some(GroupMemory { left, .. }) if left < available => {
            FreeMemory { bytes: left, bound: Bound::ControlGroup }
        }
        _ => FreeMemory { bytes: available, bound: Bound::Machine },
    })
}

fn kib(meminfo: &str, key: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// Names of the files of one version of control groups.
struct Version {
    mount: &'static str,
    /// The lowest of these is the limit.
    limits: &'static [&'static str],
    used: &'static str,
    /// Entries of `memory.stat` that count file pages.
    file_pages: [&'static str; 2],
}

const V1: Version = Version {
    mount: "sys/fs/cgroup/memory",
    limits: &["memory.limit_in_bytes"],
    used: "memory.usage_in_bytes",
    file_pages: ["total_active_file", "total_inactive_file"],
};

const V2: Version = Version {
    mount: "sys/fs/cgroup",
    limits: &["memory.max", "memory.high"],
    used: "memory.current",
    file_pages: ["active_file", "inactive_file"],
};

/// The groups with a limit of one line of `/proc/self/cgroup`, `ID:CONTROLLERS:PATH`: from the process's own up to the
/// root.
fn groups_of_line(root: &Path, line: &str) -> Vec<GroupMemory> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { return Vec::new() };
    let version = match controllers {
        "" => V2,
        names if names.split(',').any(|name| name == "memory") => V1,
        _ => return Vec::new(),
    };
    let mount = root.join(version.mount);
    let own = mount.join(path.trim_start_matches('/'));
    let above = own.ancestors().take_while(|group| group.starts_with(&mount) && *group != mount);
    // In a container the mount may be the group itself, whatever the path says.
    above.chain([mount.as_path()]).filter_map(|group| memory_of(group, &version)).collect()
}

/// The memory of one group; `None` without a limit.
fn memory_of(group: &Path, version: &Version) -> Option<GroupMemory> {
    let number = |file: &str| std::fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    // Without a limit, version 2 writes "max".
    let limit = version.limits.iter().filter_map(|file| number(file)).min()?;
    let used = number(version.used)?;
    let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let entry = |key: &str| stat.lines().find_map(|line| line.strip_prefix(key)?.trim().parse::<u64>().ok());
    let file_pages: u64 = version.file_pages.iter().filter_map(|key| entry(key)).sum();
    Some(GroupMemory { limit, left: limit.saturating_sub(used.saturating_sub(file_pages)) })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A root folder with these files.
    struct System(PathBuf);

    impl System {
        fn new(name: &str, files: &[(&str, &str)]) -> System {
            let root = std::env::temp_dir().join(format!("keel-memory-{}-{name}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
                std::fs::write(path, text).expect("written");
            }
            System(root)
        }
    }

    impl Drop for System {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n");

    #[test]
    fn a_machine_without_limits_has_what_it_says() {
        let files = [MEMINFO, ("proc/self/cgroup", "0::/user\n"), ("sys/fs/cgroup/user/memory.max", "max\n")];
        let system = System::new("machine", &files);
        let expected = FreeMemory { bytes: 8000 * 1024, bound: Bound::Machine };
        assert_eq!(free_under(&system.0), Some(expected));
        let unknown = System::new("unknown", &[("proc/other", "")]);
        assert_eq!(free_under(&unknown.0), None);
    }

    #[test]
    fn the_tightest_group_above_the_process_decides_and_file_pages_are_free() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/memory.max", "1000000"),
            ("sys/fs/cgroup/a/memory.current", "600000"),
            ("sys/fs/cgroup/a/memory.stat", "anon 1\nactive_file 100000\ninactive_file 50000\n"),
            ("sys/fs/cgroup/a/b/memory.max", "2000000"),
            ("sys/fs/cgroup/a/b/memory.current", "10"),
        ];
        let system = System::new("v2", &files);
        let expected = FreeMemory { bytes: 550_000, bound: Bound::ControlGroup };
        assert_eq!(free_under(&system.0), Some(expected));
    }

    #[test]
    fn a_group_is_also_limited_to_the_bytes_above_which_it_is_slowed_down() {
        for (most, high) in [("2000000", "1000000"), ("max", "1000000"), ("1000000", "max")] {
            let files = [
                MEMINFO,
                ("proc/self/cgroup", "0::/a\n"),
                ("sys/fs/cgroup/a/memory.max", most),
                ("sys/fs/cgroup/a/memory.high", high),
                ("sys/fs/cgroup/a/memory.current", "10"),
            ];
            let system = System::new(&format!("high-{most}-{high}"), &files);
            let expected = FreeMemory { bytes: 999_990, bound: Bound::ControlGroup };
            assert_eq!(free_under(&system.0), Some(expected), "max {most}, high {high}");
        }
    }

    #[test]
    fn version_1_is_read_too_also_where_the_mount_is_the_group() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "5:cpu:/x\n4:memory:/docker/none\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "5000000"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "6000000"),
            ("sys/fs/cgroup/memory/memory.stat", "active_file 1\ntotal_active_file 2000000\n"),
        ];
        let system = System::new("v1", &files);
        let expected = FreeMemory { bytes: 1_000_000, bound: Bound::ControlGroup };
        assert_eq!(free_under(&system.0), Some(expected));
    }

    /// As `keel doctor` prints it.
    #[test]
    fn the_group_with_the_fewest_bytes_left_is_reported() {
        let group_of = |name: &str, most: &str, high: &str, group: &str| {
            let line = format!("0::{group}\n");
            let files = [
                MEMINFO,
                ("proc/self/cgroup", line.as_str()),
                ("sys/fs/cgroup/a/memory.max", most),
                ("sys/fs/cgroup/a/memory.high", high),
                ("sys/fs/cgroup/a/memory.current", "3500000\n"),
                ("sys/fs/cgroup/a/b/memory.max", "max\n"),
                ("sys/fs/cgroup/a/b/memory.current", "10\n"),
                ("sys/fs/cgroup/a/b/c/memory.max", "2000000\n"),
                ("sys/fs/cgroup/a/b/c/memory.current", "10\n"),
            ];
            let system = System::new(name, &files);
            let memory = SystemMemory::under(&system.0);
            assert_eq!((memory.total, memory.available), (Some(9000 * 1024), Some(8000 * 1024)));
            assert_eq!(memory.free(), free_under(&system.0).map(|free| free.bytes), "as plans have it");
            memory.group.map(|group| (group.limit, group.left))
        };
        assert_eq!(group_of("max", "4000000\n", "max\n", "/a/b/c"), Some((4_000_000, 500_000)));
        assert_eq!(group_of("high", "4000000\n", "3900000\n", "/a/b/c"), Some((3_900_000, 400_000)));
        assert_eq!(group_of("root", "4000000\n", "max\n", "/"), None);
        assert_eq!(group_of("large", "99000000\n", "max\n", "/a"), None, "more than there is limits nothing");
    }

    #[test]
    fn controllers_of_version_1_may_share_a_hierarchy() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "4:cpu,memory:/a\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "4000000\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "5000000\n"),
            ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "3000000\n"),
            ("sys/fs/cgroup/memory/a/memory.stat", "total_inactive_file 1000000\n"),
        ];
        let system = System::new("shared", &files);
        let group = GroupMemory { limit: 5_000_000, left: 3_000_000 };
        assert_eq!(SystemMemory::under(&system.0).group, Some(group));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_has_some() {
        assert!(free().is_some_and(|free| free.bytes > 1 << 20));
    }
}
