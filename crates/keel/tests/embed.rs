//! `keel embed`: texts from everywhere, poolings, and refusals.

mod common;

use common::{arg, fail, keel_with_input, misuse, stderr, succeed};
use serde_json::Value;

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn values(line: &Value) -> Vec<f64> {
    let values = line["embedding"].as_array().expect("numbers").iter();
    values.map(|value| value.as_f64().expect("a number")).collect()
}

fn length(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}

const TEXTS: [&str; 3] = ["Once upon a time", "The bird sat on a tree and sang.", "A"];

#[test]
fn texts_come_from_the_command_line_files_and_standard_input() {
    let given = succeed(&[&["embed"][..], &TEXTS].concat());
    let all = lines(&given);
    assert_eq!(all.len(), 3);
    for (i, line) in all.iter().enumerate() {
        assert_eq!(line["index"], i);
        assert!(line["tokens"].as_u64() > Some(0) && line.get("text").is_none());
        assert!((length(&values(line)) - 1.0).abs() < 1e-5);
    }
    assert!(values(&all[0]) != values(&all[1]));
    // How texts are batched changes no bit.
    let alone = lines(&succeed(&["embed", TEXTS[1]]));
    assert_eq!(alone[0]["embedding"], all[1]["embedding"]);
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("texts.txt");
    std::fs::write(&file, format!("{}\n\n{}\n", TEXTS[1], TEXTS[2])).expect("written");
    assert_eq!(succeed(&["embed", TEXTS[0], "--file", arg(&file)]), given);
    for args in [&["embed"][..], &["embed", "--file", "-"]] {
        let output = keel_with_input(args, &TEXTS.join("\n"));
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(String::from_utf8_lossy(&output.stdout), given);
    }
    let shorter = lines(&succeed(&["embed", TEXTS[0], "--dimensions", "8", "--with-text"]));
    let first = values(&shorter[0]);
    assert!(first.len() == 8 && (length(&first) - 1.0).abs() < 1e-5 && shorter[0]["text"] == TEXTS[0]);
    let whole = values(&all[0]);
    let scale = length(&whole[..8]);
    assert!(first.iter().zip(&whole).all(|(a, b)| (a - b / scale).abs() < 1e-5));
}

/// A copy of the built-in model whose files name a pooling.
#[test]
fn the_pooling_is_what_the_models_files_say() {
    let source = common::demo();
    let dir = tempfile::tempdir().expect("a folder");
    for entry in std::fs::read_dir(&source).expect("there") {
        let path = entry.expect("there").path();
        if path.is_file() {
            std::fs::copy(&path, dir.path().join(path.file_name().expect("named"))).expect("copied");
        }
    }
    let embed = |extra: &[&str]| {
        succeed(&[&["embed", "--model", arg(dir.path()), "Once upon a time"][..], extra].concat())
    };
    let (last, mean) = (embed(&["--pooling", "last"]), embed(&["--pooling", "mean"]));
    assert!(last != mean);
    assert_eq!(embed(&[]), last);
    let pooling = dir.path().join("1_Pooling");
    std::fs::create_dir(&pooling).expect("made");
    let config = pooling.join("config.json");
    std::fs::write(&config, r#"{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": false}"#)
        .expect("written");
    assert_eq!(embed(&[]), mean);
    assert_eq!(embed(&["--pooling", "last"]), last);
    std::fs::write(&config, r#"{"pooling_mode_cls_token": true}"#).expect("written");
    fail(&["embed", "--model", arg(dir.path()), "a"], "cls_token");
    assert_eq!(embed(&["--pooling", "last"]), last);
}

/// `quantize` once left the pooling out, and mean embeddings became those of the last token.
#[test]
fn a_copy_in_another_form_keeps_the_pooling() {
    let dir = tempfile::tempdir().expect("a folder");
    let model = dir.path().join("model");
    // MLX's form is made of a dense model, and the built-in one is quantised.
    succeed(&["quantize", arg(&common::demo()), arg(&model), "--to", "safetensors"]);
    let mean = r#"{"pooling_mode_mean_tokens": true}"#;
    let modules =
        r#"[{"path": "", "type": "models.Transformer"}, {"path": "pooled", "type": "models.Pooling"}]"#;
    for (folder, modules) in [("1_Pooling", None), ("pooled", Some(modules))] {
        std::fs::create_dir(model.join(folder)).expect("made");
        std::fs::write(model.join(folder).join("config.json"), mean).expect("written");
        if let Some(modules) = modules {
            std::fs::remove_dir_all(model.join("1_Pooling")).expect("there");
            std::fs::write(model.join("modules.json"), modules).expect("written");
        }
        for form in ["mlx", "safetensors"] {
            let copy = dir.path().join(format!("{folder}-{form}"));
            succeed(&["quantize", arg(&model), arg(&copy), "--to", form]);
            let embed =
                |extra: &[&str]| succeed(&[&["embed", "--model", arg(&copy), "a bird"], extra].concat());
            assert_eq!(embed(&[]), embed(&["--pooling", "mean"]), "{folder} {form}");
            assert!(embed(&[]) != embed(&["--pooling", "last"]), "{folder} {form}");
        }
    }
}

#[test]
fn what_cannot_be_embedded_is_said() {
    misuse(&["embed", "a", "--dimensions", "0"], "--dimensions 0");
    misuse(&["embed", "a", "--dimensions", "99999"], "this model has 1 to");
    fail(&["embed", "--file", "no/such/file"], "cannot read no/such/file");
    let output = keel_with_input(&["embed"], "\n \n");
    assert!(stderr(&output).contains("no texts: give them"), "{}", stderr(&output));
}
