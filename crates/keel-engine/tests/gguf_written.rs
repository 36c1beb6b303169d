//! Fixtures converted to GGUF files, and those back to checkpoints, give the reference logits too.

mod common;

use std::path::Path;

use common::{all_logits, exact, expected, fixture, relative_error, runtime};
use keel_engine::Engine;
use keel_models::gguf::{CheckpointAsGguf, GgufAsCheckpoint, GgufParameters};
use keel_models::loading::{CheckpointParameters, Parameters};
use keel_testkit::fixtures::{HYBRID, PLAIN};
use keel_weights::Checkpoint;
use keel_weights::gguf::GgufFile;
use keel_weights::quantize::{GgufRecipe, SafetensorsForm, write_config, write_gguf, write_safetensors};
use serde_json::Value;

/// Fixtures that GGUF files can hold: all but those whose layers turn their input.
fn held() -> impl Iterator<Item = &'static str> {
    HYBRID.into_iter().chain(PLAIN)
}

fn check(name: &str, form: &str, folder: &Path, parameters: &dyn Parameters, json: &Value) {
    let mut engine = Engine::load(&runtime(2), parameters, json, exact(), &|_| ())
        .unwrap_or_else(|e| panic!("{name}, {form}: {e}"));
    let want = expected(folder);
    let (logits, mtp) = all_logits(&mut engine, &want.ids, false, want.mtp_logits.is_some());
    let error = relative_error(&logits, &want.logits);
    assert!(error <= 1e-4, "{name}, {form}: logits differ by {error:.1e}");
    if let Some(want) = want.mtp_logits {
        let error = relative_error(&mtp, &want);
        assert!(error <= 1e-4, "{name}, {form}: logits of the head differ by {error:.1e}");
    }
}

/// Converts a fixture there and back.
fn there_and_back(name: &str, folder: &Path, scratch: &Path) {
    let source = Checkpoint::open(folder).expect("the fixture opens");
    let config = keel_models::read_config(source.config()).expect("the config is complete");
    let tensors = CheckpointAsGguf::new(&source, &config).unwrap_or_else(|e| panic!("{name}: {e}"));
    let metadata = keel_models::gguf::metadata(source.config(), &config, tensors.has_mtp_head());
    let metadata = metadata.unwrap_or_else(|e| panic!("{name}: {e}"));
    let path = scratch.join(format!("{name}.gguf"));
    let recipe = GgufRecipe::from_name("F32").expect("a recipe");
    write_gguf(&tensors, &path, metadata, &recipe, &mut |_| ()).unwrap_or_else(|e| panic!("{name}: {e}"));

    let file = GgufFile::open(&path).expect("it was just written");
    let json = keel_models::gguf::config(&file).unwrap_or_else(|e| panic!("{name}: {e}"));
    let config = keel_models::read_config(&json).unwrap_or_else(|e| panic!("{name}: {e}"));
    check(name, "GGUF", folder, &GgufParameters::new(&file, &config), &json);

    let tensors = GgufAsCheckpoint::new(&file, &config).unwrap_or_else(|e| panic!("{name}: {e}"));
    let target = scratch.join(name);
    let form = SafetensorsForm::Dense(None);
    let (_, section) =
        write_safetensors(&tensors, &target, &Default::default(), &form, &mut |_| ()).expect("written");
    write_config(&target, &json, section).expect("written");
    let back = Checkpoint::open(&target).expect("it was just written");
    check(name, "back", folder, &CheckpointParameters(&back), back.config());
}

#[test]
fn fixtures_survive_the_way_there_and_back() {
    let scratch = tempfile::tempdir().expect("a temporary folder");
    for name in held() {
        if let Some(folder) = fixture(name) {
            there_and_back(name, &folder, scratch.path());
        }
    }
}

#[test]
fn what_a_file_cannot_say_is_refused() {
    let Some(folder) = fixture("qwen3_5_paro") else { return };
    let source = Checkpoint::open(&folder).expect("the fixture opens");
    let config = keel_models::read_config(source.config()).expect("the config is complete");
    let message = CheckpointAsGguf::new(&source, &config).err().expect("rotations have no place").to_string();
    assert!(message.contains("its input is rotated"), "{message}");
}
