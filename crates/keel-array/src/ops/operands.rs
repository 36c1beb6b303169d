//! How many operands a kernel of each operation has.

use std::ops::RangeInclusive;

use super::{FusedStep, Op, RowLog, Source};

impl Op {
    /// Checks that a kernel has as many operands and results as its code uses. Those of a custom kernel are its own.
    ///
    /// # Errors
    /// One sentence.
    pub(crate) fn check_operands(&self, inputs: usize, outputs: usize) -> Result<(), String> {
        let (wanted, results) = (self.inputs(), self.outputs());
        if wanted.contains(&inputs) && results == outputs || matches!(self, Op::Custom(_)) {
            return Ok(());
        }
        let takes = match (*wanted.start(), *wanted.end()) {
            (least, usize::MAX) => format!("at least {least}"),
            (least, most) if least == most => format!("{least}"),
            (least, most) => format!("{least} to {most}"),
        };
        Err(format!("it has {inputs} operands and {outputs} results; it takes {takes}, and gives {results}"))
    }

    fn outputs(&self) -> usize {
        match self {
            Op::Sort { .. } | Op::TopK { .. } | Op::AddRmsNorm { .. } | Op::RouteTopK { .. } => 2,
            _ => 1,
        }
    }

    fn inputs(&self) -> RangeInclusive<usize> {
        let exactly = |count| count..=count;
        match self {
            Op::Fill(_) | Op::Arange { .. } | Op::Random { .. } | Op::Receive { .. } => exactly(0),
            Op::View(_) | Op::Copy | Op::Cast | Op::Unary(_) => exactly(1),
            Op::Reduce(_) | Op::ArgReduce { .. } | Op::Softmax | Op::CumSum { .. } => exactly(1),
            Op::Sort { .. } | Op::TopK { .. } | Op::SwiGlu | Op::RouteTopK { .. } => exactly(1),
            Op::Send { .. } | Op::AllReduce { .. } | Op::AllGather { .. } | Op::ReduceScatter { .. } => {
                exactly(1)
            }
            Op::Binary(_) | Op::SliceUpdate { .. } | Op::Sample | Op::Matmul => exactly(2),
            Op::Take | Op::TakeAlong | Op::RmsNorm { .. } | Op::SigmoidGate | Op::Embedding { .. } => {
                exactly(2)
            }
            Op::Where | Op::AddRmsNorm { .. } | Op::GatedRmsNorm { .. } | Op::LayerNorm { .. } => exactly(3),
            Op::Rope(_) | Op::GatherLinear { .. } => exactly(3),
            Op::NormRope { .. } | Op::RotatePairs => exactly(4),
            Op::Linear { residual, .. } => exactly(2 + usize::from(*residual)),
            Op::CombineExperts { shared, residual } => {
                exactly(2 + 2 * usize::from(*shared) + usize::from(*residual))
            }
            Op::CausalConv(spec) => exactly(if spec.log == RowLog::None { 5 } else { 7 }),
            Op::GatedDelta(spec) => exactly(if spec.log == RowLog::None { 9 } else { 11 }),
            // `until` is optional.
            Op::PagedAttention(_) => 8..=9,
            Op::Concatenate { .. } | Op::Custom(_) => 1..=usize::MAX,
            Op::Fused(fused) => exactly(fused.steps.iter().map(inputs_of_step).max().unwrap_or(0)),
        }
    }
}

/// One more than the last input that a step names.
fn inputs_of_step(step: &FusedStep) -> usize {
    let input = |source| match source {
        Source::Input(input) => input.saturating_add(1),
        Source::Step(_) => 0,
    };
    match *step {
        FusedStep::Unary(_, x) => input(x),
        FusedStep::Binary(_, x, y) => input(x).max(input(y)),
    }
}
