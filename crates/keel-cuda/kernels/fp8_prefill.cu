// Operands of prompts' products in e4m3 (4 bits of exponent, 3 of mantissa, at most 448), each row with an f32 scale:
// value = code * scale. The scale makes the row's greatest magnitude 448. A row of zeros, or of values so small that 448
// divided by them is no float, has the scale 1. Devices of compute capability 8.9 and above.
//
// Macros: DIM_K. For quantize_fp8 THREADS and FROM; for dequantize_to_fp8 DIM_N and BITS, GROUP, PAIR_T or BLOCK.
//   quantize_fp8           y e4m3 [T][K] and scales [T] from rows of x, which are `stride` values apart. FROM says what
//                          becomes 8 bits: f32 values, f16 values that hold x / 8 (see half.cuh), the RMS norm of f32
//                          values (w and eps), or SwiGLU of 2 K f32 values. A thread keeps its columns in registers;
//                          K is a multiple of 4. Grid T, block THREADS. Floor: x read once, 1 byte a value written.
//   dequantize_to_fp8      w e4m3 [N][K] and scales [N]. A block converts 16 rows: once for their greatest magnitudes,
//                          once more to round. Grid ceil(N / 16), block 256. Floor: packed bytes read, 1 byte a weight
//                          written.
#include "half.cuh"
#ifndef THREADS
#include "weight_tiles.cuh"
#endif

#define E4M3_MAX 448.0f
#define INPUT_FACTOR 8.0f
#define LEAST_MAGNITUDE 1e-35f

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
#define FOURS (DIM_K / 4)
#define FOURS_OF_THREAD ((FOURS + THREADS - 1) / THREADS)

// Columns 4 i to 4 i + 3 of row `row`.
__device__ __forceinline__ float4 four_of_row(const void *x, u64 stride, u32 row, u32 i) {
    const float *values = (const float *)x + row * stride;
    if constexpr (FROM == FROM_F16) {
        const uint2 v = ((const uint2 *)x)[row * stride / 4 + i];
        const f16x2 low = *(const f16x2 *)&v.x, high = *(const f16x2 *)&v.y;
        return make_float4(to_f32(low.x), to_f32(low.y), to_f32(high.x), to_f32(high.y));
    }
    const float4 v = ((const float4 *)values)[i];
    if constexpr (FROM != FROM_SWIGLU) return v;
    const float4 up = ((const float4 *)(values + DIM_K))[i];
    return make_float4(silu(v.x) * up.x, silu(v.y) * up.y, silu(v.z) * up.z, silu(v.w) * up.w);
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
        v[j] = i < FOURS ? four_of_row(x, stride, blockIdx.x, i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
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
            if (i >= FOURS) continue;
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
    if (threadIdx.x == 0) scales[blockIdx.x] = (FROM == FROM_F16 ? INPUT_FACTOR : 1.0f) * scale_of(largest);
    const float by = codes_of_one(largest);
    u32 *out = y + (size_t)blockIdx.x * FOURS;
#pragma unroll
    for (int j = 0; j < FOURS_OF_THREAD; j++) {
        const u32 i = j * THREADS + threadIdx.x;
        if (i < FOURS) out[i] = four_e4m3(by * v[j].x, by * v[j].y, by * v[j].z, by * v[j].w);
    }
}
#endif

#ifdef BITS
extern "C" __global__ void __launch_bounds__(256) dequantize_to_fp8(
#include "dequantize_to_fp8.params"
) {
    take_turn();
    __shared__ float of_warps[8][16];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rt = blockIdx.x;
    auto column = [&](int kt, int m) { return 64 * kt + 32 * m + 8 * (lane % 4); };
    float largest[2] = {};
    for (int kt = warp; kt < K_TILES; kt += 8) {
        float w[2][16];
        widen_tile(w, WEIGHT, rt, kt, lane);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < 16; i++)
                if (column(kt, i / 8) < DIM_K) largest[h] = fmaxf(largest[h], fabsf(w[h][i]));
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 1));
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 2));
        if (lane % 4 == 0) of_warps[warp][8 * h + lane / 4] = largest[h];
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = 8 * h + lane / 4, n = 16 * rt + row;
#pragma unroll
        for (int i = 0; i < 8; i++) largest[h] = fmaxf(largest[h], of_warps[i][row]);
        if (warp == 0 && lane % 4 == 0 && n < DIM_N) scales[n] = scale_of(largest[h]);
        largest[h] = codes_of_one(largest[h]);
    }
    for (int kt = warp; kt < K_TILES; kt += 8) {
        float w[2][16];
        widen_tile(w, WEIGHT, rt, kt, lane);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int n = 16 * rt + 8 * h + lane / 4;
            const float by = largest[h];
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const int k = column(kt, m);
                if (n >= DIM_N || k >= DIM_K) continue; // DIM_K is a multiple of 16
                const float *v = &w[h][8 * m];
                *(uint2 *)(out + (size_t)n * DIM_K + k) =
                    make_uint2(four_e4m3(by * v[0], by * v[1], by * v[2], by * v[3]), four_e4m3(by * v[4], by * v[5], by * v[6], by * v[7]));
            }
        }
    }
}
#endif
#endif
