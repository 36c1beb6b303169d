//! Converts the text side of a GGUF file from and to its metadata.

use keel_text::{ExportedVocabulary, GenerationDefaults, TextFiles, TokenKind, Vocabulary};
use keel_weights::gguf::{GgufFile, GgufMetadata, GgufValue};

use crate::Result;

/// Whether a file has a vocabulary.
///
/// ```no_run
/// let file = evenkeel::weights::gguf::GgufFile::open("model.gguf".as_ref())?;
/// assert!(evenkeel::gguf::has_vocabulary(&file));
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub fn has_vocabulary(file: &GgufFile) -> bool {
    file.metadata().contains_key("tokenizer.ggml.tokens")
}

/// The text files that correspond to the metadata.
///
/// # Errors
/// The vocabulary's kind is not supported, or the vocabulary contradicts itself.
///
/// ```no_run
/// let file = evenkeel::weights::gguf::GgufFile::open("model.gguf".as_ref())?;
/// let files = evenkeel::gguf::text_files(&file, "model.gguf".into())?;
/// let tokenizer = evenkeel::text::Tokenizer::new(&files)?;
/// assert!(!tokenizer.encode("Once upon a time", false)?.is_empty());
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub fn text_files(file: &GgufFile, name: String) -> Result<TextFiles<'static>> {
    let keys = Keys(file);
    let kinds = keys.list("token_type");
    let kind = |i: usize| match kinds.get(i).and_then(GgufValue::as_u64) {
        Some(1) | None => TokenKind::Normal,
        Some(3) => TokenKind::Control,
        Some(4) => TokenKind::UserDefined,
        Some(6) => TokenKind::Byte,
        Some(_) => TokenKind::Other,
    };
    let texts = keys.list("tokens").iter().map(|token| token.as_str().unwrap_or_default());
    let sampling = [
        ("temperature", "temp"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("repetition_penalty", "penalty_repeat"),
    ];
    let sampling = sampling.into_iter().filter_map(|(ours, theirs)| {
        Some((ours, file.metadata().get(&format!("general.sampling.{theirs}"))?.as_f64()?))
    });
    let vocabulary = Vocabulary {
        name,
        model: keys.text("model").unwrap_or_default(),
        pre: keys.text("pre").unwrap_or_default(),
        tokens: texts.enumerate().map(|(i, text)| (text, kind(i))).collect(),
        scores: keys.list("scores").iter().map(|score| score.as_f64().unwrap_or(0.0) as f32).collect(),
        merges: keys.list("merges").iter().filter_map(GgufValue::as_str).collect(),
        bos: keys.id("bos_token_id"),
        eos: keys.id("eos_token_id"),
        eot: ["eot_token_id", "eom_token_id"].into_iter().filter_map(|key| keys.id(key)).collect(),
        unk: keys.id("unknown_token_id"),
        pad: keys.id("padding_token_id"),
        add_bos: keys.flag("add_bos_token"),
        add_eos: keys.flag("add_eos_token"),
        add_space_prefix: keys.flag("add_space_prefix"),
        chat_template: file.metadata().get("tokenizer.chat_template").and_then(GgufValue::as_str),
        sampling: sampling.collect(),
    };
    Ok(TextFiles::from_vocabulary(&vocabulary)?)
}

/// Writes the metadata that [`text_files`] reads.
///
/// ```
/// use evenkeel::{ModelFiles, gguf, weights::gguf::GgufMetadata};
/// let files = ModelFiles::built_in()?;
/// let vocabulary = files.text_files()?.vocabulary(files.config.vocab)?;
/// let mut metadata = GgufMetadata::default();
/// gguf::write_vocabulary(&vocabulary, &mut metadata);
/// assert!(metadata.contains("tokenizer.ggml.tokens"));
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub fn write_vocabulary(vocabulary: &ExportedVocabulary, metadata: &mut GgufMetadata) {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    metadata.string(&key("model"), vocabulary.model);
    metadata.string(&key("pre"), vocabulary.pre);
    let tokens: Vec<&str> = vocabulary.tokens.iter().map(|(text, _)| text.as_str()).collect();
    metadata.strings(&key("tokens"), &tokens);
    let kind = |(id, kind): (usize, TokenKind)| match kind {
        _ if vocabulary.unk == Some(id as u32) && vocabulary.model == "llama" => 2,
        TokenKind::Normal => 1,
        TokenKind::Control => 3,
        TokenKind::UserDefined => 4,
        TokenKind::Other => 5,
        TokenKind::Byte => 6,
    };
    let kinds: Vec<i32> = vocabulary.tokens.iter().map(|(_, kind)| *kind).enumerate().map(kind).collect();
    metadata.i32s(&key("token_type"), &kinds);
    if !vocabulary.scores.is_empty() {
        metadata.f32s(&key("scores"), &vocabulary.scores);
    }
    if !vocabulary.merges.is_empty() {
        let merges: Vec<&str> = vocabulary.merges.iter().map(String::as_str).collect();
        metadata.strings(&key("merges"), &merges);
    }
    for (name, id) in [
        ("bos_token_id", vocabulary.bos),
        ("eos_token_id", vocabulary.eos),
        ("eot_token_id", vocabulary.eot),
        ("unknown_token_id", vocabulary.unk),
        ("padding_token_id", vocabulary.pad),
    ] {
        if let Some(id) = id {
            metadata.u32(&key(name), id);
        }
    }
    metadata.bool(&key("add_bos_token"), vocabulary.add_bos);
    if vocabulary.add_eos {
        metadata.bool(&key("add_eos_token"), true);
    }
    if let Some(prefix) = vocabulary.add_space_prefix {
        metadata.bool(&key("add_space_prefix"), prefix);
    }
    if let Some(template) = &vocabulary.chat_template {
        metadata.string("tokenizer.chat_template", template);
    }
}

/// Writes the settings of sampling that [`text_files`] reads, those that differ from greedy decoding. Its keys are
/// those of llama.cpp.
///
/// ```
/// use evenkeel::{gguf, text::GenerationDefaults, weights::gguf::GgufMetadata};
/// let defaults = GenerationDefaults { do_sample: Some(true), top_k: Some(20), ..GenerationDefaults::default() };
/// let mut metadata = GgufMetadata::default();
/// gguf::write_sampling(&defaults, &mut metadata);
/// assert!(metadata.contains("general.sampling.temp") && metadata.contains("general.sampling.top_k"));
/// ```
pub fn write_sampling(defaults: &GenerationDefaults, metadata: &mut GgufMetadata) {
    let recommended = defaults.recommended();
    let key = |name: &str| format!("general.sampling.{name}");
    if defaults.do_sample == Some(true) {
        metadata.f32(&key("temp"), recommended.temperature);
        if recommended.top_k > 0 {
            metadata.u32(&key("top_k"), recommended.top_k as u32);
        }
        for (name, value, neutral) in [("top_p", recommended.top_p, 1.0), ("min_p", recommended.min_p, 0.0)] {
            if value != neutral {
                metadata.f32(&key(name), value);
            }
        }
    }
    if recommended.repetition_penalty != 1.0 {
        metadata.f32(&key("penalty_repeat"), recommended.repetition_penalty);
    }
}

/// The metadata of the tokenizer.
struct Keys<'a>(&'a GgufFile);

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a GgufValue> {
        self.0.metadata().get(&format!("tokenizer.ggml.{key}"))
    }

    fn text(&self, key: &str) -> Option<&'a str> {
        self.get(key)?.as_str()
    }

    fn flag(&self, key: &str) -> Option<bool> {
        self.get(key)?.as_bool()
    }

    fn id(&self, key: &str) -> Option<u32> {
        self.get(key)?.as_u64()?.try_into().ok()
    }

    fn list(&self, key: &str) -> &'a [GgufValue] {
        self.get(key).and_then(GgufValue::as_array).unwrap_or_default()
    }
}
