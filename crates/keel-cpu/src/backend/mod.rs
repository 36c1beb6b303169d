//! The CPU as a device of the array runtime.
//!
//! A launch is one job of the thread pool. Every worker walks the whole list of kernels, does its share of each, and
//! meets the others at a barrier before the next.

mod dispatch;
mod group;
#[cfg(test)]
mod group_tests;
mod launch;
pub(crate) mod memory;
mod operand;
mod profile;
mod slab;
mod weights;

use crate::isa::Isa;
use crate::pool::ThreadPool;
pub use group::CpuGroup;
use keel_array::{
    ArrayError, Backend, DeviceMemory, Group, Kernel, Launch, Memory, Programs, RowBlock, Submission,
    WeightSpec,
};
use memory::HostMemory;
pub use profile::KernelTime;
use profile::Profile;
use slab::Slabs;
use std::ops::Range;

/// Options of a [`CpuBackend`].
#[derive(Clone, Debug, Default)]
pub struct CpuOptions {
    /// Number of threads, including the caller of an evaluation. `None`: one for each core that the process may use.
    pub threads: Option<usize>,
    /// Instructions to use, at most the machine's best. `None`: the machine's best.
    pub isa: Option<Isa>,
    /// Fill memory with NaN before it is freed, and scratch before it is lent. This shows uses after free and reads of
    /// unwritten memory. For tests.
    pub poison_freed: bool,
    /// Take all pages of an allocation from the system at once, not each at its first use. Planned memory is then
    /// resident from the start and cannot be missing later.
    pub resident: bool,
    /// Measure the time of each kernel, see [`CpuBackend::take_profile`].
    pub profile: bool,
    /// Count memory, allocate none and run nothing: the backend of a memory plan.
    pub planning: bool,
    /// The group of devices that this one exchanges arrays with.
    pub group: Option<CpuGroup>,
}

/// The CPU backend.
pub struct CpuBackend {
    pool: ThreadPool,
    /// Workers that memory is planned for: those of `pool`, or `CpuOptions::threads` when planning.
    workers: usize,
    options: CpuOptions,
    profile: Profile,
    slabs: Slabs,
}

impl CpuBackend {
    /// A backend with its threads started. A planning backend starts none.
    pub fn new(options: CpuOptions) -> CpuBackend {
        let available = || std::thread::available_parallelism().map_or(1, usize::from);
        let workers = options.threads.unwrap_or_else(available).max(1);
        let isa = options.isa.unwrap_or_else(Isa::best);
        let pool = ThreadPool::at(if options.planning { 1 } else { workers }, isa);
        CpuBackend { pool, workers, options, profile: Profile::default(), slabs: Slabs::default() }
    }

    /// A backend that gives the same numbers as [`CpuBackend::new`] with the same options, and allocates nothing.
    pub fn planning(options: CpuOptions) -> CpuBackend {
        CpuBackend::new(CpuOptions { planning: true, ..options })
    }

    /// Threads that take part in a launch.
    pub fn threads(&self) -> usize {
        self.workers
    }

    /// Time by operation since the last call, longest first; empty unless [`CpuOptions::profile`] is set.
    pub fn take_profile(&self) -> Vec<KernelTime> {
        self.profile.take()
    }

    /// Instructions in use.
    pub fn isa(&self) -> Isa {
        self.pool.isa()
    }

    /// Refuses work if the system did not start the threads. The work would be slow without a word.
    fn expect_threads(&self, op: &str) -> Result<(), ArrayError> {
        if self.pool.workers() == self.workers {
            return Ok(());
        }
        let reason = format!("the system did not start {} threads; give fewer (--threads)", self.workers);
        Err(ArrayError::Kernel { op: op.into(), reason })
    }

    /// The memory that `make` allocates. When planning, only its number of bytes.
    fn memory(
        &self,
        bytes: usize,
        make: impl FnOnce(usize) -> Result<HostMemory, String>,
    ) -> Result<Box<dyn DeviceMemory>, String> {
        if self.options.planning {
            return Ok(Box::new(HostMemory::counted(bytes)));
        }
        let memory = make(bytes)?.poisoned_when_freed(self.options.poison_freed);
        if self.options.resident {
            memory.touch(&self.pool);
        }
        Ok(Box::new(memory))
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &str {
        "cpu"
    }

    fn is_planning(&self) -> bool {
        self.options.planning
    }
}

impl Memory for CpuBackend {
    fn allocate(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.memory(bytes, HostMemory::zeroed)
    }

    fn allocate_lasting(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.memory(bytes, |bytes| self.slabs.allocate(bytes))
    }

    fn release_idle_memory(&self, arena: Option<&dyn DeviceMemory>) {
        if self.options.resident {
            return;
        }
        if let Some(arena) = arena {
            HostMemory::of(arena).discard();
        }
        self.slabs.give_back_unused();
    }

    fn write(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &[u8]) {
        HostMemory::of(memory).write(offset, bytes);
    }

    fn read(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &mut [u8]) -> keel_array::Result<()> {
        HostMemory::of(memory).read(offset, bytes);
        Ok(())
    }

    fn packed_bytes(&self, spec: &WeightSpec) -> usize {
        weights::packed_bytes(spec)
    }

    fn first_byte_of_rows(&self, spec: &WeightSpec, rows: Range<usize>) -> Option<usize> {
        weights::first_byte_of_rows(spec, rows)
    }

    fn pack(
        &self,
        spec: &WeightSpec,
        memory: &dyn DeviceMemory,
        offset: usize,
        block: &RowBlock<'_>,
    ) -> Result<(), ArrayError> {
        if self.options.planning {
            return Ok(());
        }
        self.expect_threads("pack")?;
        weights::pack(&self.pool, spec, HostMemory::of(memory), offset, block)
    }
}

impl Programs for CpuBackend {
    fn supports(&self, kernel: &Kernel) -> Result<(), String> {
        dispatch::supports(kernel, self.options.group.as_ref())
    }

    fn workspace_bytes(&self, kernel: &Kernel) -> usize {
        dispatch::workspace_bytes(kernel, self.workers, self.isa())
    }
}

impl Submission for CpuBackend {
    fn launch(&self, launch: &Launch<'_>) -> Result<(), ArrayError> {
        if self.options.planning {
            let reason = "a planning backend has no memory to work on".into();
            return Err(ArrayError::Kernel { op: "launch".into(), reason });
        }
        self.expect_threads("launch")?;
        let watch = launch::Watch {
            isa: self.isa(),
            profile: self.options.profile.then_some(&self.profile),
            poison: self.options.poison_freed,
            group: self.options.group.as_ref(),
        };
        launch::run(&self.pool, launch, watch)
    }

    fn group(&self) -> Option<&dyn Group> {
        self.options.group.as_ref().map(|group| group as &dyn Group)
    }
}

impl std::fmt::Debug for CpuBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CpuBackend({} threads, {})", self.workers, self.isa())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_level_that_was_asked_for_is_that_of_all_kernels() {
        for isa in Isa::available() {
            let options = CpuOptions { threads: Some(2), isa: Some(isa), ..CpuOptions::default() };
            let backend = CpuBackend::new(options);
            backend.pool.run(|worker| assert_eq!(worker.isa, isa));
            assert_eq!(backend.isa(), isa);
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn resident_memory_is_backed_when_it_is_allocated() {
        let options = CpuOptions { threads: Some(2), resident: true, ..CpuOptions::default() };
        let backend = CpuBackend::new(options);
        for bytes in [100, memory::LARGE_PAGE + 5, 5 * memory::LARGE_PAGE] {
            for memory in [backend.allocate(bytes), backend.allocate_lasting(bytes)] {
                let memory = memory.expect("there is memory");
                assert_ne!(HostMemory::of(&*memory).is_backed(), Some(false), "{bytes} bytes");
            }
        }
    }
}
