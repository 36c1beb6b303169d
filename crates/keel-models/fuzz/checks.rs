//! Checks that must hold for any bytes. The fuzz target and `tests/fuzz_smoke.rs` share them.

use keel_models::vision::{prompt_layout, read_vision, run_ends};
use serde_json::Value;

/// Rows of a picture whose prompt is made.
const PROMPT_ROWS_MAX: usize = 1 << 16;

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

/// Reads `file` as the config.json of a model with vision. Returns whether it has a vision tower and was accepted.
///
/// # Panics
/// If an error says nothing, or the numbers of an accepted tower contradict each other.
pub fn tower(file: &[u8]) -> bool {
    let Ok(json) = serde_json::from_slice::<Value>(file) else { return false };
    let tower = match read_vision(&json) {
        Ok(Some(tower)) => tower,
        Ok(None) => return false,
        Err(problem) => {
            assert!(!problem.to_string().is_empty());
            return false;
        }
    };
    assert!(tower.head_dim() * tower.heads == tower.hidden && tower.hidden > 0 && tower.text_hidden > 0);
    assert!(tower.eps > 0.0 && tower.eps.is_finite(), "an eps of {}", tower.eps);
    assert!(tower.patch_values() > 0 && tower.levels() > 0);
    let (side, block) = (tower.grid_side().max(tower.block_side()), tower.block_side());
    assert!(side.is_multiple_of(block), "blocks of {block} in a grid of {side}");
    let products = tower.products_per_block(side * side);
    assert_eq!(products.len(), tower.depth);
    assert!(products.iter().all(|&count| count > 0));
    let rows = tower.rows_of(side, side);
    let runs = tower.runs_of(1, side, side, &mut 0);
    assert_eq!(runs.iter().map(|run| run.height * run.width).sum::<usize>(), rows);
    if rows <= PROMPT_ROWS_MAX {
        let tokens =
            [vec![tower.tokens.start], vec![tower.tokens.image; rows], vec![tower.tokens.end]].concat();
        let Ok(layout) = prompt_layout(&tower, &tokens, &runs, &[]) else { return true };
        assert_eq!((layout.positions.len(), layout.features.len()), (tokens.len(), tokens.len()));
        assert_eq!(run_ends(&tower, &layout).len(), tokens.len());
    }
    true
}
