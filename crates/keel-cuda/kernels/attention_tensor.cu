// Causal attention with grouped heads over paged keys and values, f16 or coded (kv_coded.cuh), on tensor cores: the
// fast mode of attention.cu, with the same formula, operands, splits and merge kernel. Products take f16 and add up in
// f32; q and the softmax's weights are rounded to f16, everything else is f32. Values are finite, as in attention.cu.
//
// Macros: H, KV, D (a multiple of 16, at most 256), Q_STRIDE, KV_BITS (8 or 4 for coded pools), WINDOW, of the prefill
// kernel UNTIL. Of the decode kernel:
//   WARPS      8; 4 if shared memory is short
//   KV_STAGES  chunks of keys and of values that a warp has under way, 1 or 2
//   EARLY=1    no kernel that may still run writes earlier steps' keys and values, row_start, position or table.
//              They are fetched while earlier kernels finish. Each sequence is then one unit.
// Launch:
//   attention_prefill  grid (KV, ceil(T G / 64) + B, splits), block 128, shared memory PREFILL_SHARED.
//                      A block computes 64 pairs (row, head of the group) against 64 keys at a time, a warp 16 of the
//                      pairs. Keys arrive while the last tile's values are multiplied, and vice versa. Long blocks
//                      start first.
//   attention_decode   grid (units, KV, splits), block 32 WARPS, shared memory DECODE_SHARED.
//                      A block computes 16 pairs, each of its warps against 16 keys at a time.
//                      units = B if all rows together have at most 16 pairs, else ceil(T G / 16) + B.
//
// Floor of prefill: 4 D H T^2 / 2 operations at the tensor cores' rate; of decode: 4 KV D bytes a key,
// coded 2 KV D (KV_BITS / 8 + 1 / 16).

#include "decode_chunk.cuh"

#define BM 64
#define BN 64
#define PREFILL_SHARED ((BM + 2 * BN) * LINE * 2)
// Queries and chunks; then each warp's sums, greatest scores and totals in their place.
#define DECODE_TILES (2 * 16 * LINE + WARPS * KV_STAGES * 2 * CHUNK_BYTES)
#define DECODE_SUMS (WARPS * 16 * (D + 2) * 4)
#define DECODE_SHARED (DECODE_TILES > DECODE_SUMS ? DECODE_TILES : DECODE_SUMS)

extern "C" __global__ void __launch_bounds__(128)
attention_prefill(
#include "attend.params"
) {
    take_turn();
    DYNAMIC_SHARED(f16, shared);
    f16 *q_tile = shared, *key_tile = shared + BM * LINE, *value_tile = shared + (BM + BN) * LINE;

    u32 b, unit;
    if (!locate(row_start, sequences, G, BM, gridDim.y - 1 - blockIdx.y, b, unit, run, position)) return;
    const SequenceRows rows = rows_of(row_start, position, b, run);
    const u32 first_row = rows.first, pairs = rows.count * G, kv = blockIdx.x;
    const u32 first = unit * BM, count = min(pairs - first, BM), start = position[b] + first_row - row_start[b];
    const u32 warp = threadIdx.x / 32, last_position = start + (first + count - 1) / G;
#if UNTIL
    const Until limits = {until + first_row, rows.count};
#else
    const Until limits = {};
#endif
    const uint2 last = last_seen(limits, start, first, count);
    u32 from, to;
    split_range(start, start + pairs / G, WINDOW, blockIdx.z, gridDim.z, by_position, from, to);
    visible_range(start + first / G, last.y, WINDOW, from, to);
    if (from >= to) return;

    auto load = [&](f16* tile, const kv_t* pool, u32 key) {
        // A tile never straddles a page. Absent rows become zeros, because memory may hold NaN.
        const u32 page = table[b * pages + key / PAGE];
        for (u32 i = threadIdx.x; i < BN * (D / 8); i += 128) {
            u32 n = i / (D / 8), d = i % (D / 8) * 8;
            fetch8(tile + n * LINE + d, pool, page, kv, key % PAGE + n, d, key + n < to);
        }
    };
    load(key_tile, keys, from);
    copy_commit();
    load_queries(q_tile, q + (u64)first_row * Q_STRIDE + kv * G * D, first, count, BM, 128, [](f16* line, u32 d, float4 x) {
        *(uint2*)(line + d) = make_uint2(pack_f16(x.x, x.y), pack_f16(x.z, x.w));
    });

    Softmax softmax;
    softmax.start();
    float sums[D / 8][4];
#pragma unroll
    for (int n = 0; n < D / 8; n++) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;

    const float factor = scale * 1.4426950408889634f;
    for (u32 tile = from; tile < to; tile += BN) {
        load(value_tile, values, tile);
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        float scores[BN / 8][4];
        multiply_keys<BN / 8, 1>(scores, q_tile, warp * 16, key_tile);
        __syncthreads();
        if (tile + BN < to) load(key_tile, keys, tile + BN);
        copy_commit();
        if (tile + BN > last.x + 1 || tile + BN > to || (WINDOW > 0 && tile + WINDOW <= last_position))
            hide<BN / 8>(scores, start, first + warp * 16, tile, to, limits);
        float shrink[2];
        softmax.weigh<BN / 8>(scores, factor, shrink);
        shrink_sums(sums, shrink);
        copy_wait<1>();
        __syncthreads();
        multiply_values<BN / 8>(sums, scores, value_tile);
        __syncthreads();
    }
    softmax.finish();
    leave_rows(sums, softmax, {first_row, first, count, kv, total_rows}, warp * 16, scale, partial, y);
}

/// Attends to the keys of one split for 16 pairs of a sequence from pair `first` on.
static __device__ __forceinline__ void attend_split(u8* shared, const float* q, const kv_t* keys, const kv_t* values,
                                                    const u32* my_table, u32 first_row, u32 first, u32 count, u32 start, u32 kv,
                                                    u32 from, u32 to, u32 total_rows, float scale, float* partial, float* y) {
    const u32 first_position = start + first / G, last_position = start + (first + count - 1) / G;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    f16* q_tile = (f16*)shared;
    u8* chunks = shared + 2 * 16 * LINE + warp * (KV_STAGES * 2 * CHUNK_BYTES);
    auto key_chunk = [&](u32 stage) { return chunks + stage * (2 * CHUNK_BYTES); };
    auto value_chunk = [&](u32 stage) { return chunks + (stage * 2 + 1) * CHUNK_BYTES; };

    auto load = [&](u8* chunk, const kv_t* pool, u32 key, bool now = true) {
        if (key < to && now) fetch_chunk(chunk, pool, my_table[key / PAGE], kv, key % PAGE, to - key);
        copy_commit();
    };
    // A warp's next keys arrive while it works on the last values, and vice versa. Which warp takes a key depends on
    // the key's position alone.
    const u32 step = WARPS * CHUNK, mine = from + (warp * CHUNK + step - from % step) % step;
    auto is_old = [&](u32 key) { return !EARLY || key + CHUNK <= start; };
#pragma unroll
    for (u32 s = 0; s < KV_STAGES; s++) {
        load(key_chunk(s), keys, mine + s * step, is_old(mine + s * step));
        load(value_chunk(s), values, mine + s * step, is_old(mine + s * step));
    }
    if (EARLY) {
        wait_for_inputs();
        bool late = false;
#pragma unroll
        for (u32 s = 0; s < KV_STAGES; s++) {
            if (mine + s * step >= to || is_old(mine + s * step)) continue;
            late = true;
            load(key_chunk(s), keys, mine + s * step);
            load(value_chunk(s), values, mine + s * step);
        }
        if (late) copy_wait<0>();
    }
    load_queries(q_tile, q + (u64)first_row * Q_STRIDE + kv * G * D, first, count, 16, 32 * WARPS, put_query);
    __syncthreads();

    Softmax softmax;
    softmax.start();
    float sums[D / 8][4];
#pragma unroll
    for (int n = 0; n < D / 8; n++) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
    const float factor = scale * 1.4426950408889634f;
    u32 stage = 0;
    for (u32 key = mine; key < to; key += step) {
        copy_wait<2 * KV_STAGES - 1>();
        __syncwarp();
        float scores[2][4];
        multiply_chunk_keys(scores, q_tile, key_chunk(stage));
        __syncwarp();
        load(key_chunk(stage), keys, key + KV_STAGES * step);
        if (key + CHUNK > first_position + 1 || key + CHUNK > to || (WINDOW > 0 && key + WINDOW <= last_position))
            hide<2>(scores, start, first, key, to, Until{});
        float shrink[2];
        softmax.weigh<2>(scores, factor, shrink);
        shrink_sums(sums, shrink);
        copy_wait<2 * KV_STAGES - 1>();
        __syncwarp();
        multiply_chunk_values(sums, scores, value_chunk(stage));
        __syncwarp();
        load(value_chunk(stage), values, key + KV_STAGES * step);
        if (++stage == KV_STAGES) stage = 0;
    }
    softmax.finish();

    // The warps attended to different keys for the same pairs. Their sums replace the tiles in shared memory.
    copy_wait<0>();
    __syncthreads();
    float *warp_sums = (float*)shared, *warp_largest = warp_sums + WARPS * 16 * D, *warp_total = warp_largest + WARPS * 16;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 m = lane / 4 + 8 * half;
        if (m >= count) continue;
        put_sums(warp_sums + (warp * 16 + m) * D, sums, half);
        if (lane % 4 == 0) {
            warp_largest[warp * 16 + m] = softmax.largest[half] * scale;
            warp_total[warp * 16 + m] = softmax.total[half];
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < count * (D / 2); i += 32 * WARPS) {
        u32 m = i / (D / 2), d = i % (D / 2) * 2;
        const Combined all = combine_warps<16>(warp_sums, warp_largest, warp_total, m, d);
        u64 row = first_row + (first + m) / G, head = kv * G + (first + m) % G;
        if (gridDim.z > 1) {
            *(float2*)(split_sums(partial, total_rows, blockIdx.z, row, head) + d) = all.sum;
            if (d == 0)
                *split_scale(partial, gridDim.z, total_rows, blockIdx.z, row, head) = make_float2(all.largest, all.total);
        } else {
            // The sums are divided by the total here, because attention_merge does not run.
            const float f = 1.0f / all.total;
            *(float2*)(y + (row * H + head) * D + d) = make_float2(all.sum.x * f, all.sum.y * f);
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
attention_decode(
#include "attend.params"
) {
    let_next_start();
    if (!EARLY) wait_for_inputs();
    DYNAMIC_SHARED(f16, shared);
    u32 b = blockIdx.x, unit = 0;
    if (gridDim.x != sequences && !locate(row_start, sequences, G, 16, blockIdx.x, b, unit)) return;
    const u32 first_row = row_start[b], pairs = (row_start[b + 1] - first_row) * G, start = position[b], kv = blockIdx.y;
    if (pairs == 0) {
        if (EARLY) wait_for_inputs();
        return;
    }
    const u32 first = unit * 16, count = min(pairs - first, 16), high = start + pairs / G;
    u32 from, to;
    split_range(start, high, WINDOW, blockIdx.z, gridDim.z, by_position, from, to);
    visible_range(start + first / G, start + (first + count - 1) / G, WINDOW, from, to);
    if (from >= to) {
        if (EARLY) wait_for_inputs();
    } else {
        attend_split((u8*)shared, q, keys, values, table + b * pages, first_row, first, count, start, kv, from, to, total_rows, scale,
                     partial, y);
    }
}
