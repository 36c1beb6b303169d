//! An engine whose launches and reads of results can be made to fail.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use keel_array::{ArrayError, Backend, Compute, Launch, Op, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::{Engine, EngineOptions};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor, injected};

/// Says when a launch fails.
#[derive(Default)]
pub struct Faults {
    /// How many launches succeed before one fails; the largest number means never.
    pub until: AtomicUsize,
    /// Let the failing launch run first, and do not report how far it came.
    pub is_silent: AtomicBool,
    /// How many results are read before a read fails; the largest number means never.
    pub reads: AtomicUsize,
    /// Break the page table of the launch instead. The first attention in it finds out, after kernels that have run.
    pub breaks_pages: AtomicBool,
}

impl Faults {
    pub fn set(&self, launches: usize) {
        self.until.store(launches, Ordering::Relaxed);
    }

    pub fn clear(&self) {
        self.set(usize::MAX);
        self.reads.store(usize::MAX, Ordering::Relaxed);
    }
}

impl Interceptor for Faults {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        let left = self.until.load(Ordering::Relaxed);
        let attention = launch.kernels().iter().find(|k| matches!(k.op, Op::PagedAttention(_)));
        let breaks_pages = self.breaks_pages.load(Ordering::Relaxed);
        if left > 0 || breaks_pages && attention.is_none() {
            self.set(if left == usize::MAX { left } else { left.saturating_sub(1) });
            return backend.launch(launch);
        }
        self.clear();
        if let Some(attention) = attention.filter(|_| breaks_pages) {
            let table = launch.resolve(attention.inputs[5].memory);
            backend.write(table.buffer.memory(), table.offset, &u32::MAX.to_le_bytes());
            return backend.launch(launch);
        }
        if self.is_silent.load(Ordering::Relaxed) {
            backend.launch(launch)?;
        } else {
            launch.note_done(0);
        }
        Err(injected("launch"))
    }

    fn before_read(&self, _bytes: usize, is_settled: bool) -> Result<(), ArrayError> {
        match self.reads.load(Ordering::Relaxed) {
            left if !is_settled || left == usize::MAX => {}
            0 => {
                self.clear();
                return Err(injected("read"));
            }
            left => self.reads.store(left - 1, Ordering::Relaxed),
        }
        Ok(())
    }
}

/// An engine for three sequences, whose programs are cut into pieces of `piece` kernels.
pub fn disturbed_engine(folder: &Path, piece: usize) -> (Engine, Arc<Faults>) {
    disturbed_engine_with(folder, piece, EngineOptions { drafts: 5, ..disturbed_options() })
}

/// The options of a [`disturbed_engine`], without drafts.
pub fn disturbed_options() -> EngineOptions {
    EngineOptions {
        context: 512,
        sequences: 3,
        prefill_step: 64,
        checkpoints: 2,
        compute: Compute::Auto,
        ..EngineOptions::default()
    }
}

/// As [`disturbed_engine`], with other options.
pub fn disturbed_engine_with(folder: &Path, piece: usize, options: EngineOptions) -> (Engine, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    faults.clear();
    let inner = CpuBackend::new(CpuOptions { threads: Some(2), poison_freed: true, ..CpuOptions::default() });
    let backend = InterceptedBackend::new(Arc::new(inner), Arc::clone(&faults));
    let runtime = RuntimeOptions { submission_ops: piece, ..RuntimeOptions::default() };
    (super::engine(folder, &Runtime::new(backend, runtime), options), faults)
}
