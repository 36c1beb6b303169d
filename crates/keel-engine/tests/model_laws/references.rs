//! Every fixture against its reference, in both regimes.

use crate::common::{all_logits, engine, exact, expected, fixture, models, relative_error, runtime};
use keel_engine::{Engine, GenerateOptions, TokenIterator};
use keel_models::loading::CheckpointParameters;
use keel_weights::Checkpoint;

/// Reference implementations differ from each other by less than this.
const ERROR_MAX: f64 = 1e-4;

fn compare(one_by_one: bool) {
    for name in models() {
        let folder = fixture(name);
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
        let folder = fixture(name);
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

/// The file is cut when the first weight is in memory, so the rest is read from a file that is too short.
#[test]
fn a_weights_file_that_is_cut_while_it_is_loaded_is_an_error() {
    let source = fixture("llama");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let copy = |name: &str| std::fs::copy(source.join(name), folder.path().join(name)).expect("copied");
    ["config.json", "model.safetensors"].into_iter().for_each(|name| _ = copy(name));
    let checkpoint = Checkpoint::open(folder.path()).expect("the checkpoint opens");
    let weights = std::fs::OpenOptions::new().write(true).open(folder.path().join("model.safetensors"));
    let weights = weights.expect("there");
    let cut = |_| weights.set_len(20_000).expect("the file can be cut");
    let parameters = CheckpointParameters(&checkpoint);
    let loaded = Engine::load(&runtime(1), &parameters, checkpoint.config(), exact(), &cut);
    let error = loaded.err().expect("its weights are gone").to_string();
    assert!(error.contains("model.safetensors was cut short while it was read"), "{error}");
}
