//! Models with vision as two GGUF files, written by the rules of the common converter: numbers, features and logits are
//! those of the checkpoints.

use std::path::{Path, PathBuf};

use crate::common::looking::{outcome, seeing};
use crate::common::{relative_error, runtime};
use keel_engine::Engine;
use keel_models::gguf::{CheckpointAsGguf, GgufParameters, add_tower, processor};
use keel_models::loading::{CheckpointParameters, Parameters};
use keel_models::vision::{TowerKind, VisionConfig, read_vision};
use keel_testkit::fixtures::{MmprojForm, SEEING, VLM, mmproj, qwen3_vl_moe, seeing_fixture, vlm_fixture};
use keel_vision::ProcessorFiles;
use keel_weights::Checkpoint;
use keel_weights::gguf::GgufFile;
use keel_weights::quantize::{GgufRecipe, write_gguf};
use serde_json::{Map, Value};

const LOGITS_MAX: f64 = 1e-4;

fn folders() -> impl Iterator<Item = (&'static str, PathBuf)> {
    let own = SEEING.into_iter().map(|name| (name, seeing_fixture(name)));
    let own = own.chain([("qwen3_vl_moe", qwen3_vl_moe())]);
    own.chain(VLM.into_iter().filter_map(|name| Some((name, vlm_fixture(name)?))))
}

/// A model as two GGUF files.
struct Pair {
    text: GgufFile,
    tower: GgufFile,
}

/// The names of the tokens that stand for pictures, in a vocabulary that has nothing else.
fn vocabulary(config: &VisionConfig, count: usize) -> Vec<String> {
    let mut tokens: Vec<String> = (0..count).map(|i| format!("t{i}")).collect();
    let tokens_of = config.tokens;
    let named = match config.kind {
        TowerKind::Qwen { .. } => [
            (Some(tokens_of.image), "<|image_pad|>"),
            (tokens_of.video, "<|video_pad|>"),
            (Some(tokens_of.start), "<|vision_start|>"),
            (Some(tokens_of.end), "<|vision_end|>"),
        ],
        TowerKind::Siglip { .. } => [
            (Some(tokens_of.image), "<image_soft_token>"),
            (Some(tokens_of.start), "<start_of_image>"),
            (Some(tokens_of.end), "<end_of_image>"),
            (None, ""),
        ],
    };
    for (id, name) in named {
        if let Some(id) = id {
            tokens[id as usize] = name.into();
        }
    }
    tokens
}

fn write(folder: &Path, scratch: &Path, form: MmprojForm) -> Pair {
    write_with(folder, scratch, form, &|_| ())
}

/// As [`write`], with a vocabulary that `change` has changed.
fn write_with(folder: &Path, scratch: &Path, form: MmprojForm, change: &dyn Fn(&mut Vec<String>)) -> Pair {
    let source = Checkpoint::open(folder).expect("the checkpoint opens");
    let config = keel_models::read_config(source.config()).expect("the config is complete");
    let vision = read_vision(source.config()).expect("sound").expect("it sees");
    let tensors = CheckpointAsGguf::new(&source, &config).expect("all tensors have names");
    let mut metadata = keel_models::gguf::metadata(source.config(), &config, tensors.has_mtp_head())
        .expect("it can be said");
    let mut tokens = vocabulary(&vision, config.vocab);
    change(&mut tokens);
    metadata.strings("tokenizer.ggml.tokens", &tokens.iter().map(String::as_str).collect::<Vec<_>>());
    let (text, tower) = (scratch.join("text.gguf"), scratch.join("mmproj.gguf"));
    let recipe = GgufRecipe::from_name("BF16").expect("a recipe");
    write_gguf(&tensors, &text, metadata, &recipe, &mut |_| ()).expect("written");
    std::fs::write(&tower, mmproj(folder, form)).expect("writable");
    Pair { text: GgufFile::open(&text).expect("sound"), tower: GgufFile::open(&tower).expect("sound") }
}

fn load(parameters: &dyn Parameters, json: &Value) -> Engine {
    Engine::load(&runtime(2), parameters, json, seeing(), &|_| ()).expect("it loads")
}

/// The numbers of a tower. A file names the blocks with features in ascending order.
fn sorted(mut config: VisionConfig) -> VisionConfig {
    if let TowerKind::Qwen { deepstack, .. } = &mut config.kind {
        deepstack.sort_unstable();
    }
    config
}

#[test]
fn two_files_are_the_checkpoint() {
    for (name, folder) in folders() {
        let scratch = tempfile::tempdir().expect("a temporary folder");
        let source = Checkpoint::open(&folder).expect("opens");
        let (features, logits) = outcome(&mut load(&CheckpointParameters(&source), source.config()));
        assert!(features.levels.iter().flatten().any(|x| x.abs() > 1e-3), "{name}");
        for form in [MmprojForm::default(), MmprojForm { is_swapped: true }] {
            let is_gemma = name.ends_with("gemma3");
            if form.is_swapped && !is_gemma {
                continue;
            }
            let pair = write(&folder, scratch.path(), form);
            let mut json = keel_models::gguf::config(&pair.text).expect("sound");
            assert!(read_vision(&json).expect("sound").is_none(), "{name}: the text alone is blind");
            add_tower(&mut json, &pair.text, &pair.tower).unwrap_or_else(|e| panic!("{name}: {e}"));
            let read = read_vision(&json).expect("sound").expect("it sees");
            let want = read_vision(source.config()).expect("sound").expect("it sees");
            assert_eq!(read, sorted(want), "{name}");
            let config = keel_models::read_config(&json).expect("sound");
            let parameters = GgufParameters::new(&pair.text, &config).with_tower(&pair.tower);
            let (seen, read) = outcome(&mut load(&parameters, &json));
            assert!(seen == features, "{name}: features differ");
            let error = relative_error(&read, &logits);
            assert!(error <= LOGITS_MAX, "{name}: logits differ by {error:.1e}");
        }
    }
}

/// Published files of Gemma 3 end one entry before the token that stands for a row of a picture.
#[test]
fn an_unused_token_stands_for_gemmas_pictures_where_theirs_is_missing() {
    let folder = seeing_fixture("seeing_gemma3");
    let scratch = tempfile::tempdir().expect("a temporary folder");
    let source = Checkpoint::open(&folder).expect("opens");
    let (features, logits) = outcome(&mut load(&CheckpointParameters(&source), source.config()));
    let pair = write_with(&folder, scratch.path(), MmprojForm::default(), &|tokens| {
        tokens[508] = "t508".into();
        (tokens[300], tokens[301]) = ("<unused7>".into(), "<unused8>".into());
    });
    let mut json = keel_models::gguf::config(&pair.text).expect("sound");
    add_tower(&mut json, &pair.text, &pair.tower).expect("it fits");
    assert_eq!(read_vision(&json).expect("sound").expect("it sees").tokens.image, 301);
    let config = keel_models::read_config(&json).expect("sound");
    let parameters = GgufParameters::new(&pair.text, &config).with_tower(&pair.tower);
    let (seen, read) = outcome(&mut load(&parameters, &json));
    assert!(seen == features);
    assert!(relative_error(&read, &logits) <= LOGITS_MAX, "nothing depends on which token it is");

    let pair =
        write_with(&folder, scratch.path(), MmprojForm::default(), &|tokens| tokens[508] = "t508".into());
    let mut json = keel_models::gguf::config(&pair.text).expect("sound");
    let message = add_tower(&mut json, &pair.text, &pair.tower).expect_err("none is unused").to_string();
    assert!(message.contains("vocabulary has no <image_soft_token>"), "{message}");
}

/// Settings come from the file's keys. Those without a key have the values of published processor files.
#[test]
fn pictures_are_prepared_as_the_processor_file_says() {
    for (name, folder) in VLM.into_iter().filter_map(|name| Some((name, vlm_fixture(name)?))) {
        let scratch = tempfile::tempdir().expect("a temporary folder");
        let pair = write(&folder, scratch.path(), MmprojForm::default());
        let json = processor(&pair.text, &pair.tower).expect("sound");
        let (got, want) =
            (ProcessorFiles::new(Some(json), None, None), ProcessorFiles::read(&folder).expect("sound"));
        let picture = keel_vision::Picture {
            width: 99,
            height: 47,
            rgb: (0..99 * 47 * 3).map(|i| (i * 7 % 251) as u8).collect(),
        };
        let prepare = |files: &ProcessorFiles| {
            files.image(&Map::new()).expect("sound").process(&picture).expect("fits").swap_remove(0)
        };
        assert!(prepare(&got) == prepare(&want), "{name}");
        // Gemma 3 reads no videos.
        assert_eq!(got.video(&Map::new()).is_ok(), name != "vlm_gemma3", "{name}");
    }
}

#[test]
fn towers_that_do_not_fit_are_refused_in_a_sentence() {
    let scratch = [(); 3].map(|()| tempfile::tempdir().expect("a temporary folder"));
    let pairs: Vec<Pair> = SEEING
        .iter()
        .zip(&scratch)
        .map(|(name, scratch)| write(&seeing_fixture(name), scratch.path(), MmprojForm::default()))
        .collect();
    let refusal = |text: &GgufFile, tower: &GgufFile| {
        let mut json = keel_models::gguf::config(text).expect("sound");
        add_tower(&mut json, text, tower).expect_err("they do not fit").to_string()
    };
    let [qwen, _, gemma] = &pairs[..] else { panic!("three models") };
    let message = refusal(&qwen.text, &gemma.tower);
    assert!(message.contains("a tower of gemma3 does not fit a text model of qwen35"), "{message}");
    let message = refusal(&qwen.text, &qwen.text);
    assert!(message.contains("this is no mmproj file"), "{message}");
    // Of two towers of one kind, that of another model gives rows of another width.
    if let Some(other) = vlm_fixture("vlm_qwen3_5") {
        let scratch = tempfile::tempdir().expect("a temporary folder");
        let other = write(&other, scratch.path(), MmprojForm::default());
        let message = refusal(&qwen.text, &other.tower);
        assert!(message.contains("rows of 80 values") && message.contains("128"), "{message}");
    }
}
