//! The quick plan: never more than the whole one, and the same but for the memory of steps.

use std::sync::Arc;

use crate::common::{demo, fixture};
use keel_array::{Backend, Category};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_cuda::{CudaBackend, CudaOptions};
use keel_engine::{EngineOptions, VisionOptions, plan};
use keel_models::loading::CheckpointParameters;
use keel_testkit::fixtures::{VLM, vlm_fixture};
use keel_weights::Checkpoint;

#[test]
fn the_largest_steps_tell_at_least_what_a_plan_holds() {
    let backends: [Arc<dyn Backend>; 2] = [
        Arc::new(CpuBackend::planning(CpuOptions { threads: Some(2), ..CpuOptions::default() })),
        Arc::new(CudaBackend::planning(&CudaOptions::default())),
    ];
    let plain = ["llama", "gemma3_text", "qwen3_5", "qwen3_5_moe"].map(|name| (fixture(name), false));
    let seeing = VLM.into_iter().filter_map(vlm_fixture).map(|folder| (folder, true));
    for (folder, sees) in [(demo(), false)].into_iter().chain(plain).chain(seeing) {
        let checkpoint = Checkpoint::open(&folder).expect("opens");
        let (parameters, config) = (CheckpointParameters(&checkpoint), checkpoint.config());
        let vision = VisionOptions { patches: 256, pictures: 2, piece_tokens: 64 };
        let options = EngineOptions {
            context: 512,
            sequences: 9,
            pool_pages: Some(8),
            vision: sees.then_some(vision),
            ..EngineOptions::default()
        };
        for backend in &backends {
            let whole = plan::plan(backend, &parameters, config, options).expect("plans");
            let quick = plan::at_least(backend, &parameters, config, options).expect("plans");
            for (category, bytes) in whole.iter() {
                let of_steps = matches!(category, Category::Activations | Category::Workspace);
                let holds =
                    if of_steps { quick.get(category) <= bytes } else { quick.get(category) == bytes };
                assert!(holds, "{}: {category} {bytes}, quickly {}", folder.display(), quick.get(category));
            }
            // It is no guess: steps of other kinds than the largest hardly ever need more.
            assert!(quick.total() * 10 >= whole.total() * 9, "{}: {whole:?} {quick:?}", folder.display());
        }
    }
}
