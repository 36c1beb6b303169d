//! The reference checkpoints.

use keel_array::DType;
use keel_testkit::fixtures::{fixture, foreign_fixture, models};
use keel_weights::{
    AffineFormat, Checkpoint, LinearFormat, LinearTensor, SafetensorsFile, TensorSource,
    affine::quantize_rows, float,
};

#[test]
fn every_checkpoint_opens_and_accounts_for_its_bytes() {
    let mut opened = 0;
    for name in models() {
        let path = fixture(name);
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
    let path = fixture("qwen3_5").join("model.safetensors");
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
    let expected = SafetensorsFile::open(&fixture("qwen3_5").join("expected.safetensors")).unwrap();
    assert_eq!(expected.info("input_ids").unwrap().dtype, DType::I32);
    let logits = expected.tensor("logits").unwrap().expect_shape(&[77, 512]).unwrap();
    assert!(logits.to_f32().unwrap().iter().all(|value| value.is_finite()));
}

#[test]
fn types_of_another_quantization_stay_out_of_the_way() {
    let checkpoint = Checkpoint::open(&fixture("qwen3_5_paro")).unwrap();
    let name = "model.language_model.layers.0.linear_attn.in_proj_z";
    assert!(checkpoint.tensor(&format!("{name}.theta")).is_ok());
    let pairs = checkpoint.tensor(&format!("{name}.pairs")).unwrap_err().to_string();
    assert!(pairs.contains("is stored as I16"), "{pairs}");
    let rotation = checkpoint.rotation(&format!("{name}."), name).unwrap().expect("it is rotated");
    assert_eq!((rotation.scales.len(), rotation.pairs.len(), rotation.angles.len()), (128, 8 * 128, 8 * 64));
    for round in rotation.pairs.chunks_exact(128) {
        let mut columns = round.to_vec();
        columns.sort_unstable();
        assert!(columns.into_iter().eq(0..128), "every column turns once a round");
    }
    let weight = checkpoint.tensor(&format!("{name}.weight")).unwrap_err().to_string();
    assert!(weight.contains("next to it 'model.language_model.layers.0.linear_attn.in_proj_z."), "{weight}");
}

/// MLX made the quantised fixtures from the weights of the dense ones. So quantising these here must give the same
/// bytes.
#[test]
fn quantizing_gives_the_bytes_that_mlx_wrote() {
    let Some(dense) = foreign_fixture("qwen3_5") else { return };
    let Some(theirs) = foreign_fixture("qwen3_5_mlx_4bit") else { return };
    let dense = Checkpoint::open(&dense).unwrap();
    let theirs = Checkpoint::open(&theirs).unwrap();
    let mut compared = 0;
    let modules = theirs.names().filter_map(|name| name.strip_suffix(".scales"));
    for module in modules {
        let source = module
            .replace("language_model.model", "model.language_model")
            .replace("language_model.lm_head", "lm_head");
        let weight = dense.tensor(&format!("{source}.weight")).unwrap();
        let LinearTensor::Affine(affine) = theirs.linear(module).unwrap() else {
            panic!("{module} is dense")
        };
        let (format, cols) = (affine.format(), affine.cols());
        let groups = weight.rows() * cols / format.group_size();
        let mut packed = vec![0; affine.weight().bytes().len()];
        let (mut scales, mut biases) = (vec![0.0; groups], vec![0.0; groups]);
        quantize_rows(format, cols, &weight.to_f32().unwrap(), &mut packed, &mut scales, &mut biases);
        for (ours, theirs) in [(scales, affine.scales()), (biases, affine.biases())] {
            let mut bytes = vec![0; theirs.bytes().len()];
            float::encode(theirs.dtype(), &ours, &mut bytes);
            assert_eq!(bytes, theirs.bytes(), "{}", theirs.name());
        }
        assert_eq!(packed, affine.weight().bytes(), "{module}");
        compared += 1;
    }
    assert!(compared > 20, "{compared} modules");
}

#[test]
fn quantized_modules_open_in_the_formats_of_the_config() {
    let checkpoint = Checkpoint::open(&fixture("qwen3_5_moe_mlx_4bit")).unwrap();
    let layer = "language_model.model.layers.2.mlp";
    let info = |module: &str| checkpoint.linear(&format!("{layer}.{module}")).unwrap().info();
    let affine =
        |bits| LinearFormat::Affine { format: AffineFormat::new(bits, 32).unwrap(), scales: DType::BF16 };
    let down = info("switch_mlp.down_proj");
    assert_eq!((down.experts, down.rows, down.cols, down.format), (Some(8), 128, 64, affine(4)));
    let router = info("gate");
    assert_eq!((router.experts, router.rows, router.cols, router.format), (None, 8, 128, affine(8)));
    assert_eq!(info("shared_expert_gate").format, affine(8));
    assert_eq!(info("shared_expert.down_proj").cols, 96);
    let module = format!("{layer}.switch_mlp.down_proj");
    assert_eq!(checkpoint.linear_info(&module).unwrap(), down);
    let mut rows = vec![0.0; 2 * 64];
    checkpoint.linear(&module).unwrap().rows_f32(1022..1024, &mut rows).unwrap();
    assert!(rows.iter().all(|value| value.is_finite()) && rows.iter().any(|value| *value != 0.0));
    checkpoint.release_linear(&module);
}

#[test]
fn dense_experts_are_linear_without_a_weight_suffix() {
    let checkpoint = Checkpoint::open(&fixture("qwen3_5_moe")).unwrap();
    let experts = checkpoint.linear("mtp.layers.0.mlp.experts.down_proj").unwrap().info();
    assert_eq!((experts.experts, experts.rows, experts.cols), (Some(8), 128, 64));
    assert_eq!(experts.format, LinearFormat::Dense(DType::BF16));
}
