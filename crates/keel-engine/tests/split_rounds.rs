//! Rounds of speculation of a tensor split whose devices queue: all passes are submitted on each device, and the host
//! waits once. On the CPU the backends only say that they queue. With `KEEL_TEST_CUDA=1` the same runs on two GPUs.

mod common;

use std::path::PathBuf;
use std::sync::Arc;

use common::queueing::Queueing;
use common::rounds::{DEPTHS, Member, fail_everywhere, members, rounds};
use common::splitting::{end, engine_on, engine_on_gpus, on_two_gpus};
use common::{decoded, demo, expect_same_state, fixture};
use keel_array::Compute;
use keel_engine::{Engine, EngineOptions, SamplerOptions};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};

fn options() -> EngineOptions {
    EngineOptions { context: 256, sequences: 4, drafts: 8, compute: Compute::F32, ..EngineOptions::default() }
}

/// A model, and on how many devices it lies. Only drafts of the built-in one are right.
#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    devices: usize,
}

const BUILT_IN: Case = Case { name: "built in", devices: 3 };
const DENSE: Case = Case { name: "qwen3_5", devices: 2 };
const MIXTURE: Case = Case { name: "qwen3_5_moe", devices: 2 };

impl Case {
    fn folder(self) -> PathBuf {
        if self.name == BUILT_IN.name { demo() } else { fixture(self.name) }
    }

    fn waiting(self) -> Engine {
        engine_on(&self.folder(), options(), (1, self.devices), |_, backend| backend)
    }

    /// On devices that say they queue.
    fn queueing(self) -> (Engine, Vec<Arc<Queueing>>) {
        let devices: Vec<Arc<Queueing>> = (0..self.devices).map(|_| Arc::default()).collect();
        let engine = engine_on(&self.folder(), options(), (1, self.devices), |rank, backend| {
            InterceptedBackend::new(backend, Arc::clone(&devices[rank]))
        });
        (engine, devices)
    }
}

fn release(engine: &mut Engine, members: Vec<Member>) {
    members.into_iter().for_each(|member| engine.release(member.cache));
}

/// The tokens of each sequence with these drafts, after some rounds, and how many drafts were right.
fn tokens(engine: &mut Engine, depths: [usize; 4], count: usize) -> (Vec<Vec<u32>>, u64) {
    let mut all = members(engine, depths);
    rounds(engine, &mut all, count);
    let tokens = all.iter().map(|member| member.tokens.clone()).collect();
    let accepted = all.iter().map(|member| member.speculation.counters().accepted_total()).sum();
    release(engine, all);
    (tokens, accepted)
}

/// Returns how many drafts were right.
fn expect_tokens_of_waiting(waiting: &mut Engine, queueing: &mut Engine, name: &str) -> u64 {
    const ROUNDS: usize = 12;
    assert!(!waiting.runs_ahead() && queueing.runs_ahead());
    let (plain, _) = tokens(waiting, [0; 4], 5 * ROUNDS);
    let of = |depths| {
        let (all, accepted) = tokens(queueing, depths, ROUNDS);
        for (got, want) in all.iter().zip(&plain) {
            assert!(got.len() > ROUNDS);
            assert_eq!(got[..], want[..got.len()], "{name}");
        }
        accepted
    };
    [DEPTHS, [0, 1, 4, 2], [0; 4]].map(of).iter().sum()
}

#[test]
fn tokens_are_those_of_passes_that_are_waited_for() {
    for case in [BUILT_IN, DENSE, MIXTURE] {
        let (mut waiting, (mut engine, _)) = (case.waiting(), case.queueing());
        let accepted = expect_tokens_of_waiting(&mut waiting, &mut engine, case.name);
        assert!(case.name != BUILT_IN.name || accepted > 20, "{accepted} drafts were right");
        [waiting, engine].into_iter().for_each(end);
    }
}

#[test]
fn tokens_on_two_gpus_are_those_of_passes_that_are_waited_for() {
    struct Waiting;
    impl Interceptor for Waiting {}
    on_two_gpus(|| {
        let waits = |_, backend| InterceptedBackend::new(backend, Arc::new(Waiting)) as _;
        let mut waiting = engine_on_gpus("qwen3_5_moe", options(), waits);
        let mut engine = engine_on_gpus("qwen3_5_moe", options(), |_, backend| backend);
        expect_tokens_of_waiting(&mut waiting, &mut engine, "qwen3_5_moe");
    });
}

#[test]
fn the_host_waits_once_all_passes_are_submitted_on_each_device() {
    let (mut engine, devices) = DENSE.queueing();
    let of = |mut members: Vec<Member>, engine: &mut Engine| {
        rounds(engine, &mut members, 1);
        devices.iter().for_each(|device| drop(device.take_events()));
        rounds(engine, &mut members, 1);
        release(engine, members);
        devices.iter().map(|device| device.take_events()).collect::<Vec<_>>()
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
    for (case, rank) in [(BUILT_IN, 0), (BUILT_IN, 2), (DENSE, 1), (MIXTURE, 0), (MIXTURE, 1)] {
        let (mut engine, devices) = case.queueing();
        let (want, _) = tokens(&mut engine, DEPTHS, ROUNDS + 4);
        let mut disturbed = members(&mut engine, DEPTHS);
        let failures: usize =
            (0..ROUNDS).map(|_| fail_everywhere(&mut engine, &devices[rank], &mut disturbed)).sum();
        assert!(failures >= 5 * ROUNDS, "{failures} failures in {ROUNDS} rounds");
        rounds(&mut engine, &mut disturbed, 4);
        let got: Vec<Vec<u32>> = disturbed.iter().map(|member| member.tokens.clone()).collect();
        assert_eq!(got, want, "{case:?}, device {rank}");
        let last = disturbed.pop().expect("there are four");
        release(&mut engine, disturbed);
        let straight = decoded(&mut engine, &last.prompt, &last.tokens[..last.tokens.len() - 1]);
        expect_same_state(&mut engine, last.cache, straight);
        end(engine);
    }
}
