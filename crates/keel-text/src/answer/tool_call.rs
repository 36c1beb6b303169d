//! The notations in which models call tools.
//!
//! | who | notation |
//! |---|---|
//! | Hermes, Qwen, Llama, SmolLM3 | a JSON object with `name` and `arguments` (or `parameters`), one after the other |
//! | Phi-4-mini, Mistral up to 2024 | a JSON list of such objects |
//! | Mistral from 2025 on | `[TOOL_CALLS]NAME[ARGS]{...}`, one after the other |
//! | Qwen3-Coder | `<function=NAME> <parameter=KEY> VALUE </parameter> ... </function>` |
//! | GLM-4 | `NAME`, a line end, a JSON object |
//! | GLM from 4.5 on | `NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ...`, or `NAME` without arguments |
//! | OLMo 3 | `NAME(KEY=VALUE, ...)`, one after the other |

use serde_json::{Deserializer, Map, Value};

use super::markers::{
    FUNCTION, FUNCTOOLS, KEY, KEY_END, MISTRAL, MISTRAL_ARGUMENTS, MISTRAL_ID, PYTHON_TAG, VALUE, VALUE_END,
};
use super::schema::typed;
use super::{pythonic, tags};

/// Name and arguments. The arguments are a JSON object as text.
pub(super) type Call = (String, String);

/// A call with its arguments as values.
pub(super) struct ParsedCall {
    pub name: String,
    pub arguments: Map<String, Value>,
}

type Parsed = Option<Vec<ParsedCall>>;

/// Parses a text that consists of calls of `tools`. Returns `None` if any part of it is not such a call.
pub(super) fn parse_calls(text: &str, tools: &[Value]) -> Option<Vec<Call>> {
    parse(text, tools, false)
}

/// As [`parse_calls`], for a text between a begin and an end marker. There a tool's name alone is a call, and the last
/// value of a call in tags may lack its end.
pub(super) fn parse_between_markers(text: &str, tools: &[Value]) -> Option<Vec<Call>> {
    let name = text.trim();
    let alone = || find(tools, name).map(|_| vec![(name.to_string(), "{}".to_string())]);
    parse(text, tools, true).or_else(alone)
}

/// `is_closed`: an end marker follows the text.
fn parse(text: &str, tools: &[Value], is_closed: bool) -> Option<Vec<Call>> {
    let text = text.trim();
    let text = text.strip_prefix(PYTHON_TAG).unwrap_or(text).trim();
    let calls = if let Some(rest) = text.strip_prefix(MISTRAL) {
        parse_mistral(rest)?
    } else if text.starts_with(FUNCTOOLS) {
        whole(json_calls(&text[FUNCTOOLS.len() - 1..]))?
    } else if text.starts_with(['{', '[']) {
        whole(json_calls(text)).or_else(|| pythonic::parse(text))?
    } else if text.starts_with(FUNCTION.begin) {
        parse_tags(text, tools, is_closed)?
    } else if text.contains(KEY) {
        vec![parse_keys(text, tools)?]
    } else {
        whole(named_calls(text, tools)).or_else(|| pythonic::parse(text))?
    };
    known(calls, tools)
}

/// The calls as texts, if there are any and all call one of the tools.
fn known(calls: Vec<ParsedCall>, tools: &[Value]) -> Option<Vec<Call>> {
    let known = calls.iter().all(|call| find(tools, &call.name).is_some());
    let as_text = |call: ParsedCall| (call.name, Value::Object(call.arguments).to_string());
    (known && !calls.is_empty()).then(|| calls.into_iter().map(as_text).collect())
}

/// The calls of `tools` that a text begins with, and the text after them. They are JSON, alone or below a name. A list
/// of them may lack its end.
pub(super) fn leading_calls<'a>(text: &'a str, tools: &[Value]) -> Option<(Vec<Call>, &'a str)> {
    let text = text.trim_start();
    let list = [FUNCTOOLS, "["].iter().find_map(|begin| text.strip_prefix(begin));
    let json = [Some(text), list].into_iter().flatten().map(json_calls);
    let mut all = json.chain([named_calls(text, tools)]);
    all.find_map(|(calls, rest)| Some((known(calls, tools)?, rest)))
}

/// The calls, if no text is left after them.
fn whole((calls, rest): (Vec<ParsedCall>, &str)) -> Parsed {
    rest.is_empty().then_some(calls)
}

/// Finds a tool (in OpenAI's form) by its name.
pub(super) fn find<'a>(tools: &'a [Value], name: &str) -> Option<&'a Value> {
    definitions(tools).find(|tool| tool["name"] == name)
}

fn definitions(tools: &[Value]) -> impl Iterator<Item = &Value> {
    tools.iter().map(|tool| tool.get("function").unwrap_or(tool))
}

/// The names of the tools.
pub(super) fn names(tools: &[Value]) -> impl Iterator<Item = &str> {
    definitions(tools).filter_map(|tool| tool["name"].as_str())
}

/// The JSON objects, and lists of them, that a text begins with, and the text after them. A comma, or Llama's
/// semicolon, may follow each.
fn json_calls(text: &str) -> (Vec<ParsedCall>, &str) {
    let mut calls = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let mut values = Deserializer::from_str(rest).into_iter::<Value>();
        let objects = match values.next() {
            Some(Ok(Value::Array(list))) => list,
            Some(Ok(value)) => vec![value],
            _ => break,
        };
        let more: Option<Vec<ParsedCall>> = objects.into_iter().map(parse_object).collect();
        let Some(more) = more else { break };
        calls.extend(more);
        rest = rest[values.byte_offset()..].trim_start();
        rest = rest.strip_prefix([';', ',']).unwrap_or(rest).trim_start();
    }
    (calls, rest)
}

fn parse_object(call: Value) -> Option<ParsedCall> {
    let Value::Object(mut call) = call else { return None };
    let name = call.get("name")?.as_str()?.to_string();
    let arguments = match call.remove("arguments").or_else(|| call.remove("parameters")) {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(arguments)) => arguments,
        Some(Value::String(text)) => serde_json::from_str(&text).ok()?,
        Some(_) => return None,
    };
    Some(ParsedCall { name, arguments })
}

/// Parses the text after Mistral's marker: a JSON list, or names with arguments, with the marker between the calls.
fn parse_mistral(text: &str) -> Parsed {
    if text.trim_start().starts_with(['[', '{']) {
        return whole(json_calls(text));
    }
    let call = |text: &str| {
        let end = text.find(MISTRAL_ARGUMENTS).or_else(|| text.find('{'))?;
        let (name, arguments) = text.split_at(end);
        let arguments = arguments.strip_prefix(MISTRAL_ARGUMENTS).unwrap_or(arguments);
        let name = name.split(MISTRAL_ID).next().unwrap_or_default().trim();
        Some(ParsedCall { name: name.into(), arguments: serde_json::from_str(arguments.trim()).ok()? })
    };
    text.split(MISTRAL).map(call).collect()
}

/// The calls that a text begins with, and the text after them. Each is a tool's name, a line end, and the arguments.
fn named_calls<'a>(text: &'a str, tools: &[Value]) -> (Vec<ParsedCall>, &'a str) {
    let call = |text: &'a str| {
        let (name, after) = text.split_once('\n')?;
        find(tools, name.trim())?;
        let mut values = Deserializer::from_str(after).into_iter::<Map<String, Value>>();
        let call = ParsedCall { name: name.trim().into(), arguments: values.next()?.ok()? };
        Some((call, after[values.byte_offset()..].trim_start()))
    };
    let (mut calls, mut rest) = (Vec::new(), text);
    while let Some((next, after)) = call(rest) {
        calls.push(next);
        rest = after;
    }
    (calls, rest)
}

/// Parses functions, one after the other.
fn parse_tags(text: &str, tools: &[Value], is_closed: bool) -> Parsed {
    let call = |function: tags::Function| {
        let name = &text[function.name];
        let mut arguments = Map::new();
        for (key, value) in function.parameters {
            let (key, value) = (&text[key], &text[value]);
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            arguments.insert(key.to_string(), typed(value, find(tools, name), key));
        }
        ParsedCall { name: name.into(), arguments }
    };
    Some(tags::parse(text, tools, is_closed)?.into_iter().map(call).collect())
}

/// Parses a call with keys and values in tags. The begin marker of a value may be missing.
fn parse_keys(call: &str, tools: &[Value]) -> Option<ParsedCall> {
    let (name, mut pairs) = call.split_once(KEY)?;
    let name = name.trim();
    let mut arguments = Map::new();
    loop {
        let (key, after) = pairs.split_once(KEY_END)?;
        let after = after.trim_start();
        let (value, after) = after.strip_prefix(VALUE).unwrap_or(after).split_once(VALUE_END)?;
        // The end of the value is missing.
        if value.contains(KEY) {
            return None;
        }
        arguments.insert(key.trim().to_string(), typed(value, find(tools, name), key.trim()));
        let after = after.trim_start();
        if after.is_empty() {
            return Some(ParsedCall { name: name.into(), arguments });
        }
        pairs = after.strip_prefix(KEY)?;
    }
}
