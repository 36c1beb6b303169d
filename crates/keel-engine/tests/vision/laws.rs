//! Vision models against their references: features, logits in both regimes, tokens after pictures, and the laws.

use std::path::Path;
use std::sync::Arc;

use crate::common::splitting::{self, backends, end, load_on};
use crate::common::{device, exact, relative_error};
use keel_cache::{Features, SeenPicture, SequenceCache, VisionInputs};
use keel_engine::{Engine, EngineOptions, GenerateOptions, PatchGrid, TokenIterator, VisionOptions};
use keel_models::loading::{CheckpointParameters, Parameters};
use keel_models::vision::{TowerKind, prompt_layout, read_vision, run_ends};
use keel_testkit::fixtures::{VLM, vlm_fixture};
use keel_vision::{Picture, ProcessorFiles};
use keel_weights::{Checkpoint, SafetensorsFile, TensorSource};
use serde_json::{Map, Value};

const FEATURES_MAX: f64 = 2e-5;
const LOGITS_MAX: f64 = 1e-4;

/// The reference's data of one case.
struct Case {
    name: String,
    file: SafetensorsFile,
}

impl Case {
    fn all(folder: &Path) -> Vec<Case> {
        let text = std::fs::read_to_string(folder.join("cases.json")).expect("readable");
        let json: Value = serde_json::from_str(&text).expect("JSON");
        let names = json["cases"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|case| case["name"].as_str().expect("named"));
        let open = |name: &str| {
            let path = folder.join(format!("expected_{name}.safetensors"));
            Case { name: name.into(), file: SafetensorsFile::open(&path).expect("opens") }
        };
        names.map(open).collect()
    }

    fn has(&self, tensor: &str) -> bool {
        self.file.contains(tensor)
    }

    fn floats(&self, tensor: &str) -> Vec<f32> {
        self.file.tensor(tensor).expect("there").to_f32().expect("float")
    }

    fn ints(&self, tensor: &str) -> Vec<u32> {
        let bytes = self.file.tensor(tensor).expect("there").bytes();
        bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    }

    /// Pictures of the size that the tower reads.
    fn pictures(&self, tensor: &str) -> Vec<Picture> {
        let Ok(view) = self.file.tensor(tensor) else { return Vec::new() };
        let &[.., height, width, 3] = view.shape() else { panic!("{tensor} is no picture") };
        let picture = |rgb: &[u8]| Picture { width, height, rgb: rgb.to_vec() };
        view.bytes().chunks_exact(height * width * 3).map(picture).collect()
    }
}

/// A case's tokens and its vision inputs.
struct Seen {
    tokens: Vec<u32>,
    vision: Arc<VisionInputs>,
}

/// Runs the tower on the reference's pictures, and compares features and positions.
fn look(engine: &mut Engine, folder: &Path, case: &Case) -> Seen {
    let config = engine.vision().expect("it sees").clone();
    let files = ProcessorFiles::read(folder).expect("sound");
    let (image, video) = (files.image(&Map::new()).expect("sound"), files.video(&Map::new()));
    let is_whole = matches!(config.kind, TowerKind::Siglip { .. });
    let mut first = 0;
    let mut runs_of = |grid: keel_vision::Grid| config.runs_of(grid.t, grid.h, grid.w, &mut first);
    let mut levels = vec![Vec::new(); config.levels()];
    let (mut images, mut videos) = (Vec::new(), Vec::new());
    let mut see = |values: &[f32], grid: keel_vision::Grid, levels: &mut Vec<Vec<f32>>| {
        let grid = PatchGrid { t: grid.t, h: grid.h, w: grid.w };
        let features = engine.encode_picture(values, grid).expect("it encodes");
        levels.iter_mut().zip(features.levels).for_each(|(all, more)| all.extend(more));
    };
    for i in 0..8 {
        // These pictures have the right size already, so they stay as they are.
        for picture in case.pictures(&format!("resized_u8.{i}")) {
            let one = image.process(&picture).expect("sound").swap_remove(0);
            see(&one.values, one.grid, &mut levels);
            images.extend(runs_of(one.grid));
        }
    }
    let rows_of_images = levels[0].len();
    let frames = case.pictures("resized_u8_video");
    if !frames.is_empty() {
        let video = video.expect("sound").process(&frames).expect("sound");
        see(&video.values, video.grid, &mut levels);
        videos.extend(runs_of(video.grid));
    }
    let compare = |got: &[f32], tensor: &str| {
        assert_eq!(case.has(tensor), !got.is_empty(), "{} {tensor}", case.name);
        if !got.is_empty() {
            let error = relative_error(got, &case.floats(tensor));
            assert!(error <= FEATURES_MAX, "{} {tensor}: {error:.1e}", case.name);
        }
    };
    for (k, level) in levels.iter().enumerate() {
        let (of_images, of_videos) = level.split_at(rows_of_images);
        let (image, video) = match k {
            0 => ("image_features".to_string(), "video_features".to_string()),
            k => (format!("deepstack_features.{}", k - 1), format!("deepstack_video_features.{}", k - 1)),
        };
        compare(of_images, &image);
        compare(of_videos, &video);
    }
    let tokens = case.ints("input_ids");
    let plan = prompt_layout(&config, &tokens, &images, &videos).expect("the tokens fit");
    if !is_whole {
        let want = case.ints("position_ids");
        let got: Vec<u32> =
            (0..3).flat_map(|axis| plan.positions.iter().map(move |place| place[axis] as u32)).collect();
        assert_eq!(got, want, "{}", case.name);
        assert_eq!(plan.delta as u32, case.ints("rope_deltas")[0], "{}", case.name);
    }
    let ends = if is_whole { run_ends(&config, &plan) } else { Vec::new() };
    let pictures = vec![SeenPicture { first: 0, features: Arc::new(Features { levels }) }];
    let (rows, width) = (plan.features, config.text_hidden);
    let vision = VisionInputs { positions: plan.positions, delta: plan.delta, rows, ends, pictures, width };
    Seen { tokens, vision: Arc::new(vision) }
}

fn engine(folder: &Path, options: EngineOptions) -> Engine {
    let checkpoint = Checkpoint::open(folder).expect("the checkpoint opens");
    let parameters = CheckpointParameters(&checkpoint);
    let options = EngineOptions {
        vision: Some(VisionOptions { patches: 256, pictures: 0, piece_tokens: VisionOptions::WHOLE }),
        ..options
    };
    Engine::load(&device(), &parameters, checkpoint.config(), options, &|_| ()).expect("the model loads")
}

fn open(engine: &mut Engine, seen: &Seen) -> SequenceCache {
    let mut sequence = engine.open().expect("a slot is free");
    sequence.set_vision_inputs(Some(Arc::clone(&seen.vision)));
    sequence
}

/// Logits of every token, and those of the MTP head.
fn logits(engine: &mut Engine, seen: &Seen, one_by_one: bool) -> (Vec<f32>, Vec<f32>) {
    let mut sequence = open(engine, seen);
    let (mut rows, mut mtp_rows) = (Vec::new(), Vec::new());
    let has_head = engine.model().mtp.is_some();
    let mut sink = |row: &[f32]| {
        rows.extend_from_slice(row);
        Ok(())
    };
    let mut mtp_sink = |row: &[f32]| {
        mtp_rows.extend_from_slice(row);
        Ok(())
    };
    let mtp_sink: Option<&mut keel_engine::LogitSink<'_>> = if has_head { Some(&mut mtp_sink) } else { None };
    engine.all_logits(&mut sequence, &seen.tokens, one_by_one, &mut sink, mtp_sink).expect("the prompt runs");
    engine.release(sequence);
    (rows, mtp_rows)
}

/// Returns whether the reference has logits of the MTP head, which are compared, too.
fn compare_logits(case: &Case, what: &str, (logits, mtp_logits): &(Vec<f32>, Vec<f32>)) -> bool {
    let (got, tensor) = match case.has("logits") {
        true => (&logits[..], "logits"),
        false => (&logits[logits.len() - case.floats("logits_last").len()..], "logits_last"),
    };
    let error = relative_error(got, &case.floats(tensor));
    assert!(error <= LOGITS_MAX, "{what} {}: {tensor} differ by {error:.1e}", case.name);
    let has_mtp_logits = case.has("mtp_logits");
    if has_mtp_logits {
        let error = relative_error(mtp_logits, &case.floats("mtp_logits"));
        assert!(error <= LOGITS_MAX, "{what} {}: mtp_logits differ by {error:.1e}", case.name);
    }
    has_mtp_logits
}

#[test]
fn features_positions_and_logits_match_the_reference() {
    for name in VLM {
        let Some(folder) = vlm_fixture(name) else { continue };
        let mut whole = engine(&folder, exact());
        let mut chunks = engine(&folder, EngineOptions { prefill_step: 64, ..exact() });
        let (mut with_mtp, mut with_chunks) = (0, 0);
        for case in Case::all(&folder) {
            let seen = look(&mut whole, &folder, &case);
            let at_once = logits(&mut whole, &seen, false);
            with_mtp += usize::from(compare_logits(&case, name, &at_once));
            if case.has("logits") {
                let in_chunks = logits(&mut chunks, &seen, false);
                assert!(at_once == in_chunks, "{name} {}: chunks change bits", case.name);
                compare_logits(&case, &format!("{name} one by one"), &logits(&mut whole, &seen, true));
                with_chunks += 1;
            }
        }
        // Three cases have logits of the MTP head if the model has one.
        let expected = if whole.model().mtp.is_some() { 3 } else { 0 };
        assert_eq!(with_mtp, expected, "{name}");
        assert!(with_chunks > 5, "{name}: {with_chunks} cases have all logits");
    }
}

#[test]
fn a_split_model_sees_what_the_whole_one_sees() {
    let mut count = 0;
    for (name, grid) in VLM.into_iter().flat_map(|name| [(name, (2, 1)), (name, (1, 2))]) {
        let Some(folder) = vlm_fixture(name) else { continue };
        let vision = VisionOptions { patches: 256, pictures: 0, piece_tokens: VisionOptions::WHOLE };
        let options = EngineOptions { vision: Some(vision), ..exact() };
        let checkpoint = Checkpoint::open(&folder).expect("the checkpoint opens");
        let source = (&CheckpointParameters(&checkpoint) as &dyn Parameters, checkpoint.config());
        let parts = match splitting::parts(source, options, grid) {
            Ok(parts) => parts,
            Err(error) => {
                assert!(error.to_string().contains("--split pipeline"), "{name} in {grid:?}: {error}");
                continue;
            }
        };
        let mut engine = load_on(source, options, backends(2, false), &parts).expect("it loads");
        for case in Case::all(&folder) {
            let seen = look(&mut engine, &folder, &case);
            compare_logits(&case, &format!("{name} in {grid:?}"), &logits(&mut engine, &seen, false));
        }
        end(engine);
        count += 1;
    }
    assert!(count != 1 && (count == 0 || count > 4), "{count} models see");
}

#[test]
fn tokens_after_pictures_match_the_reference() {
    for name in VLM {
        let Some(folder) = vlm_fixture(name) else { continue };
        let mut engine = engine(&folder, EngineOptions { all_logits: false, ..exact() });
        for case in Case::all(&folder) {
            let seen = look(&mut engine, &folder, &case);
            let (want, margins) = (case.ints("greedy_ids"), case.floats("greedy_margin"));
            let options = GenerateOptions { max_tokens: want.len(), ..GenerateOptions::default() };
            let sequence = open(&mut engine, &seen);
            let tokens =
                TokenIterator::new(&mut engine, sequence, &seen.tokens, options, &mut |_| ()).expect("fits");
            let mut tokens = tokens;
            let got: Vec<u32> = tokens.by_ref().collect::<Result<_, _>>().expect("every step runs");
            let sequence = tokens.into_sequence();
            engine.release(sequence);
            assert_eq!(got.len(), want.len(), "{name} {}", case.name);
            let differs = got.iter().zip(&want).position(|(a, b)| a != b);
            assert!(
                differs.is_none_or(|i| margins[i] < 1e-3),
                "{name} {}: {got:?}, expected {want:?}",
                case.name
            );
        }
    }
}

#[test]
fn a_fork_sees_what_its_sequence_saw() {
    for name in VLM {
        let Some(folder) = vlm_fixture(name) else { continue };
        let mut engine = engine(&folder, EngineOptions { checkpoints: 2, ..exact() });
        let case = Case::all(&folder).swap_remove(0);
        let seen = look(&mut engine, &folder, &case);
        let mut sequence = open(&mut engine, &seen);
        let mut logits = [Vec::new(), Vec::new()];
        engine.prefill(&mut sequence, &seen.tokens, &mut logits[0], &mut |_| ()).expect("fits");
        let mut twin = engine.cache_mut().fork(&sequence).expect("a slot is free");
        for (sequence, logits) in [&mut sequence, &mut twin].into_iter().zip(&mut logits) {
            engine.decode(&mut [sequence], &[7]).expect("runs");
            engine.logits(0, logits).expect("there");
        }
        assert!(logits[0] == logits[1], "{name}");
        let place = seen.tokens.len() as i32 + seen.vision.delta;
        assert_eq!(twin.position_of(seen.tokens.len()), [place; 3], "{name}");
        engine.release(sequence);
        engine.release(twin);
    }
}

#[test]
fn a_model_without_eyes_says_so() {
    let folder = crate::common::demo();
    let checkpoint = Checkpoint::open(&folder).expect("opens");
    assert!(read_vision(checkpoint.config()).expect("sound").is_none());
    let options = EngineOptions {
        vision: Some(VisionOptions { patches: 64, pictures: 0, piece_tokens: VisionOptions::WHOLE }),
        context: 256,
        ..exact()
    };
    let loaded = Engine::load(
        &crate::common::runtime(1),
        &CheckpointParameters(&checkpoint),
        checkpoint.config(),
        options,
        &|_| (),
    );
    let message = loaded.err().expect("refused").to_string();
    assert!(message.contains("reads only text"), "{message}");
}
