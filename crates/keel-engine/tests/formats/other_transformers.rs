//! Plain transformers of other families against their reference, in both regimes: as the reference spells them, and as
//! they are published.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{all_logits, device, engine, exact, expected, greedy, relative_error};
use keel_array::Compute;
use keel_engine::EngineOptions;
use keel_testkit::fixtures_plain::{OTHERS, other_fixture};

/// As in `fixtures.rs`.
const ERROR_MAX: f64 = 1e-4;

fn fixtures() -> impl Iterator<Item = (&'static str, PathBuf)> {
    OTHERS.into_iter().filter_map(|name| Some((name, other_fixture(name)?)))
}

fn error_of(folder: &Path, one_by_one: bool) -> f64 {
    let want = expected(folder);
    let mut engine = engine(folder, &device(), exact());
    relative_error(&all_logits(&mut engine, &want.ids, one_by_one, false).0, &want.logits)
}

#[test]
fn logits_match_the_reference_in_both_regimes() {
    let mut wrong = Vec::new();
    for (name, folder) in fixtures() {
        for one_by_one in [false, true] {
            let error = error_of(&folder, one_by_one);
            println!("{name}, one by one {one_by_one}: {error:.1e}");
            if error > ERROR_MAX {
                wrong.push(format!("{name}, one by one {one_by_one}: logits differ by {error:.1e}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn configs_as_they_are_published_give_the_same_logits() {
    let scratch = tempfile::tempdir().expect("a temporary folder");
    for (name, folder) in fixtures() {
        let published = folder.join("config.published.json");
        if !published.exists() {
            continue;
        }
        let target = scratch.path().join(name);
        fs::create_dir(&target).expect("the folder is writable");
        fs::copy(published, target.join("config.json")).expect("copied");
        for file in ["model.safetensors", "expected.safetensors"] {
            fs::copy(folder.join(file), target.join(file)).expect("copied");
        }
        let error = error_of(&target, false);
        assert!(error <= ERROR_MAX, "{name}: logits differ by {error:.1e}");
    }
}

#[test]
fn greedy_tokens_match_the_reference() {
    for (name, folder) in fixtures() {
        let want = expected(&folder);
        let reference = want.greedy.expect("all of them have some").tokens;
        let mut engine = engine(&folder, &device(), exact());
        assert_eq!(greedy(&mut engine, &want.ids, reference.len()), reference, "{name}");
    }
}

/// A prompt of several steps of the smallest size, with a partial chunk at the end.
fn long_prompt(ids: &[u32]) -> Vec<u32> {
    ids.iter().cycle().take(300).enumerate().map(|(i, id)| (id + i as u32 * 7) % 256).collect()
}

#[test]
fn neither_the_prefill_step_nor_neighbours_change_a_bit() {
    for (name, folder) in fixtures() {
        let prompt = long_prompt(&expected(&folder).ids);
        let logits = |prefill_step| {
            let options = EngineOptions { prefill_step, compute: Compute::Auto, ..exact() };
            all_logits(&mut engine(&folder, &device(), options), &prompt, false, false).0
        };
        assert!(logits(64) == logits(2048), "{name}: steps of 64 give other bits");
        let options = EngineOptions { compute: Compute::Auto, ..exact() };
        let mut engine = engine(&folder, &device(), options);
        let alone = [70, 33].map(|len| greedy(&mut engine, &prompt[..len], 12));
        let mut sequences = Vec::new();
        let mut logits = Vec::new();
        for (len, tokens) in [70, 33].into_iter().zip(&alone) {
            let mut sequence = engine.open().expect("a slot is free");
            engine.prefill(&mut sequence, &prompt[..len], &mut logits, &mut |_| ()).expect("runs");
            assert_eq!(crate::common::argmax(&logits), tokens[0], "{name}");
            sequences.push(sequence);
        }
        for at in 1..12 {
            let last = [alone[0][at - 1], alone[1][at - 1]];
            engine.decode(&mut sequences.iter_mut().collect::<Vec<_>>(), &last).expect("runs");
            for (row, tokens) in alone.iter().enumerate() {
                engine.logits(row, &mut logits).expect("there");
                assert_eq!(crate::common::argmax(&logits), tokens[at], "{name}, row {row}, token {at}");
            }
        }
        sequences.into_iter().for_each(|sequence| engine.release(sequence));
        assert!(engine.cache().is_idle());
    }
}
