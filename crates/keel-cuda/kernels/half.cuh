// The 16-bit operands of products on tensor cores.
//
// f16 has eight times the precision of bf16. Its range is smaller, so x is stored as x / 8 and W as 8 W: values of x
// reach 524,000, weights are normal numbers from 8e-6 on, and values beyond the range saturate. A dense weight stored
// as f16 stays as it is; its product with x / 8 is multiplied by 8.
// HALF_BF16=1: bf16 without these factors, for dense weights that are stored as bf16.
// HALF_PANEL=32, 64, ... 256: x in panels for linear_panels. A panel has this many rows, and its column tiles of 64 one
// after the other. In a tile, row r has 128 bytes in chunks of 16. Chunk c lies at c ^ (r % 8), as products read it,
// and holds the columns from column_of_chunk(c) on, two of each eight.
#pragma once
#include "common.cuh"

#ifndef HALF_BF16
#define HALF_BF16 0
#endif
#ifndef HALF_PANEL
#define HALF_PANEL 0
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
// In step i of 16 columns, slots 4 i and 4 i + 1 of lane t of a tile of the weight are at 2 t, the next two at 8 + 2
// t. So a chunk has the columns c, c + 1, c + 8, c + 9, ... from this one on.
__device__ __forceinline__ u32 column_of_chunk(u32 chunk) { return 32 * (chunk / 4) + 4 * (chunk / 2 % 2) + 2 * (chunk % 2); }
#if HALF_PANEL
// Number of a chunk of column tile `kt` of `row`, counted from the first panel on.
__device__ __forceinline__ u64 chunk_in_panels(u32 row, u32 kt, u32 chunk, u32 k_tiles) {
    return ((u64)(row / HALF_PANEL) * k_tiles + kt) * (HALF_PANEL * 8) + row % HALF_PANEL * 8 + (chunk ^ row % 8);
}
#endif
// Writes columns `column` to `column` + 3 of row `row` of x, `column` a multiple of 4. Panels: width is a multiple of
// 64.
__device__ __forceinline__ void put_four(u16* x, u32 row, u32 width, u32 column, float4 v) {
    const u32 low = two_inputs(v.x, v.y), high = two_inputs(v.z, v.w);
#if HALF_PANEL
    const u32 kt = column / 64, chunk = column / 32 % 2 * 4 + column / 4 % 2 * 2, word = column / 8 % 4;
    u32* words = (u32*)x + word;
    words[4 * chunk_in_panels(row, kt, chunk, width / 64)] = low;
    words[4 * chunk_in_panels(row, kt, chunk + 1, width / 64)] = high;
#else
    *(uint2*)(x + (u64)row * width + column) = make_uint2(low, high);
#endif
}
// Four values from `at` on, which may be any value's address: a parameter may be a part of another array.
__device__ __forceinline__ float4 any_four(const float* at) {
    return (u64)at % 16 ? make_float4(at[0], at[1], at[2], at[3]) : *(const float4*)at;
}
// Packs two weights that are already multiplied by WEIGHT_FACTOR.
__device__ __forceinline__ u32 two_weights(float low, float high) {
    const f16x2 v = two_f16(low, high);
    return *(const u32*)&v;
}
#define WEIGHT_FACTOR 8.0f
