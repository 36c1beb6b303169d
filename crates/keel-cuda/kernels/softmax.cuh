// The softmax of attention on tensor cores, over scores in the fragments of a product: a warp has 16 pairs of row and head, a lane
// two of them (lane / 4 and 8 on) and two of every 8 keys. Macros: G (heads of a group), WINDOW.
#pragma once
#include "ptx.cuh"

/// What a thread knows of two of its warp's 16 pairs (rows lane / 4 and 8 on) while keys go by.
struct Softmax {
    float largest[2], total[2];

    __device__ __forceinline__ void start() {
        largest[0] = largest[1] = -INF;
        total[0] = total[1] = 0.0f;
    }

    /// Turns scores of TILES * 8 keys into weights; what was summed up before is to shrink by `shrink`, since the greatest score grew.
    template <int TILES>
    __device__ __forceinline__ void weigh(float (&scores)[TILES][4], float factor, float (&shrink)[2]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float now = largest[half];
#pragma unroll
            for (int n = 0; n < TILES; n++) now = fmaxf(now, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            now = fmaxf(now, __shfl_xor_sync(FULL_WARP, now, 1));
            now = fmaxf(now, __shfl_xor_sync(FULL_WARP, now, 2));
            // A row that has seen no key has only scores of -inf; its base is 0 so that their weights become 0.
            float base = now == -INF ? 0.0f : now * factor;
            shrink[half] = exp2_flushed(largest[half] * factor - base);
            largest[half] = now;
            total[half] *= shrink[half];
#pragma unroll
            for (int n = 0; n < TILES; n++) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    scores[n][i] = exp2_flushed(fmaf(scores[n][i], factor, -base));
                    total[half] += scores[n][i];
                }
            }
        }
    }

    /// Adds up what the four threads of a row have.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            total[half] += __shfl_xor_sync(FULL_WARP, total[half], 1);
            total[half] += __shfl_xor_sync(FULL_WARP, total[half], 2);
        }
    }
};

/// sums *= shrink, row by row.
template <int TILES> static __device__ __forceinline__ void shrink_sums(float (&sums)[TILES][4], const float (&shrink)[2]) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[n][i] *= shrink[i / 2];
    }
}

/// Scores that a row may not see become -inf. Rows are pairs `pair` + lane / 4 and 8 on, keys `key` and on.
template <int TILES>
static __device__ __forceinline__ void hide(float (&scores)[TILES][4], u32 start, u32 pair, u32 key, u32 to) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 at = start + (pair + lane / 4 + 8 * half) / G, end = min(at + 1, to);
        u32 begin = WINDOW > 0 && at + 1 > WINDOW ? at + 1 - WINDOW : 0;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                u32 j = key + n * 8 + lane % 4 * 2 + i;
                if (j >= end || j < begin) scores[n][2 * half + i] = -INF;
            }
        }
    }
}
