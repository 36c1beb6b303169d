//! A user's own kernel, which composes lazily with every other operation.
//!
//! ```text
//! cargo run --release -p keel-cpu --example custom_kernel
//! ```

use keel_array::{
    Array, CustomKernel, DType, HostSlice, HostSliceMut, Result, Runtime, RuntimeOptions, Shape,
};
use keel_cpu::{CpuBackend, CpuOptions};
use std::sync::Arc;

/// The logistic map `y = r x (1 - x)`.
fn logistic_map(n: usize, r: f32) -> CustomKernel {
    CustomKernel::new("logistic_map", vec![(Shape::from([n]), DType::F32)], 0.0, move |call| {
        let (HostSlice::F32(x), HostSliceMut::F32(y)) = (call.inputs[0], &mut call.outputs[0]) else {
            return Err("works on f32".into());
        };
        y.iter_mut().zip(x).for_each(|(y, x)| *y = r * x * (1.0 - x));
        Ok(())
    })
}

fn main() -> Result<()> {
    let runtime = Runtime::new(Arc::new(CpuBackend::new(CpuOptions::default())), RuntimeOptions::default());
    let kernel = logistic_map(5, 3.7);
    let mut x = Array::from_slice(&runtime, &[0.1f32, 0.2, 0.3, 0.4, 0.5], [5])?;
    // 64 applications in one graph. Handles are dropped on the way; the submission owns the memory that it needs.
    for _ in 0..64 {
        x = kernel.apply(&[&x])?.remove(0);
    }
    let mean = x.mean(0)?;
    println!("after 64 steps: {:?}, mean {:?}", x.to_vec::<f32>()?, mean.to_vec::<f32>()?);
    Ok(())
}
