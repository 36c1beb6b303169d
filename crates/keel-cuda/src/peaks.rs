//! The peak rates of a GPU, measured now.

use crate::driver::{
    BLAS_WORKSPACE_BYTES, Blas, CudaMemory, Device, FactorType, Product, ProductOperands, Purpose,
    ResultType, ScaleAddresses, driver, explained,
};
use crate::error::Result;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of a copy: far more than the caches hold.
const COPY_BYTES: usize = 2 << 30;

/// The purpose of the memory, in an error.
const PURPOSE: Purpose = Purpose { what: "the measurement of its rates, which takes 4 GiB", bytes: 6 << 30 };
const _: () = assert!(2 * COPY_BYTES == 4 << 30);

/// Extent of a square product: large enough to fill the chip.
const PRODUCT: usize = 8192;

/// Timed runs, after one run to warm up.
const RUNS: usize = 10;

/// Rates of a GPU.
#[derive(Clone, Debug)]
pub struct GpuPeaks {
    /// Name of the device.
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Bytes per second of a copy within the device, reads and writes counted.
    pub copy_bytes_per_s: f64,
    /// Operations per second of a bf16 product of cuBLASLt, a multiply-add counted as two, on numbers other than zero.
    pub bf16_ops_per_s: f64,
}

impl GpuPeaks {
    /// Measures for about a second. The device memory that it takes is given back.
    ///
    /// # Errors
    /// If the device or its libraries are not available, or its free memory has no room for 4 GiB and the driver's
    /// context.
    pub fn measure(ordinal: usize) -> Result<GpuPeaks> {
        let device = Arc::new(Device::open(ordinal)?);
        let rates = copy_rate(&device).and_then(|copy| Ok((copy, product_rate(&device)?)));
        let (copy_bytes_per_s, bf16_ops_per_s) = rates.map_err(explained(device.ordinal(), PURPOSE))?;
        Ok(GpuPeaks {
            copy_bytes_per_s,
            bf16_ops_per_s,
            name: device.name.clone(),
            capability: device.capability,
            multiprocessors: device.multiprocessors,
        })
    }
}

/// Seconds of one run, the mean over [`RUNS`].
fn time(device: &Device, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    run()?;
    device.synchronize()?;
    let start = Instant::now();
    for _ in 0..RUNS {
        run()?;
    }
    device.synchronize()?;
    Ok(start.elapsed().as_secs_f64() / RUNS as f64)
}

fn copy_rate(device: &Arc<Device>) -> Result<f64> {
    let (from, to) = (CudaMemory::zeroed(device, COPY_BYTES)?, CudaMemory::zeroed(device, COPY_BYTES)?);
    let seconds = time(device, || {
        // SAFETY: both are COPY_BYTES long and live past the last synchronisation.
        unsafe { driver!(cuMemcpyDtoDAsync_v2(to.at(0), from.at(0), COPY_BYTES, device.stream())) }
    })?;
    Ok(2.0 * COPY_BYTES as f64 / seconds)
}

fn product_rate(device: &Arc<Device>) -> Result<f64> {
    let blas = Blas::new(device)?;
    let half = |seed: u32| filled(device, 2 * PRODUCT * PRODUCT, seed);
    let (x, w) = (half(1)?, half(2)?);
    let y = CudaMemory::zeroed(device, 4 * PRODUCT * PRODUCT)?;
    let workspace = CudaMemory::zeroed(device, BLAS_WORKSPACE_BYTES)?;
    let product = Product {
        rows: PRODUCT,
        cols: PRODUCT,
        inner: PRODUCT,
        alpha: 1,
        accumulate: false,
        bias: false,
        factors: FactorType::Bf16,
        result: ResultType::F32,
    };
    let scales = ScaleAddresses::default();
    let operands = ProductOperands { x: x.at(0), w: w.at(0), y: y.at(0), bias: 0, scales };
    let seconds = time(device, || {
        // SAFETY: all memories have the product's sizes and live past the last synchronisation.
        unsafe { blas.multiply(device, product, operands, workspace.at(0)) }
    })?;
    Ok(2.0 * (PRODUCT as f64).powi(3) / seconds)
}

/// Memory of bf16 numbers between 1/2 and 2 of both signs: a product of zeros would be faster.
fn filled(device: &Arc<Device>, bytes: usize, seed: u32) -> Result<CudaMemory> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Sign and mantissa at random, exponent 126 or 127.
        0x3f00 | (state >> 16) as u16 & 0x80ff
    };
    let values: Vec<u8> = (0..1 << 20).flat_map(|_| next().to_ne_bytes()).collect();
    let memory = CudaMemory::zeroed(device, bytes)?;
    for at in (0..bytes).step_by(values.len()) {
        let len = values.len().min(bytes - at);
        // SAFETY: within both; the copy is synchronous.
        unsafe { driver!(cuMemcpyHtoD_v2(memory.range(at, len), values.as_ptr().cast(), len))? };
    }
    Ok(memory)
}
