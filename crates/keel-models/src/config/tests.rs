use super::*;
use serde_json::json;

fn minimal() -> Value {
    json!({
        "model_type": "qwen3_5", "hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4, "rope_theta": 5000.0, "partial_rotary_factor": 0.25
    })
}

#[test]
fn flat_and_nested_layouts_give_the_same_numbers() {
    let flat = HybridConfig::from_json(&minimal()).expect("complete");
    let mut text = minimal();
    text["rope_parameters"] = json!({"rope_theta": 5000.0, "partial_rotary_factor": 0.25});
    text["rope_theta"] = Value::Null;
    text["partial_rotary_factor"] = Value::Null;
    let nested = json!({"model_type": "qwen3_5", "text_config": text});
    assert_eq!(HybridConfig::from_json(&nested).expect("complete"), flat);
    assert_eq!(
        (flat.rotary, flat.layers[3], flat.layers[4]),
        (8, MixerKind::Attention, MixerKind::GatedDelta)
    );
    assert_eq!(flat.recurrent_layers().conv_channels(), 2 * 2 * 16 + 4 * 24);
}

#[test]
fn errors_name_the_key() {
    for (key, value) in [
        ("hidden_size", json!(null)),
        ("hidden_size", json!("wide")),
        ("linear_conv_kernel_dim", json!(1)),
        ("num_key_value_heads", json!(3)),
        ("layer_types", json!(["full_attention"])),
        ("vocab_size", json!(0)),
        ("rms_norm_eps", json!(-1)),
    ] {
        let mut config = minimal();
        config[key] = value;
        let message = HybridConfig::from_json(&config).expect_err("must not pass").to_string();
        assert!(message.contains(key), "{key}: {message}");
    }
}

/// Each number is allowed. Lists of the rows of such heads would take gigabytes before a tensor's shape is compared.
#[test]
fn heads_are_bounded_together() {
    for (key, size) in
        [("num_attention_heads", "head_dim"), ("linear_num_value_heads", "linear_value_head_dim")]
    {
        let mut config = minimal();
        (config[key], config[size]) = (json!(1 << 20), json!(512));
        let message = HybridConfig::from_json(&config).expect_err("must not pass").to_string();
        assert!(message.contains("heads times their size is above 2^20"), "{key}: {message}");
    }
}

#[test]
fn sections_of_positions_matter_only_where_pictures_are_read() {
    let mut config = minimal();
    config["rope_parameters"] =
        json!({"rope_theta": 5000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 0]});
    let text = crate::read_config(&config).expect("a text model reads none of them");
    assert_eq!(text.rope_sections.map(|sections| sections.counts), Some([2, 1, 0]));
    for (i, key) in ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"]
        .iter()
        .enumerate()
    {
        config[*key] = json!(5 + i);
    }
    config["vision_config"] = json!({"depth": 2, "hidden_size": 48, "num_heads": 2, "intermediate_size": 64,
        "num_position_embeddings": 81, "out_hidden_size": 64});
    crate::read_config(&config).expect("nor one whose tower is left out");
    let message = crate::vision::read_vision(&config).expect_err("must not pass").to_string();
    assert!(message.contains("mrope_section") && message.contains("3"), "{message}");
    config["rope_parameters"]["mrope_section"] = json!([2, 1, 1]);
    crate::vision::read_vision(&config).expect("they add up");
}

#[test]
fn keys_that_hybrids_leave_out_have_the_values_of_the_reference() {
    let mut config = minimal();
    config["partial_rotary_factor"] = Value::Null;
    let c = HybridConfig::from_json(&config).expect("the rest is there");
    assert_eq!((c.head_dim, c.rotary), (32, 8));
    config["partial_rotary_factor"] = json!(1.0);
    assert_eq!(HybridConfig::from_json(&config).expect("complete").rotary, 32);
    for (key, value) in [("num_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 48)] {
        config[key] = value.into();
    }
    let shared = |config: &Value| {
        HybridConfig::from_json(config).expect("complete").moe.expect("it has experts").shared_intermediate
    };
    assert_eq!(shared(&config), Some(512));
    config["shared_expert_intermediate_size"] = 80.into();
    assert_eq!(shared(&config), Some(80));
    config["shared_expert_intermediate_size"] = 0.into();
    assert_eq!(shared(&config), None);
}

#[test]
fn hybrids_have_one_activation_and_no_biases_in_attention() {
    for (key, value) in [("hidden_act", json!("gelu_pytorch_tanh")), ("attention_bias", json!(true))] {
        let mut config = minimal();
        config[key] = value;
        let message = HybridConfig::from_json(&config).expect_err("it would be another model").to_string();
        assert!(message.contains(key) && message.contains("not supported"), "{message}");
    }
}

/// Without recurrent layers, nothing reads or bounds their numbers.
#[test]
fn numbers_of_recurrent_layers_are_ignored_where_there_are_none() {
    let mut config = minimal();
    config["layer_types"] = vec!["full_attention"; 8].into();
    config["linear_num_key_heads"] = json!(u64::MAX);
    let c = HybridConfig::from_json(&config).expect("no layer has key heads");
    assert_eq!(c.recurrent, None);
    assert!(c.products_per_token() > 0);
}

#[test]
fn products_of_huge_mixtures_do_not_overflow() {
    let mut config = minimal();
    for (key, value) in [
        ("hidden_size", 1 << 24),
        ("num_hidden_layers", 4096),
        ("num_experts", 1 << 14),
        ("num_experts_per_tok", 1 << 14),
        ("moe_intermediate_size", 1 << 24),
    ] {
        config[key] = value.into();
    }
    let c = HybridConfig::from_json(&config).expect("each number is allowed");
    assert_eq!(c.products_per_token(), u64::MAX);
}

#[test]
fn divisors_are_one_for_each_frequency() {
    let mut config = minimal();
    config["rope_scaling"] = json!({"rope_type": "divisors", "divisors": [1.0, 2.0, 4.0]});
    let message = crate::read_config(&config).expect_err("there are 4 frequencies").to_string();
    assert!(message.contains("divisors of the rope has 3 numbers, expected 4"), "{message}");
    config["rope_scaling"]["divisors"] = json!([1.0, 2.0, 4.0, 8.0]);
    crate::read_config(&config).expect("they fit");
}

/// Qwen's model cards tell users to add this to the config of a published model.
#[test]
fn yarn_lengthens_the_context() {
    let yarn = |kind: &str, factor: f64, original: usize| {
        json!({kind: "yarn", "factor": factor, "original_max_position_embeddings": original,
            "rope_theta": 5000.0, "partial_rotary_factor": 0.25})
    };
    let context = |model_type: &str, key: &str, rope: Value| {
        let mut config = minimal();
        config["model_type"] = model_type.into();
        config["max_position_embeddings"] = 40_960.into();
        config[key] = rope;
        crate::read_config(&config).map(|c| c.context_max).map_err(|error| error.to_string())
    };
    for model_type in ["qwen3_5", "qwen3"] {
        for (key, kind) in [("rope_parameters", "rope_type"), ("rope_scaling", "type")] {
            let of = |factor, original| context(model_type, key, yarn(kind, factor, original));
            assert_eq!(of(4.0, 32_768), Ok(131_072), "{model_type}, {key}");
            assert_eq!(of(4.0, 8192), Ok(40_960), "{model_type}: the stated context is longer");
            let message = of(1e6, 32_768).expect_err("it is out of range");
            assert!(message.contains("factor times original_max_position_embeddings"), "{message}");
        }
        let linear = json!({"rope_type": "linear", "factor": 4.0});
        assert_eq!(context(model_type, "rope_scaling", linear), Ok(40_960), "{model_type}");
    }
}
