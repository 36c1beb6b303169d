//! Programs that are traced once and run again and again.

use super::{active, counting, runtime, runtime_with};
use keel_array::{Array, Batch, Category, ConvWindow, DType, RowLog, Runtime, RuntimeOptions};

fn storage(runtime: &Runtime, n: usize) -> Array {
    Array::persistent(runtime, Category::Staging, [n], DType::F32).expect("there is memory")
}

#[test]
fn a_prepared_graph_reads_what_the_host_has_written_and_allocates_nothing() {
    let runtime = runtime();
    let (input, output) = (storage(&runtime, 4), storage(&runtime, 4));
    let value = input.exp().and_then(|y| y.cumsum(0, false, false)).expect("an axis");
    let step = runtime.prepare(&[(&value, &output)]).expect("the destination fits");
    drop(value);
    runtime.ledger().freeze();
    let charges = runtime.ledger().charges();
    for round in 0..5 {
        input.write(&[round as f32, 0.0, 0.0, 0.0]).expect("it fits");
        step.run().expect("the step runs");
        let first = output.to_vec::<f32>().expect("in memory")[3];
        assert!((first - ((round as f32).exp() + 3.0)).abs() < 1e-4, "{first}");
    }
    assert_eq!(runtime.ledger().charges(), charges);
    runtime.ledger().thaw();
    drop((step, input, output));
    runtime.clear_cache();
    assert_eq!(active(&runtime), 0);
}

#[test]
fn a_traced_graph_is_not_submitted_however_long_it_is() {
    let runtime =
        runtime_with(RuntimeOptions { pending_ops: 16, pending_bytes: 64, ..RuntimeOptions::default() });
    let (input, output) = (storage(&runtime, 3), storage(&runtime, 3));
    let value = runtime.trace(|| {
        let mut value = input.clone();
        for _ in 0..100 {
            value = value.cumsum(0, true, false).and_then(|y| y.sigmoid()).expect("an axis");
        }
        value
    });
    assert!(!value.is_evaluated() && runtime.submissions() == 0);
    let step = runtime.prepare(&[(&value, &output)]).expect("the destination fits");
    input.write(&[1.0f32, -2.0, 3.0]).expect("it fits");
    step.run().expect("the step runs");
    assert_eq!(output.to_vec::<f32>().expect("in memory"), value.to_vec::<f32>().expect("a graph runs"));
    // Outside the trace the bound holds again.
    let mut chain = input.clone();
    for _ in 0..40 {
        chain = chain.neg().expect("floats");
    }
    assert!(runtime.pending_ops() <= 17);
}

#[test]
fn what_cannot_be_prepared_is_refused() {
    let runtime = runtime();
    let (x, place) = (counting(&runtime, &[6]), storage(&runtime, 6));
    let refused = |results: &[(&Array, &Array)]| runtime.prepare(results).err().expect("refused").to_string();
    assert!(refused(&[(&x, &place)]).contains("must be lazy"), "an evaluated value has nothing to run");
    let y = x.neg().expect("floats");
    assert!(refused(&[(&y, &place), (&y, &storage(&runtime, 6))]).contains("asked for once"));
    assert!(refused(&[(&y, &storage(&runtime, 5))]).contains("expected (6,), got (5,)"));
    let z = x.exp().expect("floats");
    assert!(refused(&[(&y, &place), (&z, &place)]).contains("destination 1 overlaps another"));
    // The first sums would be written to x before the second ones read it.
    let sum = x.cumsum(0, false, false).expect("an axis");
    let rest = x.cumsum(0, true, false).expect("an axis");
    assert!(refused(&[(&sum, &x), (&rest, &place)]).contains("still reads it"));
}

/// A kernel that refuses its data stops a run between two kernels; the states that earlier kernels changed are known.
#[test]
fn a_run_that_failed_tells_which_state_it_has_changed() {
    let runtime = runtime();
    let rows = |n: u32| {
        let batch = |values: &[u32]| Array::from_slice(&runtime, values, [values.len()]).expect("memory");
        let table = batch(&[0]).reshape([1, 1]).expect("one element");
        Batch {
            row_start: batch(&[0, n]),
            slot: batch(&[0]),
            position: batch(&[0]),
            table,
            accepted: batch(&[0]),
        }
    };
    let windows = [(); 3].map(|()| ConvWindow {
        rows: Array::persistent(&runtime, Category::Recurrent, [1, 3, 5], DType::F32).expect("memory"),
        open: None,
    });
    // The second kernel is given more rows than there are.
    let batches = [rows(2), rows(7), rows(2)];
    let (x, weight) = (counting(&runtime, &[2, 5]), counting(&runtime, &[4, 5]));
    let y = runtime.trace(|| {
        windows
            .iter()
            .zip(&batches)
            .try_fold(x, |x, (window, batch)| x.causal_conv(&weight, window, batch, RowLog::None))
    });
    let y = y.expect("shapes fit");
    let place = Array::persistent(&runtime, Category::Staging, [2, 5], DType::F32).expect("memory");
    let failed = runtime.prepare(&[(&y, &place)]).expect("fits").run().expect_err("there are two rows");
    let changed = windows.each_ref().map(|window| failed.has_mutated(&window.rows));
    assert_eq!(changed, [Some(true), Some(false), Some(false)]);
    assert_eq!(failed.has_mutated(&weight), Some(false));
    let values = windows.map(|window| window.rows.to_vec::<f32>().expect("in memory"));
    assert!(values[0].iter().any(|&x| x != 0.0) && values[1..].iter().flatten().all(|&x| x == 0.0));
}

/// A step may leave its result where its input was, once the input has been read.
#[test]
fn a_result_may_take_the_place_of_an_input() {
    let runtime = runtime();
    let state = counting(&runtime, &[5]);
    let next = state.cumsum(0, false, false).and_then(|y| y.cumsum(0, true, false)).expect("an axis");
    let step = runtime.prepare(&[(&next, &state)]).expect("the input is read before");
    step.run().expect("the step runs");
    assert_eq!(state.to_vec::<f32>().expect("in memory"), [20.0, 20.0, 19.0, 16.0, 10.0]);
}
