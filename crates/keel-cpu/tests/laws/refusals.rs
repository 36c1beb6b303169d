//! Mistakes are found when an operation is built, and the message names the operation and the numbers.

use super::{counting, runtime};
use keel_array::{
    Array, AttentionSpec, Batch, Compute, ConvWindow, DType, KvPool, Real, Reduction, Regime, Result,
    RopeSpec, RowLog, Runtime, Weight, WeightFormat, WeightSpec,
};

#[track_caller]
fn refused<T>(result: Result<T>, message: &str) {
    let error = result.err().expect("it should have been refused").to_string();
    assert!(error.contains(message), "{error}");
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let runtime = runtime();
    let x = counting(&runtime, &[3, 5]);
    let y = counting(&runtime, &[4, 5]);
    refused(x.add(&y), "add: shapes (3, 5) and (4, 5) do not broadcast");
    refused(x.matmul(&y), "matmul: rhs expected (.., K, N) for a lhs (.., M, K) of (3, 5), got (4, 5)");
    refused(x.reshape([4, 4]), "reshape: x expected 16 elements");
    refused(x.transpose(&[0, 0]), "not a permutation");
    refused(x.slice(&[0, 2], &[3, 6]), "is not within (3, 5)");
    refused(x.sum(2), "sum: axis 2 is out of range for shape (3, 5)");
    refused(x.sum(-3), "axis -3");
    refused(x.broadcast_to([2, 5]), "do not broadcast");
    refused(
        Array::concatenate(&[&x, &counting(&runtime, &[3, 6])], 0),
        "concatenate: operand expected (3, 5), got (3, 6)",
    );
    refused(x.clone().slice_update(&y, &[0, 0]), "slice_update");
    refused(x.top_k(6, 1), "top_k: 6 of axis 1 of (3, 5) are more than there are");
    refused(x.rms_norm(&counting(&runtime, &[3]), 1e-6), "rms_norm: weight expected (5,), got (3,)");
    refused(counting(&runtime, &[2, 7]).swiglu(), "swiglu: x expected (.., 2F), got (2, 7)");
    refused(Array::from_slice(&runtime, &[1.0f32; 5], [2, 3]), "from_slice: values expected (6,), got (5,)");
    assert_eq!(runtime.pending_ops(), 0, "what is refused leaves nothing behind");
}

#[test]
fn types_that_do_not_fit_are_refused() {
    let runtime = runtime();
    let x = counting(&runtime, &[3]);
    let flags = x.less(&x).expect("comparable");
    refused(flags.add(&flags), "add: both operands expected a number, got bool");
    refused(x.logical_and(&x), "and: both operands expected bool, got f32");
    refused(flags.exp(), "exp: x expected a float type, got bool");
    refused(x.logical_not(), "not: x expected bool, got f32");
    refused(x.select(&x, &x), "where: condition expected bool, got f32");
    refused(x.reduce(Reduction::Any, 0), "any: x expected bool, got f32");
    refused(x.take(&x), "take: indices expected i32 or u32, got f32");
    refused(x.to_vec::<u32>(), "to_vec: array expected the array's own type");
    refused(x.write(&[1u32]), "write");
}

#[test]
fn sizes_are_bounded() {
    let runtime = runtime();
    let x = counting(&runtime, &[1]);
    refused(x.reshape([1; 9]), "at most 8 axes");
    refused(Array::zeros(&runtime, [usize::MAX, 2], DType::F32), "cannot be addressed");
    refused(x.broadcast_to([1 << 40, 1 << 40]), "cannot be addressed");
    refused(x.reduce(Reduction::Max, 0).and_then(|y| y.max(0)), "axis 0 is out of range for shape ()");
}

/// Builds attention of one row with heads of this size.
fn attention(runtime: &Runtime, size: usize, scale: f32) -> Result<Array> {
    let index = |n: usize| Array::from_slice(runtime, &vec![0u32; n], [n]).expect("there is memory");
    let rows = counting(runtime, &[1, 1, size]);
    let pool = || counting(runtime, &[1, 1, AttentionSpec::PAGE, size]);
    let batch = Batch {
        row_start: index(2),
        slot: index(1),
        position: index(1),
        table: index(1).reshape([1, 1]).expect("one element"),
        accepted: index(1),
    };
    let spec = AttentionSpec { scale: Real::from(scale), window: None, regime: Regime::Decode };
    let pools = KvPool { keys: pool(), values: pool() };
    rows.paged_attention(&rows, &rows, &pools, &batch, spec)
}

#[test]
fn attention_that_no_kernel_computes_is_refused_when_the_operation_is_built() {
    let runtime = runtime();
    for size in [24, 528] {
        refused(attention(&runtime, size, 1.0), "expected a multiple of 16, at most 512");
    }
    // With a scale of 0 or less, the score of a key that a row does not see would no longer be the least.
    for (scale, number) in
        [(0.0, "0"), (-0.125, "-0.125"), (f32::NAN, "NaN"), (f32::INFINITY, "inf"), (-0.0, "-0")]
    {
        let message = format!("a scale of {number}: expected a finite number above 0");
        refused(attention(&runtime, 16, scale), &message);
    }
    attention(&runtime, 16, 1e-30).expect("a small scale");
}

#[test]
fn arrays_of_different_runtimes_do_not_meet() {
    let (here, there) = (runtime(), runtime());
    refused(counting(&here, &[2]).add(&counting(&there, &[2])), "different runtimes");
}

/// State is written in place: an intermediate would lose the writes.
#[test]
fn state_that_is_not_plain_memory_is_refused() {
    let runtime = runtime();
    let index =
        |values: &[u32]| Array::from_slice(&runtime, values, [values.len()]).expect("there is memory");
    let batch = Batch {
        row_start: index(&[0, 5]),
        slot: index(&[0]),
        position: index(&[0]),
        table: Array::from_slice(&runtime, &[0u32], [1, 1]).expect("there is memory"),
        accepted: index(&[0]),
    };
    let (x, weight) = (counting(&runtime, &[5, 6]), counting(&runtime, &[4, 6]));
    let conv = |weight: &Array, rows: Array| {
        x.causal_conv(weight, &ConvWindow { rows, open: None }, &batch, RowLog::None)
    };
    let lazy = counting(&runtime, &[1, 3, 6]).neg().expect("floats");
    let turned = counting(&runtime, &[1, 6, 3]).transpose(&[0, 2, 1]).expect("three axes");
    for rows in [lazy, turned] {
        refused(conv(&weight, rows), "causal_conv writes to");
    }
    conv(&weight, counting(&runtime, &[1, 3, 6])).expect("memory");
    let none = Array::from_slice(&runtime, &[0f32; 0], [0, 6]).expect("no memory");
    refused(conv(&none, none.reshape([1, 0, 6]).expect("no elements")), "weight expected (1, 6), got (0, 6)");
}

#[test]
fn what_no_kernel_takes_is_refused_before_it_runs() {
    let runtime = runtime();
    let rotated = |size: usize| {
        let (x, out) = (counting(&runtime, &[1, 1, size]), counting(&runtime, &[1, 1, size]));
        let positions = Array::from_slice(&runtime, &[3i32], [1])?;
        let spec = RopeSpec { rotary: size, sections: None, interleaved: false };
        let y = runtime.trace(|| x.rope(&positions, &counting(&runtime, &[size / 2]), spec))?;
        runtime.prepare(&[(&y, &out)]).map(drop)
    };
    rotated(512).expect("there is room for its frequencies");
    refused(rotated(514), "514 rotary elements; at most 512 are supported");
}

#[test]
fn operands_of_other_types_and_entries_beyond_memory_are_refused() {
    let runtime = runtime();
    let format = WeightFormat::Dense(DType::F32);
    let spec = WeightSpec { experts: 1, rows: 3, cols: 5, format, compute: Compute::F32 };
    let weight = Weight::allocate(&runtime, spec).expect("there is memory");
    let residual = Array::full(&runtime, [2, 3], DType::F16, 1.0).expect("an addressable shape");
    let x = counting(&runtime, &[2, 5]);
    refused(x.linear_add(&weight, &residual), "linear: every operand expected f32, got f16");
    refused(x.entries(usize::MAX, 1), "entries in (2, 5)");
    refused(x.entries(1, usize::MAX), "entries in (2, 5)");
}
