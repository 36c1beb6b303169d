//! Page tables are data. What no kernel may be given is refused when the step runs, and nothing is written.

use super::{counting, runtime};
use keel_array::{Array, AttentionSpec, Batch, Category, DType, KvPool, Regime, Runtime};

const PAGE: usize = AttentionSpec::PAGE;

/// A step whose sequences have rows at these positions, each with its pages.
struct Step {
    /// The first position of each sequence and the number of its rows.
    rows: &'static [(usize, usize)],
    pages: &'static [&'static [u32]],
    window: Option<usize>,
    regime: Regime,
}

/// The error of the step, if there is one.
fn outcome(runtime: &Runtime, step: &Step) -> Result<(), String> {
    let index = |values: Vec<u32>| {
        let count = values.len();
        Array::from_slice(runtime, &values, [count]).expect("there is memory")
    };
    let mut row_start = vec![0];
    step.rows.iter().for_each(|(_, rows)| row_start.push(row_start[row_start.len() - 1] + *rows as u32));
    let (sequences, stride) = (step.rows.len(), step.pages[0].len());
    let batch = Batch {
        row_start: index(row_start.clone()),
        slot: index(vec![0; sequences]),
        position: index(step.rows.iter().map(|(first, _)| *first as u32).collect()),
        table: index(step.pages.concat()).reshape([sequences, stride]).expect("as many entries"),
        accepted: index(vec![0; sequences]),
    };
    let pool = || Array::persistent(runtime, Category::Kv, [9, 1, PAGE, 16], DType::F32).expect("memory");
    let pool = KvPool { keys: pool(), values: pool() };
    let x = counting(runtime, &[row_start[sequences] as usize, 1, 16]);
    let spec = AttentionSpec { scale: 1.0.into(), window: step.window, regime: step.regime };
    let y = x.paged_attention(&x, &x, &pool, &batch, spec).expect("shapes fit");
    let outcome = y.eval().map_err(|error| error.to_string());
    let is_written = pool.keys.to_vec::<f32>().expect("readable").iter().any(|&key| key != 0.0);
    assert_eq!(is_written, outcome.is_ok(), "a refused step writes nothing");
    outcome
}

#[test]
fn steps_whose_rows_would_overwrite_keys_are_refused() {
    let runtime = runtime();
    let refused = |step: Step, message: &str| {
        let error = outcome(&runtime, &step).expect_err(message);
        assert!(error.contains(message), "{error}");
    };
    let (decode, prefill) = (Regime::Decode, Regime::Prefill);
    refused(
        Step { rows: &[(0, 1), (0, 1)], pages: &[&[3], &[3]], window: None, regime: decode },
        "sequences 0 and 1 both write to page 3",
    );
    refused(
        Step { rows: &[(250, 20)], pages: &[&[4, 4]], window: None, regime: prefill },
        "sequence 0 writes positions 250 to 269 to page 4, where its rows still see earlier keys",
    );
    // A run of rows ends at position 256, and the next one sees the 256 keys before it.
    refused(
        Step { rows: &[(200, 80)], pages: &[&[7, 7]], window: Some(256), regime: prefill },
        "sequence 0 writes positions 256 to 279 to page 7",
    );
    refused(
        Step { rows: &[(255, 1)], pages: &[&[u32::MAX]], window: Some(0), regime: decode },
        "sequence 0 is in page 4294967295 of 9",
    );
}

#[test]
fn pages_that_no_row_sees_any_more_may_come_again() {
    let runtime = runtime();
    let steps = [
        Step { rows: &[(0, 1), (0, 1)], pages: &[&[3], &[4]], window: None, regime: Regime::Decode },
        Step { rows: &[(500, 30)], pages: &[&[1, 2, 1]], window: Some(200), regime: Regime::Prefill },
        Step { rows: &[(300, 1), (2, 0)], pages: &[&[1, 5], &[5, 5]], window: None, regime: Regime::Decode },
    ];
    for step in steps {
        outcome(&runtime, &step).expect("it runs");
    }
}
