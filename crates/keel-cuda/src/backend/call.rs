//! A kernel with its memory, and its launch on the stream.

use super::operand::{Bound, BoundKernel};
use super::{Gpu, Mode};
use crate::driver::{Arguments, Product, ProductOperands, driver, overlap};
use crate::error::Result;
use crate::kernels::KernelKey;
use crate::parameters::{CheckBatch, Parameters};
use cudarc::driver::sys;
use keel_array::ArrayError;
use std::cell::RefCell;
use std::ops::{Deref, Range};

/// Counters that are zero before and after each kernel: blocks of a launch count each other with them.
pub(super) const COUNTERS: usize = 1 << 16;

/// A kernel with its memory.
pub(super) struct Call<'a> {
    pub gpu: &'a Gpu,
    pub mode: Mode,
    pub bound: BoundKernel<'a>,
    /// Number of the kernel within the launch, for reports.
    pub index: usize,
    pub outputs: Vec<Bound<'a>>,
    /// Address of the scratch that `workspace_bytes` asked for.
    pub scratch: u64,
    /// Address of the report.
    pub fault: u64,
    /// Address of [`COUNTERS`] counters.
    pub counters: u64,
    /// Checks that the launch has made so far: operands that last are checked once.
    pub checked: &'a RefCell<Vec<CheckBatch>>,
    /// Memory from before the launch that its kernels have written so far.
    pub written: &'a RefCell<Vec<Range<u64>>>,
    /// Memory written by kernels that may still run when the next one starts.
    pub unsettled: &'a RefCell<Vec<Range<u64>>>,
}

impl<'a> Deref for Call<'a> {
    type Target = BoundKernel<'a>;

    fn deref(&self) -> &BoundKernel<'a> {
        &self.bound
    }
}

/// Blocks, threads and dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub grid: (usize, usize, usize),
    pub block: (usize, usize, usize),
    pub shared_bytes: usize,
}

impl Geometry {
    /// Threads of [`Geometry::elements`] at most.
    pub const THREADS_MAX: usize = 1 << 28;

    /// One thread for each of `n` elements; beyond the largest grid, kernels stride.
    pub fn elements(n: usize) -> Geometry {
        const BLOCK: usize = 256;
        Geometry {
            grid: (n.div_ceil(BLOCK).clamp(1, Geometry::THREADS_MAX / BLOCK), 1, 1),
            block: (BLOCK, 1, 1),
            shared_bytes: 0,
        }
    }

    /// One thread for each of `n` elements, without striding.
    pub fn every_element(n: usize) -> Geometry {
        Geometry { grid: (n.div_ceil(256).max(1), 1, 1), block: (256, 1, 1), shared_bytes: 0 }
    }

    /// One block for each row.
    pub fn rows(rows: usize, block: usize) -> Geometry {
        Geometry { grid: (rows, 1, 1), block: (block, 1, 1), shared_bytes: 0 }
    }
}

impl Gpu {
    /// Puts a kernel on the stream.
    pub(super) fn launch(&self, key: &KernelKey, geometry: Geometry, mut arguments: Arguments) -> Result<()> {
        if self.listing.takes(key, geometry.shared_bytes) {
            return Ok(());
        }
        let function = self.modules.function(key, geometry.shared_bytes)?;
        let mut pointers = arguments.pointers();
        let Geometry { grid, block, shared_bytes } = geometry;
        let mut overlap = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: Default::default(),
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let overlaps = !self.take_hold() && key.waits() && self.device.capability >= (9, 0);
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0 as u32,
            gridDimY: grid.1 as u32,
            gridDimZ: grid.2 as u32,
            blockDimX: block.0 as u32,
            blockDimY: block.1 as u32,
            blockDimZ: block.2 as u32,
            sharedMemBytes: shared_bytes as u32,
            hStream: self.device.stream(),
            attrs: &raw mut overlap,
            numAttrs: u32::from(overlaps),
        };
        // SAFETY: the arguments match the entry point's parameters: one description gives both, or both are generated
        // together. All addresses were checked against their memory, which the launch owns until the stream has
        // passed. A kernel that may start before earlier ones have ended waits for them, see `common.cuh`.
        unsafe {
            driver!(cuLaunchKernelEx(&config, function.handle, pointers.as_mut_ptr(), std::ptr::null_mut()))
        }
    }
}

impl<'a> Call<'a> {
    /// Puts a kernel on the stream. A grid without blocks launches nothing.
    pub fn launch(
        &self,
        key: &KernelKey,
        geometry: Geometry,
        parameters: &impl Parameters,
    ) -> Result<(), ArrayError> {
        self.launch_generated(key, geometry, parameters.arguments(key.entry))
    }

    /// As [`Call::launch`], for a kernel whose parameter list is generated together with its text.
    pub fn launch_generated(
        &self,
        key: &KernelKey,
        geometry: Geometry,
        arguments: Arguments,
    ) -> Result<(), ArrayError> {
        let (x, y, z) = geometry.grid;
        if x * y * z == 0 {
            return Ok(());
        }
        self.gpu.launch(key, geometry, arguments).map_err(|e| e.in_op(self.kernel.op.name()))
    }

    /// Whether an operand is as it was before the launch. If so, it may be read while other kernels of the launch run.
    pub fn is_untouched(&self, operand: &Bound<'_>) -> bool {
        let span = operand.span();
        operand.lasting && are_apart(&self.written.borrow(), &span)
    }

    /// Whether all of an operand is there before this kernel waits: no kernel that may still run then writes it.
    pub fn is_settled(&self, operand: &Bound<'_>) -> bool {
        self.is_untouched(operand) || are_apart(&self.unsettled.borrow(), &operand.span())
    }

    /// Notes that this kernel lets the next one start only when all kernels before itself have ended.
    pub fn settle(&self) {
        self.unsettled.borrow_mut().clear();
    }

    /// Notes the operands that this kernel writes: all of them as unsettled, and those in memory from before the launch
    /// as written.
    pub fn note_written(&self) {
        let states = self.kernel.op.mutated_inputs().map(|i| self.inputs[i]);
        let all = states.chain(self.outputs.iter().copied());
        self.unsettled.borrow_mut().extend(all.clone().map(|operand| operand.span()));
        let written = all.filter(|operand| operand.lasting);
        self.written.borrow_mut().extend(written.map(|operand| operand.span()));
    }

    /// The call of an absorbed kernel whose result is this one's.
    pub fn of_absorbed(&self, absorbed: &BoundKernel<'a>) -> Call<'a> {
        Call { bound: absorbed.clone(), outputs: self.outputs.clone(), ..*self }
    }

    /// The error of this kernel.
    pub fn error(&self, reason: String) -> ArrayError {
        ArrayError::Kernel { op: self.kernel.op.name().into(), reason }
    }

    /// Refuses an operand that does not begin at a multiple of `bytes` bytes, because a kernel reads `bytes` at a time.
    /// An intermediate begins at a multiple of 16; memory from outside, and a part of either, may not.
    pub fn expect_aligned(&self, operand: &Bound<'_>, bytes: u64) -> Result<(), ArrayError> {
        if operand.address.is_multiple_of(bytes) { Ok(()) } else { Err(self.misaligned(operand, bytes)) }
    }

    /// The error of [`Call::expect_aligned`].
    pub fn misaligned(&self, operand: &Bound<'_>, bytes: u64) -> ArrayError {
        let shape = &operand.layout.shape;
        self.error(format!(
            "an operand {shape} does not begin at a multiple of {bytes} bytes; make it contiguous"
        ))
    }

    /// Puts a product of cuBLASLt on the stream: operands by address, and the library's own scratch.
    pub fn multiply(&self, product: Product, operands: ProductOperands, own: u64) -> Result<()> {
        if self.gpu.is_listing() {
            return Ok(());
        }
        // SAFETY: the operands were checked against their memory or lie in the kernel's scratch. The arena has room for
        // that scratch and for the library's own.
        unsafe { self.gpu.blas.multiply(&self.gpu.device, product, operands, own) }
    }

    /// Copies bytes on the stream, unless they are there already.
    pub fn bring(&self, from: &Bound<'_>, to: &Bound<'_>) -> Result<(), ArrayError> {
        let copied = self.copy(from.address, to.address, from.len() * from.dtype.size());
        copied.map_err(|e| e.in_op(self.kernel.op.name()))
    }

    /// Copies bytes by address, from and to operands of the kernel or its scratch.
    pub fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        if from == to || self.gpu.is_listing() {
            return Ok(());
        }
        // SAFETY: contiguous parts of operands that were checked against their memory, or of the kernel's scratch.
        unsafe { driver!(cuMemcpyDtoDAsync_v2(to, from, bytes, self.gpu.device.stream())) }
    }
}

fn are_apart(written: &[Range<u64>], span: &Range<u64>) -> bool {
    written.iter().all(|written| !overlap(written, span))
}
