//! What a node does with one of its devices for the leader.

use std::collections::HashMap;
use std::io::{self, BufReader};
use std::net::{Shutdown, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use keel_array::{
    ArrayError, Backend, Buffer, Category, Kernel, MemoryAt, MemoryCopy, MemoryRange, Op, Operand,
    RemoteLaunch, RowBlock, RowData, Runtime, View,
};

use crate::connection::MessageSender;
use crate::frame::{self, BYTES_MAX};
use crate::message::{
    At, Coding, CopyAt, DeviceReply, Failure, MOVES_MAX, PIECES_MAX, Piece, RangeAt, Request,
};
use crate::node::Session;

/// Most allocations of a device.
const MEMORIES_MAX: usize = 1 << 20;

/// Most memory of all pieces of programs together, in bytes. A kernel takes about 1 KiB.
const PIECE_BYTES_MAX: usize = 4 << 30;

/// What a request gives: an answer, and bytes for it.
type Outcome = Result<(DeviceReply, Vec<u8>), Failure>;

/// A piece of a program.
struct BoundPiece {
    launch: RemoteLaunch,
    /// Its [`bytes_of`].
    bytes: usize,
}

/// Memory of this process that a piece takes, in bytes.
fn bytes_of(piece: &Piece) -> usize {
    let places = piece.externals.len() + piece.outputs.len();
    let kernels: usize = piece.kernels.iter().map(bytes_of_kernel).sum();
    places * size_of::<(Buffer, usize)>() + kernels
}

/// The same of a kernel with those that it absorbs.
fn bytes_of_kernel(kernel: &Kernel) -> usize {
    let operand = |Operand { layout, .. }: &Operand| {
        size_of::<Operand>() + size_of_val(&layout.shape[..]) + size_of_val(&layout.strides[..])
    };
    let operands: usize = kernel.inputs.iter().chain(&kernel.outputs).map(operand).sum();
    let attributes = match &kernel.op {
        Op::Fused(fused) => size_of_val(&fused.steps[..]),
        Op::SliceUpdate { starts } | Op::View(View::Permute(starts) | View::Slice(starts)) => {
            size_of_val(&starts[..])
        }
        _ => 0,
    };
    let absorbed: usize = kernel.absorbed.iter().map(bytes_of_kernel).sum();
    size_of::<Kernel>() + operands + attributes + absorbed
}

/// A device with what a connection of the leader has on it. Dropping it frees all of that.
struct Worker {
    pieces: HashMap<u64, BoundPiece>,
    memories: HashMap<u64, Buffer>,
    /// Users of the arena.
    arena_users: usize,
    runtime: Runtime,
    /// The first failure of a request without an answer.
    failure: Option<Failure>,
    session: Arc<Session>,
}

/// Serves the connection of a device until it ends, and closes it. A leader that has not given it up then loses the
/// node, because it can run nothing without this device.
///
/// # Errors
/// The connection fails. A leader that closes it is no error.
pub(crate) fn serve(
    stream: &TcpStream,
    to: &MessageSender,
    runtime: Runtime,
    session: Arc<Session>,
) -> io::Result<()> {
    let mut worker = Worker::new(runtime, session);
    let served = answer_all(&mut worker, stream, to);
    // Before the worker frees its memory, which may take long.
    let _ = stream.shutdown(Shutdown::Both);
    served
}

fn answer_all(worker: &mut Worker, stream: &TcpStream, to: &MessageSender) -> io::Result<()> {
    let mut from = BufReader::with_capacity(1 << 20, stream);
    let mut bytes = Vec::new();
    loop {
        let request: Request = match frame::read(&mut from, &mut bytes) {
            Err(error) if is_departure(&error) => return Ok(()),
            read => read?,
        };
        let has_reply = request.has_reply();
        let outcome = worker.attempt(request, &bytes);
        if !has_reply {
            if let Err(failure) = outcome {
                worker.keep(failure);
            }
            continue;
        }
        let (answer, bytes) = outcome.unwrap_or_else(|failure| (DeviceReply::Failed(failure), Vec::new()));
        match to.send(&answer, &bytes) {
            Err(error) if is_departure(&error) => return Ok(()),
            sent => sent?,
        }
    }
}

/// Whether the leader just went. A heartbeat that comes too late turns its farewell into a reset.
fn is_departure(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe)
}

/// An answer without bytes.
fn done() -> Outcome {
    Ok((DeviceReply::Done, Vec::new()))
}

fn too_many(what: &str, most: usize) -> Failure {
    Failure::new(format!("the leader has sent too many {what}: a device has at most {most}"))
}

fn failed(error: ArrayError) -> Failure {
    match error {
        ArrayError::Kernel { op, reason } => Failure { op: Some(op), ..Failure::new(reason) },
        ArrayError::DeviceLost { op, reason } => {
            Failure { op: Some(op), is_lasting: true, ..Failure::new(reason) }
        }
        other => Failure::new(other.to_string()),
    }
}

impl Worker {
    fn new(runtime: Runtime, session: Arc<Session>) -> Worker {
        let (pieces, memories) = (HashMap::new(), HashMap::new());
        Worker { pieces, memories, arena_users: 0, runtime, failure: None, session }
    }

    /// Keeps the first failure of a request without an answer. The first that lasts replaces one that does not.
    fn keep(&mut self, failure: Failure) {
        if self.failure.as_ref().is_none_or(|kept| failure.is_lasting && !kept.is_lasting) {
            self.failure = Some(failure);
        }
    }

    /// Handles a request. Launches and requests with an answer fail with the failure that is kept, because they may
    /// need the missing result. `Rejoin` and `Usage` run in any case. The failure is forgotten when the last launch of
    /// a program or `MakeReady` has failed with it, or when the device rejoins. The failure of a request that changes
    /// memory lasts: nothing tells what the memory holds.
    fn attempt(&mut self, request: Request, bytes: &[u8]) -> Outcome {
        let is_launch = matches!(request, Request::Launch { .. });
        let ends_program =
            matches!(request, Request::Launch { is_last: true, .. } | Request::MakeReady { .. });
        let depends =
            is_launch || request.has_reply() && !matches!(request, Request::Rejoin | Request::Usage);
        let before = self.failure.clone().filter(|_| depends);
        if ends_program {
            self.forget_failure();
        }
        let changes_memory = matches!(
            request,
            Request::Write { .. } | Request::Copy { .. } | Request::Clear { .. } | Request::Pack { .. }
        );
        let outcome = match before {
            Some(failure) => Err(failure),
            None => catch_unwind(AssertUnwindSafe(|| self.handle(request, bytes)))
                .unwrap_or_else(|_| Err(Failure::new("the node panicked, which is a bug; see its log"))),
        };
        if is_launch && outcome.is_err() {
            // It does not come to its exchanges: the others must not wait for it.
            self.abandon();
        }
        outcome.map_err(|failure| Failure { is_lasting: failure.is_lasting || changes_memory, ..failure })
    }

    fn forget_failure(&mut self) {
        self.failure.take_if(|failure| !failure.is_lasting);
    }

    fn backend(&self) -> &dyn Backend {
        self.runtime.backend()
    }

    fn abandon(&self) {
        if let Some(group) = self.backend().group() {
            group.abandon();
        }
    }

    /// The memory of a place, if it has `bytes` bytes from there on.
    fn place(&self, At { memory, offset }: At, bytes: usize) -> Result<MemoryAt<'_>, Failure> {
        let buffer = self.buffer(memory)?;
        if offset.checked_add(bytes).is_none_or(|end| end > buffer.bytes()) {
            let has = buffer.bytes();
            let reason = format!("{bytes} bytes from byte {offset} of memory {memory}, which has {has}");
            return Err(Failure::new(reason));
        }
        Ok(MemoryAt { memory: buffer.memory(), offset })
    }

    fn buffer(&self, memory: u64) -> Result<&Buffer, Failure> {
        let missing = || Failure::new(format!("there is no memory {memory}"));
        self.memories.get(&memory).ok_or_else(missing)
    }

    fn handle(&mut self, request: Request, bytes: &[u8]) -> Outcome {
        match request {
            Request::Allocate { .. } if self.memories.len() >= MEMORIES_MAX => {
                return Err(too_many("allocations", MEMORIES_MAX));
            }
            Request::Allocate { memory, bytes, lasting } => {
                let category = if lasting { Category::Weights } else { Category::User };
                let buffer = self.runtime.allocate(category, bytes).map_err(failed)?;
                self.memories.insert(memory, buffer);
            }
            Request::Free { memory } => {
                if let Some(freed) = self.memories.remove(&memory) {
                    self.pieces.retain(|_, piece| !piece.launch.uses(&freed));
                }
            }
            Request::Arena { bytes } => self.enter_arena(bytes)?,
            Request::GrowArena { bytes } => self.runtime.reserve_arena(bytes).map_err(failed)?,
            Request::FreeArena => self.leave_arena(),
            Request::ReleaseIdleMemory => self.runtime.release_idle_memory(),
            Request::Write { at } => {
                let MemoryAt { memory, offset } = self.place(at, bytes.len())?;
                self.backend().write(memory, offset, bytes);
            }
            Request::Read { at, bytes, settled } => return self.read(at, bytes, settled),
            Request::Copy { copies } if copies.len() > MOVES_MAX => {
                return Err(too_many("copies", MOVES_MAX));
            }
            Request::Clear { parts } if parts.len() > MOVES_MAX => return Err(too_many("parts", MOVES_MAX)),
            Request::Copy { copies } => {
                let copy = |CopyAt { from, to, bytes }: CopyAt| {
                    Ok(MemoryCopy { from: self.place(from, bytes)?, to: self.place(to, bytes)?, bytes })
                };
                self.backend().copy(&copies.into_iter().map(copy).collect::<Result<Vec<_>, Failure>>()?);
            }
            Request::Clear { parts } => {
                let range = |RangeAt { at, bytes }: RangeAt| {
                    let MemoryAt { memory, offset } = self.place(at, bytes)?;
                    Ok(MemoryRange { memory, bytes: offset..offset + bytes })
                };
                self.backend().clear(&parts.into_iter().map(range).collect::<Result<Vec<_>, Failure>>()?);
            }
            Request::Pack { spec, at, expert, first_row, rows, coding } => {
                let floats = Floats::of(coding, bytes)?;
                let block = RowBlock { expert, first_row, rows, data: floats.data(coding, bytes) };
                spec.check_block(&block).map_err(failed)?;
                let MemoryAt { memory, offset } = self.place(at, self.backend().packed_bytes(&spec))?;
                self.backend().pack(&spec, memory, offset, &block).map_err(failed)?;
            }
            Request::Repeat { spec, at, rows } => {
                spec.check().map_err(failed)?;
                if rows == 0 || rows > spec.rows {
                    let reason = format!("{rows} rows are repeated in a weight of {}", spec.rows);
                    return Err(Failure::new(reason));
                }
                let MemoryAt { memory, offset } = self.place(at, self.backend().packed_bytes(&spec))?;
                if !self.backend().repeat_rows(&spec, memory, offset, rows) {
                    return Ok((DeviceReply::Cannot, Vec::new()));
                }
            }
            Request::Program(piece) => self.bind(piece)?,
            Request::Forget { number } => drop(self.pieces.remove(&number)),
            Request::Launch { number, .. } => {
                self.piece(number)?.with(|launch| self.backend().launch(launch)).map_err(failed)?;
                return Ok((self.prepared(), Vec::new()));
            }
            Request::MakeReady { numbers } => return self.make_ready(&numbers),
            Request::Usage => {
                return Ok((DeviceReply::Usage(self.backend().device_usage()), Vec::new()));
            }
            Request::Rejoin => {
                self.forget_failure();
                self.session.rejoin(self.backend());
            }
        }
        done()
    }

    fn enter_arena(&mut self, bytes: usize) -> Result<(), Failure> {
        self.runtime.reserve_arena(bytes).map_err(failed)?;
        self.arena_users += 1;
        Ok(())
    }

    fn leave_arena(&mut self) {
        self.arena_users = self.arena_users.saturating_sub(1);
        if self.arena_users == 0 {
            self.runtime.clear_cache();
        }
    }

    fn read(&self, at: At, count: usize, settled: bool) -> Outcome {
        if count > BYTES_MAX {
            let reason = format!("{count} bytes at once; at most {BYTES_MAX} are read");
            return Err(Failure::new(reason));
        }
        let MemoryAt { memory, offset } = self.place(at, count)?;
        let mut bytes = vec![0; count];
        if settled {
            self.backend().read_settled(memory, offset, &mut bytes).map_err(failed)?;
        } else {
            self.backend().read(memory, offset, &mut bytes).map_err(failed)?;
        }
        Ok((DeviceReply::Done, bytes))
    }

    fn piece(&self, number: u64) -> Result<&RemoteLaunch, Failure> {
        let missing = || Failure::new(format!("there is no piece {number} of a program"));
        let launch = &self.pieces.get(&number).ok_or_else(missing)?.launch;
        match launch.fits_arena() {
            true => Ok(launch),
            false => Err(Failure::new(format!(
                "the arena has become smaller than piece {number} of a program needs"
            ))),
        }
    }

    fn bind(&mut self, piece: Piece) -> Result<(), Failure> {
        let bytes = bytes_of(&piece);
        let Piece { number, kernels, externals, outputs, has_arena } = piece;
        let buffers = |places: Vec<At>| -> Result<Vec<(Buffer, usize)>, Failure> {
            places.into_iter().map(|at| Ok((self.buffer(at.memory)?.clone(), at.offset))).collect()
        };
        let (externals, outputs) = (buffers(externals)?, buffers(outputs)?);
        self.pieces.remove(&number);
        // A leader sends one piece before it forgets another, and pieces of programs that run once.
        if self.pieces.len() >= PIECES_MAX + 2 {
            return Err(too_many("pieces of programs", PIECES_MAX + 2));
        }
        let others: usize = self.pieces.values().map(|piece| piece.bytes).sum();
        if others + bytes > PIECE_BYTES_MAX {
            return Err(too_many("bytes of programs", PIECE_BYTES_MAX));
        }
        let launch =
            RemoteLaunch::new(&self.runtime, kernels, externals, outputs, has_arena).map_err(failed)?;
        self.pieces.insert(number, BoundPiece { launch, bytes });
        Ok(())
    }

    fn make_ready(&self, numbers: &[u64]) -> Outcome {
        if numbers.len() > self.pieces.len() {
            return Err(too_many("programs to make ready", self.pieces.len()));
        }
        let pieces = numbers.iter().map(|number| self.piece(*number)).collect::<Result<Vec<_>, _>>()?;
        RemoteLaunch::with_all(&pieces, |launches| self.backend().make_ready(launches, &mut |_, _| ()))
            .map_err(failed)?;
        Ok((self.prepared(), Vec::new()))
    }

    fn prepared(&self) -> DeviceReply {
        DeviceReply::Ran(self.backend().preparations())
    }
}

impl Drop for Worker {
    /// The session keeps the runtime, but the next connection must find the device empty.
    fn drop(&mut self) {
        self.runtime.clear_cache();
    }
}

/// Scales and biases of a block of rows.
#[derive(Default)]
struct Floats {
    scales: Vec<f32>,
    biases: Vec<f32>,
}

impl Floats {
    fn of(coding: Coding, bytes: &[u8]) -> Result<Floats, Failure> {
        let Coding::Affine { codes, groups } = coding else { return Ok(Floats::default()) };
        let length = groups.checked_mul(8).and_then(|floats| floats.checked_add(codes));
        if length != Some(bytes.len()) {
            let reason = format!("{codes} codes and {groups} scales and biases in {} bytes", bytes.len());
            return Err(Failure::new(reason));
        }
        let floats = |bytes: &[u8]| {
            let (words, _) = bytes.as_chunks::<4>();
            words.iter().map(|word| f32::from_le_bytes(*word)).collect()
        };
        let (scales, biases) = bytes[codes..].split_at(4 * groups);
        Ok(Floats { scales: floats(scales), biases: floats(biases) })
    }

    fn data<'a>(&'a self, coding: Coding, bytes: &'a [u8]) -> RowData<'a> {
        match coding {
            Coding::Dense => RowData::Dense(bytes),
            Coding::Blocks => RowData::Blocks(bytes),
            Coding::Affine { codes, .. } => {
                RowData::Affine { codes: &bytes[..codes], scales: &self.scales, biases: &self.biases }
            }
        }
    }
}

#[cfg(test)]
mod tests;
