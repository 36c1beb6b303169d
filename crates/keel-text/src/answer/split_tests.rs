//! How an answer is cut into pieces changes no part of it.

use super::cut_tests::cut;
use super::tests::{parts, tools};
use super::*;

/// What is written into an answer at each place.
const WORDS: [&str; 22] = [
    "<tool_call>",
    "</tool_call>",
    "<function_calls>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<function=",
    "</function>",
    "</parameter>",
    "<arg_key>",
    "</arg_value>",
    "<think>",
    "<tool",
    "weather",
    "{",
    "]",
    "\"",
    "\"\"\"",
    "\\",
    "\n",
    "\u{a0}",
    "\u{e9}",
    ",",
];

#[test]
fn any_split_gives_the_parts_of_the_whole() {
    let form = AnswerForm { tools: tools(), reasoning: true, ..AnswerForm::default() };
    for answer in [
        r#"<tool_call>{"name": "weather", "arguments": {"city": "a <tool_call>weather</tool_call>"}}</tool_call> b"#,
        r#"<tool_call>{"a": "<tool_call>weather</tool_call>"}"#,
        r#"{"name": "weather", "arguments": {"city": "B"}}; {"name": "weather"}"#,
        r#"[TOOL_CALLS]weather{"city":"a>b"}[TOOL_CALLS]weather{"city": "</tool_call>"}"#,
        "<tool_call><function=weather>\n<parameter=city>\na <b\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>a</tool_call></arg_value></tool_call>",
        "<function_calls>weather(city='a \"b', days=[1])\nweather(city=\"\"\"<tool_call>\"\"\")</function_calls>",
        "weather\n{\"city\": \"\\u00e9\"}\n<tool_call>weather</tool_call>",
    ] {
        for (at, _) in answer.char_indices() {
            for word in WORDS {
                let answer = format!("{}{word}{}", &answer[..at], &answer[at..]);
                let (whole, whole_cut) = (parts(&form, &answer, usize::MAX), cut(&answer, usize::MAX));
                for size in [1, 3, 7] {
                    assert_eq!(parts(&form, &answer, size), whole, "{answer:?} in pieces of {size}");
                    assert_eq!(cut(&answer, size), whole_cut, "{answer:?}, cut off, in pieces of {size}");
                }
            }
        }
    }
}
