//! Runs answers and grammars through seeded mutations, which must not panic. `fuzz/` runs the same functions on inputs
//! that libFuzzer finds.

#[path = "common/answering.rs"]
mod answering;

use answering::{exercise_answer, exercise_grammar};
use keel_testkit::random::{Random, mutate};

const ANSWERS: [&str; 19] = [
    "<think>\nLet me see.\n</think>\n\nIt is <tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"1\", \"y\": 2}}\n</tool_call>\n",
    "<tool_call>\n<function=f>\n<parameter=x>\na\nb\n</parameter>\n<parameter=y>\n7\n</parameter>\n</function>\n</tool_call>",
    "{\"name\": \"get\", \"parameters\": {\"a\": [1, {\"b\": null}]}}",
    "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}",
    "Hello <tool_call> there </think> \u{1f600}",
    "[THINK]a[/THINK][TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"x\": \"1\"}}]",
    "b[TOOL_CALLS]f[ARGS]{\"y\": 2}[TOOL_CALLS]get[CALL_ID]c[ARGS]{}",
    "<|tool_call|>[{\"name\": \"get\", \"arguments\": {}}]<|/tool_call|> c",
    "f\n{\"x\": \"1\"}\nget\n{}",
    "<function_calls>f(x='a\\n', y=-2)\nget(a=[1, {'b': None}])</function_calls> d",
    "a\n<function=f>\n<parameter=x>\n</function> </tool_call>\n</parameter>\n</function>\n</tool_call> b",
    "<tool_call>\n<function=f>\n<parameter=x>\na\n<parameter=y>\n7\n</function>\n</tool_call>\n<tool_call>get</tool_call>",
    "{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"get\", \"parameters\": {}}",
    "{\"a\": \"<tool_call>\", \"b\": 1} <tool_call>get<arg_key>a</arg_key>b</arg_value></tool_call>",
    "a</think>  <tool_call>{\"name\": \"get\"}</tool_call><tool_call>{\"name\": \"nobody\"}</tool_call> b",
    "{\"text\": \"Use <tool_call>get</tool_call> so\"}",
    "{\"id\": \"a\", \"name\": \"get [TOOL_CALLS]get{} so\"}",
    "<tool_call>{\"name\": \"nobody\", \"arguments\": {\"x\": \"<tool_call>get</tool_call>\"}}</tool_call>",
    "<function_calls>save(x=\"<tool_call>get</tool_call>\", 'a')\nget(a=\"\"\"b\"\"\")</function_calls>",
];

const ANSWER_WORDS: [&str; 31] = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "<function=f>",
    "</function>",
    "<parameter=",
    "<parameter=y>",
    "</parameter>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[{",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<function_calls>",
    "</function_calls>",
    "f\n",
    "{\"name\": \"f\", \"arguments\": ",
    "}",
    "<",
    "get",
    "get(",
    "[",
    "<function=no>\n<parameter=x>",
    "{\"id\": \"a\", ",
    "\"name\": \"get\"",
    "\"",
    "\n ",
    "\u{e9}",
];

const GRAMMARS: [(u8, &str); 7] = [
    (
        0,
        "{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"integer\", \"minimum\": 3}, \"b\": {\"enum\": [\"x\", 1, null]}}, \"required\": [\"a\"]}",
    ),
    (
        0,
        "{\"anyOf\": [{\"type\": \"array\", \"items\": {\"$ref\": \"#/$defs/n\"}, \"minItems\": 1}, {\"const\": true}], \"$defs\": {\"n\": {\"type\": \"number\"}}}",
    ),
    (0, "{\"type\": \"string\", \"pattern\": \"^[a-z]{2,5}$\", \"maxLength\": 9}"),
    (1, "start: \"a\" b+\nb: /[0-9]{1,3}/ | \"x\"\n"),
    (1, "start: item (\",\" item)*\nitem: %json {\"type\": \"object\"}\n"),
    (2, "(yes|no|[0-9]+(\\.[0-9]{2})?)"),
    (2, "a.*b\\d\\w[^x]"),
];

const GRAMMAR_WORDS: [&str; 20] = [
    "null",
    "-1",
    "1e999",
    "99999",
    "[]",
    "{}",
    "true",
    "\"$ref\": \"#\",",
    "\"type\": \"object\",",
    "\"pattern\": \"(\",",
    "\"allOf\": [{}],",
    "\"minItems\": 9,",
    "{2,}",
    "*",
    "(",
    "|",
    "\\",
    "%json {",
    "start: start\n",
    "\u{1f600}",
];

/// Runs `cases` mutations and returns how many `exercise` accepted. A panic is reported with its case.
fn survive(
    cases: u64,
    words: &[&str],
    base: impl Fn(&mut Random) -> Vec<u8>,
    exercise: fn(&[u8]) -> bool,
) -> u64 {
    let run = |case: u64| {
        let mut random = Random::of_case(case);
        let mut data = base(&mut random);
        let first = data.remove(0);
        (0..=random.below(3)).for_each(|_| mutate(&mut data, words, &mut random));
        data.insert(0, first);
        match std::panic::catch_unwind(|| exercise(&data)) {
            Ok(taken) => taken,
            Err(_) => panic!("case {case} panicked: {:?}", String::from_utf8_lossy(&data)),
        }
    };
    (0..cases).filter(|&case| run(case)).count() as u64
}

#[test]
fn answers_of_all_sorts_come_apart_alike_however_they_are_cut() {
    let base = |random: &mut Random| {
        let text = ANSWERS[random.below(ANSWERS.len())];
        [&[random.below(256) as u8], text.as_bytes()].concat()
    };
    let called = survive(20_000, &ANSWER_WORDS, base, exercise_answer);
    assert!((500..10_000).contains(&called), "{called} called a tool");
}

#[test]
fn damaged_grammars_are_errors() {
    for (kind, text) in GRAMMARS {
        assert!(exercise_grammar(&[&[kind], text.as_bytes()].concat()), "{text}");
    }
    let base = |random: &mut Random| {
        let (kind, text) = GRAMMARS[random.below(GRAMMARS.len())];
        [&[kind], text.as_bytes()].concat()
    };
    let taken = survive(2_000, &GRAMMAR_WORDS, base, exercise_grammar);
    assert!((100..1_900).contains(&taken), "{taken} were grammars");
}
