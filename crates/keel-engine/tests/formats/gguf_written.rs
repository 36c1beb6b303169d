//! Fixtures converted to GGUF files, and these files converted back to checkpoints, also give the reference logits.

use std::path::{Path, PathBuf};

use crate::common::splitting::{self, backends, end, load_on};
use crate::common::{all_logits, engine, exact, expected, fixture, relative_error, runtime};
use keel_engine::{Engine, EngineOptions};
use keel_models::SumOrder;
use keel_models::gguf::{CheckpointAsGguf, GgufAsCheckpoint, GgufParameters};
use keel_models::loading::{CheckpointParameters, Parameters};
use keel_testkit::fixtures::{HYBRID, PLAIN};
use keel_testkit::fixtures_plain::{OTHERS, other_fixture};
use keel_weights::Checkpoint;
use keel_weights::gguf::GgufFile;
use keel_weights::quantize::{
    GgufRecipe, RowSource, SafetensorsForm, write_config, write_gguf, write_safetensors,
};
use serde_json::Value;

/// Fixtures that GGUF files can hold. These cannot be held:
///
/// - fixtures whose layers rotate their input;
/// - `ministral`: a file of its architecture cannot say which layers have a window;
/// - `smollm3`: such a file can only say that every fourth layer has no positions.
fn held() -> impl Iterator<Item = (&'static str, PathBuf)> {
    let own = HYBRID.into_iter().chain(PLAIN).map(|name| (name, fixture(name)));
    let others = OTHERS.into_iter().filter(|name| !["ministral", "smollm3"].contains(name));
    own.chain(others.filter_map(|name| Some((name, other_fixture(name)?))))
}

fn check_logits(what: &str, want: (&[u32], &[f32]), parameters: &dyn Parameters, json: &Value) {
    let mut engine = Engine::load(&runtime(2), parameters, json, exact(), &|_| ())
        .unwrap_or_else(|e| panic!("{what}: {e}"));
    let (logits, _) = all_logits(&mut engine, want.0, false, false);
    let error = relative_error(&logits, want.1);
    assert!(error <= 1e-4, "{what}: logits differ by {error:.1e}");
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

/// Converts a checkpoint there and back. Calls `check` with each form and its name.
fn convert(name: &str, folder: &Path, scratch: &Path, mut check: impl FnMut(&str, &dyn Parameters, &Value)) {
    let source = Checkpoint::open(folder).expect("the checkpoint opens");
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
    check("GGUF", &GgufParameters::new(&file, &config), &json);

    let tensors = GgufAsCheckpoint::new(&file, &config).unwrap_or_else(|e| panic!("{name}: {e}"));
    let target = scratch.join(name);
    let form = SafetensorsForm::Dense(None);
    let (_, section) =
        write_safetensors(&tensors, &target, &Default::default(), &form, &mut |_| ()).expect("written");
    write_config(&target, &json, section).expect("written");
    let back = Checkpoint::open(&target).expect("it was just written");
    check("back", &CheckpointParameters(&back), back.config());
}

/// Converts a fixture.
fn there_and_back(name: &str, folder: &Path, scratch: &Path) {
    convert(name, folder, scratch, |form, parameters, json| check(name, form, folder, parameters, json));
}

/// Converts a checkpoint whose logits these are.
fn there_and_back_to(name: &str, folder: &Path, scratch: &Path, ids: &[u32], logits: &[f32]) {
    convert(name, folder, scratch, |form, parameters, json| {
        check_logits(&format!("{name}, {form}"), (ids, logits), parameters, json);
    });
}

#[test]
fn fixtures_survive_the_way_there_and_back() {
    let scratch = tempfile::tempdir().expect("a temporary folder");
    for (name, folder) in held() {
        there_and_back(name, &folder, scratch.path());
    }
}

/// Qwen3-Next's checkpoints have such a head. A file's number of blocks would not count its layers.
#[test]
fn a_head_that_the_config_does_not_count_is_left_out() {
    let scratch = tempfile::tempdir().expect("a temporary folder");
    let folder = fixture("qwen3_5");
    let source = Checkpoint::open(&folder).expect("the checkpoint opens");
    let mut json = source.config().clone();
    json["text_config"]["mtp_num_hidden_layers"] = Value::Null;
    let config = keel_models::read_config(&json).expect("the config is complete");
    let tensors = CheckpointAsGguf::new(&source, &config).expect("all other tensors have names");
    assert!(!tensors.has_mtp_head());
    for spec in tensors.tensors().expect("all types are known") {
        let block =
            spec.name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        assert!(block.is_none_or(|block| block < config.layers.len()), "{}", spec.name);
    }
    let metadata = keel_models::gguf::metadata(&json, &config, tensors.has_mtp_head()).expect("known");
    let path = scratch.path().join("headless.gguf");
    let recipe = GgufRecipe::from_name("F32").expect("a recipe");
    write_gguf(&tensors, &path, metadata, &recipe, &mut |_| ()).expect("written");
    let file = GgufFile::open(&path).expect("it was just written");
    let json = keel_models::gguf::config(&file).expect("complete");
    let config = keel_models::read_config(&json).expect("complete");
    let want = expected(&folder);
    let parameters = GgufParameters::new(&file, &config);
    check_logits("headless", (&want.ids[..], &want.logits[..]), &parameters, &json);
}

/// Logits of a file in two shares: to rounding those of the whole file, and in the fixed order of sums its bits. False
/// if the model does not divide.
fn check_shares(name: &str, ids: &[u32], parameters: &dyn Parameters, json: &Value) -> bool {
    for sums in [SumOrder::ByDevice, SumOrder::Fixed] {
        let options = EngineOptions { sums, ..exact() };
        let loaded = splitting::parts((parameters, json), options, (1, 2))
            .and_then(|parts| load_on((parameters, json), options, backends(2, false), &parts));
        let mut shares = match loaded {
            Ok(engine) => engine,
            Err(error) => {
                assert!(error.to_string().contains("--split pipeline"), "{name}: {error}");
                return false;
            }
        };
        let mut whole = Engine::load(&runtime(1), parameters, json, options, &|_| ()).expect("it fits");
        for one_by_one in [false, true] {
            let got = all_logits(&mut shares, ids, one_by_one, false).0;
            let want = all_logits(&mut whole, ids, one_by_one, false).0;
            let error = relative_error(&got, &want);
            assert!(error <= 1e-5, "{name}, {sums:?}: logits of two shares differ by {error:.1e}");
            assert!(sums == SumOrder::ByDevice || got == want, "{name}: other bits than on one device");
        }
        end(shares);
    }
    true
}

#[test]
fn files_are_split_by_shares() {
    let scratch = tempfile::tempdir().expect("a temporary folder");
    let (mut split, mut recurrent) = (0, 0);
    for (name, folder) in held() {
        convert(name, &folder, scratch.path(), |form, parameters, json| {
            if form == "GGUF" && check_shares(name, &expected(&folder).ids, parameters, json) {
                split += 1;
                recurrent += usize::from(name.starts_with("qwen3_5") || name == "qwen3_next");
            }
        });
    }
    assert!(
        split > 4 && recurrent > 1,
        "{split} files were split, {recurrent} of them with recurrent layers"
    );
}

/// The writer's answer for a fixture whose config is changed.
fn written(name: &str, change: impl FnOnce(&mut Value)) -> Option<Result<(), String>> {
    let folder = other_fixture(name)?;
    let source = Checkpoint::open(&folder).expect("the fixture opens");
    let mut json = source.config().clone();
    change(&mut json);
    let config = keel_models::read_config(&json).expect("the config is complete");
    let tensors = CheckpointAsGguf::new(&source, &config).expect("all tensors have names");
    let metadata = keel_models::gguf::metadata(&json, &config, tensors.has_mtp_head());
    Some(metadata.map(drop).map_err(|error| error.to_string()))
}

#[test]
fn patterns_of_layers_that_a_file_cannot_say_are_refused() {
    for (name, what) in [("ministral", "a window"), ("smollm3", "no positions")] {
        let Some(outcome) = written(name, |_| ()) else { continue };
        let message = outcome.expect_err("the file would be another model");
        assert!(message.contains(what), "{name}: {message}");
    }
}

/// With every fourth layer without positions, each of the fixture's three layers has them. The tensors are the
/// fixture's.
#[test]
fn the_usual_pattern_of_smollm3_survives_the_way_there_and_back() {
    let Some(folder) = other_fixture("smollm3") else { return };
    let scratch = tempfile::tempdir().expect("a temporary folder");
    let usual = scratch.path().join("usual");
    std::fs::create_dir(&usual).expect("the folder is writable");
    std::fs::copy(folder.join("model.safetensors"), usual.join("model.safetensors")).expect("copied");
    let source = Checkpoint::open(&folder).expect("the fixture opens");
    let mut json = source.config().clone();
    json["no_rope_layers"] = Value::Null;
    json["no_rope_layer_interval"] = 4.into();
    std::fs::write(usual.join("config.json"), json.to_string()).expect("the folder is writable");
    let ids = expected(&folder).ids;
    let logits = all_logits(&mut engine(&usual, &runtime(2), exact()), &ids, false, false).0;
    there_and_back_to("smollm3", &usual, scratch.path(), &ids, &logits);
}

/// The tensors are right, and the config is that of another model.
#[test]
fn tensors_with_other_rows_than_the_config_says_are_refused_either_way() {
    let scratch = tempfile::tempdir().expect("a temporary folder");
    for (name, part) in [("llama", ".self_attn."), ("qwen3_5", ".linear_attn.")] {
        let source = Checkpoint::open(&fixture(name)).expect("the checkpoint opens");
        let config = keel_models::read_config(source.config()).expect("the config is complete");
        let tensors = CheckpointAsGguf::new(&source, &config).expect("all tensors have names");
        let metadata = keel_models::gguf::metadata(source.config(), &config, tensors.has_mtp_head());
        let path = scratch.path().join(format!("{name}.gguf"));
        let recipe = GgufRecipe::from_name("F32").expect("a recipe");
        write_gguf(&tensors, &path, metadata.expect("known"), &recipe, &mut |_| ()).expect("written");
        let file = GgufFile::open(&path).expect("it was just written");

        let mut other = config.clone();
        other.head_dim *= 64;
        let recurrent = other.recurrent.iter_mut();
        recurrent.for_each(|recurrent| recurrent.value_heads += recurrent.key_heads);
        let there = CheckpointAsGguf::new(&source, &other).err().expect("the rows do not fit").to_string();
        assert!(there.contains(part) && there.contains("the config implies"), "{there}");
        let back = GgufAsCheckpoint::new(&file, &other).err().expect("the rows do not fit").to_string();
        assert!(back.contains("the config implies"), "{back}");
    }
}

#[test]
fn what_a_file_cannot_say_is_refused() {
    let folder = fixture("qwen3_5_paro");
    let source = Checkpoint::open(&folder).expect("the fixture opens");
    let config = keel_models::read_config(source.config()).expect("the config is complete");
    let message = CheckpointAsGguf::new(&source, &config).err().expect("rotations have no place").to_string();
    assert!(message.contains("its input is rotated"), "{message}");
}
