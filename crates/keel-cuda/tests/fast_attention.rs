//! Attention has kernels of its own in the fast mode. Behind rotations that it has taken in it gives what it gives behind the same one by
//! one, and its pages hold the same. Needs a GPU: `KEEL_TEST_CUDA=1`.

use keel_array::{Runtime, RuntimeOptions};
use keel_cuda::{CudaBackend, CudaOptions};
use keel_testkit::checks::turned_attention;
use std::sync::Arc;

#[test]
fn attention_is_the_same_with_its_rotations_as_behind_them() {
    if std::env::var_os("KEEL_TEST_CUDA").is_none() {
        eprintln!("skipped: set KEEL_TEST_CUDA=1 on a machine with a GPU");
        return;
    }
    // Most of the time goes to compiling kernels.
    std::thread::scope(|scope| {
        for deterministic in [false, true] {
            scope.spawn(move || {
                let options = CudaOptions { deterministic, poison_freed: true, ..CudaOptions::default() };
                let backend = Arc::new(CudaBackend::new(&options).expect("a GPU"));
                turned_attention(&Runtime::new(backend, RuntimeOptions::default()));
            });
        }
    });
}
