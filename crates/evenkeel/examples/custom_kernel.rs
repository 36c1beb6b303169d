//! A kernel of one's own next to the operations of the array library, in one lazy graph.
//!
//! ```text
//! cargo run --release -p evenkeel --example custom_kernel
//! ```

use evenkeel::array::{Array, ArraySpec, Compute, CustomKernel, DType, HostSlice, HostSliceMut};
use evenkeel::{Device, DeviceOptions, Result};

/// The logistic map `y = r x (1 - x)`.
fn logistic_map(n: usize, r: f32) -> CustomKernel {
    CustomKernel::new("logistic_map", vec![ArraySpec::new([n], DType::F32)], 0.0, move |call| {
        let (HostSlice::F32(x), HostSliceMut::F32(y)) = (call.inputs[0], &mut call.outputs[0]) else {
            return Err("works on f32".into());
        };
        y.iter_mut().zip(x).for_each(|(y, x)| *y = r * x * (1.0 - x));
        Ok(())
    })
}

fn main() -> Result<()> {
    run(None)
}

/// The example, with the path of a model or the built-in model.
pub fn run(_: Option<String>) -> Result<()> {
    let cpu = DeviceOptions { device: Some(Device::Cpu), ..DeviceOptions::default() };
    let runtime = cpu.runtime(Compute::Auto)?;
    let kernel = logistic_map(5, 3.7);
    let mut x = Array::from_slice(&runtime, &[0.1f32, 0.2, 0.3, 0.4, 0.5], [5])?;
    for _ in 0..64 {
        x = kernel.apply(&[&x])?.remove(0);
    }
    let mean = x.mean(0)?;
    println!("after 64 steps: {:?}, mean {:?}", x.to_vec::<f32>()?, mean.to_vec::<f32>()?);
    Ok(())
}
