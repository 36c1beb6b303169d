//! Configs that are read from GGUF files, and configs for which no GGUF file is written.

use std::path::{Path, PathBuf};

use keel_models::gguf::{
    ARCHITECTURES, GgufAsCheckpoint, config, metadata, portable_config, transformers_config,
};
use keel_models::{HybridConfig, QueryGrowth, RopeScaling, read_config};
use keel_testkit::fixtures::{GgufBuilder, GgufTensor};
use keel_weights::gguf::GgufFile;
use keel_weights::quantize::{QuantizeRecipe, RowSource, SafetensorsForm, write_safetensors};
use keel_weights::{AffineFormat, SafetensorsFile};
use serde_json::{Value, json};

/// Elements of a head.
const HEAD_DIM: usize = 16;

/// The path of a file of [`read`].
fn path_of(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("gguf").join(format!("{name}.gguf"))
}

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
    if arch.starts_with("qwen35") || arch == "qwen3next" {
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
    let path = path_of(name);
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("the target folder is writable");
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

/// Adds three numbers of a mixture of experts.
fn add_experts(file: &mut GgufBuilder, arch: &str, experts: usize, chosen: usize, width: usize) {
    for (key, value) in
        [("expert_count", experts), ("expert_used_count", chosen), ("expert_feed_forward_length", width)]
    {
        file.size(&format!("{arch}.{key}"), &value.into());
    }
}

/// The tensors are written with `model.` before their names, as those of a text model.
#[test]
fn a_written_checkpoint_has_a_text_model_of_transformers() {
    for arch in ARCHITECTURES {
        let json = read("text", arch, |file| {
            file.size(&format!("{arch}.attention.sliding_window"), &16.into());
            if arch.contains("moe") || arch == "qwen3next" {
                add_experts(file, arch, 16, 16, 16);
            }
        });
        let json = json.unwrap_or_else(|error| panic!("{arch}: {error}"));
        let from = numbers(&json);
        let written = transformers_config(&json, &from);
        let class = written["architectures"][0].as_str().unwrap_or_default();
        assert!(class.ends_with("ForCausalLM"), "{arch}: {written}");
        let (text, expected) = match arch {
            "qwen35" => ("qwen3_5_text", "Qwen3_5ForCausalLM"),
            "qwen35moe" | "qwen3next" => ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
            "qwen3vl" => ("qwen3", "Qwen3ForCausalLM"),
            "qwen3vlmoe" => ("qwen3_moe", "Qwen3MoeForCausalLM"),
            _ => (from.model_type.as_str(), class),
        };
        assert_eq!((&written["model_type"], class), (&json!(text), expected), "{arch}");
        let mut to = numbers(&written);
        metadata(&written, &to, false).unwrap_or_else(|error| panic!("{arch}, a file again: {error}"));
        to.model_type.clone_from(&from.model_type);
        assert_eq!(to, from, "{arch}");
        assert_eq!(portable_config(&json, &from), json, "{arch}");
    }
}

/// Files of Llama 3.1 have a table of divisors, which other programs do not read from a config.
#[test]
fn divisors_of_llama_3_become_its_scaling() {
    let frequencies = |scaling: &RopeScaling| scaling.inverse_frequencies(500_000.0, HEAD_DIM);
    let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
    let table = |divisors: Vec<f32>| {
        let json = read("llama3", "llama", |file| {
            file.float("llama.rope.freq_base", 500_000.0);
            let (name, shape) = ("rope_freqs.weight".into(), vec![divisors.len()]);
            file.tensors.push(GgufTensor { name, shape, values: divisors });
        });
        json.expect("complete")
    };
    let plain = frequencies(&RopeScaling::None);
    let json = table(plain.iter().zip(frequencies(&scaling)).map(|(plain, slow)| plain / slow).collect());
    let from = numbers(&json);
    for written in [transformers_config(&json, &from), portable_config(&json, &from)] {
        let to = numbers(&written);
        assert_eq!(to.rope_scaling, scaling, "{written}");
        let is_close = |(a, b): (f32, f32)| (a / b - 1.0).abs() < 1e-6;
        assert!(from.inverse_frequencies().into_iter().zip(to.inverse_frequencies()).all(is_close));
    }
    let json = table(vec![1.0, 1.0, 1.0, 2.0, 2.0, 4.0, 8.0, 8.0]);
    assert_eq!(portable_config(&json, &numbers(&json)), json, "it is no scaling of Llama 3");
}

/// transformers has gate and up of all experts of a layer in one parameter, MLX in two.
#[test]
fn experts_have_the_stacks_of_the_form() {
    let (experts, width, hidden) = (3, 2, 64);
    // Each value is the number of its row, from `first` on.
    let stack = |name: &str, shape: [usize; 3], first: usize| {
        let values = (0..experts * width * hidden).map(|i| (first + i / shape[2]) as f32).collect();
        GgufTensor { name: format!("blk.0.{name}.weight"), shape: shape.into(), values }
    };
    let json = read("experts", "qwen3moe", |file| {
        add_experts(file, "qwen3moe", experts, 2, width);
        file.tensors.push(stack("ffn_gate_exps", [experts, width, hidden], 0));
        file.tensors.push(stack("ffn_up_exps", [experts, width, hidden], 100));
        file.tensors.push(stack("ffn_down_exps", [experts, hidden, width], 200));
    });
    let config = numbers(&json.expect("complete"));
    let file = GgufFile::open(&path_of("experts")).expect("it was just written");
    let tensors = GgufAsCheckpoint::new(&file, &config).expect("all tensors have names");
    let layer = "model.layers.0.mlp";
    let specs = tensors.tensors().expect("all types are known");
    let shapes: Vec<_> = specs.into_iter().map(|spec| (spec.name, spec.shape)).collect();
    let expected = [
        ("model.embed_tokens.weight".to_string(), vec![100, hidden]),
        (format!("{layer}.experts.down_proj"), vec![experts, hidden, width]),
        (format!("{layer}.experts.gate_up_proj"), vec![experts, 2 * width, hidden]),
    ];
    assert_eq!(shapes, expected);
    let mut rows = vec![0.0; 9 * hidden];
    tensors.rows_f32(&format!("{layer}.experts.gate_up_proj"), 1..10, &mut rows).expect("there");
    let numbers: Vec<f32> = rows.iter().step_by(hidden).copied().collect();
    assert_eq!(numbers, [1.0, 100.0, 101.0, 2.0, 3.0, 102.0, 103.0, 4.0, 5.0]);

    let target = path_of("experts").with_extension("mlx");
    std::fs::remove_dir_all(&target).ok();
    let recipe = QuantizeRecipe::new(AffineFormat::new(8, 64).expect("a format"));
    let form = SafetensorsForm::Affine(&recipe);
    write_safetensors(&tensors, &target, &Default::default(), &form, &mut |_| ()).expect("writable");
    let written = SafetensorsFile::open(&target.join("model.safetensors")).expect("it was just written");
    for part in ["gate", "up", "down"] {
        let name = format!("{layer}.switch_mlp.{part}_proj.weight");
        assert_eq!(
            written.header().tensors()[&name].shape[..2],
            [experts, if part == "down" { hidden } else { width }]
        );
    }
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
    let experts = |file: &mut GgufBuilder| add_experts(file, "qwen35moe", 4, 2, 32);
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
