// Causal attention with grouped heads over paged keys and values, in f32 arithmetic.
//
//   y[t, h] = sum_j softmax_j(scale q[t, h] . k[j, h / G]) v[j, h / G],  j <= position of t,  j > position - WINDOW
//
// With UNTIL, j <= max(position of t, until[t]), and j is before the end of the sequence: all rows are written before
// any row attends.
// Values are finite: a key that a row does not see has weight 0 in its tile, and 0 times NaN or infinity is NaN.
// q [T, H, D] (Q_STRIDE values from row to row), k and v [T, KV, D] (K_STRIDE, V_STRIDE), y [T, H, D];
// pools [pages, KV, 256, D] f32 or f16, or coded (kv_coded.cuh); table [B, P]. kv_write first puts the new rows into
// their pages.
//
// A window keeps only the pages that it needs and reuses them: positions more than the window apart may share a page.
// Prompts are therefore written and attended in runs that end at multiples of 64 positions, with one launch of kv_write
// and one of attention for each run (RUNS = 1, `run`).
//
// Macros: H, KV, D (a multiple of 16, at most 256), Q_STRIDE, K_STRIDE, V_STRIDE (multiples of 4, 16-byte bases),
// KV_F16 (0 or 1), KV_BITS (8 or 4 for coded pools, whose heads are multiples of 32; else 0), WINDOW (0: none),
// UNTIL (0 or 1; 1 needs one split and no runs), Y_HALF (1: y is f16 of an eighth, for a product in 8-bit floats; for
// prompts on tensor cores and attention_merge after them).
// Launch:
//   kv_write         grid T, or min(T, 64 B) with RUNS, block 128
//   attention        grid (ceil(T G / 16) + B, KV, splits), block 128, shared memory sizeof(Tiles)
//   attention_merge  grid (T, H), block 128, shared memory 4 splits bytes; not needed with one split
// A block computes 16 pairs (row, head of the group) of one sequence against the keys of its split, 32 keys at a time.
// by_position=1: splits are cut at fixed positions (split_start of paged.cuh); 256 P keys need `splits` of them. A
// row's bits then depend on its own keys alone. by_position=0: the existing keys are cut evenly.
// partial: splits T H (D + 2) floats, see paged.cuh. Splits without keys write nothing.
// EARLY=1 (attention_merge only): no kernel that may still run writes row_start and position, so they are read while
// earlier kernels finish.
//
// Bytes of decode: 2 KV D bytes_of(element) a key. Floor: those bytes at the memory's bandwidth.

#include "kept.cuh"
#include "paged.cuh"

#ifndef EARLY
#define EARLY 0
#endif
#define G (H / KV)
#define BM 16
#define BN 32
#define QUADS (D / 4)

struct __align__(16) Tiles {
    float q[BM][D];
    // Keys, then values. Four extra columns put the lanes of a warp, a row each, on different banks.
    float kv[BN][D + 4];
    float weights[BM][BN + 1];
    float factors[BM], totals[BM];
};

static __device__ __forceinline__ float4 load4(const float* p) { return *(const float4*)p; }
static __device__ __forceinline__ float4 load4(const f16* p) {
    uint2 x = *(const uint2*)p;
    return make_float4(low_f16(x.x), high_f16(x.x), low_f16(x.y), high_f16(x.y));
}
static __device__ __forceinline__ void store4(float* p, float4 x) { *(float4*)p = x; }
static __device__ __forceinline__ void store4(f16* p, float4 x) {
    *(uint2*)p = make_uint2(pack_f16(x.x, x.y), pack_f16(x.z, x.w));
}

extern "C" __global__ void __launch_bounds__(128)
kv_write(
#include "kv_write.params"
) {
    take_turn();
    u32 b, row;
    if (!locate(row_start, sequences, 1, 1, blockIdx.x, b, row, run, position)) return;
    const u32 t = rows_of(row_start, position, b, run).first + row;
    u32 at = position[b] + t - row_start[b], page = table[b * pages + at / PAGE];
#if KV_BITS
    // A warp encodes one group of a key or of a value. Values of several groups are under way together.
    constexpr u32 HALF = KV * GROUPS_OF_ROW, TOGETHER = 4;
    for (u32 first = threadIdx.x / 32; first < 2 * HALF; first += 4 * TOGETHER) {
        float x[TOGETHER];
#pragma unroll
        for (u32 n = 0; n < TOGETHER; n++) {
            const u32 i = first + 4 * n, d = i % HALF * 32 + threadIdx.x % 32;
            x[n] = i < HALF ? k[(u64)t * K_STRIDE + d] : i < 2 * HALF ? v[(u64)t * V_STRIDE + d] : 0.0f;
        }
#pragma unroll
        for (u32 n = 0; n < TOGETHER; n++) {
            const u32 i = first + 4 * n, head = i % HALF / GROUPS_OF_ROW;
            if (i < 2 * HALF) store_group((i < HALF ? keys : values) + head_page(page, head), at % PAGE, i % GROUPS_OF_ROW, x[n]);
        }
    }
    return;
#else
    for (u32 i = threadIdx.x; i < KV * QUADS; i += 128) {
        u32 head = i / QUADS, d = i % QUADS * 4;
        u64 to = (((u64)page * KV + head) * PAGE + at % PAGE) * D + d;
        store4(keys + to, load4(k + (u64)t * K_STRIDE + head * D + d));
        store4(values + to, load4(v + (u64)t * V_STRIDE + head * D + d));
    }
#endif
}

/// Values d .. d + 3 of token `token` of a page of a pool.
static __device__ __forceinline__ float4 kept4(const kv_t* pool, u32 page, u32 head, u32 token, u32 d) {
#if KV_BITS
    return coded4(pool + head_page(page, head), token, d);
#else
    return load4(pool + (((u64)page * KV + head) * PAGE + token) * D + d);
#endif
}

/// Writes y if there is one split, else partial.
extern "C" __global__ void __launch_bounds__(128)
attention(
#include "attend.params"
) {
    take_turn();
    // Row groups for the products with V: as many as 128 threads allow, with QUADS threads for all columns of a group.
    constexpr int ROW_GROUPS = 128 / QUADS >= 16 ? 16 : 128 / QUADS >= 8 ? 8 : 128 / QUADS >= 4 ? 4 : 128 / QUADS >= 2 ? 2 : 1;
    constexpr int ROWS = BM / ROW_GROUPS;
    DYNAMIC_SHARED(char, shared);
    Tiles& tiles = *(Tiles*)shared;
    auto& q_tile = tiles.q;
    auto& kv_tile = tiles.kv;
    auto& weights = tiles.weights;
    auto& factors = tiles.factors;
    auto& totals = tiles.totals;

    u32 b, unit;
    if (!locate(row_start, sequences, G, BM, blockIdx.x, b, unit, run, position)) return;
    const SequenceRows rows = rows_of(row_start, position, b, run);
    const u32 first_row = rows.first, pairs = rows.count * G, kv = blockIdx.y;
    const u32 first = unit * BM, count = min(pairs - first, BM), start = position[b] + first_row - row_start[b];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    u32 from, to;
    split_range(start, start + pairs / G, WINDOW, blockIdx.z, gridDim.z, by_position, from, to);
    u32 last_seen = start + (first + count - 1) / G;
#if UNTIL
    for (u32 row = first / G; row <= (first + count - 1) / G; row++) last_seen = max(last_seen, until[first_row + row]);
    // No row sees beyond the last position.
    last_seen = min(last_seen, start + pairs / G - 1);
#endif
    visible_range(start + first / G, last_seen, WINDOW, from, to);
    if (from >= to) return;

    for (u32 i = threadIdx.x; i < BM * QUADS; i += 128) {
        u32 m = i / QUADS, d = i % QUADS * 4;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (m < count) x = load4(q + (u64)(first_row + (first + m) / G) * Q_STRIDE + (kv * G + (first + m) % G) * D + d);
        *(float4*)&q_tile[m][d] = make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
    }

    const u32 row_group = threadIdx.x / QUADS, column = threadIdx.x % QUADS * 4;
    const bool has_columns = row_group < ROW_GROUPS;
    float4 sums[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    // Greatest scores and sums of the four rows of this warp.
    float largest[4] = {-INF, -INF, -INF, -INF}, total[4] = {0.0f, 0.0f, 0.0f, 0.0f};

    for (u32 tile = from; tile < to; tile += BN) {
        // A tile never straddles a page.
        const u32 page = table[b * pages + tile / PAGE], token = tile % PAGE;
        u32 present = min(to - tile, BN);
        __syncthreads();
        for (u32 i = threadIdx.x; i < BN * QUADS; i += 128) {
            u32 n = i / QUADS, d = i % QUADS * 4;
            *(float4*)&kv_tile[n][d] = n < present ? kept4(keys, page, kv, token + n, d) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        __syncthreads();
        float score[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
        for (int d = 0; d < D; d += 4) {
            float4 k = *(const float4*)&kv_tile[lane][d];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float4 x = *(const float4*)&q_tile[warp * 4 + i][d];
                score[i] = fmaf(x.x, k.x, fmaf(x.y, k.y, fmaf(x.z, k.z, fmaf(x.w, k.w, score[i]))));
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 m = warp * 4 + i, at = start + (first + m) / G, j = tile + lane, last = at;
#if UNTIL
            if (m < count) last = max(at, until[first_row + (first + m) / G]);
#endif
            bool seen = m < count && j <= last && lane < present && (WINDOW == 0 || j + WINDOW > at);
            float s = seen ? score[i] : -INF;
            float now = fmaxf(largest[i], warp_max(s));
            // Until a row has seen a key, its greatest score and all its scores are -inf.
            float factor = now == -INF ? 1.0f : expf(largest[i] - now);
            float weight = seen ? expf(s - now) : 0.0f;
            total[i] = total[i] * factor + warp_sum(weight);
            largest[i] = now;
            weights[m][lane] = weight;
            if (lane == 0) factors[m] = factor;
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < BN * QUADS; i += 128) {
            u32 n = i / QUADS, d = i % QUADS * 4;
            *(float4*)&kv_tile[n][d] = n < present ? kept4(values, page, kv, token + n, d) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        __syncthreads();
        if (has_columns) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float f = factors[row_group * ROWS + r];
                sums[r] = make_float4(sums[r].x * f, sums[r].y * f, sums[r].z * f, sums[r].w * f);
            }
#pragma unroll 4
            for (int n = 0; n < BN; n++) {
                float4 x = *(const float4*)&kv_tile[n][column];
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    float w = weights[row_group * ROWS + r][n];
                    sums[r] = make_float4(fmaf(w, x.x, sums[r].x), fmaf(w, x.y, sums[r].y), fmaf(w, x.z, sums[r].z),
                                          fmaf(w, x.w, sums[r].w));
                }
            }
        }
    }

    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 m = warp * 4 + i;
            totals[m] = total[i];
            if (gridDim.z > 1 && m < count) {
                u64 row = first_row + (first + m) / G, head = kv * G + (first + m) % G;
                *split_scale(partial, gridDim.z, total_rows, blockIdx.z, row, head) = make_float2(largest[i], total[i]);
            }
        }
    }
    __syncthreads();
    if (!has_columns) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        u32 m = row_group * ROWS + r;
        if (m >= count) continue;
        u64 row = first_row + (first + m) / G, head = kv * G + (first + m) % G;
        if (gridDim.z > 1) {
            store4(split_sums(partial, total_rows, blockIdx.z, row, head) + column, sums[r]);
        } else {
            float f = 1.0f / totals[m];
            store4(y + (row * H + head) * D + column,
                   make_float4(sums[r].x * f, sums[r].y * f, sums[r].z * f, sums[r].w * f));
        }
    }
}

/// Adds up the splits of a row and head. A thread has four columns; D / 4 threads have a row, and 128 / (D / 4) such
/// sets share the splits.
extern "C" __global__ void __launch_bounds__(128)
attention_merge(
#include "attention_merge.params"
) {
    let_next_start();
    if (!EARLY) wait_for_inputs();
    // Each set of D / 4 threads takes some of the splits.
    constexpr int SETS = 128 / QUADS;
    DYNAMIC_SHARED(float, weights);
    __shared__ __align__(16) float4 parts[128];
    u32 t = blockIdx.x, head = blockIdx.y, b = 0, row = 0;
    const bool located = locate(row_start, sequences, 1, 1, t, b, row);
    const u32 start = located ? position[b] : 0, high = located ? start + row_start[b + 1] - row_start[b] : 0, lane = threadIdx.x % 32;
    // The splits that a row sees are consecutive; the others were not written.
    u32 begin = splits, end = 0;
    for (u32 s = lane; located && s < splits; s += 32) {
        u32 from, to;
        split_range(start, high, WINDOW, s, splits, by_position, from, to);
        if (!sees(start + row, WINDOW, from, to)) continue;
        begin = min(begin, s);
        end = s + 1;
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        begin = min(begin, __shfl_xor_sync(FULL_WARP, begin, d));
        end = max(end, __shfl_xor_sync(FULL_WARP, end, d));
    }
    if (EARLY) wait_for_inputs();
    if (!located) return;
    // Loads of several splits are under way together. The first ones overlap with the computation of their weights.
    const u32 set = threadIdx.x / QUADS, column = threadIdx.x % QUADS * 4;
    const float* in = split_sums(partial, total_rows, 0, t, head) + column;
    const u64 stride = (u64)total_rows * (H * D);
    float4 part[16];
    auto load = [&](u32 first) {
#pragma unroll
        for (u32 j = 0; j < 16; j++) {
            const bool there = set < SETS && first + j * SETS < end;
            part[j] = there ? load4(in + (first + j * SETS) * stride) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    };
    load(begin + set);
    float largest = -INF, total = 0.0f;
    for (u32 s = begin + lane; s < end; s += 32) {
        // Every warp computes the total itself, in the same order; the first warp stores the weights.
        float2 x = *split_scale(partial, splits, total_rows, s, t, head);
        float now = fmaxf(largest, x.x);
        total = total * (largest == -INF ? 0.0f : expf(largest - now)) + x.y * (x.x == -INF ? 0.0f : expf(x.x - now));
        largest = now;
        if (threadIdx.x < 32) weights[s] = x.x;
    }
    float now = warp_max(largest);
    total = warp_sum(largest == -INF ? 0.0f : total * expf(largest - now));
    // A lane reads only weights that it wrote itself.
    for (u32 s = begin + threadIdx.x; s < end && threadIdx.x < 32; s += 32) weights[s] = expf(weights[s] - now);
    __syncthreads();
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (u32 s = begin + set; set < SETS && s < end; s += 16 * SETS) {
        if (s != begin + set) load(s);
#pragma unroll
        for (int j = 0; j < 16; j++) {
            float weight = s + j * SETS < end ? weights[s + j * SETS] : 0.0f;
            sum = make_float4(fmaf(weight, part[j].x, sum.x), fmaf(weight, part[j].y, sum.y),
                              fmaf(weight, part[j].z, sum.z), fmaf(weight, part[j].w, sum.w));
        }
    }
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= QUADS) return;
#pragma unroll
    for (int i = 1; i < SETS; i++) {
        float4 other = parts[i * QUADS + threadIdx.x];
        sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
    }
    float f = (Y_HALF ? 0.125f : 1.0f) / total;
    if (Y_HALF) {
        *(uint2*)((u16*)y + ((u64)t * H + head) * D + column) = make_uint2(pack_f16(sum.x * f, sum.y * f), pack_f16(sum.z * f, sum.w * f));
        return;
    }
    store4(y + ((u64)t * H + head) * D + column, make_float4(sum.x * f, sum.y * f, sum.z * f, sum.w * f));
}
