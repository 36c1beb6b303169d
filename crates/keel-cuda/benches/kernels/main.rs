//! Single kernels of a GPU, compared with its floors. `cargo bench -p keel-cuda --bench kernels [-- FILTER]` takes
//! device 0 and up to 8 GB of its memory.
//!
//! The time of a kernel is (T(3 N) - T(N)) / 2 N, where T(n) is the time of a graph of n of them, the median of 20
//! runs. So it does not contain starting a graph and waiting for it, but it contains the overlap of each kernel with
//! the one before, as in a step. Each kernel has its own random data, together more than the cache holds.
//!
//! A line counts the bytes that cannot be saved, each once, next to the rate of a copy within the device (reads and
//! writes); or the operations, next to those of cuBLASLt's largest bf16 product. `--test operations` checks the
//! results.
//!
//! With several GPUs, lines with `one_shot_all_reduce` are sums over all of them; see `sums.rs`.

mod products;
mod sequence;
mod sums;

use keel_array::{Array, Category, DType, KvFormat, Result, Runtime, RuntimeOptions};
use keel_cuda::{CudaBackend, CudaOptions, GpuPeaks};
use keel_testkit::random::Random;
use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

/// Timed runs, after the runs that load and capture.
const RUNS: usize = 20;
const WARM_UP: usize = 3;

/// More than any cache holds.
const COLD_BYTES: usize = 256 << 20;

/// Instances of a kernel in the shorter graph, at most.
const INSTANCES: usize = 128;

/// The work that a kernel cannot avoid.
#[derive(Clone, Copy)]
enum Floor {
    /// Bytes read and written.
    Bytes(usize),
    /// Operations of tensor cores, a multiply-add counted as two, and their number of rows.
    Operations(f64, usize),
}

struct Bench {
    runtime: Runtime,
    peaks: GpuPeaks,
    filter: String,
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with("--")).unwrap_or_default();
    let groups = sums::groups();
    let peaks = GpuPeaks::measure(0)?;
    println!(
        "{}, copy {:.2} TB/s, bf16 {:.0} TFLOP/s",
        peaks.name,
        peaks.copy_bytes_per_s / 1e12,
        peaks.bf16_ops_per_s / 1e12
    );
    let backend = Arc::new(CudaBackend::new(&CudaOptions::default())?);
    let bench = Bench { runtime: Runtime::new(backend, RuntimeOptions::default()), peaks, filter };
    products::time(&bench)?;
    sequence::time(&bench)?;
    sums::time(groups, &bench.filter)?;
    Ok(())
}

impl Bench {
    /// Times `op` on instances that `data` makes and prints a line, if the filter asks for it. `cold` bytes of an
    /// instance are its own and have to come from memory.
    fn time<D>(
        &self,
        name: &str,
        floor: Floor,
        cold: usize,
        mut data: impl FnMut() -> Result<D>,
        op: impl Fn(&D) -> Result<Array>,
    ) -> Result<()> {
        if !name.contains(&self.filter) {
            return Ok(());
        }
        let few = COLD_BYTES.div_ceil(cold).clamp(1, INSTANCES);
        let instances = (0..3 * few).map(|_| data()).collect::<Result<Vec<D>>>()?;
        let (short, long) = (self.graph(&instances[..few], &op)?, self.graph(&instances, &op)?);
        self.report(name, floor, (long - short) / (2 * few) as f64);
        Ok(())
    }

    /// Seconds of a graph of these instances, the median.
    fn graph<D>(&self, instances: &[D], op: impl Fn(&D) -> Result<Array>) -> Result<f64> {
        let lazy = self.runtime.trace(|| instances.iter().map(&op).collect::<Result<Vec<Array>>>())?;
        let places = lazy
            .iter()
            .map(|y| Array::persistent(&self.runtime, Category::Activations, y.shape().clone(), y.dtype()))
            .collect::<Result<Vec<Array>>>()?;
        let results: Vec<(&Array, &Array)> = lazy.iter().zip(&places).collect();
        let graph = self.runtime.prepare(&results)?;
        median_seconds(RUNS, || Ok(graph.run()?))
    }

    fn report(&self, name: &str, floor: Floor, seconds: f64) {
        let GpuPeaks { copy_bytes_per_s, bf16_ops_per_s, .. } = self.peaks;
        let (amount, peak, unit, per_row) = match floor {
            Floor::Bytes(bytes) => (bytes as f64, copy_bytes_per_s, "TB/s", String::new()),
            Floor::Operations(operations, rows) => {
                let per_row = format!(", {:.1} ns a row", seconds / rows as f64 * 1e9);
                (operations, bf16_ops_per_s, "TFLOP/s", per_row)
            }
        };
        println!(
            "{name:70} {:9.1} us, floor {:8.1}: {:6.2} {unit}, {:3.0}%{per_row}",
            seconds * 1e6,
            amount / peak * 1e6,
            amount / seconds / 1e12,
            100.0 * amount / seconds / peak,
        );
    }

    /// Memory of random numbers in `-1..1`.
    fn random(&self, shape: &[usize]) -> Result<Array> {
        self.random_within(shape, DType::F32, -1.0, 1.0)
    }

    /// Coded pages `[pages, KV, 256, W]` of heads of `size`, with steps of 1/87: random codes, repeated.
    fn coded_pages(&self, shape: &[usize], size: usize) -> Result<Array> {
        /// Heads with codes of their own.
        const HEADS: usize = 32;
        let array = Array::persistent(&self.runtime, Category::Kv, shape, DType::U8)?;
        let (bytes, head) = (shape.iter().product::<usize>(), shape[2..].iter().product::<usize>());
        let steps = shape[2] * (size / KvFormat::GROUP) * 2;
        let mut random = Random::new(bytes as u64);
        let mut block: Vec<u8> = (0..HEADS * head).map(|_| random.below(256) as u8).collect();
        block.chunks_exact_mut(head).for_each(|head_page| head_page[head - steps..].fill(0x3c));
        for start in (0..bytes).step_by(block.len()) {
            array.write_bytes(start, &block[..block.len().min(bytes - start)])?;
        }
        Ok(array)
    }

    /// Random numbers in f32 or f16: one block of them, repeated.
    fn random_within(&self, shape: &[usize], dtype: DType, low: f32, high: f32) -> Result<Array> {
        /// Odd, so that rows of the usual lengths differ.
        const BLOCK: usize = (1 << 20) + 1;
        let array = Array::persistent(&self.runtime, Category::Activations, shape, dtype)?;
        let elements: usize = shape.iter().product();
        let values = Random::new(elements as u64).uniforms(elements.min(BLOCK), low, high);
        let bytes: Vec<u8> = match dtype {
            DType::F16 => values.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        for start in (0..elements * dtype.size()).step_by(bytes.len()) {
            let len = bytes.len().min(elements * dtype.size() - start);
            array.write_bytes(start, &bytes[..len])?;
        }
        Ok(array)
    }
}

/// The median of `runs` runs, after those that load and capture.
fn median_seconds(runs: usize, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut seconds = Vec::with_capacity(runs);
    for number in 0..WARM_UP + runs {
        let start = Instant::now();
        run()?;
        if number >= WARM_UP {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[runs / 2])
}
