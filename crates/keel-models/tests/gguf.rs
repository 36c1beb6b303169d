//! What the config of a GGUF file says, and what a config must not say for one to be written.

use std::path::Path;

use keel_models::gguf::{config, metadata, transformers_config};
use keel_models::{HybridConfig, QueryGrowth, RopeScaling, read_config};
use keel_testkit::fixtures::{GgufBuilder, GgufTensor};
use keel_weights::gguf::GgufFile;
use serde_json::{Value, json};

/// Elements of a head.
const HEAD_DIM: usize = 16;

/// The config of a file of an architecture, after `change`. `name` is that of the file.
fn read(name: &str, arch: &str, change: impl FnOnce(&mut GgufBuilder)) -> Result<Value, String> {
    let mut file = GgufBuilder::default();
    file.text("general.architecture", arch);
    for (key, value) in [
        ("block_count", 2),
        ("context_length", 256),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("attention.head_count", 4),
        ("attention.key_length", HEAD_DIM),
    ] {
        file.size(&format!("{arch}.{key}"), &value.into());
    }
    if arch.starts_with("qwen35") {
        for (key, value) in [
            ("ssm.time_step_rank", 4),
            ("ssm.inner_size", 64),
            ("ssm.group_count", 2),
            ("ssm.state_size", 16),
            ("ssm.conv_kernel", 4),
        ] {
            file.size(&format!("{arch}.{key}"), &value.into());
        }
    }
    add(&mut file, "token_embd.weight", &[100, 64]);
    change(&mut file);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gguf");
    std::fs::create_dir_all(&folder).expect("the target folder is writable");
    let path = folder.join(format!("{name}.gguf"));
    std::fs::write(&path, file.bytes(|_| false)).expect("writable");
    config(&GgufFile::open(&path).expect("sound")).map_err(|error| error.to_string())
}

fn add(file: &mut GgufBuilder, name: &str, shape: &[usize]) {
    let values = vec![0.5; shape.iter().product()];
    file.tensors.push(GgufTensor { name: name.into(), shape: shape.into(), values });
}

fn numbers(config: &Value) -> HybridConfig {
    read_config(config).unwrap_or_else(|error| panic!("{error}: {config}"))
}

#[test]
fn biases_are_those_of_the_tensors() {
    for arch in ["llama", "qwen3", "qwen3vl", "olmo2"] {
        let json = read("unbiased", arch, |_| ()).expect("complete");
        assert_eq!(json["attention_bias"], false, "{arch}");
        let json = read("biased", arch, |file| {
            ["q", "k", "v", "output"].iter().for_each(|n| add(file, &format!("blk.1.attn_{n}.bias"), &[64]));
        });
        assert_eq!(json.expect("complete")["attention_bias"], true, "{arch}");
    }
    for (arch, tensor) in [
        ("phi3", "blk.0.attn_qkv.bias"),
        ("mistral3", "blk.0.attn_q.bias"),
        ("qwen2", "blk.1.attn_output.bias"),
        ("qwen3", "blk.0.ffn_up.bias"),
        ("qwen3", "blk.0.attn_norm.bias"),
        ("qwen35", "blk.1.attn_q.bias"),
    ] {
        let message = read("refused", arch, |file| add(file, tensor, &[64])).expect_err("another model");
        assert!(message.contains(tensor) && message.contains(arch), "{message}");
    }
    read("recurrent", "qwen35", |file| add(file, "blk.0.ssm_dt.bias", &[4])).expect("a parameter");
}

#[test]
fn whole_heads_rotate_unless_the_file_says_otherwise() {
    for arch in ["qwen3", "glm4", "qwen35"] {
        let json = read("rotary", arch, |_| ()).expect("complete");
        assert_eq!(numbers(&json).rotary, HEAD_DIM, "{arch}");
        let json = read("rotary", arch, |file| file.size(&format!("{arch}.rope.dimension_count"), &4.into()));
        assert_eq!(numbers(&json.expect("complete")).rotary, 4, "{arch}");
    }
}

#[test]
fn yarn_lengthens_the_context() {
    let context = |original: Option<usize>| {
        let json = read("yarn", "qwen3", |file| {
            file.text("qwen3.rope.scaling.type", "yarn");
            file.float("qwen3.rope.scaling.factor", 4.0);
            if let Some(original) = original {
                file.size("qwen3.rope.scaling.original_context_length", &original.into());
            }
        });
        numbers(&json.expect("complete")).context_max
    };
    // The file's own context is 256. Without another length it is the one that is stretched.
    assert_eq!([Some(128), Some(32), None].map(context), [512, 256, 1024]);
}

/// The tensors are written with `model.` before their names, as those of a text model.
#[test]
fn a_written_checkpoint_has_the_model_type_of_a_text_model() {
    let experts = |file: &mut GgufBuilder| {
        for key in ["expert_count", "expert_used_count", "expert_feed_forward_length"] {
            file.size(&format!("qwen35moe.{key}"), &16.into());
        }
    };
    for (json, text, class) in [
        (read("text", "qwen35", |_| ()), "qwen3_5_text", "Qwen3_5ForCausalLM"),
        (read("text", "qwen35moe", experts), "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    ] {
        let json = json.expect("complete");
        let written = transformers_config(&json);
        assert_eq!((&written["model_type"], &written["architectures"]), (&json!(text), &json!([class])));
        let (from, mut to) = (numbers(&json), numbers(&written));
        to.model_type.clone_from(&from.model_type);
        assert_eq!(to, from, "{text}");
        metadata(&written, &numbers(&written), false).expect("it can be a file again");
    }
    let llama = read("text", "llama", |_| ()).expect("complete");
    assert_eq!(transformers_config(&llama), llama);
}

#[test]
fn queries_that_grow_need_no_scaling() {
    let json = read("growing", "mistral3", |file| file.float("mistral3.attention.temperature_scale", 0.125));
    let c = numbers(&json.expect("complete"));
    let grown = |original| Some(QueryGrowth { beta: 0.125, original });
    assert_eq!((c.query_growth, c.rope_scaling), (grown(256), RopeScaling::None));
    let json = read("growing", "mistral3", |file| {
        file.float("mistral3.attention.temperature_scale", 0.125);
        file.text("mistral3.rope.scaling.type", "none");
        file.size("mistral3.rope.scaling.original_context_length", &64.into());
    });
    let c = numbers(&json.expect("complete"));
    assert_eq!((c.query_growth, c.rope_scaling), (grown(64), RopeScaling::None));
}

#[test]
fn divisors_are_checked() {
    let with = |values: &[f32]| {
        let values = values.to_vec();
        read("divisors", "llama", |file| {
            let (name, shape) = ("rope_freqs.weight".into(), vec![values.len()]);
            file.tensors.push(GgufTensor { name, shape, values });
        })
    };
    let json = with(&[1.0, 1.0, 1.0, 2.0, 2.0, 4.0, 8.0, 8.0]).expect("one for each frequency");
    assert!(matches!(numbers(&json).rope_scaling, RopeScaling::Divisors(list) if list[5] == 4.0));
    let message = with(&[1.0; 7]).expect_err("there are 8 frequencies");
    assert!(message.contains("rope_freqs.weight") && message.contains("[8]"), "{message}");
    for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let json = with(&[1.0, 1.0, 1.0, 2.0, 2.0, 4.0, 8.0, wrong]).expect("the shape fits");
        let message = read_config(&json).expect_err("no divisor").to_string();
        assert!(message.contains("divisors"), "{wrong}: {message}");
    }
    let long = read("long", "phi3", |file| {
        file.size("phi3.rope.scaling.original_context_length", &64.into());
        add(file, "rope_factors_short.weight", &[8]);
        add(file, "rope_factors_long.weight", &[4, 2]);
    });
    let message = long.expect_err("a list is expected");
    assert!(message.contains("rope_factors_long.weight"), "{message}");
}

#[test]
fn a_shared_expert_is_as_wide_as_its_tensors_where_the_file_has_no_number() {
    let experts = |file: &mut GgufBuilder| {
        for (key, value) in
            [("expert_count", 4), ("expert_used_count", 2), ("expert_feed_forward_length", 32)]
        {
            file.size(&format!("qwen35moe.{key}"), &value.into());
        }
    };
    let shared = |json: Result<Value, String>| {
        numbers(&json.expect("complete")).moe.expect("it has experts").shared_intermediate
    };
    assert_eq!(shared(read("shared", "qwen35moe", experts)), None);
    let with_tensor = read("shared", "qwen35moe", |file| {
        experts(file);
        add(file, "blk.0.ffn_gate_shexp.weight", &[48, 64]);
    });
    assert_eq!(shared(with_tensor), Some(48));
}

#[test]
fn what_a_file_cannot_say_is_refused() {
    let written = |model_type: &str, more: Value| {
        let mut json = json!({"model_type": model_type, "hidden_size": 64, "intermediate_size": 96,
            "vocab_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
            "head_dim": 32, "sliding_window": 16});
        more.as_object().into_iter().flatten().for_each(|(key, value)| json[key] = value.clone());
        metadata(&json, &numbers(&json), false).map(drop).map_err(|error| error.to_string())
    };
    written("llama", json!({})).expect("usual");
    written("gemma3_text", json!({"query_pre_attn_scalar": 32})).expect("usual");
    for (model_type, key, value) in [
        ("llama", "hidden_act", json!("gelu_pytorch_tanh")),
        ("qwen3", "hidden_act", json!("gelu_pytorch_tanh")),
        ("gemma3_text", "hidden_activation", json!("silu")),
        ("gemma3_text", "query_pre_attn_scalar", json!(168)),
    ] {
        let message = written(model_type, json!({"query_pre_attn_scalar": 32, key: value}));
        let message = message.expect_err("the file would be another model");
        assert!(message.contains(key) && message.contains("cannot say"), "{message}");
    }
}
