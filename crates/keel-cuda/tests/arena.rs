//! The arena on a GPU grows in place, so no graph is captured again. Needs a GPU: `KEEL_TEST_CUDA=1`.

use keel_array::{Array, Backend, Category, DType, Executable, Memory, Runtime, RuntimeOptions};
use keel_cuda::{CudaBackend, CudaOptions};
use keel_testkit::compare::assert_same_bits;
use std::sync::Arc;

/// Memory is mapped in multiples of this.
const GRANULE: usize = 2 << 20;

/// Bytes that the driver may take in addition to the mapped memory, for page tables.
const DRIVER_BYTES_MAX: u64 = 8 << 20;

/// Row sums of a softmax of `[7, n]` numbers, which lies in the arena.
fn prepare(runtime: &Runtime, n: usize) -> (Executable, Array) {
    let place = Array::persistent(runtime, Category::Staging, [7], DType::F32).expect("memory");
    let values: Vec<f32> = (0..7 * n).map(|i| (i % 97) as f32 / 16.0).collect();
    let x = Array::from_slice(runtime, &values, [7, n]).expect("memory");
    let sums = x.softmax(1).and_then(|y| y.cumsum(1, false, false)).and_then(|y| y.sum(1)).expect("an axis");
    (runtime.prepare(&[(&sums, &place)]).expect("a program"), place)
}

fn values(array: &Array) -> Vec<f32> {
    array.to_vec().expect("in memory")
}

fn arena_bytes(runtime: &Runtime) -> u64 {
    runtime.ledger().active().get(Category::Activations)
}

#[test]
fn the_arena_grows_where_it_lies() {
    if !keel_testkit::has_gpu!() {
        return;
    }
    let options = CudaOptions { poison_freed: true, ..CudaOptions::default() };
    let backend = Arc::new(CudaBackend::new(&options).expect("a GPU"));
    let runtime = Runtime::new(Arc::clone(&backend) as Arc<dyn Backend>, RuntimeOptions::default());
    let free = || backend.device_usage().expect("the driver answers").free;

    let (small, sums) = prepare(&runtime, 33);
    assert_eq!(arena_bytes(&runtime), GRANULE as u64);
    (0..3).for_each(|_| small.run().expect("it runs"));
    let graph_counts = || (backend.capture_count(), backend.replay_count());
    let (wanted, (captured, replayed)) = (values(&sums), graph_counts());
    assert_eq!((captured, replayed), (1, 1), "run, captured, and run as a graph");

    // The ledger and the driver count the same mapped memory.
    let mut sizes = [5 * GRANULE, 40 * GRANULE + 1, 40 * GRANULE + 2, 64 * GRANULE].into_iter();
    for bytes in sizes.by_ref() {
        let before = (free(), arena_bytes(&runtime));
        runtime.reserve_arena(bytes).expect("the arena grows");
        assert_eq!(arena_bytes(&runtime), bytes.next_multiple_of(GRANULE) as u64);
        let (grown, taken) = (arena_bytes(&runtime) - before.1, before.0.saturating_sub(free()));
        eprintln!("{grown} bytes more, of which the driver says {taken}");
        assert!((grown..=grown + DRIVER_BYTES_MAX).contains(&taken));
        small.run().expect("it runs in a larger arena, too");
        assert_same_bits("after the arena grew", &values(&sums), &wanted);
    }
    assert_eq!(graph_counts(), (captured, replayed + 4), "the graph is still right");

    // The same while queued work uses the arena.
    let (large, large_sums) = prepare(&runtime, 100_003);
    large.run().expect("it runs");
    let expected = values(&large_sums);
    let x = Array::from_slice(&runtime, &vec![0.25f32; 1 << 22], [1 << 11, 1 << 11]).expect("memory");
    for round in 1..=8 {
        let value =
            (0..4).fold(x.clone(), |y, _| y.matmul(&x).and_then(|y| y.softmax(1)).expect("extents fit"));
        let value = value.sum(1).expect("an axis");
        runtime.async_eval(&[&value]).expect("it is submitted");
        runtime.reserve_arena((64 + 2 * round) * GRANULE).expect("the arena grows");
        assert_eq!(arena_bytes(&runtime), ((64 + 2 * round) * GRANULE) as u64);
        let value = value.to_vec::<f32>().expect("it ran");
        assert!(value.iter().all(|sum| (sum - 1.0).abs() < 1e-3), "round {round}: {:?}", &value[..4]);
    }
    (0..2).for_each(|_| large.run().expect("it runs"));
    small.run().expect("it runs");
    assert_same_bits("the large program", &values(&large_sums), &expected);
    assert_same_bits("the small program", &values(&sums), &wanted);
    assert_eq!(backend.capture_count(), captured + 1, "nothing was captured again");

    // Everything goes back.
    let (arena, before) = (arena_bytes(&runtime), free());
    drop((small, sums, large, large_sums, x));
    runtime.clear_cache();
    let own = runtime.backend().own_memory();
    assert_eq!(runtime.ledger().active().total(), own.device_bytes + own.host_bytes);
    assert!(free() >= before + arena, "{} bytes free, {before} before {arena} went", free());
}
