//! Turns the bytes of a `tokenizer.json` into the library's tokenizer.

use std::collections::HashMap;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;
use tokenizers::{
    AddedToken, DecoderWrapper, Model, ModelWrapper, NormalizerWrapper, PostProcessorWrapper,
    PreTokenizerWrapper, TokenizerImpl,
};

use super::model::TextModel;
use super::token_byte_bound::TokenByteBound;
use super::{bpe, check};

/// Most tokens. Tables by id are as long as the largest id, however few tokens there are.
pub(crate) const TOKENS_MAX: u32 = 1 << 24;

/// The library's tokenizer around a model of this crate.
pub(super) type LibraryTokenizer =
    TokenizerImpl<TextModel, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// A tokenizer, with facts about it that the rest of this crate needs.
pub(super) struct CheckedTokenizer {
    pub(super) inner: LibraryTokenizer,
    /// All ids are below this.
    pub(super) vocab_size: usize,
    /// Ids of the special tokens, ascending.
    pub(super) special_ids: Vec<u32>,
    /// The byte that a token such as `<0xE5>` stands for; empty unless the decoder knows such tokens.
    pub(super) byte_of: HashMap<u32, u8>,
    /// The most text that a token covers, if that is bounded.
    pub(super) longest: Option<TokenByteBound>,
}

#[derive(Deserialize)]
struct TokenizerJson<'a> {
    version: Option<String>,
    #[serde(default)]
    added_tokens: Vec<AddedJson>,
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    post_processor: Option<Value>,
    decoder: Option<Value>,
    #[serde(borrow)]
    model: &'a RawValue,
}

#[derive(Deserialize)]
struct AddedJson {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    normalized: Option<bool>,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct ModelKind {
    #[serde(rename = "type")]
    kind: Option<String>,
    /// Models of an early format have no type. Only byte pair encoding has merges.
    merges: Option<serde::de::IgnoredAny>,
}

/// Reads and checks the file. Its padding and truncation are ignored: they belong to batches for training, and a prompt
/// must be encoded whole.
pub(super) fn read(bytes: &[u8]) -> Result<CheckedTokenizer, String> {
    let json: TokenizerJson<'_> = serde_json::from_slice(bytes).map_err(|err| format!("not valid: {err}"))?;
    if let Some(version) = json.version.as_deref().filter(|&version| version != "1.0") {
        return Err(format!("version {version:?} is not known; expected \"1.0\""));
    }
    check::normalizer(json.normalizer.as_ref())?;
    check::pre_tokenizer(json.pre_tokenizer.as_ref())?;
    check::post_processor(json.post_processor.as_ref())?;
    check::decoder(json.decoder.as_ref())?;
    let has_byte_tokens =
        json.decoder.as_ref().is_some_and(|decoder| check::contains_type(decoder, "ByteFallback"));

    let (model, id_max) = read_model(json.model)?;
    let id_max = json.added_tokens.iter().map(|token| token.id).fold(id_max, u32::max);
    if id_max >= TOKENS_MAX {
        return Err(format!("a token has the id {id_max}, at most {TOKENS_MAX} tokens are read"));
    }
    let is_greedy = json.added_tokens.iter().any(|token| token.lstrip || token.rstrip);
    let added_bytes = json.added_tokens.iter().map(|token| token.content.len()).max().unwrap_or(0);
    let (normalizer, splits) = (json.normalizer.as_ref(), json.pre_tokenizer.as_ref());
    let longest = TokenByteBound::new(normalizer, splits, json.post_processor.as_ref(), &model, added_bytes);
    let longest = longest.filter(|_| !is_greedy);
    let mut inner = LibraryTokenizer::new(model);
    let normalizer: Option<NormalizerWrapper> = part("normalizer", json.normalizer)?;
    inner.with_normalizer(normalizer).map_err(|err| format!("normalizer: {err}"))?;
    inner.with_pre_tokenizer(part::<PreTokenizerWrapper>("pre_tokenizer", json.pre_tokenizer)?);
    inner.with_post_processor(part::<PostProcessorWrapper>("post_processor", json.post_processor)?);
    inner.with_decoder(part::<DecoderWrapper>("decoder", json.decoder)?);
    let special_ids = add_tokens(&mut inner, &json.added_tokens)?;

    let byte_of = if has_byte_tokens { byte_tokens(&inner) } else { HashMap::new() };
    Ok(CheckedTokenizer { inner, vocab_size: id_max as usize + 1, special_ids, byte_of, longest })
}

/// Reads the model. Also returns its largest id.
fn read_model(json: &RawValue) -> Result<(TextModel, u32), String> {
    let invalid = |err: serde_json::Error| format!("model: not valid: {err}");
    let kind: ModelKind = serde_json::from_str(json.get()).map_err(invalid)?;
    if kind.kind.as_deref() == Some("BPE") || (kind.kind.is_none() && kind.merges.is_some()) {
        let model = bpe::read(json.get()).map_err(|reason| format!("model: {reason}"))?;
        let id_max = model.id_max();
        return Ok((TextModel::Bpe(Box::new(model)), id_max));
    }
    let model: ModelWrapper = serde_json::from_str(json.get()).map_err(invalid)?;
    let id_max = model.get_vocab().values().copied().max().ok_or("model: the vocabulary is empty")?;
    Ok((TextModel::Library(Box::new(model)), id_max))
}

/// Reads one of the optional steps around the model.
fn part<T: DeserializeOwned>(name: &str, json: Option<Value>) -> Result<Option<T>, String> {
    json.map(serde_json::from_value).transpose().map_err(|err| format!("{name}: not valid: {err}"))
}

/// Adds the tokens that are not part of the model. Returns the ids of the special ones.
///
/// The library gives a new token the next free id, whatever the file says. A different id would silently shift every
/// later token of the model, so it is an error here.
fn add_tokens(inner: &mut LibraryTokenizer, tokens: &[AddedJson]) -> Result<Vec<u32>, String> {
    if let Some(token) = tokens.iter().find(|token| token.content.is_empty()) {
        return Err(format!("added token {} is empty", token.id));
    }
    let added = tokens.iter().map(|token| {
        AddedToken::from(token.content.as_str(), token.special)
            .single_word(token.single_word)
            .lstrip(token.lstrip)
            .rstrip(token.rstrip)
            .normalized(token.normalized.unwrap_or(!token.special))
    });
    inner.add_tokens(added).map_err(|err| format!("added tokens: {err}"))?;
    for AddedJson { id, content, .. } in tokens {
        match inner.token_to_id(content) {
            Some(found) if found == *id => {}
            Some(found) => {
                return Err(format!(
                    "added token {content:?} has id {id} in the list, but the vocabulary gives {found}"
                ));
            }
            None => return Err(format!("added token {content:?} with id {id} could not be added")),
        }
    }
    let mut special_ids: Vec<u32> =
        tokens.iter().filter(|token| token.special).map(|token| token.id).collect();
    special_ids.sort_unstable();
    special_ids.dedup();
    Ok(special_ids)
}

fn byte_tokens(inner: &LibraryTokenizer) -> HashMap<u32, u8> {
    (0..=u8::MAX).filter_map(|byte| Some((inner.token_to_id(&format!("<0x{byte:02X}>"))?, byte))).collect()
}
