//! The runtime: one backend with its ledger, programs, arena and stream.

mod arena;
mod copies;
mod device_lock;
mod executable;
mod fence;
mod gauge;
mod host;
mod pending;
mod ready;
mod stream;

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::array::{Array, State, Storage};
use crate::backend::Backend;
use crate::buffer::{Buffer, HostBuffer};
use crate::ledger::{Category, Charge, Ledger};
use crate::program::graph::{Collected, Purpose, collect};
use crate::program::{Binding, Bindings, Graph, OutputMemory, Program, ProgramCache, ProgramCacheUse};
use crate::{ArrayError, DeviceReading, Layout, Result};

use arena::Arena;
pub use copies::{ElementCopy, clear_entries, copy_all};
pub(crate) use executable::next_prepared;
pub use executable::{Executable, FailedRun};
pub use gauge::Gauge;
pub use host::Element;
pub use pending::{PendingRun, RUNS_MAX};
pub(crate) use stream::Fence;
use stream::{Stream, Work};

/// Bounds of a runtime.
#[derive(Clone, Debug)]
pub struct RuntimeOptions {
    /// Hard limit on all tensor memory, in bytes.
    pub memory_limit: Option<u64>,
    /// Pending operations above which the graph is submitted automatically.
    pub pending_ops: usize,
    /// Bytes of pending results, as if all were in memory at once, above which the graph is submitted automatically.
    /// Views count 0.
    pub pending_bytes: usize,
    /// Most kernels of one submission.
    pub submission_ops: usize,
    /// Most bytes that one submission touches.
    pub submission_bytes: usize,
    /// Most host bytes of cached programs.
    pub program_cache_bytes: usize,
}

/// Bound of one submission, and of the pending graph: a larger graph would be cut into submissions anyway.
const SUBMISSION_BYTES: usize = 16 << 30;

impl Default for RuntimeOptions {
    fn default() -> RuntimeOptions {
        RuntimeOptions {
            memory_limit: None,
            pending_ops: 4096,
            pending_bytes: SUBMISSION_BYTES,
            submission_ops: 512,
            submission_bytes: SUBMISSION_BYTES,
            program_cache_bytes: 16 << 20,
        }
    }
}

struct Inner {
    backend: Arc<dyn Backend>,
    ledger: Ledger,
    /// For the memory that the backend holds for itself.
    _own: Vec<Charge>,
    options: RuntimeOptions,
    programs: Mutex<ProgramCache>,
    arena: Arena,
    stream: Stream,
    /// Held by the thread that evaluates arrays.
    evaluating: Mutex<()>,
    pending_ops: AtomicUsize,
    pending_bytes: AtomicUsize,
    submissions: AtomicUsize,
}

thread_local! {
    /// Depth of [`Runtime::trace`] on this thread.
    static TRACING: Cell<usize> = const { Cell::new(0) };
}

/// Leaves [`Runtime::trace`] on drop, also in a panic.
struct TraceScope;

impl Drop for TraceScope {
    fn drop(&mut self) {
        TRACING.set(TRACING.get() - 1);
    }
}

/// A device ready for work. Clones are handles to the same runtime.
#[derive(Clone)]
pub struct Runtime(Arc<Inner>);

impl Runtime {
    /// A runtime on a backend.
    pub fn new(backend: Arc<dyn Backend>, options: RuntimeOptions) -> Runtime {
        let ledger = Ledger::default();
        let own = backend.own_memory();
        let own = [(Category::Workspace, own.device_bytes), (Category::Staging, own.host_bytes)];
        // Charged before the limit is set: this memory is allocated already.
        let charge = |(category, bytes)| (bytes > 0).then(|| ledger.charge(category, bytes).ok()).flatten();
        let own = own.into_iter().filter_map(charge).collect();
        ledger.set_limit(options.memory_limit);
        Runtime(Arc::new(Inner {
            stream: Stream::new(Arc::clone(&backend)),
            backend,
            ledger,
            _own: own,
            programs: Mutex::new(ProgramCache::new(options.program_cache_bytes)),
            options,
            arena: Arena::default(),
            evaluating: Mutex::new(()),
            pending_ops: AtomicUsize::new(0),
            pending_bytes: AtomicUsize::new(0),
            submissions: AtomicUsize::new(0),
        }))
    }

    /// The device.
    pub fn backend(&self) -> &dyn Backend {
        &*self.0.backend
    }

    /// The account of this runtime's memory.
    pub fn ledger(&self) -> &Ledger {
        &self.0.ledger
    }

    /// As [`Gauge::device_usage`].
    pub fn device_usage(&self) -> Option<DeviceReading> {
        self.gauge().device_usage()
    }

    /// Reads the memory of this runtime without keeping any of it.
    pub fn gauge(&self) -> Gauge {
        Gauge::new(&self.0.backend, &self.0.ledger)
    }

    /// True if both are handles to the same runtime.
    pub fn is_same(&self, other: &Runtime) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Zeroed memory under a category.
    ///
    /// # Errors
    /// If the limit would be exceeded, the plan is frozen, or the system refuses.
    pub fn allocate(&self, category: Category, bytes: usize) -> Result<Buffer> {
        Buffer::allocate(self.backend(), self.ledger(), category, bytes)
    }

    /// Zeroed memory of the host under a category.
    ///
    /// # Errors
    /// As [`Runtime::allocate`].
    pub fn allocate_host(&self, category: Category, bytes: usize) -> Result<HostBuffer> {
        HostBuffer::allocate(self.backend(), self.ledger(), category, bytes)
    }

    /// Makes the arena large enough for a program of this many bytes, before its first run.
    ///
    /// # Errors
    /// As [`Runtime::allocate`].
    pub fn reserve_arena(&self, bytes: usize) -> Result<()> {
        self.arena(bytes).map(drop)
    }

    /// Lets the system have the arena's memory until its next use, if the backend can: a prompt needs far more of it
    /// than the tokens that follow. It stays allocated and charged.
    pub fn release_idle_memory(&self) {
        self.0.stream.at_rest(|backend| {
            let arena = self.0.arena.at_once();
            backend.release_idle_memory(arena.as_ref().map(Buffer::memory));
        });
    }

    /// Evaluates arrays and waits for them. After a failure, all arrays of this evaluation return its error when read.
    /// Arrays that were evaluated before keep their values.
    ///
    /// # Errors
    /// If an array belongs to another runtime, the memory limit would be exceeded, or a kernel fails.
    pub fn eval(&self, arrays: &[&Array]) -> Result<()> {
        self.expect_own("eval", arrays.iter().copied())?;
        self.submit(arrays, Stream::run)?;
        arrays.iter().try_for_each(|a| a.wait())
    }

    /// Submits arrays for evaluation and returns; reading one waits for it.
    ///
    /// # Errors
    /// If an array belongs to another runtime, or the memory limit would be exceeded. A kernel's error is returned when
    /// an array is read.
    pub fn async_eval(&self, arrays: &[&Array]) -> Result<()> {
        self.expect_own("async_eval", arrays.iter().copied())?;
        self.submit(arrays, Stream::enqueue)
    }

    /// Waits until all submitted work is done.
    pub fn synchronize(&self) {
        self.0.stream.synchronize();
    }

    /// Frees the arena and the cached programs.
    pub fn clear_cache(&self) {
        self.synchronize();
        self.0.arena.clear();
        self.programs().clear();
    }

    /// The state of the program cache.
    pub fn program_cache(&self) -> ProgramCacheUse {
        let programs = self.programs();
        ProgramCacheUse { bytes: programs.bytes(), hits: programs.hits, misses: programs.misses }
    }

    /// Submissions made so far.
    pub fn submissions(&self) -> usize {
        self.0.submissions.load(Ordering::Relaxed)
    }

    /// Runs of [`Executable::submit`] that have not been waited for yet: at most [`RUNS_MAX`].
    pub fn runs_under_way(&self) -> usize {
        self.0.stream.lock().runs()
    }

    /// Runs `build`. Operations that it builds on this thread are never submitted automatically, however many they are.
    /// For a graph that is prepared, not evaluated.
    pub fn trace<R>(&self, build: impl FnOnce() -> R) -> R {
        TRACING.set(TRACING.get() + 1);
        let _scope = TraceScope;
        build()
    }

    /// Operations built and not yet evaluated.
    pub fn pending_ops(&self) -> usize {
        self.0.pending_ops.load(Ordering::Relaxed)
    }

    /// Refuses arrays of another runtime: their memory is of another device, and their work has another stream.
    fn expect_own<'a>(&self, op: &'static str, arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
        match arrays.into_iter().find(|array| !self.is_same(array.runtime())) {
            None => Ok(()),
            Some(array) => Err(ArrayError::Argument { op, reason: of_another_runtime(array) }),
        }
    }

    pub(crate) fn exclusive<R>(&self, access: impl FnOnce(&dyn Backend) -> R) -> R {
        self.0.stream.exclusive(access)
    }

    /// Counts a call. True if the graph has outgrown its bounds.
    pub(crate) fn note_built(&self, bytes: usize) -> bool {
        let ops = self.0.pending_ops.fetch_add(1, Ordering::Relaxed) + 1;
        let bytes = self.0.pending_bytes.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let crowded = ops > self.0.options.pending_ops || bytes > self.0.options.pending_bytes;
        crowded && TRACING.get() == 0
    }

    pub(crate) fn note_dropped(&self, bytes: usize) {
        self.0.pending_ops.fetch_sub(1, Ordering::Relaxed);
        self.0.pending_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn programs(&self) -> MutexGuard<'_, ProgramCache> {
        self.0.programs.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn arena(&self, bytes: usize) -> Result<Option<Buffer>> {
        self.0.arena.at_least(self, bytes)
    }

    /// The arena's memory, if there is any yet.
    pub(crate) fn arena_buffer(&self) -> Option<Buffer> {
        self.0.arena.get()
    }

    fn program(&self, graph: &Graph) -> Result<Arc<Program>> {
        if let Some(program) = self.programs().get(graph) {
            return Ok(program);
        }
        let program = self.compile(graph)?;
        self.programs().insert(graph.clone(), Arc::clone(&program));
        Ok(program)
    }

    fn compile(&self, graph: &Graph) -> Result<Arc<Program>> {
        let program = Program::compile(graph, self.backend(), &self.0.options)?;
        // A server plans hundreds of programs at its start.
        tracing::trace!(
            kernels = program.kernels().len(),
            arena_bytes = program.arena_bytes(),
            "compiled a program"
        );
        Ok(Arc::new(program))
    }

    /// Allocates a program's outputs, and binds memory to its slots.
    fn bind(&self, program: &Program, externals: &[Storage], graph: &Graph) -> Result<Bindings> {
        let externals = external_bindings(externals, graph);
        let outputs = program
            .outputs
            .iter()
            .map(|output| match output.memory {
                OutputMemory::Fresh(bytes) => {
                    Ok(Binding { buffer: self.allocate(Category::User, bytes)?, offset: 0 })
                }
                OutputMemory::Donated(e) => Ok(externals[e].clone()),
            })
            .collect::<Result<_>>()?;
        Ok(Bindings { externals, outputs, prepared: None })
    }

    fn submit(&self, arrays: &[&Array], how: fn(&Stream, Work)) -> Result<()> {
        // Until the work is in the stream: another thread that evaluates the same arrays would run their state updates
        // a second time, or read an operand that this work overwrites.
        let _turn = self.0.evaluating.lock().unwrap_or_else(|e| e.into_inner());
        let mut targets = Vec::new();
        for &array in arrays.iter().filter(|a| !a.is_evaluated()) {
            if !array.settle_as_view() {
                targets.push(array);
            }
        }
        if targets.is_empty() {
            return Ok(());
        }
        let Collected { graph, externals, outputs } = collect(&targets, Purpose::Evaluate);
        let program = self.program(&graph)?;
        let bindings = self.bind(&program, &externals, &graph)?;
        let arena = self.arena(program.arena_bytes())?;
        let needs = externals.iter().filter_map(|s| s.fence.clone()).collect();
        drop(externals);
        let fence = Fence::default();
        for (node, binding) in outputs.iter().zip(&bindings.outputs) {
            let layout = Layout::contiguous(node.shape.clone());
            node.settle(Storage { buffer: binding.buffer.clone(), layout, fence: Some(fence.clone()) });
        }
        self.0.submissions.fetch_add(program.pieces().len(), Ordering::Relaxed);
        how(&self.0.stream, Work { program, bindings: Arc::new(bindings), arena, needs, fence });
        Ok(())
    }
}

/// Why an array of another runtime is refused.
fn of_another_runtime(array: &Array) -> String {
    let runtime = array.runtime();
    format!(
        "{array:?} belongs to another runtime, {runtime:?}; use that one, or copy the array through the host"
    )
}

/// The memory that a graph reads.
fn external_bindings(externals: &[Storage], graph: &Graph) -> Vec<Binding> {
    let binding = |(s, e): (&Storage, &crate::program::graph::External)| Binding {
        buffer: s.buffer.clone(),
        offset: s.layout.offset * e.dtype.size(),
    };
    externals.iter().zip(&graph.externals).map(binding).collect()
}

impl crate::array::Node {
    /// Makes the node ready. Its parents are dropped outside the lock.
    fn settle(&self, storage: Storage) {
        let before = std::mem::replace(&mut *self.state(), State::Ready(storage));
        drop(before);
    }
}

impl Array {
    /// Waits until the value is in memory.
    fn wait(&self) -> Result<()> {
        match self.0.storage().and_then(|s| s.fence) {
            Some(fence) => fence.wait(),
            None => Ok(()),
        }
    }

    /// A view of evaluated memory becomes a handle to that memory, unless it would pin more than twice its own bytes.
    fn settle_as_view(&self) -> bool {
        match self.resolve_view() {
            Some(storage) if storage.buffer.bytes() <= 2 * self.bytes() => {
                self.0.settle(storage);
                true
            }
            _ => false,
        }
    }
}

impl std::fmt::Debug for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Runtime({})", self.backend().name())
    }
}
