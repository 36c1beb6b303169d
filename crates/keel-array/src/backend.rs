//! What a device offers to the runtime.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use crate::ledger::{Category, Charge, Ledger};
use crate::program::{Kernel, Launch};
use crate::usage::DeviceUsage;
use crate::weight::{RowBlock, WeightSpec};
use crate::{ArrayError, Result};

/// Bytes that pass through the host at a time where a backend has no copy of its own: within the first-level cache.
const PIECE_BYTES: usize = 16 << 10;

/// Bytes that come to the host with a launch that is not waited for, at most; see [`Backend::enqueue`].
pub const RESULT_BYTES_MAX: usize = 4096;

/// Launches that may be under way at a time; see [`Backend::enqueue`].
pub const LAUNCHES_MAX: usize = 16;

/// A launch that was not waited for.
#[derive(Debug)]
pub struct Ticket {
    /// The backend's number for it.
    pub number: u64,
    /// What came to the host with it, where it has ended already.
    pub result: Vec<u8>,
}

/// What a backend has done so far to be able to run programs, besides running them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preparations {
    /// Kernels compiled.
    pub compiled: u64,
    /// Kernels loaded on the device.
    pub loaded: u64,
    /// Programs recorded, to be run again as a whole.
    pub captured: u64,
}

/// What a backend holds for itself; see [`Backend::own_memory`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnMemory {
    /// Bytes of the device, charged to `workspace`.
    pub device_bytes: u64,
    /// Bytes of the host, charged to `staging`.
    pub host_bytes: u64,
}

/// Memory of a device. The backend that allocated it knows its concrete type.
pub trait DeviceMemory: Any + Send + Sync {
    /// For the backend to recognise its own memory.
    fn as_any(&self) -> &dyn Any;
}

/// A device: allocates memory, moves bytes and runs kernels. Implemented by `keel-cpu` and `keel-cuda`.
///
/// The runtime calls `read`, `write`, `pack` and `launch` one at a time, in stream order.
pub trait Backend: Send + Sync + 'static {
    /// Name in reports.
    fn name(&self) -> &str;

    /// Zeroed memory, aligned for any kernel.
    ///
    /// # Errors
    /// The system's reason, if it refuses.
    fn allocate(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String>;

    /// As [`Backend::allocate`], for memory that stays for long and is read as a whole, such as weights: a backend may
    /// lay it together.
    ///
    /// # Errors
    /// The system's reason, if it refuses.
    fn allocate_lasting(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.allocate(bytes)
    }

    /// Bytes that an arena of at least `bytes` takes: the granularity in which this backend has it grow.
    fn arena_bytes(&self, bytes: usize) -> usize {
        bytes
    }

    /// As [`Backend::allocate`], for the arena of a stream: of [`Backend::arena_bytes`] of something.
    ///
    /// # Errors
    /// The system's reason, if it refuses.
    fn allocate_arena(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.allocate(bytes)
    }

    /// Makes an arena larger where it lies, which queued work may be using: its address and what it holds stay, and what is
    /// added is zeroed. False if it cannot grow in place; another then takes its place.
    ///
    /// # Errors
    /// The system's reason, if it refuses; the arena is as it was.
    fn grow_arena(&self, arena: &dyn DeviceMemory, bytes: usize) -> Result<bool, String> {
        let _ = (arena, bytes);
        Ok(false)
    }

    /// Told that nothing runs and nobody needs what the arena holds: the system may have it, and other memory that is idle,
    /// until it is used again. The arena then holds anything.
    fn rest(&self, arena: Option<&dyn DeviceMemory>) {
        let _ = arena;
    }

    /// Memory of the device as its driver counts it; `None` where tensors lie in the host's memory, and for a plan.
    fn device_usage(&self) -> Option<DeviceUsage> {
        None
    }

    /// Memory that the backend holds for itself as long as it lives: counters, reports and pinned memory that data passes
    /// through. The runtime charges it, so that it is in the plan and in the books.
    fn own_memory(&self) -> OwnMemory {
        OwnMemory::default()
    }

    /// True if memory is only counted, never touched: the backend of `keel plan`.
    fn is_planning(&self) -> bool {
        false
    }

    /// Copies host bytes to `memory` at byte `offset`.
    fn write(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &[u8]);

    /// Copies bytes from `memory` at byte `offset` to the host.
    fn read(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &mut [u8]);

    /// Copies bytes from one place of device memory to another; the two do not overlap.
    fn copy(&self, from: (&dyn DeviceMemory, usize), to: (&dyn DeviceMemory, usize), bytes: usize) {
        let mut piece = vec![0; bytes.min(PIECE_BYTES)];
        for at in (0..bytes).step_by(PIECE_BYTES) {
            let piece = &mut piece[..PIECE_BYTES.min(bytes - at)];
            self.read(from.0, from.1 + at, piece);
            self.write(to.0, to.1 + at, piece);
        }
    }

    /// Zeroes bytes of device memory.
    fn clear(&self, memory: &dyn DeviceMemory, offset: usize, bytes: usize) {
        let zeros = vec![0; bytes.min(PIECE_BYTES)];
        for at in (0..bytes).step_by(PIECE_BYTES) {
            self.write(memory, offset + at, &zeros[..PIECE_BYTES.min(bytes - at)]);
        }
    }

    /// Whether this device can run the kernel with these attributes, shapes and types. It is asked for every kernel when a
    /// program is made, so that a plan which succeeds runs. The answer needs no device: a backend that only plans gives the
    /// one of the device it plans for.
    ///
    /// # Errors
    /// What it cannot run, what it could, and what to do, in a sentence.
    fn supports(&self, kernel: &Kernel) -> Result<(), String> {
        let _ = kernel;
        Ok(())
    }

    /// Scratch that this kernel needs, placed in the arena beside the operands.
    fn workspace_bytes(&self, kernel: &Kernel) -> usize;

    /// True if `reader`, given what `producer` reads, makes its input number `input` for itself: the value is then never
    /// in memory. It is asked only about values without another use, and about producers that change no state.
    fn absorbs(&self, reader: &Kernel, input: usize, producer: &Kernel) -> bool {
        let _ = (reader, input, producer);
        false
    }

    /// Whether a program costs much before its first run, such as a compilation. Whoever makes programs then makes few, and
    /// pads what they work on.
    fn is_compiling(&self) -> bool {
        false
    }

    /// Does what can be done before the first run of each of these, without running them. `progress` gets what is done and
    /// how much there is.
    ///
    /// # Errors
    /// What a first run would say.
    fn make_ready(&self, launches: &[Launch<'_>], progress: &mut dyn FnMut(usize, usize)) -> Result<()> {
        let _ = (launches, progress);
        Ok(())
    }

    /// What was prepared so far.
    fn preparations(&self) -> Preparations {
        Preparations::default()
    }

    /// Runs some kernels of a program in order and returns when their results are in memory.
    ///
    /// # Errors
    /// What a kernel found wrong with its data, naming the operation. With [`Launch::note_done`] it says how far it came;
    /// only then can the state that the kernels write be used further.
    fn launch(&self, launch: &Launch<'_>) -> Result<()>;

    /// True if the host can go on while what it [enqueues](Backend::enqueue) runs.
    fn is_queueing(&self) -> bool {
        false
    }

    /// As [`Backend::launch`], but does not wait, if the backend [is queueing](Backend::is_queueing): what the host writes,
    /// reads or launches from then on comes behind it. What it touches stays in place until [`Backend::wait`] has returned.
    /// The bytes of `result`, words of 4 and at most [`RESULT_BYTES_MAX`], come to the host as its last kernel has left them.
    /// At most [`LAUNCHES_MAX`] are under way at a time.
    ///
    /// # Errors
    /// As [`Backend::launch`], as far as it is known yet.
    fn enqueue(
        &self,
        launch: &Launch<'_>,
        result: Option<(&dyn DeviceMemory, Range<usize>)>,
    ) -> Result<Ticket> {
        self.launch(launch)?;
        let mut ticket = Ticket { number: 0, result: Vec::new() };
        if let Some((memory, at)) = result {
            ticket.result.resize(at.len(), 0);
            self.read(memory, at.start, &mut ticket.result);
        }
        Ok(ticket)
    }

    /// Waits for a launch that was enqueued, and hands out the bytes of its result. Each one is waited for once. A later
    /// one may be waited for first; the results of those before it stay until they are asked for.
    ///
    /// # Errors
    /// As [`Backend::launch`].
    fn wait(&self, ticket: Ticket, launch: &Launch<'_>, result: &mut [u8]) -> Result<()> {
        let _ = launch;
        result.copy_from_slice(&ticket.result);
        Ok(())
    }

    /// Bytes of a weight in this device's own layout.
    fn packed_bytes(&self, spec: &WeightSpec) -> usize;

    /// Where some rows of a packed matrix begin, in bytes, if they lie there as they would in a weight that has no others.
    fn first_byte_of_rows(&self, spec: &WeightSpec, rows: Range<usize>) -> Option<usize> {
        let _ = (spec, rows);
        None
    }

    /// Repeats the first `rows` rows of expert 0, which were packed, over the whole weight; false if it cannot.
    /// For weights that are made up.
    fn repeat_rows(&self, spec: &WeightSpec, memory: &dyn DeviceMemory, offset: usize, rows: usize) -> bool {
        let _ = (spec, memory, offset, rows);
        false
    }

    /// Brings rows of a weight into this device's layout, in `memory` at byte `offset`. The block lies within the weight, and its
    /// elements are coded as the weight's and as many as its rows have: [`Weight::fill`](crate::Weight::fill) has seen to it.
    ///
    /// # Errors
    /// If the rows are not those that this device packs together; what the device says.
    fn pack(
        &self,
        spec: &WeightSpec,
        memory: &dyn DeviceMemory,
        offset: usize,
        block: &RowBlock<'_>,
    ) -> Result<()>;
}

struct BufferInner {
    memory: Box<dyn DeviceMemory>,
    charge: Charge,
}

/// Device memory with an owner in the ledger. Cloning shares it; the last handle gives the bytes back.
#[derive(Clone)]
pub struct Buffer(Arc<BufferInner>);

impl Buffer {
    /// Reserves in the ledger, then allocates.
    pub(crate) fn allocate(
        backend: &dyn Backend,
        ledger: &Ledger,
        category: Category,
        bytes: usize,
    ) -> Result<Buffer> {
        Buffer::charged(ledger, category, bytes, || match category {
            Category::Weights => backend.allocate_lasting(bytes),
            _ => backend.allocate(bytes),
        })
    }

    /// As [`Buffer::allocate`], for the arena of a stream.
    pub(crate) fn allocate_arena(backend: &dyn Backend, ledger: &Ledger, bytes: usize) -> Result<Buffer> {
        Buffer::charged(ledger, Category::Activations, bytes, || backend.allocate_arena(bytes))
    }

    fn charged(
        ledger: &Ledger,
        category: Category,
        bytes: usize,
        allocate: impl FnOnce() -> Result<Box<dyn DeviceMemory>, String>,
    ) -> Result<Buffer> {
        let charge = ledger.charge(category, bytes as u64)?;
        let refused = |reason| ArrayError::Allocation { category, requested: bytes as u64, reason };
        let memory = allocate().map_err(refused)?;
        Ok(Buffer(Arc::new(BufferInner { memory, charge })))
    }

    /// Makes an arena larger where it lies, for all its handles; false if the backend cannot.
    pub(crate) fn grow_arena(&self, backend: &dyn Backend, ledger: &Ledger, bytes: usize) -> Result<bool> {
        let category = self.category();
        let more = ledger.charge(category, bytes.saturating_sub(self.bytes()) as u64)?;
        let refused = |reason| ArrayError::Allocation { category, requested: more.bytes(), reason };
        let grown = backend.grow_arena(self.memory(), bytes).map_err(refused)?;
        if grown {
            self.0.charge.absorb(more);
        }
        Ok(grown)
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.charge.bytes() as usize
    }

    /// The category it is charged to.
    pub fn category(&self) -> Category {
        self.0.charge.category()
    }

    /// The device's memory.
    pub fn memory(&self) -> &dyn DeviceMemory {
        &*self.0.memory
    }

    /// True if both are handles to the same memory.
    pub fn is_same(&self, other: &Buffer) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Handles to this memory.
    pub(crate) fn handles(&self) -> usize {
        Arc::strong_count(&self.0)
    }
}

/// Memory of the host with an owner in the ledger, for what is kept away from the device. It is given back on drop.
pub struct HostBuffer {
    bytes: Box<[u8]>,
    charge: Charge,
}

impl HostBuffer {
    /// Reserves in the ledger, then allocates zeroed bytes; none on a backend that only plans.
    pub(crate) fn allocate(
        backend: &dyn Backend,
        ledger: &Ledger,
        category: Category,
        bytes: usize,
    ) -> Result<HostBuffer> {
        let charge = ledger.charge(category, bytes as u64)?;
        let bytes = if backend.is_planning() { 0 } else { bytes };
        // The system zeroes memory when it is first touched. `vec![0; bytes]` does the same, but aborts where there is none.
        let bytes = bytemuck::try_zeroed_slice_box(bytes).map_err(|()| ArrayError::Allocation {
            category,
            requested: bytes as u64,
            reason: "the host has no memory left".into(),
        })?;
        Ok(HostBuffer { bytes, charge })
    }

    /// The category it is charged to.
    pub fn category(&self) -> Category {
        self.charge.category()
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl std::fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostBuffer({} bytes, {})", self.bytes.len(), self.category())
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes, {})", self.bytes(), self.category())
    }
}
