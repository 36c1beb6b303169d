//! Passes of a round that are submitted one after the other. The host waits once, at the end of the round.
//!
//! ```text
//! host     draft 1   draft 2   verify   wait, read drafts and tokens
//! device             | draft 1       | draft 2       | verify          |
//! ```
//!
//! A pass of the MTP (multi-token-prediction) head finds the tokens and hidden states of the pass before in its own
//! rows. The verify pass finds all drafts in the pool.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use keel_array::{RESULT_BYTES_MAX, RUNS_MAX};

use super::round::{Proposal, RoundSequence, RoundTimes};
use crate::engine::in_flight::{EndedRun, InFlightRun};
use crate::step::{Outcome, Rows, StepKind};
use crate::{Engine, Result};

/// The passes of a round.
#[derive(Default)]
pub(super) struct Passes {
    /// Those under way, the oldest first.
    in_flight: VecDeque<(StepKind, InFlightRun)>,
    /// The tokens that the others drew, in order.
    drawn: Vec<Vec<u32>>,
    /// Those that have failed.
    failed: Vec<EndedRun>,
    /// When the last pass of the MTP head was seen to end.
    drafted: Option<Instant>,
    /// Whether the verify pass has succeeded.
    is_verified: bool,
}

impl Engine {
    /// Whether the host need not wait between the passes of a round: the device draws each draft and the tokens that
    /// judge it, and all these tokens come to the host with the verify pass.
    pub(super) fn queues_passes(&self, proposals: &[Proposal]) -> bool {
        let tokens: usize = proposals.iter().map(|proposal| proposal.depth + 1).sum();
        self.runs_ahead()
            && tokens > proposals.len()
            && tokens * size_of::<u32>() <= RESULT_BYTES_MAX
            && proposals.iter().all(|proposal| proposal.depth == 0 || proposal.draws.is_some())
    }

    /// Submits all passes of a round, then waits for them. Returns the tokens that the verify pass drew, and sets the
    /// times of drafting and verifying. If the verify pass has succeeded, an error is the inner one.
    ///
    /// The sum of the times is exact. Drafting ends when the host sees the end of the last draft. If the device made
    /// the drafts faster than the host submitted the passes, that is once the verify pass is submitted.
    pub(super) fn run_queued(
        &mut self,
        batch: &mut [RoundSequence<'_>],
        proposals: &mut [Proposal],
        times: &mut RoundTimes,
    ) -> Result<Result<Vec<u32>>> {
        self.finish_in_flight()?;
        batch.iter().try_for_each(|sequence| self.cache.expect_whole(sequence.cache))?;
        let (start, mut passes) = (Instant::now(), Passes::default());
        let submitted = self.draft(batch, proposals, Some(&mut passes));
        let submitted = submitted.and_then(|()| self.verify(batch, proposals, Some(&mut passes))?.map(drop));
        while !passes.in_flight.is_empty() {
            self.end_first(&mut passes);
        }
        // A pass that failed ended those after it.
        let failed = std::mem::take(&mut passes.failed);
        let outcome = if failed.is_empty() { submitted } else { Err(self.first_cause_of(failed)) };
        if let Err(error) = outcome {
            // This makes the devices ready for the next program.
            let error = self.finish_in_flight().err().unwrap_or(error);
            return if passes.is_verified { Ok(Err(error)) } else { Err(error) };
        }
        let tokens = passes.drawn.pop().unwrap_or_default();
        for proposal in proposals.iter_mut() {
            proposal.drafts =
                passes.drawn[..proposal.depth].iter().map(|drawn| drawn[proposal.row]).collect();
        }
        let drafted = passes.drafted.unwrap_or(start);
        (times.drafting, times.verifying) = (drafted.duration_since(start), drafted.elapsed());
        self.note_draft_times(proposals, times.drafting);
        Ok(Ok(tokens))
    }

    /// Submits a pass. Where as many runs as possible are under way, waits for the oldest one.
    pub(super) fn submit_pass(
        &mut self,
        outcome: Outcome,
        rows: &[Rows<'_>],
        passes: &mut Passes,
    ) -> Result<()> {
        if passes.in_flight.len() == RUNS_MAX {
            self.end_first(passes);
        }
        let kind = StepKind::decode(outcome);
        let run = self.submit_on_all(kind, rows)?;
        passes.in_flight.push_back((kind, run));
        Ok(())
    }

    /// Waits for the oldest pass under way.
    fn end_first(&mut self, passes: &mut Passes) {
        let Some((kind, run)) = passes.in_flight.pop_front() else { return };
        let ended = run.wait();
        if ended.has_failed() {
            EndedRun::rejoin(std::iter::once(&ended));
            self.note_failed_pass(kind, &ended);
            return passes.failed.push(ended);
        }
        passes.drawn.push(ended.tokens());
        match kind.outcome {
            Outcome::OpenRows => passes.is_verified = true,
            _ => passes.drafted = Some(Instant::now()),
        }
    }

    /// Records the mean time of the passes of the MTP head for each number of sequences that they had.
    fn note_draft_times(&mut self, proposals: &[Proposal], drafting: Duration) {
        let deepest = proposals.iter().map(|proposal| proposal.depth).max().unwrap_or(0);
        let mut counts: Vec<usize> = (0..deepest)
            .map(|pass| proposals.iter().filter(|proposal| proposal.depth > pass).count())
            .collect();
        counts.dedup();
        let mean = drafting.as_secs_f64() / deepest as f64;
        counts.into_iter().for_each(|count| self.costs.note_draft(count, mean));
    }
}
