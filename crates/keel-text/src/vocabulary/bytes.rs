//! A vocabulary for a model that has none: one token for each byte.

use super::{TokenKind, Vocabulary};
use crate::{TextError, TextFiles};

/// Number of bytes.
const BYTES: usize = 256;

impl TextFiles<'static> {
    /// The files of a stand-in for a missing tokenizer. Ids below 256 are bytes. Higher ids, up to `vocab` in all,
    /// appear in texts as `<id>`, and no text is encoded to them. There is no end token.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] if `vocab` is below 256.
    pub fn of_bytes(vocab: usize) -> Result<TextFiles<'static>, TextError> {
        let name = "stand-in tokenizer";
        if vocab < BYTES {
            let reason = format!("a vocabulary of {vocab} does not hold the {BYTES} bytes");
            return Err(TextError::Tokenizer { file: name.into(), reason });
        }
        let higher = (BYTES..vocab).map(|id| format!("<{id}>"));
        let tokens: Vec<String> = alphabet().map(String::from).chain(higher).collect();
        TextFiles::from_vocabulary(&Vocabulary {
            name: name.into(),
            model: "gpt2",
            pre: "gpt-2",
            tokens: tokens.iter().map(|token| (token.as_str(), TokenKind::Normal)).collect(),
            ..Vocabulary::default()
        })
    }
}

/// The characters of byte-level vocabularies for the bytes 0 to 255: a printable character stands for itself, other
/// bytes follow from U+0100.
fn alphabet() -> impl Iterator<Item = char> {
    let mut next = '\u{100}'..;
    (0..=u8::MAX).map(move |byte| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => next.next().expect("there are more characters than bytes"),
    })
}

/// The bytes of a token of a byte-level vocabulary, from its spelling. `None` if it has another spelling.
pub(crate) fn spelled_bytes(token: &str) -> Option<Vec<u8>> {
    let byte = |wanted: char| alphabet().position(|spelling| spelling == wanted).map(|byte| byte as u8);
    token.chars().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use crate::{TextFiles, Tokenizer};

    #[test]
    fn a_text_is_its_bytes() {
        let tokenizer = Tokenizer::new(&TextFiles::of_bytes(1000).expect("large enough")).expect("sound");
        assert_eq!(tokenizer.vocab_size(), 1000);
        let all: String = (0..0x250).filter_map(char::from_u32).chain("€ 文 \u{1f600}".chars()).collect();
        let ids = tokenizer.encode(&all, true).expect("every byte has a token");
        assert_eq!(ids, all.bytes().map(u32::from).collect::<Vec<_>>());
        assert_eq!(tokenizer.decode(&ids, true).expect("decodes"), all);
        assert_eq!(tokenizer.decode(&[72, 105, 256, 999], true).expect("decodes"), "Hi<256><999>");
        let written = tokenizer.encode("<300>", true).expect("every byte has a token");
        assert_eq!(written, b"<300>".map(u32::from), "text never becomes a higher id");
        for id in 0..256 {
            assert_eq!(
                tokenizer.token_bytes(id).expect("decodes"),
                [id as u8],
                "also of a part of a character"
            );
        }
        assert_eq!(tokenizer.token_bytes(256).expect("decodes"), b"<256>");
        assert!(tokenizer.token_bytes(5000).expect("decodes").is_empty());
        assert!(tokenizer.eos_ids().is_empty());
        let small = TextFiles::of_bytes(255).expect_err("too small").to_string();
        assert!(small.contains("255 does not hold the 256 bytes"), "{small}");
    }
}
