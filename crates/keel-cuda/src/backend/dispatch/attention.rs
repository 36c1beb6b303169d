//! Attention over pages. New rows first go to their pages; then a block computes a tile of rows and heads against a
//! split of the keys.

mod decode_persistent;
mod kv_splits;
mod shared_memory;

use super::batch::{BatchCheck, check_batch};
use super::fast::rotation;
use super::{BLOCKS_WANTED, Bound, BoundKernel, Call, Geometry};
use crate::backend::operand::HeadStrides;
use crate::backend::{Mode, Precision};
use crate::kernels::{
    ATTENTION, ATTENTION_DECODE_PERSISTENT, ATTENTION_PREPARE, ATTENTION_TENSOR, ATTENTION_WGMMA, KernelKey,
    Source,
};
use crate::parameters::{Attend, AttentionMerge, AttentionPrepare, KvWrite};
use decode_persistent::{Capacity, Walk, is_worthwhile};
use keel_array::{ArrayError, AttentionSpec, DType, Kernel, KvFormat, Op, Regime, RopeSpec, Shape};
use kv_splits::{KvSplits, SPLIT_STEP, WIDE_TILE, splits};
use shared_memory::KvHead;

/// Pairs of row and head of a block, in decode and in f32; four times as many in prefill on tensor cores.
const TILE: usize = 16;

/// Scratch: queries that the operation rotates itself, then the partial results. These are for each split, row and
/// head: a sum for each column, the largest score, and the total of the weights.
pub(super) fn workspace_bytes(spec: &AttentionSpec, kernel: &Kernel, mode: Mode) -> usize {
    let shape = |i: usize| &kernel.inputs[i].layout.shape;
    let (q, kv_heads, table) = (shape(0), shape(1)[1], shape(5));
    let rotated = kernel.producer(0).map_or(0, |_| rotated_bytes(q));
    let count = if sees_later_keys(kernel) { 1 } else { splits(spec, q, kv_heads, table, mode).count };
    rotated
        + match count {
            1 => 0,
            splits => splits * q[0] * q[1] * (q[2] + 2) * size_of::<f32>(),
        }
}

/// Whether rows see keys after their own position; there is a ninth operand then.
fn sees_later_keys(kernel: &Kernel) -> bool {
    kernel.inputs.len() > 8
}

/// Whether every device attends on tensor cores, for all rows at once. The kernel can then leave f16 of an eighth.
pub(super) fn leaves_half(spec: &AttentionSpec, kernel: &Kernel, mode: Mode) -> bool {
    (spec.regime, spec.window, mode.precision) == (Regime::Prefill, None, Precision::Fast)
        && kernel.inputs[3].dtype != DType::F32
}

fn rotated_bytes(q: &Shape) -> usize {
    (q.elements() * size_of::<f32>()).next_multiple_of(16)
}

pub(super) fn run(spec: &AttentionSpec, call: &Call<'_>) -> Result<(), ArrayError> {
    let [q, _, _, keys, _, table, row_start, position, ..] = &call.inputs[..] else {
        unreachable!("eight operands")
    };
    let task = Task::new(spec, call)?;
    let check = BatchCheck {
        rows: task.rows,
        position: Some(position),
        table: Some((table, keys.layout.shape[0])),
        // A window of 0 sees nothing, so its rows may overwrite all but each other, as in a window of 1.
        window: spec.window.map_or(0, |window| window.max(1)),
        run: if task.runs() > 1 { AttentionSpec::RUN } else { 0 },
        ..BatchCheck::default()
    };
    check_batch(call, row_start, &check)?;
    if task.runs() > 1 {
        return (0..task.runs()).try_for_each(|run| {
            task.write(run)?;
            task.attend(q.address, run, KvSplits { count: 1, by_position: false }, 0)
        });
    }
    let (mut queries, mut partial) = (q.address, call.scratch);
    if call.producer(0).is_some() {
        (queries, partial) = (call.scratch, call.scratch + rotated_bytes(&q.layout.shape) as u64);
    }
    match [0, 1].map(|i| call.producer(i)) {
        [Some(q), Some(k)] if rope_args(q).rotates_as(&rope_args(k)) => {
            task.enter(Some(q), Some(k), queries)?
        }
        [q, k] => {
            if q.is_some() {
                task.enter(q, None, queries)?;
            }
            match k {
                Some(_) => task.enter(None, k, queries)?,
                None => task.write(0)?,
            }
        }
    }
    if spec.window == Some(0) {
        return Ok(());
    }
    let splits = match task.until() {
        Some(_) => KvSplits { count: 1, by_position: false },
        None => splits(spec, &q.layout.shape, task.kv_heads, &table.layout.shape, call.mode),
    };
    task.attend(queries, 0, splits, partial)?;
    if splits.count == 1 {
        return Ok(());
    }
    let parameters = AttentionMerge {
        partial,
        row_start: row_start.address,
        position: position.address,
        sequences: task.sequences,
        total_rows: task.rows,
        splits: splits.count,
        by_position: usize::from(splits.by_position),
        y: call.outputs[0].address,
    };
    let shared_bytes = splits.count * size_of::<f32>();
    let geometry = Geometry { grid: (task.rows, task.heads, 1), block: (128, 1, 1), shared_bytes };
    let early = [row_start, position].iter().all(|operand| call.is_untouched(operand));
    let key = task.key(ATTENTION, "attention_merge").define("EARLY", u8::from(early));
    call.launch(&key, geometry, &parameters)
}

/// The rotation of queries or keys.
struct RopeArgs<'a> {
    heads: &'a BoundKernel<'a>,
    spec: &'a RopeSpec,
    /// The epsilon if each head is normed first. The norm's weight is the fourth operand of `heads`.
    norm_eps: Option<f32>,
}

fn rope_args<'a>(producer: &'a BoundKernel<'a>) -> RopeArgs<'a> {
    let (spec, norm_eps) = match &producer.kernel.op {
        Op::Rope(spec) => (spec, None),
        Op::NormRope { rope, eps } => (rope, Some(eps.get())),
        op => unreachable!("{} is not absorbed by attention", op.name()),
    };
    RopeArgs { heads: producer, spec, norm_eps }
}

impl RopeArgs<'_> {
    fn rotates_as(&self, other: &RopeArgs<'_>) -> bool {
        self.spec == other.spec && self.norm_eps.is_some() == other.norm_eps.is_some()
    }

    /// `RopeArgs` of the source.
    fn words(&self) -> [u64; 4] {
        let weight = self.norm_eps.map_or(0, |_| self.heads.inputs[3].address);
        let [positions, inverse] = [1, 2].map(|i| self.heads.inputs[i].address);
        [positions, inverse, weight, u64::from(self.norm_eps.unwrap_or(0.0).to_bits())]
    }
}

/// `Heads` of the source: address, and the distances of rows and heads.
fn heads(producer: &BoundKernel<'_>) -> [u64; 3] {
    let x = producer.strided(0);
    let HeadStrides { row, head } = match producer.producer(0) {
        Some(_) => x.head_strides(),
        None => HeadStrides { row: x.row_stride(2), head: x.width() },
    };
    [x.address, row as u64, head as u64]
}

/// The dimensions of a step.
struct Task<'a> {
    spec: &'a AttentionSpec,
    call: &'a Call<'a>,
    rows: usize,
    heads: usize,
    kv_heads: usize,
    size: usize,
    sequences: usize,
    pages: usize,
}

impl<'a> Task<'a> {
    fn new(spec: &'a AttentionSpec, call: &'a Call<'a>) -> Result<Task<'a>, ArrayError> {
        let (q, k, table) = (&call.inputs[0], &call.inputs[1], &call.inputs[5]);
        let &[rows, heads, size] = &q.layout.shape[..] else { unreachable!("three axes") };
        for operand in &call.inputs[..3] {
            call.expect_aligned(operand, 16)?;
            if !operand.row_stride(2).is_multiple_of(4) {
                return Err(call.misaligned(operand, 16));
            }
        }
        let (sequences, pages) = (table.layout.shape[0], table.width());
        Ok(Task { spec, call, rows, heads, kv_heads: k.layout.shape[1], size, sequences, pages })
    }

    fn key(&self, source: Source, entry: &'static str) -> KernelKey {
        let stride = |i: usize| self.call.inputs[i].row_stride(2);
        KernelKey::new(source, entry)
            .define("H", self.heads)
            .define("KV", self.kv_heads)
            .define("D", self.size)
            .define("Q_STRIDE", stride(0))
            .define("K_STRIDE", stride(1))
            .define("V_STRIDE", stride(2))
            .define("KV_F16", u8::from(self.call.inputs[3].dtype == DType::F16))
            .define("KV_BITS", self.coded_bits())
            .define("WINDOW", self.spec.window.unwrap_or(0))
            .define("RUNS", u8::from(self.runs() > 1))
            .define("UNTIL", u8::from(self.until().is_some()))
            .define("Y_HALF", u8::from(self.call.outputs[0].dtype == DType::F16))
            .define("SPLIT_STEP", self.wide_keys().unwrap_or(SPLIT_STEP))
    }

    /// The key of an entry of `attention_tensor.cu`. Only the decode kernel depends on warps, stages and `early`.
    fn tensor_key(&self, entry: &'static str, warps: usize, stages: usize, early: bool) -> KernelKey {
        let key = self.key(ATTENTION_TENSOR, entry).define("WARPS", warps);
        key.define("KV_STAGES", stages).define("EARLY", u8::from(early))
    }

    /// The last position that each row sees, if it may be after the row's own.
    fn until(&self) -> Option<&'a Bound<'a>> {
        self.call.inputs.get(8)
    }

    /// Launches that rows are cut into: a window's pages may be reused within a prompt. The rows of one sequence begin
    /// at any position, so two of them may already be in different runs.
    fn runs(&self) -> usize {
        match (self.spec.regime, self.spec.window) {
            (Regime::Prefill, Some(1..)) if self.until().is_none() => {
                self.rows.saturating_sub(1).div_ceil(AttentionSpec::RUN) + 1
            }
            _ => 1,
        }
    }

    /// Rows of a sequence in a launch, at most.
    fn run_rows(&self) -> usize {
        if self.runs() > 1 { AttentionSpec::RUN } else { self.rows }
    }

    fn kv_head(&self) -> KvHead {
        KvHead { size: self.size, bits: self.coded_bits() }
    }

    /// Bits of a value in coded pools, 0 in others.
    fn coded_bits(&self) -> usize {
        let keys = &self.call.inputs[3];
        match KvFormat::of(keys.dtype, keys.width(), self.size) {
            Some(KvFormat::Bits8) => 8,
            Some(KvFormat::Bits4) => 4,
            _ => 0,
        }
    }

    /// Rotates queries into `queries` and keys into their pages, and writes values to their pages.
    fn enter(
        &self,
        q: Option<&BoundKernel<'_>>,
        k: Option<&BoundKernel<'_>>,
        queries: u64,
    ) -> Result<(), ArrayError> {
        let Some(any) = q.or(k) else { unreachable!("queries or keys are rotated") };
        let [_, _, v, keys, values, table, row_start, position, ..] = &self.call.inputs[..] else {
            unreachable!("eight operands")
        };
        let (rotated_q, rotated_k) = (q.unwrap_or(any), k.unwrap_or(any));
        let parameters = AttentionPrepare {
            q: heads(rotated_q),
            k: heads(rotated_k),
            v: [v.address, v.row_stride(2) as u64, self.size as u64],
            rope_q: rope_args(rotated_q).words(),
            rope_k: rope_args(rotated_k).words(),
            rotated: queries,
            keys: keys.address,
            values: values.address,
            table: table.address,
            row_start: row_start.address,
            position: position.address,
            sequences: self.sequences,
            pages: self.pages,
            rows: self.rows,
        };
        let rotations = [q, k].into_iter().flatten().flat_map(|heads| &heads.inputs[1..3]);
        let early =
            rotations.chain([table, row_start, position]).all(|operand| self.call.is_untouched(operand));
        let taken =
            if q.is_some() { self.heads } else { 0 } + if k.is_some() { 2 * self.kv_heads } else { 0 };
        let (entry, blocks, early) = match self.spec.regime {
            Regime::Decode => ("attention_prepare", (self.rows * taken).div_ceil(4), early),
            Regime::Prefill => ("attention_prepare_rows", self.rows, false),
        };
        let key = KernelKey::new(ATTENTION_PREPARE, entry)
            .define("H", self.heads)
            .define("KV", self.kv_heads)
            .define("D", self.size)
            .define("KV_F16", u8::from(keys.dtype == DType::F16))
            // Without keys, nothing is written to pools.
            .define("KV_BITS", if k.is_some() { self.coded_bits() } else { 0 })
            .define("EARLY", u8::from(early))
            .define("QUERIES", u8::from(q.is_some()))
            .define("KEYS", u8::from(k.is_some()));
        let key = rotation(key, rope_args(any).spec, rope_args(any).norm_eps.is_some());
        self.call.launch(&key, Geometry::rows(blocks, 128), &parameters)
    }

    /// Writes the keys and values of a run to their pages.
    fn write(&self, run: usize) -> Result<(), ArrayError> {
        let [_, k, v, keys, values, table, row_start, position, ..] = &self.call.inputs[..] else {
            unreachable!("eight operands")
        };
        let parameters = KvWrite {
            k: k.address,
            v: v.address,
            keys: keys.address,
            values: values.address,
            table: table.address,
            row_start: row_start.address,
            position: position.address,
            sequences: self.sequences,
            pages: self.pages,
            run,
        };
        let rows = self.rows.min(self.sequences * self.run_rows());
        self.call.launch(&self.key(ATTENTION, "kv_write"), Geometry::rows(rows, 128), &parameters)
    }

    /// Attends the rows of a run: to y, or to `partial` if there are several splits.
    fn attend(&self, queries: u64, run: usize, splits: KvSplits, partial: u64) -> Result<(), ArrayError> {
        let [_, _, _, keys, values, table, row_start, position, ..] = &self.call.inputs[..] else {
            unreachable!("eight operands")
        };
        let parameters = Attend {
            q: queries,
            keys: keys.address,
            values: values.address,
            table: table.address,
            row_start: row_start.address,
            position: position.address,
            sequences: self.sequences,
            pages: self.pages,
            total_rows: self.rows,
            scale: self.spec.scale.get(),
            by_position: usize::from(splits.by_position),
            run,
            partial,
            y: self.call.outputs[0].address,
            until: self.until().map(|until| until.address),
        };
        let (key, geometry) = self.kernel(splits.count);
        self.call.launch(&key, geometry, &parameters)
    }

    /// Keys that the kernel for Hopper's instructions takes at a time, if that kernel runs.
    fn wide_keys(&self) -> Option<usize> {
        let takes = self.call.gpu.has_wgmma()
            && self.call.mode.precision == Precision::Fast
            && (self.call.inputs[3].dtype == DType::F16 || self.coded_bits() > 0)
            && (self.spec.regime, self.spec.window) == (Regime::Prefill, None);
        match self.size {
            64 | 128 if takes => Some(128),
            256 if takes => Some(64),
            _ => None,
        }
    }

    /// Whether earlier steps' keys and values, and all that says where they are, may be read before this kernel waits.
    fn keeps_keys(&self) -> bool {
        self.spec.window.is_none() && self.call.inputs[3..].iter().all(|x| self.call.is_untouched(x))
    }

    /// The walk through the sequences and key heads of a decode step, if there are many and their keys are not split.
    fn walk(&self, splits: usize) -> Option<Walk> {
        let device = &self.call.gpu.device;
        if self.spec.regime != Regime::Decode
            || splits > 1
            || !is_worthwhile(self.sequences, self.kv_heads, device.multiprocessors)
        {
            return None;
        }
        let units = (self.rows * self.heads / self.kv_heads).div_ceil(TILE) + self.sequences;
        // `Item` of the source has 12 bits for a key head and 16 for a unit.
        if self.kv_heads > 1 << 12 || units > 1 << 16 {
            return None;
        }
        let capacity =
            Capacity { multiprocessors: device.multiprocessors, shared_bytes_max: device.shared_bytes_max };
        Walk::of(&self.kv_head(), units * self.kv_heads, &capacity)
    }

    /// The kernel that attends.
    fn kernel(&self, splits: usize) -> (KernelKey, Geometry) {
        let group = self.heads / self.kv_heads;
        let tiles = |tile: usize| {
            let most = self.sequences * (self.run_rows() * group).div_ceil(tile);
            most.min((self.rows * group).div_ceil(tile) + self.sequences)
        };
        let head = self.kv_head();
        let tensor = self.call.mode.precision == Precision::Fast && self.call.inputs[3].dtype != DType::F32;
        let shared_max = self.call.gpu.device.shared_bytes_max;
        if let Some(keys) = self.wide_keys() {
            let geometry = Geometry {
                grid: (self.kv_heads, tiles(WIDE_TILE), splits),
                block: (256, 1, 1),
                shared_bytes: head.wide_bytes(keys),
            };
            let key = self.key(ATTENTION_WGMMA, "attention_prefill_wide");
            return (key.define("BN", keys), geometry);
        }
        if tensor && self.spec.regime == Regime::Prefill && head.prefill_bytes() <= shared_max {
            let geometry = Geometry {
                grid: (self.kv_heads, tiles(4 * TILE), splits),
                block: (128, 1, 1),
                shared_bytes: head.prefill_bytes(),
            };
            return (self.tensor_key("attention_prefill", 8, 1, false), geometry);
        }
        let decodes = tensor && self.until().is_none();
        if let Some(walk) = self.walk(splits).filter(|_| decodes) {
            let geometry = Geometry {
                grid: (walk.blocks * self.call.gpu.device.multiprocessors, 1, 1),
                block: (32 * walk.warps, 1, 1),
                shared_bytes: walk.shared_bytes,
            };
            let key = walk.constants(self.key(ATTENTION_DECODE_PERSISTENT, "attention_decode_persistent"));
            return (key.define("EARLY", u8::from(self.keeps_keys())), geometry);
        }
        // A block that is alone on its multiprocessor keeps more keys under way.
        let few = self.sequences * self.kv_heads * splits <= BLOCKS_WANTED;
        let several = few && self.pages * AttentionSpec::PAGE > splits * 8 * TILE;
        let cuts = [(8, 2), (8, 1), (4, 1)].into_iter().filter(|&(_, stages)| several || stages == 1);
        let cut = cuts.into_iter().find(|&(warps, stages)| head.decode_bytes(warps, stages) <= shared_max);
        if let (true, Regime::Decode, Some((warps, stages))) = (decodes, self.spec.regime, cut) {
            // One tile holds the pairs of any sequence if it holds those of all.
            let single = self.rows * group <= TILE;
            let units = if single { self.sequences } else { tiles(TILE) };
            let geometry = Geometry {
                grid: (units, self.kv_heads, splits),
                block: (32 * warps, 1, 1),
                shared_bytes: head.decode_bytes(warps, stages),
            };
            let early = single && self.keeps_keys();
            return (self.tensor_key("attention_decode", warps, stages, early), geometry);
        }
        let geometry = Geometry {
            grid: (tiles(TILE), self.kv_heads, splits),
            block: (128, 1, 1),
            shared_bytes: head.exact_bytes(),
        };
        (self.key(ATTENTION, "attention"), geometry)
    }
}
