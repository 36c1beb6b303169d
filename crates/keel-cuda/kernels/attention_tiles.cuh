// Tiles of queries, keys and values in shared memory, and their products on tensor cores. The kernels of
// attention_tensor.cu and attention_decode_persistent.cu share them. Macros: H, KV, D (a multiple of 16, at most 256),
// Q_STRIDE, KV_BITS (8 or 4 for coded pools), WINDOW.
#pragma once
#include "paged.cuh"

#if KV_BITS
#include "kv_coded.cuh"
typedef u8 kv_t;
#else
typedef f16 kv_t;
#endif
#define G (H / KV)
// A row of a tile in shared memory: 16 extra bytes put eight rows on different banks.
#define LINE (D + 8)
#define STEPS (D / 16)
#include "softmax.cuh"

/// Copies values d .. d + 7 of token `token` of a page to a tile; writes zeros if it is not `there`.
static __device__ __forceinline__ void fetch8(f16* to, const kv_t* pool, u32 page, u32 head, u32 token, u32 d, bool there) {
#if KV_BITS
    *(uint4*)to = there ? coded8(pool + head_page(page, head), token, d) : make_uint4(0, 0, 0, 0);
#else
    copy_async(to, pool + (((u64)page * KV + head) * PAGE + token) * D + d, there);
#endif
}

/// Copies `count` pairs of q from `first` on, as f16; rows without a pair are zero. Pair i is row i / G and head i % G.
/// `put` stores columns d .. d + 3 of a row.
template <typename Put>
static __device__ __forceinline__ void load_queries(f16* tile, const float* q, u32 first, u32 count, u32 rows,
                                                    u32 threads, Put put) {
    for (u32 i = threadIdx.x; i < rows * (D / 4); i += threads) {
        u32 m = i / (D / 4), d = i % (D / 4) * 4;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (m < count) x = *(const float4*)(q + (u64)((first + m) / G) * Q_STRIDE + (first + m) % G * D + d);
        put(tile + m * LINE, d, x);
    }
}

/// scores = 16 rows of q times TILES * 8 keys. A product waits for the one before it. With few tiles, CHAINS sums
/// therefore run at the same time, each over every CHAINS-th step of 16 columns of q.
template <int TILES, int CHAINS>
static __device__ __forceinline__ void multiply_keys(float (&scores)[TILES][4], const f16* q, u32 row, const f16* keys) {
    float sums[CHAINS][TILES][4];
#pragma unroll
    for (int n = 0; n < CHAINS * TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[n / TILES][n % TILES][i] = 0.0f;
    }
#pragma unroll 4
    for (int k = 0; k < STEPS; k++) {
        u32 a[4];
        load_matrices(a, row_major<LINE>(q, row, k * 16));
#pragma unroll
        for (int n = 0; n < TILES; n += 2) {
            u32 x[4];
            load_matrices(x, column_major<LINE>(keys, n * 8, k * 16));
            mma_f16(sums[k % CHAINS][n], a, x[0], x[1]);
            mma_f16(sums[k % CHAINS][n + 1], a, x[2], x[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            scores[n][i] = sums[0][n][i];
#pragma unroll
            for (int c = 1; c < CHAINS; c++) scores[n][i] += sums[c][n][i];
        }
    }
}

/// sums += weights of TILES * 8 keys times their values.
template <int TILES>
static __device__ __forceinline__ void multiply_values(float (&sums)[D / 8][4], const float (&weights)[TILES][4],
                                                       const f16* values) {
#pragma unroll
    for (int k = 0; k < TILES / 2; k++) {
        u32 a[4] = {pack_f16(weights[2 * k][0], weights[2 * k][1]), pack_f16(weights[2 * k][2], weights[2 * k][3]),
                    pack_f16(weights[2 * k + 1][0], weights[2 * k + 1][1]),
                    pack_f16(weights[2 * k + 1][2], weights[2 * k + 1][3])};
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            u32 x[4];
            load_matrices_transposed(x, row_major<LINE>(values, k * 16, n * 8));
            mma_f16(sums[n], a, x[0], x[1]);
            mma_f16(sums[n + 1], a, x[2], x[3]);
        }
    }
}
