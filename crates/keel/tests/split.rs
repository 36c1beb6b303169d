//! A model on several devices, through the program.

mod common;

use common::{arg, fail, fixture, json, keel, misuse, stderr, succeed};
use keel_testkit::fixtures::models;
use serde_json::Value;

/// The bytes of the file that `keel logits` writes.
fn logits(name: &str, ids: &str, devices: &[&str]) -> Vec<u8> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("logits.safetensors");
    let model = fixture(name);
    let command = ["logits", "--model", arg(&model), "--ids", ids, "--out", arg(&file), "--threads", "2"];
    succeed(&[&command[..], devices].concat());
    std::fs::read(file).expect("it was written")
}

#[test]
fn logits_on_two_devices_are_those_of_one_to_the_bit() {
    for name in ["qwen3_5_moe_mlx_4bit", "gemma3_text"] {
        let whole = logits(name, "3,1,4,1,5,9,2,6", &[]);
        let parts = logits(name, "3,1,4,1,5,9,2,6", &["--devices", "cpu:0,cpu:1", "--split", "pipeline"]);
        assert!(whole == parts, "{name}");
    }
}

/// Shares that do not divide the parts of a sum have bits of their own.
#[test]
fn the_bits_of_other_numbers_of_devices_are_not_promised() {
    let three = ["plan", "--shape", "qwen3.5-0.8b", "--devices", "cpu:0,cpu:1,cpu:2"];
    let with = |flags: &[&'static str]| [&three[..], flags].concat();
    let reason = "3 devices share each layer, and 1, 2 and 4 have the same bits";
    misuse(&with(&["--split", "tensor", "--deterministic=devices"]), reason);
    succeed(&with(&["--split", "pipeline", "--deterministic=devices"]));
}

#[test]
fn deterministic_logits_on_two_and_four_devices_are_those_of_one_to_the_bit() {
    let devices = "cpu:0,cpu:1,cpu:2,cpu:3";
    for (name, counts) in [("llama", &[2, 4][..]), ("qwen3_moe", &[2, 4]), ("qwen3_5_moe_mlx_4bit", &[2])] {
        let of = |flags: &[&str]| logits(name, "3,1,4,1,5,9,2,6", flags);
        let (exact, fixed) = (["--compute", "f32"], ["--compute", "f32", "--deterministic"]);
        let whole = of(&fixed);
        assert!(
            whole == of(&["--compute", "f32", "--deterministic=devices"]),
            "{name}: the CPU has one order"
        );
        for count in counts {
            let parts = ["--devices", &devices[..count * 6 - 1], "--split", "tensor"];
            assert!(whole == of(&[&fixed[..], &parts].concat()), "{name} on {count} devices");
            assert!(
                whole != of(&[&exact[..], &parts].concat()),
                "{name} on {count} devices needs the option"
            );
        }
    }
}

#[test]
fn each_device_allocates_its_column_of_the_plan_and_the_text_is_that_of_one() {
    for name in models() {
        let folder = fixture(name);
        let devices = ["--devices", "cpu:0,cpu:1", "--threads", "2"];
        let plan =
            json(&[&["plan", "--model", arg(&folder), "--context", "256", "--json"][..], &devices].concat());
        let command = ["generate", "--model", arg(&folder), "--ids", "3,1,4,1,5,9", "--max-tokens", "20"];
        let command = [&command[..], &["--ignore-eos", "--json", "--context", "256"]].concat();
        let report = json(&[&command[..], &devices].concat());
        assert_eq!(report["tokens"], json(&command)["tokens"], "{name}");
        let (planned, measured) = (&plan["devices"], &report["memory"]["devices"]);
        for (rank, device) in ["cpu:0", "cpu:1"].into_iter().enumerate() {
            let (mut column, measured) = (planned[rank].clone(), &measured[rank]);
            assert_eq!(
                (&column["device"], &measured["device"]),
                (&Value::from(device), &Value::from(device))
            );
            let layers = column.as_object_mut().expect("an object").remove("layers").expect("there");
            column.as_object_mut().expect("an object").remove("device");
            assert!(layers[0].as_u64() < layers[1].as_u64(), "{name}: {layers}");
            for report in ["planned", "allocated", "peak"] {
                assert_eq!(measured[report], column, "{name}, {device}: {report}");
            }
            let sum = column["weights"].as_u64().expect("bytes");
            assert!(sum > 0 && sum < plan["weights"].as_u64().expect("bytes"), "{name}, {device}: {sum}");
        }
    }
}

#[test]
fn shares_of_every_layer_are_planned_and_run() {
    let model = fixture("qwen3_5_moe");
    let devices = ["--devices", "cpu:0,cpu:1", "--split", "tensor", "--threads", "2"];
    let plan = [&["plan", "--model", arg(&model), "--context", "256"][..], &devices].concat();
    let text = succeed(&plan);
    assert!(text.contains("cpu:1: share 2 of 2 of every layer"), "{text}");
    assert!(text.contains("experts: by columns: each device has a share of every expert"), "{text}");
    let plan = json(&[&plan[..], &["--json"]].concat());
    let command = ["generate", "--model", arg(&model), "--ids", "3,1,4,1,5,9", "--max-tokens", "20"];
    let command =
        [&command[..], &["--ignore-eos", "--json", "--context", "256", "--compute", "f32"]].concat();
    let report = json(&[&command[..], &devices].concat());
    assert_eq!(report["tokens"], json(&command)["tokens"]);
    for rank in 0..2 {
        let (column, measured) = (&plan["devices"][rank], &report["memory"]["devices"][rank]);
        for category in ["weights", "recurrent", "staging"] {
            assert_eq!(measured["allocated"][category], column[category], "{rank}: {category}");
            assert_eq!(measured["peak"][category], column[category], "{rank}: {category}");
        }
    }
    let logits = ["logits", "--model", arg(&model), "--ids", "1,2", "--out", "/dev/null"];
    let three = ["--devices", "cpu:0,cpu:1,cpu:2", "--split", "tensor"];
    fail(&[&logits[..], &three].concat(), "4 attention heads cannot be split evenly over 3 devices");
}

#[test]
fn a_plan_has_a_column_for_each_device() {
    let plan = succeed(&[
        "plan",
        "--shape",
        "qwen3.5-122b-a10b",
        "--devices",
        "cpu:0,cpu:1,cpu:2",
        "--context",
        "512",
    ]);
    let lines: Vec<&str> = plan.lines().collect();
    assert!(lines[1].starts_with("cpu:0: embedding, layers 0 to "), "{plan}");
    assert!(lines[3].starts_with("cpu:2: layers ") && lines[3].ends_with(", output head"), "{plan}");
    let columns: Vec<&str> = lines[5].split_whitespace().collect();
    assert_eq!(columns, ["cpu:0", "cpu:1", "cpu:2", "all"], "{plan}");
    let total = lines.iter().find(|line| line.starts_with("total")).expect("a sum");
    let total: Vec<u64> = total.split_whitespace().skip(1).map(|n| n.parse().expect("bytes")).collect();
    assert_eq!(total[..3].iter().sum::<u64>(), total[3], "{plan}");
    let (least, most) = (total[..3].iter().min().expect("three"), total[..3].iter().max().expect("three"));
    assert!(*most < least + least / 8, "the shares are even: {plan}");
}

#[test]
fn a_plan_of_several_devices_prints_the_shapes_of_steps_if_asked() {
    let model = fixture("qwen3_5");
    let command = ["plan", "--model", arg(&model), "--context", "256"];
    let whole = succeed(&[&command[..], &["-v"]].concat());
    let steps =
        whole.lines().filter(|line| line.starts_with("rows of a step") || line.starts_with("programs"));
    let parts = succeed(&[&command[..], &["--devices", "cpu:0,cpu:1", "-v"]].concat());
    let missing: Vec<&str> = steps.clone().filter(|line| !parts.contains(line)).collect();
    assert!(steps.count() == 2 && missing.is_empty(), "{missing:?}: {parts}");
}

#[test]
fn stages_of_shares_are_planned_and_run() {
    let model = fixture("qwen3_5_moe");
    let devices =
        ["--devices", "cpu:0,cpu:1,cpu:2,cpu:3", "--split", "pipeline:2,tensor:2", "--threads", "2"];
    let plan = [&["plan", "--model", arg(&model), "--context", "256"][..], &devices].concat();
    let text = succeed(&plan);
    assert!(text.contains("cpu:1: share 2 of 2 of embedding, layers 0 to "), "{text}");
    let command = ["generate", "--model", arg(&model), "--ids", "3,1,4,1,5,9", "--max-tokens", "20"];
    let command =
        [&command[..], &["--ignore-eos", "--json", "--context", "256", "--compute", "f32"]].concat();
    let report = json(&[&command[..], &devices].concat());
    assert_eq!(report["tokens"], json(&command)["tokens"]);
    for device in report["memory"]["devices"].as_array().expect("devices") {
        assert_eq!(device["planned"], device["allocated"]);
        assert_eq!(device["planned"], device["peak"]);
    }
}

#[test]
fn a_split_is_timed_and_proposed() {
    let model = fixture("qwen3_5");
    let two = ["--devices", "cpu:0,cpu:1", "--threads", "2"];
    let bench = ["bench", "--model", arg(&model), "--prompt", "8", "--gen", "2", "--repeat", "1", "--json"];
    for batch in ["1", "3"] {
        let whole = json(&[&bench[..], &["--batch", batch]].concat());
        let report = json(&[&bench[..], &["--batch", batch], &two].concat());
        assert!(report["decode_tokens_per_second"].as_f64().expect("a rate") > 0.0);
        assert_eq!(report["bytes_per_decoded_token"], whole["bytes_per_decoded_token"]);
        assert_eq!(report["memory"]["devices"].as_array().map(Vec::len), Some(2));
    }
    let fit = ["fit", arg(&model), "--sequences", "1", "--context", "256", "--limit", "1Gi", "--json"];
    let fit = json(&[&fit[..], &["--devices", "cpu:0,cpu:1"]].concat());
    let best = &fit["fits"][0];
    let command = best["command"].as_str().expect("a command");
    assert!(command.contains("--devices cpu:0,cpu:1 --split "), "{command}");
    let (needed, all) = (best["needed"].as_u64(), best["bytes"].as_u64());
    assert!(needed < all && needed > Some(0), "{best}");
}

#[test]
fn each_split_that_fits_has_a_line_and_the_smallest_largest_device_is_first() {
    let model = fixture("qwen3_5");
    let devices = ["--devices", "cpu:0,cpu:1", "--kv-bits", "16"];
    let fit = ["fit", arg(&model), "--sequences", "1", "--context", "256", "--json"];
    for limit in [&["--limit", "1Gi"][..], &[]] {
        let fit = json(&[&fit[..], &devices, limit].concat());
        let first: Vec<&Value> = fit["fits"].as_array().expect("lines").iter().take(2).collect();
        let splits: Vec<&str> = first.iter().map(|line| line["split"].as_str().expect("a split")).collect();
        assert!(splits.contains(&"tensor") && splits.contains(&"pipeline"), "{splits:?}, {limit:?}");
        let largest: Vec<u64> =
            first.iter().map(|line| line["largest_device"].as_u64().expect("bytes")).collect();
        assert!(largest.is_sorted(), "{largest:?}, {limit:?}");
        for line in first {
            let command = line["command"].as_str().expect("a command");
            assert!(
                command.ends_with(&format!("--split {}", line["split"].as_str().expect("a split"))),
                "{command}"
            );
        }
    }
}

/// The pipeline of a model with the largest step's bytes on each device.
fn columns(limits: &str) -> Vec<(u64, u64)> {
    let model = fixture("qwen3_5");
    let plan = ["plan", "--serve", "--model", arg(&model), "--context", "256", "--sequences", "2", "--json"];
    let plan = json(&[&plan[..], &["--devices", "cpu:0,cpu:1", "--memory-limit", limits]].concat());
    let column = |rank: usize| {
        let device = &plan["devices"][rank];
        let layers = (0..2).map(|i| device["layers"][i].as_u64().expect("a number")).collect::<Vec<_>>();
        (layers[1] - layers[0], device["weights"].as_u64().expect("bytes"))
    };
    vec![column(0), column(1)]
}

#[test]
fn unequal_devices_get_layers_by_what_they_hold() {
    let (large_first, large_last) = (columns("900Mi,300Mi"), columns("300Mi,900Mi"));
    assert!(large_first[0].0 > large_last[0].0, "{large_first:?}, {large_last:?}");
    assert!(large_first[1].1 < large_last[1].1, "{large_first:?}, {large_last:?}");
    let model = fixture("qwen3_5");
    let command = ["generate", "--model", arg(&model), "--ids", "3,1,4", "--max-tokens", "6", "--ignore-eos"];
    let command = [&command[..], &["--json", "--context", "256"]].concat();
    let devices = ["--devices", "cpu:0,cpu:1", "--threads", "2", "--memory-limit"];
    let report = json(&[&command[..], &devices, &["900Mi,300Mi"]].concat());
    assert_eq!(report["tokens"], json(&command)["tokens"], "a pipeline has the bits of the whole model");
    let too_small = keel(&[&command[..], &devices, &["900Mi,64Ki"]].concat());
    let message = stderr(&too_small);
    assert!(message.contains("the memory limit, which cpu:1 has for itself"), "{message}");
    assert!(!too_small.status.success() && message.contains("65536"), "{message}");
    misuse(&[&command[..], &devices, &["1G,2G,3G"]].concat(), "--memory-limit has 3 values for 2 device(s)");
    misuse(
        &[&command[..], &["--memory-limit", "1G,2G"]].concat(),
        "--memory-limit has 2 values for 1 device(s)",
    );
}

#[test]
fn a_server_that_is_made_smaller_names_the_limit_of_a_device() {
    let model = fixture("qwen3_5");
    let plan = ["plan", "--serve", "--model", arg(&model), "--devices", "cpu:0,cpu:1"];
    let output = keel(&[&plan[..], &["--memory-limit", "18Mi"]].concat());
    let message = stderr(&output);
    assert!(message.contains("18.0 MiB are the --memory-limit of a device: reduced to"), "{message}");
    assert!(!message.contains("free memory"), "{message}");
}

#[test]
fn a_server_is_planned_on_each_device() {
    let model = fixture("qwen3_5");
    let plan = ["plan", "--serve", "--model", arg(&model), "--context", "256", "--sequences", "2", "--json"];
    let plan = json(&[&plan[..], &["--devices", "cpu:0,cpu:1"]].concat());
    let sum =
        |category: &str| (0..2).map(|rank| plan["devices"][rank][category].as_u64().expect("bytes")).sum();
    for category in ["weights", "kv", "recurrent", "checkpoints"] {
        assert_eq!(plan[category].as_u64(), Some(sum(category)), "{category}");
    }
    assert!(plan["requests"].as_u64() > Some(0), "{plan}");
}

#[test]
fn a_device_that_is_too_small_is_named_with_its_numbers() {
    let model = fixture("qwen3_5");
    let command = ["generate", "--model", arg(&model), "--ids", "1,2", "--max-tokens", "4"];
    let output = keel(&[&command[..], &["--devices", "cpu:0,cpu:1", "--memory-limit", "64Ki"]].concat());
    let message = stderr(&output);
    assert!(
        !output.status.success() && message.contains("the memory limit, which cpu:0 has for itself"),
        "{message}"
    );
    assert!(message.contains("65536") && message.contains("weights"), "{message}");
}

#[test]
fn what_is_not_split_says_so() {
    let model = fixture("llama");
    let two = ["--devices", "cpu:0,cpu:1"];
    for command in [&["inspect", arg(&model)][..], &["serve", "--model", "a=x", "--model", "b=y"]] {
        misuse(&[command, &two].concat(), "runs a model on one device");
    }
    let logits = ["logits", "--model", arg(&model), "--ids", "1,2", "--out", "/dev/null"];
    let with = |devices: &'static str| [&logits[..], &["--devices", devices]].concat();
    misuse(&with("cpu:0,cpu:0"), "cpu:0 is listed twice");
    fail(&with("cpu:0,cpu:1,cpu:2,cpu:3,cpu:4"), "a pipeline of 5 devices needs at least as many layers");
    for (extra, reason) in [
        (
            &["--devices", "cpu:0,cpu:1", "--split", "pipeline:2,tensor:2"][..],
            "are 4 devices, and --devices lists 2",
        ),
        (&["--devices", "tpu:0"], "there is no such device"),
        (&["--split", "pipeline"], "--devices"),
    ] {
        let output = keel(&[&logits[..], extra].concat());
        let message = stderr(&output);
        assert!(output.status.code() == Some(2) && message.contains(reason), "{extra:?}: {message}");
    }
}

#[test]
fn a_split_over_gpus_is_planned_without_them() {
    let plan = |split: &str| {
        let devices = ["--devices", "cuda:0,cuda:1", "--split", split, "--context", "512", "--json"];
        json(&[&["plan", "--shape", "qwen3.5-122b-a10b"][..], &devices].concat())
    };
    let whole = ["plan", "--shape", "qwen3.5-122b-a10b", "--device", "cuda:0", "--context", "512", "--json"];
    let whole = json(&whole)["weights"].as_u64().expect("bytes");
    for split in ["pipeline", "tensor"] {
        let plan = plan(split);
        for (rank, name) in ["cuda:0", "cuda:1"].into_iter().enumerate() {
            let device = &plan["devices"][rank];
            assert_eq!(device["device"], name);
            let weights = device["weights"].as_u64().expect("bytes");
            assert!(
                weights > whole / 2 - whole / 20 && weights < whole / 2 + whole / 20,
                "{split}: {weights}"
            );
        }
    }
    misuse(&["plan", "--shape", "qwen3-8b", "--devices", "cpu:0,cuda:0"], "list only one kind");
}
