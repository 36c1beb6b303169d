//! The reference checkpoints, where they are at hand.

use std::path::{Path, PathBuf};

use keel_array::DType;
use keel_weights::{Checkpoint, SafetensorsFile, TensorSource};

/// The folder of reference checkpoints, or `None` with a line that says the test is skipped.
fn fixtures(test: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/fixtures");
    if !folder.is_dir() {
        println!("{test}: skipped, there is no {}", folder.display());
        return None;
    }
    Some(folder)
}

#[test]
fn every_checkpoint_opens_and_accounts_for_its_bytes() {
    let Some(fixtures) = fixtures("every_checkpoint_opens_and_accounts_for_its_bytes") else { return };
    let mut opened = 0;
    for entry in std::fs::read_dir(fixtures).unwrap() {
        let path = entry.unwrap().path();
        if !path.join("model.safetensors").exists() {
            continue;
        }
        let checkpoint = Checkpoint::open(&path).unwrap();
        let file_bytes = std::fs::metadata(path.join("model.safetensors")).unwrap().len();
        assert!(checkpoint.config()["model_type"].is_string());
        assert!(checkpoint.names().count() > 20);
        assert!(checkpoint.total_bytes() < file_bytes && checkpoint.total_bytes() > file_bytes * 9 / 10);
        assert!(checkpoint.metadata()["format"] == "pt" || checkpoint.metadata()["format"] == "mlx");
        opened += 1;
    }
    assert!(opened >= 11, "{opened} checkpoints");
}

#[test]
fn tensors_have_the_values_that_the_reference_parser_reads() {
    let Some(fixtures) = fixtures("tensors_have_the_values_that_the_reference_parser_reads") else { return };
    let path = fixtures.join("qwen3_5/model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let ours = Checkpoint::open(&path).unwrap();
    assert_eq!(ours.names().count(), theirs.len());
    for (name, view) in theirs.tensors() {
        let tensor = ours.tensor(&name).unwrap().expect_shape(view.shape()).unwrap();
        assert_eq!((tensor.dtype(), tensor.bytes()), (DType::BF16, view.data()), "{name}");
        ours.release(&name);
        assert_eq!(tensor.bytes(), view.data(), "{name} after its pages were released");
    }
}

#[test]
fn expected_outputs_read_without_a_config() {
    let Some(fixtures) = fixtures("expected_outputs_read_without_a_config") else { return };
    let expected = SafetensorsFile::open(&fixtures.join("qwen3_5/expected.safetensors")).unwrap();
    assert_eq!(expected.info("input_ids").unwrap().dtype, DType::I32);
    let logits = expected.tensor("logits").unwrap().expect_shape(&[77, 512]).unwrap();
    assert!(logits.to_f32().unwrap().iter().all(|value| value.is_finite()));
}

#[test]
fn types_of_another_quantisation_stay_out_of_the_way() {
    let Some(fixtures) = fixtures("types_of_another_quantisation_stay_out_of_the_way") else { return };
    let checkpoint = Checkpoint::open(&fixtures.join("qwen3_5_paro")).unwrap();
    let name = "model.language_model.layers.0.linear_attn.in_proj_z";
    assert!(checkpoint.tensor(&format!("{name}.theta")).is_ok());
    let pairs = checkpoint.tensor(&format!("{name}.pairs")).unwrap_err().to_string();
    assert!(pairs.contains("is stored as I16"), "{pairs}");
    let weight = checkpoint.tensor(&format!("{name}.weight")).unwrap_err().to_string();
    assert!(weight.contains("beside it 'model.language_model.layers.0.linear_attn.in_proj_z."), "{weight}");
}
