use std::ops::Range;

use keel_array::{
    Compute, DType, Fused, FusedStep, Layout, OperandMemory, RuntimeOptions, Source, Unary, WeightFormat,
    WeightSpec,
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
    assert!(matches!(allocated, Ok((DeviceReply::Done, _))));
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
    let pack = |rows| Request::Pack { spec, at: at(0), expert: 0, first_row: 0, rows, coding: Coding::Dense };
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

/// A kernel that copies.
fn copy(input: Operand, output: Operand, workspace: Option<Range<usize>>) -> Kernel {
    let (inputs, outputs) = (vec![input], vec![output]);
    Kernel { op: Op::Copy, inputs, outputs, workspace, absorbed: Vec::new(), regime: None }
}

/// A request without an answer.
fn send(worker: &mut Worker, request: Request, bytes: &[u8]) {
    let failed = worker.attempt(request, bytes).err();
    failed.into_iter().for_each(|failure| worker.keep(failure));
}

/// A piece that should have run before a program's last piece is missing until the program has failed because of it.
#[test]
fn a_piece_that_fails_ends_its_program() {
    let (session, _leader) = session(1);
    let mut worker = worker(session);
    let launch = |number, is_last| Request::Launch { number, is_last };
    send(&mut worker, launch(1, false), &[]);
    let missing = "there is no piece 1 of a program";
    assert_eq!(refusal(&mut worker, launch(2, false), &[]), missing);
    let allocate = Request::Allocate { memory: 1, bytes: 64, lasting: false };
    assert_eq!(refusal(&mut worker, allocate, &[]), missing, "it tells, and keeps the failure");
    assert_eq!(refusal(&mut worker, launch(2, true), &[]), missing);
    assert_eq!(refusal(&mut worker, launch(2, true), &[]), "there is no piece 2 of a program");
}

/// A step that is repeated after such a failure would read other bytes than it should.
#[test]
fn nothing_runs_after_memory_has_not_been_changed() {
    let at = At { memory: 5, offset: 0 };
    let copies = vec![CopyAt { from: at, to: at, bytes: 4 }];
    let parts = vec![RangeAt { at, bytes: 4 }];
    for (request, bytes) in [
        (Request::Write { at }, &[0; 4][..]),
        (Request::Copy { copies }, &[]),
        (Request::Clear { parts }, &[]),
    ] {
        let (session, _leader) = session(1);
        let mut worker = worker(session);
        send(&mut worker, Request::Launch { number: 1, is_last: false }, &[]);
        send(&mut worker, request, bytes);
        for _ in 0..2 {
            let outcome = worker.attempt(Request::Launch { number: 2, is_last: true }, &[]);
            let failure = outcome.expect_err("the bytes are missing");
            assert!(failure.is_lasting, "{}", failure.reason);
            assert_eq!(failure.reason, "there is no memory 5");
            assert!(worker.attempt(Request::Rejoin, &[]).is_ok());
        }
    }
}

/// The next connection of a device finds it empty.
#[test]
fn a_worker_that_is_dropped_frees_all_memory() {
    let (session, _leader) = session(1);
    let mut worker = worker(session);
    let runtime = worker.runtime.clone();
    let before = runtime.ledger().active();
    allocate_two(&mut worker);
    assert!(worker.attempt(Request::Arena { bytes: 1 << 10 }, &[]).is_ok());
    assert!(worker.attempt(Request::Program(copying(1)), &[]).is_ok());
    assert!(runtime.ledger().active().total() > before.total());
    drop(worker);
    assert_eq!(runtime.ledger().active(), before);
}

/// A program has as much of the arena as it uses, or does not run.
#[test]
fn a_program_is_not_run_in_a_smaller_arena() {
    let (session, _leader) = session(1);
    let mut worker = worker(session);
    for request in
        [Request::Allocate { memory: 1, bytes: 64, lasting: false }, Request::Arena { bytes: 1 << 20 }]
    {
        assert!(worker.attempt(request, &[]).is_ok());
    }
    let operand = |memory| Operand { memory, layout: Layout::contiguous([4].into()), dtype: DType::F32 };
    let piece = Piece {
        number: 1,
        kernels: vec![copy(
            operand(OperandMemory::Arena { temp: 0, offset: 4096 - 16 }),
            operand(OperandMemory::Output(0)),
            None,
        )],
        externals: Vec::new(),
        outputs: vec![At { memory: 1, offset: 0 }],
        has_arena: true,
    };
    assert!(worker.attempt(Request::Program(piece), &[]).is_ok());
    let launch = || Request::Launch { number: 1, is_last: true };
    assert!(worker.attempt(launch(), &[]).is_ok());
    let mut in_arena = |bytes: Option<usize>| {
        assert!(worker.attempt(Request::FreeArena, &[]).is_ok());
        if let Some(bytes) = bytes {
            assert!(worker.attempt(Request::Arena { bytes }, &[]).is_ok());
        }
        worker.attempt(launch(), &[]).map(|_| ()).map_err(|failure| failure.reason)
    };
    for smaller in [None, Some(4095)] {
        let found = in_arena(smaller).expect_err("it uses 4096 bytes");
        assert!(found.contains("the arena has become smaller"), "{smaller:?}: {found}");
    }
    for as_large in [4096, 1 << 20] {
        assert_eq!(in_arena(Some(as_large)), Ok(()), "another arena of {as_large} bytes");
    }
}

/// A step without rows has arrays without elements, which may lie at the end of their memory.
#[test]
fn operands_without_elements_need_no_memory() {
    let (session, _leader) = session(1);
    let mut worker = worker(session);
    for request in [
        Request::Allocate { memory: 1, bytes: 0, lasting: false },
        Request::Allocate { memory: 2, bytes: 64, lasting: false },
        Request::Arena { bytes: 1 << 10 },
    ] {
        assert!(worker.attempt(request, &[]).is_ok());
    }
    let operand = |memory| Operand { memory, layout: Layout::contiguous([0, 8].into()), dtype: DType::F32 };
    let (external, result) = (OperandMemory::External(0), OperandMemory::Output(0));
    let piece = |number, input, has_arena| Piece {
        number,
        kernels: vec![copy(operand(input), operand(result), None)],
        externals: vec![At { memory: 1, offset: 0 }],
        outputs: vec![At { memory: 2, offset: 64 }],
        has_arena,
    };
    for (number, input) in [(1, external), (2, OperandMemory::Arena { temp: 0, offset: 1 << 10 })] {
        assert!(worker.attempt(Request::Program(piece(number, input, true)), &[]).is_ok(), "{input:?}");
        assert!(worker.attempt(Request::Launch { number, is_last: true }, &[]).is_ok(), "{input:?}");
    }
    let beyond = piece(3, OperandMemory::Arena { temp: 0, offset: (1 << 10) + 1 }, true);
    assert!(refusal(&mut worker, Request::Program(beyond), &[]).contains("not within its memory"));
    let nowhere = piece(3, OperandMemory::Arena { temp: 0, offset: 0 }, false);
    assert!(refusal(&mut worker, Request::Program(nowhere), &[]).contains("not within its memory"));
}

/// Memories 1 and 2, of 64 bytes each.
fn allocate_two(worker: &mut Worker) {
    for memory in [1, 2] {
        let allocate = Request::Allocate { memory, bytes: 64, lasting: false };
        assert!(worker.attempt(allocate, &[]).is_ok());
    }
}

/// An operand that no plan has must not reach a kernel.
#[test]
fn operands_outside_of_their_memory_are_refused() {
    let (session, _leader) = session(1);
    let mut worker = worker(session);
    allocate_two(&mut worker);
    let operand = |memory, shape: &[usize]| Operand {
        memory,
        layout: Layout::contiguous(shape.into()),
        dtype: DType::F32,
    };
    let at = At { memory: 1, offset: 0 };
    let piece = |input: Operand, output: Operand, workspace| Piece {
        number: 1,
        kernels: vec![copy(input, output, workspace)],
        externals: vec![at],
        outputs: vec![At { memory: 2, offset: 0 }],
        has_arena: false,
    };
    let (external, result) = (OperandMemory::External(0), OperandMemory::Output(0));
    let fitting = || operand(external, &[2, 8]);
    let out = || operand(result, &[2, 8]);
    assert!(worker.attempt(Request::Program(piece(fitting(), out(), None)), &[]).is_ok());
    // What is absorbed may itself absorb.
    let nested = |input: Operand| {
        let mut piece = piece(operand(OperandMemory::Absorbed(0), &[2, 8]), out(), None);
        let mut inner = piece.kernels[0].clone();
        let mut innermost = inner.clone();
        innermost.inputs = vec![input];
        inner.absorbed = vec![innermost];
        piece.kernels[0].absorbed = vec![inner];
        piece
    };
    let found = refusal(&mut worker, Request::Program(nested(operand(external, &[2, 9]))), &[]);
    assert!(found.contains("not within its memory"), "{found}");
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

/// A kernel of another build may use more scratch than the leader has planned.
#[test]
fn kernels_without_enough_scratch_are_refused() {
    let (session, _leader) = session(1);
    let mut worker = worker(session);
    for request in
        [Request::Allocate { memory: 1, bytes: 1 << 10, lasting: false }, Request::Arena { bytes: 1 << 20 }]
    {
        assert!(worker.attempt(request, &[]).is_ok());
    }
    let operand =
        |memory, shape: &[usize], dtype| Operand { memory, layout: Layout::contiguous(shape.into()), dtype };
    let external = OperandMemory::External(0);
    let sample = |workspace| Kernel {
        op: Op::Sample,
        inputs: vec![operand(external, &[2, 16], DType::F32), operand(external, &[2, 5], DType::F32)],
        outputs: vec![operand(OperandMemory::Output(0), &[2], DType::U32)],
        workspace,
        absorbed: Vec::new(),
        regime: None,
    };
    let needed = worker.backend().workspace_bytes(&sample(None));
    assert!(needed > 0);
    let at = At { memory: 1, offset: 0 };
    let program = |workspace| {
        let outputs = vec![At { memory: 1, offset: 512 }];
        let (kernels, externals) = (vec![sample(workspace)], vec![at]);
        Request::Program(Piece { number: 1, kernels, externals, outputs, has_arena: true })
    };
    for short in [None, Some(0..needed - 1)] {
        let found = refusal(&mut worker, program(short), &[]);
        assert!(found.contains(&format!("{needed} bytes of scratch are needed")), "{found}");
    }
    assert!(worker.attempt(program(Some(64..64 + needed)), &[]).is_ok());
}

/// Kernels index their operands.
#[test]
fn kernels_without_all_operands_are_refused() {
    let (session, _leader) = session(1);
    let mut worker = worker(session);
    let allocate = Request::Allocate { memory: 1, bytes: 64, lasting: false };
    assert!(worker.attempt(allocate, &[]).is_ok());
    let operand = || Operand {
        memory: OperandMemory::External(0),
        layout: Layout::contiguous([1, 1, 4].into()),
        dtype: DType::F32,
    };
    let result = || Operand { memory: OperandMemory::Output(0), ..operand() };
    let kernel = |op, inputs: usize, outputs: usize| Kernel {
        op,
        inputs: (0..inputs).map(|_| operand()).collect(),
        outputs: (0..outputs).map(|_| result()).collect(),
        ..copy(operand(), result(), None)
    };
    let combine = |shared| Op::CombineExperts { shared, residual: true };
    let mut refusal_of = |kernel: Kernel| {
        let at = At { memory: 1, offset: 0 };
        let (externals, outputs) = (vec![at], vec![at]);
        let piece = Piece { number: 1, kernels: vec![kernel], externals, outputs, has_arena: false };
        refusal(&mut worker, Request::Program(piece), &[])
    };
    for (op, inputs, outputs) in [
        (Op::Copy, 0, 1),
        (Op::Copy, 2, 1),
        (Op::Copy, 1, 0),
        (combine(false), 2, 1),
        (combine(true), 3, 1),
        (Op::TopK { k: 1 }, 1, 1),
    ] {
        let found = refusal_of(kernel(op.clone(), inputs, outputs));
        assert!(
            found.contains(&format!("it has {inputs} operands and {outputs} results")),
            "{op:?}: {found}"
        );
        let absorbed = Kernel { absorbed: vec![kernel(op, inputs, outputs)], ..kernel(Op::Copy, 1, 1) };
        assert!(refusal_of(absorbed).contains(&format!("it has {inputs} operands")));
    }
}

/// A piece that copies 4 bytes from one memory to another.
fn copying(number: u64) -> Piece {
    let operand = |memory| Operand { memory, layout: Layout::contiguous([1].into()), dtype: DType::F32 };
    let (input, output) = (operand(OperandMemory::External(0)), operand(OperandMemory::Output(0)));
    Piece {
        number,
        kernels: vec![copy(input, output, None)],
        externals: vec![At { memory: 1, offset: 0 }],
        outputs: vec![At { memory: 2, offset: 0 }],
        has_arena: false,
    }
}

/// The message with a piece may be long. What stays of it is limited, too.
#[test]
fn all_that_takes_memory_in_a_piece_is_counted() {
    const COUNT: usize = 1000;
    let changed = |change: fn(&mut Piece)| {
        let mut piece = copying(1);
        change(&mut piece);
        bytes_of(&piece) - bytes_of(&copying(1))
    };
    let (kernel, operand, number) = (size_of::<Kernel>(), size_of::<Operand>(), size_of::<usize>());
    let step = size_of::<FusedStep>();
    type Change = fn(&mut Piece);
    let cases: [(&str, usize, Change); 8] = [
        ("kernels", kernel + 2 * operand, |piece| piece.kernels = vec![piece.kernels[0].clone(); COUNT + 1]),
        ("absorbed kernels", kernel + 2 * operand, |piece| {
            piece.kernels[0].absorbed = vec![piece.kernels[0].clone(); COUNT];
        }),
        ("what these absorb", kernel, |piece| {
            let innermost = vec![piece.kernels[0].clone(); COUNT];
            let inner = Kernel { absorbed: innermost, ..piece.kernels[0].clone() };
            piece.kernels[0].absorbed = vec![inner];
        }),
        ("operands", operand, |piece| {
            piece.kernels[0].inputs = vec![piece.kernels[0].inputs[0].clone(); COUNT + 1];
        }),
        ("axes", 2 * number, |piece| {
            piece.kernels[0].inputs[0].layout = Layout::contiguous(vec![1usize; COUNT + 1].into());
        }),
        ("places", size_of::<Buffer>(), |piece| piece.externals = vec![piece.externals[0]; COUNT + 1]),
        ("steps", step, |piece| {
            let steps = vec![FusedStep::Unary(Unary::Neg, Source::Input(0)); COUNT];
            piece.kernels[0].op = Op::Fused(Arc::new(Fused { steps }));
        }),
        ("starts", number, |piece| piece.kernels[0].op = Op::SliceUpdate { starts: vec![0; COUNT] }),
    ];
    for (what, each, change) in cases {
        let bytes = changed(change);
        assert!(bytes >= COUNT * each, "{what}: {bytes} bytes");
    }
}

/// A leader that sends more and more programs does not take all memory of the node.
#[test]
fn programs_have_a_limit_of_memory() {
    let (session, _leader) = session(1);
    let mut worker = worker(session);
    allocate_two(&mut worker);
    let send = |worker: &mut Worker, number| worker.attempt(Request::Program(copying(number)), &[]);
    assert!(send(&mut worker, 1).is_ok());
    let bytes = bytes_of(&copying(1));
    // As if it were as large as that.
    worker.pieces.get_mut(&1).expect("it is bound").bytes = PIECE_BYTES_MAX - bytes + 1;
    let found = refusal(&mut worker, Request::Program(copying(2)), &[]);
    assert!(found.contains("too many bytes of programs: a device has at most 4294967296"), "{found}");
    worker.pieces.get_mut(&1).expect("it stays").bytes -= 1;
    assert!(send(&mut worker, 2).is_ok(), "there is just room for it");
    assert!(send(&mut worker, 2).is_ok(), "it is replaced");
    assert!(send(&mut worker, 3).is_err(), "there is no room for one more");
    assert!(worker.attempt(Request::Forget { number: 2 }, &[]).is_ok());
    assert!(send(&mut worker, 3).is_ok(), "one is forgotten");
    assert!(worker.attempt(Request::Free { memory: 1 }, &[]).is_ok());
    assert!(worker.pieces.is_empty(), "they have lost their memory");
}
