//! Sequences parked in host memory, to make room for others.
//!
//! A parked sequence holds no page and no slot. Its contents lie in blocks of a buffer that was allocated with the
//! cache, one array after the other. They come back bit for bit, into other pages and another slot:
//!
//! ```text
//! device   pages 7, 3 | slot 2        image    layer 0: page 7, page 3 | layer 1: window, state | ...
//! host     blocks 5, 0, 9             image cut into blocks of 64 KiB, in this order
//! ```

use std::ops::Range;

use keel_array::{AttentionSpec, Category, HostBuffer, Runtime};

use crate::contents::{HeldEntries, contents};
use crate::{CacheError, CacheSize, CacheSpec, HostBlockId, ModelCache, Result, SequenceCache};

/// Bytes of a block of host memory.
const BLOCK_BYTES: usize = 64 << 10;

/// Amount of host memory for parked sequences, and how much a sequence takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwapSize {
    /// Number of blocks; 0 if no sequence can be parked.
    pub blocks: usize,
    /// Bytes of a page in all layers without a window.
    pub page_bytes: usize,
    /// Most bytes of a sequence apart from these pages: its slot, and the pages of its windows.
    pub fixed_bytes: usize,
}

impl SwapSize {
    /// The blocks that `size.swap_bytes` has room for.
    pub(crate) fn new(spec: &CacheSpec, size: &CacheSize) -> SwapSize {
        let window_page = spec.sliding_token_bytes() * AttentionSpec::PAGE;
        SwapSize {
            blocks: size.swap_bytes / BLOCK_BYTES,
            page_bytes: (spec.token_bytes() - spec.sliding_token_bytes()) * AttentionSpec::PAGE,
            fixed_bytes: spec.slot_bytes() + spec.sliding_pages(size) * window_page,
        }
    }

    /// Most blocks of a sequence with this many pages.
    pub fn blocks_for(&self, pages: usize) -> usize {
        (pages * self.page_bytes + self.fixed_bytes).div_ceil(BLOCK_BYTES)
    }

    /// Bytes of this many blocks.
    pub fn bytes(blocks: usize) -> usize {
        blocks * BLOCK_BYTES
    }
}

/// The buffer. Its free blocks are in the pools.
#[derive(Debug)]
pub(crate) struct SwapSpace {
    size: SwapSize,
    memory: HostBuffer,
}

impl SwapSpace {
    pub fn allocate(runtime: &Runtime, size: SwapSize) -> Result<SwapSpace> {
        Ok(SwapSpace { size, memory: runtime.allocate_host(Category::Swap, SwapSize::bytes(size.blocks))? })
    }

    pub fn blocks(&self) -> usize {
        self.size.blocks
    }
}

/// The places of an image in host memory, in order.
struct Places<'a> {
    blocks: &'a [HostBlockId],
    at: usize,
}

impl Places<'_> {
    /// The range of the next bytes, at most `most`.
    fn next(&mut self, most: usize) -> Range<usize> {
        let (block, within) = (self.at / BLOCK_BYTES, self.at % BLOCK_BYTES);
        let len = most.min(BLOCK_BYTES - within);
        self.at += len;
        let start = self.blocks[block].index() * BLOCK_BYTES + within;
        start..start + len
    }
}

/// Calls `copy` for each range of an image that lies in one block: the entries that it belongs to, its place in their
/// array, its place in host memory, its bytes.
fn each_range(
    contents: &[HeldEntries<'_>],
    blocks: &[HostBlockId],
    mut copy: impl FnMut(&HeldEntries<'_>, usize, usize, usize) -> Result<()>,
) -> Result<()> {
    let mut places = Places { blocks, at: 0 };
    for held in contents {
        let entry_bytes = held.entry_bytes();
        for &entry in &held.entries {
            let mut done = 0;
            while done < entry_bytes {
                let host = places.next(entry_bytes - done);
                copy(held, entry * entry_bytes + done, host.start, host.len())?;
                done += host.len();
            }
        }
    }
    Ok(())
}

impl ModelCache {
    /// Size of the host memory for parked sequences.
    pub fn swap_size(&self) -> SwapSize {
        self.swap.size
    }

    /// Free blocks of host memory.
    pub fn free_swap_blocks(&self) -> usize {
        self.pools.lock().blocks.len()
    }

    fn take_blocks(&self, count: usize) -> Result<Vec<HostBlockId>> {
        let free = &mut self.pools.lock().blocks;
        let left = free.len().checked_sub(count).ok_or_else(|| {
            let [needed_bytes, free_bytes, total_bytes] =
                [count, free.len(), self.swap.blocks()].map(SwapSize::bytes);
            CacheError::NoSwap { needed_bytes, free_bytes, total_bytes }
        })?;
        Ok(free.split_off(left))
    }

    /// Copies the sequence's contents to host memory, and frees its pages, slot and checkpoints.
    ///
    /// # Errors
    /// [`CacheError::NoSwap`]; [`CacheError::OpenRows`], [`CacheError::TornState`]; an error of the runtime. The
    /// sequence is then unchanged.
    pub fn park(&mut self, sequence: &mut SequenceCache) -> Result<()> {
        self.expect_settled(sequence)?;
        let contents = contents(&self.layers, sequence, 0, sequence.len());
        let image_bytes = contents.iter().map(HeldEntries::bytes).sum::<usize>();
        let blocks = self.take_blocks(image_bytes.div_ceil(BLOCK_BYTES))?;
        let memory = self.swap.memory.bytes_mut();
        let copied = each_range(&contents, &blocks, |held, at, host, len| {
            Ok(held.pool.read_bytes(at, &mut memory[host..host + len])?)
        });
        if let Err(error) = copied {
            self.pools.lock().blocks.extend(blocks);
            return Err(error);
        }
        self.pools.take_from(sequence);
        sequence.parked = Some(blocks);
        Ok(())
    }

    /// Brings a parked sequence back.
    ///
    /// # Errors
    /// [`CacheError::NoSlot`], [`CacheError::NoPages`]; an error of the runtime. The sequence then stays parked.
    pub fn unpark(&mut self, sequence: &mut SequenceCache) -> Result<()> {
        let Some(blocks) = sequence.parked.take() else { return Ok(()) };
        match self.fill_from_host(sequence, &blocks) {
            Ok(()) => {
                self.pools.lock().blocks.extend(blocks);
                Ok(())
            }
            Err(error) => {
                sequence.parked = Some(blocks);
                Err(error)
            }
        }
    }

    fn fill_from_host(&mut self, sequence: &mut SequenceCache, blocks: &[HostBlockId]) -> Result<()> {
        sequence.slot = Some(self.take_slot()?);
        let filled = self.reserve(sequence, 0).and_then(|()| {
            let memory = self.swap.memory.bytes();
            each_range(&contents(&self.layers, sequence, 0, sequence.len()), blocks, |held, at, host, len| {
                Ok(held.pool.write_bytes(at, &memory[host..host + len])?)
            })
        });
        if filled.is_err() {
            self.pools.take_from(sequence);
        }
        filled
    }
}
