//! The computation of each kind of step: its values and their destinations.

use keel_array::{Array, Executable, Regime, Runtime};
use keel_cache::LayerStorage;
use keel_models::HybridModel;
use keel_models::blocks::StepContext;

use super::{HiddenOf, Outcome, StepShape, Stepper};
use crate::{EngineError, Result};

/// The values that a program computes, each with its destination.
pub(crate) type Pairs = Vec<(Array, Array)>;

/// Traces a program.
pub(crate) fn trace(runtime: &Runtime, pairs: impl FnOnce() -> Result<Pairs>) -> Result<Executable> {
    runtime.trace(|| {
        let pairs = pairs()?;
        let pairs: Vec<(&Array, &Array)> = pairs.iter().map(|(value, place)| (value, place)).collect();
        Ok(runtime.prepare(&pairs)?)
    })
}

/// The inputs of a traced step, and the device's part of the model.
struct Tracing<'a> {
    model: &'a HybridModel,
    layers: &'a [LayerStorage],
    shape: StepShape,
    tokens: Array,
    context: StepContext,
}

impl Tracing<'_> {
    /// The model's hidden states.
    fn hidden(&self) -> Result<Array> {
        Ok(self.model.hidden(&self.tokens, self.layers, &self.context)?)
    }

    /// The MTP head over hidden states and the tokens after them.
    fn mtp(&self, hidden: &Array, next: &Array) -> Result<Array> {
        let head = self.model.mtp.as_ref().ok_or(EngineError::NoMtpHead)?;
        Ok(self.model.mtp_hidden(head, hidden, next, self.mtp_layers(), &self.context)?)
    }

    /// The layers of the MTP head.
    fn mtp_layers(&self) -> &[LayerStorage] {
        &self.layers[self.model.blocks.len()..]
    }
}

impl Stepper {
    fn context(&self, shape: StepShape) -> Result<StepContext> {
        let (batch, window_batch) = self.staging.batches(shape.sequences)?;
        let positions = self.staging.positions.prefix(shape.rows)?;
        let log = self.row_log(shape.kind());
        let rope_positions = self.staging.rope_positions(shape.rows)?;
        let vision = match &self.vision {
            Some(vision) if shape.has_pictures => Some(vision.rows(shape)?),
            _ => None,
        };
        Ok(StepContext { batch, window_batch, positions, rope_positions, vision, regime: shape.regime, log })
    }

    pub(super) fn pairs_of(&self, shape: StepShape) -> Result<Pairs> {
        let (model, layers) = (&self.model, self.storage.as_slice());
        let (tokens, context) = (self.staging.tokens_of(shape)?, self.context(shape)?);
        let step = Tracing { model, layers, shape, tokens, context };
        Ok(match shape.outcome {
            // Only the device with the output head has results. The others hand their hidden states on.
            outcome if outcome.hands_on(model) => {
                vec![(model.hand_on(&step.tokens, layers, &step.context)?, self.results.sent()?.clone())]
            }
            Outcome::State | Outcome::LastLogits | Outcome::Ahead => self.trace_last(&step)?,
            Outcome::Hidden => {
                vec![(step.hidden()?, self.results.hidden()?.prefix(shape.rows)?)]
            }
            Outcome::MtpHidden => {
                // The buffer holds the head's input. The head's result overwrites it.
                let input = self.results.hidden()?.prefix(shape.rows)?;
                vec![(step.mtp(&input, &step.tokens)?, input)]
            }
            Outcome::Logits => {
                let input = self.results.logits_input()?.prefix(shape.rows)?;
                vec![(model.logits(&input)?, self.results.logits.prefix(shape.rows)?)]
            }
            Outcome::KeptHidden { place, all_rows } => {
                let mut all = vec![(HiddenOf::Prompts, &self.results.last_hidden)];
                if self.drafts {
                    all.push((HiddenOf::Answers, &self.results.draft()?.rows));
                }
                if all_rows {
                    all.push((HiddenOf::PromptRows, self.results.hidden()?));
                }
                self.kept_hidden()?.trace(&all, place)?
            }
            Outcome::KeptLogits => vec![self.kept()?.trace(&self.results.logits, shape)?],
            Outcome::OpenRows => {
                let hidden = step.hidden()?;
                let logits = model.logits(&hidden)?;
                let draft = self.results.draft()?;
                vec![
                    (hidden, draft.rows.prefix(shape.rows)?),
                    (
                        logits.sample(&self.staging.draws.prefix(shape.rows)?)?,
                        draft.drawn.prefix(shape.rows)?,
                    ),
                    (logits, self.results.logits.prefix(shape.rows)?),
                ]
            }
            Outcome::Draft => self.trace_draft(&step)?,
            Outcome::MtpState => {
                let head = model.mtp.as_ref().ok_or(EngineError::NoMtpHead)?;
                let input = self.head_staging()?.input(shape.rows)?;
                let rows =
                    model.mtp_write_kv(head, &input, &step.tokens, step.mtp_layers(), &step.context)?;
                let last = rows.take(&self.staging.last_rows.prefix(1)?)?;
                vec![(last, self.results.draft()?.remembered.clone())]
            }
            Outcome::Commit(settled) => {
                let results = model.commit(layers, &step.context, settled)?.into_iter();
                let sum = results.map(Ok).reduce(|sum, y| sum?.add(&y?));
                let place = self.results.draft()?.committed.clone();
                sum.transpose()?.into_iter().zip(place).collect()
            }
        })
    }

    /// A step of a prompt or a plain decode step. Where sequences draft, a prompt also passes the MTP head, for its
    /// keys and values.
    fn trace_last(&self, step: &Tracing<'_>) -> Result<Pairs> {
        let Tracing { model, shape, .. } = *step;
        let last_rows = self.staging.last_rows.prefix(shape.sequences)?;
        let hidden = step.hidden()?;
        let last = hidden.take(&last_rows)?;
        let mut pairs = Vec::new();
        if shape.outcome != Outcome::State {
            let logits = model.logits(&last)?;
            let tokens = logits.sample(&self.staging.draws.prefix(shape.sequences)?)?;
            pairs.push((tokens, self.drawn(shape.kind(), shape.sequences)?));
            pairs.push((logits, self.results.logits.prefix(shape.sequences)?));
        }
        let head = self.staging.head.as_ref().filter(|_| shape.regime == Regime::Prefill);
        if let Some(head) = head {
            let next = head.next_tokens.prefix(shape.rows)?;
            let drafts = step.mtp(&hidden, &next)?.take(&last_rows)?;
            pairs.push((drafts, self.results.draft()?.head.prefix(shape.sequences)?));
        }
        if shape.outcome == Outcome::Ahead {
            pairs.push((last, self.results.draft()?.rows.prefix(shape.sequences)?));
        } else if shape.regime == Regime::Prefill {
            pairs.push((last, self.results.last_hidden.prefix(shape.sequences)?));
            if self.results.keeps_rows {
                pairs.push((hidden, self.results.hidden()?.prefix(shape.rows)?));
            }
        }
        Ok(pairs)
    }

    /// A drafting pass of the MTP head.
    fn trace_draft(&self, step: &Tracing<'_>) -> Result<Pairs> {
        let Tracing { model, shape, .. } = *step;
        let staging = self.head_staging()?;
        let hidden = step.mtp(&staging.input(shape.rows)?, &step.tokens)?;
        let last = hidden.take(&self.staging.last_rows.prefix(shape.sequences)?)?;
        let logits = model.logits(&last)?;
        // The next pass of the same sequences reads the results there.
        let StepShape { sequences, .. } = shape;
        Ok(vec![
            (logits.sample(&self.staging.draws.prefix(sequences)?)?, self.staging.tokens.prefix(sequences)?),
            (logits, self.results.logits.prefix(sequences)?),
            (last, staging.hidden.prefix(sequences)?),
        ])
    }
}
