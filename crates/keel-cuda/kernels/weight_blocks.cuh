// The block codings of GGUF files in the form of weight_tiles.cuh: a level of BITS bits for each value, and scales for
// each GROUP of columns. Equal to keel_array::BlockFormat::decode to the bit: value = scale (level - ZERO) + offset;
// only some codings have an offset.
//
// Macro: BLOCK, one of the names below. A group has SUB_BYTES of its own; 256 columns of a row share SUPER_BYTES:
//   Q4_0 Q5_0 Q8_0 IQ4_NL   sub: scale f16
//   Q4_1 Q5_1               sub: scale, offset f16
//   MXFP4                   sub: exponent u8
//   Q4_K Q5_K               sub: u8 s, u8 m; super: f16 d, e. Scale d s, offset -e m
//   Q2_K                    sub: u8 s + 16 m; super: as above
//   Q3_K Q6_K IQ4_XS        sub: i8 s; super: f16 d. Scale d s
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

#define IS_ONE_OF(a, b, c, d) (BLOCK == a || BLOCK == b || BLOCK == c || BLOCK == d)
#if BLOCK == Q2_K
#define BITS 2
#elif BLOCK == Q3_K
#define BITS 3
#elif IS_ONE_OF(Q5_0, Q5_1, Q5_K, Q5_K)
#define BITS 5
#elif BLOCK == Q6_K
#define BITS 6
#elif BLOCK == Q8_0
#define BITS 8
#else
#define BITS 4
#endif
#define GROUP (IS_ONE_OF(Q2_K, Q3_K, Q6_K, Q6_K) ? 16 : 32)
#define ZERO (BLOCK == Q4_0 ? 8 : BLOCK == Q5_0 ? 16 : BLOCK == Q3_K ? 4 : BLOCK == Q6_K ? 32 : IS_ONE_OF(Q8_0, IQ4_NL, IQ4_XS, MXFP4) ? 128 : 0)
#define HAS_OFFSET (IS_ONE_OF(Q4_1, Q5_1, Q2_K, Q4_K) || BLOCK == Q5_K)
#define SUB_BYTES (IS_ONE_OF(Q4_1, Q5_1, Q5_1, Q5_1) ? 4 : IS_ONE_OF(Q2_K, Q3_K, Q6_K, IQ4_XS) || BLOCK == MXFP4 ? 1 : 2)
#define SUPER_BYTES (IS_ONE_OF(Q2_K, Q4_K, Q5_K, Q5_K) ? 4 : IS_ONE_OF(Q3_K, Q6_K, IQ4_XS, IQ4_XS) ? 2 : 0)
#define HAS_TABLE IS_ONE_OF(IQ4_NL, IQ4_XS, MXFP4, MXFP4)

// The range of a level.
#define LEAST_LEVEL (BLOCK == MXFP4 ? 116.0f : HAS_TABLE ? 1.0f : 0.0f)
#define GREATEST_LEVEL (BLOCK == MXFP4 ? 140.0f : HAS_TABLE ? 241.0f : (float)((1 << BITS) - 1))

#if HAS_TABLE
// Looks up four 4-bit levels, a byte each, in a table of sixteen bytes. Table entries are stored plus 128.
__device__ __forceinline__ u32 four_of_table(u32 levels) {
#if BLOCK == MXFP4
    // 0 1 2 3 4 6 8 12, and the same below zero: twice the value
    const u32 table[4] = {0x83828180u, 0x8c888684u, 0x7d7e7f80u, 0x74787a7cu};
#else
    // -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
    const u32 table[4] = {0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u};
#endif
    const u32 close = levels | levels >> 4, index = (close & 0xff) | (close >> 8 & 0xff00); // a nibble each
    const u32 low = __byte_perm(table[0], table[1], index & 0x7777), high = __byte_perm(table[2], table[3], index & 0x7777);
    return __byte_perm(low, high, 0x3210 + ((index & 0x8888) >> 1));
}
#endif

__device__ __forceinline__ float half_of(u32 word, int which) { return to_f32(f16{(u16)(which ? word >> 16 : word)}); }

struct Scaling {
    float scale, offset;
};
// Decodes item `i` of a packed array of subs, with item `j` of a packed array of supers.
__device__ __forceinline__ Scaling scaling_of(const u32 *subs, int i, const u32 *supers, int j) {
    Scaling s = {0, 0};
#if BLOCK == MXFP4
    // 2^(e - 128), because the levels are doubled; the two smallest are subnormal.
    const u32 e = subs[i / 4] >> (8 * (i % 4)) & 255;
    s.scale = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
#elif BLOCK == Q4_1 || BLOCK == Q5_1
    s.scale = half_of(subs[i], 0), s.offset = half_of(subs[i], 1);
#elif BLOCK == Q4_K || BLOCK == Q5_K
    s.scale = __fmul_rn(half_of(supers[j], 0), byte_as_float(subs[i / 2], i % 2 * 2));
    s.offset = -__fmul_rn(half_of(supers[j], 1), byte_as_float(subs[i / 2], i % 2 * 2 + 1));
#elif BLOCK == Q2_K
    s.scale = __fmul_rn(half_of(supers[j], 0), byte_as_float(subs[i / 4] & 0x0f0f0f0fu, i % 4));
    s.offset = -__fmul_rn(half_of(supers[j], 1), byte_as_float(subs[i / 4] >> 4 & 0x0f0f0f0fu, i % 4));
#elif SUPER_BYTES == 2
    s.scale = __fmul_rn(half_of(supers[j / 2], j % 2), byte_as_float(subs[i / 4] ^ 0x80808080u, i % 4, 128.0f));
#else
    s.scale = half_of(subs[i / 2], i % 2);
#endif
    return s;
}
// value_of: the decoded value of a level. bias_of: the factor of sum p that is added to scale (sum level p).
__device__ __forceinline__ float value_of(float level, Scaling s) {
    const float value = __fmul_rn(s.scale, level - ZERO);
    return HAS_OFFSET ? __fadd_rn(value, s.offset) : value;
}
__device__ __forceinline__ float bias_of(Scaling s) { return ZERO == 0 ? s.offset : __fmul_rn(s.scale, -(float)ZERO); }
