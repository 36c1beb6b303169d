//! GGUF models whose vision tower is a file of its own, from the command line.

mod common;

use std::path::{Path, PathBuf};

use common::{arg, fail, floats, holds, ints, keel, misuse, relative_error, stderr, succeed};
use evenkeel::text::GrammarSource;
use evenkeel::{LoadOptions, Model, ModelFiles, Request, TowerFile};
use keel_testkit::fixtures::{MmprojForm, VLM, mmproj, vlm_fixture};
use serde_json::json;

const LOGITS_MAX: f64 = 1e-4;

/// A fixture as a GGUF file, with its tower next to it.
struct Files {
    scratch: tempfile::TempDir,
    text: PathBuf,
    tower: PathBuf,
}

fn files(folder: &Path) -> Files {
    let scratch = tempfile::tempdir().expect("a temporary folder");
    let (text, tower) = (scratch.path().join("model.gguf"), scratch.path().join("model-mmproj-BF16.gguf"));
    succeed(&["quantize", arg(folder), arg(&text), "--type", "BF16"]);
    std::fs::write(&tower, mmproj(folder, MmprojForm::default())).expect("writable");
    Files { scratch, text, tower }
}

/// Ids, features and logits of a question about a picture.
struct Asked {
    ids: Vec<u32>,
    features: Vec<f32>,
    logits: Vec<f32>,
}

fn ask(folder: &Path, model: &[&str]) -> Asked {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (messages, out) = (dir.path().join("m.json"), dir.path().join("out.safetensors"));
    let picture = std::path::absolute(folder.join("images/b_large.png")).expect("a path");
    let parts = json!([{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "What is this?"}]);
    std::fs::write(&messages, json!([{"role": "user", "content": parts}]).to_string()).expect("writable");
    let command = ["logits", "--messages", arg(&messages), "--out", arg(&out), "--compute", "f32", "-m"];
    succeed(&[&command[..], model].concat());
    assert!(holds(&out, "image_features"));
    Asked {
        ids: ints(&out, "input_ids"),
        features: floats(&out, "image_features"),
        logits: floats(&out, "logits"),
    }
}

#[test]
fn a_question_about_a_picture_is_that_of_the_checkpoint() {
    for name in VLM {
        let Some(folder) = vlm_fixture(name) else { continue };
        let files = files(&folder);
        let want = ask(&folder, &[arg(&folder)]);
        for model in [vec![arg(&files.text)], vec![arg(&files.text), "--mmproj", arg(&files.tower)]] {
            let got = ask(&folder, &model);
            assert!(got.ids == want.ids, "{name}: ids differ");
            assert!(got.features == want.features, "{name}: features differ");
            let error = relative_error(&got.logits, &want.logits);
            assert!(error <= LOGITS_MAX, "{name}: logits differ by {error:.1e}");
        }
    }
}

#[test]
fn the_tower_next_to_a_model_is_found_and_named() {
    let Some(folder) = vlm_fixture("vlm_qwen3_5") else { return };
    let files = files(&folder);
    let image = folder.join("images/a_photo.png");
    let ask = ["generate", "-m", arg(&files.text), "--image", arg(&image), "What?", "--max-tokens", "2"];
    let output = keel(&ask);
    assert!(output.status.success(), "{}", stderr(&output));
    let notice = "the vision tower is model-mmproj-BF16.gguf, which lies next to the model";
    assert!(stderr(&output).contains(notice), "{}", stderr(&output));
    fail(&[&ask[..], &["--mmproj", "none"]].concat(), "see --mmproj");
    let plan = |extra: &[&str]| {
        let args =
            ["plan", "--serve", "-v", "-m", arg(&files.text), "--image-pixels", "65536", "--device", "cpu"];
        succeed(&[&args[..], extra].concat())
    };
    assert!(plan(&[]).contains("programs of the tower: "));
    assert!(!plan(&["--mmproj", "none"]).contains("of the tower"));

    std::fs::copy(&files.tower, files.scratch.path().join("mmproj-F32.gguf")).expect("writable");
    fail(&ask, "2 files next to");
    fail(&ask, "mmproj-F32.gguf, model-mmproj-BF16.gguf");
    succeed(&[&ask[..], &["--mmproj", arg(&files.tower)]].concat());
    // Without a tower, or with one of them, the library never asks which.
    for tower in [TowerFile::None, TowerFile::At(files.tower.clone())] {
        let opened = ModelFiles::open_with(&files.text, &tower).expect("it opens");
        let mut model = Model::load(&opened, &LoadOptions::default(), &|_| ()).expect("it loads");
        let grammar = Some(GrammarSource::Regex("[0-9]{2}".into()));
        let request = Request { grammar, max_tokens: Some(4), ..Request::default() };
        let answer = model.stream("a", request).expect("the files are read again for the grammar");
        let text: String = answer.collect::<Result<_, _>>().expect("no step fails");
        assert!(text.len() == 2 && text.parse::<u32>().is_ok(), "{text:?}");
    }
    // A tower of another model in the same folder is passed over.
    let other = vlm_fixture("vlm_gemma3").expect("there with the first");
    let other = mmproj(&other, MmprojForm::default());
    std::fs::write(files.scratch.path().join("mmproj-F32.gguf"), other).expect("writable");
    let output = keel(&ask);
    assert!(output.status.success() && stderr(&output).contains(notice), "{}", stderr(&output));
}

/// `keel quantize` of a GGUF file gives a folder without the tower, which is a file of its own.
#[test]
fn fit_counts_no_tower_for_a_copy_in_fewer_bits() {
    let Some(folder) = vlm_fixture("vlm_qwen3_5") else { return };
    let files = files(&folder);
    // If nothing fits, the message names the copy with the fewest bits.
    let least = |extra: &[&str]| {
        let message = stderr(&keel(&[&["fit", arg(&files.text), "--limit", "1K"], extra].concat()));
        let needed =
            message.split(" needs ").nth(1).and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
        needed.unwrap_or_else(|| panic!("{message}"))
    };
    assert_eq!(least(&[]), least(&["--mmproj", "none"]));
    let as_it_is = |extra: &[&str]| {
        let fit =
            ["fit", arg(&files.text), "--limit", "8Gi", "--sequences", "1", "--context", "256", "--json"];
        common::json(&[&fit[..], extra].concat())["fits"][0]["bytes"].as_u64().expect("bytes")
    };
    assert!(as_it_is(&[]) > as_it_is(&["--mmproj", "none"]), "the file itself is served with its tower");
}

#[test]
fn a_tower_that_does_not_fit_is_left_out_or_refused() {
    let (Some(folder), Some(other)) = (vlm_fixture("vlm_qwen3_5"), vlm_fixture("vlm_gemma3")) else { return };
    let files = files(&folder);
    std::fs::write(&files.tower, mmproj(&other, MmprojForm::default())).expect("writable");
    let ask = ["generate", "-m", arg(&files.text), "--raw", "a", "--max-tokens", "2"];
    let output = keel(&ask);
    assert!(output.status.success(), "text needs no tower: {}", stderr(&output));
    assert!(
        stderr(&output).contains("no vision tower next to the model fits it, so only text is read: "),
        "{}",
        stderr(&output)
    );
    fail(&[&ask[..], &["--mmproj", arg(&files.tower)]].concat(), "does not fit a text model of qwen35");
    fail(&[&ask[..], &["--mmproj", arg(&files.text)]].concat(), "this is no mmproj file");
    // A file that is cut short is refused as any other.
    let whole = std::fs::read(&files.tower).expect("readable");
    std::fs::write(&files.tower, &whole[..whole.len() / 2]).expect("writable");
    fail(&[&ask[..], &["--mmproj", arg(&files.tower)]].concat(), "model-mmproj-BF16.gguf");
    fail(&["generate", "-m", arg(&folder), "a", "--mmproj", arg(&files.tower)], "no GGUF file");
    fail(&["generate", "a", "--mmproj", arg(&files.tower)], "the built-in model reads only text");
    misuse(&["serve", "--shape", "qwen3.5-4b", "--mmproj", arg(&files.tower)], "random weights");
    let two = ["serve", "-m", arg(&files.text), "-m", arg(&files.text), "--mmproj", arg(&files.tower)];
    misuse(&two, "--mmproj is for a single model");
}
