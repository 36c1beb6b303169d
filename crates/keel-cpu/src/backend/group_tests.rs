//! Groups whose members compute in turns.

use super::group::CpuGroup;
use keel_array::{Group, Peers};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

#[test]
fn no_more_members_compute_at_a_time_than_there_are_turns() {
    for turns in 1..=4 {
        let (computing, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let compute = || {
            most.fetch_max(computing.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(2));
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

/// Members of two sets come to more exchanges than members of one.
#[test]
fn sets_of_peers_may_overlap() {
    let [pair, other_pair, all] = [(0, 2), (1, 2), (0, 3)].map(|(first, count)| Peers { first, count });
    let sums = |group: &CpuGroup| {
        let sum = |peers: Peers| {
            let mut sum = 0.0;
            let own = [10f32.powi(group.rank() as i32)];
            group.exchange("all_reduce", peers, &own, |_, x| sum += x[0]).map(|()| sum)
        };
        let sets = [pair, pair, all, other_pair, all, pair].into_iter();
        sets.filter(|peers| peers.contains(group.rank())).map(sum).collect::<Result<Vec<f32>, String>>()
    };
    let (done, ended) = std::sync::mpsc::channel();
    let found: Vec<_> = std::thread::scope(|scope| {
        let groups = CpuGroup::of(3);
        let run = |group: &CpuGroup| {
            let (group, done) = (group.clone(), done.clone());
            scope.spawn(move || {
                let found = sums(&group);
                done.send(()).expect("the test waits");
                found
            })
        };
        let threads: Vec<_> = groups.iter().map(run).collect();
        // If one waits for ever, all of them end with an error.
        if !groups.iter().all(|_| ended.recv_timeout(Duration::from_secs(20)).is_ok()) {
            groups[0].abandon();
        }
        threads.into_iter().map(|thread| thread.join().expect("it ends").expect("all come")).collect()
    });
    assert_eq!(found[0], [11.0, 11.0, 111.0, 111.0, 11.0]);
    assert_eq!(found[1], [11.0, 11.0, 111.0, 110.0, 111.0, 11.0]);
    assert_eq!(found[2], [111.0, 110.0, 111.0]);
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
