//! How the keys of a sequence are split among blocks.

use super::super::BLOCKS_WANTED;
use crate::backend::Mode;
use keel_array::{AttentionSpec, Regime, Shape};

/// Keys that make a split worthwhile, in decode and in prefill.
const SPLIT_KEYS: usize = 64;
const PREFILL_SPLIT_KEYS: usize = 256;

/// Evenly cut splits are multiples of this number of keys, and of a tile's keys in the fastest prefill kernel.
pub(super) const SPLIT_STEP: usize = 64;

/// Pairs of row and head of a block of the fastest prefill kernel.
pub(super) const WIDE_TILE: usize = 128;

/// Most splits that are cut evenly, in decode and in prefill: each writes partial results to scratch.
const SPLITS_MAX: usize = 64;
const PREFILL_SPLITS_MAX: usize = 16;

/// How the keys of a sequence are split among blocks; see `split_range` of `paged.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KvSplits {
    pub count: usize,
    /// Splits are cut at the same positions for every sequence, not evenly.
    pub by_position: bool,
}

/// Depends on shapes alone, since a graph fixes the grid. In the deterministic mode a key's split depends on its
/// position alone, and the number of splits on the longest context that the table can name. In the fast mode the keys
/// of a prompt step with few rows are split as well. Otherwise a short chunk after a long context has too few blocks to
/// fill the device.
pub(super) fn splits(
    spec: &AttentionSpec,
    q: &Shape,
    kv_heads: usize,
    table: &Shape,
    mode: Mode,
) -> KvSplits {
    let (sequences, pages) = (table[0].max(1), table[1]);
    let by_position = mode.is_deterministic() && spec.regime == Regime::Decode;
    let worth = |keys: usize| (pages * AttentionSpec::PAGE).div_ceil(keys).max(1);
    let count = match spec.regime {
        Regime::Prefill if mode.is_deterministic() || spec.window.is_some() => 1,
        Regime::Prefill => {
            // Of the rows alone: a step has room for more sequences than take part.
            let units = (q[0] * q[1] / kv_heads.max(1)).div_ceil(WIDE_TILE);
            let fill = BLOCKS_WANTED / (units * kv_heads).max(1);
            fill.clamp(1, PREFILL_SPLITS_MAX).min(worth(PREFILL_SPLIT_KEYS))
        }
        Regime::Decode if by_position => splits_by_position(pages * AttentionSpec::PAGE),
        Regime::Decode => {
            (BLOCKS_WANTED / (sequences * kv_heads)).clamp(1, SPLITS_MAX).min(worth(SPLIT_KEYS))
        }
    };
    KvSplits { count, by_position }
}

/// Splits that hold `keys` keys: 16 of one page, 16 of two, 16 of four and so on. This keeps blocks busy from short
/// contexts on, and partial results few in long ones. See `split_start` of `paged.cuh`.
fn splits_by_position(keys: usize) -> usize {
    let start = |split: usize| {
        let run = split / 16;
        AttentionSpec::PAGE * (16 * ((1 << run) - 1) + split % 16 * (1 << run))
    };
    (1..).find(|&split| start(split) >= keys).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Determinism, Precision};

    #[test]
    fn splits_by_position_hold_every_key() {
        assert_eq!([1, 256, 257, 4096, 4097, 12_288].map(splits_by_position), [1, 1, 2, 16, 17, 32]);
        assert_eq!([12_289, 131_072].map(splits_by_position), [33, 81]);
    }

    fn count(regime: Regime, [rows, sequences, pages]: [usize; 3], determinism: Determinism) -> usize {
        let spec = AttentionSpec { scale: 1.0.into(), window: None, regime };
        let mode = Mode { precision: Precision::Fast, determinism };
        splits(&spec, &Shape::from([rows, 16, 256]), 4, &Shape::from([sequences, pages]), mode).count
    }

    #[test]
    fn in_the_deterministic_mode_splits_do_not_depend_on_the_batch() {
        let decode =
            |sequences: usize, determinism| count(Regime::Decode, [sequences, sequences, 32], determinism);
        let steps = |sequences| decode(sequences, Determinism::Steps);
        assert!([2, 20, 200].into_iter().all(|sequences| steps(sequences) == steps(1)));
        let [one, many] = [1, 20].map(|sequences| decode(sequences, Determinism::Off));
        assert_ne!(one, many, "the fast mode splits for the device");
        let prefill = |rows| count(Regime::Prefill, [rows, 1, 512], Determinism::Steps);
        assert!([64, 100, 2048].into_iter().all(|rows| prefill(rows) == 1));
    }

    #[test]
    fn few_rows_of_a_prompt_share_keys_as_far_as_these_are_worth_it() {
        let prefill = |rows, pages| count(Regime::Prefill, [rows, 1, pages], Determinism::Off);
        assert_eq!([64, 100, 300, 1024, 2048].map(|rows| prefill(rows, 512)), [16, 8, 3, 1, 1]);
        assert_eq!([1, 2, 7].map(|pages| prefill(64, pages)), [1, 2, 7]);
        let in_a_crowd = |rows| count(Regime::Prefill, [rows, 32, 512], Determinism::Off);
        assert!([64, 100, 300, 1024, 2048].into_iter().all(|rows| in_a_crowd(rows) == prefill(rows, 512)));
    }
}
