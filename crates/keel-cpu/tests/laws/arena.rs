//! The arena: as large as the largest program needs. Where the backend can grow it, its address never changes.

use super::{active, backend, counting, runtime, while_resting};
use keel_array::{Array, ArrayError, Backend, Category, DType, DeviceMemory, Executable, Launch, Result};
use keel_array::{Runtime, RuntimeOptions};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Bytes reserved from the start, for growth.
const RESERVED: usize = 1 << 20;

/// Grows the arena in place, and records its address.
#[derive(Default)]
struct Growing {
    stuck: AtomicBool,
    broken: AtomicBool,
    allocated: AtomicUsize,
    grown: AtomicUsize,
    /// Address of the arena at the last launch.
    arena: AtomicUsize,
}

impl Interceptor for Growing {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<()> {
        let arena = std::ptr::from_ref(launch.arena().memory()).addr();
        self.arena.store(arena, Ordering::Relaxed);
        backend.launch(launch)
    }

    fn allocate_arena(&self, backend: &dyn Backend, _: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.allocated.fetch_add(1, Ordering::Relaxed);
        backend.allocate(RESERVED)
    }

    fn grow_arena(&self, _: &dyn Backend, _: &dyn DeviceMemory, bytes: usize) -> Result<bool, String> {
        assert!(bytes <= RESERVED);
        if self.broken.load(Ordering::Relaxed) {
            return Err("no more".into());
        }
        let grows = !self.stuck.load(Ordering::Relaxed);
        self.grown.fetch_add(grows.into(), Ordering::Relaxed);
        Ok(grows)
    }
}

fn growing() -> (Arc<Growing>, Runtime) {
    let growing = Arc::new(Growing::default());
    let backend = InterceptedBackend::new(Arc::new(backend()), Arc::clone(&growing));
    (growing, Runtime::new(backend, RuntimeOptions::default()))
}

/// Row sums of the softmax of `[7, n]` numbers, with that softmax in the arena.
fn prepare(runtime: &Runtime, n: usize) -> Result<(Executable, Array)> {
    let place = Array::persistent(runtime, Category::Staging, [7], DType::F32)?;
    let x = counting(runtime, &[7, n]);
    let sums = x.softmax(1)?.cumsum(1, false, false)?.sum(1)?;
    Ok((runtime.prepare(&[(&sums, &place)])?, place))
}

fn arena_bytes(runtime: &Runtime) -> u64 {
    runtime.ledger().active().get(Category::Activations)
}

#[test]
fn a_growing_arena_stays_where_it_is_and_is_charged_for_what_it_has() {
    let (growing, runtime) = growing();
    let (first, sums) = prepare(&runtime, 33).expect("a program");
    assert_eq!(arena_bytes(&runtime), first.program().arena_bytes() as u64);
    first.run().expect("it runs");
    let (place, bits) = (growing.arena.load(Ordering::Relaxed), sums.to_vec::<f32>().expect("in memory"));

    let (second, _) = prepare(&runtime, 1025).expect("a program");
    assert_eq!(arena_bytes(&runtime), second.program().arena_bytes() as u64);
    assert!(second.program().arena_bytes() > first.program().arena_bytes());
    let charges = runtime.ledger().charges();
    second.run().expect("it runs");
    first.run().expect("it runs in a larger arena, too");
    assert_eq!(growing.arena.load(Ordering::Relaxed), place);
    assert_eq!(sums.to_vec::<f32>().expect("in memory"), bits);
    let counts = [&growing.allocated, &growing.grown].map(|count| count.load(Ordering::Relaxed));
    assert_eq!((counts, runtime.ledger().charges()), ([1, 1], charges), "grown once, when it was prepared");

    drop((first, sums, second));
    runtime.clear_cache();
    assert_eq!(active(&runtime), 0);
}

#[test]
fn an_arena_that_cannot_grow_is_given_back_before_a_larger_one_is_taken() {
    let (growing, runtime) = growing();
    growing.stuck.store(true, Ordering::Relaxed);
    let (first, _) = prepare(&runtime, 33).expect("a program");
    let (second, _) = prepare(&runtime, 1025).expect("a program");
    assert_eq!(arena_bytes(&runtime), second.program().arena_bytes() as u64);
    assert_eq!(runtime.ledger().peak().get(Category::Activations), arena_bytes(&runtime));
    assert_eq!([&growing.allocated, &growing.grown].map(|count| count.load(Ordering::Relaxed)), [2, 0]);
    first.run().expect("it runs in a larger arena, too");
}

#[test]
fn an_arena_that_may_not_grow_stays_as_it_was() {
    let (growing, runtime) = growing();
    let (first, _) = prepare(&runtime, 33).expect("a program");
    let before = runtime.ledger().active();
    let refused = |why: &str| {
        let error = prepare(&runtime, 1025).err().expect("it is refused").to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(runtime.ledger().active(), before);
        first.run().expect("what fits still runs");
    };
    growing.broken.store(true, Ordering::Relaxed);
    refused("no more");
    growing.broken.store(false, Ordering::Relaxed);
    runtime.ledger().set_limit(Some(before.total() + 7 * 4 * (1025 + 1) + 1));
    refused("limit");
    runtime.ledger().set_limit(None);
    prepare(&runtime, 1025).expect("it may grow now");
    assert!(matches!(
        error_when_frozen(&runtime),
        ArrayError::Frozen { category: Category::Activations, .. }
    ));
}

/// The memory is poisoned meanwhile.
#[test]
fn nothing_reads_what_the_arena_held_before_a_rest() {
    let (_, runtime) = growing();
    runtime.release_idle_memory();
    let (step, sums) = prepare(&runtime, 1025).expect("a program");
    step.run().expect("it runs");
    let (bits, active) = (sums.to_vec::<f32>().expect("in memory"), runtime.ledger().active());
    for _ in 0..3 {
        runtime.release_idle_memory();
        step.run().expect("it runs");
        assert_eq!(sums.to_vec::<f32>().expect("in memory"), bits);
    }
    assert_eq!(runtime.ledger().active(), active, "it stays allocated");
}

/// Another thread gives idle memory back while the arena is replaced.
struct RestMeanwhile {
    replacing: Sender<()>,
    rested: Mutex<Receiver<()>>,
}

impl Interceptor for RestMeanwhile {
    fn allocate_arena(&self, backend: &dyn Backend, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.replacing.send(()).map_err(|error| error.to_string())?;
        let rested = self.rested.lock().expect("no panic").recv_timeout(Duration::from_secs(60));
        rested.map_err(|_| "a rest waits for the arena".to_string())?;
        backend.allocate(bytes)
    }
}

/// The rest has the device, and the replacement of an arena may wait for the device.
#[test]
fn a_rest_does_not_wait_for_an_arena_that_is_being_replaced() {
    let ((replacing, asked), (done, rested)) = (channel(), channel());
    let meanwhile = Arc::new(RestMeanwhile { replacing, rested: Mutex::new(rested) });
    let runtime =
        Runtime::new(InterceptedBackend::new(Arc::new(backend()), meanwhile), RuntimeOptions::default());
    let resting = runtime.clone();
    std::thread::spawn(move || {
        asked.iter().take(2).for_each(|()| {
            resting.release_idle_memory();
            let _ = done.send(());
        });
    });
    for n in [33, 1025] {
        let (program, _) = prepare(&runtime, n).expect("the arena is replaced");
        program.run().expect("it runs");
    }
}

/// An arena that is replaced waits until nothing is queued, and a rest keeps queued launches from running.
#[test]
fn a_rest_and_a_larger_arena_do_not_wait_for_each_other() {
    let (done, ended) = channel();
    std::thread::spawn(move || {
        let runtime = runtime();
        let sums = |count: usize| {
            let x = counting(&runtime, &[7, count]);
            x.softmax(1).and_then(|y| y.cumsum(1, false, false)).and_then(|y| y.sum(1)).expect("an axis")
        };
        while_resting(&runtime, || {
            for round in 0..300 {
                let queued = sums(33);
                runtime.async_eval(&[&queued]).expect("there is memory");
                runtime.eval(&[&sums(1024 + 512 * round)]).expect("there is memory");
            }
        });
        done.send(()).expect("the test waits");
    });
    ended.recv_timeout(Duration::from_secs(120)).expect("nobody waits without end");
}

/// The error of a program for which the arena would have to grow past the plan.
fn error_when_frozen(runtime: &Runtime) -> ArrayError {
    let place = Array::persistent(runtime, Category::Staging, [7], DType::F32).expect("memory");
    let x = counting(runtime, &[7, 4097]);
    let sums = x.softmax(1).and_then(|y| y.cumsum(1, false, false)).and_then(|y| y.sum(1)).expect("an axis");
    runtime.ledger().freeze();
    runtime.prepare(&[(&sums, &place)]).err().expect("the plan is complete")
}
