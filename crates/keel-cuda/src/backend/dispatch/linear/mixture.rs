//! The experts of a mixture for few tokens, in two launches instead of six: what routes is part of the launch of gate and up,
//! what combines is part of that of down, and a shared expert of the same shape is one more of either. See `mixture.cu`.

use super::super::{Bound, BoundKernel, Call, Geometry};
use super::few_rows::{Entry, FewRows};
use super::tuning::Tuning;
use super::{Arithmetic, arithmetic, col_tiles, packed, row_tiles, takes_few_rows, weight_key};
use crate::backend::Mode;
use crate::backend::weights::Coding;
use crate::driver::Arguments;
use crate::kernels::{KernelKey, MIXTURE};
use keel_array::{ArrayError, Kernel, Op, Slot, WeightSpec};

/// Experts that a warp chooses among, and choices that its lanes keep.
const EXPERTS_MAX: usize = 512;
const CHOICES_MAX: usize = 32;

/// Columns of x that a block prepares, and bytes of shared memory of a block that combines.
const COLS_MAX: usize = 16_384;
const SHARED_MAX: usize = 40 << 10;

/// Blocks of a grid along y.
const GRID_MAX: usize = 65_535;

/// Warps of a block that combines, at most.
const WARPS_MAX: usize = 20;

/// Whether a combination runs the experts' down projection within itself.
pub(in crate::backend::dispatch) fn takes_down(
    combination: &Kernel,
    weight: &WeightSpec,
    product: &Kernel,
    mode: Mode,
) -> bool {
    let (x, choices) = (&product.inputs[0], combination.inputs[1].layout.shape.last().copied().unwrap_or(0));
    let own_rows = x.layout.shape.elements() == product.inputs[2].layout.shape.elements() * weight.cols;
    arithmetic(weight) == Arithmetic::Codes
        && takes_few_rows(weight, product, mode)
        && own_rows
        && is_plain(product)
        && choices <= CHOICES_MAX
        && Down::of(weight, choices + 1).shared_bytes(weight) <= SHARED_MAX
}

/// Whether it runs the shared expert's, too: a product like the others.
pub(in crate::backend::dispatch) fn takes_shared_down(
    combination: &Kernel,
    weight: &WeightSpec,
    product: &Kernel,
    mode: Mode,
) -> bool {
    let alike = combination.maker(0).is_some_and(|down| match &down.op {
        Op::GatherLinear { weight: stack } => is_alike(stack, weight),
        _ => false,
    });
    alike && takes_few_rows(weight, product, mode) && is_plain(product)
}

/// Whether what is multiplied lies in memory, 16 bytes at a time.
fn is_plain(product: &Kernel) -> bool {
    let x = &product.inputs[0];
    product.absorbed.is_empty() && matches!(x.slot, Slot::Temp(_)) && x.layout.offset.is_multiple_of(4)
}

/// Whether a weight is coded and shaped as one of a stack.
fn is_alike(stack: &WeightSpec, weight: &WeightSpec) -> bool {
    *weight == WeightSpec { experts: 1, ..*stack }
}

/// How a combination is cut; a function of the weight's shape and the number of products alone, for it orders the sums.
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

/// A combination with the products that it has absorbed. With the routing that chose the experts it finds these for itself, ahead
/// of its turn if the logits are there.
pub(in crate::backend::dispatch) fn combine(
    call: &Call<'_>,
    route: Option<&Call<'_>>,
) -> Result<(), ArrayError> {
    let Some(down) = call.maker(0) else { unreachable!("the product was absorbed") };
    let route = route.filter(|route| call.is_settled(&route.strided(0)));
    let Op::GatherLinear { weight } = &down.kernel.op else { unreachable!("experts' products are combined") };
    let (probabilities, residual) = (&call.inputs[1], &call.inputs[call.inputs.len() - 1]);
    let (choices, tokens) = (probabilities.width(), probabilities.rows());
    let has_shared = call.inputs.len() == 5;
    let always = call.maker(2).filter(|_| has_shared);
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
    let mut arguments = packed(Arguments::default(), weight, &down.inputs[1]);
    if let Some(always) = always {
        let Op::Linear { weight, .. } = &always.kernel.op else { unreachable!("a product was absorbed") };
        arguments = packed(arguments, weight, &always.inputs[1]);
    }
    arguments = arguments.pointer(down.inputs[0].address);
    if has_shared {
        let (input, gate) = (always.map_or(&call.inputs[2], |always| &always.inputs[0]), call.strided(3));
        key = key.define("SHARE_ROW", gate.row_stride(1));
        arguments = arguments.pointer(input.address).pointer(gate.address);
    }
    arguments = match route {
        Some(route) => {
            let logits = route.strided(0);
            key = key.define("LOGITS_ROW", logits.row_stride(1));
            arguments.pointer(logits.address)
        }
        None => arguments
            .pointer(probabilities.address)
            .pointer(down.inputs[2].address)
            .pointer(call.fault)
            .u32(call.index),
    };
    let arguments = arguments.pointer(residual.address).pointer(call.outputs[0].address);
    let grid = (row_tiles(weight), tokens, 1);
    let geometry = Geometry { grid, block: (32 * cut.warps, 1, 1), shared_bytes: 0 };
    call.launch(&key, geometry, arguments)
}

/// Constants of both entries of the source.
fn mixture_key(entry: &'static str, weight: &WeightSpec, choices: usize, normalises: bool) -> KernelKey {
    weight_key(MIXTURE, entry, weight)
        .define("EXPERTS", weight.experts)
        .define("CHOICES", choices)
        .define("NORMALISE", u8::from(normalises))
}

/// Kernels of a step that follow each other and make up a mixture.
struct Mixture<'c, 'a> {
    /// The router's product. Where it is in front, x is settled behind it.
    router: Option<&'c Call<'a>>,
    route: &'c Call<'a>,
    choices: usize,
    normalises: bool,
    /// SwiGLU behind the chosen experts' gate and up projection.
    chosen: &'c Call<'a>,
    weight: &'a WeightSpec,
    rows: FewRows<'a>,
    /// SwiGLU behind the shared expert's, if it is a product like theirs, and that product.
    shared: Option<(&'c Call<'a>, &'c BoundKernel<'a>)>,
    combination: Option<&'c Call<'a>>,
}

/// Puts the launches of a mixture on the stream, if the kernels begin with one; returns how many kernels that were. 0 if they
/// do not; then nothing has been done.
pub(in crate::backend::dispatch) fn run(calls: &[Call<'_>]) -> Result<usize, ArrayError> {
    let Some(mixture) = Mixture::find(calls) else { return Ok(0) };
    let mut done = 0;
    let mut note = |call: &Call<'_>| {
        call.note_written();
        done += 1;
    };
    if let Some((router, Op::Linear { weight, .. })) =
        mixture.router.map(|router| (router, &router.kernel.op))
    {
        FewRows::of(weight, &router.bound).late().run(None, router)?;
        note(router);
    }
    mixture.gate_up()?;
    [Some(mixture.route), Some(mixture.chosen), mixture.shared.map(|(call, _)| call)]
        .into_iter()
        .flatten()
        .for_each(&mut note);
    if let Some(combination) = mixture.combination {
        combine(combination, Some(mixture.route))?;
        note(combination);
    }
    Ok(done)
}

impl<'c, 'a> Mixture<'c, 'a> {
    fn find(calls: &'c [Call<'a>]) -> Option<Mixture<'c, 'a>> {
        let is_product = |call: &Call<'_>| matches!(call.kernel.op, Op::Linear { .. });
        let (router, rest) = match calls {
            [first, rest @ ..] if is_product(first) => (Some(first), rest),
            _ => (None, calls),
        };
        let [route, chosen, rest @ ..] = rest else { return None };
        let (&Op::RouteTopK { k: choices, normalise: normalises }, Op::SwiGlu) =
            (&route.kernel.op, &chosen.kernel.op)
        else {
            return None;
        };
        let product = chosen.maker(0)?;
        let Op::GatherLinear { weight } = &product.kernel.op else { return None };
        let rows = FewRows::of(weight, product);
        let found = Mixture {
            router,
            route,
            choices,
            normalises,
            chosen,
            weight,
            rows,
            shared: None,
            combination: None,
        };
        if !found.fits(product) || router.is_some_and(|router| !found.is_router(router)) {
            return None;
        }
        let shared = rest.first().and_then(|call| Some((call, call.maker(0)?)));
        let shared = shared.filter(|(call, product)| found.takes_shared(call, product));
        let next = rest.get(usize::from(shared.is_some()));
        let combination = next.filter(|call| found.is_combined_by(call));
        Some(Mixture { shared, combination, ..found })
    }

    /// Whether the choice and the experts' products can be one launch.
    fn fits(&self, product: &BoundKernel<'_>) -> bool {
        let (Mixture { weight, rows, .. }, logits) = (self, self.route.strided(0));
        let [_, experts] = &self.route.outputs[..] else { return false };
        let tokens = rows.rows();
        arithmetic(weight) == Arithmetic::Codes
            && weight.experts == logits.width()
            && weight.experts <= EXPERTS_MAX
            && self.choices <= CHOICES_MAX
            && weight.cols <= COLS_MAX
            && tokens == logits.rows()
            && (1..=GRID_MAX / (self.choices + 1)).contains(&tokens)
            && product.inputs[2].address == experts.address
            && product.inputs[2].len() == experts.len()
            && matches!(rows.entry, Entry::Plain | Entry::Norm(..))
            && rows.is_aligned()
            && self.is_apart(&[self.route, self.chosen])
    }

    /// Whether what these kernels write is apart from what blocks of the launch may still have to read, and from each other.
    fn is_apart(&self, calls: &[&Call<'_>]) -> bool {
        let written: Vec<&Bound<'_>> = calls.iter().flat_map(|call| &call.outputs).collect();
        let read = self.rows.operands().chain([self.route.strided(0)]);
        read.into_iter().all(|read| written.iter().all(|y| !y.overlaps(&read)))
            && written.iter().enumerate().all(|(i, y)| written[..i].iter().all(|other| !y.overlaps(other)))
    }

    fn is_router(&self, router: &Call<'_>) -> bool {
        match &router.kernel.op {
            Op::Linear { weight, residual: false } => {
                takes_few_rows(weight, router.kernel, router.mode)
                    && FewRows::of(weight, &router.bound).has_rows_of(&self.rows)
            }
            _ => false,
        }
    }

    fn takes_shared(&self, call: &Call<'_>, product: &BoundKernel<'_>) -> bool {
        match (&call.kernel.op, &product.kernel.op) {
            (Op::SwiGlu, Op::Linear { weight, residual: false }) => {
                is_alike(self.weight, weight)
                    && FewRows::of(weight, product).has_rows_of(&self.rows)
                    && self.is_apart(&[self.route, self.chosen, call])
            }
            _ => false,
        }
    }

    /// Whether a combination can find the experts from the same logits.
    fn is_combined_by(&self, call: &Call<'_>) -> bool {
        let [probabilities, experts] = &self.route.outputs[..] else { return false };
        let Some(down) = call.maker(0) else { return false };
        let stacked =
            matches!(&down.kernel.op, Op::GatherLinear { weight } if weight.experts == self.weight.experts);
        matches!(call.kernel.op, Op::CombineExperts { .. })
            && stacked
            && call.inputs[1].address == probabilities.address
            && down.inputs[2].address == experts.address
            && !call.outputs[0].overlaps(&self.route.strided(0))
    }

    /// The launch of the choice and of gate and up.
    fn gate_up(&self) -> Result<(), ArrayError> {
        let tuning = Tuning::of(self.weight, 1, true, true);
        let products = self.choices + usize::from(self.shared.is_some());
        // So many blocks that all of them are there at once, as far as registers allow.
        let blocks_min = match Coding::of(self.weight.format) {
            Some(coding) if coding.bits <= 4 => 24 / tuning.split,
            _ => 16 / tuning.split,
        };
        let early = self.rows.operands().all(|operand| self.chosen.is_settled(&operand));
        let mut key = mixture_key("chosen_gate_up", self.weight, self.choices, self.normalises)
            .define("SWIGLU", 1)
            .define("SPLIT", tuning.split)
            .define("UNIT", tuning.unit)
            .define("MIN_BLOCKS", blocks_min.max(1))
            .define("ALWAYS", u8::from(self.shared.is_some()))
            .define("EARLY", u8::from(early));
        let mut arguments = packed(Arguments::default(), self.weight, &self.rows.packed);
        if let Some((_, product)) = self.shared {
            let spec = WeightSpec { experts: 1, ..*self.weight };
            arguments = packed(arguments, &spec, &product.inputs[1]);
        }
        arguments = arguments.pointer(self.rows.x.address);
        if let Entry::Norm(norm, eps) = self.rows.entry {
            key = key.define("NORM", 1).define("EPS", format!("{eps:e}f"));
            arguments = arguments.pointer(norm.address);
        }
        let outputs = self.route.outputs.iter().chain(&self.chosen.outputs);
        let logits = self.route.strided(0);
        key = key.define("LOGITS_ROW", logits.row_stride(1));
        arguments = arguments.pointer(logits.address);
        arguments = outputs.fold(arguments, |arguments, y| arguments.pointer(y.address));
        if let Some((call, _)) = self.shared {
            arguments = arguments.pointer(call.outputs[0].address);
        }
        let geometry = Geometry {
            grid: (row_tiles(self.weight) / 2, self.rows.rows() * products, 1),
            block: (32 * tuning.split, 1, 1),
            shared_bytes: 0,
        };
        self.chosen.launch(&key, geometry, arguments)?;
        self.chosen.settle();
        Ok(())
    }
}
