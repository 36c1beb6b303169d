//! Conversations of `chat`, with the built-in model.

mod common;

use common::{demo, joined, json, keel_with_input, stderr};
use keel_text::{ChatRequest, ChatTemplate, Message, TextFiles, Tokenizer};

/// The output of `chat` for these lines. It must succeed.
fn chat(flags: &[&str], input: &str) -> String {
    let output = keel_with_input(&[&["chat"], flags].concat(), input);
    assert!(output.status.success(), "{}", stderr(&output));
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn chat_answers_remembers_and_forgets() {
    let flags = ["--temperature", "0", "--max-tokens", "40"];
    let input = "Tell me a story about a dog.\nWhat happened then?\n/reset\nTell me a story about a dog.\n";
    let text = chat(&flags, &format!("{input}/memory\n/exit\nnever read\n"));
    let first = chat(&flags, "Tell me a story about a dog.\n");
    assert!(first.trim().len() > 20, "{first}");
    assert!(text.starts_with(&first), "{text}");
    assert_eq!(text.matches(first.trim_end()).count(), 2, "after /reset the same answer comes: {text}");
    assert!(text.contains("checkpoints"), "{text}");
}

#[test]
fn a_turn_that_can_no_longer_be_answered_stays() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let saved = folder.path().join("turns.json");
    let (long, save) = ("so on and ".repeat(200), format!("/save {}", saved.display()));
    let flags = ["--temperature", "0", "--max-tokens", "8", "--context", "256"];
    let text = chat(&flags, &format!("Tell me of a dog.\n/system {long}\n/retry\n/system\n{save}\n"));
    assert!(text.contains("its context is 256"), "{text}");
    let saved: serde_json::Value =
        serde_json::from_slice(&std::fs::read(saved).expect("it was saved")).expect("JSON");
    let roles: Vec<&str> =
        saved["messages"].as_array().expect("a list").iter().filter_map(|m| m["role"].as_str()).collect();
    assert!(roles.ends_with(&["user", "assistant"]), "{saved}");
}

/// The conversation as one prompt, in the ids that `chat` computes.
fn conversation_ids(messages: &[Message]) -> String {
    let files = TextFiles::read(&demo()).expect("the built-in model has a tokenizer");
    let template = ChatTemplate::new(&files).expect("a sound template").expect("there is one");
    let text = template.render(&ChatRequest::new(messages)).expect("it renders");
    joined(&Tokenizer::new(&files).and_then(|t| t.encode(&text, false)).expect("it has ids"))
}

#[test]
fn a_further_turn_is_answered_as_if_the_whole_conversation_had_been_the_prompt() {
    // The first turn is long enough that its beginning is not run again. The penalty must still see that part.
    let first = "Tell me a story about a dog and a cat who met a bird. ".repeat(8);
    let second = "What happened to the bird then?";
    let flags = ["--temperature", "0", "--max-tokens", "24", "--repetition-penalty", "6"];
    let one = chat(&flags, &format!("{first}\n"));
    let both = chat(&flags, &format!("{first}\n{second}\n"));
    let without_break = |answer: &str| answer.strip_suffix('\n').map(str::to_string);
    let first_answer = without_break(&one).expect("a line break ends a turn");
    let second_answer = both.strip_prefix(&one).and_then(without_break).expect("the first turn is the same");
    let turn = |role, text: &str| Message::new(role, text);
    let conversation =
        [turn("user", first.trim_end()), turn("assistant", &first_answer), turn("user", second)];
    let whole = ["generate", "--json", "--ids", &conversation_ids(&conversation)];
    let report = json(&[&whole[..], &flags].concat());
    assert!(report["prompt_tokens"].as_u64() > Some(128), "{report}");
    assert_eq!(report["text"].as_str(), Some(&second_answer[..]));
}

#[test]
fn chat_refuses_a_turn_that_does_not_fit_and_goes_on() {
    let long = "word ".repeat(400);
    let flags = ["--context", "256", "--max-tokens", "8", "--temperature", "0"];
    let text = chat(&flags, &format!("{long}\nHello!\n"));
    let (refusal, answer) = text.split_once('\n').expect("two lines");
    assert!(refusal.contains("its context is 256") && !answer.trim().is_empty(), "{text}");
}

#[test]
fn chat_goes_on_after_a_turn_that_the_template_refuses() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for entry in std::fs::read_dir(demo()).expect("there") {
        let path = entry.expect("readable").path();
        std::fs::copy(&path, folder.path().join(path.file_name().expect("a file"))).expect("copied");
    }
    let refusing = "{%- for message in messages %}{% if message.content == 'No!' %}{{ raise_exception('not this') }}\
        {% endif %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}\
        {%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";
    std::fs::write(folder.path().join("chat_template.jinja"), refusing).expect("writable");
    let flags = ["--model", common::arg(folder.path()), "--temperature", "0", "--max-tokens", "8"];
    let plain = chat(&flags, "Hello!\nAnd then?\n");
    let refused = chat(&flags, "Hello!\nNo!\nAnd then?\n");
    let message = "the chat template refuses this conversation: not this";
    assert!(refused.contains(message), "{refused}");
    let rest: String = refused.split_inclusive('\n').filter(|line| !line.contains(message)).collect();
    assert_eq!(rest, plain, "the refused turn is taken back");
}

#[test]
fn an_answer_that_is_cut_says_so() {
    let said = |flags: &[&str], input: &str| {
        let output = keel_with_input(&[&["chat", "--temperature", "0"], flags].concat(), input);
        assert!(output.status.success(), "{}", stderr(&output));
        stderr(&output)
    };
    let notice = "(cut at --max-tokens 8; /set max-tokens 32 allows more)";
    let input = "Tell me a story about a dog.\n";
    assert_eq!(said(&["--max-tokens", "8"], input).matches(notice).count(), 1);
    // The setting that it names is one.
    let again = said(&["--max-tokens", "8"], &format!("/set max-tokens 32\n{input}"));
    assert!(again.contains("(cut at --max-tokens 32;"), "{again}");
    let full = said(&["--context", "256", "--max-tokens", "512"], input);
    assert!(full.contains("(cut at the context of 256 tokens"), "{full}");
    let whole = said(&["--max-tokens", "8", "--stop", "e"], input);
    assert!(!whole.contains("(cut at"), "{whole}");
}
