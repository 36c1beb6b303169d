//! Steps of a batch that fail: a transient fault costs no answer, and a lasting fault costs only the answers that it
//! concerns.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::common::batching::{Outcome, assert_all_is_back, finish, run, step};
use crate::common::{PLAIN, demo, engine, fixture};
use keel_array::{ArrayError, Backend, Launch, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher};
use keel_engine::{Depth, EngineError, EngineOptions, SamplerOptions, SpeculationOptions};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor, injected};

/// Fails launches by their number. Their kernels do not run, and the launch reports so.
#[derive(Default)]
struct Faults {
    launches: AtomicUsize,
    failing: Mutex<BTreeSet<usize>>,
    /// How many reads of results fail from now on.
    failing_reads: AtomicUsize,
    /// Whether the kernels of failing launches run, and it is not said how many.
    tears: AtomicBool,
}

impl Faults {
    /// Launches so far.
    fn launches(&self) -> usize {
        self.launches.load(Ordering::SeqCst)
    }

    /// Fails these of the coming launches; the next one has number 0.
    fn fail(&self, launches: impl IntoIterator<Item = usize>) {
        let next = self.launches();
        *self.failing.lock().expect("held by nobody who panics") =
            launches.into_iter().map(|i| next + i).collect();
    }
}

impl Interceptor for Faults {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        let number = self.launches.fetch_add(1, Ordering::SeqCst);
        let is_listed = self.failing.lock().expect("held by nobody who panics").contains(&number);
        if is_listed && self.tears.load(Ordering::SeqCst) {
            backend.launch(launch)?;
            return Err(injected("launch"));
        }
        if is_listed {
            launch.note_done(0);
            return Err(injected("launch"));
        }
        backend.launch(launch)
    }

    fn before_read(&self, _bytes: usize, is_settled: bool) -> Result<(), ArrayError> {
        let fails = |left: usize| left.checked_sub(1).filter(|_| is_settled);
        match self.failing_reads.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fails) {
            Ok(_) => Err(injected("read")),
            Err(_) => Ok(()),
        }
    }
}

fn batcher(folder: &Path, drafts: usize) -> (Batcher, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    let cpu = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() });
    let runtime =
        Runtime::new(InterceptedBackend::new(Arc::new(cpu), Arc::clone(&faults)), RuntimeOptions::default());
    let options = EngineOptions {
        context: 512,
        sequences: 4,
        prefill_step: 128,
        checkpoints: 12,
        drafts,
        ..EngineOptions::default()
    };
    let speculation = SpeculationOptions { depth: Depth::Fixed(2), ..SpeculationOptions::default() };
    let batch = BatchOptions { speculation, ..BatchOptions::default() };
    (Batcher::new(engine(folder, &runtime, options), batch), faults)
}

const COUNT: usize = 3;

/// Prompts that end off the grid, and answers that cross it, one of them sampled.
fn requests() -> Vec<BatchRequest> {
    let ids = |i: u32| (0..100 + 11 * i).map(move |j| (j * 7 + i * 13 + 5) % 500).collect();
    let mut requests: Vec<_> = (0..COUNT as u32).map(|i| BatchRequest::new(i.into(), ids(i), 50)).collect();
    requests[1].sampler = SamplerOptions { temperature: 0.8, seed: 3, ..SamplerOptions::default() };
    requests[1].speculate = false;
    requests
}

/// Submits the requests and runs until each has drawn a token.
fn begin(batcher: &mut Batcher) -> Vec<Outcome> {
    let mut outcomes: Vec<Outcome> = (0..COUNT).map(|_| Outcome::default()).collect();
    let now = Instant::now();
    requests().into_iter().for_each(|request| batcher.submit(request, now).expect("accepted"));
    while outcomes.iter().any(|outcome| outcome.tokens.is_empty()) {
        step(batcher, now, &mut outcomes);
    }
    outcomes
}

/// Runs the requests to their ends.
fn end(batcher: &mut Batcher, mut outcomes: Vec<Outcome>) -> Vec<Outcome> {
    for (outcome, rest) in outcomes.iter_mut().zip(finish(batcher, COUNT)) {
        outcome.tokens.extend(rest.tokens);
        (outcome.finish, outcome.error) = (rest.finish, rest.error);
    }
    outcomes
}

#[test]
fn a_fault_that_passes_costs_nobody_an_answer() {
    let plain = [(fixture(PLAIN[0]), 0)];
    for (folder, drafts) in [(demo(), 2), (demo(), 0)].into_iter().chain(plain) {
        let (mut batcher, faults) = batcher(&folder, drafts);
        let before = faults.launches();
        let good = run(&mut batcher, requests());
        let launches = faults.launches() - before;
        assert!(good.iter().all(|outcome| outcome.tokens.len() == 50), "{good:?}");
        for number in (0..launches).step_by(1 + launches / 20) {
            batcher.forget_prefixes();
            let failed = batcher.status().failed_steps;
            faults.fail([number]);
            let outcomes = run(&mut batcher, requests());
            for (outcome, good) in outcomes.iter().zip(&good) {
                let what = (&outcome.tokens, outcome.finish);
                assert_eq!(
                    what,
                    (&good.tokens, good.finish),
                    "{drafts} drafts, launch {number}: {outcome:?}"
                );
            }
            assert_eq!(batcher.status().failed_steps, failed + 1, "launch {number} was not tried again");
        }
        assert_all_is_back(&mut batcher);
    }
}

/// Where a round can be repeated, a read that fails once or twice costs no answer.
#[test]
fn results_that_cannot_be_read_are_made_again() {
    for (folder, drafts) in [(demo(), 2), (fixture(PLAIN[0]), 0)] {
        let (mut batcher, faults) = batcher(&folder, drafts);
        // The host draws each token, so that it reads logits.
        let requests = || {
            let penalty = |mut request: BatchRequest| {
                request.sampler.repetition_penalty = 1.1;
                request
            };
            requests().into_iter().map(penalty)
        };
        let good = run(&mut batcher, requests().collect());
        for failing in [1, 2] {
            batcher.forget_prefixes();
            let mut outcomes: Vec<Outcome> = (0..COUNT).map(|_| Outcome::default()).collect();
            let now = Instant::now();
            requests().for_each(|request| batcher.submit(request, now).expect("accepted"));
            while outcomes.iter().any(|outcome| outcome.tokens.is_empty()) {
                step(&mut batcher, now, &mut outcomes);
            }
            let failed = batcher.status().failed_steps;
            faults.failing_reads.store(failing, Ordering::SeqCst);
            for (outcome, good) in end(&mut batcher, outcomes).iter().zip(&good) {
                assert_eq!((&outcome.tokens, outcome.finish), (&good.tokens, good.finish), "{outcome:?}");
            }
            assert_eq!(batcher.status().failed_steps, failed + failing as u64);
        }
        assert_all_is_back(&mut batcher);
    }
}

#[test]
fn a_fault_that_stays_with_one_sequence_ends_that_one_alone() {
    let (mut batcher, faults) = batcher(&demo(), 0);
    let good = run(&mut batcher, requests());
    for unlucky in 0..COUNT {
        batcher.forget_prefixes();
        let outcomes = begin(&mut batcher);
        // Both attempts of all together, then the attempt of one alone.
        faults.fail([0, 1, 2 + unlucky]);
        let outcomes = end(&mut batcher, outcomes);
        for (i, (outcome, good)) in outcomes.iter().zip(&good).enumerate() {
            if i == unlucky {
                assert!(
                    matches!(&outcome.error, Some(EngineError::Step(cause)) if cause.contains("injected"))
                );
                assert_eq!(outcome.tokens, good.tokens[..outcome.tokens.len()]);
            } else {
                assert_eq!(
                    (&outcome.tokens, outcome.finish),
                    (&good.tokens, good.finish),
                    "{i}: {outcome:?}"
                );
            }
        }
    }
    assert_all_is_back(&mut batcher);
}

#[test]
fn a_fault_that_stays_with_all_ends_all_and_leaves_nothing() {
    for drafts in [0, 2] {
        let (mut batcher, faults) = batcher(&demo(), drafts);
        let good = run(&mut batcher, requests());
        let outcomes = begin(&mut batcher);
        faults.fail(0..1000);
        let outcomes = end(&mut batcher, outcomes);
        assert!(outcomes.iter().all(|o| matches!(o.error, Some(EngineError::Step(_)))), "{outcomes:?}");
        faults.fail([]);
        batcher.forget_prefixes();
        let again = run(&mut batcher, requests());
        assert!(again.iter().zip(&good).all(|(again, good)| again.tokens == good.tokens), "{drafts} drafts");
        assert_all_is_back(&mut batcher);
    }
}

/// Sequences whose states a failed step has torn are not run again, so nothing else fails.
#[test]
fn a_step_that_tears_all_states_counts_once() {
    let (mut batcher, faults) = batcher(&fixture("qwen3_5"), 0);
    let outcomes = begin(&mut batcher);
    faults.tears.store(true, Ordering::SeqCst);
    faults.fail([0]);
    for outcome in end(&mut batcher, outcomes) {
        assert!(matches!(outcome.error, Some(EngineError::Step(_))), "{outcome:?}");
    }
    assert_eq!(batcher.status().failed_steps, 1);
    assert_all_is_back(&mut batcher);
}

#[test]
fn both_attempts_at_a_prompt_are_counted() {
    let (mut batcher, faults) = batcher(&fixture(PLAIN[0]), 0);
    faults.fail([0, 1]);
    let outcome = run(&mut batcher, requests().into_iter().take(1).collect()).remove(0);
    assert!(outcome.error.is_some() && outcome.tokens.is_empty(), "{outcome:?}");
    assert_eq!(batcher.status().failed_steps, 2);
    assert_all_is_back(&mut batcher);
}

/// A state that cannot be kept for a next turn costs no token, not even those of the same round.
#[test]
fn a_state_that_is_not_kept_ends_no_answer() {
    // The answer's last round ends on the grid, and its state is committed after it.
    let (rows, max_tokens) = (100, 29);
    let prompt = || (0..rows).map(|j| (j * 7 + 5) % 500).collect::<Vec<u32>>();
    let answer =
        |batcher: &mut Batcher| run(batcher, vec![BatchRequest::new(0, prompt(), max_tokens)]).remove(0);
    let next_turn = |batcher: &mut Batcher, tokens: &[u32]| {
        let text = [&prompt()[..], tokens].concat();
        run(batcher, vec![BatchRequest::new(0, text, 1)]).remove(0).cached
    };
    let (mut batcher, faults) = batcher(&demo(), 2);
    let before = faults.launches();
    let good = answer(&mut batcher);
    let launches = faults.launches() - before;
    assert_eq!((good.tokens.len(), next_turn(&mut batcher, &good.tokens)), (max_tokens, 128));

    batcher.forget_prefixes();
    let failed = batcher.status().failed_steps;
    faults.fail([launches - 1, launches]);
    let outcome = answer(&mut batcher);
    assert_eq!((&outcome.tokens, outcome.finish), (&good.tokens, good.finish), "{outcome:?}");
    assert_eq!(batcher.status().failed_steps, failed + 2, "both attempts to commit");
    assert_eq!(next_turn(&mut batcher, &outcome.tokens), 64, "the state of the prompt alone was kept");
    assert_all_is_back(&mut batcher);
}
