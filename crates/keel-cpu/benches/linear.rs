//! Linear layers compared with the floors of the machine. `cargo bench -p keel-cpu --bench linear [-- FILTER]`
//!
//! The results of each line are checked against the oracle. A line states its share of both floors: memory binds
//! for few rows, dot products for many. The median of the passes is printed.

use std::time::{Duration, Instant};

use keel_array::BlockFormat;
use keel_cpu::floors::{self, Peaks};
use keel_cpu::isa::Isa;
use keel_cpu::kernels::linear::{
    Compute, Epilogue, FloatType, Linear, PackedLayout, Rows, WeightFormat, pack, unpack_row,
};
use keel_cpu::pool::ThreadPool;
use keel_cpu::shared_slice::SharedMut;
use keel_testkit::cases::linear::weights;
use keel_testkit::compare::assert_close;
use keel_testkit::naive::matmul::matmul_transposed;
use keel_testkit::random::Random;
use keel_testkit::tolerance;
use memmap2::MmapMut;

const BUDGET: Duration = Duration::from_millis(400);

/// Rows of weights that are packed once, and copied until they fill the matrix.
const PATTERN_ROWS: usize = 64;

/// Larger than any cache, so that a walk over a set of matrices reads memory.
const STREAM_BYTES: usize = 320 << 20;

struct Machine {
    pool: ThreadPool,
    read: f64,
    peaks: Peaks,
}

/// Memory as the backend allocates it: in large pages if the system has them.
struct Pages(MmapMut);

impl Pages {
    fn new(bytes: usize) -> Pages {
        let pages = MmapMut::map_anon(bytes).expect("memory");
        #[cfg(target_os = "linux")]
        let _ = pages.advise(memmap2::Advice::HugePage);
        Pages(pages)
    }

    /// `bytes` bytes of repetitions of `pattern`.
    fn filled(bytes: usize, pattern: &[u8]) -> Pages {
        let mut pages = Pages::new(bytes);
        for piece in pages.0.chunks_mut(pattern.len()) {
            piece.copy_from_slice(&pattern[..piece.len()]);
        }
        pages
    }
}

/// A matrix and its copies in memory.
struct Matrix {
    linear: Linear,
    copies: Vec<Pages>,
}

impl Matrix {
    fn new(n: usize, k: usize, format: WeightFormat, compute: Compute, bytes_wanted: usize) -> Matrix {
        let layout = PackedLayout::new(n, k, format).expect("a valid shape");
        let pattern = PackedLayout::new(PATTERN_ROWS.min(n), k, format).expect("a valid shape");
        let mut packed = vec![0; pattern.bytes()];
        let mut random = Random::new(1);
        match format {
            WeightFormat::Affine { bits, group, .. } => {
                let w = weights(&mut random, pattern.n(), k, bits, group);
                let rows = Rows::Affine { quants: &w.quants, scales: &w.scales, biases: &w.biases };
                pack(&pattern, rows, &mut packed);
            }
            WeightFormat::Blocks(format) => {
                let len = pattern.n() * format.row_bytes(k).expect("whole blocks");
                let mut blocks: Vec<u8> = (0..len).map(|_| random.below(128) as u8).collect();
                for block in blocks.chunks_exact_mut(format.bytes()) {
                    for &at in format.scale_offsets() {
                        block[at..at + 2].copy_from_slice(&[0, 0x1c]);
                    }
                }
                pack(&pattern, Rows::Blocks(&blocks), &mut packed);
            }
            WeightFormat::Dense(_) => {
                pack(&pattern, Rows::Dense(&random.uniforms(pattern.n() * k, -1.0, 1.0)), &mut packed);
            }
        }
        let copies = bytes_wanted.div_ceil(layout.bytes()).max(1);
        let copies = (0..copies).map(|_| Pages::filled(layout.bytes(), &packed)).collect();
        Matrix { linear: Linear::new(layout, compute, Isa::best()), copies }
    }

    /// Seconds of one pass over all copies, each multiplied with `x`.
    fn pass(&self, pool: &ThreadPool, x: &[f32], y: &mut [f32], scratch: &mut [u8]) -> f64 {
        let (y, scratch) = (SharedMut::new(y), SharedMut::new(scratch));
        let start = Instant::now();
        pool.run(|worker| {
            for weights in &self.copies {
                self.linear.run(worker, &weights.0, x, y, Epilogue::Store, scratch);
                worker.barrier();
            }
        });
        start.elapsed().as_secs_f64()
    }

    fn bench(&self, machine: &Machine, rows: usize) {
        let layout = self.linear.layout();
        let (n, k) = (layout.n(), layout.k());
        let x = Random::new(2).uniforms(rows * k, -1.0, 1.0);
        let mut y = vec![0.0; rows * n];
        let mut scratch = vec![0; self.linear.scratch_bytes(rows)];
        self.pass(&machine.pool, &x, &mut y, &mut scratch);
        self.check(&x, &y);
        let (started, mut times) = (Instant::now(), Vec::new());
        while times.len() < 5 || started.elapsed() < BUDGET {
            times.push(self.pass(&machine.pool, &x, &mut y, &mut scratch));
        }
        times.sort_by(f64::total_cmp);
        let copies = self.copies.len() as f64;
        let seconds = times[times.len() / 2] / copies;
        let peak = match self.linear.compute() {
            Compute::Int8 => machine.peaks.int8_dot,
            Compute::Bf16 => machine.peaks.bf16_dot,
            Compute::F32 => machine.peaks.f32_fma,
        };
        let bandwidth = layout.bytes() as f64 / seconds;
        let rate = 2.0 * (rows * n * k) as f64 / seconds;
        println!(
            "T {rows:4}  N {n:6}  K {k:5}  {:40} {:9.1} us  {:6.1} GB/s ({:3.0}% of read)  {:7.0} GOP/s ({})",
            format!("{:?} {:?}", layout.format(), self.linear.compute())
                .replace("Affine { ", "")
                .replace(" }", "")
                .replace("params: ", ""),
            seconds * 1e6,
            bandwidth / 1e9,
            100.0 * bandwidth / machine.read,
            rate / 1e9,
            peak.map_or("no peak".into(), |peak| format!("{:3.0}% of peak", 100.0 * rate / peak)),
        );
    }

    /// Compares the first columns of the first and last row with the oracle.
    fn check(&self, x: &[f32], y: &[f32]) {
        let layout = self.linear.layout();
        let (n, k) = (layout.n(), layout.k());
        let columns = n.min(PATTERN_ROWS);
        let mut w = vec![0.0; columns * k];
        for (row, w) in w.chunks_exact_mut(k).enumerate() {
            unpack_row(Isa::best(), layout, &self.copies[0].0, 0, row, w);
        }
        for row in [0, x.len() / k - 1] {
            let want = matmul_transposed(&x[row * k..(row + 1) * k], &w, k);
            let tolerance = match self.linear.compute() {
                Compute::F32 => tolerance::F32,
                Compute::Bf16 => tolerance::BF16_ACTIVATIONS,
                Compute::Int8 => tolerance::INT8_ACTIVATIONS,
            };
            assert_close("bench", &y[row * n..row * n + columns], &want, tolerance);
        }
    }
}

/// A stack of experts; each row of x goes through several.
struct Experts {
    linear: Linear,
    weights: Pages,
}

impl Experts {
    fn new(experts: usize, n: usize, k: usize, format: WeightFormat) -> Experts {
        let layout = PackedLayout::stacked(experts, n, k, format).expect("a valid shape");
        let one = Matrix::new(n, k, format, Compute::fastest(format, Isa::best()), 0);
        let weights = Pages::filled(layout.bytes(), &one.copies[0].0);
        Experts { linear: Linear::new(layout, one.linear.compute(), Isa::best()), weights }
    }

    fn bench(&self, machine: &Machine, rows: usize, fanout: usize) {
        let layout = self.linear.layout();
        let (n, k, experts) = (layout.n(), layout.k(), layout.matrices());
        let mut random = Random::new(3);
        let x = random.uniforms(rows * k, -1.0, 1.0);
        let mut y = vec![0.0; rows * fanout * n];
        let mut scratch = vec![0u64; self.linear.gathered_scratch_bytes(rows, rows * fanout).div_ceil(8)];
        let (started, mut times) = (Instant::now(), Vec::new());
        let mut used = 0;
        while times.len() < 5 || started.elapsed() < BUDGET {
            // The experts of a row differ, and change from step to step, so that none stays in the cache.
            let choice: Vec<u32> = (0..rows)
                .flat_map(|_| {
                    let first = random.below(experts);
                    (0..fanout).map(move |i| ((first + i * 13) % experts) as u32)
                })
                .collect();
            used = choice.iter().collect::<std::collections::HashSet<_>>().len();
            let y = SharedMut::new(&mut y);
            // SAFETY: the words outlive the handle.
            let scratch =
                unsafe { SharedMut::from_raw(scratch.as_mut_ptr().cast::<u8>(), scratch.len() * 8) };
            let start = Instant::now();
            machine
                .pool
                .run(|worker| self.linear.run_gathered(worker, &self.weights.0, &x, &choice, y, scratch));
            times.push(start.elapsed().as_secs_f64());
        }
        // All experts are the same matrix.
        let mut w = vec![0.0; PATTERN_ROWS * k];
        for (row, w) in w.chunks_exact_mut(k).enumerate() {
            unpack_row(Isa::best(), layout, &self.weights.0, 0, row, w);
        }
        let want = matmul_transposed(&x[..k], &w, k);
        assert_close("experts", &y[..PATTERN_ROWS], &want, tolerance::INT8_ACTIVATIONS);
        times.sort_by(f64::total_cmp);
        let seconds = times[times.len() / 2];
        let bandwidth = (used * layout.bytes() / experts) as f64 / seconds;
        let rate = 2.0 * (rows * fanout * n * k) as f64 / seconds;
        println!(
            "T {rows:4}  {fanout} of {experts} experts, N {n}  K {k}: {:9.1} us  {:6.1} GB/s ({:3.0}% of read)  {:7.0} GOP/s",
            seconds * 1e6,
            bandwidth / 1e9,
            100.0 * bandwidth / machine.read,
            rate / 1e9,
        );
    }
}

fn main() {
    // Cargo passes flags of its own.
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-')).unwrap_or_default();
    let wanted = |name: &str| name.contains(&filter);
    let machine = measure();
    let affine = |bits, group| WeightFormat::Affine { bits, group, params: FloatType::Bf16 };
    let (q4, bf16) = (affine(4, 64), WeightFormat::Dense(FloatType::Bf16));
    let streamed = |n, k, format, compute| Matrix::new(n, k, format, compute, STREAM_BYTES);
    if wanted("decode") {
        Matrix::new(248_320, 1024, q4, Compute::Int8, 0).bench(&machine, 1);
        for (n, k) in [(8192, 1024), (3584, 1024), (1024, 3584), (1024, 2048)] {
            streamed(n, k, q4, Compute::Int8).bench(&machine, 1);
        }
    }
    if wanted("verify") {
        let matrix = streamed(8192, 1024, q4, Compute::Int8);
        for rows in [2, 3, 4, 5, 8, 16] {
            matrix.bench(&machine, rows);
        }
    }
    if wanted("prefill") {
        for (n, k) in [(8192, 1024), (1024, 3584), (4096, 4096)] {
            let matrix = Matrix::new(n, k, q4, Compute::Int8, 0);
            for rows in [64, 512, 2048] {
                matrix.bench(&machine, rows);
            }
        }
    }
    if wanted("formats") {
        for (bits, group) in [(2, 64), (3, 64), (4, 32), (4, 128), (5, 64), (6, 64), (8, 64)] {
            streamed(3584, 1024, affine(bits, group), Compute::Int8).bench(&machine, 1);
            Matrix::new(3584, 1024, affine(bits, group), Compute::Int8, 0).bench(&machine, 512);
        }
        streamed(3584, 1024, q4, Compute::F32).bench(&machine, 1);
        Matrix::new(3584, 1024, q4, Compute::F32, 0).bench(&machine, 512);
    }
    if wanted("blocks") {
        for format in BlockFormat::ALL {
            let format = WeightFormat::Blocks(format);
            streamed(3584, 1024, format, Compute::Int8).bench(&machine, 1);
            Matrix::new(3584, 1024, format, Compute::Int8, 0).bench(&machine, 512);
        }
    }
    if wanted("stream") {
        for format in [BlockFormat::Q4K, BlockFormat::Q6K] {
            for (n, k) in [(151_936, 1536), (17_920, 1536), (1536, 8960), (1536, 1536)] {
                streamed(n, k, WeightFormat::Blocks(format), Compute::Int8).bench(&machine, 1);
            }
        }
    }
    if wanted("experts") {
        let experts = Experts::new(128, 512, 2048, q4);
        for rows in [1, 4, 512] {
            experts.bench(&machine, rows, 8);
        }
    }
    if wanted("dense") {
        let f32 = WeightFormat::Dense(FloatType::F32);
        let f16 = WeightFormat::Dense(FloatType::F16);
        for (format, compute) in [
            (bf16, Compute::fastest(bf16, Isa::best())),
            (bf16, Compute::F32),
            (f16, Compute::F32),
            (f32, Compute::F32),
        ] {
            streamed(3584, 1024, format, compute).bench(&machine, 1);
            Matrix::new(3584, 1024, format, compute, 0).bench(&machine, 512);
        }
    }
}

/// Measures and prints the floors.
fn measure() -> Machine {
    let pool = ThreadPool::new(std::thread::available_parallelism().map_or(1, usize::from));
    let peaks = floors::peaks(&pool, Isa::best(), BUDGET);
    let giga = |rate: Option<f64>| rate.map_or("-".into(), |r| format!("{:.0}", r / 1e9));
    let mut buffer = Pages::new(512 << 20);
    buffer.0.fill(1);
    // SAFETY: any bytes are words.
    let words = unsafe { buffer.0.align_to::<u64>().1 };
    let read = floors::read_bandwidth(&pool, words, BUDGET);
    println!(
        "{} threads, {}: f32 FMA {} GFLOP/s, int8 dot {} GOP/s, bf16 dot {} GFLOP/s, memory read {:.1} GB/s",
        pool.workers(),
        Isa::best(),
        giga(peaks.f32_fma),
        giga(peaks.int8_dot),
        giga(peaks.bf16_dot),
        read / 1e9,
    );
    Machine { pool, read, peaks }
}
