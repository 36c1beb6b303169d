//! A GPU as a device of the array runtime.

mod call;
mod dispatch;
mod failed_transfer;
mod fault;
mod group;
mod launch;
mod listing;
mod mode;
mod operand;
mod queue;
mod read_ahead;
mod staging;
mod transfer;
mod weights;

use crate::driver::{Blas, CudaMemory, Device, GRANULE, Modules, OPENING, SizedKernel, explained};
use crate::error::Result;
use group::Membership;
pub use group::{CudaGroup, GroupIds, PeerProcesses, Role};
use keel_array::{
    ArrayError, Backend, DeviceMemory, DeviceUsage, Group, Kernel, KernelGroup, Launch, Memory, MemoryAt,
    MemoryCopy, MemoryRange, OwnMemory, Preparations, Programs, RowBlock, Submission, Ticket, WeightSpec,
};
use launch::{Session, runs_nothing};
use listing::Listing;
use mode::Mode;
pub use mode::{Determinism, Precision};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use transfer::Move;

/// How a [`CudaBackend`] works.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// Number of the device.
    pub ordinal: usize,
    /// Arithmetic.
    pub precision: Precision,
    /// The changes under which a row keeps its bits.
    pub determinism: Determinism,
    /// Fill memory with NaN before it is freed, so that a use after free is seen. For tests.
    pub poison_freed: bool,
    /// The group of GPUs that this one exchanges arrays with. The backends of all of them must be opened, and those of
    /// several processes connected, before the first exchange.
    pub group: Option<CudaGroup>,
}

impl CudaOptions {
    fn mode(&self) -> Mode {
        Mode { precision: self.precision, determinism: self.determinism }
    }
}

/// The CUDA backend.
pub struct CudaBackend {
    name: String,
    mode: Mode,
    poison_freed: bool,
    gpu: Option<Gpu>,
    group: Option<CudaGroup>,
}

/// A device with everything that launches need.
struct Gpu {
    device: Arc<Device>,
    // Dropped before `modules` and `blas`: graphs refer to the kernels that those have loaded.
    session: Mutex<Session>,
    /// Dropped after the graphs that hold its exchanges.
    membership: Option<Membership>,
    modules: Modules,
    blas: Blas,
    /// Takes kernels that are to be listed instead of launched.
    listing: Listing,
    /// Whether the next kernel must not start before the work on the stream has ended.
    is_held: AtomicBool,
    /// Graphs captured.
    captured: AtomicU64,
}

impl CudaBackend {
    /// Opens a device.
    ///
    /// # Errors
    /// - The driver, the compiler or cuBLASLt is missing or too old.
    /// - There is no such device, it is too old, or its memory is full.
    /// - The device is in a group, and NCCL is missing.
    /// - The group is of this process alone, this is its last device, and connecting fails.
    pub fn new(options: &CudaOptions) -> Result<CudaBackend> {
        let device = Arc::new(Device::open(options.ordinal)?);
        let gpu = Gpu::open(&device, options.group.as_ref()).map_err(explained(device.ordinal(), OPENING))?;
        Ok(CudaBackend {
            name: format!("cuda:{} ({})", options.ordinal, gpu.device.name),
            mode: options.mode(),
            poison_freed: options.poison_freed,
            gpu: Some(gpu),
            group: options.group.clone(),
        })
    }

    /// A backend for plans: it gives the numbers of [`CudaBackend::new`] with the same options, needs no device and
    /// allocates nothing.
    pub fn planning(options: &CudaOptions) -> CudaBackend {
        let name = format!("cuda:{}", options.ordinal);
        let group = options.group.clone();
        CudaBackend { name, mode: options.mode(), poison_freed: false, gpu: None, group }
    }

    /// Graphs captured.
    pub fn capture_count(&self) -> u64 {
        self.gpu.as_ref().map_or(0, |gpu| gpu.captured.load(Ordering::Relaxed))
    }

    /// Submissions that re-used a captured graph.
    pub fn replay_count(&self) -> u64 {
        self.gpu.as_ref().map_or(0, |gpu| gpu.session().replayed())
    }

    /// File, entry point and constants of every kernel launched since the last call, except in graphs that were
    /// captured before it.
    pub fn take_kernels(&self) -> Vec<String> {
        self.gpu.as_ref().map_or_else(Vec::new, |gpu| gpu.modules.take_names())
    }

    /// How often the host has waited for the device: once for each launch, and once for each copy to the host that did
    /// not come with a launch.
    pub fn wait_count(&self) -> u64 {
        self.gpu.as_ref().map_or(0, |gpu| gpu.session().waits())
    }
}

impl Gpu {
    fn open(device: &Arc<Device>, group: Option<&CudaGroup>) -> Result<Gpu> {
        // A missing library is found before a group counts on this device.
        let (modules, blas) = (Modules::new(device)?, Blas::new(device)?);
        let gpu = Gpu {
            session: Mutex::new(Session::new(device)?),
            membership: group.map(|group| Membership::new(group, device)).transpose()?,
            modules,
            blas,
            listing: Listing::default(),
            is_held: AtomicBool::new(false),
            captured: AtomicU64::new(0),
            device: Arc::clone(device),
        };
        if let Some(kernel) = group.and_then(CudaGroup::one_shot_kernel) {
            // On a GPU that several ranks share, a kernel might not be loaded while a peer's kernel waits for it.
            gpu.device.bind()?;
            gpu.modules.function(&kernel, 0)?;
        }
        Ok(gpu)
    }

    /// Whether kernels may use Hopper's matrix instructions, which no other generation has.
    fn has_wgmma(&self) -> bool {
        self.device.capability == (9, 0) && !self.device.architecture.is_portable
    }

    fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Makes the next kernel start only when everything before it has ended.
    fn hold_next(&self) {
        self.is_held.store(true, Ordering::Relaxed);
    }

    /// Clears the hold, and returns whether there was one.
    fn take_hold(&self) -> bool {
        self.is_held.swap(false, Ordering::Relaxed)
    }

    /// Whether kernels are only listed, not put on the stream.
    fn is_listing(&self) -> bool {
        self.listing.is_under_way()
    }
}

impl Drop for Gpu {
    /// Its stream may hold exchanges that never end if the group has failed and not met again.
    fn drop(&mut self) {
        if self.membership.as_ref().is_some_and(|membership| membership.group.has_failed()) {
            self.session().end_exchanges(self);
        }
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn is_planning(&self) -> bool {
        self.gpu.is_none()
    }
}

impl Memory for CudaBackend {
    fn allocate(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        let memory = match &self.gpu {
            None => CudaMemory::counted(bytes),
            Some(gpu) => {
                let mut session = gpu.session();
                session.note_allocation();
                let memory = CudaMemory::zeroed(&gpu.device, bytes).map_err(|e| e.to_string())?;
                memory.poisoned_when_freed(self.poison_freed)
            }
        };
        Ok(Box::new(memory))
    }

    /// Whole granules, because memory is mapped in granules. A device without such memory takes as many bytes.
    fn arena_bytes(&self, bytes: usize) -> usize {
        bytes.checked_next_multiple_of(GRANULE).unwrap_or(bytes)
    }

    fn allocate_arena(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        let Some(gpu) = &self.gpu else { return self.allocate(bytes) };
        let session = gpu.session();
        let growing = CudaMemory::growing(&gpu.device, bytes);
        drop(session);
        match growing {
            Ok(Some(memory)) => return Ok(Box::new(memory.poisoned_when_freed(self.poison_freed))),
            Ok(None) => {}
            Err(error) => tracing::debug!("no memory that grows: {error}"),
        }
        self.allocate(bytes)
    }

    fn grow_arena(&self, arena: &dyn DeviceMemory, bytes: usize) -> Result<bool, String> {
        let Some(gpu) = &self.gpu else { return Ok(false) };
        let _session = gpu.session();
        CudaMemory::of(arena).grow(bytes).map_err(|e| e.to_string())
    }

    /// From cuMemGetInfo. The free bytes from before the device was opened come from NVML, if it is there: asking the
    /// driver needs a context.
    fn device_usage(&self) -> Option<DeviceUsage> {
        self.gpu.as_ref()?.device.usage().ok()
    }

    fn own_memory(&self) -> OwnMemory {
        let exchanges = self.group.as_ref().map_or(0, CudaGroup::buffer_bytes);
        OwnMemory { device_bytes: launch::OWN_MEMORY.device_bytes + exchanges, ..launch::OWN_MEMORY }
    }

    fn write(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &[u8]) {
        let Some(gpu) = &self.gpu else { return };
        gpu.session().write(gpu, CudaMemory::of(memory), offset, bytes);
    }

    fn read(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &mut [u8]) -> Result<(), ArrayError> {
        let Some(gpu) = &self.gpu else {
            bytes.fill(0);
            return Ok(());
        };
        let outcome = gpu.session().read(gpu, CudaMemory::of(memory), offset, bytes);
        outcome.map_err(|e| e.in_op("read"))
    }

    fn read_settled(
        &self,
        memory: &dyn DeviceMemory,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<(), ArrayError> {
        let Some(gpu) = &self.gpu else { return self.read(memory, offset, bytes) };
        let outcome = gpu.session().read_settled(gpu, CudaMemory::of(memory), offset, bytes);
        outcome.map_err(|e| e.in_op("read"))
    }

    fn copy(&self, copies: &[MemoryCopy<'_>]) {
        let Some(gpu) = &self.gpu else { return };
        let moves = copies.iter().map(|&MemoryCopy { from, to, bytes }| {
            let address = |at: MemoryAt<'_>| CudaMemory::of(at.memory).range(at.offset, bytes);
            Move { to: address(to), from: Some(address(from)), bytes }
        });
        gpu.session().move_all(gpu, &moves.collect::<Vec<_>>());
    }

    fn clear(&self, ranges: &[MemoryRange<'_>]) {
        let Some(gpu) = &self.gpu else { return };
        let moves = ranges.iter().map(|MemoryRange { memory, bytes }| {
            let to = CudaMemory::of(*memory).range(bytes.start, bytes.len());
            Move { to, from: None, bytes: bytes.len() }
        });
        gpu.session().move_all(gpu, &moves.collect::<Vec<_>>());
    }

    fn packed_bytes(&self, spec: &WeightSpec) -> usize {
        weights::Layout::of(spec).bytes()
    }

    fn repeat_rows(&self, spec: &WeightSpec, memory: &dyn DeviceMemory, offset: usize, rows: usize) -> bool {
        for section in weights::Layout::of(spec).sections(spec, rows) {
            let mut filled = section.first;
            while filled < section.bytes {
                let bytes = filled.min(section.bytes - filled);
                let from = MemoryAt { memory, offset: offset + section.offset };
                let to = MemoryAt { memory, offset: from.offset + filled };
                self.copy(&[MemoryCopy { from, to, bytes }]);
                filled += bytes;
            }
        }
        true
    }

    fn pack(
        &self,
        spec: &WeightSpec,
        memory: &dyn DeviceMemory,
        offset: usize,
        block: &RowBlock<'_>,
    ) -> Result<(), ArrayError> {
        let Some(gpu) = &self.gpu else { return Ok(()) };
        if weights::keeps_fp8(spec) && !gpu.has_wgmma() {
            let (major, minor) = gpu.device.capability;
            let reason = format!(
                "steps of many sequences in 8-bit floats need a GPU of compute capability 9.0, and this one has {major}.{minor}: \
                 choose another arithmetic"
            );
            return Err(ArrayError::Argument { op: "pack_weight", reason });
        }
        for packed in weights::pack(spec, block)? {
            self.write(memory, offset + packed.offset, &packed.bytes);
        }
        let rows = block.first_row..block.first_row + block.rows;
        let rounded = gpu.session().round_rows(gpu, spec, CudaMemory::of(memory), offset, rows);
        rounded.map_err(|error| error.in_op("pack_weight"))
    }
}

impl Programs for CudaBackend {
    fn supports(&self, kernel: &Kernel) -> Result<(), String> {
        dispatch::supports(kernel, self.mode)?;
        kernel.op.check_exchange(self.group())?;
        self.group.as_ref().map_or(Ok(()), |group| group.supports(&kernel.op))
    }

    fn workspace_bytes(&self, kernel: &Kernel) -> usize {
        dispatch::workspace_bytes(kernel, self.mode)
    }

    fn absorbs(&self, reader: &Kernel, input: usize, producer: &Kernel) -> bool {
        dispatch::absorbs(reader, input, producer, self.mode)
    }

    fn narrows(&self, producer: &Kernel, reader: &Kernel) -> bool {
        dispatch::narrows(producer, reader, self.mode)
    }

    fn group_of(&self, kernels: &[Kernel]) -> Option<KernelGroup> {
        dispatch::group_of(kernels, self.mode)
    }

    fn is_compiling(&self) -> bool {
        true
    }

    /// Compiles kernels on all of the host's cores, then loads them. A library chooses how to multiply on its first
    /// run; only products in 8 bits are chosen here, because it may refuse them.
    fn make_ready(
        &self,
        launches: &[Launch<'_>],
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<(), ArrayError> {
        let Some(gpu) = &self.gpu else { return Ok(()) };
        let in_op = |error: crate::CudaError| error.in_op("compile");
        gpu.device.bind().map_err(in_op)?;
        let mut kernels = gpu.session().kernels_of(gpu, self.mode, launches)?;
        kernels.push(SizedKernel { key: transfer::kernel(), shared_bytes: 0 });
        gpu.modules.load_all(&kernels, progress).map_err(in_op)
    }

    fn compiles_plans(&self) -> bool {
        self.gpu.is_some()
    }

    fn preparations(&self) -> Preparations {
        let Some(gpu) = &self.gpu else { return Preparations::default() };
        let (compiled, loaded) = (gpu.modules.compiled_count(), gpu.modules.loaded_count());
        // Without the session's lock: a launch holds it until its stream is empty, and may wait for a peer whose launch
        // the caller is to make.
        Preparations { compiled, loaded, captured: gpu.captured.load(Ordering::Relaxed) }
    }
}

impl Submission for CudaBackend {
    fn launch(&self, launch: &Launch<'_>) -> Result<(), ArrayError> {
        let Some(gpu) = &self.gpu else { return Err(runs_nothing(launch)) };
        gpu.session().run(gpu, self.mode, launch)
    }

    fn is_queueing(&self) -> bool {
        true
    }

    fn enqueue(&self, launch: &Launch<'_>, result: Option<MemoryRange<'_>>) -> Result<Ticket, ArrayError> {
        let Some(gpu) = &self.gpu else { return Err(runs_nothing(launch)) };
        let result = result.map(|MemoryRange { memory, bytes }| {
            let start = CudaMemory::of(memory).range(bytes.start, bytes.len());
            start..start + bytes.len() as u64
        });
        gpu.session().enqueue(gpu, self.mode, launch, result)
    }

    fn wait(&self, ticket: Ticket, launch: &Launch<'_>, result: &mut [u8]) -> Result<(), ArrayError> {
        let Some(gpu) = &self.gpu else { return Err(runs_nothing(launch)) };
        gpu.session().wait(gpu, ticket.number, launch, result)
    }

    fn group(&self) -> Option<&dyn Group> {
        self.group.is_some().then_some(self)
    }
}

impl CudaBackend {
    /// The membership. The runtime asks for it as a [`Group`] only if there is one.
    fn member(&self) -> &CudaGroup {
        self.group.as_ref().unwrap_or_else(|| unreachable!("this device is in no group"))
    }
}

impl Group for CudaBackend {
    fn rank(&self) -> usize {
        self.member().rank
    }

    fn size(&self) -> usize {
        self.member().size()
    }

    fn spans_processes(&self) -> bool {
        self.member().spans_processes()
    }

    fn abandon(&self) {
        self.member().abandon();
    }

    fn rejoin(&self) {
        if let Some(gpu) = &self.gpu {
            self.member().rejoin(gpu);
        }
    }
}
