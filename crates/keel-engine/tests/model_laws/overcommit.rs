//! If more is admitted than fits, sequences are parked on the host and come back unchanged.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::batching::{Outcome, assert_all_is_back, finish, finish_from, prompt, run, step};
use crate::common::queueing::{queueing, waiting_and_queueing};
use crate::common::{HYBRID, PLAIN, decoded, demo, engine, expect_same_state, fixture, runtime};
use keel_array::sampling::Draw;
use keel_array::{ArrayError, Backend, Category, KvFormat, Launch, Runtime, RuntimeOptions};
use keel_cache::CacheError;
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::batch::{BatchEvent, BatchOptions, BatchRequest, Batcher, Constraint};
use keel_engine::{
    Depth, EngineError, EngineOptions, HostReads, SamplerOptions, SpeculationOptions, Work, WorkRows,
};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor, injected};

fn options() -> EngineOptions {
    EngineOptions {
        context: 1024,
        sequences: 8,
        prefill_step: 256,
        checkpoints: 12,
        // Two long requests are admitted. Each ends with three pages.
        pool_pages: Some(5),
        swap_bytes: 64 << 20,
        ..EngineOptions::default()
    }
}

fn batch() -> BatchOptions {
    let speculation = SpeculationOptions { depth: Depth::Fixed(2), ..SpeculationOptions::default() };
    BatchOptions { step_tokens: 256, speculation, ..BatchOptions::default() }
}

/// A prompt of one or two pages and a short answer. Every fourth answer is long, so that the request ends with three
/// pages. Some prompts begin alike.
fn request(i: usize) -> BatchRequest {
    let ids = |seed: usize, len: usize| (0..len).map(move |j| ((j * 7 + seed * 13 + 5) % 500) as u32);
    let own = ids(i, 120 + (i * 37) % 100);
    let prompt = if i.is_multiple_of(3) { ids(99, 128).chain(own).collect() } else { own.collect() };
    let max_tokens = if i % 4 == 1 { 400 + i } else { 1 + (i * 53) % 20 };
    let mut request = BatchRequest::new(i as u64, prompt, max_tokens);
    if i.is_multiple_of(5) {
        request.sampler = SamplerOptions { temperature: 1.0, seed: i as u64, ..SamplerOptions::default() };
        request.speculate = false;
    }
    request
}

/// Runs requests at once in a pool that is too small. Compares them with each request alone in a pool that has room.
fn expect_what_each_gets_alone(folder: &Path, drafts: usize, count: usize, kv: Option<KvFormat>) {
    let options = || EngineOptions { kv, ..options() };
    let crowded = EngineOptions { drafts, ..options() };
    let mut busy = Batcher::new(engine(folder, &runtime(2), crowded), batch());
    let together = run(&mut busy, (0..count).map(request).collect());
    let parking = busy.status().parking;
    assert!(parking.times as usize > count / 16, "too few were parked to tell: {parking:?}");
    assert_eq!((parking.parked, parking.bytes), (0, 0));
    assert_eq!(parking.bytes_out, parking.bytes_in);
    let roomy = EngineOptions { sequences: 1, drafts: 0, pool_pages: None, swap_bytes: 0, ..options() };
    let anew = BatchOptions { reuse_prefixes: false, ..batch() };
    let mut quiet = Batcher::new(engine(folder, &runtime(2), roomy), anew);
    for (i, outcome) in together.iter().enumerate() {
        let alone = &run(&mut quiet, vec![BatchRequest { id: 0, ..request(i) }])[0];
        assert_eq!(outcome.tokens, alone.tokens, "{}: request {i}", folder.display());
        assert_eq!(outcome.finish, alone.finish);
    }
    let drafted = busy.status().speculation.drafted_total();
    assert_eq!(drafted > 100, drafts > 0, "{drafted} drafts");
    assert_all_is_back(&mut busy);
}

#[test]
fn every_sequence_that_was_parked_gets_the_tokens_it_gets_alone() {
    for (name, drafts) in [("qwen3_5", 3), ("gemma3_text", 0)] {
        let folder = fixture(name);
        expect_what_each_gets_alone(&folder, drafts, 64, None);
    }
}

#[test]
fn so_does_the_built_in_model_however_it_keeps_keys_and_values() {
    for kv in [KvFormat::F16, KvFormat::Bits8, KvFormat::Bits4] {
        expect_what_each_gets_alone(&demo(), 2, 14, Some(kv));
    }
}

/// On a backend that queues, steps run ahead while sequences are parked, come back and end.
#[test]
fn steps_run_ahead_while_sequences_are_parked() {
    for (name, drafts) in [("qwen3_5", 0), ("gemma3_text", 0), ("qwen3_5", 2)] {
        for (waiting, queueing) in waiting_and_queueing() {
            let folder = fixture(name);
            let speculation = SpeculationOptions { depth: Depth::Fixed(0), ..SpeculationOptions::default() };
            let batch = BatchOptions { speculation, ..batch() };
            let crowded = EngineOptions { drafts, ..options() };
            let mut busy = Batcher::new(engine(&folder, &queueing, crowded), batch);
            assert!(busy.engine().runs_ahead());
            let (count, now) = (24, Instant::now());
            (0..count).for_each(|i| busy.submit(request(i), now).expect("accepted"));
            let mut outcomes: Vec<Outcome> = (0..count).map(|_| Outcome::default()).collect();
            let (mut steps, mut ahead, mut with_parked) = (0, 0, 0);
            while !busy.is_idle() {
                step(&mut busy, now, &mut outcomes);
                let is_ahead = busy.engine().steps_in_flight() > 0;
                steps += 1;
                ahead += usize::from(is_ahead);
                with_parked += usize::from(is_ahead && busy.status().parking.parked > 0);
            }
            let parking = busy.status().parking;
            assert!(parking.times > 2 && parking.bytes_out == parking.bytes_in, "{parking:?}");
            assert!(
                2 * ahead > steps && with_parked > 10,
                "{name}: {ahead} of {steps} steps, {with_parked} while one is parked"
            );
            let roomy =
                EngineOptions { sequences: 1, drafts: 0, pool_pages: None, swap_bytes: 0, ..options() };
            let mut quiet = Batcher::new(engine(&folder, &waiting, roomy), batch);
            for (i, outcome) in outcomes.iter().enumerate() {
                let alone = &run(&mut quiet, vec![BatchRequest { id: 0, ..request(i) }])[0];
                assert_eq!((&outcome.tokens, outcome.finish), (&alone.tokens, alone.finish), "{name}: {i}");
            }
            assert_all_is_back(&mut busy);
        }
    }
}

#[test]
fn nothing_fails_for_memory_whatever_the_host_has_room_for() {
    let folder = fixture("qwen3_5");
    let roomy = engine(&folder, &runtime(1), options());
    let one = roomy.cache().swap_size().blocks_for(1);
    drop(roomy);
    for blocks in [1, 2 * one + 1] {
        let options = EngineOptions { swap_bytes: blocks << 16, drafts: 2, ..options() };
        let mut batcher = Batcher::new(engine(&folder, &runtime(2), options), batch());
        for outcome in run(&mut batcher, (0..30).map(request).collect()) {
            assert!(outcome.error.is_none() && outcome.finish.is_some(), "{blocks} blocks: {outcome:?}");
        }
        assert_all_is_back(&mut batcher);
    }
}

const DEADLINE: Duration = Duration::from_secs(1000);

/// Runs steps until a sequence is parked.
fn crowd(batcher: &mut Batcher, count: usize, now: Instant) {
    for i in 0..count {
        let mut request = BatchRequest::new(i as u64, prompt("qwen3_5", i as u32, 200), 500);
        request.deadline = Some(now + DEADLINE);
        batcher.submit(request, now).expect("it fits alone");
    }
    for _ in 0..2000 {
        if batcher.status().parking.parked > 0 {
            return;
        }
        batcher.step(now);
    }
    panic!("nobody was parked: {:?}", batcher.status());
}

/// Its mask is not there at one position until it is told.
struct Stops {
    at: usize,
    taken: usize,
    goes_on: Arc<AtomicBool>,
}

impl Constraint for Stops {
    fn mask(&mut self, _logits: &mut [f32]) -> Result<(), String> {
        Ok(())
    }

    fn is_ready(&mut self, _patience: Duration) -> bool {
        self.taken != self.at || self.goes_on.load(Ordering::Relaxed)
    }

    fn accept(&mut self, _token: u32) -> Result<(), String> {
        self.taken += 1;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        false
    }
}

#[test]
fn nobody_is_parked_for_a_sequence_that_waits_for_its_mask() {
    let mut batcher = Batcher::new(engine(&fixture("qwen3_5"), &runtime(2), options()), batch());
    let goes_on = Arc::new(AtomicBool::new(false));
    // With 313 tokens it needs a third page.
    let stops = Stops { at: 313, taken: 0, goes_on: Arc::clone(&goes_on) };
    let now = Instant::now();
    for (id, constraint) in [(0, Some(Box::new(stops) as Box<dyn Constraint>)), (1, None)] {
        let request = BatchRequest::new(id, prompt("qwen3_5", id as u32, 200), 500);
        batcher.submit(BatchRequest { constraint, ..request }, now).expect("it fits alone");
    }
    let mut outcomes = vec![Outcome::default(), Outcome::default()];
    while outcomes[1].finish.is_none() {
        step(&mut batcher, now, &mut outcomes);
    }
    assert_eq!(outcomes[0].tokens.len(), 313, "it waits");
    assert_eq!(batcher.status().parking.times, 0, "the other one has all the pages that it needs");
    goes_on.store(true, Ordering::Relaxed);
    let outcomes = finish_from(&mut batcher, outcomes);
    assert_eq!(outcomes[0].tokens.len(), 500);
    assert_all_is_back(&mut batcher);
}

#[test]
fn a_parked_request_can_be_cancelled_and_be_late() {
    let folder = fixture("qwen3_5");
    let mut batcher = Batcher::new(engine(&folder, &runtime(2), options()), batch());
    let parked = |batcher: &Batcher| -> Vec<u64> {
        let status = batcher.status();
        (0..2).filter(|id| status.running.iter().all(|r| r.id != *id)).collect()
    };
    let now = Instant::now();
    crowd(&mut batcher, 2, now);
    assert_eq!(parked(&batcher), [1], "the newest");
    assert!(batcher.status().parking.bytes > 0);
    batcher.cancel(1);
    assert_eq!((batcher.status().parking.parked, batcher.status().parking.bytes), (0, 0));
    batcher.cancel(0);
    crowd(&mut batcher, 2, now);
    assert_eq!(parked(&batcher), [1]);
    let events = batcher.step(now + DEADLINE);
    let is_late = |id| {
        events.iter().any(|e| e.id == id && matches!(e.event, BatchEvent::Failed(EngineError::Deadline)))
    };
    assert!(is_late(0) && is_late(1), "{events:?}");
    assert!(batcher.is_idle());
    crowd(&mut batcher, 2, now);
    batcher.cancel_all();
    assert!(batcher.is_idle());
    assert_all_is_back(&mut batcher);
}

#[test]
fn a_sequence_comes_back_bit_for_bit_into_other_pages() {
    for name in HYBRID.iter().chain(&PLAIN) {
        let folder = fixture(name);
        let options = EngineOptions { sequences: 3, pool_pages: None, checkpoints: 0, ..options() };
        let mut engine = engine(&folder, &runtime(2), options);
        let text: Vec<u32> = (0..600).map(|i| (i * 7 + 3) % 500).collect();
        let mut parked = decoded(&mut engine, &text[..590], &text[590..]);
        let (pages, slot) = (parked.pages().to_vec(), parked.slot());
        assert_eq!(pages.len(), 3);
        engine.cache_mut().park(&mut parked).expect("there is room");
        assert!(parked.is_parked() && parked.pages().is_empty());
        // Another sequence takes the slot and the pages and overwrites them.
        let other = decoded(&mut engine, &text[5..300], &text[300..310]);
        assert!(other.slot() == slot && pages.contains(&other.pages()[0]), "{name}");
        engine.cache_mut().unpark(&mut parked).expect("there is room");
        assert!(parked.slot() != slot && parked.pages() != pages, "{name}");
        engine.release(other);
        let alike = decoded(&mut engine, &text[..590], &text[590..]);
        expect_same_state(&mut engine, parked, alike);
        assert!(engine.cache().is_idle(), "{name}");
    }
}

#[test]
fn host_memory_is_planned_and_bounded() {
    let runtime = runtime(1);
    let options = EngineOptions { swap_bytes: 3 << 20, pool_pages: None, drafts: 2, ..options() };
    let mut engine = engine(&demo(), &runtime, options);
    assert_eq!(runtime.ledger().active().get(Category::Swap), 3 << 20);
    let charges = runtime.ledger().charges();
    let mut parked = Vec::new();
    let refused = loop {
        let mut sequence = decoded(&mut engine, &[1, 2, 3], &[4]);
        engine.commit(&mut sequence).expect("runs");
        match engine.cache_mut().park(&mut sequence) {
            Ok(()) => parked.push(sequence),
            Err(error) => break (sequence, error),
        }
    };
    assert!(!parked.is_empty());
    assert!(matches!(refused.1, CacheError::NoSwap { total_bytes: 3145728, .. }), "{}", refused.1);
    assert_eq!(refused.0.len(), 4, "it is as it was");
    engine.release(refused.0);
    parked.into_iter().for_each(|sequence| engine.release(sequence));
    assert!(engine.cache().is_idle());
    assert_eq!(runtime.ledger().charges(), charges, "nothing is allocated on the way");
}

/// Notes how many bytes each read has.
#[derive(Debug, Default)]
struct Reads(Mutex<BTreeSet<usize>>);

impl Interceptor for Reads {
    fn before_read(&self, bytes: usize, _is_settled: bool) -> Result<(), ArrayError> {
        self.0.lock().expect("no panic").insert(bytes);
        Ok(())
    }
}

/// The host gets the hidden states that a parked sequence still needs, not those of its whole round.
#[test]
fn a_parked_sequence_takes_its_own_hidden_states_along() {
    let reads = Arc::new(Reads::default());
    let cpu = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() });
    let backend = InterceptedBackend::new(Arc::new(cpu), Arc::clone(&reads));
    let runtime = Runtime::new(backend, RuntimeOptions::default());
    let drafting = EngineOptions { drafts: 2, ..options() };
    let mut batcher = Batcher::new(engine(&fixture("qwen3_5"), &runtime, drafting), batch());
    let greedy = |i| BatchRequest { speculate: true, sampler: SamplerOptions::default(), ..request(i) };
    run(&mut batcher, (0..32).map(greedy).collect());
    let (parking, speculation) = (batcher.status().parking, batcher.status().speculation);
    assert!(parking.times > 2 && speculation.drafted_total() > 100, "{parking:?}, {speculation:?}");
    let row = batcher.engine().model().config.hidden * size_of::<f32>();
    let reads = reads.0.lock().expect("no panic");
    assert!(reads.contains(&row), "{reads:?}: one row of a sequence");
    for sequences in 2..=3 {
        // Each sequence has three rows in a round.
        assert!(!reads.contains(&(3 * sequences * row)), "{reads:?}: a round of {sequences} sequences");
    }
    assert_all_is_back(&mut batcher);
}

/// While it is set, launches fail.
#[derive(Default)]
struct Failing(AtomicBool);

impl Interceptor for Failing {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        if self.0.load(Ordering::Relaxed) {
            return Err(injected("launch"));
        }
        backend.launch(launch)
    }
}

#[test]
fn a_failed_step_spares_those_that_are_parked() {
    let folder = fixture("qwen3_5");
    let failing = Arc::new(Failing::default());
    let cpu = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() });
    let backend = InterceptedBackend::new(Arc::new(cpu), Arc::clone(&failing));
    let runtime = Runtime::new(backend, RuntimeOptions::default());
    let mut batcher = Batcher::new(engine(&folder, &runtime, options()), batch());
    let now = Instant::now();
    crowd(&mut batcher, 4, now);
    let running: Vec<u64> = batcher.status().running.iter().map(|r| r.id).collect();
    failing.0.store(true, Ordering::Relaxed);
    let failed: Vec<u64> = batcher
        .step(now)
        .into_iter()
        .filter_map(|e| matches!(e.event, BatchEvent::Failed(_)).then_some(e.id))
        .collect();
    failing.0.store(false, Ordering::Relaxed);
    assert!(running.iter().all(|id| failed.contains(id)), "{running:?} ran, {failed:?} failed");
    let rest: Vec<Outcome> = finish(&mut batcher, 4);
    let ended = rest.iter().filter(|outcome| outcome.finish.is_some()).count();
    assert_eq!(ended, 4 - failed.len(), "the others come to their ends");
    assert!(ended > 0);
    assert_all_is_back(&mut batcher);
}

/// A sequence leaves while a step with its row is under way, and another takes its slot. Then the step fails.
#[test]
fn a_failed_step_says_nothing_about_the_next_owner_of_a_slot() {
    for is_taken_first in [false, true] {
        let (runtime, failing) = queueing(16);
        let mut engine = engine(&fixture("qwen3_5"), &runtime, EngineOptions { sequences: 2, ..options() });
        let mut leaving = decoded(&mut engine, &[1, 2, 3], &[4]);
        let mut other = decoded(&mut engine, &[5, 6, 7], &[8]);
        engine.cache_mut().park(&mut other).expect("there is room");
        let slot = leaving.slot();
        failing.until.store(2, Ordering::Relaxed);
        let work = Work {
            sequence: &mut leaving,
            ahead: 0,
            rows: WorkRows::Token(9),
            draw: Some(Draw::GREATEST),
            reads: HostReads::Nothing,
        };
        let ticket = engine.submit(&mut [work]).expect("it is reported when it is taken");
        engine.release(leaving);
        if is_taken_first {
            engine.take(ticket).expect_err("injected");
            engine.cache_mut().unpark(&mut other).expect("there is room");
        } else {
            engine.cache_mut().unpark(&mut other).expect("there is room");
            engine.take(ticket).expect_err("injected");
        }
        assert_eq!(other.slot(), slot);
        engine.cache().expect_whole(&other).expect("it was in no failed step");
        engine.release(other);
        assert!(engine.cache().is_idle());
    }
}
