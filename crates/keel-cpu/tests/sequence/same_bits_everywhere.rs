//! Every sequence kernel gives the same bits on every instruction set.

use half::f16;
use keel_cpu::isa::Isa;
use keel_cpu::kernels::activation::{sigmoid_gate, swiglu};
use keel_cpu::kernels::attention::{
    Attention, KvPages, KvPagesMut, PAGE, PageTable, attention_decode, attention_prefill,
    decode_workspace_len, kv_write, prefill_workspace_len,
};
use keel_cpu::kernels::causal_conv::{CausalConv, causal_conv};
use keel_cpu::kernels::gated_delta::{
    GatedDelta, GatedDeltaInputs, GatedDeltaShape, StateElement, gated_delta, gated_delta_workspace_len,
};
use keel_cpu::kernels::gated_delta_chunked::{gated_delta_chunked, gated_delta_chunked_workspace_len};
use keel_cpu::kernels::rms_norm::{add_rms_norm, gated_rms_norm, rms_norm};
use keel_cpu::kernels::rope::{HeadNorm, Rope, rope};
use keel_cpu::kernels::rows::{Batch, Rows, RowsMut};
use keel_cpu::pool::ThreadPool;
use keel_cpu::shared_slice::SharedMut;
use keel_testkit::compare::assert_same_bits;
use keel_testkit::random::Random;

/// Rows of the single sequence in every test.
const ROWS: usize = 70;

fn rows(y: &mut [f32], width: usize) -> RowsMut<'_> {
    RowsMut::whole(SharedMut::new(y), width)
}

/// Runs `kernel` at every level and compares the outputs.
fn check(what: &str, outputs: usize, kernel: impl Fn(&ThreadPool, &mut [f32])) {
    let at = |isa| {
        let mut y = vec![0.0; outputs];
        kernel(&ThreadPool::at(2, isa), &mut y);
        y
    };
    let want = at(Isa::Portable);
    assert!(want.iter().all(|x| x.is_finite()) && want.iter().any(|&x| x != 0.0), "{what} wrote nothing");
    for isa in Isa::available() {
        assert_same_bits(&format!("{what}, {isa}"), &at(isa), &want);
    }
}

const BATCH: Batch<'_> = Batch { row_start: &[0, ROWS as u32], position: &[0] };

#[test]
fn row_wise_kernels() {
    let (width, mut random) = (77, Random::new(1));
    let a = random.uniforms(ROWS * 2 * width, -6.0, 6.0);
    let b = random.uniforms(ROWS * width, -6.0, 6.0);
    let weight = random.uniforms(width, 0.5, 1.5);
    let (wide, narrow) = (Rows::whole(&a, 2 * width), Rows::whole(&b, width));
    let half = wide.columns(width..2 * width);
    let len = ROWS * width;
    check("swiglu", len, |pool, y| {
        let y = rows(y, width);
        pool.run(|w| swiglu(wide, y, w));
    });
    check("sigmoid_gate", len, |pool, y| {
        let y = rows(y, width);
        pool.run(|w| sigmoid_gate(half, narrow, y, w));
    });
    check("rms_norm", len, |pool, y| {
        let y = rows(y, width);
        pool.run(|w| rms_norm(half, &weight, 1e-6, y, w));
    });
    check("gated_rms_norm", len, |pool, y| {
        let y = rows(y, width);
        pool.run(|w| gated_rms_norm(half, narrow, &weight, 1e-6, y, w));
    });
    check("add_rms_norm", 2 * len, |pool, y| {
        let (y, residual) = y.split_at_mut(len);
        residual.copy_from_slice(&b);
        let (y, residual) = (rows(y, width), rows(residual, width));
        pool.run(|w| add_rms_norm(half, residual, &weight, 1e-6, y, w));
    });
    let taps = random.uniforms(4 * width, -1.0, 1.0);
    check("causal_conv", len + 3 * width, |pool, y| {
        let (y, window) = y.split_at_mut(len);
        window.fill(0.5);
        let conv = CausalConv {
            x: narrow,
            weight: &taps,
            batch: BATCH,
            slot: &[0],
            window: SharedMut::new(window),
            log: None,
            y: rows(y, width),
        };
        pool.run(|w| causal_conv(&conv, w));
    });
}

#[test]
fn gated_delta_in_both_regimes() {
    let shape = GatedDeltaShape { key_heads: 2, value_heads: 4, key_size: 40, value_size: 56 };
    let mut random = Random::new(2);
    let qkv = random.uniforms(ROWS * shape.qkv_len(), -1.0, 1.0);
    let (a, b) = (random.uniforms(ROWS * 4, -4.0, 1.0), random.uniforms(ROWS * 4, -3.0, 3.0));
    let (a_log, dt_bias) = (random.uniforms(4, -1.0, 1.0), random.uniforms(4, -1.0, 1.0));
    let width = shape.value_heads * shape.value_size;
    for (chunked, half) in [(false, false), (true, false), (false, true), (true, true)] {
        check("gated_delta", ROWS * width + shape.state_len(), |pool, y| {
            let (y, state) = y.split_at_mut(ROWS * width);
            let workspace = match chunked {
                false => gated_delta_workspace_len(&shape, 2),
                true => gated_delta_chunked_workspace_len(&shape, 2),
            };
            let mut workspace = vec![0.0; workspace];
            let inputs = GatedDeltaInputs {
                shape,
                qkv: Rows::whole(&qkv, shape.qkv_len()),
                a: Rows::whole(&a, 4),
                b: Rows::whole(&b, 4),
                a_log: &a_log,
                dt_bias: &dt_bias,
            };
            let y = RowsMut::whole(SharedMut::new(y), width);
            let workspace = SharedMut::new(&mut workspace);
            let run = Delta { pool, chunked, workspace };
            if half {
                let mut narrow: Vec<f16> = state.iter().map(|&x| f16::from_f32(x)).collect();
                let (batch, slot) = (BATCH, &[0][..]);
                run.run(&GatedDelta {
                    inputs,
                    batch,
                    slot,
                    state: SharedMut::new(&mut narrow),
                    log: None,
                    y,
                });
                state.iter_mut().zip(narrow).for_each(|(x, half)| *x = half.to_f32());
            } else {
                let (batch, slot) = (BATCH, &[0][..]);
                run.run(&GatedDelta { inputs, batch, slot, state: SharedMut::new(state), log: None, y });
            }
        });
    }
}

/// How the gated delta rule is run.
struct Delta<'a> {
    pool: &'a ThreadPool,
    chunked: bool,
    workspace: SharedMut<'a, f32>,
}

impl Delta<'_> {
    fn run<E: StateElement>(&self, task: &GatedDelta<'_, E>) {
        self.pool.run(|w| match self.chunked {
            false => gated_delta(task, self.workspace, w),
            true => gated_delta_chunked(task, self.workspace, w),
        });
    }
}

#[test]
fn rope_and_attention_in_both_regimes() {
    let (heads, kv_heads, head_dim) = (5, 1, 80);
    let mut random = Random::new(3);
    let (q_len, kv_len) = (heads * head_dim, kv_heads * head_dim);
    let qkv = random.uniforms(ROWS * (q_len + 2 * kv_len), -2.0, 2.0);
    let norm = random.uniforms(head_dim, 0.5, 1.5);
    let x = Rows::whole(&qkv, q_len + 2 * kv_len);
    let positions: Vec<i32> = (0..ROWS as i32).collect();
    let frequencies: Vec<f32> = (0..20).map(|i| 0.7f32.powi(i)).collect();
    let table = PageTable { pages: &[0], stride: 1 };
    for prefill in [false, true] {
        check("attention", 2 * ROWS * q_len, |pool, y| {
            let (turned, y) = y.split_at_mut(ROWS * q_len);
            let rotation = Rope {
                x: x.columns(0..q_len),
                head_dim,
                positions: &positions,
                inverse_frequencies: &frequencies,
                axes: &[],
                norm: Some(HeadNorm { weight: &norm, eps: 1e-6 }),
                y: RowsMut::whole(SharedMut::new(turned), q_len),
            };
            pool.run(|w| rope(&rotation, w));
            let (mut keys, mut values) = (vec![f16::ZERO; PAGE * kv_len], vec![f16::ZERO; PAGE * kv_len]);
            let pages = KvPagesMut {
                keys: SharedMut::new(&mut keys),
                values: SharedMut::new(&mut values),
                kv_heads,
                head_dim,
            };
            let (k, v) = (x.columns(q_len..q_len + kv_len), x.columns(q_len + kv_len..q_len + 2 * kv_len));
            pool.run(|w| kv_write(k, v, BATCH, table, pages, w));
            let workspace = match prefill {
                false => decode_workspace_len(ROWS, heads, head_dim, 1),
                true => prefill_workspace_len(2, head_dim),
            };
            let mut workspace = vec![0.0; workspace];
            let attention = Attention {
                q: Rows::whole(turned, q_len),
                batch: BATCH,
                table,
                pages: KvPages { keys: &keys, values: &values, kv_heads, head_dim },
                scale: 0.11,
                window: Some(33),
                until: None,
                y: RowsMut::whole(SharedMut::new(y), q_len),
            };
            let workspace = SharedMut::new(&mut workspace);
            pool.run(|w| match prefill {
                false => attention_decode(&attention, workspace, w),
                true => attention_prefill(&attention, workspace, w),
            });
        });
    }
}
