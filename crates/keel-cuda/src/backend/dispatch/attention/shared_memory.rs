//! Dynamic shared memory of the kernels of attention, each as its source divides it.

use super::{TILE, WIDE_TILE};

/// Keys of a chunk, which a warp attends to at a time.
const CHUNK: usize = 16;

/// Keys of a tile of `attention_prefill`.
const PREFILL_KEYS: usize = 64;

/// A head of keys or values in its pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct KvHead {
    /// Values of a head.
    pub size: usize,
    /// Bits of a value in coded pools, 0 in others.
    pub bits: usize,
}

impl KvHead {
    /// `CHUNK_BYTES` of `decode_chunk.cuh`: 16 keys, or their values. Steps of a coded key are two bytes for each 32
    /// values.
    pub fn chunk_bytes(&self) -> usize {
        match self.bits {
            0 => CHUNK * self.line_bytes(),
            bits => CHUNK * (16 * ((self.size * bits / 128) | 1) + self.size / 16),
        }
    }

    /// A row of a tile of f16.
    fn line_bytes(&self) -> usize {
        (self.size + 8) * size_of::<u16>()
    }

    /// Queries of a block of a decode kernel.
    pub fn query_bytes(&self) -> usize {
        TILE * self.line_bytes()
    }

    /// `WIDE_SHARED` of `attention_wgmma.cu`, for `keys` keys at a time: queries, two tiles of keys and two of values,
    /// and codes of one of each.
    pub fn wide_bytes(&self, keys: usize) -> usize {
        1024 + 2 * (WIDE_TILE + 4 * keys) * self.size + 2 * keys * self.size * self.bits / 8
    }

    /// `PREFILL_SHARED` of `attention_tensor.cu`: queries, keys and values.
    pub fn prefill_bytes(&self) -> usize {
        (4 * TILE + 2 * PREFILL_KEYS) * self.line_bytes()
    }

    /// `DECODE_SHARED` of `attention_tensor.cu`: queries and the chunks of all warps, then the warps' sums in their
    /// place.
    pub fn decode_bytes(&self, warps: usize, stages: usize) -> usize {
        let tiles = self.query_bytes() + 2 * warps * stages * self.chunk_bytes();
        tiles.max(warps * TILE * (self.size + 2) * size_of::<f32>())
    }

    /// `sizeof(Tiles)` of `attention.cu`: queries, 32 keys or values with 4 columns more, and weights with one more;
    /// two numbers of each query.
    pub fn exact_bytes(&self) -> usize {
        size_of::<f32>() * (TILE * self.size + 32 * (self.size + 4) + TILE * 33 + 2 * TILE)
    }
}

#[cfg(test)]
mod tests {
    use super::super::kv_splits::SPLIT_STEP;
    use super::*;
    use crate::agreement::{assert_values, key_of};
    use crate::kernels::{ATTENTION, ATTENTION_TENSOR, ATTENTION_WGMMA, BATCH, KernelKey, Source};
    use keel_array::AttentionSpec;

    const BITS: [usize; 3] = [0, 8, 4];

    /// A key with the constants that all kernels of attention have.
    fn key(source: Source, entry: &'static str, head: KvHead, step: usize) -> KernelKey {
        let shape = [("H", 8), ("KV", 2), ("D", head.size), ("KV_F16", 1), ("KV_BITS", head.bits)];
        let strides = [("Q_STRIDE", 2048), ("K_STRIDE", 512), ("V_STRIDE", 512)];
        let others = [("WINDOW", 0), ("RUNS", 0), ("UNTIL", 0), ("Y_HALF", 0), ("SPLIT_STEP", step)];
        key_of(source, entry, &[&shape[..], &strides, &others].concat())
    }

    #[test]
    fn the_sources_divide_shared_memory_in_this_way() {
        for (size, bits) in [32, 96, 256].into_iter().flat_map(|size| BITS.map(|bits| (size, bits))) {
            let head = KvHead { size, bits };
            let exact = key(ATTENTION, "attention", head, SPLIT_STEP);
            assert_values(exact, &[("BM", TILE), ("sizeof(Tiles)", head.exact_bytes())]);
            for (warps, stages) in [(8, 2), (4, 1)] {
                let tensor = key(ATTENTION_TENSOR, "attention_decode", head, SPLIT_STEP);
                let tensor = tensor.define("WARPS", warps).define("KV_STAGES", stages).define("EARLY", 0);
                let values = [
                    ("BM", 4 * TILE),
                    ("BN", PREFILL_KEYS),
                    ("PREFILL_SHARED", head.prefill_bytes()),
                    ("CHUNK_BYTES", head.chunk_bytes()),
                    ("DECODE_SHARED", head.decode_bytes(warps, stages)),
                ];
                assert_values(tensor, &values);
            }
        }
        for (size, bits) in [(64, 0), (128, 8), (256, 4)] {
            let (head, keys) = (KvHead { size, bits }, if size == 256 { 64 } else { 128 });
            let wide = key(ATTENTION_WGMMA, "attention_prefill_wide", head, keys).define("BN", keys);
            assert_values(wide, &[("BM", WIDE_TILE), ("WIDE_SHARED", head.wide_bytes(keys))]);
        }
    }

    #[test]
    fn the_sources_have_the_same_pages_and_runs() {
        let of_attention = key(ATTENTION, "attention", KvHead { size: 64, bits: 0 }, SPLIT_STEP);
        assert_values(of_attention, &[("PAGE", AttentionSpec::PAGE), ("RUN", AttentionSpec::RUN)]);
        assert_values(KernelKey::new(BATCH, "check_batch"), &[("PAGE", AttentionSpec::PAGE)]);
    }
}
