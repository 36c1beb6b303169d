//! Fields that other endpoints pass on to a chat by name. Their types are checked here, so that an error names the
//! field.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::api::numbers::Whole;
use crate::error::{Result, wrong};

/// Refuses a field of a type that a chat does not read. Other fields of `fields` are not looked at.
///
/// # Errors
/// The first such field, and what is expected there.
pub(crate) fn check_types(names: &[&'static str], fields: &Map<String, Value>) -> Result<()> {
    for &name in names {
        let Some(value) = fields.get(name).filter(|value| !value.is_null()) else { continue };
        let (is_read, expected) = read(name, value);
        if !is_read {
            return Err(wrong(name, format!("expected {expected}")));
        }
    }
    Ok(())
}

/// Whether a chat reads the value, and what it expects.
fn read(name: &str, value: &Value) -> (bool, &'static str) {
    let texts = |items: &Vec<Value>| items.iter().all(Value::is_string);
    let numbers = |fields: &Map<String, Value>| fields.values().all(Value::is_number);
    match name {
        "model" => (value.is_string(), "a text"),
        "stop" => (value.is_string() || value.as_array().is_some_and(texts), "a text or a list of texts"),
        "top_k" | "seed" => (Whole::<i64>::deserialize(value).is_ok(), "a whole number"),
        "logit_bias" => (value.as_object().is_some_and(numbers), "an object of numbers"),
        "ignore_eos" | "parallel_tool_calls" => (value.is_boolean(), "true or false"),
        "tools" => (value.is_array(), "a list"),
        "chat_template_kwargs" => (value.is_object(), "an object"),
        // Its forms are checked where it is read.
        "tool_choice" => (true, "a choice"),
        _ => (value.is_number(), "a number"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::anthropic;
    use crate::api::openai::chat::ChatBody;
    use crate::api::openai::responses;

    #[test]
    fn a_type_is_refused_exactly_if_a_chat_does_not_read_it() {
        let values = [
            json!(null),
            json!("x"),
            json!(["x"]),
            json!([["x"]]),
            json!({}),
            json!({"5": 1}),
            json!({"5": "x"}),
            json!(true),
            json!(1),
            json!(2.0),
            json!(0.5),
            json!(u64::MAX),
        ];
        for &name in responses::SHARED.iter().chain(&anthropic::SHARED) {
            for value in &values {
                let fields = json!({name: value});
                let checked = check_types(&[name], fields.as_object().expect("an object"));
                let mut chat = json!({"messages": []});
                chat[name] = value.clone();
                let read = serde_json::from_value::<ChatBody>(chat);
                assert_eq!(checked.is_ok(), read.is_ok(), "{name}: {value}");
                if let Err(error) = checked {
                    assert_eq!(error.field(), Some(name));
                }
            }
        }
    }
}
