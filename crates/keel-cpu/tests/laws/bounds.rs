//! Failure 5: pending graphs and submissions are bounded. Limits, and the program cache.

use super::watched::Watched;
use super::{active, backend, counting, runtime, runtime_with};
use keel_array::{Array, ArrayError, Category, DType, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const NODES: usize = 10_000;
const PENDING: usize = 256;
const SUBMISSION: usize = 64;
const ELEMENTS: usize = 4096;

/// Peak values while a graph of 10,000 nodes is built without an evaluation.
#[derive(Debug)]
struct Highest {
    pending_ops: usize,
    kernels_of_a_launch: usize,
    launches: usize,
    bytes: u64,
}

fn ten_thousand_nodes(options: RuntimeOptions) -> Highest {
    let (watched, backend) = Watched::over(backend());
    let runtime = Runtime::new(backend, options);
    let mut state = counting(&runtime, &[ELEMENTS]);
    let mut highest = Highest { pending_ops: 0, kernels_of_a_launch: 0, launches: 0, bytes: 0 };
    for _ in 0..NODES / 2 {
        // A reduction does not fuse with its neighbours, so every node is a kernel.
        let total = state.max(0).expect("an axis");
        state = state.minimum(&total).expect("shapes broadcast");
        highest.pending_ops = highest.pending_ops.max(runtime.pending_ops());
    }
    let last = state.to_vec::<f32>().expect("the graph runs")[ELEMENTS - 1];
    assert_eq!(last, (ELEMENTS - 1) as f32);
    highest.kernels_of_a_launch = watched.kernels_max.load(Ordering::Relaxed);
    highest.launches = watched.launches.load(Ordering::Relaxed);
    highest.bytes = runtime.ledger().peak_total();
    drop(state);
    runtime.clear_cache();
    assert_eq!(active(&runtime), 0);
    highest
}

#[test]
fn a_graph_of_ten_thousand_nodes_is_submitted_in_bounded_pieces() {
    let options =
        RuntimeOptions { pending_ops: PENDING, submission_ops: SUBMISSION, ..RuntimeOptions::default() };
    let highest = ten_thousand_nodes(options);
    assert!(highest.pending_ops <= PENDING + 2, "{highest:?}");
    assert!(highest.kernels_of_a_launch <= SUBMISSION, "{highest:?}");
    assert!(highest.launches >= NODES / 2 / SUBMISSION, "{highest:?}");
    // Input and result of a piece, and those of the pieces in the queue.
    assert!(highest.bytes <= 40 * ELEMENTS as u64 * 4, "{highest:?}");
}

#[test]
fn without_the_bounds_that_test_would_fail() {
    let options = RuntimeOptions {
        pending_ops: usize::MAX,
        pending_bytes: usize::MAX,
        submission_ops: usize::MAX,
        ..RuntimeOptions::default()
    };
    let highest = ten_thousand_nodes(options);
    assert!(highest.pending_ops >= NODES, "{highest:?}");
    assert!(highest.kernels_of_a_launch > SUBMISSION && highest.launches == 1, "{highest:?}");
}

#[test]
fn pending_bytes_are_bounded_too() {
    let runtime = runtime_with(RuntimeOptions { pending_bytes: 100_000, ..RuntimeOptions::default() });
    let x = counting(&runtime, &[1000]);
    let kept: Vec<Array> = (0..1000).map(|_| x.neg().expect("floats")).collect();
    assert!(kept.iter().filter(|a| a.is_evaluated()).count() > 900);
    assert!(runtime.pending_ops() <= 26, "{}", runtime.pending_ops());
}

#[test]
fn views_wait_without_counting_as_memory() {
    let runtime = runtime_with(RuntimeOptions { pending_bytes: 100_000, ..RuntimeOptions::default() });
    let x = counting(&runtime, &[1000]);
    let wide = x.broadcast_to([1000, 1000]).and_then(|y| y.transpose(&[1, 0])).expect("shapes broadcast");
    let row = wide.slice(&[7, 0], &[8, 1000]).expect("within the array");
    assert_eq!((wide.is_evaluated(), row.is_evaluated(), runtime.pending_ops()), (false, false, 3));
    let dense = wide.exp().expect("floats");
    assert!(dense.is_evaluated(), "four megabytes are past the bound");
    assert_eq!(row.to_vec::<f32>().expect("a view runs"), [7.0; 1000]);
}

#[test]
fn by_default_no_more_waits_than_a_submission_may_touch() {
    let defaults = RuntimeOptions::default();
    assert!(defaults.pending_bytes <= defaults.submission_bytes);
    let planning = CpuBackend::planning(CpuOptions::default());
    let runtime = Runtime::new(Arc::new(planning), defaults.clone());
    // A planning backend holds nothing in memory, so results may have any size.
    let quarter = defaults.pending_bytes / 4 / size_of::<f32>();
    let part = || Array::full(&runtime, [quarter], DType::F32, 1.0).expect("an addressable shape");
    let kept: Vec<Array> = (0..5).map(|_| part()).collect();
    assert_eq!(kept.iter().filter(|part| part.is_evaluated()).count(), 1, "the fifth was one too many");
}

#[test]
fn submissions_are_bounded_in_bytes() {
    let (watched, backend) = Watched::over(backend());
    let options = RuntimeOptions { submission_bytes: 3 * 4096, ..RuntimeOptions::default() };
    let runtime = Runtime::new(backend, options);
    let mut x = counting(&runtime, &[1024]);
    for _ in 0..10 {
        x = x.cumsum(0, false, false).expect("an axis");
    }
    x.eval().expect("the graph runs");
    assert_eq!(
        watched.launches.load(Ordering::Relaxed),
        10,
        "two operands of 4096 bytes, so one kernel each"
    );
}

#[test]
fn a_limit_names_its_numbers_and_leaves_everything_as_it_was() {
    let runtime = runtime_with(RuntimeOptions { memory_limit: Some(10_000), ..RuntimeOptions::default() });
    let x = counting(&runtime, &[1000]);
    let y = x.add(&x).and_then(|y| y.concat_twice()).expect("shapes fit");
    let error = y.eval().expect_err("too large");
    assert!(
        matches!(error, ArrayError::Limit { requested: 8000, used: 4000, limit: 10_000, .. }),
        "{error:?}"
    );
    let message = error.to_string();
    assert!(
        message.contains("requested 8000") && message.contains("4000 in use of a limit of 10000"),
        "{message}"
    );
    assert_eq!(active(&runtime), 4000);
    runtime.ledger().set_limit(Some(100_000));
    assert_eq!(y.to_vec::<f32>().expect("it fits now")[1999], 1998.0);
}

/// The array joined with itself.
trait ConcatTwice {
    fn concat_twice(&self) -> Result<Array, ArrayError>;
}

impl ConcatTwice for Array {
    fn concat_twice(&self) -> Result<Array, ArrayError> {
        Array::concatenate(&[self, self], 0)
    }
}

#[test]
fn a_frozen_plan_refuses_what_it_does_not_contain() {
    let runtime = runtime();
    let x = counting(&runtime, &[100]);
    runtime.ledger().freeze();
    assert!(matches!(
        Array::persistent(&runtime, Category::Kv, [10], DType::F32),
        Err(ArrayError::Frozen { category: Category::Kv, requested: 40 })
    ));
    let graph = x.softmax(0).and_then(|y| y.cumsum(0, false, false)).expect("an axis");
    assert!(matches!(graph.eval(), Err(ArrayError::Frozen { category: Category::Activations, .. })));
    runtime.ledger().thaw();
    graph.eval().expect("the arena may grow again");
}

#[test]
fn the_same_graph_is_compiled_once() {
    let runtime = runtime();
    let x = counting(&runtime, &[33]);
    let run = |n: usize| {
        let x = x.slice(&[0], &[n]).expect("within the array");
        x.exp().and_then(|y| y.sum(0)).and_then(|y| y.to_vec::<f32>()).expect("a graph runs")
    };
    run(20);
    let misses = runtime.program_cache().misses;
    let first = run(20);
    let cache = runtime.program_cache();
    assert_eq!(cache.misses, misses, "nothing new to compile");
    assert!(cache.hits >= 1 && cache.bytes > 0);
    assert_eq!(run(20), first);
    run(21);
    assert_eq!(runtime.program_cache().misses, misses + 1, "another shape is another program");
}

#[test]
fn the_program_cache_is_bounded_in_bytes() {
    let limit = 20_000;
    let runtime = runtime_with(RuntimeOptions { program_cache_bytes: limit, ..RuntimeOptions::default() });
    for n in 1..200 {
        let x = Array::full(&runtime, [n], DType::F32, 1.0).expect("an addressable shape");
        assert_eq!(x.sum(0).and_then(|y| y.to_vec::<f32>()).expect("a graph runs"), [n as f32]);
        assert!(runtime.program_cache().bytes <= limit);
    }
    runtime.clear_cache();
    assert_eq!(runtime.program_cache().bytes, 0);
}
