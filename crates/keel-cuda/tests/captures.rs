//! Other threads allocate and free memory while graphs are captured. Needs a GPU: `KEEL_TEST_CUDA=1`.

use keel_array::{Array, Backend, Category, DType, Executable, Memory, Runtime, RuntimeOptions};
use keel_cuda::{CudaBackend, CudaOptions};
use keel_testkit::compare::assert_same_bits;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Programs, each of which is captured once.
const PROGRAMS: usize = 60;

/// Kernels of a program: enough that a capture takes longer than memory is freed.
const KERNELS: usize = 60;

/// Elements of an array that is freed. Even a few lost ones show next to the memory of graphs and kernels.
const FREED: usize = 16 << 20;

/// Arrays that are freed one after the other.
const ARRAYS: usize = 6;

/// A chain of kernels that do not fuse.
fn prepare(runtime: &Runtime) -> (Executable, Array) {
    let place = Array::persistent(runtime, Category::Staging, [7, 33], DType::F32).expect("memory");
    let values: Vec<f32> = (0..7 * 33).map(|i| (i % 97) as f32 / 16.0).collect();
    let x = Array::from_slice(runtime, &values, [7, 33]).expect("memory");
    let y =
        (0..KERNELS).fold(x, |y, _| y.cumsum(1, false, false).and_then(|y| y.softmax(1)).expect("an axis"));
    (runtime.prepare(&[(&y, &place)]).expect("a program"), place)
}

fn values(array: &Array) -> Vec<f32> {
    array.to_vec().expect("in memory")
}

#[test]
fn memory_may_be_freed_while_graphs_are_captured() {
    if !keel_testkit::has_gpu!() {
        return;
    }
    let options = CudaOptions { poison_freed: true, ..CudaOptions::default() };
    let backend = Arc::new(CudaBackend::new(&options).expect("a GPU"));
    let runtime = Runtime::new(Arc::clone(&backend) as Arc<dyn Backend>, RuntimeOptions::default());
    let free = || backend.device_usage().expect("the driver answers").free;
    // Loads the kernels.
    let (first, place) = prepare(&runtime);
    (0..3).for_each(|_| first.run().expect("it runs"));
    let want = values(&place);
    let (captured, before) = (backend.capture_count(), free());

    let (is_over, mut freed) = (AtomicBool::new(false), 0);
    let programs: Vec<(Executable, Array)> = std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            let mut freed = 0;
            while !is_over.load(Ordering::Relaxed) {
                let array =
                    |_| Array::persistent(&runtime, Category::User, [FREED], DType::F32).expect("memory");
                let arrays: Vec<Array> = (0..ARRAYS).map(array).collect();
                let zeros = arrays[0].slice(&[0], &[64]).and_then(|x| x.to_vec::<f32>()).expect("in memory");
                assert!(zeros.iter().all(|&x| x == 0.0), "memory is zeroed by a copy that is in no graph");
                freed += arrays.len();
                drop(arrays);
            }
            freed
        });
        let programs: Vec<_> = (0..PROGRAMS).map(|_| prepare(&runtime)).collect();
        // Each capture is followed by a replay.
        for (program, place) in &programs {
            (0..3).for_each(|_| program.run().expect("it runs"));
            assert_same_bits("a replay", &values(place), &want);
        }
        is_over.store(true, Ordering::Relaxed);
        freed = others.join().expect("it ends");
        programs
    });
    eprintln!("{freed} arrays were freed while {PROGRAMS} graphs were captured");
    assert_eq!(backend.capture_count(), captured + PROGRAMS as u64, "no capture was ended by another thread");
    for (program, place) in &programs {
        program.run().expect("it runs");
        assert_same_bits("a replay", &values(place), &want);
    }
    // The graphs themselves take less.
    let lost = before.saturating_sub(free());
    assert!(lost < 4 * FREED as u64, "{lost} bytes are lost");
}
