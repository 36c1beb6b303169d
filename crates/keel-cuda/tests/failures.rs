//! The failures that the design makes impossible, on a GPU, with freed memory poisoned. Needs a GPU:
//! `KEEL_TEST_CUDA=1`.

use keel_array::{Array, ArraySpec, CudaSource, CustomKernel, DType, Runtime, RuntimeOptions};
use keel_cuda::{CudaBackend, CudaOptions};
use keel_testkit::checks::ownership::{self, counting};
use std::sync::Arc;
use std::time::Instant;

/// A runtime on a GPU; `None` if no GPU is to be tested.
fn runtime() -> Option<Runtime> {
    if !keel_testkit::has_gpu!() {
        return None;
    }
    let options = CudaOptions { poison_freed: true, ..CudaOptions::default() };
    let backend = CudaBackend::new(&options).expect("a GPU");
    Some(Runtime::new(Arc::new(backend), RuntimeOptions::default()))
}

#[test]
fn tails_of_chunks_do_not_pin_the_chunks() {
    let Some(runtime) = runtime() else { return };
    ownership::tails_do_not_pin_their_chunks(&runtime);
}

/// Bytes that the backend holds for itself.
fn own_bytes(runtime: &Runtime) -> u64 {
    let own = runtime.backend().own_memory();
    own.device_bytes + own.host_bytes
}

#[test]
fn the_last_handle_frees_at_once() {
    let Some(runtime) = runtime() else { return };
    ownership::the_last_handle_frees_at_once(&runtime);
}

const KERNELS: usize = 64;
const ELEMENTS: usize = 1000;

/// `z = (3 x + 5 y) mod 2^24`: the order of two launches and a stale operand both change the bits.
fn step(x: u32, y: u32) -> u32 {
    x.wrapping_mul(3).wrapping_add(y.wrapping_mul(5)) & 0xff_ffff
}

fn kernel() -> CustomKernel {
    let source = CudaSource {
        inputs: vec!["x".into(), "y".into()],
        outputs: vec!["z".into()],
        header: String::new(),
        body: "const u32 i = blockIdx.x * blockDim.x + threadIdx.x;\n\
               if (i < x_size) z[i] = (3u * x[i] + 5u * y[i]) & 0xffffffu;"
            .into(),
        constants: Vec::new(),
        grid: [ELEMENTS.div_ceil(128), 1, 1],
        block: [128, 1, 1],
        shared_bytes: 0,
        any_strides: false,
    };
    CustomKernel::cuda("step", vec![ArraySpec::new([ELEMENTS], DType::U32)], 0.0, source)
}

/// 64 kernels, each on the two results before it, and the expected value. `between` is called on each result; all
/// handles but the last are dropped.
fn graph(runtime: &Runtime, round: usize, between: impl Fn(&Array)) -> (Array, Vec<u32>) {
    let kernel = kernel();
    let values = |seed: usize| -> Vec<u32> { (0..ELEMENTS).map(|i| (i * 7 + seed) as u32).collect() };
    let (mut x, mut y) = (values(round), values(round + 50));
    let array = |values: &[u32]| Array::from_slice(runtime, values, [ELEMENTS]).expect("there is memory");
    let (mut lazy_x, mut lazy_y) = (array(&x), array(&y));
    for _ in 0..KERNELS {
        let lazy_z = kernel.apply(&[&lazy_x, &lazy_y]).expect("one runtime").remove(0);
        between(&lazy_z);
        (lazy_x, lazy_y) = (lazy_y, lazy_z);
        let z = x.iter().zip(&y).map(|(x, y)| step(*x, *y)).collect();
        (x, y) = (y, z);
    }
    (lazy_y, y)
}

/// Failure 4: kernels composed in one lazy graph, their handles dropped while the work is in flight.
#[test]
fn sixty_four_kernels_compose_a_thousand_times() {
    let Some(runtime) = runtime() else { return };
    for round in 0..1000 {
        let (result, want) = graph(&runtime, round, |_| ());
        runtime.async_eval(&[&result]).expect("the graph is submitted");
        // Takes any memory that was freed too early.
        let _others = Array::full(&runtime, [ELEMENTS], DType::F32, f32::NAN).expect("an addressable shape");
        assert_eq!(result.to_vec::<u32>().expect("the graph runs"), want, "round {round}");
    }
    let time = |between: &dyn Fn(&Array)| {
        let start = Instant::now();
        for round in 0..100 {
            graph(&runtime, round, between).0.eval().expect("the graph runs");
        }
        start.elapsed().as_secs_f64() * 1e4
    };
    let (composed, apart) = (time(&|_| ()), time(&|x| x.eval().expect("a kernel runs")));
    eprintln!("64 kernels composed: {composed:.0} us; evaluated one by one: {apart:.0} us");
    runtime.clear_cache();
    assert_eq!(runtime.ledger().active().total(), own_bytes(&runtime));
}

/// The first kernel of a graph finds wrong data, and the second one is refused, so no launch is waited for. The next
/// launch is not blamed for the wrong data that the first kernel has found.
#[test]
fn a_launch_that_is_refused_leaves_no_report() {
    let Some(runtime) = runtime() else { return };
    let source = CudaSource {
        inputs: vec!["x".into()],
        outputs: vec!["y".into()],
        header: String::new(),
        body: "this is no code".into(),
        constants: Vec::new(),
        grid: [1, 1, 1],
        block: [32, 1, 1],
        shared_bytes: 0,
        any_strides: false,
    };
    let broken = CustomKernel::cuda("broken", vec![ArraySpec::new([2], DType::U32)], 0.0, source);
    let table = Array::from_slice(&runtime, &[5u32, 6, 7], [3]).expect("memory");
    let taken = |at: [u32; 2]| {
        let at = Array::from_slice(&runtime, &at, [2]).expect("memory");
        table.take(&at).expect("an axis")
    };
    for round in 0..3 {
        let refused = broken.apply(&[&taken([9, 1])]).expect("one runtime").remove(0);
        let error = refused.eval().expect_err("it does not compile").to_string();
        assert!(error.contains("kernel broken does not compile for sm_"), "{error}");
        let right = taken([2, 0]).to_vec::<u32>();
        assert_eq!(right.expect("nothing is wrong with it"), [7, 5], "round {round}");
        let error = taken([1, 11]).eval().expect_err("no such entry").to_string();
        assert!(error.contains("index 11 is out of range for 3"), "{error}");
    }
}

/// Failure 5: a graph that grows without end is submitted piece by piece.
#[test]
fn a_graph_past_its_bounds_is_submitted_by_itself() {
    let Some(runtime) = runtime() else { return };
    let (mut x, one) =
        (counting(&runtime, &[33]), Array::full(&runtime, [33], DType::F32, 1.0).expect("a shape"));
    for _ in 0..20_000 {
        x = x.add(&one).expect("shapes fit");
        assert!(runtime.pending_ops() <= RuntimeOptions::default().pending_ops + 1);
    }
    assert!(runtime.submissions() > 1);
    let want: Vec<f32> = (0..33).map(|i| (i + 20_000) as f32).collect();
    assert_eq!(x.to_vec::<f32>().expect("a graph runs"), want);
}
