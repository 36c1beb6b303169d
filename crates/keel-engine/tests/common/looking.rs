//! Engines that look at a made-up picture.

use std::sync::Arc;

use keel_cache::{SeenPicture, VisionInputs};
use keel_engine::{Engine, EngineOptions, Features, PatchGrid, VisionOptions};
use keel_models::vision::{ImageRun, TowerKind, VisionConfig, prompt_layout, run_ends};
use keel_testkit::random::Random;

use super::exact;

/// Options for a picture of 64 patches.
pub fn seeing() -> EngineOptions {
    let vision = VisionOptions { patches: 64, pictures: 2, piece_tokens: VisionOptions::WHOLE };
    EngineOptions { vision: Some(vision), ..exact() }
}

/// A made-up picture, and a prompt that shows it.
pub struct MadeUp {
    pub values: Vec<f32>,
    pub grid: PatchGrid,
    pub tokens: Vec<u32>,
    runs: Vec<ImageRun>,
}

impl MadeUp {
    /// The picture of this seed.
    pub fn new(config: &VisionConfig, seed: u64) -> MadeUp {
        let grid = PatchGrid { t: 1, h: 4, w: 6 };
        let (count, runs) = match config.kind {
            TowerKind::Qwen { .. } => (24 * config.patch_values(), config.runs_of(1, 4, 6, &mut 0)),
            TowerKind::Siglip { image_size, .. } => {
                (3 * image_size * image_size, config.runs_of(1, 1, 1, &mut 0))
            }
        };
        let rows: usize = runs.iter().map(|run| run.height * run.width).sum();
        let mut tokens = vec![5, 9, config.tokens.start];
        tokens.extend(vec![config.tokens.image; rows]);
        tokens.extend([config.tokens.end, 17, 4]);
        MadeUp { values: Random::new(seed).uniforms(count, -1.0, 1.0), grid, tokens, runs }
    }
}

/// The features of a made-up picture, and the logits of a prompt that shows it.
pub fn outcome(engine: &mut Engine) -> (Features, Vec<f32>) {
    let config = engine.vision().expect("it sees").clone();
    let MadeUp { values, grid, tokens, runs } = MadeUp::new(&config, 3);
    let features = engine.encode_picture(&values, grid).expect("it encodes");
    let plan = prompt_layout(&config, &tokens, &runs, &[]).expect("the tokens fit");
    let ends = if config.is_bidirectional() { run_ends(&config, &plan) } else { Vec::new() };
    let picture = SeenPicture { first: 0, features: Arc::new(features.clone()) };
    let mut sequence = engine.open().expect("a slot is free");
    sequence.set_vision_inputs(Some(Arc::new(VisionInputs {
        positions: plan.positions,
        delta: plan.delta,
        rows: plan.features,
        ends,
        pictures: vec![picture],
        width: config.text_hidden,
    })));
    let mut logits = Vec::new();
    let mut sink = |row: &[f32]| {
        logits.extend_from_slice(row);
        Ok(())
    };
    engine.all_logits(&mut sequence, &tokens, false, &mut sink, None).expect("the prompt runs");
    engine.release(sequence);
    (features, logits)
}
