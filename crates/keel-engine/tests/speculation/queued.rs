//! Rounds whose passes are submitted one after the other, with one wait at the end. On the CPU the backend only says
//! that it queues. With `KEEL_TEST_CUDA=1` the same rounds run on a GPU, which does.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::queueing::{Poison, queueing, runtimes, waiting_and_queueing};
use crate::common::rounds::{DEPTHS, Member, fail_everywhere, hidden_bytes, members, round, rounds};
use crate::common::{decoded, demo, engine, expect_same_state, fixture};
use keel_array::{Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::{Engine, EngineOptions, SamplerOptions};
use keel_testkit::intercepted::InterceptedBackend;

fn drafting(folder: &Path, runtime: &Runtime) -> Engine {
    let options = EngineOptions { context: 256, sequences: 4, drafts: 8, ..EngineOptions::default() };
    engine(folder, runtime, options)
}

fn poisoned() -> Runtime {
    let cpu = CpuBackend::new(CpuOptions { threads: Some(2), poison_freed: true, ..CpuOptions::default() });
    Runtime::new(
        InterceptedBackend::new(Arc::new(cpu), Arc::new(Poison { queues: true })),
        RuntimeOptions::default(),
    )
}

#[test]
fn tokens_are_those_of_plain_decoding() {
    const ROUNDS: usize = 12;
    for folder in [demo(), fixture("qwen3_5_moe")] {
        for runtime in runtimes().into_iter().chain([poisoned()]) {
            let mut engine = drafting(&folder, &runtime);
            let mut plain = members(&mut engine, [0; 4]);
            rounds(&mut engine, &mut plain, 5 * ROUNDS);
            let want: Vec<Vec<u32>> = plain.iter().map(|member| member.tokens.clone()).collect();
            plain.into_iter().for_each(|member| engine.release(member.cache));

            let mut all = members(&mut engine, DEPTHS);
            rounds(&mut engine, &mut all, ROUNDS);
            let mut accepted = 0;
            for ((member, want), depth) in all.iter().zip(&want).zip(DEPTHS) {
                assert_eq!(member.tokens, want[..member.tokens.len()], "{}", folder.display());
                let counters = member.speculation.counters();
                assert_eq!(counters.drafted_total(), (depth * ROUNDS) as u64);
                accepted += counters.accepted_total();
            }
            assert!(folder != demo() || accepted > 12, "{accepted} drafts of the built-in head accepted");
            let deepest = all.swap_remove(1);
            all.into_iter().for_each(|member| engine.release(member.cache));
            let straight = decoded(&mut engine, &deepest.prompt, &deepest.tokens[..deepest.tokens.len() - 1]);
            expect_same_state(&mut engine, deepest.cache, straight);
            assert!(engine.cache().is_idle());
        }
    }
}

/// Each draft is the one that the sequence makes alone, where the host waits for each pass: hidden states of the head
/// and drafts stay with their sequence while the others stop drafting.
#[test]
fn drafts_are_those_of_a_sequence_alone_whose_passes_are_waited_for() {
    const ROUNDS: usize = 20;
    let greedy = |engine: &mut Engine, i: usize| {
        let prompt: Vec<u32> = (0..4 + 9 * i as u32).map(|j| (j * 11 + i as u32 * 17 + 3) % 500).collect();
        Member::join(engine, &prompt, DEPTHS[i], SamplerOptions::default())
    };
    let standing = |member: &Member| {
        let counters = member.speculation.counters();
        (member.tokens.clone(), counters.drafted, counters.accepted)
    };
    for (waiting, queueing) in waiting_and_queueing() {
        let mut engine = drafting(&demo(), &waiting);
        let alone = (0..4).map(|i| {
            let mut one = vec![greedy(&mut engine, i)];
            rounds(&mut engine, &mut one, ROUNDS);
            let standing = standing(&one[0]);
            one.into_iter().for_each(|member| engine.release(member.cache));
            standing
        });
        let want: Vec<_> = alone.collect();
        assert!(want.iter().map(|(.., accepted)| accepted[1..].iter().sum::<u64>()).sum::<u64>() > 8);
        let mut engine = drafting(&demo(), &queueing);
        let mut all: Vec<Member> = (0..4).map(|i| greedy(&mut engine, i)).collect();
        rounds(&mut engine, &mut all, ROUNDS);
        assert_eq!(all.iter().map(standing).collect::<Vec<_>>(), want);
        all.into_iter().for_each(|member| engine.release(member.cache));
    }
}

#[test]
fn the_host_waits_once_all_passes_are_submitted() {
    let (runtime, queueing) = queueing(512);
    let mut engine = drafting(&demo(), &runtime);
    let of = |mut members: Vec<Member>, engine: &mut Engine| {
        rounds(engine, &mut members, 1);
        queueing.take_events();
        rounds(engine, &mut members, 1);
        members.into_iter().for_each(|member| engine.release(member.cache));
        queueing.take_events()
    };
    let four = members(&mut engine, DEPTHS);
    assert_eq!(of(four, &mut engine), "LLLLLWWWWW", "4 passes of the head and one of the model");
    let deep = vec![Member::join(&mut engine, &[5, 9, 3], 8, SamplerOptions::default())];
    assert_eq!(of(deep, &mut engine), "LLLLLLLLWLWWWWWWWW", "8 may be under way");
    // Drafts that the host draws are waited for.
    let penalised = SamplerOptions { repetition_penalty: 1.2, ..SamplerOptions::default() };
    let waiting = vec![Member::join(&mut engine, &[5, 9, 3], 2, penalised)];
    assert_eq!(of(waiting, &mut engine), "LWLWLW");
}

#[test]
fn a_round_may_fail_at_any_launch_and_be_tried_again() {
    // The folder, kernels in a piece, rounds, and the least number of launches in a round.
    let moe = (fixture("qwen3_5_moe"), 3, 2, 50);
    for (folder, piece, count, launches_min) in [(demo(), 1, 2, 100), (demo(), 512, 6, 5), moe] {
        let (runtime, queueing) = queueing(piece);
        let mut engine = drafting(&folder, &runtime);
        let mut undisturbed = members(&mut engine, DEPTHS);
        rounds(&mut engine, &mut undisturbed, count + 4);
        let want: Vec<Vec<u32>> = undisturbed.iter().map(|member| member.tokens.clone()).collect();
        undisturbed.into_iter().for_each(|member| engine.release(member.cache));

        let mut disturbed = members(&mut engine, DEPTHS);
        let failures: usize =
            (0..count).map(|_| fail_everywhere(&mut engine, &queueing, &mut disturbed)).sum();
        assert!(failures >= count * launches_min, "{failures} failures in {count} rounds");
        // Hidden states that cannot be read end the round after its passes.
        queueing.large_bytes.store(hidden_bytes(&engine), Ordering::Relaxed);
        queueing.breaks_large_reads.store(true, Ordering::Relaxed);
        round(&mut engine, &mut disturbed).expect_err("injected");
        queueing.breaks_large_reads.store(false, Ordering::Relaxed);
        rounds(&mut engine, &mut disturbed, 4);
        let got: Vec<Vec<u32>> = disturbed.iter().map(|member| member.tokens.clone()).collect();
        assert_eq!(got, want, "{} in pieces of {piece}", folder.display());
        let last = disturbed.pop().expect("there are four");
        disturbed.into_iter().for_each(|member| engine.release(member.cache));
        let straight = decoded(&mut engine, &last.prompt, &last.tokens[..last.tokens.len() - 1]);
        expect_same_state(&mut engine, last.cache, straight);
        assert!(engine.cache().is_idle());
    }
}
