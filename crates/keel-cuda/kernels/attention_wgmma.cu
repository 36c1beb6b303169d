// attention_prefill of attention_tensor.cu with Hopper's matrix instructions. Formula, operands and roundings are the
// same; pages are f16 or coded, without a window.
//
// A block has 128 pairs of row and head, 64 for each of its two warpgroups, against BN keys at a time. While the tensor
// cores multiply one tile's weights by its values, the scores of the next tile are turned into weights. Copies run one
// tile further ahead. Shared memory holds two tiles of keys and two of values, in the panels of wgmma.cuh.
//
// Macros: H, KV, D (64, 128, 256), Q_STRIDE, KV_F16, KV_BITS, WINDOW=0, UNTIL, BN (64 where D = 256, else 128),
// SPLIT_STEP=BN.
// Launch: grid (KV, ceil(T G / 128) + B, splits), block 256, shared memory WIDE_SHARED. Long blocks start first.
//
// Floor: 4 D H T^2 / 2 operations at the tensor cores' rate.

#include "kept.cuh"
#include "wgmma.cuh"

#define G (H / KV)
#define BM 128
static_assert(SPLIT_STEP == BN, "a split begins with a tile");
#include "softmax.cuh"

#define PANELS (D / 64)
#define Q_PANEL (BM * 128)
#define KV_PANEL (BN * 128)
#define KV_TILE (PANELS * KV_PANEL)
// Each thread copies the same 16 bytes of every ROW_STEP-th row of a tile. ROW_STEP is a multiple of 8, so these rows
// are swizzled alike.
#define ROW_STEP (256 / (D / 8))
#define PIECES (BN / ROW_STEP)
// Room to begin at a multiple of 1,024 bytes; queries; two tiles of keys and two of values; codes of one of each.
#define WIDE_SHARED (1024 + PANELS * Q_PANEL + 4 * KV_TILE + 2 * PIECES * 256 * KV_BITS)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// ---- keys and values: from pages to tiles ----

// Splits begin at multiples of BN, so a tile never straddles a page. Absent rows become zeros, because memory may hold
// NaN.

/// A thread's share of the tiles of head `kv`, whose keys end before `to`.
struct Copies {
    u32 kv, to, row, chunk, place;
    __device__ __forceinline__ Copies(u32 kv, u32 to)
        : kv(kv), to(to), row(threadIdx.x / (D / 8)), chunk(threadIdx.x % (D / 8)), place(chunk / 8 * KV_PANEL + panel_offset(row, chunk % 8)) {}

#if KV_BITS
    /// Copies the codes and the steps of the tile that begins at `key`, which are in `page`.
    __device__ __forceinline__ void fetch(u32 codes, u32 (&steps)[PIECES], const u8* pool, u32 page, u32 key) const {
        if (key >= to) return;
        const u32 token = key % PAGE + row;
        const u8* head = pool + head_page(page, kv);
        const u16* steps_of_head = (const u16*)(head + PAGE * CODE_ROW);
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            const u32 of = token + i * ROW_STEP;
            const bool is_there = key + row + i * ROW_STEP < to;
            copy_async_few<KV_BITS>(codes + i * 256 * KV_BITS, head + of * CODE_ROW + chunk * KV_BITS, is_there);
            steps[i] = 0;
            if (is_there) steps[i] = steps_of_head[of * GROUPS_OF_ROW + chunk / 4];
        }
    }
    /// Fills a tile from codes that have arrived, and copies those of the next tile of the pool, which are in `page`.
    __device__ __forceinline__ void load(u32 tile, u32 codes, u32 (&steps)[PIECES], const u8* pool, u32 page, u32 key) const {
        if (key >= to) return;
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            const u32 at = codes + i * 256 * KV_BITS;
            uint2 eight = {};
            if (KV_BITS == 8) asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(eight.x), "=r"(eight.y) : "r"(at));
            else asm volatile("ld.shared.b32 %0, [%1];" : "=r"(eight.x) : "r"(at));
            const uint4 wide = widen8(eight, steps[i]);
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(tile + place + i * ROW_STEP * 128), "r"(wide.x), "r"(wide.y),
                         "r"(wide.z), "r"(wide.w) : "memory");
        }
        fetch(codes, steps, pool, page, key + BN);
    }
#else
    /// Copies the tile that begins at `key`, which is in `page`.
    __device__ __forceinline__ void load(u32 tile, const f16* pool, u32 page, u32 key) const {
        if (key >= to) return;
        const f16* rows = pool + (((u64)page * KV + kv) * PAGE + key % PAGE + row) * D + chunk * 8;
#pragma unroll
        for (u32 i = 0; i < BN; i += ROW_STEP)
            copy_async_to(tile + place + i * 128, rows + i * D, key + row + i < to);
    }
#endif
};

/// Fills the tile of queries: pairs `first` to `first` + `count` of the sequence that begins at `first_row`.
static __device__ __forceinline__ void store_queries(u32 q_tile, const float* q, u32 first_row, u32 first, u32 count, u32 kv) {
    for (u32 i = threadIdx.x; i < BM * (D / 8); i += 256) {
        const u32 m = i / (D / 8), c = i % (D / 8);
        float4 x[2] = {};
        if (m < count) {
            const float4* eight = (const float4*)(q + (u64)(first_row + (first + m) / G) * Q_STRIDE + (kv * G + (first + m) % G) * D + c * 8);
            x[0] = eight[0], x[1] = eight[1];
        }
        const u32 at = q_tile + c / 8 * Q_PANEL + panel_offset(m, c % 8);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(pack_f16(x[0].x, x[0].y)), "r"(pack_f16(x[0].z, x[0].w)),
                     "r"(pack_f16(x[1].x, x[1].y)), "r"(pack_f16(x[1].z, x[1].w)) : "memory");
    }
}

// ---- one tile: products under way, and weights between them ----

/// Starts the products of the warpgroup's queries with a tile of keys.
static __device__ __forceinline__ void multiply_keys(float (&scores)[BN / 8][4], u32 q_tile, u32 tile) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        wgmma(scores, panel_of_rows(q_tile + k / 4 * Q_PANEL + threadIdx.x / 128 * (64 * 128)) + k % 4 * 2,
              panel_of_rows(tile + k / 4 * KV_PANEL) + k % 4 * 2, k > 0);
    wgmma_commit();
}
/// Starts sums += weights times a tile of values.
static __device__ __forceinline__ void multiply_values(float (&sums)[D / 8][4], const u32 (&weights)[BN / 16][4], u32 tile) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BN / 16; k++) {
        const u64 rows = panels_of_columns(tile, KV_PANEL) + k * 128;
        if constexpr (D == 256) {
            wgmma<128, 0, true>(sums, weights[k], rows);
            wgmma<128, 128, true>(sums, weights[k], rows + (2 * KV_PANEL >> 4));
        } else {
            wgmma<D, 0, true>(sums, weights[k], rows);
        }
    }
    wgmma_commit();
}
/// Rounds weights to f16, as operands of the product with values.
static __device__ __forceinline__ void round_weights(u32 (&weights)[BN / 16][4], const float (&scores)[BN / 8][4]) {
#pragma unroll
    for (int k = 0; k < BN / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            weights[k][i] = pack_f16(scores[2 * k + i / 2][i % 2 * 2], scores[2 * k + i / 2][i % 2 * 2 + 1]);
}

extern "C" __global__ void __launch_bounds__(256, 1)
attention_prefill_wide(
#include "attend.params"
) {
    take_turn();
    DYNAMIC_SHARED(u8, shared);
    const u32 q_tile = (shared_address(shared) + 1023) / 1024 * 1024, key_tiles = q_tile + PANELS * Q_PANEL,
              value_tiles = key_tiles + 2 * KV_TILE;

    u32 b, unit;
    if (!locate(row_start, sequences, G, BM, gridDim.y - 1 - blockIdx.y, b, unit)) return;
    const u32 first_row = row_start[b], pairs = (row_start[b + 1] - first_row) * G, kv = blockIdx.x;
    const u32 first = unit * BM, count = min(pairs - first, BM), start = position[b];
    const u32 first_position = start + first / G;
#if UNTIL
    const Until limits = {until + first_row, pairs / G};
#else
    const Until limits = {};
#endif
    const uint2 last = last_seen(limits, start, first, count);
    u32 from, to;
    split_range(start, start + pairs / G, WINDOW, blockIdx.z, gridDim.z, by_position, from, to);
    visible_range(first_position, last.y, WINDOW, from, to);
    if (from >= to) return;

    const Copies copies(kv, to);
    auto page_of = [&](u32 key) { return table[b * pages + min(key, to - 1) / PAGE]; };
#if KV_BITS
    const u32 key_codes = value_tiles + 2 * KV_TILE + threadIdx.x * KV_BITS, value_codes = key_codes + PIECES * 256 * KV_BITS;
    u32 key_steps[PIECES], value_steps[PIECES];
#define KEYS key_codes, key_steps, keys
#define VALUES value_codes, value_steps, values
#define AHEAD BN
#else
#define KEYS keys
#define VALUES values
#define AHEAD 0
#endif
    const u32 first_page = page_of(from);
    // Pages of the tile that is copied next and of the one after it; each is read a tile ahead.
    u32 page = page_of(from + BN + AHEAD), next_page = page_of(from + 2 * BN + AHEAD);
#if KV_BITS
    const u32 second_page = page_of(from + BN);
    copies.fetch(KEYS, first_page, from);
    copies.fetch(VALUES, first_page, from);
#else
    copies.load(key_tiles, KEYS, first_page, from);
    copy_commit();
    copies.load(value_tiles, VALUES, first_page, from);
    copies.load(key_tiles + KV_TILE, KEYS, page, from + BN);
#endif
    copy_commit();

    store_queries(q_tile, q, first_row, first, count, kv);

    const u32 m = threadIdx.x / 32 * 16;
    float scores[BN / 8][4], sums[D / 8][4] = {};
    u32 weights[BN / 16][4];
    Softmax softmax;
    softmax.start();
    const float factor = scale * 1.4426950408889634f;
    float shrink[2];
    auto weigh = [&](u32 key) {
        settle(scores);
        if (key + BN > last.x + 1) hide<BN / 8>(scores, start, first + m, key, to, limits);
        softmax.weigh<BN / 8>(scores, factor, shrink);
    };

#if KV_BITS
    copy_wait<0>();
    copies.load(key_tiles, KEYS, second_page, from);
    copies.load(value_tiles, VALUES, second_page, from);
    copy_commit();
#else
    copy_wait<1>();
#endif
    publish_to_products();
    __syncthreads();
    multiply_keys(scores, q_tile, key_tiles);
#if KV_BITS
    copy_wait<0>();
    copies.load(key_tiles + KV_TILE, KEYS, page, from + BN);
    copy_commit();
#endif
    wgmma_wait<0>();
    weigh(from);
    round_weights(weights, scores);
    u32 odd = 0;
#pragma unroll 1
    for (u32 key = from + BN; key < to; key += BN, odd ^= 1) {
        copy_wait<0>();
        publish_to_products();
        // The keys of this tile and the values of the one before have arrived, and all warps are done with earlier
        // tiles.
        __syncthreads();
        multiply_keys(scores, q_tile, key_tiles + (odd ^ 1) * KV_TILE);
        multiply_values(sums, weights, value_tiles + odd * KV_TILE);
        copies.load(value_tiles + (odd ^ 1) * KV_TILE, VALUES, page, key);
        copies.load(key_tiles + odd * KV_TILE, KEYS, next_page, key + BN);
        copy_commit();
        page = next_page, next_page = page_of(key + 2 * BN + AHEAD);
        wgmma_wait<1>();
        weigh(key);
        wgmma_wait<0>();
        settle(sums);
        shrink_sums(sums, shrink);
        round_weights(weights, scores);
    }
    copy_wait<0>();
    publish_to_products();
    __syncthreads();
    multiply_values(sums, weights, value_tiles + odd * KV_TILE);
    wgmma_wait<0>();
    settle(sums);
    softmax.finish();
    leave_rows(sums, softmax, {first_row, first, count, kv, total_rows}, m, scale, partial, y);
}
#endif
