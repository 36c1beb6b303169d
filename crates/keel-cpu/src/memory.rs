//! Memory that the system has free for this process.

use std::path::{Path, PathBuf};

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

/// Free memory now; `None` where the system does not report it (other systems than Linux).
///
/// It is the minimum of `MemAvailable` and of the rest of the limit of each control group above the process (version 1
/// or 2). File pages in memory count as free, because the system drops them when it needs memory.
pub fn free() -> Option<FreeMemory> {
    free_under(Path::new("/"))
}

/// Like [`free`], with the system's files under `root`.
fn free_under(root: &Path) -> Option<FreeMemory> {
    let meminfo = std::fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let machine = FreeMemory { bytes: kib(&meminfo, "MemAvailable:")? * 1024, bound: Bound::Machine };
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let of_groups = groups.lines().filter_map(|line| left_of_line(root, line)).min();
    Some(match of_groups {
        Some(bytes) if bytes < machine.bytes => FreeMemory { bytes, bound: Bound::ControlGroup },
        _ => machine,
    })
}

fn kib(meminfo: &str, key: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// Names of the files of one version of control groups.
struct Version {
    mount: &'static str,
    /// The lowest of these is the limit. Above `memory.high` a process is not killed, but slowed down until it gives
    /// memory back.
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

/// Bytes left by the groups of one line of `/proc/self/cgroup`: `ID:CONTROLLERS:PATH`.
fn left_of_line(root: &Path, line: &str) -> Option<u64> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (controllers, path) = (parts.next()?, parts.next()?);
    let version = match controllers {
        "" => V2,
        names if names.split(',').any(|name| name == "memory") => V1,
        _ => return None,
    };
    let mount = root.join(version.mount);
    let mut group: PathBuf = mount.join(path.trim_start_matches('/'));
    // In a container the mount may be the group itself, whatever the path says.
    let mut least = left(&mount, &version);
    while group.starts_with(&mount) && group != mount {
        least = least.into_iter().chain(left(&group, &version)).min();
        group.pop();
    }
    least
}

/// Bytes left of the limit of one group; `None` without a limit.
fn left(group: &Path, version: &Version) -> Option<u64> {
    let number = |file: &str| std::fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    // Without a limit, version 2 writes "max". Version 1 writes a number beyond any memory, which is never the minimum.
    let limit = version.limits.iter().filter_map(|file| number(file)).min()?;
    let used = number(version.used)?;
    let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let entry = |key: &str| stat.lines().find_map(|line| line.strip_prefix(key)?.trim().parse::<u64>().ok());
    let file_pages: u64 = version.file_pages.iter().filter_map(|key| entry(key)).sum();
    Some(limit.saturating_sub(used.saturating_sub(file_pages)))
}

#[cfg(test)]
mod tests {
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

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_has_some() {
        assert!(free().is_some_and(|free| free.bytes > 1 << 20));
    }
}
