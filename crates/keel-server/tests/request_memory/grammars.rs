//! Compiled grammars: the memory of compiling, and the tables of each answer, which grow with its text.

use keel_server::ServerOptions;
use keel_text::{GrammarFactory, GrammarSource, GrammarState, TextFiles, Tokenizer};
use serde_json::{Value, json};

use crate::common::{Running, demo, engine_options, wait_for};
use crate::{counter, heap_bytes};

/// Heap that the library takes once, whatever the grammar.
const SLACK: usize = 64 << 10;

/// A grammar whose parser has three items for each rule in the row of each byte.
fn many_rules(rules: usize) -> String {
    let names: Vec<String> = (0..rules).map(|i| format!("a{i}")).collect();
    let rule = |name: &String| format!("{name}: {name} \"q\" | \"q\"\n");
    format!("start: {}\n{}", names.join(" | "), names.iter().map(rule).collect::<String>())
}

/// A schema with a regular expression for each property.
fn patterns(properties: usize) -> Value {
    let property = |i: usize| {
        let pattern = format!("^[a-z]{{{},{}}}(x|y{i}|z)*[0-9]{{1,{}}}$", 1 + i % 7, 9 + i % 11, 3 + i % 5);
        (format!("name_{i}"), json!({"type": "string", "pattern": pattern}))
    };
    let required: Vec<String> = (0..30).map(|i| property(i).0).collect();
    let properties: serde_json::Map<String, Value> = (0..properties).map(property).collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

/// A grammar whose every token has many ways to go on.
fn tangled(words: usize) -> String {
    let names: Vec<String> = (0..words).map(|i| format!("w{i}")).collect();
    let rule = |i: usize| {
        let (next, other) = ((i + 1) % words, (i * 7 + 3) % words);
        format!("w{i}: /[a-z ]{{0,{}}}[aeiou]{{1,{}}}/ (w{next} | w{other})?\n", 20 + i, 9 + i % 7)
    };
    format!("start: ({})+\n{}", names.join("|"), (0..words).map(rule).collect::<String>())
}

fn sources() -> Vec<(&'static str, GrammarSource)> {
    let names: Vec<String> = (0..2000).map(|i| format!("field {i}")).collect();
    vec![
        ("an object", GrammarSource::json_object()),
        ("many rules", GrammarSource::Lark(many_rules(250))),
        ("patterns", GrammarSource::JsonSchema(patterns(100))),
        ("tangled words", GrammarSource::Lark(tangled(12))),
        ("many names", GrammarSource::JsonSchema(json!({"enum": names}))),
        ("a long text", GrammarSource::JsonSchema(json!({"type": "string", "maxLength": 5000}))),
        ("letters of all scripts", GrammarSource::Regex(r"[\p{L}\p{N} ]{1,400}".into())),
    ]
}

/// Follows a grammar for some tokens, which are drawn from those that it allows.
fn follow(state: &mut GrammarState, tokenizer: &Tokenizer, tokens: usize) {
    let (vocab, mut random) = (tokenizer.vocab_size(), 7u64);
    for _ in 0..tokens {
        let mut logits = vec![0.0f32; vocab];
        state.mask(&mut logits).expect("within bounds");
        let is_open = |id: &u32| logits[*id as usize] == 0.0 && !tokenizer.eos_ids().contains(id);
        let open: Vec<u32> = (0..vocab as u32).filter(is_open).collect();
        if open.is_empty() {
            break;
        }
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        state.accept(open[(random >> 33) as usize % open.len()]).expect("it was allowed");
    }
    // The bytes are as of the last mask.
    state.allowed().expect("within bounds");
}

/// A state counts no fewer bytes than it takes of the heap: after compiling, in a clone, and after a text.
pub fn states_count_what_they_take() {
    let files = TextFiles::read(&demo()).expect("the built-in model is there");
    let tokenizer = Tokenizer::new(&files).expect("it has a tokenizer");
    let factory = GrammarFactory::new(&files, &tokenizer).expect("its vocabulary is made of bytes");
    // This creates everything that is created only once.
    drop(factory.start(&GrammarSource::json_object()).expect("it is right").allowed());
    let mut wrong = Vec::new();
    let mut check = |what: &str, when: &str, taken: usize, counted: usize| {
        println!("{what}, {when}: {} KB on the heap, {} KB counted", taken / 1000, counted / 1000);
        if taken > counted + SLACK {
            wrong.push(format!("{what}, {when}: {taken} bytes on the heap, {counted} counted"));
        }
    };
    for (what, source) in sources() {
        let before = heap_bytes();
        let mut compiled = factory.start(&source).expect("it is right");
        drop(compiled.allowed().expect("within bounds"));
        check(what, "compiled", heap_bytes().saturating_sub(before), compiled.bytes());
        let before = heap_bytes();
        let mut copy = compiled.clone();
        check(what, "copied", heap_bytes().saturating_sub(before), copy.bytes());
        follow(&mut copy, &tokenizer, 300);
        check(what, "after a text", heap_bytes().saturating_sub(before), copy.bytes());
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// A request whose answers have parsers that grow by 750 items with each token. The bias keeps the text from its end.
fn growing(tokens: usize, answers: usize) -> Value {
    json!({"prompt": "Once", "max_tokens": tokens, "n": answers, "temperature": 0, "ignore_eos": true,
        "logit_bias": {"4093": -100, "4095": -100},
        "response_format": {"type": "grammar", "grammar": many_rules(250)}})
}

/// Requests whose compiled grammars are much larger than their bodies: status, name of the content, path and body.
pub fn large_grammars() -> Vec<(u16, &'static str, &'static str, String)> {
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": patterns(300)}});
    let many = json!({"prompt": "Once", "max_tokens": 4, "n": 16, "response_format": format});
    vec![
        (200, "rows of long answers", "/v1/completions", growing(400, 4).to_string()),
        (200, "patterns of many answers", "/v1/completions", many.to_string()),
    ]
}

/// Answers whose grammars outgrow the memory end with the numbers, and leave nothing.
pub fn grammars_without_room_are_refused() {
    let options = ServerOptions { request_memory: 32 << 20, ..ServerOptions::default() };
    let server = Running::with(engine_options(), options);
    let reply = server.post("/v1/completions", &growing(1500, 8));
    assert_eq!(reply.status, 413, "{}", reply.body);
    assert!(reply.body.contains("--request-memory"), "{}", reply.body);
    wait_for("all is given back", || server.model.memory.used() == 0);
    let finished =
        |reason: &str| counter(&server, &format!("requests_finished_total{{reason=\"{reason}\"}}"));
    assert_eq!((finished("request_too_large"), finished("cancelled")), (8, 0), "all have begun");
}
