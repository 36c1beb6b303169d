//! The built-in model against its reference outputs: `models/demo/expected.json`.

use crate::common::{all_logits, argmax, engine, exact, runtime};
use keel_engine::{GenerateOptions, TokenIterator};
use serde_json::Value;

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("a list of ids").iter();
    ids.map(|id| id.as_u64().expect("an id") as u32).collect()
}

#[test]
fn greedy_tokens_and_first_drafts_are_those_of_the_reference() {
    let folder = crate::common::demo();
    let text =
        std::fs::read_to_string(folder.join("expected.json")).expect("the reference is in the repository");
    let cases: Value = serde_json::from_str(&text).expect("the reference is JSON");
    let mut engine = engine(&folder, &runtime(2), exact());
    for case in cases.as_array().expect("a list of prompts") {
        let (prompt, greedy) = (ids(&case["prompt_ids"]), ids(&case["greedy_ids"]));
        let sequence = engine.open().expect("a slot is free");
        let options = GenerateOptions { max_tokens: greedy.len(), ..GenerateOptions::default() };
        let mut tokens = TokenIterator::new(&mut engine, sequence, &prompt, options, &mut |_| ())
            .expect("the prompt fits");
        let got: Vec<u32> = tokens.by_ref().collect::<Result<_, _>>().expect("every step runs");
        drop(tokens);
        assert_eq!(got, greedy, "{}", case["prompt"]);
        // The draft after a token reads the hidden state of the token before it.
        let whole = [&prompt[..], &greedy].concat();
        let (_, drafts) = all_logits(&mut engine, &whole, false, true);
        let vocab = engine.model().config.vocab;
        let drafted: Vec<u32> = drafts.chunks(vocab).skip(prompt.len() - 1).map(argmax).collect();
        assert_eq!(drafted, ids(&case["first_draft_ids"]), "{}", case["prompt"]);
    }
}
