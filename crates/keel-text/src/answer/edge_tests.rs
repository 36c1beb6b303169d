//! Rare answers: how they are read, when their text comes, and how much reading they take.

use serde_json::json;

use super::cut_tests::check as check_cut;
use super::tests::{call, check, parser_after, text, tools, work};
use super::*;

const CALL: &str = r#"<tool_call>{"name": "weather", "arguments": {}}</tool_call>"#;

fn form() -> AnswerForm {
    AnswerForm { tools: tools(), ..AnswerForm::default() }
}

/// Number of bytes that are read for a whole answer in pieces of `size` bytes, and its text.
fn work_and_text(answer: &str, size: usize) -> (usize, String) {
    let (mut parser, mut parts) = parser_after(&form(), answer, size);
    parser.finish(&mut parts);
    (work(&parser), all_text(&parts))
}

/// The text of an answer, with `|` in place of each call.
fn all_text(parts: &[AnswerPart]) -> String {
    parts.iter().map(|part| if let AnswerPart::Text(text) = part { text } else { "|" }).collect()
}

/// Text after many calls, or a call that is not whole, makes all of them text. They are not read again one by one.
#[test]
fn many_calls_that_are_text_take_little_time() {
    let mistral = r#"[TOOL_CALLS]weather[ARGS]{"city": "Bern"}"#;
    for (one, last, has_calls) in [
        (mistral, " x", false),
        (mistral, "[TOOL_CALLS]weather", false),
        (mistral, "[TOOL_CALLS]weather[ARGS]{\"city\": \"Bern\"]", false),
        // Each of these begins a string that hides the others.
        ("<tool_call>weather(a=\"\"\" \"", "", false),
        ("<tool_call>weather(a=\"\"\" \"", "\\xzz", false),
        // Each first marker's reading reaches the end, and the second one's is a call.
        ("<|python_tag|><function=weather><parameter=a></function></tool_call>x", "", true),
    ] {
        for size in [7, 1 << 20] {
            let work = |count: usize| {
                let answer = format!("{}{last}", one.repeat(count));
                let (work, text) = work_and_text(&answer, size);
                assert!(has_calls || text == answer, "{one} in pieces of {size}");
                assert!(work < 24 * answer.len(), "{work} bytes were read of {} {one}", answer.len());
                work
            };
            let (few, many) = (work(500), work(2000));
            assert!(many < 5 * few, "{few} and {many} bytes were read of {one}");
        }
    }
}

/// Of text that follows calls in a list, only that counts as text which the list hides.
#[test]
fn a_marker_in_a_call_that_is_text_begins_no_call() {
    let wrong = r#"[TOOL_CALLS]weather{"city": "<tool_call>weather</tool_call>"}"#;
    for end in [" x", "[TOOL_CALLS]weathers", " x [TOOL_CALLS] y"] {
        check(&form(), &format!("{wrong}{end}"), &[text(&format!("{wrong}{end}"))]);
        check(&form(), &format!("{wrong}{end} {CALL}"), &[text(&format!("{wrong}{end}")), call("{}")]);
    }
    check(&form(), &format!("{wrong} \n {CALL}"), &[text(wrong), call("{}")]);
    let again = "[TOOL_CALLS]weather{} x";
    check(&form(), &format!("{again}[TOOL_CALLS]weather{{}}"), &[text(again), call("{}")]);
}

/// A reading that was put off happens soon, and not at the end of the answer.
#[test]
fn a_call_full_of_markers_comes_soon() {
    let value = format!("{}<tool_call>", "a".repeat(89)).repeat(1000);
    let json = format!(r#"{{"name": "weather", "arguments": {{"city": "{value}"}}}}"#);
    let answer = format!("<tool_call>{json}</tool_call>");
    for size in [1, 3, 7] {
        let (mut parser, mut parts) = parser_after(&form(), &answer, size);
        let mut late = 0;
        while parts.is_empty() && late < 2 * answer.len() {
            parser.push("b ", &mut parts);
            late += 2;
        }
        assert!(late <= answer.len() / 7, "{late} bytes after the call, in pieces of {size}");
        assert!(work(&parser) < 12 * answer.len(), "{} bytes were read", work(&parser));
    }
}

/// The end marker ends a malformed call, also on one line and where a quote is missing.
#[test]
fn quotes_after_a_malformed_call_hide_nothing() {
    let begin = r#"<tool_call>{"name": "weather", "arguments": {"city": "#;
    for wrong in [
        format!("{begin}Bern}}}}</tool_call> 5\" of rain."),
        format!("{begin}\"Bern}}}}</tool_call>"),
        format!("{begin}\"Bern}}}}</tool_call> "),
        format!("{begin}'a\"b'}}}}</tool_call>"),
    ] {
        check(&form(), &format!("{wrong}{CALL}"), &[text(wrong.trim_end()), call("{}")]);
        check(
            &form(),
            &format!("{wrong}{CALL} b {CALL}"),
            &[text(wrong.trim_end()), call("{}"), text("b"), call("{}")],
        );
    }
    // A string that mentions the markers.
    for same in [
        r#"<tool_call>{"name": "save", "text": "see <tool_call>weather</tool_call><tool_call>weather</tool_call>"}"#,
        r#"<tool_call>{"name": "save", "text": "not </tool_call> but <tool_call>weather</tool_call>"}"#,
    ] {
        check(&form(), same, &[text(same)]);
    }
}

/// The line end makes the call malformed. The text after it is not held back.
#[test]
fn text_after_a_call_that_lacks_a_quote_comes_at_once() {
    let city = "Bern ".repeat(600);
    for (begin, gap) in [("", "\n"), ("Look: ", "\n\n")] {
        let wrong = format!(
            r#"{begin}<tool_call>{{"name": "weather", "arguments": {{"city": "{city}}}}}</tool_call>{gap}"#
        );
        for size in [1, 3, 7] {
            let (mut parser, mut parts) = parser_after(&form(), wrong.trim_end(), size);
            parser.push(gap, &mut parts);
            parser.push("Now", &mut parts);
            assert_eq!(all_text(&parts), format!("{wrong}Now"), "pieces of {size}");
        }
    }
}

/// White space before a call is that of JSON. After a call any white space may come.
#[test]
fn other_white_space_is_text_before_a_call() {
    for space in ["\u{a0}", "\u{b}", "\u{3000}"] {
        let begin = format!("<tool_call>{space}{{\"a\": \"");
        check(&form(), &format!("{begin}{CALL}\"}}"), &[text(&begin), call("{}"), text("\"}")]);
        check(&form(), &format!("{{\"name\": \"weather\", \"arguments\": {{}}}}{space}\n"), &[call("{}")]);
        check(&form(), &format!("weather\n{{}}\n{space}"), &[call("{}")]);
    }
}

/// A tag that names no function ends where its name does.
#[test]
fn a_function_without_a_name_hides_no_call() {
    let call = call(r#"{"city":"a>b"}"#);
    check(&form(), r#"<function=[TOOL_CALLS]weather{"city":"a>b"}"#, &[text("<function="), call.clone()]);
    let marked = r#"<tool_call><function=[TOOL_CALLS]weather{"city":"a>b"}"#;
    check(&form(), marked, &[text("<tool_call><function="), call]);
}

#[test]
fn an_empty_list_that_is_cut_off_is_text() {
    for answer in ["[]", "[]\n", "[ ]\n\n", "[]\r\n", "[\t]\n"] {
        check_cut(answer, answer, 0);
    }
    check_cut("[]\n[{\"name\": \"wea", "", 0);
}

/// GLM's values may contain the end marker of the call.
#[test]
fn a_value_between_tags_may_contain_a_call() {
    let value = "see <tool_call>weather</tool_call>";
    let expected = [call(&json!({ "city": value }).to_string())];
    let begin = "<tool_call>weather<arg_key>city</arg_key><arg_value>";
    check(&form(), &format!("{begin}{value}</arg_value></tool_call>"), &expected);
    let days = "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>";
    let expected = [call(&json!({ "city": value, "days": 2 }).to_string()), text("b")];
    check(&form(), &format!("{begin}{value}</arg_value>{days} b"), &expected);
    // The end of the value is missing.
    for end in ["", " b"] {
        let wrong = format!("{begin}Bern</tool_call>");
        check(&form(), &format!("{wrong}{end}"), &[text(&format!("{wrong}{end}"))]);
        check(&form(), &format!("{wrong}{end} {CALL}"), &[text(&format!("{wrong}{end}")), call("{}")]);
        check(
            &form(),
            &format!("{wrong}{end} {begin}Bern</arg_value></tool_call>"),
            &[text(&format!("{wrong}{end}")), call(r#"{"city":"Bern"}"#)],
        );
        check_cut(&format!("{wrong}{end}"), "", 0);
    }
}

#[test]
fn a_name_may_be_escaped_and_arguments_may_be_blank() {
    let tools = vec![json!({"name": "m\u{e9}t\u{e9}o"}), json!({"name": "weather"})];
    let form = AnswerForm { tools, ..AnswerForm::default() };
    for name in ["m\\u00e9t\\u00e9o", "\\u006d\u{e9}t\\u00e9o"] {
        let json = format!(r#"{{"name": "{name}", "arguments": {{"a": 1}}}}"#);
        for answer in
            [json.clone(), format!("<tool_call>{json}</tool_call>"), format!("[TOOL_CALLS][{json}]")]
        {
            let expected =
                AnswerPart::ToolCall { name: "m\u{e9}t\u{e9}o".into(), arguments: r#"{"a":1}"#.into() };
            check(&form, &answer, &[expected]);
        }
    }
    for same in [r#"{"name": "m\u00e9t\u00e9", "arguments": {}}"#, r#"{"name": "mx\u00e9", "arguments": {}}"#]
    {
        check(&form, same, &[text(same)]);
    }
    for blank in ["", " ", "\\n"] {
        let json = format!(r#"{{"name": "weather", "arguments": "{blank}"}}"#);
        check(&form, &format!("<tool_call>{json}</tool_call>"), &[call("{}")]);
        check(&form, &json, &[call("{}")]);
    }
}
