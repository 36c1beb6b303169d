//! Translates a request of Anthropic's API to a chat in OpenAI's form.

use serde_json::{Map, Value, json};

use super::{InputMessage, MessagesBody, SHARED};
use crate::api::field_names::read;
use crate::api::openai::chat::ChatBody;
use crate::api::unsupported;
use crate::error::{Result, wrong};

/// Translates the request to a chat.
pub(crate) fn chat(body: MessagesBody) -> Result<ChatBody> {
    read(to_chat(body)?)
}

fn to_chat(body: MessagesBody) -> Result<Value> {
    unsupported::MESSAGES.check(&body.rest)?;
    let mut messages = Vec::new();
    if let Some(system) = body.system.filter(|s| !s.is_null()) {
        check_system(&system)?;
        messages.push(json!({"role": "system", "content": system}));
    }
    for message in body.messages {
        translate(message, &mut messages)?;
    }
    let tools = body.tools.map(|tools| tools.into_iter().map(tool).collect::<Result<_>>()).transpose()?;
    let choice = match &body.tool_choice {
        None | Some(Value::Null) => Value::Null,
        Some(choice) => match choice["type"].as_str() {
            Some("auto") => json!("auto"),
            Some("none") => json!("none"),
            Some("any") => json!("required"),
            Some("tool") => json!({"type": "function", "function": {"name": choice["name"]}}),
            _ => return Err(wrong("tool_choice", "type is one of auto, any, tool, none")),
        },
    };
    let parallel =
        body.tool_choice.as_ref().and_then(|c| c["disable_parallel_tool_use"].as_bool()) != Some(true);
    let mut variables = Map::new();
    match &body.thinking {
        None | Some(Value::Null) => {}
        Some(thinking) => {
            let thinks = match thinking["type"].as_str() {
                Some("enabled" | "adaptive") => true,
                Some("disabled") => false,
                _ => return Err(wrong("thinking", "type is one of enabled, adaptive, disabled")),
            };
            variables.insert("enable_thinking".into(), json!(thinks));
        }
    }
    let mut chat = json!({
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "chat_template_kwargs": variables,
    });
    // The values are moved, because the macro would copy them.
    chat["messages"] = Value::Array(messages);
    chat["tools"] = tools.map_or(Value::Null, Value::Array);
    chat["response_format"] = answer_format(body.output_config, body.output_format)?;
    for (key, value) in body.rest {
        if SHARED.contains(&key.as_str()) {
            chat[key] = value;
        }
    }
    Ok(chat)
}

/// The form of the answer, which is a schema; null if there is none.
fn answer_format(config: Option<Value>, earlier: Option<Value>) -> Result<Value> {
    let given = config.map(|mut config| config.get_mut("format").map(Value::take).unwrap_or_default());
    let format = given.filter(|format| !format.is_null()).or(earlier).unwrap_or_default();
    match format["type"].as_str() {
        Some("json_schema") if format["schema"].is_object() => Ok(format),
        None if format.is_null() => Ok(format),
        _ => Err(wrong("output_config", "its format is {\"type\": \"json_schema\", \"schema\": {...}}")),
    }
}

fn tool(tool: Value) -> Result<Value> {
    if !matches!(tool["type"].as_str(), None | Some("custom")) {
        let problem =
            format!("a tool of type {}: the server runs no tools; describe one of yours", tool["type"]);
        return Err(wrong("tools", problem));
    }
    let mut function = json!({
        "name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]});
    if tool["strict"] == true {
        function["strict"] = json!(true);
    }
    Ok(json!({"type": "function", "function": function}))
}

/// Refuses system prompts other than a text or blocks of text.
fn check_system(system: &Value) -> Result<()> {
    let is_text = |block: &Value| block["type"] == "text" && block["text"].is_string();
    let is_read = match system {
        Value::String(_) => true,
        Value::Array(blocks) => blocks.iter().all(is_text),
        _ => false,
    };
    if is_read { Ok(()) } else { Err(wrong("system", "expected a text or a list of text blocks")) }
}

/// The text of a block, in the field with the name of its type.
fn text_of<'a>(block: &'a Value, kind: &str) -> Result<&'a str> {
    block[kind].as_str().ok_or_else(|| wrong("messages", format!("a {kind} block has no {kind}")))
}

/// Translates a message. A message with results of tools becomes several.
fn translate(message: InputMessage, messages: &mut Vec<Value>) -> Result<()> {
    let blocks = match message.content {
        Value::Array(blocks) => blocks,
        content => {
            messages.push(json!({"role": message.role, "content": content}));
            return Ok(());
        }
    };
    let (mut parts, mut thinking, mut calls) = (Vec::new(), String::new(), Vec::new());
    for mut block in blocks {
        match block["type"].as_str() {
            Some("text") => parts.push(json!({"type": "text", "text": text_of(&block, "text")?})),
            Some("image") => parts.push(image(&mut block)?),
            Some("thinking") => thinking.push_str(text_of(&block, "thinking")?),
            Some("redacted_thinking") => {}
            Some("tool_use") => calls.push(json!({"id": block["id"], "type": "function",
                "function": {"name": block["name"], "arguments": block["input"]}})),
            Some("tool_result") => messages.push(tool_result(block)?),
            _ => {
                let problem = format!(
                    "a block of type {}: text, image, thinking, tool_use and tool_result can be read",
                    block["type"]
                );
                return Err(wrong("messages", problem));
            }
        }
    }
    if parts.is_empty() && thinking.is_empty() && calls.is_empty() {
        return Ok(());
    }
    let mut one = json!({"role": message.role});
    one["content"] = Value::Array(parts);
    if !thinking.is_empty() {
        one["reasoning_content"] = json!(thinking);
    }
    if !calls.is_empty() {
        one["tool_calls"] = json!(calls);
    }
    messages.push(one);
    Ok(())
}

/// The result of a tool, whose blocks may be pictures, too.
fn tool_result(mut block: Value) -> Result<Value> {
    let mut one = json!({"role": "tool", "tool_call_id": block["tool_use_id"]});
    one["content"] = match block["content"].take() {
        Value::Array(blocks) => Value::Array(blocks.into_iter().map(result_block).collect::<Result<_>>()?),
        content => content,
    };
    Ok(one)
}

/// A block of the result of a tool.
fn result_block(mut block: Value) -> Result<Value> {
    match block["type"].as_str() {
        Some("image") => image(&mut block),
        Some("text") => Ok(json!({"type": "text", "text": text_of(&block, "text")?})),
        _ => {
            let problem = format!(
                "a block of type {} in a tool_result: text and image can be read there",
                block["type"]
            );
            Err(wrong("messages", problem))
        }
    }
}

/// A picture in OpenAI's form. Its bytes are copied once, into the URL.
fn image(block: &mut Value) -> Result<Value> {
    let source = &block["source"];
    let url = match (source["type"].as_str(), source["media_type"].as_str(), source["data"].as_str()) {
        (Some("base64"), kind, Some(data)) => format!("data:{};base64,{data}", kind.unwrap_or("image")),
        (Some("url"), ..) if source["url"].is_string() => {
            source["url"].as_str().unwrap_or_default().to_string()
        }
        _ => {
            let problem = "an image block has no source of the form {\"type\": \"base64\", \"media_type\", \"data\"} or \
                           {\"type\": \"url\", \"url\"}";
            return Err(wrong("messages", problem));
        }
    };
    *block = Value::Null;
    let mut part = json!({"type": "image_url"});
    part["image_url"] = Value::String(url);
    Ok(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(message: Value) -> Result<Value> {
        to_chat(serde_json::from_value(json!({"messages": [message]})).expect("the types are right"))
    }

    fn refusal(content: Value) -> String {
        translated(json!({"role": "user", "content": content})).expect_err("it cannot be read").to_string()
    }

    #[test]
    fn a_block_that_cannot_be_read_is_told_the_blocks_of_this_api() {
        let document = json!([{"type": "document", "source": {}}]);
        let own = "messages: a block of type \"document\": text, image, thinking, tool_use and tool_result can be read";
        assert_eq!(refusal(document.clone()), own);
        let result = json!([{"type": "tool_result", "tool_use_id": "1", "content": document}]);
        let own = "messages: a block of type \"document\" in a tool_result: text and image can be read there";
        assert_eq!(refusal(result), own);
    }

    #[test]
    fn a_block_without_its_text_is_no_empty_text() {
        let nested = |block: &Value| json!([{"type": "tool_result", "tool_use_id": "1", "content": [block]}]);
        for block in [json!({"type": "text"}), json!({"type": "text", "text": 5})] {
            assert_eq!(refusal(nested(&block)), "messages: a text block has no text");
            assert_eq!(refusal(json!([block])), "messages: a text block has no text");
        }
        let block = json!([{"type": "thinking", "thinking": null}]);
        assert_eq!(refusal(block), "messages: a thinking block has no thinking");
    }

    #[test]
    fn a_wrong_type_is_refused_with_the_name_of_its_field() {
        for (field, value) in [
            ("system", json!(5)),
            ("system", json!([{"type": "text"}])),
            ("messages", json!([{"role": "user", "content": 5}])),
        ] {
            let mut body = json!({"messages": []});
            body[field] = value;
            let body = serde_json::from_value(body).expect("the types are right");
            assert_eq!(chat(body).expect_err("wrong").field(), Some(field));
        }
    }

    #[test]
    fn a_tool_stays_strict() {
        let of = |more: Value| tool(more).expect("right")["function"]["strict"].take();
        assert_eq!(of(json!({"name": "f", "strict": true})), true);
        assert_eq!(of(json!({"name": "f", "strict": false})), Value::Null);
    }
}
