//! The gated delta rule and attention.

use super::{Bench, Floor};
use keel_array::{
    Array, AttentionSpec, Batch, DType, DeltaState, GatedDeltaSpec, KvFormat, KvPool, PREFILL_GRID, Regime,
    Result, RowLog,
};

/// Positions of a page.
const PAGE: usize = 256;

pub fn time(bench: &Bench) -> Result<()> {
    for sequences in [1, 8, 64] {
        recurrent_step(bench, sequences)?;
    }
    for rows in [4096, 32_768] {
        chunked(bench, rows)?;
    }
    let (qwen3_8b, qwen3_5_4b) =
        (Heads { query: 32, kv: 8, size: 128 }, Heads { query: 16, kv: 4, size: 256 });
    for heads in [qwen3_8b, qwen3_5_4b] {
        for (context, sequences) in [(4096, 1), (32_768, 1), (4096, 16), (4096, 128), (512, 256)] {
            for format in [KvFormat::F16, KvFormat::Bits8, KvFormat::Bits4] {
                attention_step(bench, heads, format, context, sequences)?;
            }
        }
        for (rows, before) in [(4096, 0), (16_384, 0), (128, 32_768)] {
            for format in [KvFormat::F16, KvFormat::Bits8, KvFormat::Bits4] {
                attention_of_a_prompt(bench, heads, format, rows, before)?;
            }
        }
    }
    Ok(())
}

const KEY_HEADS: usize = 16;
const VALUE_HEADS: usize = 32;
const HEAD: usize = 128;

/// The inputs of the gated delta rule, except the state.
struct DeltaInputs {
    qkv: Array,
    a: Array,
    b: Array,
    a_log: Array,
    dt_bias: Array,
    batch: Batch,
}

impl DeltaInputs {
    fn random(bench: &Bench, sequences: usize, rows: usize) -> Result<DeltaInputs> {
        let tokens = sequences * rows;
        Ok(DeltaInputs {
            qkv: bench.random(&[tokens, 2 * KEY_HEADS * HEAD + VALUE_HEADS * HEAD])?,
            a: bench.random_within(&[tokens, VALUE_HEADS], DType::F32, -6.0, 1.0)?,
            b: bench.random_within(&[tokens, VALUE_HEADS], DType::F32, -3.0, 3.0)?,
            a_log: bench.random_within(&[VALUE_HEADS], DType::F32, -1.0, 2.0)?,
            dt_bias: bench.random(&[VALUE_HEADS])?,
            batch: batch(bench, sequences, 0, rows)?,
        })
    }

    fn apply(&self, state: &DeltaState, regime: Regime) -> Result<Array> {
        let spec = GatedDeltaSpec {
            key_heads: KEY_HEADS,
            value_heads: VALUE_HEADS,
            key_dim: HEAD,
            value_dim: HEAD,
            regime,
            log: RowLog::None,
        };
        self.qkv.gated_delta(&self.a, &self.b, &self.a_log, &self.dt_bias, state, &self.batch, spec)
    }
}

fn state(bench: &Bench, sequences: usize) -> Result<DeltaState> {
    let state = bench.random(&[sequences + 1, VALUE_HEADS, HEAD, HEAD])?;
    Ok(DeltaState { state, records: None })
}

fn recurrent_step(bench: &Bench, sequences: usize) -> Result<()> {
    let state_bytes = 4 * sequences * VALUE_HEADS * HEAD * HEAD;
    let inputs = DeltaInputs::random(bench, sequences, 1)?;
    let name = format!("gated delta step, {KEY_HEADS} and {VALUE_HEADS} heads of {HEAD}, batch {sequences}");
    bench.time(
        &name,
        Floor::Bytes(2 * state_bytes),
        state_bytes,
        || state(bench, sequences),
        |state| inputs.apply(state, Regime::Decode),
    )
}

fn chunked(bench: &Bench, rows: usize) -> Result<()> {
    const CHUNK: usize = PREFILL_GRID;
    let inputs = DeltaInputs::random(bench, 1, rows)?;
    // In each chunk and value head: keys by keys and queries by keys, keys and queries by the state, both triangles by
    // rows of values, and the state's update.
    let chunk = 2 * CHUNK * (2 * CHUNK * HEAD + 2 * HEAD * HEAD + 2 * CHUNK * HEAD + HEAD * HEAD);
    let operations = (rows / CHUNK * VALUE_HEADS * chunk) as f64;
    let name = format!("gated delta of a prompt, {KEY_HEADS} and {VALUE_HEADS} heads of {HEAD}, {rows} rows");
    let floor = Floor::Operations(operations, rows);
    bench.time(
        &name,
        floor,
        super::COLD_BYTES,
        || state(bench, 1),
        |state| inputs.apply(state, Regime::Prefill),
    )
}

#[derive(Clone, Copy)]
struct Heads {
    query: usize,
    kv: usize,
    size: usize,
}

impl Heads {
    fn inputs(&self, bench: &Bench, rows: usize) -> Result<[Array; 3]> {
        let kv = || bench.random(&[rows, self.kv, self.size]);
        Ok([bench.random(&[rows, self.query, self.size])?, kv()?, kv()?])
    }

    fn pool(&self, bench: &Bench, format: KvFormat, pages: usize) -> Result<KvPool> {
        let shape = [pages + 1, self.kv, PAGE, self.row_elements(format)];
        let pages = || match format.dtype() {
            DType::U8 => bench.coded_pages(&shape, self.size),
            dtype => bench.random_within(&shape, dtype, -1.0, 1.0),
        };
        Ok(KvPool { keys: pages()?, values: pages()? })
    }

    fn row_elements(&self, format: KvFormat) -> usize {
        format.row_elements(self.size).expect("a size that pools keep")
    }

    fn spec(&self, regime: Regime) -> AttentionSpec {
        AttentionSpec { scale: (1.0 / (self.size as f32).sqrt()).into(), window: None, regime }
    }

    fn named(&self) -> String {
        format!("{} and {} heads of {}", self.query, self.kv, self.size)
    }
}

fn attention_step(
    bench: &Bench,
    heads: Heads,
    format: KvFormat,
    context: usize,
    sequences: usize,
) -> Result<()> {
    let [q, k, v] = heads.inputs(bench, sequences)?;
    let batch = batch(bench, sequences, context - 1, 1)?;
    let bytes = 2 * sequences * context * heads.kv * heads.row_elements(format) * format.dtype().size();
    let name = format!(
        "attention step, {}, {} bits, context {context}, batch {sequences}",
        heads.named(),
        bits_of(format)
    );
    let pool = || heads.pool(bench, format, sequences * context.div_ceil(PAGE));
    bench.time(&name, Floor::Bytes(bytes), bytes, pool, |pool| {
        q.paged_attention(&k, &v, pool, &batch, heads.spec(Regime::Decode))
    })
}

fn bits_of(format: KvFormat) -> usize {
    match format {
        KvFormat::F32 => 32,
        KvFormat::F16 => 16,
        KvFormat::Bits8 => 8,
        KvFormat::Bits4 => 4,
    }
}

fn attention_of_a_prompt(
    bench: &Bench,
    heads: Heads,
    format: KvFormat,
    rows: usize,
    before: usize,
) -> Result<()> {
    let [q, k, v] = heads.inputs(bench, rows)?;
    let batch = batch(bench, 1, before, rows)?;
    // Each row with the keys that it sees, once for the scores and once for the sums.
    let seen = rows as f64 * (before as f64 + rows as f64 / 2.0);
    let operations = (4 * heads.query * heads.size) as f64 * seen;
    let name = format!(
        "attention of a prompt, {}, {} bits, {rows} rows after {before}",
        heads.named(),
        bits_of(format)
    );
    let pool = || heads.pool(bench, format, (before + rows).div_ceil(PAGE));
    bench.time(&name, Floor::Operations(operations, rows), super::COLD_BYTES, pool, |pool| {
        q.paged_attention(&k, &v, pool, &batch, heads.spec(Regime::Prefill))
    })
}

/// Sequences with `rows` rows each after `before` others, in consecutive slots and pages.
fn batch(bench: &Bench, sequences: usize, before: usize, rows: usize) -> Result<Batch> {
    let pages = (before + rows).div_ceil(PAGE);
    let array = |values: Vec<usize>, shape: &[usize]| {
        let values: Vec<u32> = values.into_iter().map(|x| x as u32).collect();
        Array::from_slice(&bench.runtime, &values, shape)
    };
    Ok(Batch {
        row_start: array((0..=sequences).map(|b| b * rows).collect(), &[sequences + 1])?,
        slot: array((1..=sequences).collect(), &[sequences])?,
        position: array(vec![before; sequences], &[sequences])?,
        table: array((1..=sequences * pages).collect(), &[sequences, pages])?,
        accepted: array(vec![0; sequences], &[sequences])?,
    })
}
