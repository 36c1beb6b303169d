// Operands of products of many rows in e4m3 (4 bits of exponent, 3 of mantissa, at most 448), each row with an f32
// scale: value = code * scale. The scale makes the row's greatest magnitude 448; of a row of W, the greatest one that
// its scales and biases can express. A row of zeros, or of values so small that 448 divided by them is no float, has
// the scale 1. Devices of compute capability 8.9 and above, but for swiglu_of_half.
//
// Macros: DIM_K. For quantize_fp8 THREADS and FROM; for dequantize_to_fp8 DIM_N, PIECES, WARP_TILES, and BITS, GROUP,
// PAIR_T or BLOCK.
//   quantize_fp8           y e4m3 [T][K] and scales [T] from rows of x, which are `stride` values apart. FROM says what
//                          becomes 8 bits: f32 values, f16 values that hold x / 8 (see half.cuh), the RMS norm of f32
//                          values (w and eps), or SwiGLU of 2 K values of either type. A thread keeps its columns in
//                          registers; K is a multiple of 4. Grid T, block THREADS. Floor: x read once, 1 byte a value
//                          written.
//   dequantize_to_fp8      w e4m3 [N][K] and scales [N]. A block converts 8 WARP_TILES column tiles of 16 rows, and
//                          reads the scales and biases of the whole rows. All codes that it needs are under way before
//                          it looks at those. Grid ceil(N / 16) PIECES, block 256. Floor: packed bytes read, 1 byte a
//                          weight written.
//   swiglu_of_half         y f16 [T][width] = silu(gate) * up / 8 from x f16 [T][2 width], which holds eighths. Width
//                          is a multiple of 8. Grid ceil(T width / 2048), block 256. For devices without products of
//                          e4m3.
#include "half.cuh"
#if defined(BITS) || defined(BLOCK)
#include "weight_tiles.cuh"
#endif

#define E4M3_MAX 448.0f
#define LEAST_MAGNITUDE 1e-35f

// Two f16 as floats. A result that f16 could not hold is infinite, and becomes the greatest value. NaN stays.
__device__ __forceinline__ float2 two_finite(u32 v) {
    asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(v) : "r"(0x7bff7bffu));
    asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(v) : "r"(0xfbfffbffu));
    const f16x2 two = *(const f16x2 *)&v;
    return make_float2(to_f32(two.x), to_f32(two.y));
}
// silu(FACTOR x) / FACTOR with a relative error of 2^-20 while it is no subnormal: far less than the error of e4m3.
template <int FACTOR> __device__ __forceinline__ float quick_silu(float x) {
    float power, part;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * (-1.4426950408889634f * FACTOR)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(part) : "f"(1.0f + power));
    return x * part;
}
template <int FACTOR> __device__ __forceinline__ float4 gated(float4 gate, float4 up) {
    return make_float4(quick_silu<FACTOR>(gate.x) * up.x, quick_silu<FACTOR>(gate.y) * up.y, quick_silu<FACTOR>(gate.z) * up.z,
                       quick_silu<FACTOR>(gate.w) * up.w);
}
// A 64th of SwiGLU of values whose eighths these are.
__device__ __forceinline__ float4 gated_of_eighths(uint2 gate, uint2 up) {
    const float2 g0 = two_finite(gate.x), g1 = two_finite(gate.y), u0 = two_finite(up.x), u1 = two_finite(up.y);
    return gated<8>(make_float4(g0.x, g0.y, g1.x, g1.y), make_float4(u0.x, u0.y, u1.x, u1.y));
}

#if !defined(THREADS) && !defined(BITS)
extern "C" __global__ void __launch_bounds__(256) swiglu_of_half(
#include "swiglu_of_half.params"
) {
    take_turn();
    const u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    const u32 eights = width / 8, row = i / eights, eight = i % eights;
    if (row >= rows) return;
    const uint4 *of_row = x + (u64)row * 2 * eights + eight;
    const uint4 gate = of_row[0], up = of_row[eights];
    auto put = [&](u32 column, float4 v) { put_four(y, row, width, column, make_float4(64.0f * v.x, 64.0f * v.y, 64.0f * v.z, 64.0f * v.w)); };
    put(8 * eight, gated_of_eighths(make_uint2(gate.x, gate.y), make_uint2(up.x, up.y)));
    put(8 * eight + 4, gated_of_eighths(make_uint2(gate.z, gate.w), make_uint2(up.z, up.w)));
}
#endif

#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ u32 four_e4m3(float a, float b, float c, float d) {
    unsigned short low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return (u32)high << 16 | low;
}

__device__ __forceinline__ float codes_of_one(float largest) { return largest > LEAST_MAGNITUDE ? E4M3_MAX / largest : 1.0f; }
__device__ __forceinline__ float scale_of(float largest) { return largest > LEAST_MAGNITUDE ? largest / E4M3_MAX : 1.0f; }

#ifdef THREADS
#define FROM_F32 0
#define FROM_F16 1
#define FROM_NORM 2
#define FROM_SWIGLU 3
#define FROM_SWIGLU_F16 4
// The rounded values are those of four_of_row times this factor.
#define FACTOR_OF_ROW (FROM == FROM_F16 ? 8.0f : FROM == FROM_SWIGLU_F16 ? 64.0f : 1.0f)
#define FOURS (DIM_K / 4)
#define FOURS_OF_THREAD ((FOURS + THREADS - 1) / THREADS)
#define IS_IN_ROW(i) (FOURS % THREADS == 0 || (i) < FOURS)

// Columns 4 i to 4 i + 3 of row `row`.
__device__ __forceinline__ float4 four_of_row(const void *x, u64 stride, u32 row, u32 i) {
    if constexpr (FROM == FROM_F16) {
        const uint2 v = ((const uint2 *)x)[row * stride / 4 + i];
        const f16x2 low = *(const f16x2 *)&v.x, high = *(const f16x2 *)&v.y;
        return make_float4(to_f32(low.x), to_f32(low.y), to_f32(high.x), to_f32(high.y));
    } else if constexpr (FROM == FROM_SWIGLU_F16) {
        const uint2 *values = (const uint2 *)x + row * stride / 4 + i;
        return gated_of_eighths(values[0], values[FOURS]);
    }
    const float4 *values = (const float4 *)((const float *)x + row * stride) + i;
    return FROM == FROM_SWIGLU ? gated<1>(values[0], values[FOURS]) : values[0];
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_fp8(
#include "quantize_fp8.params"
) {
    take_turn();
    __shared__ float shared[33];
    float4 v[FOURS_OF_THREAD];
#pragma unroll
    for (int j = 0; j < FOURS_OF_THREAD; j++) {
        const u32 i = j * THREADS + threadIdx.x;
        v[j] = IS_IN_ROW(i) ? four_of_row(x, stride, blockIdx.x, i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    if constexpr (FROM == FROM_NORM) {
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < FOURS_OF_THREAD; j++)
            squares = fmaf(v[j].x, v[j].x, fmaf(v[j].y, v[j].y, fmaf(v[j].z, v[j].z, fmaf(v[j].w, v[j].w, squares))));
        const float rms = 1.0f / sqrtf(block_sum(squares, shared) / (float)DIM_K + eps);
#pragma unroll
        for (int j = 0; j < FOURS_OF_THREAD; j++) {
            const u32 i = j * THREADS + threadIdx.x;
            if (!IS_IN_ROW(i)) continue;
            const float4 n = any_four(w + 4 * i);
            v[j] = make_float4(v[j].x * rms * n.x, v[j].y * rms * n.y, v[j].z * rms * n.z, v[j].w * rms * n.w);
        }
    }
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < FOURS_OF_THREAD; j++)
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(v[j].x), fabsf(v[j].y)), fmaxf(fabsf(v[j].z), fabsf(v[j].w))));
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = largest;
    __syncthreads();
    largest = shared[0];
#pragma unroll
    for (int i = 1; i < THREADS / 32; i++) largest = fmaxf(largest, shared[i]);
    if (threadIdx.x == 0) scales[blockIdx.x] = FACTOR_OF_ROW * scale_of(largest);
    const float by = codes_of_one(largest);
    u32 *out = y + (size_t)blockIdx.x * FOURS;
#pragma unroll
    for (int j = 0; j < FOURS_OF_THREAD; j++) {
        const u32 i = j * THREADS + threadIdx.x;
        if (IS_IN_ROW(i)) out[i] = four_e4m3(by * v[j].x, by * v[j].y, by * v[j].z, by * v[j].w);
    }
}
#endif

#ifdef BITS
#define WARPS 8 // of a block
// Tiles of a row tile that have scale groups of their own.
#define PAIR_TILES ((K_TILES + SHARE - 1) / SHARE)
#define IS_TILE(kt) (K_TILES == PIECES * WARPS * WARP_TILES || (kt) < K_TILES)

// The greatest magnitude that the scale groups of rows g and g + 8 of a row tile can express. Values are monotonous in
// the level, so the least and the greatest level give it. The block's threads share the groups out.
__device__ __forceinline__ void greatest_magnitudes(float (&largest)[2], const Weights &from, int rt, int g) {
    largest[0] = largest[1] = 0.0f;
#pragma unroll 4
    for (int first = 0; first < PAIR_TILES; first += 4 * WARPS) {
        const int i = first + threadIdx.x / 8;
        if (PAIR_TILES % (4 * WARPS) != 0 && i >= PAIR_TILES) break;
        SlotPairs p[TILE_SLOTS];
        const TilesAt at = tiles_at(from, rt, SHARE * i);
#pragma unroll
        for (int s = 0; s < TILE_SLOTS; s++) load_pairs(p[s], at, s, g);
#pragma unroll
        for (int s = 0; s < TILE_SLOTS; s++)
#pragma unroll
            for (int part = 0; part < SLOT_PARTS; part++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const Scaling of = scaling(p[s], part, h);
                    largest[h] = fmaxf(largest[h], fmaxf(fabsf(value_of(LEAST_LEVEL, of)), fabsf(value_of(GREATEST_LEVEL, of))));
                }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) dequantize_to_fp8(
#include "dequantize_to_fp8.params"
) {
    let_next_start();
    __shared__ float of_warps[WARPS][16];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rt = blockIdx.x / PIECES;
    const int first = (blockIdx.x % PIECES * WARPS + warp) * WARP_TILES;
    const Weights from = WEIGHT;
    TileCodes codes[WARP_TILES];
    SlotPairs p[WARP_TILES][TILE_SLOTS];
#pragma unroll
    for (int j = 0; j < WARP_TILES; j++) {
        if (!IS_TILE(first + j)) continue;
        const TilesAt at = tiles_at(from, rt, first + j);
        load_codes(codes[j], at.codes, lane);
#pragma unroll
        for (int s = 0; s < TILE_SLOTS; s++) load_pairs(p[j][s], at, s, lane / 4);
    }
    float by[2];
    greatest_magnitudes(by, from, rt, lane % 8);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        by[h] = fmaxf(by[h], __shfl_xor_sync(0xffffffffu, by[h], 8));
        by[h] = fmaxf(by[h], __shfl_xor_sync(0xffffffffu, by[h], 16));
        if (lane < 8) of_warps[warp][8 * h + lane] = by[h];
    }
    __syncthreads();
    // Kernels before this one may still read the old contents of `out` and `scales`.
    wait_for_inputs();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = 8 * h + lane / 4, n = 16 * rt + row;
        float largest = of_warps[0][row];
#pragma unroll
        for (int i = 1; i < WARPS; i++) largest = fmaxf(largest, of_warps[i][row]);
        if (blockIdx.x % PIECES == 0 && warp == 0 && lane % 4 == 0 && (DIM_N % 16 == 0 || n < DIM_N)) scales[n] = scale_of(largest);
        by[h] = codes_of_one(largest);
    }
    // A lane has eight columns of each half of a tile. Two lanes exchange, so that each has 16 columns of one half.
    const bool is_odd = lane % 2;
    const int column = is_odd ? 32 + 8 * (lane % 4 - 1) : 8 * (lane % 4);
#pragma unroll
    for (int j = 0; j < WARP_TILES; j++) {
        if (!IS_TILE(first + j)) break;
        const int k = 64 * (first + j) + column;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 q[4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const u32 levels = four_codes(codes[j], h, r);
                const Scaling of = scaling_at(p[j], r / 2, h, lane % 4);
                // Rounded twice, as the oracle: values half-way between two codes are frequent.
                auto value = [&](int i) { return by[h] * value_of(byte_as_float(levels, i), of); };
                q[r] = four_e4m3(value(0), value(1), value(2), value(3));
            }
            const u32 low = __shfl_xor_sync(0xffffffffu, is_odd ? q[0] : q[2], 1);
            const u32 high = __shfl_xor_sync(0xffffffffu, is_odd ? q[1] : q[3], 1);
            const int n = 16 * rt + 8 * h + lane / 4;
            // DIM_K is a multiple of 16.
            if ((DIM_N % 16 != 0 && n >= DIM_N) || (DIM_K % 64 != 0 && k >= DIM_K)) continue;
            u8 *to = out + (size_t)n * DIM_K + k;
            store16(to, is_odd ? low : q[0], is_odd ? high : q[1], is_odd ? q[2] : low, is_odd ? q[3] : high);
        }
    }
}
#endif
#endif
