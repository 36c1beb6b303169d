//! Failure 4: custom kernels composed in one lazy graph, their handles dropped while the work is in flight.

use super::watched::Watched;
use super::{backend, runtime};
use keel_array::{
    Array, ArraySpec, Category, CudaSource, CustomKernel, DType, HostSlice, HostSliceMut, Runtime,
    RuntimeOptions,
};
use std::sync::atomic::Ordering;

const KERNELS: usize = 64;
const ELEMENTS: usize = 1000;

fn step(x: f32, y: f32) -> f32 {
    0.75 * x - 0.5 * y + 1.0
}

fn kernel() -> CustomKernel {
    CustomKernel::new("step", vec![ArraySpec::new([ELEMENTS], DType::F32)], 0.0, |call| {
        let (HostSlice::F32(x), HostSlice::F32(y), HostSliceMut::F32(z)) =
            (call.inputs[0], call.inputs[1], &mut call.outputs[0])
        else {
            return Err("works on f32".into());
        };
        z.iter_mut().zip(x.iter().zip(y)).for_each(|(z, (x, y))| *z = step(*x, *y));
        Ok(())
    })
}

/// A graph of 64 kernels and its expected value. Each kernel reads the two results before it; only the last handle is
/// kept.
fn graph(runtime: &Runtime, round: usize) -> (Array, Vec<f32>) {
    let kernel = kernel();
    let values =
        |seed: usize| -> Vec<f32> { (0..ELEMENTS).map(|i| ((i * 7 + seed) % 101) as f32 / 101.0).collect() };
    let (mut x, mut y) = (values(round), values(round + 50));
    let array = |values: &[f32]| Array::from_slice(runtime, values, [ELEMENTS]).expect("there is memory");
    let (mut lazy_x, mut lazy_y) = (array(&x), array(&y));
    for _ in 0..KERNELS {
        let lazy_z = kernel.apply(&[&lazy_x, &lazy_y]).expect("one runtime").remove(0);
        (lazy_x, lazy_y) = (lazy_y, lazy_z);
        let z = x.iter().zip(&y).map(|(x, y)| step(*x, *y)).collect();
        (x, y) = (y, z);
    }
    (lazy_y, y)
}

#[test]
fn sixty_four_kernels_compose_without_evaluation_in_between() {
    let runtime = runtime();
    for round in 0..100 {
        let (result, want) = graph(&runtime, round);
        runtime.async_eval(&[&result]).expect("the graph is submitted");
        assert_eq!(result.to_vec::<f32>().expect("the graph runs"), want, "round {round}");
    }
    runtime.clear_cache();
    assert_eq!(super::active(&runtime), 0);
}

/// As above with the device held back until all handles are dropped. Returns whether the result is right.
fn drop_handles_in_flight(forgetful: bool) -> bool {
    let (watched, backend) = Watched::over(backend());
    watched.forgetful.store(forgetful, Ordering::Relaxed);
    let runtime = Runtime::new(backend, RuntimeOptions { submission_ops: 8, ..RuntimeOptions::default() });
    (0..5).all(|round| {
        watched.close();
        let (result, want) = graph(&runtime, round);
        runtime.async_eval(&[&result]).expect("the graph is submitted");
        // Memory that the kernels do not own would be given to these, or be poisoned.
        let _others: Vec<Array> = (0..8)
            .map(|_| Array::full(&runtime, [ELEMENTS], DType::F32, f32::NAN).expect("an addressable shape"))
            .collect();
        watched.open();
        result.to_vec::<f32>().expect("the graph runs") == want
    })
}

#[test]
fn a_submission_owns_what_it_reads_until_it_is_done() {
    assert!(drop_handles_in_flight(false));
}

#[test]
fn a_submission_that_does_not_own_its_inputs_would_fail_that_test() {
    assert!(!drop_handles_in_flight(true));
}

#[test]
fn what_a_kernel_says_is_the_error_and_a_panic_is_one_too() {
    let runtime = runtime();
    let x = super::counting(&runtime, &[3]);
    let outputs = || vec![ArraySpec::new([3], DType::F32)];
    let refusing = CustomKernel::new("refusing", outputs(), 0.0, |_| Err("not on Sundays".into()));
    let y = refusing.apply(&[&x]).expect("one runtime").remove(0);
    assert_eq!(y.eval().expect_err("it refuses").to_string(), "refusing: not on Sundays");
    let panicking = CustomKernel::new("panicking", outputs(), 0.0, |call| {
        assert!(call.inputs.is_empty(), "planted");
        Ok(())
    });
    let y = panicking.apply(&[&x]).expect("one runtime").remove(0);
    let error = y.eval().expect_err("it panics").to_string();
    assert!(error.contains("panicking: the kernel panicked: planted"), "{error}");
    let works = CustomKernel::new("works", outputs(), 2.0, |_| Ok(()));
    let y = works.apply(&[&x]).expect("one runtime").remove(0);
    assert_eq!(y.to_vec::<f32>().expect("the pool still works"), [2.0; 3]);
}

#[test]
fn a_kernel_without_a_body_for_the_cpu_is_refused_before_anything_runs() {
    let runtime = runtime();
    let x = super::counting(&runtime, &[3]);
    let outputs = || vec![ArraySpec::new([3], DType::F32)];
    for kernel in [
        CustomKernel::cuda("elsewhere", outputs(), 0.0, CudaSource::default()),
        CustomKernel::cuda("elsewhere", outputs(), 0.0, CudaSource::default())
            .with_cuda(CudaSource::default()),
    ] {
        let y = kernel.apply(&[&x]).expect("one runtime").remove(0);
        let place = Array::persistent(&runtime, Category::User, [3], DType::F32).expect("there is memory");
        let error = runtime.prepare(&[(&y, &place)]).err().expect("it cannot run").to_string();
        assert!(error.contains("give it one for the CPU"), "{error}");
    }
}
