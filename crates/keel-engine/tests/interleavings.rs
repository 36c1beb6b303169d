//! Every order in which work can be handed to a thread that may end at any time. The file under test is the crate's
//! own, compiled with a channel of loom's types, so no special build is needed. loom ends a test in which all threads
//! wait.

#[path = "../src/device_thread/work_channel.rs"]
#[allow(dead_code)]
mod work_channel;

/// The channel of the standard library as its documentation describes it: values are received in the order in which
/// they were sent. A receiver that ends drops the values that it has not received. Time passes between any two steps.
mod sync {
    use std::collections::VecDeque;
    use std::time::Duration;

    use loom::sync::{Arc, Condvar, Mutex};

    pub(crate) use std::sync::mpsc::{RecvError, RecvTimeoutError, SendError};

    struct State<T> {
        queue: VecDeque<T>,
        has_sender: bool,
        has_receiver: bool,
    }

    type Shared<T> = Arc<(Mutex<State<T>>, Condvar)>;

    pub(crate) struct Sender<T>(Shared<T>);
    pub(crate) struct Receiver<T>(Shared<T>);

    pub(crate) fn channel<T>() -> (Sender<T>, Receiver<T>) {
        let state = State { queue: VecDeque::new(), has_sender: true, has_receiver: true };
        let shared = Arc::new((Mutex::new(state), Condvar::new()));
        (Sender(Arc::clone(&shared)), Receiver(shared))
    }

    impl<T> Sender<T> {
        pub fn send(&self, value: T) -> Result<(), SendError<T>> {
            let mut state = self.0.0.lock().expect("no thread panics");
            if !state.has_receiver {
                drop(state);
                return Err(SendError(value));
            }
            state.queue.push_back(value);
            self.0.1.notify_one();
            Ok(())
        }
    }

    impl<T> Receiver<T> {
        pub fn recv(&self) -> Result<T, RecvError> {
            let mut state = self.0.0.lock().expect("no thread panics");
            loop {
                match state.queue.pop_front() {
                    Some(value) => return Ok(value),
                    None if !state.has_sender => return Err(RecvError),
                    None => state = self.0.1.wait(state).expect("no thread panics"),
                }
            }
        }

        pub fn recv_timeout(&self, _patience: Duration) -> Result<T, RecvTimeoutError> {
            let mut state = self.0.0.lock().expect("no thread panics");
            match state.queue.pop_front() {
                Some(value) => Ok(value),
                None if !state.has_sender => Err(RecvTimeoutError::Disconnected),
                None => Err(RecvTimeoutError::Timeout),
            }
        }
    }

    impl<T> Drop for Sender<T> {
        fn drop(&mut self) {
            self.0.0.lock().expect("no thread panics").has_sender = false;
            self.0.1.notify_one();
        }
    }

    impl<T> Drop for Receiver<T> {
        fn drop(&mut self) {
            let mut state = self.0.0.lock().expect("no thread panics");
            state.has_receiver = false;
            let rest = std::mem::take(&mut state.queue);
            drop(state);
            drop(rest);
        }
    }
}

use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use work_channel::{Disconnected, line};

/// The other devices of a group. loom reports it if two threads touch them at once, or in no order.
type Others = Arc<UnsafeCell<()>>;

/// Tells the other devices when it is dropped, as the membership of a job does.
struct Guard(Others);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.with_mut(|_| ());
    }
}

#[test]
fn a_job_is_lost_after_the_other_devices_were_told() {
    loom::model(|| {
        let others = Others::new(UnsafeCell::new(()));
        let (jobs, inbox) = line::<Guard, u32, u32>();
        let device = thread::spawn(move || drop(inbox));
        let running = jobs.hand(Guard(Arc::clone(&others)), 1);
        assert_eq!(running.wait(), Err(Disconnected));
        // The group is made ready again.
        others.with_mut(|_| ());
        device.join().expect("it ends");
    });
}

#[test]
fn a_thread_that_ends_after_its_first_job_loses_the_second() {
    loom::model(|| {
        let others = Others::new(UnsafeCell::new(()));
        let (jobs, inbox) = line::<Guard, u32, u32>();
        let device = thread::spawn(move || {
            if let Some(handed) = inbox.next() {
                handed.run(|guard, job| {
                    drop(guard);
                    job + 10
                });
            }
        });
        let first = jobs.hand(Guard(Arc::clone(&others)), 1);
        assert_eq!(first.wait(), Ok(11));
        others.with_mut(|_| ());
        let second = jobs.hand(Guard(Arc::clone(&others)), 2);
        let lost = loop {
            match second.wait_for(Duration::ZERO) {
                Ok(None) => thread::yield_now(),
                end => break end,
            }
        };
        assert_eq!(lost, Err(Disconnected));
        others.with_mut(|_| ());
        device.join().expect("it ends");
    });
}

/// A device does all jobs that it was handed, in order, also without a waiter for their ends, and then ends.
#[test]
fn jobs_are_done_in_order_and_the_thread_ends_after_the_last() {
    loom::model(|| {
        let (jobs, inbox) = line::<(), u32, u32>();
        let device = thread::spawn(move || {
            let mut done = Vec::new();
            while let Some(handed) = inbox.next() {
                handed.run(|(), job| {
                    done.push(job);
                    job + 10
                });
            }
            done
        });
        drop(jobs.hand((), 1));
        let second = jobs.hand((), 2);
        drop(jobs);
        assert_eq!(second.wait(), Ok(12));
        assert_eq!(device.join().expect("it ends"), [1, 2]);
    });
}
