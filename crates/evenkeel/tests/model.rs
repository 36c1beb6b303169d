//! The facade on the built-in model, in both forms of its files.

use std::path::Path;
use std::time::Duration;

use evenkeel::array::{Category, Compute};
use evenkeel::engine::batch::BatchOptions;
use evenkeel::engine::{
    EngineError, EngineOptions, FinishReason, GenerateOptions, SamplerOptions, SpeculationOptions,
};
use evenkeel::text::{AnswerPart, GrammarSource, Message, ToolSignature};
use evenkeel::{
    Batch, BatchEvent, Error, LoadOptions, Model, ModelFiles, Request, SequenceEvent, TokenOptions,
};
use serde_json::json;

fn folder() -> &'static Path {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo").as_ref()
}

fn greedy(max_tokens: usize) -> Request {
    Request { max_tokens: Some(max_tokens), sampler: Some(SamplerOptions::default()), ..Request::default() }
}

fn options() -> LoadOptions {
    LoadOptions { context: Some(512), ..LoadOptions::default() }
}

fn text(model: &mut Model, request: Request) -> String {
    let answer = model.stream("Once upon a time", request).expect("it fits");
    answer.collect::<Result<_, _>>().expect("no step fails")
}

/// The recurrent states are only free for the next sequence if the last one was given back.
#[test]
fn a_dropped_answer_gives_its_memory_back() {
    let mut model = Model::built_in(&options()).expect("it loads");
    let whole = text(&mut model, greedy(12));
    for _ in 0..3 {
        let mut answer = model.stream("Once upon a time", greedy(12)).expect("a sequence is free");
        assert!(answer.next().is_some());
    }
    assert!(model.engine().cache().is_idle());
    assert_eq!(text(&mut model, greedy(12)), whole);
}

#[test]
fn the_folder_has_the_text_of_the_built_in_model_and_the_checkpoints_sampling() {
    let mut built_in = Model::built_in(&options()).expect("it loads");
    let mut folder = Model::open(folder(), &options()).expect("it loads");
    assert_eq!(text(&mut built_in, greedy(12)), text(&mut folder, greedy(12)));
    let recommended = built_in.text().expect("it has a tokenizer").sampling();
    assert_eq!((recommended.temperature, recommended.top_k, recommended.top_p), (0.7, 40, 0.95));
    assert_eq!(folder.text().expect("it has a tokenizer").sampling(), recommended);
    let mut drawn = || text(&mut folder, Request { max_tokens: Some(40), ..Request::default() });
    assert_ne!(drawn(), drawn(), "each text has a seed of its own");
    let mut batch = folder.into_batch(BatchOptions::default()).expect("it has a tokenizer");
    let request = Request { max_tokens: Some(40), ..Request::default() };
    let texts = batch.complete(&["Once upon a time"; 2], &request).expect("all run");
    assert_ne!(texts[0], texts[1], "each text of a list has a seed of its own");
}

/// A folder with the weights of the demo under two names. No generation_config.json recommends sampling.
fn two_weights_files() -> tempfile::TempDir {
    let two = tempfile::tempdir().expect("a folder");
    for (name, copy) in [
        ("config.json", "config.json"),
        ("tokenizer.json", "tokenizer.json"),
        ("tokenizer_config.json", "tokenizer_config.json"),
        ("model.safetensors", "a.safetensors"),
        ("model.safetensors", "b.safetensors"),
    ] {
        std::fs::copy(folder().join(name), two.path().join(copy)).expect("it is copied");
    }
    two
}

#[test]
fn a_weights_file_is_told_from_its_neighbours_and_takes_grammars() {
    let two = two_weights_files();
    let open = |name: &str| ModelFiles::open(two.path().join(name)).expect("it opens");
    let identity = |name: &str| open(name).identity(Compute::Auto).expect("its files are there");
    let (a, b) = (identity("a.safetensors"), identity("b.safetensors"));
    assert_ne!(a, b);
    let saved = two.path().join("saved.safetensors");
    let load = |name: &str| Model::load(&open(name), &options(), &|_| ()).expect("it loads");
    let mut model = load("a.safetensors");
    let mut sequence = model
        .stream("Once upon a time", greedy(4))
        .and_then(|answer| answer.into_sequence())
        .expect("it runs");
    model.save(&mut sequence, &saved).expect("it is written");
    drop(sequence);
    assert_eq!(identity("a.safetensors"), a, "a new file of the folder is no part of the model");
    load("a.safetensors").restore(&saved).expect("it is of this model");
    load("b.safetensors").restore(&saved).expect_err("it is of the other model");
    // The grammar needs no file of the folder any more.
    drop(two);
    for _ in 0..2 {
        let grammar = Some(GrammarSource::Regex("[0-9]{3}".into()));
        let digits = text(&mut model, Request { grammar, max_tokens: Some(24), ..Request::default() });
        assert!(digits.len() == 3 && digits.chars().all(|c| c.is_ascii_digit()), "{digits}");
    }
    let drawn = text(&mut model, Request { max_tokens: Some(12), ..Request::default() });
    assert_eq!(drawn, text(&mut model, greedy(12)), "nothing asked for is as recommended");
}

/// No other test of this file depends on the working folder.
#[test]
fn a_weights_file_of_the_working_folder_is_opened_by_its_bare_name() {
    let (two, before) = (two_weights_files(), std::env::current_dir().expect("there is one"));
    std::env::set_current_dir(two.path()).expect("it is there");
    let opened = Model::open("a.safetensors", &options()).map(drop);
    std::env::set_current_dir(before).expect("it is there");
    opened.expect("it opens");
}

#[test]
fn stop_strings_and_grammars_end_a_text() {
    let mut model = Model::built_in(&options()).expect("it loads");
    let whole = text(&mut model, greedy(24));
    let stop = whole.split_whitespace().nth(3).expect("it has words").to_string();
    let request = Request { stop: vec![stop.clone()], ..greedy(24) };
    let mut answer = model.stream("Once upon a time", request).expect("it fits");
    let before: String = answer.by_ref().collect::<Result<_, _>>().expect("no step fails");
    assert_eq!(before, whole[..whole.find(&stop).expect("it is a part")]);
    assert_eq!(answer.finish_reason(), Some(FinishReason::Stop));
    drop(answer);
    let form = Some(GrammarSource::Regex("[0-9]{3}".into()));
    let digits = text(&mut model, Request { grammar: form, ..greedy(24) });
    assert!(digits.len() == 3 && digits.chars().all(|c| c.is_ascii_digit()), "{digits}");
}

#[test]
fn a_call_that_the_limit_of_tokens_cuts_off_is_left_out() {
    let mut model = Model::built_in(&options()).expect("it loads");
    let tools = [json!({"type": "function", "function": {"name": "f"}})];
    let arguments = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let signature = ToolSignature { name: "f".into(), arguments };
    let messages = [Message::new("user", "Call it.")];
    let mut parts = |max_tokens: usize| -> Vec<AnswerPart> {
        let grammar = Some(GrammarSource::tool_calls(std::slice::from_ref(&signature), false));
        let request = Request { grammar, ..greedy(max_tokens) };
        let chat = model.chat(&messages, &tools, request).expect("it starts");
        chat.collect::<Result<_, _>>().expect("it runs")
    };
    for max_tokens in [1, 4, 10] {
        assert_eq!(parts(max_tokens), [], "{max_tokens}");
    }
    assert_eq!(parts(100), [AnswerPart::ToolCall { name: "f".into(), arguments: "{}".into() }]);
}

#[test]
fn a_picture_in_a_message_is_refused_and_not_lost() {
    let mut model = Model::built_in(&options()).expect("it loads");
    let text = json!({"type": "text", "text": "What is this?"});
    for (part, kind) in [
        (json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}), "image_url"),
        (json!({"type": "video", "video": "a.mp4"}), "video"),
        (json!({"image": "a.png"}), "image"),
    ] {
        let shown = Message { content: json!([text.clone(), part]), ..Message::new("user", "") };
        match model.chat(&[Message::new("user", "Hello"), shown], &[], greedy(1)).err() {
            Some(Error::Picture { message: 1, kind: found }) => assert_eq!(found, kind),
            other => panic!("{kind}: {other:?}"),
        }
    }
    let words = Message { content: json!([text]), ..Message::new("user", "") };
    let refused = model.chat(&[words], &[], greedy(1)).err();
    assert!(matches!(refused, Some(Error::Text(_))), "only the template refuses parts of text: {refused:?}");
}

#[test]
fn a_saved_sequence_goes_on_as_the_one_that_stayed() {
    let file = tempfile::tempdir().expect("a folder");
    let file = file.path().join("sequence.safetensors");
    let mut model = Model::built_in(&options()).expect("it loads");
    let mut stayed = model
        .stream("Once upon a time", greedy(6))
        .and_then(|answer| answer.into_sequence())
        .expect("it runs");
    model.save(&mut stayed, &file).expect("it is written");
    let goes_on = |model: &mut Model, sequence| -> Vec<u32> {
        let mut answer = model.resume(sequence, " and", greedy(8)).expect("it fits");
        answer.by_ref().for_each(|piece| drop(piece.expect("no step fails")));
        answer.tokens().to_vec()
    };
    // The token that was drawn last is not in the file, so it is dropped here, too.
    let restored = model_again().restore(&file).expect("it is whole");
    assert_eq!(restored.tokens(), &stayed.tokens()[..stayed.tokens().len() - 1]);
    let mut other = model_again();
    let restored = other.restore(&file).expect("it is whole");
    assert!(other.stream("Once upon a time", greedy(6)).is_err(), "the only sequence is in use");
    let from_file = goes_on(&mut other, restored);
    stayed.forget_last();
    assert_eq!(goes_on(&mut model, stayed), from_file);
    // A longer text crosses the grid of prefill, also under a grammar.
    let restored = other.restore(&file).expect("the sequence before was given back");
    let form = Some(GrammarSource::Regex("[0-9]{2}".into()));
    let text = " and the dog".repeat(40);
    let digits = other.resume(restored, &text, Request { grammar: form, ..greedy(8) }).expect("it fits");
    assert_eq!(digits.collect::<Result<String, _>>().expect("no step fails").len(), 2);
}

fn model_again() -> Model {
    Model::built_in(&options()).expect("it loads")
}

#[test]
fn a_batch_gives_the_texts_of_single_runs_and_embeddings_of_length_one() {
    let mut model = Model::built_in(&options()).expect("it loads");
    let single = text(&mut model, greedy(12));
    let engine = EngineOptions { sequences: 2, ..EngineOptions::default() };
    let model = Model::built_in(&LoadOptions { engine, ..options() }).expect("it loads");
    let mut batch = model.into_batch(Default::default()).expect("it has a tokenizer");
    let texts = batch.complete(&["Once upon a time", "The cat", "Once upon a time"], &greedy(12));
    let texts = texts.expect("all run");
    assert_eq!((texts[0].as_str(), texts[2].as_str()), (single.as_str(), single.as_str()));
    assert_ne!(texts[1], single);
    let embeddings = batch.embed(&["a cat", "a cat", "the moon"]).expect("all run");
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    assert!((dot(&embeddings[0], &embeddings[1]) - 1.0).abs() < 1e-5);
    assert!(dot(&embeddings[0], &embeddings[2]) < 0.999);
    let stop = single.split_whitespace().nth(3).expect("it has words").to_string();
    let id = batch.submit("Once upon a time", Request { stop: vec![stop], ..greedy(12) }).expect("it fits");
    let mut end = None;
    while !batch.is_idle() {
        for SequenceEvent { id: of, event } in batch.step() {
            assert_eq!(of, id);
            if let BatchEvent::Finished(reason) = event {
                end = Some(reason);
            }
        }
    }
    assert_eq!(end, Some(FinishReason::Stop));
}

/// One sequence runs at a time here, so the second text waits longer than 0 s, and the queue has room for one.
#[test]
fn a_list_of_any_length_waits_until_it_has_run() {
    let queue = BatchOptions { queue_limit: 1, queue_timeout: Duration::ZERO, ..BatchOptions::default() };
    let mut batch = model_again().into_batch(queue).expect("it has a tokenizer");
    let texts = batch.complete(&["Once upon a time", "The cat", "Once upon a time"], &greedy(4));
    let texts = texts.expect("all wait");
    assert_eq!(texts[0], texts[2]);
    assert_eq!(batch.embed(&["a cat", "the moon", "a dog"]).expect("all wait").len(), 3);
}

#[test]
fn a_batch_follows_grammars_and_refuses_speculation_of_a_request() {
    let mut batch = model_again().into_batch(BatchOptions::default()).expect("it has a tokenizer");
    let grammar = Some(GrammarSource::Regex("[0-9]{3}".into()));
    let digits = batch.complete(&["Once upon a time", "The cat"], &Request { grammar, ..greedy(24) });
    for digits in digits.expect("both run") {
        assert!(digits.len() == 3 && digits.chars().all(|c| c.is_ascii_digit()), "{digits}");
    }
    let speculation = Some(SpeculationOptions::default());
    let refused = batch.submit("Once", Request { speculation, ..greedy(4) }).expect_err("it is not used");
    assert!(refused.to_string().contains("BatchOptions::speculation"), "{refused}");
}

#[test]
fn a_batch_has_the_limits_of_single_runs() {
    let options = LoadOptions { context: Some(256), ..LoadOptions::default() };
    let load = || Model::built_in(&options).expect("it loads");
    let asked = |max_tokens| Request { max_tokens, ignore_end: true, ..greedy(1) };
    let single = text(&mut load(), asked(Some(100_000)));
    let mut batch = load().into_batch(BatchOptions::default()).expect("it has a tokenizer");
    for max_tokens in [Some(100_000), None] {
        let texts = batch.complete(&["Once upon a time"], &asked(max_tokens)).expect("it is cut");
        assert!(texts[0].len() > 256 && single.starts_with(&texts[0]), "{max_tokens:?}: {}", texts[0]);
    }
    let long = "once upon a time ".repeat(100);
    for max_tokens in [Some(1), None] {
        let single = load().stream(&long, asked(max_tokens)).err();
        assert!(
            matches!(single, Some(Error::Engine(EngineError::Context { context: 256, .. }))),
            "{single:?}"
        );
        let batched = batch.submit(&long, asked(max_tokens)).err();
        assert!(
            matches!(batched, Some(Error::Engine(EngineError::Context { context: 256, .. }))),
            "{batched:?}"
        );
    }
    assert!(matches!(batch.submit("", asked(None)), Err(Error::EmptyPrompt)));
    assert!(matches!(batch.submit_embedding(""), Err(Error::EmptyPrompt)));
}

#[test]
fn a_list_leaves_other_requests_their_events() {
    let alone = text(&mut Model::built_in(&options()).expect("it loads"), greedy(20));
    let mut batch = model_again().into_batch(Default::default()).expect("it fits");
    let first = batch.submit("Once upon a time", greedy(20)).expect("it fits");
    let second = batch.submit("The cat", greedy(20)).expect("it fits");
    // One at a time runs, so both requests end before the list does.
    batch.complete(&["The little dog"], &greedy(40)).expect("no step fails");
    batch.cancel(second);
    assert!(!batch.is_idle());
    let (mut whole, mut ends) = (String::new(), 0);
    while !batch.is_idle() {
        for SequenceEvent { id, event } in batch.step() {
            assert_eq!(id, first, "the other one was cancelled");
            match event {
                BatchEvent::Text(piece) => whole.push_str(&piece),
                BatchEvent::Finished(_) => ends += 1,
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!((whole, ends), (alone, 1));
}

#[test]
fn a_stop_string_that_ends_a_request_while_a_list_runs_leaves_its_text() {
    let engine = EngineOptions { sequences: 2, ..EngineOptions::default() };
    let model = Model::built_in(&LoadOptions { engine, ..options() }).expect("it loads");
    let alone = text(&mut model_again(), greedy(12));
    let stop = alone.split_whitespace().nth(6).expect("it has words").to_string();
    let mut batch = model.into_batch(Default::default()).expect("it has a tokenizer");
    let stops = Request { stop: vec![stop.clone()], ..greedy(12) };
    batch.submit("Once upon a time", stops).expect("it fits");
    batch.complete(&["The cat"], &greedy(20)).expect("it runs");
    let (got, end) = rest_of(&mut batch);
    assert_eq!(Some(got.as_str()), alone.split(&stop).next());
    assert!(matches!(end, Some(BatchEvent::Finished(FinishReason::Stop))), "{end:?}");
}

/// The events of a batch of one request until it is idle: its text, and its end.
fn rest_of(batch: &mut Batch) -> (String, Option<BatchEvent>) {
    let (mut text, mut end) = (String::new(), None);
    while !batch.is_idle() {
        for SequenceEvent { event, .. } in batch.step() {
            assert!(end.is_none(), "nothing follows an end: {event:?}");
            match event {
                BatchEvent::Text(piece) => text.push_str(&piece),
                other => end = Some(other),
            }
        }
    }
    (text, end)
}

#[test]
fn limits_are_errors_with_numbers() {
    let long = LoadOptions { context: Some(1 << 20), ..LoadOptions::default() };
    assert!(matches!(Model::built_in(&long), Err(Error::Context { tokens: 1_048_576, .. })));
    let mut limited = options();
    limited.device.memory_limit = Some(1 << 20);
    match Model::built_in(&limited) {
        Err(Error::OutOfMemory(error)) => {
            assert_eq!((error.limit, error.context), (1 << 20, 512));
            assert!(error.planned.get(Category::Weights) > 1 << 20);
            assert!(error.to_string().contains("1048576 (1.0 MiB) of the memory limit"), "{error}");
        }
        other => panic!("{:?}", other.err()),
    }
    let mut model = Model::built_in(&options()).expect("it loads");
    assert!(matches!(model.stream("", greedy(1)).err(), Some(Error::EmptyPrompt)));
    assert!(model.engine().cache().is_idle(), "a refused prompt holds no sequence");
}

#[test]
fn bare_tokens_have_the_error_of_this_crate() {
    let mut model = Model::built_in(&options()).expect("it loads");
    let sequence = model.engine_mut().open().expect("a sequence is free");
    let tokens = TokenOptions { options: GenerateOptions::default(), grammar: None };
    let error = tokens.start(model.engine_mut(), sequence, &[], &mut |_| ()).err().expect("an empty prompt");
    assert!(matches!(error, Error::Engine(EngineError::EmptyPrompt)), "{error}");
    assert!(model.engine().cache().is_idle());
}

/// A sequence holds pages and a state of the model that made it. Another model would write over its own.
#[test]
fn a_sequence_of_another_model_is_refused() {
    let mut first = Model::built_in(&options()).expect("it loads");
    let mut second = Model::built_in(&options()).expect("it loads");
    let mut answer = first.stream("Once upon a time", greedy(4)).expect("it fits");
    answer.by_ref().for_each(|piece| drop(piece.expect("no step fails")));
    let sequence = answer.into_sequence().expect("it ended well");
    let more = "and then ".repeat(200);
    let refused = second.resume(sequence, &more, greedy(4)).err().expect("refused").to_string();
    assert!(refused.contains("another model"), "{refused}");
    assert!(first.engine().cache().is_idle() && second.engine().cache().is_idle());
}

#[test]
fn a_batch_ends_each_text_once_and_keeps_nothing_of_a_list_that_it_refuses() {
    let mut batch = Model::built_in(&options())
        .expect("it loads")
        .into_batch(Default::default())
        .expect("it has a tokenizer");
    let first = batch.complete(&["Once upon a time"], &greedy(1)).expect("it fits").remove(0);
    assert!(!first.is_empty());
    let stops = Request { stop: vec![first], ..greedy(1) };
    let id = batch.submit("Once upon a time", stops).expect("it fits");
    let mut ends = Vec::new();
    while !batch.is_idle() {
        for SequenceEvent { id: of, event } in batch.step() {
            assert_eq!(of, id);
            if let BatchEvent::Finished(reason) = event {
                ends.push(reason);
            }
        }
    }
    assert_eq!(ends, [FinishReason::Stop]);
    let long = "once upon a time ".repeat(500);
    assert!(batch.complete(&["Once", &long], &greedy(4)).is_err());
    assert!(batch.is_idle(), "the first of the list is not left behind");
}
