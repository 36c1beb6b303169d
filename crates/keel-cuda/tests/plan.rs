//! What the kernels of a program are, as planned; this needs no GPU.

use keel_array::{
    Array, Category, Compute, DType, Runtime, RuntimeOptions, Weight, WeightFormat, WeightSpec,
};
use keel_cuda::{CudaBackend, CudaOptions};
use std::sync::Arc;

const K: usize = 256;

fn weight(runtime: &Runtime, rows: usize, cols: usize) -> Weight {
    let format = WeightFormat::Affine { bits: 4, group_size: 64, scale_dtype: DType::BF16 };
    let spec = WeightSpec { experts: 1, rows, cols, format, compute: Compute::Auto };
    Weight::allocate(runtime, spec).expect("a weight")
}

/// Names of the kernels of the second half of a layer, and bytes of the arena.
fn feed_forward(rows: usize) -> (Vec<String>, usize) {
    let planning = CudaBackend::planning(&CudaOptions::default());
    let runtime = Runtime::new(Arc::new(planning), RuntimeOptions::default());
    let (gate_up, down) = (weight(&runtime, 2 * 512, K), weight(&runtime, K, 512));
    let array = |shape: &[usize]| {
        Array::persistent(&runtime, Category::Activations, shape, DType::F32).expect("memory")
    };
    let (x, scale, place) = (array(&[rows, K]), array(&[K]), array(&[rows, K]));
    runtime.trace(|| {
        let normed = x.rms_norm(&scale, 1e-6).expect("shapes fit");
        let inner = normed.linear(&gate_up).and_then(|wide| wide.swiglu()).expect("shapes fit");
        let y = inner.linear_add(&down, &x).expect("shapes fit");
        let prepared = runtime.prepare(&[(&y, &place)]).expect("a program");
        let program = prepared.program();
        let names = program.kernels().iter().map(|kernel| kernel.op.name().to_owned()).collect();
        (names, program.arena_bytes())
    })
}

#[test]
fn norms_and_gates_disappear_into_products_of_few_rows() {
    // A single row is rounded by each block for itself: the arena holds what is between the two kernels.
    let (names, arena_bytes) = feed_forward(1);
    assert_eq!((&names[..], arena_bytes), (&["swiglu".to_owned(), "linear".to_owned()][..], 4 * 512));
    assert_eq!(feed_forward(16).0, ["swiglu", "linear"]);
    assert_eq!(feed_forward(17).0, ["rms_norm", "linear", "swiglu", "linear"]);
}
