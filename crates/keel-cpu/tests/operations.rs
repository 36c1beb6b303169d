//! Every operation against its oracle: on every instruction set, with one worker and with several.

use keel_array::{Backend, Binary, Launch, Op, Place, Reduction, Result, Runtime, RuntimeOptions, Unary};
use keel_cpu::isa::Isa;
use keel_cpu::{CpuBackend, CpuOptions};
use keel_testkit::checks;
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

fn backend(isa: Isa, threads: usize) -> CpuBackend {
    let options =
        CpuOptions { threads: Some(threads), isa: Some(isa), poison_freed: true, ..CpuOptions::default() };
    CpuBackend::new(options)
}

/// Two threads share the checks of each instruction set, each with a backend of its own: oracles run on one thread. A
/// thread that finds no check left goes on to the next instruction set.
#[test]
fn every_operation_agrees_with_its_oracle() {
    let checks = checks::all();
    let all: Vec<(Isa, AtomicUsize)> = Isa::available().map(|isa| (isa, AtomicUsize::new(0))).collect();
    let run_some = || {
        for (i, (isa, next)) in all.iter().enumerate() {
            let runtime = Runtime::new(Arc::new(backend(*isa, 1 + i % 3)), RuntimeOptions::default());
            while let Some(check) = checks.get(next.fetch_add(1, Ordering::Relaxed)) {
                check.run(&runtime);
            }
            runtime.clear_cache();
            assert_eq!(runtime.ledger().active().total(), 0, "memory left behind at {isa}");
        }
    };
    std::thread::scope(|threads| {
        threads.spawn(run_some);
        run_some();
    });
    for (isa, next) in all {
        assert!(next.into_inner() >= checks.len(), "every check is run at {isa}");
    }
}

/// Makes `NAMES`, all operations that checks of one device run, and `is_listed` of the same lines. Its match is total:
/// a new operation does not compile until it is listed.
macro_rules! operations {
    ($($op:pat => $name:literal,)* ; $elsewhere:pat) => {
        const NAMES: &[&str] = &[$($name),*];

        fn is_listed(op: &Op) -> bool {
            match op {
                $($op => op.name() == $name,)*
                $elsewhere => false,
            }
        }
    };
}

operations! {
    Op::Fill(_) => "fill",
    Op::Arange { .. } => "arange",
    Op::Random { .. } => "random",
    Op::Copy => "copy",
    Op::Cast => "cast",
    Op::Unary(Unary::Neg) => "neg",
    Op::Unary(Unary::Abs) => "abs",
    Op::Unary(Unary::Exp) => "exp",
    Op::Unary(Unary::Log) => "log",
    Op::Unary(Unary::Sqrt) => "sqrt",
    Op::Unary(Unary::Rsqrt) => "rsqrt",
    Op::Unary(Unary::Sin) => "sin",
    Op::Unary(Unary::Cos) => "cos",
    Op::Unary(Unary::Tanh) => "tanh",
    Op::Unary(Unary::Sigmoid) => "sigmoid",
    Op::Unary(Unary::Silu) => "silu",
    Op::Unary(Unary::Softplus) => "softplus",
    Op::Unary(Unary::GeluTanh) => "gelu_tanh",
    Op::Unary(Unary::Gelu) => "gelu",
    Op::Unary(Unary::Not) => "not",
    Op::Binary(Binary::Add) => "add",
    Op::Binary(Binary::Sub) => "sub",
    Op::Binary(Binary::Mul) => "mul",
    Op::Binary(Binary::Div) => "div",
    Op::Binary(Binary::Max) => "maximum",
    Op::Binary(Binary::Min) => "minimum",
    Op::Binary(Binary::Pow) => "pow",
    Op::Binary(Binary::Equal) => "equal",
    Op::Binary(Binary::Less) => "less",
    Op::Binary(Binary::LessEqual) => "less_equal",
    Op::Binary(Binary::And) => "and",
    Op::Binary(Binary::Or) => "or",
    Op::Where => "where",
    Op::Fused(_) => "fused",
    Op::Concatenate { .. } => "concatenate",
    Op::SliceUpdate { .. } => "slice_update",
    Op::Reduce(Reduction::Sum) => "sum",
    Op::Reduce(Reduction::Mean) => "mean",
    Op::Reduce(Reduction::Max) => "max",
    Op::Reduce(Reduction::Min) => "min",
    Op::Reduce(Reduction::Prod) => "prod",
    Op::Reduce(Reduction::Any) => "any",
    Op::Reduce(Reduction::All) => "all",
    Op::ArgReduce { largest: true } => "argmax",
    Op::ArgReduce { largest: false } => "argmin",
    Op::Softmax => "softmax",
    Op::CumSum { .. } => "cumsum",
    Op::Sort { .. } => "sort",
    Op::TopK { .. } => "top_k",
    Op::Sample => "sample",
    Op::Matmul => "matmul",
    Op::Take => "take",
    Op::TakeAlong => "take_along_axis",
    Op::RmsNorm { .. } => "rms_norm",
    Op::AddRmsNorm { .. } => "add_rms_norm",
    Op::GatedRmsNorm { .. } => "gated_rms_norm",
    Op::LayerNorm { .. } => "layer_norm",
    Op::Rope(_) => "rope",
    Op::NormRope { .. } => "norm_rope",
    Op::RotatePairs => "rotate_pairs",
    Op::SwiGlu => "swiglu",
    Op::SigmoidGate => "sigmoid_gate",
    Op::Linear { .. } => "linear",
    Op::GatherLinear { .. } => "gather_linear",
    Op::Embedding { .. } => "embedding",
    Op::RouteTopK { .. } => "route_top_k",
    Op::CombineExperts { .. } => "combine_experts",
    Op::CausalConv(_) => "causal_conv",
    Op::GatedDelta(_) => "gated_delta",
    Op::PagedAttention(_) => "paged_attention",
    Op::Custom(_) => "custom",
    ;
    // Views never reach a backend. Exchanges need several devices (`tests/exchange.rs`).
    Op::View(_)
    | Op::Send { .. }
    | Op::Receive { .. }
    | Op::AllReduce { .. }
    | Op::AllGather { .. }
    | Op::ReduceScatter { .. }
}

/// One broken kernel: it spoils an element of one of an operation's results.
struct Broken {
    op: &'static str,
    output: usize,
    /// The most results that a kernel of this operation has had.
    outputs: AtomicUsize,
}

impl Interceptor for Broken {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<()> {
        backend.launch(launch)?;
        for kernel in launch.kernels().iter().filter(|k| k.op.name() == self.op) {
            assert!(is_listed(&kernel.op), "{} has a line of its own in the list above", self.op);
            self.outputs.fetch_max(kernel.outputs.len(), Ordering::Relaxed);
            let Some(output) = kernel.outputs.get(self.output) else { continue };
            let elements = output.layout.shape.elements();
            if elements == 0 {
                continue;
            }
            // The last element, wrong by far more than any tolerance.
            let size = output.dtype.size();
            let Place { buffer, offset } = launch.resolve(output.memory);
            let at = offset + (output.layout.offset + elements - 1) * size;
            let mut bytes = vec![0; size];
            backend.read(buffer.memory(), at, &mut bytes)?;
            bytes[size - 1] ^= if size == 1 { 1 } else { 0x41 };
            backend.write(buffer.memory(), at, &bytes);
        }
        Ok(())
    }
}

/// The results of an operation that no check finds wrong when they are. `has_noticed` tells whether the testkit has
/// panicked since it was asked last.
fn missed(op: &'static str, has_noticed: impl Fn() -> bool) -> Vec<String> {
    let (mut missed, mut outputs) = (Vec::new(), 1);
    for output in 0.. {
        if output >= outputs {
            break;
        }
        let broken = Arc::new(Broken { op, output, outputs: AtomicUsize::new(0) });
        let backend = InterceptedBackend::new(Arc::new(backend(Isa::best(), 2)), Arc::clone(&broken));
        let runtime = Runtime::new(backend, RuntimeOptions::default());
        let mut checks = checks::all().into_iter().filter(|check| check.op == op);
        let is_caught = checks.any(|check| {
            let outcome = catch_unwind(AssertUnwindSafe(|| check.run(&runtime)));
            has_noticed() && outcome.is_err()
        });
        if !is_caught {
            missed.push(format!("{op}, result {output}"));
        }
        outputs = outputs.max(broken.outputs.load(Ordering::Relaxed));
    }
    missed
}

#[test]
fn a_broken_kernel_of_any_operation_is_caught() {
    // Failures of the testkit on this thread are expected; all others are still printed.
    let (this, print) = (std::thread::current().id(), std::panic::take_hook());
    let noticed = Arc::new(AtomicBool::new(false));
    let notice = Arc::clone(&noticed);
    std::panic::set_hook(Box::new(move |panic| {
        let is_of_testkit = panic.location().is_some_and(|at| at.file().contains("keel-testkit"));
        if std::thread::current().id() == this && is_of_testkit {
            notice.store(true, Ordering::Relaxed);
        } else {
            print(panic);
        }
    }));
    let missed: Vec<String> =
        NAMES.iter().flat_map(|op| missed(op, || noticed.swap(false, Ordering::Relaxed))).collect();
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "no check notices that these are broken: {missed:?}");
}
