//! Exchanges between GPUs: their plans, which need no GPU, and on a machine with two GPUs, with `KEEL_TEST_CUDA=1`, the
//! exchanges themselves.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Prepared, Rank, on_each, options};
use keel_array::{
    Array, ArrayError, Category, Compute, DType, Peers, RowBlock, RowData, Runtime, RuntimeOptions, Weight,
    WeightFormat, WeightSpec,
};
use keel_cuda::{CudaBackend, CudaOptions, Determinism, Survey};
use keel_testkit::checks;

fn planner(options: &CudaOptions) -> Runtime {
    Runtime::new(Arc::new(CudaBackend::planning(options)), RuntimeOptions::default())
}

/// A sum over several devices.
type Sum = fn(&Array, Peers) -> Result<Array, ArrayError>;

/// A sum over all devices, and one in parts.
const SUMS: [Sum; 2] = [Array::all_reduce, Array::reduce_scatter];

/// The kernels of a sum over all devices followed by a gathering, and the bytes of the arena.
fn planned(
    options: &CudaOptions,
    sum: Sum,
    peers: Peers,
    len: usize,
) -> Result<(Vec<String>, usize), String> {
    let runtime = planner(options);
    let array = |shape: &[usize]| {
        Array::persistent(&runtime, Category::Activations, shape, DType::F32).expect("memory")
    };
    let x = array(&[len]);
    runtime.trace(|| {
        let y = sum(&x, peers).and_then(|sum| sum.all_gather(peers)).expect("f32, and the length divides");
        let place = array(y.shape());
        let prepared = runtime.prepare(&[(&y, &place)]).map_err(|error| error.to_string())?;
        let program = prepared.program();
        let names = program.kernels().iter().map(|kernel| kernel.op.name().to_owned()).collect();
        Ok((names, program.arena_bytes()))
    })
}

#[test]
fn exchanges_and_their_scratch_are_planned() {
    const LEN: usize = 3 * 4096;
    let sum_bytes = 4 * LEN;
    for (count, determinism, scratch) in [
        (2, Determinism::Off, 0),
        (2, Determinism::Steps, 0),
        (3, Determinism::Off, 0),
        (3, Determinism::Steps, 3 * sum_bytes),
        (4, Determinism::Steps, 4 * sum_bytes),
    ] {
        let peers = Peers { first: 0, count };
        for options in options(count, count, determinism) {
            for (sum, name, bytes) in
                [(SUMS[0], "all_reduce", sum_bytes), (SUMS[1], "reduce_scatter", sum_bytes / count)]
            {
                let (names, arena_bytes) = planned(&options, sum, peers, LEN).expect("a program");
                assert_eq!(names, [name, "all_gather"]);
                assert_eq!(arena_bytes, bytes + scratch, "{count} devices, {determinism:?}");
            }
        }
    }
}

#[test]
fn exchanges_that_cannot_happen_are_refused_by_the_plan() {
    // Each number of peers below divides it.
    const LEN: usize = 60;
    let refusals = |options: &CudaOptions, peers| {
        SUMS.map(|sum| planned(options, sum, peers, LEN).expect_err("refused"))
    };
    for alone in refusals(&CudaOptions::default(), Peers { first: 0, count: 2 }) {
        assert!(alone.contains("this device is alone; make a group of devices first"), "{alone}");
    }
    let four = options(4, 2, Determinism::Off);
    for (peers, reason) in [
        (Peers { first: 0, count: 3 }, "GPUs do that with their stage, 0..2, or with all"),
        (Peers { first: 2, count: 2 }, "device 0 is not one of the devices 2..4"),
        (Peers { first: 0, count: 5 }, "not all in the group, which has 4"),
    ] {
        for refusal in refusals(&four[0], peers) {
            assert!(refusal.contains(reason), "{refusal}");
        }
    }
    let runtime = planner(&four[1]);
    let refusal = Array::receive(&runtime, [8], 1).expect("a shape").eval().expect_err("refused").to_string();
    assert!(refusal.contains("device 1 cannot exchange with itself"), "{refusal}");
}

/// The product before a sum adds the residual, and the one after it computes the norm. So a sum in a decode step is a
/// kernel with nothing next to it.
#[test]
fn residual_and_norm_around_a_sum_are_parts_of_products() {
    const K: usize = 256;
    for rows in [1, 12] {
        let options = &options(2, 2, Determinism::Off)[1];
        let runtime = planner(options);
        let weight = |rows, cols| {
            let format = WeightFormat::Affine { bits: 4, group_size: 64, scale_dtype: DType::BF16 };
            let spec = WeightSpec { experts: 1, rows, cols, format, compute: Compute::Auto };
            Weight::allocate(&runtime, spec).expect("a weight")
        };
        let array = |shape: &[usize]| {
            Array::persistent(&runtime, Category::Activations, shape, DType::F32).expect("memory")
        };
        let (down, next) = (weight(K, 512), weight(512, K));
        let (inner, x, scale, place) =
            (array(&[rows, 512]), array(&[rows, K]), array(&[K]), array(&[rows, 512]));
        let names: Vec<String> = runtime.trace(|| {
            let share = inner.linear_add(&down, &x).expect("shapes fit");
            let sum = share.all_reduce(Peers { first: 0, count: 2 }).expect("f32");
            let y = sum.rms_norm(&scale, 1e-6).and_then(|x| x.linear(&next)).expect("shapes fit");
            let prepared = runtime.prepare(&[(&y, &place)]).expect("a program");
            prepared.program().kernels().iter().map(|kernel| kernel.op.name().to_owned()).collect()
        });
        assert_eq!(names, ["linear", "all_reduce", "linear"], "{rows} rows");
    }
}

/// All GPUs, in two stages or as one. One GPU may stand for several.
fn ranks(determinism: Determinism) -> Option<Vec<Rank>> {
    let found = common::gpus()?;
    let count = if found == 1 || found >= 4 { 4 } else { 2 };
    Some(common::open(found, count, 2, determinism))
}

#[test]
fn gpus_agree_with_the_oracle_and_keep_nothing() {
    for determinism in [Determinism::Off, Determinism::Steps] {
        let Some(ranks) = separate_gpus(determinism) else { return };
        let runtimes: Vec<Runtime> = ranks.into_iter().map(|rank| rank.runtime).collect();
        let own: Vec<u64> = runtimes.iter().map(|runtime| runtime.ledger().active().total()).collect();
        checks::exchange(&runtimes);
        for (runtime, own) in runtimes.iter().zip(own) {
            runtime.clear_cache();
            assert_eq!(runtime.ledger().active().total(), own);
        }
    }
}

/// As [`ranks`], for tests that do not end on a GPU that ranks share: the ranks share a context of the driver, which
/// loads no kernels and captures no graph while a kernel of NCCL waits for a rank that waits for the driver.
fn separate_gpus(determinism: Determinism) -> Option<Vec<Rank>> {
    let ranks = ranks(determinism)?;
    if Survey::take().gpus.len() == 1 {
        keel_testkit::skipped!("does not end on a GPU that ranks share");
        return None;
    }
    Some(ranks)
}

/// Arrays that are too long for one shot, over a stage and over all ranks, whole and in parts, and messages between
/// stages. All values are whole numbers, so any order of a sum has the same bits.
#[test]
fn nccl_adds_gathers_and_sends_long_arrays_within_graphs() {
    for determinism in [Determinism::Off, Determinism::Steps] {
        let Some(ranks) = separate_gpus(determinism) else { return };
        let (count, shares) = (ranks.len(), 2);
        let value = |rank: usize, i: usize| (1000 * rank + i % 977) as f32;
        for len in [65_537, 300_001] {
            let prepare = |of: &Rank| {
                let (rank, all) = (of.group().rank(), of.peers());
                let stage = Peers { first: rank / shares * shares, count: shares };
                let build = |x: &[Array]| {
                    let (x, wide) = (&x[0], &x[1]);
                    let sums = [all, stage].map(|peers| x.all_reduce(peers).expect("f32"));
                    let gathered = x.all_gather(all).expect("f32");
                    let parts = [all, stage].map(|peers| wide.reduce_scatter(peers).expect("it divides"));
                    let message = if rank + shares < count {
                        Some(x.send(rank + shares).expect("f32"))
                    } else {
                        (rank >= shares)
                            .then(|| Array::receive(&of.runtime, [len], rank - shares).expect("a shape"))
                    };
                    sums.into_iter().chain([gathered]).chain(parts).chain(message).collect()
                };
                let from = [len, count * len].map(|len| of.array(len, DType::F32)).to_vec();
                let prepared = Prepared::new(of, from, build);
                prepared.fill(|i| value(rank, i));
                prepared
            };
            let prepared: Vec<Prepared> = ranks.iter().map(prepare).collect();
            on_each(&ranks, &prepared, |_, prepared| prepared.run(3).expect("all come"));
            for (rank, results) in prepared.iter().map(Prepared::results).enumerate() {
                let sum = |ranks: std::ops::Range<usize>, i| ranks.map(|rank| value(rank, i)).sum::<f32>();
                let stage = rank / shares * shares;
                let [of_all, of_stage, gathered, part_of_all, part_of_stage] =
                    [0, 1, 2, 3, 4].map(|result| &results[result]);
                assert!((0..len).all(|i| of_all[i] == sum(0..count, i)), "rank {rank}: sum over all");
                assert!((0..len).all(|i| of_stage[i] == sum(stage..stage + shares, i)), "rank {rank}: stage");
                assert_eq!(gathered.len(), count * len);
                assert!((0..count * len).all(|i| gathered[i] == value(i / len, i % len)), "rank {rank}");
                for (part, ranks) in [(part_of_all, 0..count), (part_of_stage, stage..stage + shares)] {
                    let (n, r) = (count * len / ranks.len(), rank - ranks.start);
                    assert_eq!(part.len(), n);
                    assert!((0..n).all(|i| part[i] == sum(ranks.clone(), r * n + i)), "rank {rank}: part");
                }
                if rank >= shares {
                    assert!(
                        (0..len).all(|i| results[5][i] == value(rank - shares, i)),
                        "rank {rank}: message"
                    );
                }
            }
        }
    }
}

/// Messages of whole prompts, from a stage of one GPU to the next. The received rows are multiplied on tensor cores:
/// the first product loads kernels of a library while a message is under way.
#[test]
fn stages_multiply_long_messages() {
    const COLS: usize = 4096;
    let Some(found) = common::gpus().filter(|&found| found > 1) else {
        keel_testkit::skipped!("needs two GPUs");
        return;
    };
    for rows in [100, 1024, 2048, 3000] {
        let ranks = common::open(found, 2, 1, Determinism::Off);
        let spec = WeightSpec {
            experts: 1,
            rows: 1024,
            cols: COLS,
            format: WeightFormat::Affine { bits: 4, group_size: 64, scale_dtype: DType::BF16 },
            compute: Compute::Auto,
        };
        let prepare = |of: &Rank| {
            let weight = Weight::allocate(&of.runtime, spec).expect("a weight");
            let (codes, groups) = (vec![1; 1024 * COLS], 1024 * COLS / 64);
            let (scales, biases) = (vec![1.0; groups], vec![0.0; groups]);
            let data = RowData::Affine { codes: &codes, scales: &scales, biases: &biases };
            weight.fill(&RowBlock { expert: 0, first_row: 0, rows: 1024, data }).expect("it fits");
            let build = |x: &[Array]| match of.group().rank() {
                0 => vec![x[0].reshape([rows, COLS]).expect("as many").send(1).expect("f32")],
                _ => {
                    let come = Array::receive(&of.runtime, [rows, COLS], 0).expect("a shape");
                    vec![come.linear(&weight).expect("shapes fit"), come]
                }
            };
            let prepared = Prepared::new(of, vec![of.array(rows * COLS, DType::F32)], build);
            prepared.fill(|i| (i / COLS % 5) as f32);
            prepared
        };
        let prepared: Vec<Prepared> = ranks.iter().map(prepare).collect();
        on_each(&ranks, &prepared, |rank, prepared| {
            let outcome = prepared.run(3);
            if outcome.is_err() {
                rank.group().abandon();
            }
            outcome.expect("both come");
        });
        let [products, come] = &prepared[1].results()[..] else { panic!("two results") };
        let value = |row: usize| (row % 5) as f32;
        assert!((0..rows * COLS).all(|i| come[i] == value(i / COLS)), "{rows} rows");
        let product = |i: usize| COLS as f32 * value(i / 1024);
        assert!((0..rows * 1024).all(|i| products[i] == product(i)), "{rows} rows: products");
    }
}

/// Short arrays are added by mailboxes, where GPUs have them, and long ones by NCCL.
#[test]
fn a_gpu_that_waits_for_one_that_failed_gets_an_error_and_all_meet_again() {
    let Some(ranks) = separate_gpus(Determinism::Off) else { return };
    let want = (1..=ranks.len()).sum::<usize>() as f32;
    let sums_of =
        |len, sums| -> Vec<Prepared> { ranks.iter().map(|rank| Prepared::sums(rank, len, sums)).collect() };
    let again = [1000, 70_000].map(|len| sums_of(len, 1));
    let all_sum = || {
        for prepared in &again {
            on_each(&ranks, prepared, |_, prepared| prepared.run(3).expect("all come"));
            for sum in prepared.iter().flat_map(Prepared::results) {
                assert!(sum.iter().all(|&y| y == want), "{:?}", &sum[..4]);
            }
        }
    };
    // With 300 sums the host waits while it launches them one by one.
    for (len, sums) in [(1000, 1), (1000, 300), (70_000, 1), (70_000, 300), (1000, 1)] {
        all_sum();
        let prepared = sums_of(len, sums);
        let start = Instant::now();
        on_each(&ranks, &prepared, |rank, prepared| {
            if rank.group().rank() == 0 {
                std::thread::sleep(Duration::from_millis(300));
                rank.group().abandon();
            } else {
                let error = prepared.run(3).expect_err("device 0 does not come");
                assert!(error.contains("device 0 of the group has failed"), "{error}");
            }
        });
        assert!(start.elapsed() < Duration::from_secs(10), "{sums} sums of {len}: {:?}", start.elapsed());
        ranks.iter().for_each(|rank| rank.group().rejoin());
    }
    all_sum();
}

/// A device that rejoins empties its stream. Bytes that the host has written before, and that no launch has delivered
/// yet, arrive all the same, whatever is written after.
#[test]
fn writes_that_wait_while_exchanges_end_arrive() {
    let Some(ranks) = ranks(Determinism::Off) else { return };
    let rank = &ranks[0];
    let [first, second] = [(); 2].map(|()| rank.array(1000, DType::F32));
    for round in 0..3u16 {
        let values =
            |of: u16| -> Vec<f32> { (0..1000).map(|i| f32::from(100 * round + of) + i as f32).collect() };
        rank.group().abandon();
        ranks.iter().for_each(|rank| rank.group().rejoin());
        first.write(&values(1)).expect("memory");
        rank.group().abandon();
        ranks.iter().for_each(|rank| rank.group().rejoin());
        second.write(&values(2)).expect("memory");
        assert_eq!(first.to_vec::<f32>().expect("memory"), values(1), "round {round}");
        assert_eq!(second.to_vec::<f32>().expect("memory"), values(2), "round {round}");
    }
}

/// The device that fails is closed, and so are the others, without meeting again.
#[test]
fn gpus_close_after_a_failure() {
    for len in [1000, 70_000] {
        let Some(ranks) = ranks(Determinism::Off) else { return };
        let prepared: Vec<Prepared> = ranks.iter().map(|rank| Prepared::sums(rank, len, 1)).collect();
        let start = Instant::now();
        on_each(&ranks, &prepared, |rank, prepared| {
            if rank.group().rank() == 0 {
                std::thread::sleep(Duration::from_millis(100));
                rank.group().abandon();
            } else {
                prepared.run(1).expect_err("device 0 does not come");
            }
        });
        drop((prepared, ranks));
        assert!(start.elapsed() < Duration::from_secs(10), "{len} floats: {:?}", start.elapsed());
    }
}
