// Pages whose keys and values are coded with KV_BITS (8 or 4) bits; keel_array::KvFormat says what the codes mean.
//
// A head's page is 256 (D KV_BITS / 8 + D / 16) bytes: codes [256][D], then steps bf16 [256][D / 32]. 8-bit codes are
// signed bytes. With 4 bits, byte i of a row holds values 2 i (low nibble) and 2 i + 1, each plus 8.
#pragma once
#include "paged.cuh"

#define CODE_ROW (D * KV_BITS / 8)
#define GROUPS_OF_ROW (D / 32)

/// Where the page of a head begins, in bytes from the start of the pool.
static __device__ __forceinline__ u64 head_page(u32 page, u32 head) { return ((u64)page * KV + head) * (PAGE * (CODE_ROW + 2 * GROUPS_OF_ROW)); }

static __device__ __forceinline__ float step_of(const u8* page, u32 token, u32 d) {
    return to_f32(((const bf16*)(page + PAGE * CODE_ROW))[token * GROUPS_OF_ROW + d / 32]);
}
/// Values d .. d + 3 of a token, d a multiple of 4.
static __device__ __forceinline__ float4 coded4(const u8* page, u32 token, u32 d) {
    const float step = step_of(page, token, d);
    const u8* at = page + token * CODE_ROW + d * KV_BITS / 8;
    u32 levels;
    float zero;
    if (KV_BITS == 8) {
        levels = *(const u32*)at ^ 0x80808080u, zero = 128.0f;
    } else {
        const u32 x = *(const u16*)at;
        levels = (x & 15) | (x & 0xf0) << 4 | (x & 0xf00) << 8 | (x & 0xf000) << 12, zero = 8.0f;
    }
    return make_float4(byte_as_float(levels, 0, zero) * step, byte_as_float(levels, 1, zero) * step, byte_as_float(levels, 2, zero) * step,
                       byte_as_float(levels, 3, zero) * step);
}
/// Values d .. d + 7 of a token as f16, d a multiple of 8.
static __device__ __forceinline__ uint4 coded8(const u8* page, u32 token, u32 d) {
    const float4 x = coded4(page, token, d), y = coded4(page, token, d + 4);
    return make_uint4(pack_f16(x.x, x.y), pack_f16(x.z, x.w), pack_f16(y.x, y.y), pack_f16(y.z, y.w));
}

// In pairs: a value is code step, rounded once to f16, as coded8 computes it. With P = 128 (8 bits) or 8 (4 bits), a
// code over P and a step times P are exact in f16 wherever the group's peak is a normal f16; their product rounds once.

/// A stored step times P.
static __device__ __forceinline__ float wide_step(u32 step) { return __uint_as_float(step << 16) * (KV_BITS == 8 ? 128.0f : 8.0f); }

/// Two codes of a register times their steps (times P), as f16. 8 bits: codes plus 128, `pair` selects bytes; 4 bits:
/// it is a shift.
static __device__ __forceinline__ u32 widen(u32 codes, u32 pair, u32 steps) {
    // The codes become the low bits of 8 (steps of 1 / 128) or 128 (steps of 1 / 8).
    u32 x = KV_BITS == 8 ? __byte_perm(codes, 0x48484848u, pair) : (codes >> pair & 0x000f000fu) | 0x58005800u;
    const u32 zero = KV_BITS == 8 ? 0x48804880u : 0x58085808u;
    const f16x2 r = __hmul2(__hsub2(*(f16x2*)&x, *(const f16x2*)&zero), *(f16x2*)&steps);
    return *(const u32*)&r;
}

/// Eight codes of one group, KV_BITS bytes, times their stored step.
static __device__ __forceinline__ uint4 widen8(uint2 codes, u32 step) {
    const float wide = wide_step(step);
    const u32 steps = pack_f16(wide, wide);
    if (KV_BITS == 8) {
        const u32 low = codes.x ^ 0x80808080u, high = codes.y ^ 0x80808080u;
        return make_uint4(widen(low, 0x4140, steps), widen(low, 0x4342, steps), widen(high, 0x4140, steps), widen(high, 0x4342, steps));
    }
    // Values i and i + 4 come together.
    const u32 a = widen(codes.x, 0, steps), b = widen(codes.x, 4, steps), c = widen(codes.x, 8, steps), d = widen(codes.x, 12, steps);
    return make_uint4(__byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x7632));
}

/// Encodes group `group` of a token's head: lane i of the warp has value i.
static __device__ __forceinline__ void store_group(u8* page, u32 token, u32 group, float x) {
    const u32 lane = threadIdx.x % 32;
    const float peak = warp_max(fabsf(x));
    float farthest = peak;
    if (KV_BITS == 4) {
        const u32 first = __ffs(__ballot_sync(FULL_WARP, fabsf(x) == peak));
        farthest = first == 0 ? 0.0f : __shfl_sync(FULL_WARP, x, first - 1);
    }
    if (__any_sync(FULL_WARP, x != x)) farthest = NAN; // which no code stands for
    const bf16 step = From<bf16>::f32(KV_BITS == 8 ? __fdiv_rn(farthest, 127.0f) : __fdiv_rn(farthest, -8.0f));
    const float width = to_f32(step), inverse = width == 0.0f ? 0.0f : __fdiv_rn(1.0f, width);
    const float level = rintf(__fmul_rn(x, inverse));
    u8* row = page + token * CODE_ROW;
    if (KV_BITS == 8) {
        row[group * 32 + lane] = (u8)(signed char)fminf(fmaxf(level, -127.0f), 127.0f);
    } else {
        const u32 code = (u32)(fminf(fmaxf(level, -8.0f), 7.0f) + 8.0f), next = __shfl_down_sync(FULL_WARP, code, 1);
        if (lane % 2 == 0) row[group * 16 + lane / 2] = (u8)(code | next << 4);
    }
    if (lane == 0) ((bf16*)(page + PAGE * CODE_ROW))[token * GROUPS_OF_ROW + group] = step;
}
