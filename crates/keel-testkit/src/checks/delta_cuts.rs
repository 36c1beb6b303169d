//! How rows of the gated delta rule are divided into steps does not change a bit, for states in f32 and in f16.

use std::ops::Range;

use super::sequence::{batch, draw, up};
use super::share::is_mine;
use super::{download, rounded, upload};
use crate::cases;
use crate::naive::gated_delta::Shape;
use crate::naive::tensor::Tensor;
use crate::random::Random;
use keel_array::{Array, DType, DeltaState, GatedDeltaSpec, Regime, RowLog, Runtime};

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
