//! Every operation against its oracle, over the case lists that all backends share. Needs a GPU: `KEEL_TEST_CUDA=1`.

use keel_array::{Runtime, RuntimeOptions};
use keel_cuda::{CudaBackend, CudaOptions, Precision};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// What is refused on a GPU so far. Each must be met, so that none stays here once it is there.
const REFUSED: [&str; 3] = [
    "cannot be multiplied on the GPU yet",
    "a log takes value heads of a multiple of 4",
    "columns cannot be turned in pairs on the GPU yet",
];

#[test]
fn every_operation_agrees_with_its_oracle() {
    if std::env::var_os("KEEL_TEST_CUDA").is_none() {
        eprintln!("skipped: set KEEL_TEST_CUDA=1 on a machine with a GPU");
        return;
    }
    let options = CudaOptions { precision: Precision::F32, poison_freed: true, ..CudaOptions::default() };
    let (mut wrong, mut refused) = (Vec::new(), BTreeSet::new());
    for check in keel_testkit::checks::all() {
        let backend = CudaBackend::new(&options).expect("a GPU");
        let runtime = Runtime::new(Arc::new(backend), RuntimeOptions::default());
        let Err(panic) = catch_unwind(AssertUnwindSafe(|| (check.run)(&runtime))) else { continue };
        let said = panic.downcast_ref::<String>().cloned().unwrap_or_default();
        match REFUSED.iter().find(|words| said.contains(**words)) {
            Some(words) => _ = refused.insert(*words),
            None => wrong.push((check.op, said)),
        }
    }
    assert!(wrong.is_empty(), "wrong: {wrong:#?}");
    assert_eq!(refused, BTreeSet::from(REFUSED), "what is refused");
}
