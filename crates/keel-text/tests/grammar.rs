//! Grammars over the vocabulary of the built-in model.

use keel_text::{
    AnswerForm, AnswerParser, AnswerPart, GrammarFactory, GrammarSource, TextFiles, Tokenizer, ToolSignature,
};
use serde_json::{Value, json};

fn factory() -> (GrammarFactory, Tokenizer) {
    let folder = keel_testkit::fixtures::demo();
    let files = TextFiles::read(&folder).expect("the built-in model is there");
    let tokenizer = Tokenizer::new(&files).expect("it has a tokenizer");
    (GrammarFactory::new(&files, &tokenizer).expect("its vocabulary is made of bytes"), tokenizer)
}

/// Draws a text from pseudo-random logits that the grammar masks.
fn draw(source: &GrammarSource, seed: u64) -> String {
    let (factory, tokenizer) = factory();
    let mut state = factory.start(source).expect("the grammar is right");
    let mut random = seed;
    let mut ids = Vec::new();
    while !state.is_complete() && ids.len() < 400 {
        let mut logits: Vec<f32> = (0..5000)
            .map(|_| {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (random >> 40) as f32
            })
            .collect();
        state.mask(&mut logits).expect("within bounds");
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).expect("not empty");
        assert!(logits[best].is_finite(), "something can always follow");
        if tokenizer.eos_ids().contains(&(best as u32)) {
            break;
        }
        state.accept(best as u32).expect("it was allowed");
        ids.push(best as u32);
    }
    tokenizer.decode(&ids, true).expect("decodes")
}

#[test]
fn random_output_follows_a_schema() {
    let schema = json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 150,
            "minimum": 0}, "kind": {"enum": ["cat", "dog"]}},
        "required": ["name", "age", "kind"],
        "additionalProperties": false,
    });
    for seed in 1..6 {
        let text = draw(&GrammarSource::JsonSchema(schema.clone()), seed);
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert!(
            value["name"].is_string() && ["cat", "dog"].contains(&value["kind"].as_str().expect("a kind"))
        );
        assert!(value["age"].as_u64().is_some_and(|age| age <= 150), "{text}");
    }
}

/// The calls in a text that the grammar of `tools` has drawn.
fn draw_calls(tools: &[ToolSignature], several: bool, seed: u64) -> Vec<(String, Value)> {
    let definition = |tool: &ToolSignature| json!({"type": "function", "function": {"name": tool.name}});
    let form = AnswerForm { tools: tools.iter().map(definition).collect(), ..AnswerForm::default() };
    let mut parser = AnswerParser::new(form);
    let mut parts = Vec::new();
    let text = draw(&GrammarSource::tool_calls(tools, several), seed);
    parser.push(&text, &mut parts);
    parser.finish(&mut parts);
    let call = |part| match part {
        AnswerPart::ToolCall { name, arguments } => {
            (name, serde_json::from_str(&arguments).expect("arguments are JSON"))
        }
        part => panic!("{text}: {part:?}"),
    };
    parts.into_iter().map(call).collect()
}

#[test]
fn random_output_calls_a_tool() {
    let parameters = json!({"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}},
        "required": ["city"], "additionalProperties": false});
    let tools = ["weather", "the \"time\""]
        .map(|name| ToolSignature { name: name.into(), arguments: parameters.clone() });
    let mut called = std::collections::BTreeSet::new();
    for seed in 1..9 {
        let calls = draw_calls(&tools, seed % 2 == 0, seed);
        assert!(!calls.is_empty() && (seed % 2 == 0 || calls.len() == 1), "{calls:?}");
        for (name, arguments) in calls {
            assert!(["Bern", "Rome"].contains(&arguments["city"].as_str().expect("a city")), "{arguments}");
            called.insert(name);
        }
    }
    assert_eq!(called.len(), 2, "{called:?}");
}

#[test]
fn references_in_a_tool_begin_at_its_own_schema() {
    let by_definition = json!({"$defs": {"City": {"enum": ["Bern", "Rome"]}}, "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"], "additionalProperties": false});
    let recursive = json!({"type": "object", "properties": {"value": {"type": "boolean"}, "next": {"$ref": "#"}},
        "required": ["value"], "additionalProperties": false});
    let tools = [("weather", by_definition), ("list", recursive)]
        .map(|(name, arguments)| ToolSignature { name: name.into(), arguments });
    let mut nested = 0;
    for seed in 1..17 {
        let [(name, arguments)] = &draw_calls(&tools, false, seed)[..] else { panic!("one call") };
        if name == "weather" {
            assert!(["Bern", "Rome"].contains(&arguments["city"].as_str().expect("a city")), "{arguments}");
            continue;
        }
        let mut node = arguments;
        while node["next"].is_object() {
            assert!(node["value"].is_boolean(), "{arguments}");
            node = &node["next"];
            nested += 1;
        }
        assert!(node["value"].is_boolean() && node.get("next").is_none(), "{arguments}");
    }
    assert!(nested > 0);
}

#[test]
fn what_is_taken_back_leaves_no_trace() {
    let (factory, _) = factory();
    let schema = json!({"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}, "n": {"type": "integer",
        "minimum": 0, "maximum": 99}}, "required": ["kind", "n"], "additionalProperties": false});
    let mut state = factory.start(&GrammarSource::JsonSchema(schema)).expect("the grammar is right");
    let allowed = |state: &mut keel_text::GrammarState| -> Vec<u32> {
        let mut logits = vec![0.0f32; 5000];
        state.mask(&mut logits).expect("within bounds");
        (0u32..).zip(&logits).filter(|(_, logit)| logit.is_finite()).map(|(id, _)| id).collect()
    };
    let mut random = 5u64;
    let mut pick = |ids: &[u32]| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ids[(random >> 33) as usize % ids.len()]
    };
    let mut to_the_end = 0;
    while !state.is_complete() {
        let here = allowed(&mut state);
        // Goes up to five tokens ahead, including an end token where one comes.
        let mut ahead = 0;
        while ahead < 5 && !state.is_complete() {
            let ids = allowed(&mut state);
            state.accept(pick(&ids)).expect("it was allowed");
            ahead += 1;
        }
        to_the_end += usize::from(state.is_complete());
        state.rollback(ahead).expect("all of them came");
        assert!(!state.is_complete());
        assert_eq!(allowed(&mut state), here);
        state.accept(pick(&here)).expect("it was allowed");
    }
    assert!(to_the_end > 0);
    assert!(state.rollback(1000).is_err(), "more than came");
}

#[test]
fn random_output_matches_an_expression() {
    let text = draw(&GrammarSource::Regex("[ab]{3}-[0-9]{2}".into()), 9);
    let classes: [&[u8]; 6] = [b"ab", b"ab", b"ab", b"-", b"0123456789", b"0123456789"];
    let matches = text.bytes().zip(classes).all(|(byte, class)| class.contains(&byte));
    assert!(text.len() == classes.len() && matches, "{text}");
    let text = draw(&GrammarSource::Lark("start: \"yes\" | \"no\"".into()), 9);
    assert!(["yes", "no"].contains(&text.as_str()), "{text}");
}

#[test]
fn what_cannot_be_used_is_refused() {
    let (factory, _) = factory();
    for source in [
        GrammarSource::JsonSchema(json!({"type": "nothing"})),
        GrammarSource::Lark("start: unknown".into()),
        GrammarSource::Regex("(".into()),
        GrammarSource::Regex("a".repeat(300 << 10)),
    ] {
        let error = factory.start(&source).err().expect("it is wrong").to_string();
        assert!(error.starts_with("the schema or grammar cannot be used"), "{error}");
    }
}

/// The text that a rule captures has no bound, and each state of a lexer has a bit for each literal.
#[test]
fn what_takes_memory_without_bound_is_refused() {
    let (factory, _) = factory();
    let literals: Vec<String> = (0..9_000).map(|i| format!("\"w{i}\"")).collect();
    for (source, why) in [
        ("start: a\na[capture]: a \"b\" | \"b\"".to_string(), "remove capture"),
        ("start: a\na[stop=\".\", stop_capture=\"end\"]: /[a-z]+/".to_string(), "stop_capture"),
        (format!("start: {}", literals.join(" | ")), "at most 8192"),
    ] {
        let error = factory.start(&GrammarSource::Lark(source)).err().expect("it is refused").to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn a_state_counts_more_bytes_with_each_token_and_its_clone_counts_the_same() {
    let (factory, tokenizer) = factory();
    let source = GrammarSource::Lark("start: a | b\na: a \"x\" | \"x\"\nb: b \"x\" | \"x\"".into());
    assert!(source.compile_bytes() > 1000);
    let mut state = factory.start(&source).expect("the grammar is right");
    let letter = tokenizer.token_to_id("x").expect("a letter");
    state.allowed().expect("within bounds");
    let (first, other) = (state.bytes(), state.clone());
    for _ in 0..50 {
        let before = state.bytes();
        state.accept(letter).expect("it goes on so");
        state.allowed().expect("within bounds");
        assert!(state.bytes() > before, "{} bytes after {before}", state.bytes());
    }
    // Each row has an item of each rule.
    assert!(state.bytes() - first > 50 * 6 * size_of::<u64>(), "{first} to {} bytes", state.bytes());
    assert_eq!(other.bytes(), first, "the other has not moved");
    let clone = state.clone();
    assert_eq!(clone.bytes(), state.bytes());
}

#[test]
fn nothing_follows_an_error() {
    let (factory, tokenizer) = factory();
    let mut state = factory.start(&GrammarSource::Regex("x+y".into())).expect("the grammar is right");
    let letter = |letter: &str| tokenizer.token_to_id(letter).expect("a letter");
    state.accept(letter("x")).expect("it begins so");
    let before = state.clone();
    state.accept(letter("z")).expect_err("it is forbidden");
    assert!(state.is_complete());
    assert!(state.allowed().is_err() && state.accept(letter("x")).is_err() && state.rollback(1).is_err());
    assert!(state.clone().allowed().is_err(), "also in a clone");
    let mut before = before;
    assert!(!before.is_complete());
    before.accept(letter("y")).expect("the clone goes on");
    assert!(before.is_complete());
    before.allowed().expect("the end");
}

/// The compiler recurses from rule to rule. A stack overflow would end the process.
#[test]
fn a_long_chain_of_rules_needs_no_more_stack_than_there_is() {
    let (factory, _) = factory();
    let chain = |rules: usize, open: &str, close: &str| {
        let rule = |n: usize| format!("r{n}:{open}r{}{close}\n", n + 1);
        let rules: String = (0..rules).map(rule).collect();
        format!("start: r0\n{rules}")
    };
    for (rules, nesting) in [(2_500, 27), (15_000, 0)] {
        let grammar = chain(rules, &"(".repeat(nesting), &")".repeat(nesting)) + &format!("r{rules}:\"a\"\n");
        drop(factory.start(&GrammarSource::Lark(grammar)));
    }
    let schemas = (0..6_000).map(|n| (format!("d{n}"), json!({"$ref": format!("#/$defs/d{}", n + 1)})));
    let mut schemas: serde_json::Map<String, Value> = schemas.collect();
    schemas.insert("d6000".into(), json!({"const": 1}));
    drop(factory.start(&GrammarSource::JsonSchema(json!({"$defs": schemas, "$ref": "#/$defs/d0"}))));
}

/// Gemma lists runs of spaces as added tokens that are not special.
#[test]
fn an_added_token_of_spaces_means_spaces() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/assets/byte_tokens");
    let read = |name| std::fs::read(folder.join(name)).expect("it is there");
    let mut json: Value = serde_json::from_slice(&read("tokenizer.json")).expect("JSON");
    let added = json["added_tokens"].as_array_mut().expect("a list");
    let mut spaces = added[0].clone();
    (spaces["id"], spaces["content"], spaces["special"]) =
        (json!(400), json!("\u{2581}\u{2581}"), json!(false));
    added.push(spaces);
    let (json, config) = (json.to_string(), read("tokenizer_config.json"));
    let files = TextFiles::in_memory(json.as_bytes()).with_tokenizer_config(&config);
    let tokenizer = Tokenizer::new(&files).expect("it is right");
    let factory = GrammarFactory::new(&files, &tokenizer).expect("its vocabulary is made of bytes");
    let letter = tokenizer.token_to_id("a").expect("a letter");
    for (regex, fits) in [("a  b", true), ("a[^ ]+", false)] {
        let mut state = factory.start(&GrammarSource::Regex(regex.into())).expect("the grammar is right");
        state.accept(letter).expect("it begins so");
        let mut logits = vec![0.0f32; 401];
        state.mask(&mut logits).expect("within bounds");
        assert_eq!(logits[400].is_finite(), fits, "{regex}");
    }
}

#[test]
fn end_ids_that_are_no_tokens_are_passed_over() {
    let file = keel_testkit::fixtures::demo().join("tokenizer.json");
    let json = std::fs::read(file).expect("the built-in model is there");
    let end_at = |ids: &str| {
        let config = format!(r#"{{"eos_token_id": {ids}}}"#);
        let files = TextFiles::in_memory(&json).with_generation_config(config.as_bytes());
        let tokenizer = Tokenizer::new(&files).expect("it has a tokenizer");
        GrammarFactory::new(&files, &tokenizer).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(end_at("[4294967295, 4093]"), Ok(()));
    let error = end_at("4294967295").expect_err("nothing ends a text");
    assert!(error.contains("no end token"), "{error}");
}
