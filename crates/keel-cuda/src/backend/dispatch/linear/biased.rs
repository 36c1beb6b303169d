//! A product and its bias, onto a residual if there is one, as one product of cuBLASLt. The chain that adds the bias
//! absorbs the product.

use super::super::Call;
use super::super::elementwise::{RowStep, row_step};
use super::blas::with_bias;
use keel_array::{ArrayError, Binary, FusedStep, Kernel, Op, Source, WeightSpec};

/// The operands of `product + bias` or `residual + (product + bias)`, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backend::dispatch) struct Biased {
    product: usize,
    bias: usize,
    residual: Option<usize>,
}

impl Biased {
    /// The sum that a chain computes if its input number `product` is a product with this weight. `None` for other
    /// chains.
    pub fn of(chain: &Kernel, product: usize, weight: &WeightSpec) -> Option<Biased> {
        let sum = Biased::by_steps(&chain.op, product)?;
        let y = &chain.outputs[0].layout;
        let is_row = matches!(row_step(&chain.inputs[sum.bias].layout), Some(RowStep::OneRow));
        let is_whole = sum.residual.is_none_or(|i| chain.inputs[i].layout == *y);
        (is_row && is_whole && y.is_contiguous() && y.shape.last() == Some(&weight.rows)).then_some(sum)
    }

    fn by_steps(op: &Op, product: usize) -> Option<Biased> {
        // The other one of the two numbers.
        let other = |a: usize, b: usize| match product {
            _ if a == product => Some(b),
            _ if b == product => Some(a),
            _ => None,
        };
        match op {
            Op::Binary(Binary::Add) => Some(Biased { product, bias: other(0, 1)?, residual: None }),
            Op::Fused(fused) => {
                let [FusedStep::Binary(Binary::Add, Source::Input(a), Source::Input(b)), last] =
                    fused.steps[..]
                else {
                    return None;
                };
                let residual = match last {
                    FusedStep::Binary(Binary::Add, Source::Input(r), Source::Step(0))
                    | FusedStep::Binary(Binary::Add, Source::Step(0), Source::Input(r)) => r,
                    _ => return None,
                };
                let bias = other(a, b)?;
                let apart = residual != bias && residual != product;
                apart.then_some(Biased { product, bias, residual: Some(residual) })
            }
            _ => None,
        }
    }
}

/// Runs a chain that has absorbed a product.
pub(in crate::backend::dispatch) fn biased_linear(call: &Call<'_>) -> Result<(), ArrayError> {
    let absorbed = (0..call.inputs.len()).find_map(|i| Some((i, call.producer(i)?)));
    let Some((number, product)) = absorbed else { unreachable!("a product was absorbed") };
    let Op::Linear { weight, .. } = &product.kernel.op else {
        unreachable!("{} is no product with a weight", product.kernel.op.name())
    };
    let Some(sum) = Biased::of(call.kernel, number, weight) else {
        unreachable!("only a chain that adds a bias absorbs a product")
    };
    let rows = product.inputs[0].len() / weight.cols;
    let residual = sum.residual.map(|i| &call.inputs[i]);
    with_bias(weight, rows, residual, &call.inputs[sum.bias], &call.of_absorbed(product))
}

#[cfg(test)]
mod tests {
    use super::*;
    use keel_array::{Fused, Unary};

    fn chain(steps: &[FusedStep]) -> Op {
        Op::Fused(Fused { steps: steps.to_vec() }.into())
    }

    #[test]
    fn a_bias_and_a_residual_are_told_apart() {
        use Source::{Input, Step};
        let add = |a, b| FusedStep::Binary(Binary::Add, a, b);
        let sum = |bias, residual| Some(Biased { product: 1, bias, residual });
        assert_eq!(Biased::by_steps(&Op::Binary(Binary::Add), 1), sum(0, None));
        assert_eq!(Biased::by_steps(&Op::Binary(Binary::Sub), 1), None);
        let onto = |first, second| chain(&[add(Input(0), Input(1)), add(first, second)]);
        assert_eq!(Biased::by_steps(&onto(Input(2), Step(0)), 1), sum(0, Some(2)));
        assert_eq!(Biased::by_steps(&onto(Step(0), Input(2)), 1), sum(0, Some(2)));
        assert_eq!(Biased::by_steps(&onto(Step(0), Input(2)), 2), None, "the product has no bias");
        assert_eq!(Biased::by_steps(&onto(Step(0), Input(0)), 1), None, "the bias is no residual");
        assert_eq!(Biased::by_steps(&onto(Step(0), Step(0)), 1), None);
        let gelu = chain(&[add(Input(0), Input(1)), FusedStep::Unary(Unary::GeluTanh, Step(0))]);
        assert_eq!(Biased::by_steps(&gelu, 1), None);
    }
}
