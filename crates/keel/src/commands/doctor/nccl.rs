//! NCCL, which a model on several GPUs needs. Its file is looked for where the system's loader looks: opening a library
//! takes unsafe code, which this crate forbids.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use keel_cuda::Version;
use keel_cuda::nccl::{NAMES, missing, refusal};
use serde_json::{Value, json};

/// Paths of libraries in the loader's cache, each with a zero byte after it.
const CACHE: &str = "/etc/ld.so.cache";
/// Folders that the loader knows by itself.
const USUAL: [&str; 6] =
    ["/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"];

/// The library's file.
#[derive(Debug, PartialEq, Eq)]
pub struct Nccl {
    pub file: PathBuf,
    /// As the file's full name tells it.
    pub version: Option<Version>,
}

impl Nccl {
    /// Looks for the library.
    pub fn look() -> Option<Nccl> {
        let named = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        Nccl::find(&named, &fs::read(CACHE).unwrap_or_default(), &USUAL.map(Path::new))
    }

    /// The library in the folders of `LD_LIBRARY_PATH`, in the loader's cache or in the usual folders.
    fn find(named: &OsStr, cache: &[u8], usual: &[&Path]) -> Option<Nccl> {
        let file = NAMES.iter().find_map(|name| {
            let in_folder = |folder: &Path| Some(folder.join(name)).filter(|file| file.is_file());
            // A variable that is not set reads as one empty name.
            let mut folders = std::env::split_paths(named).filter(|folder| !folder.as_os_str().is_empty());
            let in_named = folders.find_map(|folder| in_folder(&folder));
            let in_usual = || usual.iter().find_map(|folder| in_folder(folder));
            in_named.or_else(|| in_cache(cache, name)).or_else(in_usual)
        })?;
        let version = version_of(&file);
        Some(Nccl { file, version })
    }
}

fn in_cache(cache: &[u8], name: &str) -> Option<PathBuf> {
    let end = format!("/{name}");
    let paths = cache.split(|byte| *byte == 0).filter_map(|path| std::str::from_utf8(path).ok());
    let mut files = paths.filter(|path| path.starts_with('/') && path.ends_with(&end)).map(PathBuf::from);
    files.find(|file| file.is_file())
}

/// Packages name the file with its version, `libnccl.so.2.27.3`, and link the short names to it.
fn version_of(file: &Path) -> Option<Version> {
    let full = file.canonicalize().ok()?;
    let (_, version) = full.file_name()?.to_str()?.split_once(".so.")?;
    let mut parts = version.split('.').map(str::parse);
    Some((parts.next()?.ok()?, parts.next()?.ok()?))
}

/// The reason why several GPUs cannot exchange arrays, in the words of the error that a run would give.
pub fn problem(found: Option<&Nccl>) -> Option<String> {
    match found {
        None => Some(missing().to_string()),
        Some(nccl) => refusal(nccl.version?),
    }
}

/// The library in a report for people.
pub fn in_words(found: Option<&Nccl>) -> String {
    match found {
        Some(Nccl { file, version: Some((major, minor)) }) => format!("{major}.{minor}, {}", file.display()),
        Some(Nccl { file, version: None }) => file.display().to_string(),
        None => format!("none ({} was not found)", NAMES[0]),
    }
}

/// The same as JSON.
pub fn to_json(found: Option<&Nccl>) -> Value {
    let version = found.and_then(|nccl| nccl.version).map(|(major, minor)| format!("{major}.{minor}"));
    let path = found.map(|nccl| nccl.file.display().to_string());
    json!({"version": version, "path": path, "problem": problem(found)})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_found_where_the_loader_finds_it() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let [named, cached, usual] = ["named", "cached", "usual"].map(|name| root.path().join(name));
        let cache = format!("glibc-ld.so.cache1.1\0libnccl.so.2\0{}\0", cached.join(NAMES[0]).display());
        let find =
            || Nccl::find(named.as_os_str(), cache.as_bytes(), &[usual.as_path()]).map(|found| found.file);
        assert_eq!(find(), None);
        // The first name is better than the first folder.
        for (folder, name) in
            [(&named, NAMES[1]), (&usual, NAMES[0]), (&cached, NAMES[0]), (&named, NAMES[0])]
        {
            fs::create_dir_all(folder).expect("writable");
            fs::write(folder.join(name), "").expect("writable");
            assert_eq!(find(), Some(folder.join(name)));
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_link_leads_to_the_version() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let find = || Nccl::find(root.path().as_os_str(), &[], &[]).expect("it is there");
        fs::write(root.path().join("libnccl.so.2.12.7"), "").expect("writable");
        std::os::unix::fs::symlink("libnccl.so.2.12.7", root.path().join(NAMES[0])).expect("writable");
        assert_eq!(find().version, Some((2, 12)));
        let too_old = problem(Some(&find()));
        assert_eq!(
            too_old.as_deref(),
            Some("libnccl.so.2 is version 2.12, and 2.18 or newer is needed: update it")
        );
        fs::remove_file(root.path().join(NAMES[0])).expect("writable");
        fs::write(root.path().join(NAMES[0]), "").expect("writable");
        assert_eq!((find().version, problem(Some(&find()))), (None, None));
    }
}
