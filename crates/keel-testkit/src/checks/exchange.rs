//! Exchanges between the devices of a group, compared with their oracles.

use super::{expect, upload};
use crate::naive::exchange::{all_gather, all_reduce};
use crate::naive::tensor::Tensor;
use keel_array::{Array, DType, Peers, Runtime};

/// Runs `work` on every device at the same time.
fn on_each(runtimes: &[Runtime], work: impl Fn(usize, &Runtime) + Sync) {
    std::thread::scope(|scope| {
        for (rank, runtime) in runtimes.iter().enumerate() {
            let work = &work;
            scope.spawn(move || work(rank, runtime));
        }
    });
}

/// Checks a group of at least two devices, given by rank.
///
/// # Panics
/// If a result is wrong.
pub fn exchange(runtimes: &[Runtime]) {
    let count = runtimes.len();
    assert!(count > 1, "a group has several devices");
    for shape in [&[1][..], &[3, 7], &[64, 33], &[65_537]] {
        let share = |rank: usize| {
            Tensor::from_fn(shape, |at| {
                let i = at.iter().fold(rank * 131, |sum, index| sum * 3 + index * 7);
                (i % 61) as f64 / 8.0 - 3.0
            })
        };
        let shares: Vec<Tensor> = (0..count).map(share).collect();
        on_each(runtimes, |rank, runtime| {
            // All devices, then two halves of them that do not know of each other.
            let half = count / 2;
            let own = if rank < half {
                Peers { first: 0, count: half }
            } else {
                Peers { first: half, count: count - half }
            };
            for peers in [Peers { first: 0, count }, own] {
                let x = upload(runtime, &shares[rank], DType::F32);
                let of_peers = &shares[peers.ranks()];
                expect("all_reduce", &x.all_reduce(peers).expect("f32"), &all_reduce(of_peers));
                expect("all_gather", &x.all_gather(peers).expect("f32"), &all_gather(of_peers));
            }
            pass_on(runtime, rank, count, shape, &shares[0]);
        });
    }
}

/// A chain: every device adds one to what it gets, and sends it on.
fn pass_on(runtime: &Runtime, rank: usize, count: usize, shape: &[usize], first: &Tensor) {
    let x = match rank {
        0 => upload(runtime, first, DType::F32),
        _ => Array::receive(runtime, shape, rank - 1).expect("a shape"),
    };
    let y = x.add(&Array::full(runtime, [1], DType::F32, 1.0).expect("a shape")).expect("it broadcasts");
    if rank + 1 < count {
        let sent = y.send(rank + 1).expect("f32");
        assert_eq!(sent.to_vec::<u32>().expect("runs"), [first.values.len() as u32]);
    }
    expect("receive", &y, &first.map(|x| x + (rank + 1) as f64));
}
