//! Attention and the gated delta rule have kernels of their own in the fast mode. Needs a GPU: `KEEL_TEST_CUDA=1`.

use keel_array::{Runtime, RuntimeOptions};
use keel_cuda::{CudaBackend, CudaOptions};
use keel_testkit::checks::{fast_sequences, turned_attention};
use std::sync::Arc;

/// Runs it in both fast modes, if there is a GPU.
fn in_both_modes(check: fn(&Runtime)) {
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
                check(&Runtime::new(backend, RuntimeOptions::default()));
            });
        }
    });
}

/// And its pages hold the same.
#[test]
fn attention_is_the_same_with_its_rotations_as_behind_them() {
    in_both_modes(turned_attention);
}

#[test]
fn attention_and_the_gated_delta_rule_agree_with_their_oracles() {
    in_both_modes(fast_sequences);
}
