// attention_prefill of attention_tensor.cu with Hopper's matrix instructions. Formula, operands and roundings are the
// same; pages are f16 or coded, without a window.
//
// A block has 128 pairs of row and head, 64 for each of its two warpgroups, against BN keys at a time. While the tensor
// cores multiply one tile's weights by its values, the scores of the next tile are turned into weights. Copies run one
// tile further ahead. Shared memory holds two tiles of keys and two of values, in the panels of wgmma.cuh.
//
// Macros: H, KV, D (64, 128, 256), Q_STRIDE, KV_F16, KV_BITS, WINDOW=0, UNTIL, BN (64 where D = 256, else 128), SPLIT_STEP=BN.
// Launch: grid (KV, ceil(T G / 128) + B, splits), block 256, shared memory 1024 + 2 (128 + 4 BN) D bytes and
// 2 BN D KV_BITS / 8. Long blocks start first.
//
// Floor: 4 D H T^2 / 2 operations at the tensor cores' rate.

#include "kept.cuh"
#include "wgmma.cuh"

#define G (H / KV)
#define BM 128
#include "softmax.cuh"

#define PANELS (D / 64)
#define Q_PANEL (BM * 128)
#define KV_PANEL (BN * 128)
#define KV_TILE (PANELS * KV_PANEL)

#if __CUDA_ARCH_FEAT_SM90_ALL
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

    // Each thread copies the same 16 bytes of every ROW_STEP-th row of a tile. ROW_STEP is a multiple of 8, so these
    // rows are swizzled alike. Splits begin at multiples of BN, so a tile never straddles a page. Absent rows become
    // zeros, because memory may hold NaN.
    constexpr u32 ROW_STEP = 256 / (D / 8);
    const u32 row = threadIdx.x / (D / 8), chunk = threadIdx.x % (D / 8);
    const u32 place = chunk / 8 * KV_PANEL + panel_offset(row, chunk % 8);
    auto page_of = [&](u32 key) { return table[b * pages + min(key, to - 1) / PAGE]; };
#if KV_BITS
    constexpr u32 PIECES = BN / ROW_STEP;
    const u32 key_codes = value_tiles + 2 * KV_TILE + threadIdx.x * KV_BITS, value_codes = key_codes + PIECES * 256 * KV_BITS;
    u32 key_steps[PIECES], value_steps[PIECES];
    auto fetch = [&](u32 codes, u32 (&steps)[PIECES], const u8* pool, u32 page, u32 key) {
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
    };
    // Fills a tile from codes that have arrived, and copies those of the next tile of the pool, which are in `page`.
    auto load = [&](u32 tile, u32 codes, u32 (&steps)[PIECES], const u8* pool, u32 page, u32 key) {
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
    };
#define KEYS key_codes, key_steps, keys
#define VALUES value_codes, value_steps, values
#define AHEAD BN
#else
    auto load = [&](u32 tile, const f16* pool, u32 page, u32 key) {
        if (key >= to) return;
        const f16* rows = pool + (((u64)page * KV + kv) * PAGE + key % PAGE + row) * D + chunk * 8;
#pragma unroll
        for (u32 i = 0; i < BN; i += ROW_STEP)
            copy_async_to(tile + place + i * 128, rows + i * D, key + row + i < to);
    };
#define KEYS keys
#define VALUES values
#define AHEAD 0
#endif
    const u32 first_page = page_of(from);
    // Pages of the tile that is copied next and of the one after it; each is read a tile ahead.
    u32 page = page_of(from + BN + AHEAD), next_page = page_of(from + 2 * BN + AHEAD);
#if KV_BITS
    const u32 second_page = page_of(from + BN);
    fetch(KEYS, first_page, from);
    fetch(VALUES, first_page, from);
#else
    load(key_tiles, KEYS, first_page, from);
    copy_commit();
    load(value_tiles, VALUES, first_page, from);
    load(key_tiles + KV_TILE, KEYS, page, from + BN);
#endif
    copy_commit();

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

    const u32 group = threadIdx.x / 128, m = threadIdx.x / 32 * 16;
    float scores[BN / 8][4], sums[D / 8][4] = {};
    auto multiply_keys = [&](u32 tile) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; k++)
            wgmma(scores, panel_of_rows(q_tile + k / 4 * Q_PANEL + group * (64 * 128)) + k % 4 * 2,
                  panel_of_rows(tile + k / 4 * KV_PANEL) + k % 4 * 2, k > 0);
        wgmma_commit();
    };
    u32 weights[BN / 16][4];
    auto multiply_values = [&](u32 tile) {
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
    };
    Softmax softmax;
    softmax.start();
    const float factor = scale * 1.4426950408889634f;
    float shrink[2];
    auto weigh = [&](u32 key) {
        settle(scores);
        if (key + BN > last.x + 1) hide<BN / 8>(scores, start, first + m, key, to, limits);
        softmax.weigh<BN / 8>(scores, factor, shrink);
    };
    auto round_weights = [&] {
#pragma unroll
        for (int k = 0; k < BN / 16; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                weights[k][i] = pack_f16(scores[2 * k + i / 2][i % 2 * 2], scores[2 * k + i / 2][i % 2 * 2 + 1]);
    };

#if KV_BITS
    copy_wait<0>();
    load(key_tiles, KEYS, second_page, from);
    load(value_tiles, VALUES, second_page, from);
    copy_commit();
#else
    copy_wait<1>();
#endif
    publish_to_products();
    __syncthreads();
    multiply_keys(key_tiles);
#if KV_BITS
    copy_wait<0>();
    load(key_tiles + KV_TILE, KEYS, page, from + BN);
    copy_commit();
#endif
    wgmma_wait<0>();
    weigh(from);
    round_weights();
    u32 odd = 0;
#pragma unroll 1
    for (u32 key = from + BN; key < to; key += BN, odd ^= 1) {
        copy_wait<0>();
        publish_to_products();
        // The keys of this tile and the values of the one before have arrived, and all warps are done with earlier
        // tiles.
        __syncthreads();
        multiply_keys(key_tiles + (odd ^ 1) * KV_TILE);
        multiply_values(value_tiles + odd * KV_TILE);
        load(value_tiles + (odd ^ 1) * KV_TILE, VALUES, page, key);
        load(key_tiles + odd * KV_TILE, KEYS, next_page, key + BN);
        copy_commit();
        page = next_page, next_page = page_of(key + 2 * BN + AHEAD);
        wgmma_wait<1>();
        weigh(key);
        wgmma_wait<0>();
        settle(sums);
        shrink_sums(sums, shrink);
        round_weights();
    }
    copy_wait<0>();
    publish_to_products();
    __syncthreads();
    multiply_values(value_tiles + odd * KV_TILE);
    wgmma_wait<0>();
    settle(sums);
    softmax.finish();
    leave_rows(sums, softmax, {first_row, first, count, kv, total_rows}, m, scale, partial, y);
}
#endif
