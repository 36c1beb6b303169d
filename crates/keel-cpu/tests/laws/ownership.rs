//! Failures 1 and 3: survivors pin no more than they show, evaluated arrays have no parents. Donation.

use super::{active, counting, runtime};
use keel_array::{Array, DType};
use keel_testkit::checks::ownership;

#[test]
fn a_slice_that_outlives_its_parent_holds_at_most_twice_its_bytes() {
    ownership::tails_do_not_pin_their_chunks(&runtime());
}

/// The test above would detect the failure. Handles that share memory, as slices would without the law, keep the chunks
/// in memory.
#[test]
fn handles_that_share_memory_would_fail_that_test() {
    let runtime = runtime();
    let kept: Vec<Array> =
        (0..20).map(|_| counting(&runtime, &[512, 64]).prefix(2).expect("persistent storage")).collect();
    assert!(kept[0].held_bytes().expect("in memory") > 2 * kept[0].bytes());
    assert_eq!(active(&runtime), 20 * 512 * 64 * 4);
}

#[test]
fn a_view_of_most_of_its_parent_shares_the_memory() {
    let runtime = runtime();
    let x = counting(&runtime, &[100, 8]);
    let before = active(&runtime);
    let view = x.slice(&[0, 0], &[60, 8]).expect("within the array");
    view.eval().expect("a view runs");
    assert_eq!(active(&runtime), before, "a view takes no memory");
    assert_eq!(view.held_bytes(), Some(x.bytes()));
    drop(x);
    assert_eq!(view.to_vec::<f32>().expect("evaluated")[479], 479.0);
}

#[test]
fn an_evaluated_array_has_no_parents_and_the_last_handle_frees_at_once() {
    ownership::the_last_handle_frees_at_once(&runtime());
}

/// Bytes in use after each step of a loop that computes each state from the last one, as a generation does. `hold` gets
/// the inputs of each step's result.
fn bytes_after_each_step(mut hold: impl FnMut([Array; 2])) -> Vec<u64> {
    let runtime = runtime();
    let weight = counting(&runtime, &[64, 64]);
    let mut state = counting(&runtime, &[64, 64]);
    let mut step = || {
        let product = state.matmul(&weight).expect("extents fit");
        let next = product.softmax(1).expect("an axis");
        next.eval().expect("a graph runs");
        hold([std::mem::replace(&mut state, next), product]);
        active(&runtime)
    };
    (0..50).map(|_| step()).collect()
}

const STATE_BYTES: u64 = 64 * 64 * 4;

/// Failure 3, in a loop: a step's inputs are free when the step is over, without a collector.
#[test]
fn a_loop_holds_its_state_and_nothing_of_the_steps_before() {
    let bytes = bytes_after_each_step(drop);
    assert!(bytes.iter().all(|&b| b == bytes[0]), "{bytes:?}");
    assert!(bytes[0] <= 4 * STATE_BYTES, "weight, state, and an arena for one product: {bytes:?}");
}

/// The binding that failed kept the parents of an evaluated object, and a dropped object lived on until a collector
/// ran. The test above would detect both.
#[test]
fn parents_that_live_on_until_a_collection_would_fail_that_test() {
    let mut garbage = Vec::new();
    let never = bytes_after_each_step(|parents| garbage.extend(parents));
    assert!(never.windows(2).all(|pair| pair[1] - pair[0] == 2 * STATE_BYTES), "{never:?}");
    let (mut garbage, mut steps) = (Vec::new(), 0);
    let now_and_then = bytes_after_each_step(|parents| {
        garbage.extend(parents);
        steps += 1;
        if steps % 16 == 0 {
            garbage.clear();
        }
    });
    let (least, most) = (now_and_then.iter().min(), now_and_then.iter().max());
    assert!(most > least.map(|least| least + 20 * STATE_BYTES).as_ref(), "{now_and_then:?}");
}

#[test]
fn handles_inside_a_graph_are_evaluated_with_it_and_lose_their_parents() {
    let runtime = runtime();
    let x = counting(&runtime, &[8, 8]);
    let inner = x.exp().expect("floats");
    let y = inner.sum(0).expect("an axis");
    y.eval().expect("a graph runs");
    assert!(inner.is_evaluated(), "somebody holds it, so it is kept");
    drop((x, y));
    runtime.clear_cache();
    assert_eq!(active(&runtime), inner.bytes() as u64);
}

/// A chain of 200,000 handles is taken apart without recursion.
#[test]
fn dropping_a_long_lazy_chain_does_not_overflow_the_stack() {
    let runtime = super::runtime_with(keel_array::RuntimeOptions {
        pending_ops: usize::MAX,
        ..keel_array::RuntimeOptions::default()
    });
    let mut x = counting(&runtime, &[1]);
    for _ in 0..200_000 {
        x = x.neg().expect("floats");
    }
    assert_eq!(runtime.pending_ops(), 200_000);
    drop(x);
    assert_eq!((runtime.pending_ops(), active(&runtime)), (0, 0));
}

#[test]
fn slice_update_works_in_place_when_nobody_else_holds_the_array() {
    let runtime = runtime();
    let mut x = counting(&runtime, &[100, 8]);
    let row = counting(&runtime, &[1, 8]);
    x = x.slice_update(&row, &[0, 0]).expect("the row fits");
    x.eval().expect("a graph runs");
    let (before, charges) = (active(&runtime), runtime.ledger().charges());
    for i in 1..50 {
        x = x.slice_update(&row, &[i, 0]).expect("the row fits");
        x.eval().expect("a graph runs");
    }
    assert_eq!((active(&runtime), runtime.ledger().charges()), (before, charges), "nothing was allocated");
    let values = x.to_vec::<f32>().expect("evaluated");
    assert_eq!((values[49 * 8 + 7], values[50 * 8]), (7.0, 400.0));
}

#[test]
fn slice_update_leaves_the_other_handle_as_it_was() {
    let runtime = runtime();
    let x = counting(&runtime, &[10, 8]);
    let before = active(&runtime);
    let row = Array::zeros(&runtime, [1, 8], DType::F32).expect("an addressable shape");
    let y = x.clone().slice_update(&row, &[3, 0]).expect("the row fits");
    y.eval().expect("a graph runs");
    assert!(active(&runtime) >= before + x.bytes() as u64, "a copy was needed");
    assert_eq!(x.to_vec::<f32>().expect("in memory")[24], 24.0);
    assert_eq!(y.to_vec::<f32>().expect("evaluated")[24], 0.0);
}

#[test]
fn an_update_that_reads_the_array_itself_is_not_disturbed() {
    let runtime = runtime();
    let x = counting(&runtime, &[4, 8]);
    let first = x.slice(&[0, 0], &[3, 8]).expect("within the array");
    let y = x.slice_update(&first, &[1, 0]).expect("the block fits");
    drop(first);
    let want: Vec<f32> = (0..8).chain(0..24).map(|x| x as f32).collect();
    assert_eq!(y.to_vec::<f32>().expect("a graph runs"), want);
}
