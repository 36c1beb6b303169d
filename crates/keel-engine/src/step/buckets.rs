//! The shapes of steps.
//!
//! A program is made for a fixed number of rows and of sequences. With a program for every number, each would be
//! traced, compiled and captured at its first use, while a request waits. So the options determine a list of shapes,
//! and a step takes the next larger shape of it. Padding rows belong to no sequence, and padding sequences have no
//! slot. They read and write no sequence's memory ([`keel_array::Batch`]).
//!
//! On a CPU a new program is cheap and a row is expensive. There the list is longer and finer.

use keel_array::{Backend, PREFILL_GRID, RESULT_BYTES_MAX, Regime};
use keel_models::Part;
use keel_models::vision::VisionConfig;

use super::{Outcome, StepKind, StepShape};
use crate::options::{EngineOptions, HOST_ANSWERS_MAX, HOST_ROWS_MAX, MTP_LAG_MAX};

/// The most prompts in a step.
const PROMPTS_MAX: usize = 32;
/// The same where each prompt costs a row of the output head.
const PROMPTS_MAX_FINE: usize = 8;

/// The list of shapes.
#[derive(Clone, Debug)]
pub(crate) struct Buckets {
    /// Numbers of sequences in a decode step, ascending.
    sequences: Vec<usize>,
    /// Mean numbers of rows per sequence in a step that leaves rows open or makes drafts, ascending. A step of many
    /// sequences uses only some of them.
    open_rows: Vec<usize>,
    /// Numbers of rows in a step of prompts, ascending.
    prefill_rows: Vec<usize>,
    /// How many tokens of one picture must be in the same step because they see each other; 0 if they do not.
    picture_run: usize,
    /// The most prompts in a step of several.
    prompts: usize,
    /// Numbers of rows in a pass in which the MTP (multi-token-prediction) head only catches up, ascending.
    lag_rows: Vec<usize>,
    is_coarse: bool,
    /// Whether steps run ahead of the host.
    runs_ahead: bool,
    /// How many rows of the logits of answers and of prompts are kept for the host.
    host_answers: usize,
    host_prompts: usize,
    /// Whether the hidden states of all rows of prompts are kept for the host where they are read.
    keeps_rows: bool,
    /// Whether the list has only the largest steps.
    are_largest: bool,
}

impl Buckets {
    /// `picture_run` tokens of a picture must be in the same step. `is_coarse` says that a program costs much before
    /// its first run. `runs_ahead` says that steps run ahead of the host.
    pub fn new(options: &EngineOptions, picture_run: usize, is_coarse: bool, runs_ahead: bool) -> Buckets {
        let prompts = prompts_max(options, is_coarse);
        let open_most = options.open_rows();
        let lags = [8, 16, 32, MTP_LAG_MAX];
        Buckets {
            sequences: up_to(options.sequences, |n| next_sequences(n, is_coarse)),
            open_rows: (1..=open_most).collect(),
            prefill_rows: up_to(prefill_rows_max(options, picture_run, prompts), |n| next_rows(n, is_coarse)),
            picture_run,
            prompts,
            lag_rows: lags.into_iter().filter(|&rows| !is_coarse || rows == MTP_LAG_MAX).collect(),
            is_coarse,
            runs_ahead,
            host_answers: if runs_ahead { options.host_rows(HOST_ANSWERS_MAX) } else { 0 },
            host_prompts: if runs_ahead { options.host_rows(HOST_ROWS_MAX) } else { 0 },
            keeps_rows: runs_ahead && options.row_hidden,
            are_largest: options.largest_steps,
        }
    }

    /// The list for the devices of a model, by rank, with its vision tower where pictures are planned for.
    pub fn for_devices<'a>(
        options: &EngineOptions,
        vision: Option<&VisionConfig>,
        devices: impl Iterator<Item = (&'a dyn Backend, &'a Part)> + Clone,
    ) -> Buckets {
        let is_coarse = devices.clone().any(|(backend, _)| backend.is_compiling());
        let picture_run = vision.map_or(0, VisionConfig::run_rows);
        Buckets::new(options, picture_run, is_coarse, runs_ahead(options, devices))
    }

    /// Whether a step of a prompt may begin and end off the grid. Where the rows of a picture see each other, it may
    /// begin and end at a picture.
    pub fn leaves_grid(&self) -> bool {
        self.picture_run > 0
    }

    /// Whether steps run ahead of the host.
    pub fn runs_ahead(&self) -> bool {
        self.runs_ahead
    }

    /// How many rows of the logits of a regime are kept for the host; 0 if none are.
    pub fn host_rows(&self, regime: Regime) -> usize {
        if regime == Regime::Decode { self.host_answers } else { self.host_prompts }
    }

    /// Whether the hidden states of all rows of prompts are kept for the host where they are read.
    pub fn keeps_rows(&self) -> bool {
        self.keeps_rows
    }

    /// Whether sequences may draft, and steps run ahead while none does.
    pub fn drafts_ahead(&self) -> bool {
        self.runs_ahead && !self.open_rows.is_empty()
    }

    /// The program that keeps the hidden states of step number `step`; with `all_rows` of all rows of its prompts, too.
    pub fn keeping_hidden(step: u64, all_rows: bool) -> StepShape {
        StepKind::decode(Outcome::KeptHidden { place: (step % 2) as usize, all_rows }).of(1, 1)
    }

    /// All programs that keep hidden states.
    fn all_keeping_hidden(&self) -> impl Iterator<Item = StepShape> {
        let all_rows = if self.keeps_rows { &[true, false][..] } else { &[false] };
        all_rows.iter().flat_map(|&all_rows| [0, 1].map(|step| Buckets::keeping_hidden(step, all_rows)))
    }

    /// The program that keeps this many rows of logits. Few answers have one of their own, because each row is a copy
    /// of the whole vocabulary.
    pub fn keeping(&self, regime: Regime, rows: usize) -> StepShape {
        let most = self.host_rows(regime);
        let padded = if rows > HOST_ROWS_MAX { most } else { most.min(HOST_ROWS_MAX) };
        StepKind { regime, outcome: Outcome::KeptLogits }.of(padded, 1)
    }

    /// How many prompts one step may run.
    pub fn prompts(&self) -> usize {
        self.prompts
    }

    /// Rows of the largest step of prompts.
    pub fn prefill_rows_max(&self) -> usize {
        self.prefill_rows.last().copied().unwrap_or(PREFILL_GRID)
    }

    /// How many of the next `rows` tokens of a prompt a step should run if the prompt is alone in it. That is all of
    /// them, or fewer on the grid where padding would exceed an eighth of the rows.
    pub fn chunk_rows(&self, rows: usize) -> usize {
        const WASTE_MAX: usize = 8;
        let padded = at_least(&self.prefill_rows, rows);
        let whole = self.prefill_rows.iter().rev().find(|&&n| n <= rows && n.is_multiple_of(PREFILL_GRID));
        match whole {
            Some(&whole) if !self.is_coarse && WASTE_MAX * (padded - rows) > rows => whole,
            _ => rows,
        }
    }

    /// Rows of the smallest step of prompts that has this many and ends on the grid.
    pub fn grid_rows(&self, rows: usize) -> usize {
        let listed = self.prefill_rows.iter().copied().find(|&n| n >= rows && n.is_multiple_of(PREFILL_GRID));
        listed.unwrap_or_else(|| rows.next_multiple_of(PREFILL_GRID))
    }

    /// The shape for this many rows and sequences.
    pub fn fit(&self, kind: StepKind, rows: usize, sequences: usize) -> StepShape {
        let padded = at_least(&self.sequences, sequences.max(1));
        match (kind.regime, kind.outcome) {
            // A prompt that goes on within a picture need not be on the grid, and its steps are.
            (Regime::Prefill, Outcome::State) => kind.of(self.grid_rows(rows), 1),
            (Regime::Prefill, Outcome::LastLogits) => {
                let sequences = if sequences > 1 { self.prompts } else { 1 };
                kind.of(at_least(&self.prefill_rows, rows), sequences)
            }
            (Regime::Decode, Outcome::LastLogits | Outcome::Ahead) => kind.of(padded, padded),
            (Regime::Decode, Outcome::Commit(_)) => kind.of(rows, padded),
            (Regime::Decode, Outcome::OpenRows | Outcome::Draft) => {
                let each = self.open_rows_of(padded).find(|each| each * padded >= rows);
                kind.of(each.map_or(rows, |each| each * padded), padded)
            }
            (Regime::Decode, Outcome::MtpState) if sequences > 1 => {
                kind.of(padded * self.open_rows.len(), padded)
            }
            (Regime::Decode, Outcome::MtpState) => kind.of(at_least(&self.lag_rows, rows), 1),
            // Steps without a sequence, or steps for which no request waits.
            _ => kind.of(rows, sequences),
        }
    }

    /// Mean numbers of rows per sequence in a step of `sequences` sequences that leaves rows open or makes drafts,
    /// ascending.
    fn open_rows_of(&self, sequences: usize) -> impl Iterator<Item = usize> {
        const FEW: usize = 4;
        let (most, is_fine) = (self.open_rows.len(), !self.is_coarse && sequences <= FEW);
        let is_kept = move |rows: &usize| is_fine || matches!(rows, 1 | 2 | 3 | 5) || *rows == most;
        self.open_rows.iter().copied().filter(is_kept)
    }

    /// Every shape that serving needs, the largest first, so that the arena has its full size at once. With
    /// [`EngineOptions::largest_steps`], only shapes that no other shape of their kind exceeds.
    pub fn list(&self) -> Vec<StepShape> {
        let mut all = self.all();
        if self.are_largest {
            let list = all.clone();
            all.retain(|shape| !list.iter().any(|other| is_larger(other, shape)));
        }
        all
    }

    fn all(&self) -> Vec<StepShape> {
        let decode = StepKind::decode;
        let mut shapes = Vec::new();
        for &rows in self.prefill_rows.iter().rev() {
            let ends = StepKind::prefill(Outcome::LastLogits);
            if self.prompts > 1 {
                shapes.push(ends.of(rows, self.prompts));
            }
            shapes.push(ends.of(rows, 1));
            // The steps of a prompt that goes on have whole grids of rows.
            if rows.is_multiple_of(PREFILL_GRID) {
                shapes.push(StepKind::prefill(Outcome::State).of(rows, 1));
            }
        }
        let sequences = self.sequences.iter().rev();
        if self.open_rows.is_empty() {
            shapes.extend(sequences.map(|&n| decode(Outcome::LastLogits).of(n, n)));
            if self.host_answers > 0 {
                if self.host_answers > HOST_ROWS_MAX {
                    shapes.push(self.keeping(Regime::Decode, self.host_answers));
                }
                shapes.extend([Regime::Decode, Regime::Prefill].map(|regime| self.keeping(regime, 1)));
                shapes.extend(self.all_keeping_hidden());
            }
            return shapes;
        }
        if self.drafts_ahead() {
            let of = |&n: &usize| [decode(Outcome::Ahead).of(n, n), decode(Outcome::COMMIT).of(1, n)];
            shapes.extend(sequences.clone().flat_map(of));
            let many = sequences.clone().filter(|&&n| n > 1);
            shapes.extend(many.map(|&n| decode(Outcome::MtpState).of(n * self.open_rows.len(), n)));
            shapes.extend(self.all_keeping_hidden());
        }
        for &n in sequences {
            let both = |each: usize| [Outcome::OpenRows, Outcome::Draft].map(|of| decode(of).of(each * n, n));
            shapes.extend(self.open_rows_of(n).flat_map(both));
        }
        shapes.extend(self.lag_rows.iter().rev().map(|&rows| decode(Outcome::MtpState).of(rows, 1)));
        shapes.push(decode(Outcome::LastLogits).of(1, 1));
        if !self.drafts_ahead() {
            shapes.push(decode(Outcome::COMMIT).of(1, 1));
        }
        shapes
    }

    /// The list as text.
    pub fn lines(&self) -> Vec<String> {
        let numbers = |list: &[usize]| list.iter().map(usize::to_string).collect::<Vec<_>>().join(" ");
        let mut lines = vec![
            format!("sequences of a decode step: {}", numbers(&self.sequences)),
            format!("rows of a step of prompts:  {}", numbers(&self.prefill_rows)),
            format!("prompts of a step:          1 or up to {}", self.prompts),
        ];
        if !self.open_rows.is_empty() {
            let most = self.sequences.last().copied().unwrap_or(1);
            let rows: Vec<usize> = self.open_rows_of(most).collect();
            lines.push(format!("rows of a sequence that drafts: {}", numbers(&rows)));
        }
        lines.push(format!("programs: {}", self.list().len()));
        lines
    }
}

/// Whether steps on these devices run ahead of the host. Several devices must have a share of every layer and be in
/// this process. The tokens of all sequences must come to the host with a step.
fn runs_ahead<'a>(
    options: &EngineOptions,
    mut devices: impl Iterator<Item = (&'a dyn Backend, &'a Part)> + Clone,
) -> bool {
    let fits = options.sequences * size_of::<u32>() <= RESULT_BYTES_MAX;
    let is_here = |backend: &dyn Backend| backend.group().is_none_or(|group| !group.spans_processes());
    fits && devices.all(|(backend, part)| backend.is_queueing() && is_here(backend) && part.is_last())
}

/// Whether `other` is a step of the same kind with more rows or sequences, and with fewer of neither.
fn is_larger(other: &StepShape, shape: &StepShape) -> bool {
    let is_alike = (other.regime, other.outcome) == (shape.regime, shape.outcome);
    is_alike && other != shape && other.rows >= shape.rows && other.sequences >= shape.sequences
}

/// The most prompts in a step.
fn prompts_max(options: &EngineOptions, is_coarse: bool) -> usize {
    options.sequences.min(if is_coarse { PROMPTS_MAX } else { PROMPTS_MAX_FINE })
}

/// Rows of the largest step of prompts: no more than these prompts can have, but at least a whole picture whose rows
/// see each other.
fn prefill_rows_max(options: &EngineOptions, picture_run: usize, prompts: usize) -> usize {
    let all = options.context.next_multiple_of(PREFILL_GRID).saturating_mul(prompts);
    options.prefill_step.min(all).max(picture_run.next_multiple_of(PREFILL_GRID))
}

/// The first number of an ascending list that is at least `n`; `n` itself if there is none.
fn at_least(list: &[usize], n: usize) -> usize {
    list.get(list.partition_point(|&entry| entry < n)).copied().unwrap_or(n)
}

/// The list `next(0)`, `next(next(0))` and so on below `most`, and then `most`.
fn up_to(most: usize, next: impl Fn(usize) -> usize) -> Vec<usize> {
    let mut list: Vec<usize> =
        std::iter::successors(Some(next(0)), |&n| Some(next(n))).take_while(|&n| n < most).collect();
    list.push(most);
    list
}

/// The number of sequences that follows `n` in the list. An octave is divided more finely where padding costs more.
fn next_sequences(n: usize, is_coarse: bool) -> usize {
    let octave = 1 << n.max(1).ilog2();
    match (n, is_coarse) {
        (0, _) => 1,
        (..16, false) => n + 1,
        (..16, true) => 2 * n,
        (16..128, true) => n + octave / 2,
        _ => n + octave / 4,
    }
}

/// The number of rows of prompts that follows `n` in the list.
fn next_rows(n: usize, is_coarse: bool) -> usize {
    let octave = 1 << n.max(1).ilog2();
    match (n, is_coarse) {
        (0, true) => 16,
        (..64, true) => 64,
        (0, false) => 1,
        (..8, false) => 2 * n,
        (..64, false) => n + 8,
        (64..128, _) => 128,
        (128..512, false) => n + 64,
        _ => n + octave / 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> EngineOptions {
        EngineOptions { sequences: 256, context: 4096, drafts: 2, ..EngineOptions::default() }
    }

    #[test]
    fn lists_ascend_to_what_the_options_say() {
        let coarse = Buckets::new(&options(), 0, true, false);
        assert_eq!(coarse.sequences, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256]);
        assert_eq!(coarse.prefill_rows, [16, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]);
        let few = EngineOptions { sequences: 3, context: 100, ..EngineOptions::default() };
        let fine = Buckets::new(&few, 0, false, false);
        assert_eq!((&fine.sequences[..], fine.prompts), (&[1, 2, 3][..], 3));
        assert_eq!(fine.prefill_rows, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 128, 192, 256, 320, 384]);
    }

    #[test]
    fn every_step_has_a_shape_of_the_list_that_holds_it() {
        for (is_coarse, runs_ahead) in [(false, false), (true, false), (true, true)] {
            for (drafts, sequences) in [(0, 1), (0, 37), (3, 5), (8, 256)] {
                let row_hidden = sequences == 5 || sequences == 37;
                let options = EngineOptions { drafts, sequences, row_hidden, ..options() };
                let buckets = Buckets::new(&options, 0, is_coarse, runs_ahead);
                let list = buckets.list();
                assert!(list.len() < 450, "{} shapes", list.len());
                assert!(list.iter().enumerate().all(|(i, shape)| !list[..i].contains(shape)));
                let expect = |kind: StepKind, rows: usize, sequences: usize| {
                    let shape = buckets.fit(kind, rows, sequences);
                    assert!(list.contains(&shape), "{shape:?} for {rows} rows of {sequences}");
                    assert!(shape.rows >= rows && shape.sequences >= sequences);
                };
                for n in 1..=sequences {
                    if drafts == 0 || n == 1 {
                        expect(StepKind::decode(Outcome::LastLogits), n, n);
                    }
                    if buckets.drafts_ahead() {
                        expect(StepKind::decode(Outcome::Ahead), n, n);
                        expect(StepKind::decode(Outcome::COMMIT), 1, n);
                        expect(StepKind::decode(Outcome::MtpState), n * (drafts + 1), n);
                    }
                    for rows in (n..=n * (drafts + 1)).filter(|_| drafts > 0) {
                        expect(StepKind::decode(Outcome::OpenRows), rows, n);
                        expect(StepKind::decode(Outcome::Draft), rows, n);
                    }
                }
                for step in if runs_ahead { 0..4 } else { 0..0 } {
                    assert!(list.contains(&Buckets::keeping_hidden(step, false)));
                    assert_eq!(list.contains(&Buckets::keeping_hidden(step, true)), row_hidden);
                }
                for rows in 1..=buckets.prefill_rows_max() {
                    expect(StepKind::prefill(Outcome::LastLogits), rows, 1);
                    expect(StepKind::prefill(Outcome::LastLogits), rows, buckets.prompts);
                    let chunk = buckets.chunk_rows(rows);
                    assert!(chunk == rows || chunk > 0 && chunk < rows && chunk.is_multiple_of(PREFILL_GRID));
                    let on_grid = buckets.grid_rows(rows);
                    assert!(on_grid.is_multiple_of(PREFILL_GRID) && on_grid >= rows);
                    assert_eq!(buckets.fit(StepKind::prefill(Outcome::State), on_grid, 1).rows, on_grid);
                    expect(StepKind::prefill(Outcome::State), rows, 1);
                }
            }
        }
    }

    #[test]
    fn few_steps_are_the_largest() {
        for (is_coarse, drafts, runs_ahead) in
            [(false, 0, true), (false, 8, true), (true, 0, true), (true, 3, false), (true, 0, false)]
        {
            let options = EngineOptions { drafts, ..options() };
            let of = |options| Buckets::new(&options, 0, is_coarse, runs_ahead);
            let all = of(options).list();
            let largest = of(EngineOptions { largest_steps: true, ..options }).list();
            assert!(largest.len() <= 10 && largest.contains(&all[0]), "{largest:?}");
            let holds =
                |shape: &StepShape| largest.iter().any(|other| other == shape || is_larger(other, shape));
            assert!(all.iter().all(holds));
        }
    }

    #[test]
    fn where_rows_are_dear_a_prompt_is_cut_before_it_is_padded() {
        let buckets = Buckets::new(&options(), 0, false, false);
        assert_eq!(
            [2048, 2000, 1100, 76, 60, 3].map(|rows| buckets.chunk_rows(rows)),
            [2048, 2000, 1024, 64, 60, 3]
        );
        assert_eq!(Buckets::new(&options(), 0, true, false).chunk_rows(1100), 1100);
    }
}
