//! Rows that may be taken back. Each round keeps some of a step's rows; the result must be that of the kept rows alone.

use super::sequence::{batch, draw, floats, kept_in, rows_of, up};
use super::{Check, expect_within, rounded, upload};
use crate::compare::assert_close;
use crate::naive::causal_conv::causal_conv;
use crate::naive::gated_delta::{Inputs, Outputs, Shape, gated_delta_kept};
use crate::naive::tensor::Tensor;
use crate::random::Random;
use crate::{cases, tolerance};
use keel_array::{
    Array, Batch, Category, ConvWindow, DType, DeltaState, GatedDeltaSpec, Regime, RowLog, Runtime,
};

pub(super) const CHECKS: &[Check] = &[
    Check { op: "causal_conv", run: conv },
    Check { op: "gated_delta", run: |r| delta(r, DType::F32, tolerance::F32 * 4.0) },
    Check { op: "gated_delta", run: |r| delta(r, DType::F16, tolerance::F16_STATE) },
    Check { op: "causal_conv", run: counts_are_checked },
];

/// Sequences of a batch.
const SEQUENCES: usize = 3;
/// Most open rows of a slot.
const CAPACITY: usize = 4;
const ROUNDS: usize = 12;

/// One step of the batch, for each sequence: its position, its rows, how many of them stay, and how many stayed in the
/// step before.
struct Round {
    position: Vec<usize>,
    rows: Vec<usize>,
    stay: Vec<usize>,
    accepted: Vec<usize>,
    log: RowLog,
}

/// Rounds in which each sequence has rows or none. One round commits; the last one commits and has no rows.
fn rounds(random: &mut Random) -> Vec<Round> {
    let (mut position, mut accepted) = (vec![0; SEQUENCES], vec![0; SEQUENCES]);
    let mut rounds = Vec::new();
    for round in 0..=ROUNDS {
        let last = round == ROUNDS;
        let log = if last || round == 5 { RowLog::Commit } else { RowLog::KeepOpen };
        let rows: Vec<usize> =
            (0..SEQUENCES).map(|_| if last { 0 } else { random.below(CAPACITY + 1) }).collect();
        let stay: Vec<usize> = rows
            .iter()
            .map(|&n| if log == RowLog::Commit || n == 0 { n } else { 1 + random.below(n) })
            .collect();
        let open = if log == RowLog::Commit { vec![0; SEQUENCES] } else { stay.clone() };
        let next = position.iter().zip(&stay).map(|(at, stay)| at + stay).collect();
        let position = std::mem::replace(&mut position, next);
        rounds.push(Round { position, rows, stay, accepted: std::mem::replace(&mut accepted, open), log });
    }
    rounds
}

/// The batch of a round, and its number of rows, at least `rows_min`. Rows may belong to no sequence.
fn staged(runtime: &Runtime, round: &Round, rows_min: usize) -> (Batch, Vec<(usize, usize)>, usize) {
    let sequences: Vec<(usize, usize)> =
        round.position.iter().copied().zip(round.rows.iter().copied()).collect();
    let accepted: Vec<u32> = round.accepted.iter().map(|&n| n as u32).collect();
    let mut batch = batch(runtime, &sequences, 1);
    batch.accepted = Array::from_slice(runtime, &accepted, [SEQUENCES]).expect("memory");
    (batch, sequences, round.rows.iter().sum::<usize>().max(rows_min))
}

fn log(runtime: &Runtime, width: usize) -> Option<Array> {
    let shape = [SEQUENCES + 1, CAPACITY, width];
    let values = vec![f32::NAN; shape.iter().product()];
    Some(Array::from_slice(runtime, &values, shape).expect("memory"))
}

/// Compares the rows that stay, for each sequence.
fn expect_stayed(what: &str, y: &Array, round: &Round, width: usize, want: &[Vec<f64>], within: f64) {
    let y: Vec<f32> = y.to_vec().expect("a case runs");
    let sequences: Vec<(usize, usize)> = round.rows.iter().map(|&n| (0, n)).collect();
    for (b, want) in want.iter().enumerate() {
        let got = &rows_of(&y, &sequences, b, width)[..round.stay[b] * width];
        assert_close(&format!("{what}, sequence {b}"), got, want, within);
    }
}

fn conv(runtime: &Runtime) {
    let mut random = Random::new(73);
    for (case, shape) in cases::causal_conv::SHAPES.iter().enumerate() {
        let (channels, slot_len) = (shape.channels, (shape.width - 1) * shape.channels);
        let w = draw(&mut random, &[shape.width, channels]);
        let start = draw(&mut random, &[SEQUENCES + 1, shape.width - 1, channels]);
        let window = ConvWindow { rows: up(runtime, &start), open: log(runtime, channels) };
        let mut windows: Vec<Vec<f32>> = floats(&start).chunks(slot_len).map(<[f32]>::to_vec).collect();
        for (i, round) in rounds(&mut random).iter().enumerate() {
            let (batch, sequences, tokens) = staged(runtime, round, case % 2);
            let x = draw(&mut random, &[tokens, channels]);
            let y = up(runtime, &x)
                .causal_conv(&up(runtime, &w), &window, &batch, round.log)
                .expect("shapes fit");
            let (values, taps) = (floats(&x), floats(&w));
            let want: Vec<Vec<f64>> = (0..SEQUENCES)
                .map(|b| {
                    let x = &rows_of(&values, &sequences, b, channels)[..round.stay[b] * channels];
                    causal_conv(x, &taps, channels, &mut windows[SEQUENCES - b])
                })
                .collect();
            let what = format!("causal_conv {shape:?}, round {i}");
            expect_stayed(&what, &y, round, channels, &want, tolerance::F32 * 4.0);
        }
        let kept: Vec<f64> = windows.iter().flatten().map(|&x| f64::from(x)).collect();
        expect_within(&format!("window of causal_conv {shape:?}"), &window.rows, &kept, tolerance::F32);
    }
}

fn delta(runtime: &Runtime, form: DType, within: f64) {
    let mut random = Random::new(74);
    for (case, &shape) in cases::gated_delta::SHAPES.iter().enumerate() {
        let Shape { key_heads, value_heads, key_size, value_size } = shape;
        let spec = |log| GatedDeltaSpec {
            key_heads,
            value_heads,
            key_dim: key_size,
            value_dim: value_size,
            regime: Regime::Decode,
            log,
        };
        let (row, width) = (spec(RowLog::None).channels(), value_heads * value_size);
        let start = draw(&mut random, &[SEQUENCES + 1, value_heads, key_size, value_size]);
        let start = rounded(&start, form);
        let records = log(runtime, spec(RowLog::None).record_len()).expect("a log");
        let state = DeltaState { state: upload(runtime, &start, form), records: Some(records.clone()) };
        let mut states: Vec<Vec<f64>> = start.values.chunks(key_size * width).map(<[f64]>::to_vec).collect();
        let [a_log, dt_bias] = [(); 2].map(|()| draw(&mut random, &[value_heads]));
        for (i, round) in rounds(&mut random).iter().enumerate() {
            let (batch, sequences, tokens) = staged(runtime, round, case % 2);
            let qkv = draw(&mut random, &[tokens, row]);
            let [a, b] = [(); 2].map(|()| draw(&mut random, &[tokens, value_heads]));
            let up = |x: &Tensor| up(runtime, x);
            let y = up(&qkv)
                .gated_delta(&up(&a), &up(&b), &up(&a_log), &up(&dt_bias), &state, &batch, spec(round.log))
                .expect("shapes fit");
            let [qkv, a, b, a_log, dt_bias] = [&qkv, &a, &b, &a_log, &dt_bias].map(floats);
            let want: Vec<Outputs> = (0..SEQUENCES)
                .map(|s| {
                    let part =
                        |x: &[f32], width| rows_of(x, &sequences, s, width)[..round.stay[s] * width].to_vec();
                    let inputs = Inputs {
                        qkv: &part(&qkv, row),
                        a: &part(&a, value_heads),
                        b: &part(&b, value_heads),
                        a_log: &a_log,
                        dt_bias: &dt_bias,
                    };
                    gated_delta_kept(shape, inputs, &mut states[SEQUENCES - s], kept_in(form))
                })
                .collect();
            let what = format!("gated_delta {shape:?}, {form}, round {i}");
            let rows: Vec<Vec<f64>> = want.iter().map(|want| want.y.clone()).collect();
            expect_stayed(&what, &y, round, width, &rows, within);
            if round.log == RowLog::KeepOpen {
                let records: Vec<f32> = records.to_vec().expect("a case runs");
                for (s, want) in want.iter().enumerate() {
                    let first = (SEQUENCES - s) * CAPACITY * spec(RowLog::None).record_len();
                    let got = &records[first..][..want.records.len()];
                    let got = Array::from_slice(runtime, got, [got.len()]).expect("memory");
                    let what = format!("records of {what}, sequence {s}");
                    expect_within(&what, &got, &want.records, within);
                }
            }
        }
        let what = format!("state of gated_delta {shape:?}, {form}");
        expect_within(&what, &state.state, &states.concat(), within);
    }
}

fn counts_are_checked(runtime: &Runtime) {
    let ones = |shape: &[usize]| {
        let array = Array::full(runtime, shape, DType::F32, 1.0).expect("an addressable shape");
        array.eval().expect("a case runs");
        array
    };
    let rows = Array::persistent(runtime, Category::Recurrent, [SEQUENCES + 1, 3, 5], DType::F32);
    let mut window = ConvWindow { rows: rows.expect("memory"), open: log(runtime, 5) };
    let round = |rows: usize, accepted: usize| {
        let log = RowLog::KeepOpen;
        let (position, accepted) = (vec![0; SEQUENCES], vec![0, accepted, 0]);
        staged(runtime, &Round { position, rows: vec![rows, 0, 0], stay: vec![], accepted, log }, 1)
    };
    for (rows, accepted, message) in [
        (1, CAPACITY + 1, "sequence 1 accepted 5 rows, and its log holds 4"),
        (CAPACITY + 1, 0, "5 rows of a sequence are to be kept open in 4"),
    ] {
        let (batch, _, tokens) = round(rows, accepted);
        let y = ones(&[tokens, 5]).causal_conv(&ones(&[4, 5]), &window, &batch, RowLog::KeepOpen);
        let error = y.expect("shapes fit").eval().expect_err("wrong counts").to_string();
        assert!(error.contains(message), "{error}");
    }
    window.open = None;
    let (batch, _, tokens) = round(1, 0);
    let refused = ones(&[tokens, 5]).causal_conv(&ones(&[4, 5]), &window, &batch, RowLog::Commit);
    assert!(refused.is_err(), "there is no log");
}
