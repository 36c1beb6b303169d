//! Decode attention of many sequences: blocks that run from start to end, each of which walks through a list of
//! sequences and key heads. See `attention_decode_persistent.cu`.

use super::shared_memory::KvHead;
use crate::kernels::KernelKey;

/// Warps of a block. As in `attention_decode`, a row's sums follow from them, so both kernels give the same bits.
const WARPS: usize = 8;

/// Bytes of `Item` of the source, and `COST_RATIO`: a block's list has room for this many times its part of the items.
const ITEM_BYTES: usize = 16;
const COST_RATIO: usize = 8;

/// Other shared memory of a block: the variables that its sources declare, and the part that the driver keeps.
const STATIC_BYTES: usize = 256;
const RESERVED_BYTES: usize = 1024;

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
    /// The walk through at most `items`: tiles of up to 16 pairs of row and head, of a sequence and a key head. `None`
    /// if a block's list and chunks do not fit shared memory.
    pub fn of(head: &KvHead, items: usize, device: &Capacity) -> Option<Walk> {
        let cut = |(blocks, stages)| {
            let list = COST_RATIO * items.div_ceil(blocks * device.multiprocessors) + 1;
            Walk { warps: WARPS, stages, blocks, shared_bytes: shared_bytes(head, stages, list) }
        };
        // Two blocks hide each other's barriers, and the widening of codes. Larger heads in f16 leave them one chunk
        // each, and gain more from two chunks. Sums of heads of more than 128 leave no registers for two blocks.
        let takes_two = head.size <= if head.bits > 0 { 128 } else { 64 };
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

/// The resources of a device for the blocks of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Capacity {
    pub multiprocessors: usize,
    /// Bytes of shared memory that a block may have: all of a multiprocessor's but the part that the driver keeps for a
    /// block.
    pub shared_bytes_max: usize,
}

/// `MANY_SHARED` of the source.
fn shared_bytes(head: &KvHead, stages: usize, items: usize) -> usize {
    let pairs = if head.size > 64 { 4 } else { 8 };
    let sums = WARPS * pairs * (head.size + 2) * size_of::<f32>();
    WARPS * stages * 2 * head.chunk_bytes() + 2 * (head.query_bytes() + sums) + items * ITEM_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::{assert_values, key_of};
    use crate::kernels::ATTENTION_DECODE_PERSISTENT;

    const HOPPER: Capacity = Capacity { multiprocessors: 132, shared_bytes_max: 227 << 10 };

    #[test]
    fn walks_fit_a_block_of_hopper() {
        let walk = |bits, size, items| {
            Walk::of(&KvHead { size, bits }, items, &HOPPER).expect("chunks of every size fit")
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
        assert_eq!(Walk::of(&KvHead { size: 256, bits: 0 }, 2048, &small), None, "chunks do not fit");
    }

    #[test]
    fn the_source_is_told_how_many_blocks_share_a_multiprocessor() {
        let constants = |size| {
            let walk =
                Walk::of(&KvHead { size, bits: 0 }, 320 * 8, &HOPPER).expect("chunks of every size fit");
            walk.constants(KernelKey::new(ATTENTION_DECODE_PERSISTENT, "attention_decode_persistent")).defines
        };
        let cut = |stages: &str, blocks: &str| {
            [("WARPS", "8"), ("KV_STAGES", stages), ("BLOCKS", blocks)].map(|(n, v)| (n, v.to_owned()))
        };
        assert_eq!(constants(64), cut("2", "2"));
        assert_eq!(constants(128), cut("2", "1"));
    }

    #[test]
    fn the_source_has_the_same_numbers() {
        let others =
            [("WINDOW", 0), ("RUNS", 0), ("UNTIL", 0), ("Y_HALF", 0), ("SPLIT_STEP", 64), ("EARLY", 0)];
        for (size, bits) in [(64, 0), (256, 0), (96, 8), (128, 4)] {
            let head = KvHead { size, bits };
            let walk = Walk::of(&head, 320 * 8, &HOPPER).expect("chunks of every size fit");
            let shape = [("H", 8), ("KV", 2), ("D", size), ("KV_BITS", bits), ("Q_STRIDE", 2048)];
            let constants = [&shape[..], &others].concat();
            let key = key_of(ATTENTION_DECODE_PERSISTENT, "attention_decode_persistent", &constants);
            let bytes = ("MANY_SHARED(7)", shared_bytes(&head, walk.stages, 7));
            assert_values(walk.constants(key), &[bytes, ("COST_RATIO", COST_RATIO)]);
        }
    }

    #[test]
    fn few_items_are_blocks_of_their_own() {
        assert!(!is_worthwhile(16, 8, 132) && is_worthwhile(32, 8, 132));
    }
}
