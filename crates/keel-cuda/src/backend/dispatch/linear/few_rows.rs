//! Products of few rows: one pass over the weight, x rounded to 8 bits for quantised weights.

use super::super::support::SHARED_BYTES;
use super::super::{Bound, BoundKernel, Call, Geometry};
use super::gather::launches;
use super::tuning::{LARGE, Tuning};
use super::{FEW_ROWS, address, at_row, col_tiles, pairs, row_tiles, weight_key};
use crate::backend::operand::HeadStrides;
use crate::backend::weights::Coding;
use crate::kernels::{KernelKey, LINEAR_FEW_ROWS};
use crate::parameters::{LinearRows, PrepareRows};
use keel_array::{ArrayError, Op, WeightFormat, WeightSpec};
use std::ops::Range;

/// Elements of a row of x up to which each block prepares the row itself, and bytes that it then takes of the block's
/// shared memory. The rest has room for partial sums and norms on every generation. Longer rows are prepared by another
/// kernel.
const FUSED_MAX: usize = 1 << 15;
const FUSED_BYTES_MAX: usize = SHARED_BYTES - (8 << 10);

/// Whether each block prepares x: a single row, and rows with chosen experts.
fn is_fused(weight: &WeightSpec, rows: usize, gathers: bool) -> bool {
    gathers || rows == 1 && weight.cols <= FUSED_MAX && prepared_bytes(weight, 1) <= FUSED_BYTES_MAX
}

/// Refuses chosen experts whose rows of x are too long: no other kernel prepares them.
pub(in crate::backend::dispatch) fn gathers(weight: &WeightSpec) -> Result<(), String> {
    let bytes = prepared_bytes(weight, 1);
    if bytes <= FUSED_BYTES_MAX {
        return Ok(());
    }
    let cols = weight.cols;
    Err(format!(
        "experts of {cols} columns, which take {bytes} bytes of shared memory; the GPU takes {FUSED_BYTES_MAX}"
    ))
}

/// Bytes of x as the kernel multiplies it.
fn prepared_bytes(weight: &WeightSpec, rows: usize) -> usize {
    let row_bytes = Coding::of(weight.format).map_or(256, |coding| 64 + coding.parts() * 8);
    col_tiles(weight) * rows * row_bytes
}

/// `PREPARE_THREADS` of the source.
fn prepare_threads(weight: &WeightSpec) -> usize {
    let tiles = col_tiles(weight);
    if tiles >= 256 { 1024 } else { (4 * tiles).next_multiple_of(32) }
}

/// Scratch of a product of few rows.
pub(super) fn few_rows_bytes(weight: &WeightSpec, rows: usize) -> usize {
    if is_fused(weight, rows, false) { 0 } else { prepared_bytes(weight, rows) }
}

/// The operation on x before the product.
#[derive(Clone, Copy)]
pub(super) enum Entry<'a> {
    Plain,
    /// The norm of each row: weight, eps.
    Norm(Bound<'a>, f32),
    /// A gate.
    Gate(Bound<'a>),
    /// The norm of each head, times the SiLU of a gate: weight, eps, gate.
    HeadNorm(Bound<'a>, f32, Bound<'a>),
}

/// A convolution of one row of one sequence, whose input is some of the product's columns.
pub(in crate::backend::dispatch) struct Convolution<'a> {
    pub width: usize,
    pub channels: usize,
    pub first_column: usize,
    pub weight: Bound<'a>,
    pub window: Bound<'a>,
    /// The first row of each sequence.
    pub row_start: Bound<'a>,
    pub slot: Bound<'a>,
    pub y: Bound<'a>,
}

/// A product of few rows, with the operations before and after it.
pub(super) struct FewRows<'a> {
    weight: &'a WeightSpec,
    pub packed: Bound<'a>,
    pub x: Bound<'a>,
    pub entry: Entry<'a>,
    /// Chosen experts, and their number for each row of x.
    experts: Option<(Bound<'a>, usize)>,
    /// The result is `silu(first half) * second half`.
    gated: bool,
    convolution: Option<Convolution<'a>>,
    /// See [`FewRows::late`].
    late: bool,
}

impl<'a> FewRows<'a> {
    /// The product of `Op::Linear` or `Op::GatherLinear`.
    pub fn of(weight: &'a WeightSpec, product: &BoundKernel<'a>) -> FewRows<'a> {
        let (x, entry) = match product.producer(0) {
            None => (product.inputs[0], Entry::Plain),
            Some(producer) => (producer.inputs[0], entry_of(producer)),
        };
        let experts = match product.kernel.op {
            Op::GatherLinear { .. } => {
                let fanout = product.inputs[2].len() / (product.inputs[0].len() / weight.cols);
                Some((product.inputs[2], fanout))
            }
            _ => None,
        };
        let packed = product.inputs[1];
        FewRows { weight, packed, x, entry, experts, gated: false, convolution: None, late: false }
    }

    /// The same, followed by SwiGLU.
    pub fn gated(self) -> FewRows<'a> {
        FewRows { gated: true, ..self }
    }

    /// The same for a single row, followed by a convolution of some of its columns.
    pub fn convolved(self, convolution: Convolution<'a>) -> FewRows<'a> {
        FewRows { convolution: Some(convolution), ..self }
    }

    /// The same, but the next kernel starts only once all kernels before this one have ended.
    pub fn late(self) -> FewRows<'a> {
        FewRows { late: true, ..self }
    }

    /// Whether the next kernel starts only once all kernels before this one have ended. That is so on request, and for
    /// a large product. A large product has not requested all of its weight when it starts, so early fetches of the
    /// next kernel would delay it.
    fn is_late(&self) -> bool {
        self.late || self.tiles() > LARGE
    }

    /// Row tiles of y.
    fn tiles(&self) -> usize {
        row_tiles(self.weight) / if self.gated { 2 } else { 1 }
    }

    pub fn rows(&self) -> usize {
        self.x.len() / self.weight.cols
    }

    /// Constants of both entries of the source, which follow from the tuning.
    fn key(&self, tuning: &Tuning, rows: usize, fused: bool) -> KernelKey {
        let key = weight_key(LINEAR_FEW_ROWS, "linear_rows", self.weight)
            .define("DENSE", u8::from(matches!(self.weight.format, WeightFormat::Dense(_))))
            .define("DIM_T", rows)
            .define("SPLIT", tuning.split)
            .define("UNIT", tuning.unit)
            .define("PASSES", tuning.passes)
            .define("ROW_WARPS", tuning.row_warps)
            .define("MIN_BLOCKS", tuning.blocks_min)
            .define("BULK", u8::from(tuning.stages > 0))
            .define("STAGES", tuning.stages.max(1))
            .define("FUSED", u8::from(fused))
            .define("SWIGLU", u8::from(self.gated))
            .define("LATE", u8::from(self.is_late()))
            .define("GATHER", self.experts.map_or(0, |(_, fanout)| fanout));
        let key = match &self.convolution {
            None => key,
            Some(conv) => key
                .define("CONV", conv.width)
                .define("CONV_C", conv.channels)
                .define("CONV_FROM", conv.first_column),
        };
        let literal = |eps: f32| format!("{eps:e}f");
        match self.entry {
            Entry::Plain => key,
            Entry::Norm(_, eps) => key.define("NORM", 1).define("EPS", literal(eps)),
            Entry::Gate(gate) => gate_constants(key.define("GATE", 1), gate),
            Entry::HeadNorm(_, eps, gate) => {
                gate_constants(key.define("GATE", 2).define("EPS", literal(eps)), gate)
            }
        }
    }

    /// The weight of the norm before the product.
    pub fn norm(&self) -> Option<Bound<'a>> {
        match self.entry {
            Entry::Norm(weight, _) | Entry::HeadNorm(weight, ..) => Some(weight),
            Entry::Plain | Entry::Gate(_) => None,
        }
    }

    /// The gate before the product.
    fn gate(&self) -> Option<Bound<'a>> {
        match self.entry {
            Entry::Gate(gate) | Entry::HeadNorm(_, _, gate) => Some(gate),
            Entry::Plain | Entry::Norm(..) => None,
        }
    }

    /// The operands that x is multiplied by before the product.
    fn factors(&self) -> impl Iterator<Item = Bound<'a>> {
        self.norm().into_iter().chain(self.gate())
    }

    /// The rows, and the operands that they are multiplied by.
    pub fn operands(&self) -> impl Iterator<Item = Bound<'a>> {
        self.factors().chain([self.x])
    }

    /// Refuses operands that kernels read 16 bytes at a time and that do not begin at a multiple of 16 bytes. Rows of x
    /// are read so if all of them can begin there.
    pub fn check_aligned(&self, call: &Call<'_>) -> Result<(), ArrayError> {
        let rows = self.weight.cols.is_multiple_of(4).then_some(self.x);
        self.factors().chain(rows).try_for_each(|operand| call.expect_aligned(&operand, 16))
    }

    /// Puts the product on the stream, [`FEW_ROWS`] at a time.
    pub fn run(&self, residual: Option<&Bound<'_>>, call: &Call<'_>) -> Result<(), ArrayError> {
        self.check_aligned(call)?;
        if let Some((experts, fanout)) = self.experts {
            return launches(experts.len(), fanout).try_for_each(|rows| self.launch(rows, residual, call));
        }
        let rows = self.rows();
        (0..rows).step_by(FEW_ROWS).try_for_each(|first| {
            let end = rows.min(first + FEW_ROWS);
            self.launch(first..end, residual, call)
        })
    }

    /// Launches some rows of y. With chosen experts each row is a product of its own, and all of them run at once.
    fn launch(
        &self,
        rows: Range<usize>,
        residual: Option<&Bound<'_>>,
        call: &Call<'_>,
    ) -> Result<(), ArrayError> {
        let (first, gathers) = (rows.start, self.experts.is_some());
        let (products, rows) = if gathers { (rows.len(), 1) } else { (1, rows.len()) };
        let first_of_x = self.experts.map_or(first, |(_, fanout)| first / fanout);
        let fused = is_fused(self.weight, rows, gathers);
        let tuning = Tuning::of(self.weight, rows, self.gated, gathers, call.select_by());
        let tuning = tuning.for_device(&call.gpu.device, |tuning| self.shared_bytes(tuning, rows, fused));
        let key = self.key(&tuning, rows, fused);
        let mut x = at_row(self.x.address, first_of_x, self.weight.cols);
        let norm = self.norm().map(|norm| norm.address);
        let gate = self.gate().map(|gate| at_row(gate.address, first_of_x, gate.head_strides().row));
        if !fused {
            let key = KernelKey { entry: "prepare_rows", ..key.clone() };
            let parameters = PrepareRows { x, norm, gate, prepared: call.scratch };
            call.launch(&key, Geometry::rows(rows, prepare_threads(self.weight)), &parameters)?;
            x = call.scratch;
        }
        let width = self.weight.rows / if self.gated { 2 } else { 1 };
        let conv = |operand: fn(&Convolution<'a>) -> Bound<'a>| {
            self.convolution.as_ref().map(|conv| operand(conv).address)
        };
        let parameters = LinearRows {
            x_or_prepared: x,
            weight: self.packed.address,
            pairs: pairs(self.weight, &self.packed),
            norm: norm.filter(|_| fused),
            gate: gate.filter(|_| fused),
            experts: self.experts.map(|(experts, _)| experts.address + (first * size_of::<u32>()) as u64),
            stack: gathers.then_some(self.weight.experts),
            fault: gathers.then_some(call.fault),
            kernel: gathers.then_some(call.index),
            residual: at_row(address(residual), first, width),
            y: at_row(call.outputs[0].address, first, width),
            conv_weight: conv(|conv| conv.weight),
            window: conv(|conv| conv.window),
            row_start: conv(|conv| conv.row_start),
            slot: conv(|conv| conv.slot),
            conv_y: conv(|conv| conv.y),
        };
        let early = fused && self.factors().all(|operand| call.is_settled(&operand));
        let key = key.define("FACTORS_EARLY", u8::from(early));
        let geometry = Geometry {
            grid: (self.tiles().div_ceil(tuning.row_warps * tuning.passes), products, 1),
            block: (32 * tuning.split * tuning.row_warps, 1, 1),
            shared_bytes: self.shared_bytes(&tuning, rows, fused),
        };
        call.launch(&key, geometry, &parameters)?;
        if self.is_late() {
            call.settle();
        }
        Ok(())
    }

    /// `SHARED_BYTES` of the source.
    fn shared_bytes(&self, tuning: &Tuning, rows: usize, fused: bool) -> usize {
        let halves = if self.gated { 2 } else { 1 };
        let partial_bytes = tuning.warps() * halves * rows * 17 * size_of::<f32>();
        let prepared = if fused { prepared_bytes(self.weight, rows) } else { 0 };
        let norms = match self.entry {
            Entry::Norm(..) if fused => rows * (col_tiles(self.weight) + 1) * size_of::<f32>(),
            _ => 0,
        };
        tuning.ring_bytes(self.weight, halves)
            + prepared
            + partial_bytes * if tuning.passes > 1 { 2 } else { 1 }
            + norms
    }
}

fn entry_of<'a>(producer: &BoundKernel<'a>) -> Entry<'a> {
    match producer.kernel.op {
        Op::RmsNorm { eps } => Entry::Norm(producer.inputs[1], eps.get()),
        Op::GatedRmsNorm { eps } => Entry::HeadNorm(producer.inputs[1], eps.get(), producer.strided(2)),
        Op::SigmoidGate => Entry::Gate(producer.strided(1)),
        ref op => unreachable!("{} is not absorbed by a product", op.name()),
    }
}

fn gate_constants(key: KernelKey, gate: Bound<'_>) -> KernelKey {
    let HeadStrides { row, head } = gate.head_strides();
    key.define("HEAD_DIM", gate.width()).define("GATE_ROW", row).define("GATE_HEAD", head)
}

#[cfg(test)]
mod tests {
    use super::super::{LinearKernel, SelectBy, linear_kernel};
    use super::*;
    use crate::agreement::assert_values;
    use keel_array::{BlockFormat, Compute, DType, Layout, Shape};

    /// The constants are those of a launch, so this also finds one that is missing.
    #[test]
    fn the_source_has_the_same_shared_memory() {
        let affine = |bits, group_size| WeightFormat::Affine { bits, group_size, scale_dtype: DType::BF16 };
        for (format, rows, gated) in [
            (affine(4, 64), 1, true),
            (affine(3, 32), 5, false),
            (affine(8, 128), 1, false),
            (WeightFormat::Blocks(BlockFormat::Q6K), 2, true),
            (WeightFormat::Dense(DType::BF16), 1, true),
        ] {
            let weight = WeightSpec { experts: 1, rows: 18_432, cols: 2560, format, compute: Compute::Auto };
            let layout = Layout::contiguous(Shape::from([rows, weight.cols]));
            let x = Bound { address: 0, layout: &layout, dtype: DType::F32, lasting: false };
            let product = FewRows {
                weight: &weight,
                packed: x,
                x,
                entry: if gated { Entry::Norm(x, 1e-6) } else { Entry::Plain },
                experts: None,
                gated,
                convolution: None,
                late: false,
            };
            let tuning = Tuning::of(&weight, rows, gated, false, SelectBy::Rows);
            let fused = is_fused(&weight, rows, false);
            let values = [
                ("SHARED_BYTES", product.shared_bytes(&tuning, rows, fused)),
                ("X_BYTES + X_SCALE_BYTES", prepared_bytes(&weight, rows)),
                ("THREADS", 32 * tuning.warps()),
                ("PREPARE_THREADS", prepare_threads(&weight)),
            ];
            assert_values(product.key(&tuning, rows, fused), &values);
        }
    }

    /// `keel_testkit` has a case of this shape, the only one of a single row that `prepare_rows` prepares.
    #[test]
    fn a_row_that_does_not_fit_a_block_is_prepared_by_another_kernel() {
        let format = WeightFormat::Dense(DType::BF16);
        let of = |cols| WeightSpec { experts: 1, rows: 80, cols, format, compute: Compute::Auto };
        let [short, long] = [4096, 25_600].map(of);
        assert!(is_fused(&short, 1, false) && !is_fused(&long, 1, false));
        assert_eq!(linear_kernel(&long, 1, SelectBy::Rows), LinearKernel::FewRows);
        let narrow = WeightSpec { rows: 19, ..long };
        assert_eq!(linear_kernel(&narrow, 1, SelectBy::Rows), LinearKernel::ExactRows);
    }

    /// Each kernel fits a block of the generations with the least shared memory, once fetches through it are dropped.
    #[test]
    fn one_row_fits_a_block_of_every_generation() {
        let formats = [WeightFormat::Dense(DType::BF16), WeightFormat::Dense(DType::F16)].into_iter();
        let affine = |bits| WeightFormat::Affine { bits, group_size: 32, scale_dtype: DType::BF16 };
        let blocks = BlockFormat::ALL.map(WeightFormat::Blocks);
        for format in formats.chain([2, 4, 8].map(affine)).chain(blocks) {
            for (cols, gated) in (256..1 << 17).step_by(256).flat_map(|cols| [(cols, false), (cols, true)]) {
                let weight = WeightSpec { experts: 1, rows: 4096, cols, format, compute: Compute::Auto };
                let layout = Layout::contiguous(Shape::from([1, cols]));
                let x = Bound { address: 0, layout: &layout, dtype: DType::F32, lasting: false };
                let entry = Entry::Norm(x, 1e-6);
                let (packed, experts, convolution) = (x, None, None);
                let weight = &weight;
                let product = FewRows { weight, packed, x, entry, experts, gated, convolution, late: false };
                let tuning = Tuning::of(weight, 1, gated, false, SelectBy::Rows);
                let tuning = Tuning { stages: 0, ..tuning };
                let bytes = product.shared_bytes(&tuning, 1, is_fused(weight, 1, false));
                assert!(bytes <= SHARED_BYTES, "{format:?} of {cols} columns, gated {gated}: {bytes} bytes");
            }
        }
    }
}
