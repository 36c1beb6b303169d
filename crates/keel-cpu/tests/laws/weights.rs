//! Rows of a weight as weights of their own, and weights that have no memory.

use keel_array::{
    Array, Compute, DType, RowBlock, RowData, Runtime, RuntimeOptions, Weight, WeightFormat, WeightSpec,
};
use keel_cpu::{CpuBackend, CpuOptions};
use std::sync::Arc;

/// A weight of 4 bits with varying codes.
fn weight(runtime: &Runtime, rows: usize, compute: Compute) -> Weight {
    let (cols, format) = (128, WeightFormat::Affine { bits: 4, group_size: 64, scale_dtype: DType::F32 });
    let weight = Weight::allocate(runtime, WeightSpec { experts: 1, rows, cols, format, compute }).unwrap();
    let codes: Vec<u8> = (0..rows * cols).map(|i| ((i * 2_654_435_761) >> 7) as u8 & 15).collect();
    let scales: Vec<f32> = (0..rows * 2).map(|i| 0.1 + (i % 11) as f32).collect();
    let biases: Vec<f32> = scales.iter().map(|scale| -7.0 * scale).collect();
    let data = RowData::Affine { codes: &codes, scales: &scales, biases: &biases };
    weight.fill(&RowBlock { expert: 0, first_row: 0, rows, data }).unwrap();
    weight
}

#[test]
fn rows_of_a_weight_give_what_they_give_within_it() {
    let runtime = crate::runtime();
    let x: Vec<f32> = (0..3 * 128).map(|i| (i as f32 * 0.37).sin()).collect();
    let x = Array::from_slice(&runtime, &x, [3, 128]).unwrap();
    for compute in [Compute::Auto, Compute::F32] {
        let whole = weight(&runtime, 120, compute);
        let all = x.linear(&whole).unwrap().to_vec::<f32>().unwrap();
        for rows in [32..64, 64..120, 0..120] {
            let part = whole.rows(rows.clone()).expect("whole pairs of tiles");
            let got = x.linear(&part).unwrap().to_vec::<f32>().unwrap();
            let want: Vec<f32> = all.chunks(120).flat_map(|row| row[rows.clone()].to_vec()).collect();
            assert_eq!(got, want, "{rows:?} in {compute:?}");
            let again = part.rows(0..rows.len()).expect("the same rows");
            assert_eq!(again.bytes(), part.bytes());
        }
        for rows in [16..64, 32..80, 32..32, 32..121] {
            assert!(whole.rows(rows.clone()).is_none(), "{rows:?}");
        }
    }
}

/// Its elements can be counted, but not the bytes of its packed form.
#[test]
fn a_weight_that_cannot_be_addressed_is_refused_also_in_a_plan() {
    let backend = CpuBackend::planning(CpuOptions { threads: Some(2), ..CpuOptions::default() });
    let planning = Runtime::new(Arc::new(backend), RuntimeOptions::default());
    for runtime in [planning, crate::runtime()] {
        let _other = weight(&runtime, 32, Compute::Auto);
        let format = WeightFormat::Dense(DType::F32);
        let spec = WeightSpec { experts: 1, rows: 1, cols: 1 << 57, format, compute: Compute::Auto };
        let error = Weight::allocate(&runtime, spec).expect_err("no memory is as large").to_string();
        assert!(error.contains(&format!("requested {} bytes", usize::MAX)), "{error}");
    }
}
