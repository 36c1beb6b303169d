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
