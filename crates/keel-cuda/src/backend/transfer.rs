//! Bytes between host and device, in the order of the stream.
//!
//! Small writes of the host wait in pinned memory for the next launch. One kernel delivers them before it.

use super::Gpu;
use super::call::Geometry;
use super::dispatch::rounds_weight;
use super::launch::Session;
use super::weights::Layout;
use crate::driver::{CudaMemory, Delivery, driver};
use crate::error::Result;
use crate::kernels::{KernelKey, MOVES};
use crate::parameters::{DequantizeToFp8, MoveWords, Parameters};
use keel_array::WeightSpec;
use std::ops::Range;

/// Bytes of pinned memory for host data on its way to the device, and as many for the way back.
pub(super) const STAGING_BYTES: usize = 4 << 20;

/// Number of moves that one kernel makes, and the most bytes of such a move.
const MOVES_MAX: usize = 48;
const MOVE_BYTES_MAX: usize = 16 << 20;

/// The most bytes of a write of the host that waits for such a kernel. The data of a step is smaller.
const DELIVERY_BYTES_MAX: usize = 64 << 10;

/// A copy between places of the device and pinned memory, or bytes of the device that are zeroed.
#[derive(Clone, Copy)]
pub(super) struct Move {
    pub to: u64,
    /// Where the bytes are; `None` for zeros.
    pub from: Option<u64>,
    pub bytes: usize,
}

impl Session {
    /// Copies host bytes to the device, after the work on the stream. Returns before they arrive.
    pub fn write(&mut self, gpu: &Gpu, memory: &CudaMemory, offset: usize, bytes: &[u8]) {
        let outcome = self.try_write(gpu, memory, offset, bytes);
        self.failed.note(outcome);
    }

    fn try_write(&mut self, gpu: &Gpu, memory: &CudaMemory, offset: usize, bytes: &[u8]) -> Result<()> {
        let device = &*gpu.device;
        device.bind()?;
        self.ahead.forget();
        let start = memory.range(offset, bytes.len());
        let to = start..start + bytes.len() as u64;
        if bytes.len() <= DELIVERY_BYTES_MAX && start.is_multiple_of(4) && bytes.len().is_multiple_of(4) {
            return self.post(gpu, to, bytes);
        }
        self.deliver(gpu)?;
        for (i, piece) in bytes.chunks(STAGING_BYTES).enumerate() {
            let from = self.stage(gpu, piece)?;
            let to = start + (i * STAGING_BYTES) as u64;
            // SAFETY: within both; the pinned bytes are not overwritten before the stream has passed.
            unsafe { driver!(cuMemcpyHtoDAsync_v2(to, from.cast(), piece.len(), device.stream()))? };
            self.outgoing_ring.put_all();
        }
        Ok(())
    }

    /// Notes a small write for the next delivery.
    pub(super) fn post(&mut self, gpu: &Gpu, to: Range<u64>, bytes: &[u8]) -> Result<()> {
        let device = &*gpu.device;
        let full = device.deliveries().len() == MOVES_MAX;
        if full || device.deliveries().iter().any(|delivery| delivery.touches(&to)) {
            self.deliver(gpu)?;
        }
        let from = self.stage(gpu, bytes)? as u64;
        device.deliveries().push(Delivery { to, from });
        Ok(())
    }

    /// Copies bytes to pinned memory, where they stay until the stream has passed their readers.
    fn stage(&mut self, gpu: &Gpu, bytes: &[u8]) -> Result<*mut u8> {
        let mut place = self.outgoing_ring.take(bytes.len(), STAGING_BYTES);
        if place.is_none() {
            self.deliver(gpu)?;
            self.synchronize(&gpu.device)?;
            place = self.outgoing_ring.take(bytes.len(), STAGING_BYTES);
        }
        let start = place.unwrap_or_else(|| unreachable!("an empty ring has room for a piece"));
        self.outgoing.bytes(start..start + bytes.len()).copy_from_slice(bytes);
        // SAFETY: within the pinned memory.
        Ok(unsafe { self.outgoing.address().add(start) })
    }

    /// Puts the waiting small writes on the stream. If that fails, they are lost, and the failure is noted for launches
    /// and reads after it, whoever has asked for the delivery.
    pub(super) fn deliver(&mut self, gpu: &Gpu) -> Result<()> {
        // Locked until the kernel is on the stream. Another thread that frees memory either takes its writes off this
        // list, or frees it after the kernel.
        let mut waiting = gpu.device.deliveries();
        // If the launch fails, nothing reads their bytes.
        self.outgoing_ring.put_all();
        if waiting.is_empty() {
            return Ok(());
        }
        let moves: Vec<Move> = waiting.drain(..).map(Move::from).collect();
        let outcome = launch_moves(gpu, &moves);
        self.failed.note(outcome.clone());
        outcome
    }

    /// Copies device bytes to the host, after the work on the stream. Fails if a transfer before it has failed.
    pub fn read(&mut self, gpu: &Gpu, memory: &CudaMemory, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.failed.report_to_read()?;
        let start = memory.range(offset, bytes.len());
        let wanted = start..start + bytes.len() as u64;
        if let Some(at) = self.ahead.find(&wanted) {
            bytes.copy_from_slice(self.incoming.bytes(at..at + bytes.len()));
            return Ok(());
        }
        // The last launch, if it was of a prepared program.
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
            piece.copy_from_slice(self.incoming.bytes(0..piece.len()));
        }
        Ok(())
    }

    /// Copies device bytes that nothing on the stream writes, without waiting for the stream.
    pub fn read_settled(
        &mut self,
        gpu: &Gpu,
        memory: &CudaMemory,
        offset: usize,
        bytes: &mut [u8],
    ) -> Result<()> {
        // The pinned bytes are about to change.
        self.ahead.forget();
        gpu.device.bind()?;
        for (i, piece) in bytes.chunks_mut(STAGING_BYTES).enumerate() {
            let from = memory.range(offset + i * STAGING_BYTES, piece.len());
            // SAFETY: within both. Pinned bytes that arrive on the stream are waited for before this call.
            unsafe { gpu.device.read_settled(self.incoming.address().cast(), from, piece.len())? };
            piece.copy_from_slice(self.incoming.bytes(0..piece.len()));
        }
        Ok(())
    }

    /// Copies bytes on the device, or zeroes them. The moves do not depend on each other.
    pub fn move_all(&mut self, gpu: &Gpu, moves: &[Move]) {
        self.ahead.forget();
        let outcome = self.try_move(gpu, moves);
        self.failed.note(outcome);
    }

    fn try_move(&mut self, gpu: &Gpu, moves: &[Move]) -> Result<()> {
        gpu.device.bind()?;
        self.deliver(gpu)?;
        let (together, alone): (Vec<Move>, Vec<Move>) = moves.iter().partition(|of| of.is_for_kernel());
        for moves in together.chunks(MOVES_MAX) {
            launch_moves(gpu, moves)?;
        }
        let stream = gpu.device.stream();
        for Move { to, from, bytes } in alone {
            // SAFETY: within the memory of both, which gave the addresses.
            unsafe {
                match from {
                    Some(from) => driver!(cuMemcpyDtoDAsync_v2(to, from, bytes, stream))?,
                    None => driver!(cuMemsetD8Async(to, 0, bytes, stream))?,
                }
            }
        }
        Ok(())
    }

    /// Makes the copy in 8-bit floats of some rows of a weight, if it has one. Their codes have been written.
    pub fn round_rows(
        &mut self,
        gpu: &Gpu,
        spec: &WeightSpec,
        memory: &CudaMemory,
        offset: usize,
        rows: Range<usize>,
    ) -> Result<()> {
        let layout = Layout::of(spec);
        let Some(copy) = layout.fp8 else { return Ok(()) };
        gpu.device.bind()?;
        self.deliver(gpu)?;
        let start = memory.range(offset, layout.bytes());
        let at = |offset: usize| start + offset as u64;
        let [codes, pairs] = layout.tiles_before(rows.start);
        let parameters = DequantizeToFp8 {
            weight: at(codes),
            pairs: Some(at(layout.pairs + pairs)),
            out: at(copy.codes + rows.start * spec.cols),
            scales: at(copy.scales + rows.start * size_of::<f32>()),
        };
        let (key, geometry) = rounds_weight(spec, rows.len());
        // The kernel reads codes before it waits for the work on the stream.
        gpu.hold_next();
        gpu.launch(&key, geometry, parameters.arguments(key.entry))?;
        gpu.hold_next();
        Ok(())
    }
}

impl From<Delivery> for Move {
    fn from(Delivery { to, from }: Delivery) -> Move {
        Move { to: to.start, from: Some(from), bytes: (to.end - to.start) as usize }
    }
}

impl Move {
    /// Whether a kernel makes it together with others. The driver is faster with very large ones.
    fn is_for_kernel(&self) -> bool {
        let words = [self.to, self.from.unwrap_or(0), self.bytes as u64];
        self.bytes <= MOVE_BYTES_MAX && words.iter().all(|at| at.is_multiple_of(4))
    }
}

/// The kernel of transfers. It is loaded before the first launch.
pub(super) fn kernel() -> KernelKey {
    KernelKey::new(MOVES, "move_words").define("MOVES", MOVES_MAX)
}

/// Puts a kernel on the stream that makes up to [`MOVES_MAX`] moves of whole words. The next kernel starts only after
/// it, because kernels read such data before they wait for their inputs.
pub(super) fn launch_moves(gpu: &Gpu, moves: &[Move]) -> Result<()> {
    const BLOCK_BYTES: usize = 16 << 10;
    assert!(moves.len() <= MOVES_MAX, "{} moves in one launch", moves.len());
    let mut words = [0; 3 * MOVES_MAX];
    for (words, Move { to, from, bytes }) in words.as_chunks_mut().0.iter_mut().zip(moves) {
        *words = [*to, from.unwrap_or(0), *bytes as u64 / 4];
    }
    let largest = moves.iter().map(|of| of.bytes).max().unwrap_or(0);
    let geometry = Geometry {
        grid: (largest.div_ceil(BLOCK_BYTES).max(1), moves.len(), 1),
        block: (256, 1, 1),
        shared_bytes: 0,
    };
    let key = kernel();
    let arguments = MoveWords { moves: words }.arguments(key.entry);
    gpu.launch(&key, geometry, arguments)?;
    gpu.hold_next();
    Ok(())
}
