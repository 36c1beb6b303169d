//! Rare answers: how they are read, when their text comes, and how much reading they take.

use serde_json::json;

use super::cut_tests::check as check_cut;
use super::tests::{call, check, parser_after, parts, text, tools, work};
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

/// A call with an empty id is none. How its text is cut does not change what its strings hide.
#[test]
fn an_id_has_a_character() {
    let begin = r#"<tool_call>save[CALL_ID][ARGS]{"text": ""#;
    let expected = [text(begin), call("{}"), text("\"}")];
    check(&form(), &format!("{begin}<tool_call>weather</tool_call>\"}}"), &expected);
}

/// How a text is cut does not change whether it is too long for a name.
#[test]
fn a_name_of_64_bytes_hides_the_calls_in_its_strings() {
    for (name, is_name) in [("n".repeat(64), true), ("n".repeat(65), false), ("\u{5b57}".repeat(22), false)] {
        for (begin, end) in [
            (format!("<tool_call>{name}{{\"text\": \"see"), "\"}</tool_call>"),
            (format!("[TOOL_CALLS]{name}[CALL_ID]a[ARGS]{{\"text\": \"see"), "\"]"),
            (format!("<function={name}>\n<parameter=text>\nsee"), "\n</parameter>\n</function>"),
        ] {
            let answer = format!("{begin} <tool_call>weather</tool_call>{end}");
            let apart = vec![text(&begin), call("{}"), text(end.trim_start())];
            check(&form(), &answer, &if is_name { vec![text(&answer)] } else { apart });
        }
    }
}

#[test]
fn an_empty_list_that_is_cut_off_is_text() {
    for answer in ["[]", "[]\n", "[ ]\n\n", "[]\r\n", "[\t]\n"] {
        check_cut(answer, answer, 0);
    }
    for answer in ["[[", "[ [\n", "[[]", "<tool_call>[[", "<tool_call>[[ ["] {
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

/// A call of a tool that was not offered is text, as is one with an argument that has no key. So is a call that one of
/// their strings mentions.
#[test]
fn a_call_that_cannot_be_made_hides_the_calls_in_its_strings() {
    let inner = "see <tool_call>weather</tool_call>";
    for same in [
        format!("<function_calls>save(text=\"{inner}\")</function_calls>"),
        format!("<function_calls>[save(text='{inner}', days=2)]</function_calls>"),
        format!("<function_calls>weather(city='Bern')\nsave(text='{inner}')</function_calls>"),
        format!("<function_calls>save(\"\"\"{inner}\n\"\"\", 5)</function_calls>"),
        format!("<function_calls>weather(\"{inner}\")</function_calls>"),
        format!("<tool_call>weather_map(text='{inner}')</tool_call>"),
        format!("<tool_call>save<arg_key>text</arg_key><arg_value>{inner}</arg_value></tool_call>"),
        format!("<tool_call>save\n{{\"text\": \"{inner}\"}}</tool_call>"),
        format!("[TOOL_CALLS]save[ARGS]{{\"text\": \"{inner}\"}}"),
        format!("[TOOL_CALLS]weather[ARGS]{{\"city\": \"{inner}\"]"),
        format!("[TOOL_CALLS]save[CALL_ID]a1[ARGS]{{\"text\": \"{inner}\"}}"),
    ] {
        check(&form(), &same, &[text(&same)]);
        check(&form(), &format!("{same} b\n{CALL}"), &[text(&format!("{same} b")), call("{}")]);
    }
    // Cut off at any place after the marker inside.
    for (same, last) in [
        (format!("<function_calls>save(text=\"{inner} an"), 20),
        (format!("<function_calls>save(text=\"{inner}\")</func"), 6),
        (format!("<tool_call>save<arg_key>text</arg_key><arg_value>{inner} an"), 20),
        (format!("[TOOL_CALLS]save{{\"text\": \"{inner} an"), 20),
    ] {
        for at in same.len() - last..=same.len() {
            assert_eq!(cut_tests::cut(&same[..at], 3).1, 0, "{}", &same[..at]);
        }
        check_cut(&same, &same, 0);
    }
    let unknown = "<tool_call><function=save>\n<parameter=text>\na\n</parameter>\n</function>\n<function=lo";
    check_cut(unknown, unknown, 0);
    // A quote is missing, so the end of the call counts, and a call after it.
    for (begin, end) in
        [("<function_calls>", "</function_calls>"), ("[TOOL_CALLS]", ""), ("<|python_tag|>", "")]
    {
        let wrong = format!("{begin}weather(city=\"Bern){end}");
        let right = format!("{begin}weather(city=\"Bern\"){end}");
        check(&form(), &format!("{wrong}\n{right}"), &[text(&wrong), call(r#"{"city":"Bern"}"#)]);
    }
}

/// Without an end marker a call of a tool that was not offered hides no call after it.
#[test]
fn a_call_may_follow_one_that_cannot_be_made() {
    let bern = call(r#"{"city":"Bern"}"#);
    for (unknown, gap, known) in [
        (r#"[TOOL_CALLS]save[ARGS]{"a":1}"#, "", r#"[TOOL_CALLS]weather[ARGS]{"city":"Bern"}"#),
        (
            r#"[TOOL_CALLS]save[CALL_ID]a1{"a": "[TOOL_CALLS]weather{}"}"#,
            " \n",
            r#"[TOOL_CALLS]weather{"city":"Bern"}"#,
        ),
        (r#"[TOOL_CALLS]weather("Bern")"#, "\n", r#"[TOOL_CALLS]weather(city="Bern")"#),
        (r#"<|python_tag|>print("a")"#, "\n", r#"<|python_tag|>weather(city="Bern")"#),
        (r#"<|python_tag|>print("a")"#, "; ", r#"<tool_call>weather(city="Bern")</tool_call>"#),
    ] {
        let shown = format!("{unknown}{}", gap.trim_end());
        check(&form(), &format!("{unknown}{gap}{known}"), &[text(&shown), bern.clone()]);
        check(&form(), &format!("{unknown}{gap}"), &[text(&format!("{unknown}{gap}"))]);
        // The second call is cut off.
        let half = &known[..known.find("rn").expect("the city")];
        check_cut(&format!("{unknown}{gap}{half}"), &shown, 0);
    }
}

/// Where texts are joined, the model's own line break keeps them apart.
#[test]
fn a_line_break_around_calls_is_kept_between_joined_texts() {
    let joining = AnswerForm { joins_texts: true, ..form() };
    let gap = " ".repeat(3 * GAP_BYTES_MAX);
    for (answer, after) in [
        (format!("First\n{CALL} then"), "\nthen"),
        (format!("First {CALL}\n\nthen"), "\nthen"),
        (format!("First {CALL}{gap}\n{gap}then"), "\nthen"),
        (format!("First {CALL}\n{CALL} then"), "\nthen"),
        (format!("First {CALL} then"), "then"),
        (format!("First{CALL}then"), "then"),
        (format!("First {CALL} then\n"), "then\n"),
    ] {
        let joined: Vec<_> =
            parts(&joining, &answer, 3).into_iter().filter(|part| *part != call("{}")).collect();
        assert_eq!(joined, [text("First"), text(after)], "{answer}");
        for size in [1, 2, 7, 1000] {
            assert_eq!(parts(&joining, &answer, size), parts(&joining, &answer, 3), "{answer}");
        }
    }
    // No text is before the calls, or after them.
    check(&joining, &format!("\n{CALL}\n{CALL}\nb"), &[call("{}"), call("{}"), text("b")]);
    check(&joining, &format!("a\n{CALL}\n"), &[text("a"), call("{}")]);
    check(&form(), &format!("a\n{CALL}\nb"), &[text("a"), call("{}"), text("b")]);
}

/// What follows a whole call makes it text. Its strings begin no call.
#[test]
fn text_after_a_call_between_markers_hides_its_strings() {
    let inner = "see <tool_call>weather</tool_call>";
    for call in [
        format!("<function_calls>weather(city=\"{inner}\")"),
        format!("<tool_call>weather<arg_key>city</arg_key><arg_value>{inner}</arg_value>"),
        format!("<tool_call>weather{{\"city\": \"{inner}\"}}"),
        format!("weather\n{{\"city\": \"{inner}\"}}"),
    ] {
        let same = format!("{call} and more.");
        check(&form(), &same, &[text(&same)]);
    }
}

/// A list of strings that mention markers is no call, and each string comes when its quote does.
#[test]
fn a_list_of_markers_is_text() {
    for same in [
        r#"["<tool_call>weather</tool_call>", "b"]"#,
        r#"[ "a", "<function=weather>", "[TOOL_CALLS]weather{}", "<|python_tag|>" ]"#,
        r#"[["<tool_call>weather</tool_call>"], ["b"]]"#,
        "[ [\n[\"<tool_call>weather</tool_call>\"]]]",
        r#"<tool_call>[[{"a": "<tool_call>weather</tool_call>"}]]"#,
        r#"<tool_call>["<tool_call>weather</tool_call>"]</tool_call>"#,
        r#"functools[{"name": "save", "arguments": {"text": "<tool_call>weather</tool_call>"}}]"#,
    ] {
        check(&form(), same, &[text(same)]);
        check(&form(), &format!("{same}\n{CALL} b"), &[text(same), call("{}"), text("b")]);
    }
    let begun = r#"["<tool_call>{", "<function_calls>[", "<tool_call>{""#;
    for size in [1, 3, 1000] {
        let (_, parts) = parser_after(&form(), begun, size);
        assert_eq!(all_text(&parts), begun, "in pieces of {size}");
    }
    // The list is none.
    check(&form(), &format!("[\"a\n{CALL}"), &[text("[\"a"), call("{}")]);
    for begin in ["[[Zurich]]", "<tool_call>[[Zurich]]", "[ [1]]", "[[]]"] {
        let same = format!("{begin} has a 6\" gauge.");
        check(&form(), &format!("{same} {CALL}"), &[text(&same), call("{}")]);
    }
}
