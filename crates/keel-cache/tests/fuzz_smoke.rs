//! Runs the functions of the fuzz targets on seeded mutations, for machines without a fuzzer.

#[path = "../fuzz/checks.rs"]
mod checks;

use checks::Bench;
use keel_testkit::random::{Random, mutations};
use serde_json::json;

const MUTATIONS: u64 = 3_000;
/// Replacements for parts of a header or index.
const STRANGE: [&str; 12] = [
    "0",
    "-1",
    "1",
    "null",
    "9",
    "18446744073709551615",
    "\"U32\"",
    "\"F16\"",
    "[]",
    "{}",
    "\"..\"",
    "\"/etc/passwd\"",
];

/// Replaces bytes, or a number or word as a whole.
fn mutate(text: &[u8], random: &mut Random) -> Vec<u8> {
    let mut text = text.to_vec();
    for _ in 0..1 + random.below(3) {
        let at = random.below(text.len());
        match random.below(4) {
            0 => text[at] = random.below(256) as u8,
            1 => drop(text.remove(at)),
            _ => {
                let is_part =
                    |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'"' | b'.' | b'_' | b'-');
                let start = text[..at].iter().rposition(|byte| !is_part(byte)).map_or(0, |i| i + 1);
                let end = text[at..].iter().position(|byte| !is_part(byte)).map_or(text.len(), |i| at + i);
                drop(text.splice(start..end.max(start), STRANGE[random.below(STRANGE.len())].bytes()));
            }
        }
        if text.is_empty() {
            break;
        }
    }
    text
}

fn survive(sound: &[u8], check: impl Fn(&[u8]) -> bool) {
    assert!(check(sound), "an undamaged file is accepted");
    let count = mutations(MUTATIONS);
    let accepted = (1..=count).filter(|seed| check(&mutate(sound, &mut Random::of_case(*seed))));
    let accepted = accepted.count() as u64;
    assert!(accepted > 0 && accepted < count, "{accepted} of {count} were accepted");
}

#[test]
fn damaged_files_of_sequences_are_refused_and_hold_nothing() {
    let file = Bench::of_this_thread(|bench| bench.saved(0, 300));
    assert!(Bench::of_this_thread(|bench| bench.file(&file)));
    for cut in [0, 7, 8, 9, file.len() / 2, file.len() - 1] {
        assert!(!Bench::of_this_thread(|bench| bench.file(&file[..cut])), "{cut} bytes");
    }
    survive(header_of(&file), |header| Bench::of_this_thread(|bench| bench.sequence(header)));
}

fn header_of(file: &[u8]) -> &[u8] {
    let length = u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize;
    &file[8..8 + length]
}

#[test]
fn files_without_their_first_pages_continue_from_exactly_these() {
    let continues = |header: &[u8]| Bench::of_this_thread(|bench| bench.continuation(header));
    for (first_page, tokens) in [(0, 300), (1, 256), (1, 300), (2, 512), (2, 600)] {
        let file = Bench::of_this_thread(|bench| bench.saved(first_page, tokens));
        assert!(continues(header_of(&file)), "{tokens} tokens from page {first_page}");
    }
    let file = Bench::of_this_thread(|bench| bench.saved(1, 600));
    let header = std::str::from_utf8(header_of(&file)).expect("JSON");
    for claimed in ["0", "2", "3", "-1", "1.0", "one", "", "18446744073709551615", "18446744073709551616"] {
        let other = header.replace("\"first_page\":\"1\"", &format!("\"first_page\":\"{claimed}\""));
        assert!(other != header && !continues(other.as_bytes()), "{claimed} pages");
    }
    for seed in 1..=mutations(MUTATIONS) {
        continues(&mutate(header.as_bytes(), &mut Random::of_case(seed)));
    }
}

#[test]
fn damaged_indexes_of_prefixes_lead_nowhere_else() {
    let crc32 = crc32fast::hash(b"text");
    let file = json!({"name": "0.safetensors", "bytes": 4, "crc32": crc32, "pictures": ["ab".repeat(32)]});
    let other = json!({"name": "1.safetensors", "bytes": 9, "crc32": 0, "pictures": []});
    let index = json!({"format": "keel-prefix-cache-2", "model": "a model", "files": [file, other]});
    survive(index.to_string().as_bytes(), |index| Bench::of_this_thread(|bench| bench.prefix_index(index)));
}

/// A file of few bytes on the disk can claim any number of tokens. They are counted before they are copied.
#[cfg(target_os = "linux")]
#[test]
fn a_file_with_more_tokens_than_memory_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let bytes = 1u64 << 40;
    let header = json!({"__metadata__": {"format": "keel-prompt-cache-1", "model": "a model"},
        "tokens": {"dtype": "U32", "shape": [bytes / 4], "data_offsets": [0, bytes]}})
    .to_string();
    let path = folder.path().join("sparse");
    let mut head = (header.len() as u64).to_le_bytes().to_vec();
    head.extend_from_slice(header.as_bytes());
    std::fs::write(&path, &head).expect("written");
    let file = std::fs::OpenOptions::new().write(true).open(&path).expect("it is there");
    file.set_len(head.len() as u64 + bytes).expect("a sparse file");
    let problem = Bench::of_this_thread(|bench| bench.refusal(&path));
    assert!(problem.contains("274877906944") && problem.contains("the context is 600"), "{problem}");
}
