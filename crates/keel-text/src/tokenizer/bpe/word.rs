//! A word while its pairs are merged.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::cancel;

/// About the number of merges between two checks for cancellation.
const CHECKED_EACH: usize = 1024;

/// Means that there is no symbol on that side.
const NONE: u32 = u32::MAX;

/// A token of the word.
#[derive(Clone, Copy)]
pub(super) struct Symbol {
    /// The token's place in the vocabulary.
    pub token: u32,
    /// Number of bytes of the word that it covers. It is 0 after the symbol was merged into the one before.
    pub bytes: u32,
    before: u32,
    after: u32,
}

/// A pair of tokens that merges.
pub(super) struct PairMerge {
    /// The pair's place in the order of merges.
    pub rank: u32,
    /// The token that it becomes.
    pub result: u32,
}

/// The tokens of a word, from left to right.
#[derive(Default)]
pub(super) struct Word {
    symbols: Vec<Symbol>,
}

impl Word {
    /// Appends a token that covers `bytes` bytes.
    pub(super) fn push(&mut self, token: u32, bytes: u32) {
        let at = self.symbols.len() as u32;
        let before = at.checked_sub(1).unwrap_or(NONE);
        if let Some(last) = self.symbols.last_mut() {
            last.after = at;
        }
        self.symbols.push(Symbol { token, bytes, before, after: NONE });
    }

    /// Merges pairs until no pair merges any more. The pair of lowest rank merges first; of equal ranks, the leftmost.
    pub(super) fn merge_all(&mut self, mut merge: impl FnMut(u32, u32) -> Option<PairMerge>) {
        let mut queue = BinaryHeap::with_capacity(self.symbols.len());
        for at in 1..self.symbols.len() {
            let pair = merge(self.symbols[at - 1].token, self.symbols[at].token);
            queue.extend(pair.map(|pair| Reverse((pair.rank, at as u32 - 1, pair.result))));
        }
        while let Some(Reverse((_, at, result))) = queue.pop() {
            if queue.len() % CHECKED_EACH == 0 && cancel::is_cancelled() {
                return;
            }
            let left = self.symbols[at as usize];
            if left.bytes == 0 || left.after == NONE {
                continue;
            }
            let right = self.symbols[left.after as usize];
            // Earlier merges may have changed the pair.
            if merge(left.token, right.token).is_none_or(|now| now.result != result) {
                continue;
            }
            self.symbols[left.after as usize].bytes = 0;
            let merged =
                Symbol { token: result, bytes: left.bytes + right.bytes, after: right.after, ..left };
            self.symbols[at as usize] = merged;
            if merged.after != NONE {
                let next = &mut self.symbols[merged.after as usize];
                next.before = at;
                let pair = merge(result, next.token);
                queue.extend(pair.map(|pair| Reverse((pair.rank, at, pair.result))));
            }
            if merged.before != NONE {
                let pair = merge(self.symbols[merged.before as usize].token, result);
                queue.extend(pair.map(|pair| Reverse((pair.rank, merged.before, pair.result))));
            }
        }
    }

    /// The tokens that are left.
    pub(super) fn tokens(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols.iter().filter(|symbol| symbol.bytes > 0)
    }
}
