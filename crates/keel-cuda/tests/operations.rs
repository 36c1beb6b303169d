//! Every operation against its oracle, over the case lists that all backends share, in f32; then the operations for
//! which the fast modes have kernels of their own, and products that keep more bits of x than other backends do. Needs
//! a GPU: `KEEL_TEST_CUDA=1`.
//!
//! - `KEEL_TEST_OPS=linear,sort` runs these operations alone.
//! - `KEEL_TEST_KERNELS=FILE` writes a line for each case and each kernel that it launches, with a tab between the two.
//! - `KEEL_TEST_CASES=FILE` runs only the cases that such a file names; parts of its lines are enough. It is for tools
//!   under which all cases take too long.

use keel_array::{
    Array, Backend, Compute, DType, RowBlock, RowData, Runtime, RuntimeOptions, Weight, WeightFormat,
    WeightSpec,
};
use keel_cuda::{CudaBackend, CudaOptions, Determinism, Precision};
use keel_testkit::checks::{self, Listed, watch_cases};
use keel_testkit::compare::assert_close;
use keel_testkit::naive::matmul::matmul_transposed;
use keel_testkit::random::Random;
use keel_testkit::tolerance;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// Checks that run at the same time, at most.
const THREADS_MAX: usize = 12;

/// A check that takes longer is printed.
const SLOW: Duration = Duration::from_secs(10);

/// The case of kernels that are launched before the first case.
const NO_CASE: &str = "";

/// How a backend computes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Exact,
    Fast,
    FastDeterministic,
}

impl Way {
    fn checks(self) -> Vec<Listed> {
        match self {
            Way::Exact => checks::all(),
            Way::Fast => checks::fast("fast "),
            Way::FastDeterministic => checks::fast("deterministic "),
        }
    }

    fn backend(self) -> Arc<CudaBackend> {
        let precision = if self == Way::Exact { Precision::F32 } else { Precision::Fast };
        let determinism = if self == Way::FastDeterministic { Determinism::Steps } else { Determinism::Off };
        let options = CudaOptions { precision, determinism, poison_freed: true, ..CudaOptions::default() };
        Arc::new(CudaBackend::new(&options).expect("a GPU"))
    }
}

#[test]
fn every_operation_agrees_with_its_oracle() {
    if !keel_testkit::has_gpu!() {
        return;
    }
    let ways = [Way::Exact, Way::Fast, Way::FastDeterministic];
    let mut checks: Vec<_> =
        ways.into_iter().flat_map(|way| way.checks().into_iter().map(move |check| (way, check))).collect();
    if let Ok(wanted) = std::env::var("KEEL_TEST_OPS") {
        checks.retain(|(_, check)| wanted.split(',').any(|op| op == check.op));
        assert!(!checks.is_empty(), "{wanted} names no operation");
    }
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let launched = Mutex::new(Launched::default());
    // Most of the time goes to compiling kernels.
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX) {
            scope.spawn(|| {
                let mut backends = BTreeMap::new();
                while let Some((way, check)) = checks.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let backend = backends.entry(way).or_insert_with(|| way.backend());
                    let record = Record::begin(backend);
                    let said = complaint(check, backend);
                    launched.lock().expect("no check panics here").join(record.borrow_mut().end());
                    let Some(said) = said else { continue };
                    wrong.lock().expect("no check panics here").push((check.op, said));
                }
            });
        }
    });
    let launched = launched.into_inner().expect("no check panics here");
    eprintln!("{} different kernels were launched in {} cases", launched.kernels(), launched.0.len());
    if let Some(file) = std::env::var_os("KEEL_TEST_KERNELS") {
        std::fs::write(file, launched.lines()).expect("a file that can be written");
    }
    let wrong = wrong.into_inner().expect("no check panics here");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Few rows meet a dense bf16 weight as the sum of two bf16. With `Compute::Bf16` many rows do, too.
#[test]
fn a_dense_weight_of_bf16_meets_two_parts_of_x() {
    if !keel_testkit::has_gpu!() {
        return;
    }
    for determinism in [Determinism::Off, Determinism::Steps] {
        let options = CudaOptions { determinism, ..CudaOptions::default() };
        let backend = Arc::new(CudaBackend::new(&options).expect("a GPU"));
        let runtime = Runtime::new(backend as Arc<dyn Backend>, RuntimeOptions::default());
        let mut random = Random::new(3);
        for (t, n, k) in [(1, 67, 1032), (5, 130, 648), (16, 96, 2568), (17, 67, 1032), (130, 96, 648)] {
            let to_bf16 = |x: f32| f32::from_bits(x.to_bits() & 0xffff_0000);
            let w: Vec<f32> = random.uniforms(n * k, -1.0, 1.0).into_iter().map(to_bf16).collect();
            let x = random.uniforms(t * k, -1.0, 1.0);
            let want = matmul_transposed(&x, &w, k);
            let array = Array::from_slice(&runtime, &x, [t, k]).expect("memory");
            // In the deterministic mode rows without a regime are those of a prompt.
            let are_few = t <= 16 && determinism == Determinism::Off;
            for compute in if are_few { &[Compute::Bf16, Compute::Auto][..] } else { &[Compute::Bf16] } {
                let y = array.linear(&dense_bf16(&runtime, &w, [n, k], *compute)).expect("extents fit");
                let what = format!("[{t}, {n}, {k}], {compute:?}, {determinism:?}");
                assert_close(&what, &y.to_vec::<f32>().expect("it runs"), &want, tolerance::TWO_BF16);
            }
        }
    }
}

/// A weight of values that bf16 holds exactly.
fn dense_bf16(runtime: &Runtime, values: &[f32], [rows, cols]: [usize; 2], compute: Compute) -> Weight {
    let spec = WeightSpec { experts: 1, rows, cols, format: WeightFormat::Dense(DType::BF16), compute };
    let weight = Weight::allocate(runtime, spec).expect("memory");
    let bytes: Vec<u8> = values.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect();
    let block = RowBlock { expert: 0, first_row: 0, rows, data: RowData::Dense(&bytes) };
    weight.fill(&block).expect("whole rows");
    weight
}

/// Runs a check with a runtime of its own. Returns its error; `None` if it passes.
fn complaint(check: &Listed, backend: &Arc<CudaBackend>) -> Option<String> {
    let runtime = Runtime::new(Arc::clone(backend) as Arc<dyn Backend>, RuntimeOptions::default());
    let start = Instant::now();
    let panic = catch_unwind(AssertUnwindSafe(|| check.run(&runtime))).err();
    if start.elapsed() > SLOW {
        eprintln!("{}: {:.0} s", check.op, start.elapsed().as_secs_f64());
    }
    let panic = panic?;
    Some(panic.downcast_ref::<String>().cloned().unwrap_or_default())
}

/// Kernels by the case that launched them.
#[derive(Default)]
struct Launched(BTreeMap<String, BTreeSet<String>>);

impl Launched {
    fn join(&mut self, other: Launched) {
        other.0.into_iter().for_each(|(case, kernels)| self.0.entry(case).or_default().extend(kernels));
    }

    fn kernels(&self) -> usize {
        self.0.values().flatten().collect::<BTreeSet<_>>().len()
    }

    fn lines(&self) -> String {
        let lines = |(case, kernels): (&String, &BTreeSet<String>)| match kernels.len() {
            0 => format!("{case}\t\n"),
            _ => kernels.iter().map(|kernel| format!("{case}\t{kernel}\n")).collect(),
        };
        self.0.iter().map(lines).collect()
    }
}

/// The kernels that the cases of one check launch.
struct Record {
    /// Weak, so that it is not the last handle: a thread's own values are dropped after everything else.
    backend: Weak<CudaBackend>,
    case: String,
    launched: Launched,
}

impl Record {
    fn begin(backend: &Arc<CudaBackend>) -> Rc<RefCell<Record>> {
        let (backend, case) = (Arc::downgrade(backend), NO_CASE.to_owned());
        let record = Rc::new(RefCell::new(Record { backend, case, launched: Launched::default() }));
        let watched = Rc::clone(&record);
        watch_cases(move |case| watched.borrow_mut().turn_to(case));
        record
    }

    fn turn_to(&mut self, case: &str) {
        let before = std::mem::replace(&mut self.case, case.to_owned());
        let kernels = self.backend.upgrade().map_or_else(Vec::new, |backend| backend.take_kernels());
        self.launched.0.entry(before).or_default().extend(kernels);
    }

    fn end(&mut self) -> Launched {
        self.turn_to(NO_CASE);
        std::mem::take(&mut self.launched)
    }
}
