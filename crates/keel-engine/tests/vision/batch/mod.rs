//! Requests with pictures in a batch. Prefixes know pictures by their pixels, features are kept within their budget,
//! and how work is cut changes nothing.

mod sizes;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::common::batching::{Outcome, assert_all_is_back, finish, run, step};
use crate::common::queueing::queueing;
use crate::common::{device, exact};
use keel_array::{Backend, Category, Runtime};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::batch::{
    BatchEvent, BatchOptions, BatchRequest, Batcher, PictureInput, RequestVision, SequenceEvent,
};
use keel_engine::{Engine, EngineError, EngineOptions, LateWork, PatchGrid, VisionOptions};
use keel_models::loading::CheckpointParameters;
use keel_models::vision::{VisionConfig, read_vision};
use keel_testkit::fixtures::{VLM, vlm_fixture};
use keel_vision::{Picture, ProcessorFiles};
use keel_weights::{Checkpoint, SafetensorsFile, TensorSource};
use serde_json::Map;

const ANSWER: usize = 12;

/// The folder of a fixture, and the parts that the tests use.
struct Model {
    name: &'static str,
    folder: std::path::PathBuf,
    config: VisionConfig,
    processor: keel_vision::ImageProcessor,
}

/// A prompt of a case, and its pictures at the size that the tower reads.
struct Case {
    tokens: Vec<u32>,
    pictures: Vec<Picture>,
}

impl Model {
    fn all() -> impl Iterator<Item = Model> {
        VLM.into_iter().filter_map(|name| {
            let folder = vlm_fixture(name)?;
            let checkpoint = Checkpoint::open(&folder).expect("opens");
            let config = read_vision(checkpoint.config()).expect("sound").expect("it sees");
            let processor = ProcessorFiles::read(&folder).expect("sound").image(&Map::new()).expect("sound");
            Some(Model { name, folder, config, processor })
        })
    }

    fn engine(&self, options: EngineOptions) -> Engine {
        self.engine_on(&device(), options)
    }

    fn engine_on(&self, runtime: &Runtime, options: EngineOptions) -> Engine {
        let checkpoint = Checkpoint::open(&self.folder).expect("opens");
        let parameters = CheckpointParameters(&checkpoint);
        Engine::load(runtime, &parameters, checkpoint.config(), options, &|_| ()).expect("the model loads")
    }

    fn batcher(&self, options: EngineOptions, batch: BatchOptions) -> Batcher {
        Batcher::new(self.engine(options), batch)
    }

    /// A batch that remembers no prefixes.
    fn fresh(&self) -> Batcher {
        self.batcher(options(), BatchOptions { reuse_prefixes: false, reuse_generated: false, ..exactly() })
    }

    fn case(&self, name: &str) -> Case {
        let file =
            SafetensorsFile::open(&self.folder.join(format!("expected_{name}.safetensors"))).expect("opens");
        let ids = file.tensor("input_ids").expect("there");
        let tokens = ids.bytes().as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b));
        // More text follows, so that there is something to remember.
        let tokens = tokens.chain((0..90).map(|i| 100 + i * 7 % 200)).collect();
        let picture = |i: usize| {
            let view = file.tensor(&format!("resized_u8.{i}")).ok()?;
            let &[height, width, 3] = view.shape() else { panic!("no picture") };
            Some(Picture { width, height, rgb: view.bytes().to_vec() })
        };
        Case { tokens, pictures: (0..8).map_while(picture).collect() }
    }

    /// The prompt, its answer, and more text. Tokens of pictures are left out of the answer, because a template would
    /// refuse them.
    fn next_turn(&self, prompt: &[u32], answer: &[u32]) -> Vec<u32> {
        let tokens = self.config.tokens;
        let is_text = |token: &&u32| **token != tokens.image && Some(**token) != tokens.video;
        let answer: Vec<u32> = answer.iter().filter(is_text).copied().collect();
        [prompt, &answer, &[107, 108, 109]].concat()
    }

    fn request(&self, id: u64, tokens: &[u32], pictures: &[Picture]) -> BatchRequest {
        let input = |picture: &Picture| {
            let one = self.processor.process(picture).expect("sound").swap_remove(0);
            let grid = PatchGrid { t: one.grid.t, h: one.grid.h, w: one.grid.w };
            PictureInput {
                key: one.key(&self.processor),
                values: Arc::new(one.values),
                grid,
                is_video: false,
            }
        };
        let inputs = pictures.iter().map(input).collect();
        let vision = RequestVision::new(&self.config, tokens, inputs).expect("the tokens fit");
        BatchRequest { vision: Some(vision), ..BatchRequest::new(id, tokens.to_vec(), ANSWER) }
    }
}

fn options() -> EngineOptions {
    EngineOptions {
        all_logits: false,
        checkpoints: 8,
        sequences: 4,
        pool_pages: Some(8),
        vision: Some(VisionOptions { patches: 256, pictures: 3, piece_tokens: VisionOptions::WHOLE }),
        ..exact()
    }
}

/// Reuses only prefixes that have the bits of a fresh run.
fn exactly() -> BatchOptions {
    BatchOptions { reuse_generated: false, ..BatchOptions::default() }
}

/// Pictures of the same size with other pixels.
fn negative(pictures: &[Picture]) -> Vec<Picture> {
    let invert = |one: &Picture| Picture { rgb: one.rgb.iter().map(|v| 255 - v).collect(), ..one.clone() };
    pictures.iter().map(invert).collect()
}

fn answer(batcher: &mut Batcher, request: BatchRequest) -> Outcome {
    let mut outcome = run(batcher, vec![BatchRequest { id: 0, ..request }]).swap_remove(0);
    assert!(outcome.error.is_none(), "{:?}", outcome.error.take());
    outcome
}

/// If placeholder tokens alone named a prefix, the second picture would get the answer for the first.
#[test]
fn two_pictures_behind_one_text_are_two_prefixes() {
    for model in Model::all() {
        let case = model.case("b_large");
        let other = negative(&case.pictures);
        let fresh = [&case.pictures, &other]
            .map(|pictures| answer(&mut model.fresh(), model.request(0, &case.tokens, pictures)).tokens);
        let mut batcher = model.batcher(options(), exactly());
        let reuses = batcher.engine().cache().spec().sliding_window().is_none();
        for (turn, which) in [0, 1, 0, 1, 0].into_iter().enumerate() {
            let pictures = [&case.pictures, &other][which];
            let outcome = answer(&mut batcher, model.request(0, &case.tokens, pictures));
            assert!(outcome.tokens == fresh[which], "{}: picture {which} in turn {turn}", model.name);
            let is_known = turn > 1 && reuses;
            assert_eq!(outcome.cached > 0, is_known, "{}: picture {which} in turn {turn}", model.name);
        }
        assert_eq!(
            batcher.status().pictures.encoded,
            2,
            "{}: the tower encodes each picture once",
            model.name
        );
        assert_all_is_back(&mut batcher);
    }
}

#[test]
fn a_second_turn_from_a_remembered_prefix_has_the_bits_of_a_fresh_run() {
    for model in Model::all() {
        for name in ["b_large", "c_two_images", "d_multi_turn"] {
            let case = model.case(name);
            let mut batcher = model.batcher(options(), exactly());
            let first = answer(&mut batcher, model.request(0, &case.tokens, &case.pictures));
            let longer = model.next_turn(&case.tokens, &first.tokens);
            let second = answer(&mut batcher, model.request(0, &longer, &case.pictures));
            let fresh = answer(&mut model.fresh(), model.request(0, &longer, &case.pictures));
            assert!(second.tokens == fresh.tokens, "{} {name}", model.name);
            let reuses = batcher.engine().cache().spec().sliding_window().is_none();
            assert_eq!(second.cached > 0, reuses, "{} {name}", model.name);
            assert_all_is_back(&mut batcher);
        }
    }
}

/// The MTP head's drafts, and the answer that is remembered for the next turn.
#[test]
fn drafts_and_remembered_answers_keep_the_offset() {
    for model in Model::all() {
        let case = model.case("b_large");
        let has_head = model.name.contains("qwen3_5");
        let drafts = EngineOptions { drafts: if has_head { 3 } else { 0 }, ..options() };
        let plain = answer(&mut model.fresh(), model.request(0, &case.tokens, &case.pictures));
        let mut batcher = model.batcher(drafts, BatchOptions::default());
        let long =
            |tokens: &[u32]| BatchRequest { max_tokens: 80, ..model.request(0, tokens, &case.pictures) };
        let first = answer(&mut batcher, long(&case.tokens));
        assert!(first.tokens[..ANSWER] == plain.tokens, "{}", model.name);
        let longer = model.next_turn(&case.tokens, &first.tokens);
        let second = answer(&mut batcher, long(&longer));
        let fresh = answer(
            &mut model.fresh(),
            BatchRequest { max_tokens: 80, ..model.request(0, &longer, &case.pictures) },
        );
        // The regimes agree to rounding. These margins are far above it.
        assert!(
            second.tokens[..8] == fresh.tokens[..8],
            "{}: {:?} and {:?}",
            model.name,
            second.tokens,
            fresh.tokens
        );
        let reuses = batcher.engine().cache().spec().sliding_window().is_none();
        assert_eq!(
            second.cached > case.tokens.len(),
            reuses,
            "{}: the answer is remembered, too",
            model.name
        );
        assert_all_is_back(&mut batcher);
    }
}

#[test]
fn neighbours_and_small_steps_change_nothing() {
    for model in Model::all() {
        let names = ["a_photo", "b_large", "c_two_images", "d_multi_turn", "e_rgba"];
        let cases: Vec<Case> = names.iter().map(|name| model.case(name)).collect();
        let alone: Vec<_> = cases
            .iter()
            .map(|case| answer(&mut model.fresh(), model.request(0, &case.tokens, &case.pictures)).tokens)
            .collect();
        let small = BatchOptions { step_tokens: 64, ..exactly() };
        let mut batcher = model.batcher(EngineOptions { prefill_step: 64, ..options() }, small);
        let requests =
            cases.iter().enumerate().map(|(i, case)| model.request(i as u64, &case.tokens, &case.pictures));
        let outcomes = run(&mut batcher, requests.collect());
        for ((name, outcome), alone) in names.iter().zip(outcomes).zip(alone) {
            assert!(
                outcome.error.is_none() && outcome.tokens == alone,
                "{} {name}: {:?}",
                model.name,
                outcome.error
            );
        }
        assert_all_is_back(&mut batcher);
    }
}

#[test]
fn the_ledger_reads_the_same_with_pictures_as_planned() {
    for model in Model::all() {
        let case = model.case("b_large");
        let mut batcher = model.batcher(options(), exactly());
        let engine = batcher.engine();
        let (ledger, before) = (engine.runtime().ledger().clone(), engine.runtime().ledger().active());
        let checkpoint = Checkpoint::open(&model.folder).expect("opens");
        let parameters = CheckpointParameters(&checkpoint);
        let backend: Arc<dyn Backend> =
            Arc::new(CpuBackend::planning(CpuOptions { threads: Some(2), ..CpuOptions::default() }));
        let planned =
            keel_engine::plan::plan(&backend, &parameters, checkpoint.config(), options()).expect("plans");
        assert_eq!(planned, before, "{}", model.name);
        assert!(before.get(Category::Vision) > 0);
        for pictures in [&case.pictures, &negative(&case.pictures)] {
            answer(&mut batcher, model.request(0, &case.tokens, pictures));
        }
        assert_eq!((ledger.active(), ledger.peak()), (before, before), "{}", model.name);
        let kept = batcher.status().pictures;
        assert!(kept.kept == 2 && kept.held_bytes == 0 && kept.bytes <= kept.bytes_max, "{kept:?}");
    }
}

#[test]
fn requests_wait_for_the_room_of_features_and_what_never_fits_is_refused() {
    for model in Model::all() {
        let case = model.case("b_large");
        let one = EngineOptions {
            vision: Some(VisionOptions { patches: 256, pictures: 1, piece_tokens: VisionOptions::WHOLE }),
            ..options()
        };
        let probe = model.batcher(one, exactly());
        let bytes_max = probe.status().pictures.bytes_max;
        drop(probe);
        let mut batcher = model.batcher(one, exactly());
        // Six pictures, of which only a few have room at a time.
        let shifted = |by: u8| -> Vec<Picture> {
            let shift = |p: &Picture| Picture {
                rgb: p.rgb.iter().map(|v| v.wrapping_add(by)).collect(),
                ..p.clone()
            };
            case.pictures.iter().map(shift).collect()
        };
        let requests = (0..6).map(|i| model.request(i, &case.tokens, &shifted(40 * i as u8)));
        requests.for_each(|request| batcher.submit(request, Instant::now()).expect("accepted"));
        let mut outcomes: Vec<Outcome> = (0..6).map(|_| Outcome::default()).collect();
        while !batcher.is_idle() {
            step(&mut batcher, Instant::now(), &mut outcomes);
            let status = batcher.status().pictures;
            assert!(status.bytes <= bytes_max, "{}: {status:?}", model.name);
        }
        assert!(outcomes.iter().all(|outcome| outcome.error.is_none() && outcome.tokens.len() == ANSWER));
        assert_eq!(batcher.status().pictures.encoded, 6);
        // Many pictures in one prompt.
        let mut tokens = case.tokens.clone();
        let (mut pictures, mut n) = (shifted(1), 1);
        let run_of = case.tokens.iter().filter(|&&t| t == model.config.tokens.image).count() as u64;
        let bytes_of_one = run_of * model.config.text_hidden as u64 * model.config.levels() as u64 * 4;
        while bytes_of_one * n <= bytes_max {
            tokens.splice(
                0..0,
                [5].into_iter()
                    .chain(case.tokens.iter().copied().filter(|&t| t == model.config.tokens.image)),
            );
            pictures.extend(shifted(100 + n as u8));
            n += 1;
        }
        if tokens.len() + ANSWER <= batcher.engine().options().context {
            let refused =
                batcher.submit(model.request(9, &tokens, &pictures), Instant::now()).expect_err("too many");
            assert!(
                matches!(refused, EngineError::PicturesNeverFit { total_bytes, .. } if total_bytes == bytes_max)
            );
        }
        assert_all_is_back(&mut batcher);
    }
}

/// A step is always under way while answers run ahead of the host.
#[test]
fn features_are_let_go_once_a_prompt_has_been_run_also_ahead() {
    for model in Model::all() {
        let case = model.case("b_large");
        let mut batcher = Batcher::new(model.engine_on(&queueing(512).0, options()), exactly());
        batcher.submit(model.request(0, &case.tokens, &case.pictures), Instant::now()).expect("accepted");
        let mut outcomes = [Outcome::default()];
        while outcomes[0].tokens.len() < 4 {
            step(&mut batcher, Instant::now(), &mut outcomes);
        }
        let pictures = batcher.status().pictures;
        assert!(pictures.encoded > 0 && pictures.held_bytes == 0, "{}: {pictures:?}", model.name);
        batcher.cancel(0);
        assert_all_is_back(&mut batcher);
    }
}

#[test]
fn pictures_that_cannot_be_shown_are_refused_and_cancelled_ones_leave_nothing() {
    for model in Model::all() {
        let case = model.case("b_large");
        let mut blind = model.batcher(EngineOptions { vision: None, ..options() }, exactly());
        let refused = blind.submit(model.request(0, &case.tokens, &case.pictures), Instant::now());
        assert!(matches!(refused, Err(EngineError::NoVisionTower)), "{}", model.name);
        if !model.config.is_bidirectional() {
            let small = EngineOptions {
                vision: Some(VisionOptions { patches: 4, pictures: 9, piece_tokens: VisionOptions::WHOLE }),
                ..options()
            };
            let mut batcher = model.batcher(small, exactly());
            let refused = batcher.submit(model.request(0, &case.tokens, &case.pictures), Instant::now());
            assert!(matches!(refused, Err(EngineError::PicturePatches { planned: 4, .. })), "{refused:?}");
        }
        for steps in 0..4 {
            let mut batcher = model.batcher(options(), exactly());
            batcher.submit(model.request(0, &case.tokens, &case.pictures), Instant::now()).expect("accepted");
            for _ in 0..steps {
                batcher.step(Instant::now());
            }
            batcher.cancel(0);
            assert!(batcher.is_idle());
            assert_eq!(batcher.status().pictures.held_bytes, 0, "{} after {steps} steps", model.name);
            let after = answer(&mut batcher, model.request(0, &case.tokens, &case.pictures));
            assert_eq!(after.tokens.len(), ANSWER);
            assert_all_is_back(&mut batcher);
        }
    }
}

#[test]
fn prefixes_with_pictures_outlive_a_restart() {
    for model in Model::all() {
        let case = model.case("b_large");
        let folder = tempfile::tempdir().expect("a folder");
        let mut batcher = model.batcher(options(), exactly());
        if batcher.engine().cache().spec().sliding_window().is_some() {
            continue;
        }
        let expected = answer(&mut batcher, model.request(0, &case.tokens, &case.pictures));
        let other = answer(&mut model.fresh(), model.request(0, &case.tokens, &negative(&case.pictures)));
        assert!(batcher.save_prefixes("m", folder.path()).expect("written") > 0);
        let mut second = model.batcher(options(), exactly());
        // Names are given in the order in which pictures come, which differs after a restart.
        let unrelated = answer(&mut second, model.request(0, &case.tokens, &negative(&case.pictures)));
        assert!(unrelated.tokens == other.tokens && unrelated.cached == 0);
        second.forget_prefixes();
        let restored = second.restore_prefixes("m", folder.path());
        assert!(restored.texts > 0 && restored.problems.is_empty(), "{restored:?}");
        let again = answer(&mut second, model.request(0, &case.tokens, &negative(&case.pictures)));
        assert!(again.tokens == other.tokens && again.cached == 0, "{}: another picture", model.name);
        let known = answer(&mut second, model.request(0, &case.tokens, &case.pictures));
        assert!(known.tokens == expected.tokens && known.cached > 0, "{}", model.name);
        break_pictures(folder.path());
        second.forget_prefixes();
        let restored = second.restore_prefixes("m", folder.path());
        assert!(
            restored.texts == 0 && restored.problems.iter().all(|p| p.contains("picture")),
            "{restored:?}"
        );
        assert_all_is_back(&mut second);
    }
}

/// Removes the names of the pictures from an index.
fn break_pictures(folder: &Path) {
    let path = folder.join("index.json");
    let mut index: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).expect("read")).expect("JSON");
    for file in index["files"].as_array_mut().expect("a list") {
        file["pictures"] = serde_json::json!([]);
    }
    std::fs::write(path, index.to_string()).expect("written");
}
