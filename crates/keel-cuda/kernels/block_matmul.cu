// y[t, n] = sum_k x[t, k] W[n, k] (+ residual[t, n]) for few rows of x and a weight in blocks: the products of decoding.
//
// Each 32 columns of a row of x become p = round(x / c), c = max |x| / 127. With value = scale (level - ZERO) + offset of
// weight_blocks.cuh, y = sum over runs of columns that share a scale of  c (scale (sum level p - ZERO sum p) + offset sum p):
// exact integer sums, then f32 in an order that depends on K alone. So the bits of a row of y do not depend on T.
//
//   prepare_rows  x f32 [T][K] -> p i8 [T][K], c f32 [T][K / 32]. A warp takes 32 columns. Grid ceil(T K / 256), block 256. No macros.
//   block_rows    One warp a row of W, a lane 32 columns at a time. Grid ceil(N / 8) (x rows of y if GATHER), block 256.
//                 Macros: DIM_N, DIM_K, BLOCK, BLOCK_VALUES, BLOCK_BYTES; DIM_T, 1 to 16; GATHER=J' as in quantized_matmul.cu (T = 1).
// Bytes moved: the weight's, once. Floor: these / (3.0 TB/s).
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) prepare_rows(const float *x, signed char *p, float *c, u64 count) {
    take_turn();
    const u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= count) return; // whole warps: rows are runs of 32
    const float v = x[i], peak = warp_max(fabsf(v));
    p[i] = (signed char)__float2int_rn(__fmul_rn(v, peak > 0 ? __fdividef(127.0f, peak) : 0.0f));
    if (threadIdx.x % 32 == 0) c[i / 32] = __fmul_rn(peak, 1.0f / 127.0f);
}

#ifdef BLOCK
#include "weight_blocks.cuh"

#ifndef DIM_T
#define DIM_T 1
#endif
#ifndef GATHER
#define GATHER 0
#endif
#define RUNS (DIM_K / 32)
#define SCALES (BLOCK == Q2_K || BLOCK == Q3_K || BLOCK == Q6_K ? 2 : 1) // scales of 32 columns
#define ROW_BYTES ((size_t)(DIM_K / BLOCK_VALUES) * BLOCK_BYTES)

// sum + a . b of four unsigned by four signed bytes.
__device__ __forceinline__ int dot4(u32 a, u32 b, int sum) {
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
    return sum;
}

extern "C" __global__ void __launch_bounds__(256) block_rows(const u8 *blocks, const u8 *p, const float *c,
#if GATHER
                                                             const u32 *experts, u32 stack, Fault *fault, u32 kernel,
#endif
                                                             const float *residual, float *y) {
    const u32 lane = threadIdx.x % 32, n = blockIdx.x * 8 + threadIdx.x / 32;
    take_turn();
#if GATHER
    const u32 expert = experts[blockIdx.y];
    if (expert >= stack) {
        if (blockIdx.x == 0 && threadIdx.x == 0) report(fault, kernel, 1, expert, stack);
        return;
    }
    blocks += expert * DIM_N * ROW_BYTES;
    p += (size_t)(blockIdx.y / GATHER) * DIM_K;
    c += (size_t)(blockIdx.y / GATHER) * RUNS;
    y += (size_t)blockIdx.y * DIM_N;
    residual = nullptr;
#endif
    if (n >= DIM_N) return;
    const u8 *row = blocks + n * ROW_BYTES;
    float acc[DIM_T] = {};
#pragma unroll 2
    for (u32 run = lane; run < RUNS; run += 32) {
        const u8 *b = row + (size_t)(run * 32 / BLOCK_VALUES) * BLOCK_BYTES;
        const int i = run * 32 % BLOCK_VALUES;
        uint2 levels[4];
        float scale[SCALES], offset[SCALES];
#pragma unroll
        for (int j = 0; j < 4; j++) levels[j] = levels_of(b, i + 8 * j);
#pragma unroll
        for (int s = 0; s < SCALES; s++) scale[s] = scale_of(b, i + 16 * s), offset[s] = offset_of(b, i + 16 * s);
#pragma unroll
        for (int t = 0; t < DIM_T; t++) {
            const uint4 *from = (const uint4 *)(p + (size_t)t * DIM_K + run * 32);
            const uint4 first = from[0], second = from[1];
            const u32 v[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
            float sum = 0;
#pragma unroll
            for (int s = 0; s < SCALES; s++) {
                int dot = 0, all = 0;
#pragma unroll
                for (int j = s * 4 / SCALES; j < (s + 1) * 4 / SCALES; j++) {
                    dot = dot4(levels[j].y, v[2 * j + 1], dot4(levels[j].x, v[2 * j], dot));
                    if (ZERO != 0 || HAS_OFFSET) all = dot4(0x01010101u, v[2 * j + 1], dot4(0x01010101u, v[2 * j], all));
                }
                sum = __fmaf_rn(scale[s], (float)(dot - ZERO * all), sum);
                if (HAS_OFFSET) sum = __fmaf_rn(offset[s], (float)all, sum);
            }
            acc[t] = __fmaf_rn(c[(size_t)t * RUNS + run], sum, acc[t]);
        }
    }
#pragma unroll
    for (int t = 0; t < DIM_T; t++) {
        const float sum = warp_sum(acc[t]);
        if (lane == 0) {
            const size_t at = (size_t)t * DIM_N + n;
            y[at] = residual ? __fadd_rn(residual[at], sum) : sum;
        }
    }
}
#endif
