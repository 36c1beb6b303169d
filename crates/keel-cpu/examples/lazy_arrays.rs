//! Lazy arrays: when operations run, and how much memory they take.
//!
//! ```text
//! cargo run --release -p keel-cpu --example lazy_arrays
//! ```

use keel_array::{Array, DType, RandomKind, Result, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use std::sync::Arc;

fn main() -> Result<()> {
    let options = RuntimeOptions { memory_limit: Some(64 << 20), ..RuntimeOptions::default() };
    let runtime = Runtime::new(Arc::new(CpuBackend::new(CpuOptions::default())), options);
    let bytes = || runtime.ledger().active().total();

    // Building checks shapes and types; nothing runs, nothing is allocated.
    let x = Array::random(&runtime, RandomKind::Normal, [1000, 64], 7)?;
    let w = Array::random(&runtime, RandomKind::Normal, [64, 32], 8)?;
    let y = x.matmul(&w)?.silu()?.softmax(-1)?;
    println!("built:     {} operations pending, {} bytes", runtime.pending_ops(), bytes());
    if let Err(error) = x.matmul(&x) {
        println!("refused:   {error}");
    }

    // One submission computes the graph; intermediates share one arena.
    y.eval()?;
    println!("evaluated: {} operations pending, {} bytes", runtime.pending_ops(), bytes());

    // A slice that is kept holds its own bytes, not its parent's.
    let row = y.slice_axis(0, 999, 1000)?;
    row.eval()?;
    println!("row sums to {:?}, holds {:?} bytes", row.sum(1)?.to_vec::<f32>()?, row.held_bytes());

    // Dropping the last handle frees at once.
    drop((x, w, y));
    runtime.clear_cache();
    println!("dropped:   {} bytes", bytes());

    // A limit is an answer, before anything is allocated.
    let large = Array::full(&runtime, [1 << 25], DType::F32, 1.0)?;
    if let Err(error) = large.eval() {
        println!("refused:   {error}");
    }
    Ok(())
}
