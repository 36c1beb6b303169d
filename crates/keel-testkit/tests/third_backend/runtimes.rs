//! Memory that belongs to a runtime: its arrays, and the arena that its programs need.

use super::Third;
use keel_array::{Array, Category, Executable, Result, Runtime, RuntimeOptions};
use std::sync::Arc;

fn runtime() -> Runtime {
    Runtime::new(Arc::new(Third), RuntimeOptions::default())
}

fn values(runtime: &Runtime) -> Array {
    Array::from_slice(runtime, &[1f32, -2.0, 3.0], [3]).expect("memory")
}

/// The running sum of a softmax, which lies in the arena, and its destination.
fn program(runtime: &Runtime) -> (Executable, Array) {
    let (x, place) = (values(runtime), values(runtime));
    let program = runtime.trace(|| {
        let y = x.softmax(0).and_then(|y| y.cumsum(0, false, false)).expect("an axis");
        runtime.prepare(&[(&y, &place)]).expect("a program")
    });
    (program, place)
}

#[track_caller]
fn expect_refusal<T>(op: &str, outcome: Result<T>) {
    let error = outcome.err().expect("it is of another runtime").to_string();
    assert!(error.starts_with(op) && error.contains("belongs to another runtime"), "{error}");
}

#[test]
fn arrays_of_another_runtime_are_refused_before_anything_runs() {
    let (here, there) = (runtime(), runtime());
    let [own, foreign] = [&here, &there].map(|runtime| values(runtime).neg().expect("floats"));
    let [place, foreign_place] = [&here, &there].map(values);
    expect_refusal("eval: ", here.eval(&[&own, &foreign]));
    expect_refusal("eval: ", here.eval(&[&own, &foreign_place]));
    expect_refusal("async_eval: ", here.async_eval(&[&own, &foreign]));
    expect_refusal("prepare: ", here.prepare(&[(&foreign, &place)]));
    expect_refusal("prepare: ", here.prepare(&[(&own, &foreign_place)]));
    assert!(!own.is_evaluated() && !foreign.is_evaluated());
    assert_eq!((here.submissions(), there.submissions()), (0, 0));
    for y in [own, foreign] {
        assert_eq!(y.to_vec::<f32>().expect("its own runtime runs it"), [-1.0, 2.0, -3.0]);
    }
}

#[test]
fn a_program_works_with_its_own_runtime_alone() {
    let (here, there) = (runtime(), runtime());
    let (program, place) = program(&here);
    let mut bytes = [0; 12];
    let error = program.submit(&values(&there)).wait(&mut bytes).expect_err("it is of another runtime");
    let error = error.to_string();
    assert!(error.starts_with("submit: ") && error.contains("belongs to another runtime"), "{error}");
    expect_refusal("make_ready: ", there.make_ready(&[&program], &mut |_, _| ()));
    program.submit(&place).wait(&mut bytes).expect("its own");
    assert_eq!(here.runs_under_way(), 0);
    let last = f32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
    assert!((last - 1.0).abs() < 1e-6, "{last}");
}

/// `clear_cache` frees the arena that `prepare` has reserved. A backend may need it to make a program ready.
#[test]
fn a_program_is_made_ready_with_an_arena() {
    let runtime = runtime();
    let (program, place) = program(&runtime);
    let arena_bytes = || runtime.ledger().active().get(Category::Activations);
    let wanted = program.program().arena_bytes() as u64;
    assert_eq!((wanted > 0, arena_bytes()), (true, wanted));
    runtime.clear_cache();
    assert_eq!(arena_bytes(), 0);
    runtime.make_ready(&[&program], &mut |_, _| ()).expect("there is memory");
    assert_eq!(arena_bytes(), wanted);
    program.run().expect("it runs");
    let last = place.to_vec::<f32>().expect("in memory")[2];
    assert!((last - 1.0).abs() < 1e-6, "{last}");
}
