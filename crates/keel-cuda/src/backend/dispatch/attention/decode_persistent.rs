//! Decode attention of many sequences: blocks that run from start to end, each of which walks through a list of
//! sequences and key heads. See `attention_decode_persistent.cu`.

use super::TILE;
use crate::kernels::KernelKey;

/// Warps of a block. As in `attention_decode`, a row's sums follow from them, so both kernels give the same bits.
const WARPS: usize = 8;

/// Bytes of `Item` of the source, and `COST_RATIO`: a block's list has room for this many times its part of the items.
const ITEM_BYTES: usize = 16;
const COST_RATIO: usize = 8;

/// Shared memory of a block besides: what its sources declare, and what the driver keeps.
const STATIC_BYTES: usize = 256;
const RESERVED_BYTES: usize = 1024;

/// Keys of a chunk, which a warp attends to at a time.
const CHUNK: usize = 16;

/// 16 keys of a head, or their values, in the shared memory of the decode kernels. See `decode_chunk.cuh`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    /// Values of a head.
    pub size: usize,
    /// Bits of a value in coded pools, 0 in others.
    pub bits: usize,
}

impl Chunk {
    /// `CHUNK_BYTES` of the source. Steps of a coded key are two bytes for each 32 values.
    pub fn bytes(&self) -> usize {
        match self.bits {
            0 => CHUNK * size_of::<u16>() * (self.size + 8),
            bits => CHUNK * (16 * ((self.size * bits / 128) | 1) + self.size / 16),
        }
    }
}

/// The cut of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Walk {
    /// Warps of a block.
    pub warps: usize,
    /// Chunks of keys and of values that a warp has under way.
    pub stages: usize,
    /// Blocks of a multiprocessor.
    pub blocks: usize,
    pub shared_bytes: usize,
}

/// Whether a walk is faster than one block for each sequence and key head. Assumed from 1.5 items a multiprocessor on;
/// measured with 2.
pub(super) fn is_worthwhile(sequences: usize, kv_heads: usize, multiprocessors: usize) -> bool {
    2 * sequences * kv_heads >= 3 * multiprocessors
}

impl Walk {
    /// The walk through at most `items`: tiles of up to [`TILE`] pairs of row and head, of a sequence and a key head.
    /// `None` if a block's list and chunks do not fit shared memory.
    pub fn of(chunk: &Chunk, items: usize, device: &Capacity) -> Option<Walk> {
        let cut = |(blocks, stages)| {
            let list = COST_RATIO * items.div_ceil(blocks * device.multiprocessors) + 1;
            Walk { warps: WARPS, stages, blocks, shared_bytes: shared_bytes(chunk, stages, list) }
        };
        // Two blocks hide each other's barriers, and the widening of codes. Larger heads in f16 leave them one chunk
        // each, and gain more from two chunks. Sums of heads of more than 128 leave no registers for two blocks.
        let takes_two = chunk.size <= if chunk.bits > 0 { 128 } else { 64 };
        let cuts: &[(usize, usize)] =
            if takes_two { &[(2, 2), (2, 1), (1, 2), (1, 1)] } else { &[(1, 2), (1, 1)] };
        cuts.iter().map(|&blocks_and_stages| cut(blocks_and_stages)).find(|walk| {
            let bytes = walk.shared_bytes + STATIC_BYTES;
            walk.blocks * (bytes + RESERVED_BYTES) <= device.shared_bytes_max + RESERVED_BYTES
        })
    }
}

impl Walk {
    /// With the constants that the cut gives the source. The compiler keeps registers free for all blocks.
    pub fn constants(&self, key: KernelKey) -> KernelKey {
        key.define("WARPS", self.warps).define("KV_STAGES", self.stages).define("BLOCKS", self.blocks)
    }
}

/// What a device has for the blocks of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Capacity {
    pub multiprocessors: usize,
    /// Bytes of shared memory that a block may have: all of a multiprocessor's but what the driver keeps for one.
    pub shared_bytes_max: usize,
}

/// `MANY_SHARED` of the source.
fn shared_bytes(chunk: &Chunk, stages: usize, items: usize) -> usize {
    let queries = TILE * size_of::<u16>() * (chunk.size + 8);
    let pairs = if chunk.size > 64 { 4 } else { 8 };
    let sums = WARPS * pairs * (chunk.size + 2) * size_of::<f32>();
    WARPS * stages * 2 * chunk.bytes() + 2 * (queries + sums) + items * ITEM_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::ATTENTION_DECODE_PERSISTENT;

    const HOPPER: Capacity = Capacity { multiprocessors: 132, shared_bytes_max: 227 << 10 };

    #[test]
    fn walks_fit_a_block_of_hopper() {
        let walk = |bits, size, items| {
            Walk::of(&Chunk { size, bits }, items, &HOPPER).expect("chunks of every size fit")
        };
        for (bits, step) in [(0, 16), (8, 32), (4, 32)] {
            for size in (step..=256).step_by(step) {
                assert!(walk(bits, size, 1024 * 8).shared_bytes + STATIC_BYTES <= HOPPER.shared_bytes_max);
            }
        }
        let cuts = |bits| {
            [64, 128, 256].map(|size| (walk(bits, size, 320 * 8).blocks, walk(bits, size, 320 * 8).stages))
        };
        assert_eq!(cuts(0), [(2, 2), (1, 2), (1, 1)]);
        assert_eq!(cuts(8), [(2, 2), (2, 1), (1, 1)]);
        assert_eq!(cuts(4), [(2, 2), (2, 2), (1, 2)]);
        let small = Capacity { multiprocessors: 84, shared_bytes_max: 99 << 10 };
        assert_eq!(Walk::of(&Chunk { size: 256, bits: 0 }, 2048, &small), None, "chunks do not fit");
    }

    #[test]
    fn the_source_is_told_how_many_blocks_share_a_multiprocessor() {
        let constants = |size| {
            let chunk = Chunk { size, bits: 0 };
            let walk = Walk::of(&chunk, 320 * 8, &HOPPER).expect("chunks of every size fit");
            walk.constants(KernelKey::new(ATTENTION_DECODE_PERSISTENT, "attention_decode_persistent")).defines
        };
        let cut = |stages: &str, blocks: &str| {
            [("WARPS", "8"), ("KV_STAGES", stages), ("BLOCKS", blocks)].map(|(n, v)| (n, v.to_owned()))
        };
        assert_eq!(constants(64), cut("2", "2"));
        assert_eq!(constants(128), cut("2", "1"));
    }

    #[test]
    fn few_items_are_blocks_of_their_own() {
        assert!(!is_worthwhile(16, 8, 132) && is_worthwhile(32, 8, 132));
    }
}
