//! Rounds of speculation of a tensor split whose devices queue: all passes are submitted on each device, and the host
//! waits once. On the CPU the backends only say that they queue. With `KEEL_TEST_CUDA=1` the same runs on two GPUs.

use std::sync::Arc;

use crate::common::queueing::Queueing;
use crate::common::rounds::{DEPTHS, Member, fail_everywhere, members, rounds};
use crate::common::splitting::{end, engine_on, engine_on_gpus, on_gpus};
use crate::common::{decoded, expect_same_state, fixture};
use keel_array::Compute;
use keel_engine::speculation::Speculation;
use keel_engine::{Depth, Engine, EngineOptions, SamplerOptions, SpeculationOptions};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};

fn options() -> EngineOptions {
    EngineOptions { context: 256, sequences: 4, drafts: 8, compute: Compute::F32, ..EngineOptions::default() }
}

/// A model on two devices.
fn waiting(name: &str) -> Engine {
    engine_on(&fixture(name), options(), (1, 2), |_, backend| backend)
}

/// The same on devices that say they queue.
fn queueing(name: &str) -> (Engine, [Arc<Queueing>; 2]) {
    let devices: [Arc<Queueing>; 2] = Default::default();
    let engine = engine_on(&fixture(name), options(), (1, 2), |rank, backend| {
        InterceptedBackend::new(backend, Arc::clone(&devices[rank]))
    });
    (engine, devices)
}

fn release(engine: &mut Engine, members: Vec<Member>) {
    members.into_iter().for_each(|member| engine.release(member.cache));
}

/// The tokens of each sequence with these drafts, after some rounds.
fn tokens(engine: &mut Engine, depths: [usize; 4], count: usize) -> Vec<Vec<u32>> {
    let mut all = members(engine, depths);
    rounds(engine, &mut all, count);
    let tokens = all.iter().map(|member| member.tokens.clone()).collect();
    release(engine, all);
    tokens
}

fn expect_tokens_of_waiting(waiting: &mut Engine, queueing: &mut Engine, name: &str) {
    const ROUNDS: usize = 12;
    assert!(!waiting.runs_ahead() && queueing.runs_ahead());
    let plain = tokens(waiting, [0; 4], 5 * ROUNDS);
    for depths in [DEPTHS, [0, 1, 4, 2], [0; 4]] {
        for (got, want) in tokens(queueing, depths, ROUNDS).iter().zip(&plain) {
            assert!(got.len() > ROUNDS);
            assert_eq!(got[..], want[..got.len()], "{name}");
        }
    }
}

#[test]
fn tokens_are_those_of_passes_that_are_waited_for() {
    for name in ["qwen3_5", "qwen3_5_moe"] {
        let (mut waiting, (mut engine, _)) = (waiting(name), queueing(name));
        expect_tokens_of_waiting(&mut waiting, &mut engine, name);
        [waiting, engine].into_iter().for_each(end);
    }
}

/// Every draft is taken, so that all rows of a round stay.
#[test]
fn drafts_that_stay_are_those_of_passes_that_are_waited_for() {
    const ROUNDS: usize = 12;
    for name in ["qwen3_5", "qwen3_5_moe"] {
        let taken = |engine: &mut Engine| {
            let join = |i: usize| {
                let prompt: Vec<u32> =
                    (0..4 + 30 * i as u32).map(|j| (j * 11 + i as u32 * 17 + 3) % 500).collect();
                let mut member = Member::join(engine, &prompt, DEPTHS[i], SamplerOptions::default());
                let depth = Depth::Fixed(DEPTHS[i]);
                let options = SpeculationOptions { depth, optimistic: true, ..SpeculationOptions::default() };
                let hidden = engine.last_hidden().expect("drafts were planned");
                member.speculation = Speculation::new(options, hidden);
                member
            };
            let mut all: Vec<Member> = (0..4).map(join).collect();
            rounds(engine, &mut all, ROUNDS);
            for (member, depth) in all.iter().zip(DEPTHS) {
                assert_eq!(member.tokens.len(), 1 + (1 + depth) * ROUNDS, "{name}");
            }
            let tokens: Vec<Vec<u32>> = all.iter().map(|member| member.tokens.clone()).collect();
            let last = all.swap_remove(1);
            release(engine, all);
            let straight = decoded(engine, &last.prompt, &last.tokens[..last.tokens.len() - 1]);
            expect_same_state(engine, last.cache, straight);
            tokens
        };
        let (mut waiting, (mut engine, _)) = (waiting(name), queueing(name));
        assert_eq!(taken(&mut engine), taken(&mut waiting), "{name}");
        [waiting, engine].into_iter().for_each(end);
    }
}

#[test]
fn tokens_on_two_gpus_are_those_of_passes_that_are_waited_for() {
    struct Waiting;
    impl Interceptor for Waiting {}
    on_gpus(2, || {
        let waits = |_, backend| InterceptedBackend::new(backend, Arc::new(Waiting)) as _;
        let mut waiting = engine_on_gpus("qwen3_5_moe", options(), waits);
        let mut engine = engine_on_gpus("qwen3_5_moe", options(), |_, backend| backend);
        expect_tokens_of_waiting(&mut waiting, &mut engine, "qwen3_5_moe");
    });
}

#[test]
fn the_host_waits_once_all_passes_are_submitted_on_each_device() {
    let (mut engine, devices) = queueing("qwen3_5");
    let of = |mut members: Vec<Member>, engine: &mut Engine| {
        rounds(engine, &mut members, 1);
        devices.iter().for_each(|device| drop(device.take_events()));
        rounds(engine, &mut members, 1);
        release(engine, members);
        devices.each_ref().map(|device| device.take_events())
    };
    let four = members(&mut engine, DEPTHS);
    assert_eq!(of(four, &mut engine), ["LLLLLWWWWW"; 2], "4 passes of the head and one of the model");
    let penalised = SamplerOptions { repetition_penalty: 1.2, ..SamplerOptions::default() };
    let waiting = vec![Member::join(&mut engine, &[5, 9, 3], 2, penalised)];
    assert_eq!(of(waiting, &mut engine), ["LLL", "LWLWLW"], "drafts that the host draws are waited for");
    end(engine);
}

#[test]
fn a_round_may_fail_on_either_device_and_be_tried_again() {
    const ROUNDS: usize = 6;
    for (name, rank) in [("qwen3_5", 0), ("qwen3_5", 1), ("qwen3_5_moe", 0), ("qwen3_5_moe", 1)] {
        let (mut engine, devices) = queueing(name);
        let want = tokens(&mut engine, DEPTHS, ROUNDS + 4);
        let mut disturbed = members(&mut engine, DEPTHS);
        let failures: usize =
            (0..ROUNDS).map(|_| fail_everywhere(&mut engine, &devices[rank], &mut disturbed)).sum();
        assert!(failures >= 5 * ROUNDS, "{failures} failures in {ROUNDS} rounds");
        rounds(&mut engine, &mut disturbed, 4);
        let got: Vec<Vec<u32>> = disturbed.iter().map(|member| member.tokens.clone()).collect();
        assert_eq!(got, want, "{name}, device {rank}");
        let last = disturbed.pop().expect("there are four");
        release(&mut engine, disturbed);
        let straight = decoded(&mut engine, &last.prompt, &last.tokens[..last.tokens.len() - 1]);
        expect_same_state(&mut engine, last.cache, straight);
        end(engine);
    }
}
