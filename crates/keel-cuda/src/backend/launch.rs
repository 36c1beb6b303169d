//! Running kernels: eagerly at first, from the second time on as a captured graph.

use super::call::{COUNTERS, Call, Geometry};
use super::dispatch;
use super::operand::{Bound, BoundKernel};
use super::read_ahead::ReadAhead;
use super::{Gpu, Mode};
use crate::driver::{Arguments, CudaMemory, Delivery, Device, Graph, PinnedBuffer, capture, driver};
use crate::error::{CudaError, Result};
use crate::kernels::{DELIVER, KernelKey};
use keel_array::{ArrayError, Kernel, Launch, Slot};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

/// Pinned bytes that host data passes through on its way to the device, and as many on the way back.
const STAGING_BYTES: usize = 4 << 20;

/// Graphs kept at a time.
const GRAPHS_MAX: usize = 64;

/// `Wrong` of `common.cuh`, and `Fault`, which adds an address.
const WRONG_BYTES: usize = 16;
const FAULT_BYTES: usize = WRONG_BYTES + size_of::<u64>();

/// Writes that one kernel delivers, and bytes of such a write: what a step is told is smaller.
const DELIVERIES: usize = 16;
const DELIVERY_BYTES_MAX: usize = 64 << 10;

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
    /// Addresses of its results.
    outputs: Vec<Range<u64>>,
    /// Those that come to the host with it.
    ahead: Range<u64>,
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
    /// Of what `incoming` holds.
    ahead: ReadAhead,
    /// A copy that failed: reported by the next launch.
    failed: Option<CudaError>,
    captured: u64,
    replayed: u64,
    waits: u64,
}

impl Session {
    pub fn new(device: &Arc<Device>) -> Result<Session> {
        let fault = CudaMemory::zeroed(device, FAULT_BYTES, false)?;
        let fault_seen = PinnedBuffer::new(device, WRONG_BYTES)?;
        let told = (fault_seen.address() as u64).to_ne_bytes();
        let at = fault.range(WRONG_BYTES, told.len());
        device.synchronize()?;
        // SAFETY: within the memory; the copy is done when the call returns.
        unsafe { driver!(cuMemcpyHtoD_v2(at, told.as_ptr().cast(), told.len()))? };
        Ok(Session {
            seen: Vec::new(),
            fault,
            fault_seen,
            counters: CudaMemory::zeroed(device, COUNTERS * size_of::<u32>(), false)?,
            outgoing: PinnedBuffer::new(device, STAGING_BYTES)?,
            outgoing_used: 0,
            incoming: PinnedBuffer::new(device, STAGING_BYTES)?,
            ahead: ReadAhead::default(),
            failed: None,
            captured: 0,
            replayed: 0,
            waits: 0,
        })
    }

    /// Graphs captured, and submissions that re-used one.
    pub fn counts(&self) -> (u64, u64) {
        (self.captured, self.replayed)
    }

    /// How often the host has waited for the stream.
    pub fn waits(&self) -> u64 {
        self.waits
    }

    /// Memory is handed out: what lies there is no longer what came to the host.
    pub fn note_allocation(&mut self) {
        self.ahead.forget();
    }

    fn synchronize(&mut self, device: &Device) -> Result<()> {
        self.outgoing_used = 0;
        self.waits += 1;
        device.synchronize()
    }

    fn note<T>(&mut self, outcome: Result<T>) {
        if let Err(error) = outcome {
            tracing::error!("{error}");
            self.failed.get_or_insert(error);
        }
    }

    /// Host bytes to the device, behind what is on the stream. Returns before they are there.
    pub fn write(&mut self, gpu: &Gpu, memory: &CudaMemory, offset: usize, bytes: &[u8]) {
        let outcome = self.try_write(gpu, memory, offset, bytes);
        self.note(outcome);
    }

    fn try_write(&mut self, gpu: &Gpu, memory: &CudaMemory, offset: usize, bytes: &[u8]) -> Result<()> {
        let device = &*gpu.device;
        device.bind()?;
        self.ahead.forget();
        let start = memory.range(offset, bytes.len());
        let to = start..start + bytes.len() as u64;
        if bytes.len() <= DELIVERY_BYTES_MAX && start.is_multiple_of(4) && bytes.len().is_multiple_of(4) {
            let full = device.deliveries().len() == DELIVERIES;
            if full || device.deliveries().iter().any(|delivery| delivery.touches(&to)) {
                self.deliver(gpu)?;
            }
            let from = self.stage(gpu, bytes)? as u64;
            device.deliveries().push(Delivery { to, from });
            return Ok(());
        }
        self.deliver(gpu)?;
        for (i, piece) in bytes.chunks(STAGING_BYTES).enumerate() {
            let from = self.stage(gpu, piece)?;
            let to = start + (i * STAGING_BYTES) as u64;
            // SAFETY: within both; the pinned bytes are not overwritten before the stream has passed.
            unsafe { driver!(cuMemcpyHtoDAsync_v2(to, from.cast(), piece.len(), device.stream()))? };
        }
        Ok(())
    }

    /// Copies bytes to pinned memory, where they stay until the stream has passed what reads them.
    fn stage(&mut self, gpu: &Gpu, bytes: &[u8]) -> Result<*mut u8> {
        if self.outgoing_used + bytes.len() > STAGING_BYTES {
            self.deliver(gpu)?;
            self.synchronize(&gpu.device)?;
        }
        let start = self.outgoing_used;
        self.outgoing.bytes()[start..start + bytes.len()].copy_from_slice(bytes);
        self.outgoing_used = (start + bytes.len()).next_multiple_of(16).min(STAGING_BYTES);
        // SAFETY: within the pinned memory.
        Ok(unsafe { self.outgoing.address().add(start) })
    }

    /// Puts the small writes that wait on the stream.
    fn deliver(&mut self, gpu: &Gpu) -> Result<()> {
        let waiting = std::mem::take(&mut *gpu.device.deliveries());
        if waiting.is_empty() {
            return Ok(());
        }
        let mut words = Vec::with_capacity(3 * DELIVERIES);
        for Delivery { to, from } in &waiting {
            words.extend([to.start, *from, (to.end - to.start) / 4]);
        }
        words.resize(3 * DELIVERIES, 0);
        let key = KernelKey::new(DELIVER, "deliver").define("DELIVERIES", DELIVERIES);
        gpu.launch(&key, Geometry::rows(waiting.len(), 128), Arguments::default().words(&words))
    }

    /// Bytes of the device to the host, once the stream has passed what is on it.
    pub fn read(&mut self, gpu: &Gpu, memory: &CudaMemory, offset: usize, bytes: &mut [u8]) {
        let outcome = self.try_read(gpu, memory, offset, bytes);
        self.note(outcome);
    }

    fn try_read(&mut self, gpu: &Gpu, memory: &CudaMemory, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let start = memory.range(offset, bytes.len());
        let wanted = start..start + bytes.len() as u64;
        if let Some(at) = self.ahead.find(&wanted) {
            bytes.copy_from_slice(&self.incoming.bytes()[at..at + bytes.len()]);
            return Ok(());
        }
        // The last launch's, if it was one of a prepared program.
        if let Some(seen) = self.seen.last_mut().filter(|seen| self.ahead.is_worth_it(&wanted, &seen.outputs))
        {
            seen.ahead = wanted;
        }
        self.ahead.forget();
        gpu.device.bind()?;
        self.deliver(gpu)?;
        for (i, piece) in bytes.chunks_mut(STAGING_BYTES).enumerate() {
            let from = memory.range(offset + i * STAGING_BYTES, piece.len());
            let to = self.incoming.address().cast();
            // SAFETY: within both; the pinned bytes are read after the stream has passed.
            unsafe { driver!(cuMemcpyDtoHAsync_v2(to, from, piece.len(), gpu.device.stream()))? };
            self.synchronize(&gpu.device)?;
            piece.copy_from_slice(&self.incoming.bytes()[..piece.len()]);
        }
        Ok(())
    }

    /// Bytes of the device to another place on it.
    pub fn copy(&mut self, gpu: &Gpu, from: (&CudaMemory, usize), to: (&CudaMemory, usize), bytes: usize) {
        self.ahead.forget();
        let (from, to) = (from.0.range(from.1, bytes), to.0.range(to.1, bytes));
        let stream = gpu.device.stream();
        let outcome = gpu.device.bind().and_then(|()| self.deliver(gpu));
        // SAFETY: within both memories.
        let outcome =
            outcome.and_then(|()| unsafe { driver!(cuMemcpyDtoDAsync_v2(to, from, bytes, stream)) });
        self.note(outcome);
    }

    /// Zeroes bytes of the device.
    pub fn clear(&mut self, gpu: &Gpu, memory: &CudaMemory, offset: usize, bytes: usize) {
        self.ahead.forget();
        let at = memory.range(offset, bytes);
        let outcome = gpu.device.bind().and_then(|()| self.deliver(gpu));
        // SAFETY: within the memory.
        let outcome =
            outcome.and_then(|()| unsafe { driver!(cuMemsetD8Async(at, 0, bytes, gpu.device.stream())) });
        self.note(outcome);
    }

    /// Runs the kernels of a launch and waits for them.
    pub fn run(&mut self, gpu: &Gpu, mode: Mode, launch: &Launch<'_>) -> Result<(), ArrayError> {
        if let Some(error) = self.failed.take() {
            return Err(error.in_op("copy"));
        }
        let device = &gpu.device;
        device.bind().and_then(|()| self.deliver(gpu)).map_err(|e| e.in_op("launch"))?;
        self.ahead.forget();
        let record = |session: &Session| session.record(gpu, mode, launch);
        let mut ahead = None;
        match launch.prepared() {
            None => record(self)?,
            Some((prepared, first_kernel)) => {
                let arena = launch.has_arena().then(|| CudaMemory::of(launch.arena().memory()).at(0));
                let key = GraphKey { prepared, first_kernel, arena: arena.unwrap_or(0) };
                self.run_prepared(device, key, launch, record)?;
                ahead = self.seen.last().map(|seen| seen.ahead.clone());
            }
        }
        self.bring(device, ahead.as_ref()).map_err(|e| e.in_op("launch"))?;
        self.synchronize(device).map_err(|e| e.in_op("launch"))?;
        ahead.into_iter().for_each(|ahead| self.ahead.launched(ahead));
        self.fault(device, launch.kernels())
    }

    /// Puts the copy of what the host will read on the stream.
    fn bring(&self, device: &Device, ahead: Option<&Range<u64>>) -> Result<()> {
        let Some(ahead) = ahead.filter(|ahead| !ahead.is_empty()) else { return Ok(()) };
        let (to, bytes) = (self.incoming.address().cast(), (ahead.end - ahead.start) as usize);
        // SAFETY: the launch owns its results, of which these bytes are some, fewer than the pinned ones; and the caller
        // waits for the stream.
        unsafe { driver!(cuMemcpyDtoHAsync_v2(to, ahead.start, bytes, device.stream())) }
    }

    fn run_prepared(
        &mut self,
        device: &Arc<Device>,
        key: GraphKey,
        launch: &Launch<'_>,
        record: impl Fn(&Session) -> Result<(), ArrayError>,
    ) -> Result<(), ArrayError> {
        let Some(i) = self.seen.iter().position(|s| s.key == key) else {
            // The first run loads kernels and lets libraries choose, which a capture could not contain.
            record(self)?;
            if self.seen.len() == GRAPHS_MAX {
                self.seen.remove(0);
            }
            self.seen.push(Seen { key, graph: None, outputs: results(launch), ahead: 0..0 });
            return Ok(());
        };
        // Least recently used first.
        let mut seen = self.seen.remove(i);
        if seen.graph.is_none() {
            seen.graph = capture(device, || record(self).map_err(Captured)).map_err(|Captured(e)| e)?;
            self.captured += u64::from(seen.graph.is_some());
        } else {
            self.replayed += 1;
        }
        let outcome = match &seen.graph {
            // SAFETY: the launch owns the memory of the prepared program, whose addresses never change; the arena's
            // address is part of the key; and the caller waits for the stream.
            Some(graph) => unsafe { graph.launch() }.map_err(|e| e.in_op("launch")),
            None => record(self),
        };
        self.seen.push(seen);
        outcome
    }

    /// Puts the kernels on the stream.
    fn record(&self, gpu: &Gpu, mode: Mode, launch: &Launch<'_>) -> Result<(), ArrayError> {
        let (checked, written, unsettled) = (RefCell::default(), RefCell::default(), RefCell::default());
        let bind = |(index, kernel)| Call {
            gpu,
            mode,
            bound: BoundKernel::new(launch, kernel),
            index,
            outputs: kernel.outputs.iter().map(|o| Bound::new(launch, o)).collect(),
            scratch: kernel
                .workspace
                .as_ref()
                .map_or(0, |range| CudaMemory::of(launch.arena().memory()).range(range.start, range.len())),
            fault: self.fault.at(0),
            counters: self.counters.at(0),
            checked: &checked,
            written: &written,
            unsettled: &unsettled,
        };
        let mut calls = launch.kernels().iter().enumerate().map(bind).peekable();
        while let Some(call) = calls.next() {
            let with_next = match calls.peek() {
                Some(next) => dispatch::run_both(&call, next)?,
                None => false,
            };
            if with_next {
                if let Some(next) = calls.next() {
                    next.note_written();
                }
            } else {
                dispatch::run(&call)?;
            }
            call.note_written();
        }
        Ok(())
    }

    /// The error that a kernel of the launch has reported.
    fn fault(&mut self, device: &Device, kernels: &[Kernel]) -> Result<(), ArrayError> {
        let words: Vec<u32> =
            self.fault_seen.bytes().as_chunks::<4>().0.iter().map(|b| u32::from_ne_bytes(*b)).collect();
        let &[kernel, what, number, bound] = &words[..] else { unreachable!("four words") };
        let Some(kernel) = kernels.get((kernel as usize).wrapping_sub(1)) else { return Ok(()) };
        self.fault_seen.bytes().fill(0);
        // SAFETY: WRONG_BYTES and more long.
        let cleared = unsafe { driver!(cuMemsetD8Async(self.fault.at(0), 0, WRONG_BYTES, device.stream())) };
        self.note(cleared);
        let reason = dispatch::describe_fault(kernel, what, number, bound);
        Err(ArrayError::Kernel { op: kernel.op.name().into(), reason })
    }
}

/// Addresses of what a launch leaves behind; destinations of prepared programs are gap-free.
fn results(launch: &Launch<'_>) -> Vec<Range<u64>> {
    let outputs = launch.kernels().iter().flat_map(|kernel| &kernel.outputs);
    let outputs = outputs.filter(|operand| matches!(operand.slot, Slot::Output(_)));
    let addresses = |operand| {
        let bound = Bound::new(launch, operand);
        bound.address..bound.address + (bound.len() * bound.dtype.size()) as u64
    };
    outputs.map(addresses).collect()
}

/// The error of a recording, apart from those of the driver.
struct Captured(ArrayError);

impl From<CudaError> for Captured {
    fn from(error: CudaError) -> Captured {
        Captured(error.in_op("capture"))
    }
}
