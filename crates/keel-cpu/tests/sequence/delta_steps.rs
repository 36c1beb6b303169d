//! Steps of the gated delta rule over random rows, on the CPU and by the oracle.

use super::row_starts;
use half::f16;
use keel_cpu::kernels::gated_delta::{
    DeltaLog, GatedDelta, GatedDeltaInputs, GatedDeltaShape, StateElement, gated_delta,
    gated_delta_workspace_len,
};
use keel_cpu::kernels::gated_delta_chunked::{gated_delta_chunked, gated_delta_chunked_workspace_len};
use keel_cpu::kernels::rows::{Batch, Rows, RowsMut};
use keel_cpu::pool::ThreadPool;
use keel_cpu::shared_slice::SharedMut;
use keel_testkit::naive;
use keel_testkit::naive::gated_delta::Shape;
use keel_testkit::random::Random;

/// The rows of one or more sequences.
#[derive(Clone)]
pub struct Data {
    pub shape: Shape,
    pub qkv: Vec<f32>,
    pub a: Vec<f32>,
    pub b: Vec<f32>,
    pub a_log: Vec<f32>,
    pub dt_bias: Vec<f32>,
}

impl Data {
    pub fn random(shape: Shape, rows: usize, seed: u64) -> Data {
        let mut random = Random::new(seed);
        let heads = shape.value_heads;
        let qkv_len = 2 * shape.key_heads * shape.key_size + heads * shape.value_size;
        Data {
            shape,
            qkv: random.uniforms(rows * qkv_len, -1.0, 1.0),
            a: random.uniforms(rows * heads, -6.0, 1.0),
            b: random.uniforms(rows * heads, -3.0, 3.0),
            a_log: random.uniforms(heads, -1.0, 2.5),
            dt_bias: random.uniforms(heads, -2.0, 2.0),
        }
    }

    pub fn qkv_len(&self) -> usize {
        self.cpu_shape().qkv_len()
    }

    pub fn cpu_shape(&self) -> GatedDeltaShape {
        let Shape { key_heads, value_heads, key_size, value_size } = self.shape;
        GatedDeltaShape { key_heads, value_heads, key_size, value_size }
    }

    /// Rows `from..to`.
    pub fn rows(&self, from: usize, to: usize) -> Data {
        let (qkv, heads) = (self.qkv_len(), self.shape.value_heads);
        Data {
            qkv: self.qkv[from * qkv..to * qkv].to_vec(),
            a: self.a[from * heads..to * heads].to_vec(),
            b: self.b[from * heads..to * heads].to_vec(),
            ..self.clone()
        }
    }

    pub fn inputs(&self) -> GatedDeltaInputs<'_> {
        GatedDeltaInputs {
            shape: self.cpu_shape(),
            qkv: Rows::whole(&self.qkv, self.qkv_len()),
            a: Rows::whole(&self.a, self.shape.value_heads),
            b: Rows::whole(&self.b, self.shape.value_heads),
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
        }
    }

    /// The oracle's outputs; updates `state`.
    pub fn oracle(&self, state: &mut [f64]) -> Vec<f64> {
        let inputs = naive::gated_delta::Inputs {
            qkv: &self.qkv,
            a: &self.a,
            b: &self.b,
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
        };
        naive::gated_delta::gated_delta(self.shape, inputs, state).y
    }
}

#[derive(Clone, Copy, PartialEq)]
pub enum Regime {
    Decode,
    Prefill,
}

/// An element of a state, as a number.
pub trait Element: StateElement {
    fn of(x: f32) -> Self;
    fn value(self) -> f32;
}

impl Element for f32 {
    fn of(x: f32) -> f32 {
        x
    }
    fn value(self) -> f32 {
        self
    }
}

impl Element for f16 {
    fn of(x: f32) -> f16 {
        f16::from_f32(x.clamp(-65504.0, 65504.0))
    }
    fn value(self) -> f32 {
        self.to_f32()
    }
}

/// A pool of states with a delta log.
#[derive(Clone)]
pub struct Slots<E> {
    pub state: Vec<E>,
    pub log: Vec<f32>,
    pub capacity: usize,
}

impl<E: Element> Slots<E> {
    /// Random states, as after a history. The log and the workspace start as NaN, which must never be read.
    pub fn random(shape: &GatedDeltaShape, slots: usize, capacity: usize) -> Slots<E> {
        let state = Random::new(99).uniforms(slots * shape.state_len(), -0.5, 0.5);
        Slots {
            state: state.into_iter().map(E::of).collect(),
            log: vec![f32::NAN; slots * capacity * shape.record_len()],
            capacity,
        }
    }

    pub fn values(&self) -> Vec<f32> {
        self.state.iter().map(|x| x.value()).collect()
    }
}

/// How a step uses the log.
#[derive(Clone, Copy)]
pub struct Log<'a> {
    pub accepted: &'a [u32],
    pub keep_open: bool,
}

/// One step over sequences with `rows` rows each, in the slots `slot`; returns `y`.
pub fn step<E: Element>(
    data: &Data,
    rows: &[usize],
    slot: &[u32],
    slots: &mut Slots<E>,
    regime: Regime,
    log: Option<Log<'_>>,
    workers: usize,
) -> Vec<f32> {
    let shape = data.cpu_shape();
    let row_start = row_starts(rows.iter().copied());
    let width = shape.value_heads * shape.value_size;
    let mut y = vec![f32::NAN; rows.iter().sum::<usize>() * width];
    let mut workspace = match regime {
        Regime::Decode => vec![f32::NAN; gated_delta_workspace_len(&shape, workers)],
        Regime::Prefill => vec![f32::NAN; gated_delta_chunked_workspace_len(&shape, workers)],
    };
    let (records, capacity) = (SharedMut::new(&mut slots.log), slots.capacity);
    let task = GatedDelta {
        inputs: data.inputs(),
        batch: Batch { row_start: &row_start, position: &vec![0; rows.len()] },
        slot,
        state: SharedMut::new(&mut slots.state),
        log: log.map(|Log { accepted, keep_open }| DeltaLog { records, capacity, accepted, keep_open }),
        y: RowsMut::whole(SharedMut::new(&mut y), width),
    };
    let workspace = SharedMut::new(&mut workspace);
    ThreadPool::new(workers).run(|worker| match regime {
        Regime::Decode => gated_delta(&task, workspace, worker),
        Regime::Prefill => gated_delta_chunked(&task, workspace, worker),
    });
    y
}
