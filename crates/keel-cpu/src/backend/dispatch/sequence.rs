//! Operations with state: convolution, gated delta rule, attention.

use std::ops::Range;

use super::{Bound, Call, batch};
use crate::kernels::attention::{
    Attention, CodedPages, CodedPagesMut, KvElement, KvPages, KvPagesMut, KvRead, KvWrite, PageTable,
    attention_decode, attention_prefill, decode_workspace_len, kv_write, prefill_workspace_len,
};
use crate::kernels::causal_conv::{CausalConv, ConvLog, causal_conv};
use crate::kernels::gated_delta::{
    DeltaLog, GatedDelta, GatedDeltaInputs, GatedDeltaShape, StateElement, gated_delta,
    gated_delta_workspace_len,
};
use crate::kernels::gated_delta_chunked::{CHUNK, gated_delta_chunked, gated_delta_chunked_workspace_len};
use crate::kernels::generic::scalar::Plain;
use crate::kernels::rows::{Batch, Rows};
use crate::pool::Worker;
use crate::simd::LANES;
use half::f16;
use keel_array::{
    ArrayError, AttentionSpec, ConvSpec, DType, GatedDeltaSpec, Kernel, KvFormat, Op, Regime, RowLog,
};

pub(super) fn run(call: &Call<'_>, worker: &Worker<'_>) -> Result<(), ArrayError> {
    if call.inputs[0].len() == 0 && !call.kernel.op.commits_open_rows() {
        return Ok(());
    }
    let inputs = call.inputs;
    let checked = call.kernel.op.check_states(inputs.len(), |i, j| inputs[i].overlaps(&inputs[j]));
    checked.map_err(|reason| call.error(reason))?;
    let outcome = match &call.kernel.op {
        Op::CausalConv(spec) => conv(spec, call, worker),
        Op::GatedDelta(spec) if call.inputs[5].dtype == DType::F16 => delta::<f16>(spec, call, worker),
        Op::GatedDelta(spec) => delta::<f32>(spec, call, worker),
        Op::PagedAttention(spec) => match kv_format(call.kernel) {
            KvFormat::F32 => plain_attention::<f32>(spec, call, worker),
            KvFormat::F16 => plain_attention::<f16>(spec, call, worker),
            KvFormat::Bits8 => coded_attention::<8>(spec, call, worker),
            KvFormat::Bits4 => coded_attention::<4>(spec, call, worker),
        },
        op => unreachable!("{} has no memory", op.name()),
    };
    outcome.map_err(|reason| call.error(reason))
}

pub(super) fn workspace_bytes(kernel: &Kernel, workers: usize) -> usize {
    let shape = |i: usize| &kernel.inputs[i].layout.shape;
    let values = match &kernel.op {
        Op::GatedDelta(spec) => match spec.regime {
            Regime::Prefill => gated_delta_chunked_workspace_len(&delta_shape(spec), workers),
            Regime::Decode => gated_delta_workspace_len(&delta_shape(spec), workers),
        },
        Op::PagedAttention(spec) => {
            let (rows, heads, size) = (shape(0)[0], shape(0)[1], shape(0)[2]);
            let page_scratch = match kv_format(kernel) {
                KvFormat::F32 | KvFormat::F16 => 0,
                KvFormat::Bits8 => 2 * CodedPages::<8>::scratch_len(size),
                KvFormat::Bits4 => 2 * CodedPages::<4>::scratch_len(size),
            };
            let own = match spec.regime {
                Regime::Prefill => prefill_workspace_len(workers, size),
                Regime::Decode => decode_workspace_len(rows, heads, size, shape(5)[1]),
            };
            own + workers * page_scratch
        }
        _ => 0,
    };
    values * size_of::<f32>()
}

fn conv(spec: &ConvSpec, call: &Call<'_>, worker: &Worker<'_>) -> Result<(), String> {
    let (x, weight, window, row_start, slot, log) = match call.inputs {
        [x, weight, window, row_start, slot] => (x, weight, window, row_start, slot, None),
        [x, weight, window, open, row_start, slot, accepted] => {
            (x, weight, window, row_start, slot, Some((open, accepted)))
        }
        _ => unreachable!("five operands, seven with a log"),
    };
    // The convolution reads no positions. The slots take their place: there is one for each sequence.
    let rows = batch::batch(row_start, slot.values(), x.layout.shape[0])?;
    let accepted = log.map(|(_, accepted)| accepted.values::<u32>());
    let slots = batch::slots(slot, window.layout.shape[0], &rows, accepted)?;
    let task = CausalConv {
        x: x.rows(1),
        weight: weight.values(),
        batch: rows,
        slot: slots,
        window: window.shared(),
        log: match log {
            None => None,
            Some((open, accepted)) => {
                let capacity = open.layout.shape[1];
                let accepted = accepted_rows(accepted, capacity, spec.log, &rows)?;
                Some(ConvLog {
                    rows: open.shared(),
                    capacity,
                    accepted,
                    keep_open: spec.log == RowLog::KeepOpen,
                })
            }
        },
        y: call.outputs[0].rows_mut(1),
    };
    causal_conv(&task, worker);
    Ok(())
}

/// The number of open rows to commit. Checks that the log holds that many and has room for the rows of this step.
fn accepted_rows<'a>(
    accepted: &Bound<'a>,
    capacity: usize,
    log: RowLog,
    batch: &Batch<'_>,
) -> Result<&'a [u32], String> {
    let accepted: &[u32] = accepted.values();
    if let Some((b, n)) = accepted.iter().enumerate().find(|(_, n)| **n as usize > capacity) {
        return Err(format!("sequence {b} accepted {n} rows, and its log holds {capacity}"));
    }
    if log == RowLog::KeepOpen && batch.most_rows() > capacity {
        return Err(format!("{} rows of a sequence are to be kept open in {capacity}", batch.most_rows()));
    }
    Ok(accepted)
}

fn delta_shape(spec: &GatedDeltaSpec) -> GatedDeltaShape {
    GatedDeltaShape {
        key_heads: spec.key_heads,
        value_heads: spec.value_heads,
        key_size: spec.key_dim,
        value_size: spec.value_dim,
    }
}

fn delta<E: StateElement>(spec: &GatedDeltaSpec, call: &Call<'_>, worker: &Worker<'_>) -> Result<(), String> {
    let [qkv, a, b, a_log, dt_bias, state, rest @ ..] = call.inputs else { unreachable!("nine operands") };
    let (row_start, slot, position, log) = match rest {
        [row_start, slot, position] => (row_start, slot, position, None),
        [records, row_start, slot, position, accepted] => {
            (row_start, slot, position, Some((records, accepted)))
        }
        _ => unreachable!("nine operands, eleven with a log"),
    };
    let rows = batch::batch(row_start, position.values(), qkv.layout.shape[0])?;
    let accepted = log.map(|(_, accepted)| accepted.values::<u32>());
    let slot = batch::slots(slot, state.layout.shape[0], &rows, accepted)?;
    let log = match log {
        None => None,
        Some((records, accepted)) => {
            let capacity = records.layout.shape[1];
            let accepted = accepted_rows(accepted, capacity, spec.log, &rows)?;
            let keep_open = spec.log == RowLog::KeepOpen;
            Some(DeltaLog { records: records.shared(), capacity, accepted, keep_open })
        }
    };
    let task = GatedDelta {
        inputs: GatedDeltaInputs {
            shape: delta_shape(spec),
            qkv: qkv.rows(1),
            a: a.rows(1),
            b: b.rows(1),
            a_log: a_log.values(),
            dt_bias: dt_bias.values(),
        },
        batch: rows,
        slot,
        state: state.shared::<E>(),
        log,
        y: call.outputs[0].rows_mut(2),
    };
    match spec.regime {
        Regime::Decode => gated_delta(&task, call.scratch(), worker),
        Regime::Prefill => {
            let astray = |b: &usize| {
                !rows.rows_of(*b).is_empty() && !(rows.position[*b] as usize).is_multiple_of(CHUNK)
            };
            if let Some(b) = (0..rows.sequences()).find(astray) {
                let position = rows.position[b];
                return Err(format!(
                    "sequence {b} starts at {position}; prefill starts at multiples of {CHUNK}"
                ));
            }
            gated_delta_chunked(&task, call.scratch(), worker);
        }
    }
    Ok(())
}

/// The form of the KV pools of a `PagedAttention`.
fn kv_format(kernel: &Kernel) -> KvFormat {
    let (q, keys) = (&kernel.inputs[0], &kernel.inputs[3]);
    let format = KvFormat::of(keys.dtype, keys.layout.shape[3], q.layout.shape[2]);
    format.unwrap_or_else(|| unreachable!("the operation was built with pools of such a form"))
}

fn plain_attention<E: KvElement + Plain>(
    spec: &AttentionSpec,
    call: &Call<'_>,
    worker: &Worker<'_>,
) -> Result<(), String> {
    let [q, k, _, keys, values, ..] = call.inputs else { unreachable!("eight operands") };
    let (kv_heads, head_dim) = (k.layout.shape[1], q.width());
    let read = KvPages { keys: keys.values::<E>(), values: values.values::<E>(), kv_heads, head_dim };
    let write = KvPagesMut { keys: keys.shared::<E>(), values: values.shared::<E>(), kv_heads, head_dim };
    attention(spec, read, write, call, worker)
}

fn coded_attention<const BITS: usize>(
    spec: &AttentionSpec,
    call: &Call<'_>,
    worker: &Worker<'_>,
) -> Result<(), String> {
    let [q, k, _, keys, values, ..] = call.inputs else { unreachable!("eight operands") };
    let (kv_heads, head_dim) = (k.layout.shape[1], q.width());
    let read = CodedPages::<BITS> { keys: keys.values(), values: values.values(), kv_heads, head_dim };
    let write = CodedPagesMut::<BITS> { keys: keys.shared(), values: values.shared(), kv_heads, head_dim };
    attention(spec, read, write, call, worker)
}

/// Refuses heads that do not fill whole vectors.
pub(super) fn supports_heads(size: usize) -> Result<(), String> {
    if size.is_multiple_of(LANES) {
        Ok(())
    } else {
        Err(format!("heads of {size}; expected a multiple of {LANES}"))
    }
}

fn attention<P: KvRead>(
    spec: &AttentionSpec,
    pages: P,
    written: impl KvWrite,
    call: &Call<'_>,
    worker: &Worker<'_>,
) -> Result<(), String> {
    let [q, k, v, keys, _, table, row_start, position, until @ ..] = call.inputs else {
        unreachable!("eight operands, nine where rows see later keys")
    };
    let rows = batch::batch(row_start, position.values(), q.layout.shape[0])?;
    let is_cut = matches!((spec.regime, spec.window), (Regime::Prefill, Some(1..))) && until.is_empty();
    let run = if is_cut { AttentionSpec::RUN } else { usize::MAX };
    let table = batch::page_table(table, &rows, spec.window, run, keys.layout.shape[0])?;
    if spec.window == Some(0) {
        kv_write(k.rows(2), v.rows(2), rows, table, written, worker);
        return Ok(());
    }
    let whole = Attention {
        q: q.rows(2),
        batch: rows,
        table,
        pages,
        scale: spec.scale.get(),
        window: spec.window,
        until: until.first().map(|until| until.values()),
        y: call.outputs[0].rows_mut(2),
    };
    let write_and_attend = |task: &Attention<'_, P>, k: Rows<'_>, v: Rows<'_>| {
        kv_write(k, v, task.batch, task.table, written, worker);
        worker.barrier();
        match spec.regime {
            Regime::Prefill => attention_prefill(task, call.scratch(), worker),
            Regime::Decode => attention_decode(task, call.scratch(), worker),
        }
    };
    let (k, v) = (k.rows(2), v.rows(2));
    let within_runs = (0..rows.sequences()).all(|b| runs(&rows, b).count() <= 1);
    if !is_cut || within_runs {
        write_and_attend(&whole, k, v);
        return Ok(());
    }
    for b in 0..rows.sequences() {
        for (run, position) in runs(&rows, b) {
            let batch = Batch { row_start: &[0, run.len() as u32], position: &[position] };
            let table = PageTable { pages: &table.pages[b * table.stride..], ..table };
            let (q, y) = (whole.q.range(run.clone()), whole.y.range(run.clone()));
            write_and_attend(&Attention { q, batch, table, y, ..whole }, k.range(run.clone()), v.range(run));
            // The next run may write to pages that have left the window of this one.
            worker.barrier();
        }
    }
    Ok(())
}

/// The rows of sequence `b`, cut at positions that are multiples of [`AttentionSpec::RUN`], with the position of the
/// first row of each run.
fn runs(rows: &Batch<'_>, b: usize) -> impl Iterator<Item = (Range<usize>, u32)> {
    let (mut rest, mut position) = (rows.rows_of(b), rows.position[b] as usize);
    std::iter::from_fn(move || {
        let len = rest.len().min(AttentionSpec::RUN - position % AttentionSpec::RUN);
        let run = (rest.start..rest.start + len, position as u32);
        (rest.start, position) = (rest.start + len, position + len);
        (len > 0).then_some(run)
    })
}
