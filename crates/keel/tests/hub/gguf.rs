//! GGUF models of a hub: one file of several, in parts, with a vision tower.

use super::{blobs, common, files_asked, refused, tokens};
use common::hub::{Hub, Manners};
use common::{arg, json, stderr, succeed};
use keel_testkit::fixtures::{MmprojForm, mmproj, vlm_fixture};
use keel_weights::gguf::{GgufEntry, GgufFile, GgufMetadata, GgufTensorSpec, GgufWriter};
use keel_weights::quantize::metadata_of;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

#[test]
fn one_of_several_gguf_files_is_picked() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let demo = common::demo();
    let file = folder.path().join("demo.gguf");
    succeed(&["quantize", arg(&demo), arg(&file), "--type", "Q8_0"]);
    let bytes = std::fs::read(&file).expect("written");
    let other = |name: &str| (name.to_string(), vec![0; 20_000]);
    let files =
        vec![other("demo-Q4_K_M.gguf"), ("demo-Q8_0.gguf".into(), bytes), other("x/mmproj-Q8_0.gguf")];
    let hub = Hub::start(files, Manners::default());
    let home = tempfile::tempdir().expect("a temporary folder");
    let how = ["--raw", "--max-tokens", "8", "--temperature", "0", "--json"];
    let run = |model| {
        hub.keel(home.path(), &[&["generate", "Once upon a time", "--model", model], &how[..]].concat(), &[])
    };
    let from_disk = json(&[&["generate", "Once upon a time", "--model", arg(&file)], &how[..]].concat());
    assert_eq!(tokens(&run("owner/name:q8_0")), from_disk["tokens"]);
    assert_eq!(files_asked(&hub.take_asked()), ["demo-Q8_0.gguf"]);
    assert_eq!(tokens(&run("owner/name:Q8_0")), from_disk["tokens"]);
    assert_eq!(hub.take_asked(), []);
    refused(&run("owner/name:Q2_K"), "pick one with owner/name:CODING of demo-Q4_K_M.gguf, demo-Q8_0.gguf");
}

/// Writes the tensors of a file in turn to two files, the first of which has the metadata.
fn split_in_two(whole: &Path, stem: &Path) -> [PathBuf; 2] {
    let file = GgufFile::open(whole).expect("a GGUF file");
    [0, 1].map(|number| {
        let path = PathBuf::from(format!("{}-0000{}-of-00002.gguf", stem.display(), number + 1));
        let mut metadata = if number == 0 { metadata_of(&file) } else { GgufMetadata::default() };
        metadata.u32("split.no", number);
        metadata.u32("split.count", 2);
        let own = || file.entries().skip(number as usize).step_by(2);
        let spec = |(name, entry): (&str, &GgufEntry)| GgufTensorSpec {
            name: name.into(),
            kind: entry.kind.expect("a known type"),
            shape: entry.shape.clone(),
        };
        let specs: Vec<GgufTensorSpec> = own().map(spec).collect();
        let mut writer = GgufWriter::create(&path, &metadata, &specs).expect("writable");
        for (name, _) in own() {
            writer.append(name, file.bytes_of(name).expect("there")).expect("writable");
        }
        writer.finish().expect("writable");
        path
    })
}

/// The name and the bytes of a file.
fn named(path: &Path) -> (String, Vec<u8>) {
    let name = path.file_name().expect("a name").to_string_lossy().into_owned();
    (name, std::fs::read(path).expect("written"))
}

#[test]
fn a_gguf_model_in_parts_is_pulled_and_run_whole() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (demo, whole) = (common::demo(), folder.path().join("demo.gguf"));
    succeed(&["quantize", arg(&demo), arg(&whole), "--type", "Q8_0"]);
    let parts = split_in_two(&whole, &folder.path().join("demo-Q8_0"));
    let how = ["--raw", "--max-tokens", "8", "--temperature", "0", "--json"];
    let from =
        |path: &Path| json(&[&["generate", "Once upon a time", "--model", arg(path)], &how[..]].concat());
    let expected = from(&whole)["tokens"].clone();
    assert_eq!(from(&parts[0])["tokens"], expected);
    assert_eq!(from(&parts[1])["tokens"], expected);
    let inspected = |path: &Path| {
        let facts = json(&["inspect", arg(path), "--json"]);
        (facts["files"].as_u64(), facts["weights_file_bytes"].clone(), facts["tensors"].clone())
    };
    let (one, two) = (inspected(&whole), inspected(&parts[0]));
    assert_eq!((one.0, two.0, one.1, one.2), (Some(1), Some(2), two.1, two.2));
    // A file that is written from the parts is whole again.
    let again = folder.path().join("again.gguf");
    succeed(&["quantize", arg(&parts[0]), arg(&again), "--type", "Q8_0"]);
    assert_eq!(from(&again)["tokens"], expected);

    let named = parts.map(|path| named(&path));
    let hub = Hub::start(named.to_vec(), Manners::default());
    let home = tempfile::tempdir().expect("a temporary folder");
    let run = || {
        let ask = ["generate", "Once upon a time", "--model", "owner/name:Q8_0"];
        hub.keel(home.path(), &[&ask[..], &how[..]].concat(), &[])
    };
    assert_eq!(tokens(&run()), expected);
    assert_eq!(files_asked(&hub.take_asked()), [&*named[0].0, &*named[1].0]);
    assert_eq!(tokens(&run()), expected);
    assert_eq!(hub.take_asked(), [], "both are here");
}

#[test]
fn a_gguf_model_comes_with_its_vision_tower() {
    let Some(fixture) = vlm_fixture("vlm_qwen3_5") else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("m.gguf");
    succeed(&["quantize", arg(&fixture), arg(&file), "--type", "Q8_0"]);
    let text = std::fs::read(&file).expect("written");
    let tower = mmproj(&fixture, MmprojForm::default());
    let files = vec![
        ("m-Q8_0.gguf".into(), text),
        ("mmproj-m-BF16.gguf".into(), tower.clone()),
        ("mmproj-m-F32.gguf".into(), tower),
    ];
    let hub = Hub::start(files, Manners::default());
    let home = tempfile::tempdir().expect("a temporary folder");
    let run = |args: &[&str]| {
        let output = hub.keel(home.path(), args, &[]);
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        output
    };
    run(&["pull", "owner/name:Q8_0", "--no-mmproj"]);
    assert_eq!(files_asked(&hub.take_asked()), ["m-Q8_0.gguf"]);
    let alone = run(&["inspect", "owner/name:Q8_0"]);
    assert!(!stderr(&alone).contains("vision tower"), "{}", stderr(&alone));
    run(&["pull", "owner/name:Q8_0"]);
    assert_eq!(files_asked(&hub.take_asked()), ["mmproj-m-BF16.gguf"], "the rest is there");
    let seeing = run(&["inspect", "owner/name:Q8_0"]);
    assert!(stderr(&seeing).contains("the vision tower is mmproj-m-BF16.gguf"), "{}", stderr(&seeing));
    assert_eq!(hub.take_asked(), []);
    let list: Value = serde_json::from_slice(&run(&["list", "--json"]).stdout).expect("JSON");
    assert_eq!(list[0]["gguf"], json!(["m-Q8_0.gguf"]));
    assert_eq!(list[0]["mmproj"], json!(["mmproj-m-BF16.gguf"]));
    let list = String::from_utf8(run(&["list"]).stdout).expect("UTF-8");
    assert!(list.contains("m-Q8_0.gguf, mmproj-m-BF16.gguf"), "{list}");
    run(&["rm", "owner/name:Q8_0"]);
    assert!(!blobs(home.path()).exists(), "the tower goes with its last model");
}

#[test]
fn a_vision_tower_in_parts_is_pulled_with_its_model() {
    let Some(fixture) = vlm_fixture("vlm_qwen3_5") else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (model, tower) = (folder.path().join("m-Q8_0.gguf"), folder.path().join("tower.gguf"));
    succeed(&["quantize", arg(&fixture), arg(&model), "--type", "Q8_0"]);
    std::fs::write(&tower, mmproj(&fixture, MmprojForm::default())).expect("writable");
    let [one, two] = split_in_two(&tower, &folder.path().join("mmproj-m-BF16")).map(|path| named(&path));
    let names = ["m-Q8_0.gguf".to_string(), one.0.clone(), two.0.clone()];
    let hub = Hub::start(vec![named(&model), one, two], Manners::default());
    let home = tempfile::tempdir().expect("a temporary folder");
    let run = |args: &[&str]| {
        let output = hub.keel(home.path(), args, &[]);
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        output
    };
    run(&["pull", "owner/name:Q8_0"]);
    assert_eq!(files_asked(&hub.take_asked()), names);
    let seeing = run(&["inspect", "owner/name:Q8_0"]);
    assert!(stderr(&seeing).contains("the vision tower is mmproj-m-BF16-00001"), "{}", stderr(&seeing));
    let list: Value = serde_json::from_slice(&run(&["list", "--json"]).stdout).expect("JSON");
    assert_eq!(list[0]["mmproj"], json!([names[1]]));
    run(&["rm", "owner/name:Q8_0"]);
    assert!(!blobs(home.path()).exists(), "all parts of the tower go with its model");
}
