//! What a node does with one of its devices for the leader.

use std::collections::HashMap;
use std::io::{self, BufReader};
use std::net::TcpStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use keel_array::{ArrayError, Backend, Buffer, Category, MemoryAt, RemoteLaunch, RowBlock, RowData, Runtime};

use crate::connection::MessageSender;
use crate::frame::{self, BYTES_MAX};
use crate::message::{Answer, At, Coding, Failure, PIECES_MAX, Piece, Request};
use crate::node::Session;

/// Most allocations of a device.
const MEMORIES_MAX: usize = 1 << 20;

/// Most kernels of all pieces of programs together.
const KERNELS_MAX: usize = 4 << 20;

/// What a request gives: an answer, and bytes for it.
type Outcome = Result<(Answer, Vec<u8>), Failure>;

/// A device with what the leader has on it. Dropping it frees all of that.
struct Worker {
    pieces: HashMap<u64, RemoteLaunch>,
    /// Kernels of these pieces.
    kernels: usize,
    memories: HashMap<u64, Buffer>,
    runtime: Runtime,
    /// The first failure of a request without an answer.
    failure: Option<Failure>,
    session: Arc<Session>,
}

/// Does what comes over the connection of a device until it ends.
///
/// # Errors
/// How it ended, if the leader did not just go.
pub(crate) fn serve(stream: TcpStream, runtime: Runtime, session: Arc<Session>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut from = BufReader::with_capacity(1 << 20, stream.try_clone()?);
    let to = MessageSender::new(stream, Answer::Here).map_err(io::Error::other)?;
    let mut worker = Worker::new(runtime, session);
    let mut bytes = Vec::new();
    loop {
        let request: Request = match frame::read(&mut from, &mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        };
        let is_answered = request.is_answered();
        let outcome = worker.attempt(request, &bytes);
        if !is_answered {
            if let Err(failure) = outcome {
                worker.failure.get_or_insert(failure);
            }
            continue;
        }
        let (answer, bytes) = outcome.unwrap_or_else(|failure| (Answer::Failed(failure), Vec::new()));
        to.send(&answer, &bytes)?;
    }
}

/// An answer without bytes.
fn done() -> Outcome {
    Ok((Answer::Done, Vec::new()))
}

fn too_many(what: &str, most: usize) -> Failure {
    Failure { op: None, reason: format!("the leader has sent too many {what}: a device has at most {most}") }
}

fn failed(error: ArrayError) -> Failure {
    match error {
        ArrayError::Kernel { op, reason } => Failure { op: Some(op), reason },
        other => Failure { op: None, reason: other.to_string() },
    }
}

impl Worker {
    fn new(runtime: Runtime, session: Arc<Session>) -> Worker {
        Worker {
            pieces: HashMap::new(),
            kernels: 0,
            memories: HashMap::new(),
            runtime,
            failure: None,
            session,
        }
    }

    /// Handles a request. The first failure of a request without an answer is kept. Launches and requests with an
    /// answer then fail with it, because they may need the missing result. `Rejoin` and `Usage` run in any case. The
    /// failure is forgotten when the last launch of a program or `MakeReady` has failed with it, or when the device
    /// rejoins.
    fn attempt(&mut self, request: Request, bytes: &[u8]) -> Outcome {
        let is_launch = matches!(request, Request::Launch { .. });
        let ends_program =
            matches!(request, Request::Launch { is_last: true, .. } | Request::MakeReady { .. });
        let depends =
            is_launch || request.is_answered() && !matches!(request, Request::Rejoin | Request::Usage);
        let before =
            if ends_program { self.failure.take() } else { self.failure.clone().filter(|_| depends) };
        let outcome = match before {
            Some(failure) => Err(failure),
            None => catch_unwind(AssertUnwindSafe(|| self.handle(request, bytes))).unwrap_or_else(|_| {
                Err(Failure { op: None, reason: "the node panicked, which is a bug; see its log".into() })
            }),
        };
        if is_launch && outcome.is_err() {
            // It does not come to its exchanges: the others must not wait for it.
            self.abandon();
        }
        outcome
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
            return Err(Failure { op: None, reason });
        }
        Ok(MemoryAt { memory: buffer.memory(), offset })
    }

    fn buffer(&self, memory: u64) -> Result<&Buffer, Failure> {
        let missing = || Failure { op: None, reason: format!("there is no memory {memory}") };
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
                    self.pieces.retain(|_, piece| !piece.uses(&freed));
                    self.kernels = self.pieces.values().map(RemoteLaunch::kernels).sum();
                }
            }
            Request::Arena { bytes } => self.runtime.reserve_arena(bytes).map_err(failed)?,
            Request::FreeArena => self.runtime.clear_cache(),
            Request::Rest => self.runtime.rest(),
            Request::Write { at } => {
                let MemoryAt { memory, offset } = self.place(at, bytes.len())?;
                self.backend().write(memory, offset, bytes);
            }
            Request::Read { at, bytes, settled } => return self.read(at, bytes, settled),
            Request::Copy { from, to, bytes } => {
                self.backend().copy(self.place(from, bytes)?, self.place(to, bytes)?, bytes);
            }
            Request::Clear { at, bytes } => {
                let MemoryAt { memory, offset } = self.place(at, bytes)?;
                self.backend().clear(memory, offset, bytes);
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
                    return Err(Failure { op: None, reason });
                }
                let MemoryAt { memory, offset } = self.place(at, self.backend().packed_bytes(&spec))?;
                if !self.backend().repeat_rows(&spec, memory, offset, rows) {
                    return Ok((Answer::Cannot, Vec::new()));
                }
            }
            Request::Program(piece) => self.bind(piece)?,
            Request::Forget { number } => self.forget(number),
            Request::Launch { number, .. } => {
                self.piece(number)?.with(|launch| self.backend().launch(launch)).map_err(failed)?;
                return Ok((self.prepared(), Vec::new()));
            }
            Request::MakeReady { numbers } => return self.make_ready(&numbers),
            Request::Usage => {
                return Ok((Answer::Usage(self.backend().device_usage()), Vec::new()));
            }
            Request::Rejoin => {
                self.failure = None;
                self.session.rejoin(self.backend());
            }
            Request::Here => {}
        }
        done()
    }

    fn read(&self, at: At, count: usize, settled: bool) -> Outcome {
        if count > BYTES_MAX {
            let reason = format!("{count} bytes at once; at most {BYTES_MAX} are read");
            return Err(Failure { op: None, reason });
        }
        let MemoryAt { memory, offset } = self.place(at, count)?;
        let mut bytes = vec![0; count];
        if settled {
            self.backend().read_settled(memory, offset, &mut bytes).map_err(failed)?;
        } else {
            self.backend().read(memory, offset, &mut bytes).map_err(failed)?;
        }
        Ok((Answer::Done, bytes))
    }

    fn piece(&self, number: u64) -> Result<&RemoteLaunch, Failure> {
        let missing = || Failure { op: None, reason: format!("there is no piece {number} of a program") };
        self.pieces.get(&number).ok_or_else(missing)
    }

    fn bind(&mut self, piece: Piece) -> Result<(), Failure> {
        let Piece { number, kernels, externals, outputs, has_arena } = piece;
        let buffers = |places: Vec<At>| -> Result<Vec<(Buffer, usize)>, Failure> {
            places.into_iter().map(|at| Ok((self.buffer(at.memory)?.clone(), at.offset))).collect()
        };
        let (externals, outputs) = (buffers(externals)?, buffers(outputs)?);
        self.forget(number);
        // A leader sends one piece before it forgets another, and pieces of programs that run once.
        if self.pieces.len() >= PIECES_MAX + 2 {
            return Err(too_many("pieces of programs", PIECES_MAX + 2));
        }
        let count = self.kernels + kernels.len();
        if count > KERNELS_MAX {
            return Err(too_many("kernels", KERNELS_MAX));
        }
        let launch =
            RemoteLaunch::new(&self.runtime, kernels, externals, outputs, has_arena).map_err(failed)?;
        self.pieces.insert(number, launch);
        self.kernels = count;
        Ok(())
    }

    fn forget(&mut self, number: u64) {
        if let Some(piece) = self.pieces.remove(&number) {
            self.kernels -= piece.kernels();
        }
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

    fn prepared(&self) -> Answer {
        Answer::Ran(self.backend().preparations())
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
            return Err(Failure { op: None, reason });
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
mod tests {
    use keel_array::{
        Compute, DType, Kernel, Layout, Op, Operand, OperandMemory, RuntimeOptions, WeightFormat, WeightSpec,
    };
    use keel_cpu::{CpuBackend, CpuOptions};

    use super::*;
    use crate::node::tests::session;

    fn refusal(worker: &mut Worker, request: Request, bytes: &[u8]) -> String {
        match worker.attempt(request, bytes) {
            Err(Failure { reason, .. }) => reason,
            Ok(_) => panic!("it is refused"),
        }
    }

    /// What no leader of ours sends must not reach a device.
    #[test]
    fn requests_beyond_memory_and_weights_are_refused() {
        let (session, _leader) = session(1);
        let mut worker = worker(session);
        let format = WeightFormat::Dense(DType::F32);
        let spec = WeightSpec { experts: 1, rows: 300, cols: 32, format, compute: Compute::F32 };
        let bytes = worker.backend().packed_bytes(&spec);
        let allocated = worker.attempt(Request::Allocate { memory: 1, bytes, lasting: true }, &[]);
        assert!(matches!(allocated, Ok((Answer::Done, _))));
        let at = |offset| At { memory: 1, offset };
        for (first_row, rows, offset, sent, reason) in [
            (256, 256, 0, 256 * 128, "256 rows from row 256 of expert 0 are not within (1, 300, 32)"),
            (0, 256, 0, 100, "100 bytes for 256 rows of 32"),
            (usize::MAX, 1, 0, 128, "are not within"),
            (0, 256, 64, 256 * 128, "bytes from byte 64 of memory 1, which has"),
        ] {
            let coding = Coding::Dense;
            let pack = Request::Pack { spec, at: at(offset), expert: 0, first_row, rows, coding };
            let found = refusal(&mut worker, pack, &vec![0; sent]);
            assert!(found.contains(reason), "{found}");
        }
        let write = Request::Write { at: at(bytes - 3) };
        assert!(refusal(&mut worker, write, &[0; 4]).contains("4 bytes from byte"));
        let read = Request::Read { at: At { memory: 2, offset: 0 }, bytes: 4, settled: false };
        assert_eq!(refusal(&mut worker, read, &[]), "there is no memory 2");
        let launch = Request::Launch { number: 9, is_last: true };
        assert_eq!(refusal(&mut worker, launch, &[]), "there is no piece 9 of a program");
        let pack =
            |rows| Request::Pack { spec, at: at(0), expert: 0, first_row: 0, rows, coding: Coding::Dense };
        assert!(worker.attempt(pack(256), &vec![0; 256 * 128]).is_ok());
        for rows in [0, 301] {
            let found = refusal(&mut worker, Request::Repeat { spec, at: at(0), rows }, &[]);
            assert_eq!(found, format!("{rows} rows are repeated in a weight of 300"));
        }
        let huge = WeightSpec { experts: 1 << 30, rows: 1 << 30, ..spec };
        let found = refusal(&mut worker, Request::Repeat { spec: huge, at: at(0), rows: 1 }, &[]);
        assert!(found.contains("has too many elements"), "{found}");
        let numbers = vec![7; 3];
        assert!(refusal(&mut worker, Request::MakeReady { numbers }, &[]).contains("at most 0"));
    }

    /// A device on the CPU.
    fn worker(session: Arc<Session>) -> Worker {
        let backend = Arc::new(CpuBackend::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }));
        Worker::new(Runtime::new(backend, RuntimeOptions::default()), session)
    }

    /// What should have come before a program is missing until the program has failed by it.
    #[test]
    fn a_failure_without_an_answer_ends_the_program_after_it() {
        let (session, _leader) = session(1);
        let mut worker = worker(session);
        let failed = worker.attempt(Request::Write { at: At { memory: 5, offset: 0 } }, &[0; 4]).err();
        worker.failure = failed;
        let missing = "there is no memory 5";
        let launch = |is_last| Request::Launch { number: 1, is_last };
        assert_eq!(refusal(&mut worker, launch(false), &[]), missing);
        let allocate = Request::Allocate { memory: 1, bytes: 64, lasting: false };
        assert_eq!(refusal(&mut worker, allocate, &[]), missing, "it tells, and keeps the failure");
        assert_eq!(refusal(&mut worker, launch(true), &[]), missing);
        assert_eq!(refusal(&mut worker, launch(true), &[]), "there is no piece 1 of a program");
    }

    /// What no plan of ours has must not reach a kernel.
    #[test]
    fn operands_outside_of_their_memory_are_refused() {
        let (session, _leader) = session(1);
        let mut worker = worker(session);
        let allocate = Request::Allocate { memory: 1, bytes: 64, lasting: false };
        assert!(worker.attempt(allocate, &[]).is_ok());
        let operand = |slot, shape: &[usize]| Operand {
            memory: slot,
            layout: Layout::contiguous(shape.into()),
            dtype: DType::F32,
        };
        let at = At { memory: 1, offset: 0 };
        let piece = |input: Operand, output: Operand, workspace| Piece {
            number: 1,
            kernels: vec![Kernel {
                op: Op::Copy,
                inputs: vec![input],
                outputs: vec![output],
                workspace,
                absorbed: Vec::new(),
                regime: None,
            }],
            externals: vec![at],
            outputs: vec![at],
            has_arena: false,
        };
        let (external, result) = (OperandMemory::External(0), OperandMemory::Output(0));
        let fitting = || operand(external, &[2, 8]);
        let out = || operand(result, &[2, 8]);
        assert!(worker.attempt(Request::Program(piece(fitting(), out(), None)), &[]).is_ok());
        let with = |change: fn(&mut Layout)| {
            let mut operand = fitting();
            change(&mut operand.layout);
            operand
        };
        for (input, output, workspace) in [
            (operand(external, &[2, 9]), out(), None),
            (operand(OperandMemory::External(1), &[2, 8]), out(), None),
            (operand(OperandMemory::Arena { temp: 0, offset: 0 }, &[1]), out(), None),
            (operand(OperandMemory::Temp(0), &[1]), out(), None),
            (operand(OperandMemory::Absorbed(0), &[1]), out(), None),
            (with(|layout| layout.offset = 1), out(), None),
            (with(|layout| layout.offset = usize::MAX), out(), None),
            (with(|layout| layout.strides = [usize::MAX, 1].into()), out(), None),
            (with(|layout| layout.strides = [1].into()), out(), None),
            (fitting(), operand(result, &[2, 9]), None),
            (fitting(), operand(OperandMemory::Absorbed(0), &[2, 8]), None),
            (fitting(), out(), Some(0..1)),
        ] {
            let shown = format!("{input:?} {output:?} {workspace:?}");
            let found = refusal(&mut worker, Request::Program(piece(input, output, workspace)), &[]);
            assert!(found.contains("not within its memory") || found.contains("scratch"), "{shown}: {found}");
        }
    }
}
