//! The outcome of a step's program, and the number of its rows.

use keel_array::Regime;
use keel_cache::CommitProgress;

use super::staging::Rows;

/// The result of a step in addition to states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Nothing: the prompt goes on.
    State,
    /// Logits of the last row of each sequence, and tokens drawn from them.
    LastLogits,
    /// As [`Outcome::LastLogits`], for a step of answers that runs ahead where sequences draft. Its rows are committed
    /// at once, so no row may be open. The hidden states of its rows stay for the MTP (multi-token-prediction) head.
    Ahead,
    /// Hidden states of every row.
    Hidden,
    /// Hidden states of the MTP head for every row.
    MtpHidden,
    /// Logits of rows of the hidden buffer.
    Logits,
    /// Logits and hidden states of every row, and tokens drawn from these logits. The rows are left open.
    OpenRows,
    /// The MTP head's hidden state in the last row of each sequence, its logits, and tokens drawn from them.
    Draft,
    /// Keys and values of the MTP head.
    MtpState,
    /// Rows of the logits of the step before, for the host.
    KeptLogits,
    /// Hidden states of the step before, for the host. Two steps may be under way, and take turns in places 0 and 1.
    /// Those of all rows of its prompts are kept only if `all_rows` is set.
    KeptHidden { place: usize, all_rows: bool },
    /// Commits accepted open rows and runs none. Those of some layers are committed already.
    Commit(CommitProgress),
}

impl Outcome {
    /// Commits in all layers.
    pub const COMMIT: Outcome = Outcome::Commit(CommitProgress { windows: 0, states: 0 });

    /// Whether it is a pass of the MTP head over hidden states in staging.
    pub fn reads_hidden(self) -> bool {
        matches!(self, Outcome::Draft | Outcome::MtpState)
    }

    /// How many tokens a step of these rows draws: one after each row that is left open, else one for each sequence.
    pub fn tokens_drawn(self, rows: &[Rows<'_>]) -> usize {
        match self {
            Outcome::OpenRows => rows.iter().map(|row| row.tokens.len()).sum(),
            _ => rows.len(),
        }
    }
}

/// The outcome and the regime of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepKind {
    pub regime: Regime,
    pub outcome: Outcome,
}

impl StepKind {
    /// A step of generated tokens.
    pub fn decode(outcome: Outcome) -> StepKind {
        StepKind { regime: Regime::Decode, outcome }
    }

    /// A step of prompts.
    pub fn prefill(outcome: Outcome) -> StepKind {
        StepKind { regime: Regime::Prefill, outcome }
    }

    /// A step for this many rows and sequences, without pictures.
    pub fn of(self, rows: usize, sequences: usize) -> StepShape {
        StepShape { regime: self.regime, rows, sequences, outcome: self.outcome, has_pictures: false }
    }
}

/// The shape of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepShape {
    pub regime: Regime,
    pub rows: usize,
    pub sequences: usize,
    pub outcome: Outcome,
    /// Whether some rows, or tokens after them, belong to pictures.
    pub has_pictures: bool,
}

impl StepShape {
    pub fn kind(self) -> StepKind {
        StepKind { regime: self.regime, outcome: self.outcome }
    }

    /// As [`Outcome::reads_hidden`].
    pub fn reads_hidden(self) -> bool {
        self.outcome.reads_hidden()
    }

    /// Whether its rows find their tokens in the pool.
    pub fn is_pooled(self) -> bool {
        let runs_model = matches!(self.outcome, Outcome::LastLogits | Outcome::Ahead | Outcome::OpenRows);
        self.regime == Regime::Decode && runs_model
    }
}
