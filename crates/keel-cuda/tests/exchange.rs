//! Exchanges between GPUs: what a plan says of them, which needs no GPU, and on a machine with two GPUs, with
//! `KEEL_TEST_CUDA=1`, the exchanges themselves.

use keel_array::{Array, Category, DType, Group, Peers, Runtime, RuntimeOptions};
use keel_cuda::{CudaBackend, CudaGroup, CudaOptions, Survey};
use keel_testkit::checks;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Options of the devices of a group.
fn options(count: usize, shares: usize, deterministic: bool) -> Vec<CudaOptions> {
    let of = |(ordinal, group)| CudaOptions {
        ordinal,
        deterministic,
        poison_freed: true,
        group: Some(group),
        ..CudaOptions::default()
    };
    CudaGroup::of(count, shares).into_iter().enumerate().map(of).collect()
}

fn planner(options: &CudaOptions) -> Runtime {
    Runtime::new(Arc::new(CudaBackend::planning(options)), RuntimeOptions::default())
}

/// The kernels of a sum over all devices followed by a gathering, and the bytes of the arena.
fn planned(options: &CudaOptions, peers: Peers, len: usize) -> Result<(Vec<String>, usize), String> {
    let runtime = planner(options);
    let array = |shape: &[usize]| {
        Array::persistent(&runtime, Category::Activations, shape, DType::F32).expect("memory")
    };
    let (x, place) = (array(&[len]), array(&[peers.count, len]));
    runtime.trace(|| {
        let y = x.all_reduce(peers).and_then(|sum| sum.all_gather(peers)).expect("f32");
        let prepared = runtime.prepare(&[(&y, &place)]).map_err(|error| error.to_string())?;
        let program = prepared.program();
        let names = program.kernels().iter().map(|kernel| kernel.op.name().to_owned()).collect();
        Ok((names, program.arena_bytes()))
    })
}

#[test]
fn exchanges_and_their_scratch_are_planned() {
    const LEN: usize = 4096;
    let sum_bytes = 4 * LEN;
    for (count, deterministic, scratch) in
        [(2, false, 0), (2, true, 0), (3, false, 0), (3, true, 3 * sum_bytes), (4, true, 4 * sum_bytes)]
    {
        let peers = Peers { first: 0, count };
        for options in options(count, count, deterministic) {
            let (names, arena_bytes) = planned(&options, peers, LEN).expect("a program");
            assert_eq!(names, ["all_reduce", "all_gather"]);
            assert_eq!(arena_bytes, sum_bytes + scratch, "{count} devices, deterministic: {deterministic}");
        }
    }
}

#[test]
fn exchanges_that_cannot_happen_are_refused_by_the_plan() {
    let alone = planned(&CudaOptions::default(), Peers { first: 0, count: 2 }, 8).expect_err("alone");
    assert!(alone.contains("this device is alone; make a group of devices first"), "{alone}");
    let four = options(4, 2, false);
    for (peers, reason) in [
        (Peers { first: 0, count: 3 }, "GPUs do that with their stage, 0..2, or with all"),
        (Peers { first: 2, count: 2 }, "device 0 is not one of the devices 2..4"),
        (Peers { first: 0, count: 5 }, "not all in the group, which has 4"),
    ] {
        let refusal = planned(&four[0], peers, 8).expect_err("refused");
        assert!(refusal.contains(reason), "{refusal}");
    }
    let runtime = planner(&four[1]);
    let refusal = Array::receive(&runtime, [8], 1).expect("a shape").eval().expect_err("refused").to_string();
    assert!(refusal.contains("device 1 cannot exchange with itself"), "{refusal}");
}

/// Backends of all GPUs if there are several.
fn gpus(deterministic: bool) -> Option<Vec<Runtime>> {
    if !keel_testkit::has_gpu!() {
        return None;
    }
    let found = Survey::take().gpus.len();
    if found < 2 {
        keel_testkit::skipped!("needs two GPUs");
        return None;
    }
    let count = if found < 4 { 2 } else { 4 };
    let open = |options: &CudaOptions| CudaBackend::new(options).expect("a GPU, and NCCL");
    // Two stages, or all devices in one.
    let shares = if count == 4 { 2 } else { count };
    let backends = options(count, shares, deterministic);
    let runtime = |backend| Runtime::new(Arc::new(backend), RuntimeOptions::default());
    Some(backends.iter().map(open).map(runtime).collect())
}

#[test]
fn gpus_agree_with_the_oracle_and_keep_nothing() {
    for deterministic in [false, true] {
        let Some(runtimes) = gpus(deterministic) else { return };
        let own: Vec<u64> = runtimes.iter().map(|runtime| runtime.ledger().active().total()).collect();
        checks::exchange(&runtimes);
        for (runtime, own) in runtimes.iter().zip(own) {
            runtime.clear_cache();
            assert_eq!(runtime.ledger().active().total(), own);
        }
    }
}

fn group(runtime: &Runtime) -> &dyn Group {
    runtime.backend().group().expect("it is in a group")
}

/// Prepared sums, one of the other, which are a graph from their second run on.
fn repeated(runtime: &Runtime, sums: usize, times: usize) -> Result<Vec<f32>, String> {
    let peers = Peers { first: 0, count: group(runtime).size() };
    let array = || Array::persistent(runtime, Category::Activations, [1000], DType::F32).expect("memory");
    let (x, place) = (array(), array());
    x.write(&[group(runtime).rank() as f32 + 1.0; 1000]).expect("memory");
    let prepared = runtime.trace(|| {
        let y = (0..sums).fold(x.clone(), |y, _| y.all_reduce(peers).expect("f32"));
        runtime.prepare(&[(&y, &place)]).expect("a program")
    });
    for _ in 0..times {
        prepared.run().map_err(|failed| keel_array::ArrayError::from(failed).to_string())?;
    }
    place.to_vec::<f32>().map_err(|error| error.to_string())
}

#[test]
fn a_gpu_that_waits_for_one_that_failed_gets_an_error_and_all_meet_again() {
    let Some(runtimes) = gpus(false) else { return };
    let want = (1..=runtimes.len()).sum::<usize>() as f32;
    let all_sum = |times| {
        std::thread::scope(|scope| {
            for runtime in &runtimes {
                scope.spawn(move || {
                    let sum = repeated(runtime, 1, times).expect("all come");
                    assert!(sum.iter().all(|&y| y == want), "{:?}", &sum[..4]);
                });
            }
        });
    };
    // With 300 sums the host waits while it launches them one by one.
    for sums in [1, 300, 1] {
        all_sum(3);
        let start = Instant::now();
        std::thread::scope(|scope| {
            for runtime in &runtimes[1..] {
                scope.spawn(move || {
                    let error = repeated(runtime, sums, 3).expect_err("device 0 does not come");
                    assert!(error.contains("device 0 of the group has failed"), "{error}");
                });
            }
            std::thread::sleep(Duration::from_millis(300));
            group(&runtimes[0]).abandon();
        });
        assert!(start.elapsed() < Duration::from_secs(10), "{sums} sums: {:?}", start.elapsed());
        runtimes.iter().for_each(|runtime| group(runtime).rejoin());
    }
    all_sum(3);
}
