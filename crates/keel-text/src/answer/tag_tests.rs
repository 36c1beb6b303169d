//! Calls in tags: what models leave out, and what values contain.

use serde_json::json;

use super::tests::{call, check, text, tools, work};
use super::*;

fn form() -> AnswerForm {
    AnswerForm { tools: tools(), ..AnswerForm::default() }
}

/// The same as `check`, with two pieces that are split at each place.
fn check_each_split(answer: &str, expected: &[AnswerPart]) {
    check(&form(), answer, expected);
    for (at, _) in answer.char_indices() {
        let mut parser = AnswerParser::new(form());
        let mut parts = Vec::new();
        parser.push(&answer[..at], &mut parts);
        parser.push(&answer[at..], &mut parts);
        parser.finish(&mut parts);
        let texts = |parts: &[AnswerPart]| -> String {
            parts
                .iter()
                .map(|part| if let AnswerPart::Text(text) = part { text.as_str() } else { "|" })
                .collect()
        };
        let calls = |parts: &[AnswerPart]| -> Vec<AnswerPart> {
            parts.iter().filter(|part| matches!(part, AnswerPart::ToolCall { .. })).cloned().collect()
        };
        assert_eq!((texts(&parts), calls(&parts)), (texts(expected), calls(expected)), "{answer:?} at {at}");
    }
}

#[test]
fn a_value_ends_at_the_next_parameter_if_its_end_is_missing() {
    let both = call(r#"{"city":"Bern","days":2}"#);
    let begin = "<function=weather>\n<parameter=city>\nBern\n<parameter=days>\n2\n";
    for function in [format!("{begin}</parameter>\n</function>"), format!("{begin}</function>")] {
        let marked = format!("<tool_call>\n{function}\n</tool_call>");
        for answer in [&marked, &function] {
            check_each_split(answer, std::slice::from_ref(&both));
            check_each_split(&format!("{answer}\nb"), &[both.clone(), text("b")]);
            check_each_split(&format!("{answer}\n{answer}"), &[both.clone(), both.clone()]);
        }
    }
    check(&form(), &format!("<tool_call>{begin}</tool_call>"), &[both]);
    // A tag that is no parameter of the tool, or that stands in a line, belongs to the value.
    for (value, end) in
        [("Bern\n<parameter=zip>\n3", "\n"), ("a <parameter=days>", ""), ("<parameter=days", "\n")]
    {
        let function = format!(
            "<function=weather>\n<parameter=city>\n{value}{end}</parameter>\n</function>\n</tool_call>"
        );
        check_each_split(&format!("<tool_call>{function}"), &[call(&json!({ "city": value }).to_string())]);
    }
}

#[test]
fn a_function_needs_no_marker_around_it() {
    let function = "<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>";
    let bern = call(r#"{"city":"Bern"}"#);
    let expected = [text("I'll look."), bern.clone()];
    for end in ["", "\n", "</tool_call>", "\n</tool_call>", " \n</tool_call>\n"] {
        check_each_split(&format!("I'll look.\n\n{function}{end}"), &expected);
    }
    let two = format!("{function}\n{function}\n</tool_call> b");
    check_each_split(&two, &[bern.clone(), bern.clone(), text("b")]);
    check_each_split(&format!("{function}</tool"), &[bern.clone(), text("</tool")]);
    check_each_split(
        &format!("Use <function=NAME>:\n<tool_call>{function}</tool_call>"),
        &[text("Use <function=NAME>:"), bern],
    );
    for same in [
        function.replace("weather", "other"),
        format!("{}\n</tool_call>", function.replace("weather", "other")),
        "a <function=NAME> b".into(),
        "</tool_call>".into(),
    ] {
        check_each_split(&same, &[text(&same)]);
    }
    let none = AnswerForm::default();
    check(&none, function, &[text(function)]);
    let gap = " ".repeat(2 * GAP_BYTES_MAX);
    check(
        &form(),
        &format!("{function}{gap}</tool_call>"),
        &[call(r#"{"city":"Bern"}"#), text("</tool_call>")],
    );
}

#[test]
fn a_value_may_contain_end_markers() {
    for closer in ["</parameter>", "</function>", "</tool_call>", "<parameter=a>"] {
        for value in
            [format!("a {closer} b"), format!("a\n{closer}\nb"), format!("{closer}b"), format!("a{closer}")]
        {
            let function = format!(
                "<function=weather>\n<parameter=city>\n{value}\n</parameter>\n<parameter=days>\n2\n</parameter>\n\
                 </function>"
            );
            let expected = [call(&json!({"city": value, "days": 2}).to_string()), text("c")];
            check_each_split(&format!("{function} c"), &expected);
            check_each_split(&format!("<tool_call>\n{function}\n</tool_call> c"), &expected);
        }
    }
    // The answer ends after the value: its end counts.
    let answer = "<tool_call><function=weather>\n<parameter=city>\na </tool_call> b\n</parameter>\n";
    check_each_split(answer, &[call(r#"{"city":"a </tool_call> b"}"#)]);
}

/// At the end of an answer the last end marker of a value ends it, and a value without an end is no argument.
#[test]
fn a_value_is_not_cut_at_a_marker_that_it_contains() {
    let begin = "<tool_call>\n<function=weather>\n<parameter=city>\n";
    let end = "\n</function>\n</tool_call>";
    let value = "see </tool_call> for";
    let expected = call(&json!({ "city": value }).to_string());
    check_each_split(&format!("{begin}{value}{end}"), std::slice::from_ref(&expected));
    check_each_split(
        &format!("{begin}{value}{end}\n{begin}{value}{end} b"),
        &[expected.clone(), expected, text("b")],
    );
    let value = "a </tool_call>\n<tool_call> b\u{a0}</parameter>\u{a0}</function>";
    let expected = call(&json!({ "city": value }).to_string());
    check_each_split(&format!("{begin}{value}\n</parameter>{end}"), &[expected]);
    for same in [format!("{begin}a </tool_call> b"), format!("{begin}a"), format!("{begin}a\n</function> b")]
    {
        check_each_split(&same, &[text(&same)]);
    }
    check_each_split(&format!("{begin}a\n</tool_call>"), &[call(r#"{"city":"a"}"#)]);
    // Without the first marker.
    let function = format!("{}a{end}", &begin[12..]);
    let city = call(r#"{"city":"a"}"#);
    check_each_split(&format!("{function}\n<tool_call>\n{function}"), &[city.clone(), city.clone()]);
    check_each_split(&format!("{function} b"), &[city, text("b")]);
}

/// Each of these calls hides its end from the search, and the search for it reaches the end of the answer.
#[test]
fn many_parameters_without_an_end_take_little_time() {
    for (end, calls_each) in [("</function></tool_call>x", 1), ("</tool_call>x", 0)] {
        let one = format!("<tool_call><function=weather><parameter=city>{end}");
        let count = CALL_BYTES_MAX / one.len();
        let (mut parser, mut parts) = (AnswerParser::new(form()), Vec::new());
        parser.push(&one.repeat(count), &mut parts);
        assert!(parts.is_empty());
        parser.finish(&mut parts);
        let calls = parts.iter().filter(|part| matches!(part, AnswerPart::ToolCall { .. })).count();
        assert_eq!(calls, count * calls_each);
        assert!(work(&parser) < 4 * one.len() * count, "{} bytes were read", work(&parser));
    }
}

#[test]
fn a_key_may_lack_the_begin_of_its_value() {
    let answer = "<tool_call>weather<arg_key>city</arg_key>Bern</arg_value><arg_key>days</arg_key><arg_value>2\
                  </arg_value></tool_call>";
    check_each_split(answer, &[call(r#"{"city":"Bern","days":2}"#)]);
    for wrong in [
        "weather<arg_key>city</arg_key><arg_value>Bern<arg_key>days</arg_key><arg_value>2</arg_value>",
        "weather<arg_key>city</arg_key><arg_value>Bern</arg_value> and <arg_key>days</arg_key>2</arg_value>",
        "weather<arg_key>city</arg_key><arg_value>Bern</arg_value> more",
        "weather<arg_key>city</arg_key>",
    ] {
        let answer = format!("<tool_call>{wrong}</tool_call>");
        check(&form(), &answer, &[text(&answer)]);
    }
}
