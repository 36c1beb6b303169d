//! Page tables are data. If a kernel may not run with them, the step is refused when it runs, and writes nothing.

use super::Check;
use keel_array::{Array, AttentionSpec, Batch, Category, DType, KvPool, Regime, Runtime};

pub(super) const CHECKS: &[Check] = &[
    Check { op: "paged_attention", run: steps_that_overwrite_keys_are_refused },
    Check { op: "paged_attention", run: two_of_many_sequences_in_one_page_are_refused },
    Check { op: "paged_attention", run: a_wrong_page_is_found_anywhere_in_long_sequences },
    Check { op: "paged_attention", run: pages_that_no_row_sees_any_more_may_come_again },
];

const PAGE: usize = AttentionSpec::PAGE;
const HEAD: usize = 16;

/// A step whose sequences have rows at these positions, each with its pages.
#[derive(Clone)]
struct Step {
    /// The first position of each sequence and the number of its rows.
    rows: Vec<(usize, usize)>,
    pages: Vec<Vec<u32>>,
    window: Option<usize>,
    regime: Regime,
    pool_pages: usize,
}

impl Step {
    fn new(rows: &[(usize, usize)], pages: &[&[u32]]) -> Step {
        let pages = pages.iter().map(|pages| pages.to_vec()).collect();
        Step { rows: rows.to_vec(), pages, window: None, regime: Regime::Prefill, pool_pages: 9 }
    }

    fn with_window(self, window: usize) -> Step {
        Step { window: Some(window), ..self }
    }

    fn of_decode(self) -> Step {
        Step { regime: Regime::Decode, ..self }
    }

    /// A decode step of sequences with one row each, which are in these pages.
    fn of_many(pages: &[u32], pool_pages: usize) -> Step {
        let rows = (0..pages.len()).map(|b| (b % PAGE, 1)).collect();
        let pages = pages.iter().map(|&page| vec![page]).collect();
        Step { rows, pages, window: None, regime: Regime::Decode, pool_pages }
    }

    /// The error of the step, if there is one.
    fn outcome(&self, runtime: &Runtime) -> Result<(), String> {
        let index = |values: Vec<u32>| {
            let count = values.len();
            Array::from_slice(runtime, &values, [count]).expect("memory")
        };
        let mut row_start = vec![0];
        self.rows.iter().for_each(|(_, rows)| row_start.push(row_start[row_start.len() - 1] + *rows as u32));
        let (sequences, width) = (self.rows.len(), self.pages[0].len());
        let tokens = row_start[sequences] as usize;
        let batch = Batch {
            row_start: index(row_start),
            slot: index(vec![0; sequences]),
            position: index(self.rows.iter().map(|(first, _)| *first as u32).collect()),
            table: index(self.pages.concat()).reshape([sequences, width]).expect("as many entries"),
            accepted: index(vec![0; sequences]),
        };
        let shape = [self.pool_pages, 1, PAGE, HEAD];
        let pool = || Array::persistent(runtime, Category::Kv, shape, DType::F32).expect("memory");
        let pool = KvPool { keys: pool(), values: pool() };
        let x = Array::full(runtime, [tokens, 1, HEAD], DType::F32, 1.0).expect("an addressable shape");
        let spec = AttentionSpec { scale: 1.0.into(), window: self.window, regime: self.regime };
        let y = x.paged_attention(&x, &x, &pool, &batch, spec).expect("shapes fit");
        let outcome = y.eval().map_err(|error| error.to_string());
        let is_written = pool.keys.to_vec::<f32>().expect("readable").iter().any(|&key| key != 0.0);
        assert_eq!(is_written, outcome.is_ok(), "a refused step writes nothing");
        outcome
    }

    /// Asserts that the step is refused with one of these messages.
    #[track_caller]
    fn expect_refusal(&self, runtime: &Runtime, messages: &[&str]) {
        let error = self.outcome(runtime).expect_err(messages[0]);
        assert!(messages.iter().any(|message| error.contains(message)), "{error}, expected {messages:?}");
    }
}

fn steps_that_overwrite_keys_are_refused(runtime: &Runtime) {
    let overwritten = "to page 4, where its rows still see earlier keys";
    let both = "sequences 0 and 1 both write to page 3";
    Step::new(&[(0, 1), (0, 1)], &[&[3], &[3]]).of_decode().expect_refusal(runtime, &[both]);
    Step::new(&[(200, 80), (600, 1)], &[&[1, 3, 0], &[5, 6, 3]]).expect_refusal(runtime, &[both]);
    // The page comes twice: both times written; once before the rows; before the rows and as the second one written.
    Step::new(&[(250, 20)], &[&[4, 4]]).expect_refusal(runtime, &[overwritten]);
    Step::new(&[(300, 1)], &[&[4, 4]]).of_decode().expect_refusal(runtime, &[overwritten]);
    Step::new(&[(500, 30)], &[&[4, 1, 4]]).expect_refusal(runtime, &[overwritten]);
    // The rows from position 256 on see the 256 keys before them.
    let rounds = "pages of a window of 256 come round";
    let step = Step::new(&[(200, 80)], &[&[4, 4]]).with_window(256);
    step.expect_refusal(runtime, &[overwritten, rounds]);
    // Rows of the decode regime are written together.
    let rounds = "pages of a window of 250 come round";
    let step = Step::new(&[(500, 30)], &[&[4, 1, 4]]).with_window(250).of_decode();
    step.expect_refusal(runtime, &[overwritten, rounds]);
    let missing = "is in page 4294967295 of 9";
    Step::new(&[(255, 1)], &[&[u32::MAX]]).with_window(0).of_decode().expect_refusal(runtime, &[missing]);
}

fn two_of_many_sequences_in_one_page_are_refused(runtime: &Runtime) {
    // A backend may look at these sequences in several turns, and at the pages of the larger pool, too.
    for (count, pool_pages) in [(300u32, 302), (1100, 2300)] {
        // All different, and scattered over the pool.
        let page = |b: u32| if b.is_multiple_of(2) { b } else { pool_pages as u32 - b };
        let pages: Vec<u32> = (0..count).map(page).collect();
        for (a, b) in [(0, 1), (5, 261), (0, count as usize - 1)] {
            let mut pages = pages.clone();
            pages[a] = pages[b];
            let message = format!("sequences {a} and {b} both write to page {}", pages[b]);
            Step::of_many(&pages, pool_pages).expect_refusal(runtime, &[&message]);
        }
        Step::of_many(&pages, pool_pages).outcome(runtime).expect("each has its own page");
    }
}

fn a_wrong_page_is_found_anywhere_in_long_sequences(runtime: &Runtime) {
    // A backend may share the pages of a sequence among threads, fewer for each of more sequences.
    const LONG: usize = 40;
    for sequences in [1, 2, 9] {
        let own = |b: usize| ((b * LONG) as u32..((b + 1) * LONG) as u32).collect::<Vec<_>>();
        let rows: Vec<_> = (0..sequences).map(|b| (LONG * PAGE - 1 - b, 1)).collect();
        let pages: Vec<_> = (0..sequences).map(own).collect();
        let step = Step { pool_pages: sequences * LONG, ..Step::new(&rows, &[]).of_decode() };
        let with = |pages| Step { pages, ..step.clone() };
        with(pages.clone()).outcome(runtime).expect("each has its own pages");
        let last = sequences - 1;
        for at in [0, 1, 17, 31, 32, LONG - 1] {
            let mut missing = pages.clone();
            missing[last][at] = 1000;
            with(missing).expect_refusal(runtime, &[&format!("is in page 1000 of {}", step.pool_pages)]);
            if at + 1 < LONG {
                let (mut twice, page) = (pages.clone(), pages[last][LONG - 1]);
                twice[last][at] = page;
                let message = format!("to page {page}, where its rows still see earlier keys");
                with(twice).expect_refusal(runtime, &[&message]);
            }
        }
    }
}

fn pages_that_no_row_sees_any_more_may_come_again(runtime: &Runtime) {
    let steps = [
        Step::new(&[(0, 1), (0, 1)], &[&[3], &[4]]).of_decode(),
        Step::new(&[(500, 30)], &[&[1, 2, 1]]).with_window(200),
        // The rows before position 512 see the page that the rows from there on overwrite.
        Step::new(&[(500, 30)], &[&[1, 2, 1]]).with_window(250),
        Step::new(&[(300, 1), (2, 0)], &[&[1, 5], &[5, 5]]).of_decode(),
        // Sequences may share pages that none of them writes.
        Step::new(&[(300, 9), (256, 300)], &[&[1, 5, 0], &[1, 6, 7]]),
    ];
    for step in steps {
        step.outcome(runtime).expect("it runs");
    }
}
