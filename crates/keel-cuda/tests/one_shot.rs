//! Sums of small arrays by the GPUs' mailboxes. They need two GPUs that reach each other's memory, or one that NCCL may
//! connect with itself (NCCL_MULTI_RANK_GPU_ENABLE=1), and `KEEL_TEST_CUDA=1`. The parts that need no GPU are tested
//! next to the code.
//!
//! On a GPU that ranks share, the driver may let a rank's call wait for the kernel of another one, which waits for that
//! rank. So nothing is allocated, loaded or freed while ranks wait for each other.

mod common;

use std::time::{Duration, Instant};

use common::{Prepared, Rank, on_each};
use keel_array::{Array, DType};
use keel_cuda::Determinism;

/// Floats of the longest array that is added in one shot.
const LEN_MAX: usize = 65_536;

/// Whether the kernels since the last call added arrays in one shot.
fn took_one_shot(rank: &Rank) -> bool {
    rank.backend.take_kernels().iter().any(|name| name.contains("one_shot_all_reduce"))
}

/// Up to four GPUs as one stage, or several ranks of one GPU.
fn ranks(determinism: Determinism) -> Option<Vec<Rank>> {
    let found = common::gpus()?;
    let count = if found == 1 { 3 } else { found.min(4) };
    let ranks = common::open(found, count, count, determinism);
    for rank in &ranks {
        // Loads the kernels that deliver the host's writes.
        let x = rank.array(1, DType::F32);
        x.write(&[1.0]).expect("memory");
        assert_eq!(x.add(&x).and_then(|y| y.to_vec::<f32>()).expect("memory"), [2.0]);
    }
    let first: Vec<Prepared> = ranks.iter().map(|rank| Prepared::sums(rank, 1, 1)).collect();
    ranks.iter().for_each(|rank| _ = took_one_shot(rank));
    on_each(&ranks, &first, |_, prepared| prepared.run(1).expect("all come"));
    let takes: Vec<bool> = ranks.iter().map(took_one_shot).collect();
    assert!(takes.iter().all(|take| *take == takes[0]), "all ranks choose alike: {takes:?}");
    if !takes[0] {
        keel_testkit::skipped!("the GPUs do not reach each other's memory, or must not");
        return None;
    }
    Some(ranks)
}

/// Values whose sum depends on the order.
fn value(rank: usize, i: usize) -> f32 {
    let scale = [1e8, -1e8, 1.0 / 3.0, 1e3][rank];
    scale * ((i % 127) as f32 + 1.0)
}

/// The sum of `len` floats from `offset` on.
fn sum_from(rank: &Rank, len: usize, offset: usize) -> Prepared {
    let prepared = Prepared::new(rank, vec![rank.array(len + offset, DType::F32)], |x| {
        let part = x[0].slice(&[offset], &[offset + len]).expect("within x");
        vec![part.all_reduce(rank.peers()).expect("f32")]
    });
    prepared.fill(|i| value(rank.group().rank(), i));
    prepared
}

#[test]
fn sums_have_the_bits_of_the_order_of_ranks_at_any_length_and_offset() {
    let lens = [1, 2, 3, 4, 5, 1023, 1024, 1025, 5120, 16_385, LEN_MAX - 1, LEN_MAX, LEN_MAX + 1];
    for determinism in [Determinism::Off, Determinism::Steps] {
        let Some(ranks) = ranks(determinism) else { return };
        let count = ranks.len();
        for (len, offset) in lens.into_iter().flat_map(|len| (0..4).map(move |offset| (len, offset))) {
            // NCCL adds more than two arrays in its own order.
            if len > LEN_MAX && count > 2 && determinism == Determinism::Off {
                continue;
            }
            let prepared: Vec<Prepared> = ranks.iter().map(|rank| sum_from(rank, len, offset)).collect();
            ranks.iter().for_each(|rank| _ = took_one_shot(rank));
            on_each(&ranks, &prepared, |_, prepared| prepared.run(1).expect("all come"));
            let sum = |i| (1..count).fold(value(0, i), |sum, rank| sum + value(rank, i));
            for (prepared, rank) in prepared.iter().zip(&ranks) {
                assert_eq!(took_one_shot(rank), len <= LEN_MAX, "{len} floats");
                let got = &prepared.results()[0];
                let wrong = (0..len).find(|&i| got[i].to_bits() != sum(i + offset).to_bits());
                let number = rank.group().rank();
                assert_eq!(
                    wrong,
                    None,
                    "rank {number}, {len} floats at {offset}: {:?}",
                    wrong.map(|i| got[i])
                );
            }
        }
    }
}

/// Every pattern of bits arrives, also the one that marks a slot to which nothing has come.
#[test]
fn sums_of_any_bits_end() {
    const LEN: usize = 5000;
    let Some(ranks) = ranks(Determinism::Off) else { return };
    let all_ones = f32::from_bits(u32::MAX);
    let values = [all_ones, -0.0, 0.0, f32::INFINITY, f32::MIN_POSITIVE / 4.0, 3.5, f32::NAN];
    let value = |rank: usize, i: usize| values[(i / values.len().pow(rank as u32)) % values.len()];
    let prepare = |rank: &Rank| {
        let prepared = Prepared::sums(rank, LEN, 1);
        prepared.fill(|i| value(rank.group().rank(), i));
        prepared
    };
    let prepared: Vec<Prepared> = ranks.iter().map(prepare).collect();
    on_each(&ranks, &prepared, |_, prepared| prepared.run(5).expect("all come"));
    let sum = |i| (1..ranks.len()).fold(value(0, i), |sum, rank| sum + value(rank, i));
    for got in prepared.iter().flat_map(Prepared::results) {
        let is_right = |i: &usize| match sum(*i) {
            sum if sum.is_nan() => got[*i].is_nan(),
            sum => got[*i].to_bits() == sum.to_bits(),
        };
        let wrong = (0..LEN).find(|i| !is_right(i));
        assert_eq!(wrong, None, "{:?}", wrong.map(|i| (got[i], sum(i))));
    }
}

/// Sums that each depend on the one before, as a graph: two chains of different lengths in turn, so that some threads
/// come to more sums than others. Ranks begin at different times.
#[test]
fn sums_that_follow_each_other_in_graphs_read_no_other_sum() {
    const ROUNDS: usize = 100;
    let Some(ranks) = ranks(Determinism::Off) else { return };
    let mean = 1.0 / ranks.len() as f32;
    let chains = |rank: &Rank| {
        Prepared::new(rank, [1000, 20_000].map(|len| rank.array(len, DType::F32)).to_vec(), |start| {
            let full = |value| Array::full(&rank.runtime, [1], DType::F32, value).expect("a shape");
            let mut ends = start.to_vec();
            for _ in 0..ROUNDS {
                for y in &mut ends {
                    let sum = y.all_reduce(rank.peers()).expect("f32");
                    *y = sum.mul(&full(mean)).and_then(|mean| mean.add(&full(1.0))).expect("f32");
                }
            }
            ends
        })
    };
    let prepared: Vec<Prepared> = ranks.iter().map(chains).collect();
    for run in 0..20 {
        let base = (run * 3) as f32;
        prepared.iter().for_each(|prepared| prepared.fill(|_| base));
        on_each(&ranks, &prepared, |rank, prepared| {
            let turn = (rank.group().rank() * 7 + run) % 5;
            std::thread::sleep(Duration::from_micros(300 * turn as u64));
            prepared.run(1).expect("all come");
        });
        for y in prepared.iter().flat_map(Prepared::results) {
            // A third is rounded in each round.
            let wrong = y.iter().find(|&&y| (y - base - ROUNDS as f32).abs() > 0.01);
            assert_eq!(wrong, None, "run {run}, {} floats", y.len());
        }
    }
}

/// The first rank comes to some sums, and then fails. The others have begun a sum in either parity.
#[test]
fn ranks_that_wait_for_one_that_failed_between_two_sums_get_an_error_and_all_meet_again() {
    let Some(ranks) = ranks(Determinism::Off) else { return };
    let want = (1..=ranks.len()).sum::<usize>() as f32;
    let again: Vec<Prepared> = ranks.iter().map(|rank| Prepared::sums(rank, 5000, 1)).collect();
    for come in 1..=4 {
        let sums = |rank: &Rank| Prepared::sums(rank, 5000, come + usize::from(rank.group().rank() > 0));
        let prepared: Vec<Prepared> = ranks.iter().map(sums).collect();
        let start = Instant::now();
        on_each(&ranks, &prepared, |rank, prepared| {
            if rank.group().rank() == 0 {
                prepared.run(1).expect("the others come, too");
                std::thread::sleep(Duration::from_millis(20));
                rank.group().abandon();
            } else {
                let error = prepared.run(1).expect_err("the first rank does not come");
                assert!(error.contains("device 0 of the group has failed"), "{error}");
            }
        });
        assert!(start.elapsed() < Duration::from_secs(10), "after {come} sums: {:?}", start.elapsed());
        ranks.iter().for_each(|rank| rank.group().rejoin());
        on_each(&ranks, &again, |_, prepared| prepared.run(1).expect("all come"));
        for sum in again.iter().flat_map(Prepared::results) {
            assert!(sum.iter().all(|&y| y == want), "after {come} sums: {:?}", &sum[..4]);
        }
        assert!(ranks.iter().all(took_one_shot));
    }
}
