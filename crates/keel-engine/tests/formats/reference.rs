//! The plain loops that make the repository's own fixtures, against the outputs of another program.

use crate::common::{expected, reference_weights, relative_error};
use keel_testkit::fixtures::{HYBRID, PLAIN, foreign_fixture};
use keel_testkit::reference::{Config, Reference};

/// The difference between another program's f32 and f64.
const ERROR_MAX: f64 = 2e-5;

#[test]
fn the_reference_agrees_with_another_program() {
    // Qwen3-Next differs from Qwen3.5 only in its file. Quantised fixtures need a reader of their own.
    let dense = |name: &&str| !name.contains("4bit") && *name != "qwen3_next";
    for name in HYBRID.into_iter().chain(PLAIN).filter(dense) {
        let Some(folder) = foreign_fixture(name) else { return };
        let json = std::fs::read_to_string(folder.join("config.json")).expect("there");
        let config = Config::read(&serde_json::from_str(&json).expect("JSON"));
        let (weights, want) = (reference_weights(&folder, &config), expected(&folder));
        let model =
            Reference::new(&config, weights.iter().map(|(name, values)| (name.as_str(), &values[..])));
        let mut memory = model.memory();
        let (mut logits, mut drafts) = (Vec::new(), Vec::new());
        for (at, id) in want.ids.iter().enumerate() {
            let hidden = model.step(&mut memory, *id);
            logits.extend(model.logits(&hidden).iter().map(|x| *x as f32));
            if let Some(next) = want.ids.get(at + 1).filter(|_| config.has_mtp) {
                drafts.extend(model.mtp_logits(&mut memory, &hidden, *next).iter().map(|x| *x as f32));
            }
        }
        let error = relative_error(&logits, &want.logits);
        assert!(error <= ERROR_MAX, "{name}: logits differ by {error:.1e}");
        assert_eq!(config.has_mtp, want.mtp_logits.is_some(), "{name}");
        if let Some(want) = &want.mtp_logits {
            let error = relative_error(&drafts, want);
            assert!(error <= ERROR_MAX, "{name}: logits of the head differ by {error:.1e}");
        }
    }
}
