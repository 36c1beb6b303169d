//! Backends that work while the host goes on.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use keel_array::sampling::Draw;
use keel_array::{ArrayError, Backend, Launch, Runtime, RuntimeOptions};
use keel_cache::SequenceCache;
use keel_cpu::{CpuBackend, CpuOptions};
use keel_cuda::{CudaBackend, CudaOptions, Determinism};
use keel_engine::{Engine, HostReads, Result, Ticket, Work, WorkRows};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor, injected};

/// A CPU backend that says it queues. It records launches and waits, and lets a launch or a read fail.
pub struct Queueing {
    /// `L` for a launch, `W` for a wait, `R` for a large read, `T` for a large write.
    pub events: Mutex<String>,
    /// How many launches succeed before one fails.
    pub until: AtomicUsize,
    /// Reads and writes of this many bytes or more are large.
    pub large_bytes: AtomicUsize,
    /// Whether large reads fail.
    pub breaks_large_reads: AtomicBool,
    /// Whether reads that do not wait for launches fail.
    pub breaks_settled_reads: AtomicBool,
}

impl Default for Queueing {
    /// Nothing fails.
    fn default() -> Queueing {
        Queueing {
            events: Mutex::default(),
            until: AtomicUsize::new(usize::MAX),
            large_bytes: AtomicUsize::new(usize::MAX),
            breaks_large_reads: AtomicBool::new(false),
            breaks_settled_reads: AtomicBool::new(false),
        }
    }
}

impl Queueing {
    fn note(&self, event: char) {
        self.events.lock().expect("nobody panics here").push(event);
    }

    pub fn take_events(&self) -> String {
        std::mem::take(&mut self.events.lock().expect("nobody panics here"))
    }
}

impl Interceptor for Queueing {
    fn is_queueing(&self) -> bool {
        true
    }

    fn note_wait(&self) {
        self.note('W');
    }

    fn before_write(&self, bytes: usize) {
        if bytes >= self.large_bytes.load(Ordering::Relaxed) {
            self.note('T');
        }
    }

    fn before_read(&self, bytes: usize, is_settled: bool) -> Result<(), ArrayError> {
        let is_large = bytes >= self.large_bytes.load(Ordering::Relaxed);
        if is_large {
            self.note('R');
        }
        let breaks_large = is_large && self.breaks_large_reads.load(Ordering::Relaxed);
        match breaks_large || is_settled && self.breaks_settled_reads.load(Ordering::Relaxed) {
            true => Err(injected("read")),
            false => Ok(()),
        }
    }

    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        self.note('L');
        let left = self.until.load(Ordering::Relaxed);
        self.until.store(left.saturating_sub(1), Ordering::Relaxed);
        if left > 0 {
            return backend.launch(launch);
        }
        self.until.store(usize::MAX, Ordering::Relaxed);
        launch.note_done(0);
        Err(injected("launch"))
    }
}

/// A runtime on the CPU whose programs are cut into pieces of `piece` kernels.
pub fn queueing(piece: usize) -> (Runtime, Arc<Queueing>) {
    let queueing = Arc::new(Queueing::default());
    let inner = CpuBackend::new(CpuOptions { threads: Some(2), poison_freed: true, ..CpuOptions::default() });
    let options = RuntimeOptions { submission_ops: piece, ..RuntimeOptions::default() };
    (Runtime::new(InterceptedBackend::new(Arc::new(inner), Arc::clone(&queueing)), options), queueing)
}

/// Gives the short list of a backend that compiles, and fills the arena with NaN before each program.
pub struct Poison {
    /// Whether the backend says that it queues.
    pub queues: bool,
}

impl Interceptor for Poison {
    fn is_queueing(&self) -> bool {
        self.queues
    }

    fn is_compiling(&self, _: &dyn Backend) -> bool {
        true
    }

    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        if launch.has_arena() && launch.prepared().is_some_and(|piece| piece.first_kernel == 0) {
            let arena = launch.arena();
            backend.write(arena.memory(), 0, &vec![0xff; arena.bytes()]);
        }
        backend.launch(launch)
    }
}

/// Kernels in a piece, for programs of more pieces than may be under way at a time.
const PIECE: usize = 16;

/// New queueing runtimes whose programs run in one piece and in many. The same on a GPU if there is one to test.
pub fn runtimes() -> Vec<Runtime> {
    let mut runtimes = vec![queueing(512).0, queueing(PIECE).0];
    let in_pieces = RuntimeOptions { submission_ops: PIECE, ..RuntimeOptions::default() };
    for options in [RuntimeOptions::default(), in_pieces] {
        runtimes.extend(gpu().map(|gpu| Runtime::new(gpu, options)));
    }
    runtimes
}

/// These runtimes, each after one that waits for every launch and computes the same.
pub fn waiting_and_queueing() -> Vec<(Runtime, Runtime)> {
    struct Waiting;
    impl Interceptor for Waiting {}
    let waiting = |queueing: &Runtime| {
        let gpu = if queueing.backend().name().starts_with("cuda") { gpu() } else { None };
        let gpu = gpu.map(|gpu| InterceptedBackend::new(gpu, Arc::new(Waiting)));
        gpu.map_or_else(|| super::runtime(2), |gpu| Runtime::new(gpu, RuntimeOptions::default()))
    };
    runtimes().into_iter().map(|queueing| (waiting(&queueing), queueing)).collect()
}

/// A GPU, if there is one to test.
pub fn gpu() -> Option<Arc<dyn Backend>> {
    if !keel_testkit::has_gpu!() {
        return None;
    }
    let options =
        CudaOptions { determinism: Determinism::Steps, poison_freed: true, ..CudaOptions::default() };
    Some(Arc::new(CudaBackend::new(&options).expect("a GPU")))
}

/// Steps of answers under way. The same sequences are in each of them.
#[derive(Default)]
pub struct Answers(pub VecDeque<Ticket>);

impl Answers {
    /// Submits a step, with these tokens or with those that the step before draws.
    pub fn submit(
        &mut self,
        engine: &mut Engine,
        sequences: &mut [SequenceCache],
        tokens: Option<&[u32]>,
        draws: &[Draw],
    ) -> Result<()> {
        let ahead = self.0.len();
        let work = sequences.iter_mut().zip(draws).enumerate().map(|(i, (sequence, draw))| {
            let rows = tokens.map_or(WorkRows::Drawn(i), |tokens| WorkRows::Token(tokens[i]));
            Work { sequence, ahead, rows, draw: Some(*draw), reads: HostReads::Nothing }
        });
        self.0.push_back(engine.submit(&mut work.collect::<Vec<_>>())?);
        Ok(())
    }

    /// Takes the tokens of the first step.
    pub fn take(&mut self, engine: &mut Engine, sequences: &mut [SequenceCache]) -> Vec<u32> {
        let ticket = self.0.pop_front().expect("a step is under way");
        let drawn = engine.take(ticket).expect("runs").into_iter();
        sequences.iter_mut().for_each(|sequence| sequence.advance(1));
        drawn.map(|token| token.expect("it was drawn for")).collect()
    }
}
