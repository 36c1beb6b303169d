//! A failed round leaves each sequence as it was: position, keys and values, windows, states, drafts and next draws.
//! Failures are injected at every launch of a round, in programs that are cut into many pieces.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use common::{decoded, demo, expect_same_state, fixture, recurrent_bytes};
use keel_array::{ArrayError, Backend, Compute, DeviceMemory, Launch, Op, Runtime, RuntimeOptions};
use keel_cache::{CacheError, Interruption, SequenceCache, Settled};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::speculation::{Chooser, RoundSequence, SamplerChooser, Speculation};
use keel_engine::{
    Depth, Engine, EngineError, EngineOptions, GenerateOptions, Sampler, SamplerOptions, SpeculationCounters,
    SpeculationOptions, TokenIterator,
};
use keel_testkit::disturbed::{Disturbance, Disturbed};

/// Says when a launch fails.
#[derive(Default)]
struct Faults {
    /// How many launches succeed before one fails; the largest number means never.
    until: AtomicUsize,
    /// Let the failing launch run first, and do not report how far it came.
    is_silent: AtomicBool,
    /// How many results are read before a read fails; the largest number means never.
    reads: AtomicUsize,
    /// Break the page table of the launch instead. The first attention in it finds out, after kernels that have run.
    breaks_pages: AtomicBool,
}

impl Faults {
    fn set(&self, launches: usize) {
        self.until.store(launches, Ordering::Relaxed);
    }

    fn clear(&self) {
        self.set(usize::MAX);
        self.reads.store(usize::MAX, Ordering::Relaxed);
    }
}

impl Disturbance for Faults {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        let left = self.until.load(Ordering::Relaxed);
        let attention = launch.kernels().iter().find(|k| matches!(k.op, Op::PagedAttention(_)));
        let breaks_pages = self.breaks_pages.load(Ordering::Relaxed);
        if left > 0 || breaks_pages && attention.is_none() {
            self.set(if left == usize::MAX { left } else { left.saturating_sub(1) });
            return backend.launch(launch);
        }
        self.clear();
        if let Some(attention) = attention.filter(|_| breaks_pages) {
            let table = launch.resolve(attention.inputs[5].slot);
            backend.write(table.buffer.memory(), table.offset, &u32::MAX.to_le_bytes());
            return backend.launch(launch);
        }
        if self.is_silent.load(Ordering::Relaxed) {
            backend.launch(launch)?;
        } else {
            launch.note_done(0);
        }
        Err(ArrayError::Kernel { op: "launch".into(), reason: "injected".into() })
    }

    fn read_settled(
        &self,
        backend: &dyn Backend,
        memory: &dyn DeviceMemory,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), ArrayError> {
        match self.reads.load(Ordering::Relaxed) {
            usize::MAX => {}
            0 => {
                self.clear();
                return Err(ArrayError::Kernel { op: "read".into(), reason: "injected".into() });
            }
            left => self.reads.store(left - 1, Ordering::Relaxed),
        }
        backend.read_settled(memory, offset, bytes)
    }
}

/// An engine for three sequences, whose programs are cut into pieces of `piece` kernels.
fn engine(folder: &Path, piece: usize) -> (Engine, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    faults.clear();
    let inner = CpuBackend::new(CpuOptions { threads: Some(2), poison_freed: true, ..CpuOptions::default() });
    let backend = Disturbed::new(Arc::new(inner), Arc::clone(&faults));
    let options = RuntimeOptions { submission_ops: piece, ..RuntimeOptions::default() };
    let runtime = Runtime::new(backend, options);
    let options = EngineOptions {
        context: 512,
        sequences: 3,
        prefill_step: 64,
        checkpoints: 2,
        drafts: 5,
        compute: Compute::Auto,
        ..EngineOptions::default()
    };
    (common::engine(folder, &runtime, options), faults)
}

struct Member {
    prompt: Vec<u32>,
    cache: SequenceCache,
    speculation: Speculation,
    chooser: SamplerChooser,
    tokens: Vec<u32>,
}

impl Member {
    fn join(engine: &mut Engine, prompt: &[u32], depth: usize, sampler: SamplerOptions) -> Member {
        let mut cache = engine.open().expect("a slot is free");
        let mut logits = Vec::new();
        engine.prefill(&mut cache, prompt, &mut logits, &mut |_| ()).expect("fits");
        let options = SpeculationOptions { depth: Depth::Fixed(depth), ..Default::default() };
        let speculation = Speculation::new(options, engine.last_hidden().expect("drafts were planned"));
        let sampler = Sampler::new(sampler, prompt).expect("in range");
        let mut chooser = SamplerChooser::new(sampler, None, Vec::new());
        let first = chooser.choose(&mut logits, None).expect("free").token;
        Member { prompt: prompt.to_vec(), cache, speculation, chooser, tokens: vec![first] }
    }

    /// Position, open rows and counters.
    fn standing(&self) -> (usize, usize, SpeculationCounters) {
        (self.cache.len(), self.cache.accepted(), self.speculation.counters().clone())
    }
}

/// One sequence that drafts and samples, one that decodes plainly, one that drafts greedily with penalties.
fn members(engine: &mut Engine) -> Vec<Member> {
    let drawn = SamplerOptions { temperature: 1.0, top_p: 0.95, seed: 7, ..SamplerOptions::default() };
    let penalised =
        SamplerOptions { repetition_penalty: 1.3, frequency_penalty: 0.2, ..SamplerOptions::default() };
    vec![
        Member::join(engine, &[1, 250, 33, 400, 12, 5], 5, drawn),
        Member::join(engine, &[1, 9], 0, SamplerOptions::default()),
        Member::join(engine, &[77; 66], 2, penalised),
    ]
}

fn round(engine: &mut Engine, members: &mut [Member]) -> keel_engine::Result<()> {
    let mut batch: Vec<RoundSequence<'_>> = members
        .iter_mut()
        .map(|m| RoundSequence {
            last: m.tokens[m.tokens.len() - 1],
            tokens_max: 100,
            cache: &mut m.cache,
            speculation: Some(&mut m.speculation),
            chooser: &mut m.chooser,
        })
        .collect();
    let rounds = engine.round(&mut batch)?;
    let all = members.iter_mut().zip(rounds);
    all.for_each(|(member, round)| member.tokens.extend(round.expect("nothing constrains it").tokens));
    Ok(())
}

/// Lets a round fail at launch after launch until it succeeds; every third failure is at a random earlier launch. A
/// failure may come while the attempt makes up for the one before. Returns how many failures there were.
fn fail_everywhere(engine: &mut Engine, faults: &Faults, members: &mut [Member]) -> usize {
    let before: Vec<_> = members.iter().map(Member::standing).collect();
    let mut launches_max = 0;
    let mut random = keel_testkit::random::Random::new(11);
    loop {
        faults.set(if launches_max % 3 == 2 { random.below(launches_max) } else { launches_max });
        let outcome = round(engine, members);
        faults.clear();
        let Err(error) = outcome else { return launches_max };
        assert!(error.to_string().contains("injected"), "{error}");
        for (member, before) in members.iter().zip(&before) {
            let (len, accepted, counters) = member.standing();
            assert_eq!(len, before.0);
            // A failed attempt may have committed accepted rows.
            assert!(accepted == before.1 || accepted == 0);
            assert_eq!(counters, before.2);
        }
        launches_max += 1;
    }
}

#[test]
fn a_round_may_fail_at_any_launch_and_be_tried_again() {
    // The folder, kernels in a piece, rounds, and the least number of launches in a round.
    let moe = [(fixture("qwen3_5_moe"), 3, 3, 50)];
    for (folder, piece, rounds, launches_min) in
        [(demo(), 1, 2, 100), (demo(), 512, 8, 6)].into_iter().chain(moe)
    {
        let (mut engine, faults) = engine(&folder, piece);
        let mut undisturbed = members(&mut engine);
        (0..rounds + 3).for_each(|_| round(&mut engine, &mut undisturbed).expect("the round runs"));
        let wanted: Vec<Vec<u32>> = undisturbed.iter().map(|m| m.tokens.clone()).collect();
        undisturbed.into_iter().for_each(|m| engine.release(m.cache));

        let mut disturbed = members(&mut engine);
        let mut failures = 0;
        // The first round has nothing to commit. The next ones have.
        for _ in 0..rounds {
            failures += fail_everywhere(&mut engine, &faults, &mut disturbed);
        }
        (0..3).for_each(|_| round(&mut engine, &mut disturbed).expect("the round runs"));
        let got: Vec<Vec<u32>> = disturbed.iter().map(|m| m.tokens.clone()).collect();
        assert_eq!(got, wanted, "{} in pieces of {piece}", folder.display());
        assert!(failures >= rounds * launches_min, "{failures} failures in {rounds} rounds");
        // There are three slots: two are freed for the sequence to compare with.
        let last = disturbed.pop().expect("there are three");
        disturbed.into_iter().for_each(|m| engine.release(m.cache));
        let straight = decoded(&mut engine, &last.prompt, &last.tokens[..last.tokens.len() - 1]);
        expect_same_state(&mut engine, last.cache, straight);
        assert!(engine.cache().is_idle());
    }
}

#[test]
fn a_round_whose_results_cannot_be_read_is_repeated() {
    let (mut engine, faults) = engine(&demo(), 512);
    let mut undisturbed = members(&mut engine);
    (0..6).for_each(|_| round(&mut engine, &mut undisturbed).expect("the round runs"));
    let wanted: Vec<Vec<u32>> = undisturbed.iter().map(|m| m.tokens.clone()).collect();
    undisturbed.into_iter().for_each(|m| engine.release(m.cache));

    let mut disturbed = members(&mut engine);
    let mut failures = 0;
    for _ in 0..6 {
        let before: Vec<_> = disturbed.iter().map(Member::standing).collect();
        for reads in 0.. {
            faults.reads.store(reads, Ordering::Relaxed);
            let outcome = round(&mut engine, &mut disturbed);
            faults.clear();
            let Err(error) = outcome else { break };
            assert!(error.to_string().contains("injected"), "{error}");
            for (member, (len, _, counters)) in disturbed.iter().zip(&before) {
                assert_eq!((member.standing().0, &member.standing().2), (*len, counters));
            }
            failures += 1;
        }
    }
    let got: Vec<Vec<u32>> = disturbed.iter().map(|m| m.tokens.clone()).collect();
    assert_eq!(got, wanted);
    // Hidden states are read once a round, and logits for two of the sequences.
    assert!(failures >= 6 * 3, "{failures} failures");
    let last = disturbed.pop().expect("there are three");
    disturbed.into_iter().for_each(|m| engine.release(m.cache));
    let straight = decoded(&mut engine, &last.prompt, &last.tokens[..last.tokens.len() - 1]);
    expect_same_state(&mut engine, last.cache, straight);
}

/// A sequence after each of its tokens: the bytes of windows and states, and the logits.
type Course = Vec<(Vec<u8>, Vec<f32>)>;

/// Plain decoding in an engine without a log, which commits each token at once.
fn plain_course(folder: &Path, prompt: &[u32], tokens: &[u32]) -> Course {
    let backend = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() });
    let runtime = Runtime::new(Arc::new(backend), RuntimeOptions::default());
    let options =
        EngineOptions { context: 512, prefill_step: 64, compute: Compute::Auto, ..EngineOptions::default() };
    let mut engine = common::engine(folder, &runtime, options);
    let mut sequence = decoded(&mut engine, prompt, &[]);
    let mut logits = Vec::new();
    let each = tokens.iter().map(|&token| {
        engine.decode(&mut [&mut sequence], &[token]).expect("runs");
        engine.logits(0, &mut logits).expect("there");
        (recurrent_bytes(&engine, &sequence), logits.clone())
    });
    each.collect()
}

/// Asserts that a sequence with the first `tokens` tokens of a course has the state of the course there, and goes on
/// like it.
fn expect_on_course(
    engine: &mut Engine,
    sequence: &SequenceCache,
    course: &Course,
    (tokens, next): (usize, u32),
) {
    let mut twin = engine.cache_mut().fork(sequence).expect("a slot is free");
    engine.commit(&mut twin).expect("runs");
    if let Some(before) = tokens.checked_sub(1) {
        assert!(recurrent_bytes(engine, &twin) == course[before].0, "windows or states differ");
    }
    let mut logits = Vec::new();
    engine.decode(&mut [&mut twin], &[next]).expect("runs");
    engine.logits(0, &mut logits).expect("there");
    assert!(logits == course[tokens].1, "keys or values differ");
    engine.release(twin);
}

#[test]
fn a_plain_step_happens_or_has_not_been() {
    let (prompt, tokens) = (vec![1, 250, 33, 400, 12, 5], [9, 77, 300]);
    let moe = [(fixture("qwen3_5_moe"), 1, 20)];
    for (folder, piece, launches_min) in [(demo(), 1, 100), (demo(), 7, 10)].into_iter().chain(moe) {
        let course = plain_course(&folder, &prompt, &tokens);
        let (mut engine, faults) = engine(&folder, piece);
        let mut sequence = decoded(&mut engine, &prompt, &[]);
        for (i, &token) in tokens.iter().enumerate() {
            let mut launches = 0;
            loop {
                faults.set(launches);
                let outcome = engine.decode(&mut [&mut sequence], &[token]);
                faults.clear();
                let Err(error) = outcome else { break };
                assert!(error.to_string().contains("injected"), "{error}");
                assert_eq!(sequence.len(), prompt.len() + i);
                expect_on_course(&mut engine, &sequence, &course, (i, token));
                launches += 1;
            }
            assert!(launches >= launches_min, "{launches} launches in pieces of {piece}");
        }
        engine.release(sequence);
    }
}

#[test]
fn a_plain_step_that_fails_within_its_launch_has_not_been() {
    let (prompt, tokens) = (vec![1, 250, 33, 400, 12, 5], [9, 77, 300]);
    let course = plain_course(&demo(), &prompt, &tokens);
    let (mut engine, faults) = engine(&demo(), 512);
    faults.breaks_pages.store(true, Ordering::Relaxed);
    let mut sequence = decoded(&mut engine, &prompt, &[]);
    for (i, &token) in tokens.iter().enumerate() {
        for _ in 0..2 {
            faults.set(0);
            let error = engine.decode(&mut [&mut sequence], &[token]).expect_err("the table is broken");
            assert!(error.to_string().contains("paged_attention"), "{error}");
            assert_eq!(sequence.len(), prompt.len() + i);
            // Three layers have committed the row before, if there is one. The others have not.
            let left = engine.cache().interruption(&sequence);
            assert_eq!(left, Some(Interruption::Settling(Settled { windows: 3, states: 3 })));
            expect_on_course(&mut engine, &sequence, &course, (i, token));
        }
        engine.decode(&mut [&mut sequence], &[token]).expect("runs");
    }
    let mut one = vec![Member::join(&mut engine, &prompt, 0, SamplerOptions::default())];
    for _ in 0..3 {
        round(&mut engine, &mut one).expect("the round runs");
        let before = one[0].standing();
        faults.set(0);
        round(&mut engine, &mut one).expect_err("the table is broken");
        assert_eq!(one[0].standing(), before);
    }
    round(&mut engine, &mut one).expect("the round runs");
    let Member { cache, tokens, .. } = one.pop().expect("there is one");
    let straight = decoded(&mut engine, &prompt, &tokens[..tokens.len() - 1]);
    expect_same_state(&mut engine, cache, straight);
}

#[test]
fn an_iterator_that_failed_gives_a_sequence_that_can_go_on() {
    let prompt = [1, 250, 33, 400, 12, 5];
    let (mut engine, faults) = engine(&demo(), 16);
    let options = || GenerateOptions { max_tokens: 40, ..GenerateOptions::default() };
    let sequence = engine.open().expect("a slot is free");
    let plain = TokenIterator::new(&mut engine, sequence, &prompt, options(), &mut |_| ()).expect("fits");
    let truth: Vec<u32> = plain.map(|token| token.expect("runs")).collect();
    let (sequence, mut got) = (engine.open().expect("a slot is free"), Vec::new());
    let how = SpeculationOptions { depth: Depth::Fixed(3), ..Default::default() };
    let mut tokens = common::drafting(&mut engine, sequence, &prompt, options(), how);
    got.extend(tokens.by_ref().take(9).map(|token| token.expect("runs")));
    // Late in the verify pass.
    faults.set(20);
    let failed = loop {
        match tokens.next().expect("it does not end") {
            Ok(token) => got.push(token),
            Err(error) => break error,
        }
    };
    assert!(failed.to_string().contains("injected"));
    let mut sequence = tokens.into_sequence();
    assert_eq!((sequence.len(), &got[..]), (prompt.len() + got.len() - 1, &truth[..got.len()]));
    let (mut logits, mut last) = (Vec::new(), got[got.len() - 1]);
    for &want in &truth[got.len()..] {
        engine.decode(&mut [&mut sequence], &[last]).expect("runs");
        engine.logits(0, &mut logits).expect("there");
        last = common::argmax(&logits);
        assert_eq!(last, want);
    }
}

#[test]
fn a_sequence_that_cannot_be_mended_says_so() {
    let prompt = [1, 250, 33, 400, 12, 5];
    let is_torn = |error: EngineError| matches!(error, EngineError::Cache(CacheError::TornState { .. }));
    let (mut engine, faults) = engine(&demo(), 512);
    let mut one = vec![Member::join(&mut engine, &prompt, 3, SamplerOptions::default())];
    round(&mut engine, &mut one).expect("the round runs");
    faults.is_silent.store(true, Ordering::Relaxed);
    // A pass of the MTP head touches no state of the model.
    faults.set(1);
    round(&mut engine, &mut one).expect_err("injected");
    round(&mut engine, &mut one).expect("it is tried again");
    // The pass of the model comes after three passes of the head.
    faults.set(3);
    assert!(!is_torn(round(&mut engine, &mut one).expect_err("injected")));
    assert!(is_torn(round(&mut engine, &mut one).expect_err("nobody knows its state")));
    let Member { mut cache, .. } = one.pop().expect("there is one");
    assert!(is_torn(engine.commit(&mut cache).expect_err("nobody knows its state")));
    assert!(is_torn(engine.decode(&mut [&mut cache], &[1]).expect_err("nobody knows its state")));
    assert!(engine.cache_mut().checkpoint(&mut cache).is_err());
    // After a reset the sequence works like a new one.
    engine.cache_mut().reset(&mut cache).expect("clears");
    engine.prefill(&mut cache, &prompt, &mut Vec::new(), &mut |_| ()).expect("runs");
    faults.is_silent.store(false, Ordering::Relaxed);
    let straight = decoded(&mut engine, &prompt, &[]);
    expect_same_state(&mut engine, cache, straight);
    assert!(engine.cache().is_idle());
}

/// Runs a prompt in which launch number `launches` fails.
fn fail_prompt(
    engine: &mut Engine,
    faults: &Faults,
    sequence: &mut SequenceCache,
    (prompt, launches): (&[u32], usize),
) {
    faults.set(launches);
    let error = engine.prefill(sequence, prompt, &mut Vec::new(), &mut |_| ()).expect_err("injected");
    faults.clear();
    assert!(error.to_string().contains("injected"), "{error}");
}

#[test]
fn a_step_of_a_prompt_that_fails_halfway_is_taken_back_or_not_built_upon() {
    let prompt: Vec<u32> = (0..130).map(|i| i * 3 % 500).collect();
    let (mut engine, faults) = engine(&demo(), 8);
    let straight = decoded(&mut engine, &prompt, &[]);
    let mut sequence = engine.open().expect("a slot is free");
    // Before any change, and in the middle of the first step. The state before that step is the empty one.
    for launches in [0, 1, 8, 15] {
        fail_prompt(&mut engine, &faults, &mut sequence, (&prompt, launches));
        assert_eq!(sequence.len(), 0);
        engine.cache().expect_whole(&sequence).expect("it is as before");
    }
    // The state between two steps is not kept.
    fail_prompt(&mut engine, &faults, &mut sequence, (&prompt, 30));
    assert_eq!(sequence.len(), 64);
    let again = engine.prefill(&mut sequence, &prompt[64..], &mut Vec::new(), &mut |_| ());
    let message = again.expect_err("its state is torn").to_string();
    assert!(message.contains("recurrent layers had changed; release the sequence"), "{message}");
    engine.cache_mut().rewind(&mut sequence, 64).expect("clears");
    assert_eq!(sequence.len(), 0);
    // At a checkpoint it is kept.
    let mut launches = 31;
    while sequence.checkpoints().next() != Some(128) {
        engine.cache_mut().reset(&mut sequence).expect("clears");
        fail_prompt(&mut engine, &faults, &mut sequence, (&prompt, launches));
        launches += 1;
    }
    for launches in [4, 9] {
        fail_prompt(&mut engine, &faults, &mut sequence, (&prompt[128..], launches));
        assert_eq!(sequence.len(), 128);
        engine.cache().expect_whole(&sequence).expect("it is as before");
    }
    engine.prefill(&mut sequence, &prompt[128..], &mut Vec::new(), &mut |_| ()).expect("runs");
    expect_same_state(&mut engine, sequence, straight);
}
