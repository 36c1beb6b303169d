//! A number for the sources on which a leader and a node must agree: their messages, the operations and programs in
//! them, and the kernels with their memory.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

const SOURCES: [&str; 5] =
    ["keel-array/src", "keel-cpu/src", "keel-cuda/src", "keel-cuda/kernels", "keel-remote/src"];

fn main() -> Result<(), Box<dyn Error>> {
    let crates = Path::new("..");
    let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
    for folder in SOURCES {
        println!("cargo:rerun-if-changed=../{folder}");
        let mut files = Vec::new();
        collect(&crates.join(folder), &mut files)?;
        files.sort();
        for file in files {
            hash.add(file.to_string_lossy().as_bytes());
            hash.add(&fs::read(&file)?);
        }
    }
    println!("cargo:rustc-env=KEEL_SOURCES={:016x}", hash.0);
    Ok(())
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() { collect(&path, files)? } else { files.push(path) }
    }
    Ok(())
}

/// FNV-1a, which is the same on every machine.
struct Fnv(u64);

impl Fnv {
    fn add(&mut self, bytes: &[u8]) {
        let length = (bytes.len() as u64).to_le_bytes();
        for byte in length.iter().chain(bytes) {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}
