//! Linear layers: the operation `linear` and its gathered form for experts, with dense, affine and block-coded weights.
//!
//! ```text
//! y[t, n] = sum over k of x[t, k] * w[n, k]                    plain
//! y[r, n] = sum over k of x[r / fanout, k] * w[expert[r], n, k]    gathered
//! ```
//!
//! Activations and results are f32. Weights are packed once, at load, and stay packed: 4 bits stay 4 bits.
//! [`PackedLayout`] defines where everything lies, and the size.
//!
//! ```
//! use keel_cpu::isa::Isa;
//! use keel_cpu::kernels::linear::{Compute, Epilogue, FloatType, Linear, PackedLayout, Rows, WeightFormat, pack};
//! use keel_cpu::{pool::ThreadPool, shared_slice::SharedMut};
//!
//! // Loading: any whole tiles of rows at a time, from any thread.
//! let layout = PackedLayout::new(2, 3, WeightFormat::Dense(FloatType::F32))?;
//! let mut weights = vec![0; layout.bytes()];
//! pack(&layout, Rows::Dense(&[1., 2., 3., 4., 5., 6.]), &mut weights[layout.row_bytes(0, 0..2)]);
//!
//! // Once per layer: which arithmetic, on which instructions.
//! let linear = Linear::new(layout, Compute::fastest(layout.format(), Isa::best()), Isa::best());
//!
//! // Each step: every worker of the pool makes the same call.
//! let x = [1., 0., 0., 0., 1., 1.];
//! let (mut y, mut scratch) = ([0.; 4], vec![0; linear.scratch_bytes(2)]);
//! let (y_out, scratch) = (SharedMut::new(&mut y), SharedMut::new(&mut scratch));
//! ThreadPool::new(2).run(|worker| linear.run(worker, &weights, &x, y_out, Epilogue::Store, scratch));
//! assert_eq!(y, [1., 4., 5., 11.]);
//! # Ok::<(), keel_cpu::error::Error>(())
//! ```
//!
//! # Why a row's bits do not depend on other rows
//!
//! A result is summed over K in one fixed order, whatever other rows, tiles or workers there are. So the same row gives
//! the same bits in decode, verification and prefill, plain and gathered. In [`Compute::F32`] and [`Compute::Int8`] the
//! bits are also the same on every instruction set.
//!
//! # Cost
//!
//! The packed weights are read once for each 256 KB or so of activations, and each row takes `2 N K` operations. Up to
//! a dozen rows memory sets the floor; beyond, the dot-product instructions do. See `benches/linear.rs`.

mod activations;
mod block;
mod coding;
mod format;
mod lanes;
mod pack;
mod routing;
mod rows;
mod schedule;

pub use format::{FloatType, PAIR_ROWS, PackedLayout, TILE_ROWS, WeightFormat};
pub use pack::{Rows, pack, unpack_row};

use crate::isa::Isa;
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use block::{BlockFns, Kernel};
use rows::{RowMap, RowOrder, Segment};
use schedule::Call;

/// The arithmetic of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compute {
    /// Weights widened or dequantised to f32, f32 multiply-add, f32 sums. Dense and affine weights.
    F32,
    /// Activations rounded to bf16, f32 sums. Dense bf16 weights.
    Bf16,
    /// Activations quantised to 8 bits for each row and group, exact integer sums over the group, f32 sums over groups.
    /// Affine weights, and block codings, whose groups have 16 or 32 inputs.
    Int8,
}

impl Compute {
    /// The fastest arithmetic on `isa` that loses no more precision than the weights' format has lost already.
    pub fn fastest(format: WeightFormat, isa: Isa) -> Compute {
        Compute::fastest_where(format, isa.has_bf16_dots())
    }

    fn fastest_where(format: WeightFormat, has_bf16_dots: bool) -> Compute {
        match format {
            WeightFormat::Affine { .. } | WeightFormat::Blocks(_) => Compute::Int8,
            WeightFormat::Dense(FloatType::Bf16) if has_bf16_dots => Compute::Bf16,
            WeightFormat::Dense(_) => Compute::F32,
        }
    }

    /// Whether this arithmetic takes weights of `format`.
    pub fn takes(self, format: WeightFormat) -> bool {
        match self {
            Compute::F32 => !matches!(format, WeightFormat::Blocks(_)),
            Compute::Bf16 => format == WeightFormat::Dense(FloatType::Bf16),
            Compute::Int8 => matches!(format, WeightFormat::Affine { .. } | WeightFormat::Blocks(_)),
        }
    }
}

/// How results are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// `y = x W^T`
    Store,
    /// `y += x W^T`, one rounding after the whole sum: a residual connection.
    Add,
}

/// A linear layer, ready to run: a layout, an arithmetic, and the kernels for them.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    layout: PackedLayout,
    compute: Compute,
    isa: Isa,
    blocks: BlockFns,
}

impl Linear {
    /// Chooses the kernels.
    ///
    /// # Panics
    /// If `compute` does not take the layout's format, or this machine lacks `isa`.
    pub fn new(layout: PackedLayout, compute: Compute, isa: Isa) -> Linear {
        assert!(isa <= Isa::best(), "kernels for {isa} cannot run here: this machine has {}", Isa::best());
        let blocks = block::block_fns(isa, Linear::kernel(&layout, compute), &layout);
        Linear { layout, compute, isa, blocks }
    }

    fn kernel(layout: &PackedLayout, compute: Compute) -> Kernel {
        assert!(compute.takes(layout.format()), "{compute:?} arithmetic with {:?} weights", layout.format());
        match (layout.format(), compute) {
            (WeightFormat::Affine { bits, .. }, Compute::Int8) => Kernel::Int8(bits),
            (WeightFormat::Affine { bits, .. }, _) => Kernel::AffineF32(bits),
            (WeightFormat::Blocks(format), _) => Kernel::Coded(format),
            (WeightFormat::Dense(_), Compute::Bf16) => Kernel::Bf16Dots,
            (WeightFormat::Dense(FloatType::F32), _) => Kernel::F32,
            (WeightFormat::Dense(FloatType::Bf16), _) => Kernel::Bf16,
            (WeightFormat::Dense(FloatType::F16), _) => Kernel::F16,
        }
    }

    /// The weights' layout.
    pub fn layout(&self) -> &PackedLayout {
        &self.layout
    }

    /// The arithmetic.
    pub fn compute(&self) -> Compute {
        self.compute
    }

    /// Bytes of scratch that [`Linear::run`] needs for `rows` rows of x, to hold prepared activations.
    pub fn scratch_bytes(&self, rows: usize) -> usize {
        rows * activations::row_bytes(&self.layout, self.compute)
    }

    /// Bytes of scratch that [`Linear::run_gathered`] needs for `rows` rows of x and `outputs` rows of y.
    pub fn gathered_scratch_bytes(&self, rows: usize, outputs: usize) -> usize {
        let prepared = if self.compute == Compute::Int8 { outputs } else { rows };
        routing::bytes(outputs, self.layout.matrices()) + self.scratch_bytes(prepared)
    }

    /// `y = x W^T`, or `y += x W^T`.
    ///
    /// Every worker of a pool calls it with the same arguments, as the first kernel after a barrier or the start of the
    /// job. The caller places a barrier after it.
    ///
    /// # Shapes
    /// `weights`: the layout's bytes, one matrix; `x`: `[T, K]`; `y`: `[T, N]`; `scratch`: at least
    /// [`Linear::scratch_bytes`]`(T)`, starting at a multiple of 8 bytes, not read before it is written.
    ///
    /// # Panics
    /// If lengths do not fit the layout.
    pub fn run(
        &self,
        worker: &Worker<'_>,
        weights: &[u8],
        x: &[f32],
        y: SharedMut<'_, f32>,
        epilogue: Epilogue,
        scratch: SharedMut<'_, u8>,
    ) {
        let rows = x.len() / self.layout.k();
        assert_eq!(self.layout.matrices(), 1, "a stack of weight matrices needs `run_gathered`");
        self.check(weights, x, y, rows, scratch.len() >= self.scratch_bytes(rows));
        let segments = [Segment { matrix: 0, start: 0, end: rows as u32 }];
        self.run_segments(
            worker,
            weights,
            x,
            RowOrder { segments: &segments, map: RowMap::Same },
            y,
            epilogue,
            scratch,
        );
    }

    /// `y[r] = x[r / fanout] W[experts[r]]^T` over a stack of matrices; each row of x gives `fanout` rows of y. Rows of
    /// one expert are computed together, so that its weights are read once.
    ///
    /// Every worker calls it, as with [`Linear::run`].
    ///
    /// # Shapes
    /// `weights`: the layout's bytes, `[E, N, K]`; `x`: `[R / fanout, K]`; `experts`: `[R]`; `y`: `[R, N]`; `scratch`:
    /// at least [`Linear::gathered_scratch_bytes`], starting at a multiple of 8 bytes.
    ///
    /// # Panics
    /// If lengths do not fit the layout, or an expert is not in the stack.
    pub fn run_gathered(
        &self,
        worker: &Worker<'_>,
        weights: &[u8],
        x: &[f32],
        experts: &[u32],
        y: SharedMut<'_, f32>,
        scratch: SharedMut<'_, u8>,
    ) {
        let (rows, outputs) = (x.len() / self.layout.k(), experts.len());
        if outputs == 0 {
            return;
        }
        assert!(rows > 0 && outputs.is_multiple_of(rows), "{outputs} rows of y for {rows} rows of x");
        self.check(weights, x, y, outputs, scratch.len() >= self.gathered_scratch_bytes(rows, outputs));
        let table_bytes = routing::bytes(outputs, self.layout.matrices());
        let (table, scratch) = (scratch.part(0..table_bytes), scratch.part(table_bytes..scratch.len()));
        if worker.index == 0 {
            // SAFETY: no other worker touches the table before the barrier.
            routing::sort(experts, self.layout.matrices(), unsafe { routing::words_mut(table) });
        }
        worker.barrier();
        // SAFETY: no worker writes the table after the barrier.
        let (order, segments) = routing::read(unsafe { routing::words(table) }, outputs);
        let map = RowMap::Gathered { order, fanout: outputs / rows };
        self.run_segments(worker, weights, x, RowOrder { segments, map }, y, Epilogue::Store, scratch);
    }

    #[allow(clippy::too_many_arguments, reason = "what `run` takes, and the rows")]
    fn run_segments(
        &self,
        worker: &Worker<'_>,
        weights: &[u8],
        x: &[f32],
        rows: RowOrder<'_>,
        y: SharedMut<'_, f32>,
        epilogue: Epilogue,
        scratch: SharedMut<'_, u8>,
    ) {
        let row_bytes = activations::row_bytes(&self.layout, self.compute);
        let (x_rows, x_stride) = match row_bytes {
            0 => (x.as_ptr().cast(), self.layout.k() * size_of::<f32>()),
            _ => (scratch.as_ptr().cast_const(), row_bytes),
        };
        let call = Call {
            layout: &self.layout,
            blocks: self.blocks,
            weights,
            x: x_rows,
            x_stride,
            x_in_blocks: self.compute == Compute::Int8,
            y,
            add: epilogue == Epilogue::Add,
        };
        if row_bytes > 0 {
            schedule::ask_for_first(worker, &call, rows.segments);
            let sizes = self.blocks.sizes();
            activations::prepare(worker, self.isa, &self.layout, self.compute, x, rows, sizes, scratch);
            worker.barrier();
        }
        schedule::run(worker, &call, rows);
    }

    fn check(&self, weights: &[u8], x: &[f32], y: SharedMut<'_, f32>, outputs: usize, scratch_fits: bool) {
        let layout = &self.layout;
        assert_eq!(weights.len(), layout.bytes(), "bytes of packed weights for {layout:?}");
        assert!(x.len().is_multiple_of(layout.k()), "x has {} values, not rows of {}", x.len(), layout.k());
        assert_eq!(y.len(), outputs * layout.n(), "values of y, [{outputs}, {}]", layout.n());
        assert!(scratch_fits, "the scratch is too small");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::ThreadPool;

    /// A layer at the portable level. [`Linear::new`] refers to the kernels of all levels, so that these tests would
    /// compile all of them.
    fn portable(layout: PackedLayout, compute: Compute) -> Linear {
        let blocks = block::portable_fns(Linear::kernel(&layout, compute));
        Linear { layout, compute, isa: Isa::Portable, blocks }
    }

    #[test]
    fn bf16_weights_are_multiplied_in_f32_where_bf16_dots_are_missing() {
        let bf16 = WeightFormat::Dense(FloatType::Bf16);
        assert_eq!(Compute::fastest_where(bf16, true), Compute::Bf16);
        assert_eq!(Compute::fastest_where(bf16, false), Compute::F32);
        assert_eq!(Compute::fastest(bf16, Isa::Avx512), Compute::F32);
    }

    fn run(linear: &Linear, weights: &[u8], x: &[f32]) -> Vec<u32> {
        let rows = x.len() / linear.layout.k();
        let mut y = vec![0.0; rows * linear.layout.n()];
        let mut scratch = vec![0xff; linear.scratch_bytes(rows)];
        let (y_out, scratch) = (SharedMut::new(&mut y), SharedMut::new(&mut scratch));
        ThreadPool::new(2).run(|worker| linear.run(worker, weights, x, y_out, Epilogue::Store, scratch));
        y.into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn blocks_of_sixteen_rows_on_tiles_have_the_bits_of_smaller_ones() {
        let (n, k) = (50, 256);
        let x: Vec<f32> = (0..45 * k).map(|i| (i as f32 * 0.37).sin()).collect();
        for bits in [2usize, 3, 4, 5, 6, 8] {
            for group in [32, 64, 128] {
                let format = WeightFormat::Affine { bits, group, params: FloatType::Bf16 };
                let layout = PackedLayout::new(n, k, format).unwrap();
                let mut weights = vec![0; layout.bytes()];
                let quants: Vec<u8> = (0..n * k)
                    .map(|i| ((i * 2_654_435_761) >> 9) as u8 & (((1 << bits) - 1) as u8))
                    .collect();
                let scales: Vec<f32> = (0..n * k / group).map(|i| 0.5 + (i % 13) as f32).collect();
                let biases: Vec<f32> = scales.iter().map(|scale| -3.0 * scale).collect();
                let rows = Rows::Affine { quants: &quants, scales: &scales, biases: &biases };
                pack(&layout, rows, &mut weights);
                let small = portable(layout, Compute::Int8);
                let tiled = Linear { blocks: block::soft_tile_fns(bits), ..small };
                for rows in [7, 16, 45] {
                    let x = &x[..rows * k];
                    let (small, tiled) = (run(&small, &weights, x), run(&tiled, &weights, x));
                    assert_eq!(small, tiled, "{bits} bits, group {group}, {rows} rows");
                }
            }
        }
    }

    #[test]
    fn bf16_on_tiles_gives_a_row_the_same_bits_among_any_others() {
        for (n, k) in [(50, 256), (33, 77), (16, 1573)] {
            let layout = PackedLayout::new(n, k, WeightFormat::Dense(FloatType::Bf16)).unwrap();
            let mut weights = vec![0; layout.bytes()];
            let values: Vec<f32> = (0..n * k).map(|i| (i as f32 * 0.61).cos()).collect();
            pack(&layout, Rows::Dense(&values), &mut weights);
            let x: Vec<f32> = (0..45 * k).map(|i| (i as f32 * 0.37).sin()).collect();
            let dots = portable(layout, Compute::Bf16);
            let tiled = Linear { blocks: block::soft_bf16_tile_fns(), ..dots };
            let alone: Vec<u32> = x.chunks(k).flat_map(|row| run(&tiled, &weights, row)).collect();
            assert_eq!(run(&tiled, &weights, &x), alone, "N = {n}, K = {k}");
            let dots = run(&dots, &weights, &x);
            for (i, (got, want)) in alone.iter().zip(&dots).enumerate() {
                let (got, want) = (f32::from_bits(*got), f32::from_bits(*want));
                assert!((got - want).abs() <= 1e-6 * k as f32, "output {i}, K = {k}: {got} and {want}");
            }
        }
    }

    #[test]
    fn bf16_on_tiles_gathers_rows_that_lie_apart() {
        let (n, k, experts) = (20, 93, 3);
        let layout = PackedLayout::stacked(experts, n, k, WeightFormat::Dense(FloatType::Bf16)).unwrap();
        let values: Vec<f32> = (0..experts * n * k).map(|i| (i as f32 * 0.61).cos()).collect();
        let mut weights = vec![0; layout.bytes()];
        for (e, values) in values.chunks(n * k).enumerate() {
            pack(&layout, Rows::Dense(values), &mut weights[layout.row_bytes(e, 0..n)]);
        }
        let x: Vec<f32> = (0..40 * k).map(|i| (i as f32 * 0.37).sin()).collect();
        // Rows of experts 1 and 2 are not evenly spaced.
        let chosen: Vec<u32> = (0..40u32).map(|row| row * row % 7 % experts as u32).collect();
        let dots = portable(layout, Compute::Bf16);
        let tiled = Linear { blocks: block::soft_bf16_tile_fns(), ..dots };
        let gathered = |linear: &Linear, x: &[f32], chosen: &[u32]| {
            let mut y = vec![0.0; chosen.len() * n];
            let mut scratch =
                vec![0u64; linear.gathered_scratch_bytes(x.len() / k, chosen.len()).div_ceil(8)];
            let bytes = scratch.as_mut_ptr().cast::<u8>();
            // SAFETY: the bytes of the scratch, which outlives the run.
            let scratch = unsafe { SharedMut::from_raw(bytes, scratch.len() * 8) };
            let y_out = SharedMut::new(&mut y);
            ThreadPool::new(2).run(|worker| linear.run_gathered(worker, &weights, x, chosen, y_out, scratch));
            y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let alone: Vec<u32> =
            x.chunks(k).zip(&chosen).flat_map(|(row, e)| gathered(&tiled, row, &[*e])).collect();
        assert_eq!(gathered(&tiled, &x, &chosen), alone);
        let dots = gathered(&dots, &x, &chosen);
        for (got, want) in alone.iter().zip(&dots) {
            let (got, want) = (f32::from_bits(*got), f32::from_bits(*want));
            assert!((got - want).abs() <= 1e-6 * k as f32, "{got} and {want}");
        }
    }
}
