//! The persistent thread pool that walks a prepared list of kernels.
//!
//! All workers run the same closure at once and meet at [`Worker::barrier`] between kernels. A step of several hundred
//! kernels therefore costs one wake-up and one barrier per kernel (well under a microsecond each while the workers
//! spin). Waiting workers spin briefly, then yield, then sleep, see `sync::Patience`.

mod meeting;

use crate::isa::Isa;
use crate::sync::{Arc, Mutex};
use meeting::{COUNT_BITS, Meeting};
use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread::JoinHandle;

/// The closure of the current job, with its lifetime erased.
#[derive(Clone, Copy)]
struct Job {
    run: *const (dyn Fn(&Worker<'_>) + Sync + 'static),
}
// SAFETY: the pointee is Sync, and `ThreadPool::run` keeps it alive until every worker has finished with it.
unsafe impl Send for Job {}

/// One thread's view of the job that its pool runs.
pub struct Worker<'a> {
    /// 0-based index of this thread.
    pub index: usize,
    /// Threads that take part.
    pub count: usize,
    /// Instructions that kernels use.
    pub isa: Isa,
    meeting: &'a Meeting<Job>,
}

impl Worker<'_> {
    /// Waits until all workers are here. Everything written before the barrier is visible to all of them after it.
    #[inline]
    pub fn barrier(&self) {
        if !self.meeting.barrier() {
            leave_job();
        }
    }

    /// This worker's fixed share of `0..total`, cut at multiples of `grain`.
    pub fn split(&self, total: usize, grain: usize) -> Range<usize> {
        self.share_of(self.index, total, grain)
    }

    fn share_of(&self, index: usize, total: usize, grain: usize) -> Range<usize> {
        let grains = total.div_ceil(grain);
        let start = grains * index / self.count * grain;
        let end = grains * (index + 1) / self.count * grain;
        start.min(total)..end.min(total)
    }

    /// Pieces of `0..total` of `grain` units, first come, first served. At most one such loop may run between two
    /// barriers: all loops share one cursor, which the barrier resets.
    pub fn claim(&self, total: usize, grain: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        std::iter::from_fn(move || {
            let start = self.meeting.claim(grain);
            (start < total).then(|| start..(start + grain).min(total))
        })
    }

    /// Pieces of `0..total`, each of one unit unless there are more units than the counts can hold. First come the
    /// pieces of this worker's share ([`Worker::split`]) in order, so that it reads one stream. Then come the units
    /// left in the shares of other workers, from the back. As with [`Worker::claim`], every worker makes the call, once
    /// between two barriers.
    pub fn claim_near(&self, total: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        let phase = self.meeting.phase();
        let grain = total.div_ceil(self.count << (COUNT_BITS - 1)).max(1);
        let mut visited = 0;
        std::iter::from_fn(move || {
            while visited < self.count {
                let owner = (self.index + visited) % self.count;
                let share = self.share_of(owner, total, grain);
                let taken = self.meeting.take(owner, phase, share.len().div_ceil(grain), visited > 0);
                if let Some(i) = taken {
                    let start = share.start + i * grain;
                    return Some(start..(start + grain).min(share.end));
                }
                visited += 1;
            }
            None
        })
    }
}

/// The payload with which a worker leaves a job because another worker has panicked.
struct OtherPanicked;

/// Ends this worker's part of a job in which another worker has panicked. Nothing is printed: the pool raises the panic
/// of the other worker.
#[cold]
fn leave_job() -> ! {
    resume_unwind(Box::new(OtherPanicked))
}

/// The first panic of the current job.
type FirstPanic = Mutex<Option<Box<dyn Any + Send>>>;

/// A fixed set of threads; the caller of [`ThreadPool::run`] is one of them.
pub struct ThreadPool {
    meeting: Arc<Meeting<Job>>,
    panic: Arc<FirstPanic>,
    isa: Isa,
    threads: Vec<JoinHandle<()>>,
    /// One job at a time.
    running: Mutex<()>,
}

impl ThreadPool {
    /// A pool of `workers` threads in total (at least one), including the caller of `run`, with the best instructions
    /// of this machine. If the system refuses one of them, the caller is the only worker.
    pub fn new(workers: usize) -> ThreadPool {
        ThreadPool::at(workers, Isa::best())
    }

    /// Like [`ThreadPool::new`], with the instructions of `isa`, or the machine's best if that is lower.
    pub fn at(workers: usize, isa: Isa) -> ThreadPool {
        let (workers, isa) = (workers.max(1), isa.min(Isa::best()));
        let meeting = Arc::new(Meeting::new(workers));
        let panic = Arc::new(FirstPanic::new(None));
        let mut pool = ThreadPool { meeting, panic, isa, threads: Vec::new(), running: Mutex::new(()) };
        for index in 1..workers {
            let (meeting, panic) = (Arc::clone(&pool.meeting), Arc::clone(&pool.panic));
            let thread = std::thread::Builder::new()
                .name(format!("keel-cpu-{index}"))
                .spawn(move || serve(&Worker { index, count: workers, isa, meeting: &meeting }, &panic));
            match thread {
                Ok(thread) => pool.threads.push(thread),
                Err(_) => {
                    // Ends the threads that have started. The program needs their memory to report the refusal.
                    drop(pool);
                    return ThreadPool::at(1, isa);
                }
            }
        }
        pool
    }

    /// Instructions that the workers use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads that take part in a job, the caller included.
    pub fn workers(&self) -> usize {
        self.meeting.workers()
    }

    /// Runs `job` once on every worker and returns when all have finished.
    ///
    /// # Panics
    /// If the job panics on any worker: with the first worker's panic. The pool stays usable.
    pub fn run<F: Fn(&Worker<'_>) + Sync>(&self, job: F) {
        let _one_at_a_time = self.running.lock().unwrap_or_else(|e| e.into_inner());
        let job: &(dyn Fn(&Worker<'_>) + Sync) = &job;
        // SAFETY: only the lifetime changes. Workers use the pointer only until all have counted themselves finished,
        // below. `job` is alive until then, and the pointer is removed from the slot before this function returns.
        let run: *const (dyn Fn(&Worker<'_>) + Sync + 'static) = unsafe { std::mem::transmute(job) };
        let meeting = &*self.meeting;
        meeting.begin(Job { run });
        let worker = Worker { index: 0, count: meeting.workers(), isa: self.isa, meeting };
        run_guarded(&worker, Job { run }, &self.panic);
        meeting.end();
        if meeting.is_poisoned() {
            let panic = self.panic.lock().unwrap_or_else(|e| e.into_inner()).take();
            resume_unwind(panic.expect("a worker keeps its panic before it poisons the meeting"));
        }
    }
}

/// Runs the job. A panic is recorded where the barrier sees it, so that no other worker waits for this one, and kept if
/// it is the job's first.
fn run_guarded(worker: &Worker<'_>, job: Job, first: &FirstPanic) {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: `ThreadPool::run` keeps the closure alive until every worker has counted itself finished.
        unsafe { (*job.run)(worker) }
    }));
    // A worker that leaves for another's panic comes after that one, and has nothing to report.
    if let Err(panic) = outcome
        && !panic.is::<OtherPanicked>()
    {
        first.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(panic);
        worker.meeting.poison();
    }
}

/// The life of a helper thread: wait for a job, run it, count itself finished.
fn serve(worker: &Worker<'_>, first: &FirstPanic) {
    let mut seen = 0;
    while let Some((generation, job)) = worker.meeting.next_job(seen) {
        seen = generation;
        run_guarded(worker, job, first);
        worker.meeting.finish();
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.meeting.close();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn every_unit_is_claimed_once_in_every_phase() {
        for workers in [1, 2, 3] {
            let pool = ThreadPool::new(workers);
            let counts: Vec<AtomicUsize> = (0..1001).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..50 {
                pool.run(|worker| {
                    for _ in 0..10 {
                        for unit in worker.claim(counts.len(), 7).flatten() {
                            counts[unit].fetch_add(1, Ordering::Relaxed);
                        }
                        worker.barrier();
                    }
                });
            }
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 500));
        }
    }

    #[test]
    fn every_unit_is_claimed_once_whoever_is_slow() {
        for (workers, slow) in [(1, 0), (2, 0), (2, 1), (3, 1)] {
            let pool = ThreadPool::new(workers);
            for total in [0, 1, 2, 3, 101] {
                let counts: Vec<AtomicUsize> = (0..total).map(|_| AtomicUsize::new(0)).collect();
                for job in 0..10 {
                    pool.run(|worker| {
                        for phase in 0..3 {
                            let mut own = worker.split(total, 1);
                            let mut stolen = false;
                            for unit in worker.claim_near(total).flatten() {
                                counts[unit].fetch_add(1, Ordering::Relaxed);
                                stolen |= !worker.split(total, 1).contains(&unit);
                                assert!(stolen || own.next() == Some(unit), "a share is walked in order");
                                if worker.index == slow && (job + phase) % 2 == 0 {
                                    std::thread::yield_now();
                                }
                            }
                            // A job may end without a barrier; the next job then starts in the same phase.
                            if phase < 2 {
                                worker.barrier();
                            }
                        }
                    });
                }
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 30), "{total}: {counts:?}");
            }
        }
    }

    #[test]
    fn more_units_than_can_be_counted_are_claimed_in_pieces() {
        let (total, pool) = ((3 << COUNT_BITS) + 5, ThreadPool::new(2));
        let claimed = AtomicUsize::new(0);
        pool.run(|worker| {
            let units: usize = worker.claim_near(total).map(|piece| piece.len()).sum();
            claimed.fetch_add(units, Ordering::Relaxed);
        });
        assert_eq!(claimed.into_inner(), total);
    }

    #[test]
    fn fixed_shares_cover_the_whole_range_without_overlap() {
        let pool = ThreadPool::new(3);
        let shares = Mutex::new(Vec::new());
        pool.run(|worker| shares.lock().unwrap().push(worker.split(1000, 64)));
        let mut shares = shares.into_inner().unwrap();
        shares.sort_by_key(|r| r.start);
        assert_eq!((shares[0].start, shares[2].end), (0, 1000));
        assert!(shares.windows(2).all(|w| w[0].end == w[1].start && w[0].end % 64 == 0));
    }

    #[test]
    fn a_panicking_job_is_raised_and_the_pool_stays_usable() {
        let pool = ThreadPool::new(2);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.run(|worker| {
                assert!(worker.index != 1, "planted");
                worker.barrier();
            });
        }));
        let panic = result.expect_err("a worker panicked");
        assert_eq!(keel_array::panic_message(&*panic), "planted", "not that another worker panicked");
        let ran = AtomicUsize::new(0);
        pool.run(|_| {
            ran.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(ran.load(Ordering::Relaxed), 2);
    }
}
