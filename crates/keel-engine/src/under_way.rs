//! A step that was submitted and not yet taken.

use std::time::Instant;

use keel_array::{FailedRun, PendingRun, Regime};
use keel_cache::SlotId;

use crate::step::ids_of;
use crate::{EngineError, Result};

/// One program of a step under way.
pub(crate) struct RunUnderWay {
    pub run: PendingRun,
    pub regime: Regime,
    pub slots: Vec<SlotId>,
    /// How many tokens come to the host with it.
    pub tokens: usize,
}

/// A work item in its step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Item {
    pub regime: Regime,
    /// Its row among those of its regime.
    pub row: usize,
    /// Whether the device draws its token.
    pub is_drawn: bool,
    /// Its row among the kept logits of its regime, if the host draws its token.
    pub kept: Option<usize>,
}

/// A step that was submitted and not yet taken.
pub(crate) struct StepUnderWay {
    pub number: u64,
    pub runs: Vec<RunUnderWay>,
    /// Why a program of the step could not be submitted.
    pub refusal: Option<EngineError>,
    pub items: Vec<Item>,
    /// When it was submitted.
    pub since: Instant,
}

/// The step taken last.
#[derive(Default)]
pub(crate) struct Taken {
    /// Its number.
    pub step: u64,
    pub items: Vec<Item>,
    /// Hidden states after its work items, answers first, once they are read.
    pub hidden: Vec<f32>,
}

impl Taken {
    /// Takes over what a step has run.
    pub fn note(&mut self, step: &mut StepUnderWay) {
        self.step = step.number;
        self.items = std::mem::take(&mut step.items);
        self.hidden.clear();
    }

    /// How many answers it had, if it had no prompts.
    pub fn plain_rows(&self) -> Option<usize> {
        let is_plain = self.items.iter().all(|item| item.regime == Regime::Decode);
        is_plain.then_some(self.items.len())
    }
}

/// A program that has ended, with the tokens that it drew or its failure.
pub(crate) struct EndedRun {
    pub regime: Regime,
    pub slots: Vec<SlotId>,
    pub outcome: Result<Vec<u32>, Box<FailedRun>>,
}

impl StepUnderWay {
    /// Waits for all of its programs.
    pub fn wait(self) -> Vec<EndedRun> {
        let wait = |RunUnderWay { run, regime, slots, tokens }: RunUnderWay| {
            let mut bytes = vec![0; tokens * size_of::<u32>()];
            let outcome = run.wait(&mut bytes).map(|()| ids_of(&bytes));
            EndedRun { regime, slots, outcome }
        };
        self.runs.into_iter().map(wait).collect()
    }
}
