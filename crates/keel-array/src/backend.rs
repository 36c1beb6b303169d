//! The operations that a device offers to the runtime.

use std::any::Any;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::program::{Kernel, KernelGroup, Launch};
use crate::usage::DeviceUsage;
use crate::weight::{RowBlock, WeightSpec};
use crate::{Group, Result};

/// Bytes that a default copy moves through the host at a time. They fit into the first-level cache.
const PIECE_BYTES: usize = 16 << 10;

/// Most bytes that one launch may return to the host without being waited for; see [`Submission::enqueue`].
pub const RESULT_BYTES_MAX: usize = 4096;

/// Most launches that may be under way at a time; see [`Submission::enqueue`].
pub const LAUNCHES_MAX: usize = 32;

/// A launch that was not waited for.
#[derive(Debug)]
pub struct Ticket {
    /// The backend's number for it.
    pub number: u64,
    /// The result's bytes, if the launch has ended already.
    pub result: Vec<u8>,
}

/// Preparation work that a backend has done so far: everything but running programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preparations {
    /// Kernels compiled.
    pub compiled: u64,
    /// Kernels loaded on the device.
    pub loaded: u64,
    /// Programs recorded, so that later runs start them as a whole.
    pub captured: u64,
}

/// Memory that a backend holds for itself; see [`Memory::own_memory`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnMemory {
    /// Bytes of the device, charged to `workspace`.
    pub device_bytes: u64,
    /// Bytes of the host, charged to `staging`.
    pub host_bytes: u64,
}

/// Memory of a device. The backend that allocated it knows its concrete type.
pub trait DeviceMemory: Any + Send + Sync {
    /// Lets the backend recognise its own memory.
    fn as_any(&self) -> &dyn Any;
}

/// A place in device memory.
#[derive(Clone, Copy)]
pub struct MemoryAt<'a> {
    /// The memory.
    pub memory: &'a dyn DeviceMemory,
    /// First byte.
    pub offset: usize,
}

/// Some bytes of device memory.
#[derive(Clone)]
pub struct MemoryRange<'a> {
    /// The memory.
    pub memory: &'a dyn DeviceMemory,
    /// Which of its bytes.
    pub bytes: Range<usize>,
}

/// A copy between two places of device memory.
#[derive(Clone, Copy)]
pub struct MemoryCopy<'a> {
    /// Where the bytes are.
    pub from: MemoryAt<'a>,
    /// Where they go.
    pub to: MemoryAt<'a>,
    /// How many.
    pub bytes: usize,
}

/// A device: [its memory](Memory), [the kernels it has](Programs) and [their runs](Submission). Implemented by
/// `keel-cpu`, `keel-cuda` and `keel-remote`; `docs/design/backend.md` is the contract.
///
/// The runtime makes the calls that move bytes or run kernels one at a time, in stream order.
pub trait Backend: Memory + Programs + Submission + 'static {
    /// Name in reports.
    fn name(&self) -> &str;

    /// True if memory is only counted, never touched: the backend of `keel plan`.
    fn is_planning(&self) -> bool {
        false
    }
}

/// The first part of the contract: allocates memory and moves bytes. Weights are in the device's own layout.
pub trait Memory: Send + Sync {
    /// Zeroed memory, aligned for any kernel.
    ///
    /// # Errors
    /// The system's reason, if it refuses.
    fn allocate(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String>;

    /// As [`Memory::allocate`], for memory that lives long and is read as a whole, such as weights. A backend may
    /// place such allocations next to each other.
    ///
    /// # Errors
    /// The system's reason, if it refuses.
    fn allocate_lasting(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.allocate(bytes)
    }

    /// Bytes of an arena that holds at least `bytes`: rounded up to the unit in which this backend grows arenas.
    fn arena_bytes(&self, bytes: usize) -> usize {
        bytes
    }

    /// As [`Memory::allocate`], for the arena of a stream. `bytes` is a result of [`Memory::arena_bytes`].
    ///
    /// # Errors
    /// The system's reason, if it refuses.
    fn allocate_arena(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.allocate(bytes)
    }

    /// Grows an arena in place, even while queued work uses it. Its address and contents stay; added bytes are zero.
    /// False if the backend cannot grow in place: the caller then replaces the arena.
    ///
    /// # Errors
    /// The system's reason, if it refuses. The arena is then unchanged.
    fn grow_arena(&self, arena: &dyn DeviceMemory, bytes: usize) -> Result<bool, String> {
        let _ = (arena, bytes);
        Ok(false)
    }

    /// Called when no launch is in flight and the arena's contents are dead. The backend may return its pages, and
    /// other idle memory, to the system. The arena's contents are undefined afterwards.
    fn release_idle_memory(&self, arena: Option<&dyn DeviceMemory>) {
        let _ = arena;
    }

    /// Memory of the device as its driver counts it. `None` if tensors lie in the host's memory, and for a plan.
    fn device_usage(&self) -> Option<DeviceUsage> {
        None
    }

    /// Memory that the backend holds for itself as long as it lives: counters, reports and pinned transfer buffers. The
    /// runtime charges it to the ledger, so the plan contains it.
    fn own_memory(&self) -> OwnMemory {
        OwnMemory::default()
    }

    /// Copies host bytes to `memory` at byte `offset`.
    ///
    /// Writes, copies and clears return no errors. If one fails, nothing tells what memory holds. Every launch and read
    /// after it fails with [`ArrayError::DeviceLost`](crate::ArrayError::DeviceLost), as long as the backend lives.
    /// Only a failure because of another device of the group may be reported once: the step after it fails, and a step
    /// that is repeated writes its inputs again.
    fn write(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &[u8]);

    /// Copies bytes from `memory` at byte `offset` to the host.
    ///
    /// # Errors
    /// The copy failed, or one before it on which these bytes may depend. The contents of `bytes` are then undefined.
    fn read(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &mut [u8]) -> Result<()>;

    /// As [`Memory::read`], for memory that no launch under way writes, and that the host has not written since it last
    /// waited. Does not wait for those launches, if the backend [is queueing](Submission::is_queueing).
    ///
    /// # Errors
    /// The copy failed, for example because a launch under way broke the device.
    fn read_settled(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.read(memory, offset, bytes)
    }

    /// Makes copies between places of device memory, in any order or all at once: no byte that a copy writes belongs to
    /// another one. A backend whose reads can fail has a function of its own.
    fn copy(&self, copies: &[MemoryCopy<'_>]) {
        for MemoryCopy { from, to, bytes } in copies {
            let mut piece = vec![0; PIECE_BYTES.min(*bytes)];
            for at in (0..*bytes).step_by(PIECE_BYTES) {
                let piece = &mut piece[..PIECE_BYTES.min(bytes - at)];
                let read = self.read(from.memory, from.offset + at, piece);
                assert!(read.is_ok(), "a backend whose reads can fail has a copy of its own: {read:?}");
                self.write(to.memory, to.offset + at, piece);
            }
        }
    }

    /// Zeroes ranges of device memory.
    fn clear(&self, ranges: &[MemoryRange<'_>]) {
        let zeros = [0; PIECE_BYTES];
        for MemoryRange { memory, bytes } in ranges {
            for at in bytes.clone().step_by(PIECE_BYTES) {
                self.write(*memory, at, &zeros[..PIECE_BYTES.min(bytes.end - at)]);
            }
        }
    }

    /// Bytes of a weight in this device's own layout.
    fn packed_bytes(&self, spec: &WeightSpec) -> usize;

    /// First byte of these rows of a packed matrix; `None` if they are not laid out as a weight of these rows alone.
    fn first_byte_of_rows(&self, spec: &WeightSpec, rows: Range<usize>) -> Option<usize> {
        let _ = (spec, rows);
        None
    }

    /// Copies the first `rows` rows of expert 0, already packed, over the whole weight; false if the backend cannot.
    /// For made-up weights.
    fn repeat_rows(&self, spec: &WeightSpec, memory: &dyn DeviceMemory, offset: usize, rows: usize) -> bool {
        let _ = (spec, memory, offset, rows);
        false
    }

    /// Writes rows of a weight in this device's layout to `memory` at byte `offset`.
    /// [`Weight::fill`](crate::Weight::fill) has checked that the block lies within the weight, has its coding, and has
    /// the right number of elements.
    ///
    /// # Errors
    /// If the block is not a unit of rows that this device packs; or the device's own error.
    fn pack(
        &self,
        spec: &WeightSpec,
        memory: &dyn DeviceMemory,
        offset: usize,
        block: &RowBlock<'_>,
    ) -> Result<()>;
}

/// The second part of the contract: says which kernels the device has, and prepares programs of them. The answers need
/// no device: a planning backend gives those of the device that it plans for.
pub trait Programs: Send + Sync {
    /// Whether this device can run the kernel with these attributes, shapes and types. The runtime asks for each kernel
    /// when it makes a program, so a plan that succeeds runs. The answer needs no device: a planning backend answers
    /// for the device that it plans for.
    ///
    /// # Errors
    /// One sentence: the unsupported shape, type or attribute, the supported ones, and what to do.
    fn supports(&self, kernel: &Kernel) -> Result<(), String>;

    /// Bytes of scratch that this kernel needs. They lie in the arena, next to the operands.
    fn workspace_bytes(&self, kernel: &Kernel) -> usize;

    /// True if `reader` can run `producer` within itself, from the producer's inputs. The value of input `input` is
    /// then never in memory. Asked for every reader of the value; only about producers that change no state. The input
    /// may be a view of the value, for example its elements under another shape: compare the two layouts.
    fn absorbs(&self, reader: &Kernel, input: usize, producer: &Kernel) -> bool {
        let _ = (reader, input, producer);
        false
    }

    /// True if the f32 value of `producer` may take 16 bits an element in memory. `reader` is the only kernel that
    /// reads it, itself or in an absorbed kernel, and reads it once. The operands of both then have type f16. Which
    /// numbers the bits stand for is agreed between the two kernels alone. Asked after absorption, about intermediates.
    fn narrows(&self, producer: &Kernel, reader: &Kernel) -> bool {
        let _ = (producer, reader);
        false
    }

    /// The kernels that this device runs together with the first of `kernels`; `None` if it runs that one alone. Asked
    /// after the memory plan, for consecutive kernels of one submission. The launch then has this
    /// [group](Launch::groups). Nothing but the kernels themselves may decide, so that a plan gives the same answer.
    fn group_of(&self, kernels: &[Kernel]) -> Option<KernelGroup> {
        let _ = kernels;
        None
    }

    /// Whether a program costs much before its first run, such as a compilation. Callers then make few programs and pad
    /// their inputs.
    fn is_compiling(&self) -> bool {
        false
    }

    /// Does all preparation for the first run of these launches, without running them. `progress` gets the number of
    /// items done and the number of all items.
    ///
    /// # Errors
    /// As the first run would return.
    fn make_ready(&self, launches: &[Launch<'_>], progress: &mut dyn FnMut(usize, usize)) -> Result<()> {
        let _ = (launches, progress);
        Ok(())
    }

    /// Whether [`Programs::make_ready`] also takes launches of a planning backend with the same options. They have the
    /// kernels of the device's own launches, so kernels can be compiled before the weights are there.
    fn compiles_plans(&self) -> bool {
        false
    }

    /// The preparation work done so far.
    fn preparations(&self) -> Preparations {
        Preparations::default()
    }
}

/// The third part of the contract: submits launches, waits for them and reports how far they came.
pub trait Submission: Memory {
    /// Runs the launch's kernels in order, and returns when their results are in memory.
    ///
    /// # Errors
    /// The error of a kernel that found wrong data, naming the operation. The backend reports with
    /// [`Launch::note_done`] how far the launch came; without that report, the state that the kernels write must not be
    /// used further.
    fn launch(&self, launch: &Launch<'_>) -> Result<()>;

    /// True if the host can go on while an [enqueued](Submission::enqueue) launch runs.
    fn is_queueing(&self) -> bool {
        false
    }

    /// As [`Submission::launch`], but does not wait if the backend [is queueing](Submission::is_queueing). Later
    /// writes, reads and launches of the host are ordered after it. The memory it uses must stay in place until
    /// [`Submission::wait`] returns. `result` is whole words of 4 bytes, at most [`RESULT_BYTES_MAX`]; the host gets
    /// them as the launch's last kernel leaves them. At most [`LAUNCHES_MAX`] launches are under way at a time.
    ///
    /// # Errors
    /// As [`Submission::launch`], for errors that are known already.
    fn enqueue(&self, launch: &Launch<'_>, result: Option<MemoryRange<'_>>) -> Result<Ticket> {
        self.launch(launch)?;
        let mut ticket = Ticket { number: 0, result: Vec::new() };
        if let Some(MemoryRange { memory, bytes }) = result {
            ticket.result.resize(bytes.len(), 0);
            self.read(memory, bytes.start, &mut ticket.result)?;
        }
        Ok(ticket)
    }

    /// Waits for an enqueued launch and returns the bytes of its result. Each launch is waited for once. A later launch
    /// may be waited for before an earlier one; the earlier result is kept until then.
    ///
    /// # Errors
    /// As [`Submission::launch`].
    fn wait(&self, ticket: Ticket, launch: &Launch<'_>, result: &mut [u8]) -> Result<()> {
        let _ = launch;
        result.copy_from_slice(&ticket.result);
        Ok(())
    }

    /// The device's place in a group of devices that exchange arrays; `None` if it is alone. A planning backend has the
    /// place of the device that it plans for.
    fn group(&self) -> Option<&dyn Group> {
        None
    }
}
