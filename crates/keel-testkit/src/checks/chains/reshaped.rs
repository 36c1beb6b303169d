//! A reshape between two operations that a backend may run as one: the rows, choices or heads of the second are not
//! those of the first.

use super::{EPS, ROWS, codings, draw, expect_same, expect_within_of};
use crate::cases::linear::weights;
use crate::checks::linear::affine_weight;
use crate::checks::share::is_mine;
use crate::checks::upload;
use crate::naive::tensor::Tensor;
use crate::random::Random;
use crate::tolerance;
use keel_array::{Array, Compute, DType, RopeSpec, Routing, Runtime, SharedExpert, Weight};

const EXPERTS: usize = 6;
const CHOICES: usize = 2;

/// A stack of experts in 4 bits.
fn stack(runtime: &Runtime, random: &mut Random, rows: usize, cols: usize) -> Weight {
    let stack: Vec<_> = (0..EXPERTS).map(|_| weights(random, rows, cols, 4, 64)).collect();
    affine_weight(runtime, &stack, 4, Compute::Auto)
}

/// Experts that no router has chosen, u32 `[tokens, CHOICES]`.
fn choices(runtime: &Runtime, random: &mut Random, tokens: usize) -> Array {
    let chosen = Tensor::integers(random, &[tokens, CHOICES], 0, EXPERTS as i64);
    upload(runtime, &chosen, DType::U32)
}

/// After the reshape, SwiGLU's halves are not the halves of the product's rows, so SwiGLU must not absorb the product.
pub(super) fn product_then_gate(runtime: &Runtime) {
    const N: usize = 128;
    const K: usize = 256;
    let mut random = Random::new(101);
    let experts = stack(runtime, &mut random, N, K);
    for rows in ROWS.into_iter().filter(|rows| is_mine(&("gate of experts after a reshape", rows))) {
        let x = draw(runtime, &mut random, &[rows, K]);
        let chosen = choices(runtime, &mut random, rows);
        expect_same(&format!("SwiGLU of {rows} rows by experts, reshaped"), &|step| {
            step(x.gather_linear(&experts, &chosen)?).reshape([rows, 2 * CHOICES, N / 2])?.swiglu()
        });
    }
    for (coding, weight) in codings(runtime, &mut random, N, K) {
        for rows in ROWS.into_iter().filter(|rows| is_mine(&("gate after a reshape", &coding, rows))) {
            let x = draw(runtime, &mut random, &[rows, K]);
            expect_same(&format!("SwiGLU of {rows} rows by {coding}, reshaped"), &|step| {
                step(x.linear(&weight)?).reshape([2 * rows, N / 2])?.swiglu()
            });
        }
    }
}

/// After the reshape, the experts' rows are not those of SwiGLU. With the most rows they are sorted by expert.
pub(super) fn gate_then_experts(runtime: &Runtime) {
    const F: usize = 128;
    let mut random = Random::new(102);
    let down = stack(runtime, &mut random, 80, F);
    for rows in [1, 5, 40].into_iter().filter(|rows| is_mine(&("experts after a reshape", rows))) {
        let wide = draw(runtime, &mut random, &[rows, 4 * F]);
        let chosen = choices(runtime, &mut random, 2 * rows);
        expect_same(&format!("experts of {rows} rows after SwiGLU, reshaped"), &|step| {
            let wide = step(wide.add(&wide)?);
            step(wide.swiglu()?).reshape([2 * rows, F])?.gather_linear(&down, &chosen)
        });
    }
}

/// A mixture whose outputs, choices or gates are seen under another shape when they are added up.
pub(super) fn experts_then_combination(runtime: &Runtime) {
    const F: usize = 128;
    const N: usize = 128;
    let mut random = Random::new(103);
    let (gate_up, down) = (stack(runtime, &mut random, 2 * F, N), stack(runtime, &mut random, N, F));
    for rows in ROWS.into_iter().filter(|rows| is_mine(&("combination after a reshape", rows))) {
        let mut draw = |shape: &[usize]| draw(runtime, &mut random, shape);
        let (inner, x) = (draw(&[rows, CHOICES, F]), draw(&[rows, N]));
        let (halves, logits) = (draw(&[rows, 2 * CHOICES]), draw(&[rows, EXPERTS]));
        let (weights, gates) = (draw(&[rows, CHOICES]), draw(&[2, rows + 3]));
        let chosen = choices(runtime, &mut random, rows);
        expect_same(&format!("halves of experts of {rows} rows, combined"), &|step| {
            let outputs = step(step(inner.add(&inner)?).gather_linear(&down, &chosen)?);
            outputs.reshape([rows, 2 * CHOICES, N / 2])?.combine_experts(&halves, None, None)
        });
        expect_same(&format!("experts of {rows} rows, combined with a gate that was a row"), &|step| {
            let gate = step(gates.slice(&[1, 2], &[2, rows + 2])?.contiguous()?).reshape([rows, 1])?;
            let outputs = step(step(inner.add(&inner)?).gather_linear(&down, &chosen)?);
            outputs.combine_experts(&weights, None, Some(SharedExpert { output: &x, gate: &gate }))
        });
        // Each choice is a token of its own from the down projection on.
        expect_same(&format!("each choice of {rows} rows, combined alone"), &|step| {
            let (x, logits) = (step(x.add(&x)?), step(logits.add(&logits)?));
            let Routing { weights, experts } = logits.route_top_k(CHOICES, true)?;
            let apart = |x: &Array| x.reshape([rows * CHOICES, 1]);
            let inner = step(step(x.gather_linear(&gate_up, &experts)?).swiglu()?);
            let inner = inner.reshape([rows * CHOICES, 1, F])?;
            let outputs = step(inner.gather_linear(&down, &apart(&experts)?)?);
            outputs.combine_experts(&apart(&weights)?, None, None)
        });
    }
}

/// The logits of a router's rows are not the rows that were copied.
pub(super) fn copy_then_routing(runtime: &Runtime) {
    let mut random = Random::new(104);
    for rows in [1, 5, 17].into_iter().filter(|rows| is_mine(&("routing after a reshape", rows))) {
        let wide = draw(runtime, &mut random, &[rows, 2 * EXPERTS + 3]);
        let what = format!("routing of copies of {rows} rows, reshaped");
        expect_within_of(tolerance::F32, &what, &|step| {
            let copied = step(wide.add(&wide)?.slice_axis(-1, 2, 2 + 2 * EXPERTS)?.contiguous()?);
            let Routing { weights, experts } =
                copied.reshape([2 * rows, EXPERTS])?.route_top_k(CHOICES, true)?;
            Array::concatenate(&[&weights, &experts.cast(DType::F32)?], 0)
        });
    }
}

/// Heads that are rotated are not those that were copied.
pub(super) fn copy_then_rotation(runtime: &Runtime) {
    const HEADS: usize = 4;
    const SIZE: usize = 32;
    let mut random = Random::new(105);
    for (rows, is_normed) in [(1, false), (5, false), (1, true), (5, true)]
        .into_iter()
        .filter(|case| is_mine(&("rotation after a reshape", case)))
    {
        let wide = draw(runtime, &mut random, &[rows, HEADS, SIZE + 4]);
        let (norm, inverse) = (draw(runtime, &mut random, &[2 * SIZE]), draw(runtime, &mut random, &[8]));
        let at: Vec<i32> = (0..rows as i32).map(|t| 3 * t + 1).collect();
        let at = Array::from_slice(runtime, &at, [rows]).expect("memory");
        let what = format!("rotation of copied heads of {rows} rows, reshaped, normed: {is_normed}");
        expect_within_of(tolerance::F32, &what, &|step| {
            let copied = step(wide.add(&wide)?.slice_axis(-1, 0, SIZE)?.contiguous()?);
            let heads = copied.reshape([rows, HEADS / 2, 2 * SIZE])?;
            let spec = RopeSpec { rotary: 16, sections: None, interleaved: false };
            match is_normed {
                true => heads.norm_rope(&at, &inverse, &norm, spec, EPS),
                false => heads.rope(&at, &inverse, spec),
            }
        });
    }
}

/// A gate of heads whose size no kernel reads as a whole, seen as rows.
pub(super) fn gate_then_product(runtime: &Runtime) {
    const HEADS: usize = 64;
    const SIZE: usize = 6;
    const K: usize = HEADS * SIZE;
    let mut random = Random::new(106);
    for (coding, weight) in codings(runtime, &mut random, 80, K) {
        for rows in ROWS.into_iter().filter(|rows| is_mine(&("gate of rows after a reshape", &coding, rows)))
        {
            let wide = draw(runtime, &mut random, &[rows, HEADS, 2 * SIZE]);
            let x = draw(runtime, &mut random, &[rows, K]);
            expect_same(&format!("gate of {rows} rows of small heads, multiplied by {coding}"), &|step| {
                let gate = step(wide.add(&wide)?.slice_axis(-1, 0, SIZE)?.contiguous()?);
                step(x.sigmoid_gate(&gate.reshape([rows, K])?)?).linear(&weight)
            });
        }
    }
}
