// Causal attention with grouped heads over paged keys and values, in f32 arithmetic.
//
//   y[t, h] = sum_j softmax_j(scale q[t, h] . k[j, h / G]) v[j, h / G],  j <= position of t,  j > position - WINDOW
//
// q [T, H, D] (Q_STRIDE values from row to row), k and v [T, KV, D] (K_STRIDE, V_STRIDE), y [T, H, D];
// pools [pages, KV, 256, D] f32 or bf16; table [B, P]. kv_write puts the new rows into their pages first.
//
// Macros: H, KV, D (a multiple of 8, at most 256), Q_STRIDE, K_STRIDE, V_STRIDE (multiples of 4, 16-byte bases),
// KV_BF16 (0 or 1), WINDOW (0: none).
// Launch:
//   kv_write         grid T, block 128
//   attention        grid (ceil(T G / 16) + B, KV, splits), block 128, shared memory 4 (48 D + 688) bytes
//   attention_merge  grid (T, H), block 128; not needed with one split
// A block takes 16 pairs (row, head of the group) of one sequence against the keys of its split, 32 at a time.
// split_keys: keys of a split, a multiple of 256, so that splits * split_keys >= 256 P (a row's bits then depend on its
// own keys alone); 0: the keys that there are, cut evenly.
// partial: f32 [splits, T, H, D + 2]: sum of e^(s - m) v, then m, then sum of e^(s - m). Splits without keys write nothing.
//
// Bytes of decode: 2 KV D bytes_of(element) a key. Floor: those at the memory's rate.

#include "paged.cuh"

#ifndef WINDOW
#define WINDOW 0
#endif
#define G (H / KV)
#define BM 16
#define BN 32
#define QUADS (D / 4)

#if KV_BF16
typedef bf16 kv_t;
#else
typedef float kv_t;
#endif

struct __align__(16) Tiles {
    float q[BM][D];
    // Keys, then values. Four more columns keep the lanes of a warp, a row each, on different banks.
    float kv[BN][D + 4];
    float weights[BM][BN + 1];
    float factors[BM], totals[BM];
};

static __device__ __forceinline__ float4 load4(const float* p) { return *(const float4*)p; }
static __device__ __forceinline__ float4 load4(const bf16* p) {
    uint2 x = *(const uint2*)p;
    return make_float4(low_bf16(x.x), high_bf16(x.x), low_bf16(x.y), high_bf16(x.y));
}
static __device__ __forceinline__ void store4(float* p, float4 x) { *(float4*)p = x; }
static __device__ __forceinline__ void store4(bf16* p, float4 x) {
    *(uint2*)p = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
}

extern "C" __global__ void __launch_bounds__(128)
kv_write(const float* k, const float* v, kv_t* keys, kv_t* values, const u32* table, const u32* row_start,
         const u32* position, u32 sequences, u32 pages) {
    u32 t = blockIdx.x, b, row;
    if (!locate(row_start, sequences, 1, 1, t, b, row)) return;
    u32 at = position[b] + row, page = table[b * pages + at / PAGE];
    for (u32 i = threadIdx.x; i < KV * QUADS; i += 128) {
        u32 head = i / QUADS, d = i % QUADS * 4;
        u64 to = (((u64)page * KV + head) * PAGE + at % PAGE) * D + d;
        store4(keys + to, load4(k + (u64)t * K_STRIDE + head * D + d));
        store4(values + to, load4(v + (u64)t * V_STRIDE + head * D + d));
    }
}

/// y is written where there is one split, partial otherwise.
extern "C" __global__ void __launch_bounds__(128)
attention(const float* q, const kv_t* keys, const kv_t* values, const u32* table, const u32* row_start,
          const u32* position, u32 sequences, u32 pages, u32 total_rows, float scale, u32 split_keys, float* partial,
          float* y) {
    // Groups of rows for the products with V: as many as there are threads for all columns.
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
    if (!locate(row_start, sequences, G, BM, blockIdx.x, b, unit)) return;
    const u32 first_row = row_start[b], pairs = (row_start[b + 1] - first_row) * G, kv = blockIdx.y;
    const u32 first = unit * BM, count = min(pairs - first, BM), start = position[b];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    u32 from, to;
    split_range(start, start + pairs / G, WINDOW, blockIdx.z, gridDim.z, split_keys, from, to);
    visible_range(start + first / G, start + (first + count - 1) / G, WINDOW, from, to);
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
    // Of the four rows of this warp.
    float largest[4] = {-INF, -INF, -INF, -INF}, total[4] = {0.0f, 0.0f, 0.0f, 0.0f};

    for (u32 tile = from; tile < to; tile += BN) {
        // A tile never straddles a page.
        u64 base = (((u64)table[b * pages + tile / PAGE] * KV + kv) * PAGE + tile % PAGE) * D;
        u32 present = min(to - tile, BN);
        __syncthreads();
        for (u32 i = threadIdx.x; i < BN * QUADS; i += 128) {
            u32 n = i / QUADS, d = i % QUADS * 4;
            *(float4*)&kv_tile[n][d] = n < present ? load4(keys + base + n * D + d) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
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
            u32 m = warp * 4 + i, at = start + (first + m) / G, j = tile + lane;
            bool seen = m < count && j <= at && lane < present && (WINDOW == 0 || j + WINDOW > at);
            float s = seen ? score[i] : -INF;
            float now = fmaxf(largest[i], warp_max(s));
            // While a row has seen no key its largest is -inf, and so is every score.
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
            *(float4*)&kv_tile[n][d] = n < present ? load4(values + base + n * D + d) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
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
                float* out = partial + (((u64)blockIdx.z * total_rows + row) * H + head) * (D + 2) + D;
                out[0] = largest[i];
                out[1] = total[i];
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
            // Eight bytes are all that rows of D + 2 values are aligned to.
            float* out = partial + (((u64)blockIdx.z * total_rows + row) * H + head) * (D + 2) + column;
            *(float2*)out = make_float2(sums[r].x, sums[r].y);
            *(float2*)(out + 2) = make_float2(sums[r].z, sums[r].w);
        } else {
            float f = 1.0f / totals[m];
            store4(y + (row * H + head) * D + column,
                   make_float4(sums[r].x * f, sums[r].y * f, sums[r].z * f, sums[r].w * f));
        }
    }
}

/// Adds up the splits of a row and head.
extern "C" __global__ void __launch_bounds__(128)
attention_merge(const float* partial, const u32* row_start, const u32* position, u32 sequences, u32 total_rows,
                u32 splits, u32 split_keys, float* y) {
    constexpr int MANY = 128;
    __shared__ float weights[MANY];
    u32 t = blockIdx.x, head = blockIdx.y, b, row;
    if (!locate(row_start, sequences, 1, 1, t, b, row)) return;
    const u32 start = position[b], high = start + row_start[b + 1] - row_start[b], lane = threadIdx.x % 32;
    const u64 stride = (u64)total_rows * H * (D + 2);
    partial += ((u64)t * H + head) * (D + 2);
    float largest = -INF, total = 0.0f, sums[(D + 127) / 128];
#pragma unroll
    for (int i = 0; i < (D + 127) / 128; i++) sums[i] = 0.0f;
    for (u32 base = 0; base < splits; base += MANY) {
        u32 many = min(splits - base, MANY);
        // Every warp finds the largest for itself; it takes one round of loads.
        float m[MANY / 32], now = largest;
#pragma unroll
        for (int i = 0; i < MANY / 32; i++) {
            u32 s = i * 32 + lane, from, to;
            m[i] = -INF;
            if (s < many) {
                split_range(start, high, WINDOW, base + s, splits, split_keys, from, to);
                if (sees(start + row, WINDOW, from, to)) m[i] = partial[(base + s) * stride + D];
            }
            now = fmaxf(now, m[i]);
        }
        now = warp_max(now);
        float before = largest == -INF ? 0.0f : expf(largest - now), sum = 0.0f;
        u32 first = many, last = 0;
#pragma unroll
        for (int i = 0; i < MANY / 32; i++) {
            u32 s = i * 32 + lane;
            float weight = m[i] == -INF ? 0.0f : expf(m[i] - now);
            if (m[i] != -INF) sum += weight * partial[(base + s) * stride + D + 1];
            if (threadIdx.x < 32) weights[s] = weight;
            // Splits that this row sees lie side by side; the others were not written.
            u32 seen = __ballot_sync(FULL_WARP, m[i] != -INF);
            if (seen != 0) {
                if (first == many) first = i * 32 + __ffs(seen) - 1;
                last = i * 32 + 32 - __clz(seen);
            }
        }
        total = total * before + warp_sum(sum);
        largest = now;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < (D + 127) / 128; i++) {
            u32 d = i * 128 + threadIdx.x;
            float x = sums[i] * before;
            if (d < D) {
#pragma unroll 16
                for (u32 s = first; s < last; s++) x = fmaf(weights[s], partial[(base + s) * stride + d], x);
            }
            sums[i] = x;
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < (D + 127) / 128; i++) {
        u32 d = i * 128 + threadIdx.x;
        if (d < D) y[((u64)t * H + head) * D + d] = sums[i] / total;
    }
}
