//! The experts of a mixture for few tokens, in two launches instead of six. Each block of gate and up finds its expert
//! itself. The down projections are added up in the launch that computes them. A shared expert of the same shape is one
//! more expert. See `mixture.cu`.

use super::super::{Bound, BoundKernel, Call, Geometry};
use super::combination::{combine, is_alike, mixture_key};
use super::few_rows::{Entry, FewRows};
use super::tuning::Tuning;
use super::{Arithmetic, arithmetic, packed, row_tiles, takes_few_rows};
use crate::backend::weights::Coding;
use crate::driver::Arguments;
use keel_array::{ArrayError, Op, WeightSpec};

/// Experts that a warp chooses among, and choices that its lanes keep.
const EXPERTS_MAX: usize = 512;
pub(super) const CHOICES_MAX: usize = 32;

/// Columns of x that a block prepares.
const COLS_MAX: usize = 16_384;

/// Blocks of a grid along y, at most.
const GRID_MAX: usize = 65_535;

/// Consecutive kernels of a step that make up a mixture.
struct Mixture<'c, 'a> {
    /// The router's product, if the kernels begin with it. x is settled after it.
    router: Option<&'c Call<'a>>,
    route: &'c Call<'a>,
    choices: usize,
    normalises: bool,
    /// SwiGLU after the chosen experts' gate and up projection.
    chosen: &'c Call<'a>,
    weight: &'a WeightSpec,
    rows: FewRows<'a>,
    /// SwiGLU after the shared expert's gate and up projection, and that product, if it is like the chosen experts'.
    shared: Option<(&'c Call<'a>, &'c BoundKernel<'a>)>,
    combination: Option<&'c Call<'a>>,
}

/// Puts the launches of a mixture on the stream, if the kernels begin with one. Returns the number of these kernels; 0
/// if there is no mixture, and then nothing has been done.
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

    /// Whether the outputs of these kernels overlap neither each other nor anything that blocks of the launch may still
    /// read.
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

    /// Launches the choice of experts together with gate and up.
    fn gate_up(&self) -> Result<(), ArrayError> {
        let tuning = Tuning::of(self.weight, 1, true, true);
        let products = self.choices + usize::from(self.shared.is_some());
        // Blocks that a multiprocessor has room for: all blocks of the grid should run at once, as far as registers
        // allow.
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
