//! Pages and saved states that outlive their sequence: a [`crate::PrefixTree`] holds them.

use keel_array::AttentionSpec;

use crate::model_cache::SlotCopy;
use crate::{CheckpointId, CheckpointLease, ModelCache, PageId, Result, SequenceCache};

impl ModelCache {
    /// Pages without a holder.
    pub fn free_pages(&self) -> usize {
        self.pools.lock().pages.free()
    }

    /// Checkpoints without a holder.
    pub fn free_checkpoints(&self) -> usize {
        self.pools.lock().checkpoints.len()
    }

    /// How many sequences and trees hold a page.
    pub fn page_holders(&self, page: PageId) -> u32 {
        self.pools.lock().pages.holders(page)
    }

    /// How many sequences hold a page.
    pub fn page_sequences(&self, page: PageId) -> u32 {
        self.pools.lock().pages.sequences(page)
    }

    /// Number of pages that a tree holds. O(1).
    pub fn remembered_pages(&self) -> usize {
        self.pools.lock().pages.remembered()
    }

    /// Number of pages that only a tree holds. Forgetting would free them. O(1).
    pub fn evictable_pages(&self) -> usize {
        self.pools.lock().pages.only_remembered()
    }

    /// Saves the state of a sequence and gives it to the caller. `None` if no checkpoint is free, or the model has no
    /// state. If steps that commit their rows are under way, this is the state after the last of them. The caller knows
    /// how many tokens that state has seen.
    ///
    /// # Errors
    /// Rows that are not committed, a torn state; an error of the runtime.
    pub fn save_checkpoint(&mut self, sequence: &SequenceCache) -> Result<Option<CheckpointLease>> {
        if !self.spec.is_recurrent() {
            return Ok(None);
        }
        let Some(checkpoint) = self.pools.take_checkpoint() else { return Ok(None) };
        self.overwrite_checkpoint(sequence, &checkpoint)?;
        Ok(Some(checkpoint))
    }

    /// As [`ModelCache::save_checkpoint`], over a saved state that the caller keeps.
    ///
    /// # Errors
    /// As [`ModelCache::save_checkpoint`]. If a copy fails, neither state is kept.
    pub fn overwrite_checkpoint(
        &mut self,
        sequence: &SequenceCache,
        checkpoint: &CheckpointLease,
    ) -> Result<()> {
        self.expect_settled(sequence)?;
        self.copy_slot(sequence.slot(), checkpoint.id(), SlotCopy::Save)
    }

    /// A sequence that continues after the first `len` tokens of `pages`, with the saved `state` at that point. The
    /// pages are shared. Before it runs a row it must have a partly filled last page
    /// [for itself](ModelCache::own_last_page).
    ///
    /// # Errors
    /// [`crate::CacheError::NoSlot`]; an error of the runtime. Nothing is then held.
    pub fn resume(
        &mut self,
        len: usize,
        pages: &[PageId],
        state: Option<CheckpointId>,
    ) -> Result<SequenceCache> {
        assert_eq!(pages.len(), len.div_ceil(AttentionSpec::PAGE), "the pages of {len} tokens");
        let mut sequence = self.open()?;
        pages.iter().for_each(|&page| self.pools.lock().pages.share(page));
        sequence.pages.extend_from_slice(pages);
        sequence.cached_len = len;
        if let Some(entry) = state {
            self.copy_slot(sequence.slot(), entry, SlotCopy::Restore)?;
        }
        Ok(sequence)
    }
}
