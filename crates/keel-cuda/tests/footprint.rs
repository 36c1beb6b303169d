//! The memory that a GPU's driver takes in addition to tensors. Needs a GPU: `KEEL_TEST_CUDA=1`.

use keel_array::{Array, Backend, Category, DType, DeviceReading, Memory, Runtime, RuntimeOptions};
use keel_cuda::{CudaBackend, CudaOptions};
use std::sync::Arc;

/// Memory is mapped in multiples of this, so an allocation may take up to this much more than its size.
const GRANULE: u64 = 2 << 20;

#[test]
fn tensors_are_no_part_of_the_drivers_footprint() {
    if !keel_testkit::has_gpu!() {
        return;
    }
    let backend = Arc::new(CudaBackend::new(&CudaOptions::default()).expect("a GPU"));
    let runtime = Runtime::new(Arc::clone(&backend) as Arc<dyn Backend>, RuntimeOptions::default());
    let driver_bytes = || runtime.device_usage().expect("the driver answers").driver_bytes;
    let x = Array::from_slice(&runtime, &[0.5f32; 3 * 77], [3, 77]).expect("memory");
    let sums = || x.exp().and_then(|y| y.sum(1)).and_then(|y| y.to_vec::<f32>()).expect("it runs");
    let expected = sums();

    let DeviceReading { usage, driver_bytes: before } = runtime.device_usage().expect("the driver answers");
    eprintln!("{usage:?}, of which the driver has {before}");
    assert!(before > 0 && before < usage.in_use(), "a context takes something, and so does the array");
    let sizes = [1, (3 << 20) + 5, (300 << 20) + 17, 1 << 30];
    let pools =
        sizes.map(|bytes| Array::persistent(&runtime, Category::Kv, [bytes], DType::U8).expect("memory"));
    let held = driver_bytes();
    let tensors = runtime.ledger().active().total();
    eprintln!("{tensors} bytes of tensors, and {held} bytes of the driver");
    assert!(held.abs_diff(before) <= sizes.len() as u64 * GRANULE, "{before} and then {held}");
    assert_eq!(sums(), expected);
    drop(pools);
    let after = driver_bytes();
    assert!(after.abs_diff(before) <= GRANULE, "{before}, and {after} once everything went back");
}

#[test]
fn a_plan_has_no_device_to_ask() {
    assert_eq!(CudaBackend::planning(&CudaOptions::default()).device_usage(), None);
}
