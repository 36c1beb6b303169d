//! Every fixture against its reference, in both regimes.

mod common;

use common::{all_logits, engine, exact, expected, fixture, models, relative_error, runtime};
use keel_engine::{GenerateOptions, TokenIterator};

/// The bound that reference implementations keep among each other leaves room to spare.
const ERROR_MAX: f64 = 1e-4;

fn compare(one_by_one: bool) {
    for name in models() {
        let Some(folder) = fixture(name) else { continue };
        let want = expected(&folder);
        let mut engine = engine(&folder, &runtime(2), exact());
        let mtp = want.mtp_logits.is_some();
        assert_eq!(
            mtp,
            engine.model().mtp.is_some(),
            "{name}: the head is there exactly when the reference has it"
        );
        let (logits, mtp_logits) = all_logits(&mut engine, &want.ids, one_by_one, mtp);
        let error = relative_error(&logits, &want.logits);
        assert!(error <= ERROR_MAX, "{name}: logits differ by {error:.1e}");
        if let Some(want) = &want.mtp_logits {
            let error = relative_error(&mtp_logits, want);
            assert!(error <= ERROR_MAX, "{name}: logits of the head differ by {error:.1e}");
        }
    }
}

#[test]
fn logits_match_the_reference_in_the_prefill_regime() {
    compare(false);
}

#[test]
fn logits_match_the_reference_in_the_decode_regime() {
    compare(true);
}

#[test]
fn greedy_tokens_match_the_reference() {
    for name in models() {
        let Some(folder) = fixture(name) else { continue };
        let want = expected(&folder);
        let Some(greedy) = want.greedy else { continue };
        let mut engine = engine(&folder, &runtime(2), exact());
        let sequence = engine.open().expect("a slot is free");
        let options = GenerateOptions { max_tokens: greedy.tokens.len(), ..GenerateOptions::default() };
        let tokens = TokenIterator::new(&mut engine, sequence, &want.ids, options, &mut |_| ())
            .expect("the prompt fits");
        let got: Vec<u32> = tokens.collect::<Result<_, _>>().expect("every step runs");
        assert_eq!(got, greedy.tokens, "{name}");
    }
}
