//! Pages of code and constants of the program and of C's libraries.

/// Drops the pages of code and constants that this process has read so far: loading a model takes other code than
/// running it. Pages that are needed again come from the system's page cache within microseconds. This is only a hint:
/// where the system does not report its mappings, nothing happens.
pub fn give_back() {
    #[cfg(target_os = "linux")]
    linux::give_back();
}

#[cfg(target_os = "linux")]
mod linux {
    use std::ops::Range;
    use std::path::Path;
    use std::sync::OnceLock;

    /// When a page is used, the system also maps pages around it: 16, or as many as its cache holds together. It maps
    /// no pages of another mapping. So mappings are cut into pieces of this many bytes. With twice as many, a small
    /// model's process holds 1.2 MB more.
    const PIECE: usize = 8 << 10;

    /// A process may have 65,530 mappings where the system has its default. Threads and memory need the others.
    const PIECES_MAX: usize = 16 << 10;

    /// Libraries that stay until the process ends and are small. Those of a GPU have hundreds of megabytes, and NVML is
    /// unloaded: another mapping in its place must not be dropped.
    const LIBRARIES: [&str; 4] = ["libc.so", "libm.so", "libgcc_s.so", "ld-linux"];

    pub fn give_back() {
        static CODE: OnceLock<Vec<Range<usize>>> = OnceLock::new();
        for range in CODE.get_or_init(cut_code) {
            advise(range.clone(), libc::MADV_DONTNEED);
        }
    }

    /// Cuts the mappings of code into pieces and returns the mappings. Every other piece is marked as left out of core
    /// dumps, which splits the mapping; code is not in core dumps anyway.
    fn cut_code() -> Vec<Range<usize>> {
        let (Ok(maps), Ok(program)) =
            (std::fs::read_to_string("/proc/self/smaps"), std::fs::read_link("/proc/self/exe"))
        else {
            return Vec::new();
        };
        let mut code = unchanged_code(&maps, &program);
        code.truncate(within(&code, PIECES_MAX));
        for range in &code {
            for start in range.clone().step_by(2 * PIECE) {
                advise(start..range.end.min(start + PIECE), libc::MADV_DONTDUMP);
            }
        }
        code
    }

    /// How many of the first mappings make at most `most` pieces together.
    pub fn within(code: &[Range<usize>], most: usize) -> usize {
        let mut pieces = 0;
        code.iter()
            .take_while(|range| {
                pieces += range.len().div_ceil(PIECE);
                pieces <= most
            })
            .count()
    }

    fn advise(range: Range<usize>, advice: libc::c_int) {
        // SAFETY: the range lies within a private mapping of the program or one of `LIBRARIES`, which stays until the
        // process ends and cannot be written. None of its pages differs from the file, so a dropped page is read back
        // when it is used.
        unsafe { libc::madvise(range.start as *mut libc::c_void, range.len(), advice) };
    }

    /// Addresses of read-only mappings of the program and of `LIBRARIES`. Mappings in which the loader or a debugger
    /// has changed a page are left out: such pages differ from the file.
    pub fn unchanged_code(smaps: &str, program: &Path) -> Vec<Range<usize>> {
        let mut found = Vec::new();
        let mut mapping = None;
        for line in smaps.lines() {
            if let Some(changed) = line.strip_prefix("Anonymous:") {
                found.extend(mapping.take().filter(|_| changed.trim() == "0 kB"));
            } else if line.split_once(' ').is_some_and(|(first, _)| !first.ends_with(':')) {
                mapping = code(line, program);
            }
        }
        found
    }

    /// Addresses of a mapping `START-END PERMISSIONS OFFSET DEVICE INODE PATH`, if it is read-only code or constants.
    fn code(mapping: &str, program: &Path) -> Option<Range<usize>> {
        let mut words = mapping.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let is_constant = ["r-xp", "r--p"].contains(&words.next()?);
        let path = Path::new(words.nth(3)?);
        let name = path.file_name()?.to_str()?;
        let is_code = path == program || LIBRARIES.iter().any(|library| name.starts_with(library));
        let address = |text| usize::from_str_radix(text, 16).ok();
        (is_constant && is_code && path.is_absolute()).then_some(address(start)?..address(end)?)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn mappings_that_were_changed_or_can_be_are_left_alone() {
        let mapping = |head: &str, changed: usize| {
            format!("{head}\nSize:  8 kB\nRss:  8 kB\nAnonymous:  {changed} kB\nVmFlags: rd mr mw me \n")
        };
        let smaps = [
            mapping("1000-3000 r--p 00000000 fe:00 12                         /bin/keel", 0),
            mapping("3000-5000 r-xp 00002000 fe:00 12                         /bin/keel", 0),
            mapping("5000-6000 r--p 00004000 fe:00 12                         /bin/keel", 4),
            mapping("6000-7000 rw-p 00005000 fe:00 12                         /bin/keel", 0),
            mapping("7000-8000 r-xp 00000000 fe:00 13                         /lib/libc.so.6", 0),
            mapping("10000000-40000000 r-xp 00000000 fe:00 15                 /lib/libcublasLt.so.13", 0),
            mapping("50000000-50100000 r-xp 00000000 fe:00 16                 /lib/libnvidia-ml.so.1", 0),
            mapping("8000-9000 r-xs 00000000 fe:00 13                         /lib/libc.so.6", 0),
            mapping("9000-a000 r--p 00000000 fe:00 14                         /models/a.gguf", 0),
            mapping("a000-b000 r--p 00000000 00:00 0 ", 0),
            mapping("b000-c000 r-xp 00000000 00:00 0                          [vdso]", 0),
        ];
        let found = linux::unchanged_code(&smaps.concat(), Path::new("/bin/keel"));
        assert_eq!(found, [0x1000..0x3000, 0x3000..0x5000, 0x7000..0x8000]);
        assert_eq!(linux::unchanged_code("nonsense\n\n:\nAnonymous:\n1-2 r-xp", Path::new("/")), []);
    }

    /// A program of 200 MB would leave no mapping to the rest of the process.
    #[test]
    fn mappings_are_cut_only_as_far_as_the_system_can_bear() {
        let mappings = [0..16 << 10, 0..8 << 20, 0..200 << 20, 0..4096];
        assert_eq!(linux::within(&mappings, 16 << 10), 2);
        assert_eq!(linux::within(&mappings, 2), 1);
        assert_eq!(linux::within(&mappings, 1 << 20), 4);
    }

    #[test]
    fn code_that_was_given_back_still_runs() {
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("the system says what is mapped");
        let program = std::env::current_exe().expect("it has a name");
        assert!(!linux::unchanged_code(&maps, &program).is_empty());
        let text = |n: u32| format!("{n:>8.3e}");
        let before = text(12_345);
        for _ in 0..10 {
            give_back();
            assert_eq!(text(12_345), before);
        }
    }
}
