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

use super::markers::{FUNCTOOLS, MISTRAL, MISTRAL_ARGUMENTS, MISTRAL_ID, PYTHON_TAG};
use super::pythonic;

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
    let text = text.trim();
    let text = text.strip_prefix(PYTHON_TAG).unwrap_or(text).trim();
    let calls = if let Some(rest) = text.strip_prefix(MISTRAL) {
        parse_mistral(rest)?
    } else if text.starts_with(FUNCTOOLS) {
        parse_json(&text[FUNCTOOLS.len() - 1..])?
    } else if text.starts_with(['{', '[']) {
        parse_json(text).or_else(|| pythonic::parse(text))?
    } else if text.starts_with("<function=") {
        parse_tags(text, tools)?
    } else if text.contains("<arg_key>") {
        vec![parse_keys(text, tools)?]
    } else {
        parse_named(text, tools).or_else(|| pythonic::parse(text))?
    };
    let known = calls.iter().all(|call| find(tools, &call.name).is_some());
    let as_text = |call: ParsedCall| (call.name, Value::Object(call.arguments).to_string());
    (known && !calls.is_empty()).then(|| calls.into_iter().map(as_text).collect())
}

/// As [`parse_calls`], for a text between a begin and an end marker. There a tool's name alone is a call.
pub(super) fn parse_between_markers(text: &str, tools: &[Value]) -> Option<Vec<Call>> {
    let name = text.trim();
    let alone = || find(tools, name).map(|_| vec![(name.to_string(), "{}".to_string())]);
    parse_calls(text, tools).or_else(alone)
}

/// Finds a tool (in OpenAI's form) by its name.
fn find<'a>(tools: &'a [Value], name: &str) -> Option<&'a Value> {
    definitions(tools).find(|tool| tool["name"] == name)
}

fn definitions(tools: &[Value]) -> impl Iterator<Item = &Value> {
    tools.iter().map(|tool| tool.get("function").unwrap_or(tool))
}

/// The names of the tools.
pub(super) fn names(tools: &[Value]) -> impl Iterator<Item = &str> {
    definitions(tools).filter_map(|tool| tool["name"].as_str())
}

/// Parses JSON objects, and lists of them, one after the other. A comma, or Llama's semicolon, may follow each.
fn parse_json(text: &str) -> Parsed {
    let mut calls = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let mut values = Deserializer::from_str(rest).into_iter::<Value>();
        match values.next()?.ok()? {
            Value::Array(list) => {
                calls.extend(list.into_iter().map(parse_object).collect::<Option<Vec<_>>>()?)
            }
            value => calls.push(parse_object(value)?),
        }
        rest = rest[values.byte_offset()..].trim_start();
        rest = rest.strip_prefix([';', ',']).unwrap_or(rest).trim_start();
    }
    Some(calls)
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
        return parse_json(text.trim());
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

/// Parses calls that are a tool's name, a line end, and the arguments.
fn parse_named(text: &str, tools: &[Value]) -> Parsed {
    let mut calls = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (name, after) = rest.split_once('\n')?;
        find(tools, name.trim())?;
        let mut values = Deserializer::from_str(after).into_iter::<Map<String, Value>>();
        calls.push(ParsedCall { name: name.trim().into(), arguments: values.next()?.ok()? });
        rest = after[values.byte_offset()..].trim_start();
    }
    Some(calls)
}

/// Parses functions, one after the other. The end of the last one may be missing.
fn parse_tags(text: &str, tools: &[Value]) -> Parsed {
    let mut calls = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (name, body) = rest.strip_prefix("<function=")?.split_once('>')?;
        let properties = find(tools, name).map_or(&Value::Null, |tool| &tool["parameters"]["properties"]);
        let mut arguments = Map::new();
        rest = body.trim_start();
        while let Some(parameter) = rest.strip_prefix("<parameter=") {
            let (key, after) = parameter.split_once('>')?;
            let is_open =
                |next: &str| next != key && properties.get(next).is_some() && !arguments.contains_key(next);
            let (value, after) = split_value(after, is_open)?;
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            let value = typed(value, name, key, tools);
            arguments.insert(key.to_string(), value);
            rest = after.trim_start();
        }
        calls.push(ParsedCall { name: name.into(), arguments });
        rest = match rest.strip_prefix("</function>") {
            Some(after) => after.trim_start(),
            None if rest.is_empty() => rest,
            None => return None,
        };
    }
    Some(calls)
}

/// Splits a parameter's value from the text after it. `is_open` says whether a key may be the next one.
///
/// The value may contain its own end marker. So the marker counts only if a next parameter, the end of the function or
/// the end of the text follows it. [`MarkerSearch`](super::search::MarkerSearch) has the same rule. The model may leave
/// out the marker. A value without it ends at a next parameter on a new line, at the end of the function, or at the end
/// of the text.
fn split_value(text: &str, is_open: impl Fn(&str) -> bool) -> Option<(&str, &str)> {
    let mut has_marker = false;
    for (at, _) in text.match_indices('<') {
        let (value, rest) = text.split_at(at);
        if let Some(after) = rest.strip_prefix("</parameter>") {
            let after = after.trim_start();
            if after.is_empty() || ["<parameter=", "</function>"].iter().any(|tag| after.starts_with(tag)) {
                return Some((value, after));
            }
            has_marker = true;
        }
        if has_marker {
            continue;
        }
        if let Some(next) = rest.strip_prefix("<parameter=").filter(|_| value.ends_with('\n')) {
            let end = next.find(['>', '<', '\n']).filter(|&end| next[end..].starts_with('>'));
            if end.is_some_and(|end| is_open(&next[..end])) {
                return Some((value, rest));
            }
        }
        let after = rest.strip_prefix("</function>").map(str::trim_start);
        if after.is_some_and(|after| after.is_empty() || after.starts_with("<function=")) {
            return Some((value, rest));
        }
    }
    (!has_marker).then_some((text, ""))
}

/// Parses a call with keys and values in tags. The begin marker of a value may be missing.
fn parse_keys(call: &str, tools: &[Value]) -> Option<ParsedCall> {
    let (name, mut pairs) = call.split_once("<arg_key>")?;
    let name = name.trim();
    let mut arguments = Map::new();
    loop {
        let (key, after) = pairs.split_once("</arg_key>")?;
        let after = after.trim_start();
        let (value, after) = after.strip_prefix("<arg_value>").unwrap_or(after).split_once("</arg_value>")?;
        // The end of the value is missing.
        if value.contains("<arg_key>") {
            return None;
        }
        arguments.insert(key.trim().to_string(), typed(value, name, key.trim(), tools));
        let after = after.trim_start();
        if after.is_empty() {
            return Some(ParsedCall { name: name.into(), arguments });
        }
        pairs = after.strip_prefix("<arg_key>")?;
    }
}

/// Reads a value that is written without quotes. It is a string if it is not valid JSON, or if the tool's schema allows
/// a string there and not the JSON's own type. Templates write some values as Python does, and models answer so.
fn typed(value: &str, name: &str, key: &str, tools: &[Value]) -> Value {
    let schema = find(tools, name).map_or(&Value::Null, |tool| &tool["parameters"]["properties"][key]);
    let types = types(schema);
    let takes_text = types.contains(&"string");
    let fits = |parsed: &Value| match type_of(parsed) {
        _ if !takes_text => true,
        "string" => false,
        "number" => types.iter().any(|kind| ["integer", "number", ANY].contains(kind)),
        kind => types.contains(&kind) || types.contains(&ANY),
    };
    let parsed = serde_json::from_str(value).ok().filter(fits);
    parsed.or_else(|| python_literal(value, &types)).unwrap_or_else(|| Value::String(value.to_string()))
}

/// Reads `True`, `False` and `None`, in upper or lower case, where the types allow their values.
fn python_literal(value: &str, types: &[&str]) -> Option<Value> {
    let takes_text = types.contains(&"string");
    let takes = |kind: &str| types.contains(&kind) || types.contains(&ANY) && !takes_text;
    match value.trim().to_ascii_lowercase().as_str() {
        "true" if takes("boolean") => Some(Value::Bool(true)),
        "false" if takes("boolean") => Some(Value::Bool(false)),
        "none" | "null" if takes("null") || !takes_text => Some(Value::Null),
        _ => None,
    }
}

/// Stands for all types in a schema that names none.
const ANY: &str = "any";

/// The types that a schema allows.
fn types(schema: &Value) -> Vec<&str> {
    let list = |key: &str| schema[key].as_array().map(|list| list.iter());
    if let Some(kind) = schema["type"].as_str() {
        vec![kind]
    } else if let Some(kinds) = list("type") {
        kinds.filter_map(Value::as_str).collect()
    } else if let Some(options) = list("anyOf").or_else(|| list("oneOf")) {
        options.flat_map(types).collect()
    } else if let Some(values) = list("enum") {
        values.map(type_of).collect()
    } else {
        vec![ANY]
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}
