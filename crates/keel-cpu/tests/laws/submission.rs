//! Order and errors of submissions.

use super::watched::Watched;
use super::{active, backend, counting, runtime, runtime_with, while_resting};
use keel_array::{
    Array, Backend, Category, Compute, DType, DeviceMemory, Runtime, RuntimeOptions, Weight, WeightFormat,
    WeightSpec,
};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
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
        let evaluates = AssertUnwindSafe(|| alone.eval());
        assert!(catch_unwind(evaluates).is_err(), "it goes on to the caller");
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
    while_resting(&runtime, || {
        for round in 0..300 {
            let x = Array::full(&runtime, [n], DType::F32, 1.0).expect("an addressable shape");
            let y = (0..6).try_fold(x, |x, i| x.cumsum(0, i % 2 == 1, false)?.sigmoid());
            let y = y.and_then(|y| y.max(0)).expect("an axis");
            runtime.async_eval(&[&y]).expect("the graph is submitted");
            let most = y.to_vec::<f32>().expect("it runs")[0];
            assert_eq!(most, 1.0, "round {round}: an intermediate was lost");
        }
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

/// One thread's evaluation may overwrite an operand in place, which another one must not read then.
#[test]
fn threads_may_evaluate_the_same_array() {
    let runtime = runtime();
    for round in 0..300 {
        let x = counting(&runtime, &[1 << 12]);
        let y = x.mul(&x).expect("floats");
        drop(x);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let values = y.to_vec::<f32>().expect("a graph runs");
                    let is_square = |(i, y): (usize, f32)| y == (i * i) as f32;
                    assert!(values.into_iter().enumerate().all(is_square), "round {round}");
                });
            }
        });
    }
}

/// The pieces of a run that is not waited for are in the backend's queue before another thread's work.
#[test]
fn nothing_runs_between_two_pieces_of_a_submitted_run() {
    let runtime = runtime_with(RuntimeOptions { submission_ops: 1, ..RuntimeOptions::default() });
    let n = 1 << 10;
    let (x, out) = (counting(&runtime, &[n]), counting(&runtime, &[1]));
    let run = runtime.trace(|| {
        let y = (0..5).try_fold(x.clone(), |x, i| x.cumsum(0, i % 2 == 1, false)?.sigmoid());
        let most = y.and_then(|y| y.max(0)).and_then(|y| y.reshape([1])).expect("an axis");
        runtime.prepare(&[(&most, &out)]).expect("the arena fits")
    });
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                let other =
                    Array::full(&runtime, [n], DType::F32, -5.0).and_then(|x| x.cumsum(0, false, false));
                let other = other.and_then(|x| x.sigmoid()).and_then(|x| x.max(0)).expect("an axis");
                other.eval().expect("a graph runs");
            }
        });
        let mut results = (0..300).map(|_| {
            let mut bytes = [0; 4];
            run.submit(&out).wait(&mut bytes).expect("it runs");
            f32::from_le_bytes(bytes)
        });
        let wrong = results.position(|most| most != 1.0);
        done.store(true, Ordering::Release);
        assert_eq!(wrong, None, "an intermediate was lost in this round");
    });
}

/// A backend that says it queues, and counts allocations.
#[derive(Default)]
struct Queueing {
    lasting: AtomicUsize,
    others: AtomicUsize,
}

impl Interceptor for Queueing {
    fn is_queueing(&self) -> bool {
        true
    }

    fn allocate(&self, backend: &dyn Backend, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.others.fetch_add(1, Ordering::Relaxed);
        backend.allocate(bytes)
    }

    fn allocate_lasting(&self, backend: &dyn Backend, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.lasting.fetch_add(1, Ordering::Relaxed);
        backend.allocate_lasting(bytes)
    }
}

/// The double of a queue runs launches at once. It must still find a host that reads too early.
#[test]
fn what_a_launch_under_way_writes_is_not_settled() {
    let backend = InterceptedBackend::new(Arc::new(backend()), Arc::new(Queueing::default()));
    let runtime = Runtime::new(backend, RuntimeOptions::default());
    let [x, out, other] = [8; 3].map(|n| counting(&runtime, &[n]));
    let run =
        runtime.trace(|| runtime.prepare(&[(&x.neg().expect("floats"), &out)]).expect("the arena fits"));
    let read = |array: &Array| {
        let mut bytes = [0; 4];
        array.read_settled_bytes(28, &mut bytes).expect("the backend reads");
        f32::from_le_bytes(bytes)
    };
    let pending = run.submit(&out);
    assert_eq!(read(&other), 7.0);
    let early =
        catch_unwind(AssertUnwindSafe(|| read(&out))).expect_err("the launch has not been waited for");
    let message = early.downcast_ref::<String>().expect("a message");
    assert!(message.contains("bytes 28..32 are read as settled"), "{message}");
    pending.wait(&mut [0; 32]).expect("it runs");
    assert_eq!(read(&out), -7.0);
}

/// Where a backend places weights is its own affair, also when a test watches it.
#[test]
fn weights_of_a_watched_backend_lie_where_its_own_do() {
    let watch = Arc::new(Queueing::default());
    let runtime = Runtime::new(
        InterceptedBackend::new(Arc::new(backend()), Arc::clone(&watch)),
        RuntimeOptions::default(),
    );
    let format = WeightFormat::Dense(DType::F32);
    let spec = WeightSpec { experts: 1, rows: 4, cols: 8, format, compute: Compute::F32 };
    let weight = Weight::allocate(&runtime, spec).expect("there is memory");
    let counts = || [&watch.lasting, &watch.others].map(|count| count.load(Ordering::Relaxed));
    assert_eq!(counts(), [1, 0]);
    drop(weight);
}

/// A prepared run does not ask again whether the arrays that it reads were ever computed.
#[test]
fn what_could_not_be_evaluated_is_not_prepared() {
    let runtime = runtime();
    let x = counting(&runtime, &[4, 3]);
    let failed = x.take(&Array::from_slice(&runtime, &[9u32, 1], [2]).expect("memory")).expect("indices");
    runtime.async_eval(&[&failed]).expect("the index is found when it runs");
    let out = counting(&runtime, &[2, 3]);
    let prepare = |value: Array, to: &Array| runtime.prepare(&[(&value, to)]).map(drop);
    for outcome in [
        runtime.trace(|| prepare(failed.exp().expect("floats"), &out)),
        runtime.trace(|| prepare(out.exp().expect("floats"), &failed)),
    ] {
        let error = outcome.expect_err("an operand has no value").to_string();
        assert!(error.contains("take: index 9 is out of range for 4"), "{error}");
    }
}

/// A block without elements may begin beyond the last element.
#[test]
fn blocks_without_elements_are_evaluated() {
    let runtime = runtime();
    let x = counting(&runtime, &[3, 4]);
    let computed = x.neg().expect("floats");
    for x in [&x, &computed] {
        let corner = x.slice(&[3, 2], &[3, 4]).expect("within the array");
        let twice = x.slice_axis(0, 3, 3).and_then(|x| x.slice_axis(1, 2, 4)).expect("within the array");
        for empty in [corner, twice] {
            assert!(empty.to_vec::<f32>().expect("a graph runs").is_empty());
            assert!(empty.exp().and_then(|x| x.to_vec::<f32>()).expect("a graph runs").is_empty());
        }
    }
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
