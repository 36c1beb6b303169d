//! Random graphs: evaluated lazily (fused, planned, in place) they give the same bits as evaluation op by op.

use super::{active, runtime, runtime_with};
use keel_array::{
    Array, ArraySpec, CustomKernel, DType, HostSlice, HostSliceMut, Result, Runtime, RuntimeOptions,
};
use proptest::prelude::*;

const ROWS: usize = 5;
/// One block of a kernel, several blocks, and several grains, which workers share.
const COLS: [usize; 3] = [37, 257, 4099];

/// One node: its operation, and the earlier nodes that it reads (modulo their number).
#[derive(Clone, Copy, Debug)]
struct Step {
    kind: u8,
    a: usize,
    b: usize,
    /// Drop the handle of this earlier node.
    drops: Option<usize>,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (0u8..20, any::<usize>(), any::<usize>(), proptest::option::of(any::<usize>()));
    proptest::collection::vec(step.prop_map(|(kind, a, b, drops)| Step { kind, a, b, drops }), 1..60)
}

/// A node from two others, all `[ROWS, cols]`.
fn apply(kind: u8, a: &Array, b: &Array, cols: usize) -> Result<Array> {
    let row = |x: &Array| x.slice_axis(0, 2, 3);
    match kind {
        0 => a.add(b),
        1 => a.mul(b),
        2 => a.sub(b),
        3 => a.maximum(b),
        4 => a.sigmoid(),
        5 => a.tanh(),
        6 => a.neg(),
        7 => a.silu(),
        8 => a.softmax(1),
        9 => a.cumsum(0, false, false),
        10 => a.add(&row(b)?),
        11 => a.mul(&b.sum(1)?.reshape([ROWS, 1])?),
        12 => a.swap_axes(0, 1)?.contiguous()?.swap_axes(0, 1)?.add(b),
        13 => a.clone().slice_update(&row(b)?, &[1, 0]),
        14 => Array::concatenate(&[&a.slice_axis(1, 30, cols)?, &b.slice_axis(1, 0, 30)?], 1),
        15 => a.cast(DType::BF16)?.cast(DType::F32),
        16 => a.less(b)?.select(a, b),
        17 => Ok(a.add_rms_norm(b, &row(a)?.reshape([cols])?, 1e-3)?.norm),
        18 => a.matmul(&a.swap_axes(0, 1)?)?.matmul(b).and_then(|y| y.sigmoid()),
        _ => Ok(mirror(cols).apply(&[a, b])?.remove(0)),
    }
}

fn mirror(cols: usize) -> CustomKernel {
    let outputs = vec![ArraySpec::new([ROWS, cols], DType::F32)];
    CustomKernel::new("mirror", outputs, 0.0, |call| {
        let (HostSlice::F32(a), HostSlice::F32(b), HostSliceMut::F32(y)) =
            (call.inputs[0], call.inputs[1], &mut call.outputs[0])
        else {
            return Err("works on f32".into());
        };
        y.iter_mut().enumerate().for_each(|(i, y)| *y = a[a.len() - 1 - i] - b[i]);
        Ok(())
    })
}

/// Builds the graph; `eager` evaluates every node as it is built. Returns the bits of the nodes that are still held.
fn run(runtime: &Runtime, steps: &[Step], cols: usize, eager: bool) -> Vec<Vec<u32>> {
    let leaf = |seed: usize| {
        let values: Vec<f32> =
            (0..ROWS * cols).map(|i| ((i * 31 + seed * 17) % 97) as f32 / 48.5 - 1.0).collect();
        Array::from_slice(runtime, &values, [ROWS, cols]).expect("there is memory")
    };
    let mut nodes: Vec<Option<Array>> = vec![Some(leaf(1)), Some(leaf(2))];
    for step in steps {
        let held: Vec<&Array> = nodes.iter().flatten().collect();
        let (a, b) = (held[step.a % held.len()], held[step.b % held.len()]);
        let node = apply(step.kind, a, b, cols).expect("shapes fit");
        if eager {
            node.eval().expect("a node runs");
        }
        nodes.push(Some(node));
        let len = nodes.len();
        if let Some(drops) = step.drops {
            // Never the newest.
            nodes[drops % (len - 1)] = None;
        }
    }
    let held: Vec<&Array> = nodes.iter().flatten().collect();
    if !eager {
        runtime.eval(&held).expect("a graph runs");
    }
    held.iter()
        .map(|array| array.to_vec::<f32>().expect("evaluated").into_iter().map(f32::to_bits).collect())
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn lazy_evaluation_changes_no_bit_and_gives_all_memory_back(
        steps in steps(),
        cols in proptest::sample::select(COLS.to_vec()),
    ) {
        let eager = runtime();
        let want = run(&eager, &steps, cols, true);
        // All at once, and in pieces: a few operations pending, a few kernels in a submission.
        let pieces = RuntimeOptions { pending_ops: 7, submission_ops: 3, ..RuntimeOptions::default() };
        for lazy in [runtime(), runtime_with(pieces)] {
            let got = run(&lazy, &steps, cols, false);
            prop_assert_eq!(&got, &want);
            prop_assert_eq!(lazy.pending_ops(), 0);
            lazy.clear_cache();
            prop_assert_eq!(active(&lazy), 0);
        }
    }
}
