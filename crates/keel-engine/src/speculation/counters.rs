//! Counts and times of speculation.

use std::time::Duration;

use super::depth::POSITIONS;

/// Counts and times of the rounds of sequences that may draft. The time of a pass that several sequences share is
/// divided among them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpeculationCounters {
    /// Rounds, including those without drafts.
    pub rounds: u64,
    /// Of these rounds, those without drafts.
    pub plain_rounds: u64,
    /// Tokens that the rounds gave.
    pub tokens: u64,
    /// Drafts made at each position after the last token.
    pub drafted: [u64; POSITIONS],
    /// Drafts accepted at each position.
    pub accepted: [u64; POSITIONS],
    /// Time in the MTP head.
    pub draft_time: Duration,
    /// Time in the model. Of a step that runs ahead, the time that the host waited for it.
    pub verify_time: Duration,
    /// Time to choose tokens and move counts. The state itself is committed within the next verify pass.
    pub commit_time: Duration,
}

impl SpeculationCounters {
    /// Drafts made.
    pub fn drafted_total(&self) -> u64 {
        self.drafted.iter().sum()
    }

    /// Drafts accepted.
    pub fn accepted_total(&self) -> u64 {
        self.accepted.iter().sum()
    }

    /// Mean number of tokens of a round; 0 before the first.
    pub fn mean_accepted_len(&self) -> f64 {
        if self.rounds == 0 { 0.0 } else { self.tokens as f64 / self.rounds as f64 }
    }

    /// Adds the counts and times of another sequence.
    pub fn add(&mut self, other: &SpeculationCounters) {
        self.rounds += other.rounds;
        self.plain_rounds += other.plain_rounds;
        self.tokens += other.tokens;
        for i in 0..POSITIONS {
            self.drafted[i] += other.drafted[i];
            self.accepted[i] += other.accepted[i];
        }
        self.draft_time += other.draft_time;
        self.verify_time += other.verify_time;
        self.commit_time += other.commit_time;
    }

    pub(super) fn note_round(&mut self, drafted: usize, accepted: usize, tokens: usize) {
        self.rounds += 1;
        self.plain_rounds += u64::from(drafted == 0);
        self.tokens += tokens as u64;
        self.drafted[..drafted].iter_mut().for_each(|n| *n += 1);
        self.accepted[..accepted].iter_mut().for_each(|n| *n += 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_add_up() {
        let mut counters = SpeculationCounters::default();
        assert_eq!(counters.mean_accepted_len(), 0.0);
        counters.note_round(3, 1, 2);
        counters.note_round(3, 3, 4);
        counters.note_round(0, 0, 1);
        assert_eq!(counters.drafted[..4], [2, 2, 2, 0]);
        assert_eq!(counters.accepted[..4], [2, 1, 1, 0]);
        assert_eq!((counters.drafted_total(), counters.accepted_total()), (6, 4));
        assert_eq!((counters.rounds, counters.plain_rounds), (3, 1));
        assert!((counters.mean_accepted_len() - 7.0 / 3.0).abs() < 1e-12);
        let mut sum = counters.clone();
        sum.add(&counters);
        assert_eq!((sum.tokens, sum.drafted[0]), (14, 4));
    }
}
