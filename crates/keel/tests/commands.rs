//! Output of `generate`, `plan` and `bench`, with the built-in model.

mod common;

use std::io::Read;
use std::process::{Command, Stdio};

use common::{arg, demo, fail, fixture, json, keel_with_input, misuse, stderr, succeed};
use serde_json::Value;

/// Standard output and standard error of a run that must succeed.
fn both(args: &[&str], input: &str) -> (String, String) {
    let output = keel_with_input(args, input);
    assert!(output.status.success(), "keel {}: {}", args.join(" "), stderr(&output));
    (String::from_utf8(output.stdout.clone()).expect("UTF-8"), stderr(&output))
}

#[test]
fn generate_writes_the_text_alone_and_reports_elsewhere() {
    // Without a seed, the number of drafts depends on measured times, and the draws depend on it. So the seed is fixed.
    let command = ["generate", "Once upon a time", "-n", "12", "--seed", "3"];
    let (text, report) = both(&command, "");
    assert!(text.ends_with('\n') && text.trim().len() > 20 && text.lines().count() == 1, "{text:?}");
    for word in ["tokens/s", "planned", "allocated", "peak", "weights", "kv", "recurrent", "total"] {
        assert!(report.contains(word) && !text.contains(word), "{word}: {report}");
    }
    let quiet = both(&[&command[..], &["-q", "--device", "cpu"]].concat(), "");
    assert_eq!(quiet, (text.clone(), String::new()));
    let (echoed, _) = both(&[&command[..], &["--echo"]].concat(), "");
    assert_eq!(echoed, format!("Once upon a time{text}"));
}

#[test]
fn a_prompt_comes_from_an_argument_an_option_a_file_or_a_pipe() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let file = dir.path().join("prompt");
    std::fs::write(&file, "The dog").expect("writable");
    let flags = ["generate", "--temp", "0", "-n", "16", "-q", "-c", "256"];
    let of = |prompt: &[&str], input| both(&[&flags[..], prompt].concat(), input).0;
    let want = of(&["The dog"], "not read");
    assert_eq!(of(&["-p", "The dog"], ""), want);
    assert_eq!(of(&["-f", arg(&file)], ""), want);
    assert_eq!(of(&[], "The dog\n"), want, "a pipe; its last line break is no part of the text");
    assert_eq!(of(&["-"], "The dog\r\n"), want);
    assert_eq!(of(&["-f", "-"], "The dog"), want);
    assert_ne!(of(&["-"], "The dog\n\n"), want, "other line breaks are");
}

#[test]
fn a_model_with_a_template_is_asked_and_the_built_in_one_tells_stories() {
    let demo = demo();
    let flags = ["generate", "Tell me a story about a cat.", "--temp", "0", "-n", "24", "-q"];
    let of = |extra: &[&str]| succeed(&[&flags[..], extra].concat());
    let (asked, continued) = (of(&["--chat"]), of(&[]));
    assert_ne!(asked, continued);
    assert_eq!(of(&["--model", arg(&demo)]), asked);
    assert_eq!(of(&["--model", arg(&demo), "--raw"]), continued);
    assert_eq!(of(&["--raw"]), continued);
    assert_ne!(of(&["--system", "Be a pirate."]), asked, "a system prompt asks, too");

    // Without its template it is a base model. A message says so before the model is loaded.
    let base = tempfile::tempdir().expect("a temporary folder");
    for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(demo.join(file), base.path().join(file)).expect("copied");
    }
    let settings = std::fs::read_to_string(demo.join("tokenizer_config.json")).expect("there");
    let mut settings: Value = serde_json::from_str(&settings).expect("JSON");
    settings.as_object_mut().expect("an object").remove("chat_template");
    std::fs::write(base.path().join("tokenizer_config.json"), settings.to_string()).expect("writable");
    let model = ["--model", arg(base.path())];
    let (text, report) = both(&[&flags[..6], &model].concat(), "");
    assert_eq!(text, continued);
    let (remark, load) = (report.find("no chat template"), report.find("load "));
    assert!(remark.is_some() && remark < load, "{report}");
    assert!(both(&[&flags[..], &model].concat(), "").1.is_empty());
    fail(&[&flags[..], &model, &["--chat"]].concat(), "no chat template");
}

#[test]
fn a_text_follows_a_schema_or_a_grammar() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (schema, grammar) = (dir.path().join("schema.json"), dir.path().join("grammar.lark"));
    let wanted = r#"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "legs": {"enum": [2, 4]}},
        "required": ["name", "legs"], "additionalProperties": false}"#;
    std::fs::write(&schema, wanted).expect("writable");
    std::fs::write(&grammar, "start: \"yes\" | \"no\"\n").expect("writable");
    let flags = ["generate", "A dog is an animal:", "-n", "120", "-q"];
    let text = succeed(&[&flags[..], &["--schema", arg(&schema)]].concat());
    let value: Value = serde_json::from_str(&text).expect("JSON");
    assert!(value["name"].is_string() && [2, 4].map(Value::from).contains(&value["legs"]), "{text}");
    let text = succeed(&[&flags[..], &["--grammar", arg(&grammar)]].concat());
    assert!(["yes\n", "no\n"].contains(&text.as_str()), "{text}");
    std::fs::write(&schema, "{").expect("writable");
    fail(&[&flags[..], &["--schema", arg(&schema)]].concat(), "is no JSON");
}

#[test]
fn an_answer_ends_where_the_models_context_does() {
    let folder = fixture("qwen3_5");
    let ids = vec!["7"; 4090].join(",");
    let flags = ["--model", arg(&folder), "--ids", &ids, "--max-tokens", "9000", "--ignore-eos", "--json"];
    let report = json(&[&["generate"], &flags[..]].concat());
    assert_eq!(report["tokens"].as_array().map(Vec::len), Some(7), "the last one needs no place: {report}");
    assert_eq!(report["finish_reason"], "length");
    let ids = vec!["7"; 4096].join(",");
    let report = json(&["generate", "--model", arg(&folder), "--ids", &ids, "--ignore-eos", "--json"]);
    assert_eq!(report["tokens"].as_array().map(Vec::len), Some(1), "the prompt fills the context: {report}");
}

#[test]
fn generate_prints_one_object_with_every_field() {
    let report = json(&["generate", "Once upon a time", "--max-tokens", "9", "--ignore-eos", "--json"]);
    assert_eq!(report["tokens"].as_array().map(Vec::len), Some(9));
    assert_eq!(report["finish_reason"], "length");
    assert!(report["prompt_tokens"].as_u64().is_some_and(|n| n > 0));
    assert!(report["text"].as_str().is_some_and(|text| !text.is_empty()));
    let timing = ["load_s", "prefill_s", "decode_s", "prefill_tokens_per_second", "decode_tokens_per_second"];
    for field in timing {
        assert!(report["timing"][field].as_f64().is_some_and(|x| x > 0.0), "{field}: {report}");
    }
    for field in ["planned", "allocated", "peak"] {
        assert!(report["memory"][field]["weights"].as_u64().is_some_and(|n| n > 0), "{field}: {report}");
    }
    let total: u64 =
        report["memory"]["peak"].as_object().expect("categories").values().filter_map(|v| v.as_u64()).sum();
    if cfg!(target_os = "linux") {
        assert!(report["memory"]["resident"].as_u64().is_some_and(|n| n > total / 2), "{report}");
    }
}

#[test]
fn speculation_changes_the_counters_and_not_the_text() {
    let generate = |flags: &[&str]| {
        let command = ["generate", "Once upon a time", "--temperature", "0", "--max-tokens", "60", "--json"];
        json(&[&command[..], flags].concat())
    };
    let plain = generate(&["--speculate", "off"]);
    assert!(plain["speculation"].is_null());
    for flags in [&[][..], &["--speculate", "3"], &["--speculate", "8"]] {
        let report = generate(flags);
        assert_eq!(report["tokens"], plain["tokens"], "{flags:?}");
        let speculation = &report["speculation"];
        assert!(speculation["warning"].is_null());
        for field in
            ["drafted", "accepted", "mean_accepted_length", "rounds", "draft_s", "verify_s", "commit_s"]
        {
            assert!(speculation[field].as_f64().is_some_and(|x| x > 0.0), "{field}: {report}");
        }
        let by_position = speculation["accepted_by_position"].as_array().expect("a list").iter();
        let sum: u64 = by_position.filter_map(|n| n.as_u64()).sum();
        assert_eq!(Some(sum), speculation["accepted"].as_u64());
        assert_eq!(report["memory"]["planned"], report["memory"]["peak"]);
    }
    let optimistic = generate(&["--speculate", "2", "--speculate-optimistic"]);
    assert!(optimistic["speculation"]["warning"].as_str().is_some_and(|text| text.contains("may differ")));
    let command = ["generate", "Once", "--max-tokens", "9", "--speculate", "2", "--speculate-optimistic"];
    let (text, report) = both(&command, "");
    assert!(report.contains("speculate") && report.contains("WARNING"), "{report}");
    assert!(!text.contains("WARNING"), "{text}");
    assert!(
        succeed(&["generate", "--help"])
            .contains("WARNING: the text may then differ from the model's own text")
    );
}

#[test]
fn the_cpu_is_deterministic_without_being_told() {
    let command = ["generate", "Once upon a time", "--temperature", "0", "--max-tokens", "20", "--json"];
    let told = json(&[&command[..], &["--deterministic"]].concat());
    // The option changes the order of sums, which moves no token here.
    assert_eq!(told["tokens"], json(&command)["tokens"]);
    // A plan for a GPU needs no GPU. With `--deterministic` no product takes cuBLASLt, and none its scratch.
    let plan = ["plan", "--device", "cuda:0", "--shape", "qwen3-8b", "--json"];
    let arena = |flags: &[&str]| json(&[&plan[..], flags].concat())["activations"].as_u64();
    assert!(arena(&["--deterministic"]) < arena(&[]));
    assert!(arena(&["--deterministic=devices"]) < arena(&[]));
}

#[test]
fn a_plan_counts_the_copy_of_weights_in_8_bits() {
    let plan = ["plan", "--device", "cuda:0", "--shape", "qwen3.5-0.8b", "--bits", "4"];
    let weights = |flags: &[&str]| {
        json(&[&plan[..], &["--json"], flags].concat())["weights"].as_u64().expect("a number")
    };
    let (auto, prompts, both) =
        (weights(&[]), weights(&["--prefill-compute", "8bit"]), weights(&["--compute", "8bit"]));
    assert_eq!(auto, prompts);
    // 4.5 bits a weight, and 8 for all but the embedding, which is a third of this model.
    assert!(both > 2 * auto && both < 3 * auto, "{auto} and {both}");
    let deterministic = [&plan[..], &["--compute", "8bit", "--deterministic"]].concat();
    misuse(&deterministic, "leave out --deterministic");
    assert_eq!(json(&["plan", "--json"]), json(&["plan", "--json", "--compute", "8bit"]), "on the CPU");
}

/// The plan for a GPU was once compared with the host's memory.
#[test]
fn a_plan_is_compared_with_the_memory_of_its_device() {
    let plan = |flags: &[&str]| succeed(&[&["plan", "--shape", "qwen3.5-0.8b"], flags].concat());
    let on_gpu = plan(&["--device", "cuda:77"]);
    assert!(on_gpu.contains("this machine has no such GPU"), "{on_gpu}");
    // The memory that the host holds for a GPU is another line.
    assert!(!on_gpu.contains("the plan fits") && !on_gpu.contains("the plan does not fit"), "{on_gpu}");
    if cfg!(target_os = "linux") {
        let on_cpu = plan(&["--device", "cpu"]);
        assert!(on_cpu.contains("the plan fits") || on_cpu.contains("the plan does not fit"), "{on_cpu}");
    }
}

/// `generate` drafts by default on any device, and so does its plan. On a GPU `auto` is four drafts at most. Random
/// weights draft only if that is asked for.
#[test]
fn a_plan_has_drafts_by_default() {
    let log = |flags: &[&str]| json(&[&["plan", "--json"], flags].concat())["delta_log"].as_u64();
    let auto = log(&["--device", "cuda:0", "--speculate", "auto"]);
    assert!(log(&[]) > auto);
    assert_eq!(log(&["--device", "cuda:0"]), auto);
    assert_eq!(auto, log(&["--device", "cuda:0", "--speculate", "4"]));
    for device in ["cpu", "cuda:0"] {
        let shape = ["--device", device, "--shape", "qwen3.5-0.8b"];
        assert_eq!(log(&shape), Some(0));
        assert!(log(&[&shape[..], &["--speculate", "auto"]].concat()) > Some(0));
    }
}

/// The launches are those of the device that is planned for, here a GPU: they come from the program.
#[test]
fn a_verbose_plan_prints_the_launches_of_a_step() {
    let text = succeed(&["plan", "-v", "--device", "cuda:0", "--shape", "qwen3.5-0.8b", "--context", "1024"]);
    let step = text.split_once("launches of a decode step, rows: 1").expect("the step").1;
    let step = step.split_once("launches of a step of prompts").expect("the other step").0;
    // One of each recurrent layer, with the norm before the product.
    let group = step.lines().find(|line| line.contains("convolved product: linear")).expect("the group");
    assert!(
        group.trim_start().starts_with("18 x ") && group.ends_with("(rms_norm) + causal_conv"),
        "{group}"
    );
    assert!(step.contains("paged_attention") && !step.contains(" swiglu\n"), "{step}");
    let text = succeed(&["plan", "-v", "--device", "cpu", "--shape", "qwen3.5-0.8b", "--context", "1024"]);
    assert!(text.contains("launches of a decode step") && !text.contains("convolved product"), "{text}");
}

#[test]
fn the_seed_decides_and_greedy_needs_none() {
    let text = |flags: &[&str]| {
        let command = ["generate", "The dog", "--max-tokens", "24", "--quiet"];
        succeed(&[&command[..], flags].concat())
    };
    let hot = ["--temperature", "1.5", "--top-k", "0", "--top-p", "1"];
    let with_seed = |seed| text(&[&hot[..], &["--seed", seed]].concat());
    assert_eq!(with_seed("1"), with_seed("1"));
    assert_ne!(with_seed("1"), with_seed("2"));
    assert_eq!(text(&["--temperature", "0", "--seed", "1"]), text(&["--temperature", "0", "--seed", "2"]));
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let command = ["generate", "Once upon a time", "--temperature", "0", "--max-tokens", "60", "--json"];
    let whole = json(&command)["text"].as_str().expect("text").to_string();
    let stop: String = whole.chars().skip(20).take(5).collect();
    let report = json(&[&command[..], &["--stop", &stop]].concat());
    let cut = whole.find(&stop).expect("it is a part");
    assert_eq!(report["text"].as_str(), Some(&whole[..cut]));
    assert_eq!(report["finish_reason"], "stop");
    // Nothing comes before a stop string that is reached at once.
    let stop: String = whole.chars().take(2).collect();
    let text = succeed(&[&command[..command.len() - 1], &["--quiet", "--stop", &stop]].concat());
    assert_eq!(text, "\n");
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_keel"))
        .env("KEEL_DEVICE", "cpu")
        .args(["generate", "Once upon a time", "--max-tokens", "200", "--ignore-eos"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("keel starts");
    let mut first = [0; 4];
    child.stdout.take().expect("piped").read_exact(&mut first).expect("some text comes");
    let output = child.wait_with_output().expect("keel ends");
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
}

#[test]
fn bench_compares_with_a_floor_and_draws() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let plot = dir.path().join("memory.svg");
    let flags = ["bench", "--prompt", "70", "--gen", "6", "--repeat", "2", "--json", "--plot", arg(&plot)];
    let report = json(&flags);
    for field in [
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "decode_tokens_per_second_min",
        "decode_tokens_per_second_max",
        "decode_floor_tokens_per_second",
        "read_gb_per_s",
        "weights_bytes",
    ] {
        assert!(report[field].as_f64().is_some_and(|x| x > 0.0), "{field}: {report}");
    }
    assert_eq!(report["memory"]["planned"], report["memory"]["peak"]);
    let drawing = std::fs::read_to_string(&plot).expect("drawn");
    assert!(drawing.contains("weights") && drawing.contains("</svg>"));
    assert_eq!(report["draw"], "none");
    for draw in ["greedy", "sampled", "host"] {
        let report =
            json(&["bench", "--prompt", "64", "--gen", "2", "--repeat", "1", "--json", "--draw", draw]);
        assert!(report["decode_tokens_per_second"].as_f64().is_some_and(|x| x > 0.0), "{report}");
        assert_eq!(report["draw"], draw);
    }
}
