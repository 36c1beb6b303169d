//! The prepared steps of a model: traced once per shape, and run again with new data in the staging buffers.

mod buckets;
mod filling;
mod kept;
mod results;
mod shape;
mod staging;
mod trace;
mod vision;

use std::ops::Range;

use keel_array::{Array, ElementCopy, Executable, Regime, RowLog, Runtime, copy_all};
use keel_cache::{LayerStorage, ModelCache};
use keel_models::HybridModel;
use keel_models::vision::VisionConfig;

pub(crate) use buckets::Buckets;
pub(crate) use filling::Filling;

use crate::options::EngineOptions;
use crate::{EngineError, Result};
pub(crate) use kept::HiddenOf;
use kept::{KeptHidden, KeptLogits};
use results::{Results, read_rows, read_settled_rows};
pub(crate) use results::{append_rows, drafts_not_planned, ids_of};
pub(crate) use shape::{Outcome, StepKind, StepShape};
use staging::{MtpStaging, Staging};
pub(crate) use staging::{Rows, TokensAt};
pub(crate) use trace::{Pairs, trace};
use vision::VisionStaging;

/// How many prepared steps are kept other than those of the list. Shapes that serving does not need replace each other.
const OTHERS_MAX: usize = 32;

/// How many rows of logits are computed at a time when every row is wanted.
pub(crate) const LOGITS_ROWS: usize = 64;

/// A step that is ready to run, and where it writes the tokens that come to the host.
pub(crate) struct PreparedStep {
    pub step: Executable,
    pub drawn: Array,
}

/// The sizes, options and storage that the steps of all devices have in common.
pub(crate) struct StepSizes<'a> {
    pub options: &'a EngineOptions,
    pub buckets: Buckets,
    pub vision: Option<&'a VisionConfig>,
    /// The storage of sequences.
    pub cache: &'a ModelCache,
}

/// A device's part of the model, and the steps prepared for it.
pub(crate) struct Stepper {
    runtime: Runtime,
    model: HybridModel,
    /// The storage of the device's layers.
    storage: Vec<LayerStorage>,
    /// These layers among those of the cache.
    layers: Range<usize>,
    buckets: Buckets,
    staging: Staging,
    vision: Option<VisionStaging>,
    results: Results,
    /// Logits for the host, where it may read them while a later step runs.
    kept: Option<KeptLogits>,
    /// Hidden states for the host in the same way.
    kept_hidden: Option<KeptHidden>,
    /// Whether sequences may draft.
    drafts: bool,
    /// Steps of the list, which stay.
    listed: Vec<(StepShape, Executable)>,
    /// Other steps, the least recently used first.
    others: Vec<(StepShape, Executable)>,
    /// Steps traced so far.
    traced: u64,
}

/// Which list a prepared step belongs to.
#[derive(Clone, Copy)]
pub(crate) enum StepList {
    /// The steps that serving needs. They stay.
    Listed,
    /// Other steps.
    Others,
}

impl Stepper {
    /// Allocates the buffers. `layers` are those of the model's part among all of the cache.
    pub fn allocate(
        runtime: &Runtime,
        model: HybridModel,
        layers: Range<usize>,
        sizes: &StepSizes<'_>,
    ) -> Result<Stepper> {
        let StepSizes { options, buckets, vision, cache } = sizes;
        let vision =
            vision.map(|config| VisionStaging::allocate(runtime, config, options, buckets)).transpose()?;
        Ok(Stepper {
            staging: Staging::allocate(runtime, &model, options, buckets)?,
            vision,
            results: Results::allocate(runtime, &model, options, buckets)?,
            kept: None,
            kept_hidden: None,
            runtime: runtime.clone(),
            storage: cache.layers()[layers.clone()].to_vec(),
            model,
            layers,
            buckets: buckets.clone(),
            drafts: options.drafts > 0,
            listed: Vec::new(),
            others: Vec::new(),
            traced: 0,
        })
    }

    /// Allocates the places of results that the host reads while a later step runs. The lead alone has them.
    pub fn keep_results(&mut self, options: &EngineOptions) -> Result<()> {
        let (vocab, hidden) = (self.model.config.vocab, self.model.config.hidden);
        self.kept = KeptLogits::allocate(&self.runtime, &self.buckets, vocab)?;
        self.kept_hidden = KeptHidden::allocate(&self.runtime, &self.buckets, options, hidden)?;
        Ok(())
    }

    /// The device's runtime.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// The device's part of the model.
    pub fn model(&self) -> &HybridModel {
        &self.model
    }

    /// The list of shapes.
    pub fn buckets(&self) -> &Buckets {
        &self.buckets
    }

    /// The device's layers among those of the cache.
    pub fn layers(&self) -> Range<usize> {
        self.layers.clone()
    }

    /// Steps traced so far.
    pub fn traced(&self) -> u64 {
        self.traced
    }

    /// The prepared step of a shape, traced if it is new.
    fn step(&mut self, shape: StepShape) -> Result<&Executable> {
        if let Some(i) = self.listed.iter().position(|(s, _)| *s == shape) {
            return Ok(&self.listed[i].1);
        }
        let step = match self.others.iter().position(|(s, _)| *s == shape) {
            Some(i) => self.others.remove(i),
            None => (shape, self.trace_step(shape)?),
        };
        if self.others.len() == OTHERS_MAX {
            self.others.remove(0);
        }
        self.others.push(step);
        Ok(&self.others[self.others.len() - 1].1)
    }

    fn trace_step(&mut self, shape: StepShape) -> Result<Executable> {
        self.traced += 1;
        trace(&self.runtime, || self.pairs_of(shape))
    }

    /// Prepares a step before its first run, so that its memory is part of the plan.
    pub fn prepare(&mut self, shape: StepShape, list: StepList) -> Result<()> {
        let mut all = self.listed.iter().chain(&self.others);
        if all.any(|(prepared, _)| *prepared == shape) {
            return Ok(());
        }
        let step = self.trace_step(shape)?;
        match list {
            StepList::Listed => self.listed.push((shape, step)),
            StepList::Others if self.runtime.backend().is_planning() => {}
            StepList::Others => self.others.push((shape, step)),
        }
        Ok(())
    }

    /// The launches of the smallest step that draws tokens, of either regime, as text.
    pub fn program_lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (regime, name) in [(Regime::Decode, "decode step"), (Regime::Prefill, "step of prompts")] {
            let draws = |shape: &StepShape| shape.regime == regime && shape.outcome == Outcome::LastLogits;
            let steps = self.listed.iter().filter(|(shape, _)| draws(shape));
            if let Some((shape, step)) = steps.min_by_key(|(shape, _)| (shape.rows, shape.sequences)) {
                lines.push(format!("launches of a {name}, rows: {}", shape.rows));
                lines.extend(step.program().lines());
            }
        }
        lines
    }

    /// The prepared steps of the list with these shapes.
    pub fn listed(&self, of: impl Fn(&StepShape) -> bool) -> Vec<&Executable> {
        self.listed.iter().filter(|(shape, _)| of(shape)).map(|(_, step)| step).collect()
    }

    /// The shapes of the list.
    pub fn listed_shapes(&self) -> Vec<StepShape> {
        self.listed.iter().map(|(shape, _)| *shape).collect()
    }

    /// A step of the list over no sequence, ready to run.
    pub fn dummy_step(&self, shape: StepShape) -> Result<Executable> {
        let step = self.listed.iter().find(|(listed, _)| *listed == shape).map(|(_, step)| step.clone());
        let missing = || EngineError::Option(format!("{shape:?} is on no list of prepared steps"));
        self.staging.filling(&[], shape, shape.outcome == Outcome::OpenRows).write()?;
        if let Some(vision) = self.vision.as_ref().filter(|_| shape.has_pictures) {
            vision.fill(&[], shape)?;
        }
        step.ok_or_else(missing)
    }

    /// How a step treats rows that may be taken back. Where rows can be left open, each decode step commits the open
    /// rows of the step before. A step of generated tokens leaves its own rows open, so it is atomic.
    pub fn row_log(&self, kind: StepKind) -> RowLog {
        match kind.outcome {
            _ if kind.regime == Regime::Prefill || !self.drafts => RowLog::None,
            // No row is open before it, and it runs as fast as in an engine without drafts.
            Outcome::Ahead => RowLog::None,
            Outcome::OpenRows | Outcome::LastLogits => RowLog::KeepOpen,
            _ => RowLog::Commit,
        }
    }

    /// The step over these rows, ready to run.
    pub fn step_for(&mut self, kind: StepKind, rows: &[Rows<'_>]) -> Result<&Executable> {
        // A step that only commits has one row of no sequence.
        let count = rows.iter().map(|r| r.tokens.len()).sum::<usize>().max(1);
        let has_pictures = rows.iter().any(|row| row.needs_pictures(kind.outcome));
        let shape = StepShape { has_pictures, ..self.buckets.fit(kind, count, rows.len()) };
        self.staging.filling(rows, shape, kind.outcome == Outcome::OpenRows).write()?;
        match &self.vision {
            Some(vision) if has_pictures => vision.fill(rows, shape)?,
            None if has_pictures => return Err(EngineError::NoVisionTower),
            _ => {}
        }
        self.step(shape)
    }

    /// The step over rows without pictures, and the values to write before it runs. Other steps may run before.
    pub fn queued_step(&mut self, kind: StepKind, rows: &[Rows<'_>]) -> Result<(Executable, Filling)> {
        let count = rows.iter().map(|row| row.tokens.len()).sum();
        let shape = self.buckets.fit(kind, count, rows.len());
        let filling = self.staging.filling(rows, shape, false);
        Ok((self.step(shape)?.clone(), filling))
    }

    /// Whether the hidden states of all rows of a step stay until the next step.
    pub fn keeps_rows(&self) -> bool {
        self.results.keeps_rows
    }

    /// The step over these rows.
    pub fn drawing_step(&mut self, kind: StepKind, rows: &[Rows<'_>]) -> Result<PreparedStep> {
        let drawn = self.drawn(kind, kind.outcome.tokens_drawn(rows))?;
        Ok(PreparedStep { step: self.step_for(kind, rows)?.clone(), drawn })
    }

    /// The program that keeps these rows of the logits of the step of this regime that was submitted last, ready to
    /// run. One token comes to the host with it and is ignored.
    pub fn keeping_logits(&mut self, regime: Regime, rows: &[usize]) -> Result<PreparedStep> {
        let shape = self.buckets.keeping(regime, rows.len());
        self.kept()?.fill(shape, rows)?;
        self.keeping(shape)
    }

    fn keeping(&mut self, shape: StepShape) -> Result<PreparedStep> {
        Ok(PreparedStep { step: self.step(shape)?.clone(), drawn: self.drawn(shape.kind(), 1)? })
    }

    fn kept(&self) -> Result<&KeptLogits> {
        let not_planned =
            || EngineError::Option("no logits are kept for the host: steps do not run ahead".into());
        self.kept.as_ref().ok_or_else(not_planned)
    }

    fn kept_hidden(&self) -> Result<&KeptHidden> {
        let not_planned =
            || EngineError::Option("no hidden states are kept for the host: steps do not run ahead".into());
        self.kept_hidden.as_ref().ok_or_else(not_planned)
    }

    /// The program that keeps the hidden states of step number `step`, whose programs were submitted last, ready to
    /// run. With `all_rows` it keeps those of all rows of prompts, too. One token comes to the host with it and is
    /// ignored.
    pub fn keeping_hidden(&mut self, step: u64, all_rows: bool) -> Result<PreparedStep> {
        self.keeping(Buckets::keeping_hidden(step, all_rows))
    }

    /// Appends these of the hidden states that were kept of step number `step`.
    pub fn append_kept_hidden(
        &self,
        step: u64,
        of: HiddenOf,
        rows: Range<usize>,
        hidden: &mut Vec<f32>,
    ) -> Result<()> {
        self.kept_hidden()?.append(step, of, rows, hidden)
    }

    /// Copies row `row` of the logits that were kept of a regime.
    pub fn read_kept_logits(&self, regime: Regime, row: usize, logits: &mut Vec<f32>) -> Result<()> {
        self.kept()?.read(regime, row, logits)
    }

    /// Copies row `row` of the logits of the last step, submitted or run.
    pub fn read_logits(&self, row: usize, logits: &mut Vec<f32>) -> Result<()> {
        read_rows(&self.results.logits, row, 1, logits)
    }

    /// The place in the pool of the token that row `row` of a step draws, for [`TokensAt::Pool`].
    pub fn place(&self, regime: Regime, row: usize) -> usize {
        self.staging.place(regime, row)
    }

    /// Where a step writes the tokens that it draws: one for each of `rows` rows with [`Outcome::OpenRows`], else one
    /// for each of `rows` sequences.
    pub fn drawn(&self, kind: StepKind, rows: usize) -> Result<Array> {
        Ok(match kind.outcome {
            Outcome::OpenRows => self.results.draft()?.drawn.prefix(rows)?,
            Outcome::Draft => self.staging.tokens.prefix(rows)?,
            _ => self.staging.drawn(kind.regime, rows)?,
        })
    }

    /// Copies the hidden states of `rows` rows of the last step, from row `first` on.
    pub fn read_hidden(&self, first: usize, rows: usize, hidden: &mut Vec<f32>) -> Result<()> {
        read_rows(self.results.hidden()?, first, rows, hidden)
    }

    /// Copies the hidden state of the last row of sequence `row` of the last step of a prompt.
    pub fn read_last_hidden(&self, row: usize, hidden: &mut Vec<f32>) -> Result<()> {
        read_rows(&self.results.last_hidden, row, 1, hidden)
    }

    /// Copies the logits of row `row` of the last decode step, which has ended.
    pub fn read_row_logits(&self, row: usize, logits: &mut Vec<f32>) -> Result<()> {
        read_settled_rows(&self.results.logits, row, 1, logits)
    }

    /// Keeps the hidden states of the first `rows` rows of the step with [`Outcome::OpenRows`] that was submitted last,
    /// for [`Rows::of_round`]. The first one becomes row `first` there.
    pub fn keep_round_hidden(&self, first: usize, rows: usize) -> Result<()> {
        let (source, head, width) =
            (&self.results.draft()?.rows, self.head_staging()?, self.model.config.hidden);
        let (to, count) = (head.place_of_round(first) * width, rows * width);
        Ok(copy_all(&[ElementCopy { source, from: 0, target: &head.hidden, to, count }])?)
    }

    /// Appends these of the hidden states that were kept.
    pub fn append_round_hidden(&self, rows: Range<usize>, hidden: &mut Vec<f32>) -> Result<()> {
        let head = self.head_staging()?;
        append_rows(&head.hidden, head.place_of_round(rows.start), rows.len(), hidden)
    }

    /// Keeps the drafts of the first `rows` rows of the step with [`Outcome::Draft`] that was submitted last, for
    /// [`TokensAt::Drafts`]. It was number `pass` of a round.
    pub fn keep_drafts(&self, pass: usize, rows: usize) -> Result<()> {
        self.staging.keep_drafts(pass, rows)
    }

    /// Sets the hidden states for rows of a step with [`Outcome::Draft`] or [`Outcome::MtpState`], in their order.
    /// Those [of the last round](Rows::of_round) are left out.
    pub fn write_draft_input(&self, hidden: &[f32]) -> Result<()> {
        Ok(self.head_staging()?.hidden.write(hidden)?)
    }

    fn head_staging(&self) -> Result<&MtpStaging> {
        self.staging.head.as_ref().ok_or(EngineError::NoMtpHead)
    }

    /// Overwrites the input of the MTP head for [`Outcome::MtpHidden`].
    pub fn write_hidden(&self, hidden: &[f32]) -> Result<()> {
        Ok(self.results.hidden()?.write(hidden)?)
    }

    /// The step that computes the logits of hidden states `[rows, hidden]`, at most [`LOGITS_ROWS`] rows.
    pub fn logits_step(&mut self, hidden: &[f32]) -> Result<&Executable> {
        let rows = hidden.len() / self.model.config.hidden;
        self.results.logits_input()?.write(hidden)?;
        self.step(StepKind::prefill(Outcome::Logits).of(rows, 1))
    }
}
