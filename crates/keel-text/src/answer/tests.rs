//! Whole answers and their parts.

use super::*;
use serde_json::{Value, json};

pub(super) fn tools() -> Vec<Value> {
    vec![json!({"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}})]
}

/// The parts of an answer that arrives in pieces of `size` characters. Neighbours of one kind are joined.
pub(super) fn parts(form: &AnswerForm, answer: &str, size: usize) -> Vec<AnswerPart> {
    let mut parser = AnswerParser::new(form.clone());
    let (mut all, chars) = (Vec::new(), answer.chars().collect::<Vec<_>>());
    for piece in chars.chunks(size) {
        parser.push(&piece.iter().collect::<String>(), &mut all);
    }
    parser.finish(&mut all);
    let mut joined: Vec<AnswerPart> = Vec::new();
    for part in all {
        match (joined.last_mut(), part) {
            (Some(AnswerPart::Text(a)), AnswerPart::Text(b))
            | (Some(AnswerPart::Reasoning(a)), AnswerPart::Reasoning(b)) => a.push_str(&b),
            (_, part) => joined.push(part),
        }
    }
    joined
}

pub(super) fn check(form: &AnswerForm, answer: &str, expected: &[AnswerPart]) {
    for size in [1, 2, 3, 7, 1000] {
        assert_eq!(parts(form, answer, size), expected, "{answer:?} in pieces of {size}");
    }
}

pub(super) fn text(text: &str) -> AnswerPart {
    AnswerPart::Text(text.into())
}

pub(super) fn call(arguments: &str) -> AnswerPart {
    AnswerPart::ToolCall { name: "weather".into(), arguments: arguments.into() }
}

#[test]
fn reasoning_is_separated() {
    let form = AnswerForm { reasoning: true, ..AnswerForm::default() };
    let expected = [AnswerPart::Reasoning("Hm.\nYes <b>".into()), text("So: yes. <think>")];
    check(&form, "<think>\nHm.\nYes <b>\n</think>\n\nSo: yes. <think>", &expected);
    let inside =
        AnswerForm { begins_in_reasoning: ReasoningMarkers::begun_at_end("<think>"), ..form.clone() };
    check(&inside, "Hm.\nYes <b>\n</think>\n\nSo: yes. <think>", &expected);
    check(&form, " plain <tool_call>", &[text(" plain <tool_call>")]);
    check(&inside, "never ends", &[AnswerPart::Reasoning("never ends".into())]);
    check(&AnswerForm::default(), "<think>a</think>", &[text("<think>a</think>")]);
}

#[test]
fn calls_come_in_both_notations() {
    let form = AnswerForm { tools: tools(), ..AnswerForm::default() };
    let json = r#"Look: <tool_call>
{"name": "weather", "arguments": {"city": "Bern", "days": 2}}
</tool_call>"#;
    check(&form, json, &[text("Look:"), call(r#"{"city":"Bern","days":2}"#)]);
    let xml = "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n2\n\
               </parameter>\n</function>\n</tool_call>\n<tool_call>{\"name\":\"weather\",\"arguments\":{}}</tool_call>";
    check(&form, xml, &[call(r#"{"city":"12","days":2}"#), call("{}")]);
    let bare = r#"{"name": "weather", "parameters": {"city": "Bern"}}"#;
    check(&form, bare, &[call(r#"{"city":"Bern"}"#)]);
    check(&form, &format!("<|python_tag|>{bare}"), &[call(r#"{"city":"Bern"}"#)]);
    let marked = AnswerForm { marked_calls: true, ..form };
    check(&marked, bare, &[text(bare)]);
    check(&marked, json, &[text("Look:"), call(r#"{"city":"Bern","days":2}"#)]);
}

#[test]
fn a_value_without_quotes_has_a_type_that_the_schema_allows() {
    let properties = json!({
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"type": ["string", "null"]},
        "code": {"enum": ["1", "2"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "open": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Place"}]},
        "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "flag": {"type": "boolean"},
    });
    let tool = json!({"function": {"name": "weather", "parameters": {"properties": properties}}});
    let form = AnswerForm { tools: vec![tool], ..AnswerForm::default() };
    for (key, value, expected) in [
        ("maybe", "12", json!("12")),
        ("maybe", "true", json!("true")),
        ("maybe", "null", json!(null)),
        ("maybe", "\"a\"", json!("\"a\"")),
        ("list", "1.50", json!("1.50")),
        ("list", "null", json!(null)),
        ("code", "1", json!("1")),
        ("either", "12", json!(12)),
        ("either", "[12]", json!("[12]")),
        ("open", "{\"a\":1}", json!({"a": 1})),
        ("count", "12", json!(12)),
        ("unknown", "12", json!(12)),
        // As Python writes them.
        ("flag", "True", json!(true)),
        ("flag", "false", json!(false)),
        ("count", "None", json!(null)),
        ("maybe", "None", json!(null)),
        ("list", "True", json!("True")),
        ("code", "None", json!("None")),
        ("unknown", "False", json!(false)),
    ] {
        let expected = json!({ key: expected }).to_string();
        let tags = format!("<function=weather>\n<parameter={key}>\n{value}\n</parameter>\n</function>");
        let keys = format!("weather\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>");
        for notation in [tags, keys] {
            check(&form, &format!("<tool_call>{notation}</tool_call>"), &[call(&expected)]);
        }
    }
}

/// The answers are written as the models' chat templates write calls, because models answer in that form.
#[test]
fn calls_come_in_the_notations_of_many_houses() {
    let form = AnswerForm { tools: tools(), ..AnswerForm::default() };
    let both = [call(r#"{"city":"Bern","days":2}"#), call("{\"city\":\"Z\u{fc}rich\"}")];
    let (first, second) = (r#"{"city": "Bern", "days": 2}"#, "{\"city\": \"Z\u{fc}rich\"}");
    let named = |arguments: &str| format!(r#"{{"name": "weather", "arguments": {arguments}}}"#);
    let list = format!("[{}, {}]", named(first), named(second));
    for (who, answer) in [
        ("Mistral 7B v0.3, Nemo, Small 3", format!("[TOOL_CALLS]{list}")),
        ("the same with a space", format!("[TOOL_CALLS] {list}")),
        ("Mistral Small 3.2, Ministral 3", format!("[TOOL_CALLS]weather[ARGS]{first}[TOOL_CALLS]weather[ARGS]{second}")),
        ("Devstral", format!("[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{first}[TOOL_CALLS]weather{second}")),
        ("SmolLM3", format!("<tool_call>{}</tool_call>\n<tool_call>{}</tool_call>", named(first), named(second))),
        ("Phi-4-mini", format!("<|tool_call|>{list}<|/tool_call|>")),
        ("Phi-4-mini without its tokens", format!("functools{list}")),
        ("Llama 3.2", format!("{}; {}", named(first), named(second).replace("arguments", "parameters"))),
        ("the same with its marker", format!("<|python_tag|>{};\n{}", named(first), named(second))),
        ("GLM-4", format!("weather\n{first}\nweather\n{second}")),
        (
            "GLM-4.5",
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n\
             <arg_value>2</arg_value>\n</tool_call>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>\
             Z\u{fc}rich</arg_value>\n</tool_call>"
                .to_string(),
        ),
        (
            "OLMo 3",
            "<function_calls>weather(city=\"Bern\", days=2)\nweather(city='Z\\xfcrich')</function_calls>".to_string(),
        ),
    ] {
        println!("{who}");
        check(&form, &answer, &both);
    }
    let spoken = "Let me see.[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {}}]";
    check(&form, spoken, &[text("Let me see."), call("{}")]);
    let spoken = "Let me check.<|python_tag|>{\"name\":\"weather\",\"parameters\":{}}";
    check(&form, spoken, &[text("Let me check."), call("{}")]);
}

#[test]
fn mistral_marks_its_reasoning_otherwise() {
    let form = AnswerForm { reasoning: true, ..AnswerForm::default() };
    check(&form, "[THINK]Hm.[/THINK]Yes.", &[reasoning("Hm."), text("Yes.")]);
}

#[test]
fn reasoning_ends_with_the_marker_of_its_own_pair() {
    for (begin, other, end) in [("<think>", "[/THINK]", "</think>"), ("[THINK]", "</think>", "[/THINK]")] {
        let form = AnswerForm { reasoning: true, ..AnswerForm::default() };
        let inside =
            AnswerForm { begins_in_reasoning: ReasoningMarkers::begun_at_end(begin), ..form.clone() };
        let expected = [reasoning(&format!("It writes {other} then.")), text("Yes.")];
        let answer = format!("It writes {other} then.{end}Yes.");
        check(&form, &format!("{begin}{answer}"), &expected);
        check(&inside, &answer, &expected);
    }
}

#[test]
fn what_is_no_call_is_text() {
    let form = AnswerForm { tools: tools(), ..AnswerForm::default() };
    for answer in [
        "<tool_call>nonsense</tool_call>",
        "<tool_call>{\"name\": \"other\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"weather\"",
        "{\"a\": 1}",
        "a < b and <tool",
        "[TOOL_CALLS]weather",
        "[TOOL_CALLS][{\"name\": \"other\"}]",
        "weather\nis nice",
        "weather",
        "[{\"a\": 1}]",
        "functools[1]",
        "<function_calls>weather(city=home())</function_calls>",
        "<|tool_call|>[]<|/tool_call|>",
        // A call of a tool that was not offered, or without its end, mentions a call.
        r#"<tool_call>{"name": "save", "arguments": {"text": "<tool_call>weather</tool_call>"}}</tool_call>"#,
        r#"<tool_call>[ {"name": "save", "arguments": {"text": "<tool_call>weather</tool_call>"}}]</tool_call>"#,
        r#"<tool_call>{"name": "weather", "arguments": {"city": "see <tool_call>weather</tool_call>"}"#,
        "<tool_call>\n<function=save>\n<parameter=text>\n<tool_call>weather</tool_call>\n</parameter>\n</function>\n\
         </tool_call>",
        "<function=save>\n<parameter=text>\n<tool_call>weather</tool_call>\n</parameter>\n</function>",
    ] {
        check(&form, answer, &[text(answer)]);
    }
    check(&AnswerForm::default(), "<tool_call>x</tool_call>", &[text("<tool_call>x</tool_call>")]);
}

fn reasoning(text: &str) -> AnswerPart {
    AnswerPart::Reasoning(text.into())
}

#[test]
fn a_name_between_markers_is_a_call_without_arguments() {
    let form = AnswerForm { tools: tools(), ..AnswerForm::default() };
    check(&form, "Look: <tool_call>weather\n</tool_call> b", &[text("Look:"), call("{}"), text("b")]);
    check(&form, "<tool_call>weather</tool_call><tool_call>weather</tool_call>", &[call("{}"), call("{}")]);
    for answer in
        ["<tool_call>weathers\n</tool_call>", "weather\n", "<tool_call></tool_call>", "[TOOL_CALLS]weather"]
    {
        check(&form, answer, &[text(answer)]);
    }
}

#[test]
fn functions_in_one_block_are_calls_of_their_own() {
    let form = AnswerForm { tools: tools(), ..AnswerForm::default() };
    let function =
        |days: u32| format!("<function=weather>\n<parameter=days>\n{days}\n</parameter>\n</function>");
    let both = [call("{\"days\":1}"), call("{\"days\":2}")];
    check(&form, &format!("<tool_call>\n{}\n{}\n</tool_call>", function(1), function(2)), &both);
    let open = "<tool_call><function=weather>\n<parameter=days>\n1\n</parameter>\n</tool_call>";
    check(&form, open, &both[..1]);
    for wrong in [
        format!("<tool_call>{} and more</tool_call>", function(1)),
        format!("<tool_call>{}{{}}</tool_call>", function(1)),
        "<tool_call><function=weather>junk<parameter=days>1</parameter></function></tool_call>".into(),
        "<tool_call><function=weather><parameter=days>1</parameter>junk</function></tool_call>".into(),
        format!("<tool_call>{}<function=other></function></tool_call>", function(1)),
    ] {
        check(&form, &wrong, &[text(&wrong)]);
    }
}

/// A mention of a marker, or one that stands there twice, does not hide the call after it.
#[test]
fn text_around_malformed_calls_is_kept() {
    let form = AnswerForm { tools: tools(), ..AnswerForm::default() };
    let json = "{\"name\": \"weather\", \"arguments\": {}}";
    let marked = format!("<tool_call>{json}</tool_call>");
    for answer in [
        "a \n\n<tool_call>no</tool_call>\n b",
        "a [TOOL_CALLS] b",
        "a\n<tool_call>",
        "a <tool_call> b <|tool_call|> c",
    ] {
        check(&form, answer, &[text(answer)]);
    }
    let mention = "Use <tool_call> tags:";
    check(&form, &format!("{mention}\n{marked}\nb"), &[text(mention), call("{}"), text("b")]);
    check(&form, &format!("a  <tool_call>{marked}"), &[text("a  <tool_call>"), call("{}")]);
    check(&form, &format!("{mention} <tool_call>{json}"), &[text(mention), call("{}")]);
    check(
        &form,
        &format!("Use [TOOL_CALLS] or {marked}{marked} b"),
        &[text("Use [TOOL_CALLS] or"), call("{}"), call("{}"), text("b")],
    );
    check(&form, "[TOOL_CALLS] or\n[TOOL_CALLS]weather{}", &[text("[TOOL_CALLS] or"), call("{}")]);
    check(
        &form,
        &format!("{marked}\n<tool_call>no</tool_call>"),
        &[call("{}"), text("<tool_call>no</tool_call>")],
    );
}

#[test]
fn a_marker_in_a_string_of_json_ends_no_call() {
    let form = AnswerForm { tools: tools(), ..AnswerForm::default() };
    let city = |city: &str| format!("{{\"name\": \"weather\", \"arguments\": {{\"city\": \"{city}\"}}}}");
    let inside = city("a\\\"</tool_call>");
    let expected = call("{\"city\":\"a\\\"</tool_call>\"}");
    check(&form, &format!("<tool_call>{inside}</tool_call> b"), &[expected.clone(), text("b")]);
    check(&form, &inside, &[expected]);
    // A quote is missing: the marker counts, at the latest when the answer ends.
    for open in ["<tool_call>{\"name</tool_call> b", "<tool_call>{\"name</tool_call>\n b \"c\""] {
        check(&form, open, &[text(open)]);
        check(&form, &format!("{open}<tool_call>weather</tool_call>"), &[text(open), call("{}")]);
    }
}

/// The line end says that the string is none. Then each of the calls counts that it hid.
#[test]
fn many_calls_in_a_string_that_is_none_take_little_time() {
    let form = AnswerForm { tools: tools(), ..AnswerForm::default() };
    for begin in ["<tool_call>{\"a</tool_call>", "{\"a ", "{\"id\": \"a "] {
        let count = 10_000;
        let answer = format!("{begin}{}\n", "<tool_call>weather</tool_call>".repeat(count));
        let (parser, parts) = parser_after(&form, &answer, answer.len());
        let calls = parts.iter().filter(|part| matches!(part, AnswerPart::ToolCall { .. })).count();
        assert_eq!(calls, count);
        assert!(work(&parser) < 4 * answer.len(), "{} bytes were read", work(&parser));
    }
}

#[test]
fn marked_calls_may_follow_calls_without_markers() {
    let form = AnswerForm { tools: tools(), ..AnswerForm::default() };
    let (bare, value) = (
        r#"{"name": "weather", "parameters": {"city": "<tool_call>"}}"#,
        r#"{"a": "<tool_call>weather</tool_call>"}"#,
    );
    let marked = "<tool_call>weather</tool_call>";
    let calls = [call("{\"city\":\"<tool_call>\"}"), call("{}")];
    check(&form, &format!("{bare}\n{marked}"), &calls);
    check(&form, &format!("weather\n{{}}\n{marked}"), &[call("{}"), call("{}")]);
    check(&form, value, &[text(value)]);
    check(&form, &format!("{value} {marked}"), &[text(value), call("{}")]);
    check(&form, &format!("{{\"a {marked}"), &[text("{\"a"), call("{}")]);
}

#[test]
fn calls_without_markers_may_follow_reasoning() {
    let form = AnswerForm { tools: tools(), reasoning: true, ..AnswerForm::default() };
    let bare = r#"{"name": "weather", "parameters": {}}"#;
    for notation in
        [bare.to_string(), format!("<|python_tag|>{bare}"), "weather\n{}".into(), format!("[{bare}]")]
    {
        let expected = [reasoning("Hm."), call("{}")];
        check(&form, &format!("<think>\nHm.\n</think>\n\n{notation}"), &expected);
        let inside =
            AnswerForm { begins_in_reasoning: ReasoningMarkers::begun_at_end("<think>"), ..form.clone() };
        check(&inside, &format!("Hm.</think>{notation}"), &expected);
        let marked = AnswerForm { marked_calls: true, ..form.clone() };
        // Llama's marker is a marker.
        let after = if notation.starts_with('<') { call("{}") } else { text(&notation) };
        check(&marked, &format!("<think>Hm.</think>\n{notation}"), &[reasoning("Hm."), after]);
    }
    let again = "<think>a</think> <think>b</think>";
    check(&form, again, &[reasoning("a"), text("<think>b</think>")]);
    check(&form, &format!("<think>a</think>b {bare}"), &[reasoning("a"), text(&format!("b {bare}"))]);
}

/// The parser after an answer that arrives in pieces of `size` bytes, and its parts.
pub(super) fn parser_after(form: &AnswerForm, answer: &str, size: usize) -> (AnswerParser, Vec<AnswerPart>) {
    let (mut parser, mut parts) = (AnswerParser::new(form.clone()), Vec::new());
    for piece in answer.as_bytes().chunks(size) {
        parser.push(std::str::from_utf8(piece).expect("ASCII"), &mut parts);
    }
    (parser, parts)
}

/// Number of bytes that were read, also if more than once.
pub(super) fn work(parser: &AnswerParser) -> usize {
    parser.work + parser.reread
}

#[test]
fn a_call_is_searched_once_however_it_is_cut() {
    let form = AnswerForm { tools: tools(), ..AnswerForm::default() };
    let long = "x".repeat(100_000);
    let tags = "<tool_call>\n<function=weather>\n<parameter=city>\n";
    let json = "<tool_call>{\"name\": \"weather\", \"a\": \"";
    for begin in [json, &json[11..], "<tool_call>weather(", tags, &tags[12..]] {
        let (parser, parts) = parser_after(&form, &format!("{begin}{long}"), 1);
        assert!(parts.is_empty());
        assert!(work(&parser) < 2 * long.len(), "{} bytes were read", work(&parser));
    }
    let (parser, _) = parser_after(&form, &format!("{{{long}"), 1);
    assert!(work(&parser) < 2 * long.len(), "{} bytes were read", work(&parser));
    assert!(parser.held.is_empty(), "{} bytes", parser.held.len());
}

/// Text that cannot become a call is not held back until the answer ends.
#[test]
fn values_and_sentences_are_streamed_with_tools() {
    let form = AnswerForm { tools: tools(), ..AnswerForm::default() };
    for (answer, shown) in [
        ("{\"a\": 1, ", "{\"a\": 1,"),
        ("[{\"a\": \"b\"", "[{\"a\": \"b\""),
        ("{\"name\": \"Anna\",", "{\"name\": \"Anna\","),
        ("weather\nis nice", "weather\nis nice"),
        ("{\"id\": \"a\", \"items\"", "{\"id\": \"a\", \"items\""),
        // A mention of a marker.
        ("Use <function=NAME> so", "Use <function=NAME> so"),
        ("Use <function=weather> so", "Use <function=weather> so"),
        (
            "Use <tool_call> and [TOOL_CALLS] or <|python_tag|> so,",
            "Use <tool_call> and [TOOL_CALLS] or <|python_tag|> so,",
        ),
        ("a <tool_call>[sic] b", "a <tool_call>[sic] b"),
        ("a <tool_call>weather (see below) b", "a <tool_call>weather (see below) b"),
        ("a <tool_call>weather [1] b", "a <tool_call>weather [1] b"),
        ("a <tool_call>weather <b> b", "a <tool_call>weather <b> b"),
        ("a <tool_call>{\"name\": \"save\", \"b\"", "a <tool_call>{\"name\": \"save\", \"b\""),
        ("a <tool_call>\n{\"name\": \"wea", "a"),
        // A marker in a string that may end is held back, for the string may not end.
        ("{\"a\": \"b <tool_call> c", "{\"a\": \"b"),
        ("{\"a\": \"b <tool_call> c\"", "{\"a\": \"b <tool_call> c\""),
        ("{\"name\": \"weather\", \"arguments\": {", ""),
        ("weather\n{\"city\": ", ""),
    ] {
        for size in [1, 3, 1000] {
            let (_, parts) = parser_after(&form, answer, size);
            let texts = parts.iter().map(|part| match part {
                AnswerPart::Text(text) => text.as_str(),
                part => panic!("{part:?}"),
            });
            assert_eq!(texts.collect::<String>(), shown, "{answer} in pieces of {size}");
        }
    }
}

#[test]
fn only_little_white_space_is_held() {
    let plain = AnswerForm { tools: tools(), reasoning: true, ..AnswerForm::default() };
    let inside =
        AnswerForm { begins_in_reasoning: ReasoningMarkers::begun_at_end("<think>"), ..plain.clone() };
    let gap = "\n".repeat(5 * GAP_BYTES_MAX);
    let kept = "\n".repeat(4 * GAP_BYTES_MAX);
    for (form, before) in [(&plain, ""), (&plain, "a"), (&inside, "a"), (&inside, "a</think>")] {
        for size in [1, 100, 10_000] {
            let (parser, _) = parser_after(form, &format!("{before}{gap}"), size);
            assert!(parser.held.len() <= GAP_BYTES_MAX, "{} bytes after {before:?}", parser.held.len());
        }
    }
    let form = &plain;
    check(form, &format!("a{gap}<tool_call>weather</tool_call>"), &[text(&format!("a{kept}")), call("{}")]);
    check(
        form,
        &format!("a{gap}<tool_call>no</tool_call>"),
        &[text(&format!("a{gap}<tool_call>no</tool_call>"))],
    );
    check(&inside, &format!("a{gap}</think>b"), &[reasoning(&format!("a{kept}")), text("b")]);
    check(&inside, &format!("a</think>{gap}b"), &[reasoning("a"), text("b")]);
    check(form, &format!("{gap}<think>"), &[text(&format!("{gap}<think>"))]);
}
