//! Order and errors of submissions.

use super::watched::Watched;
use super::{active, backend, counting, runtime, runtime_with};
use keel_array::{Array, Category, DType, Runtime, RuntimeOptions};
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Duration;

#[test]
fn submitted_work_runs_in_order_and_reading_waits_for_it() {
    let runtime = runtime_with(RuntimeOptions { submission_ops: 2, ..RuntimeOptions::default() });
    let mut x = counting(&runtime, &[256]);
    let mut all = Vec::new();
    for _ in 0..50 {
        x = x.cumsum(0, false, true).and_then(|y| y.sigmoid()).expect("an axis");
        runtime.async_eval(&[&x]).expect("the graph is submitted");
        assert!(x.is_evaluated(), "submitted, so without parents");
        all.push(x.clone());
    }
    let mut again = counting(&runtime, &[256]);
    for (i, x) in all.iter().enumerate() {
        again = again.cumsum(0, false, true).and_then(|y| y.sigmoid()).expect("an axis");
        let want = again.to_vec::<f32>().expect("a graph runs");
        assert_eq!(x.to_vec::<f32>().expect("it has been submitted"), want, "step {i}");
    }
}

#[test]
fn an_error_reaches_whoever_reads_and_what_depends_on_it_and_nobody_else() {
    let runtime = runtime();
    let x = counting(&runtime, &[4, 3]);
    let wrong = Array::from_slice(&runtime, &[1u32, 9], [2]).expect("there is memory");
    let taken = x.take(&wrong).expect("indices");
    runtime.async_eval(&[&taken]).expect("the index is found when it runs");
    let dependent = taken.exp().expect("floats");
    runtime.async_eval(&[&dependent]).expect("the graph is submitted");
    let other = x.neg().expect("floats");
    runtime.async_eval(&[&other]).expect("the graph is submitted");
    for array in [&taken, &dependent] {
        let error = array.to_vec::<f32>().expect_err("an index is out of range").to_string();
        assert!(error.contains("take: index 9 is out of range for 4"), "{error}");
    }
    assert_eq!(other.to_vec::<f32>().expect("it is not concerned")[5], -5.0);
    drop((taken, dependent, other, x, wrong));
    runtime.clear_cache();
    assert_eq!(active(&runtime), 0, "failed work gives its memory back");
}

/// A panic in the stream's thread must not leave anybody waiting, neither for the work nor for an empty queue.
#[test]
fn a_panic_in_queued_work_is_its_error_and_nobody_waits_for_it() {
    let (done, finished) = channel();
    std::thread::spawn(move || {
        let (watched, backend) = Watched::over(backend());
        let runtime =
            Runtime::new(backend, RuntimeOptions { submission_ops: 1, ..RuntimeOptions::default() });
        let x = counting(&runtime, &[3]);
        watched.panics.store(true, Ordering::Relaxed);
        // Two pieces: the second does not run.
        let lost = x.cumsum(0, false, true).and_then(|y| y.cumsum(0, true, false)).expect("an axis");
        runtime.async_eval(&[&lost]).expect("the graph is submitted");
        let error = lost.to_vec::<f32>().expect_err("the device panics").to_string();
        assert!(error.contains("panicked, which is a bug: planted"), "{error}");
        runtime.synchronize();
        runtime.release_idle_memory();
        let next = x.neg().expect("floats");
        runtime.async_eval(&[&next]).expect("the graph is submitted");
        assert_eq!(next.to_vec::<f32>().expect("the stream goes on"), [0.0, -1.0, -2.0]);
        // The same on this thread, which sees the panic itself.
        watched.panics.store(true, Ordering::Relaxed);
        let alone = x.exp().expect("floats");
        let evaluates = std::panic::AssertUnwindSafe(|| alone.eval());
        assert!(std::panic::catch_unwind(evaluates).is_err(), "it goes on to the caller");
        assert!(alone.to_vec::<f32>().expect_err("it has no value").to_string().contains("planted"));
        drop((x, lost, next, alone));
        runtime.clear_cache();
        let _ = done.send(active(&runtime));
    });
    assert_eq!(finished.recv_timeout(Duration::from_secs(60)), Ok(0), "somebody waits, or memory is lost");
}

/// Between two pieces of a thread's work, only the arena holds its intermediates. A thread that asks for the device
/// meanwhile waits for the last piece. Here another thread asks, to return the arena's pages to the system.
#[test]
fn nobody_gets_the_device_between_two_pieces_of_queued_work() {
    let runtime = runtime_with(RuntimeOptions { submission_ops: 1, ..RuntimeOptions::default() });
    // Large enough for whole pages.
    let n = 1 << 16;
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                runtime.release_idle_memory();
            }
        });
        for round in 0..300 {
            let x = Array::full(&runtime, [n], DType::F32, 1.0).expect("an addressable shape");
            let y = (0..6).try_fold(x, |x, i| x.cumsum(0, i % 2 == 1, false)?.sigmoid());
            let y = y.and_then(|y| y.max(0)).expect("an axis");
            runtime.async_eval(&[&y]).expect("the graph is submitted");
            let most = y.to_vec::<f32>().expect("it runs")[0];
            assert_eq!(most, 1.0, "round {round}: an intermediate was lost");
        }
        done.store(true, Ordering::Release);
    });
}

/// Threads share the runtime's arena: the pieces of one thread's work are not interleaved with another's.
#[test]
fn threads_may_evaluate_at_the_same_time() {
    let runtime = runtime_with(RuntimeOptions { submission_ops: 1, ..RuntimeOptions::default() });
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let runtime = &runtime;
            scope.spawn(move || {
                for round in 0..50 {
                    let n = 100 + 10 * thread;
                    let x = Array::full(runtime, [n], DType::F32, 1.0).expect("an addressable shape");
                    let y = x.cumsum(0, false, false).and_then(|y| y.cumsum(0, true, false));
                    let y = y.and_then(|y| y.max(0)).expect("an axis");
                    if round % 2 == 0 {
                        runtime.async_eval(&[&y]).expect("the graph is submitted");
                    }
                    let want = (n * (n + 1) / 2) as f32;
                    assert_eq!(
                        y.to_vec::<f32>().expect("a graph runs"),
                        [want],
                        "thread {thread}, round {round}"
                    );
                }
            });
        }
    });
}

#[test]
fn categories_add_up_and_give_everything_back() {
    let runtime = runtime();
    let kv = Array::persistent(&runtime, Category::Kv, [10, 7], DType::BF16).expect("there is memory");
    let user = counting(&runtime, &[11]);
    let report = runtime.ledger().active();
    assert_eq!((report.get(Category::Kv), report.get(Category::User), report.total()), (140, 44, 184));
    drop((kv, user));
    assert_eq!(active(&runtime), 0);
    assert_eq!(runtime.ledger().peak_total(), 184);
}
