//! A backend whose launches and allocations a test can disturb: faults, gates, counters.

use keel_array::{
    ArrayError, Backend, DeviceMemory, DeviceUsage, Group, Kernel, KernelGroup, Launch, Memory, MemoryCopy,
    MemoryRange, Operand, OperandMemory, OwnMemory, Place, Preparations, Programs, Result, RowBlock,
    Submission, Ticket, WeightSpec,
};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The error of a launch or a read that a test lets fail.
pub fn injected(op: &str) -> ArrayError {
    ArrayError::Kernel { op: op.into(), reason: "injected".into() }
}

/// A test's changes to a backend's work. Each default passes the call on unchanged.
pub trait Interceptor: Send + Sync + 'static {
    /// Replaces a launch.
    ///
    /// # Errors
    /// The backend's own error, or one that the test injects.
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<()> {
        backend.launch(launch)
    }

    /// The backend's name.
    fn name<'a>(&self, backend: &'a dyn Backend) -> &'a str {
        backend.name()
    }

    /// Replaces an allocation.
    ///
    /// # Errors
    /// The backend's own error, or one that the test injects.
    fn allocate(&self, backend: &dyn Backend, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        backend.allocate(bytes)
    }

    /// Replaces an allocation for weights.
    ///
    /// # Errors
    /// As [`Interceptor::allocate`].
    fn allocate_lasting(&self, backend: &dyn Backend, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        backend.allocate_lasting(bytes)
    }

    /// Called before a copy from the host.
    fn before_write(&self, _bytes: usize) {}

    /// Called before a copy of this many bytes to the host. One that is settled does not wait for launches under way.
    ///
    /// # Errors
    /// One that the test injects. Nothing is copied then.
    fn before_read(&self, _bytes: usize, _is_settled: bool) -> Result<()> {
        Ok(())
    }

    /// Whether the host acts as if launches were queued. They run at once when they are enqueued.
    fn is_queueing(&self) -> bool {
        false
    }

    /// Whether callers should make few programs, as on a backend that compiles.
    fn is_compiling(&self, backend: &dyn Backend) -> bool {
        backend.is_compiling()
    }

    /// Whether launches of a planning backend are made ready, too.
    fn compiles_plans(&self) -> bool {
        false
    }

    /// Replaces the preparation of launches.
    ///
    /// # Errors
    /// The backend's own error, or one that the test injects.
    fn make_ready(
        &self,
        backend: &dyn Backend,
        launches: &[Launch<'_>],
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<()> {
        backend.make_ready(launches, progress)
    }

    /// The backend's preparations so far.
    fn preparations(&self, backend: &dyn Backend) -> Preparations {
        backend.preparations()
    }

    /// Called when a launch that was enqueued is waited for.
    fn note_wait(&self) {}

    /// Whether enqueued launches go to the backend's own queue. They are then not [launched](Interceptor::launch) here.
    fn passes_queue(&self) -> bool {
        false
    }

    /// Called before a launch enters the backend's own queue.
    ///
    /// # Errors
    /// One that the test injects. The launch is then not enqueued.
    fn before_enqueue(&self) -> Result<()> {
        Ok(())
    }

    /// Called when a launch of the backend's own queue has ended well.
    ///
    /// # Errors
    /// One that the test injects.
    fn after_wait(&self) -> Result<()> {
        Ok(())
    }

    /// Replaces an arena's allocation.
    ///
    /// # Errors
    /// As [`Interceptor::allocate`].
    fn allocate_arena(&self, backend: &dyn Backend, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.allocate(backend, bytes)
    }

    /// Replaces an arena's growth.
    ///
    /// # Errors
    /// As [`Interceptor::allocate`].
    fn grow_arena(
        &self,
        backend: &dyn Backend,
        arena: &dyn DeviceMemory,
        bytes: usize,
    ) -> Result<bool, String> {
        backend.grow_arena(arena, bytes)
    }
}

/// A backend whose launches and allocations go through an [`Interceptor`]. It runs the same kernels as the inner
/// backend: absorbed kernels are the same, so sums have the same order.
pub struct InterceptedBackend<D> {
    backend: Arc<dyn Backend>,
    disturbance: Arc<D>,
    /// The outputs of launches that were not waited for, if the host acts as if they were queued.
    under_way: Mutex<BTreeMap<u64, Vec<Written>>>,
}

/// Bytes of a memory.
#[derive(Clone, Debug)]
struct Written {
    /// An address that stands for the memory.
    memory: usize,
    bytes: Range<usize>,
}

fn address(memory: &dyn DeviceMemory) -> usize {
    std::ptr::from_ref(memory).addr()
}

/// The bytes that a launch's kernels write: the outputs, each from its first to its last element.
fn written(launch: &Launch<'_>) -> Vec<Written> {
    let outputs = launch.kernels().iter().flat_map(|kernel| &kernel.outputs);
    let placed = outputs.filter(|output| !matches!(output.memory, OperandMemory::Absorbed(_)));
    let range = |output: &Operand| {
        let Place { buffer, offset } = launch.resolve(output.memory);
        let (layout, size) = (&output.layout, output.dtype.size());
        let steps = layout.shape.iter().zip(&layout.strides).map(|(n, stride)| n.saturating_sub(1) * stride);
        let start = offset + layout.offset * size;
        let elements = if layout.shape.elements() == 0 { 0 } else { steps.sum::<usize>() + 1 };
        Written { memory: address(buffer.memory()), bytes: start..start + elements * size }
    };
    placed.map(range).collect()
}

impl<D: Interceptor> InterceptedBackend<D> {
    /// Wraps a backend in a disturbance. The test keeps a handle to control it.
    pub fn new(backend: Arc<dyn Backend>, disturbance: Arc<D>) -> Arc<InterceptedBackend<D>> {
        Arc::new(InterceptedBackend { backend, disturbance, under_way: Mutex::default() })
    }

    fn under_way(&self) -> MutexGuard<'_, BTreeMap<u64, Vec<Written>>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: Interceptor> Backend for InterceptedBackend<D> {
    fn name(&self) -> &str {
        self.disturbance.name(&*self.backend)
    }
    fn is_planning(&self) -> bool {
        self.backend.is_planning()
    }
}

impl<D: Interceptor> Memory for InterceptedBackend<D> {
    fn allocate(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.disturbance.allocate(&*self.backend, bytes)
    }
    fn allocate_lasting(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.disturbance.allocate_lasting(&*self.backend, bytes)
    }
    fn arena_bytes(&self, bytes: usize) -> usize {
        self.backend.arena_bytes(bytes)
    }
    fn allocate_arena(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.disturbance.allocate_arena(&*self.backend, bytes)
    }
    fn grow_arena(&self, arena: &dyn DeviceMemory, bytes: usize) -> Result<bool, String> {
        self.disturbance.grow_arena(&*self.backend, arena, bytes)
    }
    fn release_idle_memory(&self, arena: Option<&dyn DeviceMemory>) {
        self.backend.release_idle_memory(arena);
    }
    fn device_usage(&self) -> Option<DeviceUsage> {
        self.backend.device_usage()
    }
    fn own_memory(&self) -> OwnMemory {
        self.backend.own_memory()
    }
    fn write(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &[u8]) {
        self.disturbance.before_write(bytes.len());
        self.backend.write(memory, offset, bytes);
    }
    fn read(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.disturbance.before_read(bytes.len(), false)?;
        self.backend.read(memory, offset, bytes)
    }
    fn read_settled(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.disturbance.before_read(bytes.len(), true)?;
        let read = offset..offset + bytes.len();
        let is_hit = |Written { memory: at, bytes }: &&Written| {
            *at == address(memory) && bytes.start < read.end && read.start < bytes.end
        };
        let hit = self.under_way().values().flatten().find(is_hit).cloned();
        assert!(hit.is_none(), "bytes {read:?} are read as settled, and a launch under way writes {hit:?}");
        self.backend.read_settled(memory, offset, bytes)
    }
    fn copy(&self, copies: &[MemoryCopy<'_>]) {
        self.backend.copy(copies);
    }
    fn clear(&self, ranges: &[MemoryRange<'_>]) {
        self.backend.clear(ranges);
    }
    fn packed_bytes(&self, spec: &WeightSpec) -> usize {
        self.backend.packed_bytes(spec)
    }
    fn first_byte_of_rows(&self, spec: &WeightSpec, rows: Range<usize>) -> Option<usize> {
        self.backend.first_byte_of_rows(spec, rows)
    }
    fn repeat_rows(&self, spec: &WeightSpec, memory: &dyn DeviceMemory, offset: usize, rows: usize) -> bool {
        self.backend.repeat_rows(spec, memory, offset, rows)
    }
    fn pack(
        &self,
        spec: &WeightSpec,
        memory: &dyn DeviceMemory,
        offset: usize,
        block: &RowBlock<'_>,
    ) -> Result<()> {
        self.backend.pack(spec, memory, offset, block)
    }
}

impl<D: Interceptor> Programs for InterceptedBackend<D> {
    fn supports(&self, kernel: &Kernel) -> Result<(), String> {
        self.backend.supports(kernel)
    }
    fn workspace_bytes(&self, kernel: &Kernel) -> usize {
        self.backend.workspace_bytes(kernel)
    }
    fn absorbs(&self, reader: &Kernel, input: usize, producer: &Kernel) -> bool {
        self.backend.absorbs(reader, input, producer)
    }
    fn narrows(&self, producer: &Kernel, reader: &Kernel) -> bool {
        self.backend.narrows(producer, reader)
    }
    fn group_of(&self, kernels: &[Kernel]) -> Option<KernelGroup> {
        self.backend.group_of(kernels)
    }
    fn is_compiling(&self) -> bool {
        self.disturbance.is_compiling(&*self.backend)
    }
    fn make_ready(&self, launches: &[Launch<'_>], progress: &mut dyn FnMut(usize, usize)) -> Result<()> {
        self.disturbance.make_ready(&*self.backend, launches, progress)
    }
    fn compiles_plans(&self) -> bool {
        self.disturbance.compiles_plans()
    }
    fn preparations(&self) -> Preparations {
        self.disturbance.preparations(&*self.backend)
    }
}

impl<D: Interceptor> Submission for InterceptedBackend<D> {
    fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        self.disturbance.launch(&*self.backend, launch)
    }
    fn is_queueing(&self) -> bool {
        self.disturbance.is_queueing() || self.disturbance.passes_queue() && self.backend.is_queueing()
    }
    fn enqueue(&self, launch: &Launch<'_>, result: Option<MemoryRange<'_>>) -> Result<Ticket> {
        if self.disturbance.passes_queue() {
            self.disturbance.before_enqueue().inspect_err(|_| launch.note_done(0))?;
            return self.backend.enqueue(launch, result);
        }
        self.launch(launch)?;
        let mut ticket = Ticket { number: 0, result: Vec::new() };
        if self.disturbance.is_queueing() {
            let mut under_way = self.under_way();
            ticket.number = under_way.keys().next_back().map_or(0, |last| last + 1);
            under_way.insert(ticket.number, written(launch));
        }
        if let Some(MemoryRange { memory, bytes }) = result {
            ticket.result.resize(bytes.len(), 0);
            self.read(memory, bytes.start, &mut ticket.result)?;
        }
        Ok(ticket)
    }
    fn wait(&self, ticket: Ticket, launch: &Launch<'_>, result: &mut [u8]) -> Result<()> {
        self.disturbance.note_wait();
        if self.disturbance.passes_queue() {
            self.backend.wait(ticket, launch, result)?;
            return self.disturbance.after_wait();
        }
        self.under_way().remove(&ticket.number);
        result.copy_from_slice(&ticket.result);
        Ok(())
    }
    fn group(&self) -> Option<&dyn Group> {
        self.backend.group()
    }
}
