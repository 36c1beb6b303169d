//! A third backend, written from `docs/design/backend.md` alone: one thread, one oracle for each kernel. It shows that
//! the contract and the testkit suffice to begin one.

mod elements;
mod kernels;
mod runtimes;

use elements::Bytes;
use keel_array::{
    Array, ArrayError, Backend, DType, DeviceMemory, Kernel, Launch, Memory, Op, Programs, Result, RowBlock,
    Runtime, RuntimeOptions, Submission, WeightSpec,
};
use keel_testkit::checks;
use std::sync::Arc;

/// The backend. It has no state of its own.
struct Third;

impl Backend for Third {
    fn name(&self) -> &str {
        "third"
    }
}

impl Memory for Third {
    fn allocate(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        Ok(Box::new(Bytes::zeroed(bytes)))
    }

    fn write(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &[u8]) {
        Bytes::of(memory)[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    fn read(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &mut [u8]) -> Result<()> {
        bytes.copy_from_slice(&Bytes::of(memory)[offset..offset + bytes.len()]);
        Ok(())
    }

    /// No kernel reads a weight yet.
    fn packed_bytes(&self, _: &WeightSpec) -> usize {
        0
    }

    fn pack(&self, _: &WeightSpec, _: &dyn DeviceMemory, _: usize, _: &RowBlock<'_>) -> Result<()> {
        Err(ArrayError::Kernel { op: "pack".into(), reason: "weights are not supported yet".into() })
    }
}

impl Programs for Third {
    fn supports(&self, kernel: &Kernel) -> Result<(), String> {
        kernels::supports(&kernel.op)
    }

    fn workspace_bytes(&self, _: &Kernel) -> usize {
        0
    }
}

impl Submission for Third {
    fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        for (i, kernel) in launch.kernels().iter().enumerate() {
            kernels::run(kernel, launch).map_err(|reason| {
                launch.note_done(i);
                ArrayError::Kernel { op: kernel.op.name().into(), reason }
            })?;
        }
        Ok(())
    }
}

/// Checks of operations that this backend refuses, by their names in the list of checks.
const REFUSED: &[&str] = &[
    "add_rms_norm",
    "causal_conv",
    "combine_experts",
    "custom",
    "embedding",
    "gated_delta",
    "gated_rms_norm",
    "gather_linear",
    "linear",
    "norm_rope",
    "paged_attention",
    "rope",
    "rotate_pairs",
    "route_top_k",
    "sample",
    "swiglu",
];

#[test]
fn a_backend_written_from_the_contract_passes_the_shared_checks() {
    let runtime = Runtime::new(Arc::new(Third), RuntimeOptions::default());
    let (refused, run): (Vec<_>, Vec<_>) =
        checks::all().into_iter().partition(|check| REFUSED.contains(&check.op));
    assert!(run.len() > 60 && !refused.is_empty(), "{} checks", run.len());
    for check in run {
        check.run(&runtime);
    }
    runtime.clear_cache();
    assert_eq!(runtime.ledger().active().total(), 0, "nothing is held after the checks");
}

#[test]
fn an_operation_without_a_kernel_is_refused_before_anything_runs() {
    let runtime = Runtime::new(Arc::new(Third), RuntimeOptions::default());
    let x = Array::zeros(&runtime, [2, 8], DType::F32).expect("shape");
    let z = Array::zeros(&runtime, [2, 8], DType::F32).expect("shape");
    let w = Array::zeros(&runtime, [8], DType::F32).expect("shape");
    let y = x.gated_rms_norm(&w, &z, 1e-6).expect("shapes fit");
    let error = y.eval().expect_err("no such kernel").to_string();
    for part in ["third", "gated_rms_norm", "not supported yet"] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(runtime.submissions(), 0, "a program that is refused is not submitted");
    assert!(kernels::supports(&Op::Softmax).is_ok());
}
