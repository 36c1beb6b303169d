use std::sync::Arc;
use std::time::Instant;

use keel_array::{Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_models::loading::CheckpointParameters;
use keel_testkit::fixtures::fixture;
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use keel_weights::Checkpoint;

use super::*;
use crate::batch::{BatchOptions, BatchRequest};
use crate::speculation::Costs;
use crate::{Engine, EngineOptions, SpeculationOptions};

/// A CPU that says it queues, so that steps run ahead.
struct Queues;

impl Interceptor for Queues {
    fn is_queueing(&self) -> bool {
        true
    }
}

const SEQUENCES: usize = 4;
/// Answers in each test.
const ANSWERS: u64 = 2;

/// A batch whose drafts are all accepted.
pub(in crate::batch) fn batcher(drafts: usize, checkpoints: usize) -> Batcher {
    let cpu = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() });
    let backend = InterceptedBackend::new(Arc::new(cpu), Arc::new(Queues));
    let runtime = Runtime::new(backend, RuntimeOptions::default());
    let checkpoint = Checkpoint::open(&fixture("qwen3_5")).expect("it opens");
    let options = EngineOptions {
        drafts,
        checkpoints,
        context: 2048,
        sequences: SEQUENCES,
        prefill_step: 64,
        ..EngineOptions::default()
    };
    let parameters = CheckpointParameters(&checkpoint);
    let engine =
        Engine::load(&runtime, &parameters, checkpoint.config(), options, &|_| ()).expect("it loads");
    let speculation = SpeculationOptions { optimistic: true, ..SpeculationOptions::default() };
    Batcher::new(engine, BatchOptions { speculation, ..BatchOptions::default() })
}

/// Times with which each draft that is accepted pays.
fn times(drafts: usize) -> Costs {
    let mut costs = Costs::default();
    for sequences in 1..=SEQUENCES {
        (1..=drafts + 1).for_each(|each| {
            costs.note_pass(each * sequences, sequences, 1e-3 + 1e-5 * each as f64);
        });
        costs.note_draft(sequences, 1e-5);
    }
    costs
}

pub(in crate::batch) fn request(id: u64, len: u64, max_tokens: usize) -> BatchRequest {
    BatchRequest::new(id, (0..len).map(|i| ((id + 1) * 37 + i * 7) as u32 % 90).collect(), max_tokens)
}

/// Runs two answers with these times. With `prompts` each step has rows of a prompt, too. Returns the drafts of all
/// answers, and the most calls in a row after which a step was under way.
fn run(batcher: &mut Batcher, max_tokens: usize, prompts: bool) -> (u64, usize) {
    let (now, drafts) = (Instant::now(), batcher.engine.options().drafts);
    // The first plain step makes it 21 rows. Rounds of two tokens then come to the row before a grid point.
    (0..ANSWERS).for_each(|id| batcher.submit(request(id, 20, max_tokens), now).expect("accepted"));
    let (mut stretch, mut longest, mut next) = (0, 0, ANSWERS);
    while (0..ANSWERS).any(|id| batcher.has(id)) {
        let status = batcher.status();
        for _ in (status.running.len() + status.waiting..SEQUENCES).take_while(|_| prompts) {
            // The first one is shorter, so that the two never end together.
            let len = if next == ANSWERS { 300 } else { 900 };
            batcher.submit(request(next, len, 1), now).expect("accepted");
            next += 1;
        }
        batcher.engine.costs.replace_times(times(drafts));
        batcher.step(now);
        stretch = if batcher.engine.steps_in_flight() > 0 { stretch + 1 } else { 0 };
        longest = longest.max(stretch);
    }
    batcher.cancel_all();
    (batcher.status().speculation.drafted_total(), longest)
}

/// A plain step is measured after 256 rounds with drafts. With checkpoints no round crosses a grid point, so answers
/// one row before it have no room for a draft.
#[test]
fn a_batch_whose_drafts_pay_soon_drafts_again() {
    for checkpoints in [0, 8] {
        let mut batcher = batcher(1, checkpoints);
        let (drafted, longest) = run(&mut batcher, 700, false);
        assert!(longest <= 8, "{checkpoints} checkpoints: {longest} calls without a round");
        assert!(drafted > ANSWERS * 300, "{checkpoints} checkpoints: {drafted} drafts of 1400 tokens");
    }
}

/// No step of such a batch has answers alone, and the MTP head catches up only once the steps under way are taken.
#[test]
fn a_batch_with_prompts_in_each_step_drafts_again() {
    for (drafts, max_tokens) in [(1, 700), (4, 1700)] {
        let mut batcher = batcher(drafts, 0);
        let (drafted, longest) = run(&mut batcher, max_tokens, true);
        assert!(longest <= 8, "up to {drafts} drafts: {longest} calls without a round");
        // Without plain rounds 1 of 2 tokens is a draft, or 4 of 5.
        let most = ANSWERS * (max_tokens * drafts / (drafts + 1)) as u64;
        assert!(10 * drafted > 8 * most, "up to {drafts} drafts: {drafted} of {most}");
    }
}

/// A number of sequences that has been in steps with prompts alone is known from them.
#[test]
fn steps_with_prompts_bound_the_time_of_a_plain_step() {
    let mut batcher = batcher(1, 0);
    let now = Instant::now();
    (0..ANSWERS).for_each(|id| batcher.submit(request(id, 20, 100), now).expect("accepted"));
    batcher.submit(request(ANSWERS, 1900, 1), now).expect("accepted");
    assert!(batcher.engine.costs.wants_plain(2));
    (0..4).for_each(|_| drop(batcher.step(now)));
    assert!(!batcher.engine.costs.wants_plain(2));
    let running = batcher.status().running;
    assert!(running.iter().any(|of| of.prefilled_tokens < of.prompt_tokens), "{running:?}");
    batcher.cancel_all();
}

/// Answers compare depths only once in 8 rounds, each in another.
#[test]
fn answers_are_asked_in_8_steps_in_a_row() {
    let mut batcher = batcher(0, 0);
    let mut asked = Vec::new();
    batcher.plain_steps = 1;
    for step in 1..=150 {
        if batcher.are_asked() {
            asked.push(step);
        }
        batcher.note_asked();
        batcher.note_plain_step();
        batcher.plain_steps = batcher.plain_steps.max(1);
    }
    assert_eq!(asked, [(64..72).collect::<Vec<_>>(), (135..143).collect()].concat());
}
