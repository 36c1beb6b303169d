//! Encoding and decoding through the public API. The expected ids are those of the tokenizers package for Python on the
//! same files.

mod common;

use common::{asset, files_of};
use keel_text::{TextError, TextFiles, Tokenizer};

const MIXED: &str = "the little girl's café 你好 👍🏽\n\n 12";

#[test]
fn byte_level_ids_agree_with_the_reference() {
    let tokenizer = Tokenizer::open(&asset("byte_level")).unwrap();
    let cases: [(&str, &[u32]); 5] = [
        ("Once upon a time", &[350, 66, 68, 220, 84, 79, 346, 261, 257, 72, 264]),
        (
            MIXED,
            &[
                83, 256, 287, 294, 6, 82, 296, 69, 343, 220, 340, 220, 172, 253, 239, 235, 172, 253, 237,
                121, 198, 198, 220, 16, 17,
            ],
        ),
        ("<|im_start|>user\nhi<|im_end|>", &[353, 84, 82, 68, 81, 198, 71, 72, 354]),
        (" two  spaces", &[257, 86, 78, 220, 220, 82, 79, 64, 66, 68, 82]),
        ("", &[]),
    ];
    for (text, ids) in cases {
        assert_eq!(tokenizer.encode(text, true).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(ids, false).unwrap(), text);
    }
    assert_eq!(tokenizer.decode(&[353, 84, 82, 68, 81, 198, 71, 72, 354], true).unwrap(), "user\nhi");
    assert_eq!(tokenizer.vocab_size(), 357);
    assert_eq!(tokenizer.special_ids(), [352, 353, 354]);
    assert!(tokenizer.is_special(353) && !tokenizer.is_special(355));
    assert_eq!(tokenizer.token_to_id("<think>"), Some(355));
    assert_eq!(tokenizer.id_to_token(220).as_deref(), Some("Ġ"));
    assert_eq!(tokenizer.id_to_token(357), None);
}

#[test]
fn byte_token_ids_agree_with_the_reference() {
    let tokenizer = Tokenizer::open(&asset("byte_tokens")).unwrap();
    let ids = [
        2, 320, 346, 353, 45, 305, 355, 293, 201, 175, 311, 314, 315, 311, 246, 165, 151, 147, 246, 165, 149,
        195, 262, 262, 311, 270, 271,
    ];
    assert_eq!(tokenizer.encode(MIXED, true).unwrap(), ids);
    assert_eq!(tokenizer.encode(MIXED, false).unwrap(), ids[1..]);
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), MIXED);
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), format!("<bos> {MIXED}"));
    assert_eq!(tokenizer.encode("", true).unwrap(), [2]);
}

#[test]
fn end_ids_are_gathered_from_all_files() {
    let qwen_like = Tokenizer::open(&asset("byte_level")).unwrap();
    assert_eq!((qwen_like.bos_id(), qwen_like.eos_ids()), (None, &[352, 354][..]));
    let gemma_like = Tokenizer::open(&asset("byte_tokens")).unwrap();
    assert_eq!((gemma_like.bos_id(), gemma_like.eos_ids()), (Some(2), &[1, 5][..]));
    assert_eq!(gemma_like.special_tokens().eos.as_deref(), Some("<eos>"));
    let bare = Tokenizer::from_bytes(&files_of("byte_level").tokenizer).unwrap();
    assert_eq!((bare.bos_id(), bare.eos_ids()), (None, &[][..]));
}

/// `add_bos_token` takes precedence over `tokenizer.json`, in both directions.
#[test]
fn the_config_decides_about_the_token_at_the_beginning() {
    let adds = files_of("byte_tokens").tokenizer;
    let text = String::from_utf8(adds.clone()).unwrap();
    let adds_none =
        text.replace(r#""single":[{"SpecialToken":{"id":"<bos>","type_id":0}},"#, r#""single":["#);
    assert_ne!(adds_none, text);
    let first_id = |tokenizer_json: &[u8], config: &str| {
        let files = TextFiles::in_memory(tokenizer_json).with_tokenizer_config(config.as_bytes());
        let ids = Tokenizer::new(&files).unwrap().encode("sea", true).unwrap();
        (ids[0], ids.len())
    };
    let (yes, no) =
        (r#"{"bos_token":"<bos>","add_bos_token":true}"#, r#"{"bos_token":"<bos>","add_bos_token":false}"#);
    let with_bos = first_id(&adds, yes);
    let without = first_id(adds_none.as_bytes(), no);
    assert_eq!(with_bos.0, 2);
    assert_eq!(with_bos.1, without.1 + 1);
    assert_eq!(first_id(adds_none.as_bytes(), yes), with_bos);
    assert_eq!(first_id(&adds, no), without);
    assert_eq!(first_id(&adds, r#"{"bos_token":"<bos>"}"#), with_bos);
}

#[test]
fn decoding_nothing_visible_is_empty() {
    for name in ["byte_level", "byte_tokens"] {
        let tokenizer = Tokenizer::open(&asset(name)).unwrap();
        assert_eq!(tokenizer.decode(&[], false).unwrap(), "");
        assert_eq!(tokenizer.decode(&[1_000_000, u32::MAX], false).unwrap(), "");
        let special = tokenizer.special_ids().to_vec();
        assert_eq!(tokenizer.decode(&special, true).unwrap(), "");
    }
}

/// A prompt is encoded whole, whatever truncation the file asks for.
#[test]
fn truncation_and_padding_of_the_file_are_left_out() {
    let text = String::from_utf8(files_of("byte_level").tokenizer).unwrap();
    let cut = text.replace(
        r#""truncation":null,"padding":null"#,
        r#""truncation":{"direction":"Right","max_length":3,"strategy":"LongestFirst","stride":0},
           "padding":{"strategy":{"Fixed":99},"direction":"Left","pad_to_multiple_of":null,"pad_id":0,
                      "pad_type_id":0,"pad_token":"!"}"#,
    );
    assert_ne!(cut, text);
    let ids = Tokenizer::from_bytes(cut.as_bytes()).unwrap().encode("Once upon a time", true).unwrap();
    assert_eq!(ids.len(), 11);
}

#[test]
fn broken_files_are_refused_with_the_reason() {
    let good = String::from_utf8(files_of("byte_level").tokenizer).unwrap();
    let refusal = |find: &str, replace: &str| {
        let bad = good.replacen(find, replace, 1);
        assert_ne!(bad, good, "{find}");
        let err = Tokenizer::from_bytes(bad.as_bytes()).unwrap_err();
        assert!(matches!(err, TextError::Tokenizer { .. }), "{err:?}");
        err.to_string()
    };
    for (find, replace, reason) in [
        (r#""version":"1.0""#, r#""version":"2.0""#, r#"version "2.0" is not known"#),
        (
            r#""id":353"#,
            r#""id":400"#,
            r#"added token "<|im_start|>" has id 400 in the list, but the vocabulary gives 353"#,
        ),
        (r#""content":"<think>""#, r#""content":"""#, "added token 355 is empty"),
        (r#""!":0,"#, r#""!":1,"#, "has id 1, which another token has too"),
        (r#""!":0,"#, r#""!":16777216,"#, "a token has the id 16777216, at most 16777216 tokens are read"),
        (r#""model":{"#, r#""Model":{"#, "missing field `model`"),
        (r#""type":"BPE""#, r#""type":"CPE""#, "model: not valid"),
        (r#""type":"NFC""#, r#""type":"NFX""#, "normalizer: not valid"),
        (r#""Regex":"'("#, r#""Regex":"'((""#, "not valid"),
        (r#"{"type":"BPE""#, r#"["#, "not valid"),
    ] {
        let message = refusal(find, replace);
        assert!(message.starts_with("tokenizer.json: ") && message.contains(reason), "{message}");
    }
    for bytes in [&b""[..], b"{", b"[]", b"null", b"{}", &[0xff, 0xfe], &good.as_bytes()[..good.len() / 2]] {
        let err = Tokenizer::from_bytes(bytes).unwrap_err();
        assert!(matches!(err, TextError::Tokenizer { .. }), "{err:?}");
    }
}

#[test]
fn a_folder_without_a_tokenizer_is_named() {
    let err = Tokenizer::open("no/such/folder".as_ref()).unwrap_err().to_string();
    assert!(err.starts_with("no/such/folder/tokenizer.json: cannot be read"), "{err}");
}

#[test]
fn a_tokenizer_is_shared_between_threads() {
    let tokenizer = Tokenizer::open(&asset("byte_level")).unwrap();
    let expected = tokenizer.encode(MIXED, false).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let (tokenizer, expected) = (tokenizer.clone(), &expected);
            scope.spawn(move || assert_eq!(&tokenizer.encode(MIXED, false).unwrap(), expected));
        }
    });
}
