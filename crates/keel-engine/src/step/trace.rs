//! What each kind of step computes: its values and where they go.

use keel_array::{Array, Regime};
use keel_cache::LayerStorage;
use keel_models::HybridModel;
use keel_models::blocks::StepContext;

use super::{Outcome, StepShape, Stepper};
use crate::{EngineError, Result};

/// The values that a traced step computes, each with its destination.
pub(super) type Pairs = Vec<(Array, Array)>;

impl Stepper {
    fn context(&self, shape: StepShape) -> Result<StepContext> {
        let (batch, window_batch) = self.staging.batches(shape.sequences)?;
        let positions = self.staging.positions.prefix(shape.rows)?;
        let log = self.row_log(shape.kind());
        let turns = self.staging.turns(shape.rows)?;
        let sight = match &self.sight {
            Some(sight) if shape.sees => Some(sight.rows(shape)?),
            _ => None,
        };
        Ok(StepContext { batch, window_batch, positions, turns, sight, regime: shape.regime, log })
    }

    pub(super) fn trace(
        &self,
        model: &HybridModel,
        layers: &[LayerStorage],
        shape: StepShape,
    ) -> Result<Pairs> {
        let context = self.context(shape)?;
        let tokens = self.staging.tokens_of(shape)?;
        Ok(match shape.outcome {
            // Only the device with the output head has results. The others hand their hidden states on.
            outcome if outcome.hands_on(model) => {
                vec![(model.hand_on(&tokens, layers, &context)?, self.results.sent()?.clone())]
            }
            Outcome::State | Outcome::LastLogits | Outcome::Ahead => {
                self.trace_last(model, layers, shape, (&tokens, &context))?
            }
            Outcome::Hidden => {
                vec![(model.hidden(&tokens, layers, &context)?, self.results.hidden()?.prefix(shape.rows)?)]
            }
            Outcome::MtpHidden => {
                // The buffer holds the head's input. The head's result overwrites it.
                let input = self.results.hidden()?.prefix(shape.rows)?;
                vec![(trace_mtp(model, layers, &input, &tokens, &context)?, input)]
            }
            Outcome::Head => {
                let input = self.results.head_input()?.prefix(shape.rows)?;
                vec![(model.logits(&input)?, self.results.logits.prefix(shape.rows)?)]
            }
            Outcome::KeptHidden(place) => {
                let kept = self.kept_hidden.as_ref().ok_or(EngineError::NoMtpHead)?;
                kept.trace(&self.results.draft()?.rows, &self.results.last_hidden, place)?
            }
            Outcome::KeptLogits => vec![self.kept()?.trace(&self.results.logits, shape)?],
            Outcome::OpenRows => {
                let hidden = model.hidden(&tokens, layers, &context)?;
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
            Outcome::Draft => self.trace_draft(model, layers, shape, (&tokens, &context))?,
            Outcome::HeadState => {
                let head = model.mtp.as_ref().ok_or(EngineError::NoMtpHead)?;
                let own = &layers[model.blocks.len()..];
                let rows = model.mtp_remember(head, &self.draft_input(shape)?, &tokens, own, &context)?;
                let last = rows.take(&self.staging.last_rows.prefix(1)?)?;
                vec![(last, self.results.draft()?.remembered.clone())]
            }
            Outcome::Commit(settled) => {
                let results = model.commit(layers, &context, settled)?.into_iter();
                let sum = results.map(Ok).reduce(|sum, y| sum?.add(&y?));
                let place = self.results.draft()?.committed.clone();
                sum.transpose()?.into_iter().zip(place).collect()
            }
        })
    }

    /// A step of a prompt or a plain decode step. Where sequences draft, a prompt also passes the MTP head, for its
    /// keys and values.
    fn trace_last(
        &self,
        model: &HybridModel,
        layers: &[LayerStorage],
        shape: StepShape,
        (tokens, context): (&Array, &StepContext),
    ) -> Result<Pairs> {
        let last_rows = self.staging.last_rows.prefix(shape.sequences)?;
        let hidden = model.hidden(tokens, layers, context)?;
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
            let drafts = trace_mtp(model, layers, &hidden, &next, context)?.take(&last_rows)?;
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
    fn trace_draft(
        &self,
        model: &HybridModel,
        layers: &[LayerStorage],
        shape: StepShape,
        (tokens, context): (&Array, &StepContext),
    ) -> Result<Pairs> {
        let hidden = trace_mtp(model, layers, &self.draft_input(shape)?, tokens, context)?;
        let last = hidden.take(&self.staging.last_rows.prefix(shape.sequences)?)?;
        let logits = model.logits(&last)?;
        // The next pass of the same sequences reads the results there.
        let StepShape { sequences, .. } = shape;
        Ok(vec![
            (logits.sample(&self.staging.draws.prefix(sequences)?)?, self.staging.tokens.prefix(sequences)?),
            (logits, self.results.logits.prefix(sequences)?),
            (last, self.draft_input(StepShape { rows: sequences, ..shape })?),
        ])
    }

    /// Hidden states for rows of the MTP head.
    fn draft_input(&self, shape: StepShape) -> Result<Array> {
        let head = self.staging.head.as_ref().ok_or(EngineError::NoMtpHead)?;
        Ok(head.hidden.prefix(shape.rows)?)
    }
}

/// The MTP head over hidden states and the tokens after them.
fn trace_mtp(
    model: &HybridModel,
    layers: &[LayerStorage],
    hidden: &Array,
    next: &Array,
    context: &StepContext,
) -> Result<Array> {
    let head = model.mtp.as_ref().ok_or(EngineError::NoMtpHead)?;
    let own = &layers[model.blocks.len()..];
    Ok(model.mtp_hidden(head, hidden, next, own, context)?)
}
