//! The plan equals the allocation, and the allocation equals the need.

mod common;

use common::{arg, copy_of, fail, fixture, joined, json, misuse, succeed};
use keel_models::shape_with_mtp_head;
use serde_json::Value;

fn total(categories: &Value) -> u64 {
    let categories = categories.as_object().expect("categories").iter();
    // The memory of requests is a bound, which no ledger has.
    categories.filter(|(name, _)| *name != "requests").filter_map(|(_, bytes)| bytes.as_u64()).sum()
}

/// Asserts that a run's three reports equal the output of `keel plan`.
fn assert_planned(memory: &Value, plan: &Value, what: &str) {
    for report in ["planned", "allocated", "peak"] {
        assert_eq!(&memory[report], plan, "{what}: {report}");
    }
    assert!(total(plan) > 0, "{what}: something is needed");
}

#[test]
fn generate_allocates_what_plan_says_and_its_peak_is_no_higher() {
    for (name, prompt, max_tokens) in [("qwen3_5", 3, 40), ("qwen3_5_moe", 100, 500), ("qwen3_next", 1, 1300)]
    {
        let folder = fixture(name);
        let ids: Vec<u32> = (1..=prompt).collect();
        let context = (prompt + max_tokens).to_string();
        let plan = json(&["plan", "--model", arg(&folder), "--context", &context, "--json"]);
        let (ids, tokens) = (joined(&ids), max_tokens.to_string());
        let command = ["generate", "--model", arg(&folder), "--ids", &ids, "--max-tokens", &tokens];
        let report = json(&[&command[..], &["--ignore-eos", "--json"]].concat());
        assert_planned(&report["memory"], &plan, name);
    }
}

#[test]
fn batches_allocate_what_plan_says() {
    let cases =
        [("qwen3_5", 2, 150, 9), ("qwen3_5_mlx_4bit", 3, 300, 5), ("qwen3_5_moe_mlx_4bit", 5, 70, 200)];
    for (name, batch, prompt, generated) in cases {
        let folder = fixture(name);
        let [batch, prompt, generated, context] =
            [batch, prompt, generated, prompt + generated].map(|n: i32| n.to_string());
        let plan =
            json(&["plan", "--model", arg(&folder), "--context", &context, "--batch", &batch, "--json"]);
        let command = ["bench", "--model", arg(&folder), "--batch", &batch, "--repeat", "1", "--json"];
        let report = json(&[&command[..], &["--prompt", &prompt, "--gen", &generated]].concat());
        assert_planned(&report["memory"], &plan, name);
    }
}

#[test]
fn what_plan_says_to_fit_fits_and_one_page_more_does_not() {
    let folder = fixture("qwen3_5_real_head_dims");
    let base = ["plan", "--model", arg(&folder), "--json"];
    let limit = total(&json(&[&base[..], &["--context", "1024"]].concat()));
    let fit = json(&[&base[..], &["--context", "1024", "--limit", &limit.to_string()]].concat());
    let context = fit["context"].as_u64().expect("a number");
    assert!(context >= 1024, "{fit}");
    assert_eq!(fit["batch"], 1);
    let of = |context: u64| total(&json(&[&base[..], &["--context", &context.to_string()]].concat()));
    assert!(of(context) <= limit && of(context + 256) > limit, "{context} of {limit}");
}

#[test]
fn prefill_grows_by_the_bytes_of_keys_and_values() {
    let folder = copy_of("qwen3_5");
    let path = folder.path().join("config.json");
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(&path).expect("there")).expect("the fixture's config");
    config["text_config"]["max_position_embeddings"] = 32768.into();
    std::fs::write(&path, config.to_string()).expect("writable");
    let peak = |prompt: &str| {
        let command = ["bench", "--model", arg(folder.path()), "--prompt", prompt, "--gen", "1"];
        let report = json(&[&command[..], &["--repeat", "1", "--prefill-step", "512", "--json"]].concat());
        report["memory"]["peak"].clone()
    };
    let tokens = 15 * 1024;
    let (short, long) = (peak("1023"), peak("16383"));
    let growth = (total(&long) - total(&short)) as f64 / f64::from(tokens);
    // One attention layer and that of the MTP head: 2 heads of 64, keys and values of 2 bytes.
    let kv = 2.0 * 2.0 * 2.0 * 64.0 * 2.0;
    assert!((growth - kv).abs() <= 0.01 * kv, "{growth} bytes per token, keys and values take {kv}");
}

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

    let folder = fixture("qwen3_5");
    let whole = json(&["fit", arg(&folder), "--limit", "1G", "--json"]);
    assert_eq!(whole["fits"].as_array().map(Vec::len), Some(3), "nothing is better than all: {whole}");
    let most = total(&json(&["plan", "--model", arg(&folder), "--sequences", "1", "--json"]));
    let tight = json(&["fit", arg(&folder), "--limit", &(most * 7 / 10).to_string(), "--json"]);
    let command = tight["fits"][0]["command"].as_str().unwrap_or_default();
    assert!(
        command.starts_with("keel quantize ") || tight["fits"][0]["context"].as_u64() < Some(4096),
        "{tight}"
    );
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
