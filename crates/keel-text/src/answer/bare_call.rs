//! Calls at the begin of an answer that have no markers.

use serde_json::Value;

use super::markers::FUNCTOOLS;
use super::tool_call::names;

/// Bytes at the begin of an answer that decide whether it may be a call. More of them are not read again and again.
const DECIDING_BYTES_MAX: usize = 4096;

/// Whether a text at the begin of an answer may be, or become, a call without markers. Otherwise it is a JSON value or
/// a sentence. A text that may not become a call does not become one if it grows.
pub(super) fn may_be_call(text: &str, tools: &[Value]) -> bool {
    let mut end = text.len().min(DECIDING_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let text = text[..end].trim_start();
    // GLM-4 writes the arguments below the name.
    let is_named = |name: &str| {
        let below = text.strip_prefix(name).and_then(|rest| rest.strip_prefix('\n')).map(str::trim_start);
        below.is_some_and(|rest| rest.is_empty() || rest.starts_with('{'))
    };
    names(tools).any(is_named) || may_be_object(text, tools)
}

/// The same for a JSON object, or a list of objects. Its first key decides, and for some keys the value.
fn may_be_object(text: &str, tools: &[Value]) -> bool {
    let list = text.strip_prefix(FUNCTOOLS.trim_end_matches('[')).unwrap_or(text);
    let object = after(list, "[").unwrap_or(list);
    let Some(members) = after(object, "{") else { return object.is_empty() };
    let Some(key) = members.strip_prefix('"') else { return members.is_empty() };
    let keys = ["name", "type", "function", "parameters", "arguments", "id"];
    let Some((key, rest)) = key.split_once('"') else { return keys.iter().any(|name| name.starts_with(key)) };
    let rest = rest.trim_start();
    let Some(value) = after(rest, ":") else { return rest.is_empty() && keys.contains(&key) };
    match key {
        "name" => names(tools).any(|name| fits(value, &Value::from(name).to_string())),
        "type" => fits(value, "\"function") || fits(value, "\"tool"),
        "id" => fits(value, "\""),
        key => keys.contains(&key),
    }
}

/// Whether `text` begins with `word`, or is a part of it that may grow.
pub(super) fn fits(text: &str, word: &str) -> bool {
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

    #[test]
    fn the_begin_decides_and_what_follows_changes_nothing() {
        let tools = [json!({"function": {"name": "weather"}}), json!({"name": "say \"it\""})];
        for text in [
            "weather\n",
            "weather\n {\"a\"",
            "{ \"name\" : \"weather\", \"x\": 1}",
            "[{\"type\": \"function\", \"id\"",
            "{\"id\": \"call_1\"",
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
