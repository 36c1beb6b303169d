//! `/openapi.json`: describes the endpoints.

use serde_json::{Map, Value, json};

/// The document. `choices_max` is the largest number of answers per request.
pub(crate) fn document(choices_max: usize) -> Value {
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Evenkeel",
            "description": "Large language models with memory that is known before a request starts.",
            "version": env!("CARGO_PKG_VERSION"),
        },
        "paths": {
            "/health": {"get": read("Whether requests are answered")},
            "/v1/models": {"get": read("The models that can be asked for, and which of them are loaded")},
            "/v1/models/{id}": {"get": one_model()},
            "/v1/chat/completions": {"post": write("Answer a conversation", "Chat")},
            "/v1/completions": {"post": write("Continue a text", "Completion")},
            "/v1/responses": {"post": write("Answer an input", "Response")},
            "/v1/embeddings": {"post": write("Embed texts", "Embedding")},
            "/v1/rerank": {"post": write("Say how well documents answer a query, the best first; also at /v2/rerank and \
             /rerank", "Rerank")},
            "/v1/messages": {"post": write("Answer a conversation, in Anthropic's form", "Messages")},
            "/v1/messages/count_tokens": {"post": write("Count the tokens of a conversation", "CountTokens")},
            "/tokenize": {"post": write("Ids of a text, which has one of three names", "Tokenize")},
            "/detokenize": {"post": write("The text of ids", "Detokenize")},
            "/metrics": {"get": read("Metrics in Prometheus' form")},
            "/status": {"get": read("Memory by category and the running sequences")},
            "/openapi.json": {"get": read("This document")},
        },
        // Without --api-key and --api-key-file no key is required.
        "security": [{"key": []}, {}],
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas(choices_max),
        },
    })
}

fn responses() -> Value {
    let described = |text: &str| json!({"description": text});
    json!({
        "200": described("Done"),
        "400": described("A field is wrong, or what is asked for can never fit; the message says why, with numbers"),
        "401": described("A key is needed"),
        "403": described("The host or the page that asks is not one of those that may; see --allow-host and --cors"),
        "404": described("No such model or endpoint"),
        "405": described("The endpoint takes other methods; the header Allow names them"),
        "415": described("The body is not application/json"),
        "413": described("The body is too large, or needs more than the memory of requests"),
        "429": described("The queue is full, or the key has asked too often; Retry-After says when to try again"),
        "500": described("The server failed at this request; its log says why"),
        "503": described("No room became free in time, or the server shuts down; Retry-After says when to try again"),
        "504": described("The deadline has passed"),
    })
}

fn read(summary: &str) -> Value {
    json!({"summary": summary, "responses": responses()})
}

fn one_model() -> Value {
    let mut operation = read("One model, by its name; a name may have a slash");
    let name = json!({"type": "string", "minLength": 1});
    operation["parameters"] = json!([{"name": "id", "in": "path", "required": true, "schema": name}]);
    operation
}

fn write(summary: &str, schema: &str) -> Value {
    let reference = format!("#/components/schemas/{schema}");
    json!({
        "summary": summary,
        "requestBody": {"required": true, "content": {"application/json": {"schema": {"$ref": reference}}}},
        "responses": responses(),
    })
}

fn object(required: &[&str], properties: Value) -> Value {
    json!({"type": "object", "required": required, "properties": properties})
}

fn number(low: f64, high: f64) -> Value {
    json!({"type": ["number", "null"], "minimum": low, "maximum": high})
}

/// The fields of `SamplingFields`, which all APIs of answers have.
fn sampling() -> Value {
    json!({
        "temperature": number(0.0, 2.0),
        "top_p": number(0.0, 1.0),
        "top_k": {"type": ["integer", "null"]},
        "min_p": number(0.0, 1.0),
        "seed": {"type": ["integer", "null"]},
        "presence_penalty": number(-2.0, 2.0),
        "frequency_penalty": number(-2.0, 2.0),
        "repetition_penalty": number(0.01, 100.0),
        "logit_bias": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
        "ignore_eos": {"type": ["boolean", "null"]},
    })
}

/// The fields that chats and completions have, besides sampling.
fn answers(choices_max: usize) -> Value {
    json!({
        "model": {"type": ["string", "null"]},
        "max_tokens": {"type": ["integer", "null"], "minimum": 1},
        "n": {"type": ["integer", "null"], "minimum": 1, "maximum": choices_max},
        "stop": stop(),
        "stream": {"type": ["boolean", "null"]},
        "stream_options": {"type": ["object", "null"], "properties": {"include_usage": {"type": ["boolean", "null"]}}},
    })
}

fn stop() -> Value {
    json!({"type": ["string", "array", "null"], "items": {"type": "string"}})
}

/// The properties of all these objects.
fn joined<const N: usize>(parts: [Value; N]) -> Value {
    let fields = parts.into_iter().flat_map(|part| match part {
        Value::Object(fields) => fields,
        _ => Map::new(),
    });
    Value::Object(fields.collect())
}

/// The form of an answer. `schema` is the field with the schema; it depends on the endpoint.
fn format(schema: &Value) -> Value {
    // Every field of a kind is required.
    let kind = |name: &str, mut fields: Value| {
        fields["type"] = json!({"const": name});
        let required: Vec<&str> =
            fields.as_object().into_iter().flatten().map(|(name, _)| name.as_str()).collect();
        object(&required, fields.clone())
    };
    json!({"anyOf": [
        {"type": "null"},
        kind("text", json!({})),
        kind("json_object", json!({})),
        kind("json_schema", schema.clone()),
        kind("grammar", json!({"grammar": {"type": "string", "description": "in llguidance's variant of Lark"}})),
        kind("regex", json!({"regex": {"type": "string", "format": "regex"}})),
    ]})
}

/// A function, in the form of the chat endpoint or of the responses endpoint.
fn tool() -> Value {
    let function = || {
        json!({
            "name": {"type": "string", "minLength": 1},
            "description": {"type": ["string", "null"]},
            "parameters": {"type": ["object", "null"]},
        })
    };
    let mut named = function();
    named["function"] = json!(false);
    json!({"anyOf": [
        object(&["function"], json!({"function": object(&["name"], function())})),
        object(&["name"], named),
    ]})
}

fn tool_choice() -> Value {
    let name = || object(&["name"], json!({"name": {"type": "string"}}));
    json!({"anyOf": [
        {"type": "null"},
        {"enum": ["none", "auto", "required"]},
        object(&["function"], json!({"function": name()})),
        name(),
    ]})
}

fn schemas(choices_max: usize) -> Value {
    let tools = json!({"type": ["array", "null"], "maxItems": 1024, "items": tool()});
    let message = object(
        &["role"],
        json!({
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"type": ["string", "array", "null"], "items": {"type": "object"}},
            "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
            "tool_call_id": {"type": "string"},
        }),
    );
    let nested = json!({"json_schema": object(&["schema"], json!({"schema": {"type": "object"}}))});
    let flat = json!({"schema": {"type": "object"}});
    let ids = json!({"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}});
    let messages = messages();
    // Counting makes no answer, so it has no `max_tokens`.
    let mut count_tokens = messages.clone();
    count_tokens["required"] = json!(["messages"]);
    if let Some(properties) = count_tokens["properties"].as_object_mut() {
        properties.remove("max_tokens");
    }
    json!({
        "Chat": object(&["messages"], joined([answers(choices_max), sampling(), json!({
            "messages": {"type": "array", "minItems": 1, "items": message},
            "max_completion_tokens": {"type": ["integer", "null"], "minimum": 1},
            "logprobs": {"type": ["boolean", "null"]},
            "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
            "tools": tools,
            "tool_choice": tool_choice(),
            "parallel_tool_calls": {"type": ["boolean", "null"]},
            "response_format": format(&nested),
            "chat_template_kwargs": {"type": ["object", "null"]},
            "reasoning_effort": {"type": ["string", "null"]},
        })])),
        "Completion": object(&["prompt"], joined([answers(choices_max), sampling(), json!({
            "prompt": {"oneOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
                ids,
                {"type": "array", "minItems": 1, "items": ids},
            ]},
            "logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
            "echo": {"type": ["boolean", "null"]},
            "response_format": format(&nested),
        })])),
        "Embedding": embedding(),
        "Rerank": rerank(),
        "Response": object(&["input"], joined([sampling(), json!({
            "model": {"type": ["string", "null"]},
            "input": {"type": ["string", "array"], "items": {"type": "object"}},
            "instructions": {"type": ["string", "null"]},
            "max_output_tokens": {"type": ["integer", "null"], "minimum": 1},
            "stop": stop(),
            "tools": tools,
            "tool_choice": tool_choice(),
            "parallel_tool_calls": {"type": ["boolean", "null"]},
            "chat_template_kwargs": {"type": ["object", "null"]},
            "text": {"type": ["object", "null"], "properties": {"format": format(&flat)}},
            "reasoning": {"type": ["object", "null"]},
            "metadata": {"type": ["object", "null"], "additionalProperties": {"type": "string"}},
            "store": {"type": ["boolean", "null"]},
            "truncation": {"enum": ["auto", "disabled", null]},
            "include": {"type": ["array", "null"], "items": {"const": "reasoning.encrypted_content"}},
            "previous_response_id": {"type": "null", "description": "responses are not stored"},
            "stream": {"type": ["boolean", "null"]},
        })])),
        "Messages": messages,
        "CountTokens": count_tokens,
        "Tokenize": tokenize(),
        "Detokenize": object(&["tokens"], json!({
            "model": {"type": ["string", "null"]},
            "tokens": {"type": "array", "description": "ids of the model's vocabulary", "items":
                {"type": "integer", "minimum": 0, "maximum": 4_294_967_295u32}},
        })),
    })
}

/// A text, under one of its three names.
fn tokenize() -> Value {
    let names = ["text", "content", "prompt"];
    let mut schema = object(
        &[],
        json!({
            "model": {"type": ["string", "null"]},
            "add_special_tokens": {"type": "boolean", "default": false, "description": "also named add_special"},
        }),
    );
    for name in names {
        schema["properties"][name] = json!({"type": "string", "description": "the text"});
    }
    schema["oneOf"] = names.iter().map(|name| json!({"required": [name]})).collect();
    schema
}

/// A form of the answer as Anthropic's API has it: a schema.
fn anthropic_format() -> Value {
    json!({"anyOf": [
        {"type": "null"},
        object(&["type", "schema"], json!({"type": {"const": "json_schema"}, "schema": {"type": "object"}})),
    ]})
}

/// A conversation in Anthropic's form.
fn messages() -> Value {
    object(
        &["messages", "max_tokens"],
        joined([
            sampling(),
            json!({
                "model": {"type": ["string", "null"]},
                "max_tokens": {"type": "integer", "minimum": 1},
                "system": {"type": ["string", "array", "null"], "items": {"type": "object"}},
                "messages": {"type": "array", "minItems": 1, "items": object(&["role", "content"], json!({
                    "role": {"enum": ["user", "assistant"]},
                    "content": {"type": ["string", "array"], "items": {"type": "object"}},
                }))},
                "stop_sequences": {"type": ["array", "null"], "items": {"type": "string"}},
                "tools": {"type": ["array", "null"], "maxItems": 1024, "items": object(&["name"], json!({
                    "name": {"type": "string", "minLength": 1},
                    "description": {"type": ["string", "null"]},
                    "input_schema": {"type": ["object", "null"]},
                }))},
                "tool_choice": {"anyOf": [
                    {"type": "null"},
                    object(&["type"], json!({"type": {"enum": ["auto", "any", "none"]}})),
                    object(&["type", "name"], json!({"type": {"const": "tool"}, "name": {"type": "string"}})),
                ]},
                "thinking": {"anyOf": [
                    {"type": "null"},
                    object(&["type"], json!({"type": {"enum": ["enabled", "adaptive", "disabled"]}})),
                ]},
                "output_config": {"type": ["object", "null"], "properties": {"format": anthropic_format()}},
                "output_format": anthropic_format(),
                "stream": {"type": ["boolean", "null"]},
            }),
        ]),
    )
}

/// Texts to embed.
fn embedding() -> Value {
    object(
        &["input"],
        json!({
            "model": {"type": ["string", "null"]},
            "input": {"oneOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]},
            "encoding_format": {"enum": ["float", "base64", null]},
            "dimensions": {"type": ["integer", "null"], "minimum": 1},
        }),
    )
}

/// Documents to rank.
fn rerank() -> Value {
    object(
        &["query", "documents"],
        json!({
            "model": {"type": ["string", "null"]},
            "query": {"type": "string"},
            "documents": {"type": "array", "minItems": 1, "items": {"oneOf": [
                {"type": "string"},
                object(&["text"], json!({"text": {"type": "string"}})),
            ]}},
            "top_n": {"type": ["integer", "null"], "minimum": 1},
            "return_documents": {"type": ["boolean", "null"]},
            "instruction": {"type": ["string", "null"]},
        }),
    )
}

#[cfg(test)]
mod tests;
