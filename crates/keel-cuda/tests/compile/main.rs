//! Every kernel compiles for every supported generation of GPUs. This needs the compiler, but no GPU.

mod attention;
mod elementary;
mod keys;
mod products;
mod rows;
mod sequences;

use keel_cuda::kernels::{KernelKey, SOURCES, Source};
use keel_cuda::{Architecture, CudaError, compile};
use keys::Keys;
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

const ARCHITECTURES: [(u32, u32); 3] = [(8, 0), (9, 0), (12, 0)];

/// At least one compilation for each entry point, together with its variants.
fn keys() -> Vec<KernelKey> {
    let mut keys = Keys::default();
    let families: [fn(&mut Keys); 6] = [
        elementary::keys,
        rows::keys,
        products::keys,
        products::block_keys,
        sequences::keys,
        attention::keys,
    ];
    families.into_iter().for_each(|family| family(&mut keys));
    keys.0
}

/// Names of the entry points of a source: the word before the first parenthesis that opens parameters.
fn entries(source: &Source) -> Vec<&str> {
    let kernels = source.text.split("extern \"C\" __global__").skip(1);
    let name = |text: &'static str| {
        let text = match text.trim_start().strip_prefix("void __launch_bounds__(") {
            Some(bounds) => bounds.split_once(')').map_or(bounds, |(_, rest)| rest),
            None => text,
        };
        let head = text.split('(').next().unwrap_or("").trim_end();
        head.rsplit(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or("")
    };
    kernels.map(name).collect()
}

#[test]
fn every_entry_point_is_in_the_list() {
    let keys = keys();
    for source in SOURCES {
        for entry in entries(source) {
            let listed = keys.iter().any(|key| key.file == source.file && key.entry == entry);
            assert!(listed, "{}: {entry} is compiled by no test", source.file);
        }
    }
}

/// A launch lets all kernels overlap except a user's. A kernel that does not wait would run before its input is there.
#[test]
fn every_kernel_waits_for_its_inputs() {
    for source in SOURCES {
        for body in source.text.split("extern \"C\" __global__").skip(1) {
            let waits = body.contains("take_turn();") || body.contains("wait_for_inputs();");
            let name = body.split('(').next().unwrap_or_default();
            assert!(waits, "{}: {name} does not wait", source.file);
        }
    }
}

/// Whether machine code has an entry point: a section is named after it.
fn holds_entry(code: &[u8], entry: &str) -> bool {
    let section = format!(".text.{entry}\0").into_bytes();
    code.windows(section.len()).any(|bytes| bytes == section)
}

/// A compilation: compute capability, and the entry points that it must hold.
type Program<'k> = ((u32, u32), Vec<&'k KernelKey>);

/// Keys grouped into programs, each of which is compiled once: the same file with the same constants for the same
/// architecture.
fn programs<'k>(keys: impl Iterator<Item = ((u32, u32), &'k KernelKey)>) -> Vec<Program<'k>> {
    let mut programs = HashMap::new();
    for (capability, key) in keys {
        let keys: &mut Vec<_> = programs.entry((capability, key.program())).or_default();
        keys.push(key);
    }
    programs.into_iter().map(|((capability, ..), keys)| (capability, keys)).collect()
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    let keys = keys();
    let hoppers = |key: &KernelKey| {
        let has = |name, value: &str| key.defines.contains(&(name, value.into()));
        key.entry == "attention_prefill_wide" || has("BULK", "1") || has("BT", "256")
    };
    // Ampere has no 8-bit floats.
    let lacks = |key: &KernelKey, capability| key.file == "fp8.cu" && capability < (8, 9);
    let programs = programs(
        ARCHITECTURES
            .into_iter()
            .flat_map(|capability| keys.iter().map(move |key| (capability, key)))
            .filter(|(capability, key)| *capability == (9, 0) || !hoppers(key)),
    );
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let compile_all = || {
        while let Some((capability, keys)) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
            match compile(keys[0], Architecture { capability: *capability, is_portable: false }) {
                Ok(code) => {
                    assert!(!code.is_empty(), "{}", keys[0].name());
                    // An entry point does not exist if a constant that it needs is missing.
                    for key in keys.iter().filter(|key| !lacks(key, *capability)) {
                        if !holds_entry(&code, key.entry) {
                            let failure = format!("{} has no code", key.name());
                            failures.lock().expect("no test panics").push(failure);
                        }
                    }
                }
                Err(error @ CudaError::Missing { .. })
                    if std::env::var_os("KEEL_REQUIRE_NVRTC").is_none() =>
                {
                    keel_testkit::skipped!("needs the compiler of kernels: {error}");
                    return;
                }
                Err(error) => failures.lock().expect("no test panics").push(error.to_string()),
            }
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..workers).for_each(|_| _ = scope.spawn(compile_all)));
    let failures = failures.into_inner().expect("no test panics");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// A compiled program holds all entry points that its constants allow, so entry points with the same constants need it
/// only once.
#[test]
fn entry_points_with_the_same_constants_are_one_program() {
    let both = |entry| KernelKey::new(SOURCES[0], entry).define("DIM_N", 96);
    let (first, second) = (both("first"), both("second"));
    let of_other_constants = KernelKey::new(SOURCES[0], "first").define("DIM_N", 97);
    let of_other_file = KernelKey::new(SOURCES[1], "first").define("DIM_N", 96);
    let keys = [&first, &of_other_constants, &second, &of_other_file];
    let programs = programs(keys.into_iter().flat_map(|key| [((8, 0), key), ((9, 0), key)]));
    assert_eq!(programs.len(), 2 * 3, "three programs for each of two architectures");
    assert_eq!(programs.iter().map(|(_, keys)| keys.len()).sum::<usize>(), 2 * 4, "no key is lost");
    for (capability, keys) in &programs {
        let entries: Vec<_> = keys.iter().map(|key| key.entry).collect();
        let is_shared = keys[0].program() == first.program();
        let want = if is_shared { &["first", "second"][..] } else { &["first"] };
        assert_eq!(entries, want, "{capability:?}: {}", keys[0].name());
    }
}
