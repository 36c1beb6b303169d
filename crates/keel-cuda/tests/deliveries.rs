//! Small writes of the host arrive before any kernel reads them, also kernels that start early. Needs a GPU:
//! `KEEL_TEST_CUDA=1`.

use keel_array::{
    Array, Compute, DType, RowBlock, RowData, Runtime, RuntimeOptions, Weight, WeightFormat, WeightSpec,
};
use keel_cuda::{CudaBackend, CudaOptions};
use std::sync::Arc;

const ROUNDS: usize = 2000;

/// A product fetches its packed weight before it waits for its inputs. 129 rows of 384 columns in 3 bits are one
/// delivery of 18 KiB: its blocks' warps end at different times.
#[test]
fn a_weight_has_arrived_before_a_product_fetches_it() {
    if !keel_testkit::has_gpu!() {
        return;
    }
    let backend = CudaBackend::new(&CudaOptions::default()).expect("a GPU");
    let runtime = Runtime::new(Arc::new(backend), RuntimeOptions::default());
    let (tokens, rows, cols) = (65, 129, 384);
    let format = WeightFormat::Affine { bits: 3, group_size: 64, scale_dtype: DType::BF16 };
    let spec = WeightSpec { experts: 1, rows, cols, format, compute: Compute::Auto };
    let weight = Weight::allocate(&runtime, spec).expect("memory");
    let groups = rows * cols / 64;
    let x = Array::from_slice(&runtime, &vec![1.0f32; tokens * cols], [tokens, cols]).expect("memory");
    x.eval().expect("an upload");
    for round in 0..ROUNDS {
        let level = (round % 7 + 1) as u8;
        let data = RowData::Affine {
            codes: &vec![level; rows * cols],
            scales: &vec![1.0; groups],
            biases: &vec![0.0; groups],
        };
        weight.fill(&RowBlock { expert: 0, first_row: 0, rows, data }).expect("whole rows");
        let y = x.linear(&weight).expect("extents fit").to_vec::<f32>().expect("a product");
        let want = f32::from(level) * cols as f32;
        let wrong = y.iter().filter(|&&y| y != want).count();
        assert_eq!(wrong, 0, "round {round}: elements of {} that are not {want}", y.len());
    }
}
