//! Chat templates through the public API. `assets/templates/render_reference.py` wrote the expected texts with Jinja2,
//! configured as in the transformers library.

mod common;

use std::time::{Duration, Instant, UNIX_EPOCH};

use common::asset;
use keel_text::{ChatRequest, ChatTemplate, Message, SpecialTokens, TextError, TextFiles};
use serde_json::{Map, Value};

fn compile(source: &str) -> ChatTemplate {
    let special =
        SpecialTokens { bos: Some("<bos>".into()), eos: Some("<eos>".into()), ..Default::default() };
    ChatTemplate::from_source(source, special).unwrap()
}

fn message(json: &Value) -> Message {
    let mut extra = json.as_object().unwrap().clone();
    let role = extra.shift_remove("role").unwrap().as_str().unwrap().to_string();
    let content = extra.shift_remove("content").unwrap();
    Message { role, content, extra }
}

#[test]
fn templates_render_as_the_reference_does() {
    let folder = asset("templates");
    let document: Value =
        serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
    let cases = document["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 23);
    for (n, case) in cases.iter().enumerate() {
        let name = case["template"].as_str().unwrap();
        let template = compile(&std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap());
        let request = &case["request"];
        let messages: Vec<Message> = request["messages"].as_array().unwrap().iter().map(message).collect();
        let rendered = template.render(&ChatRequest {
            messages: &messages,
            add_generation_prompt: request.get("add_generation_prompt").is_none_or(|add| add == true),
            tools: request.get("tools").map(|tools| tools.as_array().unwrap().as_slice()),
            variables: request.get("variables").map(|variables| variables.as_object().unwrap()),
            now: UNIX_EPOCH + Duration::from_secs(document["now"].as_u64().unwrap()),
        });
        match (&case["expected"]["text"], &case["expected"]["refused"]) {
            (Value::String(text), _) => {
                let rendered = rendered.unwrap_or_else(|err| panic!("case {n}, {name}: {err}"));
                assert_eq!(&rendered, text, "case {n}, {name}");
            }
            (_, Value::String(words)) => match rendered {
                Err(TextError::Refused { message }) => assert_eq!(&message, words, "case {n}, {name}"),
                other => panic!("case {n}, {name}: {other:?}"),
            },
            other => panic!("case {n}: {other:?}"),
        }
    }
}

#[test]
fn a_checkpoint_brings_its_template_and_special_tokens() {
    let template = ChatTemplate::open(&asset("byte_level")).unwrap().unwrap();
    let messages = [Message::new("user", "hi")];
    let text = template.render(&ChatRequest::new(&messages)).unwrap();
    assert_eq!(text, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    assert!(ChatTemplate::open(&asset("byte_tokens")).unwrap().is_none());

    let config = br#"{"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ pad_token is defined }}"}"#;
    let files = TextFiles::in_memory(b"").with_tokenizer_config(config);
    let text = ChatTemplate::new(&files).unwrap().unwrap().render(&ChatRequest::new(&messages)).unwrap();
    assert_eq!(text, "<s>hiFalse");
}

#[test]
fn requests_with_tools_take_the_template_for_tools() {
    let config = br#"{"chat_template": [{"name": "default", "template": "plain"},
                                        {"name": "tool_use", "template": "{{ tools|length }} tools"}]}"#;
    let template =
        ChatTemplate::new(&TextFiles::in_memory(b"").with_tokenizer_config(config)).unwrap().unwrap();
    let tools = [Value::Null, Value::Null];
    assert_eq!(template.render(&ChatRequest::new(&[])).unwrap(), "plain");
    assert_eq!(
        template.render(&ChatRequest { tools: Some(&tools), ..ChatRequest::new(&[]) }).unwrap(),
        "2 tools"
    );
}

#[test]
fn a_template_without_a_place_for_tools_gets_them_as_text() {
    let tools = [serde_json::json!({"function": {"name": "f"}})];
    let said = [message(
        &serde_json::json!({"role": "assistant", "content": "", "tool_calls": [{"function": tools[0]["function"]}]}),
    )];
    let asked = |template: &ChatTemplate, tools| {
        template.render(&ChatRequest { tools, ..ChatRequest::new(&said) }).unwrap()
    };
    let all =
        "{% for m in messages %}[{{ m.role }}: {{ m.content }}{{ m.tool_calls is defined }}]{% endfor %}";
    let plain = compile(all);
    assert!(asked(&plain, Some(&tools)).starts_with("[system: You can call"));
    let call = "[assistant: <tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    assert!(asked(&plain, None).starts_with(call));
    let reading = compile(&format!("{{% if tools %}}{{{{ tools|length }}}}{{% endif %}}{all}"));
    assert_eq!(asked(&reading, Some(&tools)), "1[assistant: True]");
    // A statement that sets them from themselves reads them, too.
    for value in ["tools", "tools or []", "tools if tools is defined else none"] {
        let resetting = compile(&format!("{{%- set tools = {value} -%}}{{{{ tools|length }}}}{all}"));
        assert_eq!(asked(&resetting, Some(&tools)), "1[assistant: True]", "{value}");
    }
    for value in ["[]", "messages[0].tools", "'tools'"] {
        let own = compile(&format!("{{% set tools = {value} %}}{all}"));
        assert!(asked(&own, Some(&tools)).starts_with("[system: You can call"), "{value}");
    }
    // Of two templates only the one for tools reads them.
    let both = serde_json::json!({"chat_template": [{"name": "default", "template": all},
        {"name": "tool_use", "template": "{{ tools|length }} tools"}]})
    .to_string();
    let files = TextFiles::in_memory(b"").with_tokenizer_config(both.as_bytes());
    let both = ChatTemplate::new(&files).unwrap().unwrap();
    assert_eq!(asked(&both, Some(&tools)), "1 tools");
    assert!(asked(&both, None).starts_with(call));
}

/// Over Anthropic's API a message of the user has results and text.
#[test]
fn a_template_of_strict_turns_takes_results_and_text() {
    let source = std::fs::read_to_string(asset("templates").join("gemma_like.jinja")).unwrap();
    let called = serde_json::json!({"role": "assistant", "content": "",
        "tool_calls": [{"function": {"name": "f"}}]});
    let result = serde_json::json!({"role": "tool", "content": "one"});
    let messages =
        [Message::new("user", "Go."), message(&called), message(&result), Message::new("user", "And now?")];
    let text = compile(&source).render(&ChatRequest::new(&messages)).unwrap();
    let turns = "<bos><start_of_turn>user\nGo.<end_of_turn>\n<start_of_turn>model\n<tool_call>\n{\"name\": \"f\", \
                 \"arguments\": {}}\n</tool_call><end_of_turn>\n<start_of_turn>user\n<tool_response>\none\n\
                 </tool_response>\nAnd now?<end_of_turn>\n<start_of_turn>model\n";
    assert_eq!(text, turns);
}

/// The user chooses a request's variables. They must not replace the conversation.
#[test]
fn variables_cannot_replace_what_the_template_relies_on() {
    let mut variables = Map::new();
    variables.insert("messages".into(), Value::from("mine"));
    variables.insert("bos_token".into(), Value::from("mine"));
    variables.insert("mood".into(), Value::from("calm"));
    let request = ChatRequest { variables: Some(&variables), ..ChatRequest::new(&[]) };
    let text = compile("{{ bos_token }} {{ messages }} {{ mood }}").render(&request).unwrap();
    assert_eq!(text, "<bos> [] calm");
}

fn failure(source: &str) -> String {
    compile(source).render(&ChatRequest::new(&[])).unwrap_err().to_string()
}

#[test]
fn errors_name_template_reason_and_line() {
    let err =
        ChatTemplate::from_source("{{ 1 }}\n{% if %}", SpecialTokens::default()).unwrap_err().to_string();
    assert!(
        err.starts_with("chat template \"default\": syntax error: ") && err.ends_with("(line 2)"),
        "{err}"
    );
    let err = failure("\n\n{{ missing.field }}");
    assert!(
        err.starts_with("chat template \"default\": undefined value") && err.ends_with("(line 3)"),
        "{err}"
    );
    assert_eq!(
        failure("{{ raise_exception('Only ' ~ 2 ~ ' roles') }}"),
        "the chat template refuses this conversation: Only 2 roles"
    );
    assert!(failure("{{ strftime_now('%Q') }}").contains("\"%Q\" has a directive that is not known"));
    assert!(failure("{{ '{a[é]}'.format(a={}) }}").contains("the key \"é\" of a format string is not ASCII"));
    assert!(failure("{{ missing | tojson }}").contains("a value of type undefined has no JSON form"));
}

/// The expected text is Jinja2's.
#[test]
fn a_template_with_line_ends_of_other_systems_renders_alike() {
    let source = "{% if true %}\r\nA\rB\r\n{% endif %}\r\n{{ 'x\r\ny\rz' | replace('\n', '+') }}\r\n\r\n";
    let text = compile(source).render(&ChatRequest::new(&[])).unwrap();
    assert_eq!(text, "A\nB\nx+y+z\n");
}

#[test]
fn a_number_in_a_format_string_is_no_width() {
    let source = "{{ 'Knowledge until 2023. Today: {}'.format(5) }} {{ '%s of 2023' | format(5) }}";
    let text = compile(source).render(&ChatRequest::new(&[])).unwrap();
    assert_eq!(text, "Knowledge until 2023. Today: 5 5 of 2023");
}

/// Each of these would run for ever, fill the memory or overflow the stack.
#[test]
fn hostile_templates_are_stopped() {
    let nested_loops =
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}";
    let endless_macro = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
    let deep_list = "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% for j in range(99999) %}\
                     {% set n.x = [[[[[[[[n.x]]]]]]]] %}{% endfor %}{% endfor %}";
    let deep_json = "{% set n = namespace(x=[]) %}{% for i in range(500) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x|tojson }}";
    let (steps, width) = ("too many steps", "a width of 11 digits in a format string");
    let wide = [
        ("{{ 'x' | indent(10000000000000) }}", "indent is 10000000000000, at most 999"),
        ("{{ [1] | tojson(indent=10000000000000) }}", "indent is 10000000000000, at most 999"),
        ("{{ '%99999999999d' | format(1) }}", width),
        ("{{ '{:99999999999}'.format(1) }}", width),
        ("{{ '{:}>99999999999}'.format(1) }}", width),
        ("{{ '{a[}]:99999999999}'.format(a={'}': 1}) }}", width),
        ("{{ '%(a)99999999999d' | format({'a': 1}) }}", width),
        ("{{ 'x' * 10000000000000 }}", "repeated string is too large"),
        ("{{ range(10000000000) | list }}", "range has too many elements"),
        ("{{ [1] | batch(10000000000) }}", "filter batch is unknown"),
        ("{{ [1] | slice(10000000000) }}", "filter slice is unknown"),
        ("{% for i in range(99999) %}{{ 'x' * 1000000 }}{% endfor %}", "the output exceeds 67108864 bytes"),
    ];
    let deep = [
        (nested_loops, steps),
        (endless_macro, "recursion limit exceeded"),
        (deep_list, steps),
        (deep_json, "a value is nested deeper than 64 levels"),
    ];
    for (source, reason) in deep.into_iter().chain(wide) {
        let start = Instant::now();
        let err = failure(source);
        assert!(err.starts_with("chat template \"default\": ") && err.contains(reason), "{source}: {err}");
        assert!(start.elapsed() < Duration::from_secs(20), "{source} took {:?}", start.elapsed());
    }
}

/// Chains on which the engine's compiler recurses or takes quadratic time.
#[test]
fn hostile_sources_are_refused_or_compiled() {
    let compiled = |source: &str| ChatTemplate::from_source(source, SpecialTokens::default());
    let refusal = |source: &str| compiled(source).unwrap_err().to_string();
    let long = "x".repeat((128 << 10) + 1);
    assert_eq!(refusal(&long), "chat template \"default\": 131073 bytes, but at most 131072 are accepted");

    let chain = |before: &str, after: &str, bytes: usize| {
        let links = (bytes - 8) / (before.len() + after.len());
        format!("{{{{ {}x{} }}}}", before.repeat(links), after.repeat(links))
    };
    let links = ["-", "not ", "1+", "x~", "x and ", "1 if x else "].map(|link| (link, ""));
    for (before, after) in links.into_iter().chain([".a", "|e", "()", "[1]", "**1"].map(|link| ("", link))) {
        let err = refusal(&chain(before, after, 9000));
        assert!(err.contains("bytes without its strings, but at most 4096 are accepted"), "{err}");
        let template = compiled(&chain(before, after, 4000)).unwrap();
        drop(template.render(&ChatRequest::new(&[])));
    }
    for brackets in [("(", ")"), ("[", "]")] {
        let err = refusal(&chain(brackets.0, brackets.1, 4000));
        assert!(err.contains("recursion"), "{err}");
    }
    let elif = format!("{{% if x %}}{}{{% endif %}}", "{%elif x%}".repeat(13_000));
    assert_eq!(compiled(&elif).unwrap().render(&ChatRequest::new(&[])).unwrap(), "");
}

/// The step limit leaves room for any real conversation.
#[test]
fn a_conversation_of_five_thousand_messages_is_rendered() {
    let source = std::fs::read_to_string(asset("templates").join("qwen_like.jinja")).unwrap();
    let messages: Vec<Message> = (0..5000)
        .map(|n| Message::new(if n % 2 == 0 { "user" } else { "assistant" }, format!("turn {n}")))
        .collect();
    let text = compile(&source).render(&ChatRequest::new(&messages)).unwrap();
    assert!(
        text.ends_with("turn 4999<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        "{}",
        &text[text.len() - 80..]
    );
}
