//! The state of a sequence after a failed step.
//!
//! A step first commits the accepted open rows of the step before, layer by layer. Then it runs its own rows. If a step
//! that leaves its own rows open fails, the other layers still have to commit. Then the sequence is whole again: later
//! rows overwrite the keys and values after the position, and open rows that are not accepted are never read. A step
//! that commits its own rows cannot be taken back.

use keel_array::Array;

use crate::{CacheError, LayerStorage, ModelCache, Result, SequenceCache, SlotId};

/// How many of the first recurrent layers have committed the accepted open rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommitProgress {
    /// Convolution windows that have committed.
    pub windows: usize,
    /// States that have committed, at most `windows`.
    pub states: usize,
}

/// How far a failed step changed the state of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailedStepState {
    /// The first layers have committed the accepted open rows; nothing else has changed.
    PartlyCommitted(CommitProgress),
    /// Some layers have committed rows of the step itself, or it is not known how far the step came.
    Torn {
        /// Layers that have committed rows; 0 if not known.
        layers: usize,
    },
    /// Later steps have changed the state, but their rows do not belong to the sequence.
    Ahead,
}

impl ModelCache {
    /// How the last step left the sequence, if it failed after it had changed state.
    pub fn failed_step(&self, sequence: &SequenceCache) -> Option<FailedStepState> {
        self.pools.lock().failed_steps[sequence.slot().index()]
    }

    /// Returns an error if the sequence's state is torn, or ahead of its tokens.
    ///
    /// # Errors
    /// [`CacheError::TornState`], [`CacheError::AheadState`].
    pub fn expect_whole(&self, sequence: &SequenceCache) -> Result<()> {
        self.expect_own(sequence)?;
        match self.failed_step(sequence) {
            Some(FailedStepState::Torn { layers }) => Err(CacheError::TornState { layers }),
            Some(FailedStepState::Ahead) => Err(CacheError::AheadState { len: sequence.cached_len }),
            _ => Ok(()),
        }
    }

    /// Whether this cache holds the sequence's pages and state.
    pub fn owns(&self, sequence: &SequenceCache) -> bool {
        self.pools.is_same(&sequence.home)
    }

    /// Returns an error if another cache holds the sequence's pages and state.
    pub(crate) fn expect_own(&self, sequence: &SequenceCache) -> Result<()> {
        if self.owns(sequence) { Ok(()) } else { Err(CacheError::Foreign) }
    }

    /// Returns an error unless the slot holds the state after all tokens of the sequence.
    pub(crate) fn expect_settled(&self, sequence: &SequenceCache) -> Result<()> {
        self.expect_whole(sequence)?;
        sequence.expect_committed()
    }

    /// Records the effect of a failed run on the sequences of these slots. `has_mutated` tells whether it has changed a
    /// state (see [`keel_array::FailedRun::has_mutated`]; on several devices, whether that of the state's device has).
    /// `settled` holds the commits of earlier runs. `commits_rows` says whether the run also commits its own rows.
    pub fn note_failure(
        &mut self,
        slots: impl IntoIterator<Item = SlotId>,
        has_mutated: &dyn Fn(&Array) -> Option<bool>,
        settled: CommitProgress,
        commits_rows: bool,
    ) {
        let interruption = self.interruption_of(has_mutated, settled, commits_rows);
        if let Some(interruption) = interruption {
            self.interrupt(slots, interruption);
        }
    }

    /// Records that `rows` rows after the last token of the sequence ran, or may have run, and are dropped. Their keys
    /// and values will be overwritten. If windows or states have moved, the sequence returns [`CacheError::AheadState`]
    /// until it is rewound.
    pub fn forget_rows(&mut self, sequence: &mut SequenceCache, rows: usize) {
        let at = sequence.cached_len;
        let is_kept = !self.spec().is_recurrent();
        let has_window = self.sliding_pages_are_whole(sequence, at + rows, at);
        self.shorten(sequence, at);
        if !has_window {
            self.drop_sliding_pages(sequence);
        }
        if !is_kept || !has_window {
            self.note_ahead([sequence.slot()]);
        }
    }

    /// Records that the states of these slots are ahead of their sequences' tokens.
    pub fn note_ahead(&mut self, slots: impl IntoIterator<Item = SlotId>) {
        self.interrupt(slots, FailedStepState::Ahead);
    }

    fn interrupt(&mut self, slots: impl IntoIterator<Item = SlotId>, interruption: FailedStepState) {
        let mut pools = self.pools.lock();
        slots.into_iter().for_each(|slot| pools.failed_steps[slot.index()] = Some(interruption));
    }

    /// Records that a sequence's accepted rows are committed in all layers.
    pub fn note_settled(&mut self, sequence: &mut SequenceCache) {
        sequence.advance(0);
        self.pools.lock().failed_steps[sequence.slot().index()] = None;
    }

    fn interruption_of(
        &self,
        has_mutated: &dyn Fn(&Array) -> Option<bool>,
        settled: CommitProgress,
        commits_rows: bool,
    ) -> Option<FailedStepState> {
        let recurrent = self.layers().iter().filter_map(|layer| match layer {
            LayerStorage::Recurrent { window, state } => {
                Some((has_mutated(&window.rows), has_mutated(&state.state)))
            }
            LayerStorage::Attention(_) | LayerStorage::Sliding(_) => None,
        });
        let (windows, states): (Vec<_>, Vec<_>) = recurrent.unzip();
        let is_known = windows.iter().chain(&states).all(Option::is_some);
        let count = |layers: &[Option<bool>]| layers.iter().filter(|moved| **moved == Some(true)).count();
        let (new_windows, new_states) = (count(&windows), count(&states));
        // On several devices, later layers may have changed and earlier ones not.
        let follow = |layers: &[Option<bool>], settled: usize, new: usize| {
            layers.iter().skip(settled).take(new).all(|moved| *moved == Some(true))
        };
        let is_in_order =
            follow(&windows, settled.windows, new_windows) && follow(&states, settled.states, new_states);
        if !is_known {
            Some(FailedStepState::Torn { layers: 0 })
        } else if new_windows == 0 && new_states == 0 {
            None
        } else if commits_rows || !is_in_order {
            Some(FailedStepState::Torn { layers: new_windows })
        } else {
            let (windows, states) = (settled.windows + new_windows, settled.states + new_states);
            Some(FailedStepState::PartlyCommitted(CommitProgress { windows, states }))
        }
    }
}
