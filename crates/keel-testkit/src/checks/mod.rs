//! Checks of a backend through the array runtime: compares every operation with its oracle, over the shared case lists.
//!
//! A backend passes if every [`Listed`] check returns. A failed check panics and names the worst element.

mod attention;
mod chains;
mod copies;
mod delta_cuts;
mod elementwise;
mod exchange;
mod fast;
mod fp8;
mod indexing;
mod layout;
mod linear;
mod linear_blocks;
mod linear_edges;
mod mixture;
mod nearest;
mod not_finite;
mod open_rows;
pub mod ownership;
mod page_tables;
mod reduce;
mod sample;
mod sequence;
mod share;
mod submitted;

use crate::compare::assert_close;
use crate::naive::tensor::Tensor;
use crate::tolerance;
use half::{bf16, f16};
use keel_array::{Array, DType, Runtime};

pub use exchange::exchange;
pub use share::watch_cases;

/// A check of one operation.
#[derive(Clone, Copy, Debug)]
struct Check {
    /// The operation's name, as in its kernels and errors.
    op: &'static str,
    /// Runs the check. Panics if a result is wrong.
    run: fn(&Runtime),
}

/// A check of one operation, as an entry of the list of all.
#[derive(Clone, Copy, Debug)]
pub struct Listed {
    /// The operation's name, as in its kernels and errors.
    pub op: &'static str,
    /// Prefix of the names of cases; empty for the exact mode.
    mode: &'static str,
    number: usize,
    tells_cases: bool,
    run: fn(&Runtime),
}

impl Listed {
    /// Runs the check. If `KEEL_TEST_CASES` names a file, runs only the cases listed there.
    ///
    /// # Panics
    /// If a result is wrong.
    pub fn run(&self, runtime: &Runtime) {
        if share::begin(format!("{}{} {}", self.mode, self.number, self.op))
            && (self.tells_cases || share::is_mine(&"whole"))
        {
            (self.run)(runtime);
        }
    }
}

/// Checks whose cases have separate names.
const BY_CASE: &[&[Check]] =
    &[linear::BY_CASE, sequence::BY_CASE, chains::CHECKS, reduce::BY_CASE, sample::BY_CASE];

/// Checks that count as one case each.
const WHOLE: &[&[Check]] = &[
    elementwise::CHECKS,
    layout::CHECKS,
    reduce::CHECKS,
    sample::CHECKS,
    indexing::CHECKS,
    linear::CHECKS,
    linear_edges::CHECKS,
    mixture::CHECKS,
    fast::CHECKS,
    sequence::CHECKS,
    open_rows::CHECKS,
    submitted::CHECKS,
    copies::CHECKS,
    not_finite::CHECKS,
    page_tables::CHECKS,
];

/// All checks: at least one for every operation.
pub fn all() -> Vec<Listed> {
    let by_case = BY_CASE.concat().into_iter().map(|check| (check, true));
    let whole = WHOLE.concat().into_iter().map(|check| (check, false));
    listed("", by_case.chain(whole))
}

/// Checks of a fast mode: attention and the gated delta rule, whose products may take f16. Also attention after
/// rotations, compared with the same operations one by one, which is valid in any precision, and products.
/// `mode` distinguishes these checks from those of other modes.
pub fn fast(mode: &'static str) -> Vec<Listed> {
    let by_case = sequence::FAST.iter().chain(chains::IN_ANY_PRECISION).chain(linear::FAST);
    let by_case = by_case.map(|&check| (check, true));
    listed(mode, by_case.chain(not_finite::FAST.iter().map(|&check| (check, false))))
}

fn listed(mode: &'static str, checks: impl Iterator<Item = (Check, bool)>) -> Vec<Listed> {
    let listed = |(number, (Check { op, run }, tells_cases))| Listed { op, mode, number, tells_cases, run };
    checks.enumerate().map(listed).collect()
}

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const INTEGERS: [DType; 4] = [DType::U8, DType::U32, DType::I32, DType::I64];

/// `x`, rounded to the values of a type.
fn rounded(x: &Tensor, dtype: DType) -> Tensor {
    x.map(|x| match dtype {
        DType::F32 => f64::from(x as f32),
        DType::F16 => f16::from_f64(x).to_f64(),
        DType::BF16 => bf16::from_f64(x).to_f64(),
        _ => x,
    })
}

/// An array of these values.
fn upload(runtime: &Runtime, x: &Tensor, dtype: DType) -> Array {
    macro_rules! of {
        ($f:expr) => {
            Array::from_slice(runtime, &x.values.iter().map($f).collect::<Vec<_>>(), &x.shape[..])
        };
    }
    let array = match dtype {
        DType::Bool => of!(|&x| x != 0.0),
        DType::U8 => of!(|&x| x as u8),
        DType::U32 => of!(|&x| x as u32),
        DType::I32 => of!(|&x| x as i32),
        DType::I64 => of!(|&x| x as i64),
        DType::F16 => of!(|&x| f16::from_f64(x)),
        DType::BF16 => of!(|&x| bf16::from_f64(x)),
        DType::F32 => of!(|&x| x as f32),
    };
    array.expect("there is memory for a case")
}

/// The values of an array.
fn download(x: &Array) -> Vec<f64> {
    macro_rules! of {
        ($t:ty, $f:expr) => {
            x.to_vec::<$t>().expect("a case runs").into_iter().map($f).collect()
        };
    }
    match x.dtype() {
        DType::Bool => of!(bool, |x| f64::from(u8::from(x))),
        DType::U8 => of!(u8, f64::from),
        DType::U32 => of!(u32, f64::from),
        DType::I32 => of!(i32, f64::from),
        DType::I64 => of!(i64, |x| x as f64),
        DType::F16 => of!(f16, f64::from),
        DType::BF16 => of!(bf16, f64::from),
        DType::F32 => of!(f32, f64::from),
    }
}

/// The same values in several memory layouts: gap-free, transposed, and as a part of a larger array.
fn layouts(runtime: &Runtime, x: &Tensor, dtype: DType) -> Vec<(&'static str, Array)> {
    let rank = x.shape.len();
    let mut arrays = vec![("contiguous", upload(runtime, x, dtype))];
    if rank >= 2 {
        let turned: Vec<usize> = (0..rank).rev().collect();
        let array = upload(runtime, &x.permute(&turned), dtype);
        arrays.push(("transposed", array.transpose(&turned).expect("a permutation")));
    }
    if rank >= 1 {
        let wide: Vec<usize> = x.shape.iter().map(|n| n + 3).collect();
        let starts: Vec<usize> = (0..rank).map(|axis| 1 + axis % 2).collect();
        let stops: Vec<usize> = starts.iter().zip(&x.shape).map(|(s, n)| s + n).collect();
        let filler = Tensor::from_fn(&wide, |_| 77.0);
        let padded = crate::naive::layout::slice_update(&filler, x, &starts);
        let array = upload(runtime, &padded, dtype);
        arrays.push(("part", array.slice(&starts, &stops).expect("a block within the array")));
    }
    arrays
}

/// Asserts that an array equals the oracle's result, within the tolerance of its type; integers and flags exactly.
#[track_caller]
fn expect(what: &str, got: &Array, want: &Tensor) {
    assert_eq!(got.shape()[..], want.shape[..], "{what}: shape");
    let tolerance = match got.dtype() {
        DType::F32 => tolerance::F32,
        DType::F16 => tolerance::F16_STORED,
        DType::BF16 => tolerance::BF16_STORED,
        _ => return assert_eq!(download(got), want.values, "{what}"),
    };
    expect_within(what, got, &want.values, tolerance);
}

/// As [`expect`], with the given tolerance.
#[track_caller]
fn expect_within(what: &str, got: &Array, want: &[f64], tolerance: f64) {
    let values: Vec<f32> = download(got).into_iter().map(|x| x as f32).collect();
    assert_close(what, &values, want, tolerance);
}
