//! The laws of streaming: the concatenated pieces equal the whole, and how text is cut does not change the result.

mod common;

use common::asset;
use keel_text::{StopMatcher, Tokenizer};
use proptest::prelude::*;

fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::open(&asset(name)).unwrap()
}

/// All pieces of a stream, including the one from `finish`.
fn pieces(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> Vec<String> {
    let mut stream = tokenizer.stream(skip_special);
    let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap().to_string()).collect();
    pieces.push(stream.finish().unwrap().to_string());
    pieces
}

/// Text with characters that are spread over several tokens: emoji with modifiers, CJK, combining marks.
fn text() -> impl Strategy<Value = String> {
    let chars = prop_oneof![
        4 => prop::sample::select(vec![" ", "the", " girl", "\n", "a", "é", "<think>", "<|im_end|>", "\u{FFFD}"]),
        2 => prop::sample::select(vec!["你", "界", "こ", "한", "е\u{301}", "n\u{303}", "▁", "\u{200D}"]),
        2 => prop::sample::select(vec!["👍🏽", "👩‍👩‍👧", "🇪🇺", "🙂", "\u{10FFFF}", "\u{7ff}", "\u{800}"]),
        1 => Just("\0"),
    ];
    let any = prop_oneof![3 => chars.prop_map(str::to_string), 1 => any::<char>().prop_map(String::from)];
    prop::collection::vec(any, 0..40).prop_map(|parts| parts.concat())
}

/// Decodes as a vocabulary with byte tokens would if valid characters were kept: each byte that is in no valid
/// character becomes one U+FFFD.
fn decode_keeping_valid(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let byte = |id: &u32| {
        u8::from_str_radix(tokenizer.id_to_token(*id)?.strip_prefix("<0x")?.strip_suffix('>')?, 16).ok()
    };
    let mut out = String::new();
    for run in ids.chunk_by(|a, b| byte(a).is_some() == byte(b).is_some()) {
        let bytes: Vec<u8> = run.iter().filter_map(byte).collect();
        if bytes.is_empty() {
            out.extend(run.iter().filter_map(|&id| tokenizer.id_to_token(id)).map(|t| t.replace('▁', " ")));
        }
        for chunk in bytes.utf8_chunks() {
            out.push_str(chunk.valid());
            out.extend(chunk.invalid().iter().map(|_| '\u{FFFD}'));
        }
    }
    out.strip_prefix(' ').map(str::to_string).unwrap_or(out)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn pieces_of_any_text_are_its_decoding(text in text(), skip_special: bool) {
        for name in ["byte_level", "byte_tokens"] {
            let tokenizer = tokenizer(name);
            let ids = tokenizer.encode(&text, true).unwrap();
            let pieces = pieces(&tokenizer, &ids, skip_special);
            prop_assert_eq!(pieces.concat(), tokenizer.decode(&ids, skip_special).unwrap());
            // Valid text gives no replacement characters other than its own.
            let own = text.matches('\u{FFFD}').count();
            prop_assert_eq!(pieces.concat().matches('\u{FFFD}').count(), own);
        }
    }

    /// Random ids are mostly invalid UTF-8, special tokens and ids outside the vocabulary.
    #[test]
    fn pieces_of_any_byte_level_ids_are_their_decoding(
        ids in prop::collection::vec(prop_oneof![4 => 0u32..360, 2 => 94u32..256, 1 => any::<u32>()], 0..60),
        skip_special: bool,
    ) {
        let tokenizer = tokenizer("byte_level");
        let pieces = pieces(&tokenizer, &ids, skip_special);
        prop_assert_eq!(pieces.concat(), tokenizer.decode(&ids, skip_special).unwrap());
    }

    #[test]
    fn pieces_of_any_byte_tokens_keep_what_is_valid(
        ids in prop::collection::vec(prop_oneof![1 => 262u32..400, 1 => 6u32..262, 3 => 134u32..256], 0..60),
    ) {
        let tokenizer = tokenizer("byte_tokens");
        prop_assert_eq!(pieces(&tokenizer, &ids, false).concat(), decode_keeping_valid(&tokenizer, &ids));
    }

    #[test]
    fn stop_strings_are_found_as_in_the_whole_text(
        text in "[abé界]{0,30}",
        stops in prop::collection::vec("[abé界]{1,4}", 0..4),
        cuts in prop::collection::vec(0usize..4, 0..40),
    ) {
        let mut matcher = StopMatcher::new(&stops).unwrap();
        let mut emitted = String::new();
        let mut stopped = false;
        let mut rest = text.as_str();
        for chars in cuts.into_iter().chain([text.len()]) {
            let end = rest.char_indices().nth(chars).map_or(rest.len(), |(at, _)| at);
            let step = matcher.push(&rest[..end]);
            emitted.push_str(step.emit);
            stopped = step.stopped;
            rest = &rest[end..];
            // Emitted text is certain. Text that is held back is still a prefix of a stop string.
            let pushed = &text[..text.len() - rest.len()];
            if !stopped {
                let held = &pushed[emitted.len()..];
                prop_assert!(held.is_empty() || stops.iter().any(|stop| stop.starts_with(held) && stop != held));
            }
        }
        emitted.push_str(matcher.finish());
        let naive = naive_stop(&text, &stops);
        prop_assert_eq!(stopped, naive.is_some());
        prop_assert_eq!(matcher.matched(), naive.map(|(_, stop)| stop));
        prop_assert_eq!(emitted.as_str(), naive.map_or(text.as_str(), |(start, _)| &text[..start]));
    }
}

/// The stop string that ends first, and where it begins. Of several that end there, the longest counts.
fn naive_stop<'a>(text: &str, stops: &'a [String]) -> Option<(usize, &'a str)> {
    (0..=text.len()).filter(|&end| text.is_char_boundary(end)).find_map(|end| {
        let ended = stops.iter().filter(|stop| text[..end].ends_with(stop.as_str()));
        ended.max_by_key(|stop| stop.len()).map(|stop| (end - stop.len(), stop.as_str()))
    })
}

#[test]
fn a_character_appears_with_its_last_token() {
    let byte_level = tokenizer("byte_level");
    let ids = byte_level.encode("a👍b", false).unwrap();
    assert_eq!(pieces(&byte_level, &ids, true), ["a", "", "", "", "👍", "b", ""]);
    let byte_tokens = tokenizer("byte_tokens");
    let ids = byte_tokens.encode("a👍b", true).unwrap();
    assert_eq!(pieces(&byte_tokens, &ids, true), ["", "a", "", "", "", "👍", "b", ""]);
}

#[test]
fn an_unfinished_character_is_shown_at_the_end_only() {
    for name in ["byte_level", "byte_tokens"] {
        let tokenizer = tokenizer(name);
        let mut ids = tokenizer.encode("a👍", false).unwrap();
        ids.pop();
        let pieces = pieces(&tokenizer, &ids, true);
        let (last, before) = pieces.split_last().unwrap();
        assert_eq!(before.concat(), "a");
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), format!("a{last}"));
    }
}

#[test]
fn a_stream_can_begin_again_after_its_end() {
    let tokenizer = tokenizer("byte_tokens");
    let ids = tokenizer.encode("sea", false).unwrap();
    let mut stream = tokenizer.stream(true);
    let mut once = || {
        let mut text: String = ids.iter().map(|&id| stream.push(id).unwrap().to_string()).collect();
        text.push_str(stream.finish().unwrap());
        text
    };
    assert_eq!([once(), once()], ["sea", "sea"]);
}

/// Ids that never complete a character must not make the stream slower or larger. If each push decoded the text from
/// its beginning, 40,000 of them would take minutes.
#[test]
fn endless_invalid_bytes_cost_the_same_each() {
    for name in ["byte_level", "byte_tokens"] {
        let tokenizer = tokenizer(name);
        let first_byte = tokenizer.token_to_id("<0xE4>").or_else(|| tokenizer.token_to_id("ä")).unwrap();
        let mut stream = tokenizer.stream(true);
        let mut shown = 0;
        for n in 0..40_000 {
            shown += stream.push(first_byte).unwrap().chars().count();
            assert_eq!(shown, n, "all but the last byte are settled");
        }
        assert!(format!("{stream:?}").len() < 1000, "the stream keeps a bounded number of ids");
        assert_eq!(stream.finish().unwrap(), "\u{FFFD}");
    }
}

#[test]
fn an_answers_markers_are_text_though_they_are_special() {
    let mut json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(asset("byte_level").join("tokenizer.json")).unwrap()).unwrap();
    let added = json["added_tokens"].as_array_mut().unwrap();
    for (id, content) in [(357, "[TOOL_CALLS]"), (358, "[ARGS]")] {
        let mut token = added[0].clone();
        (token["id"], token["content"]) = (id.into(), content.into());
        added.push(token);
    }
    let json = json.to_string();
    let tokenizer = Tokenizer::new(&keel_text::TextFiles::in_memory(json.as_bytes())).unwrap();
    let text = "a é[TOOL_CALLS]f[ARGS]{\"x\": \"ü\"}<|im_end|>";
    let ids = tokenizer.encode(text, false).unwrap();
    assert!(ids.contains(&357) && ids.contains(&358));
    let shown = |form: &keel_text::AnswerForm| {
        let mut stream = tokenizer.answer_stream(form);
        let mut shown: String = ids.iter().map(|&id| stream.push(id).unwrap().to_string()).collect();
        shown.push_str(stream.finish().unwrap());
        shown
    };
    let tools = vec![serde_json::json!({"name": "f"})];
    let calls = keel_text::AnswerForm { tools, ..Default::default() };
    assert_eq!(shown(&calls), "a é[TOOL_CALLS]f[ARGS]{\"x\": \"ü\"}");
    // Without tools there are no calls, and their markers are no text.
    let reasoning = keel_text::AnswerForm { reasoning: true, ..Default::default() };
    assert_eq!(shown(&reasoning), "a éf{\"x\": \"ü\"}");
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "a éf{\"x\": \"ü\"}");
}
