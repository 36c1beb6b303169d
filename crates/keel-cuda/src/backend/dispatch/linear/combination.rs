//! The end of a mixture for few tokens: one launch computes the down projections of the chosen experts, and of a shared
//! expert of the same shape, and adds them up. See `mixture.cu`.

use super::super::{Call, Geometry};
use super::mixture::CHOICES_MAX;
use super::{
    Arithmetic, SelectBy, arithmetic, codes_and_pairs, col_tiles, row_tiles, takes_few_rows, weight_key,
};
use crate::backend::Mode;
use crate::backend::weights::Coding;
use crate::kernels::{KernelKey, MIXTURE};
use crate::parameters::ChosenDown;
use keel_array::{ArrayError, Kernel, Op, OperandMemory, WeightSpec};

/// Bytes of shared memory of a block, at most.
const SHARED_MAX: usize = 40 << 10;

/// Warps of a block, at most.
const WARPS_MAX: usize = 20;

/// Whether a combination absorbs the experts' down projection.
pub(in crate::backend::dispatch) fn takes_down(
    combination: &Kernel,
    weight: &WeightSpec,
    product: &Kernel,
    mode: Mode,
) -> bool {
    let (x, choices) = (&product.inputs[0], combination.inputs[1].layout.shape.last().copied().unwrap_or(0));
    let own_rows = x.layout.shape.elements() == product.inputs[2].layout.shape.elements() * weight.cols;
    // With this kernel the experts order the sums together. If several devices may hold them, each is summed by itself.
    !mode.spans_devices()
        && arithmetic(weight, SelectBy::of(product, mode)) == Arithmetic::Codes
        && takes_few_rows(weight, product, mode)
        && own_rows
        && is_plain(product)
        && choices <= CHOICES_MAX
        && Down::of(weight, choices + 1).shared_bytes(weight) <= SHARED_MAX
}

/// Whether it also absorbs the shared expert's: a product like the others.
pub(in crate::backend::dispatch) fn takes_shared_down(
    combination: &Kernel,
    weight: &WeightSpec,
    product: &Kernel,
    mode: Mode,
) -> bool {
    let alike = combination.producer(0).is_some_and(|down| match &down.op {
        Op::GatherLinear { weight: stack } => is_alike(stack, weight),
        _ => false,
    });
    alike && takes_few_rows(weight, product, mode) && is_plain(product)
}

/// Whether the input of the product lies in memory and can be read 16 bytes at a time.
fn is_plain(product: &Kernel) -> bool {
    let x = &product.inputs[0];
    product.absorbed.is_empty()
        && matches!(x.memory, OperandMemory::Temp(_))
        && x.layout.offset.is_multiple_of(4)
}

/// Whether a weight is coded and shaped as one of a stack.
pub(super) fn is_alike(stack: &WeightSpec, weight: &WeightSpec) -> bool {
    *weight == WeightSpec { experts: 1, ..*stack }
}

/// How a combination is cut. This orders the sums, so it depends on the weight's shape and the number of products
/// alone.
struct Down {
    products: usize,
    unit: usize,
    units: usize,
    warps: usize,
}

impl Down {
    fn of(weight: &WeightSpec, products: usize) -> Down {
        let coding = Coding::of(weight.format);
        let narrow = coding.is_some_and(|coding| coding.bits == 8 || coding.group == 16);
        let unit = if narrow { 2 } else { 4 };
        let units = products * col_tiles(weight).div_ceil(unit);
        let turns = units.div_ceil(WARPS_MAX);
        Down { products, unit, units, warps: units.div_ceil(turns) }
    }

    fn shared_bytes(&self, weight: &WeightSpec) -> usize {
        let parts = Coding::of(weight.format).map_or(1, |coding| coding.parts());
        self.products * (col_tiles(weight) * (64 + 8 * parts)).next_multiple_of(16)
            + self.units * 17 * size_of::<f32>()
            + CHOICES_MAX * 8
    }
}

/// A combination with the products that it has absorbed. If it knows the routing that chose the experts and the logits
/// are settled, it finds the experts itself, before its wait.
pub(in crate::backend::dispatch) fn combine(
    call: &Call<'_>,
    route: Option<&Call<'_>>,
) -> Result<(), ArrayError> {
    let Some(down) = call.producer(0) else { unreachable!("the product was absorbed") };
    let route = route.filter(|route| call.is_settled(&route.strided(0)));
    let Op::GatherLinear { weight } = &down.kernel.op else { unreachable!("experts' products are combined") };
    let &Op::CombineExperts { shared: has_shared, residual } = &call.kernel.op else {
        unreachable!("a combination absorbs products")
    };
    let probabilities = &call.inputs[1];
    let (choices, tokens) = (probabilities.width(), probabilities.rows());
    let always = has_shared.then(|| call.producer(2)).flatten();
    let cut = Down::of(weight, choices + usize::from(always.is_some()));
    let normalises =
        route.is_some_and(|route| matches!(route.kernel.op, Op::RouteTopK { normalise: true, .. }));
    let mut key = mixture_key("chosen_down", weight, choices, normalises)
        .define("SWIGLU", 0)
        .define("SPLIT", cut.warps)
        .define("UNIT", cut.unit)
        .define("ALWAYS", u8::from(always.is_some()))
        .define("ADDED", u8::from(has_shared && always.is_none()))
        .define("EARLY", u8::from(route.is_some()));
    let gate = has_shared.then(|| call.strided(3));
    if let Some(gate) = gate {
        key = key.define("SHARE_ROW", gate.row_stride(1));
    }
    let logits = route.map(|route| route.strided(0));
    if let Some(logits) = logits {
        key = key.define("LOGITS_ROW", logits.row_stride(1));
    }
    let [codes, pairs] = codes_and_pairs(weight, &down.inputs[1]);
    let always_at = always.map(|always| match &always.kernel.op {
        Op::Linear { weight, .. } => codes_and_pairs(weight, &always.inputs[1]),
        _ => unreachable!("a product was absorbed"),
    });
    let finds_none = logits.is_none();
    let parameters = ChosenDown {
        codes,
        pairs,
        always_codes: always_at.map(|[codes, _]| codes),
        always_pairs: always_at.map(|[_, pairs]| pairs),
        inner: down.inputs[0].address,
        always: has_shared.then(|| always.map_or(&call.inputs[2], |always| &always.inputs[0]).address),
        gate: gate.map(|gate| gate.address),
        logits: logits.map(|logits| logits.address),
        probabilities: finds_none.then_some(probabilities.address),
        chosen: finds_none.then_some(down.inputs[2].address),
        fault: finds_none.then_some(call.fault),
        kernel: finds_none.then_some(call.index),
        residual: if residual { call.inputs[call.inputs.len() - 1].address } else { 0 },
        y: call.outputs[0].address,
    };
    let grid = (row_tiles(weight), tokens, 1);
    let geometry = Geometry { grid, block: (32 * cut.warps, 1, 1), shared_bytes: 0 };
    call.launch(&key, geometry, &parameters)?;
    call.settle();
    Ok(())
}

/// Constants of both entries of the source.
pub(super) fn mixture_key(
    entry: &'static str,
    weight: &WeightSpec,
    choices: usize,
    normalises: bool,
) -> KernelKey {
    weight_key(MIXTURE, entry, weight)
        .define("EXPERTS", weight.experts)
        .define("CHOICES", choices)
        .define("NORMALISE", u8::from(normalises))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::assert_values;
    use keel_array::{Compute, DType, WeightFormat};

    #[test]
    fn the_source_has_the_same_units() {
        for (bits, group_size, cols, choices) in [(4, 64, 512, 8), (8, 32, 1024, 4), (3, 128, 640, 2)] {
            let format = WeightFormat::Affine { bits, group_size, scale_dtype: DType::BF16 };
            let spec = WeightSpec { experts: 64, rows: 2048, cols, format, compute: Compute::Auto };
            let cut = Down::of(&spec, choices);
            let key = mixture_key("chosen_down", &spec, choices, false)
                .define("SWIGLU", 0)
                .define("SPLIT", cut.warps)
                .define("UNIT", cut.unit)
                .define("ALWAYS", 0)
                .define("ADDED", 0)
                .define("EARLY", 0);
            let bytes = "PRODUCTS * PREPARED_BYTES + sizeof(float[ALL_UNITS][17])";
            let bytes = (bytes, cut.shared_bytes(&spec) - CHOICES_MAX * 8);
            assert_values(key, &[("THREADS", 32 * cut.warps), ("ALL_UNITS", cut.units), bytes]);
        }
    }

    #[test]
    fn warps_share_the_units_of_all_products() {
        let of = |bits, cols, products| {
            let format = WeightFormat::Affine { bits, group_size: 64, scale_dtype: DType::BF16 };
            let spec = WeightSpec { experts: 256, rows: 2048, cols, format, compute: Compute::Auto };
            let down = Down::of(&spec, products);
            (down.unit, down.units, down.warps)
        };
        assert_eq!(of(4, 512, 9), (4, 18, 18));
        assert_eq!(of(8, 512, 9), (2, 36, 18));
        assert_eq!(of(4, 1024, 11), (4, 44, 15));
        assert_eq!(of(4, 64, 2), (4, 2, 2));
    }
}
