//! Every order in which threads can take turns at a device, and wait for work. The files under test are the crate's
//! own, compiled with loom's types, so no special build is needed.

#[path = "../src/runtime/fence.rs"]
#[allow(dead_code)]
mod fence;

#[path = "../src/runtime/device_lock.rs"]
#[allow(dead_code)]
mod device_lock;

mod sync {
    pub(crate) use loom::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};
}

use device_lock::DeviceLock;
use fence::Fence;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

/// The protected value stands for the arena. loom reports two threads in it at once.
struct Device {
    turns: DeviceLock,
    arena: UnsafeCell<usize>,
    /// Pieces of the queued work that have run.
    done: AtomicUsize,
}

impl Device {
    fn new() -> Arc<Device> {
        let (turns, arena) = (DeviceLock::new(), UnsafeCell::new(0));
        Arc::new(Device { turns, arena, done: AtomicUsize::new(0) })
    }

    fn touch(&self) {
        // The turn of the caller makes this exclusive, which loom checks.
        self.arena.with_mut(|_| ());
    }

    /// The stream's thread, with work of two pieces.
    fn serve_two_pieces(&self) {
        for _ in 0..2 {
            self.turns.take(|| {
                self.touch();
                self.done.fetch_add(1, Ordering::Relaxed);
            });
        }
    }

    fn is_between_pieces(&self) -> bool {
        self.done.load(Ordering::Relaxed) == 1
    }
}

#[test]
fn nobody_has_the_device_between_two_pieces_of_one_work() {
    loom::model(|| {
        let device = Device::new();
        let (other, served) = (Arc::clone(&device), Arc::clone(&device));
        let exclusive = thread::spawn(move || {
            let _turn = other.turns.exclusive();
            other.touch();
            assert!(!other.is_between_pieces());
        });
        device.turns.announce(2);
        let stream = thread::spawn(move || served.serve_two_pieces());
        exclusive.join().expect("it ends");
        stream.join().expect("it ends");
        assert!(device.turns.now().is_some(), "nothing is queued at the end");
    });
}

#[test]
fn work_that_runs_at_once_runs_before_or_after_queued_work() {
    loom::model(|| {
        let device = Device::new();
        let other = Arc::clone(&device);
        let at_once = thread::spawn(move || {
            if let Some(_turn) = other.turns.now() {
                other.touch();
                assert!(!other.is_between_pieces());
            }
        });
        device.turns.announce(2);
        device.serve_two_pieces();
        device.turns.synchronize();
        at_once.join().expect("it ends");
    });
}

#[test]
fn a_piece_that_does_not_come_lets_waiting_threads_go_on() {
    loom::model(|| {
        let device = Device::new();
        device.turns.announce(1);
        let other = Arc::clone(&device);
        let waits = thread::spawn(move || other.turns.synchronize());
        device.turns.pass();
        waits.join().expect("it ends");
    });
}

#[test]
fn nothing_rests_between_two_pieces_of_a_run() {
    loom::model(|| {
        let device = Device::new();
        let other = Arc::clone(&device);
        let rests = thread::spawn(move || {
            if let Some(_turn) = other.turns.at_rest() {
                other.touch();
                assert!(!other.is_between_pieces(), "the arena holds intermediates");
            }
        });
        device.turns.begin_run();
        for _ in 0..2 {
            let _turn = device.turns.exclusive();
            device.touch();
            device.done.fetch_add(1, Ordering::Relaxed);
        }
        device.turns.end_run();
        rests.join().expect("it ends");
        assert!(device.turns.at_rest().is_some(), "no run is under way at the end");
    });
}

/// Work passes its fence after it has freed its memory. A thread that waits for the fence then finds that memory free.
#[test]
fn whoever_waits_for_work_hears_of_its_end_and_finds_its_memory_free() {
    loom::model(|| {
        let (fence, memory) = (Fence::default(), Arc::new(UnsafeCell::new(0)));
        let (passed, used) = (fence.clone(), Arc::clone(&memory));
        let works = thread::spawn(move || {
            used.with_mut(|_| ());
            drop(used);
            passed.pass(7);
            passed.pass(8);
        });
        let (other, also) = (fence.clone(), Arc::clone(&memory));
        let waits = thread::spawn(move || {
            assert_eq!(other.outcome(), 7, "the first outcome stays");
            also.with(|_| ());
        });
        assert_eq!(fence.outcome(), 7);
        memory.with(|_| ());
        waits.join().expect("it hears of the end");
        works.join().expect("it ends");
        assert_eq!(fence.outcome_so_far(), Some(7));
    });
}
