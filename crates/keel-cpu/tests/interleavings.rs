//! Every order in which devices of the CPU can exchange values. The file under test is the crate's own, compiled with
//! loom's types, so no special build is needed. loom ends a test in which all threads wait.

#[path = "../src/backend/group.rs"]
#[allow(dead_code)]
mod group;

mod sync {
    pub(crate) use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
}

use group::CpuGroup;
use keel_array::{Group, Peers};
use loom::thread;

const BOTH: Peers = Peers { first: 0, count: 2 };

/// Two members, of which `turns` compute at the same time.
fn members(turns: usize) -> [CpuGroup; 2] {
    CpuGroup::with_turns(2, turns).try_into().unwrap_or_else(|_| unreachable!("two members"))
}

fn sum(group: &CpuGroup, value: f32) -> Result<f32, String> {
    let mut sum = 0.0;
    group.exchange(BOTH, &[value], |_, x| sum += x[0])?;
    Ok(sum)
}

#[test]
fn members_that_share_one_turn_add_up_their_values_and_go_on() {
    loom::model(|| {
        let [first, second] = members(1);
        let other = thread::spawn(move || {
            let _turn = second.turn();
            sum(&second, 2.0)
        });
        let here = {
            let _turn = first.turn();
            sum(&first, 1.0)
        };
        assert_eq!((here, other.join().expect("it ends")), (Ok(3.0), Ok(3.0)));
        drop(first.turn());
    });
}

#[test]
fn a_value_that_is_sent_is_read_before_its_sender_goes_on() {
    loom::model(|| {
        let [first, second] = members(2);
        let other = thread::spawn(move || {
            let mut got = [0.0];
            second.receive(0, &mut got).map(|()| got)
        });
        // The sender's values do not outlive its call.
        first.send(1, &[7.0]).expect("it is received");
        assert_eq!(other.join().expect("it ends"), Ok([7.0]));
    });
}

/// Whoever waits for a member that gives up hears of it, and what it has lent is taken back.
#[test]
fn nobody_waits_for_a_member_that_has_given_up() {
    loom::model(|| {
        let [first, second] = members(1);
        let other = thread::spawn(move || {
            let _turn = second.turn();
            second.abandon();
        });
        let outcome = {
            let _turn = first.turn();
            sum(&first, 1.0)
        };
        assert!(outcome.is_err_and(|reason| reason.contains("device 1 of the group has failed")));
        other.join().expect("it ends");
        first.rejoin();
        drop(first.turn());
    });
}
