//! Values that a model writes without quotes, and the types that a tool's schema allows for them.

use serde_json::Value;

/// Stands for all types in a schema that names none.
const ANY: &str = "any";
/// Most schemas that are read for one value. References may lead in circles.
const SCHEMAS_MAX: usize = 64;

/// Reads a value of the parameter `key` that is written without quotes. It is a string if it is not valid JSON, or if
/// the tool's schema allows a string there and not the JSON's own type. Templates write some values as Python does, and
/// models answer so.
pub(super) fn typed(value: &str, tool: Option<&Value>, key: &str) -> Value {
    let allowed = tool.map_or_else(Allowed::any, |tool| Allowed::by(&tool["parameters"], key));
    let fits = |parsed: &Value| match type_of(parsed) {
        _ if !allowed.takes("string") => true,
        "string" => false,
        "number" => allowed.takes("integer") || allowed.takes("number") || allowed.takes(ANY),
        kind => allowed.takes(kind) || allowed.takes(ANY),
    };
    if let Some(parsed) = serde_json::from_str(value).ok().filter(fits) {
        return parsed;
    }
    let is_member = allowed.members.iter().any(|member| member.as_str() == Some(value));
    let literal = if is_member { None } else { python_literal(value.trim(), &allowed) };
    literal.unwrap_or_else(|| Value::String(value.to_string()))
}

/// Reads `True`, `False` and `None` where the schema allows their values. It allows other spellings, such as `TRUE`,
/// only where it names the type, because they may be a string's value.
fn python_literal(value: &str, allowed: &Allowed) -> Option<Value> {
    let takes_text = allowed.takes("string");
    let is_open = allowed.takes(ANY) && !takes_text;
    let takes = |kind: &str, exact: &str| allowed.takes(kind) || is_open && value == exact;
    // No value fits a number or a list, so `None` says that there is none.
    let takes_none = takes("null", "None") || !takes_text && !is_open;
    match value.to_ascii_lowercase().as_str() {
        "true" if takes("boolean", "True") => Some(Value::Bool(true)),
        "false" if takes("boolean", "False") => Some(Value::Bool(false)),
        "none" | "null" if takes_none => Some(Value::Null),
        _ => None,
    }
}

/// What a schema allows.
#[derive(Default)]
struct Allowed<'a> {
    types: Vec<&'a str>,
    /// The values that it lists.
    members: Vec<&'a Value>,
    /// Number of schemas that were read.
    schemas: usize,
}

impl<'a> Allowed<'a> {
    fn any() -> Allowed<'a> {
        Allowed { types: vec![ANY], ..Allowed::default() }
    }

    /// What the schema of a tool's parameters allows for `key`.
    fn by(parameters: &'a Value, key: &str) -> Allowed<'a> {
        let mut allowed = Allowed::default();
        allowed.add(&parameters["properties"][key], parameters);
        allowed
    }

    fn takes(&self, kind: &str) -> bool {
        self.types.contains(&kind)
    }

    /// Adds what `schema` allows. Its references lead into `root`.
    fn add(&mut self, schema: &'a Value, root: &'a Value) {
        self.schemas += 1;
        if self.schemas > SCHEMAS_MAX {
            self.types.push(ANY);
            return;
        }
        let list = |key: &str| schema[key].as_array().into_iter().flatten();
        self.members.extend(list("enum").chain(schema.get("const")));
        let first = self.types.len();
        let target = schema["$ref"].as_str().and_then(|path| root.pointer(path.strip_prefix('#')?));
        if let Some(target) = target {
            self.add(target, root);
        } else if let Some(kind) = schema["type"].as_str() {
            self.types.push(kind);
        } else if schema["type"].is_array() {
            self.types.extend(list("type").filter_map(Value::as_str));
        } else if ["anyOf", "oneOf"].iter().any(|key| schema[key].is_array()) {
            list("anyOf").chain(list("oneOf")).for_each(|option| self.add(option, root));
        } else if schema["allOf"].is_array() {
            list("allOf").for_each(|option| self.add(option, root));
            // A schema without a type does not widen the others.
            if self.types[first..].iter().any(|kind| *kind != ANY) {
                let added = self.types.split_off(first);
                self.types.extend(added.into_iter().filter(|kind| *kind != ANY));
            }
        } else {
            self.types
                .extend(list("enum").chain(schema.get("const")).map(|value| -> &'a str { type_of(value) }));
        }
        if self.types.len() == first {
            self.types.push(ANY);
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A string that looks like a literal of Python stays a string where the schema may mean one.
    #[test]
    fn references_are_followed() {
        let tool = json!({"name": "f", "parameters": {
            "properties": {
                "level": {"$ref": "#/$defs/Level"},
                "all": {"allOf": [{"$ref": "#/$defs/Level"}, {"description": "how much"}]},
                "maybe": {"anyOf": [{"$ref": "#/$defs/Level"}, {"type": "null"}]},
                "count": {"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]},
                "fixed": {"const": "TRUE"},
                "lost": {"$ref": "#/$defs/Lost"},
                "circle": {"$ref": "#/$defs/Circle"},
            },
            "$defs": {
                "Level": {"enum": ["none", "low", "False"]},
                "Count": {"type": "integer"},
                "Circle": {"anyOf": [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Circle"}]},
            },
        }});
        for (key, value, expected) in [
            ("level", "none", json!("none")),
            ("level", "False", json!("False")),
            ("level", "12", json!("12")),
            ("all", "none", json!("none")),
            ("maybe", "none", json!("none")),
            ("maybe", "None", json!(null)),
            ("maybe", "null", json!(null)),
            ("count", "none", json!(null)),
            ("count", "7", json!(7)),
            ("fixed", "TRUE", json!("TRUE")),
            ("lost", "none", json!("none")),
            ("lost", "TRUE", json!("TRUE")),
            ("lost", "True", json!(true)),
            ("lost", "None", json!(null)),
            ("circle", "none", json!("none")),
            ("circle", "[1]", json!([1])),
        ] {
            assert_eq!(typed(value, Some(&tool), key), expected, "{key}: {value}");
            // Without a schema every type is allowed.
            assert_eq!(typed(value, None, key), typed(value, Some(&json!({})), key), "{value}");
        }
    }
}
