//! Operations with memory: convolution windows, gated-delta states and KV pages.
//!
//! State lives in separate arrays, allocated once and written in place. An operation takes them as inputs and mutates
//! them. Operations on the same state that are evaluated together run in the order in which they were built. All that
//! changes from step to step (rows of each sequence, positions, page tables) is data in small arrays. So a prepared
//! program is run again without being rebuilt.
//!
//! # Rows that may be taken back
//! A sequence that speculates does not know yet which rows of a step it will keep. The step leaves them *open*
//! ([`RowLog::KeepOpen`]). Convolution and gated delta rule compute open rows as usual, but write the data needed to
//! commit them to the log, and do not change window and state. The next step with a log reads from [`Batch::accepted`]
//! how many of a sequence's open rows are kept. It commits these first rows in order, drops the others, and continues
//! with its own rows. Taking rows back lowers a count: no state is copied and no row is run twice. Keys and values of
//! dropped rows are overwritten by the later rows at the same positions.
//!
//! Window, state and outputs have the same bits as in a step that commits the rows at once.

use serde::{Deserialize, Serialize};

use super::fast::expect_f32;
use super::{KvFormat, Op, Real};
use crate::error::{expect_dtype, expect_shape, wrong_shape};
use crate::{Array, ArrayError, DType, Result, Shape};

/// The two ways in which rows are computed; see the crate documentation on regimes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Regime {
    /// Rows on the [`PREFILL_GRID`](crate::PREFILL_GRID), anchored at position 0.
    Prefill,
    /// Rows of running sequences and their drafts.
    Decode,
}

/// How a step of a layer with memory uses the log of rows that may be taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RowLog {
    /// Reads and writes no log: no row may be open. Every row is committed.
    None,
    /// Commits the accepted open rows of the step before, then its own rows. No row is open afterwards.
    Commit,
    /// Commits the accepted open rows of the step before, and leaves its own rows open. Each sequence may have as many
    /// open rows as the log has records for a slot. Decode regime only.
    KeepOpen,
}

/// The sequences of a step. All arrays are u32. The host fills them before each run; kernels read them from memory.
///
/// Rows from `row_start[B]` on belong to no sequence and are not computed. A sequence may have no rows; a step with a
/// log still commits its accepted rows. A sequence with neither may have the slot [`Batch::NO_SLOT`]: nothing of it is
/// read or written. A step with fewer sequences is padded with these.
#[derive(Clone, Debug)]
pub struct Batch {
    /// `[B + 1]`: rows `row_start[b]..row_start[b + 1]` belong to sequence `b`.
    pub row_start: Array,
    /// `[B]`: the slot that holds the recurrent state of sequence `b`.
    pub slot: Array,
    /// `[B]`: position of the first row of sequence `b`.
    pub position: Array,
    /// `[B, P]`: pages of sequence `b` in order.
    pub table: Array,
    /// `[B]`: how many open rows of sequence `b`, from the first on, to commit before this step's rows; 0 if none is
    /// open. Read only with a [`RowLog`]. The same for all layers of a step.
    pub accepted: Array,
}

/// Causal depthwise convolution of width `K` with SiLU:
/// `y[t, c] = silu(sum_j w[j, c] x[t - K + 1 + j, c])`; rows before the step come from the window.
///
/// Inputs: x f32 `[T, C]`; w f32 `[K, C]`; window f32 `[slots, K - 1, C]`, oldest row first, mutated; with a log also
/// open rows f32 `[slots, R, C]`, mutated; row_start; slot; with a log also accepted.
///
/// With a log and `n = accepted[b]`, the window of sequence `b` first becomes the last `K - 1` rows of the window
/// followed by open rows `0..n`. [`RowLog::KeepOpen`] then does not change the window further, and writes row `i` of
/// the sequence's `x` to its open row `i`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ConvSpec {
    /// `K`.
    pub width: usize,
    /// Whether rows may be taken back.
    pub log: RowLog,
}

impl ConvSpec {
    pub(crate) fn state(&self) -> std::ops::Range<usize> {
        if self.log == RowLog::None { 2..3 } else { 2..4 }
    }
}

/// The gated delta rule, per sequence and value head `h` with key head `h / (Hv / Hk)`:
///
/// `q, k` divided by `sqrt(sum of squares + 1e-6)`, `q` by `sqrt(Dk)`; `beta = sigmoid(b)`;
/// `g = -exp(a_log) softplus(a + dt_bias)`; `S *= e^g`; `u = beta (v - k S)`; `S += k^T u`; `y = q S`.
///
/// Inputs: qkv f32 `[T, 2 Hk Dk + Hv Dv]`; a, b f32 `[T, Hv]`; a_log, dt_bias f32 `[Hv]`;
/// state f32 or f16 `[slots, Hv, Dk, Dv]`, mutated; with a log also records f32 `[slots, R, Hk Dk + Hv Dv + Hv]`,
/// mutated; row_start; slot; position; with a log also accepted. Output f32 `[T, Hv, Dv]`.
/// In the prefill regime rows are computed in chunks of 64 (WY form), and there is no log.
///
/// An f16 state takes half of the memory and traffic. All arithmetic stays in f32; `S` is rounded to f16 (to nearest,
/// ties to even, magnitudes at most 65,504) after each row of the decode regime, and in the prefill regime after each
/// row or each chunk, as the backend computes them. So the bits do not depend on how rows are divided into steps.
///
/// A record holds the data to repeat one row's update of the state: the normalised `k` of all key heads, then `u` of
/// all value heads, then `g` of all value heads. With a log and `n = accepted[b]`, the state of sequence `b` first
/// takes the updates of its records `0..n` in order: `S = e^g S + k^T u`. They use the same operations as the row's own
/// step, so the bits are equal. [`RowLog::KeepOpen`] then computes the step's rows from there without writing the
/// state, and writes row `i` of a sequence to its record `i`. All records `0..n` are read before any is overwritten.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GatedDeltaSpec {
    /// `Hk`.
    pub key_heads: usize,
    /// `Hv`, a multiple of `Hk`.
    pub value_heads: usize,
    /// `Dk`.
    pub key_dim: usize,
    /// `Dv`.
    pub value_dim: usize,
    /// How rows are computed.
    pub regime: Regime,
    /// Whether rows may be taken back.
    pub log: RowLog,
}

impl GatedDeltaSpec {
    pub(crate) fn state(&self) -> std::ops::Range<usize> {
        if self.log == RowLog::None { 5..6 } else { 5..7 }
    }

    /// Columns of qkv.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Values of a record of the log.
    pub fn record_len(&self) -> usize {
        self.key_heads * self.key_dim + self.value_heads * (self.value_dim + 1)
    }
}

/// Causal attention with grouped heads over paged keys and values. The new rows are written to their pages first.
///
/// With a window, the table may name the same page for positions that are more than the window apart. In the prefill
/// regime rows are written and attended in runs that end at multiples of [`AttentionSpec::RUN`], so the next run may
/// overwrite pages that have left the window of this run. In the decode regime, with `until`, and with a window of 0,
/// all rows are written before any is attended: the positions from the first row's window to the last row must not
/// share a page.
///
/// Inputs: q f32 `[T, H, D]`; k, v f32 `[T, KV, D]`; key pool and value pool f32 or f16 `[pages, KV, 256, D]`,
/// mutated; table; row_start; position; for [`Array::attention_until`] also until u32 `[T]`. Output f32 `[T, H, D]`.
/// `D` is a multiple of 16 and at most 512.
///
/// With `until`, row `t` sees the keys of its sequence up to position `max(position, until[t])`, if the step writes
/// them. Prefill regime only.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AttentionSpec {
    /// Factor on `q . k`, finite and above 0.
    pub scale: Real,
    /// Tokens that a row sees, itself included; `None` for all before it. With `Some(0)` the step writes rows for later
    /// steps, and rows see nothing: the output is undefined and `q` is not read.
    pub window: Option<usize>,
    /// How rows are computed.
    pub regime: Regime,
}

impl AttentionSpec {
    pub(crate) const STATE: std::ops::Range<usize> = 3..5;
    /// Tokens of a page.
    pub const PAGE: usize = 256;
    /// Head sizes are multiples of this.
    pub const HEAD_UNIT: usize = 16;
    /// Largest head size.
    pub const HEAD_MAX: usize = 512;
    /// Rows of prompts with a window are cut into runs at multiples of this position.
    pub const RUN: usize = 64;
}

/// The convolution's memory of one layer.
#[derive(Clone, Debug)]
pub struct ConvWindow {
    /// Rows before the next one, oldest first: f32 `[slots, K - 1, C]`.
    pub rows: Array,
    /// Rows that may be taken back: f32 `[slots, R, C]`.
    pub open: Option<Array>,
}

/// Keys and values of new rows, each f32 `[T, KV, D]`.
#[derive(Clone, Copy, Debug)]
pub struct KvRows<'a> {
    /// The keys.
    pub keys: &'a Array,
    /// The values.
    pub values: &'a Array,
}

/// The gated delta rule's memory of one layer.
#[derive(Clone, Debug)]
pub struct DeltaState {
    /// f32 or f16 `[slots, Hv, Dk, Dv]`.
    pub state: Array,
    /// Records of rows that may be taken back: f32 `[slots, R, Hk Dk + Hv Dv + Hv]`.
    pub records: Option<Array>,
}

/// Keys and values of one layer, each `[pages, KV, 256, W]`. The [`KvFormat`] gives their type and `W`, the elements
/// for one token and head of `D` values. Each backend chooses the order of the elements within a page.
#[derive(Clone, Debug)]
pub struct KvPool {
    /// Keys.
    pub keys: Array,
    /// Values.
    pub values: Array,
}

impl Batch {
    /// The slot of a padding sequence.
    pub const NO_SLOT: u32 = u32::MAX;
}

impl Array {
    /// Causal depthwise convolution with SiLU; see [`ConvSpec`]. `window` is mutated.
    ///
    /// # Errors
    /// If shapes or types differ from the specification, or `log` asks for open rows that the window does not have.
    pub fn causal_conv(
        &self,
        weight: &Array,
        window: &ConvWindow,
        batch: &Batch,
        log: RowLog,
    ) -> Result<Array> {
        const OP: &str = "causal_conv";
        expect_f32(OP, &[self, weight, &window.rows])?;
        let &[_, channels] = &self.shape()[..] else {
            return Err(wrong_shape(OP, "x", "(T, C)", self.shape()));
        };
        let &[width, _] = &weight.shape()[..] else {
            return Err(wrong_shape(OP, "weight", "(K, C)", weight.shape()));
        };
        expect_shape(OP, "weight", &[width.max(1), channels], weight.shape())?;
        let slots = extent(&window.rows, 0);
        expect_shape(OP, "window", &[slots, width.saturating_sub(1), channels], window.rows.shape())?;
        let batch = checked(OP, batch)?;
        let mut inputs = vec![self, weight, &window.rows];
        let open = expect_log(OP, log, window.open.as_ref(), slots, channels)?;
        inputs.extend(open);
        inputs.extend([&batch.row_start, &batch.slot]);
        inputs.extend(open.map(|_| &batch.accepted));
        Array::build(Op::CausalConv(ConvSpec { width, log }), &inputs, self.shape().clone(), DType::F32)
    }

    /// The gated delta rule; see [`GatedDeltaSpec`]. This array is qkv after the convolution; `state` is mutated.
    ///
    /// # Errors
    /// If shapes or types differ from the specification, or it needs a log that the state does not have.
    #[allow(clippy::too_many_arguments)] // the operands of the rule
    pub fn gated_delta(
        &self,
        a: &Array,
        b: &Array,
        a_log: &Array,
        dt_bias: &Array,
        state: &DeltaState,
        batch: &Batch,
        spec: GatedDeltaSpec,
    ) -> Result<Array> {
        const OP: &str = "gated_delta";
        expect_f32(OP, &[self, a, b, a_log, dt_bias])?;
        let is_right = matches!(state.state.dtype(), DType::F32 | DType::F16);
        expect_dtype(OP, "state", is_right, "f32 or f16", state.state.dtype())?;
        if spec.key_heads == 0 || !spec.value_heads.is_multiple_of(spec.key_heads) {
            let reason = format!(
                "{} value heads are not a multiple of {} key heads",
                spec.value_heads, spec.key_heads
            );
            return Err(ArrayError::Argument { op: OP, reason });
        }
        let (tokens, hv) = (extent(self, 0), spec.value_heads);
        expect_shape(OP, "qkv", &[tokens, spec.channels()], self.shape())?;
        expect_shape(OP, "a", &[tokens, hv], a.shape())?;
        expect_shape(OP, "b", &[tokens, hv], b.shape())?;
        expect_shape(OP, "a_log", &[hv], a_log.shape())?;
        expect_shape(OP, "dt_bias", &[hv], dt_bias.shape())?;
        let slots = extent(&state.state, 0);
        expect_shape(OP, "state", &[slots, hv, spec.key_dim, spec.value_dim], state.state.shape())?;
        if spec.regime == Regime::Prefill && spec.log != RowLog::None {
            let reason = "prefill commits its rows: it takes no log".into();
            return Err(ArrayError::Argument { op: OP, reason });
        }
        let batch = checked(OP, batch)?;
        let shape = Shape::from([tokens, hv, spec.value_dim]);
        let records = expect_log(OP, spec.log, state.records.as_ref(), slots, spec.record_len())?;
        let mut inputs = vec![self, a, b, a_log, dt_bias, &state.state];
        inputs.extend(records);
        inputs.extend([&batch.row_start, &batch.slot, &batch.position]);
        inputs.extend(records.map(|_| &batch.accepted));
        Array::build(Op::GatedDelta(spec), &inputs, shape, DType::F32)
    }

    /// Writes k and v to their pages, then attends; see [`AttentionSpec`]. This array is q; the pool is mutated.
    ///
    /// # Errors
    /// If shapes or types differ from the specification, or the scale is not finite and above 0.
    pub fn paged_attention(
        &self,
        k: &Array,
        v: &Array,
        pool: &KvPool,
        batch: &Batch,
        spec: AttentionSpec,
    ) -> Result<Array> {
        self.attend(KvRows { keys: k, values: v }, pool, batch, None, spec)
    }

    /// As [`Array::paged_attention`] in the prefill regime, but each row also sees later keys up to its own limit. The
    /// tokens of a picture see each other this way. See [`AttentionSpec`].
    ///
    /// # Errors
    /// As [`Array::paged_attention`]; in the decode regime; if `until` is not u32 `[T]`.
    pub fn attention_until(
        &self,
        rows: KvRows<'_>,
        pool: &KvPool,
        batch: &Batch,
        until: &Array,
        spec: AttentionSpec,
    ) -> Result<Array> {
        const OP: &str = "attention_until";
        if spec.regime != Regime::Prefill || spec.window == Some(0) {
            let reason =
                "rows that see later keys are rows of the prefill regime, with a window or without".into();
            return Err(ArrayError::Argument { op: OP, reason });
        }
        expect_dtype(OP, "until", until.dtype() == DType::U32, "u32", until.dtype())?;
        expect_shape(OP, "until", &[extent(self, 0)], until.shape())?;
        self.attend(rows, pool, batch, Some(until), spec)
    }

    fn attend(
        &self,
        rows: KvRows<'_>,
        pool: &KvPool,
        batch: &Batch,
        until: Option<&Array>,
        spec: AttentionSpec,
    ) -> Result<Array> {
        const OP: &str = "paged_attention";
        let KvRows { keys: k, values: v } = rows;
        expect_f32(OP, &[self, k, v])?;
        let &[tokens, heads, size] = &self.shape()[..] else {
            return Err(wrong_shape(OP, "q", "(T, H, D)", self.shape()));
        };
        let (kv_heads, scale) = (extent(k, 1), spec.scale.get());
        if !(scale.is_finite() && scale > 0.0) {
            let reason = format!("a scale of {scale}: expected a finite number above 0");
            return Err(ArrayError::Argument { op: OP, reason });
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            let reason = format!("{heads} query heads are not a multiple of {kv_heads} key-value heads");
            return Err(ArrayError::Argument { op: OP, reason });
        }
        if size == 0 || size > AttentionSpec::HEAD_MAX || !size.is_multiple_of(AttentionSpec::HEAD_UNIT) {
            let (unit, max) = (AttentionSpec::HEAD_UNIT, AttentionSpec::HEAD_MAX);
            let reason = format!("heads of {size}: expected a multiple of {unit}, at most {max}");
            return Err(ArrayError::Argument { op: OP, reason });
        }
        expect_shape(OP, "k", &[tokens, kv_heads, size], k.shape())?;
        expect_shape(OP, "v", &[tokens, kv_heads, size], v.shape())?;
        for (operand, array) in [("key pool", &pool.keys), ("value pool", &pool.values)] {
            let elements = extent(&pool.keys, 3);
            expect_shape(
                OP,
                operand,
                &[extent(&pool.keys, 0), kv_heads, AttentionSpec::PAGE, elements],
                array.shape(),
            )?;
            let format = KvFormat::of(array.dtype(), elements, size);
            if format.is_none() || array.dtype() != pool.keys.dtype() {
                let (dtype, shape) = (array.dtype(), array.shape());
                return Err(ArrayError::Argument {
                    op: OP,
                    reason: format!(
                        "the {operand} is {dtype} {shape}: for heads of {size}, expected f32 or f16 with {size} elements for \
                         each token, or u8 with those of 8 or 4 bits; both pools alike"
                    ),
                });
            }
        }
        let batch = checked(OP, batch)?;
        let mut inputs =
            vec![self, k, v, &pool.keys, &pool.values, &batch.table, &batch.row_start, &batch.position];
        inputs.extend(until);
        Array::build(Op::PagedAttention(spec), &inputs, self.shape().clone(), DType::F32)
    }
}

fn extent(array: &Array, axis: usize) -> usize {
    array.shape().get(axis).copied().unwrap_or(0)
}

/// The log that the specification needs: f32 `[slots, R, width]`.
fn expect_log<'a>(
    op: &'static str,
    log: RowLog,
    array: Option<&'a Array>,
    slots: usize,
    width: usize,
) -> Result<Option<&'a Array>> {
    let array = match (log, array) {
        (RowLog::None, _) => return Ok(None),
        (_, Some(array)) => array,
        (_, None) => {
            let reason = "no log was allocated, so no row may be left open".into();
            return Err(ArrayError::Argument { op, reason });
        }
    };
    expect_f32(op, &[array])?;
    expect_shape(op, "log", &[slots, extent(array, 1), width], array.shape())?;
    Ok(Some(array))
}

/// The batch, after a check that its arrays agree.
fn checked<'a>(op: &'static str, batch: &'a Batch) -> Result<&'a Batch> {
    let sequences = extent(&batch.slot, 0);
    expect_shape(op, "batch.row_start", &[sequences + 1], batch.row_start.shape())?;
    expect_shape(op, "batch.slot", &[sequences], batch.slot.shape())?;
    expect_shape(op, "batch.position", &[sequences], batch.position.shape())?;
    expect_shape(op, "batch.accepted", &[sequences], batch.accepted.shape())?;
    expect_shape(op, "batch.table", &[sequences, extent(&batch.table, 1)], batch.table.shape())?;
    for array in [&batch.row_start, &batch.slot, &batch.position, &batch.table, &batch.accepted] {
        expect_dtype(op, "batch", array.dtype() == DType::U32, "u32", array.dtype())?;
    }
    Ok(batch)
}
