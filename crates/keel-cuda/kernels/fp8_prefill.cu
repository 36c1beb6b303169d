// Operands of prompts' products in e4m3 (4 bits of exponent, 3 of mantissa, at most 448), each row with an f32 scale:
// value = code * scale. The scale makes the row's greatest magnitude 448; it is 1 for a row of zeros. Devices of
// compute capability 8.9 and above.
//
// Macros: DIM_N, DIM_K; BITS, GROUP, PAIR_T or BLOCK.
//   quantize_fp8           y e4m3 [T][K] and scales [T] from x f16 [T][K], which holds x / 8 (see half.cuh). K is a
//                          multiple of 8. Grid T, block 256. Floor: 2 bytes read and 1 written a value.
//   dequantize_to_fp8      w e4m3 [N][K] and scales [N]. A block converts 16 rows: once for their greatest magnitudes,
//                          once more to round. Grid ceil(N / 16), block 256. Floor: packed bytes read, 1 byte a weight
//                          written.
#include "weight_tiles.cuh"

#define E4M3_MAX 448.0f
#define INPUT_FACTOR 8.0f

#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ u32 four_e4m3(float a, float b, float c, float d) {
    unsigned short low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return (u32)high << 16 | low;
}

__device__ __forceinline__ float codes_of_one(float largest) { return largest > 0.0f ? E4M3_MAX / largest : 1.0f; }
__device__ __forceinline__ float scale_of(float largest) { return largest > 0.0f ? largest / E4M3_MAX : 1.0f; }

extern "C" __global__ void __launch_bounds__(256) quantize_fp8(
#include "quantize_fp8.params"
) {
    take_turn();
    __shared__ float of_warps[8];
    constexpr u32 EIGHTS = DIM_K / 8;
    const uint4 *row = x + (size_t)blockIdx.x * EIGHTS;
    float largest = 0.0f;
    for (u32 i = threadIdx.x; i < EIGHTS; i += 256) {
        const uint4 v = row[i];
        for (const u32 two : {v.x, v.y, v.z, v.w}) {
            const f16x2 pair = *(const f16x2 *)&two;
            largest = fmaxf(largest, fmaxf(fabsf(to_f32(pair.x)), fabsf(to_f32(pair.y))));
        }
    }
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++) largest = fmaxf(largest, of_warps[i]);
    if (threadIdx.x == 0) scales[blockIdx.x] = INPUT_FACTOR * scale_of(largest);
    const float by = codes_of_one(largest);
    uint2 *out = y + (size_t)blockIdx.x * EIGHTS;
    for (u32 i = threadIdx.x; i < EIGHTS; i += 256) {
        const uint4 v = row[i];
        auto at = [&](u32 two, int high) {
            const f16x2 pair = *(const f16x2 *)&two;
            return by * to_f32(high ? pair.y : pair.x);
        };
        out[i] = make_uint2(four_e4m3(at(v.x, 0), at(v.x, 1), at(v.y, 0), at(v.y, 1)),
                            four_e4m3(at(v.z, 0), at(v.z, 1), at(v.w, 0), at(v.w, 1)));
    }
}

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
