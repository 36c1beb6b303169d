//! What the machine can do at most, measured now.

use std::time::Duration;

use anyhow::Result;
use keel_array::Compute;
use keel_cpu::floors::{self, Peaks};
use keel_cpu::isa::Isa;
use keel_cpu::pool::ThreadPool;

use crate::args::DeviceArgs;

/// Larger than last-level caches, smaller than the weights of the smallest shape, so that the measurement does not
/// raise the peak of the process.
const BUFFER_BYTES: usize = 384 << 20;
const BANDWIDTH_BUDGET: Duration = Duration::from_millis(500);
const PEAK_BUDGET: Duration = Duration::from_millis(50);

/// Rates of the whole thread pool.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    pub threads: usize,
    pub isa: Isa,
    pub read_bytes_per_s: f64,
    peaks: Peaks,
}

impl Machine {
    /// Measures for about a second.
    ///
    /// # Errors
    /// If another device than the CPU is asked for.
    pub fn measure(device: &DeviceArgs) -> Result<Machine> {
        let backend = device.planning_backend()?;
        let (threads, isa) = (backend.threads(), backend.isa());
        let pool = ThreadPool::new(threads);
        let buffer = vec![1u64; BUFFER_BYTES / size_of::<u64>()];
        Ok(Machine {
            threads,
            isa,
            read_bytes_per_s: floors::read_bandwidth(&pool, &buffer, BANDWIDTH_BUDGET),
            peaks: floors::peaks(&pool, isa, PEAK_BUDGET),
        })
    }

    /// Operations per second of the instruction that linear layers use, if it was measured.
    pub fn peak_of(&self, compute: Compute, quantised: bool) -> Option<f64> {
        match compute {
            Compute::F32 => self.peaks.f32_fma,
            Compute::Auto if quantised => self.peaks.int8_dot.or(self.peaks.f32_fma),
            _ => self.peaks.bf16_dot.or(self.peaks.f32_fma),
        }
    }
}
