//! Every fixture against its reference on a GPU: `KEEL_TEST_CUDA=1` where there is one. `--nocapture` prints the
//! errors.

use std::sync::Arc;

use crate::common::{Expected, all_logits, argmax, engine, exact, expected, fixture, models};
use keel_array::{Compute, Runtime, RuntimeOptions};
use keel_cuda::{CudaBackend, CudaOptions, Determinism, Precision};
use keel_engine::{Engine, EngineOptions};
use keel_testkit::fixtures_plain::{OTHERS, other_fixture};

/// An arithmetic and its bound on the distance from the reference.
struct Setting {
    name: &'static str,
    compute: Compute,
    determinism: Determinism,
    error_max: f32,
}

/// The default, whose activations may have 8 bits. [`fast_bound`] gives its bounds.
const FAST: Setting =
    Setting { name: "fast", compute: Compute::Auto, determinism: Determinism::Off, error_max: 0.0 };

/// The bound of the fast mode, about twice the measured distance (`docs/notebook/numerics.md`).
struct FastBound {
    error_max: f32,
    /// Whether the bound is on the median row. If two experts are nearly equal, the router of a row may choose the
    /// other one. That row and later rows then have little to do with the reference, in any arithmetic of 16 bits or
    /// fewer.
    of_the_middle_row: bool,
}

fn fast_bound(name: &str, one_by_one: bool) -> FastBound {
    let is_packed = name.contains("4bit") || name.contains("paro");
    let is_mixture = name.contains("moe") || name.contains("next");
    let error_max = match (is_packed, one_by_one) {
        // 8-bit activations, in models this small and random.
        (true, true) if is_mixture => 0.11,
        (true, true) => 0.6,
        (true, false) => 3e-2,
        (false, true) => 2e-2,
        (false, false) => 8e-2,
    };
    FastBound { error_max, of_the_middle_row: is_mixture && (is_packed == one_by_one) }
}

/// The median of the rows' greatest differences.
fn middle_row(got: &[f32], want: &[f32], width: usize) -> f32 {
    let rows = got.chunks(width).zip(want.chunks(width));
    let mut far: Vec<f32> = rows.map(|(got, want)| distance(got, want).0).collect();
    far.sort_by(f32::total_cmp);
    far[far.len() / 2]
}

const SETTINGS: [Setting; 4] = [
    Setting { name: "f32", compute: Compute::F32, determinism: Determinism::Off, error_max: 1e-4 },
    Setting {
        name: "f32, deterministic",
        compute: Compute::F32,
        determinism: Determinism::Steps,
        error_max: 1e-4,
    },
    Setting { name: "bf16", compute: Compute::Bf16, determinism: Determinism::Off, error_max: 2e-2 },
    Setting {
        name: "bf16, deterministic",
        compute: Compute::Bf16,
        determinism: Determinism::Steps,
        error_max: 2e-2,
    },
];

impl Setting {
    fn engine(&self, folder: &std::path::Path) -> Engine {
        let precision = if self.compute == Compute::F32 { Precision::F32 } else { Precision::Fast };
        let options = CudaOptions {
            precision,
            determinism: self.determinism,
            poison_freed: true,
            ..CudaOptions::default()
        };
        let backend = CudaBackend::new(&options).expect("a GPU");
        let runtime = Runtime::new(Arc::new(backend), RuntimeOptions::default());
        engine(folder, &runtime, EngineOptions { compute: self.compute, ..exact() })
    }
}

/// Every fixture that exists, with its reference. None without a GPU to test.
fn references() -> Vec<(&'static str, std::path::PathBuf, Expected)> {
    if !keel_testkit::has_gpu!() {
        return Vec::new();
    }
    let own = models().map(|name| (name, fixture(name)));
    let others = OTHERS.into_iter().filter_map(|name| Some((name, other_fixture(name)?)));
    own.chain(others).map(|(name, folder)| (name, folder.clone(), expected(&folder))).collect()
}

/// The greatest difference, and the greatest expected value. A NaN is farther than any number.
fn distance(got: &[f32], want: &[f32]) -> (f32, f32) {
    assert_eq!(got.len(), want.len());
    let farther = |far: f32, (a, b): (&f32, &f32)| {
        let difference = (a - b).abs();
        if difference.is_nan() { f32::INFINITY } else { far.max(difference) }
    };
    (got.iter().zip(want).fold(0.0, farther), want.iter().fold(0.0, |most, x| most.max(x.abs())))
}

#[test]
fn logits_and_drafts_are_as_near_as_their_arithmetic() {
    let mut wrong = Vec::new();
    for (name, folder, want) in references() {
        for setting in SETTINGS.iter().chain([&FAST]) {
            let mut engine = setting.engine(&folder);
            for one_by_one in [false, true] {
                let (logits, drafts) =
                    all_logits(&mut engine, &want.ids, one_by_one, want.mtp_logits.is_some());
                let drafts = want.mtp_logits.as_ref().map(|want| ("drafts", &drafts, want));
                let regime = if one_by_one { "one by one" } else { "prefill" };
                let width = want.logits.len() / want.ids.len();
                for (what, got, want) in [("logits", &logits, &want.logits)].into_iter().chain(drafts) {
                    let (far, most) = distance(got, want);
                    let middle = middle_row(got, want, width);
                    let line = format!(
                        "{name}, {}, {regime}, {what}: {:.1e}, middle row {:.1e}",
                        setting.name,
                        far / most,
                        middle / most
                    );
                    println!("{line}");
                    let fast = fast_bound(name, one_by_one);
                    let (far, error_max) = match setting.name == FAST.name {
                        true if fast.of_the_middle_row => (middle, fast.error_max),
                        true => (far, fast.error_max),
                        false => (far, setting.error_max),
                    };
                    if far > error_max * most {
                        wrong.push(line);
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "too far from the reference:\n{}", wrong.join("\n"));
}

/// Feeds the reference's own tokens, so that one near tie does not end the comparison.
#[test]
fn greedy_tokens_are_the_references_where_its_margin_is_over_the_error() {
    for (name, folder, want) in references() {
        let Some(greedy) = &want.greedy else { continue };
        for setting in SETTINGS.iter().chain([&FAST]) {
            let mut engine = setting.engine(&folder);
            let ids = [&want.ids, &greedy.tokens[..greedy.tokens.len() - 1]].concat();
            let (logits, _) = all_logits(&mut engine, &ids, true, false);
            let (error, _) = distance(&logits[..want.logits.len()], &want.logits);
            let vocabulary = want.logits.len() / want.ids.len();
            let rows = logits.chunks(vocabulary).skip(want.ids.len() - 1);
            let mut decided = 0;
            for (at, ((&token, &margin), row)) in
                greedy.tokens.iter().zip(&greedy.margins).zip(rows).enumerate()
            {
                // Each of the two logits may be off by the error.
                if margin > 2.0 * error {
                    decided += 1;
                    assert_eq!(argmax(row), token, "{name}, {}, token {at}, margin {margin}", setting.name);
                }
            }
            println!("{name}, {}: {decided} of {} tokens decided", setting.name, greedy.tokens.len());
            assert!(2 * decided > greedy.tokens.len(), "{name}, {}: {decided} tokens decided", setting.name);
        }
    }
}
