//! A host that runs a step ahead gets the tokens of a host that waits for each step, and a step too many leaves no
//! trace. On the CPU the backend only says that it queues. With `KEEL_TEST_CUDA=1` the same tests run on a GPU, which
//! does.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::drawn::{prompt, waited_for};
use crate::common::queueing::{Answers, Queueing, queueing, runtimes};
use crate::common::{decoded, demo, engine, fixture, runtime, state_of};
use keel_array::sampling::Draw;
use keel_cache::{CacheError, SequenceCache};
use keel_engine::{
    Depth, Engine, EngineError, EngineOptions, FinishReason, GenerateOptions, HostReads, SamplerOptions,
    SpeculationOptions, TokenIterator, Work, WorkRows,
};

const TOKENS: usize = 24;

fn options(drafts: usize) -> EngineOptions {
    EngineOptions { context: 256, sequences: 3, checkpoints: 2, drafts, ..EngineOptions::default() }
}

fn sampled() -> SamplerOptions {
    SamplerOptions { temperature: 0.9, top_k: 40, top_p: 0.97, seed: 11, ..SamplerOptions::default() }
}

fn until(max_tokens: usize, sampler: SamplerOptions, end_tokens: Vec<u32>) -> GenerateOptions {
    GenerateOptions { max_tokens, sampler, end_tokens, ..GenerateOptions::default() }
}

fn iterator(engine: &mut Engine, options: GenerateOptions) -> TokenIterator<'_> {
    let sequence = engine.open().expect("a slot is free");
    TokenIterator::new(engine, sequence, &prompt(), options, &mut |_| ()).expect("fits")
}

/// Models with and without recurrent layers, each with a number of drafts. An engine with drafts has a log.
fn models() -> Vec<(PathBuf, usize)> {
    let fixtures = ["qwen3_5", "llama", "gemma3_text"].into_iter().map(fixture);
    let mut models = vec![(demo(), 0), (demo(), 1)];
    models.extend(fixtures.map(|folder| (folder, 0)));
    models
}

#[test]
fn tokens_are_those_of_a_host_that_waits() {
    for (folder, drafts) in models() {
        for runtime in runtimes() {
            let mut engine = engine(&folder, &runtime, options(drafts));
            assert!(engine.runs_ahead());
            for sampler in [SamplerOptions::default(), sampled()] {
                let (sequence, want) = waited_for(&mut engine, sampler.clone(), TOKENS);
                engine.release(sequence);
                for disposable in [false, true] {
                    let options = until(TOKENS, sampler.clone(), Vec::new());
                    let mut tokens = iterator(&mut engine, GenerateOptions { disposable, ..options });
                    let got: Vec<u32> = tokens.by_ref().map(|token| token.expect("runs")).collect();
                    assert_eq!(got, want, "{}: {drafts} drafts, {sampler:?}", folder.display());
                    assert_eq!(tokens.finish_reason(), Some(FinishReason::Length));
                }
            }
            assert!(engine.cache().is_idle());
        }
    }
}

#[test]
fn a_step_is_submitted_before_the_one_before_it_is_waited_for() {
    let (runtime, queueing) = queueing(512);
    let mut engine = engine(&demo(), &runtime, options(0));
    for (disposable, steps) in [(true, "LLWLWLWLWW"), (false, "LWLWLWLWLW")] {
        let options = until(6, sampled(), Vec::new());
        let mut tokens = iterator(&mut engine, GenerateOptions { disposable, ..options });
        queueing.take_events();
        assert_eq!(tokens.by_ref().count(), 6);
        assert_eq!(queueing.take_events(), steps, "of 5 steps");
    }
    // A sampler that needs the host between two steps waits for each.
    let penalised = SamplerOptions { repetition_penalty: 1.2, ..sampled() };
    let mut tokens =
        iterator(&mut engine, GenerateOptions { disposable: true, ..until(4, penalised, vec![]) });
    queueing.take_events();
    assert_eq!(tokens.by_ref().count(), 4);
    assert_eq!(queueing.take_events(), "LWLWLW");
}

#[test]
fn the_step_after_the_end_leaves_no_trace() {
    for (folder, drafts) in models() {
        for runtime in runtimes() {
            let mut engine = engine(&folder, &runtime, options(drafts));
            let can_take_back = engine.can_take_back();
            for sampler in [SamplerOptions::default(), sampled()] {
                let (sequence, drawn) = waited_for(&mut engine, sampler.clone(), TOKENS);
                engine.release(sequence);
                // The text ends at the first token in the middle that did not occur before.
                let Some(at) = (3..TOKENS - 3).find(|&i| !drawn[..i].contains(&drawn[i])) else { continue };
                let (straight, _) = waited_for(&mut engine, sampler.clone(), at + 1);
                let want = (straight.len(), state_of(&mut engine, straight));
                for disposable in [false, true] {
                    let options = until(TOKENS, sampler.clone(), vec![drawn[at]]);
                    let mut tokens = iterator(&mut engine, GenerateOptions { disposable, ..options });
                    let got: Vec<u32> = tokens.by_ref().map(|token| token.expect("runs")).collect();
                    assert_eq!((&got[..], tokens.finish_reason()), (&drawn[..at], Some(FinishReason::Stop)));
                    let mut sequence = tokens.into_sequence();
                    assert_eq!(engine.steps_in_flight(), 0);
                    assert_eq!(sequence.len(), want.0);
                    if can_take_back || !disposable {
                        assert_eq!(state_of(&mut engine, sequence), want.1, "{}", folder.display());
                        continue;
                    }
                    let refusal = engine.decode(&mut [&mut sequence], &[1]).expect_err("it is ahead");
                    let is_ahead = matches!(refusal, EngineError::Cache(CacheError::AheadState { .. }));
                    assert!(is_ahead, "{refusal}");
                    expect_rewound(&mut engine, sequence, &prompt()[64..], &drawn[..at]);
                }
            }
            assert!(engine.cache().is_idle());
        }
    }
}

/// Drafts are compared with the tokens that the device draws, so even a sampled text is the text without drafts.
#[test]
fn a_sampled_text_is_the_same_with_drafts() {
    let fixtures = ["qwen3_5", "qwen3_5_moe"].into_iter().map(fixture);
    for folder in [demo()].into_iter().chain(fixtures) {
        for runtime in runtimes() {
            let mut engine = engine(&folder, &runtime, options(4));
            for sampler in [SamplerOptions::default(), sampled()] {
                let (sequence, want) = waited_for(&mut engine, sampler.clone(), TOKENS);
                engine.release(sequence);
                for depth in [Depth::Fixed(1), Depth::Fixed(4), Depth::Auto] {
                    let speculation = SpeculationOptions { depth, ..SpeculationOptions::default() };
                    let sequence = engine.open().expect("a slot is free");
                    let options = until(TOKENS, sampler.clone(), Vec::new());
                    let mut tokens =
                        crate::common::drafting(&mut engine, sequence, &prompt(), options, speculation);
                    let got: Vec<u32> = tokens.by_ref().map(|token| token.expect("runs")).collect();
                    assert_eq!(got, want, "{}, {depth:?}, {sampler:?}", folder.display());
                    let drafted = tokens.counters().expect("it drafts").drafted_total();
                    assert!(depth == Depth::Auto || drafted > 0);
                }
            }
            assert!(engine.cache().is_idle());
        }
    }
}

/// While a sequence makes no drafts, an engine that could make some runs ahead. Rounds in between find the rows of the
/// MTP head that a host would leave that waits for each step, so as many drafts are made and accepted.
#[test]
fn steps_run_ahead_between_rounds_of_drafts() {
    const TOKENS: usize = 170;
    // Most drafts of so hot a sampler are wrong.
    let hot = SamplerOptions { temperature: 2.5, top_k: 0, ..sampled() };
    let speculation = SpeculationOptions { repeatable: true, ..SpeculationOptions::default() };
    for runtime in runtimes() {
        let mut engine = engine(&demo(), &runtime, options(3));
        let mut of = |disposable: bool| {
            let options = until(TOKENS, hot.clone(), Vec::new());
            let how = GenerateOptions { disposable, speculation: Some(speculation), ..options };
            let mut tokens = iterator(&mut engine, how);
            let drawn: Vec<u32> = tokens.by_ref().map(|token| token.expect("runs")).collect();
            let counters = tokens.counters().expect("it drafts").clone();
            assert!(counters.plain_rounds > 64 && counters.drafted_total() > 4, "{counters:?}");
            (drawn, counters.rounds, counters.plain_rounds, counters.drafted, counters.accepted)
        };
        assert_eq!(of(true), of(false));
        assert!(engine.cache().is_idle());
    }
    let (runtime, queueing) = queueing(512);
    let mut engine = engine(&demo(), &runtime, options(3));
    let none = SpeculationOptions { depth: Depth::Fixed(0), ..SpeculationOptions::default() };
    let how = GenerateOptions { disposable: true, speculation: Some(none), ..until(6, hot, Vec::new()) };
    let mut tokens = iterator(&mut engine, how);
    queueing.take_events();
    assert_eq!(tokens.by_ref().count(), 6);
    let counters = tokens.counters().expect("it could draft");
    assert!(counters.rounds == 5 && counters.verify_time > Duration::ZERO, "{counters:?}");
    // Each step has a second program, which keeps hidden states.
    assert_eq!(queueing.take_events(), "LLLLWWLLWWLLWWLLWWWW", "of 5 steps");
}

/// Each device says so before the prompt runs, also a model that runs ahead and can take its steps back.
#[test]
fn drafts_that_were_not_planned_are_refused() {
    for runtime in [queueing(512).0, runtime(2)] {
        let mut engine = engine(&fixture("llama"), &runtime, options(0));
        let speculation = Some(SpeculationOptions::default());
        let options = GenerateOptions { speculation, ..until(TOKENS, sampled(), Vec::new()) };
        let sequence = engine.open().expect("a slot is free");
        let mut has_run = false;
        let refused = TokenIterator::new(&mut engine, sequence, &prompt(), options, &mut |_| has_run = true);
        let refused = refused.err().expect("it has no drafts").to_string();
        assert!(refused.contains("set drafts") && !has_run, "{refused}");
        assert!(engine.cache().is_idle());
    }
}

/// Rewinds to the checkpoint of the prompt. From there the sequence goes on like a fresh one.
fn expect_rewound(engine: &mut Engine, mut sequence: SequenceCache, rest: &[u32], tokens: &[u32]) {
    assert_eq!(engine.cache_mut().rewind(&mut sequence, 64).expect("it is kept"), 64);
    engine.prefill(&mut sequence, rest, &mut Vec::new(), &mut |_| ()).expect("fits");
    for token in tokens {
        engine.decode(&mut [&mut sequence], &[*token]).expect("runs");
    }
    let straight = decoded(engine, &prompt(), tokens);
    crate::common::expect_same_state(engine, sequence, straight);
}

/// Three sequences, each after its own prompt.
fn three(engine: &mut Engine) -> Vec<SequenceCache> {
    let sequences = (0..3).map(|i| {
        let mut sequence = engine.open().expect("a slot is free");
        let prompt: Vec<u32> = (0..60 + 5 * i).map(|j| (j * 7 + i * 13 + 5) % 500).collect();
        engine.prefill(&mut sequence, &prompt, &mut Vec::new(), &mut |_| ()).expect("fits");
        sequence
    });
    sequences.collect()
}

/// Greedy, and sampled in two ways.
fn draws(step: usize) -> [Draw; 3] {
    let uniform = |salt: usize| (step * 37 % 64 + salt) as f32 / 96.0;
    let sampled =
        |salt| Draw { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.02, uniform: uniform(salt) };
    [Draw::GREATEST, sampled(0), sampled(30)]
}

/// The tokens of each step. One or two steps are under way if `is_ahead`, else none.
fn batch_tokens(engine: &mut Engine, steps: usize, is_ahead: bool) -> (Vec<Vec<u32>>, Vec<SequenceCache>) {
    let mut all = three(engine);
    let (mut tokens, mut answers) = (vec![vec![7, 8, 9]], Answers::default());
    for step in 0..steps {
        if !is_ahead {
            let mut all: Vec<&mut SequenceCache> = all.iter_mut().collect();
            let drawn = engine.decode_and_draw(&mut all, &tokens[step], &draws(step).map(Some));
            tokens.push(drawn.expect("runs").into_iter().flatten().collect());
            continue;
        }
        if engine.steps_in_flight() == 0 {
            let submitted = answers.submit(engine, &mut all, Some(&tokens[step]), &draws(step));
            submitted.expect("nothing is under way");
        }
        // In some steps the host is not ahead.
        if step % 7 != 4 && step + 1 < steps {
            answers.submit(engine, &mut all, None, &draws(step + 1)).expect("one is under way");
            let refused = answers.submit(engine, &mut all, None, &draws(step + 2)).expect_err("two are");
            assert!(refused.to_string().contains("take the tokens of one first"), "{refused}");
        }
        tokens.push(answers.take(engine, &mut all));
    }
    assert_eq!(engine.steps_in_flight(), 0);
    (tokens, all)
}

#[test]
fn sequences_of_a_batch_are_drawn_for_apart() {
    for (folder, drafts) in models() {
        for runtime in runtimes() {
            let mut engine = engine(&folder, &runtime, options(drafts));
            let (want, sequences) = batch_tokens(&mut engine, TOKENS, false);
            let states: Vec<_> = sequences.into_iter().map(|s| state_of(&mut engine, s)).collect();
            let (got, sequences) = batch_tokens(&mut engine, TOKENS, true);
            assert_eq!(got, want, "{}: {drafts} drafts", folder.display());
            let ahead: Vec<_> = sequences.into_iter().map(|s| state_of(&mut engine, s)).collect();
            assert!(ahead == states, "{}: {drafts} drafts", folder.display());
        }
    }
}

/// One row of a sequence with nothing under way, with a greedy draw.
fn of<'a>(sequence: &'a mut SequenceCache, rows: WorkRows<'a>) -> Work<'a> {
    Work { sequence, ahead: 0, rows, draw: Some(Draw::GREATEST), reads: HostReads::Nothing }
}

#[test]
fn what_else_runs_ends_what_is_under_way() {
    for runtime in runtimes() {
        let mut engine = engine(&demo(), &runtime, options(0));
        let mut sequences = three(&mut engine);
        let [one, two, three] = &mut sequences[..] else { unreachable!("three") };
        let foreign = engine.submit(&mut [of(one, WorkRows::Drawn(0))]).expect_err("none is under way");
        assert!(foreign.to_string().contains("no step under way draws the token"), "{foreign}");
        let first = engine.submit(&mut [of(one, WorkRows::Token(5))]).expect("runs");
        let second = engine.submit(&mut [of(two, WorkRows::Token(5))]).expect("runs");
        engine.take(second).expect_err("another comes first");
        engine.decode(&mut [&mut *three], &[5]).expect("runs");
        assert_eq!(engine.steps_in_flight(), 0);
        assert_eq!([one.len(), two.len(), three.len()], [60, 65, 71]);
        engine.take(first).expect_err("it has ended");
        let refused = engine.decode(&mut [&mut *two], &[5]).expect_err("its token was not taken");
        assert!(refused.to_string().contains("ahead of its 65 tokens"), "{refused}");
        assert_eq!(engine.cache_mut().rewind(one, 60).expect("clears"), 0, "there is no checkpoint");
        engine.prefill(one, &[3], &mut Vec::new(), &mut |_| ()).expect("fits");
        let refused = engine.submit(&mut [of(one, WorkRows::Token(1 << 20))]).expect_err("no token");
        assert!(matches!(refused, EngineError::TokenId { .. }));
        sequences.into_iter().for_each(|sequence| engine.release(sequence));
        let (sequence, _) = waited_for(&mut engine, sampled(), TOKENS);
        let tokens = iterator(
            &mut engine,
            GenerateOptions { disposable: true, ..until(TOKENS, sampled(), Vec::new()) },
        );
        // A dropped iterator gives up the step after its last token.
        assert_eq!(tokens.take(3).count(), 3);
        assert_eq!(engine.steps_in_flight(), 0);
        let mut other = decoded(&mut engine, &prompt(), &[1, 2]);
        assert_eq!((engine.steps_in_flight(), other.len()), (0, 72));
        engine.commit(&mut other).expect("it is whole");
        engine.release(sequence);
    }
}

/// The place where such a token would be has another one.
#[test]
fn only_a_token_that_the_device_draws_can_be_run() {
    let (runtime, _) = queueing(512);
    let mut engine = engine(&demo(), &runtime, options(0));
    let mut sequence = engine.open().expect("a slot is free");
    let part = WorkRows::Prompt { tokens: &prompt()[..64], next: Some(prompt()[64]) };
    let first = engine.submit(&mut [Work { draw: None, ..of(&mut sequence, part) }]).expect("runs");
    let refused = engine.submit(&mut [Work { ahead: 64, ..of(&mut sequence, WorkRows::Drawn(0)) }]);
    let refused = refused.expect_err("the prompt goes on").to_string();
    assert!(refused.contains("no step under way draws the token"), "{refused}");
    engine.take(first).expect("it runs");
    sequence.advance(64);
    let by_host = Work { draw: None, reads: HostReads::Logits, ..of(&mut sequence, WorkRows::Token(5)) };
    let first = engine.submit(&mut [by_host]).expect("runs");
    let refused = engine.submit(&mut [Work { ahead: 1, ..of(&mut sequence, WorkRows::Drawn(0)) }]);
    refused.expect_err("the host draws it");
    engine.take(first).expect("it runs");
    engine.release(sequence);
}

/// Lets launch number `launches` fail. The tokens before it come, then the error. The sequence is then as before the
/// step, or says that it cannot go on. Returns whether it went on.
fn fail_at(
    engine: &mut Engine,
    queueing: &Queueing,
    (launches, pieces): (usize, usize),
    want: &[u32],
) -> bool {
    let options = until(want.len(), SamplerOptions::default(), Vec::new());
    let mut tokens = iterator(engine, GenerateOptions { disposable: true, ..options });
    queueing.until.store(launches, Ordering::Relaxed);
    let mut got = Vec::new();
    let error = loop {
        match tokens.next().expect("it does not end") {
            Ok(token) => got.push(token),
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("injected"), "{error}");
    assert_eq!(got, want[..1 + launches / pieces], "launch {launches}");
    assert!(tokens.next().is_none());
    assert_eq!(tokens.finish_reason(), None, "launch {launches}: a failure is no good end");
    let mut sequence = tokens.into_sequence();
    assert_eq!(sequence.len(), prompt().len() + got.len() - 1);
    let mut logits = Vec::new();
    for i in got.len()..want.len() {
        match engine.decode(&mut [&mut sequence], &[want[i - 1]]) {
            Ok(()) => engine.logits(0, &mut logits).expect("there"),
            Err(EngineError::Cache(CacheError::AheadState { .. } | CacheError::TornState { .. }))
                if i == got.len() && engine.cache().spec().is_recurrent() =>
            {
                expect_rewound(engine, sequence, &prompt()[64..], &got[..got.len() - 1]);
                return false;
            }
            Err(error) => panic!("launch {launches}: {error}"),
        }
        assert_eq!(crate::common::argmax(&logits), want[i], "launch {launches}");
    }
    let straight = decoded(engine, &prompt(), &want[..want.len() - 1]);
    crate::common::expect_same_state(engine, sequence, straight);
    true
}

#[test]
fn a_step_that_fails_is_the_one_that_says_so() {
    const STEPS: usize = 5;
    for (folder, drafts) in models() {
        let (runtime, queueing) = queueing(16);
        let mut engine = engine(&folder, &runtime, options(drafts));
        let (sequence, want) = waited_for(&mut engine, SamplerOptions::default(), STEPS + 1);
        engine.release(sequence);
        let options = until(STEPS + 1, SamplerOptions::default(), Vec::new());
        let mut tokens = iterator(&mut engine, GenerateOptions { disposable: true, ..options });
        queueing.take_events();
        assert_eq!(tokens.by_ref().count(), STEPS + 1);
        let launches = queueing.take_events().matches('L').count();
        drop(tokens);
        let pieces = launches / STEPS;
        assert_eq!(pieces * STEPS, launches);
        for at in (0..launches).step_by(if pieces > 3 { 3 } else { 1 }) {
            let goes_on = fail_at(&mut engine, &queueing, (at, pieces), &want);
            assert!(
                goes_on || engine.cache().spec().is_recurrent(),
                "{}: launch {at} of {launches}",
                folder.display()
            );
        }
        assert!(engine.cache().is_idle());
        assert_eq!(engine.runtime().runs_under_way(), 0);
    }
}
