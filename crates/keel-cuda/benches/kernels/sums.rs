//! Sums of arrays over all GPUs of the machine, as in a decode step of a tensor split.
//!
//! A line is the time of a sum in a chain of sums, each of which adds the results of the one before. All GPUs run the
//! same graph and start together. So the time contains the start and the end of a kernel, and a write to a peer. The
//! floor of a line counts the bytes alone, at 450 GB/s; the floor of a short sum is the latency of that write.
//!
//! The last line is the time that a sum adds between two products, as in a layer: a chain of norms and of pairs of
//! products of one row, with a sum after each pair and without. Each pair has weights of its own.

use super::{RUNS, median_seconds, products};
use keel_array::{
    Array, Category, DType, Executable, Group, Peers, Result, Runtime, RuntimeOptions, Weight, WeightFormat,
};
use keel_cuda::{CudaBackend, CudaGroup, CudaOptions, Survey};
use std::sync::{Arc, Barrier};

/// Sums in the shorter chain. The longer one has three times as many.
const CHAIN: usize = 100;

/// Chains of two GPUs differ from run to run more than kernels of one.
const RUNS_OF_SUMS: usize = 5 * RUNS;

/// Columns of the rows that are summed between products, as of qwen3.5-122b-a10b, and of those between a pair.
const WIDTH: usize = 3072;
const INNER: usize = 4096;

/// Pairs of products in the longer chain. The shorter one has a third of them.
const PAIRS: usize = 48;

const GPUS_MAX: usize = 8;

/// Bytes that NVLink 4 carries in a second in one direction, with 18 links.
const LINK_BYTES_PER_S: f64 = 450e9;

/// The memberships of all GPUs, if they are several. Made before a GPU is opened.
pub fn groups() -> Vec<CudaGroup> {
    let found = Survey::take().gpus.len().min(GPUS_MAX);
    if found > 1 { CudaGroup::of(found, found) } else { Vec::new() }
}

pub fn time(groups: Vec<CudaGroup>, filter: &str) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let name = |len| format!("one_shot_all_reduce of {len} floats, {} GPUs", groups.len());
    let lens = [1, 3072, 5120, 20_480, 40_960, 65_536, 196_608, 524_288, 1_048_576, 8_388_608];
    let lens: Vec<usize> = lens.into_iter().filter(|&len| name(len).contains(filter)).collect();
    let between = format!("one_shot_all_reduce of {WIDTH} floats between products, {} GPUs", groups.len());
    if groups.is_empty() || lens.is_empty() && !between.contains(filter) {
        return Ok(());
    }
    let ranks = groups.iter().enumerate().map(|(ordinal, group)| Rank::open(ordinal, group));
    let ranks = ranks.collect::<std::result::Result<Vec<Rank>, _>>()?;
    for len in lens {
        let (short, long) = (chain_seconds(&ranks, len, CHAIN)?, chain_seconds(&ranks, len, 3 * CHAIN)?);
        let seconds = (long - short) / (2 * CHAIN) as f64;
        let took_one_shot = ranks
            .iter()
            .all(|rank| rank.backend.take_kernels().iter().any(|k| k.contains("one_shot_all_reduce")));
        let sent = ((ranks.len() - 1) * len * size_of::<f32>()) as f64;
        println!(
            "{:70} {:9.2} us, floor {:8.2}{}",
            name(len),
            seconds * 1e6,
            sent / LINK_BYTES_PER_S * 1e6,
            if took_one_shot { "" } else { ", by NCCL" }
        );
    }
    if between.contains(filter) {
        let pairs = ranks.iter().map(Rank::pairs).collect::<Result<Vec<_>>>()?;
        let seconds = |sums| -> Result<f64> {
            let seconds = |count: usize| {
                let chains =
                    ranks.iter().zip(&pairs).map(|(rank, pairs)| rank.products(&pairs[..count], sums));
                slowest_seconds(&ranks, &chains.collect::<Result<Vec<_>>>()?)
            };
            Ok((seconds(PAIRS)? - seconds(PAIRS / 3)?) / (PAIRS - PAIRS / 3) as f64)
        };
        let (with, without) = (seconds(Some(ranks.len()))?, seconds(None)?);
        println!("{between:70} {:9.2} us, a pair of products {:.2}", (with - without) * 1e6, without * 1e6);
    }
    Ok(())
}

struct Rank {
    backend: Arc<CudaBackend>,
    runtime: Runtime,
}

/// A prepared chain with the place of its result.
struct Chain {
    program: Executable,
    result: Array,
}

impl Rank {
    fn open(ordinal: usize, group: &CudaGroup) -> std::result::Result<Rank, Box<dyn std::error::Error>> {
        let options = CudaOptions { ordinal, group: Some(group.clone()), ..CudaOptions::default() };
        let backend = Arc::new(CudaBackend::new(&options)?);
        Ok(Rank { runtime: Runtime::new(Arc::clone(&backend) as _, RuntimeOptions::default()), backend })
    }

    /// A chain of sums that begins with ones.
    fn chain(&self, len: usize, sums: usize, gpus: usize) -> Result<Chain> {
        let array = || Array::persistent(&self.runtime, Category::Activations, [len], DType::F32);
        let (x, result) = (array()?, array()?);
        x.write(&vec![1.0f32; len])?;
        let peers = Peers { first: 0, count: gpus };
        let lazy = self.runtime.trace(|| (0..sums).try_fold(x.clone(), |y, _| y.all_reduce(peers)))?;
        let program = self.runtime.prepare(&[(&lazy, &result)])?;
        self.runtime.make_ready(&[&program], &mut |_, _| ())?;
        Ok(Chain { program, result })
    }

    /// Weights of pairs of products, to `INNER` columns and back.
    fn pairs(&self) -> Result<Vec<(Weight, Weight)>> {
        let format = WeightFormat::Affine { bits: 4, group_size: 64, scale_dtype: DType::BF16 };
        let weight = |rows, cols| products::weight(&self.runtime, format, 1, rows, cols);
        (0..PAIRS).map(|_| Ok((weight(INNER, WIDTH)?, weight(WIDTH, INNER)?))).collect()
    }

    /// A chain of these products, with a sum over `gpus` GPUs after each pair.
    fn products(&self, pairs: &[(Weight, Weight)], gpus: Option<usize>) -> Result<Chain> {
        let array =
            |shape: &[usize]| Array::persistent(&self.runtime, Category::Activations, shape, DType::F32);
        let (x, scale, result) = (array(&[1, WIDTH])?, array(&[WIDTH])?, array(&[1, WIDTH])?);
        [&x, &scale].into_iter().try_for_each(|array| array.write(&vec![1.0f32; WIDTH]))?;
        let step = |y: Array, (up, down): &(Weight, Weight)| {
            let y = y.rms_norm(&scale, 1e-6)?.linear(up)?.linear(down)?;
            gpus.map_or(Ok(y.clone()), |count| y.all_reduce(Peers { first: 0, count }))
        };
        let lazy = self.runtime.trace(|| pairs.iter().try_fold(x.clone(), step))?;
        let program = self.runtime.prepare(&[(&lazy, &result)])?;
        self.runtime.make_ready(&[&program], &mut |_, _| ())?;
        Ok(Chain { program, result })
    }
}

/// Seconds of a chain of sums. The result is checked.
fn chain_seconds(ranks: &[Rank], len: usize, sums: usize) -> Result<f64> {
    let chains = ranks.iter().map(|rank| rank.chain(len, sums, ranks.len())).collect::<Result<Vec<_>>>()?;
    let seconds = slowest_seconds(ranks, &chains)?;
    // Beyond the range of f32 both are infinite.
    let sum = (0..sums).fold(1.0f32, |y, _| (1..ranks.len()).fold(y, |sum, _| sum + y));
    for chain in &chains {
        assert!(chain.result.to_vec::<f32>()?.iter().all(|&y| y == sum), "{sums} sums of {len} floats");
    }
    Ok(seconds)
}

/// Seconds of a chain on the slowest GPU, the median.
fn slowest_seconds(ranks: &[Rank], chains: &[Chain]) -> Result<f64> {
    let together = &Barrier::new(ranks.len());
    let seconds = std::thread::scope(|scope| {
        let time = |(rank, chain)| scope.spawn(move || time_chain(rank, chain, together));
        let threads: Vec<_> = ranks.iter().zip(chains).map(time).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no thread panics"))
            .collect::<Result<Vec<f64>>>()
    })?;
    Ok(seconds.into_iter().fold(0.0, f64::max))
}

/// A GPU that fails leaves the group, so that the others' runs end, too.
fn time_chain(rank: &Rank, chain: &Chain, together: &Barrier) -> Result<f64> {
    let mut failed = None;
    let seconds = median_seconds(RUNS_OF_SUMS, || {
        together.wait();
        if failed.is_none() {
            failed = chain.program.run().err();
        }
        if failed.is_some() {
            rank.runtime.backend().group().into_iter().for_each(Group::abandon);
        }
        Ok(())
    });
    failed.map_or(seconds, |error| Err(error.into()))
}
