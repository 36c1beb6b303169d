//! Runs that are not waited for: each gives the same result as when it runs alone.

use super::Check;
use keel_array::{Array, Category, DType, Executable, PendingRun, RESULT_BYTES_MAX, RUNS_MAX, Runtime};

pub(super) const CHECKS: &[Check] = &[
    Check { op: "take", run: results_arrive_in_order },
    Check { op: "take", run: what_is_wrong_belongs_to_its_run },
    Check { op: "take", run: each_of_two_wrong_runs_says_so },
    Check { op: "take", run: more_than_may_be_under_way },
];

const NODES: u32 = 17;

/// Three walkers over a table of numbers. A step is `at = table[at] + offset`, with offsets from the host.
struct Walk {
    step: Executable,
    at: Array,
    offsets: Array,
}

/// The table's entry.
fn next(at: u32) -> u32 {
    (at * 5 + 3) % (NODES - 1)
}

impl Walk {
    fn new(runtime: &Runtime) -> Walk {
        let table: Vec<u32> = (0..NODES).map(next).collect();
        let table = Array::from_slice(runtime, &table, [NODES as usize]).expect("memory");
        let input = || Array::persistent(runtime, Category::User, [3], DType::U32).expect("memory");
        let (at, offsets) = (input(), input());
        let step = runtime.trace(|| {
            let led = table.take(&at).and_then(|led| led.add(&offsets)).expect("shapes agree");
            runtime.prepare(&[(&led, &at)]).expect("the table is read before the places are written")
        });
        Walk { step, at, offsets }
    }

    fn submit(&self, offsets: [u32; 3]) -> PendingRun {
        self.offsets.write(&offsets).expect("three");
        self.step.submit(&self.at)
    }
}

/// The walkers' places after a run.
fn places(run: PendingRun) -> Result<[u32; 3], String> {
    let mut bytes = [0; 12];
    run.wait(&mut bytes).map_err(|failed| failed.to_string())?;
    let mut words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
    Ok([(); 3].map(|()| words.next().expect("three words")))
}

fn results_arrive_in_order(runtime: &Runtime) {
    let walk = Walk::new(runtime);
    let (mut want, mut in_flight) = ([0u32, 5, 16], None);
    walk.at.write(&want).expect("three");
    for i in 0..40u32 {
        let offsets = [i % 2, i / 2 % 2, i / 4 % 2];
        let run = walk.submit(offsets);
        if let Some(before) = in_flight.replace(run) {
            assert_eq!(runtime.runs_under_way(), 2);
            assert_eq!(places(before), Ok(want), "run {}", i - 1);
        }
        for (at, offset) in want.iter_mut().zip(offsets) {
            *at = next(*at) + offset;
        }
        match i % 8 {
            // Other reads and runs are allowed meanwhile.
            3 => assert_eq!(walk.at.to_vec::<u32>().expect("there"), want),
            5 => {
                let twice: Vec<u32> =
                    walk.offsets.add(&walk.offsets).expect("one shape").to_vec().expect("runs");
                assert_eq!(twice, offsets.map(|offset| 2 * offset));
            }
            _ => {}
        }
    }
    assert_eq!(places(in_flight.take().expect("the last")), Ok(want));
    assert_eq!(runtime.runs_under_way(), 0);
    // A run that is dropped without a wait has run, too.
    drop(walk.submit([0; 3]));
    assert_eq!(walk.at.to_vec::<u32>().expect("there"), want.map(next));
    let bytes = Array::persistent(runtime, Category::User, [8], DType::U8).expect("memory");
    let odd = bytes.entries(1, 4).expect("in memory");
    let refusal = walk.step.submit(&odd).wait(&mut [0; 4]).expect_err("it begins within a word").to_string();
    assert!(refusal.contains("is not whole words of 4 bytes in memory"), "{refusal}");
    assert_eq!(runtime.runs_under_way(), 0);
}

fn what_is_wrong_belongs_to_its_run(runtime: &Runtime) {
    let walk = Walk::new(runtime);
    for _ in 0..3 {
        walk.at.write(&[1u32, 2, 3]).expect("three");
        let first = walk.submit([0, 100, 0]);
        let second = walk.submit([0; 3]);
        assert_eq!(places(first), Ok([next(1), next(2) + 100, next(3)]), "the first is all right");
        // The first result is available before the second run's error is known.
        let third = walk.submit([0; 3]);
        let message = places(second).expect_err("it has left the table");
        let wrong = format!("index {} is out of range for {NODES}", next(2) + 100);
        assert!(message.contains(&wrong), "{message}");
        drop(third);
        walk.at.write(&[4u32, 5, 6]).expect("three");
        assert_eq!(places(walk.submit([1; 3])), Ok([4, 5, 6].map(|at| next(at) + 1)), "none the worse");
    }
}

/// Both are under way when the first one fails, and the run after them is all right.
fn each_of_two_wrong_runs_says_so(runtime: &Runtime) {
    let walk = Walk::new(runtime);
    let submit = |at: [u32; 3]| {
        walk.at.write(&at).expect("three");
        walk.submit([0; 3])
    };
    let expect_wrong = |run, index: u32| {
        let message = places(run).expect_err("it is out of the table");
        assert!(message.contains(&format!("index {index} is out of range for {NODES}")), "{message}");
    };
    for round in 0..4u32 {
        let first = submit([1, 40 + round, 3]);
        let second = submit([60 + round, 2, 3]);
        let third = submit([4, 5, 6]);
        // The later one may be waited for first.
        if round % 2 == 0 {
            expect_wrong(first, 40 + round);
            expect_wrong(second, 60 + round);
        } else {
            expect_wrong(second, 60 + round);
            expect_wrong(first, 40 + round);
        }
        assert_eq!(places(third), Ok([4, 5, 6].map(next)), "round {round}: none the worse");
    }
}

fn more_than_may_be_under_way(runtime: &Runtime) {
    let walk = Walk::new(runtime);
    let runs: Vec<PendingRun> = (0..=RUNS_MAX).map(|_| walk.submit([0; 3])).collect();
    let outcomes: Vec<_> = runs.into_iter().map(places).collect();
    assert!(outcomes[..RUNS_MAX].iter().all(Result::is_ok), "{outcomes:?}");
    let refusal = outcomes[RUNS_MAX].as_ref().expect_err("one too many");
    let full = format!("{RUNS_MAX} runs are under way; wait for one first");
    assert!(refusal.contains(&full), "{refusal}");
    let large = Array::persistent(runtime, Category::User, [RESULT_BYTES_MAX / 4 + 1], DType::U32);
    let refusal = walk.step.submit(&large.expect("memory")).wait(&mut [0; RESULT_BYTES_MAX + 4]);
    assert!(refusal.expect_err("too large").to_string().contains("takes 4100 bytes, more than 4096"));
    assert_eq!(runtime.runs_under_way(), 0);
}
