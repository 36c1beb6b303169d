//! Every operation against its oracle: on every instruction set, with one worker and with several.

use keel_array::{Backend, Launch, Place, Result, Runtime, RuntimeOptions};
use keel_cpu::isa::Isa;
use keel_cpu::{CpuBackend, CpuOptions};
use keel_testkit::checks;
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

fn backend(isa: Isa, threads: usize) -> CpuBackend {
    let options =
        CpuOptions { threads: Some(threads), isa: Some(isa), poison_freed: true, ..CpuOptions::default() };
    CpuBackend::new(options)
}

/// Two threads share the checks, each with a backend of its own: oracles run on one thread.
#[test]
fn every_operation_agrees_with_its_oracle() {
    let checks = checks::all();
    for (i, isa) in Isa::available().enumerate() {
        let next = AtomicUsize::new(0);
        let run_some = || {
            let runtime = Runtime::new(Arc::new(backend(isa, 1 + i % 3)), RuntimeOptions::default());
            while let Some(check) = checks.get(next.fetch_add(1, Ordering::Relaxed)) {
                check.run(&runtime);
            }
            runtime.clear_cache();
            assert_eq!(runtime.ledger().active().total(), 0, "memory left behind at {isa}");
        };
        std::thread::scope(|threads| {
            threads.spawn(run_some);
            run_some();
        });
        assert!(next.into_inner() >= checks.len(), "every check is run at {isa}");
    }
}

/// One broken kernel: it spoils an element of one operation's result.
struct Broken {
    op: &'static str,
}

impl Interceptor for Broken {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<()> {
        backend.launch(launch)?;
        for kernel in launch.kernels().iter().filter(|k| k.op.name() == self.op) {
            let output = &kernel.outputs[0];
            let elements = output.layout.shape.elements();
            if elements == 0 {
                continue;
            }
            // The last element, wrong by far more than any tolerance.
            let size = output.dtype.size();
            let Place { buffer, offset } = launch.resolve(output.memory);
            let at = offset + (output.layout.offset + elements - 1) * size;
            let mut bytes = vec![0; size];
            backend.read(buffer.memory(), at, &mut bytes)?;
            bytes[size - 1] ^= if size == 1 { 1 } else { 0x41 };
            backend.write(buffer.memory(), at, &bytes);
        }
        Ok(())
    }
}

#[test]
fn a_broken_kernel_of_any_operation_is_caught() {
    let ops: BTreeSet<&str> = checks::all().iter().map(|check| check.op).collect();
    // Failures of this thread are expected; those of other tests are still printed.
    let (this, print) = (std::thread::current().id(), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| {
        if std::thread::current().id() != this {
            print(panic);
        }
    }));
    let missed: Vec<&str> = ops
        .into_iter()
        .filter(|&op| {
            let broken = InterceptedBackend::new(Arc::new(backend(Isa::best(), 2)), Arc::new(Broken { op }));
            let runtime = Runtime::new(broken, RuntimeOptions::default());
            let mut checks = checks::all().into_iter().filter(|check| check.op == op);
            let caught = checks.any(|check| catch_unwind(AssertUnwindSafe(|| check.run(&runtime))).is_err());
            !caught
        })
        .collect();
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "nobody noticed that these are broken: {missed:?}");
}
