//! GPUs of a group, or ranks that share a GPU, and programs that all of them run.

#![allow(dead_code)] // each test file uses its part

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard};

use keel_array::{Array, ArrayError, Category, DType, Executable, Group, Peers, Runtime, RuntimeOptions};
use keel_cuda::{CudaBackend, CudaGroup, CudaOptions, Determinism, Survey};

pub struct Rank {
    pub backend: Arc<CudaBackend>,
    pub runtime: Runtime,
}

impl Rank {
    pub fn group(&self) -> &dyn Group {
        self.runtime.backend().group().expect("it is in a group")
    }

    pub fn peers(&self) -> Peers {
        Peers { first: 0, count: self.group().size() }
    }

    pub fn array(&self, len: usize, dtype: DType) -> Array {
        Array::persistent(&self.runtime, Category::Activations, [len], dtype).expect("memory")
    }
}

/// How many GPUs there are, if they are several, or if NCCL may connect one with itself: version 2.30 or newer, with
/// NCCL_MULTI_RANK_GPU_ENABLE=1.
pub fn gpus() -> Option<usize> {
    if !keel_testkit::has_gpu!() {
        return None;
    }
    let found = Survey::take().gpus.len();
    if found < 2 && !CudaGroup::may_share_a_gpu() {
        keel_testkit::skipped!("needs two GPUs");
        return None;
    }
    take_turn();
    Some(found)
}

/// Waits until no other test of groups runs, and keeps others out until this test's thread ends: kernels of two groups
/// that wait for their peers on the same GPUs can wait for each other.
fn take_turn() {
    static GPUS: Mutex<()> = Mutex::new(());
    thread_local! {
        static TURN: RefCell<Option<MutexGuard<'static, ()>>> = const { RefCell::new(None) };
    }
    TURN.with_borrow_mut(|turn| {
        turn.get_or_insert_with(|| GPUS.lock().unwrap_or_else(|e| e.into_inner()));
    });
}

/// Options of the devices of a group.
pub fn options(count: usize, shares: usize, determinism: Determinism) -> Vec<CudaOptions> {
    let of = |(ordinal, group)| CudaOptions {
        ordinal,
        determinism,
        poison_freed: true,
        group: Some(group),
        ..CudaOptions::default()
    };
    CudaGroup::of(count, shares).into_iter().enumerate().map(of).collect()
}

/// The ranks of a group on `gpus` GPUs.
pub fn open(gpus: usize, count: usize, shares: usize, determinism: Determinism) -> Vec<Rank> {
    let open = |mut options: CudaOptions| {
        options.ordinal %= gpus;
        let backend = Arc::new(CudaBackend::new(&options).expect("a GPU, and NCCL"));
        Rank { runtime: Runtime::new(Arc::clone(&backend) as _, RuntimeOptions::default()), backend }
    };
    options(count, shares, determinism).into_iter().map(open).collect()
}

/// A rank's prepared program, which is a graph from its second run on. Its kernels are loaded: on a GPU that ranks
/// share, the driver would not load them while a kernel waits for a peer.
pub struct Prepared {
    program: Executable,
    from: Vec<Array>,
    to: Vec<Array>,
}

impl Prepared {
    /// A program that reads `from`. Each of its results has a place of its own.
    pub fn new(rank: &Rank, from: Vec<Array>, build: impl FnOnce(&[Array]) -> Vec<Array>) -> Prepared {
        let (program, to) = rank.runtime.trace(|| {
            let results: Vec<Array> = build(&from)
                .into_iter()
                .map(|y| y.reshape([y.shape().elements()]).expect("as many elements"))
                .collect();
            let to: Vec<Array> =
                results.iter().map(|y| rank.array(y.shape().elements(), y.dtype())).collect();
            let pairs: Vec<(&Array, &Array)> = results.iter().zip(&to).collect();
            (rank.runtime.prepare(&pairs).expect("a program"), to)
        });
        rank.runtime.make_ready(&[&program], &mut |_, _| ()).expect("kernels");
        Prepared { program, from, to }
    }

    /// `sums` sums of `len` floats over all ranks, one of the other. Each float is the rank's number plus one.
    pub fn sums(rank: &Rank, len: usize, sums: usize) -> Prepared {
        let prepared = Prepared::new(rank, vec![rank.array(len, DType::F32)], |x| {
            vec![(0..sums).fold(x[0].clone(), |y, _| y.all_reduce(rank.peers()).expect("f32"))]
        });
        prepared.fill(|_| rank.group().rank() as f32 + 1.0);
        prepared
    }

    /// Overwrites each float that it reads with the value of its place.
    pub fn fill(&self, value: impl Fn(usize) -> f32) {
        for x in &self.from {
            let values: Vec<f32> = (0..x.shape().elements()).map(&value).collect();
            x.write(&values).expect("memory");
        }
    }

    pub fn run(&self, times: usize) -> Result<(), String> {
        (0..times).try_for_each(|_| self.program.run()).map_err(|failed| ArrayError::from(failed).to_string())
    }

    pub fn results(&self) -> Vec<Vec<f32>> {
        self.to.iter().map(|y| y.to_vec().expect("memory")).collect()
    }
}

/// Runs `work` for every rank at the same time.
pub fn on_each(ranks: &[Rank], prepared: &[Prepared], work: impl Fn(&Rank, &Prepared) + Sync) {
    std::thread::scope(|scope| {
        for (rank, prepared) in ranks.iter().zip(prepared) {
            let work = &work;
            scope.spawn(move || work(rank, prepared));
        }
    });
}
