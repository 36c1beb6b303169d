//! Exchanges between the devices of a group, compared with their oracles.

use super::{expect, upload};
use crate::naive::exchange::{all_gather, all_reduce, reduce_scatter};
use crate::naive::tensor::Tensor;
use keel_array::{Array, DType, Peers, Runtime};

/// Tells the other devices if the check of one has panicked. Without that they would wait for it, and no test would
/// end.
struct Membership<'a>(&'a Runtime);

impl Drop for Membership<'_> {
    fn drop(&mut self) {
        if let Some(group) = self.0.backend().group().filter(|_| std::thread::panicking()) {
            group.abandon();
        }
    }
}

/// Runs `work` on every device at the same time.
fn on_each(runtimes: &[Runtime], work: impl Fn(usize, &Runtime) + Sync) {
    std::thread::scope(|scope| {
        for (rank, runtime) in runtimes.iter().enumerate() {
            let work = &work;
            scope.spawn(move || {
                let _membership = Membership(runtime);
                work(rank, runtime);
            });
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
    // All devices, then two halves of them that do not know of each other.
    let (half, all) = (count / 2, Peers { first: 0, count });
    let halves = [Peers { first: 0, count: half }, Peers { first: half, count: count - half }];
    let is_common = |n: &usize| [all, halves[0], halves[1]].iter().all(|peers| n.is_multiple_of(peers.count));
    let parts = (count..).find(is_common).expect("their product, for one");
    for shape in [&[1][..], &[3, 7], &[64, 33], &[65_537]] {
        let (shares, wide) = (shares(count, 1, shape), shares(count, parts, shape));
        on_each(runtimes, |rank, runtime| {
            for peers in [all, halves[usize::from(rank >= half)]] {
                let x = upload(runtime, &shares[rank], DType::F32);
                let of_peers = &shares[peers.ranks()];
                expect("all_reduce", &x.all_reduce(peers).expect("f32"), &all_reduce(of_peers));
                expect("all_gather", &x.all_gather(peers).expect("f32"), &all_gather(of_peers));
                scatter(&upload(runtime, &wide[rank], DType::F32), peers, rank, &wide[peers.ranks()]);
            }
            pass_on(runtime, rank, count, shape, &shares[0]);
        });
    }
}

/// The arrays of `count` devices, with `times` as many rows as `shape`.
fn shares(count: usize, times: usize, shape: &[usize]) -> Vec<Tensor> {
    let shape = [&[times * shape[0]], &shape[1..]].concat();
    let share = |rank: usize| {
        Tensor::from_fn(&shape, |at| {
            let i = at.iter().fold(rank * 131, |sum, index| sum * 3 + index * 7);
            (i % 61) as f64 / 8.0 - 3.0
        })
    };
    (0..count).map(share).collect()
}

/// A sum in parts, and the whole sum, which is made of the parts of all peers.
fn scatter(x: &Array, peers: Peers, rank: usize, shares: &[Tensor]) {
    let part = x.reduce_scatter(peers).expect("its rows divide");
    expect("reduce_scatter", &part, &reduce_scatter(shares, rank - peers.first));
    let whole = part.all_gather(peers).and_then(|parts| parts.reshape(x.shape().clone()));
    expect("all_gather of reduce_scatter", &whole.expect("as many elements"), &all_reduce(shares));
}

/// A chain: every device adds one to its input, and sends the sum on.
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
