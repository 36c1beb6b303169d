//! A program that a GPU cannot run is refused when it is made, on a backend that only plans.

use keel_array::{
    Array, ArrayError, ArraySpec, AttentionSpec, Batch, Category, Compute, ConvWindow, CustomKernel, DType,
    DeltaState, GatedDeltaSpec, KvPool, Regime, RowLog, Runtime, RuntimeOptions, Weight, WeightFormat,
    WeightSpec,
};
use keel_cuda::{CudaBackend, CudaOptions};
use std::sync::Arc;

fn runtime() -> Runtime {
    let backend = CudaBackend::planning(&CudaOptions::default());
    Runtime::new(Arc::new(backend), RuntimeOptions::default())
}

fn floats(runtime: &Runtime, shape: &[usize]) -> Array {
    Array::persistent(runtime, Category::User, shape.to_vec(), DType::F32).expect("a plan has room")
}

/// Sequences with a page each.
fn batch(runtime: &Runtime, sequences: usize) -> Batch {
    let index = |shape: &[usize]| {
        Array::persistent(runtime, Category::Staging, shape.to_vec(), DType::U32).expect("a plan has room")
    };
    Batch {
        row_start: index(&[sequences + 1]),
        slot: index(&[sequences]),
        position: index(&[sequences]),
        table: index(&[sequences, 1]),
        accepted: index(&[sequences]),
    }
}

/// Prepares attention of one row with heads of this size.
fn attention(size: usize) -> Result<(), ArrayError> {
    let runtime = runtime();
    let batch = batch(&runtime, 1);
    let pool = || floats(&runtime, &[1, 1, AttentionSpec::PAGE, size]);
    let pools = KvPool { keys: pool(), values: pool() };
    let [q, k, v, out] = [(); 4].map(|()| floats(&runtime, &[1, 1, size]));
    let spec = AttentionSpec { scale: 1.0.into(), window: None, regime: Regime::Decode };
    let y = runtime.trace(|| q.paged_attention(&k, &v, &pools, &batch, spec))?;
    runtime.prepare(&[(&y, &out)]).map(drop)
}

#[test]
fn what_the_backend_holds_for_itself_is_in_the_plan() {
    let runtime = runtime();
    let active = runtime.ledger().active();
    // Counters; 4 MiB of pinned memory for each direction, and the slots of the queue.
    assert!((1 << 18..1 << 19).contains(&active.get(Category::Workspace)), "{active:?}");
    assert!((8 << 20..9 << 20).contains(&active.get(Category::Staging)), "{active:?}");
    assert_eq!(active.total(), active.get(Category::Workspace) + active.get(Category::Staging));
}

#[test]
fn heads_wider_than_the_kernels_take_are_refused() {
    for size in [16, 64, 128, 256] {
        attention(size).unwrap_or_else(|error| panic!("heads of {size}: {error}"));
    }
    for size in [272, 512] {
        let error = attention(size).expect_err("no kernel takes it").to_string();
        assert!(error.starts_with("cuda:0 cannot run paged_attention: heads of"), "{error}");
        assert!(error.contains("multiples of 16 up to 256") && error.contains("--device cpu"), "{error}");
    }
}

#[test]
fn more_products_than_a_grid_has_blocks_are_refused() {
    let runtime = runtime();
    let product = |batch: usize| {
        let (a, b) = (floats(&runtime, &[batch, 1, 2]), floats(&runtime, &[batch, 2, 1]));
        let out = floats(&runtime, &[batch, 1, 1]);
        let y = runtime.trace(|| a.matmul(&b)).expect("extents fit");
        runtime.prepare(&[(&y, &out)]).map(drop)
    };
    product(65_535).expect("a grid has 65,535");
    let error = product(65_536).expect_err("a grid has fewer").to_string();
    assert!(error.contains("cannot run matmul: 65536 products in a batch; the GPU takes 65535"), "{error}");
}

#[test]
fn a_kernel_of_the_users_without_a_body_for_the_device_is_refused() {
    let runtime = runtime();
    let [x, out] = [(); 2].map(|()| floats(&runtime, &[4]));
    let kernel = CustomKernel::new("twice", vec![ArraySpec::new([4], DType::F32)], 0.0, |_| Ok(()));
    let y = runtime.trace(|| kernel.apply(&[&x])).expect("one runtime");
    let error = runtime.prepare(&[(&y[0], &out)]).map(drop).expect_err("no body").to_string();
    assert!(error.contains("cannot run twice") && error.contains("with_cuda"), "{error}");
}

/// Prepares a convolution of rows of two channels.
fn convolution(width: usize, rows: usize, sequences: usize) -> Result<(), ArrayError> {
    let runtime = runtime();
    let batch = batch(&runtime, sequences);
    let [x, out] = [(); 2].map(|()| floats(&runtime, &[rows, 2]));
    let window = ConvWindow { rows: floats(&runtime, &[sequences, width - 1, 2]), open: None };
    let weight = floats(&runtime, &[width, 2]);
    let y = runtime.trace(|| x.causal_conv(&weight, &window, &batch, RowLog::None))?;
    runtime.prepare(&[(&y, &out)]).map(drop)
}

#[test]
fn convolutions_beyond_a_tile_and_a_grid_are_refused() {
    const TILES: usize = 65_535;
    for (width, rows, sequences) in [(33, 64, 1), (4, 32 * (TILES - 1), 1), (4, 32 * (TILES - 9), 9)] {
        convolution(width, rows, sequences).unwrap_or_else(|error| panic!("{width}, {rows}: {error}"));
    }
    for (width, rows, sequences, reason) in [
        (34, 64, 1, "34 columns of a convolution; the GPU takes 33"),
        (4, 32 * TILES, 1, "65536 tiles of 32 rows in a step; the GPU takes 65535"),
        (4, 32 * (TILES - 9) + 1, 9, "65536 tiles of 32 rows in a step; the GPU takes 65535"),
    ] {
        let error = convolution(width, rows, sequences).expect_err("no kernel takes it").to_string();
        assert!(error.contains(reason), "{error}");
    }
}

/// Prepares a prompt's gated delta rule with heads of 16.
fn gated_delta(rows: usize, sequences: usize) -> Result<(), ArrayError> {
    let runtime = runtime();
    let batch = batch(&runtime, sequences);
    let spec = GatedDeltaSpec {
        key_heads: 1,
        value_heads: 1,
        key_dim: 16,
        value_dim: 16,
        regime: Regime::Prefill,
        log: RowLog::None,
    };
    let (qkv, out) = (floats(&runtime, &[rows, 48]), floats(&runtime, &[rows, 1, 16]));
    let [a, b] = [(); 2].map(|()| floats(&runtime, &[rows, 1]));
    let [a_log, dt_bias] = [(); 2].map(|()| floats(&runtime, &[1]));
    let state = DeltaState { state: floats(&runtime, &[sequences, 1, 16, 16]), records: None };
    let y = runtime.trace(|| qkv.gated_delta(&a, &b, &a_log, &dt_bias, &state, &batch, spec))?;
    runtime.prepare(&[(&y, &out)]).map(drop)
}

#[test]
fn more_chunks_than_a_grid_has_blocks_are_refused() {
    const CHUNKS: usize = 65_535;
    for (rows, sequences) in [(64 * (CHUNKS - 1), 1), (64 * (CHUNKS - 9), 9)] {
        gated_delta(rows, sequences).unwrap_or_else(|error| panic!("{rows}, {sequences}: {error}"));
    }
    for (rows, sequences) in [(64 * CHUNKS, 1), (64 * (CHUNKS - 9) + 1, 9)] {
        let error = gated_delta(rows, sequences).expect_err("a grid has fewer").to_string();
        let reason = "cannot run gated_delta: 65536 chunks of 64 rows in a step; the GPU takes 65535";
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn more_rows_than_a_grid_has_blocks_are_refused() {
    let prepare = |blocks: usize, what: fn(&Array) -> Result<Array, ArrayError>| {
        let runtime = runtime();
        let (x, out) = (floats(&runtime, &[blocks, 1 << 15, 1]), floats(&runtime, &[blocks, 1 << 15, 1]));
        let y = runtime.trace(|| what(&x))?;
        runtime.prepare(&[(&y, &out)]).map(drop)
    };
    let softmax: fn(&Array) -> _ = |x| x.softmax(-1);
    let norm: fn(&Array) -> _ = |x| x.rms_norm(&floats(x.runtime(), &[1]), 1e-6);
    for (name, what) in [("softmax", softmax), ("rms_norm", norm)] {
        prepare((1 << 16) - 1, what).unwrap_or_else(|error| panic!("{name}: {error}"));
        let error = prepare(1 << 16, what).expect_err("a grid has fewer").to_string();
        let reason = format!("cannot run {name}: 2147483648 rows; the GPU takes 2147483647");
        assert!(error.contains(&reason), "{error}");
    }
}

/// Prepares a product of rows of 64 with chosen experts.
fn gathered(rows: usize, cols: usize, format: WeightFormat) -> Result<(), ArrayError> {
    let runtime = runtime();
    let spec = WeightSpec { experts: 2, rows: 64, cols, format, compute: Compute::Bf16 };
    let weight = Weight::allocate(&runtime, spec)?;
    let (x, out) = (floats(&runtime, &[rows, cols]), floats(&runtime, &[rows, 3, 64]));
    let experts = Array::persistent(&runtime, Category::Staging, [rows, 3], DType::U32)?;
    let y = runtime.trace(|| x.gather_linear(&weight, &experts))?;
    runtime.prepare(&[(&y, &out)]).map(drop)
}

#[test]
fn chosen_experts_have_no_rows_or_rows_that_a_block_holds() {
    let affine = WeightFormat::Affine { bits: 4, group_size: 64, scale_dtype: DType::BF16 };
    let dense = WeightFormat::Dense(DType::BF16);
    for (rows, cols, format) in [(0, 256, affine), (0, 256, dense), (5, 256, affine), (5, 23_296, dense)] {
        gathered(rows, cols, format).unwrap_or_else(|error| panic!("{rows}, {cols}, {format:?}: {error}"));
    }
    let error = gathered(5, 23_297, dense).expect_err("a block has less shared memory").to_string();
    assert!(error.contains("experts of 23297 columns, which take 93440 bytes"), "{error}");
}
