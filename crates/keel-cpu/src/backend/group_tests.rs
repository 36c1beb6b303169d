//! Groups whose members compute in turns.

use super::group::CpuGroup;
use keel_array::{Group, Peers};
use std::sync::atomic::{AtomicUsize, Ordering};

#[test]
fn no_more_members_compute_at_a_time_than_there_are_turns() {
    for turns in 1..=4 {
        let (computing, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let compute = || {
            most.fetch_max(computing.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::sleep(std::time::Duration::from_millis(2));
            computing.fetch_sub(1, Ordering::SeqCst);
        };
        let run = |group: CpuGroup| {
            let _turn = group.turn();
            for _ in 0..5 {
                compute();
                let mut sum = 0.0;
                let peers = Peers { first: 0, count: 4 };
                group
                    .exchange("all_reduce", peers, &[group.rank() as f32], |_, x| sum += x[0])
                    .expect("all come");
                assert_eq!(sum, 6.0);
            }
        };
        std::thread::scope(|scope| {
            for group in CpuGroup::with_turns(4, turns) {
                scope.spawn(move || run(group));
            }
        });
        assert!(most.into_inner() <= turns);
    }
}

/// The lengths are the same, so only the kinds tell.
#[test]
fn members_that_come_to_operations_of_different_kinds_are_refused() {
    let kinds = ["all_reduce", "all_gather"];
    let peers = Peers { first: 0, count: 2 };
    let come = |group: CpuGroup| {
        let mut reads = 0;
        let outcome = group.exchange(kinds[group.rank()], peers, &[1.0], |_, _| reads += 1);
        outcome.expect_err("the other comes to another operation")
    };
    let found: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            CpuGroup::of(2).into_iter().map(|group| scope.spawn(move || come(group))).collect();
        threads.into_iter().map(|thread| thread.join().expect("it ends")).collect()
    });
    for reason in found {
        assert!(kinds.iter().all(|kind| reason.contains(kind)), "{reason}");
    }
}
