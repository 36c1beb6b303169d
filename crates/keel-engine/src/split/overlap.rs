//! Prompts in a pipeline: the chunks of a step overlap across its stages.
//!
//! ```text
//! stage 1    chunk 1 ▸ chunk 2 ▸ chunk 3 ▸ chunk 4
//! stage 2              chunk 1 ▸ chunk 2 ▸ chunk 3 ▸ chunk 4
//! ```
//!
//! Each device gets its programs of all chunks at once and runs them in order. Its buffers are filled when a chunk's
//! turn comes. The chunks lie on the 64-token grid, so the bits are those of one step.

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use keel_array::Regime;
use keel_cache::{CommitProgress, SequenceCache};

use crate::PREFILL_GRID;
use crate::device_thread::{FinishedJob, Job, Queued};
use crate::split::step::{DeviceStep, Drawn, all_steppers, run_on_all};
use crate::step::{Outcome, Rows, StepKind, Stepper};
use crate::{Engine, Result};

/// Chunks for each stage of a pipeline. More keep the stages busier at both ends of a step: with `n` chunks and `s`
/// stages each stage works for `n` of `n + s - 1` turns.
const CHUNKS_PER_STAGE: usize = 4;

/// The fewest rows of a chunk but the last: fewer use a device less well.
const CHUNK_ROWS_MIN: usize = 256;

/// The fewest rows of a chunk for each expert of a mixture, on average. A chunk reads and widens the weights of all
/// experts that its rows choose, which takes as long as multiplying about 30 rows by them.
const EXPERT_ROWS_MIN: usize = 32;

/// Cuts `rows` rows into chunks for a pipeline of `stages` stages. `limits` are the fewest and the most rows of a
/// chunk; the last one may be shorter. `padded` gives the rows of the step that runs a chunk. Returns `None` for a
/// single stage, or if one chunk holds all rows.
fn chunks_of(
    rows: usize,
    stages: usize,
    limits: RangeInclusive<usize>,
    padded: impl Fn(usize) -> usize,
) -> Option<Vec<Range<usize>>> {
    let (fewest, most) = limits.into_inner();
    let count = (CHUNKS_PER_STAGE * stages).min(rows / fewest).max(rows.div_ceil(most));
    let size = padded(rows.div_ceil(count.max(1)));
    (stages > 1 && rows > size)
        .then(|| (0..rows).step_by(size).map(|start| start..(start + size).min(rows)).collect())
}

impl Engine {
    /// The stages of the pipeline, each of one device or several.
    pub(crate) fn stages(&self) -> usize {
        (self.peers.len() + 1) / self.model().part.share.count
    }

    /// Whether a prompt without pictures is cut into chunks that overlap. It is not if a chunk may leave the grid, or
    /// if the hidden states of all rows are kept.
    fn overlaps_prompts(&self) -> bool {
        self.stages() > 1 && !self.leaves_grid() && !self.stepper.keeps_rows()
    }

    /// The most rows of a step that runs this sequence's prompt alone. In a pipeline these are more than
    /// [`Engine::prefill_rows_max`], because each chunk is a step of its own on a device.
    pub fn lone_prompt_rows_max(&self, sequence: &SequenceCache) -> usize {
        let is_concurrent = self.runtime().backend().group().is_some_and(|group| group.is_concurrent());
        let overlaps = self.overlaps_prompts() && is_concurrent && sequence.vision_inputs().is_none();
        self.prefill_rows_max() * if overlaps { CHUNKS_PER_STAGE * self.stages() } else { 1 }
    }

    /// The chunks into which a step of one prompt is cut to overlap; `None` if it runs as a whole.
    pub(crate) fn overlapping_chunks(&self, kind: StepKind, rows: &[Rows<'_>]) -> Option<Vec<Range<usize>>> {
        let [row] = rows else { return None };
        let is_prompt =
            kind.regime == Regime::Prefill && matches!(kind.outcome, Outcome::State | Outcome::LastLogits);
        let can_overlap = self.overlaps_prompts() && !row.has_pictures();
        if !is_prompt || !can_overlap || !row.first.is_multiple_of(PREFILL_GRID) {
            return None;
        }
        let mixture = self.model().config.moe.as_ref();
        let for_experts = mixture.map_or(0, |moe| EXPERT_ROWS_MIN * moe.experts / moe.chosen);
        let (buckets, most) = (self.stepper.buckets(), self.prefill_rows_max());
        let fewest = for_experts.max(CHUNK_ROWS_MIN).min(most);
        chunks_of(row.tokens.len(), self.stages(), fewest..=most, |rows| buckets.grid_rows(rows))
    }

    /// Runs the chunks of a step of one prompt on all devices. The bytes of `drawn` come to the host after the last.
    pub(crate) fn run_overlapping(
        &mut self,
        outcome: Outcome,
        row: &Rows<'_>,
        chunks: &[Range<usize>],
        drawn: Option<Drawn<'_>>,
    ) -> Result<()> {
        let (place, bytes) = drawn.map_or((None, None), |(place, bytes)| (Some(place.clone()), Some(bytes)));
        let mut jobs = self.jobs_of_chunks(outcome, row, chunks)?;
        if let Some(last) = jobs.last_mut().and_then(|of_lead| of_lead.last_mut()) {
            last.drawn = place;
        }
        let threads = self.peers.iter().map(|peer| peer.thread.as_deref()).chain([None]);
        let of_device =
            |(thread, jobs): (_, Vec<Job>)| jobs.into_iter().map(move |job| DeviceStep { thread, job });
        let ended = run_on_all(threads.zip(jobs).flat_map(of_device).collect());
        if let (Some(bytes), Some(FinishedJob { outcome: Ok(drawn), .. })) = (bytes, ended.last()) {
            bytes.copy_from_slice(drawn);
        }
        self.note_finished(ended, std::slice::from_ref(row), CommitProgress::default(), true)
    }

    /// The jobs of each device, by rank.
    fn jobs_of_chunks(
        &mut self,
        outcome: Outcome,
        row: &Rows<'_>,
        chunks: &[Range<usize>],
    ) -> Result<Vec<Vec<Job>>> {
        let has_failed = Arc::new(AtomicBool::new(false));
        let mut jobs: Vec<Vec<Job>> = (0..=self.peers.len()).map(|_| Vec::new()).collect();
        for (i, chunk) in chunks.iter().enumerate() {
            let is_last = i + 1 == chunks.len();
            let tokens = &row.tokens[chunk.clone()];
            let part = Rows {
                first: row.first + chunk.start,
                next: row.tokens.get(chunk.end).copied().or(row.next),
                draws: if is_last { row.draws } else { &[] },
                ..Rows::after(row.sequence, tokens)
            };
            let outcome = if is_last { outcome } else { Outcome::State };
            let of_chunk =
                self.queued_jobs(StepKind::prefill(outcome), std::slice::from_ref(&part), &has_failed)?;
            jobs.iter_mut().zip(of_chunk).for_each(|(jobs, job)| jobs.push(job));
        }
        Ok(jobs)
    }

    /// A step over rows without pictures as a job of each device, by rank. Jobs of other steps may run before. If one
    /// of them sets `has_failed`, these do not run.
    pub(crate) fn queued_jobs(
        &mut self,
        kind: StepKind,
        rows: &[Rows<'_>],
        has_failed: &Arc<AtomicBool>,
    ) -> Result<Vec<Job>> {
        let job = |stepper: &mut Stepper| {
            let (step, filling) = stepper.queued_step(kind, rows)?;
            let fill = Box::new(move || filling.write());
            let queued = Some(Queued { fill, has_failed: Arc::clone(has_failed) });
            Ok(Job { step, drawn: None, queued })
        };
        all_steppers(&mut self.peers, &mut self.stepper).map(job).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::chunks_of;

    #[test]
    fn a_step_is_cut_on_the_grid_where_that_keeps_stages_busy() {
        let cut = |rows, stages, fewest| {
            let chunks = chunks_of(rows, stages, fewest..=2048, |rows| rows.next_multiple_of(64))?;
            assert_eq!(chunks.iter().map(ExactSizeIterator::len).sum::<usize>(), rows);
            let (last, others) = chunks.split_last().expect("some");
            assert!(others.iter().all(|chunk| (fewest..=2048).contains(&chunk.len())) && last.len() <= 2048);
            Some((chunks.len(), chunks[0].len()))
        };
        assert_eq!(cut(2048, 1, 256), None);
        assert_eq!(cut(300, 2, 256), None);
        assert_eq!(cut(600, 2, 256), Some((2, 320)));
        assert_eq!(cut(2048, 2, 256), Some((8, 256)));
        assert_eq!(cut(2048, 4, 256), Some((8, 256)), "no chunk is smaller");
        assert_eq!(cut(3000, 2, 256), Some((8, 384)));
        assert_eq!(cut(2048, 2, 1638), None, "experts have too few rows");
        assert_eq!(cut(2048, 2, 1024), Some((2, 1024)));
        assert_eq!(cut(16_384, 2, 256), Some((8, 2048)));
        assert_eq!(cut(16_300, 4, 1638), Some((9, 1856)), "all but the last have enough rows");
    }
}
