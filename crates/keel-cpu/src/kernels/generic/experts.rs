//! The two ends of a mixture of experts: choosing experts, and summing their outputs.

use super::row_grain;
use super::sort::largest;
use crate::pool::Worker;
use crate::shared_slice::SharedMut;

/// Softmax probabilities of the `k` largest of each row of `experts` logits, divided by their sum if `normalise`,
/// and their indices.
///
/// # Panics
/// If the lengths do not fit.
pub fn route_top_k(
    logits: &[f32],
    experts: usize,
    k: usize,
    normalise: bool,
    weights: SharedMut<'_, f32>,
    chosen: SharedMut<'_, u32>,
    worker: &Worker<'_>,
) {
    let rows = logits.len() / experts;
    assert!(k <= experts && weights.len() == rows * k && chosen.len() == rows * k);
    for row in worker.claim(rows, row_grain(experts)).flatten() {
        let logits = &logits[row * experts..(row + 1) * experts];
        let range = row * k..(row + 1) * k;
        // SAFETY: each row is claimed once.
        let (weights, chosen) = unsafe { (weights.range(range.clone()), chosen.range(range)) };
        largest(logits, chosen);
        // NaN comes last and counts as negative infinity.
        let number = |logit: f32| if logit.is_nan() { f32::NEG_INFINITY } else { logit };
        let max = number(logits[chosen[0] as usize]);
        let power = |logit: f32| (number(logit) - max).exp();
        weights.iter_mut().zip(&*chosen).for_each(|(weight, &e)| *weight = power(logits[e as usize]));
        let total: f32 =
            if normalise { weights.iter().sum() } else { logits.iter().map(|&logit| power(logit)).sum() };
        weights.iter_mut().for_each(|weight| *weight /= total);
    }
}

/// An expert for every token.
#[derive(Clone, Copy)]
pub struct SharedExpert<'a> {
    /// `[T, N]`
    pub output: &'a [f32],
    /// `[T, 1]`
    pub gate: &'a [f32],
}

/// Operands of [`combine`].
#[derive(Clone, Copy)]
pub struct Combine<'a> {
    /// `[T, J, N]`: outputs of the chosen experts.
    pub experts: &'a [f32],
    /// `[T, J]`
    pub weights: &'a [f32],
    /// An expert for every token, if there is one.
    pub shared: Option<SharedExpert<'a>>,
    /// `[T, N]`, if there is one.
    pub residual: Option<&'a [f32]>,
    /// J
    pub choices: usize,
    /// N
    pub width: usize,
}

/// `y = sum_j weights[j] experts[j] [+ sigmoid(gate) shared] [+ residual]` for each row.
///
/// # Panics
/// If the lengths do not fit.
pub fn combine(task: &Combine<'_>, y: SharedMut<'_, f32>, worker: &Worker<'_>) {
    let (choices, width) = (task.choices, task.width);
    let rows = y.len() / width.max(1);
    assert!(task.experts.len() == rows * choices * width && task.weights.len() == rows * choices);
    assert!(task.residual.is_none_or(|x| x.len() == rows * width));
    assert!(task.shared.is_none_or(|x| x.output.len() == rows * width && x.gate.len() == rows));
    for row in worker.claim(rows, row_grain(width * (choices + 2))).flatten() {
        // SAFETY: each row is claimed once.
        let y = unsafe { y.range(row * width..(row + 1) * width) };
        y.fill(0.0);
        for choice in row * choices..(row + 1) * choices {
            add_scaled(task.weights[choice], &task.experts[choice * width..], y);
        }
        if let Some(SharedExpert { output, gate }) = task.shared {
            add_scaled(1.0 / (1.0 + (-gate[row]).exp()), &output[row * width..], y);
        }
        if let Some(residual) = task.residual {
            add_scaled(1.0, &residual[row * width..], y);
        }
    }
}

/// `y += factor * x`
fn add_scaled(factor: f32, x: &[f32], y: &mut [f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += factor * x);
}
