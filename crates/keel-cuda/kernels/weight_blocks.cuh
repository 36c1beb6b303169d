// Weights in the block codings of GGUF files, as they are stored: rows of whole blocks, [expert][DIM_N][DIM_K / BLOCK_VALUES].
// What a block means is what keel_array::BlockFormat::decode says; eight values at a time are decoded here, to the same bits:
// value = scale * (level - ZERO) + offset, the offset with codings that have one.
//
// Macros: BLOCK, one of the names below; BLOCK_VALUES and BLOCK_BYTES, values and bytes of a block.
#pragma once
#include "common.cuh"

#define Q4_0 1
#define Q4_1 2
#define Q5_0 3
#define Q5_1 4
#define Q8_0 5
#define Q2_K 6
#define Q3_K 7
#define Q4_K 8
#define Q5_K 9
#define Q6_K 10
#define IQ4_NL 11
#define IQ4_XS 12
#define MXFP4 13

// ---- eight levels, one per byte, and how they are taken out of fewer bits ----

// Eight bytes from an address that is a multiple of ALIGN.
template <int ALIGN> __device__ __forceinline__ uint2 eight_bytes(const u8 *p) {
    if (ALIGN == 8) return __ldg((const uint2 *)p);
    if (ALIGN == 4) return make_uint2(__ldg((const u32 *)p), __ldg((const u32 *)p + 1));
    u32 v[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8 / ALIGN; i++) {
        const u32 part = ALIGN == 2 ? (u32)__ldg((const u16 *)p + i) : (u32)__ldg(p + i);
        v[i * ALIGN / 4] |= part << (8 * (i * ALIGN % 4));
    }
    return make_uint2(v[0], v[1]);
}
__device__ __forceinline__ uint2 bits_of(uint2 v, int shift, u32 mask) { return make_uint2(v.x >> shift & mask, v.y >> shift & mask); }
__device__ __forceinline__ uint2 atop(uint2 low, uint2 high, int shift) { return make_uint2(low.x | high.x << shift, low.y | high.y << shift); }

// Levels i .. i + 7 of 32 four-bit ones: byte j holds j and j + 16.
template <int ALIGN> __device__ __forceinline__ uint2 nibbles(const u8 *p, int i) {
    return bits_of(eight_bytes<ALIGN>(p + i % 16), i / 16 * 4, 0x0f0f0f0fu);
}
// Of 256 four-bit ones: each run of 64 takes 32 bytes, its first half the low bits.
template <int ALIGN> __device__ __forceinline__ uint2 nibbles_of_runs(const u8 *p, int i) {
    return bits_of(eight_bytes<ALIGN>(p + i / 64 * 32 + i % 32), i % 64 / 32 * 4, 0x0f0f0f0fu);
}
// Of 256 two-bit ones: each half takes 32 bytes, in four layers.
template <int ALIGN> __device__ __forceinline__ uint2 pairs_of_bits(const u8 *p, int i) {
    return bits_of(eight_bytes<ALIGN>(p + i / 128 * 32 + i % 32), i % 128 / 32 * 2, 0x03030303u);
}
// Of 256 single bits: bit i / 32 of byte i % 32.
template <int ALIGN> __device__ __forceinline__ uint2 single_bits(const u8 *p, int i) {
    return bits_of(eight_bytes<ALIGN>(p + i % 32), i / 32, 0x01010101u);
}
// Bits 0..7 of a byte, one to each of eight bytes. The copies of four bits that a product makes do not meet.
__device__ __forceinline__ uint2 spread_bits(u32 byte) {
    return make_uint2((byte & 15) * 0x00204081u & 0x01010101u, (byte >> 4) * 0x00204081u & 0x01010101u);
}

// Levels of four bits through a table of sixteen bytes.
__device__ __forceinline__ u32 four_of_table(u32 levels, const u32 (&table)[4]) {
    const u32 close = levels | levels >> 4, index = (close & 0xff) | (close >> 8 & 0xff00); // a nibble each
    const u32 low = __byte_perm(table[0], table[1], index & 0x7777), high = __byte_perm(table[2], table[3], index & 0x7777);
    return __byte_perm(low, high, 0x3210 + ((index & 0x8888) >> 1));
}
__device__ __forceinline__ uint2 of_table(uint2 levels, const u32 (&table)[4]) {
    return make_uint2(four_of_table(levels.x, table), four_of_table(levels.y, table));
}
// Both tables with 128 added to each level.
__device__ __forceinline__ uint2 nonlinear(uint2 levels) {
    const u32 table[4] = {0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u}; // -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
    return of_table(levels, table);
}
__device__ __forceinline__ uint2 fp4_doubled(uint2 levels) {
    const u32 table[4] = {0x83828180u, 0x8c888684u, 0x7d7e7f80u, 0x74787a7cu}; // 0 1 2 3 4 6 8 12, and the same below zero
    return of_table(levels, table);
}

// ---- scales ----

__device__ __forceinline__ float half_at(const u8 *p) { return to_f32(f16{__ldg((const u16 *)p)}); }
// Scale i of eight, 6 bits each, or offset i: the first four lie plainly, the last four with their 2 upper bits on top of those.
__device__ __forceinline__ float scale_of_six(const u8 *p, int i) {
    return (float)(i < 4 ? p[i] & 63 : (p[i + 4] & 15) | p[i - 4] >> 6 << 4);
}
__device__ __forceinline__ float offset_of_six(const u8 *p, int i) {
    return (float)(i < 4 ? p[i + 4] & 63 : p[i + 4] >> 4 | p[i] >> 6 << 4);
}

// ---- each coding: levels i .. i + 7 of a block, i a multiple of 8, and their scale and offset ----

#if BLOCK == Q4_0
#define ZERO 8
__device__ __forceinline__ uint2 levels_of(const u8 *b, int i) { return nibbles<2>(b + 2, i); }
__device__ __forceinline__ float scale_of(const u8 *b, int i) { return half_at(b); }
#elif BLOCK == Q4_1
#define ZERO 0
#define HAS_OFFSET 1
__device__ __forceinline__ uint2 levels_of(const u8 *b, int i) { return nibbles<4>(b + 4, i); }
__device__ __forceinline__ float scale_of(const u8 *b, int i) { return half_at(b); }
__device__ __forceinline__ float offset_of(const u8 *b, int i) { return half_at(b + 2); }
#elif BLOCK == Q5_0
#define ZERO 16
__device__ __forceinline__ uint2 levels_of(const u8 *b, int i) { return atop(nibbles<2>(b + 6, i), spread_bits(b[2 + i / 8]), 4); }
__device__ __forceinline__ float scale_of(const u8 *b, int i) { return half_at(b); }
#elif BLOCK == Q5_1
#define ZERO 0
#define HAS_OFFSET 1
__device__ __forceinline__ uint2 levels_of(const u8 *b, int i) { return atop(nibbles<8>(b + 8, i), spread_bits(b[4 + i / 8]), 4); }
__device__ __forceinline__ float scale_of(const u8 *b, int i) { return half_at(b); }
__device__ __forceinline__ float offset_of(const u8 *b, int i) { return half_at(b + 2); }
#elif BLOCK == Q8_0
#define ZERO 128 // signed bytes, turned into unsigned ones
__device__ __forceinline__ uint2 levels_of(const u8 *b, int i) {
    const uint2 v = eight_bytes<2>(b + 2 + i);
    return make_uint2(v.x ^ 0x80808080u, v.y ^ 0x80808080u);
}
__device__ __forceinline__ float scale_of(const u8 *b, int i) { return half_at(b); }
#elif BLOCK == Q2_K
#define ZERO 0
#define HAS_OFFSET 1
__device__ __forceinline__ uint2 levels_of(const u8 *b, int i) { return pairs_of_bits<4>(b + 16, i); }
__device__ __forceinline__ float scale_of(const u8 *b, int i) { return __fmul_rn(half_at(b + 80), (float)(b[i / 16] & 15)); }
__device__ __forceinline__ float offset_of(const u8 *b, int i) { return -__fmul_rn(half_at(b + 82), (float)(b[i / 16] >> 4)); }
#elif BLOCK == Q3_K
#define ZERO 4
__device__ __forceinline__ uint2 levels_of(const u8 *b, int i) { return atop(pairs_of_bits<2>(b + 32, i), single_bits<2>(b, i), 2); }
__device__ __forceinline__ float scale_of(const u8 *b, int i) {
    const int s = i / 16, low = b[96 + s % 8] >> (s / 8 * 4) & 15, upper = b[104 + s % 4] >> (s / 4 * 2) & 3;
    return __fmul_rn(half_at(b + 108), (float)((low | upper << 4) - 32));
}
#elif BLOCK == Q4_K
#define ZERO 0
#define HAS_OFFSET 1
__device__ __forceinline__ uint2 levels_of(const u8 *b, int i) { return nibbles_of_runs<8>(b + 16, i); }
__device__ __forceinline__ float scale_of(const u8 *b, int i) { return __fmul_rn(half_at(b), scale_of_six(b + 4, i / 32)); }
__device__ __forceinline__ float offset_of(const u8 *b, int i) { return -__fmul_rn(half_at(b + 2), offset_of_six(b + 4, i / 32)); }
#elif BLOCK == Q5_K
#define ZERO 0
#define HAS_OFFSET 1
__device__ __forceinline__ uint2 levels_of(const u8 *b, int i) { return atop(nibbles_of_runs<8>(b + 48, i), single_bits<8>(b + 16, i), 4); }
__device__ __forceinline__ float scale_of(const u8 *b, int i) { return __fmul_rn(half_at(b), scale_of_six(b + 4, i / 32)); }
__device__ __forceinline__ float offset_of(const u8 *b, int i) { return -__fmul_rn(half_at(b + 2), offset_of_six(b + 4, i / 32)); }
#elif BLOCK == Q6_K
#define ZERO 32
__device__ __forceinline__ uint2 levels_of(const u8 *b, int i) {
    const uint2 low = bits_of(eight_bytes<2>(b + i / 128 * 64 + i % 64), i % 128 / 64 * 4, 0x0f0f0f0fu);
    return atop(low, pairs_of_bits<2>(b + 128, i), 4);
}
__device__ __forceinline__ float scale_of(const u8 *b, int i) { return __fmul_rn(half_at(b + 208), (float)(signed char)b[192 + i / 16]); }
#elif BLOCK == IQ4_NL
#define ZERO 128
__device__ __forceinline__ uint2 levels_of(const u8 *b, int i) { return nonlinear(nibbles<2>(b + 2, i)); }
__device__ __forceinline__ float scale_of(const u8 *b, int i) { return half_at(b); }
#elif BLOCK == IQ4_XS
#define ZERO 128
__device__ __forceinline__ uint2 levels_of(const u8 *b, int i) { return nonlinear(nibbles<8>(b + 8 + i / 32 * 16, i % 32)); }
__device__ __forceinline__ float scale_of(const u8 *b, int i) {
    const int s = i / 32, low = b[4 + s / 2] >> (s % 2 * 4) & 15, upper = b[2 + s / 4] >> (s % 4 * 2) & 3;
    return __fmul_rn(half_at(b), (float)((low | upper << 4) - 32));
}
#elif BLOCK == MXFP4
#define ZERO 128
__device__ __forceinline__ uint2 levels_of(const u8 *b, int i) { return fp4_doubled(nibbles<1>(b + 1, i)); }
// 2^(e - 128), because the levels are doubled; the two smallest are subnormal.
__device__ __forceinline__ float scale_of(const u8 *b, int i) { return __uint_as_float(b[0] < 2 ? 0x00200000u << b[0] : (u32)(b[0] - 1) << 23); }
#endif
#ifndef HAS_OFFSET
#define HAS_OFFSET 0
__device__ __forceinline__ float offset_of(const u8 *b, int i) { return 0.0f; }
#endif

// Values k .. k + 7 of a row, k a multiple of 8.
__device__ __forceinline__ void eight_values(float (&v)[8], const u8 *row, int k) {
    const u8 *b = row + (size_t)(k / BLOCK_VALUES) * BLOCK_BYTES;
    const int i = k % BLOCK_VALUES;
    const uint2 levels = levels_of(b, i);
    const float scale = scale_of(b, i), offset = offset_of(b, i);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        // A byte in the low bits of 2^23 is the float 2^23 + level.
        const u32 level = __byte_perm(j < 4 ? levels.x : levels.y, 0x4B000000u, 0x7540 | (j % 4));
        v[j] = __fmul_rn(scale, __uint_as_float(level) - (8388608.0f + ZERO));
        if (HAS_OFFSET) v[j] = __fadd_rn(v[j], offset);
    }
}
