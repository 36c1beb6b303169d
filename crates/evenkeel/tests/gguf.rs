//! Values that are read from the metadata of GGUF files.

use evenkeel::array::DType;
use evenkeel::models;
use evenkeel::text::{GenerationDefaults, TextFiles, TokenKind, Tokenizer, Vocabulary};
use evenkeel::weights::gguf::{GgmlType, GgufFile, GgufMetadata, GgufTensorSpec, GgufWriter};

/// A file with a small embedding.
fn written(metadata: &GgufMetadata) -> GgufFile {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let kind = GgmlType::Plain(DType::F32);
    let tensor = GgufTensorSpec { name: "token_embd.weight".into(), kind, shape: vec![4, 8] };
    let mut writer = GgufWriter::create(&path, metadata, &[tensor]).expect("the folder is writable");
    writer.append("token_embd.weight", &[0; 4 * 8 * 4]).expect("the tensor is listed");
    writer.finish().expect("it is complete");
    GgufFile::open(&path).expect("it was just written")
}

#[test]
fn the_number_of_layers_has_a_bound() {
    let mut metadata = GgufMetadata::default();
    metadata.string("general.architecture", "olmo2");
    let sizes = [("embedding_length", 8), ("attention.head_count", 2), ("context_length", 64)];
    for (key, value) in sizes {
        metadata.u32(&format!("olmo2.{key}"), value);
    }
    metadata.u32("olmo2.block_count", u32::MAX);
    let error = models::gguf::config(&written(&metadata)).expect_err("there are too many").to_string();
    assert!(error.contains("olmo2.block_count is 4294967295, at most 4096 are read"), "{error}");
    metadata.u32("olmo2.block_count", 2);
    assert!(models::gguf::config(&written(&metadata)).is_ok());
}

/// Metadata of a small model of an architecture.
fn small(architecture: &str) -> GgufMetadata {
    let mut metadata = GgufMetadata::default();
    metadata.string("general.architecture", architecture);
    let sizes = [
        ("embedding_length", 64),
        ("block_count", 2),
        ("attention.head_count", 2),
        ("context_length", 64),
        ("feed_forward_length", 96),
        ("attention.sliding_window", 16),
        ("attention.key_length", 32),
    ];
    for (key, value) in sizes {
        metadata.u32(&format!("{architecture}.{key}"), value);
    }
    metadata.f32(&format!("{architecture}.attention.layer_norm_rms_epsilon"), 1e-6);
    metadata
}

#[test]
fn logits_that_a_file_caps_are_refused_as_those_of_a_checkpoint() {
    let mut metadata = small("gemma3");
    let read = |metadata: &GgufMetadata| {
        models::gguf::config(&written(metadata)).and_then(|config| models::read_config(&config))
    };
    read(&metadata).expect("no cap");
    metadata.f32("gemma3.final_logit_softcapping", 30.0);
    let error = read(&metadata).expect_err("capped").to_string();
    assert!(error.contains("final_logit_softcapping is 30"), "{error}");
}

#[test]
fn a_factor_of_positions_without_a_type_is_linear() {
    let mut metadata = small("llama");
    let scaling = |metadata: &GgufMetadata| {
        models::gguf::config(&written(metadata)).expect("complete")["rope_scaling"].clone()
    };
    assert!(scaling(&metadata).is_null());
    metadata.f32("llama.rope.scaling.factor", 4.0);
    let linear =
        serde_json::json!({"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 64.0});
    assert_eq!(scaling(&metadata), linear);
    metadata.string("llama.rope.scaling.type", "none");
    assert!(scaling(&metadata).is_null());
}

#[test]
fn settings_of_sampling_go_into_a_file_and_come_back() {
    let vocabulary = Vocabulary {
        model: "gpt2",
        pre: "qwen2",
        tokens: vec![("a", TokenKind::Normal), ("</s>", TokenKind::Control)],
        eos: Some(1),
        ..Vocabulary::default()
    };
    let files = TextFiles::from_vocabulary(&vocabulary).expect("known");
    let back = |defaults: &GenerationDefaults| {
        let mut metadata = GgufMetadata::default();
        evenkeel::gguf::write_vocabulary(&files.vocabulary(4).expect("it has a name"), &mut metadata);
        evenkeel::gguf::write_sampling(defaults, &mut metadata);
        let files = evenkeel::gguf::text_files(&written(&metadata), "model.gguf".into()).expect("it is read");
        GenerationDefaults::new(&files).expect("in range").recommended()
    };
    let qwen = GenerationDefaults {
        do_sample: Some(true),
        top_k: Some(20),
        top_p: Some(0.95),
        repetition_penalty: Some(1.05),
        ..GenerationDefaults::default()
    };
    let greedy = GenerationDefaults { do_sample: None, ..qwen.clone() };
    for defaults in [qwen, greedy, GenerationDefaults::default()] {
        assert_eq!(back(&defaults), defaults.recommended(), "{defaults:?}");
    }
}

#[test]
fn a_file_says_whether_an_end_token_comes_after_a_text() {
    let ids = |add_eos| {
        let vocabulary = Vocabulary {
            model: "gpt2",
            pre: "qwen2",
            tokens: vec![("a", TokenKind::Normal), ("</s>", TokenKind::Control)],
            eos: Some(1),
            add_eos,
            ..Vocabulary::default()
        };
        let files = TextFiles::from_vocabulary(&vocabulary).expect("known");
        let mut metadata = GgufMetadata::default();
        evenkeel::gguf::write_vocabulary(&files.vocabulary(4).expect("it has a name"), &mut metadata);
        let files = evenkeel::gguf::text_files(&written(&metadata), "model.gguf".into()).expect("it is read");
        let tokenizer = Tokenizer::new(&files).expect("sound");
        [true, false].map(|special| tokenizer.encode("a", special).expect("it is known"))
    };
    assert_eq!(ids(Some(true)), [vec![0, 1], vec![0]]);
    assert_eq!(ids(None), [vec![0], vec![0]]);
}
