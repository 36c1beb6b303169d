//! Sequence kernels and the floors of the machine. `cargo bench -p keel-cpu --bench sequence [-- FILTER WORKERS]`
//!
//! Shapes are those of the qwen3.5-0.8b layers. Gated delta prefill is checked against decode on its own data;
//! attention and the convolution are checked against their oracles. Between two real steps all weights pass through the
//! cache, so a step finds its data cold. It is cold here, too: the timed calls walk over copies that together exceed
//! the cache. The fastest pass is printed: other programs on the machine only make a pass slower.

use half::f16;
use keel_cpu::floors;
use keel_cpu::isa::Isa;
use keel_cpu::kernels::attention::{
    Attention, KvPages, KvPagesMut, PAGE, PageTable, attention_decode, attention_prefill,
    decode_workspace_len, kv_write, prefill_workspace_len,
};
use keel_cpu::kernels::causal_conv::{CausalConv, causal_conv};
use keel_cpu::kernels::gated_delta::{
    DeltaLog, GatedDelta, GatedDeltaInputs, GatedDeltaShape, StateElement, gated_delta,
    gated_delta_workspace_len,
};
use keel_cpu::kernels::gated_delta_chunked::{gated_delta_chunked, gated_delta_chunked_workspace_len};
use keel_cpu::kernels::rms_norm::gated_rms_norm;
use keel_cpu::kernels::rows::{Batch, Rows, RowsMut};
use keel_cpu::pool::{ThreadPool, Worker};
use keel_cpu::shared_slice::SharedMut;
use keel_testkit::compare::assert_close;
use keel_testkit::naive;
use keel_testkit::random::Random;
use std::time::{Duration, Instant};

const BUDGET: Duration = Duration::from_millis(500);

/// Larger than any cache.
const COLD_BYTES: usize = 256 << 20;

const DELTA: GatedDeltaShape =
    GatedDeltaShape { key_heads: 16, value_heads: 16, key_size: 128, value_size: 128 };

const ATTENTION: naive::attention::Shape =
    naive::attention::Shape { heads: 8, kv_heads: 2, head_dim: 256, scale: 0.0625, window: None };

struct Machine {
    pool: ThreadPool,
    /// Bytes per second.
    read: f64,
    /// Operations per second.
    f32_fma: f64,
}

impl Machine {
    fn measure(workers: usize) -> Machine {
        let pool = ThreadPool::new(workers);
        let read = floors::read_bandwidth(&pool, &vec![1; COLD_BYTES / 8], BUDGET);
        let f32_fma = floors::peaks(&pool, Isa::best(), BUDGET).f32_fma.unwrap_or(f64::INFINITY);
        println!(
            "{} workers, {}: read {:.1} GB/s, f32 FMA {:.0} GFLOP/s",
            pool.workers(),
            Isa::best(),
            read / 1e9,
            f32_fma / 1e9
        );
        Machine { pool, read, f32_fma }
    }

    fn report_bytes(&self, name: &str, seconds: f64, bytes: usize) {
        let (rate, floor) = (bytes as f64 / seconds, bytes as f64 / self.read);
        println!(
            "{name:44} {:9.1} us, floor {:9.1} us: {:5.1} GB/s, {:3.0}% of the read bandwidth",
            seconds * 1e6,
            floor * 1e6,
            rate / 1e9,
            100.0 * rate / self.read
        );
    }

    fn report_operations(&self, name: &str, seconds: f64, operations: f64, tokens: usize) {
        let rate = operations / seconds;
        println!(
            "{name:44} {:9.1} us, floor {:9.1} us: {:5.0} GFLOP/s, {:3.0}% of the peak, {:.0} ns per token",
            seconds * 1e6,
            operations / self.f32_fma * 1e6,
            rate / 1e9,
            100.0 * rate / self.f32_fma,
            seconds * 1e9 / tokens as f64
        );
    }
}

/// Seconds of the fastest call; `call` gets the number of the call.
fn time(mut call: impl FnMut(usize)) -> f64 {
    let (started, mut passes, mut best) = (Instant::now(), 0, f64::INFINITY);
    while passes < 5 || started.elapsed() < BUDGET {
        let pass = Instant::now();
        call(passes);
        best = best.min(pass.elapsed().as_secs_f64());
        passes += 1;
    }
    best
}

/// Inputs of the gated delta rule for `rows` rows.
struct DeltaData {
    qkv: Vec<f32>,
    a: Vec<f32>,
    b: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
}

impl DeltaData {
    fn random(rows: usize) -> DeltaData {
        let mut random = Random::new(1);
        DeltaData {
            qkv: random.uniforms(rows * DELTA.qkv_len(), -1.0, 1.0),
            a: random.uniforms(rows * DELTA.value_heads, -6.0, 1.0),
            b: random.uniforms(rows * DELTA.value_heads, -3.0, 3.0),
            a_log: random.uniforms(DELTA.value_heads, -1.0, 2.0),
            dt_bias: random.uniforms(DELTA.value_heads, -1.0, 1.0),
        }
    }

    fn inputs(&self) -> GatedDeltaInputs<'_> {
        GatedDeltaInputs {
            shape: DELTA,
            qkv: Rows::whole(&self.qkv, DELTA.qkv_len()),
            a: Rows::whole(&self.a, DELTA.value_heads),
            b: Rows::whole(&self.b, DELTA.value_heads),
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
        }
    }
}

/// One call over sequences with `rows` rows each.
struct DeltaStep<'a, E> {
    data: &'a DeltaData,
    rows: &'a [usize],
    slot: &'a [u32],
    state: &'a mut [E],
    /// Records, their number per slot, and for each sequence the number accepted of its last step.
    log: Option<(&'a mut [f32], usize, &'a [u32])>,
    workspace: &'a mut [f32],
    y: &'a mut [f32],
}

impl<E: StateElement> DeltaStep<'_, E> {
    fn run(
        self,
        pool: &ThreadPool,
        kernel: impl Fn(&GatedDelta<'_, E>, SharedMut<'_, f32>, &Worker<'_>) + Sync,
    ) {
        let mut row_start = vec![0];
        for &rows in self.rows {
            row_start.push(row_start[row_start.len() - 1] + rows as u32);
        }
        let position = vec![0; self.rows.len()];
        let task = GatedDelta {
            inputs: self.data.inputs(),
            batch: Batch { row_start: &row_start, position: &position },
            slot: self.slot,
            state: SharedMut::new(self.state),
            log: self.log.map(|(records, capacity, accepted)| DeltaLog {
                records: SharedMut::new(records),
                capacity,
                accepted,
                keep_open: true,
            }),
            y: RowsMut::whole(SharedMut::new(self.y), DELTA.value_heads * DELTA.value_size),
        };
        let workspace = SharedMut::new(self.workspace);
        pool.run(|worker| kernel(&task, workspace, worker));
    }
}

fn gated_delta_decode<E: StateElement>(machine: &Machine, form: &str) {
    let slots = COLD_BYTES / size_of::<E>() / DELTA.state_len();
    let mut state = vec![E::default(); slots * DELTA.state_len()];
    let mut workspace = vec![0.0; gated_delta_workspace_len(&DELTA, machine.pool.workers())];
    let width = DELTA.value_heads * DELTA.value_size;
    for sequences in [1, 8] {
        let data = DeltaData::random(sequences);
        let mut y = vec![0.0; sequences * width];
        let seconds = time(|n| {
            let slot: Vec<u32> = (0..sequences).map(|b| ((n * sequences + b) % slots) as u32).collect();
            let (rows, state, workspace, y) =
                (&vec![1; sequences][..], &mut state[..], &mut workspace[..], &mut y[..]);
            DeltaStep { data: &data, rows, slot: &slot, state, log: None, workspace, y }
                .run(&machine.pool, gated_delta);
        });
        let name = format!("gated_delta decode, {form} state, {sequences} sequences");
        machine.report_bytes(&name, seconds, sequences * 2 * size_of::<E>() * DELTA.state_len());
    }
    let (rows, capacity) = (4, 4);
    let data = DeltaData::random(rows);
    let mut y = vec![0.0; rows * width];
    let mut log = vec![0.0; slots * capacity * DELTA.record_len()];
    let seconds = time(|n| {
        let (slot, log) = ([(n % slots) as u32], Some((&mut log[..], capacity, &[2][..])));
        let (state, workspace, y) = (&mut state[..], &mut workspace[..], &mut y[..]);
        DeltaStep { data: &data, rows: &[rows], slot: &slot, state, log, workspace, y }
            .run(&machine.pool, gated_delta);
    });
    let name = format!("gated_delta verify, {form} state, 4 rows after 2 accepted");
    machine.report_bytes(&name, seconds, 2 * size_of::<E>() * DELTA.state_len());
}

fn gated_delta_prefill(machine: &Machine) {
    let pool = &machine.pool;
    let mut workspace = vec![0.0; gated_delta_chunked_workspace_len(&DELTA, pool.workers())];
    let width = DELTA.value_heads * DELTA.value_size;
    for rows in [64, 512, 2048] {
        let data = DeltaData::random(rows);
        let (mut state, mut y) = (vec![0.01; DELTA.state_len()], vec![0.0; rows * width]);
        let mut prefill = |state: &mut [f32], y: &mut [f32]| {
            let workspace = &mut workspace[..];
            DeltaStep { data: &data, rows: &[rows], slot: &[0], state, log: None, workspace, y }
                .run(pool, gated_delta_chunked);
        };
        prefill(&mut state, &mut y);
        let (mut decode_state, mut want) = (vec![0.01; state.len()], vec![0.0; y.len()]);
        let mut scratch = vec![0.0; gated_delta_workspace_len(&DELTA, pool.workers())];
        let (decode, workspace) = (&mut decode_state[..], &mut scratch[..]);
        DeltaStep {
            data: &data,
            rows: &[rows],
            slot: &[0],
            state: decode,
            log: None,
            workspace,
            y: &mut want,
        }
        .run(pool, gated_delta);
        assert_close("prefill", &y, &want.iter().map(|&x| f64::from(x)).collect::<Vec<_>>(), 1e-5);

        let seconds = time(|_| prefill(&mut state, &mut y));
        let (dk, dv) = (DELTA.key_size as f64, DELTA.value_size as f64);
        let operations = rows as f64 * DELTA.value_heads as f64 * (6.0 * dk * dv + 128.0 * (dk + dv));
        machine.report_operations(&format!("gated_delta prefill, {rows} rows"), seconds, operations, rows);
    }
}

/// Pages of `layers` layers with `tokens` tokens each.
struct Kv {
    keys: Vec<f16>,
    values: Vec<f16>,
    table: Vec<u32>,
    stride: usize,
}

impl Kv {
    fn random(pool: &ThreadPool, layers: usize, tokens: usize, k: &[f32], v: &[f32]) -> Kv {
        let stride = tokens.div_ceil(PAGE);
        let (kv_heads, head_dim) = (ATTENTION.kv_heads, ATTENTION.head_dim);
        let len = layers * stride * PAGE * kv_heads * head_dim;
        let (mut keys, mut values) = (vec![f16::ZERO; len], vec![f16::ZERO; len]);
        let table: Vec<u32> = (0..(layers * stride) as u32).collect();
        let width = kv_heads * head_dim;
        let pages = KvPagesMut {
            keys: SharedMut::new(&mut keys),
            values: SharedMut::new(&mut values),
            kv_heads,
            head_dim,
        };
        for layer in 0..layers {
            let batch = Batch { row_start: &[0, tokens as u32], position: &[0] };
            let table = PageTable { pages: &table[layer * stride..], stride };
            pool.run(|w| kv_write(Rows::whole(k, width), Rows::whole(v, width), batch, table, pages, w));
        }
        Kv { keys, values, table, stride }
    }

    /// Runs `kernel` on the rows `q` at positions `first..` of one layer.
    fn attend(
        &self,
        (layer, first): (usize, usize),
        q: &[f32],
        y: &mut [f32],
        kernel: impl FnOnce(&Attention<'_, KvPages<'_, f16>>),
    ) {
        let width = ATTENTION.heads * ATTENTION.head_dim;
        let attention = Attention {
            q: Rows::whole(q, width),
            batch: Batch { row_start: &[0, (q.len() / width) as u32], position: &[first as u32] },
            table: PageTable { pages: &self.table[layer * self.stride..], stride: self.stride },
            pages: KvPages {
                keys: &self.keys,
                values: &self.values,
                kv_heads: ATTENTION.kv_heads,
                head_dim: ATTENTION.head_dim,
            },
            scale: ATTENTION.scale,
            window: None,
            until: None,
            y: RowsMut::whole(SharedMut::new(y), width),
        };
        kernel(&attention);
    }
}

/// Keys and values that f16 holds exactly.
fn halves(random: &mut Random, len: usize) -> Vec<f32> {
    (0..len).map(|_| f16::from_f32(random.uniform(-1.0, 1.0)).to_f32()).collect()
}

fn attention(machine: &Machine) {
    let (kv_width, width) = (ATTENTION.kv_heads * ATTENTION.head_dim, ATTENTION.heads * ATTENTION.head_dim);
    let mut random = Random::new(2);
    for tokens in [1024, 8192] {
        let (k, v) = (halves(&mut random, tokens * kv_width), halves(&mut random, tokens * kv_width));
        let bytes = 2 * 2 * tokens * kv_width;
        let layers = COLD_BYTES / bytes;
        let kv = Kv::random(&machine.pool, layers, tokens, &k, &v);
        for rows in [1, 4] {
            let q = random.uniforms(rows * width, -1.0, 1.0);
            let mut y = vec![0.0; q.len()];
            let len = decode_workspace_len(rows, ATTENTION.heads, ATTENTION.head_dim, kv.stride);
            let mut workspace = vec![0.0; len];
            let shared = SharedMut::new(&mut workspace);
            let seconds = time(|n| {
                kv.attend((n % layers, tokens - rows), &q, &mut y, |attention| {
                    machine.pool.run(|worker| attention_decode(attention, shared, worker));
                });
            });
            assert_close(
                "decode",
                &y,
                &naive::attention::attention(ATTENTION, &q, tokens - rows, &k, &v),
                1e-5,
            );
            machine.report_bytes(&format!("attention decode, {rows} rows at {tokens}"), seconds, bytes);
        }
        let (rows, first) = (512, tokens - 512);
        let q = random.uniforms(rows * width, -1.0, 1.0);
        let mut y = vec![0.0; q.len()];
        let mut workspace = vec![0.0; prefill_workspace_len(machine.pool.workers(), ATTENTION.head_dim)];
        let shared = SharedMut::new(&mut workspace);
        let seconds = time(|_| {
            kv.attend((0, first), &q, &mut y, |attention| {
                machine.pool.run(|worker| attention_prefill(attention, shared, worker));
            });
        });
        let last = naive::attention::attention(ATTENTION, &q[q.len() - width..], tokens - 1, &k, &v);
        assert_close("prefill", &y[y.len() - width..], &last, 1e-5);
        let pairs = rows as f64 * (first as f64 + rows as f64 / 2.0);
        let operations = 4.0 * width as f64 * pairs;
        machine.report_operations(
            &format!("attention prefill, {rows} rows at {first}"),
            seconds,
            operations,
            rows,
        );
    }
}

fn row_wise(machine: &Machine) {
    let mut random = Random::new(3);
    let channels = DELTA.qkv_len();
    for rows in [1usize, 512] {
        let x = random.uniforms(rows * channels, -1.0, 1.0);
        let weight = random.uniforms(4 * channels, -1.0, 1.0);
        let (mut window, mut y) = (vec![0.0; 3 * channels], vec![0.0; x.len()]);
        let out = SharedMut::new(&mut y);
        let conv = CausalConv {
            x: Rows::whole(&x, channels),
            weight: &weight,
            batch: Batch { row_start: &[0, rows as u32], position: &[0] },
            slot: &[0],
            window: SharedMut::new(&mut window),
            log: None,
            y: RowsMut::whole(out, channels),
        };
        let seconds = time(|n| {
            machine.pool.run(|worker| causal_conv(&conv, worker));
            if n == 0 {
                // SAFETY: no worker is running.
                let y = unsafe { out.range(0..out.len()) };
                let mut window = vec![0.0; 3 * channels];
                assert_close(
                    "causal_conv",
                    y,
                    &naive::causal_conv::causal_conv(&x, &weight, channels, &mut window),
                    1e-6,
                );
            }
        });
        machine.report_bytes(&format!("causal_conv, {rows} rows of {channels}"), seconds, 8 * x.len());

        let width = DELTA.value_heads * DELTA.value_size;
        let (x, gate) = (random.uniforms(rows * width, -1.0, 1.0), random.uniforms(rows * width, -1.0, 1.0));
        let weight = random.uniforms(DELTA.value_size, 0.5, 1.5);
        let mut y = vec![0.0; x.len()];
        let out = RowsMut::whole(SharedMut::new(&mut y), width);
        let (x, gate) = (Rows::whole(&x, width), Rows::whole(&gate, width));
        let seconds =
            time(|_| machine.pool.run(|worker| gated_rms_norm(x, gate, &weight, 1e-6, out, worker)));
        machine.report_bytes(&format!("gated_rms_norm, {rows} rows of {width}"), seconds, 12 * rows * width);
    }
}

fn main() {
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let filter = arguments.first().cloned().unwrap_or_default();
    let workers = arguments.get(1).and_then(|workers| workers.parse().ok());
    let workers = workers.or_else(|| std::thread::available_parallelism().ok().map(|n| n.get()));
    let machine = Machine::measure(workers.unwrap_or(1));
    let wanted = |name: &str| name.contains(&filter);
    if wanted("gated_delta_decode") {
        gated_delta_decode::<f32>(&machine, "f32");
        gated_delta_decode::<f16>(&machine, "f16");
    }
    if wanted("gated_delta_prefill") {
        gated_delta_prefill(&machine);
    }
    if wanted("attention") {
        attention(&machine);
    }
    if wanted("row_wise") {
        row_wise(&machine);
    }
}
