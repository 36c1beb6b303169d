//! The experts of a mixture for few tokens, in two launches instead of six. Each block of gate and up finds its expert
//! itself. The down projections are added up in the launch that computes them. A shared expert of the same shape is one
//! more expert. See `mixture.cu`.

use super::super::support::GRID_MAX;
use super::super::{BoundKernel, Call, Geometry};
use super::combination::{combine, is_alike, mixture_key};
use super::few_rows::{Entry, FewRows};
use super::tuning::Tuning;
use super::{Arithmetic, SelectBy, arithmetic, codes_and_pairs, row_tiles, takes_few_rows};
use crate::backend::Mode;
use crate::backend::weights::Coding;
use crate::parameters::ChosenGateUp;
use keel_array::{ArrayError, Kernel, Op, Operand, WeightSpec};

/// Experts that a warp chooses among, and choices that its lanes keep.
const EXPERTS_MAX: usize = 512;
pub(super) const CHOICES_MAX: usize = 32;

/// Columns of x that a block prepares.
const COLS_MAX: usize = 16_384;

/// The name of a group of kernels that make up a mixture.
pub(in crate::backend::dispatch) const NAME: &str = "mixture";

/// Consecutive kernels of a step that make up a mixture: kernels of a program, or calls of a launch.
struct Parts<'k, K> {
    /// The router's product, if the kernels begin with it. x is settled after it.
    router: Option<&'k K>,
    route: &'k K,
    /// SwiGLU after the chosen experts' gate and up projection.
    chosen: &'k K,
    /// SwiGLU after the shared expert's gate and up projection.
    shared: Option<&'k K>,
    combination: Option<&'k K>,
}

impl<'k, K> Parts<'k, K> {
    /// The parts by their operations alone, if the kernels begin with them.
    fn of(kernels: &'k [K], op: impl Fn(&K) -> &Op) -> Option<Parts<'k, K>> {
        let (router, rest) = match kernels {
            [first, rest @ ..] if matches!(op(first), Op::Linear { .. }) => (Some(first), rest),
            _ => (None, kernels),
        };
        let [route, chosen, rest @ ..] = rest else { return None };
        if !matches!((op(route), op(chosen)), (Op::RouteTopK { .. }, Op::SwiGlu)) {
            return None;
        }
        let shared = rest.first().filter(|next| matches!(op(next), Op::SwiGlu));
        let combination = rest.get(usize::from(shared.is_some()));
        let combination = combination.filter(|next| matches!(op(next), Op::CombineExperts { .. }));
        Some(Parts { router, route, chosen, shared, combination })
    }

    fn len(&self) -> usize {
        let optional = [self.router, self.shared, self.combination];
        2 + optional.into_iter().flatten().count()
    }
}

/// How many of the kernels are one mixture, beginning with the first; `None` if they do not begin with one.
pub(in crate::backend::dispatch) fn group_len(kernels: &[Kernel], mode: Mode) -> Option<usize> {
    let parts = Parts::of(kernels, |kernel| &kernel.op)?;
    let planned = Planned { rows: Rows::of(parts.chosen.producer(0)?)?, parts, mode };
    if !planned.fits() || planned.parts.router.is_some_and(|router| !planned.is_router(router)) {
        return None;
    }
    let shared = planned.parts.shared.filter(|shared| planned.takes_shared(shared));
    let is_next = planned.parts.shared.is_some() == shared.is_some();
    let combination = planned.parts.combination.filter(|next| is_next && planned.is_combined_by(next));
    Some(Parts { shared, combination, ..planned.parts }.len())
}

/// The rows that a product multiplies, as a program describes them.
struct Rows<'k> {
    x: &'k Operand,
    /// The norm's weight and eps.
    norm: Option<(&'k Operand, f32)>,
    weight: &'k WeightSpec,
}

impl<'k> Rows<'k> {
    /// `None` if anything but a norm comes before the product.
    fn of(product: &'k Kernel) -> Option<Rows<'k>> {
        let (Op::Linear { weight, .. } | Op::GatherLinear { weight }) = &product.op else { return None };
        let (x, norm) = match product.producer(0) {
            None => (&product.inputs[0], None),
            Some(producer) => match producer.op {
                Op::RmsNorm { eps } => (&producer.inputs[0], Some((&producer.inputs[1], eps.get()))),
                _ => return None,
            },
        };
        Some(Rows { x, norm, weight })
    }

    fn count(&self) -> usize {
        self.x.layout.shape.elements() / self.weight.cols
    }

    /// Whether another product multiplies the same rows.
    fn are_those_of(&self, product: &Kernel) -> bool {
        Rows::of(product).is_some_and(|other| {
            let enter_alike = match (self.norm, other.norm) {
                (None, None) => true,
                (Some((a, a_eps)), Some((b, b_eps))) => a.is_same(b) && a_eps.to_bits() == b_eps.to_bits(),
                _ => false,
            };
            enter_alike
                && self.x.is_same(other.x)
                && self.x.layout.shape.elements() == other.x.layout.shape.elements()
                && self.weight.cols == other.weight.cols
        })
    }
}

/// Kernels of a program that look like a mixture.
struct Planned<'k> {
    parts: Parts<'k, Kernel>,
    rows: Rows<'k>,
    mode: Mode,
}

impl Planned<'_> {
    /// Whether the choice and the experts' products can be one launch.
    fn fits(&self) -> bool {
        let (Planned { parts, rows, .. }, logits) = (self, self.parts.route.source(0));
        let ([_, experts], Some(product), &Op::RouteTopK { k: choices, .. }) =
            (&parts.route.outputs[..], parts.chosen.producer(0), &parts.route.op)
        else {
            return false;
        };
        let (weight, tokens) = (rows.weight, rows.count());
        let width = logits.layout.shape.last().copied().unwrap_or(1);
        matches!(product.op, Op::GatherLinear { .. })
            && arithmetic(weight, SelectBy::of(product, self.mode)) == Arithmetic::Codes
            && weight.experts == width
            && weight.experts <= EXPERTS_MAX
            && choices <= CHOICES_MAX
            && weight.cols <= COLS_MAX
            && tokens * width == logits.layout.shape.elements()
            && (1..=GRID_MAX / (choices + 1)).contains(&tokens)
            && is_unchanged(&product.inputs[2], experts)
            && self.is_apart(&[parts.route, parts.chosen])
    }

    /// Whether the outputs of these kernels overlap neither each other nor anything that blocks of the launch may still
    /// read.
    fn is_apart(&self, kernels: &[&Kernel]) -> bool {
        let written: Vec<&Operand> = kernels.iter().flat_map(|kernel| &kernel.outputs).collect();
        let norm = self.rows.norm.map(|(weight, _)| weight);
        let mut read = norm.into_iter().chain([self.rows.x, self.parts.route.source(0)]);
        read.all(|read| written.iter().all(|y| !y.may_overlap(read)))
            && written.iter().enumerate().all(|(i, y)| written[..i].iter().all(|other| !y.may_overlap(other)))
    }

    fn is_router(&self, router: &Kernel) -> bool {
        match &router.op {
            Op::Linear { weight, residual: false } => {
                takes_few_rows(weight, router, self.mode) && self.rows.are_those_of(router)
            }
            _ => false,
        }
    }

    fn takes_shared(&self, shared: &Kernel) -> bool {
        let Some(product) = shared.producer(0) else { return false };
        match &product.op {
            Op::Linear { weight, residual: false } => {
                is_alike(self.rows.weight, weight)
                    && self.rows.are_those_of(product)
                    && self.is_apart(&[self.parts.route, self.parts.chosen, shared])
            }
            _ => false,
        }
    }

    /// Whether a combination can find the experts from the same logits.
    fn is_combined_by(&self, combination: &Kernel) -> bool {
        let [probabilities, experts] = &self.parts.route.outputs[..] else { return false };
        let Some(down) = combination.producer(0) else { return false };
        let experts_max = self.rows.weight.experts;
        matches!(&down.op, Op::GatherLinear { weight } if weight.experts == experts_max)
            && is_unchanged(&combination.inputs[1], probabilities)
            && is_unchanged(&down.inputs[2], experts)
            && !combination.outputs[0].may_overlap(self.parts.route.source(0))
    }
}

/// Whether an operand is this result of the routing, a row of choices for each token. After a reshape it is not.
fn is_unchanged(operand: &Operand, result: &Operand) -> bool {
    operand.is_same(result) && operand.layout.shape == result.layout.shape
}

/// The calls of a mixture, and the numbers of its launch.
struct Mixture<'c, 'a> {
    parts: Parts<'c, Call<'a>>,
    choices: usize,
    normalises: bool,
    weight: &'a WeightSpec,
    rows: FewRows<'a>,
    /// SwiGLU and the product before it, of a shared expert that is like the chosen ones.
    shared: Option<(&'c Call<'a>, &'c BoundKernel<'a>)>,
}

/// Puts the launches of a mixture on the stream. Its kernels are those that [`group_len`] has counted.
pub(in crate::backend::dispatch) fn run(calls: &[Call<'_>]) -> Result<(), ArrayError> {
    let Some(mixture) = Mixture::of(calls) else { unreachable!("a group of kernels is a mixture") };
    let Parts { router, route, chosen, shared, combination } = mixture.parts;
    if let Some((router, Op::Linear { weight, .. })) = router.map(|router| (router, &router.kernel.op)) {
        FewRows::of(weight, &router.bound).late().run(None, router)?;
        router.note_written();
    }
    mixture.gate_up()?;
    [Some(route), Some(chosen), shared].into_iter().flatten().for_each(Call::note_written);
    if let Some(combination) = combination {
        combine(combination, Some(route))?;
        combination.note_written();
    }
    Ok(())
}

impl<'c, 'a> Mixture<'c, 'a> {
    fn of(calls: &'c [Call<'a>]) -> Option<Mixture<'c, 'a>> {
        let parts = Parts::of(calls, |call| &call.kernel.op).filter(|parts| parts.len() == calls.len())?;
        let &Op::RouteTopK { k: choices, normalise: normalises } = &parts.route.kernel.op else {
            return None;
        };
        let product = parts.chosen.producer(0)?;
        let Op::GatherLinear { weight } = &product.kernel.op else { return None };
        let shared = parts.shared.and_then(|call| Some((call, call.producer(0)?)));
        Some(Mixture { choices, normalises, weight, rows: FewRows::of(weight, product), shared, parts })
    }

    /// Launches the choice of experts together with gate and up.
    fn gate_up(&self) -> Result<(), ArrayError> {
        self.rows.check_aligned(self.parts.chosen)?;
        let tuning = Tuning::of(self.weight, 1, true, true, self.parts.chosen.select_by());
        let products = self.choices + usize::from(self.shared.is_some());
        // Blocks that a multiprocessor has room for: all blocks of the grid should run at once, as far as registers
        // allow.
        let blocks_min = match Coding::of(self.weight.format) {
            Some(coding) if coding.bits <= 4 => 24 / tuning.split,
            _ => 16 / tuning.split,
        };
        let early = self.rows.operands().all(|operand| self.parts.chosen.is_settled(&operand));
        let mut key = mixture_key("chosen_gate_up", self.weight, self.choices, self.normalises)
            .define("SWIGLU", 1)
            .define("SPLIT", tuning.split)
            .define("UNIT", tuning.unit)
            .define("MIN_BLOCKS", blocks_min.max(1))
            .define("ALWAYS", u8::from(self.shared.is_some()))
            .define("EARLY", u8::from(early));
        if let Entry::Norm(_, eps) = self.rows.entry {
            key = key.define("NORM", 1).define("EPS", format!("{eps:e}f"));
        }
        let logits = self.parts.route.strided(0);
        key = key.define("LOGITS_ROW", logits.row_stride(1));
        let [codes, pairs] = codes_and_pairs(self.weight, &self.rows.packed);
        let always = self.shared.map(|(_, product)| {
            codes_and_pairs(&WeightSpec { experts: 1, ..*self.weight }, &product.inputs[1])
        });
        let [probabilities, chosen] = &self.parts.route.outputs[..] else { unreachable!("two outputs") };
        let parameters = ChosenGateUp {
            codes,
            pairs,
            always_codes: always.map(|[codes, _]| codes),
            always_pairs: always.map(|[_, pairs]| pairs),
            x: self.rows.x.address,
            norm: self.rows.norm().map(|norm| norm.address),
            logits: logits.address,
            probabilities: probabilities.address,
            chosen: chosen.address,
            y: self.parts.chosen.outputs[0].address,
            always_y: self.shared.map(|(call, _)| call.outputs[0].address),
        };
        let geometry = Geometry {
            grid: (row_tiles(self.weight) / 2, self.rows.rows() * products, 1),
            block: (32 * tuning.split, 1, 1),
            shared_bytes: 0,
        };
        self.parts.chosen.launch(&key, geometry, &parameters)?;
        self.parts.chosen.settle();
        Ok(())
    }
}
