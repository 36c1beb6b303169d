// The softmax of attention on tensor cores, on scores in the fragments of a product. A warp has 16 pairs of row and
// head. A lane has two of them (lane / 4 and lane / 4 + 8) and two of every 8 keys. Macros: H, KV, D, G (heads of a
// group), WINDOW, UNTIL, Y_HALF (y is f16 of an eighth, see attention.cu).
#pragma once
#include "paged.cuh"

/// The last position that each row of a sequence sees, if it may be after the row's own (UNTIL=1, see attention.cu).
struct Until {
    const u32* rows;
    u32 count;
    /// For row `row`, which is at `position`. Rows beyond the sequence have none.
    __device__ __forceinline__ u32 last(u32 row, u32 position) const {
        return UNTIL ? max(position, rows[min(row, count - 1)]) : position;
    }
};

/// The last position that every row of pairs first..first + count sees, and the last that any of them sees. Rows of the
/// sequence are at positions from `start` on. All lanes of a warp call this.
static __device__ __forceinline__ uint2 last_seen(const Until& until, u32 start, u32 first, u32 count) {
    u32 every = start + first / G, any = start + (first + count - 1) / G;
    if (UNTIL) {
        every = 0xffffffff;
        for (u32 row = first / G + threadIdx.x % 32; row <= (first + count - 1) / G; row += 32) {
            const u32 last = min(until.last(row, start + row), start + until.count - 1);
            every = min(every, last), any = max(any, last);
        }
        every = __reduce_min_sync(FULL_WARP, every), any = __reduce_max_sync(FULL_WARP, any);
    }
    return make_uint2(every, any);
}

/// A thread's state for two of its warp's 16 pairs (rows lane / 4 and lane / 4 + 8) while keys go by.
struct Softmax {
    float largest[2], total[2];

    __device__ __forceinline__ void start() {
        largest[0] = largest[1] = -INF;
        total[0] = total[1] = 0.0f;
    }

    /// Turns scores of TILES * 8 keys into weights. Earlier sums must then be multiplied by `shrink`, since the
    /// greatest score grew.
    template <int TILES>
    __device__ __forceinline__ void weigh(float (&scores)[TILES][4], float factor, float (&shrink)[2]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float now = largest[half];
#pragma unroll
            for (int n = 0; n < TILES; n++) now = fmaxf(now, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            now = fmaxf(now, __shfl_xor_sync(FULL_WARP, now, 1));
            now = fmaxf(now, __shfl_xor_sync(FULL_WARP, now, 2));
            // A row that has seen no key has only scores of -inf. Its base is 0, so that their weights become 0.
            float base = now == -INF ? 0.0f : __fmul_rn(now, factor);
            // Not contracted to one rounding: where `largest` stays, the difference must be 0. Else a tile that a row
            // does not see would change the row's bits.
            shrink[half] = exp2_flushed(__fmul_rn(largest[half], factor) - base);
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

    /// Adds up the sums of the four threads of a row.
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

/// Sets scores that a row may not see to -inf. Rows are pairs `pair` + lane / 4 and 8 further; keys begin at `key`.
template <int TILES>
static __device__ __forceinline__ void hide(float (&scores)[TILES][4], u32 start, u32 pair, u32 key, u32 to, const Until& until) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 row = (pair + lane / 4 + 8 * half) / G, at = start + row, end = min(until.last(row, at), to - 1) + 1;
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

/// The pairs of a block of prefill: `count` from `first` on, of one key head of the sequence that begins at row
/// `first_row`.
struct Pairs {
    u32 first_row, first, count, kv, total_rows;
};

/// Writes the rows of a warp, from pair `m` of the block on: to y, or to `partial` for attention_merge if keys are
/// split.
static __device__ __forceinline__ void leave_rows(const float (&sums)[D / 8][4], const Softmax& softmax, const Pairs& pairs, u32 m, float scale,
                                                  float* partial, float* y) {
    const u32 lane = threadIdx.x % 32;
    const bool split = gridDim.z > 1;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 pair = m + lane / 4 + 8 * half;
        if (pair >= pairs.count) continue;
        const u64 row = pairs.first_row + (pairs.first + pair) / G, head = pairs.kv * G + (pairs.first + pair) % G;
        float* out = split ? split_sums(partial, pairs.total_rows, blockIdx.z, row, head) : y + (row * H + head) * D;
        const float f = split ? 1.0f : (Y_HALF ? 0.125f : 1.0f) / softmax.total[half];
        if (Y_HALF && !split) {
            u32* words = (u32*)y + (row * H + head) * (D / 2) + lane % 4;
#pragma unroll
            for (int n = 0; n < D / 8; n++) words[4 * n] = pack_f16(sums[n][2 * half] * f, sums[n][2 * half + 1] * f);
            continue;
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            *(float2*)(out + n * 8 + lane % 4 * 2) = make_float2(sums[n][2 * half] * f, sums[n][2 * half + 1] * f);
        // Times scale, so that e is the base, as attention_merge expects.
        if (split && lane % 4 == 0)
            *split_scale(partial, gridDim.z, pairs.total_rows, blockIdx.z, row, head) =
                make_float2(softmax.largest[half] * scale, softmax.total[half]);
    }
}
