//! Batches on a backend that queues. Each answer equals that of steps that are waited for, whichever sequences join,
//! end or leave while a step is under way. With `KEEL_TEST_CUDA=1` the same on a GPU.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::common::batching::{Outcome, assert_all_is_back, finish, finish_from, run, step};
use crate::common::queueing::{queueing, waiting_and_queueing};
use crate::common::{demo, engine, fixture};
use keel_array::Runtime;
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher};
use keel_engine::{Depth, EngineOptions, FinishReason, SamplerOptions, SpeculationOptions};

fn models() -> Vec<PathBuf> {
    let fixtures = ["llama", "gemma3_text", "qwen3_5_moe"].into_iter().map(fixture);
    [demo()].into_iter().chain(fixtures).collect()
}

fn batcher(folder: &Path, runtime: &Runtime) -> Batcher {
    drafting(folder, runtime, 0, SpeculationOptions::default())
}

fn drafting(folder: &Path, runtime: &Runtime, drafts: usize, speculation: SpeculationOptions) -> Batcher {
    let options = EngineOptions {
        drafts,
        context: 512,
        sequences: 4,
        prefill_step: 128,
        checkpoints: 12,
        pool_pages: Some(9),
        ..EngineOptions::default()
    };
    Batcher::new(engine(folder, runtime, options), BatchOptions { speculation, ..BatchOptions::default() })
}

/// Request `i`: greedy, sampled, or (one in six) such that it needs the host. Answers cross the grid and pages; some
/// have one token.
fn request(i: usize, end_tokens: Vec<u32>) -> BatchRequest {
    let ids = (0..30 + 37 * i % 240).map(|j| ((j * 7 + i * 131 + 5) % 500) as u32).collect();
    let mut request = BatchRequest::new(i as u64, ids, [45, 1, 80, 20, 7, 2][i % 6]);
    let sampled =
        SamplerOptions { temperature: 0.9, top_k: 50, seed: i as u64 + 3, ..SamplerOptions::default() };
    match i % 6 {
        0 | 3 => {}
        5 => request.sampler = SamplerOptions { repetition_penalty: 1.2, ..sampled },
        _ => request.sampler = sampled,
    }
    request.end_tokens = end_tokens;
    request
}

const REQUESTS: usize = 18;

/// Submits a request every `every` steps, and cancels some of them after a while.
fn traffic(batcher: &mut Batcher, every: usize, ends: &[Vec<u32>]) -> Vec<Outcome> {
    let mut outcomes: Vec<Outcome> = (0..REQUESTS).map(|_| Outcome::default()).collect();
    let now = Instant::now();
    for at in 0..5_000 {
        if at % every == 0 && at / every < REQUESTS {
            let request = request(at / every, ends[at / every].clone());
            // It drafts only where drafts change nothing.
            batcher.submit(BatchRequest { speculate: false, ..request }, now).expect("accepted");
        }
        if at % every == 2 && at / every > 4 {
            let id = at / every - 4;
            if id % 5 == 2 {
                batcher.cancel(id as u64);
            }
        }
        step(batcher, now, &mut outcomes);
        assert!(batcher.engine().steps_in_flight() <= 1, "between steps");
    }
    assert!(batcher.is_idle());
    assert_eq!(batcher.engine().steps_in_flight(), 0);
    outcomes
}

/// Asserts that a busy batch gives the answers that each request gets from `alone`, while requests arrive, end and are
/// cancelled.
fn expect_answers_in_traffic(what: &str, alone: &mut Batcher, busy: &mut Batcher) {
    assert!(!alone.engine().runs_ahead() && busy.engine().runs_ahead());
    let no_ends = vec![Vec::new(); REQUESTS];
    let whole: Vec<Outcome> = (0..REQUESTS).map(|i| run_alone(alone, request(i, Vec::new()))).collect();
    // A token from the middle of every other answer becomes its end token.
    let end_of = |(i, outcome): (usize, &Outcome)| match outcome.tokens.get(outcome.tokens.len() / 2) {
        Some(&end) if i % 2 == 0 => vec![end],
        _ => Vec::new(),
    };
    let ends: Vec<Vec<u32>> = whole.iter().enumerate().map(end_of).collect();
    let ended: Vec<Outcome> = (0..REQUESTS).map(|i| run_alone(alone, request(i, ends[i].clone()))).collect();
    assert!(ended.iter().any(|outcome| outcome.finish == Some(FinishReason::Stop)));
    for (every, ends, want) in [(11, &no_ends, &whole), (23, &ends, &ended), (2, &ends, &ended)] {
        for (i, got) in traffic(busy, every, ends).into_iter().enumerate() {
            expect_answer(&format!("{what}, one in {every} steps"), i, got, &want[i]);
        }
    }
    assert_all_is_back(busy);
}

#[test]
fn answers_are_those_of_steps_that_are_waited_for() {
    for folder in models() {
        for (waiting, queueing) in waiting_and_queueing() {
            let (mut alone, mut busy) = (batcher(&folder, &waiting), batcher(&folder, &queueing));
            expect_answers_in_traffic(&folder.display().to_string(), &mut alone, &mut busy);
        }
    }
}

/// A batch whose answers make no drafts runs ahead, with prompts and kept states. The MTP head catches up in between.
#[test]
fn a_batch_that_makes_no_drafts_runs_ahead() {
    // The host draws every sixth.
    let drawn = |i: usize| if i < 5 { i } else { i + 1 };
    let long = |i: usize| BatchRequest { id: i as u64, max_tokens: 150, ..request(drawn(i), Vec::new()) };
    for (waiting, queueing) in waiting_and_queueing() {
        let mut alone = batcher(&demo(), &waiting);
        let none = SpeculationOptions { depth: Depth::Fixed(0), ..SpeculationOptions::default() };
        let mut together = drafting(&demo(), &queueing, 3, none);
        let (now, mut ahead, mut steps) = (Instant::now(), 0, 0);
        let mut outcomes: Vec<Outcome> = (0..8).map(|_| Outcome::default()).collect();
        for i in 0..8 {
            together.submit(long(i), now).expect("accepted");
        }
        while !together.is_idle() {
            step(&mut together, now, &mut outcomes);
            (ahead, steps) = (ahead + together.engine().steps_in_flight(), steps + 1);
        }
        assert!(10 * ahead > 9 * steps, "{ahead} of {steps} steps");
        assert_eq!(together.status().speculation.drafted_total(), 0);
        assert_eq!(
            together.status().speculation.rounds,
            8 * 149,
            "each token but the first was given by a step"
        );
        for (i, got) in outcomes.into_iter().enumerate() {
            expect_answer("without drafts", i, got, &run_alone(&mut alone, long(i)));
        }
        assert_all_is_back(&mut together);
    }
}

/// Drafts that fail make a batch run ahead, and drafts that are right in the end bring rounds back.
#[test]
fn a_batch_goes_from_rounds_to_steps_ahead_and_back() {
    for (waiting, queueing) in waiting_and_queueing() {
        let mut alone = batcher(&demo(), &waiting);
        let auto = SpeculationOptions { repeatable: true, ..SpeculationOptions::default() };
        let mut together = drafting(&demo(), &queueing, 3, auto);
        let hot = |i: usize| BatchRequest {
            max_tokens: 180,
            sampler: SamplerOptions { temperature: 2.5, seed: 3 + i as u64, ..SamplerOptions::default() },
            ..request(i, Vec::new())
        };
        let (now, mut ahead, mut rounds) = (Instant::now(), 0, 0);
        let (mut stretch, mut rounds_after) = (0, 0);
        let mut outcomes: Vec<Outcome> = (0..4).map(|_| Outcome::default()).collect();
        (0..4).for_each(|i| together.submit(hot(i), now).expect("accepted"));
        while !together.is_idle() {
            step(&mut together, now, &mut outcomes);
            let in_flight = together.engine().steps_in_flight();
            (ahead, rounds) = (ahead + in_flight, rounds + 1 - in_flight);
            rounds_after += usize::from(stretch >= 60 && in_flight == 0 && !together.is_idle());
            stretch = if in_flight > 0 { stretch + 1 } else { 0 };
        }
        assert!(rounds_after > 0, "the answers are asked again after a stretch of steps ahead");
        let counters = together.status().speculation;
        assert!(counters.drafted_total() > 8 && ahead > 2 * rounds, "{ahead} and {rounds}: {counters:?}");
        for (i, got) in outcomes.into_iter().enumerate() {
            expect_answer("drafts that fail", i, got, &run_alone(&mut alone, hot(i)));
        }
        assert_all_is_back(&mut together);
    }
}

/// Drafts mix with arrivals, ends and cancellations. The device draws in rounds, too, so sampled answers do not depend
/// on the drafts of their neighbours. Answers that the host draws make no drafts of their own.
#[test]
fn answers_with_drafts_are_those_without() {
    for folder in [demo(), fixture("qwen3_5_moe")] {
        for (waiting, queueing) in waiting_and_queueing() {
            let mut alone = batcher(&folder, &waiting);
            let auto = SpeculationOptions { repeatable: true, ..SpeculationOptions::default() };
            let mut busy = drafting(&folder, &queueing, 3, auto);
            expect_answers_in_traffic(&format!("{} with drafts", folder.display()), &mut alone, &mut busy);
            assert!(busy.status().speculation.drafted_total() > 0);
        }
    }
}

/// Asserts that a request got the answer that it gets alone, or a part of it if it was cancelled.
fn expect_answer(what: &str, i: usize, got: Outcome, want: &Outcome) {
    assert!(got.error.is_none(), "{what}: request {i}: {:?}", got.error);
    if got.finish.is_some() {
        assert_eq!((&got.tokens, got.finish), (&want.tokens, want.finish), "{what}: request {i}");
    } else {
        assert!(i % 5 == 2, "{what}: request {i} was not cancelled");
        let begin = &want.tokens[..got.tokens.len().min(want.tokens.len())];
        assert_eq!(got.tokens, begin, "{what}: request {i}");
    }
}

fn run_alone(batcher: &mut Batcher, mut request: BatchRequest) -> Outcome {
    request.id = 0;
    let outcome = run(batcher, vec![request]).remove(0);
    batcher.forget_prefixes();
    outcome
}

#[test]
fn a_steady_batch_is_a_step_ahead() {
    let (runtime, queueing) = queueing(512);
    let mut batcher = batcher(&demo(), &runtime);
    let (mut outcomes, now) = ([(); 3].map(|()| Outcome::default()), Instant::now());
    for i in [0, 3] {
        let ids = (0..70).map(|j| (j * 7 + i * 13 + 5) as u32 % 500).collect();
        batcher.submit(BatchRequest::new(u64::from(i != 0), ids, 40), now).expect("accepted");
    }
    while outcomes[..2].iter().any(|outcome| outcome.tokens.is_empty()) {
        step(&mut batcher, now, &mut outcomes);
    }
    queueing.take_events();
    for _ in 0..10 {
        step(&mut batcher, now, &mut outcomes);
    }
    assert_eq!(queueing.take_events(), "LW".repeat(10));
    // A newcomer is admitted after the step under way, together with the running sequences.
    let ids = (0..20).collect();
    batcher.submit(BatchRequest::new(2, ids, 1), now).expect("accepted");
    step(&mut batcher, now, &mut outcomes);
    assert_eq!(
        queueing.take_events(),
        "LLW",
        "a token of both and the prompt, then the tokens of the step before"
    );
    step(&mut batcher, now, &mut outcomes);
    assert_eq!(queueing.take_events(), "LWW", "the next step before the prompt's token is seen");
    // A cancelled sequence leaves at once.
    step(&mut batcher, now, &mut outcomes);
    assert_eq!(batcher.engine().steps_in_flight(), 1);
    batcher.cancel(1);
    assert_eq!(batcher.engine().steps_in_flight(), 1, "another waits for its token");
    batcher.cancel_all();
    assert_eq!(batcher.engine().steps_in_flight(), 0);
    assert_all_is_back(&mut batcher);
}

/// Each answer has room for one state. It is not that of a shared prompt, also while a step is under way.
#[test]
fn answers_leave_the_states_of_prompts() {
    for (_, queueing) in waiting_and_queueing() {
        let sequences = 3;
        let options = EngineOptions {
            drafts: 0,
            context: 512,
            sequences,
            prefill_step: 128,
            checkpoints: 1 + sequences,
            pool_pages: Some(12),
            ..EngineOptions::default()
        };
        let mut batcher = Batcher::new(engine(&demo(), &queueing, options), BatchOptions::default());
        let shared: Vec<u32> = (0..100).map(|i| 3 + i * 7 % 400).collect();
        run(&mut batcher, vec![BatchRequest::new(0, shared.clone(), 1)]);
        assert_eq!(batcher.status().prefix_states, 1);
        let now = Instant::now();
        let answer = |i: u32| BatchRequest::new(u64::from(i), (0..20).map(|j| 9 + i + j * 5).collect(), 230);
        (0..sequences as u32).for_each(|i| batcher.submit(answer(i), now).expect("accepted"));
        let mut outcomes: Vec<Outcome> = (0..sequences).map(|_| Outcome::default()).collect();
        while !batcher.is_idle() {
            step(&mut batcher, now, &mut outcomes);
            assert!(batcher.status().prefix_states >= 1, "{:?}", batcher.status());
        }
        let again = run(&mut batcher, vec![BatchRequest::new(0, shared, 1)]).remove(0);
        assert_eq!(again.cached, 64);
        // And the answers' own states are kept.
        let second = |i: usize| {
            let mut text: Vec<u32> = (0..20).map(|j| 9 + i as u32 + j * 5).collect();
            text.extend(&outcomes[i].tokens);
            BatchRequest::new(0, text, 1)
        };
        let reused: Vec<usize> =
            (0..sequences).map(|i| run(&mut batcher, vec![second(i)]).remove(0).cached).collect();
        assert_eq!(reused, [192; 3]);
        assert_all_is_back(&mut batcher);
    }
}

/// A host's draw for one sequence does not make the others wait: the step after it is submitted before its logits are
/// read. The sequence itself is in every other step.
#[test]
fn only_the_sequence_that_the_host_draws_for_waits() {
    for folder in models() {
        let (runtime, queueing) = queueing(512);
        let mut batcher = batcher(&folder, &runtime);
        let all = || (0..4).map(|i| BatchRequest { id: i as u64, ..request([0, 5, 3, 5][i], Vec::new()) });
        let long = |request: BatchRequest| BatchRequest { max_tokens: 40, ..request };
        let alone: Vec<Outcome> = all().map(|request| run_alone(&mut batcher, long(request))).collect();
        all().for_each(|request| batcher.submit(long(request), Instant::now()).expect("accepted"));
        let mut outcomes: Vec<Outcome> = (0..4).map(|_| Outcome::default()).collect();
        let now = Instant::now();
        while outcomes.iter().any(|outcome| outcome.tokens.is_empty()) {
            step(&mut batcher, now, &mut outcomes);
        }
        queueing.take_events();
        let before: Vec<usize> = outcomes.iter().map(|outcome| outcome.tokens.len()).collect();
        for _ in 0..10 {
            step(&mut batcher, now, &mut outcomes);
            assert_eq!(batcher.engine().steps_in_flight(), 1, "{}", folder.display());
        }
        let drawn: Vec<usize> =
            outcomes.iter().zip(&before).map(|(o, before)| o.tokens.len() - before).collect();
        assert_eq!(drawn, [10, 5, 10, 5], "{}", folder.display());
        // A step is submitted, then the one before is taken; every other step also keeps logits.
        let events = queueing.take_events();
        assert_eq!(events.matches('L').count(), 15, "{events}");
        assert!(!events.contains("WWW"), "{events}");
        for (i, got) in finish_from(&mut batcher, outcomes).into_iter().enumerate() {
            assert_eq!(got.tokens, alone[i].tokens, "{}: request {i}", folder.display());
        }
        assert_all_is_back(&mut batcher);
    }
}

/// Sequences that all need the host are in the same steps, so together they take no more steps than one alone.
#[test]
fn sequences_that_need_the_host_share_their_steps() {
    let (runtime, queueing) = queueing(512);
    let mut batcher = batcher(&demo(), &runtime);
    let mut launches = |count: usize| {
        let all = (0..count).map(|i| BatchRequest { id: i as u64, max_tokens: 30, ..request(5, Vec::new()) });
        queueing.take_events();
        assert!(run(&mut batcher, all.collect()).iter().all(|outcome| outcome.tokens.len() == 30));
        batcher.forget_prefixes();
        queueing.take_events().matches('L').count()
    };
    let alone = launches(1);
    assert!(launches(4) <= alone + 8, "their prompts may take some more");
}

/// The end of a prompt whose first token the host draws waits while a step keeps logits for another sequence. It comes
/// first in a later step, however long the other prompts are.
#[test]
fn a_prompt_for_the_host_ends_while_longer_ones_run() {
    let narrow = EngineOptions { context: 512, sequences: 3, prefill_step: 64, ..EngineOptions::default() };
    for (order, pause) in [([1, 2], 0), ([1, 2], 1), ([2, 1], 0), ([2, 1], 1)] {
        let (runtime, _) = queueing(512);
        let mut batcher = Batcher::new(engine(&demo(), &runtime, narrow), BatchOptions::default());
        let (mut outcomes, now) = ([(); 3].map(|()| Outcome::default()), Instant::now());
        let of = |id: u64, by_host: bool, rows: usize| {
            let ids = (0..rows).map(|j| (j * 7 + id as usize * 31 + 5) as u32 % 500).collect();
            let mut request = BatchRequest::new(id, ids, 60);
            request.sampler.repetition_penalty = if by_host { 1.2 } else { 1.0 };
            request
        };
        batcher.submit(of(0, true, 20), now).expect("accepted");
        while outcomes[0].tokens.is_empty() {
            step(&mut batcher, now, &mut outcomes);
        }
        (0..pause).for_each(|_| step(&mut batcher, now, &mut outcomes));
        for id in order {
            let (by_host, rows) = if id == 1 { (true, 100) } else { (false, 440) };
            batcher.submit(of(id, by_host, rows), now).expect("accepted");
        }
        while outcomes[1].tokens.is_empty() {
            step(&mut batcher, now, &mut outcomes);
        }
        assert!(outcomes[2].tokens.is_empty(), "{order:?}, {pause}: the long prompt was first");
        finish_from(&mut batcher, outcomes.into());
        assert_all_is_back(&mut batcher);
    }
}

/// No token is drawn from logits that could not be read.
#[test]
fn logits_that_cannot_be_read_end_their_sequence_alone() {
    let (runtime, queueing) = queueing(512);
    let mut batcher = batcher(&demo(), &runtime);
    let (mut outcomes, now) = ([(); 2].map(|()| Outcome::default()), Instant::now());
    for (id, i) in [(0, 0), (1, 5)] {
        let request = BatchRequest { id, max_tokens: 40, ..request(i, Vec::new()) };
        batcher.submit(request, now).expect("accepted");
    }
    while outcomes.iter().any(|outcome| outcome.tokens.is_empty()) {
        step(&mut batcher, now, &mut outcomes);
    }
    queueing.breaks_settled_reads.store(true, Ordering::Relaxed);
    let before = outcomes[1].tokens.len();
    let outcomes = finish_from(&mut batcher, outcomes.into());
    assert_eq!((outcomes[0].tokens.len(), outcomes[1].tokens.len()), (40, before));
    let error = outcomes[1].error.as_ref().map(ToString::to_string).unwrap_or_default();
    assert!(error.contains("injected") && outcomes[0].error.is_none(), "{error}");
    assert_all_is_back(&mut batcher);
}

#[test]
fn a_step_that_fails_ends_nobody_it_need_not() {
    for folder in models() {
        let (runtime, queueing) = queueing(512);
        let mut batcher = batcher(&folder, &runtime);
        let requests = || (0..3).map(|i| request([0, 2, 3][i], Vec::new())).enumerate();
        let all = || requests().map(|(i, request)| BatchRequest { id: i as u64, ..request }).collect();
        let want = run(&mut batcher, all());
        batcher.forget_prefixes();
        let is_recurrent = batcher.engine().cache().spec().is_recurrent();
        for launches in [6, 7, 20, 41, 60] {
            let list: Vec<BatchRequest> = all();
            list.into_iter().for_each(|r| batcher.submit(r, Instant::now()).expect("accepted"));
            queueing.until.store(launches, Ordering::Relaxed);
            for (i, got) in finish(&mut batcher, 3).into_iter().enumerate() {
                match got.error {
                    None => assert_eq!(got.tokens, want[i].tokens, "{}: {launches}", folder.display()),
                    // Its state is ahead of its tokens.
                    Some(error) => {
                        assert!(is_recurrent, "{}: {launches}: {error}", folder.display());
                        assert!(want[i].tokens.starts_with(&got.tokens));
                    }
                }
            }
            assert!(batcher.status().failed_steps > 0);
            assert_all_is_back(&mut batcher);
        }
    }
}
