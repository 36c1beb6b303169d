//! When the parts of an answer come, and how much reading they take.

use super::tests::{parser_after, tools, work};
use super::*;

fn form() -> AnswerForm {
    AnswerForm { tools: tools(), ..AnswerForm::default() }
}

/// A long call comes with the last byte of it, also if a value mentions markers.
#[test]
fn a_call_comes_as_soon_as_it_is_whole() {
    let value = format!("{} </tool_call> <tool_call> </function> {}", "a > b ".repeat(500), "c".repeat(3000));
    let json = format!(r#"{{"name": "weather", "arguments": {{"city": "{value}"}}}}"#);
    let function = format!("<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>");
    for answer in [
        format!("<tool_call>{json}\n</tool_call>"),
        format!("<|tool_call|>[{json}, {json}]<|/tool_call|>"),
        format!("<tool_call>\n{function}\n</tool_call>"),
        format!("<function_calls>weather(city='{value}')</function_calls>"),
        function.clone(),
        format!("{json}\n<tool_call>"),
    ] {
        for size in [1, 3, 1 << 20] {
            let (_, parts) = parser_after(&form(), &answer[..answer.len() - 1], size);
            assert_eq!(parts, [], "{size}");
            let (parser, parts) = parser_after(&form(), &answer, size);
            let is_call = |part: &AnswerPart| matches!(part, AnswerPart::ToolCall { .. });
            assert!(!parts.is_empty() && parts.iter().all(is_call), "{} in pieces of {size}", &answer[..40]);
            assert!(work(&parser) < 30 * answer.len(), "{} bytes were read", work(&parser));
        }
    }
}

/// Text after a malformed call comes before the answer ends.
#[test]
fn a_malformed_call_holds_back_no_text() {
    for begin in [
        "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": Bern}}</tool_call>",
        "[TOOL_CALLS]weather[ARGS]{\"city\": \"Bern\"]",
        "[TOOL_CALLS]save[ARGS]{\"city\": \"Bern\"} note(",
        "<|python_tag|>print(\"a\")\nprint(\"b\")\nprint(",
        "<tool_call><function=weather>Bern</function>",
        "<function_calls>weather(city=Bern)",
        "{\"name\": \"weather\", \"arguments\": {}} is a call, and",
        "weather\n\"is nice",
    ] {
        let answer = format!("{begin} text");
        let (parser, parts) = parser_after(&form(), &answer, 1);
        let texts = parts.iter().map(|part| if let AnswerPart::Text(text) = part { text } else { "" });
        assert_eq!((texts.collect::<String>(), parser.held.len()), (answer, 0));
    }
}

/// A text without spaces is no name, if it is too long for one.
#[test]
fn text_without_spaces_comes_at_once_after_a_mention() {
    for marker in ["<tool_call>", "[TOOL_CALLS]", "<function=", "<tool_call><function="] {
        let answer = format!("{marker}{}", "\u{5b57}".repeat(30));
        let (mut parser, mut parts) = (AnswerParser::new(form()), Vec::new());
        answer.chars().for_each(|c| parser.push(&c.to_string(), &mut parts));
        let texts = parts.iter().map(|part| if let AnswerPart::Text(text) = part { text } else { "" });
        assert_eq!((texts.collect::<String>(), parser.held.len()), (answer, 0));
    }
}

/// Markers in a string ask for a reading each.
#[test]
fn many_markers_in_a_string_take_little_time() {
    for marker in ["</tool_call>", "<function=", "x\\\"<tool_call>"] {
        for begin in
            ["<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"", "{\"a\": \"<tool_call>"]
        {
            let answer = format!("{begin}{}", marker.repeat(100_000 / marker.len()));
            let (parser, parts) = parser_after(&form(), &answer, 7);
            assert!(parts.len() <= 8, "{parts:?}");
            assert!(work(&parser) < 12 * answer.len(), "{} bytes were read", work(&parser));
        }
    }
}

/// A call, or a string that hides a marker, is text once it is too long.
#[test]
fn no_more_is_held_than_a_call_may_take() {
    for begin in [
        "<tool_call>{\"name\": \"weather\", \"arguments\": {\"a\": \"",
        "{\"a\": \"<tool_call>",
        "<function=weather>\n<parameter=city>",
    ] {
        let answer = format!("  {begin}{}", "\u{e9}".repeat(CALL_BYTES_MAX));
        for size in [1 << 15, 1 << 22] {
            let (mut parser, mut parts, mut held) = (AnswerParser::new(form()), Vec::new(), 0);
            for piece in answer.chars().collect::<Vec<_>>().chunks(size) {
                parser.push(&piece.iter().collect::<String>(), &mut parts);
                held = held.max(parser.held.len());
            }
            assert!(held <= CALL_BYTES_MAX + GAP_BYTES_MAX + 2 * size, "{held} bytes");
            parser.finish(&mut parts);
            let texts = parts.iter().map(|part| if let AnswerPart::Text(text) = part { text } else { "" });
            assert!(texts.collect::<String>() == answer, "{begin}");
        }
    }
}

/// White space in a value of JSON holds back no text after it.
#[test]
fn text_after_a_long_gap_comes_at_once() {
    for begin in ["{\"a\": 1,", "{\"a\": \"<tool_call>\",", "a", "a <tool_call>[sic]"] {
        let answer = format!("{begin}{}b", " ".repeat(2 * SHORT_BYTES_MAX));
        let (parser, _) = parser_after(&form(), &answer, 1);
        assert_eq!(parser.held, "", "{begin}");
    }
}
