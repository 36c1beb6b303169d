//! A backend that is watched, and that can be told to break a law.

use keel_array::{Backend, DeviceMemory, Kernel, Launch, Result, RowBlock, Slot, WeightSpec};
use keel_cpu::CpuBackend;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

/// A CPU backend behind a gate.
pub struct Watched {
    inner: CpuBackend,
    /// Launches wait while it is closed.
    gate: Mutex<bool>,
    opened: Condvar,
    /// Act as if dropping the host's handle had freed what a submission still reads.
    pub forgetful: AtomicBool,
    /// Kernels of the largest launch.
    pub kernels_max: AtomicUsize,
    /// Launches so far.
    pub launches: AtomicUsize,
}

impl Watched {
    pub fn new(inner: CpuBackend) -> Watched {
        Watched {
            inner,
            gate: Mutex::new(true),
            opened: Condvar::new(),
            forgetful: AtomicBool::new(false),
            kernels_max: AtomicUsize::new(0),
            launches: AtomicUsize::new(0),
        }
    }

    fn gate(&self) -> MutexGuard<'_, bool> {
        self.gate.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Launches wait from now on.
    pub fn close(&self) {
        *self.gate() = false;
    }

    /// Launches go on.
    pub fn open(&self) {
        *self.gate() = true;
        self.opened.notify_all();
    }

    /// Fills what the launch reads from outside with NaN, as freeing it would.
    fn poison_inputs(&self, launch: &Launch<'_>) {
        let inputs = launch.kernels().iter().flat_map(|kernel| &kernel.inputs);
        for input in inputs.filter(|input| matches!(input.slot, Slot::External(_))) {
            let (buffer, _) = launch.resolve(input.slot);
            self.inner.write(buffer.memory(), 0, &vec![0xff; buffer.bytes()]);
        }
    }
}

impl Backend for Watched {
    fn name(&self) -> &str {
        "watched"
    }
    fn allocate(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.inner.allocate(bytes)
    }
    fn write(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &[u8]) {
        self.inner.write(memory, offset, bytes);
    }
    fn read(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &mut [u8]) {
        self.inner.read(memory, offset, bytes);
    }
    fn workspace_bytes(&self, kernel: &Kernel) -> usize {
        self.inner.workspace_bytes(kernel)
    }
    fn packed_bytes(&self, spec: &WeightSpec) -> usize {
        self.inner.packed_bytes(spec)
    }
    fn pack(
        &self,
        spec: &WeightSpec,
        memory: &dyn DeviceMemory,
        at: usize,
        rows: &RowBlock<'_>,
    ) -> Result<()> {
        self.inner.pack(spec, memory, at, rows)
    }
    fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        let mut open = self.gate();
        while !*open {
            open = self.opened.wait(open).unwrap_or_else(|e| e.into_inner());
        }
        drop(open);
        if self.forgetful.load(Ordering::Relaxed) {
            self.poison_inputs(launch);
        }
        self.launches.fetch_add(1, Ordering::Relaxed);
        self.kernels_max.fetch_max(launch.kernels().len(), Ordering::Relaxed);
        self.inner.launch(launch)
    }
}
