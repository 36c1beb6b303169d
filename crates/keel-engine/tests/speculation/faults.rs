//! A failed round leaves each sequence as it was: position, keys and values, windows, states, drafts and next draws.
//! Failures are injected at every launch of a round, in programs that are cut into many pieces.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::launch_faults::{Faults, disturbed_engine, disturbed_options};
use crate::common::rounds::{Member, round};
use crate::common::{decoded, demo, engine, expect_same_state, fixture};
use keel_array::sampling::Draw;
use keel_array::{ArrayError, RESULT_BYTES_MAX, Runtime, RuntimeOptions};
use keel_cache::{CacheError, SequenceCache};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::{
    DRAFTS_MAX, Depth, Engine, EngineError, EngineOptions, GenerateOptions, SamplerOptions,
    SpeculationOptions, TokenIterator,
};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor, injected};

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
        let (mut engine, faults) = disturbed_engine(&folder, piece);
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
    let (mut engine, faults) = disturbed_engine(&demo(), 512);
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
    // Logits are read for two of the sequences.
    assert!(failures >= 6 * 3, "{failures} failures");
    let last = disturbed.pop().expect("there are three");
    disturbed.into_iter().for_each(|m| engine.release(m.cache));
    let straight = decoded(&mut engine, &last.prompt, &last.tokens[..last.tokens.len() - 1]);
    expect_same_state(&mut engine, last.cache, straight);
}

/// Fails one read of this size.
struct FailingRead(usize, AtomicBool);

impl Interceptor for FailingRead {
    fn before_read(&self, bytes: usize, _is_settled: bool) -> Result<(), ArrayError> {
        match bytes == self.0 && self.1.swap(false, Ordering::Relaxed) {
            true => Err(injected("read")),
            false => Ok(()),
        }
    }
}

/// The tokens of many rows are read after the verify pass. The pass has committed the rows of the round before, once.
#[test]
fn a_round_of_many_rows_whose_tokens_cannot_be_read_is_repeated() {
    const ROWS: usize = RESULT_BYTES_MAX / size_of::<u32>() + 11;
    let sequences = ROWS / (DRAFTS_MAX + 1);
    assert_eq!(ROWS, sequences * (DRAFTS_MAX + 1));
    let fails = Arc::new(FailingRead(ROWS * size_of::<u32>(), AtomicBool::new(false)));
    let inner = CpuBackend::new(CpuOptions { threads: Some(2), poison_freed: true, ..CpuOptions::default() });
    let backend = InterceptedBackend::new(Arc::new(inner), Arc::clone(&fails));
    let options = EngineOptions { sequences, drafts: DRAFTS_MAX, ..disturbed_options() };
    let mut engine = engine(&fixture("qwen3_5"), &Runtime::new(backend, RuntimeOptions::default()), options);
    let join_all = |engine: &mut Engine| -> Vec<Member> {
        let prompt = |i: u32| [i % 250, 7, i % 11];
        let join = |i| Member::join(engine, &prompt(i), DRAFTS_MAX, SamplerOptions::default());
        (0..sequences as u32).map(join).collect()
    };
    let mut undisturbed = join_all(&mut engine);
    (0..3).for_each(|_| round(&mut engine, &mut undisturbed).expect("the round runs"));
    let wanted: Vec<Vec<u32>> = undisturbed.iter().map(|m| m.tokens.clone()).collect();
    undisturbed.into_iter().for_each(|m| engine.release(m.cache));

    let mut disturbed = join_all(&mut engine);
    for _ in 0..3 {
        fails.1.store(true, Ordering::Relaxed);
        let error = round(&mut engine, &mut disturbed).expect_err("its tokens cannot be read");
        assert!(error.to_string().contains("injected"), "{error}");
        assert!(disturbed.iter().all(|member| member.standing().1 == 0), "no row is committed twice");
        round(&mut engine, &mut disturbed).expect("the round runs");
    }
    let got: Vec<Vec<u32>> = disturbed.iter().map(|m| m.tokens.clone()).collect();
    assert!(got == wanted, "the tokens are others");
    let last = disturbed.pop().expect("there are many");
    disturbed.into_iter().for_each(|m| engine.release(m.cache));
    let straight = decoded(&mut engine, &last.prompt, &last.tokens[..last.tokens.len() - 1]);
    expect_same_state(&mut engine, last.cache, straight);
}

/// Without a log the states hold a token whose successor is lost: they must not run it again.
#[test]
fn a_step_of_many_rows_whose_tokens_cannot_be_read_tears_states_without_a_log() {
    const SEQUENCES: usize = RESULT_BYTES_MAX / size_of::<u32>() + 1;
    let fails = Arc::new(FailingRead(SEQUENCES * size_of::<u32>(), AtomicBool::new(false)));
    let inner = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() });
    let backend = InterceptedBackend::new(Arc::new(inner), Arc::clone(&fails));
    let options = EngineOptions { context: 64, sequences: SEQUENCES, ..EngineOptions::default() };
    let runtime = Runtime::new(backend, RuntimeOptions::default());
    let mut engine = engine(&fixture("qwen3_5"), &runtime, options);
    let mut all: Vec<_> = (0..SEQUENCES).map(|_| engine.open().expect("a slot is free")).collect();
    let (tokens, draws) = (vec![7; SEQUENCES], vec![Some(Draw::GREATEST); SEQUENCES]);
    let step = |engine: &mut Engine, all: &mut Vec<SequenceCache>| {
        engine.decode_and_draw(&mut all.iter_mut().collect::<Vec<_>>(), &tokens, &draws)
    };
    step(&mut engine, &mut all).expect("the step runs");
    fails.1.store(true, Ordering::Relaxed);
    let error = step(&mut engine, &mut all).expect_err("its tokens cannot be read");
    assert!(error.to_string().contains("injected"), "{error}");
    let torn = step(&mut engine, &mut all).expect_err("the states are ahead");
    assert!(matches!(torn, EngineError::Cache(CacheError::AheadState { .. })), "{torn}");
}

#[test]
fn a_plain_round_that_fails_within_its_launch_has_not_been() {
    let prompt = [1, 250, 33, 400, 12, 5];
    let (mut engine, faults) = disturbed_engine(&demo(), 512);
    faults.breaks_pages.store(true, Ordering::Relaxed);
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
    let (mut engine, faults) = disturbed_engine(&demo(), 16);
    let options = || GenerateOptions { max_tokens: 40, ..GenerateOptions::default() };
    let sequence = engine.open().expect("a slot is free");
    let plain = TokenIterator::new(&mut engine, sequence, &prompt, options(), &mut |_| ()).expect("fits");
    let truth: Vec<u32> = plain.map(|token| token.expect("runs")).collect();
    let (sequence, mut got) = (engine.open().expect("a slot is free"), Vec::new());
    let how = SpeculationOptions { depth: Depth::Fixed(3), ..Default::default() };
    let mut tokens = crate::common::drafting(&mut engine, sequence, &prompt, options(), how);
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
        last = crate::common::argmax(&logits);
        assert_eq!(last, want);
    }
}

#[test]
fn a_sequence_that_cannot_be_mended_says_so() {
    let prompt = [1, 250, 33, 400, 12, 5];
    let is_torn = |error: EngineError| matches!(error, EngineError::Cache(CacheError::TornState { .. }));
    let (mut engine, faults) = disturbed_engine(&demo(), 512);
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
