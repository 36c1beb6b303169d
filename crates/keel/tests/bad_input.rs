//! Every wrong input gives one line on standard error and exit code 1, or 2 for wrong usage.

mod common;

use std::fs;
use std::path::Path;

#[cfg(target_os = "linux")]
use common::hostile::ends_soon;
use common::{arg, copy_of, fail, fixture, keel, stderr, succeed};
use serde_json::{Value, json};

/// Runs a copy of a fixture after `damage` changed its folder. The run must fail with `reason`.
fn fails_after(name: &str, damage: impl Fn(&Path), reason: &str) {
    let folder = copy_of(name);
    damage(folder.path());
    fail(&["generate", "--model", arg(folder.path()), "--ids", "1,2,3", "--max-tokens", "2"], reason);
}

fn edit_weights(folder: &Path, edit: impl Fn(&mut Vec<u8>)) {
    let path = folder.join("model.safetensors");
    let mut bytes = fs::read(&path).expect("there");
    edit(&mut bytes);
    fs::write(path, bytes).expect("writable");
}

/// Edits the header of the weights file, and updates its length field.
fn edit_header(folder: &Path, edit: impl Fn(&mut Value)) {
    edit_weights(folder, |bytes| {
        let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
        let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("JSON");
        edit(&mut header);
        let text = header.to_string().into_bytes();
        let rest = bytes.split_off(8 + length);
        *bytes = [&(text.len() as u64).to_le_bytes()[..], &text, &rest].concat();
    });
}

fn edit_config(folder: &Path, edit: impl Fn(&mut Value)) {
    let path = folder.join("config.json");
    let mut config = serde_json::from_slice(&fs::read(&path).expect("there")).expect("JSON");
    edit(&mut config);
    fs::write(path, config.to_string()).expect("writable");
}

const Q_PROJ: &str = "model.language_model.layers.3.self_attn.q_proj.weight";

#[test]
fn truncated_weights() {
    for keep in [0, 4, 8, 100, 20_000] {
        fails_after(
            "qwen3_5",
            |f| edit_weights(f, |bytes| bytes.truncate(keep)),
            "is not a valid weights file",
        );
    }
    let cut = |f: &Path| {
        edit_weights(f, |bytes| {
            bytes.pop();
        });
    };
    fails_after("qwen3_5", cut, "is not a valid weights file");
}

/// NaN as bf16 and f32 has all bits set.
#[test]
fn a_score_needs_numbers_and_text() {
    let folder = copy_of("qwen3");
    add_tokenizer(folder.path());
    let text = folder.path().join("text");
    fs::write(&text, "a b ".repeat(200)).expect("writable");
    let eval = ["eval", "--window", "128", "--model", arg(folder.path()), "--perplexity", arg(&text)];
    succeed(&eval);
    edit_weights(folder.path(), |bytes| {
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
        bytes[header..].fill(0xff);
    });
    fail(&eval, "logits are no numbers");
    fs::write(&text, b"a b \xff\xfe ".repeat(200)).expect("writable");
    fail(&eval, "not text in UTF-8");
}

#[test]
fn headers_that_lie() {
    for length in [u64::MAX, 1 << 62, 1 << 32, 3_000_000, 1] {
        let lie = |f: &Path| {
            edit_weights(f, |bytes| bytes[..8].copy_from_slice(&length.to_le_bytes()));
        };
        fails_after("qwen3_5", lie, "is not a valid weights file");
    }
    let lies: [(&str, Value); 5] = [
        ("data_offsets", json!([0, u64::MAX])),
        ("data_offsets", json!([10, 2])),
        ("data_offsets", json!([1_757_872, 1_888_942])),
        ("shape", json!([u64::MAX, 128])),
        ("dtype", json!("F32")),
    ];
    for (key, value) in lies {
        let lie = |f: &Path| edit_header(f, |header| header[Q_PROJ][key] = value.clone());
        fails_after("qwen3_5", lie, "is not a valid weights file");
    }
    let garbage = |f: &Path| edit_weights(f, |bytes| bytes[8..40].fill(b'{'));
    fails_after("qwen3_5", garbage, "is not a valid weights file");
}

#[test]
fn missing_and_misshapen_tensors() {
    let rename = |f: &Path| {
        edit_header(f, |header| {
            let tensors = header.as_object_mut().expect("an object");
            let entry = tensors.remove(Q_PROJ).expect("there");
            tensors.insert("unrelated".into(), entry);
        });
    };
    fails_after("qwen3_5", rename, "q_proj");
    let transpose = |f: &Path| edit_header(f, |header| header[Q_PROJ]["shape"] = json!([128, 512]));
    fails_after("qwen3_5", transpose, "q_proj");
    let widen = |f: &Path| edit_config(f, |config| config["text_config"]["hidden_size"] = json!(256));
    fails_after("qwen3_5", widen, "(512, 256)");
}

#[test]
fn configs_that_cannot_be_used() {
    let model_type = |f: &Path| edit_config(f, |config| config["model_type"] = json!("gpt17"));
    fails_after("qwen3_5", model_type, "model_type \"gpt17\" is not supported; supported are qwen3_5");
    let no_json = |f: &Path| fs::write(f.join("config.json"), "{").expect("writable");
    fails_after("qwen3_5", no_json, "config.json is not usable");
    let no_config = |f: &Path| fs::remove_file(f.join("config.json")).expect("writable");
    fails_after("qwen3_5", no_config, "config.json is missing");
    let no_weights = |f: &Path| fs::remove_file(f.join("model.safetensors")).expect("writable");
    fails_after("qwen3_5", no_weights, "no weights at");
    for (key, value) in [
        ("num_hidden_layers", json!(-4)),
        ("num_hidden_layers", json!(1_000_000_000)),
        ("hidden_size", json!("wide")),
        ("vocab_size", json!(0)),
        ("num_attention_heads", json!(0)),
        ("layer_types", json!(["sliding"])),
        ("linear_conv_kernel_dim", json!(1)),
        ("head_dim", json!(72)),
        ("head_dim", json!(528)),
    ] {
        let edit = |f: &Path| edit_config(f, |config| config["text_config"][key] = value.clone());
        fails_after("qwen3_5", edit, "config.json");
    }
}

#[test]
fn quantised_weights_that_do_not_fit_their_config() {
    let bits = |f: &Path| {
        edit_config(f, |config| {
            for section in ["quantization", "quantization_config"] {
                if config[section].is_object() {
                    config[section]["bits"] = json!(8);
                }
            }
        });
    };
    fails_after("qwen3_5_mlx_4bit", bits, "module '");
}

/// Adds a tokenizer from the tests of keel-text. The fixtures' vocabularies contain its ids.
fn add_tokenizer(folder: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../keel-text/tests/assets/byte_level");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(source.join(file), folder.join(file)).expect("the test's own files are there");
    }
}

#[test]
fn broken_tokenizers_and_templates() {
    let folder = copy_of("qwen3_5");
    let path = arg(folder.path());
    let text = ["generate", "--model", path, "ab", "--max-tokens", "1"];
    fail(&text, "tokenizer.json: cannot be read");
    assert_eq!(stderr(&keel(&text)).matches("No such file").count(), 1, "a cause is said once");
    add_tokenizer(folder.path());
    assert!(keel(&text).status.success(), "{}", stderr(&keel(&text)));
    for template in ["{% for %}", "{{ messages | nothing }}", "{{ raise_exception('no') }}"] {
        fs::write(folder.path().join("chat_template.jinja"), template).expect("writable");
        fail(&["generate", "--model", path, "ab", "--chat"], "chat template");
        // A refusal concerns one turn. The conversation goes on after it.
        if !template.contains("raise_exception") {
            fail_chat(path);
        }
    }
    fs::write(folder.path().join("generation_config.json"), r#"{"top_p": 7}"#).expect("writable");
    fail(&text, "generation_config.json");
    fs::remove_file(folder.path().join("generation_config.json")).expect("there");
    for broken in ["", "{}", "[1]", r#"{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}"#] {
        fs::write(folder.path().join("tokenizer.json"), broken).expect("writable");
        fail(&text, "tokenizer.json");
    }
}

/// `chat` reads its input before it renders the template. So a template that breaks only when it is rendered needs
/// input.
fn fail_chat(model: &str) {
    let output = common::keel_with_input(&["chat", "--model", model], "hello\n");
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert_eq!(stderr(&output).lines().filter(|line| line.starts_with("keel: ")).count(), 1);
}

#[test]
fn prompts_that_do_not_fit() {
    let folder = fixture("qwen3_5");
    let ids = vec!["7"; 4097].join(",");
    let model = ["--model", arg(&folder), "--ids"];
    let reason = "more than the model's context of 4096";
    fail(&[&["generate"], &model[..], &[&ids]].concat(), reason);
    let out = std::env::temp_dir().join("never-written.safetensors");
    fail(&[&["logits"], &model[..], &[&ids, "--out", arg(&out)]].concat(), reason);
    fail(&[&["generate"], &model[..], &["1", "--context", "5000"]].concat(), reason);
    let long = vec!["7"; 300].join(",");
    fail(&[&["generate"], &model[..], &[&long, "--context", "256"]].concat(), "300 tokens do not fit");
    fail(&["plan", "--model", arg(&folder), "--context", "9999999"], reason);
    fail(&["bench", "--model", arg(&folder), "--prompt", "5000"], reason);
}

#[test]
fn ids_that_the_model_does_not_have() {
    let folder = fixture("qwen3_5");
    let dir = tempfile::tempdir().expect("a temporary folder");
    let out = dir.path().join("out.safetensors");
    let reason = "token id 512 is out of range: the vocabulary has 512 entries";
    fail(&["generate", "--model", arg(&folder), "--ids", "511,512"], reason);
    fail(&["logits", "--model", arg(&folder), "--ids", "512", "--out", arg(&out)], reason);
    let ids = dir.path().join("ids");
    let from_file = ["logits", "--model", arg(&folder), "--ids-file", arg(&ids), "--out", arg(&out)];
    fail(&from_file, "cannot read");
    for (text, reason) in [("1\n2x\n", "line 2"), ("", "holds no token ids"), ("-1", "line 1")] {
        fs::write(&ids, text).expect("writable");
        fail(&from_file, reason);
    }
    assert!(!out.exists(), "nothing is written when nothing was run");
}

#[test]
fn memory_limits_that_are_too_small() {
    let folder = fixture("qwen3_5");
    for limit in ["0", "100K", "3Mi"] {
        let output = keel(&["generate", "--model", arg(&folder), "--ids", "1", "--memory-limit", limit]);
        let message = stderr(&output);
        assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{message}");
        assert!(message.contains("out of memory") && message.contains("are needed"), "{message}");
    }
}

/// A few of the stacks fit into the address space. They are large: the rest of it after the last one is then enough for
/// the small mappings that each started thread makes, which std does not let fail.
#[cfg(target_os = "linux")]
#[test]
fn threads_that_the_system_does_not_start_are_an_error() {
    let run = "exec \"$0\" generate --device cpu --threads 1024 --ids 1 --max-tokens 1 --model \"$1\"";
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &format!("ulimit -v 1500000; {run}"), env!("CARGO_BIN_EXE_keel")]);
    command.env("RUST_MIN_STACK", "300000000");
    let output = command.arg(fixture("qwen3_5")).output().expect("sh runs");
    let message = stderr(&output);
    assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{message}");
    assert!(message.contains("did not start 1024 threads; give fewer (--threads)"), "{message}");
}

#[cfg(target_os = "linux")]
fn make_pipe(path: &Path) {
    assert!(std::process::Command::new("mkfifo").arg(path).status().expect("mkfifo runs").success());
}

/// Puts pipes, devices and endless files in place of each file of a model folder.
#[cfg(target_os = "linux")]
#[test]
fn a_model_folder_of_pipes_and_devices_is_refused() {
    let endless = |path: &Path| std::os::unix::fs::symlink("/dev/zero", path).expect("a link");
    let damages: [&dyn Fn(&Path); 2] = [&make_pipe, &endless];
    for file in ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"] {
        for damage in damages {
            let folder = copy_of("llama");
            let demo = common::demo();
            fs::copy(demo.join("tokenizer.json"), folder.path().join("tokenizer.json")).expect("there");
            let path = folder.path().join(file);
            let _ = fs::remove_file(&path);
            damage(&path);
            let args = ["generate", "hello", "--model", arg(folder.path()), "--max-tokens", "1"];
            let message = ends_soon(&args);
            assert!(message.contains(file) && message.contains("not a regular file"), "{message}");
        }
    }
}

/// A device has no end, so an option that names one is refused. A pipe without a writer is waited for a moment.
#[cfg(target_os = "linux")]
#[test]
fn an_option_that_names_a_device_or_a_pipe_without_writer_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let pipe = folder.path().join("pipe");
    make_pipe(&pipe);
    let options: [&[&str]; 11] = [
        &["generate", "hello", "--schema"],
        &["generate", "hello", "--grammar"],
        &["generate", "--prompt-file"],
        &["generate", "--ids-file"],
        &["generate", "hello", "--config"],
        &["generate", "hello", "--video"],
        &["logits", "--out", "never-written.safetensors", "--messages"],
        &["serve", "--port", "0", "--api-key-file"],
        &["embed", "--file"],
        &["eval", "--perplexity"],
        &["bench", "serve", "--file"],
    ];
    let zero = Path::new("/dev/zero");
    for (path, reason) in [(zero, "not a regular file"), (&pipe, "nobody has opened for writing")] {
        // A few at a time, so that none is slow because of the others.
        for options in options.chunks(3) {
            std::thread::scope(|scope| {
                for &option in options {
                    scope.spawn(move || {
                        let message = ends_soon(&[option, &[arg(path)]].concat());
                        // Videos are read more than once, which a pipe does not allow.
                        let is_told = message.contains(reason) || message.contains("neither a file");
                        assert!(is_told, "{option:?}: {message}");
                        assert!(!message.contains("panic"), "{option:?}: {message}");
                    });
                }
            });
        }
    }
}

/// The shell's `<(...)` names a pipe.
#[cfg(target_os = "linux")]
#[test]
fn an_option_that_names_a_pipe_of_the_shell_is_read() {
    let keel = env!("CARGO_BIN_EXE_keel");
    let runs = [
        (r#"generate Once -q -n 4 --schema <(echo '{"enum": ["yes"]}')"#, "\"yes\"\n"),
        (r#"generate Once -q -n 4 --grammar <(echo 'start: "yes"')"#, "yes\n"),
        (r#"generate -q -n 4 --prompt-file <(echo Once) --schema /dev/stdin"#, "\"no\"\n"),
        (
            r#"generate Once -q --config <(echo 'max-tokens = 4') --grammar <(sleep 0.2; echo 'start: "no"')"#,
            "no\n",
        ),
    ];
    for (command, said) in runs {
        let output = std::process::Command::new("bash")
            .args(["-c", &format!("echo '{{\"enum\": [\"no\"]}}' | {keel} {command}")])
            .env("KEEL_DEVICE", "cpu")
            .output()
            .expect("bash runs");
        assert!(output.status.success(), "{command}: {}", stderr(&output));
        assert_eq!(String::from_utf8_lossy(&output.stdout), said, "{command}");
    }
}

/// The limit is by the bytes that are read: standard input has no size.
#[cfg(target_os = "linux")]
#[test]
fn standard_input_without_end_is_refused() {
    for args in [&["generate", "-"][..], &["generate", "--prompt-file", "-"], &["chat"]] {
        let zero = fs::File::open("/dev/zero").expect("it is there");
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_keel"))
            .args(args)
            .env("KEEL_DEVICE", "cpu")
            .stdin(zero)
            .output()
            .expect("keel starts");
        let message = stderr(&output);
        assert!(message.contains("standard input has more than 67108864 bytes"), "{args:?}: {message}");
        assert_eq!(output.status.code(), Some(1), "{args:?}");
    }
}

/// Each step is harmless. Together they turn one letter into a billion.
#[cfg(target_os = "linux")]
#[test]
fn a_tokenizer_that_multiplies_text_is_refused() {
    let demo = common::demo();
    let folder = copy_of("llama");
    let text = fs::read_to_string(demo.join("tokenizer.json")).expect("there");
    let mut tokenizer: Value = serde_json::from_str(&text).expect("JSON");
    let step = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"});
    tokenizer["normalizer"] = json!({"type": "Sequence", "normalizers": vec![step; 9]});
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).expect("writable");
    let message = ends_soon(&["generate", "a", "--model", arg(folder.path()), "--max-tokens", "1"]);
    assert!(message.contains("normalizer") && message.contains("64 times as long"), "{message}");
}

#[cfg(target_os = "linux")]
#[test]
fn an_output_does_not_replace_what_is_not_a_file() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (pipe, link) = (folder.path().join("pipe"), folder.path().join("link"));
    make_pipe(&pipe);
    std::os::unix::fs::symlink("/dev/full", &link).expect("a link");
    for path in [&pipe, &link] {
        let message = ends_soon(&["logits", "--ids", "1,2,3", "--out", arg(path)]);
        assert!(message.contains("not a regular file"), "{message}");
        assert!(!fs::metadata(path).expect("still there").is_file());
    }
}
