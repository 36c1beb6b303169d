//! Byte-level pair encoding: bytes are written as characters, a pattern cuts the text, pairs merge by rank.

use serde_json::{Value, json};

use super::{BpeJson, TokenizerJson, Vocabulary};

/// The pattern of GPT-2, which is built into the library's byte-level step.
const GPT2: &str = "";
/// Llama 3: groups of up to three digits.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen2 to Qwen3: single digits.
pub(super) const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen3.5: combining marks belong to letters.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Mistral from Nemo on: a word begins where letters become capital; single digits.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// GPT-4o and Phi-4-mini: as Tekken, with groups of up to three digits, and words keep the part after an apostrophe.
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The names that an export may use.
pub(super) const NAMES: [&str; 8] =
    ["gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"];

/// How text is prepared before the merges.
struct PreTokenizer {
    pattern: &'static str,
    /// Each digit becomes a piece of its own before the pattern is applied.
    single_digits: bool,
    /// Characters are composed first (NFC).
    nfc: bool,
    /// A piece that is a token is taken whole, however its pairs would merge.
    ignore_merges: bool,
}

fn pre_tokenizer(pre: &str) -> Option<PreTokenizer> {
    let plain = |pattern| PreTokenizer { pattern, single_digits: false, nfc: false, ignore_merges: false };
    Some(match pre {
        "gpt-2" | "default" | "olmo" | "" => plain(GPT2),
        "smollm" | "starcoder" | "codeshell" | "refact" | "command-r" => {
            PreTokenizer { single_digits: true, ..plain(GPT2) }
        }
        "llama-bpe" | "llama3" | "llama-v3" => PreTokenizer { ignore_merges: true, ..plain(LLAMA3) },
        // smaug-bpe: SmolLM3. dbrx: Phi-4, OLMo 2 and OLMo 3. glm4: GLM-4.
        "smaug-bpe" | "dbrx" | "glm4" | "chatglm-bpe" => plain(LLAMA3),
        "tekken" => PreTokenizer { ignore_merges: true, ..plain(TEKKEN) },
        "gpt-4o" => plain(GPT4O),
        "qwen2" | "deepseek-r1-qwen" | "megrez" => PreTokenizer { nfc: true, ..plain(QWEN2) },
        "qwen35" => PreTokenizer { nfc: true, ..plain(QWEN35) },
        _ => return None,
    })
}

/// The name of the way to cut text with these patterns, after digits were separated if `single_digits` holds. If
/// several names cut alike, one with `ignore_merges` equal to `ignores_merges` is preferred.
pub(super) fn name_of(patterns: &[&str], single_digits: bool, ignores_merges: bool) -> Option<&'static str> {
    let pattern = match patterns {
        [] => GPT2,
        [pattern] => *pattern,
        _ => return None,
    };
    let cuts = |pre: &&str| {
        pre_tokenizer(pre).is_some_and(|of| (of.pattern, of.single_digits) == (pattern, single_digits))
    };
    let alike = |pre: &&str| pre_tokenizer(pre).is_some_and(|of| of.ignore_merges == ignores_merges);
    let named = || NAMES.into_iter().filter(cuts);
    named().find(alike).or_else(|| named().next())
}

/// Whether text is composed first (NFC) under this name.
pub(super) fn composes(pre: &str) -> bool {
    pre_tokenizer(pre).is_some_and(|of| of.nfc)
}

/// Builds the `tokenizer.json`.
pub(super) fn tokenizer(vocabulary: &Vocabulary<'_>) -> Result<String, String> {
    let Some(pre) = pre_tokenizer(vocabulary.pre) else {
        return Err(format!(
            "pre-tokenizer {:?} is not supported; supported are starcoder, olmo, dbrx, glm4, {}",
            vocabulary.pre,
            NAMES.join(", ")
        ));
    };
    let byte_level = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": use_regex});
    let mut pieces = Vec::new();
    if pre.single_digits {
        pieces.push(json!({"type": "Digits", "individual_digits": true}));
    }
    if pre.pattern != GPT2 {
        pieces.push(json!({"type": "Split", "pattern": {"Regex": pre.pattern}, "behavior": "Isolated",
            "invert": false}));
    }
    pieces.push(byte_level(pre.pattern == GPT2));
    let ids = vocabulary.ids();
    let json = TokenizerJson {
        version: "1.0",
        added_tokens: vocabulary.added_tokens(&ids),
        normalizer: if pre.nfc { json!({"type": "NFC"}) } else { Value::Null },
        pre_tokenizer: json!({"type": "Sequence", "pretokenizers": pieces}),
        post_processor: vocabulary.post_processor()?.unwrap_or_default(),
        decoder: byte_level(false),
        model: BpeJson {
            r#type: "BPE",
            unk_token: None,
            fuse_unk: false,
            byte_fallback: false,
            ignore_merges: pre.ignore_merges,
            merges: &vocabulary.merges,
            vocab: &ids,
        },
    };
    json.write()
}

#[cfg(test)]
mod tests {
    use super::super::{TokenKind, Vocabulary};
    use crate::{TextFiles, Tokenizer};

    /// In byte-level vocabularies ASCII stands for itself, except that a space is Ġ and a line break Ċ.
    fn vocabulary(pre: &'static str) -> Vocabulary<'static> {
        let words = ["a", "b", "1", "2", "Ġ", "Ċ", "ab", "Ġab", "12", "<s>"];
        let kind = |word: &&str| if *word == "<s>" { TokenKind::Control } else { TokenKind::Normal };
        Vocabulary {
            model: "gpt2",
            pre,
            tokens: words.iter().map(|word| (*word, kind(word))).collect(),
            merges: vec!["a b", "Ġ ab", "1 2"],
            bos: Some(9),
            ..Vocabulary::default()
        }
    }

    fn encode(pre: &'static str, text: &str, special: bool) -> Vec<u32> {
        let files = TextFiles::from_vocabulary(&vocabulary(pre)).expect("known");
        let tokenizer = Tokenizer::new(&files).expect("sound");
        let ids = tokenizer.encode(text, special).expect("bytes are all there");
        assert_eq!(tokenizer.decode(&ids, true).expect("decodes"), text.replace("<s>", ""));
        ids
    }

    #[test]
    fn text_is_cut_as_the_model_was_trained() {
        for pre in [
            "gpt-2",
            "llama-bpe",
            "qwen2",
            "qwen35",
            "smollm",
            "smaug-bpe",
            "dbrx",
            "glm4",
            "tekken",
            "gpt-4o",
        ] {
            assert_eq!(encode(pre, "ab ab\n<s>", false), [6, 7, 5, 9], "{pre}");
            let single = matches!(pre, "qwen2" | "qwen35" | "smollm" | "tekken");
            let digits: &[u32] = if single { &[2, 3] } else { &[8] };
            assert_eq!(encode(pre, "12", false), digits, "{pre}");
        }
        for pre in ["llama-bpe", "llama3", "llama-v3", "tekken"] {
            assert_eq!(encode(pre, "ab", true), [9, 6], "{pre} marks the beginning");
        }
        for pre in ["qwen2", "smaug-bpe", "glm4", "gpt-4o"] {
            assert_eq!(encode(pre, "ab", true), [6], "{pre}");
        }
    }

    #[test]
    fn every_way_has_the_name_that_it_is_found_by() {
        for pre in super::NAMES {
            let of = super::pre_tokenizer(pre).expect("listed");
            let patterns: &[&str] = if of.pattern.is_empty() { &[] } else { &[of.pattern] };
            assert_eq!(super::name_of(patterns, of.single_digits, of.ignore_merges), Some(pre));
        }
        assert_eq!(super::name_of(&[super::QWEN2], false, true), Some("qwen2"));
        assert_eq!(super::name_of(&["x"], false, false), None);
    }
}
