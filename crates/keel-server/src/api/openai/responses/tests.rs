use super::*;
use crate::api::openai::messages::to_template;

fn translated(body: Value) -> Result<Value> {
    to_chat(serde_json::from_value(body).expect("the types are right"))
}

#[test]
fn an_assistants_items_are_one_turn() {
    let call = |id: &str| json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"});
    let output = |id: &str| json!({"type": "function_call_output", "call_id": id, "output": "x"});
    let said = json!({"role": "assistant", "content": "I look."});
    let input = json!([{"role": "user", "content": "Look!"}, {"type": "reasoning"}, said, call("1"), call("2"),
        output("1"), output("2"), call("3"), call("4"), output("3"), output("4")]);
    let chat = translated(json!({"input": input})).expect("right");
    let turns: Vec<(&str, usize)> = chat["messages"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|m| (m["role"].as_str().expect("a role"), m["tool_calls"].as_array().map_or(0, Vec::len)))
        .collect();
    let expected =
        [("user", 0), ("assistant", 2), ("tool", 0), ("tool", 0), ("assistant", 2), ("tool", 0), ("tool", 0)];
    assert_eq!(turns, expected);
    assert_eq!(chat["messages"][1]["content"], "I look.");
}

/// A chat has the same turns, and its template decides which of them show their reasoning.
#[test]
fn reasoning_belongs_to_the_turn_of_its_answer() {
    let thought = |text: &str| Kind::Reasoning.item("rs", text, "completed");
    let call = json!({"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"});
    let output = json!({"type": "function_call_output", "call_id": "1", "output": "x"});
    let user = json!({"role": "user", "content": "Look!"});
    let said = Kind::Message.item("msg", "I look.", "completed");
    let input = json!([
        user,
        thought("Hm."),
        said,
        call,
        output,
        thought("So"),
        thought("?"),
        call,
        output,
        said,
        user
    ]);
    let chat = translated(json!({"input": input})).expect("right");
    let turns: Vec<(&str, Option<&str>, bool, bool)> = chat["messages"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|turn| {
            let role = turn["role"].as_str().expect("a role");
            let reasoning = turn["reasoning_content"].as_str();
            (role, reasoning, turn["content"].is_null(), turn["tool_calls"].is_array())
        })
        .collect();
    let expected = [
        ("user", None, false, false),
        ("assistant", Some("Hm."), false, true),
        ("tool", None, false, false),
        ("assistant", Some("So?"), true, true),
        ("tool", None, false, false),
        ("assistant", None, false, false),
        ("user", None, false, false),
    ];
    assert_eq!(turns, expected);
    let messages = serde_json::from_value(chat["messages"].clone()).expect("messages");
    let messages = to_template(messages).expect("right").messages;
    assert_eq!(messages[1].extra["reasoning_content"], "Hm.");
}

#[test]
fn instructions_and_a_developers_message_are_one_system_message() {
    let input = json!([{"role": "developer", "content": "b"}, {"role": "user", "content": "Hi"}]);
    let chat = translated(json!({"instructions": "a", "input": input})).expect("right");
    let messages = serde_json::from_value(chat["messages"].clone()).expect("messages");
    let messages = to_template(messages).expect("right").messages;
    let contents: Vec<(&str, &Value)> = messages.iter().map(|m| (&*m.role, &m.content)).collect();
    assert_eq!(contents, [("system", &json!("a\n\nb")), ("user", &json!("Hi"))]);
}

#[test]
fn the_output_of_a_call_is_a_text_or_parts() {
    let of = |output: Value| {
        let item = json!({"type": "function_call_output", "call_id": "1", "output": output});
        translated(json!({"input": [item]})).map(|mut chat| chat["messages"][0].take())
    };
    let parts = json!([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:x"}]);
    for output in [json!("a"), parts, Value::Null] {
        let message = json!({"role": "tool", "tool_call_id": "1", "content": output});
        assert_eq!(of(output).expect("right"), message);
    }
    for wrong in [json!({"a": 1}), json!(5), json!(true)] {
        assert_eq!(of(wrong).expect_err("neither").field(), Some("input"));
    }
}

#[test]
fn fields_of_a_chat_are_passed_on_or_refused() {
    let fields = json!({"input": "x", "stop": ["a"], "min_p": 0.5, "presence_penalty": 1.0, "n": 1,
        "frequency_penalty": 1.0, "repetition_penalty": 1.5, "logit_bias": {"5": 1.0}, "top_logprobs": 0});
    let chat = translated(fields.clone()).expect("right");
    for field in
        ["stop", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"]
    {
        assert_eq!(chat[field], fields[field], "{field}");
    }
    for (field, value) in [
        ("n", json!(2)),
        ("response_format", json!({"type": "json_object"})),
        ("top_logprobs", json!(3)),
        ("prompt", json!({"id": "p"})),
        ("max_tokens", json!(5)),
    ] {
        let refused = translated(json!({"input": "x", field: value})).expect_err("it has no effect here");
        assert_eq!(refused.field(), Some(field));
    }
}
