//! Answers that are cut off.

use serde_json::json;

use super::*;
use crate::AnswerForm;

/// The text and the number of calls of an answer that is cut off after it arrived in pieces of `size` characters.
pub(super) fn cut(answer: &str, size: usize) -> (String, usize) {
    let tools = vec![json!({"function": {"name": "weather"}})];
    let mut parser = AnswerParser::new(AnswerForm { tools, ..AnswerForm::default() });
    let (mut parts, chars) = (Vec::new(), answer.chars().collect::<Vec<_>>());
    for piece in chars.chunks(size) {
        parser.push(&piece.iter().collect::<String>(), &mut parts);
    }
    parser.cut_off(&mut parts);
    let text = |part: &AnswerPart| match part {
        AnswerPart::Text(text) => text.clone(),
        _ => String::new(),
    };
    let calls = parts.iter().filter(|part| matches!(part, AnswerPart::ToolCall { .. })).count();
    (parts.iter().map(text).collect(), calls)
}

pub(super) fn check(answer: &str, text: &str, calls: usize) {
    for size in [1, 3, 1000] {
        assert_eq!(cut(answer, size), (text.to_string(), calls), "{answer:?} in pieces of {size}");
    }
}

#[test]
fn a_call_that_is_cut_off_anywhere_is_left_out() {
    let json = r#"{"name": "weather", "arguments": {"city": "Bern"}}"#;
    for (begin, call, end) in [
        ("<tool_call>", json, "</tool_call>"),
        ("<tool_call>", &format!("\n{json}"), "\n</tool_call>"),
        // The call is whole before its list is.
        ("<|tool_call|>", &format!("[{json}"), "]<|/tool_call|>"),
        ("<function_calls>", "weather(city=\"Bern\")", "</function_calls>"),
        (
            "<tool_call>",
            "<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>",
            "</tool_call>",
        ),
        ("<tool_call>", "weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n", "</tool_call>"),
        ("[TOOL_CALLS]", "weather[ARGS]{\"city\": \"Bern\"}", ""),
        ("<function=", "weather>\n<parameter=city>\nBern\n</parameter>\n", "</function>"),
        ("<tool_call>", "weather\n", "</tool_call>"),
    ] {
        let before = format!("Look: {begin}");
        for at in 6 + MARKER_PART_MIN..before.len() + call.len() {
            let answer = format!("{before}{call}");
            check(&answer[..at], "Look:", 0);
        }
        check(&format!("{before}{call}{end}"), "Look:", 1);
        // Whether or not the call is made, nothing of it or of its end marker is text.
        for at in 1..end.len() {
            let (text, calls) = cut(&format!("{before}{call}{}", &end[..at]), 3);
            assert!(text == "Look:" && calls <= 1, "{call} and {}: {text:?}", &end[..at]);
        }
        // The first call is kept where the second is cut off.
        check(&format!("{before}{call}{end}{begin}{}", &call[..call.len() - 1]), "Look:", 1);
    }
}

#[test]
fn calls_without_markers_are_left_out_and_values_are_not() {
    for (answer, text) in [
        (r#"{"name": "weather", "parameters": {"ci"#, ""),
        (r#"[{ "name" : "wea"#, ""),
        ("<|python_tag|>{\"na", ""),
        ("functools[{\"na", ""),
        ("weather\n", ""),
        ("<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"</tool_call>", ""),
        ("weather\n{\"city\": ", ""),
        ("weather\nis ni", "weather\nis ni"),
        (r#"{"name": "Anna", "a"#, r#"{"name": "Anna", "a"#),
        (r#"{"name": "weatherman", "a"#, r#"{"name": "weatherman", "a"#),
        (r#"[{"a": 1"#, r#"[{"a": 1"#),
        ("[\n", "[\n"),
        (r#"{"id": "a", "items": [1"#, r#"{"id": "a", "items": [1"#),
        (r#"{"parameters": {"a": 1"#, r#"{"parameters": {"a": 1"#),
        (r#"{"type": "tool", "x"#, r#"{"type": "tool", "x"#),
        (r#"{"type": "func"#, ""),
        (
            r#"{"type": "function", "function": {"name": "weather""#,
            r#"{"type": "function", "function": {"name": "weather""#,
        ),
        // A string that is no name of a call.
        (r#"{"id": "a1", "kind": "weather", "items": [1"#, r#"{"id": "a1", "kind": "weather", "items": [1"#),
        (r#"{"arguments": {"kind": "weather", "x"#, r#"{"arguments": {"kind": "weather", "x"#),
        (r#"{"id": "call_1", "na"#, ""),
        (r#"{"id": "call_1", "name": "weather", "arg"#, ""),
        (r#"[{"arguments": {"city": "B"}, "name": "weather""#, ""),
        ("if a <", "if a <"),
        ("<", ""),
        ("<t", ""),
    ] {
        check(answer, text, 0);
    }
    check(r#"{"name": "weather", "arguments": {}}"#, "", 1);
    check("a  <tool_call>no</tool_call> \n<tool_call>weather", "a  <tool_call>no</tool_call>", 0);
    check("Look.<|python_tag|>{\"name\": \"wea", "Look.", 0);
    let function = "<function=weather>\n</function>";
    for end in ["", "\n", "\n</tool_", "\n</tool_call>"] {
        check(&format!("Look. {function}{end}"), "Look.", 1);
    }
}

/// Of calls in JSON, alone or below a name, the whole ones are kept, if nothing but another call follows.
#[test]
fn whole_calls_before_one_that_is_cut_off_are_kept() {
    let json = r#"{"name": "weather", "arguments": {"city": "Bern"}}"#;
    for begin in ["<|python_tag|>", "", "<tool_call>"] {
        for gap in ["; ", ",", "\n"] {
            for end in ["", "{", "{\"na", &json[..json.len() - 1]] {
                check(&format!("{begin}{json}{gap}{end}"), "", 1);
            }
            check(&format!("{begin}{json}{gap}{json}{gap}{{\"name\": \"wea"), "", 2);
        }
        let explained = format!("{begin}{json} is a call, and");
        check(&explained, &explained, 0);
    }
    for begin in ["[TOOL_CALLS][", "<|tool_call|>[", "functools[", "["] {
        for end in ["", ", ", ", {\"na", ", {\"name\": \"weather\", \"arg"] {
            check(&format!("{begin}{json}{end}"), "", 1);
        }
        let explained = format!("{begin}{json}] is a call, and");
        check(&explained, &explained, 0);
    }
    for end in ["", "wea", "weather", "weather\n{\"ci"] {
        check(&format!("weather\n{{}}\n{end}"), "", 1);
    }
    check("weather\n{}\nNow a long text", "weather\n{}\nNow a long text", 0);
}

/// The marker after the end of the function counts, and not one in a value that may go on.
#[test]
fn a_call_that_lacks_the_end_of_a_parameter_keeps_the_text_after_it() {
    let function = "<function=weather>\n<parameter=city>\nBern\n</function>\n</tool_call>";
    for begin in ["", "<tool_call>\n"] {
        check(&format!("{begin}{function}\nNow a long text"), "Now a long text", 1);
        check(&format!("{begin}{function}\nNow a long text <tool_"), "Now a long text", 1);
    }
    let values =
        ["Bern\n</tool_call>", "a </tool_call> b", "a\n</function>", "a\n</function>\nb", "a</parameter>"];
    for value in values {
        check(&format!("<tool_call><function=weather>\n<parameter=city>\n{value}"), "", 0);
        check(&format!("<function=weather>\n<parameter=city>\n{value}"), "", 0);
        check(&format!("<|python_tag|><function=weather>\n<parameter=city>\n{value}"), "", 0);
    }
}

/// Only a call is left out, not the text after a marker that the model writes about.
#[test]
fn text_after_a_mention_of_a_marker_is_kept() {
    for same in [
        "Use <tool_call> tags, then more",
        "Use [TOOL_CALLS] or <tool_call> and <function=NAME> here",
        "Use <function=NAME> tags",
        "Use <function=weather> tags",
        "Use <tool_call>[sic] and more",
        "Use <tool_call>weather is a tool",
        "Use <tool_call>weather (see below) and",
        "Use <tool_call>weather [1] and",
        "Use <tool_call>weather <b> and",
        "Use <function=NA",
        "Use <function=NAME>",
        // The string that is cut off mentions a call.
        "{\"text\": \"Use <tool_call>weather</tool_call> to ask",
        "{\"id\": \"Use <tool_call>weather</tool_call> to",
        "<tool_call>{\"arguments\": {\"text\": \"see <tool_call>weather</tool_call> an",
        "<function=other>\n<parameter=city>\n<tool_call>weather</tool_call> an",
        "<tool_call>{\"a\": 1, \"b\": [",
        "Use <|python_tag|> so",
        "<tool_call><function=other>\n<parameter=city>",
        "{\"a\": \"<tool_call>\", \"b",
    ] {
        check(same, same, 0);
    }
    check("Use <tool_call> tags:\n<tool_call>{\"name\": \"wea", "Use <tool_call> tags:", 0);
    let twice = "Use <tool_call> or <tool_call> tags:";
    check(&format!("{twice} <tool_call>{{\"name\": \"wea"), twice, 0);
    check("Use <tool_call> tags:\n<tool_ca", "Use <tool_call> tags:", 0);
}

/// Only the call that is cut off is left out of a list, whatever its notation.
#[test]
fn whole_calls_of_a_list_that_is_cut_off_are_kept() {
    let json = r#"{"name": "weather", "arguments": {"city": "Bern"}}"#;
    let function = "<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n";
    let keys = "weather<arg_key>city</arg_key><arg_value>Bern</arg_value>\n";
    for (begin, call, end) in [
        ("<function_calls>", "weather(city=\"Bern\")\n", "</function_calls>"),
        ("<function_calls>[", "weather(city='Bern'), ", "]</function_calls>"),
        ("<tool_call>\n", function, "</tool_call>"),
        ("<tool_call>", keys, "</tool_call>"),
        ("<|tool_call|>[", &format!("{json}, "), "]<|/tool_call|>"),
        ("[TOOL_CALLS]", "weather[ARGS]{}[TOOL_CALLS]", ""),
        ("", &format!("{json}; "), ""),
    ] {
        let two = format!("{begin}{call}{call}");
        for at in 1..=call.rfind(['}', ')', '>']).expect("it has an end") {
            check(&format!("{two}{}", &call[..at]), "", 2);
        }
        let (text, calls) = cut(&format!("{two}{end}"), 3);
        assert_eq!((&text[..], calls), ("", 2), "{two}");
    }
}

#[test]
fn text_after_a_malformed_call_is_kept() {
    for wrong in [
        r#"<tool_call>{"name": "weather", "arguments": {"city": Bern}}</tool_call>"#,
        "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern}}\n</tool_call>",
        r#"<tool_call>{"name": "weather", "arguments": {"city": "Bern"}</tool_call>"#,
        r#"[TOOL_CALLS]weather[ARGS]{"city": "Bern"]"#,
        "<function_calls>weather(city=Bern)</function_calls>",
        "<tool_call>weather<arg_key>city</arg_key>Bern</tool_call>",
        "<tool_call><function=weather>Bern</function></tool_call>",
        "<tool_call><function=weather>\n<parameter=city>\nBern\n</parameter>\n</parameters>\n</function>\n</tool_call>",
        r#"{"name": "weather", "arguments": {"city": "Bern"}]}"#,
    ] {
        let answer = format!("{wrong} A long text");
        check(&answer, &answer, 0);
        check(&format!("{answer} <tool_call>weather</tool_call> and"), &format!("{answer}and"), 1);
    }
}
