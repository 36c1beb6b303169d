//! SentencePiece vocabularies: a space is `▁`, pairs merge by the score of their result, and text that is not in the
//! vocabulary is spelled in bytes.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::{BpeJson, TokenKind, TokenizerJson, Vocabulary};

/// Most bytes of a token. The work for a token grows with the square of its length.
const TOKEN_BYTES_MAX: usize = 4096;

/// Builds the `tokenizer.json`.
pub(super) fn tokenizer(vocabulary: &Vocabulary<'_>) -> Result<String, String> {
    let (tokens, scores) = (vocabulary.tokens.len(), vocabulary.scores.len());
    if scores != tokens {
        return Err(format!("the vocabulary has {tokens} tokens but {scores} scores"));
    }
    let too_long =
        |token: &&(&str, TokenKind)| token.1 == TokenKind::Normal && token.0.len() > TOKEN_BYTES_MAX;
    if let Some((text, _)) = vocabulary.tokens.iter().find(too_long) {
        return Err(format!("a token has {} bytes, at most {TOKEN_BYTES_MAX} are read", text.len()));
    }
    let prefix = vocabulary.add_space_prefix.unwrap_or(true);
    let to_mark = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let normalizer = match prefix {
        true => {
            json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, to_mark]})
        }
        false => to_mark,
    };
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let ids = vocabulary.ids();
    let unk = vocabulary.unk.map(|id| vocabulary.text(id)).transpose()?;
    let json = TokenizerJson {
        version: "1.0",
        added_tokens: vocabulary.added_tokens(&ids),
        normalizer,
        pre_tokenizer: Value::Null,
        post_processor: vocabulary.post_processor()?.unwrap_or_default(),
        decoder: json!({"type": "Sequence", "decoders": decoders}),
        model: BpeJson {
            r#type: "BPE",
            unk_token: unk,
            fuse_unk: true,
            byte_fallback: vocabulary.tokens.iter().any(|token| token.1 == TokenKind::Byte),
            ignore_merges: false,
            merges: &merges(vocabulary, &ids),
            vocab: &ids,
        },
    };
    json.write()
}

/// Every way to make a token from two others, best first.
fn merges<'a>(vocabulary: &Vocabulary<'a>, ids: &[(&'a str, u32)]) -> Vec<(&'a str, &'a str)> {
    let ids: HashMap<&str, u32> = ids.iter().copied().collect();
    let mut pairs = Vec::new();
    for ((text, kind), score) in vocabulary.tokens.iter().zip(&vocabulary.scores) {
        if *kind != TokenKind::Normal {
            continue;
        }
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            if let (Some(l), Some(r)) = (ids.get(left), ids.get(right)) {
                pairs.push((*score, *l, *r, left, right));
            }
        }
    }
    // If several pairs make the same token, the pair with the longest left part comes first.
    pairs.sort_by(|a, b| {
        b.0.total_cmp(&a.0).then(b.3.len().cmp(&a.3.len())).then((a.1, a.2).cmp(&(b.1, b.2)))
    });
    pairs.into_iter().map(|(_, _, _, left, right)| (left, right)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TextFiles, Tokenizer};

    fn tokenizer(add_space_prefix: Option<bool>) -> Tokenizer {
        let mut tokens = vec![("<unk>", TokenKind::Control), ("<s>", TokenKind::Control)];
        let bytes: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
        tokens.extend(bytes.iter().map(|byte| (byte.as_str(), TokenKind::Byte)));
        // These have the ids from 258 on.
        tokens.extend(["▁", "a", "b", "ab", "▁a", "▁ab", "aa"].map(|text| (text, TokenKind::Normal)));
        tokens.push(("\n\n", TokenKind::UserDefined));
        let scores = (0..tokens.len()).map(|id| if id < 261 { 0.0 } else { -(id as f32) }).collect();
        let (model, unk, bos) = ("llama", Some(0), Some(1));
        let vocabulary =
            Vocabulary { model, tokens, scores, unk, bos, add_space_prefix, ..Vocabulary::default() };
        Tokenizer::new(&TextFiles::from_vocabulary(&vocabulary).expect("known")).expect("sound")
    }

    #[test]
    fn pairs_merge_by_score_and_the_rest_is_bytes() {
        let plain = tokenizer(Some(false));
        // ab has a better score than ▁a, so it merges first.
        assert_eq!(plain.encode("ab ab", false).unwrap(), [261, 263]);
        assert_eq!(plain.encode("aa", true).unwrap(), [1, 264]);
        assert_eq!(plain.encode("aé", false).unwrap(), [259, 2 + 0xc3, 2 + 0xa9]);
        assert_eq!(plain.encode("a\n\nb", false).unwrap(), [259, 265, 260]);
        for text in ["ab ab", " a  b", "é\n\nü€", ""] {
            let ids = plain.encode(text, false).unwrap();
            assert_eq!(plain.decode(&ids, true).unwrap(), text);
        }
    }

    #[test]
    fn a_space_is_put_in_front_and_taken_away() {
        let prefixed = tokenizer(None);
        let ids = prefixed.encode("ab", false).unwrap();
        assert_eq!(ids, [263]);
        assert_eq!(prefixed.decode(&ids, true).unwrap(), "ab");
        let bytes = |id| prefixed.token_bytes(id).unwrap();
        // ▁, ab, ▁ab, a line break as a byte, two line breaks, and <s>.
        assert_eq!(
            [258, 261, 263, 12, 265, 1].map(bytes),
            [" ", "ab", " ab", "\n", "\n\n", "<s>"].map(Vec::from)
        );
    }

    #[test]
    fn a_token_is_not_endless() {
        let text = "a".repeat(TOKEN_BYTES_MAX + 1);
        let tokens = vec![(text.as_str(), TokenKind::Normal)];
        let vocabulary = Vocabulary { model: "llama", tokens, scores: vec![0.0], ..Vocabulary::default() };
        let error = TextFiles::from_vocabulary(&vocabulary).expect_err("too long").to_string();
        assert!(error.contains("a token has 4097 bytes, at most 4096"), "{error}");
    }
}
