//! Drafts after pictures.

use std::sync::Arc;

use crate::common::batching::{assert_all_is_back, run};
use crate::common::looking::{MadeUp, seeing};
use crate::common::queueing::queueing;
use crate::common::runtime;
use keel_array::Runtime;
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher, PictureInput, RequestVision};
use keel_engine::{Depth, Engine, EngineOptions, SpeculationOptions};
use keel_models::loading::CheckpointParameters;
use keel_testkit::fixtures::seeing_fixture;
use keel_weights::Checkpoint;

/// A batch of a model with an MTP head. Each round makes this many drafts.
fn batcher(runtime: &Runtime, drafts: usize) -> Batcher {
    let source = Checkpoint::open(&seeing_fixture("seeing_qwen3_5")).expect("opens");
    let options = EngineOptions { drafts, all_logits: false, ..seeing() };
    let engine = Engine::load(runtime, &CheckpointParameters(&source), source.config(), options, &|_| ())
        .expect("it loads");
    let speculation = SpeculationOptions { depth: Depth::Fixed(drafts), ..SpeculationOptions::default() };
    Batcher::new(engine, BatchOptions { speculation, ..BatchOptions::default() })
}

/// A raw prompt whose last token is a picture's.
fn request(batcher: &Batcher) -> BatchRequest {
    let config = batcher.engine().vision().expect("it sees");
    let MadeUp { values, grid, mut tokens, .. } = MadeUp::new(config, 3);
    let last = tokens.iter().rposition(|&token| token == config.tokens.image);
    tokens.truncate(last.expect("it shows a picture") + 1);
    let input = PictureInput { key: [7; 32], values: Arc::new(values), grid, is_video: false };
    let vision = RequestVision::new(config, &tokens, vec![input]).expect("the tokens fit");
    BatchRequest { vision: Some(vision), ..BatchRequest::new(0, tokens, 24) }
}

/// The features of a picture are let go once its prompt has been run. The head's first pass then runs the prompt's last
/// row, which is a picture's here.
#[test]
fn a_prompt_that_ends_with_a_picture_drafts() {
    let mut plain = batcher(&runtime(2), 0);
    let asked = vec![request(&plain)];
    let want = run(&mut plain, asked).swap_remove(0).tokens;
    assert_eq!(want.len(), 24);
    for runtime in [runtime(2), queueing(512).0] {
        let mut batcher = batcher(&runtime, 2);
        let asked = vec![request(&batcher)];
        let got = run(&mut batcher, asked).swap_remove(0);
        assert!(got.error.is_none(), "{:?}", got.error);
        assert_eq!(got.tokens, want);
        let status = batcher.status();
        assert!(status.speculation.drafted_total() > 0, "{:?}", status.speculation);
        assert_eq!((status.failed_steps, status.pictures.held_bytes), (0, 0));
        assert_all_is_back(&mut batcher);
    }
}
