//! Plans: the bytes that they count, the options that they fit to a limit, and refusals. `fixtures.rs` compares plans
//! with the allocations of runs.

mod common;

use common::{arg, fail, json, misuse, succeed, total};
use keel_models::shape_with_mtp_head;
use serde_json::Value;

#[test]
fn host_memory_for_parked_sequences_is_a_category_of_its_own() {
    let of = |swap: &str| json(&["plan", "--context", "512", "--overcommit", "--swap", swap, "--json"]);
    let (without, with) = (of("0"), of("4Mi"));
    assert_eq!((&without["swap"], &with["swap"]), (&Value::from(0), &Value::from(4 << 20)));
    assert_eq!(total(&with), total(&without) + (4 << 20));
}

/// A GPU supports every operation of the largest published models, in both regimes and with drafts.
#[test]
fn the_largest_shapes_are_planned_for_a_gpu() {
    for shape in ["qwen3.5-122b-a10b", "qwen3.5-397b-a17b"] {
        for mode in [&["--speculate", "2"][..], &["--speculate", "off", "--compute", "f32"]] {
            let command = ["plan", "--shape", shape, "--device", "cuda:0", "--context", "4096", "--json"];
            let plan = json(&[&command[..], mode].concat());
            assert!(plan["weights"].as_u64().is_some_and(|bytes| bytes > 50 << 30), "{shape}: {plan}");
        }
    }
}

/// Each width of the largest published models runs: two layers, once with few experts of their own width and drafts,
/// once with all experts, which are narrow, and without drafts. The device is the CPU, and a GPU where there is one to
/// test.
#[test]
fn the_widths_of_the_largest_shapes_run() {
    const NARROW: u64 = 64;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("config.json");
    let devices = if keel_testkit::has_gpu!() { &["cpu", "cuda:0"][..] } else { &["cpu"] };
    for name in ["qwen3.5-122b-a10b", "qwen3.5-397b-a17b"] {
        let mut whole = shape_with_mtp_head(name).expect("it has a head");
        whole["num_hidden_layers"] = 2.into();
        whole["full_attention_interval"] = 2.into();
        whole["vocab_size"] = 1024.into();
        let few = whole["num_experts_per_tok"].as_u64().expect("a number") + 2;
        for (field, value, drafts) in [("num_experts", few, "2"), ("moe_intermediate_size", NARROW, "off")] {
            let mut config = whole.clone();
            config[field] = value.into();
            std::fs::write(&path, config.to_string()).expect("written");
            for device in devices {
                let run =
                    ["bench", "--shape", arg(&path), "--bits", "5", "--device", device, "--prompt", "70"];
                let run =
                    [&run[..], &["--gen", "4", "--repeat", "1", "--json", "--speculate", drafts]].concat();
                let report = json(&run);
                assert_eq!(
                    report["memory"]["planned"], report["memory"]["peak"],
                    "{name}, {field}, {device}"
                );
                let rate = report["decode_tokens_per_second"].as_f64();
                assert!(rate.is_some_and(|rate| rate > 0.0), "{name}, {field}, {device}: {report}");
            }
        }
    }
}

#[test]
fn a_shape_is_planned_without_a_checkpoint() {
    let shape = ["plan", "--shape", "qwen3.5-35b-a3b", "--context", "8192", "--batch", "2", "--json"];
    let plan = json(&shape);
    // 10 attention layers with keys and values of 2 heads of 256, in 2 bytes, for 2 x 8192 tokens.
    assert_eq!(plan["kv"], 10 * 2 * 2 * 256 * 2 * 2 * 8192);
    // 30 recurrent layers: 32 states of 128 x 128 in f32, and 3 rows of 8192 channels, for 2 sequences.
    assert_eq!(plan["recurrent"], 30 * 2 * 4 * (32 * 128 * 128 + 3 * 8192));
    let weights = plan["weights"].as_f64().expect("a number");
    let dense = json(&[&shape[..], &["--dtype", "bf16"]].concat())["weights"].as_f64().expect("a number");
    assert!((3.4..3.7).contains(&(dense / weights)), "16 bits against 4.5: {dense} and {weights}");
}

#[test]
fn what_no_machine_has_is_refused_with_numbers_before_anything_is_loaded() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let demo = common::demo();
    for file in ["model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(demo.join(file), dir.path().join(file)).expect("copied");
    }
    let config = std::fs::read_to_string(demo.join("config.json")).expect("there");
    let mut config: Value = serde_json::from_str(&config).expect("JSON");
    let longest = 1 << 24;
    config["text_config"]["max_position_embeddings"] = longest.into();
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("writable");
    let model = ["--model", arg(dir.path()), "--context", "16777216"];
    // 256 sequences of 16 million tokens need terabytes.
    let serve = ["serve", "--port", "0", "--sequences", "256", "--kv-cache", "7T", "--on-demand"];
    let start = std::time::Instant::now();
    fail(&[&serve[..], &model].concat(), "more than the");
    fail(&[&serve[..], &model].concat(), "free memory of");
    assert!(start.elapsed().as_secs() < 60, "it was refused before it was taken");
    // A requested limit does not create memory.
    fail(&[&serve[..], &model, &["--memory-limit", "999999T"]].concat(), "free memory of");
    fail(&[&["generate", "Once", "--memory-limit", "20M"][..], &model[..2]].concat(), "of the memory limit");
}

#[test]
fn keys_and_values_that_are_asked_for_are_planned_or_refused_and_never_cut() {
    // More than the sequences of the built-in model need: the rest keeps remembered prefixes.
    let plan = json(&["plan", "--serve", "--kv-cache", "1Gi", "--json"]);
    assert_eq!(plan["kv"].as_u64(), Some(1 << 30), "{plan}");
    let serve = ["serve", "--port", "0", "--on-demand", "--kv-cache"];
    fail(&[&serve[..], &["7T"]].concat(), "free memory of");
    misuse(&[&serve[..], &["900T"]].concat(), "--kv-cache: 900000000000000 bytes are 1716613769 pages");
}

#[test]
fn an_option_of_a_servers_memory_plans_a_server() {
    for option in [["--step-tokens", "64"], ["--request-memory", "1Gi"], ["--sequences", "3"]] {
        let plan = |flags: &[&str]| json(&[&["plan", "--json"], flags, &option].concat());
        assert_eq!(plan(&[]), plan(&["--serve"]), "{option:?}");
    }
}

#[test]
fn a_small_model_gets_a_small_pool_on_the_cpu() {
    let plan = json(&["plan", "--serve", "--json"]);
    let of = |category: &str| plan[category].as_u64().expect("a number");
    // One sequence at full length, or as many bytes as the weights.
    let one = json(&["plan", "--sequences", "1", "--json"])["kv"].as_u64().expect("a number");
    assert!(of("kv") <= of("weights").max(one), "{plan}");
    assert!(of("checkpoints") < 2 * of("weights"), "{plan}");
    let many = json(&["plan", "--serve", "--sequences", "64", "--kv-cache", "1G", "--json"]);
    assert!(many["kv"].as_u64() > Some(of("kv")), "what is asked for is given: {many}");
}

#[test]
fn a_plan_for_a_gpu_that_is_not_here_follows_its_limit() {
    // No machine has a GPU with this number.
    let of = |device: &[&str], options: &[&str]| {
        let shape = ["plan", "--serve", "--shape", "qwen3.5-4b", "--bits", "4"];
        succeed(&[&shape[..], device, options].concat())
    };
    let (one, two) = (["--device", "cuda:99"], ["--devices", "cuda:98,cuda:99", "--split", "tensor"]);
    let unknown = of(&one, &[]);
    assert!(unknown.starts_with("context 8192, batch 16,"), "{unknown}");
    assert!(unknown.contains("--memory-limit says how much it has"), "{unknown}");
    for device in [&one[..], &two] {
        let plan = of(device, &["--memory-limit", "40Gi"]);
        assert!(plan.starts_with("context 8192, batch 128"), "{plan}");
    }
    assert!(of(&two, &["--memory-limit", "40Gi,40Gi"]).starts_with("context 8192, batch 128"));
}

#[test]
fn what_fit_says_fits_and_its_commands_hold_what_it_says() {
    let limit = "90M";
    let fit = json(&["fit", "--limit", limit, "--json"]);
    let lines = fit["fits"].as_array().expect("lines");
    assert!(!lines.is_empty(), "{fit}");
    for line in lines {
        let command = line["command"].as_str().expect("a command");
        let flags = command.strip_prefix("keel serve").expect("a server");
        let plan: Vec<&str> = ["plan", "--json"].into_iter().chain(flags.split_whitespace()).collect();
        let planned = total(&json(&plan));
        assert_eq!(Some(planned), line["bytes"].as_u64(), "{command}");
        assert!(planned <= 90_000_000, "{command}");
    }
    let first = &lines[0];
    assert_eq!((&first["weights"], &first["kv_bits"]), (&"as it is".into(), &16.into()));
    let table = succeed(&["fit", "--limit", limit]);
    assert!(table.contains("best first") && table.contains("keel serve --sequences 1"), "{table}");
    fail(&["fit", "--limit", "1M"], "nothing fits into 1000000 bytes");
    fail(&["fit", "--limit", "1M"], "bytes (");
}

/// A command that leaves out an option that was given would start another server than the one that was counted.
#[test]
fn the_commands_of_fit_repeat_what_was_given() {
    let given = [
        "--compute",
        "f32",
        "--prefill-step",
        "256",
        "--state-bits",
        "16",
        "--threads",
        "3",
        "--cpu-isa",
        "portable",
    ];
    let start = ["fit", "--limit", "200M", "--sequences", "1", "--device", "cpu", "--json"];
    let fit = json(&[&start[..], &given].concat());
    let command = fit["fits"][0]["command"].as_str().expect("a command");
    for option in given.chunks(2).chain([&["--device", "cpu"][..]]) {
        assert!(command.contains(&option.join(" ")), "{option:?} is not in {command}");
    }
    let flags = command.strip_prefix("keel serve").expect("a server");
    let plan: Vec<&str> = ["plan", "--json"].into_iter().chain(flags.split_whitespace()).collect();
    assert_eq!(Some(total(&json(&plan))), fit["fits"][0]["bytes"].as_u64(), "{command}");
}

#[test]
fn fit_offers_fewer_bits_where_they_buy_something() {
    let shape = ["fit", "--shape", "qwen3.5-4b", "--limit", "6Gi", "--json"];
    let fit = json(&shape);
    let lines = fit["fits"].as_array().expect("lines");
    let bits: Vec<&str> = lines.iter().filter_map(|line| line["weights"].as_str()).collect();
    assert!(!bits.contains(&"bf16") && bits.contains(&"8 bits"), "{fit}");
    let command = lines[0]["command"].as_str().expect("a command");
    let words: Vec<&str> = command.split_whitespace().skip(1).chain(["--json"]).collect();
    assert_eq!(Some(total(&json(&words))), lines[0]["bytes"].as_u64(), "{command}");
}

/// A plan for a GPU needs none. Parked sequences are in host memory, and charged to the limit.
#[test]
fn a_limit_between_the_bytes_on_the_gpu_and_all_bytes_is_kept() {
    let plan = ["plan", "--serve", "--overcommit", "--device", "cuda:0", "--json"];
    let whole = json(&plan);
    let on_host = whole["swap"].as_u64().filter(|&bytes| bytes > 0).expect("host memory");
    let limit = total(&whole) - on_host / 2;
    let held = json(&[&plan[..], &["--memory-limit", &limit.to_string()]].concat());
    assert!(total(&held) <= limit, "{} bytes with a limit of {limit}: {held}", total(&held));
    let kv = |plan: &Value| plan["kv"].as_u64().expect("a number");
    assert!(kv(&held) > 0 && kv(&held) <= kv(&whole), "{held}");
}

#[test]
fn what_takes_no_memory_refuses_a_memory_limit() {
    for command in ["plan", "fit", "inspect"] {
        misuse(&[command, "--memory-limit", "1G"], "--memory-limit");
    }
    misuse(&["plan", "--serve", "--batch", "4"], "a server has --sequences");
    misuse(&["plan", "--serve", "--speculate", "2"], "a server has --drafts");
    misuse(&["plan", "--serve", "--limit", "1G"], "keel fit");
}

/// A server may make as many drafts as `generate`. Where they do not fit, two come before fewer remembered prefixes.
#[test]
fn a_server_plans_as_many_drafts_as_fit() {
    let plan = |flags: &[&str]| json(&[&["plan", "--serve", "--json", "--sequences", "3"], flags].concat());
    for (device, most) in [("cpu", "8"), ("cuda:0", "4")] {
        assert_eq!(plan(&["--device", device]), plan(&["--device", device, "--drafts", most]));
    }
    let all = total(&plan(&["--device", "cpu"]));
    let fewer = plan(&["--device", "cpu", "--memory-limit", &(all - 1).to_string()]);
    assert_eq!(fewer, plan(&["--device", "cpu", "--drafts", "2"]));
}
