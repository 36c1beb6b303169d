//! Measures the peak rates of the machine.

use std::fmt;
use std::time::Duration;

use anyhow::Result;
use keel_array::Compute;
use keel_cpu::CpuBackend;
use keel_cpu::floors;
use keel_cpu::pool::ThreadPool;
use keel_cuda::GpuPeaks;
use keel_engine::split::DeviceGrid;

use crate::args::{Device, DeviceArgs};

/// Larger than last-level caches, so that memory is measured. Smaller than the weights of the smallest shape, so that
/// the measurement does not raise the peak of the process.
const BUFFER_BYTES: usize = 384 << 20;
const BANDWIDTH_BUDGET: Duration = Duration::from_millis(500);
const PEAK_BUDGET: Duration = Duration::from_millis(50);

/// Rates of a whole device.
#[derive(Clone, Debug)]
pub struct Machine {
    /// `cpu`, or the name of the GPU.
    pub device: String,
    /// The instruction set in use; for a GPU, its compute capability.
    pub instructions: String,
    /// Threads of the CPU, or multiprocessors of the GPU.
    pub threads: usize,
    pub read_bytes_per_s: f64,
    f32_fma: Option<f64>,
    int8_dot: Option<f64>,
    bf16_dot: Option<f64>,
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} threads, {}", self.device, self.threads, self.instructions)
    }
}

impl Machine {
    /// Measures for about one second.
    ///
    /// # Errors
    /// The device is not available.
    pub fn measure(device: &DeviceArgs) -> Result<Machine> {
        // The last of several devices is one of this process.
        let members = device.split.members();
        match members.last().map_or(device.device(), |last| last.device) {
            Device::Cpu => Ok(Machine::measure_cpu(device)),
            Device::Cuda(ordinal) => {
                let count = members.len().max(1);
                let DeviceGrid { shares, .. } = device.split.split().grid(count)?;
                Ok(Machine::of_gpu(GpuPeaks::measure(ordinal)?).together(count, shares))
            }
        }
    }

    /// Several such GPUs. Those that share layers read their weights at the same time. The stages of a pipeline read
    /// one after the other for a token, but compute at the same time for a prompt.
    fn together(self, count: usize, shares: usize) -> Machine {
        if count == 1 {
            return self;
        }
        Machine {
            device: format!("{count} x {}", self.device),
            read_bytes_per_s: self.read_bytes_per_s * shares as f64,
            bf16_dot: self.bf16_dot.map(|rate| rate * count as f64),
            ..self
        }
    }

    fn measure_cpu(device: &DeviceArgs) -> Machine {
        let backend = CpuBackend::planning(device.options().cpu_options());
        let (pool, isa) = (ThreadPool::new(backend.threads()), backend.isa());
        let peaks = floors::peaks(&pool, isa, PEAK_BUDGET);
        Machine {
            device: "cpu".into(),
            instructions: isa.to_string(),
            threads: pool.workers(),
            read_bytes_per_s: floors::weights_bandwidth(&pool, BUFFER_BYTES, BANDWIDTH_BUDGET),
            f32_fma: peaks.f32_fma,
            int8_dot: peaks.int8_dot,
            bf16_dot: peaks.bf16_dot,
        }
    }

    fn of_gpu(peaks: GpuPeaks) -> Machine {
        Machine {
            device: peaks.name,
            instructions: format!("compute capability {}.{}", peaks.capability.0, peaks.capability.1),
            threads: peaks.multiprocessors,
            read_bytes_per_s: peaks.copy_bytes_per_s,
            f32_fma: None,
            int8_dot: None,
            bf16_dot: Some(peaks.bf16_ops_per_s),
        }
    }

    /// Operations per second of the instruction that linear layers use, if they were measured.
    pub fn peak_of(&self, compute: Compute, quantised: bool) -> Option<f64> {
        match compute {
            Compute::F32 => self.f32_fma,
            Compute::Auto if quantised => self.int8_dot.or(self.bf16_dot).or(self.f32_fma),
            // A GPU's peak in 8-bit floats is not measured. No CPU multiplies them.
            Compute::PrefillFp8 | Compute::Fp8 if quantised => self.int8_dot.or(self.f32_fma),
            _ => self.bf16_dot.or(self.f32_fma),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_that_share_layers_read_at_the_same_time_and_stages_do_not() {
        let one = Machine {
            device: "GPU".into(),
            instructions: "9.0".into(),
            threads: 132,
            read_bytes_per_s: 3e12,
            f32_fma: None,
            int8_dot: None,
            bf16_dot: Some(7e14),
        };
        let rates = |machine: Machine| (machine.read_bytes_per_s, machine.bf16_dot);
        assert_eq!(rates(one.clone().together(1, 1)), (3e12, Some(7e14)));
        assert_eq!(rates(one.clone().together(2, 2)), (6e12, Some(14e14)), "tensor");
        assert_eq!(rates(one.clone().together(2, 1)), (3e12, Some(14e14)), "pipeline");
        assert!(one.together(4, 2).to_string().starts_with("4 x GPU, "));
    }
}
