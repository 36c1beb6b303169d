//! Copies on the device and entries that are zeroed: many together, in stream order.

use super::Check;
use keel_array::{Array, Category, DType, ElementCopy, Runtime, clear_entries, copy_all};

pub(super) const CHECKS: &[Check] = &[
    Check { op: "take", run: many_moves_are_as_one_by_one },
    Check { op: "take", run: moves_follow_runs_and_runs_follow_moves },
];

/// Bytes of an entry: less than a word, no whole number of words, and more than a block of a kernel moves.
const WIDTHS: [usize; 6] = [1, 3, 16, 100, 4_099, 40_004];
const ENTRIES: usize = 4;

/// More entries of whole words than one kernel moves: three for each round.
const ROUNDS: usize = 18;

fn bytes_of(array: &Array) -> Vec<u8> {
    let mut bytes = vec![0; array.bytes()];
    array.read_bytes(0, &mut bytes).expect("contiguous storage");
    bytes
}

/// An array of entries, whose bytes depend on `seed`.
fn entries(runtime: &Runtime, width: usize, seed: usize) -> (Array, Vec<u8>) {
    let shape = [ENTRIES, width];
    let array = Array::persistent(runtime, Category::User, shape, DType::U8).expect("memory");
    let values: Vec<u8> = (0..ENTRIES * width).map(|i| (i * 7 + seed * 13 + 1) as u8).collect();
    array.write(&values).expect("as many");
    (array, values)
}

fn many_moves_are_as_one_by_one(runtime: &Runtime) {
    let seeds = 0..ROUNDS * WIDTHS.len();
    let all: Vec<[(Array, Vec<u8>); 2]> = seeds
        .map(|seed| {
            let width = WIDTHS[seed % WIDTHS.len()];
            [entries(runtime, width, seed), entries(runtime, width, seed + 100)]
        })
        .collect();
    let copies = all.iter().map(|[(source, _), (target, _)]| source.entry_copy(2, target, 1));
    let copies: Vec<ElementCopy<'_>> = copies.collect::<Result<_, _>>().expect("there are such entries");
    copy_all(&copies).expect("types agree");
    let targets: Vec<&Array> = all.iter().map(|[_, (target, _)]| target).collect();
    clear_entries(&targets, 3).expect("there is such an entry");
    for [(source, before), (target, overwritten)] in &all {
        let width = source.shape()[1];
        let mut want = overwritten.clone();
        want[width..2 * width].copy_from_slice(&before[2 * width..3 * width]);
        want[3 * width..].fill(0);
        assert_eq!(&bytes_of(source), before, "{width} bytes an entry: the source");
        assert_eq!(bytes_of(target), want, "{width} bytes an entry: the target");
    }
    let foreign = Array::persistent(runtime, Category::User, [ENTRIES, 2], DType::U8).expect("memory");
    all[0][0].0.entry_copy(0, &foreign, 0).expect_err("entries of another shape");
    clear_entries(&targets, ENTRIES).expect_err("no such entry");
}

fn moves_follow_runs_and_runs_follow_moves(runtime: &Runtime) {
    let table = Array::from_slice(runtime, &[3u32, 5, 8, 13, 21], [5]).expect("memory");
    let place =
        |count: usize| Array::persistent(runtime, Category::User, [count], DType::U32).expect("memory");
    let (at, led, copied, again) = (place(2), place(2), place(3), place(3));
    let steps = runtime.trace(|| {
        let first = table.take(&at).expect("places");
        let second = copied.add(&copied).expect("shapes agree");
        let [first, second] = [(&first, &led), (&second, &again)].map(|pair| runtime.prepare(&[pair]));
        first.and_then(|first| Ok([first, second?])).expect("persistent places")
    });
    for (i, j) in [(4u32, 1u32), (2, 3), (0, 0)] {
        at.write(&[i, j]).expect("two");
        copied.write(&[7u32, 7, 7]).expect("three");
        steps[0].run().expect("places within the table");
        copy_all(&[ElementCopy { source: &led, from: 0, target: &copied, to: 1, count: 2 }])
            .expect("they fit");
        steps[1].run().expect("it adds");
        let [first, second] = [i, j].map(|at| [3u32, 5, 8, 13, 21][at as usize]);
        assert_eq!(again.to_vec::<u32>().expect("words"), [14, 2 * first, 2 * second]);
    }
}
