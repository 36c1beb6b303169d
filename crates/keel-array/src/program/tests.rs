//! Plans and launches whose operands lie where they may, and where they must not. No kernel runs.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::graph::External;
use super::*;
use crate::{
    Array, Category, Compute, DeviceMemory, Memory, Programs, RowBlock, Runtime, Shape, Submission, Unary,
    WeightFormat, WeightSpec, panic_message,
};

/// A backend that runs nothing. Its memory reads as zeros.
struct Idle;

struct Nothing;

impl DeviceMemory for Nothing {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Backend for Idle {
    fn name(&self) -> &str {
        "idle"
    }
}

impl Memory for Idle {
    fn allocate(&self, _: usize) -> Result<Box<dyn DeviceMemory>, String> {
        Ok(Box::new(Nothing))
    }

    fn write(&self, _: &dyn DeviceMemory, _: usize, _: &[u8]) {}

    fn read(&self, _: &dyn DeviceMemory, _: usize, bytes: &mut [u8]) -> Result<()> {
        bytes.fill(0);
        Ok(())
    }

    fn packed_bytes(&self, spec: &WeightSpec) -> usize {
        4 * spec.experts * spec.rows * spec.cols
    }

    fn pack(&self, _: &WeightSpec, _: &dyn DeviceMemory, _: usize, _: &RowBlock<'_>) -> Result<()> {
        Ok(())
    }
}

impl Programs for Idle {
    fn supports(&self, _: &Kernel) -> Result<(), String> {
        Ok(())
    }

    fn workspace_bytes(&self, _: &Kernel) -> usize {
        0
    }
}

impl Submission for Idle {
    fn launch(&self, _: &Launch<'_>) -> Result<()> {
        Ok(())
    }
}

fn runtime() -> Runtime {
    Runtime::new(Arc::new(Idle), RuntimeOptions::default())
}

/// An operand of 4 x 4 floats, which take 64 bytes.
fn operand(memory: OperandMemory) -> Operand {
    Operand { memory, layout: Layout::contiguous([4, 4].into()), dtype: DType::F32 }
}

fn arena(temp: usize, offset: usize) -> Operand {
    operand(OperandMemory::Arena { temp, offset })
}

fn external() -> Operand {
    operand(OperandMemory::External(0))
}

fn kernel(op: Op, inputs: &[Operand], outputs: &[Operand]) -> Kernel {
    Kernel::new(op, inputs.to_vec(), outputs.to_vec())
}

fn exp(input: Operand, output: Operand) -> Kernel {
    kernel(Op::Unary(Unary::Exp), &[input], &[output])
}

/// The verdict of `verify` on a plan: two intermediates at the bytes 0 and 128 of an arena of 1 KiB, then `last`.
fn verdict(last: Kernel) -> Result<(), String> {
    let fill = |output| kernel(Op::Fill(1.0f32.into()), &[], &[output]);
    let kernels = vec![fill(arena(0, 0)), fill(arena(1, 128)), last];
    let pieces = std::iter::once(0..kernels.len()).collect();
    let program = Program { kernels, outputs: Vec::new(), arena_bytes: 1 << 10, pieces, groups: Vec::new() };
    let input = External { layout: external().layout, dtype: DType::F32, donatable: true };
    let graph = Graph { calls: Vec::new(), externals: vec![input], outputs: Vec::new() };
    catch_unwind(AssertUnwindSafe(|| verify::verify(&program, &graph)))
        .map_err(|panic| panic_message(&*panic).to_owned())
}

fn with_scratch(bytes: Range<usize>) -> Kernel {
    Kernel { workspace: Some(bytes), ..exp(arena(0, 0), arena(2, 256)) }
}

#[test]
fn a_plan_may_place_a_result_only_where_its_operation_permits_it() {
    let added = |outputs: [Operand; 2]| {
        kernel(Op::AddRmsNorm { eps: 1e-6f32.into() }, &[arena(0, 0), arena(1, 128), external()], &outputs)
    };
    for (what, sound) in [
        ("a place of its own", kernel(Op::Matmul, &[arena(0, 0), arena(0, 0)], &[arena(2, 256)])),
        ("in place", exp(arena(0, 0), arena(2, 0))),
        ("in place of an input of the program", exp(external(), external())),
        ("the sum in place of the residual", added([arena(2, 128), arena(3, 256)])),
        ("scratch of its own", with_scratch(512..640)),
    ] {
        assert_eq!(verdict(sound), Ok(()), "{what}");
    }
    let absorbing = |output| Kernel {
        absorbed: vec![kernel(Op::Copy, &[arena(0, 0)], &[operand(OperandMemory::Temp(0))])],
        ..exp(operand(OperandMemory::Absorbed(0)), output)
    };
    assert_eq!(verdict(absorbing(arena(2, 256))), Ok(()));
    let mut reversed = arena(0, 0);
    reversed.layout = reversed.layout.permute(&[1, 0]);
    for (wrong, part) in [
        (kernel(Op::Matmul, &[arena(0, 0), arena(1, 128)], &[arena(2, 128)]), "memory with operand 1"),
        (kernel(Op::Matmul, &[external(), external()], &[external()]), "memory with operand 0"),
        (exp(arena(0, 0), arena(2, 32)), "result 0 shares memory with operand 0"),
        (exp(reversed, arena(2, 0)), "result 0 shares memory with operand 0"),
        (added([arena(2, 0), arena(3, 256)]), "result 0 shares memory with operand 0"),
        (added([arena(2, 256), arena(3, 128)]), "result 1 shares memory with operand 1"),
        (added([arena(2, 256), arena(3, 256)]), "result 1 shares memory with another result"),
        (absorbing(arena(2, 0)), "memory with an operand of an absorbed kernel"),
        (with_scratch(32..64), "the scratch shares memory with an operand"),
        (with_scratch(300..400), "the scratch shares memory with an operand"),
    ] {
        let shown = format!("{wrong:?}");
        let message = verdict(wrong).expect_err(&shown);
        assert!(message.contains("kernel 2") && message.contains(part), "{shown}: {message}");
    }
}

#[test]
fn a_launch_of_another_machine_may_place_a_result_only_where_its_operation_permits_it() {
    let runtime = runtime();
    let [one, other]: [Buffer; 2] =
        std::array::from_fn(|_| runtime.allocate(Category::User, 256).expect("there is memory"));
    let result = || operand(OperandMemory::Output(0));
    let bind = |kernel: &Kernel, input: &Buffer, at: usize| {
        let (externals, outputs) = (vec![(input.clone(), 64)], vec![(one.clone(), at)]);
        let bound = RemoteLaunch::new(&runtime, vec![kernel.clone()], externals, outputs, false);
        bound.map(drop).map_err(|error| error.to_string())
    };
    let matmul = kernel(Op::Matmul, &[external(), external()], &[result()]);
    for at in [0, 128] {
        assert_eq!(bind(&matmul, &one, at), Ok(()), "next to its operand");
    }
    assert_eq!(bind(&matmul, &other, 64), Ok(()), "in other memory");
    for at in [4, 64, 124] {
        let message = bind(&matmul, &one, at).expect_err("it writes to its own operand");
        assert_eq!(message, "matmul: result 0 shares memory with operand 0", "{at}");
    }
    let in_place = exp(external(), result());
    assert_eq!(bind(&in_place, &one, 64), Ok(()));
    let message = bind(&in_place, &one, 68).expect_err("it is off by one element");
    assert_eq!(message, "exp: result 0 shares memory with operand 0");
    // A weight has all its bytes, so that a result cannot lie among them unnoticed.
    let format = WeightFormat::Dense(DType::F32);
    let weight = WeightSpec { experts: 1, rows: 4, cols: 4, format, compute: Compute::F32 };
    let linear = |bytes: usize| {
        let layout = Layout::contiguous(Shape::from([bytes]));
        let packed = Operand { layout, dtype: DType::U8, ..external() };
        let x = operand(OperandMemory::Output(0));
        let y = operand(OperandMemory::Output(1));
        kernel(Op::Linear { weight, residual: false }, &[x, packed], &[y])
    };
    for (bytes, at, part) in [
        (64, 128, None),
        (64, 96, Some("result 0 shares memory with operand 1")),
        (60, 128, Some("operand 1 is not within its memory")),
    ] {
        let (externals, outputs) = (vec![(one.clone(), 64)], vec![(other.clone(), 0), (one.clone(), at)]);
        let bound = RemoteLaunch::new(&runtime, vec![linear(bytes)], externals, outputs, false);
        let message = bound.err().map(|error| error.to_string());
        let is_right = match (&message, part) {
            (Some(message), Some(part)) => message.contains(part),
            (message, part) => message.is_none() && part.is_none(),
        };
        assert!(is_right, "{bytes} bytes, result at {at}: {message:?}");
    }
}

/// A result that takes over a part of an input would keep all of it.
#[test]
fn an_output_takes_over_a_whole_input_alone() {
    let runtime = runtime();
    let twelve = || Array::from_slice(&runtime, &[1.0f32; 12], [12]).expect("there is memory");
    let whole = twelve().reshape([3, 4]).and_then(|x| x.exp()).expect("floats");
    whole.eval().expect("it is planned");
    assert_eq!(runtime.ledger().charges(), 1, "it has the memory of its input");
    let part = twelve().slice(&[0], &[8]).and_then(|x| x.exp()).expect("floats");
    part.eval().expect("it is planned");
    assert_eq!(part.held_bytes(), Some(32));
}

#[test]
fn entries_of_a_view_begin_where_its_strides_say() {
    let runtime = runtime();
    let x = Array::from_slice(&runtime, &[0.0f32; 15], [3, 5]).expect("there is memory");
    let view = x.swap_axes(0, 1).expect("two axes");
    view.eval().expect("it is a view");
    let layout = |array: Array| array.0.storage().expect("in memory").layout;
    let some = layout(view.entries(2, 3).expect("there are five"));
    assert_eq!((&*some.shape, &*some.strides, some.offset), (&[3, 3][..], &[1, 5][..], 2));
    let rows = layout(x.entries(1, 2).and_then(|rows| rows.entries(1, 1)).expect("there are three"));
    assert_eq!((&*rows.shape, &*rows.strides, rows.offset), (&[1, 5][..], &[5, 1][..], 10));
    assert!(view.entries(3, 3).is_err() && x.prefix(4).is_err());
}
