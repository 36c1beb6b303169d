//! The notations in which models call tools.

use serde_json::{Map, Value};

/// Name and arguments (a JSON object, as text) of a call of one of `tools`; `None` if it is none.
///
/// Two notations are known: a JSON object with `name` and `arguments` (or `parameters`), and
/// `<function=NAME> <parameter=KEY> VALUE </parameter> ... </function>`, where a value is a string if the tool's schema
/// says so or it is no JSON.
pub(super) fn parse_call(call: &str, tools: &[Value]) -> Option<(String, String)> {
    let call = call.trim();
    let (name, arguments) = if call.starts_with('{') { parse_json(call)? } else { parse_tags(call, tools)? };
    find(tools, &name)?;
    Some((name, Value::Object(arguments).to_string()))
}

/// A tool in OpenAI's form, by name.
fn find<'a>(tools: &'a [Value], name: &str) -> Option<&'a Value> {
    tools.iter().map(|tool| tool.get("function").unwrap_or(tool)).find(|tool| tool["name"] == name)
}

fn parse_json(call: &str) -> Option<(String, Map<String, Value>)> {
    let mut call: Map<String, Value> = serde_json::from_str(call).ok()?;
    let name = call.get("name")?.as_str()?.to_string();
    let arguments = match call.remove("arguments").or_else(|| call.remove("parameters")) {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(arguments)) => arguments,
        Some(Value::String(text)) => serde_json::from_str(&text).ok()?,
        Some(_) => return None,
    };
    Some((name, arguments))
}

fn parse_tags(call: &str, tools: &[Value]) -> Option<(String, Map<String, Value>)> {
    let (name, mut rest) = call.strip_prefix("<function=")?.split_once('>')?;
    let properties = &find(tools, name)?["parameters"]["properties"];
    let mut arguments = Map::new();
    while let Some((_, parameter)) = rest.split_once("<parameter=") {
        let (key, after) = parameter.split_once('>')?;
        let (value, after) = after.split_once("</parameter>")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let is_text = properties[key]["type"] == "string";
        let parsed = if is_text { None } else { serde_json::from_str(value).ok() };
        arguments.insert(key.to_string(), parsed.unwrap_or_else(|| Value::String(value.to_string())));
        rest = after;
    }
    Some((name.to_string(), arguments))
}
