//! Checks that must hold for any bytes. The fuzz target and `tests/fuzz_smoke.rs` share them.

use serde_json::Value;

/// Reads `file` as the config.json of a model. Returns whether it was accepted.
///
/// # Panics
/// If an error says nothing, or an accepted config has numbers that contradict each other.
pub fn config(file: &[u8]) -> bool {
    let Ok(json) = serde_json::from_slice::<Value>(file) else { return false };
    let config = match keel_models::read_config(&json) {
        Ok(config) => config,
        Err(problem) => {
            assert!(!problem.to_string().is_empty());
            return false;
        }
    };
    assert!(config.vocab > 0 && config.hidden > 0);
    // Counts products without overflow.
    let _ = config.products_per_token();
    true
}
