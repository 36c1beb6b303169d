//! Plans and configs agree on the values that a config leaves out.

use std::sync::Arc;

use keel_array::{Backend, DType, WeightFormat};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::plan::{fit, steps};
use keel_engine::split::PlacedPart;
use keel_engine::{EngineOptions, VisionOptions};
use keel_models::loading::RandomParameters;
use serde_json::json;

/// Gemma 3 publishes configs without a context. Its reference then has 131072 tokens, other models 32768.
#[test]
fn the_longest_context_is_the_models_own_default() {
    let gemma = json!({
        "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512,
        "sliding_window": 64,
    });
    let mut llama = gemma.clone();
    llama["model_type"] = "llama".into();
    llama["rms_norm_eps"] = 1e-6.into();
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::planning(CpuOptions::default()));
    let parameters = RandomParameters { format: WeightFormat::Dense(DType::BF16) };
    for (config, context) in [(gemma, 131_072), (llama, 32_768)] {
        assert_eq!(keel_models::read_config(&config).expect("complete").context_max, context);
        let fit = fit(&backend, &parameters, &config, EngineOptions::default(), u64::MAX);
        assert_eq!(fit.expect("plans").context, context, "{config}");
    }
}

/// Gemma 3 runs a picture of 256 tokens in one step, however small the other steps are.
#[test]
fn a_list_of_steps_has_one_that_holds_a_whole_picture() {
    let config = json!({
        "model_type": "gemma3", "mm_tokens_per_image": 256, "text_config": {
            "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512,
            "sliding_window": 64,
        }, "vision_config": {
            "hidden_size": 48, "image_size": 224, "intermediate_size": 80, "num_attention_heads": 3,
            "num_hidden_layers": 1, "patch_size": 14,
        },
    });
    let backend: Arc<dyn Backend> = Arc::new(CpuBackend::planning(CpuOptions::default()));
    let devices = [PlacedPart::whole(Arc::clone(&backend))];
    let vision = VisionOptions { patches: 256, pictures: 1, piece_tokens: VisionOptions::WHOLE };
    let options = EngineOptions { prefill_step: 64, vision: Some(vision), ..EngineOptions::default() };
    let lines = steps(&devices, &*backend, &config, options).expect("a sound config");
    let rows = lines.iter().find(|line| line.starts_with("rows of a step of prompts")).expect("listed");
    assert!(rows.ends_with(" 256"), "{rows}");
    let text = EngineOptions { vision: None, ..options };
    let lines = steps(&devices, &*backend, &config, text).expect("a sound config");
    assert!(lines.iter().any(|line| line.starts_with("rows of a step of prompts") && line.ends_with(" 64")));
}
