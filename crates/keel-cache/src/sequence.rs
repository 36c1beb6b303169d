//! One sequence's share of the cache.

use std::sync::Arc;

use crate::{CacheError, Result, Sight};

/// Page and slot numbers of a sequence. It owns no memory: [`crate::ModelCache`] does, and takes the numbers back
/// in [`crate::ModelCache::release`].
#[derive(Debug)]
pub struct SequenceCache {
    pub(crate) pages: Vec<u32>,
    /// Of sliding layers: page `i` of the sequence is entry `i % window_pages_max`.
    pub(crate) window_pages: Vec<u32>,
    pub(crate) slot: u32,
    pub(crate) cached_len: usize,
    /// The last so many tokens are open rows that the next step commits.
    pub(crate) accepted: usize,
    /// Positions with a saved slot, and which.
    pub(crate) checkpoints: Vec<(usize, u32)>,
    /// It turns by the frequencies of long sequences, where the model has others for these.
    pub(crate) is_long: bool,
    /// Blocks of host memory, where it is parked; it holds nothing else then.
    pub(crate) parked: Option<Vec<u32>>,
    /// Its pictures.
    pub(crate) sight: Option<Arc<Sight>>,
}

impl SequenceCache {
    /// Without pages.
    pub(crate) fn new(slot: u32, cached_len: usize, accepted: usize) -> SequenceCache {
        SequenceCache {
            pages: Vec::new(),
            window_pages: Vec::new(),
            slot,
            cached_len,
            accepted,
            checkpoints: Vec::new(),
            is_long: false,
            parked: None,
            sight: None,
        }
    }

    /// Tokens whose keys, values and state are in the cache; also the position of the next token. The state of the
    /// last [`SequenceCache::accepted`] of them is in the log.
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

    /// True where it lies in host memory: it has to be brought back before anything else is done with it.
    pub fn is_parked(&self) -> bool {
        self.parked.is_some()
    }

    /// Pages in order of position.
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// Pages of sliding layers. They rotate: page `i` in order of position is entry `i` modulo their number, once there
    /// are as many as the window needs.
    pub fn window_pages(&self) -> &[u32] {
        &self.window_pages
    }

    /// The slot of the recurrent state.
    ///
    /// # Panics
    /// If it is parked.
    pub fn slot(&self) -> u32 {
        assert!(!self.is_parked(), "a parked sequence has no slot");
        self.slot
    }

    /// Whether it turns by the frequencies of long sequences, where the model has others for these.
    pub fn is_long(&self) -> bool {
        self.is_long
    }

    /// Says by which frequencies it turns, before its first token; afterwards only the holder of a remembered prefix does.
    pub fn set_long(&mut self, is_long: bool) {
        self.is_long = is_long;
    }

    /// Positions that [`crate::ModelCache::rewind`] can go back to, oldest first.
    pub fn checkpoints(&self) -> impl Iterator<Item = usize> + '_ {
        self.checkpoints.iter().map(|&(position, _)| position)
    }

    /// Open rows of the last step that were accepted and are still to be committed by the next.
    pub fn accepted(&self) -> usize {
        self.accepted
    }

    /// Notes that a step has committed what was accepted and `rows` more tokens.
    pub fn advance(&mut self, rows: usize) {
        self.extend(rows);
        self.accepted = 0;
    }

    /// Notes that a step has committed what was accepted before, and left rows open of which the first `rows` stay.
    /// Keys and values, state, window and position move on with this one count.
    pub fn accept(&mut self, rows: usize) {
        self.extend(rows);
        self.accepted = rows;
    }

    /// Takes back the last `rows` of the rows that were accepted and are not committed yet.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn take_back(&mut self, rows: usize) {
        assert!(rows <= self.accepted, "{rows} of {} open rows are to be taken back", self.accepted);
        self.accepted -= rows;
        self.cached_len -= rows;
    }

    /// The pictures of the sequence.
    pub fn sight(&self) -> Option<&Arc<Sight>> {
        self.sight.as_ref()
    }

    /// Says which pictures the sequence's tokens show, from its first token on, those that it does not hold yet among them. Tokens
    /// that it holds already must be where they were. Going back keeps this: another text behind it takes another call.
    pub fn look_at(&mut self, sight: Option<Arc<Sight>>) {
        self.sight = sight;
    }

    /// Where token number `token` stands: time, row and column.
    pub fn position_of(&self, token: usize) -> [i32; 3] {
        self.sight.as_ref().map_or([token as i32; 3], |sight| sight.position(token))
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
