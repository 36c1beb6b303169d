//! Host time of a launch: a prepared step of 300 tiny kernels, in which only the walk over the kernels costs time.
//!
//! Cost per kernel: two operands to resolve, a call by every worker, a barrier. Floor: the barrier, some 100 ns between
//! two cores. Goal: under 1 us a kernel, so that a step of 300 kernels costs at most 0.3 ms.
//!
//! ```text
//! cargo bench -p keel-cpu --bench launch
//! ```

use keel_array::{Array, Category, DType, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use std::sync::Arc;
use std::time::Instant;

const KERNELS: usize = 300;
const RUNS: usize = 200;

fn main() -> keel_array::Result<()> {
    for threads in [1, 2] {
        let options = CpuOptions { threads: Some(threads), ..CpuOptions::default() };
        let runtime = Runtime::new(Arc::new(CpuBackend::new(options)), RuntimeOptions::default());
        let storage = || Array::persistent(&runtime, Category::Staging, [4, 16], DType::F32);
        let (input, output) = (storage()?, storage()?);
        input.write(&[1.0f32; 64])?;
        // Alternating sums are not fused and do not grow.
        let value =
            runtime.trace(|| (0..KERNELS).try_fold(input.clone(), |x, i| x.cumsum(-1, i % 2 == 0, true)))?;
        let step = runtime.prepare(&[(&value, &output)])?;
        assert_eq!(step.program().kernels().len(), KERNELS);
        step.run()?;
        assert_eq!(
            output.to_vec::<f32>()?,
            value.to_vec::<f32>()?,
            "a prepared step gives the values of the graph"
        );
        let mut best = f64::INFINITY;
        for _ in 0..RUNS {
            let start = Instant::now();
            step.run()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        println!(
            "{threads} threads: {:.0} ns a kernel (goal 1000), best of {RUNS} runs",
            best / KERNELS as f64 * 1e9
        );
    }
    Ok(())
}
