//! What a step that failed leaves of a sequence.
//!
//! A step first commits the accepted open rows of the one before, layer by layer, then runs its own rows. If it fails on
//! the way and its own rows were to stay open, the sequence is whole again once the other layers have committed theirs, too:
//! keys and values behind the position are written again by the rows that take their places, and open rows that nobody
//! accepted are not read. A step that commits its own rows cannot be taken back.

use keel_array::FailedRun;

use crate::{CacheError, LayerStorage, ModelCache, Result, SequenceCache};

/// How far a failed step came with the state of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interruption {
    /// It has committed the accepted open rows in the first layers, and changed nothing else. Counts of recurrent layers.
    Settling {
        /// Convolution windows that have moved on.
        windows: usize,
        /// States that have.
        states: usize,
    },
    /// It has committed rows of its own in some layers, or nobody knows how far it came.
    Torn {
        /// Layers that have moved on; 0 if that is not known.
        layers: usize,
    },
    /// Steps were run behind it that do not belong to the sequence.
    Ahead,
}

impl ModelCache {
    /// What the last step of a sequence left, if it failed after it had changed state.
    pub fn interruption(&self, sequence: &SequenceCache) -> Option<Interruption> {
        self.interruptions[sequence.slot() as usize]
    }

    /// Refuses a sequence whose state is torn, or not that of its tokens.
    ///
    /// # Errors
    /// [`CacheError::TornState`], [`CacheError::AheadState`].
    pub fn expect_whole(&self, sequence: &SequenceCache) -> Result<()> {
        match self.interruption(sequence) {
            Some(Interruption::Torn { layers }) => Err(CacheError::TornState { layers }),
            Some(Interruption::Ahead) => Err(CacheError::AheadState { len: sequence.cached_len }),
            _ => Ok(()),
        }
    }

    /// Refuses a sequence whose slot is not the state of all its tokens.
    pub(crate) fn expect_settled(&self, sequence: &SequenceCache) -> Result<()> {
        self.expect_whole(sequence)?;
        sequence.expect_committed()
    }

    /// Notes what a failed run has done to the sequences of these slots. `settled` is how far earlier runs had come with
    /// committing their open rows; `commits_rows` whether the run was to commit rows of its own.
    pub fn note_failure(
        &mut self,
        slots: impl IntoIterator<Item = u32>,
        failed: &FailedRun,
        settled: (usize, usize),
        commits_rows: bool,
    ) {
        let interruption = self.interruption_of(failed, settled, commits_rows);
        if let Some(interruption) = interruption {
            slots.into_iter().for_each(|slot| self.interruptions[slot as usize] = Some(interruption));
        }
    }

    /// Notes that `steps` decode steps were run behind the sequence that do not belong to it. What they have left of keys and
    /// values is written again. Windows and states are those of the sequence only if it was one step, which
    /// left its row open; otherwise the sequence answers [`CacheError::AheadState`] until it is rewound.
    pub fn forget_steps(&mut self, sequence: &mut SequenceCache, steps: usize, leaves_open: bool) {
        let at = sequence.cached_len;
        let is_kept = !self.spec().is_recurrent() || leaves_open && steps == 1;
        let has_window = self.window_is_whole(sequence, at + steps, at);
        // The step has committed what was accepted before.
        self.shorten(sequence, at);
        if !has_window {
            self.drop_window(sequence);
        }
        if !is_kept || !has_window {
            self.note_ahead([sequence.slot()]);
        }
    }

    /// Notes that the states of these slots are not those of their sequences' tokens.
    pub fn note_ahead(&mut self, slots: impl IntoIterator<Item = u32>) {
        slots.into_iter().for_each(|slot| self.interruptions[slot as usize] = Some(Interruption::Ahead));
    }

    /// Notes that a sequence's accepted rows are committed in all layers.
    pub fn note_settled(&mut self, sequence: &mut SequenceCache) {
        sequence.advance(0);
        self.interruptions[sequence.slot() as usize] = None;
    }

    fn interruption_of(
        &self,
        failed: &FailedRun,
        settled: (usize, usize),
        commits_rows: bool,
    ) -> Option<Interruption> {
        let recurrent = self.layers().iter().filter_map(|layer| match layer {
            LayerStorage::Recurrent { window, state } => {
                Some((failed.has_mutated(&window.rows), failed.has_mutated(&state.state)))
            }
            LayerStorage::Attention(_) | LayerStorage::Sliding(_) => None,
        });
        let (windows, states): (Vec<_>, Vec<_>) = recurrent.unzip();
        let is_known = windows.iter().chain(&states).all(Option::is_some);
        let count = |layers: &[Option<bool>]| layers.iter().filter(|moved| **moved == Some(true)).count();
        let (new_windows, new_states) = (count(&windows), count(&states));
        if !is_known {
            Some(Interruption::Torn { layers: 0 })
        } else if new_windows == 0 && new_states == 0 {
            None
        } else if commits_rows {
            Some(Interruption::Torn { layers: new_windows })
        } else {
            Some(Interruption::Settling { windows: settled.0 + new_windows, states: settled.1 + new_states })
        }
    }
}
