//! One sequence's share of the cache.

use std::sync::Arc;

use crate::pools::SharedPools;
use crate::{CacheError, CheckpointLease, HostBlockId, PageId, Result, SlotId, VisionInputs};

/// The saved state of a sequence at a position.
#[derive(Debug)]
pub struct SavedState {
    /// The tokens that the state has seen.
    pub position: usize,
    /// Holds the copy of the slot.
    pub checkpoint: CheckpointLease,
}

/// Page and slot numbers of a sequence. [`crate::ModelCache`] owns the memory, and has the numbers back when the
/// sequence is dropped.
#[derive(Debug)]
pub struct SequenceCache {
    /// Where everything goes back to.
    pub(crate) home: SharedPools,
    pub(crate) pages: Vec<PageId>,
    /// Pages of sliding layers: page `i` of the sequence is entry `i % CacheSpec::sliding_pages`.
    pub(crate) sliding_pages: Vec<PageId>,
    /// `None` if the sequence is parked.
    pub(crate) slot: Option<SlotId>,
    pub(crate) cached_len: usize,
    /// How many tokens at the end are open rows that the next step commits.
    pub(crate) accepted: usize,
    /// Saved states, oldest first.
    pub(crate) checkpoints: Vec<SavedState>,
    /// Keys are rotated by the frequencies of long sequences, if the model has a separate list for these.
    pub(crate) is_long: bool,
    /// Blocks of host memory, if the sequence is parked. It then holds nothing else.
    pub(crate) parked: Option<Vec<HostBlockId>>,
    /// Its pictures.
    pub(crate) vision: Option<Arc<VisionInputs>>,
}

impl SequenceCache {
    /// A sequence without pages.
    pub(crate) fn new(home: SharedPools, slot: SlotId, cached_len: usize, accepted: usize) -> SequenceCache {
        SequenceCache {
            home,
            pages: Vec::new(),
            sliding_pages: Vec::new(),
            slot: Some(slot),
            cached_len,
            accepted,
            checkpoints: Vec::new(),
            is_long: false,
            parked: None,
            vision: None,
        }
    }

    /// Tokens whose keys, values and state are in the cache; also the position of the next token. The state of the last
    /// [`SequenceCache::accepted`] tokens is in the log.
    pub fn offset(&self) -> usize {
        self.cached_len
    }

    /// Tokens in the cache.
    pub fn len(&self) -> usize {
        self.cached_len
    }

    /// True before the first token.
    pub fn is_empty(&self) -> bool {
        self.cached_len == 0
    }

    /// True if the sequence lies in host memory. Any other use must bring it back first.
    pub fn is_parked(&self) -> bool {
        self.parked.is_some()
    }

    /// Pages in order of position.
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Pages of sliding layers. They rotate: once there are as many as the window needs, page `i` in order of position
    /// is entry `i` modulo their number.
    pub fn sliding_pages(&self) -> &[PageId] {
        &self.sliding_pages
    }

    /// The slot of the recurrent state.
    ///
    /// # Panics
    /// If the sequence is parked.
    pub fn slot(&self) -> SlotId {
        self.slot.expect("a parked sequence has no slot")
    }

    /// Whether keys are rotated by the frequencies of long sequences, if the model has a separate list for these.
    pub fn is_long(&self) -> bool {
        self.is_long
    }

    /// Sets the list of frequencies, before the first token. Later only a sequence that resumes a prefix sets it.
    pub fn set_long(&mut self, is_long: bool) {
        self.is_long = is_long;
    }

    /// Positions that [`crate::ModelCache::rewind`] can go back to, oldest first.
    pub fn checkpoints(&self) -> impl Iterator<Item = usize> + '_ {
        self.checkpoints.iter().map(|saved| saved.position)
    }

    /// Accepted open rows of the last step. The next step commits them.
    pub fn accepted(&self) -> usize {
        self.accepted
    }

    /// Records that a step has committed the accepted rows and `rows` more tokens.
    pub fn advance(&mut self, rows: usize) {
        self.extend(rows);
        self.accepted = 0;
    }

    /// Records that a step has committed the rows accepted before, and left rows open of which the first `rows` are
    /// kept. Keys and values, state, window and position all follow from this one count.
    pub fn accept(&mut self, rows: usize) {
        self.extend(rows);
        self.accepted = rows;
    }

    /// Takes back the last `rows` of the accepted rows, which are not committed yet.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn take_back(&mut self, rows: usize) {
        assert!(rows <= self.accepted, "{rows} of {} open rows are to be taken back", self.accepted);
        self.accepted -= rows;
        self.cached_len -= rows;
    }

    /// The pictures of the sequence.
    pub fn vision_inputs(&self) -> Option<&Arc<VisionInputs>> {
        self.vision.as_ref()
    }

    /// Sets the pictures of the sequence's tokens, from the first token on, also of tokens that are not run yet. Tokens
    /// already in the cache must keep their positions. A rewind does not change this; for another text after it, call
    /// this again.
    pub fn set_vision_inputs(&mut self, vision: Option<Arc<VisionInputs>>) {
        self.vision = vision;
    }

    /// The position of token number `token`: time, row and column.
    pub fn position_of(&self, token: usize) -> [i32; 3] {
        self.vision.as_ref().map_or([token as i32; 3], |vision| vision.position(token))
    }

    pub(crate) fn expect_committed(&self) -> Result<()> {
        match self.accepted {
            0 => Ok(()),
            accepted => Err(CacheError::OpenRows { accepted }),
        }
    }

    fn extend(&mut self, rows: usize) {
        self.cached_len += rows;
        let room = self.pages.len() * keel_array::AttentionSpec::PAGE;
        assert!(self.cached_len <= room, "{} tokens are in pages for {room}", self.cached_len);
    }
}
