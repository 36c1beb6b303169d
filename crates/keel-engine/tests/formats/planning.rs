//! Plans and configs agree on what a config leaves out.

use std::sync::Arc;

use keel_array::{Backend, DType, WeightFormat};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::EngineOptions;
use keel_engine::plan::fit;
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
