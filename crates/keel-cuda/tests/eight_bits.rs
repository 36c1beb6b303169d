//! Which kernels multiply by a weight that is kept in 8-bit floats. Needs a GPU: `KEEL_TEST_CUDA=1`.

use keel_array::{
    Array, ArrayError, Compute, DType, RowBlock, RowData, Runtime, RuntimeOptions, Weight, WeightFormat,
    WeightSpec,
};
use keel_cuda::{CudaBackend, CudaOptions, Survey};
use std::sync::Arc;

const N: usize = 256;
const K: usize = 512;
const GROUP: usize = 64;

fn fill(weight: &Weight) -> Result<(), ArrayError> {
    let (codes, pairs) = (vec![3; N * K], vec![0.5; N * K / GROUP]);
    let data = RowData::Affine { codes: &codes, scales: &pairs, biases: &pairs };
    weight.fill(&RowBlock { expert: 0, first_row: 0, rows: N, data })
}

/// The kernels of a product of `rows` rows.
fn kernels(runtime: &Runtime, backend: &CudaBackend, weight: &Weight, rows: usize) -> Vec<String> {
    let x = Array::from_slice(runtime, &vec![1.0f32; rows * K], [rows, K]).expect("memory");
    backend.take_kernels();
    x.linear(weight).and_then(|y| y.eval()).expect("shapes fit");
    backend.take_kernels()
}

#[test]
fn more_than_128_rows_are_multiplied_in_8_bits_by_the_copy_of_the_weight() {
    if !keel_testkit::has_gpu!() {
        return;
    }
    let backend = Arc::new(CudaBackend::new(&CudaOptions::default()).expect("a GPU"));
    let runtime = Runtime::new(Arc::clone(&backend) as _, RuntimeOptions::default());
    let format = WeightFormat::Affine { bits: 4, group_size: GROUP as _, scale_dtype: DType::BF16 };
    let spec = WeightSpec { experts: 1, rows: N, cols: K, format, compute: Compute::Fp8 };
    let weight = Weight::allocate(&runtime, spec).expect("memory");
    let filled = fill(&weight);
    if Survey::take().gpus[0].capability != (9, 0) {
        let refusal = filled.expect_err("it has no such products").to_string();
        assert!(refusal.contains("compute capability 9.0"), "{refusal}");
        return;
    }
    filled.expect("whole tiles of rows");
    let runs = |kernels: &[String], name: &str| kernels.iter().any(|kernel| kernel.contains(name));
    assert!(runs(&backend.take_kernels(), "dequantize_to_fp8"), "W is rounded when it is loaded");

    let many = kernels(&runtime, &backend, &weight, 129);
    assert!(runs(&many, "quantize_fp8"), "x is rounded: {many:?}");
    assert!(!runs(&many, "linear_panels"), "not in 16 bits: {many:?}");
    assert!(!runs(&many, "dequantize_to_fp8"), "nor is W rounded again: {many:?}");
    let few = kernels(&runtime, &backend, &weight, 128);
    assert!(runs(&few, "linear_panels") && !runs(&few, "quantize_fp8"), "{few:?}");
}
