//! Running kernels: eagerly at first, from the second time on as a captured graph.

use super::call::{COUNTERS, Call};
use super::dispatch;
use super::operand::Bound;
use super::{Gpu, Precision};
use crate::driver::{CudaMemory, Device, Graph, PinnedBuffer, capture, driver};
use crate::error::{CudaError, Result};
use keel_array::{ArrayError, Kernel, Launch};
use std::sync::Arc;

/// Pinned bytes that host data passes through on its way to the device, and as many on the way back.
const STAGING_BYTES: usize = 4 << 20;

/// Graphs kept at a time.
const GRAPHS_MAX: usize = 64;

/// `Fault` of `common.cuh`.
const FAULT_BYTES: usize = 16;

/// What a graph was captured with: the prepared program, where the piece begins, and where the arena was.
#[derive(Clone, Copy, PartialEq, Eq)]
struct GraphKey {
    prepared: u64,
    first_kernel: usize,
    arena: u64,
}

/// A prepared piece that has run: without a graph once, with one from then on.
struct Seen {
    key: GraphKey,
    graph: Option<Graph>,
}

/// What passes between host and device on the stream, and the graphs.
pub(super) struct Session {
    // Graphs go first: they refer to the memory below.
    seen: Vec<Seen>,
    fault: CudaMemory,
    fault_seen: PinnedBuffer,
    counters: CudaMemory,
    outgoing: PinnedBuffer,
    /// Bytes of `outgoing` that the device may not have read yet.
    outgoing_used: usize,
    incoming: PinnedBuffer,
    /// A copy that failed: reported by the next launch.
    failed: Option<CudaError>,
    captured: u64,
    replayed: u64,
}

impl Session {
    pub fn new(device: &Arc<Device>) -> Result<Session> {
        Ok(Session {
            seen: Vec::new(),
            fault: CudaMemory::zeroed(device, FAULT_BYTES, false)?,
            fault_seen: PinnedBuffer::new(device, FAULT_BYTES)?,
            counters: CudaMemory::zeroed(device, COUNTERS * size_of::<u32>(), false)?,
            outgoing: PinnedBuffer::new(device, STAGING_BYTES)?,
            outgoing_used: 0,
            incoming: PinnedBuffer::new(device, STAGING_BYTES)?,
            failed: None,
            captured: 0,
            replayed: 0,
        })
    }

    /// Graphs captured, and submissions that re-used one.
    pub fn counts(&self) -> (u64, u64) {
        (self.captured, self.replayed)
    }

    fn synchronize(&mut self, device: &Device) -> Result<()> {
        self.outgoing_used = 0;
        device.synchronize()
    }

    fn note<T>(&mut self, outcome: Result<T>) {
        if let Err(error) = outcome {
            tracing::error!("{error}");
            self.failed.get_or_insert(error);
        }
    }

    /// Host bytes to the device, behind what is on the stream. Returns before they are there.
    pub fn write(&mut self, device: &Device, memory: &CudaMemory, offset: usize, bytes: &[u8]) {
        let outcome = self.try_write(device, memory, offset, bytes);
        self.note(outcome);
    }

    fn try_write(&mut self, device: &Device, memory: &CudaMemory, offset: usize, bytes: &[u8]) -> Result<()> {
        device.bind()?;
        for (i, piece) in bytes.chunks(STAGING_BYTES).enumerate() {
            if self.outgoing_used + piece.len() > STAGING_BYTES {
                self.synchronize(device)?;
            }
            let start = self.outgoing_used;
            self.outgoing.bytes()[start..start + piece.len()].copy_from_slice(piece);
            self.outgoing_used += piece.len();
            let to = memory.range(offset + i * STAGING_BYTES, piece.len());
            // SAFETY: within both; the pinned bytes are not overwritten before the stream has passed.
            unsafe {
                let from = self.outgoing.address().add(start).cast();
                driver!(cuMemcpyHtoDAsync_v2(to, from, piece.len(), device.stream()))?;
            }
        }
        Ok(())
    }

    /// Bytes of the device to the host, once the stream has passed what is on it.
    pub fn read(&mut self, device: &Device, memory: &CudaMemory, offset: usize, bytes: &mut [u8]) {
        let outcome = self.try_read(device, memory, offset, bytes);
        self.note(outcome);
    }

    fn try_read(
        &mut self,
        device: &Device,
        memory: &CudaMemory,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<()> {
        device.bind()?;
        for (i, piece) in bytes.chunks_mut(STAGING_BYTES).enumerate() {
            let from = memory.range(offset + i * STAGING_BYTES, piece.len());
            // SAFETY: within both; the pinned bytes are read after the stream has passed.
            unsafe {
                driver!(cuMemcpyDtoHAsync_v2(
                    self.incoming.address().cast(),
                    from,
                    piece.len(),
                    device.stream()
                ))?;
            }
            self.synchronize(device)?;
            piece.copy_from_slice(&self.incoming.bytes()[..piece.len()]);
        }
        Ok(())
    }

    /// Bytes of the device to another place on it.
    pub fn copy(
        &mut self,
        device: &Device,
        from: (&CudaMemory, usize),
        to: (&CudaMemory, usize),
        bytes: usize,
    ) {
        let (from, to) = (from.0.range(from.1, bytes), to.0.range(to.1, bytes));
        // SAFETY: within both memories.
        let outcome = device
            .bind()
            .and_then(|()| unsafe { driver!(cuMemcpyDtoDAsync_v2(to, from, bytes, device.stream())) });
        self.note(outcome);
    }

    /// Zeroes bytes of the device.
    pub fn clear(&mut self, device: &Device, memory: &CudaMemory, offset: usize, bytes: usize) {
        let at = memory.range(offset, bytes);
        // SAFETY: within the memory.
        let outcome =
            device.bind().and_then(|()| unsafe { driver!(cuMemsetD8Async(at, 0, bytes, device.stream())) });
        self.note(outcome);
    }

    /// Runs the kernels of a launch and waits for them.
    pub fn run(&mut self, gpu: &Gpu, precision: Precision, launch: &Launch<'_>) -> Result<(), ArrayError> {
        if let Some(error) = self.failed.take() {
            return Err(error.in_op("copy"));
        }
        let device = &gpu.device;
        device.bind().map_err(|e| e.in_op("launch"))?;
        let record = |session: &Session| session.record(gpu, precision, launch);
        match launch.prepared() {
            None => record(self)?,
            Some((prepared, first_kernel)) => {
                let arena = launch.has_arena().then(|| CudaMemory::of(launch.arena().memory()).at(0));
                let key = GraphKey { prepared, first_kernel, arena: arena.unwrap_or(0) };
                self.run_prepared(device, key, record)?;
            }
        }
        self.synchronize(device).map_err(|e| e.in_op("launch"))?;
        self.fault(device, launch.kernels())
    }

    fn run_prepared(
        &mut self,
        device: &Arc<Device>,
        key: GraphKey,
        record: impl Fn(&Session) -> Result<(), ArrayError>,
    ) -> Result<(), ArrayError> {
        let Some(i) = self.seen.iter().position(|s| s.key == key) else {
            // The first run loads kernels and lets libraries choose, which a capture could not contain.
            record(self)?;
            if self.seen.len() == GRAPHS_MAX {
                self.seen.remove(0);
            }
            self.seen.push(Seen { key, graph: None });
            return Ok(());
        };
        // Least recently used first.
        let mut seen = self.seen.remove(i);
        if seen.graph.is_none() {
            seen.graph = Some(capture(device, || record(self).map_err(Captured)).map_err(|Captured(e)| e)?);
            self.captured += 1;
        } else {
            self.replayed += 1;
        }
        let Some(graph) = &seen.graph else { unreachable!("captured above") };
        // SAFETY: the launch owns the memory of the prepared program, whose addresses never change; the arena's
        // address is part of the key; and the caller waits for the stream.
        let outcome = unsafe { graph.launch() }.map_err(|e| e.in_op("launch"));
        self.seen.push(seen);
        outcome
    }

    /// Puts the kernels on the stream, and behind them the report of wrong data.
    fn record(&self, gpu: &Gpu, precision: Precision, launch: &Launch<'_>) -> Result<(), ArrayError> {
        for (index, kernel) in launch.kernels().iter().enumerate() {
            let inputs = kernel.inputs.iter().map(|o| Bound::new(launch, o)).collect();
            let outputs = kernel.outputs.iter().map(|o| Bound::new(launch, o)).collect();
            let scratch = kernel
                .workspace
                .as_ref()
                .map_or(0, |range| CudaMemory::of(launch.arena().memory()).range(range.start, range.len()));
            let call = Call {
                gpu,
                precision,
                kernel,
                index,
                inputs,
                outputs,
                scratch,
                fault: self.fault.at(0),
                counters: self.counters.at(0),
            };
            dispatch::run(&call)?;
        }
        // SAFETY: both are FAULT_BYTES long and live as long as the session.
        let copied = unsafe {
            driver!(cuMemcpyDtoHAsync_v2(
                self.fault_seen.address().cast(),
                self.fault.at(0),
                FAULT_BYTES,
                gpu.device.stream(),
            ))
        };
        copied.map_err(|e| e.in_op("launch"))
    }

    /// The error that a kernel of the launch has reported.
    fn fault(&mut self, device: &Device, kernels: &[Kernel]) -> Result<(), ArrayError> {
        let words: Vec<u32> =
            self.fault_seen.bytes().as_chunks::<4>().0.iter().map(|b| u32::from_ne_bytes(*b)).collect();
        let &[kernel, what, number, bound] = &words[..] else { unreachable!("four words") };
        let Some(kernel) = kernels.get((kernel as usize).wrapping_sub(1)) else { return Ok(()) };
        // SAFETY: FAULT_BYTES long.
        let cleared = unsafe { driver!(cuMemsetD8Async(self.fault.at(0), 0, FAULT_BYTES, device.stream())) };
        self.note(cleared);
        let reason = dispatch::describe_fault(kernel, what, number, bound);
        Err(ArrayError::Kernel { op: kernel.op.name().into(), reason })
    }
}

/// The error of a recording, apart from those of the driver.
struct Captured(ArrayError);

impl From<CudaError> for Captured {
    fn from(error: CudaError) -> Captured {
        Captured(error.in_op("capture"))
    }
}
