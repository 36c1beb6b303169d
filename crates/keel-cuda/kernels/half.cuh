// The 16-bit operands of prefill's products on tensor cores.
//
// f16 has eight times the precision of bf16. Its range is smaller, so x is stored as x / 8 and W as 8 W: values of x
// reach 524,000, weights are normal numbers from 8e-6 on, and values beyond the range saturate. A dense weight stored as
// f16 stays as it is; its product with x / 8 is multiplied by 8.
// HALF_BF16=1: bf16 without these factors, for dense weights that are stored as bf16.
// HALF_TILES=1: columns in the order of linear_tiled, rows of whole tiles of 64.
#pragma once
#include "common.cuh"

#ifndef HALF_BF16
#define HALF_BF16 0
#endif
#ifndef HALF_TILES
#define HALF_TILES 0
#endif

// Packs two values of x into a register, `low` in its low half.
__device__ __forceinline__ u32 two_inputs(float low, float high) {
#if HALF_BF16
    const bf16x2 v = two_bf16(low, high);
#else
    const f16x2 v = two_f16(low * 0.125f, high * 0.125f);
#endif
    return *(const u32*)&v;
}
// Writes columns `column` to `column` + 3 of a row of x, `column` a multiple of 4.
__device__ __forceinline__ void put_four(u16* row, u32 column, float4 v) {
    const u32 low = two_inputs(v.x, v.y), high = two_inputs(v.z, v.w);
#if HALF_TILES
    // Fragment i of a tile, lane t of four: see to_half_tiles.
    const u32 i = column / 32 % 2 * 2 + column / 4 % 2, t = column / 8 % 4;
    u32* at = (u32*)row + column / 64 * 32 + 8 * i + t;
    at[0] = low, at[4] = high;
#else
    *(uint2*)(row + column) = make_uint2(low, high);
#endif
}
// Packs two weights that are already multiplied by WEIGHT_FACTOR.
__device__ __forceinline__ u32 two_weights(float low, float high) {
    const f16x2 v = two_f16(low, high);
    return *(const u32*)&v;
}
#define WEIGHT_FACTOR 8.0f
