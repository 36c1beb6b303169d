//! Speculation with the model's own multi-token-prediction head.
//!
//! A round of a batch:
//!
//! ```text
//! draft    the head proposes d1 .. dk after the token x that was drawn last        k passes of the head
//! verify   x, d1 .. dk run through the model in one pass, left open                1 pass of the model
//! accept   row by row: the token that the row's logits lead to; on as long as it is the draft
//! ```
//!
//! With `a` accepted drafts a round gives `a + 1` tokens. Keys and values, recurrent state, convolution window and
//! position all follow one count, the one given to [`keel_cache::SequenceCache::accept`]. The next pass commits these
//! rows before it runs its own. Rows of a verify pass have the bits of plain decoding. So a greedy text is the text of
//! plain decoding, and a sampled text has the same distribution.
//!
//! Row `t` of the MTP head reads the model's hidden state of token `t` and the token after it. Rows that have not
//! passed the head yet, such as the accepted rows of the last round, are the first rows of its next pass.
//!
//! Each sequence has its own depth, 0 for plain decoding; sequences join and leave between rounds. The rounds of a
//! batch and those of a [`crate::TokenIterator`], which has one sequence, are the same.

mod choose;
mod counters;
mod depth;
mod draft;
mod lag;
mod passes;
mod round;

pub use choose::{Choice, Chooser, Draft, SamplerChooser};
pub use counters::SpeculationCounters;
pub use depth::Depth;
pub(crate) use depth::{BOUNDS_MAX, COMPARED_EVERY, Costs};
pub use round::{Round, RoundSequence};

use std::time::Duration;

use depth::DepthControl;
use lag::Lag;

/// How sequences draft.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpeculationOptions {
    /// How many drafts a round makes.
    pub depth: Depth,
    /// Accept every draft without comparing it with the model's choice. The text may then differ from the model's.
    pub optimistic: bool,
    /// Choose the depth from accepted drafts and nominal costs instead of measured ones, so that the same seed draws
    /// the same tokens. The depth decides which random numbers are used. Greedy tokens are the same in any case.
    pub repeatable: bool,
}

/// The data that a drafting sequence keeps between rounds.
#[derive(Debug)]
pub struct Speculation {
    options: SpeculationOptions,
    control: DepthControl,
    counters: SpeculationCounters,
    /// Rows that have not passed the MTP head yet.
    lag: Lag,
}

impl Speculation {
    /// The most bytes of a sequence with hidden states of `width` values.
    pub(crate) fn bytes_max(width: usize) -> usize {
        Lag::ROWS_MAX * width * size_of::<f32>()
    }

    /// For a sequence whose prompt has just been run. `last_hidden` is the hidden state of its last token, from
    /// [`crate::Engine::last_hidden`].
    pub fn new(options: SpeculationOptions, last_hidden: Vec<f32>) -> Speculation {
        Speculation {
            options,
            control: DepthControl::new(options.depth, options.repeatable),
            counters: SpeculationCounters::default(),
            lag: Lag::after_prompt(last_hidden),
        }
    }

    /// Sets the depth of the rounds from now on.
    pub fn set_depth(&mut self, depth: Depth) {
        self.options.depth = depth;
        self.control.set_depth(depth);
    }

    /// The counts and times of its rounds.
    pub fn counters(&self) -> &SpeculationCounters {
        &self.counters
    }

    /// How many rows the head lags behind once `ahead` steps under way are taken.
    pub(crate) fn lag_after(&self, ahead: usize) -> usize {
        self.lag.tokens().len() + ahead
    }

    /// Learns from a step that ran `run`, the last token known, with this hidden state, and gave `token`. `time` is its
    /// share of the time that the host waited.
    ///
    /// # Panics
    /// If rows of a round were not [brought to the host](crate::Engine::fetch_lags).
    pub(crate) fn note_plain(&mut self, run: u32, hidden: &[f32], token: u32, time: Duration) {
        self.lag.name_last(run);
        self.lag.push(hidden, token);
        self.control.note(0, 0);
        self.counters.note_round(0, 0, 1);
        self.counters.verify_time += time;
    }

    /// Takes back the last `tokens` tokens of the last round, and the rows in which they were drawn. The round must
    /// have succeeded.
    ///
    /// # Panics
    /// If the last round did not give that many.
    pub fn take_back(&mut self, cache: &mut keel_cache::SequenceCache, tokens: usize) {
        if tokens == 0 {
            return;
        }
        cache.take_back(tokens);
        self.lag.take_back(tokens);
    }
}
