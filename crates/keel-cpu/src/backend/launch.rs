//! Running a list of kernels as one job of the pool.

use super::dispatch::{self, Call};
use super::group::CpuGroup;
use super::memory::{HostMemory, POISON};
use super::operand::Bound;
use super::profile::{Profile, name_of};
use crate::isa::Isa;
use crate::pool::{ThreadPool, Worker};
use crate::shared_slice::SharedMut;
use keel_array::{ArrayError, Kernel, Launch, panic_message};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// The first failed kernel and its error.
///
/// Workers stop after the barrier of the kernel that failed. A fast worker may already have recorded a failure of the
/// next kernel. So workers compare kernel numbers instead of checking for any failure: all stop after the same one.
struct Failure {
    kernel: AtomicUsize,
    error: Mutex<Option<(usize, ArrayError)>>,
}

impl Failure {
    fn note(&self, kernel: usize, error: ArrayError) {
        self.kernel.fetch_min(kernel, Ordering::AcqRel);
        let mut slot = self.error.lock().unwrap_or_else(|e| e.into_inner());
        if slot.as_ref().is_none_or(|(earlier, _)| kernel < *earlier) {
            *slot = Some((kernel, error));
        }
    }
}

/// Additional work of a walk, next to running kernels.
#[derive(Clone, Copy)]
pub(super) struct Watch<'a> {
    pub isa: Isa,
    /// Sums the time of each kernel.
    pub profile: Option<&'a Profile>,
    /// Fills scratch with NaN before each kernel, so that a read of unwritten scratch shows up.
    pub poison: bool,
    /// The backend's group, if it is in one.
    pub group: Option<&'a CpuGroup>,
}

/// Runs the kernels of a launch.
pub(super) fn run<'a>(pool: &ThreadPool, launch: &Launch<'a>, watch: Watch<'a>) -> Result<(), ArrayError> {
    let _turn = watch.group.map(CpuGroup::turn);
    let calls = Calls::resolve(launch, watch);
    let failure = Failure { kernel: AtomicUsize::new(usize::MAX), error: Mutex::new(None) };
    let outcome = catch_unwind(AssertUnwindSafe(|| pool.run(|worker| walk(&calls, &failure, watch, worker))));
    if let Err(panic) = outcome {
        // A bug of ours. As an error it reaches the caller that waits for the result; a dead stream would not.
        let reason = format!("a kernel panicked, which is a bug of the backend: {}", panic_message(&*panic));
        return Err(ArrayError::Kernel { op: "launch".into(), reason });
    }
    match failure.error.into_inner().unwrap_or_else(|e| e.into_inner()) {
        Some((kernel, error)) => {
            // A kernel checks its data before it writes anything, so exactly the kernels before it are done.
            launch.note_done(kernel);
            Err(error)
        }
        None => Ok(()),
    }
}

fn walk(calls: &Calls<'_>, failure: &Failure, watch: Watch<'_>, worker: &Worker<'_>) {
    let profile = watch.profile.filter(|_| worker.index == 0);
    for i in 0..calls.kernels.len() {
        let call = calls.get(i);
        if watch.poison && !call.scratch.is_empty() {
            if worker.index == 0 {
                // SAFETY: the others wait at the barrier.
                unsafe { call.scratch.range(0..call.scratch.len()) }.fill(POISON);
            }
            worker.barrier();
        }
        let start = profile.map(|_| Instant::now());
        if let Err(error) = dispatch::run(&call, worker) {
            failure.note(i, error);
        }
        worker.barrier();
        if let (Some(profile), Some(start)) = (profile, start) {
            profile.add(name_of(&calls.kernels[i]), start.elapsed());
        }
        if failure.kernel.load(Ordering::Acquire) <= i {
            return;
        }
    }
}

/// Kernels with their operands resolved, once for all workers.
struct Calls<'a> {
    kernels: &'a [Kernel],
    /// Inputs, then outputs, kernel by kernel.
    operands: Vec<Bound<'a>>,
    /// First operand of each kernel.
    starts: Vec<usize>,
    arena: Option<SharedMut<'a, u8>>,
    isa: Isa,
    group: Option<&'a CpuGroup>,
}

impl<'a> Calls<'a> {
    fn resolve(launch: &Launch<'a>, watch: Watch<'a>) -> Calls<'a> {
        let kernels = launch.kernels();
        let mut operands = Vec::with_capacity(4 * kernels.len());
        let mut starts = Vec::with_capacity(kernels.len());
        for kernel in kernels {
            starts.push(operands.len());
            // SAFETY: the launch owns the buffers for 'a, and the stream runs one launch at a time. The verified plan
            // of the program keeps the operands of a kernel apart. State is contiguous and not an output of any kernel.
            operands.extend(
                kernel.inputs.iter().chain(&kernel.outputs).map(|o| unsafe { Bound::new(launch, o) }),
            );
        }
        let has_scratch = kernels.iter().any(|k| k.workspace.is_some());
        let arena = has_scratch.then(|| {
            let memory = HostMemory::of(launch.arena().memory());
            // SAFETY: the arena is memory of the launch; parts are lent as the plan says.
            unsafe { SharedMut::from_raw(memory.start(), memory.bytes()) }
        });
        Calls { kernels, operands, starts, arena, isa: watch.isa, group: watch.group }
    }

    fn get(&self, i: usize) -> Call<'_> {
        let kernel = &self.kernels[i];
        let (inputs, rest) = self.operands[self.starts[i]..].split_at(kernel.inputs.len());
        let scratch = match (&kernel.workspace, self.arena) {
            (Some(range), Some(arena)) => arena.part(range.clone()),
            _ => SharedMut::new(&mut []),
        };
        Call {
            kernel,
            inputs,
            outputs: &rest[..kernel.outputs.len()],
            scratch,
            isa: self.isa,
            group: self.group,
        }
    }
}
