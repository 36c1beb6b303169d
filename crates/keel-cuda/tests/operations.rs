//! Every operation against its oracle, over the case lists that all backends share. Needs a GPU: `KEEL_TEST_CUDA=1`.
//! For tools under which all take too long, `KEEL_TEST_OPS=linear,sort` takes some of them alone, `KEEL_TEST_SHARD=i/n` a share of
//! all cases, and `KEEL_TEST_KERNELS=FILE` writes down which kernels were launched.

use keel_array::{Backend, Runtime, RuntimeOptions};
use keel_cuda::{CudaBackend, CudaOptions, Precision};
use keel_testkit::checks::Check;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Checks that run side by side.
const THREADS_MAX: usize = 12;

/// A check that takes longer is named.
const SLOW: Duration = Duration::from_secs(10);

#[test]
fn every_operation_agrees_with_its_oracle() {
    if std::env::var_os("KEEL_TEST_CUDA").is_none() {
        eprintln!("skipped: set KEEL_TEST_CUDA=1 on a machine with a GPU");
        return;
    }
    let mut checks = keel_testkit::checks::all();
    if let Ok(wanted) = std::env::var("KEEL_TEST_OPS") {
        checks.retain(|check| wanted.split(',').any(|op| op == check.op));
        let is_shared_out = std::env::var_os("KEEL_TEST_SHARD").is_some();
        assert!(is_shared_out || !checks.is_empty(), "{wanted} names no operation");
    }
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let kernels = Mutex::new(BTreeSet::new());
    // Most of the time goes to compiling kernels.
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX) {
            scope.spawn(|| {
                let options =
                    CudaOptions { precision: Precision::F32, poison_freed: true, ..CudaOptions::default() };
                let backend = Arc::new(CudaBackend::new(&options).expect("a GPU"));
                while let Some(check) = checks.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let Some(said) = complaint(check, &backend) else { continue };
                    wrong.lock().expect("no check panics here").push((check.op, said));
                }
                kernels.lock().expect("no check panics here").extend(backend.kernels());
            });
        }
    });
    let kernels: Vec<String> = kernels.into_inner().expect("no check panics here").into_iter().collect();
    eprintln!("{} different kernels were launched", kernels.len());
    if let Some(file) = std::env::var_os("KEEL_TEST_KERNELS") {
        std::fs::write(file, kernels.join("\n") + "\n").expect("a file that can be written");
    }
    let wrong = wrong.into_inner().expect("no check panics here");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// What a check says against a runtime of its own; `None` if it passes.
fn complaint(check: &Check, backend: &Arc<CudaBackend>) -> Option<String> {
    let runtime = Runtime::new(Arc::clone(backend) as Arc<dyn Backend>, RuntimeOptions::default());
    let start = Instant::now();
    let panic = catch_unwind(AssertUnwindSafe(|| (check.run)(&runtime))).err();
    if start.elapsed() > SLOW {
        eprintln!("{}: {:.0} s", check.op, start.elapsed().as_secs_f64());
    }
    let panic = panic?;
    Some(panic.downcast_ref::<String>().cloned().unwrap_or_default())
}
