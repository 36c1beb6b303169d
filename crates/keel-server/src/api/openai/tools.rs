//! The tools that may be called, and the form of the answer.

use keel_text::{GrammarSource, ToolSignature};
use serde_json::{Value, json};

use crate::engine::grammar::Grammar;
use crate::error::{Result, wrong};

/// The fields of a request about tools and the answer's form, after validation.
#[derive(Debug, Default)]
pub(crate) struct Tools {
    /// The tools in OpenAI's form. Empty if none may be called.
    pub offered: Vec<Value>,
    /// The grammar of the answer: a call if one is required, else the form that was asked for, or a call in its place.
    pub grammar: Option<Grammar>,
    /// The answer ends after its first call.
    pub one_call: bool,
}

/// Most tools of a request. OpenAI takes 128, and clients of Anthropic's API send more.
const TOOLS_MAX: usize = 1024;
const FORMAT: &str = "response_format";

impl Tools {
    /// Reads `tools` and `tool_choice`. `asked` is the form of the answer's text.
    pub fn new(
        tools: Option<Vec<Value>>,
        choice: Option<&Value>,
        parallel: bool,
        asked: Option<Grammar>,
    ) -> Result<Tools> {
        let tools: Vec<Value> = tools.unwrap_or_default().into_iter().map(nested).collect();
        if tools.len() > TOOLS_MAX {
            return Err(wrong("tools", format!("{} tools, at most {TOOLS_MAX} are accepted", tools.len())));
        }
        let signatures = tools.iter().map(signature).collect::<Result<Vec<_>>>()?;
        let choice = choice.unwrap_or(&Value::Null);
        let named = choice["function"]["name"].as_str().or(choice["name"].as_str());
        let callable: Vec<_> = match (choice.as_str(), named) {
            (Some("none"), _) => return Ok(Tools { grammar: asked, ..Tools::default() }),
            (Some("auto" | "required"), _) => signatures,
            (None, Some(name)) => signatures.into_iter().filter(|tool| tool.name == name).collect(),
            (None, None) if choice.is_null() => signatures,
            _ => return Err(wrong("tool_choice", "expected none, auto, required, or a function's name")),
        };
        let is_forced = choice == "required" || named.is_some();
        if is_forced && callable.is_empty() {
            return Err(wrong("tool_choice", "there is no such tool"));
        }
        let several = parallel && named.is_none();
        let grammar = match asked {
            _ if is_forced => Some(Grammar(GrammarSource::tool_calls(&callable, several))),
            Some(Grammar(GrammarSource::JsonSchema(schema))) if !callable.is_empty() => {
                Some(Grammar(GrammarSource::value_or_calls(schema, &callable, several)))
            }
            Some(_) if !callable.is_empty() => {
                let problem = "a grammar or regex has no place for tool calls; set tool_choice to none";
                return Err(wrong(FORMAT, problem));
            }
            asked => asked,
        };
        if grammar.is_none() && tools.iter().any(|tool| tool["function"]["strict"] == true) {
            tracing::debug!(
                "a strict tool: its schema binds calls that tool_choice requires, and this request requires none"
            );
        }
        Ok(Tools { offered: tools, grammar, one_call: !parallel })
    }
}

/// A function in the form of a chat, which templates read. The form of `/v1/responses` has the same fields one level
/// up.
fn nested(tool: Value) -> Value {
    match tool {
        Value::Object(mut function) if !function.contains_key("function") => {
            let kind = function.remove("type").unwrap_or(json!("function"));
            json!({"type": kind, "function": function})
        }
        tool => tool,
    }
}

fn signature(tool: &Value) -> Result<ToolSignature> {
    if !matches!(tool["type"].as_str(), None | Some("function")) {
        return Err(wrong("tools", format!("a tool of type {}: functions can be called", tool["type"])));
    }
    let function = &tool["function"];
    let name = function["name"].as_str().filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| wrong("tools", "a function has no name"))?;
    if !matches!(function["description"], Value::Null | Value::String(_)) {
        return Err(wrong("tools", format!("the description of {name} is no text")));
    }
    let parameters = match &function["parameters"] {
        Value::Null => json!({"type": "object", "properties": {}}),
        Value::Object(_) => function["parameters"].clone(),
        _ => return Err(wrong("tools", format!("the parameters of {name} are no JSON schema"))),
    };
    Ok(ToolSignature { name: name.to_string(), arguments: closed(parameters) })
}

/// Forbids arguments that the tool does not list, unless its schema says otherwise.
fn closed(mut parameters: Value) -> Value {
    if let Value::Object(schema) = &mut parameters
        && schema.contains_key("properties")
    {
        schema.entry("additionalProperties").or_insert(json!(false));
    }
    parameters
}

/// The grammar for `response_format` (or for the `format` of a response's text).
pub(crate) fn response_grammar(format: Option<&Value>) -> Result<Option<Grammar>> {
    let Some(format) = format.filter(|f| !f.is_null()) else { return Ok(None) };
    let source = match format["type"].as_str() {
        Some("text") => return Ok(None),
        Some("json_object") => GrammarSource::json_object(),
        Some("json_schema") => {
            let schema = format["json_schema"].get("schema").or(format.get("schema"));
            match schema {
                Some(schema @ Value::Object(_)) => GrammarSource::JsonSchema(schema.clone()),
                _ => return Err(wrong(FORMAT, "its schema is missing or no JSON schema")),
            }
        }
        Some("grammar") => match format["grammar"].as_str() {
            Some(grammar) => GrammarSource::Lark(grammar.to_string()),
            None => return Err(wrong(FORMAT, "grammar is missing")),
        },
        Some("regex") => match format["regex"].as_str().or(format["pattern"].as_str()) {
            Some(regex) => GrammarSource::Regex(regex.to_string()),
            None => return Err(wrong(FORMAT, "regex is missing")),
        },
        _ => {
            return Err(wrong(FORMAT, "type is one of text, json_object, json_schema, grammar, regex"));
        }
    };
    Ok(Some(Grammar(source)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_decides_what_may_and_what_must_be_called() {
        let tools = || Some(vec![json!({"type": "function", "function": {"name": "f"}})]);
        let new = |choice: Value| Tools::new(tools(), Some(&choice), true, None);
        let auto = new(json!("auto")).expect("right");
        assert!(auto.offered.len() == 1 && auto.grammar.is_none());
        assert!(new(json!("none")).expect("right").offered.is_empty());
        assert!(new(json!("required")).expect("right").grammar.is_some());
        let named = json!({"type": "function", "function": {"name": "f"}});
        assert!(new(named).expect("right").grammar.is_some());
        for wrong in [json!("maybe"), json!({"function": {"name": "g"}}), json!(3)] {
            assert_eq!(new(wrong).expect_err("wrong").field(), Some("tool_choice"));
        }
        assert!(Tools::new(None, Some(&json!("required")), true, None).is_err());
        let many = |count: usize| vec![json!({"function": {"name": "f"}}); count];
        assert!(Tools::new(Some(many(TOOLS_MAX)), None, true, None).is_ok());
        let refused = Tools::new(Some(many(TOOLS_MAX + 1)), None, true, None).expect_err("too many");
        assert!(refused.to_string().contains("1025 tools, at most 1024"), "{refused}");
        assert!(Tools::new(Some(vec![json!({})]), None, true, None).is_err());
        let described = json!({"function": {"name": "f", "description": {}}});
        assert!(Tools::new(Some(vec![described]), None, true, None).is_err());
    }

    #[test]
    fn templates_see_one_form_of_a_tool() {
        let flat = json!({"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": true});
        let offered = Tools::new(Some(vec![flat]), None, true, None).expect("right").offered;
        let function = json!({"name": "f", "parameters": {"type": "object"}, "strict": true});
        assert_eq!(offered, [json!({"type": "function", "function": function})]);
        let custom = json!({"type": "custom", "name": "f"});
        let refused = Tools::new(Some(vec![custom]), None, true, None).expect_err("no function");
        assert!(refused.to_string().contains("a tool of type \"custom\""), "{refused}");
    }

    #[test]
    fn a_form_of_the_text_leaves_calls_possible_or_is_refused() {
        let of = |choice: &str, asked: &Option<Grammar>| {
            let tools = Some(vec![json!({"function": {"name": "f"}})]);
            Tools::new(tools, Some(&json!(choice)), true, asked.clone()).map(|tools| tools.grammar)
        };
        let schema = Some(Grammar(GrammarSource::json_object()));
        let regex = Some(Grammar(GrammarSource::Regex("a+".into())));
        let Ok(Some(Grammar(GrammarSource::Lark(both)))) = of("auto", &schema) else {
            panic!("no grammar of both")
        };
        assert!(both.contains("<tool_call>") && both.contains("\nvalue: %json {"), "{both}");
        assert_eq!(of("none", &schema).expect("right"), schema);
        assert_eq!(of("auto", &None).expect("right"), None);
        assert_eq!(of("required", &regex).expect("right"), of("required", &None).expect("right"));
        let refused = of("auto", &regex).expect_err("no calls");
        assert_eq!(refused.field(), Some("response_format"));
        let alone = Tools::new(None, None, true, regex.clone()).expect("right");
        assert_eq!(alone.grammar, regex);
    }

    #[test]
    fn arguments_are_those_that_a_tool_lists() {
        let tool = |parameters: Value| json!({"function": {"name": "f", "parameters": parameters}});
        let of = |parameters| signature(&tool(parameters)).expect("right").arguments;
        assert_eq!(of(json!({"properties": {}}))["additionalProperties"], false);
        assert_eq!(of(json!({"properties": {}, "additionalProperties": true}))["additionalProperties"], true);
        assert_eq!(of(json!({"type": "object"})), json!({"type": "object"}));
    }

    #[test]
    fn formats_are_grammars() {
        assert_eq!(response_grammar(Some(&json!({"type": "text"}))).expect("right"), None);
        let schema = json!({"type": "json_schema", "json_schema": {"schema": {"type": "array"}}});
        let expected = Grammar(GrammarSource::JsonSchema(json!({"type": "array"})));
        assert_eq!(response_grammar(Some(&schema)).expect("right"), Some(expected));
        for wrong in [json!({}), json!({"type": "xml"}), json!({"type": "json_schema"}), json!(1)] {
            assert!(response_grammar(Some(&wrong)).is_err(), "{wrong}");
        }
    }
}
