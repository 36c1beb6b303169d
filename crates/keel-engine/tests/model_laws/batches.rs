//! Many sequences at once: each gets the tokens that it gets alone, and all memory is given back.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::common::batching::{Outcome, assert_all_is_back, batcher, finish, options, prompt, run, step};
use crate::common::{engine, fixture, runtime};
use keel_array::{ArrayError, Backend, Category, Launch, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::batch::{BatchEvent, BatchOptions, BatchRequest, Batcher, Constraint, SequenceEvent};
use keel_engine::{Depth, EngineError, EngineOptions, FinishReason, SamplerOptions, SpeculationOptions};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor, injected};

const FIXTURES: [&str; 3] = ["qwen3_5", "qwen3_next", "qwen3_5_mlx_4bit"];

#[test]
fn two_requests_never_have_the_same_number() {
    let options = EngineOptions { sequences: 1, ..options() };
    let mut batcher =
        Batcher::new(engine(&fixture("qwen3_5"), &runtime(2), options), BatchOptions::default());
    let now = Instant::now();
    let submit = |batcher: &mut Batcher, id| batcher.submit(BatchRequest::new(id, vec![1, 2, 3], 4), now);
    submit(&mut batcher, 7).expect("it is free");
    submit(&mut batcher, 8).expect("it is free");
    batcher.step(now);
    // The first runs, the second waits.
    for id in [7, 8] {
        let refused = submit(&mut batcher, id).expect_err("it is in use");
        assert!(matches!(refused, EngineError::SequenceId { id: of } if of == id), "{refused}");
    }
    batcher.cancel(7);
    submit(&mut batcher, 7).expect("it is free again");
    batcher.cancel_all();
}

#[test]
fn every_sequence_of_a_busy_batch_gets_the_tokens_it_gets_alone() {
    let speculation = SpeculationOptions { depth: Depth::Fixed(2), ..SpeculationOptions::default() };
    let batch = BatchOptions { step_tokens: 128, speculation, ..BatchOptions::default() };
    for (name, drafts) in [("qwen3_5", 0), ("qwen3_5", 3), ("qwen3_5_moe", 3), ("qwen3_5_mlx_4bit", 0)] {
        let folder = fixture(name);
        let mut busy =
            Batcher::new(engine(&folder, &runtime(2), EngineOptions { drafts, ..options() }), batch);
        let shared = prompt(name, 99, 200);
        let requests = || -> Vec<BatchRequest> {
            let request = |i: usize| {
                let own = prompt(name, i as u32, 1 + (i * 37) % 300);
                let ids = if i.is_multiple_of(3) { [shared.clone(), own].concat() } else { own };
                let mut request = BatchRequest::new(i as u64, ids, 1 + (i * 5) % 23);
                if i.is_multiple_of(4) {
                    request.sampler =
                        SamplerOptions { temperature: 1.0, seed: i as u64, ..SamplerOptions::default() };
                    request.speculate = false;
                }
                request
            };
            (0..64).map(request).collect()
        };
        let together = run(&mut busy, requests());
        let anew = BatchOptions { reuse_prefixes: false, ..batch };
        let mut quiet = batcher(name, anew);
        for (i, request) in requests().into_iter().enumerate() {
            let mut only = request;
            only.id = 0;
            let alone = &run(&mut quiet, vec![only])[0];
            assert_eq!(together[i].tokens, alone.tokens, "{name}: request {i}");
            assert_eq!(together[i].finish, alone.finish);
        }
        assert!(together.iter().filter(|o| o.cached > 0).count() > 10, "prefixes are shared");
        let counters = busy.status().speculation;
        assert_eq!(counters.drafted_total() > 100, drafts > 0, "{name}: {counters:?}");
        assert_all_is_back(&mut busy);
        assert_all_is_back(&mut quiet);
    }
}

#[test]
fn a_next_turn_runs_only_what_is_new() {
    for name in FIXTURES {
        let mut batcher = batcher(name, BatchOptions::default());
        let first = prompt(name, 1, 330);
        let answer = run(&mut batcher, vec![BatchRequest::new(0, first.clone(), 100)]).remove(0).tokens;
        let second = [first, answer, prompt(name, 2, 40)].concat();
        let outcome = run(&mut batcher, vec![BatchRequest::new(0, second.clone(), 10)]).remove(0);
        assert_eq!(outcome.cached, (330 + 99) / 64 * 64, "{name}: all but the last grid of the answer");
        if name == "qwen3_5" {
            let drafting = EngineOptions { drafts: 3, ..options() };
            let folder = fixture(name);
            let speculation = SpeculationOptions { depth: Depth::Fixed(3), ..SpeculationOptions::default() };
            let batch = BatchOptions { speculation, ..BatchOptions::default() };
            let mut drafting = Batcher::new(engine(&folder, &runtime(2), drafting), batch);
            let again = run(&mut drafting, vec![BatchRequest::new(0, second[..330].to_vec(), 100)]).remove(0);
            assert_eq!(again.tokens, second[330..430], "drafts change nothing");
            let next = run(&mut drafting, vec![BatchRequest::new(0, second.clone(), 10)]).remove(0);
            assert_eq!((next.cached, &next.tokens), (outcome.cached, &outcome.tokens));
            assert_all_is_back(&mut drafting);
        }
        // The answer was decoded. If it is not reused, the bits are those of a run from scratch.
        let exact = BatchOptions { reuse_generated: false, ..BatchOptions::default() };
        let mut batcher = self::batcher(name, exact);
        run(&mut batcher, vec![BatchRequest::new(0, second[..330].to_vec(), 100)]);
        let reused = run(&mut batcher, vec![BatchRequest::new(0, second.clone(), 10)]).remove(0);
        batcher.forget_prefixes();
        let anew = run(&mut batcher, vec![BatchRequest::new(0, second, 10)]).remove(0);
        assert_eq!((reused.cached, anew.cached), (320, 0), "{name}");
        assert_eq!(reused.tokens, anew.tokens, "{name}");
        assert_all_is_back(&mut batcher);
    }
}

#[test]
fn prompts_that_come_together_are_run_once() {
    let mut batcher = batcher("qwen3_5", BatchOptions::default());
    let shared = prompt("qwen3_5", 1, 400);
    let requests = (0..5).map(|i| {
        let ids = if i == 3 { prompt("qwen3_5", 9, 20) } else { shared.clone() };
        BatchRequest::new(i, ids, 5)
    });
    let outcomes = run(&mut batcher, requests.collect());
    let cached: Vec<usize> = outcomes.iter().map(|o| o.cached).collect();
    assert_eq!(cached, [0, 384, 384, 0, 384]);
    assert!([1, 2, 4].iter().all(|&i| outcomes[i].tokens == outcomes[0].tokens));
    assert_all_is_back(&mut batcher);
}

#[test]
fn an_admitted_request_never_fails_for_memory() {
    let mut batcher = batcher("qwen3_5", BatchOptions::default());
    let requests = (0..40).map(|i| {
        let len = 1 + (i * 211) % 700;
        BatchRequest::new(i as u64, prompt("qwen3_5", i as u32 % 5, len), 1 + (i * 97) % 300)
    });
    for outcome in run(&mut batcher, requests.collect()) {
        assert!(outcome.error.is_none() && outcome.finish.is_some(), "{outcome:?}");
    }
    assert_all_is_back(&mut batcher);
}

#[test]
fn what_cannot_run_is_refused_with_numbers() {
    let folder = fixture("qwen3_5");
    let small = EngineOptions { pool_pages: Some(2), ..options() };
    let limits = BatchOptions { queue_limit: 1, ..BatchOptions::default() };
    let mut batcher = Batcher::new(engine(&folder, &runtime(2), small), limits);
    let now = Instant::now();
    let mut submit = |prompt: Vec<u32>, max_tokens| {
        batcher.submit(BatchRequest::new(0, prompt, max_tokens), now).map_err(|e| e.to_string())
    };
    let context = submit(vec![1; 1000], 100).expect_err("too long");
    assert!(context.contains("1100") && context.contains("1024"), "{context}");
    let never = submit(vec![1; 500], 100).expect_err("three pages of two");
    assert!(never.contains("600 tokens") && never.contains("bytes"), "{never}");
    assert!(submit(vec![], 1).is_err() && submit(vec![1], 0).is_err() && submit(vec![999_999], 1).is_err());
    submit(vec![1; 10], 5).expect("fits");
    let second = batcher.submit(BatchRequest::new(1, vec![1; 10], 5), now);
    assert!(second.expect_err("one may wait").to_string().contains("limit of 1"));
    assert_eq!(finish(&mut batcher, 1)[0].tokens.len(), 5);
}

/// Layers with a window have no part in the pool.
#[test]
fn what_never_fits_is_refused_with_the_bytes_of_the_plan() {
    let with = |pool_pages| {
        let options = EngineOptions { pool_pages: Some(pool_pages), ..options() };
        engine(&fixture("gemma3_text"), &runtime(2), options)
    };
    let [two, three] = [2, 3].map(with);
    let [less, more] = [&two, &three].map(|engine| engine.runtime().ledger().active().get(Category::Kv));
    let page_bytes = (more - less) as usize;
    let mut batcher = Batcher::new(two, BatchOptions::default());
    let refused = batcher.submit(BatchRequest::new(0, vec![1, 2, 3], 700), Instant::now());
    let Err(EngineError::NeverFits { needed_bytes, total_bytes, .. }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!((needed_bytes, total_bytes), (3 * page_bytes, 2 * page_bytes));
}

#[test]
fn waiting_and_running_end_in_time() {
    let limits = BatchOptions { queue_timeout: Duration::from_secs(5), ..BatchOptions::default() };
    let mut batcher = batcher("qwen3_5", limits);
    let start = Instant::now();
    for id in 0..7 {
        let mut request = BatchRequest::new(id, prompt("qwen3_5", 1, 20), 500);
        request.deadline = (id == 2).then_some(start + Duration::from_secs(3));
        batcher.submit(request, start).expect("accepted");
    }
    batcher.step(start);
    assert_eq!((batcher.status().running.len(), batcher.status().waiting), (6, 1));
    let failed = |events: Vec<SequenceEvent>| -> Vec<(u64, String)> {
        let failure = |SequenceEvent { id, event }| match event {
            BatchEvent::Failed(error) => Some((id, error.to_string())),
            _ => None,
        };
        events.into_iter().filter_map(failure).collect()
    };
    let late = failed(batcher.step(start + Duration::from_secs(4)));
    assert!(matches!(&late[..], [(2, reason)] if reason.contains("deadline")), "{late:?}");
    assert_eq!(batcher.status().waiting, 0, "its place was free at once");
    batcher.submit(BatchRequest::new(9, vec![1], 500), start).expect("accepted");
    let late = failed(batcher.step(start + Duration::from_secs(5)));
    assert!(matches!(&late[..], [(9, reason)] if reason.contains("5 seconds")), "{late:?}");
    batcher.cancel_all();
    assert_all_is_back(&mut batcher);
}

#[test]
fn a_cancelled_request_gives_its_memory_back_at_once() {
    let mut batcher = batcher("qwen3_5", BatchOptions::default());
    let now = Instant::now();
    for id in 0..8 {
        batcher.submit(BatchRequest::new(id, prompt("qwen3_5", 3, 600), 50), now).expect("accepted");
    }
    batcher.step(now);
    (0..8).for_each(|id| batcher.cancel(id));
    batcher.cancel(77);
    assert!(batcher.is_idle() && batcher.step(now).is_empty());
    assert_all_is_back(&mut batcher);
}

#[test]
fn a_long_prompt_delays_the_others_by_at_most_a_chunk() {
    let limits = BatchOptions { step_tokens: 64, ..BatchOptions::default() };
    let mut batcher = batcher("qwen3_5", limits);
    let now = Instant::now();
    batcher.submit(BatchRequest::new(0, vec![1; 10], 100), now).expect("accepted");
    batcher.step(now);
    batcher.submit(BatchRequest::new(1, prompt("qwen3_5", 1, 900), 10), now).expect("accepted");
    batcher.submit(BatchRequest::new(2, vec![2; 10], 10), now).expect("accepted");
    for step in 0..8 {
        let events = batcher.step(now);
        let token = |id| events.iter().any(|e| e.id == id && matches!(e.event, BatchEvent::Token { .. }));
        assert!(token(0), "step {step}: an answer goes on");
        let is_run = |e: &&SequenceEvent| matches!(e.event, BatchEvent::Prefilled(_));
        assert!(events.iter().filter(is_run).count() <= 2, "step {step}");
        if step == 1 {
            let drawn = batcher.status().running.iter().find(|r| r.id == 2).map(|r| r.generated_tokens);
            assert!(drawn > Some(0), "a newcomer does not wait for the long prompt: {:?}", batcher.status());
        }
    }
    batcher.cancel_all();
}

/// Allows only even tokens, and four of them.
struct Even(usize);

impl Constraint for Even {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        logits.iter_mut().skip(1).step_by(2).for_each(|l| *l = f32::NEG_INFINITY);
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        self.0 += 1;
        if token.is_multiple_of(2) { Ok(()) } else { Err(format!("{token} is odd")) }
    }

    fn is_complete(&self) -> bool {
        self.0 == 4
    }
}

#[test]
fn a_constraint_decides_what_is_drawn_and_when_it_ends() {
    let mut batcher = batcher("qwen3_5", BatchOptions::default());
    let mut request = BatchRequest::new(0, prompt("qwen3_5", 4, 20), 100);
    request.constraint = Some(Box::new(Even(0)));
    request.sampler = SamplerOptions { temperature: 1.0, ..SamplerOptions::default() };
    let outcome = run(&mut batcher, vec![request]).remove(0);
    assert_eq!((outcome.tokens.len(), outcome.finish), (4, Some(FinishReason::Stop)));
    assert!(outcome.tokens.iter().all(|id| id.is_multiple_of(2)));
}

#[test]
fn times_that_jump_back_or_ahead_without_a_deadline_change_nothing() {
    let mut batcher = batcher("qwen3_5", BatchOptions::default());
    let hours = Duration::from_secs(5 * 3600);
    let now = Instant::now() + hours;
    let requests = || (0..7).map(|i| BatchRequest::new(i, prompt("qwen3_5", i as u32, 100), 20));
    let still = run(&mut batcher, requests().collect());
    batcher.forget_prefixes();
    for jump in [now - hours, now + hours] {
        requests().for_each(|r| batcher.submit(r, now).expect("accepted"));
        // All requests but one begin at once; that one waits for a slot.
        let mut tokens = vec![Vec::new(); 7];
        let mut times = [now, jump, now, jump].into_iter().cycle();
        while !batcher.is_idle() {
            let waits = batcher.status().waiting > 0;
            let time = times.next().expect("it cycles");
            // A waiting request has a time limit, which a jump ahead would exceed.
            for SequenceEvent { id, event } in batcher.step(if waits { time.min(now) } else { time }) {
                match event {
                    BatchEvent::Token { id: token, .. } => tokens[id as usize].push(token),
                    BatchEvent::Failed(error) => panic!("{id}: {error}"),
                    _ => {}
                }
            }
        }
        assert!(tokens.iter().zip(&still).all(|(tokens, still)| *tokens == still.tokens));
    }
    assert_all_is_back(&mut batcher);
}

/// Counts launches. Fails one launch and the next, which is its retry.
#[derive(Default)]
struct Launches {
    done: AtomicUsize,
    /// The first launch that fails, counted from the start; 0 fails none.
    fails: AtomicUsize,
}

impl Interceptor for Launches {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        let number = self.done.fetch_add(1, Ordering::SeqCst) + 1;
        let fails = self.fails.load(Ordering::SeqCst);
        if fails > 0 && (number == fails || number == fails + 1) {
            return Err(injected("launch"));
        }
        backend.launch(launch)
    }
}

#[test]
fn a_failed_prompt_fails_alone() {
    let folder = fixture("qwen3_5");
    let launches = Arc::new(Launches::default());
    let cpu = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() });
    let backend = InterceptedBackend::new(Arc::new(cpu), Arc::clone(&launches));
    let runtime = Runtime::new(backend, RuntimeOptions::default());
    let mut batcher = Batcher::new(engine(&folder, &runtime, options()), BatchOptions::default());
    let requests = || (0..3).map(|i| BatchRequest::new(i, prompt("qwen3_5", i as u32, 90), 20));
    let good = run(&mut batcher, requests().collect());
    batcher.forget_prefixes();
    let now = Instant::now();
    for request in requests().take(2) {
        batcher.submit(request, now).expect("accepted");
    }
    let mut outcomes: Vec<Outcome> = (0..3).map(|_| Outcome::default()).collect();
    let before = loop {
        let before = launches.done.load(Ordering::SeqCst);
        step(&mut batcher, now, &mut outcomes);
        if outcomes[..2].iter().all(|outcome| outcome.tokens.len() > 2) {
            break launches.done.load(Ordering::SeqCst) - before;
        }
    };
    // A step of both answers takes `before` launches. The launch after it belongs to the newcomer's prompt.
    launches.fails.store(launches.done.load(Ordering::SeqCst) + before + 1, Ordering::SeqCst);
    batcher.submit(requests().nth(2).expect("three"), now).expect("accepted");
    while !batcher.is_idle() {
        step(&mut batcher, now, &mut outcomes);
    }
    assert!(matches!(outcomes[2].error, Some(EngineError::Array(_))), "{:?}", outcomes[2]);
    for i in 0..2 {
        assert_eq!((&outcomes[i].tokens, outcomes[i].finish), (&good[i].tokens, good[i].finish));
    }
    assert_all_is_back(&mut batcher);
}
