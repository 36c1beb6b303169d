//! What a text begins with.

use serde_json::{Value, json};

use super::markers::{FUNCTION, Markers, TOOL_CALL};
use super::reader::{End, Reading, read};

fn may_be_marked_call(markers: Markers, text: &str, tools: &[Value]) -> bool {
    let text = format!("{}{text}", markers.begin);
    !matches!(read(&text, Some(markers), tools, End::More), Reading::Text(_))
}

fn may_be_call(text: &str, tools: &[Value]) -> bool {
    !matches!(read(text, None, tools, End::More), Reading::Text(_))
}

/// A marker is mentioned if no call can follow it. What decides stays decided if the text grows.
#[test]
fn text_after_a_marker_is_a_call_or_a_mention() {
    let tools = [json!({"function": {"name": "weather"}})];
    for (markers, text) in [
        (TOOL_CALL, "\n{\"id\": 1, \"name\": \"weather\""),
        (TOOL_CALL, "{\"name\": \"weather\", "),
        (TOOL_CALL, "[{\"arguments\": {"),
        (TOOL_CALL, "[weather(city="),
        (TOOL_CALL, "weather\n<arg_key>"),
        (TOOL_CALL, "weather [ARGS]{"),
        (TOOL_CALL, "weather \n{\"city\""),
        (TOOL_CALL, "weather ( )"),
        (TOOL_CALL, "weather( city = 1"),
        (TOOL_CALL, "weather[CALL_ID]a"),
        (TOOL_CALL, "functools[{"),
        (TOOL_CALL, "\n<function=weather>\n<parameter=city>"),
        (FUNCTION, "weather>\n</function>"),
        // It was not offered.
        (FUNCTION, "save>\n<parameter=text>"),
        (TOOL_CALL, " save(text="),
        (TOOL_CALL, "save(1"),
        (TOOL_CALL, "save\n<arg_key>text"),
        (TOOL_CALL, "save[CALL_ID]a[ARGS]{"),
    ] {
        for end in 0..=text.len() {
            assert!(may_be_marked_call(markers, &text[..end], &tools), "{}", &text[..end]);
        }
    }
    for (markers, text) in [
        (TOOL_CALL, " tags,"),
        (TOOL_CALL, "[sic]"),
        (TOOL_CALL, "weather is"),
        (TOOL_CALL, "weather (see below"),
        (TOOL_CALL, "weather (="),
        (TOOL_CALL, "weather [1"),
        (TOOL_CALL, "weather <b"),
        (TOOL_CALL, "weathers,"),
        (TOOL_CALL, "{name"),
        (TOOL_CALL, "{}"),
        (TOOL_CALL, "{\"name\": \"weathers"),
        (TOOL_CALL, "<function=weather>Use"),
        (TOOL_CALL, "</"),
        (FUNCTION, "NAME> "),
        (FUNCTION, "NAME>\nso"),
        (FUNCTION, "NAME <"),
        (FUNCTION, "weather> or"),
        (FUNCTION, "weather></tool"),
        (FUNCTION, "weather "),
    ] {
        for more in ["", "\"", ": {}", "\", \"name\": \"weather\"}", "\n{", "</tool_call>"] {
            assert!(!may_be_marked_call(markers, &format!("{text}{more}"), &tools), "{text}{more}");
        }
    }
}

#[test]
fn the_begin_decides_and_what_follows_changes_nothing() {
    let tools = [json!({"function": {"name": "weather"}}), json!({"name": "say \"it\""})];
    for text in [
        "weather\n",
        "weather\n {\"a\"",
        "{ \"name\" : \"weather\", \"x\": 1",
        "[{\"type\": \"function\", \"id\"",
        "{\"id\": \"call_1\"",
        "{\"id\": \"call_1\" , \"type\": \"function\", \"name\": \"weather\"",
        "{\"type\": \"tool_call\", \"parameters\": {",
        "functools[ {\"name\": \"wea",
        "{\"name\": \"say \\\"it\\\"\"",
        "{\"parameters\": {\"a\": 1}",
    ] {
        let mut begins = (1..=text.len()).filter(|&end| text[..end].starts_with(['{', '[']));
        assert!(begins.all(|end| may_be_call(&text[..end], &tools)), "{text}");
        assert!(may_be_call(text, &tools), "{text}");
    }
    for text in [
        "weather\nis",
        "{}",
        "{\"b",
        "{\"names",
        "{\"name\": \"weathers",
        "{\"name\": 1",
        "{\"id\": 1",
        "{\"id\": \"a\"}",
        "{\"id\": \"a\", \"items",
        "{\"id\": \"a\", \"name\": \"weathers",
        "{\"function\"",
        "{\"type\": \"function\", \"function\"",
        "{\"type\": \"object",
        "[{\"b",
        "functools[1",
        "{ x",
        "{\"name\" ,",
    ] {
        for more in ["", "\"", ": {}", "\", \"name\": \"weather\"}", "\n{"] {
            assert!(!may_be_call(&format!("{text}{more}"), &tools), "{text}{more}");
        }
    }
}
