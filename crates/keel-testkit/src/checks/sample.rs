//! Tokens drawn from logits: the same tokens as the oracle's, to the bit.

use super::Check;
use super::share::is_mine;
use crate::naive::sample::sample;
use crate::random::Random;
use keel_array::sampling::Draw;
use keel_array::{Array, Runtime};
use std::fmt::Debug;

pub(super) const CHECKS: &[Check] = &[Check { op: "sample", run: a_token_depends_on_its_row_alone }];

pub(super) const BY_CASE: &[Check] = &[
    Check { op: "sample", run: odd_rows },
    Check { op: "sample", run: every_option },
    Check { op: "sample", run: crowded_rows },
];

/// One element, widths around powers of two, and widths of several parts.
const WIDTHS: [usize; 6] = [1, 2, 33, 511, 4097, 20_011];

/// The tokens that a backend draws from rows of `width` logits.
fn drawn(runtime: &Runtime, logits: &[f32], width: usize, draws: &[Option<Draw>]) -> Vec<u32> {
    let words: Vec<f32> =
        draws.iter().flat_map(|draw| draw.as_ref().map_or(Draw::NOTHING, Draw::words)).collect();
    let logits =
        Array::from_slice(runtime, logits, [draws.len(), width]).expect("there is memory for a case");
    let words =
        Array::from_slice(runtime, &words, [draws.len(), Draw::WORDS]).expect("there is memory for a case");
    logits.sample(&words).expect("shapes fit").to_vec().expect("a case runs")
}

#[track_caller]
fn expect(runtime: &Runtime, what: &str, logits: &[f32], width: usize, draws: &[Draw]) {
    if draws.is_empty() {
        return;
    }
    let got = drawn(runtime, logits, width, &draws.iter().copied().map(Some).collect::<Vec<_>>());
    for ((row, draw), got) in logits.chunks(width).zip(draws).zip(got) {
        assert_eq!(got, sample(row, draw), "{what}, {width} logits, {draw:?}");
    }
}

/// Every combination of options, one for each row.
fn options(random: &mut Random) -> Vec<Draw> {
    let mut draws = Vec::new();
    for temperature in [0.0, 0.05, 0.7, 1.0, 30.0] {
        for top_k in [0, 1, 2, 40, 1_000_000] {
            for top_p in [1.0, 0.95, 0.4, f32::MIN_POSITIVE] {
                for min_p in [0.0, 0.03, 1.0] {
                    let uniform = random.uniform(0.0, 1.0);
                    draws.push(Draw { temperature, top_k, top_p, min_p, uniform });
                }
            }
        }
    }
    draws
}

/// The draws of a case that this process runs.
fn my_own(case: impl Debug, draws: Vec<Draw>) -> Vec<Draw> {
    let numbered = draws.into_iter().enumerate();
    numbered.filter(|(i, _)| is_mine(&(&case, i))).map(|(_, draw)| draw).collect()
}

fn every_option(runtime: &Runtime) {
    let mut random = Random::new(60);
    for width in WIDTHS {
        let mut draws = options(&mut random);
        // The oracle's time grows with the square of the width.
        if width > 1000 {
            draws = draws.into_iter().skip(width % 7).step_by(11).collect();
        }
        let draws = my_own(("options", width), draws);
        let logits = random.uniforms(draws.len() * width, -9.0, 6.0);
        expect(runtime, "even logits", &logits, width, &draws);
        // Few different values, so that some are equal, of both signs.
        let rough: Vec<f32> = logits.iter().map(|x| (x / 4.0).round()).collect();
        expect(runtime, "equal logits", &rough, width, &draws);
    }
}

fn odd_rows(runtime: &Runtime) {
    let (nan, none, most) = (f32::NAN, f32::NEG_INFINITY, f32::INFINITY);
    let rows = [
        [none, none, none, 2.5, none],
        [nan, -0.0, 0.0, -1.0, nan],
        [nan, nan, nan, nan, nan],
        [none, none, nan, none, none],
        [1.0, most, 2.0, nan, none],
        [f32::MAX, f32::MIN, 0.0, f32::MAX, 1.0],
        [1e-42, 0.0, -1e-42, -0.0, none],
    ];
    for uniform in [0.0, 0.3, 1.0 - f32::EPSILON / 2.0] {
        for (temperature, top_p, min_p) in
            [(0.0, 1.0, 0.0), (1.0, 1.0, 0.0), (1e-30, 0.9, 0.1), (100.0, 0.5, 0.0)]
        {
            let draw = Draw { temperature, top_k: 0, top_p, min_p, uniform };
            if is_mine(&("odd", draw)) {
                expect(runtime, "odd rows", &rows.concat(), 5, &[draw; 7]);
            }
        }
    }
}

/// Thousands of candidates with equal or nearly equal weights: ids decide the boundary between equals.
fn crowded_rows(runtime: &Runtime) {
    let mut random = Random::new(61);
    let width = 6007;
    let draws: Vec<Draw> = (0..24)
        .map(|i| Draw {
            temperature: [1.0, 50.0, 0.5][i % 3],
            top_k: [0, 3000, 5999, 1200][i % 4],
            top_p: [1.0, 0.7][i % 2],
            min_p: [0.0, 0.9][i / 12],
            uniform: random.uniform(0.0, 1.0),
        })
        .collect();
    for (what, spread, outlier) in [
        ("one value", 0.0, None),
        ("close values", 1e-6, None),
        ("a hair apart", 1e-2, None),
        ("close values and a lesser one", 1e-6, Some(-9000.0)),
        ("close values and a greater one", 1e-6, Some(3.0)),
    ] {
        let draws = my_own(what, draws.clone());
        let mut logits: Vec<f32> =
            (0..draws.len() * width).map(|_| -3.0 + random.uniform(0.0, spread)).collect();
        if let Some(outlier) = outlier {
            logits.iter_mut().skip(width / 3).step_by(width).for_each(|logit| *logit = outlier);
        }
        expect(runtime, what, &logits, width, &draws);
    }
}

/// Law 7: a row's token does not depend on its neighbours, nor on rows from which nothing is drawn.
fn a_token_depends_on_its_row_alone(runtime: &Runtime) {
    let mut random = Random::new(62);
    let (rows, width) = (37, 1234);
    let logits = random.uniforms(rows * width, -4.0, 4.0);
    let draws: Vec<Option<Draw>> = options(&mut random).into_iter().step_by(7).take(rows).map(Some).collect();
    let together = drawn(runtime, &logits, width, &draws);
    for (i, draw) in draws.iter().enumerate().step_by(5) {
        let alone = drawn(runtime, &logits[i * width..][..width], width, &[*draw]);
        assert_eq!(alone, together[i..=i], "row {i}");
    }
    let some: Vec<Option<Draw>> = draws.iter().enumerate().map(|(i, d)| d.filter(|_| i % 3 == 1)).collect();
    let got = drawn(runtime, &logits, width, &some);
    (1..rows)
        .step_by(3)
        .for_each(|i| assert_eq!(got[i], together[i], "row {i} among rows that are left out"));
}
