//! The storage of all layers, and the sequences that share it.

use keel_array::{Array, AttentionSpec, ElementCopy, Runtime, clear_entries, copy_all};

use crate::pools::{Pools, SharedPools};
use crate::storage::{DeviceLayers, SavedSlots};
use crate::swap::SwapSpace;
use crate::{
    CacheError, CacheSize, CacheSpec, CheckpointId, HostBlockId, LayerStorage, PageAllocator, PageId, Result,
    SavedState, SequenceCache, SlotId, SwapSize,
};

/// The cache of a model: storage of all layers, and the bookkeeping of its pages and slots.
#[derive(Debug)]
pub struct ModelCache {
    pub(crate) spec: CacheSpec,
    size: CacheSize,
    pub(crate) layers: Vec<LayerStorage>,
    /// Saved slots, one array on each device with recurrent layers.
    saved: Vec<SavedSlots>,
    pub(crate) pools: SharedPools,
    pub(crate) swap: SwapSpace,
}

/// The purpose of a copy between a slot and a checkpoint.
#[derive(Clone, Copy)]
pub(crate) enum SlotCopy {
    Save,
    Restore,
}

impl ModelCache {
    /// Allocates everything.
    ///
    /// # Errors
    /// If the memory limit would be exceeded.
    pub fn allocate(runtime: &Runtime, spec: CacheSpec, size: CacheSize) -> Result<ModelCache> {
        let layers = 0..spec.layers.len();
        ModelCache::allocate_on(&[DeviceLayers { runtime: runtime.clone(), layers }], spec, size)
    }

    /// As [`ModelCache::allocate`], each range of layers on a device of its own. The ranges follow each other and hold
    /// all layers. Pages and slots have the same numbers on every device. Parked sequences are charged to the last.
    ///
    /// # Errors
    /// As [`ModelCache::allocate`].
    ///
    /// # Panics
    /// If the ranges do not follow each other.
    pub fn allocate_on(devices: &[DeviceLayers], spec: CacheSpec, size: CacheSize) -> Result<ModelCache> {
        let (mut layers, mut saved) = (Vec::with_capacity(spec.layers.len()), Vec::new());
        for device @ DeviceLayers { runtime, layers: range } in devices {
            assert_eq!(
                range.start,
                layers.len(),
                "the layers of each device come after those of the one before"
            );
            for layer in &spec.layers[range.clone()] {
                layers.push(LayerStorage::allocate(runtime, layer, &spec, &size)?);
            }
            saved.extend(SavedSlots::allocate(device, &spec, size.checkpoints)?);
        }
        let host = match devices.last() {
            Some(last) if last.layers.end == spec.layers.len() => &last.runtime,
            _ => panic!("{} layers on devices that hold {}", spec.layers.len(), layers.len()),
        };
        let swap = SwapSpace::allocate(host, SwapSize::new(&spec, &size))?;
        let pools = SharedPools::new(Pools {
            pages: PageAllocator::new(size.pages()),
            sliding_pages: PageAllocator::new(size.sequences * spec.sliding_pages(&size)),
            slots: SlotId::all(size.sequences),
            checkpoints: CheckpointId::all(size.checkpoints),
            blocks: HostBlockId::all(swap.blocks()),
            failed_steps: vec![None; size.sequences],
        });
        Ok(ModelCache { swap, layers, saved, pools, spec, size })
    }

    /// The storage of each layer, and its formats.
    pub fn spec(&self) -> &CacheSpec {
        &self.spec
    }

    /// The size that the cache was allocated for.
    pub fn size(&self) -> CacheSize {
        self.size
    }

    /// The storage of each layer.
    pub fn layers(&self) -> &[LayerStorage] {
        &self.layers
    }

    /// True if no sequence is open and every page, slot, checkpoint and host block is free.
    pub fn is_idle(&self) -> bool {
        let pools = self.pools.lock();
        [&pools.pages, &pools.sliding_pages].iter().all(|p| p.is_conserved() && p.free() == p.total())
            && pools.slots.len() == self.size.sequences
            && pools.checkpoints.len() == self.size.checkpoints
            && pools.blocks.len() == self.swap.blocks()
    }

    /// A new, empty sequence.
    ///
    /// # Errors
    /// [`CacheError::NoSlot`] if all slots are taken.
    pub fn open(&mut self) -> Result<SequenceCache> {
        let sequence = SequenceCache::new(self.pools.clone(), self.take_slot()?, 0, 0);
        self.clear_slot(sequence.slot())?;
        Ok(sequence)
    }

    pub(crate) fn take_slot(&mut self) -> Result<SlotId> {
        let mut pools = self.pools.lock();
        let slot = pools.slots.pop().ok_or(CacheError::NoSlot { total: self.size.sequences })?;
        // A step of the sequence that had it before may have failed since.
        pools.failed_steps[slot.index()] = None;
        Ok(slot)
    }

    /// Makes room for `rows` more tokens. Growth copies nothing.
    ///
    /// # Errors
    /// [`CacheError::NoPages`], [`CacheError::Foreign`]; the sequence is then unchanged.
    pub fn reserve(&mut self, sequence: &mut SequenceCache, rows: usize) -> Result<()> {
        self.expect_own(sequence)?;
        let needed = (sequence.cached_len + rows).div_ceil(AttentionSpec::PAGE);
        let missing = needed.saturating_sub(sequence.pages.len());
        let mut pools = self.pools.lock();
        sequence.pages.extend(pools.pages.take(missing)?);
        // The pool has as many window pages as all sequences can hold, so there are always enough.
        let window_needed = needed.min(self.spec.sliding_pages(&self.size));
        let missing = window_needed.saturating_sub(sequence.sliding_pages.len());
        sequence.sliding_pages.extend(pools.sliding_pages.take(missing)?);
        Ok(())
    }

    /// Ends a sequence and frees everything it held, as dropping it does.
    pub fn release(&mut self, sequence: SequenceCache) {
        drop(sequence);
    }

    /// Forgets all tokens of a sequence.
    ///
    /// # Errors
    /// [`CacheError::Foreign`]; an error of the runtime.
    pub fn reset(&mut self, sequence: &mut SequenceCache) -> Result<()> {
        self.expect_own(sequence)?;
        sequence.checkpoints.clear();
        self.shorten(sequence, 0);
        self.drop_sliding_pages(sequence);
        self.clear_slot(sequence.slot())?;
        self.pools.lock().failed_steps[sequence.slot().index()] = None;
        Ok(())
    }

    /// Saves the present state, so that the sequence can go back to it. If no checkpoint is free, it replaces the
    /// oldest checkpoint of the sequence; if the sequence has none, nothing is saved.
    ///
    /// # Errors
    /// [`CacheError::OpenRows`]; an error of the runtime.
    pub fn checkpoint(&mut self, sequence: &mut SequenceCache) -> Result<()> {
        self.expect_settled(sequence)?;
        if sequence.checkpoints().last() == Some(sequence.cached_len) {
            return Ok(());
        }
        let oldest = || (!sequence.checkpoints.is_empty()).then(|| sequence.checkpoints.remove(0).checkpoint);
        let Some(checkpoint) = self.pools.take_checkpoint().or_else(oldest) else { return Ok(()) };
        self.copy_slot(sequence.slot(), checkpoint.id(), SlotCopy::Save)?;
        sequence.checkpoints.push(SavedState { position: sequence.cached_len, checkpoint });
        Ok(())
    }

    /// Goes back to the latest checkpoint at or before `position` (or to the start) and returns its position. A model
    /// without recurrent layers needs no checkpoint. Exception: if sliding layers have overwritten pages that are
    /// needed there, the sequence goes back to the start.
    ///
    /// # Errors
    /// - [`CacheError::NoCheckpoint`] if `position` is beyond the end; [`CacheError::Foreign`].
    /// - [`CacheError::NoPages`] if the page at the end is shared and there is none for a copy; the sequence is then
    ///   unchanged.
    /// - An error of the runtime.
    pub fn rewind(&mut self, sequence: &mut SequenceCache, position: usize) -> Result<usize> {
        self.expect_own(sequence)?;
        if position > sequence.cached_len {
            let kept = sequence.checkpoints().collect();
            return Err(CacheError::NoCheckpoint { wanted: position, kept });
        }
        if position == sequence.cached_len && self.expect_whole(sequence).is_ok() {
            return Ok(position);
        }
        let at = if self.spec.is_recurrent() {
            let saved = sequence.checkpoints.iter().rev().find(|saved| saved.position <= position);
            saved.map(|saved| (saved.position, Some(saved.checkpoint.id())))
        } else {
            Some((position, None))
        };
        let Some((at, entry)) =
            at.filter(|&(at, _)| self.sliding_pages_are_whole(sequence, sequence.cached_len, at))
        else {
            self.reset(sequence)?;
            return Ok(0);
        };
        self.expect_own_page_at(sequence, at)?;
        sequence.checkpoints.retain(|saved| saved.position <= at);
        if let Some(entry) = entry {
            self.copy_slot(sequence.slot(), entry, SlotCopy::Restore)?;
        }
        self.shorten(sequence, at);
        self.pools.lock().failed_steps[sequence.slot().index()] = None;
        self.own_last_page(sequence)?;
        Ok(at)
    }

    /// Cuts the sequence to `at` tokens, none of them open, and frees the pages after them.
    pub(crate) fn shorten(&mut self, sequence: &mut SequenceCache, at: usize) {
        let keep = at.div_ceil(AttentionSpec::PAGE);
        let mut pools = self.pools.lock();
        sequence.pages.drain(keep..).for_each(|page| pools.pages.release(page));
        (sequence.cached_len, sequence.accepted) = (at, 0);
    }

    /// Gives back the pages of sliding layers, whose contents no longer fit the sequence.
    pub(crate) fn drop_sliding_pages(&mut self, sequence: &mut SequenceCache) {
        let mut pools = self.pools.lock();
        sequence.sliding_pages.drain(..).for_each(|page| pools.sliding_pages.release(page));
    }

    /// Whether the pages of the sliding layers still hold everything that a row at `position` sees, after `written`
    /// tokens were written to them.
    pub(crate) fn sliding_pages_are_whole(
        &self,
        sequence: &SequenceCache,
        written: usize,
        position: usize,
    ) -> bool {
        let Some(window) = self.spec.sliding_window() else { return true };
        let last = written.saturating_sub(1) / AttentionSpec::PAGE;
        let oldest = (last + 1).saturating_sub(sequence.sliding_pages.len());
        (position + 1).saturating_sub(window) / AttentionSpec::PAGE >= oldest
    }

    /// Returns an error if a sequence that is cut to `at` tokens would have to copy its last page and no page is free
    /// for that, not even one of those that the cut frees.
    fn expect_own_page_at(&self, sequence: &SequenceCache, at: usize) -> Result<()> {
        let (last, pools) = (at / AttentionSpec::PAGE, self.pools.lock());
        let is_shared = |&page: &PageId| pools.pages.is_shared(page);
        let copies = !at.is_multiple_of(AttentionSpec::PAGE) && is_shared(&sequence.pages[last]);
        if copies && pools.pages.free() == 0 && sequence.pages[last + 1..].iter().all(is_shared) {
            return Err(CacheError::NoPages { needed: 1, free: 0, total: pools.pages.total() });
        }
        Ok(())
    }

    /// Replaces a partly filled last page by the sequence's own copy, if it is shared: the next token is written there.
    /// That needs a free page.
    ///
    /// # Errors
    /// [`CacheError::NoPages`], [`CacheError::Foreign`]; an error of the runtime. The page is then shared as before.
    pub fn own_last_page(&mut self, sequence: &mut SequenceCache) -> Result<()> {
        self.expect_own(sequence)?;
        let last = sequence.cached_len / AttentionSpec::PAGE;
        let partial = !sequence.cached_len.is_multiple_of(AttentionSpec::PAGE);
        if !partial || !self.pools.lock().pages.is_shared(sequence.pages[last]) {
            return Ok(());
        }
        let shared = sequence.pages[last];
        let own = self.pools.lock().pages.take_one()?;
        let arrays = self.layers.iter().flat_map(LayerStorage::page_arrays);
        let copies = arrays.map(|array| array.entry_copy(shared.index(), array, own.index()));
        let copied = copies.collect::<Result<Vec<_>, _>>().and_then(|copies| copy_all(&copies));
        // The page that is not used goes back.
        let (kept, free) = if copied.is_ok() { (own, shared) } else { (shared, own) };
        self.pools.lock().pages.release(free);
        sequence.pages[last] = kept;
        Ok(copied?)
    }

    /// A second sequence with the same tokens. Full pages are shared; the page being filled and the state are copied.
    ///
    /// # Errors
    /// [`CacheError::NoSlot`], [`CacheError::NoPages`], [`CacheError::Foreign`]; an error of the runtime.
    pub fn fork(&mut self, sequence: &SequenceCache) -> Result<SequenceCache> {
        self.expect_own(sequence)?;
        let (slot, home) = (self.take_slot()?, self.pools.clone());
        let mut twin = SequenceCache::new(home, slot, sequence.cached_len, sequence.accepted);
        twin.is_long = sequence.is_long;
        twin.vision.clone_from(&sequence.vision);
        self.fork_into(sequence, &mut twin)?;
        Ok(twin)
    }

    fn fork_into(&mut self, sequence: &SequenceCache, twin: &mut SequenceCache) -> Result<()> {
        let interruption = self.failed_step(sequence);
        self.pools.lock().failed_steps[twin.slot().index()] = interruption;
        let mut copies = Vec::new();
        for layer in &self.layers {
            let log = if sequence.accepted > 0 { layer.log_arrays() } else { vec![] };
            for array in layer.slot_arrays().into_iter().chain(log) {
                copies.push(array.entry_copy(sequence.slot().index(), array, twin.slot().index())?);
            }
        }
        // Rotating pages are overwritten, so none can be shared.
        let rotating = sequence.sliding_pages.len();
        twin.sliding_pages.extend(self.pools.lock().sliding_pages.take(rotating)?);
        for array in self.layers.iter().flat_map(LayerStorage::sliding_page_arrays) {
            for (&from, &to) in sequence.sliding_pages.iter().zip(&twin.sliding_pages) {
                copies.push(array.entry_copy(from.index(), array, to.index())?);
            }
        }
        copy_all(&copies)?;
        let used = sequence.cached_len.div_ceil(AttentionSpec::PAGE);
        for &page in &sequence.pages[..used] {
            self.pools.lock().pages.share(page);
            twin.pages.push(page);
        }
        self.own_last_page(twin)
    }

    fn clear_slot(&mut self, slot: SlotId) -> Result<()> {
        let arrays: Vec<&Array> = self.layers.iter().flat_map(LayerStorage::slot_arrays).collect();
        Ok(clear_entries(&arrays, slot.index())?)
    }

    /// Copies a slot to a checkpoint or back.
    pub(crate) fn copy_slot(&self, slot: SlotId, entry: CheckpointId, way: SlotCopy) -> Result<()> {
        let mut copies = Vec::new();
        for SavedSlots { layers, windows, states } in &self.saved {
            // In the order of `slot_arrays`, each with the element that comes next.
            let mut kept = [windows, states].map(|saved| (saved, entry.index() * saved.shape()[1]));
            for layer in &self.layers[layers.clone()] {
                for (live, (saved, at)) in layer.slot_arrays().into_iter().zip(&mut kept) {
                    let len = live.shape()[1..].iter().product();
                    let from = slot.index() * len;
                    let saving = ElementCopy { source: live, from, target: saved, to: *at, count: len };
                    copies.push(match way {
                        SlotCopy::Save => saving,
                        SlotCopy::Restore => saving.reversed(),
                    });
                    *at += len;
                }
            }
        }
        Ok(copy_all(&copies)?)
    }
}
