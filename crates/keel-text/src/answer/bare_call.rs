//! Whether a text may become a call.

use serde_json::Value;

use super::markers::{
    END_BEGIN, FUNCTION, FUNCTOOLS, KEY, MISTRAL_ARGUMENTS, MISTRAL_ID, Markers, PARAMETER,
};
use super::pythonic::is_of_name;
use super::tool_call::names;

/// Bytes at the begin of a text that decide whether it may be a call. More of them are not read again and again.
const DECIDING_BYTES_MAX: usize = 4096;

/// The part of the text that decides.
fn head(text: &str) -> &str {
    let mut end = text.len().min(DECIDING_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Whether the text after the begin marker of `markers` may be, or become, a call. Otherwise the text only mentions the
/// marker. A text that may not become a call does not become one if it grows.
pub(super) fn may_be_marked_call(markers: Markers, text: &str, tools: &[Value]) -> bool {
    let text = head(text);
    if markers.is_tags() {
        return may_be_function(text, tools);
    }
    let text = text.trim_start();
    if let Some(function) = text.strip_prefix(FUNCTION.begin) {
        return may_be_function(function, tools);
    }
    let first = after(text, "[").unwrap_or(text);
    let is_named = |name: &str| match after(first, name) {
        Some(rest) => {
            ["{", KEY, MISTRAL_ARGUMENTS, MISTRAL_ID].iter().any(|word| fits(rest, word))
                || after(rest, "(").is_some_and(may_be_arguments)
        }
        None => name.starts_with(first),
    };
    [FUNCTION.begin, FUNCTOOLS].iter().any(|word| fits(text, word))
        || names(tools).any(is_named)
        || may_be_object(text, tools, true)
}

/// The same for the text after the begin of a function in tags. A function that was not offered counts, too, if a
/// parameter follows on a new line. So a marker inside its parameters begins no call.
fn may_be_function(text: &str, tools: &[Value]) -> bool {
    let rest = text.trim_start_matches(is_of_name);
    let may_be_unknown = match rest.strip_prefix(">\n") {
        Some(body) => fits(body, PARAMETER),
        None => ">\n".starts_with(rest),
    };
    may_be_unknown || begins_function(text, tools)
}

/// The same for the functions that were offered. A parameter or an end must follow the name.
pub(super) fn begins_function(text: &str, tools: &[Value]) -> bool {
    let is_named = |name: &str| match text.strip_prefix(name).map(|rest| (rest, after(rest, ">"))) {
        Some((_, Some(body))) => fits(body, PARAMETER) || fits(body, END_BEGIN),
        Some((rest, None)) => rest.is_empty(),
        None => name.starts_with(text),
    };
    names(tools).any(is_named)
}

/// The same for the text after an opening bracket, in Python's notation. A key must follow, or the end.
fn may_be_arguments(text: &str) -> bool {
    let rest = text.trim_start_matches(is_of_name);
    let next = rest.trim_start();
    next.is_empty() || text.starts_with(')') || next.starts_with('=') && rest.len() < text.len()
}

/// Whether a text at the begin of an answer may be, or become, a call without markers. Otherwise it is a JSON value or
/// a sentence. A text that may not become a call does not become one if it grows.
pub(super) fn may_be_call(text: &str, tools: &[Value]) -> bool {
    let text = head(text).trim_start();
    // GLM-4 writes the arguments below the name.
    let is_named = |name: &str| {
        let below = text.strip_prefix(name).and_then(|rest| rest.strip_prefix('\n')).map(str::trim_start);
        below.is_some_and(|rest| rest.is_empty() || rest.starts_with('{'))
    };
    names(tools).any(is_named) || may_be_object(text, tools, false)
}

/// The same for a JSON object, or a list of objects. Its first key decides, and for some keys the value. After an id or
/// a type the next key decides. After a begin marker any key may come first.
fn may_be_object(text: &str, tools: &[Value], is_marked: bool) -> bool {
    let list = text.strip_prefix(FUNCTOOLS.trim_end_matches('[')).unwrap_or(text);
    let object = after(list, "[").unwrap_or(list);
    let Some(mut members) = after(object, "{") else { return object.is_empty() };
    let keys = ["name", "type", "parameters", "arguments", "id"];
    loop {
        let Some(key) = members.strip_prefix('"') else { return members.is_empty() };
        let Some((key, rest)) = key.split_once('"') else {
            return is_marked || keys.iter().any(|name| name.starts_with(key));
        };
        let rest = rest.trim_start();
        let Some(value) = after(rest, ":") else {
            return rest.is_empty() && (is_marked || keys.contains(&key));
        };
        let is_string = match key {
            "name" => return names(tools).any(|name| fits(value, &Value::from(name).to_string())),
            _ if is_marked => return true,
            "type" => fits(value, "\"function") || fits(value, "\"tool"),
            "id" => fits(value, "\""),
            key => return keys.contains(&key),
        };
        // A string has an end, and the next key comes after it.
        let string = value.strip_prefix('"').and_then(|string| string.split_once('"'));
        let Some((_, rest)) = string.filter(|_| is_string) else { return is_string };
        let rest = rest.trim_start();
        let Some(next) = after(rest, ",") else { return rest.is_empty() };
        members = next;
    }
}

/// Whether `text` begins with `word`, or is a part of it that may grow.
fn fits(text: &str, word: &str) -> bool {
    text.starts_with(word) || word.starts_with(text)
}

/// The text after `word`, without the white space between.
pub(super) fn after<'a>(text: &'a str, word: &str) -> Option<&'a str> {
    text.strip_prefix(word).map(str::trim_start)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::answer::markers::TOOL_CALL;

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
            (FUNCTION, "weather></tool_call>"),
            // It was not offered.
            (FUNCTION, "save>\n<parameter=text>"),
        ] {
            for end in 0..=text.len() {
                assert!(may_be_marked_call(markers, &text[..end], &tools), "{}", &text[..end]);
            }
        }
        for (markers, text) in [
            (TOOL_CALL, " tags"),
            (TOOL_CALL, "[sic]"),
            (TOOL_CALL, "weather is"),
            (TOOL_CALL, "weather (see below"),
            (TOOL_CALL, "weather (="),
            (TOOL_CALL, "weather [1"),
            (TOOL_CALL, "weather <b"),
            (TOOL_CALL, "weathers"),
            (TOOL_CALL, "{name"),
            (TOOL_CALL, "{}"),
            (TOOL_CALL, "{\"name\": \"weathers"),
            (TOOL_CALL, "<function=weather>Use"),
            (TOOL_CALL, "</"),
            (FUNCTION, "NAME> "),
            (FUNCTION, "NAME>\nso"),
            (FUNCTION, "NAME <"),
            (FUNCTION, "weather> or"),
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
            "{ \"name\" : \"weather\", \"x\": 1}",
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
}
