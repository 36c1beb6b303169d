//! Plain transformers of other families against plain loops, with made-up parameters. The loops are compared with the
//! references of the fixtures that exist.

#[path = "../common/plainly.rs"]
mod computed;

use std::ops::Range;

use crate::common::{all_logits, exact, expected, relative_error, runtime};
use keel_array::{DType, RowData, WeightFormat, WeightSpec};
use keel_engine::Engine;
use keel_models::loading::{Altered, CheckpointParameters, Parameters, RandomParameters, RowSink};
use keel_testkit::fixtures_plain::{OTHERS, other_fixture};
use keel_testkit::random::Random;
use keel_weights::Checkpoint;
use serde_json::{Value, json};

/// f32 parameters that are derived from their names, large enough that scores matter.
struct MadeUp;

fn made_up(name: &str, count: usize, deviation: f32, mean: f32) -> Vec<f32> {
    let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    let mut random = Random::new(seed);
    let mut value = || random.below(1 << 20) as f32 / (1 << 19) as f32 - 1.0;
    (0..count).map(|_| mean + deviation * value()).collect()
}

impl Altered for MadeUp {
    fn inner(&self) -> &dyn Parameters {
        &RandomParameters { format: WeightFormat::Dense(DType::F32) }
    }

    fn contains(&self, name: &str) -> bool {
        !name.contains("language_model")
    }

    fn linear_format(
        &self,
        _module: &str,
        _experts: Option<usize>,
        _rows: usize,
        _cols: usize,
    ) -> keel_models::Result<WeightFormat> {
        Ok(WeightFormat::Dense(DType::F32))
    }

    fn linear_rows(
        &self,
        module: &str,
        _expert: Option<usize>,
        rows: Range<usize>,
        spec: &WeightSpec,
        sink: &mut RowSink<'_>,
    ) -> keel_models::Result<()> {
        let deviation = 3.0 / (spec.cols as f32).sqrt();
        for row in rows {
            let values = made_up(&format!("{module}.{row}"), spec.cols, deviation, 0.0);
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            sink(1, RowData::Dense(&bytes))?;
        }
        Ok(())
    }

    fn values(&self, name: &str, elements: usize) -> keel_models::Result<Vec<f32>> {
        let mean = if name.contains("norm") { 1.0 } else { 0.0 };
        Ok(made_up(name, elements, 0.5, mean))
    }

    fn rows_are_alike(&self) -> bool {
        false
    }

    fn norms_are_scales(&self) -> bool {
        false
    }
}

fn with(model_type: &str, more: Value) -> Value {
    let mut config = json!({
        "model_type": model_type, "hidden_size": 48, "vocab_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 56,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        "sliding_window": null, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}
    });
    for (key, value) in more.as_object().expect("an object") {
        config[key] = value.clone();
    }
    config
}

fn configs() -> Vec<Value> {
    let kinds = json!(["sliding_attention", "full_attention", "sliding_attention"]);
    let yarn = json!({"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 20});
    let long = |original: usize| {
        json!({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": original, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5]}, "original_max_position_embeddings": original})
    };
    let mut growing = yarn.clone();
    for (key, value) in [("llama_4_scaling_beta", 0.3), ("mscale", 1.0), ("mscale_all_dim", 1.0)] {
        growing[key] = value.into();
    }
    vec![
        with("mistral", json!({})),
        with("mistral", json!({"sliding_window": 9, "head_dim": 32})),
        with("ministral", json!({"sliding_window": 9, "layer_types": kinds})),
        with("ministral3", json!({"rope_parameters": growing})),
        with("smollm3", json!({"no_rope_layers": [1, 0, 1], "tie_word_embeddings": true})),
        with(
            "phi3",
            json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ),
        with("phi3", long(64)),
        with("phi3", long(32)),
        with(
            "olmo3",
            json!({"sliding_window": 9, "layer_types": kinds, "rope_parameters": {
            "full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
        ),
        with(
            "glm4",
            json!({"attention_bias": true,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ),
    ]
}

#[test]
fn models_made_up_here_give_the_logits_of_plain_loops() {
    let ids: Vec<u32> = (0..40).map(|i| (i * i * 5 + i) % 80).collect();
    for config in configs() {
        let want = computed::logits(&config, &MadeUp, &ids);
        for one_by_one in [false, true] {
            let mut engine = Engine::load(&runtime(2), &MadeUp, &config, exact(), &|_| ())
                .unwrap_or_else(|e| panic!("{config}: {e}"));
            let (logits, _) = all_logits(&mut engine, &ids, one_by_one, false);
            let error = relative_error(&logits, &want);
            assert!(error <= 1e-4, "{config}: logits differ by {error:.1e}");
        }
    }
}

#[test]
fn an_unknown_type_with_llamas_tensors_says_what_is_not_understood() {
    let config = with("granite", json!({"attention_multiplier": 0.5, "rope_parameters": null}));
    let refused = Engine::load(&runtime(1), &MadeUp, &config, exact(), &|_| ()).err();
    let message = refused.expect("scores would be wrong").to_string();
    assert!(message.contains("granite") && message.contains("attention_multiplier (0.5)"), "{message}");
}

/// Checks the loops themselves. The other tests compare with them.
#[test]
fn the_loops_are_those_of_the_reference() {
    for name in OTHERS {
        let Some(folder) = other_fixture(name) else { continue };
        let checkpoint = Checkpoint::open(&folder).expect("the fixture opens");
        let want = expected(&folder);
        let logits = computed::logits(checkpoint.config(), &CheckpointParameters(&checkpoint), &want.ids);
        let error = relative_error(&logits, &want.logits);
        assert!(error <= 1e-5, "{name}: logits differ by {error:.1e}");
    }
}
