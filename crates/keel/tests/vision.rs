//! Compares conversations with pictures with the reference outputs of the fixtures.

mod common;

use std::path::Path;

use common::{arg, fail, floats, holds, ints, relative_error, succeed};
use keel_testkit::fixtures::{VLM, vlm_fixture};
use keel_weights::{SafetensorsFile, TensorSource};
use serde_json::{Value, json};

/// f32 and f64 differ by 2e-6; the smallest mistake costs 1e-4.
const FEATURES_MAX: f64 = 2e-5;
const LOGITS_MAX: f64 = 1e-4;

fn cases(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("cases.json")).expect("readable");
    let all: Value = serde_json::from_str(&text).expect("JSON");
    all["cases"].as_array().expect("a list").clone()
}

/// The conversation in OpenAI's form.
fn conversation(folder: &Path, case: &Value) -> Value {
    let path = |name: &Value| {
        let images = std::path::absolute(folder.join("images")).expect("a path");
        json!(images.join(name.as_str().expect("a name")))
    };
    let mut messages = case["messages"].clone();
    for message in messages.as_array_mut().expect("a list") {
        for part in message["content"].as_array_mut().into_iter().flatten() {
            if part["type"] == "image" {
                *part = json!({"type": "image_url", "image_url": {"url": path(&part["image"])}});
            } else if part["type"] == "video" {
                let video = &case["video"];
                let frames: Vec<Value> =
                    video["frames"].as_array().expect("frames").iter().map(path).collect();
                *part = json!({"type": "video", "video": frames, "fps": video["fps"],
                    "do_sample_frames": video["do_sample_frames"]});
            }
        }
    }
    let mut settings = case["processor_kwargs"].as_object().cloned().unwrap_or_default();
    settings.retain(|key, _| key.contains("pan_and_scan"));
    json!({"messages": messages, "processor_kwargs": settings})
}

fn bytes(path: &Path, name: &str) -> Vec<u8> {
    let file = SafetensorsFile::open(path).expect("opens");
    file.tensor(name).expect("there").bytes().to_vec()
}

/// Compares the tensors of a case's output file with the reference. Returns how many were compared.
fn check(name: &str, want: &Path, out: &Path) -> usize {
    let mut compared = 0;
    let ids = ["input_ids", "position_ids", "rope_deltas", "image_grid_thw", "video_grid_thw"];
    let exact = ["resized_u8.0", "resized_u8.1", "resized_u8.2", "resized_u8_video", "pixel_values"];
    for tensor in ids.into_iter().chain(exact).chain(["pixel_values_videos"]) {
        if holds(want, tensor) {
            assert!(bytes(out, tensor) == bytes(want, tensor), "{name}: {tensor} differs");
            compared += 1;
        }
    }
    let deep =
        (0..3).flat_map(|k| [format!("deepstack_features.{k}"), format!("deepstack_video_features.{k}")]);
    for tensor in ["image_features", "video_features"].map(String::from).into_iter().chain(deep) {
        if holds(want, &tensor) {
            let error = relative_error(&floats(out, &tensor), &floats(want, &tensor));
            assert!(error <= FEATURES_MAX, "{name}: {tensor} differ by {error:.1e}");
            compared += 1;
        }
    }
    let got = floats(out, "logits");
    let (got, tensor) = match holds(want, "logits") {
        true => (&got[..], "logits"),
        false => (&got[got.len() - floats(want, "logits_last").len()..], "logits_last"),
    };
    let error = relative_error(got, &floats(want, tensor));
    assert!(error <= LOGITS_MAX, "{name}: {tensor} differ by {error:.1e}");
    compared += 1;
    if holds(want, "mtp_logits") {
        let error = relative_error(&floats(out, "mtp_logits"), &floats(want, "mtp_logits"));
        assert!(error <= LOGITS_MAX, "{name}: mtp_logits differ by {error:.1e}");
        compared += 1;
    }
    compared
}

/// Whether the case can be compared with the reference. It cannot in two cases:
///
/// - The reference keeps a video's own markers around those of its frames. keel replaces them.
/// - The reference clips 16-bit grey values.
fn is_comparable(case: &Value) -> bool {
    let name = case["name"].as_str().expect("named");
    let with_markers = name.starts_with("f_") && name != "f_video_no_outer_wrapper";
    !with_markers && name != "e_gray16"
}

/// `expected` says how many tensors of each model are compared.
fn compare(extra: &[&str], is_mine: fn(&str) -> bool, expected: [usize; VLM.len()]) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (messages, out) = (dir.path().join("messages.json"), dir.path().join("out.safetensors"));
    for (model, expected) in VLM.into_iter().zip(expected) {
        let Some(folder) = vlm_fixture(model) else { continue };
        let mut compared = 0;
        for case in cases(&folder) {
            let name = case["name"].as_str().expect("named");
            if !is_comparable(&case) || !is_mine(name) {
                continue;
            }
            std::fs::write(&messages, conversation(&folder, &case).to_string()).expect("writable");
            let command =
                ["logits", "--model", arg(&folder), "--messages", arg(&messages), "--out", arg(&out)];
            succeed(&[&command[..], &["--compute", "f32"], extra].concat());
            compared += check(
                &format!("{model} {name} {extra:?}"),
                &folder.join(format!("expected_{name}.safetensors")),
                &out,
            );
        }
        assert_eq!(compared, expected, "tensors of {model}");
    }
}

#[test]
fn conversations_match_the_reference() {
    compare(&[], |_| true, [114, 72, 96, 67]);
}

#[test]
fn chunks_and_single_tokens_match_the_reference() {
    let few = |name: &str| {
        ["a_photo", "c_two_images", "f_video_no_outer_wrapper", "h_pan_and_scan"].contains(&name)
    };
    compare(&["--prefill-step", "64"], few, [24, 24, 32, 17]);
    compare(&["--one-by-one"], few, [24, 24, 32, 17]);
}

#[test]
fn the_frames_of_a_video_match_the_reference() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (messages, out) = (dir.path().join("messages.json"), dir.path().join("out.safetensors"));
    for model in VLM {
        let Some(folder) = vlm_fixture(model) else { continue };
        let cases = cases(&folder);
        let mut with_values = 0;
        for case in cases.iter().filter(|case| case["video"].is_object()) {
            let name = case["name"].as_str().expect("named");
            let want = folder.join(format!("expected_{name}.safetensors"));
            std::fs::write(&messages, conversation(&folder, case).to_string()).expect("writable");
            let command =
                ["logits", "--model", arg(&folder), "--messages", arg(&messages), "--out", arg(&out)];
            succeed(&[&command[..], &["--compute", "f32"]].concat());
            // Only one case of a model has these values.
            let values = holds(&want, "pixel_values_videos").then_some("pixel_values_videos");
            with_values += usize::from(values.is_some());
            for tensor in ["resized_u8_video", "video_grid_thw", "rope_deltas"].into_iter().chain(values) {
                assert!(bytes(&out, tensor) == bytes(&want, tensor), "{model} {name}: {tensor} differs");
            }
            let error = relative_error(&floats(&out, "video_features"), &floats(&want, "video_features"));
            assert!(error <= FEATURES_MAX, "{model} {name}: {error:.1e}");
            // Each video has two markers fewer. Everything else is the same.
            let (got, wanted) = (ints(&out, "input_ids").len(), ints(&want, "input_ids").len());
            let markers = if name == "f_video_no_outer_wrapper" { 0 } else { 2 };
            assert_eq!(got + markers, wanted, "{model} {name}");
        }
        assert_eq!(with_values, usize::from(model != "vlm_gemma3"), "{model}");
    }
}

/// Two logits this close may be ranked either way.
const NEAR_TIE: f32 = 1e-3;

#[test]
fn answers_about_pictures_match_the_reference() {
    for model in VLM {
        let Some(folder) = vlm_fixture(model) else { continue };
        for (case, speculate) in [("a_photo", "off"), ("b_large", "off"), ("b_large", "2")] {
            if speculate != "off" && !model.starts_with("vlm_qwen3_5") {
                continue;
            }
            let want = folder.join(format!("expected_{case}.safetensors"));
            let (greedy, margin) = (ints(&want, "greedy_ids"), floats(&want, "greedy_margin"));
            let image = folder.join("images").join(format!("{case}.png"));
            let all = cases(&folder);
            let asked = all.iter().find(|c| c["name"] == case).expect("there");
            let parts = asked["messages"][0]["content"].as_array().expect("parts");
            let text = parts[1]["text"].as_str().expect("text");
            let command =
                ["generate", "--model", arg(&folder), "--image", arg(&image), text, "--compute", "f32"];
            let how = [
                "--temperature",
                "0",
                "--max-tokens",
                "24",
                "--ignore-eos",
                "--json",
                "--speculate",
                speculate,
            ];
            let report = common::json(&[&command[..], &how].concat());
            let got: Vec<u64> =
                report["tokens"].as_array().expect("a list").iter().filter_map(Value::as_u64).collect();
            assert_eq!(got.len(), greedy.len());
            for (i, (got, want)) in got.iter().zip(&greedy).enumerate() {
                if *got != u64::from(*want) {
                    assert!(
                        margin[i] < NEAR_TIE,
                        "{model} {case} {speculate}: token {i} is {got}, expected {want}"
                    );
                    break;
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_seen_is_said_in_a_sentence() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| dir.path().join(name);
    let pictures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../keel-vision/tests/data");
    let sound = std::fs::read(pictures.join("bilevel.png")).expect("readable");
    std::fs::write(path("cut.png"), &sound[..sound.len() / 2]).expect("writable");
    std::fs::write(path("text.png"), "no picture").expect("writable");
    std::fs::write(path("sound.png"), &sound).expect("writable");
    let out = path("out");
    let run = |model: &Path, url: &str, reason: &str| {
        let part = json!({"type": "image_url", "image_url": {"url": url}});
        let conversation = json!({"messages": [{"role": "user", "content": [part]}]});
        std::fs::write(path("m.json"), conversation.to_string()).expect("writable");
        fail(
            &["logits", "--model", arg(model), "--messages", arg(&path("m.json")), "--out", arg(&out)],
            reason,
        );
    };
    let demo = common::demo();
    run(&demo, "sound.png", "reads only text");
    let Some(folder) = vlm_fixture("vlm_qwen3_5") else { return };
    run(&folder, "cut.png", "cannot be decoded");
    run(&folder, "text.png", "not a picture in a supported format");
    run(&folder, "missing.png", "cannot read");
    run(&folder, "https://example.org/a.png", "is not fetched");
    run(&folder, "data:image/png;base64,%%", "base64");
}

#[test]
fn the_plan_prints_the_passes_of_the_tower() {
    let Some(folder) = vlm_fixture("vlm_qwen3_5") else { return };
    let plan = |extra: &[&str]| {
        let args =
            ["plan", "-v", "--serve", "--model", arg(&folder), "--image-pixels", "65536", "--device", "cpu"];
        succeed(&[&args[..], extra].concat())
    };
    let text = plan(&[]);
    let line = text.lines().find(|line| line.starts_with("patches of a picture: ")).expect("the list");
    assert!(line.contains(" 16 32 48 ") && line.ends_with(" 256"), "{line}");
    assert!(text.contains("programs of the tower: "), "{text}");
    // The smaller a step, the smaller the pieces.
    let text = plan(&["--step-tokens", "1"]);
    assert!(text.contains(" 256 (3 pieces)"), "{text}");
    assert!(!plan(&["--images", "0"]).contains("of the tower"));
}

/// A plan for a GPU needs none.
#[test]
fn a_tower_off_the_gpu_is_planned_on_the_cpu() {
    let Some(folder) = vlm_fixture("vlm_qwen3_5") else { return };
    let plan = ["plan", "--serve", "-m", arg(&folder), "--image-pixels", "65536", "--sequences", "1"];
    let gpu = [&plan[..], &["--device", "cuda:0", "--json"]].concat();
    let apart = [&gpu[..], &["--vision-device", "cpu"]].concat();
    let (whole, split) = (common::json(&gpu), common::json(&apart));
    let devices = split["devices"].as_array().expect("two devices");
    let [on_gpu, on_cpu] = &devices[..] else { panic!("{split}") };
    assert_eq!((&on_gpu["device"], &on_cpu["device"]), (&json!("cuda:0"), &json!("cpu (vision)")));
    let bytes = |report: &Value, category: &str| report[category].as_u64().expect("a number");
    assert!(bytes(on_gpu, "weights") < bytes(&whole, "weights"), "{split}");
    assert!(bytes(on_cpu, "weights") > 0 && bytes(on_cpu, "vision") > bytes(on_gpu, "vision"), "{split}");
    assert_eq!(bytes(on_cpu, "features"), bytes(&whole, "features"));
    assert_eq!(bytes(on_gpu, "features"), 0);
    for category in ["kv", "recurrent"] {
        assert_eq!(
            (bytes(on_gpu, category), bytes(on_cpu, category)),
            (bytes(&whole, category), 0),
            "{category}"
        );
    }
    let table = succeed(&[&plan[..], &["--device", "cuda:0", "--vision-device", "cpu", "-v"]].concat());
    assert!(
        table.contains("cuda:0") && table.contains("cpu (vision)") && table.contains("features"),
        "{table}"
    );
    // The passes are those of the CPU, whose list is finer.
    let passes = table.lines().find(|line| line.starts_with("patches of a picture: ")).expect("the list");
    assert!(passes.contains(" 16 32 48 "), "{passes}");
    // A model on the CPU has its tower there anyway.
    let cpu = [&plan[..], &["--device", "cpu", "--json"]].concat();
    assert_eq!(common::json(&cpu), common::json(&[&cpu[..], &["--vision-device", "cpu"]].concat()));
    let two = [&plan[..], &["--devices", "cpu:0,cpu:1", "--vision-device", "cpu"]].concat();
    common::misuse(&two, "--vision-device is for a model on one device");
}

/// Kept features are in host memory, and a server's limit counts them.
#[test]
fn fit_counts_what_a_limit_counts_and_names_the_device_of_the_tower() {
    let Some(folder) = vlm_fixture("vlm_qwen3_5") else { return };
    let fit = ["fit", arg(&folder), "--device", "cuda:0", "--limit", "8Gi", "--json"];
    let lines = |fit: Value| fit["fits"].as_array().expect("lines").clone();
    let whole = lines(common::json(&fit));
    assert!(!whole.is_empty());
    for line in &whole {
        assert_eq!(line["needed"], line["bytes"], "{line}");
    }
    let apart = lines(common::json(&[&fit[..], &["--vision-device", "cpu"]].concat()));
    for line in &apart {
        let command = line["command"].as_str().expect("a command");
        assert!(command.ends_with(" --device cuda:0 --vision-device cpu"), "{command}");
    }
    assert!(apart[0]["bytes"].as_u64() < whole[0]["bytes"].as_u64(), "the tower is not on the GPU");
}

/// The tower stays as it is, and routers take more bits than the rest.
#[test]
fn fit_counts_a_copy_in_fewer_bits_as_quantize_writes_it() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let folders = vlm_fixture("vlm_qwen3_5").into_iter().chain([common::fixture("qwen3_5_moe")]);
    for (i, folder) in folders.enumerate() {
        let form = ["--sequences", "1", "--context", "256", "--kv-bits", "4", "--json", "--limit"];
        let fit = [&["fit", arg(&folder)][..], &form].concat();
        // Where nothing fits, the copy with the fewest bits is told.
        let message = common::stderr(&common::keel(&[&fit[..], &["1K"]].concat()));
        let least = message.split(" needs ").nth(1).and_then(|rest| rest.split(' ').next());
        let least = least.unwrap_or_else(|| panic!("{message}"));
        let line = common::json(&[&fit[..], &[least]].concat())["fits"][0].clone();
        let bits = line["weights"].as_str().and_then(|name| name.strip_suffix(" bits"));
        let copy = dir.path().join(i.to_string());
        succeed(&["quantize", arg(&folder), arg(&copy), "--bits", bits.expect("a copy")]);
        let command = line["command"].as_str().expect("a command");
        let flags = command.split_once(" --sequences ").expect("the bounds").1;
        let plan = ["plan", "--json", "--model", arg(&copy), "--sequences"];
        let plan: Vec<&str> = plan.into_iter().chain(flags.split_whitespace()).collect();
        assert_eq!(Some(common::total(&common::json(&plan))), line["bytes"].as_u64(), "{command}");
    }
}

/// A program that stands in for `ffmpeg` gives a file the frames of the fixture.
#[cfg(unix)]
#[test]
fn a_video_file_is_read_by_ffmpeg() {
    let Some(folder) = vlm_fixture("vlm_qwen3_5") else { return };
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| dir.path().join(name);
    let names: Vec<String> = (0..5).map(|i| format!("f_video_0{i}.png")).collect();
    let mut frames = Vec::new();
    let mut size = (0, 0);
    // Four of five frames are chosen.
    for name in [0, 1, 3, 4].map(|i| folder.join("images").join(&names[i])) {
        let bytes = std::fs::read(name).expect("there");
        let picture = keel_vision::decode(&bytes, keel_vision::DecodeLimits::default()).expect("decodes");
        size = (picture.width, picture.height);
        frames.extend(format!("P6\n{} {}\n255\n", size.0, size.1).into_bytes());
        frames.extend(picture.rgb);
    }
    std::fs::write(path("frames.ppm"), frames).expect("writable");
    let mut list = format!("#tb 0: 1/10\n#dimensions 0: {}x{}\n", size.0, size.1);
    (0..5).for_each(|i| list.push_str(&format!("0, {i}, {i}, 1, 9, 0x1\n")));
    std::fs::write(path("list.txt"), list).expect("writable");
    std::fs::write(path("a.mp4"), b"\0\0\0\x18ftypisom").expect("writable");
    let script = "cd \"$(dirname \"$0\")\"\ncase \"$*\" in *framecrc*) cat list.txt;; \
        *'((eq(n,0)+eq(n,1))+(eq(n,3)+eq(n,4)))'*) cat frames.ppm;; *) exit 1;; esac\n";
    std::fs::write(path("script"), script).expect("writable");
    // A link: a program that is written here might still be open for writing in a process that another test starts.
    let stand_in = Path::new(env!("CARGO_MANIFEST_DIR")).join("../keel-vision/tests/data/stand_in.sh");
    std::os::unix::fs::symlink(stand_in, path("ffmpeg")).expect("linked");
    let features = |video: Value, out: &str| {
        let messages = json!([{"role": "user", "content": [video, {"type": "text", "text": "What moves?"}]}]);
        std::fs::write(path("m.json"), messages.to_string()).expect("writable");
        let (messages, out) = (path("m.json"), path(out));
        let own = std::env::var("PATH").unwrap_or_default();
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_keel"))
            .args(["logits", "--model", arg(&folder), "--messages", arg(&messages), "--out", arg(&out)])
            .env("PATH", format!("{}:{own}", dir.path().display()))
            .output()
            .expect("runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        (floats(&out, "video_features"), ints(&out, "input_ids"))
    };
    let listed: Vec<Value> = names.iter().map(|name| json!(folder.join("images").join(name))).collect();
    let expected = features(json!({"type": "video", "video": listed, "fps": 10}), "listed.safetensors");
    let got = features(json!({"type": "video_url", "video_url": {"url": "a.mp4"}}), "film.safetensors");
    assert!(expected == got, "the file has the frames of the list");
}

/// A turn about a picture, one about another in its place, and the first again.
#[test]
fn chat_shows_pictures() {
    let Some(folder) = vlm_fixture("vlm_qwen3_5") else { return };
    let image = |name: &str| arg(&folder.join("images").join(name)).to_string();
    let (dog, other) = (image("a_photo.png"), image("d_photo.png"));
    let chat = |flags: &[&str], input: &str| {
        let all =
            ["chat", "-m", arg(&folder), "--temperature", "0", "--max-tokens", "12", "--compute", "f32"];
        let output = common::keel_with_input(&[&all, flags].concat(), input);
        assert!(output.status.success(), "{}", common::stderr(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let turns = |images: &[&str]| {
        let turns: Vec<String> =
            images.iter().map(|image| format!("/image {image}\nWhat is this?\n/undo\n")).collect();
        chat(&["--images"], &turns.concat())
    };
    let (one, two) = (turns(&[&dog]), turns(&[&other]));
    assert!(one.contains("goes with the next turn") && one.trim().lines().count() > 1, "{one}");
    assert_ne!(one.replace(&dog, ""), two.replace(&other, ""), "it sees which picture it is");
    // The prompts have the same tokens, and the cached rows of one are not used for the other.
    assert_eq!(turns(&[&dog, &other, &dog]), format!("{one}{two}{one}"));
    let refused = chat(&["--images"], "/image no/such.png\n/image\n");
    assert!(refused.contains("cannot read") && refused.contains("needs the name"), "{refused}");
    assert!(chat(&[], &format!("/image {dog}\n")).contains("--images"));
    fail(&["chat", "--images"], "reads only text");
}
