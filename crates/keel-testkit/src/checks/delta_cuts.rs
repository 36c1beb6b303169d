//! How rows of the gated delta rule are divided into steps does not change a bit, for states in f32 and in f16. Decays
//! of very different strength follow the oracle. The parameters of decays may be results of the step's own kernels.

use std::ops::Range;

use super::sequence::{batch, draw, floats, up};
use super::share::is_mine;
use super::{download, expect_within, rounded, upload};
use crate::cases;
use crate::compare::assert_close;
use crate::naive::gated_delta::{Inputs, Shape, gated_delta};
use crate::naive::tensor::Tensor;
use crate::random::Random;
use keel_array::{Array, DType, DeltaState, GatedDeltaSpec, Regime, Result, RowLog, Runtime};

/// Open rows of a slot.
const OPEN: usize = 4;

pub(super) fn check(runtime: &Runtime) {
    for shape in cases::gated_delta::SHAPES {
        for form in [DType::F32, DType::F16] {
            if is_mine(&("delta_cuts", shape, form)) {
                let case = Case::new(runtime, *shape, form);
                case.rows_of_a_step_are_steps_of_a_row();
                case.open_rows_are_rows();
                case.chunks_of_a_step_are_steps_of_a_chunk();
            }
        }
    }
}

/// Within a chunk, rows that forget everything and rows that forget little take turns. After the former, the sum of log
/// decays is large, and differences between sums of the latter are small.
pub(super) fn strong_decays(runtime: &Runtime, within: f64) {
    for shape in cases::gated_delta::SHAPES.iter().filter(|shape| is_mine(&("strong_decays", shape))) {
        let mut case = Case::new(runtime, *shape, DType::F32);
        case.a_log.values.fill(2.5);
        for (t, a) in case.a.values.chunks_mut(shape.value_heads).enumerate() {
            a.fill(if t % 20 < 10 { 100.0 } else { -9.0 });
        }
        case.prompt_follows_the_oracle(120, within);
    }
}

/// The parameters of the decay are results of the step's own kernels. A layer before has the same batch. A backend may
/// check this batch once, and then nothing else comes between those kernels and the second layer.
pub(super) fn computed_decays(runtime: &Runtime) {
    for shape in cases::gated_delta::SHAPES.iter().filter(|shape| is_mine(&("computed_decays", shape))) {
        Case::new(runtime, *shape, DType::F32).decays_may_be_computed();
    }
}

/// One sequence: its inputs, and the state before its first row.
struct Case<'a> {
    runtime: &'a Runtime,
    shape: Shape,
    form: DType,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    start: Tensor,
}

/// Rows of a step, and how it uses the log.
struct Step {
    rows: Range<usize>,
    regime: Regime,
    log: RowLog,
    accepted: u32,
}

impl Step {
    fn plain(rows: Range<usize>, regime: Regime) -> Step {
        Step { rows, regime, log: RowLog::None, accepted: 0 }
    }
}

impl Case<'_> {
    fn new(runtime: &Runtime, shape: Shape, form: DType) -> Case<'_> {
        const ROWS: usize = 150;
        let mut random = Random::new(75);
        let heads = shape.value_heads;
        let channels = 2 * shape.key_heads * shape.key_size + heads * shape.value_size;
        let mut of = |shape: &[usize]| draw(&mut random, shape);
        let start = rounded(&of(&[2, heads, shape.key_size, shape.value_size]), form);
        let (qkv, a, b) = (of(&[ROWS, channels]), of(&[ROWS, heads]), of(&[ROWS, heads]));
        Case { runtime, shape, form, qkv, a, b, a_log: of(&[heads]), dt_bias: of(&[heads]), start }
    }

    fn spec(&self, regime: Regime, log: RowLog) -> GatedDeltaSpec {
        let Shape { key_heads, value_heads, key_size, value_size } = self.shape;
        GatedDeltaSpec { key_heads, value_heads, key_dim: key_size, value_dim: value_size, regime, log }
    }

    fn state(&self) -> DeltaState {
        let shape = [2, OPEN, self.spec(Regime::Decode, RowLog::None).record_len()];
        let records = Array::from_slice(self.runtime, &vec![f32::NAN; shape.iter().product()], shape);
        DeltaState { state: upload(self.runtime, &self.start, self.form), records: records.ok() }
    }

    /// The outputs of some steps in order.
    fn run(&self, state: &DeltaState, steps: &[Step]) -> Vec<f64> {
        let mut all = Vec::new();
        for Step { rows, regime, log, accepted } in steps {
            let part = |x: &Tensor| {
                let width = x.shape[1];
                let values = x.values[rows.start * width..rows.end * width].to_vec();
                up(self.runtime, &Tensor { shape: vec![rows.len(), width], values })
            };
            let mut batch = batch(self.runtime, &[(rows.start, rows.len())], 1);
            batch.accepted = Array::from_slice(self.runtime, &[*accepted], [1]).expect("memory");
            let (a_log, dt_bias) = (up(self.runtime, &self.a_log), up(self.runtime, &self.dt_bias));
            let y = part(&self.qkv).gated_delta(
                &part(&self.a),
                &part(&self.b),
                &a_log,
                &dt_bias,
                state,
                &batch,
                self.spec(*regime, *log),
            );
            all.extend(download(&y.expect("shapes fit")));
        }
        all
    }

    /// Both ways give the same outputs and the same state, to the bit.
    fn expect_same(&self, what: &str, one: &[Step], other: &[Step]) {
        let states = [self.state(), self.state()];
        let (y, z) = (self.run(&states[0], one), self.run(&states[1], other));
        let what = format!("{what}, {:?}, {}", self.shape, self.form);
        assert!(y == z, "{what}: outputs differ");
        assert!(download(&states[0].state) == download(&states[1].state), "{what}: states differ");
    }

    /// A prompt of the first rows gives the oracle's outputs and state.
    fn prompt_follows_the_oracle(&self, rows: usize, within: f64) {
        let first = |x: &Tensor| floats(x)[..rows * x.shape[1]].to_vec();
        let (qkv, a, b) = (first(&self.qkv), first(&self.a), first(&self.b));
        let (a_log, dt_bias) = (floats(&self.a_log), floats(&self.dt_bias));
        let inputs = Inputs { qkv: &qkv, a: &a, b: &b, a_log: &a_log, dt_bias: &dt_bias };
        // The sequence is in slot 1 of 2.
        let mut want = self.start.values.clone();
        let slot = want.len() / 2;
        let outputs = gated_delta(self.shape, inputs, &mut want[slot..]);
        let state = self.state();
        let y = self.run(&state, &[Step::plain(0..rows, Regime::Prefill)]);
        let y: Vec<f32> = y.into_iter().map(|y| y as f32).collect();
        let what = format!("decays of {:?}", self.shape);
        assert_close(&what, &y, &outputs.y, within);
        expect_within(&format!("state after {what}"), &state.state, &want, within);
    }

    fn decays_may_be_computed(&self) {
        const ROWS: usize = 3;
        let part = |x: &Tensor| {
            let width = x.shape[1];
            let values = x.values[..ROWS * width].to_vec();
            up(self.runtime, &Tensor { shape: vec![ROWS, width], values })
        };
        let (qkv, a, b) = (part(&self.qkv), part(&self.a), part(&self.b));
        let (a_log, dt_bias) = (up(self.runtime, &self.a_log), up(self.runtime, &self.dt_bias));
        let batch = batch(self.runtime, &[(0, ROWS)], 1);
        let outputs = |is_apart: bool| -> Result<Array> {
            let states = [self.state(), self.state()];
            let delta = |a_log: &Array, dt_bias: &Array, state: &DeltaState| {
                let spec = self.spec(Regime::Decode, RowLog::None);
                qkv.gated_delta(&a, &b, a_log, dt_bias, state, &batch, spec)
            };
            let before = delta(&a_log, &dt_bias, &states[0])?;
            let (computed, bias) = (a_log.add(&dt_bias)?, dt_bias.sub(&a_log)?);
            if is_apart {
                self.runtime.eval(&[&before, &computed, &bias])?;
            }
            Array::concatenate(&[&before, &delta(&computed, &bias, &states[1])?], 0)
        };
        let [apart, together] =
            [true, false].map(|is_apart| download(&outputs(is_apart).expect("shapes fit")));
        assert!(apart == together, "computed decays of {:?}: outputs differ", self.shape);
    }

    fn rows_of_a_step_are_steps_of_a_row(&self) {
        let singles: Vec<Step> = (0..OPEN).map(|t| Step::plain(t..t + 1, Regime::Decode)).collect();
        self.expect_same("rows of a step", &[Step::plain(0..OPEN, Regime::Decode)], &singles);
    }

    /// All open rows are accepted, and committed by the next row.
    fn open_rows_are_rows(&self) {
        let open = Step { log: RowLog::KeepOpen, ..Step::plain(0..OPEN, Regime::Decode) };
        let rest =
            Step { log: RowLog::Commit, accepted: OPEN as u32, ..Step::plain(OPEN..6, Regime::Decode) };
        self.expect_same("open rows", &[Step::plain(0..6, Regime::Decode)], &[open, rest]);
    }

    fn chunks_of_a_step_are_steps_of_a_chunk(&self) {
        let cut = [0..64, 64..128, 128..150].map(|rows| Step::plain(rows, Regime::Prefill));
        self.expect_same("chunks of a step", &[Step::plain(0..150, Regime::Prefill)], &cut);
    }
}
