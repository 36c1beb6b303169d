//! Qwen3-VL with experts against transformers: features, positions, logits, other forms of its weights, and splits.

use std::sync::Arc;

use crate::common::splitting::{self, backends, end, load_on};
use crate::common::{device, exact, relative_error};
use keel_array::DType;
use keel_cache::{Features, SeenPicture, VisionInputs};
use keel_engine::{Engine, EngineOptions, PatchGrid, VisionOptions};
use keel_models::loading::{CheckpointParameters, Parameters};
use keel_models::vision::prompt_layout;
use keel_testkit::fixtures::qwen3_vl_moe;
use keel_weights::quantize::{
    Dequantized, QuantizeRecipe, SafetensorsForm, quantize_checkpoint, write_config, write_safetensors,
};
use keel_weights::{AffineFormat, Checkpoint, SafetensorsFile, TensorSource};

const FEATURES_MAX: f64 = 2e-5;
const LOGITS_MAX: f64 = 1e-4;

/// Outputs of transformers.
struct Reference(SafetensorsFile);

impl Reference {
    fn open() -> Reference {
        let path = qwen3_vl_moe().join("expected.safetensors");
        Reference(SafetensorsFile::open(&path).expect("opens"))
    }

    fn floats(&self, tensor: &str) -> Vec<f32> {
        self.0.tensor(tensor).expect("there").to_f32().expect("float")
    }

    fn ints(&self, tensor: &str) -> Vec<u32> {
        let bytes = self.0.tensor(tensor).expect("there").bytes();
        bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    }
}

fn options() -> EngineOptions {
    let vision = VisionOptions { patches: 64, pictures: 0, piece_tokens: VisionOptions::WHOLE };
    EngineOptions { vision: Some(vision), ..exact() }
}

fn engine(checkpoint: &Checkpoint) -> Engine {
    let parameters = CheckpointParameters(checkpoint);
    Engine::load(&device(), &parameters, checkpoint.config(), options(), &|_| ()).expect("the model loads")
}

/// The logits of the reference's prompt, whose two pictures the engine looks at. Features and positions are compared.
fn logits(engine: &mut Engine, reference: &Reference, one_by_one: bool) -> Vec<f32> {
    let config = engine.vision().expect("it sees").clone();
    let (pixels, grids) = (reference.floats("pixel_values"), reference.ints("image_grid_thw"));
    let mut levels = vec![Vec::new(); config.levels()];
    let (mut start, mut first, mut runs) = (0, 0, Vec::new());
    for grid in grids.chunks_exact(3) {
        let [t, h, w] = [0, 1, 2].map(|axis| grid[axis] as usize);
        let count = t * h * w * config.patch_values();
        let picture = &pixels[start..start + count];
        start += count;
        let features = engine.encode_picture(picture, PatchGrid { t, h, w }).expect("it encodes");
        levels.iter_mut().zip(features.levels).for_each(|(all, more)| all.extend(more));
        runs.extend(config.runs_of(t, h, w, &mut first));
    }
    for (level, tensor) in
        levels.iter().zip(["image_features", "deepstack_features.0", "deepstack_features.1"])
    {
        let error = relative_error(level, &reference.floats(tensor));
        assert!(error <= FEATURES_MAX, "{tensor}: {error:.1e}");
    }
    let tokens = reference.ints("input_ids");
    let plan = prompt_layout(&config, &tokens, &runs, &[]).expect("the tokens fit");
    let positions: Vec<u32> =
        (0..3).flat_map(|axis| plan.positions.iter().map(move |place| place[axis] as u32)).collect();
    assert_eq!(positions, reference.ints("position_ids"));
    assert_eq!(plan.delta as u32, reference.ints("rope_deltas")[0]);
    let pictures = vec![SeenPicture { first: 0, features: Arc::new(Features { levels }) }];
    let (rows, width) = (plan.features, config.text_hidden);
    let vision = VisionInputs {
        positions: plan.positions,
        delta: plan.delta,
        rows,
        ends: Vec::new(),
        pictures,
        width,
    };
    let mut sequence = engine.open().expect("a slot is free");
    sequence.set_vision_inputs(Some(Arc::new(vision)));
    let mut logits = Vec::new();
    let mut sink = |row: &[f32]| {
        logits.extend_from_slice(row);
        Ok(())
    };
    engine.all_logits(&mut sequence, &tokens, one_by_one, &mut sink, None).expect("the prompt runs");
    engine.release(sequence);
    logits
}

#[test]
fn features_positions_and_logits_are_those_of_transformers() {
    let reference = Reference::open();
    let mut engine = engine(&Checkpoint::open(&qwen3_vl_moe()).expect("opens"));
    for one_by_one in [false, true] {
        let error = relative_error(&logits(&mut engine, &reference, one_by_one), &reference.floats("logits"));
        assert!(error <= LOGITS_MAX, "one by one {one_by_one}: {error:.1e}");
    }
}

#[test]
fn split_models_give_the_same_logits() {
    let reference = Reference::open();
    let checkpoint = Checkpoint::open(&qwen3_vl_moe()).expect("opens");
    let source = (&CheckpointParameters(&checkpoint) as &dyn Parameters, checkpoint.config());
    for grid in [(3, 1), (1, 2), (2, 2)] {
        let parts = splitting::parts(source, options(), grid).expect("it can be split");
        let mut engine =
            load_on(source, options(), backends(grid.0 * grid.1, false), &parts).expect("it loads");
        let error = relative_error(&logits(&mut engine, &reference, false), &reference.floats("logits"));
        assert!(error <= LOGITS_MAX, "{grid:?}: {error:.1e}");
        end(engine);
    }
}

/// A copy whose experts are stored by rows, and one with separate stacks of gate and up.
#[test]
fn converted_copies_have_the_same_experts() {
    let reference = Reference::open();
    let source = Checkpoint::open(&qwen3_vl_moe()).expect("opens");
    let folders = [(); 2].map(|()| tempfile::tempdir().expect("a temporary folder"));
    let [by_rows, stacked] = folders.each_ref().map(tempfile::TempDir::path);
    let dense = Dequantized::new(&source).expect("sound");
    let form = SafetensorsForm::Dense(Some(DType::BF16));
    let (_, section) =
        write_safetensors(&dense, by_rows, source.metadata(), &form, &mut |_| ()).expect("written");
    write_config(by_rows, source.config(), section).expect("written");
    let copy = Checkpoint::open(by_rows).expect("opens");
    let up = "model.language_model.layers.0.mlp.experts.gate_up_proj";
    assert_eq!(source.info(up).expect("there").shape, [6, 48, 32]);
    assert_eq!(copy.info(up).expect("there").shape, [6, 32, 48]);
    assert!(logits(&mut engine(&copy), &reference, false) == logits(&mut engine(&source), &reference, false));

    let recipe = QuantizeRecipe::new(AffineFormat::new(8, 32).expect("a format"));
    quantize_checkpoint(&qwen3_vl_moe(), stacked, &recipe, &mut |_| ()).expect("written");
    compare_stacks(&source, &Checkpoint::open(stacked).expect("opens"));
}

/// Compares an expert of both checkpoints. Its rows are no whole groups, so they stay dense.
fn compare_stacks(source: &Checkpoint, copy: &Checkpoint) {
    let layer = "model.language_model.layers.2.mlp";
    let rows = |checkpoint: &Checkpoint, module: &str, range: std::ops::Range<usize>| {
        let linear = checkpoint.linear(&format!("{layer}.{module}")).expect("there");
        let mut values = vec![0.0; range.len() * linear.info().cols];
        linear.rows_f32(range, &mut values).expect("these rows");
        values
    };
    // Expert 4: 16 rows of gate, then 16 of up.
    for (stack, first) in [("gate_proj", 0), ("up_proj", 16)] {
        let want = rows(source, "experts.gate_up_proj", 4 * 32 + first..4 * 32 + first + 16);
        let got = rows(copy, &format!("switch_mlp.{stack}"), 4 * 16..5 * 16);
        assert_eq!(got, want, "{stack}");
    }
    let down = |checkpoint: &Checkpoint, module: &str| rows(checkpoint, module, 4 * 48..5 * 48);
    assert_eq!(down(copy, "switch_mlp.down_proj"), down(source, "experts.down_proj"));
}
