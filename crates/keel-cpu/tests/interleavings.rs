//! Every order in which devices of the CPU can exchange values, and those with few switches in which the threads of a
//! pool can meet. The files under test are the crate's own, compiled with loom's types, so no special build is needed.
//! loom ends a test in which all threads wait.

#[path = "../src/backend/group.rs"]
#[allow(dead_code)]
mod group;

#[path = "../src/pool/meeting.rs"]
#[allow(dead_code)]
mod meeting;

mod sync {
    pub(crate) use loom::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};

    /// A waiting thread lets another make a step, then sleeps. More rounds show nothing else.
    pub(crate) struct Patience;

    impl Patience {
        pub fn new() -> Patience {
            Patience
        }

        pub fn lasts(&self, round: u32) -> bool {
            loom::thread::yield_now();
            round == 0
        }
    }
}

use group::CpuGroup;
use keel_array::{Group, Peers};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use meeting::Meeting;

const BOTH: Peers = Peers { first: 0, count: 2 };

/// Two members, of which `turns` compute at the same time.
fn members(turns: usize) -> [CpuGroup; 2] {
    CpuGroup::with_turns(2, turns).try_into().unwrap_or_else(|_| unreachable!("two members"))
}

fn sum(group: &CpuGroup, value: f32) -> Result<f32, String> {
    let mut sum = 0.0;
    group.exchange("all_reduce", BOTH, &[value], |_, x| sum += x[0])?;
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

/// A member that waits for one that gives up gets an error, and the memory that the latter offered is taken back.
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

/// A value, and a cell. loom reports a thread that reads or writes the cell while another writes it.
struct Value(UnsafeCell<()>, AtomicUsize);

impl Value {
    fn new() -> Value {
        Value(UnsafeCell::new(()), AtomicUsize::new(0))
    }

    fn write(&self, value: usize) {
        self.0.with_mut(|_| ());
        self.1.store(value, Ordering::Relaxed);
    }

    fn read(&self) -> usize {
        self.0.with(|_| ());
        self.1.load(Ordering::Relaxed)
    }

    fn add(&self, more: usize) {
        self.write(self.read() + more);
    }
}

/// A pool of a caller, worker 0, and a helper, worker 1.
struct Pair {
    meeting: Meeting<usize>,
    values: [Value; 2],
}

/// The work of worker `index` in a job.
type Work = fn(pair: &Pair, index: usize, job: usize);

impl Pair {
    /// Runs the jobs on a pool, one after another, and returns the values that they leave.
    fn run(jobs: &[usize], work: Work) -> [usize; 2] {
        let pair = Arc::new(Pair { meeting: Meeting::new(2), values: [Value::new(), Value::new()] });
        let helper = thread::spawn({
            let pair = Arc::clone(&pair);
            move || {
                let (mut seen, mut done) = (0, Vec::new());
                while let Some((generation, job)) = pair.meeting.next_job(seen) {
                    seen = generation;
                    work(&pair, 1, job);
                    pair.meeting.finish();
                    done.push(job);
                }
                done
            }
        });
        for &job in jobs {
            pair.meeting.begin(job);
            work(&pair, 0, job);
            pair.meeting.end();
            // The helper is out, so its writes are there, and the values may be changed.
            pair.values.iter().for_each(|value| value.add(0));
        }
        pair.meeting.close();
        assert_eq!(helper.join().expect("it ends"), jobs, "the helper does each job once");
        [0, 1].map(|index| pair.values[index].read())
    }
}

/// All orders with at most this many switches away from a thread that could go on.
const SWITCHES: usize = 3;

fn model(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(SWITCHES);
    builder.check(check);
}

#[test]
fn what_a_worker_writes_is_there_after_a_barrier() {
    model(|| {
        let work: Work = |pair, index, job| {
            pair.values[index].write(job + index);
            assert!(pair.meeting.barrier());
            assert_eq!(pair.values[1 - index].read(), job + 1 - index);
        };
        assert_eq!(Pair::run(&[5], work), [5, 6]);
    });
}

#[test]
fn each_worker_does_each_job_once() {
    model(|| assert_eq!(Pair::run(&[1, 2], |pair, index, job| pair.values[index].add(job)), [3, 3]));
}

#[test]
fn every_unit_is_claimed_once_in_every_phase() {
    model(|| {
        let work: Work = |pair, _, _| {
            for phase in 0..2 {
                let units = std::iter::repeat_with(|| pair.meeting.claim(1));
                units.take_while(|&unit| unit < 2).for_each(|unit| pair.values[unit].add(1));
                assert!(phase == 1 || pair.meeting.barrier());
            }
        };
        assert_eq!(Pair::run(&[0], work), [2, 2]);
    });
}

/// The second job begins in the phase in which the first has taken all units.
#[test]
fn every_unit_of_a_share_is_taken_once_in_every_job() {
    model(|| {
        let work: Work = |pair, index, _| {
            let phase = pair.meeting.phase();
            for owner in [index, 1 - index] {
                let units = std::iter::from_fn(|| pair.meeting.take(owner, phase, 1, owner != index));
                units.for_each(|_| pair.values[owner].add(1));
            }
        };
        assert_eq!(Pair::run(&[0, 1], work), [2, 2]);
    });
}

#[test]
fn nobody_waits_for_a_worker_that_panicked_and_the_next_job_runs() {
    model(|| {
        let work: Work = |pair, index, job| match (job, index) {
            (0, 1) => pair.meeting.poison(),
            _ => assert_eq!(pair.meeting.barrier(), job > 0),
        };
        assert_eq!(Pair::run(&[0, 1], work), [0, 0]);
    });
}
