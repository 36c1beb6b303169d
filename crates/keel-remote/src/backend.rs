//! A device of another process, as the leader sees it.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use keel_array::{
    ArrayError, Backend, DeviceMemory, DeviceUsage, Group, Kernel, KernelGroup, Launch, Memory, MemoryAt,
    MemoryCopy, MemoryRange, OwnMemory, Place, Preparations, PreparedPiece, Programs, RowBlock, RowData,
    Submission, WeightSpec,
};

use crate::Cluster;
use crate::connection::locked;
use crate::frame::BYTES_MAX;
use crate::link::Link;
use crate::message::{
    At, Coding, CopyAt, DeviceReply, Failure, MOVES_MAX, PIECES_MAX, Piece, RangeAt, Request,
};

/// The arena's number among the memories. All handles to an arena have it: the device has one arena, and counts them.
const ARENA: u64 = 0;

/// Memory of the other process, by its number.
struct RemoteMemory {
    number: u64,
    link: Arc<Link>,
}

impl RemoteMemory {
    fn of(memory: &dyn DeviceMemory) -> &RemoteMemory {
        memory.as_any().downcast_ref().unwrap_or_else(|| unreachable!("the memory of another backend"))
    }
}

impl DeviceMemory for RemoteMemory {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for RemoteMemory {
    fn drop(&mut self) {
        let request = match self.number {
            ARENA => Request::FreeArena,
            memory => Request::Free { memory },
        };
        self.link.send(&request, &[]);
    }
}

/// Pieces of programs that the device has.
#[derive(Default)]
struct Sent {
    pieces: HashMap<PreparedPiece, u64>,
    /// Those of prepared programs, the oldest first.
    order: VecDeque<PreparedPiece>,
    next: u64,
}

/// A backend whose device belongs to another process.
///
/// A planning backend of the same kind answers all questions of [`Programs`] and those about sizes. Everything that
/// touches memory goes to the other process. If that is lost, writes are forgotten, and all later reads, launches and
/// allocations are errors. Those of reads and launches are [`ArrayError::Kernel`], not [`ArrayError::DeviceLost`]: the
/// leader meets its nodes again.
pub struct RemoteBackend {
    name: String,
    link: Arc<Link>,
    planner: Arc<dyn Backend>,
    cluster: Weak<Cluster>,
    next_memory: AtomicU64,
    sent: Mutex<Sent>,
    prepared: Mutex<Preparations>,
}

impl RemoteBackend {
    pub(crate) fn new(link: Arc<Link>, planner: Arc<dyn Backend>, cluster: Weak<Cluster>) -> RemoteBackend {
        RemoteBackend {
            name: format!("{} on {}", planner.name(), link.name()),
            link,
            planner,
            cluster,
            next_memory: AtomicU64::new(ARENA + 1),
            sent: Mutex::default(),
            prepared: Mutex::default(),
        }
    }

    fn sent(&self) -> MutexGuard<'_, Sent> {
        locked(&self.sent)
    }

    /// Waits for an answer, and the bytes that follow it.
    fn ask(&self, request: &Request) -> Result<(DeviceReply, Vec<u8>), Failure> {
        match self.link.ask(request) {
            Ok((DeviceReply::Failed(failure), _)) => Err(failure),
            Ok(answered) => Ok(answered),
            Err(error) => Err(Failure::new(error.to_string())),
        }
    }

    fn memory(&self, bytes: usize, lasting: bool) -> Result<Box<dyn DeviceMemory>, String> {
        let number = self.next_memory.fetch_add(1, Ordering::Relaxed);
        let asked = self.ask(&Request::Allocate { memory: number, bytes, lasting });
        asked.map_err(|failure| failure.reason)?;
        Ok(Box::new(RemoteMemory { number, link: Arc::clone(&self.link) }))
    }

    fn read_in_pieces(&self, from: At, bytes: &mut [u8], settled: bool) -> Result<(), Failure> {
        for (i, piece) in bytes.chunks_mut(BYTES_MAX).enumerate() {
            let at = At { offset: from.offset + i * BYTES_MAX, ..from };
            let (_, read) = self.ask(&Request::Read { at, bytes: piece.len(), settled })?;
            if read.len() != piece.len() {
                let reason = format!("{} sends {} of {} bytes", self.link.name(), read.len(), piece.len());
                return Err(Failure::new(reason));
            }
            piece.copy_from_slice(&read);
        }
        Ok(())
    }

    /// The number under which the device has this piece of a program. It is sent if the device does not have it.
    fn piece(&self, launch: &Launch<'_>) -> u64 {
        let mut sent = self.sent();
        let prepared = launch.prepared();
        if let Some(number) = prepared.and_then(|piece| sent.pieces.get(&piece)) {
            return *number;
        }
        let number = sent.next;
        sent.next += 1;
        if let Some(piece) = prepared {
            sent.pieces.insert(piece, number);
            sent.order.push_back(piece);
        }
        let [externals, outputs] = launch.places().map(|places| places.iter().map(at_of).collect());
        let (kernels, has_arena) = (launch.kernels().to_vec(), launch.has_arena());
        self.link.send(&Request::Program(Piece { number, kernels, externals, outputs, has_arena }), &[]);
        // One that is pushed out is sent again.
        if sent.order.len() > PIECES_MAX
            && let Some(old) = sent.order.pop_front().and_then(|piece| sent.pieces.remove(&piece))
        {
            self.link.send(&Request::Forget { number: old }, &[]);
        }
        number
    }

    fn note_prepared(&self, answer: &DeviceReply) {
        if let DeviceReply::Ran(done) = answer {
            *locked(&self.prepared) = *done;
        }
    }
}

fn at_of(place: &Place<'_>) -> At {
    at(place.buffer.memory(), place.offset)
}

/// A place in memory as messages name it: the number of the memory, and the byte in it.
fn at(memory: &dyn DeviceMemory, offset: usize) -> At {
    At { memory: RemoteMemory::of(memory).number, offset }
}

fn error_of(op: &str, Failure { op: of, reason, is_lasting }: Failure) -> ArrayError {
    let op = of.unwrap_or_else(|| op.into());
    match is_lasting {
        true => ArrayError::DeviceLost { op, reason },
        false => ArrayError::Kernel { op, reason },
    }
}

impl Backend for RemoteBackend {
    fn name(&self) -> &str {
        &self.name
    }
}

impl Memory for RemoteBackend {
    fn allocate(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.memory(bytes, false)
    }

    fn allocate_lasting(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.memory(bytes, true)
    }

    fn arena_bytes(&self, bytes: usize) -> usize {
        self.planner.arena_bytes(bytes)
    }

    fn allocate_arena(&self, bytes: usize) -> Result<Box<dyn DeviceMemory>, String> {
        self.ask(&Request::Arena { bytes }).map_err(|failure| failure.reason)?;
        Ok(Box::new(RemoteMemory { number: ARENA, link: Arc::clone(&self.link) }))
    }

    /// The device may have to replace its arena. Here it stays the same, because nothing knows its address.
    fn grow_arena(&self, _arena: &dyn DeviceMemory, bytes: usize) -> Result<bool, String> {
        self.ask(&Request::GrowArena { bytes }).map_err(|failure| failure.reason)?;
        Ok(true)
    }

    fn release_idle_memory(&self, _arena: Option<&dyn DeviceMemory>) {
        // It is waited for, because nothing else may be asked for a long time.
        let _ = self.ask(&Request::ReleaseIdleMemory);
    }

    fn device_usage(&self) -> Option<DeviceUsage> {
        match self.ask(&Request::Usage) {
            Ok((DeviceReply::Usage(usage), _)) => usage,
            _ => None,
        }
    }

    fn own_memory(&self) -> OwnMemory {
        self.planner.own_memory()
    }

    fn write(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &[u8]) {
        for (i, piece) in bytes.chunks(BYTES_MAX).enumerate() {
            self.link.send(&Request::Write { at: at(memory, offset + i * BYTES_MAX) }, &[piece]);
        }
    }

    fn read(&self, memory: &dyn DeviceMemory, offset: usize, bytes: &mut [u8]) -> keel_array::Result<()> {
        self.read_in_pieces(at(memory, offset), bytes, false).map_err(|failure| error_of("read", failure))
    }

    fn read_settled(
        &self,
        memory: &dyn DeviceMemory,
        offset: usize,
        bytes: &mut [u8],
    ) -> keel_array::Result<()> {
        self.read_in_pieces(at(memory, offset), bytes, true).map_err(|failure| error_of("read", failure))
    }

    fn copy(&self, copies: &[MemoryCopy<'_>]) {
        let place = |MemoryAt { memory, offset }: MemoryAt<'_>| at(memory, offset);
        let copies = copies.iter().map(|copy| CopyAt {
            from: place(copy.from),
            to: place(copy.to),
            bytes: copy.bytes,
        });
        let copies: Vec<CopyAt> = copies.collect();
        for copies in copies.chunks(MOVES_MAX) {
            self.link.send(&Request::Copy { copies: copies.to_vec() }, &[]);
        }
    }

    fn clear(&self, ranges: &[MemoryRange<'_>]) {
        let range = |MemoryRange { memory, bytes }: &MemoryRange<'_>| RangeAt {
            at: at(*memory, bytes.start),
            bytes: bytes.len(),
        };
        for ranges in ranges.chunks(MOVES_MAX) {
            self.link.send(&Request::Clear { parts: ranges.iter().map(range).collect() }, &[]);
        }
    }

    fn packed_bytes(&self, spec: &WeightSpec) -> usize {
        self.planner.packed_bytes(spec)
    }

    fn first_byte_of_rows(&self, spec: &WeightSpec, rows: Range<usize>) -> Option<usize> {
        self.planner.first_byte_of_rows(spec, rows)
    }

    fn repeat_rows(&self, spec: &WeightSpec, memory: &dyn DeviceMemory, offset: usize, rows: usize) -> bool {
        let request = Request::Repeat { spec: *spec, at: at(memory, offset), rows };
        matches!(self.ask(&request), Ok((DeviceReply::Done, _)))
    }

    /// A failure is the error of the next request that is waited for, such as a launch or an allocation.
    fn pack(
        &self,
        spec: &WeightSpec,
        memory: &dyn DeviceMemory,
        offset: usize,
        block: &RowBlock<'_>,
    ) -> keel_array::Result<()> {
        let RowBlock { expert, first_row, rows, data } = *block;
        let send = |coding, parts: &[&[u8]]| {
            let bytes: usize = parts.iter().map(|part| part.len()).sum();
            if bytes > BYTES_MAX {
                let reason = format!(
                    "{rows} rows are {bytes} bytes, and at most {BYTES_MAX} are sent to another process: \
                     fill the weight with fewer rows at a time"
                );
                return Err(ArrayError::Argument { op: "pack_weight", reason });
            }
            let at = at(memory, offset);
            self.link.send(&Request::Pack { spec: *spec, at, expert, first_row, rows, coding }, parts);
            Ok(())
        };
        match data {
            RowData::Dense(bytes) => send(Coding::Dense, &[bytes]),
            RowData::Blocks(bytes) => send(Coding::Blocks, &[bytes]),
            RowData::Affine { codes, scales, biases } => {
                let coding = Coding::Affine { codes: codes.len(), groups: scales.len() };
                let floats =
                    |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|x| x.to_le_bytes()).collect() };
                send(coding, &[codes, &floats(scales), &floats(biases)])
            }
        }
    }
}

impl Programs for RemoteBackend {
    fn supports(&self, kernel: &Kernel) -> Result<(), String> {
        if matches!(kernel.op, keel_array::Op::Custom(_)) {
            return Err(
                "the code of a custom kernel cannot be sent to another process; run on one machine".into()
            );
        }
        self.planner.supports(kernel)
    }

    fn workspace_bytes(&self, kernel: &Kernel) -> usize {
        self.planner.workspace_bytes(kernel)
    }

    fn absorbs(&self, reader: &Kernel, input: usize, producer: &Kernel) -> bool {
        self.planner.absorbs(reader, input, producer)
    }

    fn narrows(&self, producer: &Kernel, reader: &Kernel) -> bool {
        self.planner.narrows(producer, reader)
    }

    fn group_of(&self, kernels: &[Kernel]) -> Option<KernelGroup> {
        self.planner.group_of(kernels)
    }

    fn is_compiling(&self) -> bool {
        self.planner.is_compiling()
    }

    fn make_ready(
        &self,
        launches: &[Launch<'_>],
        progress: &mut dyn FnMut(usize, usize),
    ) -> keel_array::Result<()> {
        let numbers: Vec<u64> = launches.iter().map(|launch| self.piece(launch)).collect();
        let count = numbers.len();
        let (answer, _) =
            self.ask(&Request::MakeReady { numbers }).map_err(|failure| error_of("compile", failure))?;
        self.note_prepared(&answer);
        progress(count, count);
        Ok(())
    }

    fn preparations(&self) -> Preparations {
        *locked(&self.prepared)
    }
}

impl Submission for RemoteBackend {
    /// Only the last piece of a program is waited for. Those before it follow each other without the host.
    fn launch(&self, launch: &Launch<'_>) -> keel_array::Result<()> {
        let (number, is_last) = (self.piece(launch), launch.is_last());
        let request = Request::Launch { number, is_last };
        if is_last {
            let (answer, _) = self.ask(&request).map_err(|failure| error_of("step", failure))?;
            self.note_prepared(&answer);
        } else {
            self.link.send(&request, &[]);
        }
        if launch.prepared().is_none() {
            self.link.send(&Request::Forget { number }, &[]);
        }
        Ok(())
    }

    fn group(&self) -> Option<&dyn Group> {
        self.planner.group().is_some().then_some(self)
    }
}

impl RemoteBackend {
    /// The device's place. The runtime asks for it as a [`Group`] only if there is one.
    fn place(&self) -> &dyn Group {
        self.planner.group().unwrap_or_else(|| unreachable!("a device of another process is in a group"))
    }
}

impl Group for RemoteBackend {
    fn rank(&self) -> usize {
        self.place().rank()
    }

    fn size(&self) -> usize {
        self.place().size()
    }

    fn is_concurrent(&self) -> bool {
        self.place().is_concurrent()
    }

    fn spans_processes(&self) -> bool {
        true
    }

    fn abandon(&self) {
        if let Some(cluster) = self.cluster.upgrade() {
            cluster.note_absent(self.rank(), None);
        }
    }

    fn rejoin(&self) {
        let asked = self.ask(&Request::Rejoin);
        let Some(cluster) = self.cluster.upgrade() else { return };
        if let Err(failure) = asked {
            // Nothing is said of a node that is lost already.
            cluster.lose_device(self.rank(), &failure.reason);
        }
        cluster.note_rejoined(self.rank());
    }
}

#[cfg(test)]
mod tests;
