//! Failures 1 and 3 of the design: slices that pin their parents, and evaluated arrays that keep theirs.

use keel_array::{Array, DType, Runtime};

/// `0, 1, 2, ..` with this shape.
pub fn counting(runtime: &Runtime, shape: &[usize]) -> Array {
    let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| i as f32).collect();
    Array::from_slice(runtime, &values, shape).expect("there is memory")
}

/// Failure 1: a slice that outlives its parent holds at most twice its own bytes. A layer keeps the last rows of each
/// chunk of its input. These rows must not keep the chunks in memory.
///
/// # Panics
/// If a chunk stays in memory.
pub fn tails_do_not_pin_their_chunks(runtime: &Runtime) {
    let (mut kept, mut growth) = (Vec::new(), Vec::new());
    for i in 0..20 {
        let first = Array::full(runtime, [1], DType::F32, i as f32).expect("an addressable shape");
        let input = counting(runtime, &[512, 64]).add(&first).expect("shapes broadcast");
        input.eval().expect("a chunk runs");
        let tail = input.slice(&[510, 0], &[512, 64]).expect("within the chunk");
        tail.eval().expect("a slice runs");
        drop(input);
        assert!(tail.held_bytes().expect("evaluated") <= 2 * tail.bytes());
        kept.push(tail);
        growth.push(runtime.ledger().active().total());
    }
    let tail_bytes = kept[0].bytes() as u64;
    let leaves_its_tail = |pair: &[u64]| pair[1] - pair[0] == tail_bytes;
    assert!(
        growth[1..].windows(2).all(leaves_its_tail),
        "each chunk leaves its tail and nothing else: {growth:?}"
    );
    for (i, tail) in kept.iter().enumerate() {
        let want: Vec<f32> = (510 * 64..512 * 64).map(|x| x as f32 + i as f32).collect();
        assert_eq!(tail.to_vec::<f32>().expect("evaluated"), want);
    }
}

/// Failure 3: an evaluated array has no parents, and its last handle frees it at once.
///
/// # Panics
/// If memory is held that no handle needs.
pub fn the_last_handle_frees_at_once(runtime: &Runtime) {
    // A backend may hold memory for itself.
    let before = runtime.ledger().active().total();
    let active = || runtime.ledger().active().total() - before;
    let (x, w) = (counting(runtime, &[64, 64]), counting(runtime, &[64, 64]));
    let bytes = x.bytes() as u64;
    let y = x.matmul(&w).and_then(|y| y.softmax(1)).and_then(|y| y.matmul(&x)).expect("extents fit");
    drop((x, w));
    assert_eq!(active(), 2 * bytes, "a lazy array holds its inputs");
    y.eval().expect("a graph runs");
    runtime.clear_cache();
    assert_eq!(active(), bytes, "an evaluated one holds itself");
    let other = y.clone();
    drop(y);
    assert_eq!(active(), bytes);
    drop(other);
    assert_eq!(active(), 0);
}
