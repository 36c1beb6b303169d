//! Runs the checks of the fuzz targets on seeded mutations of valid files, for machines without a fuzzer.

#[path = "../fuzz/checks.rs"]
mod checks;

use std::{collections::BTreeMap, panic, path::Path};

use keel_array::DType;
use keel_testkit::random::{Random, mutate, mutations};
use keel_weights::{SafetensorsWriter, TensorSpec};

const MUTATED_FILES: u64 = 20_000;

/// Byte strings with a meaning for the parser.
const TOKENS: [&[u8]; 14] = [
    b"0",
    b"-1",
    b"18446744073709551615",
    b"18446744073709551616",
    b"4294967296",
    b"\"a\":",
    b"\"__metadata__\":",
    b"null",
    b"[]",
    b"{}",
    b",",
    b"\"F6_E2M3\"",
    b"\xff",
    b"1e3",
];

/// Damages a file, or its first bytes, which declare the length of its JSON or its format.
fn damage(file: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..1 + random.below(3) {
        match random.below(7) {
            0 => {
                let declared = file.len().min(8);
                file[..declared].fill(random.below(256) as u8);
            }
            _ => mutate(file, &TOKENS, random),
        }
    }
}

/// Runs `check` on mutations of `sound`, and `repair`s some of them first. Both outcomes must occur: some mutations are
/// harmless, most are not.
fn survive(sound: &[u8], check: fn(&[u8]) -> bool, repair: impl Fn(&mut [u8])) {
    assert!(check(sound));
    let mut accepted = 0;
    let files = mutations(MUTATED_FILES);
    for seed in 1..=files {
        let mut file = sound.to_vec();
        let mut random = Random::of_case(seed);
        damage(&mut file, &mut random);
        if random.below(4) > 0 {
            repair(&mut file);
        }
        match panic::catch_unwind(|| check(&file)) {
            Ok(sound) => accepted += u64::from(sound),
            Err(cause) => {
                println!("seed {seed}: {}", String::from_utf8_lossy(&file));
                panic::resume_unwind(cause);
            }
        }
    }
    assert!(accepted > files / 100 && accepted < files * 9 / 10, "{accepted} accepted");
}

#[test]
fn mutated_safetensors_never_panic() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("seed.safetensors");
    let spec =
        |name: &str, dtype, shape: &[usize]| TensorSpec { name: name.into(), dtype, shape: shape.into() };
    let specs = [
        spec("a", DType::BF16, &[3, 5]),
        spec("b.weight", DType::U32, &[2, 1, 4]),
        spec("c", DType::F32, &[0]),
    ];
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let mut writer = SafetensorsWriter::create(&path, &specs, &metadata).unwrap();
    for spec in &specs {
        writer.append(&spec.name, &vec![63; spec.bytes().unwrap()]).unwrap();
    }
    writer.finish().unwrap();
    let sound = std::fs::read(&path).unwrap();
    let data_bytes: usize = specs.iter().map(|spec| spec.bytes().unwrap()).sum();
    // Most mutations make the length field wrong. Correct it, so that the JSON is parsed.
    survive(&sound, checks::safetensors, |file| {
        if let Some(json_bytes) = file.len().checked_sub(8 + data_bytes) {
            file[..8].copy_from_slice(&(json_bytes as u64).to_le_bytes());
        }
    });
}

#[test]
fn mutated_gguf_never_panics() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/reference.gguf");
    let sound = std::fs::read(path).unwrap();
    survive(&sound, checks::gguf, |file| {
        let magic = file.len().min(8);
        file[..magic].copy_from_slice(&b"GGUF\x03\0\0\0"[..magic]);
    });
}

#[test]
fn mutated_configs_never_panic() {
    let sound = br#"{"quantization": {"group_size": 64, "bits": 4, "mode": "affine",
        "lm_head": {"group_size": 32, "bits": 8}, "model.layers.0.mlp.gate": false}}"#;
    survive(sound, checks::config, |_| ());
}
