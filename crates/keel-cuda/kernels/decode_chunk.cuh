// A chunk of 16 keys, or of their values, in a warp's shared memory, and its products on tensor cores. The decode
// kernels of attention_tensor.cu and attention_decode_persistent.cu share them. Both take a row's sums in the same
// order.
//
// Chunks of f16 are tiles of attention_tiles.cuh. Coded chunks (KV_BITS) lie in shared memory as in their page, codes
// and then steps, so copies bring them in the background. They are widened to f16 in registers, between shared memory
// and the tensor cores.
//
// A register of load_matrices holds 4 bytes of a key (8 bits: 4 columns, 4 bits: 8 columns), or, transposed, 2 bytes of
// two keys. Its codes are taken in pairs, two for each register of a fragment. This puts columns out of order:
// - Keys: a product may take columns in any order if both operands do. put_query stores queries in that order.
// - Values: columns of the sums are out of order. put_sums stores them where they belong.
//
// P is explained in kv_coded.cuh.
#pragma once
#include "attention_tiles.cuh"

#define CHUNK 16

#if KV_BITS
/// Bytes from one key's codes to the next one's: an odd multiple of 16 puts eight keys on different banks.
#define CODE_LINE (16 * (CODE_ROW / 16 | 1))
#define CHUNK_BYTES (CHUNK * (CODE_LINE + 2 * GROUPS_OF_ROW))

/// Copies 16 keys from `token` on, in the background. Of keys from `count` on, codes and steps are zeros.
static __device__ __forceinline__ void fetch_chunk(u8* to, const kv_t* pool, u32 page, u32 head, u32 token, u32 count) {
    constexpr u32 PIECES = CODE_ROW / 16, STEPS_OF_KEY = 2 * GROUPS_OF_ROW;
    const u32 lane = threadIdx.x % 32;
    const u8* from = pool + head_page(page, head);
#pragma unroll
    for (u32 i = lane; i < CHUNK * PIECES; i += 32)
        copy_async(to + i / PIECES * CODE_LINE + i % PIECES * 16, from + token * CODE_ROW + i * 16, i / PIECES < count);
    // 16 bytes hold the steps of one key or of several. Beyond `count` a page may hold NaN.
    if (lane < CHUNK * STEPS_OF_KEY / 16) {
        const u32 at = lane * 16, end = count * STEPS_OF_KEY;
        copy_async_part(to + CHUNK * CODE_LINE + at, from + PAGE * CODE_ROW + token * STEPS_OF_KEY + at,
                        end > at ? min(end - at, 16) : 0);
    }
}

/// Steps of a key for groups g and g + 1, as they are stored; g is even. There may be no group g + 1.
static __device__ __forceinline__ u32 steps_at(const u8* chunk, u32 key, u32 g) {
    const u16* at = (const u16*)(chunk + CHUNK * CODE_LINE) + key * GROUPS_OF_ROW + g;
    return GROUPS_OF_ROW % 2 == 0 ? *(const u32*)at : at[0] | (g + 1 < GROUPS_OF_ROW ? at[1] << 16 : 0);
}
/// The step of group g + j times P.
static __device__ __forceinline__ float wide_step(u32 steps, int j) { return wide_step(j ? steps >> 16 : steps & 0xffffu); }

/// Codes of groups g and g + 1 of a chunk; g is even.
struct Codes {
    u32 words[KV_BITS / 4][4];

    template <bool TRANSPOSED> __device__ __forceinline__ void load(const u8* chunk, int g) {
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < KV_BITS / 4; i++) {
            // Two columns of 16 bytes. The second may be beyond the row.
            const u32 column = min((KV_BITS == 8 ? 2 * (g + i) : g) + lane / 16, CODE_ROW / 16 - 1);
            const u8* at = chunk + lane % 16 * CODE_LINE + column * 16;
            if (TRANSPOSED) load_matrices_transposed(words[i], at);
            else load_matrices(words[i], at);
#pragma unroll
            for (int w = 0; w < 4; w++) words[i][w] ^= KV_BITS == 8 ? 0x80808080u : 0;
        }
    }
    /// The register of columns 16 s to 16 s + 15 (8 bits) or of all (4 bits) of group g + j, keys 8 half to 8 half + 7.
    __device__ __forceinline__ u32 at(int j, int s, int half) const {
        return KV_BITS == 8 ? words[KV_BITS == 8 ? j : 0][2 * s + half] : words[0][2 * j + half];
    }
};

static constexpr __device__ u32 key_pair(int s, int p) { return KV_BITS == 8 ? (p ? 0x4342 : 0x4140) : 4 * (2 * s + p); }
static constexpr __device__ u32 value_pair(int s, int p) { return KV_BITS == 8 ? (p ? 0x4341 : 0x4240) : 4 * (2 * s + p); }

/// Stores columns d .. d + 3 of a query in the order of multiply_chunk_keys; d is a multiple of 4.
static __device__ __forceinline__ void put_query(f16* line, u32 d, float4 x) {
    const u32 low = pack_f16(x.x, x.y), high = pack_f16(x.z, x.w);
    if (KV_BITS == 8) {
        u32* to = (u32*)(line + d / 16 * 16 + d % 16 / 2);
        to[0] = low, to[4] = high;
    } else {
        u16* to = (u16*)line + d / 32 * 32 + d % 32 / 8 * 2 + d / 4 % 2;
        to[0] = (u16)low, to[8] = (u16)(low >> 16), to[16] = (u16)high, to[24] = (u16)(high >> 16);
    }
}

/// scores = 16 queries times the keys of a chunk; see multiply_keys of attention_tiles.cuh.
static __device__ __forceinline__ void multiply_chunk_keys(float (&scores)[2][4], const f16* q, const u8* chunk) {
    constexpr int CHAINS = 4;
    const u32 key = threadIdx.x % 32 / 4;
    float sums[CHAINS][2][4];
#pragma unroll
    for (int i = 0; i < CHAINS * 8; i++) sums[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll 2
    for (int g = 0; g < GROUPS_OF_ROW; g += 2) {
        Codes codes;
        codes.load<false>(chunk, g);
        const u32 steps[2] = {steps_at(chunk, key, g), steps_at(chunk, 8 + key, g)};
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (g + j >= GROUPS_OF_ROW) break;
            u32 wide[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float step = wide_step(steps[half], j);
                wide[half] = pack_f16(step, step);
            }
#pragma unroll
            for (int s = 0; s < 2; s++) {
                u32 a[4];
                load_matrices(a, row_major<LINE>(q, 0, (2 * (g + j) + s) * 16));
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 x = codes.at(j, s, half);
                    mma_f16(sums[(2 * j + s) % CHAINS][half], a, widen(x, key_pair(s, 0), wide[half]),
                            widen(x, key_pair(s, 1), wide[half]));
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        scores[i / 4][i % 4] = sums[0][i / 4][i % 4];
#pragma unroll
        for (int c = 1; c < CHAINS; c++) scores[i / 4][i % 4] += sums[c][i / 4][i % 4];
    }
}

/// sums += weights of a chunk's keys times their values. Of group g, the columns of sums[4 g + 2 s + p] are, from c = 0
/// on, 16 s + 2 c + p (8 bits) or 4 c + 2 s + p (4 bits).
static __device__ __forceinline__ void multiply_chunk_values(float (&sums)[D / 8][4], const float (&weights)[2][4], const u8* chunk) {
    const u32 key = threadIdx.x % 4 * 2;
    const u32 a[4] = {pack_f16(weights[0][0], weights[0][1]), pack_f16(weights[0][2], weights[0][3]),
                      pack_f16(weights[1][0], weights[1][1]), pack_f16(weights[1][2], weights[1][3])};
#pragma unroll
    for (int g = 0; g < GROUPS_OF_ROW; g += 2) {
        Codes codes;
        codes.load<true>(chunk, g);
        u32 steps[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++) steps[i / 2][i % 2] = steps_at(chunk, key + i / 2 * 8 + i % 2, g);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (g + j >= GROUPS_OF_ROW) break;
            u32 wide[2];
#pragma unroll
            for (int half = 0; half < 2; half++) wide[half] = pack_f16(wide_step(steps[half][0], j), wide_step(steps[half][1], j));
#pragma unroll
            for (int i = 0; i < 4; i++)
                mma_f16(sums[4 * (g + j) + i], a, widen(codes.at(j, i / 2, 0), value_pair(i / 2, i % 2), wide[0]),
                        widen(codes.at(j, i / 2, 1), value_pair(i / 2, i % 2), wide[1]));
        }
    }
}

/// Stores a lane's part of the sums of pair lane / 4 + 8 half: all columns of the pair from `to` on.
static __device__ __forceinline__ void put_sums(float* to, const float (&sums)[D / 8][4], int half) {
    float4* at = (float4*)to + threadIdx.x % 4 * (KV_BITS == 8 ? 1 : 2);
#pragma unroll
    for (int n = 0; n < D / 8; n += 4) {
        const float x[4] = {sums[n][2 * half], sums[n + 1][2 * half], sums[n + 2][2 * half], sums[n + 3][2 * half]};
        const float y[4] = {sums[n][2 * half + 1], sums[n + 1][2 * half + 1], sums[n + 2][2 * half + 1], sums[n + 3][2 * half + 1]};
        if (KV_BITS == 8) {
            at[2 * n] = make_float4(x[0], x[1], y[0], y[1]);
            at[2 * n + 4] = make_float4(x[2], x[3], y[2], y[3]);
        } else {
            at[2 * n] = make_float4(x[0], x[1], x[2], x[3]);
            at[2 * n + 1] = make_float4(y[0], y[1], y[2], y[3]);
        }
    }
}
#else
#define CHUNK_BYTES (2 * CHUNK * LINE)

static __device__ __forceinline__ void fetch_chunk(u8* to, const kv_t* pool, u32 page, u32 head, u32 token, u32 count) {
#pragma unroll
    for (u32 i = threadIdx.x % 32; i < CHUNK * (D / 8); i += 32) {
        const u32 n = i / (D / 8), d = i % (D / 8) * 8;
        fetch8((f16*)to + n * LINE + d, pool, page, head, token + n, d, n < count);
    }
}
static __device__ __forceinline__ void put_query(f16* line, u32 d, float4 x) { *(uint2*)(line + d) = make_uint2(pack_f16(x.x, x.y), pack_f16(x.z, x.w)); }
static __device__ __forceinline__ void multiply_chunk_keys(float (&scores)[2][4], const f16* q, const u8* chunk) {
    multiply_keys<2, 4>(scores, q, 0, (const f16*)chunk);
}
static __device__ __forceinline__ void multiply_chunk_values(float (&sums)[D / 8][4], const float (&weights)[2][4], const u8* chunk) {
    multiply_values<2>(sums, weights, (const f16*)chunk);
}
static __device__ __forceinline__ void put_sums(float* to, const float (&sums)[D / 8][4], int half) {
#pragma unroll
    for (int n = 0; n < D / 8; n++)
        *(float2*)(to + n * 8 + threadIdx.x % 4 * 2) = make_float2(sums[n][2 * half], sums[n][2 * half + 1]);
}
#endif

/// Columns d and d + 1 of a pair over the keys of all warps, the greatest score, and the total weight.
struct Combined {
    float2 sum;
    float largest, total;
};

/// Combines the warps' results for a pair, in the order of the warps: sums [WARPS, PAIRS, D], greatest scores and
/// totals [WARPS, PAIRS].
template <int PAIRS>
static __device__ __forceinline__ Combined combine_warps(const float* sums, const float* largest, const float* totals, u32 pair, u32 d) {
    sums += pair * D + d, largest += pair, totals += pair;
    Combined all = {make_float2(0.0f, 0.0f), -INF, 0.0f};
#pragma unroll
    for (int w = 0; w < WARPS; w++) all.largest = fmaxf(all.largest, largest[w * PAIRS]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        // A warp that saw no key has a total of 0 and no sums to use. One whose scores are all NaN has a total of NaN.
        if (totals[w * PAIRS] == 0.0f) continue;
        const float f = expf(largest[w * PAIRS] - all.largest);
        const float2 part = *(const float2*)(sums + w * PAIRS * D);
        all.total = fmaf(f, totals[w * PAIRS], all.total);
        all.sum.x = fmaf(f, part.x, all.sum.x);
        all.sum.y = fmaf(f, part.y, all.sum.y);
    }
    return all;
}
