//! Running kernels: one by one the first time, as a captured graph from the second time on.

use super::call::{COUNTERS, Call};
use super::dispatch;
use super::failed_transfer::FailedTransfer;
use super::fault::{FAULT_BYTES, Header, WRONG_BYTES, Wrong};
use super::operand::{Bound, BoundKernel};
use super::queue::{Queue, WAITED};
use super::read_ahead::ReadAhead;
use super::staging::Ring;
use super::transfer::{Move, STAGING_BYTES, launch_moves};
use super::{Gpu, Mode};
use crate::driver::{CudaMemory, Device, Graph, PinnedBuffer, SizedKernel, capture, driver};
use crate::error::{CudaError, Result};
use crate::kernels::KernelKey;
use keel_array::{
    ArrayError, Kernel, LAUNCHES_MAX, Launch, OperandMemory, OwnMemory, PreparedPiece, RESULT_BYTES_MAX,
    Ticket,
};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Graphs kept at a time: more than the steps that an engine prepares.
const GRAPHS_MAX: usize = 512;

/// How often a capture is repeated that another thread has ended. Exchanges of a group might not bear it.
const CAPTURE_REPEATS: usize = 8;

/// Memory that a session holds as long as it lives: the header of reports and the counters; staging for both directions
/// and the queue's slots.
pub(super) const OWN_MEMORY: OwnMemory = OwnMemory {
    device_bytes: (FAULT_BYTES + COUNTERS * size_of::<u32>()) as u64,
    host_bytes: (2 * STAGING_BYTES + (1 + LAUNCHES_MAX) * (WRONG_BYTES + RESULT_BYTES_MAX)) as u64,
};

/// The groups of kernels between two waits of a host that launches one by one. Only for devices with peers. The driver
/// holds about 1,024 launches. Then it blocks the host, which could not see a failed peer.
const WATCHED_GROUPS: usize = 128;

/// How kernels are put on the stream.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pace {
    /// All at once: into a graph, or only into a list.
    Free,
    /// One by one. A host whose device has peers looks at them from time to time.
    Watched,
}

/// Why kernels were not put on the stream.
enum Unrecorded {
    /// One was refused.
    Kernel(ArrayError),
    /// A wait for kernels launched before has failed.
    Wait(CudaError),
}

impl Unrecorded {
    fn into_error(self) -> ArrayError {
        match self {
            Unrecorded::Kernel(error) => error,
            Unrecorded::Wait(error) => error.in_op("launch"),
        }
    }
}

impl From<CudaError> for Unrecorded {
    fn from(error: CudaError) -> Unrecorded {
        Unrecorded::Kernel(error.in_op("capture"))
    }
}

/// The key of a captured graph: the piece of a prepared program, and the arena's address.
#[derive(Clone, Copy, PartialEq, Eq)]
struct GraphKey {
    piece: PreparedPiece,
    arena: u64,
}

/// A prepared piece that has run: once without a graph, with one from then on.
pub(super) struct Seen {
    key: GraphKey,
    graph: Option<Graph>,
    /// Addresses of its results.
    pub outputs: Vec<Range<u64>>,
    /// Those of them that come to the host with the launch.
    pub ahead: Range<u64>,
}

/// The traffic between host and device on the stream, and the graphs.
pub(super) struct Session {
    // Dropped first: graphs refer to the memory below.
    pub(super) seen: Vec<Seen>,
    /// The header of reports on the device. `header` is the last one that the host has posted there.
    fault: CudaMemory,
    header: Header,
    queue: Queue,
    counters: CudaMemory,
    pub(super) outgoing: PinnedBuffer,
    /// The part of `outgoing` that the device may not have read yet.
    pub(super) outgoing_ring: Ring,
    pub(super) incoming: PinnedBuffer,
    /// The results that `incoming` holds.
    pub(super) ahead: ReadAhead,
    pub(super) failed: FailedTransfer,
    replayed: u64,
    waits: u64,
}

impl Session {
    pub fn new(device: &Arc<Device>) -> Result<Session> {
        Ok(Session {
            seen: Vec::new(),
            fault: CudaMemory::zeroed(device, FAULT_BYTES)?,
            header: Header::default(),
            queue: Queue::new(device)?,
            counters: CudaMemory::zeroed(device, COUNTERS * size_of::<u32>())?,
            outgoing: PinnedBuffer::new(device, STAGING_BYTES)?,
            outgoing_ring: Ring::default(),
            incoming: PinnedBuffer::new(device, STAGING_BYTES)?,
            ahead: ReadAhead::default(),
            failed: FailedTransfer::default(),
            replayed: 0,
            waits: 0,
        })
    }

    /// Submissions that re-used a captured graph.
    pub fn replayed(&self) -> u64 {
        self.replayed
    }

    /// How often the host has waited for the stream.
    pub fn waits(&self) -> u64 {
        self.waits
    }

    /// Memory is allocated: at its address there may be other bytes now than those that came to the host.
    pub fn note_allocation(&mut self) {
        self.ahead.forget();
    }

    pub(super) fn synchronize(&mut self, device: &Device) -> Result<()> {
        self.waits += 1;
        device.synchronize()?;
        self.outgoing_ring.pass_put(STAGING_BYTES);
        Ok(())
    }

    /// Runs the kernels of a launch and waits for them.
    pub fn run(&mut self, gpu: &Gpu, mode: Mode, launch: &Launch<'_>) -> Result<(), ArrayError> {
        let ahead = self.put(gpu, mode, launch, WAITED)?;
        let device = &gpu.device;
        self.bring(device, ahead.as_ref()).map_err(|e| e.in_op("launch"))?;
        let passed = self.synchronize(device).and_then(|()| device.check_peers());
        passed.map_err(|e| self.after_wait(gpu, e).in_op("launch"))?;
        ahead.into_iter().for_each(|ahead| self.ahead.launched(ahead));
        self.fault(WAITED, self.header.number(), launch.kernels())
    }

    /// Puts the kernels of a launch on the stream, followed by the copy of its result to the host.
    pub fn enqueue(
        &mut self,
        gpu: &Gpu,
        mode: Mode,
        launch: &Launch<'_>,
        result: Option<Range<u64>>,
    ) -> Result<Ticket, ArrayError> {
        let slot = self.queue.next_slot()?;
        self.put(gpu, mode, launch, slot)?;
        if let Some(from) = result {
            // Kernels of the next launch would have to wait for the copy engine. A copying kernel is faster.
            let bytes = (from.end - from.start).next_multiple_of(4) as usize;
            let to = self.queue.result_address(slot);
            launch_moves(gpu, &[Move { to, from: Some(from.start), bytes }])
                .map_err(|e| e.in_op("launch"))?;
        }
        let number = self.queue.push(slot, self.header.number(), self.outgoing_ring.mark())?;
        Ok(Ticket { number, result: Vec::new() })
    }

    /// Waits for a launch that was enqueued.
    pub fn wait(
        &mut self,
        gpu: &Gpu,
        number: u64,
        launch: &Launch<'_>,
        result: &mut [u8],
    ) -> Result<(), ArrayError> {
        gpu.device.bind().map_err(|e| e.in_op("launch"))?;
        self.waits += 1;
        let (entry, outcome) = self.queue.wait(number);
        let outcome = outcome.and_then(|()| gpu.device.check_peers());
        outcome.map_err(|e| self.after_wait(gpu, e).in_op("launch"))?;
        self.outgoing_ring.pass(entry.staged);
        result.copy_from_slice(self.queue.result(entry.slot, 0..result.len()));
        self.fault(entry.slot, entry.header, launch.kernels())
    }

    /// Ends the device's exchanges, and forgets the reports of these and of the kernels after them.
    pub fn end_exchanges(&mut self, gpu: &Gpu) {
        let Some(membership) = &gpu.membership else { return };
        let ended = gpu.device.bind().and_then(|()| membership.end(|| self.seen.clear()));
        self.ahead.forget();
        if let Err(error) = ended {
            tracing::error!("after its exchanges were ended: {error}");
            return;
        }
        self.outgoing_ring.pass_put(STAGING_BYTES);
        // Kernels after an exchange that has not happened may have reported wrong data. No launch is to blame for it.
        self.queue.forget_reports();
    }

    /// The error of a recording. As [`Session::after_wait`].
    fn after_recording(&mut self, gpu: &Gpu, failure: Unrecorded) -> ArrayError {
        match failure {
            Unrecorded::Wait(error) => Unrecorded::Wait(self.after_wait(gpu, error)).into_error(),
            Unrecorded::Kernel(_) => failure.into_error(),
        }
    }

    /// If the host has stopped waiting because a peer has failed, frees the stream from the exchanges that wait for it.
    fn after_wait(&mut self, gpu: &Gpu, error: CudaError) -> CudaError {
        if matches!(error, CudaError::Peer { .. }) {
            self.end_exchanges(gpu);
        }
        error
    }

    /// Puts the host's writes on the stream, then the kernels of a launch, which report to `slot`. Returns the
    /// addresses that are to come to the host with them.
    ///
    /// Kernels of a launch may read lasting memory before earlier kernels have ended. If an earlier launch may still
    /// run, the delivery of the header of reports separates the two launches.
    fn put(
        &mut self,
        gpu: &Gpu,
        mode: Mode,
        launch: &Launch<'_>,
        slot: usize,
    ) -> Result<Option<Range<u64>>, ArrayError> {
        self.failed.report_to_launch()?;
        let device = &gpu.device;
        let ready = device.bind().and_then(|()| self.report_to(gpu, slot)).and_then(|()| self.deliver(gpu));
        ready.map_err(|e| e.in_op("launch"))?;
        self.ahead.forget();
        let record = |session: &Session, pace| session.record(gpu, mode, launch, pace);
        let Some(piece) = launch.prepared() else {
            record(self, Pace::Watched).map_err(|failure| self.after_recording(gpu, failure))?;
            return Ok(None);
        };
        let arena = launch.has_arena().then(|| CudaMemory::of(launch.arena().memory()).at(0));
        let key = GraphKey { piece, arena: arena.unwrap_or(0) };
        let run = self.run_prepared(gpu, key, launch, record);
        run.map_err(|failure| self.after_recording(gpu, failure))?;
        Ok(self.seen.last().map(|seen| seen.ahead.clone()))
    }

    /// Makes kernels after the next delivery report to `slot`, whatever kernels before it have reported.
    fn report_to(&mut self, gpu: &Gpu, slot: usize) -> Result<()> {
        if !self.header.turn_to(slot) {
            return Ok(());
        }
        let at = self.fault.at(0);
        let header = self.header.bytes(self.queue.address(slot));
        self.post(gpu, at..at + header.len() as u64, &header)
    }

    /// Puts the copy of the bytes that the host will read on the stream.
    fn bring(&self, device: &Device, ahead: Option<&Range<u64>>) -> Result<()> {
        let Some(ahead) = ahead.filter(|ahead| !ahead.is_empty()) else { return Ok(()) };
        let (to, bytes) = (self.incoming.address().cast(), (ahead.end - ahead.start) as usize);
        // SAFETY: the launch owns its results, which include these bytes; they are fewer than the pinned ones; and the
        // caller waits for the stream.
        unsafe { driver!(cuMemcpyDtoHAsync_v2(to, ahead.start, bytes, device.stream())) }
    }

    fn run_prepared(
        &mut self,
        gpu: &Gpu,
        key: GraphKey,
        launch: &Launch<'_>,
        record: impl Fn(&Session, Pace) -> Result<(), Unrecorded>,
    ) -> Result<(), Unrecorded> {
        let Some(i) = self.seen.iter().position(|s| s.key == key) else {
            // All cores of the host compile its kernels. Launches would compile them one after the other.
            let kernels = listed(gpu, || record(self, Pace::Free))?;
            let loaded = gpu.modules.load_all(&kernels, &mut |_, _| ());
            loaded.map_err(|e| Unrecorded::Kernel(e.in_op("launch")))?;
            // The first run lets libraries choose, which a capture cannot contain.
            record(self, Pace::Watched)?;
            if self.seen.len() == GRAPHS_MAX {
                self.seen.remove(0);
            }
            self.seen.push(Seen { key, graph: None, outputs: results(launch), ahead: 0..0 });
            return Ok(());
        };
        // Least recently used first.
        let mut seen = self.seen.remove(i);
        if seen.graph.is_none() {
            let repeats = if gpu.membership.is_some() { 0 } else { CAPTURE_REPEATS };
            seen.graph = capture(&gpu.device, repeats, || record(self, Pace::Free))?;
            gpu.captured.fetch_add(u64::from(seen.graph.is_some()), Ordering::Relaxed);
        } else {
            self.replayed += 1;
        }
        let outcome = match &seen.graph {
            // SAFETY: the launch owns the memory of the prepared program, whose addresses never change; the arena's
            // address is part of the key; and the caller keeps both until the stream has passed.
            Some(graph) => unsafe { graph.launch() }.map_err(|e| Unrecorded::Kernel(e.in_op("launch"))),
            None => record(self, Pace::Watched),
        };
        self.seen.push(seen);
        outcome
    }

    /// Puts the kernels on the stream.
    fn record(&self, gpu: &Gpu, mode: Mode, launch: &Launch<'_>, pace: Pace) -> Result<(), Unrecorded> {
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
        let calls: Vec<Call<'_>> = launch.kernels().iter().enumerate().map(bind).collect();
        let is_watched = pace == Pace::Watched && gpu.membership.is_some();
        let watch = || gpu.device.synchronize();
        let watch = is_watched.then_some(&watch);
        put_all(launch.groups(), |group| dispatch::run_group(group.name, &calls[group.kernels]), watch)
    }

    /// The kernels that the launches would put on the stream, each once. Runs nothing.
    pub fn kernels_of(
        &self,
        gpu: &Gpu,
        mode: Mode,
        launches: &[Launch<'_>],
    ) -> Result<Vec<SizedKernel>, ArrayError> {
        let record = || launches.iter().try_for_each(|launch| self.record(gpu, mode, launch, Pace::Free));
        listed(gpu, record).map_err(Unrecorded::into_error)
    }

    /// The error that a kernel of a slot's launch has reported. The launch has ended.
    fn fault(&mut self, slot: usize, header: u32, kernels: &[Kernel]) -> Result<(), ArrayError> {
        let Some(wrong) = Wrong::of(self.queue.report(slot), header) else {
            self.header.note_right(slot, header);
            return Ok(());
        };
        Err(dispatch::fault(&kernels[wrong.kernel], wrong))
    }
}

/// The kernels that `record` would put on the stream, each once, with the most shared memory that it needs.
fn listed<E>(gpu: &Gpu, record: impl FnOnce() -> Result<(), E>) -> Result<Vec<SizedKernel>, E> {
    let mut most: HashMap<KernelKey, usize> = HashMap::new();
    for SizedKernel { key, shared_bytes } in gpu.listing.of(record)? {
        let bytes = most.entry(key).or_default();
        *bytes = shared_bytes.max(*bytes);
    }
    Ok(most.into_iter().map(|(key, shared_bytes)| SizedKernel { key, shared_bytes }).collect())
}

/// The error of a launch on a backend that only plans.
pub(super) fn runs_nothing(launch: &Launch<'_>) -> ArrayError {
    launch.note_done(0);
    let reason = "this backend plans programs and has no device: open one with CudaBackend::new to run them";
    ArrayError::Argument { op: "launch", reason: reason.into() }
}

/// Addresses of a launch's results; destinations of prepared programs are gap-free.
fn results(launch: &Launch<'_>) -> Vec<Range<u64>> {
    let outputs = launch.kernels().iter().flat_map(|kernel| &kernel.outputs);
    let outputs = outputs.filter(|operand| matches!(operand.memory, OperandMemory::Output(_)));
    let addresses = |operand| {
        let bound = Bound::new(launch, operand);
        bound.address..bound.address + (bound.len() * bound.dtype.size()) as u64
    };
    outputs.map(addresses).collect()
}

/// Puts groups of kernels on the stream. With `watch`, the host waits after each [`WATCHED_GROUPS`] of them.
fn put_all<G>(
    groups: impl Iterator<Item = G>,
    put: impl Fn(G) -> Result<(), ArrayError>,
    watch: Option<&impl Fn() -> Result<()>>,
) -> Result<(), Unrecorded> {
    groups.enumerate().try_for_each(|(i, group)| {
        put(group).map_err(Unrecorded::Kernel)?;
        match watch.filter(|_| (i + 1).is_multiple_of(WATCHED_GROUPS)) {
            Some(watch) => watch().map_err(Unrecorded::Wait),
            None => Ok(()),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// A failed peer is distinguished from a failed kernel. Only after a failed peer does this device end its
    /// exchanges.
    #[test]
    fn a_recording_that_waits_for_a_failed_peer_says_so() {
        let put = Cell::new(0);
        let count = |_| -> Result<(), ArrayError> {
            put.set(put.get() + 1);
            Ok(())
        };
        let watch = || match put.get() < 2 * WATCHED_GROUPS {
            true => Ok(()),
            false => Err(CudaError::Peer { reason: "device 1 has failed".into() }),
        };
        let failure = put_all(0..1000, count, Some(&watch)).expect_err("the peer has failed");
        assert_eq!(put.replace(0), 2 * WATCHED_GROUPS, "nothing follows");
        assert!(matches!(failure, Unrecorded::Wait(CudaError::Peer { .. })));
        assert!(put_all(0..1000, count, Some(&watch).filter(|_| false)).is_ok());
        assert_eq!(put.get(), 1000, "nobody waits");
        let refused =
            |_| Err(ArrayError::Kernel { op: "matmul".into(), reason: "it is not supported".into() });
        let failure = put_all(0..10, refused, Some(&watch)).expect_err("refused");
        assert!(matches!(failure, Unrecorded::Kernel(ArrayError::Kernel { .. })));
    }
}
