//! LongRoPE: a sequence uses one list of divisors up to the original context, and another list beyond it, always for
//! all its tokens.

use std::time::Instant;

use crate::common::batching::{assert_all_is_back, finish, run};
use crate::common::queueing::{Answers, queueing};
use crate::common::rounds::{Member, round};
use crate::common::{all_logits, argmax, exact, fixture, greedy, runtime};
use keel_array::sampling::Draw;
use keel_array::{DType, Runtime, WeightFormat};
use keel_engine::batch::{BatchEvent, BatchOptions, BatchRequest, Batcher};
use keel_engine::speculation::Speculation;
use keel_engine::{Depth, Engine, EngineError, EngineOptions, SamplerOptions, SpeculationOptions};
use keel_models::loading::RandomParameters;
use serde_json::{Value, json};

/// The most tokens of a sequence that uses the short list.
const ORIGINAL: usize = 64;

const SHORT: [f64; 6] = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5];
const LONG: [f64; 6] = [2.0, 3.0, 4.0, 5.0, 6.0, 7.0];

/// A model with these lists of divisors. `long` is for sequences of more than `original` tokens.
fn model(short: [f64; 6], long: [f64; 6], original: usize) -> Engine {
    model_on(&runtime(2), short, long, original)
}

fn model_on(runtime: &Runtime, short: [f64; 6], long: [f64; 6], original: usize) -> Engine {
    model_with(runtime, short, long, original, exact())
}

fn model_with(
    runtime: &Runtime,
    short: [f64; 6],
    long: [f64; 6],
    original: usize,
    options: EngineOptions,
) -> Engine {
    let config = json!({
        "model_type": "phi3", "hidden_size": 64, "vocab_size": 300, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
        "max_position_embeddings": 4096, "original_max_position_embeddings": original, "rope_theta": 100.0,
        "partial_rotary_factor": 0.75, "tie_word_embeddings": true,
        "rope_scaling": {"type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": 40.0}
    });
    let parameters = RandomParameters { format: WeightFormat::Dense(DType::F32) };
    Engine::load(runtime, &parameters, &config, options, &|_| ()).expect("the config is complete")
}

fn switching() -> Engine {
    model(SHORT, LONG, ORIGINAL)
}

fn always(divisors: [f64; 6]) -> Engine {
    model(divisors, divisors, 4000)
}

fn prompt(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i * i * 7 + 5) % 300).collect()
}

#[test]
fn the_length_of_the_whole_prompt_decides() {
    for one_by_one in [false, true] {
        let logits = |mut engine: Engine, len| all_logits(&mut engine, &prompt(len), one_by_one, false).0;
        assert!(logits(switching(), ORIGINAL) == logits(always(SHORT), ORIGINAL), "a short prompt");
        assert!(logits(switching(), ORIGINAL + 1) == logits(always(LONG), ORIGINAL + 1), "a long prompt");
        assert!(logits(always(SHORT), 70) != logits(always(LONG), 70), "the lists make no difference");
    }
}

/// The expected answer of a sequence that begins short and is run again as a long one.
fn expected(len: usize, tokens: usize) -> Vec<u32> {
    expected_beyond(ORIGINAL, len, tokens)
}

fn expected_beyond(original: usize, len: usize, tokens: usize) -> Vec<u32> {
    let mut all = prompt(len);
    // The last of these tokens is drawn after `original` tokens.
    all.extend(greedy(&mut always(SHORT), &prompt(len), original + 1 - len));
    let mut engine = always(LONG);
    let mut sequence = engine.open().expect("a slot is free");
    let mut logits = Vec::new();
    engine.prefill(&mut sequence, &all[..original], &mut logits, &mut |_| ()).expect("fits");
    while all.len() < len + tokens {
        engine.decode(&mut [&mut sequence], &all[all.len() - 1..]).expect("runs");
        engine.logits(0, &mut logits).expect("there");
        all.push(argmax(&logits));
    }
    all.split_off(len)
}

#[test]
fn an_answer_that_grows_beyond_is_run_again() {
    // A step that is submitted ahead must not cross the end of the short list either.
    let (ahead, _) = queueing(512);
    for mut engine in [switching(), model_on(&ahead, SHORT, LONG, ORIGINAL)] {
        assert_eq!(greedy(&mut engine, &prompt(50), 40), expected(50, 40), "ahead: {}", engine.runs_ahead());
    }
    let mut engine = switching();
    let mut sequence = engine.open().expect("a slot is free");
    engine.prefill(&mut sequence, &prompt(ORIGINAL), &mut Vec::new(), &mut |_| ()).expect("fits");
    let error = engine.decode(&mut [&mut sequence], &[1]).expect_err("its keys turn as those of a short one");
    assert!(matches!(error, EngineError::Outgrown { needed: 65, original: ORIGINAL }), "{error}");
}

#[test]
fn a_step_ahead_does_not_cross_the_end_of_the_short_list() {
    let mut engine = model_on(&queueing(512).0, SHORT, LONG, ORIGINAL);
    let (mut sequence, mut answers) = ([engine.open().expect("a slot is free")], Answers::default());
    engine.prefill(&mut sequence[0], &prompt(ORIGINAL - 1), &mut Vec::new(), &mut |_| ()).expect("fits");
    let draws = [Draw::GREATEST];
    answers.submit(&mut engine, &mut sequence, Some(&[1]), &draws).expect("the last row of a short one");
    let error = answers.submit(&mut engine, &mut sequence, None, &draws).expect_err("one row more");
    assert!(matches!(error, EngineError::Outgrown { needed: 65, original: ORIGINAL }), "{error}");
    answers.take(&mut engine, &mut sequence);
}

#[test]
fn answers_of_a_batch_are_run_again_each_for_itself() {
    let mut batcher = Batcher::new(switching(), BatchOptions::default());
    let lens = [50, 20, 100, 61];
    let requests: Vec<BatchRequest> =
        (0..).zip(lens).map(|(id, len)| BatchRequest::new(id, prompt(len), 30)).collect();
    for (outcome, len) in run(&mut batcher, requests).into_iter().zip(lens) {
        assert!(outcome.error.is_none(), "{:?}", outcome.error);
        let want = match len {
            100 => greedy(&mut always(LONG), &prompt(len), 30),
            20 => greedy(&mut always(SHORT), &prompt(len), 30),
            len => expected(len, 30),
        };
        assert_eq!(outcome.tokens, want, "a prompt of {len}");
    }
    assert_all_is_back(&mut batcher);
}

/// Two answers share the first page of their prompt. Each outgrows the short list and runs again in pages of its own,
/// so the pool has room for one answer at a time.
#[test]
fn pages_of_answers_that_are_run_again_are_promised() {
    let options = EngineOptions { pool_pages: Some(3), ..exact() };
    let mut batcher =
        Batcher::new(model_with(&runtime(2), SHORT, LONG, 300, options), BatchOptions::default());
    let requests = (0..2).map(|id| BatchRequest::new(id, prompt(290), 40)).collect();
    for outcome in run(&mut batcher, requests) {
        assert!(outcome.error.is_none(), "{:?}", outcome.error);
        assert_eq!(outcome.tokens, expected_beyond(300, 290, 40));
    }
    assert_all_is_back(&mut batcher);
}

#[test]
fn an_answer_that_is_run_again_is_no_prompt_to_the_caller() {
    let mut batcher = Batcher::new(switching(), BatchOptions::default());
    batcher.submit(BatchRequest::new(0, prompt(ORIGINAL), 5), Instant::now()).expect("accepted");
    let mut events = Vec::new();
    while !batcher.is_idle() {
        events.extend(batcher.step(Instant::now()).into_iter().map(|event| event.event));
    }
    let is_token = |event: &BatchEvent| matches!(event, BatchEvent::Token { .. });
    assert_eq!(events.iter().filter(|event| is_token(event)).count(), 5);
    let after = events.iter().skip_while(|event| !is_token(event));
    assert!(!after.into_iter().any(|event| matches!(event, BatchEvent::Prefilled(_))), "{events:?}");
    assert_all_is_back(&mut batcher);
}

#[test]
fn long_sequences_share_prefixes_with_long_ones_alone() {
    let mut batcher = Batcher::new(switching(), BatchOptions::default());
    let dir = tempfile::tempdir().expect("a temporary folder");
    let ask = |batcher: &mut Batcher, len| {
        batcher.submit(BatchRequest::new(0, prompt(len), 4), Instant::now()).expect("accepted");
        let outcome = finish(batcher, 1).pop().expect("one was asked for");
        (outcome.cached, outcome.tokens)
    };
    assert_eq!(ask(&mut batcher, 200).0, 0);
    let (cached, tokens) = ask(&mut batcher, 200);
    assert!(cached >= ORIGINAL, "{cached} tokens");
    assert_eq!(tokens, greedy(&mut always(LONG), &prompt(200), 4));
    batcher.save_prefixes("model", dir.path()).expect("the folder is writable");
    let mut second = Batcher::new(switching(), BatchOptions::default());
    let restored = second.restore_prefixes("model", dir.path());
    assert!(restored.texts > 0 && restored.problems.is_empty(), "{restored:?}");
    assert_eq!(ask(&mut second, 200), (cached, tokens));
    let mut third = Batcher::new(model(SHORT, LONG, 130), BatchOptions::default());
    assert_eq!(ask(&mut third, 100).0, 0);
    assert_eq!(ask(&mut third, 131).0, 0, "the short one's keys turn otherwise");
    assert_eq!(ask(&mut third, 101).0, 64);
    for batcher in [&mut batcher, &mut second, &mut third] {
        assert_all_is_back(batcher);
    }
}

/// A model with recurrent layers and an MTP head. Its states and drafts know nothing of rotary frequencies.
fn hybrid(original: usize, options: EngineOptions) -> Engine {
    hybrid_with(1.0, 3.0, original, options)
}

fn hybrid_with(short: f64, long: f64, original: usize, options: EngineOptions) -> Engine {
    let text = std::fs::read_to_string(fixture("qwen3_5").join("config.json")).expect("there");
    let mut config: Value = serde_json::from_str(&text).expect("it is JSON");
    let rope = &mut config["text_config"]["rope_parameters"];
    rope["rope_type"] = json!("longrope");
    (rope["short_factor"], rope["long_factor"]) = (Value::from(vec![short; 8]), Value::from(vec![long; 8]));
    (rope["attention_factor"], rope["original_max_position_embeddings"]) = (json!(1.0), json!(original));
    let parameters = RandomParameters { format: WeightFormat::Dense(DType::F32) };
    Engine::load(&runtime(2), &parameters, &config, options, &|_| ()).expect("the config is complete")
}

#[test]
fn the_head_turns_the_keys_of_a_long_prompt_as_the_model_does() {
    let options = EngineOptions { drafts: 1, ..exact() };
    let logits = |mut engine: Engine| all_logits(&mut engine, &prompt(100), false, true).1;
    let switching = logits(hybrid(ORIGINAL, options));
    assert!(switching == logits(hybrid_with(3.0, 3.0, 4000, options)));
    assert!(switching != logits(hybrid_with(1.0, 1.0, 4000, options)), "the lists make no difference");
}

#[test]
fn drafts_do_not_cross_the_end_of_the_short_list() {
    let options = EngineOptions { context: 512, drafts: 4, ..EngineOptions::default() };
    let mut engine = hybrid(ORIGINAL, options);
    let mut all = vec![Member::join(&mut engine, &prompt(ORIGINAL - 7), 4, SamplerOptions::default())];
    // All drafts are taken.
    all[0].speculation = {
        let options = SpeculationOptions { depth: Depth::Fixed(4), optimistic: true, ..Default::default() };
        Speculation::new(options, engine.last_hidden().expect("drafts were planned"))
    };
    let error = loop {
        match round(&mut engine, &mut all) {
            Ok(()) => assert!(all[0].cache.len() <= ORIGINAL, "{} tokens", all[0].cache.len()),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, EngineError::Outgrown { .. }), "{error}");
    assert_eq!(all[0].cache.len(), ORIGINAL);
    assert!(all[0].speculation.counters().accepted_total() > 2);
}

/// The state that an answer keeps belongs to the short list, and so do the pages up to it.
#[test]
fn an_answer_that_is_run_again_forgets_the_state_it_kept() {
    let options =
        EngineOptions { context: 1024, prefill_step: 64, checkpoints: 8, ..EngineOptions::default() };
    let batch = BatchOptions { step_tokens: 64, reuse_generated: true, ..BatchOptions::default() };
    let mut batcher = Batcher::new(hybrid(400, options), batch);
    batcher.submit(BatchRequest::new(0, prompt(100), 600), Instant::now()).expect("accepted");
    let pages = |batcher: &mut Batcher| {
        batcher.step(Instant::now());
        batcher.status().running[0].pages
    };
    while pages(&mut batcher) < 2 {}
    while pages(&mut batcher) > 1 {}
    batcher.cancel(0);
    batcher.step(Instant::now());
    assert_all_is_back(&mut batcher);
}
